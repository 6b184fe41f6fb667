"""The runs that lie under `outputs/` and `records/`: found, described in a line each, linked from `outputs/index.html`.

A run is its file of rows: `outputs/EXPERIMENT/NAME/records.json`, or `records/EXPERIMENT/CASE.json`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tabulate import tabulate

from distlab.files import write_whole
from distlab.report.provenance import date_of_commit
from distlab.report.record import Record, read_json
from distlab.report.table import is_number

ROWS = "records.json"
INDEX = "index.html"
# What a run is about, if its rows hold it; else the first of their metrics.
RESULTS = ("step_p50_ms", "predicted_step_ms", r"\w*_p50_ms", r"\w*_ms", r"\w*_per_s", r"\w*_bytes", r"\w+")
HEADINGS = ("run", "when (UTC)", "machine", "commit", "differs from the default", "result")
WRAPPED = (27, 10, 12, 9, 18, 14)  # characters of a line in a terminal: 90, and 10 between
MOST_VALUES = 3  # of an option that are written out

Defaults = Callable[[Record], Mapping[str, Any]]


def rows_of(run: str | Path) -> Path:
    """The file of a run's rows, from its folder or from that file itself.

    Raises:
        ValueError: neither; the message says what a run is.
    """
    path = Path(run)
    found = path / ROWS if path.is_dir() else path
    if found.is_file():
        return found
    what = f"has no {ROWS}" if path.is_dir() else "is no folder and no file"
    raise ValueError(
        f"{run} {what}: give the folder of a run, its {ROWS} or a file of records/; `distlab runs` lists them"
    )


def files_of(roots: Sequence[Path]) -> list[Path]:
    """The rows of every run under these folders; a comparison is no run."""
    found = (
        path for root in roots for form in (f"*/*/{ROWS}", "*/*.json") for path in sorted(root.glob(form))
    )
    return [path for path in found if path.parts[-3] != "compare"]


def main_metric(records: Sequence[Record]) -> str:
    """The name of what these rows are about: the time of a step, else another median, time, rate or size.

    Raises:
        ValueError: no row holds a number.
    """
    numbers = dict.fromkeys(name for r in records for name, value in r.metrics.items() if is_number(value))
    found = next((name for form in RESULTS for name in numbers if re.fullmatch(form, name)), None)
    if found is None:
        raise ValueError("these rows hold no number")
    return found


def higher_is_better(metric: str) -> bool:
    """Whether more of it is better: rates, shares of a peak, overlap."""
    return re.search(r"_per_s$|^(mfu|overlap|of_copy|efficiency)_pct$", metric) is not None


def in_unit(value: float, metric: str) -> str:
    """A value with the unit that its metric's name ends with."""
    for end, unit, scale in (
        ("_ms", "ms", 1),
        ("_us", "µs", 1),
        ("_bytes", "GiB", 2**-30),
        ("_gb_per_s", "GB/s", 1),
        ("_tflop_per_s", "TFLOP/s", 1),
        ("_per_s", "/s", 1),
        ("_pct", "%", 1),
    ):
        if metric.endswith(end):
            return f"{value * scale:,.4g} {unit}"
    return f"{value:,.4g}"


def result_of(records: Sequence[Record]) -> str:
    """The best row in a few words; of a sweep, in which a variant has several rows, their number."""
    rows = [r for r in records if r.variant != "local"] or list(records)
    if not rows or len({r.variant for r in rows}) < len(rows):
        return f"{len(records)} rows"
    numbers = [r for r in rows if any(map(is_number, r.metrics.values()))]
    if not numbers:
        return f"{len(records)} rows without a number"
    metric = main_metric(numbers)
    known = [r for r in numbers if is_number(r.metrics.get(metric))]
    best = (max if higher_is_better(metric) else min)(known, key=lambda r: r.metrics[metric])
    return f"{best.variant} {in_unit(best.metrics[metric], metric)}"


def shown(value: Any) -> str:
    """An option's value in a few words."""
    if isinstance(value, list | tuple):
        return " ".join(map(shown, value)) if len(value) <= MOST_VALUES else f"of {len(value)} values"
    return f"{value:g}" if isinstance(value, float) else str(value)


def changed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The options of a run that are not at their defaults, `batch 8, dtype bf16`."""
    return ", ".join(
        f"{name.replace('_', ' ')} {shown(config[name])}"
        for name, value in defaults.items()
        if name in config and config[name] != value
    )


def described(path: Path, defaults: Defaults) -> dict[str, str]:
    """One run in a line: heading → text.

    Raises:
        OSError, ValueError: its rows cannot be read, or there are none.
    """
    records = read_json(path)
    if not records:
        raise ValueError(f"{path}: no rows")
    first = records[0]
    count = first.config.get("world_size") or 1
    machine = str(first.environment.get("device_name") or "unknown").removeprefix("NVIDIA ")
    return {
        "run": str(path.parent if path.name == ROWS else path),
        "experiment": first.experiment,
        "when (UTC)": when_of(path, first)[:19].replace("T", " "),
        "machine": f"{count} × {machine}",
        "commit": short(first.commit),
        "differs from the default": changed(first.config, defaults(first)),
        "result": result_of(records),
    }


def short(commit: str | None) -> str:
    """Eight digits of a commit and what follows them, `-dirty`."""
    return re.sub(r"^(\w{8})\w*", r"\1", commit or "unknown")


def when_of(path: Path, record: Record) -> str:
    """When a run was made, ISO 8601: as it says, by its folder's name, by its commit, or by its file's time."""
    if date := record.environment.get("date"):
        return str(date)
    if stamp := re.fullmatch(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)(-\d+)?", path.parent.name):
        return "{}-{}-{}T{}:{}:{}".format(*stamp.groups()[:6])
    made = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return date_of_commit((record.commit or "").removesuffix("-dirty")) or made


def listed(files: Sequence[Path], defaults: Defaults) -> list[dict[str, str]]:
    """`described` of every run, the newest first; one that cannot be read says so in its result."""
    rows = []
    for path in files:
        try:
            rows.append(described(path, defaults))
        except (OSError, ValueError) as error:
            nothing = dict.fromkeys((*HEADINGS, "experiment"), "")
            rows.append(nothing | {"run": str(path.parent), "result": f"cannot be read: {error}"})
    return sorted(rows, key=lambda row: row["when (UTC)"], reverse=True)


def as_text(rows: Sequence[Mapping[str, str]]) -> str:
    """The list for a terminal of 100 characters."""

    def lines(texts: Sequence[str]) -> list[str]:
        return [
            textwrap.fill(text, width, max_lines=3, placeholder=" …")
            for text, width in zip(texts, WRAPPED, strict=True)
        ]

    names = ["/ ".join(row["run"].rsplit("/", 1)) for row in rows]  # broken there
    cells = [lines([name, *(row[n] for n in HEADINGS[1:])]) for name, row in zip(names, rows, strict=True)]
    return tabulate(cells, lines(HEADINGS), disable_numparse=True)


def write_index(root: Path) -> Path:
    """Write `index.html` into the folder of all results: a link to the page of every run, the newest first."""
    pages = sorted(root.glob("*/*/report.html"), key=lambda page: page.stat().st_mtime_ns, reverse=True)
    names = [page.relative_to(root).as_posix() for page in pages]
    links = "".join(f'<li><a href="{quote(name)}">{escape(name)}</a></li>\n' for name in names)
    write_whole(root / INDEX, f"<!DOCTYPE html>\n<title>Runs</title>\n<ul>\n{links}</ul>\n")
    return root / INDEX
