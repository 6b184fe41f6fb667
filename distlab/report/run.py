"""`Run`: one run of one experiment, its folder, its rows as they come, and what a resumed run finds of them.

    run.add("bucketed", {"step_p50_ms": 12.3}, bucket_size_mb=25.0)     # saved at once
    if run.done("bucketed", bucket_size_mb=25.0): …                      # by the run that was cut off

A run's folder holds `run.json`, which says what is run (options, ranks, device, commit, command), and the rows in
`records.json`; when all are there, `report.view.write` adds tables, pictures and the page. A run is resumed by its
name, and only where `run.json` says the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distlab.ending import how_to_continue, results_go_to
from distlab.report.record import (
    MEASURE_AGAIN,
    Record,
    from_fields,
    plain,
    read_checked,
    read_json,
    write_checked,
    write_json,
)

HEADER = "run.json"


class OutputFolder:
    """The folder ``<root>/<experiment>/<stamp>/`` of one run, created at once so that a bad ``--out`` fails
    early.

    Args:
        root: the folder of all results, such as ``outputs``.
        experiment: name of the experiment.
        stamp: name of the run. None makes a fresh UTC ``YYYYmmdd-HHMMSS``, with ``-2``, ``-3``, … appended if
            a run of the same second exists. A stamp that is given is used as it is and may exist already:
            that is how a sweep resumes, and how the other ranks join the folder that rank 0 made.

    Attributes:
        path: the folder.

    Raises:
        ValueError: a name is not usable as a folder name.
        OSError: the folder cannot be made or written; the message names it and says to pass ``--out``.
    """

    def __init__(self, root: str | os.PathLike, experiment: str, stamp: str | None = None) -> None:
        check_names(str(root), experiment, stamp)
        parent = Path(root) / experiment
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = _fresh_folder(parent) if stamp is None else parent / stamp
            self.path.mkdir(exist_ok=True)
            # Making the folder is not enough: an existing one may be read-only, and a full disk shows only
            # here.
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".tmp-probe-") as probe:
                probe.write(b"x")
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(
                f"results cannot be written under {parent} ({reason}): "
                "pass --out FOLDER with a folder that you can write to"
            ) from error
        results_go_to(self.path)


def check_names(out: str, *names: str | None) -> None:
    """Raise ValueError for what is no name of a folder, or would write elsewhere or into a terminal."""
    if not out or not out.isprintable():
        raise ValueError(f"--out {out!r} names no folder: give one, such as outputs")
    for name in names:
        if name is not None and (not re.fullmatch(r"[\w.-]+", name) or name in (".", "..")):
            raise ValueError(f"--name {name!r} cannot name a folder: use letters, digits, '-', '_' and '.'")


def _fresh_folder(parent: Path) -> Path:
    """Make and return a folder named after this second that no other run has."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()  # mkdir itself decides between two runs that race for one name
            return folder
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Header:
    """What is run, on what, with which code.

    Attributes:
        experiment: its name.
        config: every option.
        world_size: number of ranks.
        environment: see `provenance.environment`.
        commit: see `provenance.commit`.
        complete: when the last of its results was written, UTC; None before that.
    """

    experiment: str
    config: Mapping[str, Any]
    world_size: int
    environment: Mapping[str, Any]
    commit: str | None
    complete: str | None = None


def same_run(before: Header, now: Header) -> list[str]:
    """What differs between a run that was cut off and the one that would resume it, one line each."""
    pairs = {
        "experiment": (before.experiment, now.experiment),
        "commit": (before.commit, now.commit),
        "number of ranks": (before.world_size, now.world_size),
        "device": (before.environment.get("device_name"), now.environment.get("device_name")),
    }
    names = [*now.config, *(name for name in before.config if name not in now.config)]
    pairs |= {f"option {name}": (before.config.get(name), now.config.get(name)) for name in names}
    return [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]


class Run:
    """Where an experiment's rows go; `is_main` alone writes files.

    Attributes:
        path: the run's folder.
        records: the rows so far.
        progress: says on stderr, on rank 0, what is done now.
        notice: says there what stays to be read.
        cut_off: set by an experiment that leaves rows to the next call of this name.
        show: writes and prints the tables of the rows so far, for an experiment that goes on to explain them.
        shown: whether it was called.
    """

    cut_off = False
    shown = False

    def __init__(
        self,
        header: Header,
        path: Path,
        *,
        records: list[Record] | None = None,
        is_main: bool = True,
        progress: Callable[[str], None] = lambda text: None,
        notice: Callable[[str], None] = lambda text: None,
    ):
        self.header = header
        self.path = path
        self.records = records if records is not None else []
        self._resumed = list(self.records)  # of the run that was cut off
        self.is_main = is_main
        self.progress = progress
        self.notice = notice
        self.parts: dict[str, Run] = {}
        self.show: Callable[[], object] = lambda: None

    def add(self, variant: str, metrics: Mapping[str, Any], **config: Any) -> Record:
        """A row: what was compared, what was measured, and what of its configuration the options do not say.

        The same row of the run that was cut off is replaced.
        """
        shared = dict(self.header.config) | {"world_size": self.header.world_size}
        record = Record(
            self.header.experiment,
            variant,
            shared | config,
            dict(metrics),
            dict(self.header.environment),
            self.header.commit,
        )
        for old in [o for o in self._resumed if (o.variant, o.config) == (variant, plain(record.config))]:
            self._resumed.remove(old)
            self.records.remove(old)
        self.records.append(record)
        self.save()
        return record

    def save(self) -> None:
        """Write the rows so far, whole or not at all; before the first of them, what is run."""
        if self.is_main:
            if not (self.path / HEADER).is_file():
                write_checked(self.path / HEADER, plain(asdict(self.header)))
            write_json(self.records, self.path / "records.json")

    def complete(self) -> None:
        """Note that everything is measured and written, unless it was cut off."""
        if not self.cut_off:
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            write_checked(self.path / HEADER, plain(asdict(replace(self.header, complete=now))))

    def done(self, variant: str, **config: Any) -> Record | None:
        """The row of this variant, and of this configuration, if it is there already."""
        if self.records:
            how_to_continue(f"the same command with --name {self.path.name} continues")
        wanted = {name: plain(value) for name, value in config.items()}
        for record in self.records:
            if record.variant == variant and all(plain(record.config.get(k)) == v for k, v in wanted.items()):
                return record
        return None

    def part(self, name: str) -> Run:
        """A run within this one, with rows of another view, in the folder `parts/<name>`."""
        if name not in self.parts:
            path = self.path / "parts" / name
            if self.is_main:
                path.mkdir(parents=True, exist_ok=True)
            header = replace(self.header, experiment=name)
            self.parts[name] = Run(header, path, is_main=self.is_main, progress=self.progress, notice=self.notice)
        return self.parts[name]


def open_run(header: Header, out: str | Path, name: str | None, differences: Callable = same_run) -> Run:
    """The run of this name under `out/<experiment>/`, resumed where it exists; without a name, a new one.

    Raises:
        ValueError: a run of that name exists and was another: another commit, other options, other ranks or device.
        OSError: the folder cannot be written.
    """
    folder = OutputFolder(out, header.experiment, name)
    saved, rows, records = folder.path / HEADER, folder.path / "records.json", []
    if saved.is_file():
        before = from_fields(Header, read_checked(saved), saved)
        if found := differences(before, Header(**plain(asdict(header)))):
            raise ValueError(
                f"--name {name}: {folder.path} holds another run: {'; '.join(found)}. Give the same options to resume "
                "it, or another --name"
            )
        records = read_json(rows) if rows.is_file() else []
        if any((record.experiment, record.commit) != (header.experiment, header.commit) for record in records):
            raise ValueError(f"{rows} holds rows of another run: {MEASURE_AGAIN}")
        header = replace(header, complete=before.complete)
    return Run(header, folder.path, records=records)
