"""Runs: one folder each, rows that are saved as they come, resuming, and the list of all runs.

    run.add("bucketed", {"step_p50_ms": 12.3}, bucket_size_mb=25.0)  # saved at once
    if run.done("bucketed", bucket_size_mb=25.0): …  # by the run that was cut off

A run's folder holds `run.json`, which says what is run (options, ranks, device, commit, command),
and the rows in `records.json`; when all are there, `report.view.write` adds tables, pictures and
the page. A run is resumed by its name, and only where `run.json` says the same.

Each run under `outputs/` and `records/` is described in one line and linked from
`outputs/index.html`. A run is its file of rows there: `outputs/EXPERIMENT/NAME/records.json`, or
`records/EXPERIMENT/CASE.json`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distlab.cli_errors import how_to_continue, results_go_to
from distlab.files import write_whole
from distlab.options import Values
from distlab.report.provenance import date_of_commit
from distlab.report.record import (
    MEASURE_AGAIN,
    Record,
    Records,
    from_fields,
    plain,
    read_checked,
    read_json,
    write_checked,
    write_json,
)
from distlab.report.table import is_number
from distlab.text import for_terminal

HEADER = "run.json"
ROWS = "records.json"
# What a run is about, if its rows hold it; else the first of their metrics.
RESULTS = (
    "validation_loss",
    "final_loss",
    "step_p50_ms",
    "predicted_step_ms",
    r"\w*_p50_ms",
    r"\w*_ms",
    r"\w*_per_s",
    r"\w*_bytes",
    r"\w+",
)
# Files that a run writes before it has rows. The second is that of a training run.
STARTED = (HEADER, "config.json")
# Bytes of a run's name. File systems allow 255, and files next to a run add their own endings.
LONGEST_NAME = 200
MOST_VALUES = 3  # values of one option that are written out
LEAST_COLUMNS = 20  # least width of a line, also where the terminal says that it is narrower

# File that `distlab show` writes to its folder. It names the runs that were drawn.
REDRAWN = "redrawn.txt"
Defaults = Callable[[Record], Values]
Results = Callable[[Records], str]


def make_folder(root: str | Path, experiment: str, name: str | None = None) -> Path:
    """Make the folder ``<root>/<experiment>/<name>/`` of one run.

    This happens before anything is measured, so that a bad ``--out`` fails early.

    Args:
        root: folder of all results, such as ``outputs``.
        experiment: name of the experiment.
        name: name of the run. None makes a fresh UTC ``YYYYmmdd-HHMMSS``, with ``-2``, ``-3``, …
            appended if a run of the same second exists. A given name is used as it is and may exist
            already: that is how a sweep resumes.

    Raises:
        ValueError: a name is not usable as a folder name.
        OSError: the folder cannot be made or written; the message names it and says to pass
            ``--out``.
    """
    check_names(str(root), experiment, name)
    parent = Path(root) / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = _fresh_folder(parent) if name is None else parent / name
        path.mkdir(exist_ok=True)
        # Making the folder is not enough: an existing one may be read-only, and a full disk shows
        # only here.
        with tempfile.NamedTemporaryFile(dir=path, prefix=".tmp-probe-") as probe:
            probe.write(b"x")
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"results cannot be written under {parent} ({reason}): "
            "pass --out FOLDER with a folder that you can write to"
        ) from error
    # A signal from here on reports this folder as the place of the results.
    results_go_to(path)
    return path


def check_names(out: str, *names: str | None) -> None:
    """Raise ValueError for names that are invalid, lead elsewhere or have control characters."""
    if not out or not out.isprintable():
        raise ValueError(f"--out {out!r} names no folder: give one, such as outputs")
    for name in names:
        # The pattern allows no separators, so a name cannot lead out of the folder.
        if name is not None and (not re.fullmatch(r"[\w.-]+", name) or name in (".", "..")):
            raise ValueError(
                f"--name {name!r} cannot name a folder: use letters, digits, '-', '_' and '.'"
            )
        if name is not None and len(os.fsencode(name)) > LONGEST_NAME:
            raise ValueError(
                f"--name of {len(name)} characters is too long for a folder: give at most "
                f"{LONGEST_NAME} bytes"
            )


def _fresh_folder(parent: Path) -> Path:
    """Make and return a folder named after this second that no other run has."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    attempt = 1
    while True:
        # The second of two runs in one second gets a number.
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()  # mkdir itself decides between two runs that race for one name
            return folder
        attempt += 1


@dataclass(frozen=True)
class Header:
    """Options, ranks, machine and code of a run.

    Attributes:
        experiment: name of the experiment.
        config: name → value of every option.
        world_size: number of ranks of the run.
        environment: packages and devices, see `provenance.environment`.
        commit: commit of the code, see `provenance.commit`.
        complete: time in UTC at which the last result was written. None before that.
    """

    experiment: str
    config: Values
    world_size: int
    environment: Values
    commit: str | None
    complete: str | None = None


def same_run(before: Header, now: Header, may_change: Sequence[str] = ()) -> list[str]:
    """Return the differences between an interrupted run and one that would resume it, a line each.

    Args:
        may_change: names of options that may differ.
    """
    old, new = (
        {
            "experiment": header.experiment,
            "commit": header.commit,
            "number of ranks": header.world_size,
            # A run may be resumed on another machine of the same kind, so only the device counts.
            "device": header.environment.get("device_name"),
            **{
                f"option {name}": value
                for name, value in header.config.items()
                if name not in may_change
            },
        }
        for header in (before, now)
    )
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in names]


def _nothing(*_: str) -> None:
    """Do nothing."""


@dataclass
class Run:
    """Rows of one run of an experiment. Only the rank with `is_main` writes files.

    Attributes:
        header: options, ranks, machine and code.
        path: folder of the run.
        records: rows so far.
        progress: function that prints the current activity on stderr of rank 0.
        notice: function that prints a line there that stays.
        cut_off: True if the experiment leaves rows to the next call with this name. The experiment
            sets it.
        show: function that writes and prints the tables of the rows so far, for an experiment that
            goes on to explain them.
        shown: True once `show` was called.
    """

    header: Header
    path: Path
    records: list[Record] = field(default_factory=list)
    is_main: bool = True
    progress: Callable[[str], object] = _nothing
    notice: Callable[[str], object] = _nothing
    show: Callable[[], object] = _nothing
    cut_off: bool = False
    shown: bool = False

    def __post_init__(self) -> None:
        self._resumed = list(self.records)  # rows of the run that was interrupted
        self.parts: dict[str, Run] = {}

    def add(self, variant: str, metrics: Values, **config: Any) -> Record:
        """Add a row and save it. The same row of the interrupted run is replaced.

        Args:
            variant: name of the row.
            metrics: name → measured value.
            config: settings of the row that the options do not hold.
        """
        # Each row says all of its options, so that it can be read without the run.
        facts = {**self.header.config, "world_size": self.header.world_size, **config}
        record = Record(
            self.header.experiment,
            variant,
            facts,
            dict(metrics),
            dict(self.header.environment),
            self.header.commit,
        )
        # Rows that this process has added itself are kept, also if they are equal.
        for old in [
            o for o in self._resumed if (o.variant, o.config) == (variant, plain(record.config))
        ]:
            self._resumed.remove(old)
            self.records.remove(old)
        self.records.append(record)
        self.save()
        return record

    def replace(self, record: Record, metrics: Values) -> Record:
        """Put other metrics in the place of a row's, and return the new row. Call `save` then."""
        changed = replace(record, metrics=dict(metrics))
        for position, known in enumerate(self.records):
            # The row is found by identity, because equal rows may exist.
            if known is record:
                self.records[position] = changed
        return changed

    def save(self) -> None:
        """Write the rows so far atomically, and before the first of them the header."""
        if self.is_main:
            # The header is written once, with the first row.
            if not (self.path / HEADER).is_file():
                write_checked(self.path / HEADER, plain(self.header))
            write_json(self.records, self.path / ROWS)

    def complete(self) -> None:
        """Note that everything is measured and written, unless the run was cut off."""
        if not self.cut_off:
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            write_checked(self.path / HEADER, plain(replace(self.header, complete=now)))

    def done(self, variant: str, **config: Any) -> Record | None:
        """Return the row of this variant, and of this configuration, if it is there already."""
        # There is something to continue only once a row is saved.
        if self.records:
            how_to_continue(f"the same command with --name {self.path.name} continues")
        for record in self.records:
            if record.variant == variant and all(
                plain(record.config.get(k)) == plain(v) for k, v in config.items()
            ):
                return record
        return None

    def part(self, name: str) -> Run:
        """Return a run within this one, with rows of another view, in the folder `parts/<name>`."""
        if name not in self.parts:
            path = self.path / "parts" / name
            if self.is_main:
                path.mkdir(parents=True, exist_ok=True)
            header = replace(self.header, experiment=name)
            self.parts[name] = Run(header, path, is_main=self.is_main)
        return self.parts[name]


def open_run(header: Header, folder: Path, may_change: Sequence[str] = ()) -> Run:
    """Return the run in this folder: a new one, or the interrupted one.

    Args:
        may_change: names of options that may differ from those of the interrupted run.

    Raises:
        ValueError: the folder holds another run, with another commit, other options, other ranks or
            another device.
    """
    saved = folder / HEADER
    rows = folder / ROWS
    records = []
    # A folder without a header is new, or failed before its first row.
    if saved.is_file():
        before = from_fields(Header, read_checked(saved), saved)
        found = same_run(before, header, may_change)
        if found:
            raise ValueError(
                f"--name {folder.name}: {folder} holds another run: {'; '.join(found)}. Give the "
                "same options to resume it, or another --name"
            )
        records = read_json(rows) if rows.is_file() else []
        for record in records:
            if (record.experiment, record.commit) != (header.experiment, header.commit):
                raise ValueError(f"{rows} holds rows of another run: {MEASURE_AGAIN}")
        # A run that was complete stays so: the caller then measures nothing.
        header = replace(header, complete=before.complete)
    return Run(header, folder, records)


# -- the list of all runs --------------------------------------------------------------------------


def rows_of(run: str | Path, *roots: str | Path) -> Path:
    """Return the file of a run's rows, given its folder or that file.

    Args:
        run: path, or the name that `distlab runs` prints: a path under one of `roots`.

    Raises:
        ValueError: there is no such file. The message says how to name a run.
    """
    # The empty root stands for the path as it was given.
    paths = [Path(root, run) for root in ("", *roots)]
    # The path as it is, before names under the folders of results.
    for path in paths:
        found = path / ROWS if path.is_dir() else path
        if found.is_file():
            return found
    what = f"has no {ROWS}" if any(path.is_dir() for path in paths) else "does not exist"
    raise ValueError(
        f"{run} {what}: give a run as `distlab runs` names it, its folder, its {ROWS} or a file of "
        "records/"
    )


def files_of(roots: Sequence[Path]) -> list[Path]:
    """Return the file of rows of each run under these folders. Comparisons do not count as runs.

    The file of a run that failed early may not exist.
    """
    forms = (f"*/*/{ROWS}", *(f"*/*/{name}" for name in STARTED), "*/*.json")
    found = (path for root in roots for form in forms for path in root.glob(form))
    rows = {path.with_name(ROWS) if path.name in STARTED else path for path in found}
    # The folder `compare` holds comparisons, which are not measured.
    return [path for path in sorted(rows) if path.parts[-3] != "compare"]


def main_metric(records: Records) -> str:
    """Return the name of the metric to compare: step time, else a median, time, rate or size.

    Raises:
        ValueError: no row holds a number.
    """
    numbers = dict.fromkeys(
        name for r in records for name, value in r.metrics.items() if is_number(value)
    )
    for form in RESULTS:
        for name in numbers:
            if re.fullmatch(form, name):
                return name
    raise ValueError("these rows hold no number")


def higher_is_better(metric: str) -> bool:
    """Return whether a higher value is better: for rates, shares of a peak, and overlap."""
    return re.search(r"_per_s$|^(mfu|overlap|of_copy|efficiency)_pct$", metric) is not None


UNITS = {  # by the end of a metric's name
    "_ms": "ms",
    "_us": "µs",
    "_bytes": "GiB",
    "_gb_per_s": "GB/s",
    "_tflop_per_s": "TFLOP/s",
    "_per_s": "/s",
    "_pct": "%",
    "_loss": "nats",
}


def in_unit(value: float, metric: str) -> str:
    """Return a value with the unit that its metric's name ends with."""
    unit = next((unit for end, unit in UNITS.items() if metric.endswith(end)), "")
    return f"{value * (2**-30 if unit == 'GiB' else 1):,.4g} {unit}".rstrip()


def result_of(records: Records) -> str:
    """Describe the best row in a few words.

    For a sweep, in which a variant has several rows, give the number of rows.
    """
    rows = [r for r in records if r.variant != "local"] or list(records)
    # In a sweep, the smallest time is that of the smallest size, and says nothing.
    if not rows or len({r.variant for r in rows}) < len(rows):
        return f"{len(records)} rows"
    try:
        metric = main_metric(rows)
    except ValueError:
        return f"{len(records)} rows without a number"
    known = [r for r in rows if is_number(r.metrics.get(metric))]
    best = (max if higher_is_better(metric) else min)(known, key=lambda r: r.metrics[metric])
    return f"{best.variant} {in_unit(best.metrics[metric], metric)}"


def shown(value: Any) -> str:
    """Return an option's value as short text."""
    if isinstance(value, list | tuple):
        return (
            " ".join(map(shown, value)) if len(value) <= MOST_VALUES else f"of {len(value)} values"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def changed(config: Values, defaults: Values) -> str:
    """List the options of a run that differ from their defaults, such as `batch 8, dtype bf16`."""
    return ", ".join(
        f"{name.replace('_', ' ')} {shown(config[name])}"
        for name, value in defaults.items()
        if name in config and config[name] != value
    )


def described(path: Path, defaults: Defaults, results: Results = result_of) -> dict[str, str]:
    """Describe one run in a line: heading → text.

    Args:
        path: file of the run's rows.
        defaults: row → default options of its experiment.
        results: rows → result, in a few words.

    Raises:
        OSError, ValueError: the rows cannot be read, or there are none.
    """
    records = read_json(path)
    if not records:
        raise ValueError(f"{path}: no rows")
    first = records[0]
    count = first.config.get("world_size") or 1
    # A page that was redrawn has no measurement of its own.
    redrawn = "redrawn; " if path.with_name(REDRAWN).is_file() else ""
    # The result of a run that was cut off is that of the rows so far.
    stopped = "stopped; " if _is_unfinished(path, first) else ""
    machine = str(first.environment.get("device_name") or "unknown").removeprefix("NVIDIA ")
    return {
        "run": str(path.parent if path.name == ROWS else path),
        "experiment": first.experiment,
        "when (UTC)": when_of(path, first),
        "machine": f"{count} × {machine}",
        "commit": short(first.commit or f"distlab {first.environment.get('distlab', 'unknown')}"),
        "differs from the default": changed(first.config, defaults(first)),
        "result": redrawn + stopped + results(records),
    }


def _is_unfinished(path: Path, row: Record) -> bool:
    """Return whether a run ended before its last result, or a training run before its last step."""
    header = path.with_name(HEADER)
    # Records under records/ and training runs have no header.
    if path.name == ROWS and header.is_file():
        return read_checked(header)["complete"] is None
    return row.experiment == "train" and row.metrics["steps"] < row.config["steps"]


def short(commit: str | None) -> str:
    """Return eight digits of a commit, and a suffix such as `-dirty`."""
    return re.sub(r"^(\w{8})\w*", r"\1", commit or "unknown")


def when_of(path: Path, record: Record | None = None) -> str:
    """Return the time of a run in UTC, such as `2026-11-22 14:05:33`.

    It is that of its row, else of its commit, else of its file.
    """
    made = None
    if record is not None:
        made = record.environment.get("date") or date_of_commit(
            (record.commit or "").removesuffix("-dirty")
        )
    # Without a date in that form, the time of the file serves: other text would not sort.
    if not re.match(r"\d{4}-\d\d-\d\d", str(made)):
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    return str(made)[:19].replace("T", " ")


def listed(
    files: Sequence[Path], defaults: Defaults, results: Results = result_of
) -> list[dict[str, str]]:
    """Return `described` of every run, the newest first.

    A run that cannot be read says so in its result.
    """
    rows = []
    # Files are read one by one, so that one broken run does not hide the others.
    for path in files:
        try:
            rows.append(described(path, defaults, results))
        except Exception as error:  # the other runs are listed, whatever is wrong with this one
            result = (
                f"cannot be read: {_reason(error, path)}"
                if path.exists()
                else "failed, without a row"
            )
            rows.append(
                {"run": str(path.parent), "when (UTC)": when_of(path.parent), "result": result}
            )
    return sorted(rows, key=lambda row: row["when (UTC)"], reverse=True)


def _reason(error: Exception, path: Path) -> str:
    """Return why a run cannot be described, with the name of its file."""
    if isinstance(error, OSError | ValueError) and str(path.parent) in str(error):
        return str(error)
    return f"{path}: {type(error).__name__}: {error}"


def as_text(rows: Sequence[Mapping[str, str]], columns: int) -> str:
    """Return the list of runs for a terminal.

    The first line of a run has its name, which is never cut, and its result. A second line has the
    rest.
    """
    rows = [
        {heading: for_terminal(" ".join(text.split())) for heading, text in row.items()}
        for row in rows
    ]
    # Names are padded to the longest one, so that times are below each other.
    longest = max(len(row["run"]) for row in rows)
    texts = []
    for row in rows:
        texts.append(f"{row['run']:{longest}}  {row['when (UTC)'][:16]}  {row['result']}")
        rest = "; ".join(
            filter(None, map(row.get, ("machine", "commit", "differs from the default")))
        )
        # A terminal may say that it has one column.
        texts += (
            ["    " + textwrap.shorten(rest, max(columns - 4, LEAST_COLUMNS), placeholder=" …")]
            if rest
            else []
        )
    return "\n".join(texts)


def write_index(root: Path, lines: Sequence[Mapping[str, str]] = ()) -> Path:
    """Write `index.html` into the folder of all results, with links to all pages, newest first.

    Args:
        root: folder of all results.
        lines: descriptions of the runs, from `listed`. Pages of other folders, such as comparisons,
            have only their link.
    """
    # Names are compared as bytes, since a folder may have a name that is not UTF-8.
    said = {os.fsencode(os.path.relpath(line["run"], root)): line for line in lines}
    pages = sorted(
        root.glob("*/*/report.html"), key=lambda page: page.stat().st_mtime_ns, reverse=True
    )
    entries = []
    for page in pages:
        name = os.fsencode(page.relative_to(root))  # a folder's name need not be UTF-8
        line = said.get(os.path.dirname(name), {})
        words = (line.get(heading) for heading in ("when (UTC)", "machine", "commit", "result"))
        about = "; ".join(filter(None, words))
        text = escape(name.decode(errors="replace"))
        entries.append(
            f'<li><a href="{quote(name)}">{text}</a>{" " if about else ""}{escape(about)}</li>\n'
        )
    index = root / "index.html"
    # As a whole, since two runs may end at the same time.
    write_whole(index, f"<!DOCTYPE html>\n<title>Runs</title>\n<ul>\n{''.join(entries)}</ul>\n")
    return index


@contextlib.contextmanager
def new_folder(root: str | Path, name: str) -> Iterator[Path]:
    """Yield a fresh folder below `root/name` for pictures and pages of saved rows.

    If that fails, nothing is left.
    """
    # Folders that existed before must stay, also if they are empty.
    existed = [path for path in (Path(root), Path(root) / name) if path.is_dir()]
    folder = make_folder(root, name)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in (folder.parent, folder.parent.parent):
            if parent not in existed:
                with contextlib.suppress(OSError):  # another run is in it by now
                    parent.rmdir()
        raise
