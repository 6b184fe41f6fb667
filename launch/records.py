"""`distlab records`: measure the committed records again, as records/manifest.toml lists them.

    distlab records --machine h200x2 --list         records, their commits, and how long each takes
    distlab records --machine h200x2                measure what this commit has not measured yet
    distlab records --machine h200x2 --minutes 9    begin nothing that would end later

The last command, given again, goes on.

A record is copied to records/EXPERIMENT/MACHINE-CASE.json when its run has ended well, those of its
parts to records/PART/MACHINE-CASE.json; none is ever edited. A run that was cut off resumes under
outputs/records/COMMIT where its experiment can.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.options import Parser
from distlab.report.provenance import commit
from distlab.report.record import read_json
from launch.registry import ROOT, load, require_clone

MANIFEST = ROOT / "records" / "manifest.toml"
RUNS = Path("outputs/records")


@dataclass(frozen=True)
class Case:
    """One record: the run that makes it, and about how long that took."""

    machine: str
    ranks: int
    experiment: str
    name: str
    options: str
    minutes: float

    @property
    def run(self) -> str:
        """Name of the run, which is also that of its record."""
        return f"{self.machine}-{self.name}"

    def file(self, folder: Path) -> Path:
        """Return the file of the record."""
        return folder / self.experiment / f"{self.run}.json"

    def commit(self, folder: Path) -> str | None:
        """Return the commit that the record was measured at. None if there is no record."""
        path = self.file(folder)
        return read_json(path)[0].commit if path.exists() else None

    def command(self, commit: str) -> list[str]:
        """Return the command that measures it."""
        ranks = (
            ["--nproc", str(self.ranks)] if load(self.experiment).EXPERIMENT.ranks == "many" else []
        )
        words = ["run", self.experiment, *shlex.split(self.options), *ranks]
        words += ["--name", self.run, "--out", str(RUNS / commit), "--commit", commit]
        return [sys.executable, "-m", "launch", *words]


def cases(machine: str, manifest: Path = MANIFEST) -> list[Case]:
    """Return the records of a machine, in the manifest's order.

    Raises:
        ValueError: the manifest has no such machine; the message lists those it has.
    """
    known = tomllib.loads(manifest.read_text(encoding="utf-8"))
    if machine not in known:
        raise ValueError(f"machine {machine!r} is unknown; {manifest.name} has {', '.join(known)}")
    ranks = known[machine].pop("ranks")
    return [
        Case(machine, ranks, experiment, name, **case)
        for experiment, found in known[machine].items()
        for name, case in found.items()
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure a machine's records. Return 1 if a run failed, else 0."""
    args = parser().parse_args(arguments)
    require_clone()
    now = commit(args.commit)
    into = Path(args.into or MANIFEST.parent)
    named = {
        f"{case.experiment}/{case.name} {case.experiment}/{case.run}": case
        for case in cases(args.machine)
    }
    for word in args.only:
        if not any(word in name for name in named):
            raise ValueError(
                f"--only {word}: no record of {args.machine} is called so; --list names them"
            )
    wanted = [
        case for name, case in named.items() if any(word in name for word in args.only or ("",))
    ]
    if args.list:
        for case in wanted:
            print(
                f"{case.experiment + '/' + case.run:<48} {case.minutes:5.1f} min  "
                f"{case.commit(into) or 'none'}"
            )
        return 0
    if now is None or now.endswith("-dirty"):
        raise ValueError(
            f"records are of a commit, and this tree is {now or 'in none'}: commit first, or "
            "--commit SHA"
        )
    return measure([case for case in wanted if case.commit(into) != now], now, into, args.minutes)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `distlab records`."""
    found = Parser("distlab records", description=(__doc__ or "").partition("\n")[0])
    found.add_argument(
        "--machine", required=True, help="machine in records/manifest.toml, such as h200x2"
    )
    found.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORD",
        help="words in EXPERIMENT/CASE of the records to measure",
    )
    found.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="minutes to use: a run that would end later is not started",
    )
    found.add_argument("--into", metavar="FOLDER", help="folder for records [records/]")
    found.add_argument("--commit", help="commit of this tree, where there is no git")
    found.add_argument("--list", action="store_true", help="list the records, and measure nothing")
    return found


def measure(left: Sequence[Case], commit: str, into: Path, minutes: float) -> int:
    """Measure the cases that are left, one after the other. Return 1 if one failed, else 0."""
    begin, failed = time.monotonic(), 0
    for case in left:
        spent = (time.monotonic() - begin) / 60
        if spent + case.minutes > minutes:
            print(f"left: {case.experiment}/{case.run}, {case.minutes:g} minutes", file=sys.stderr)
            continue
        print(
            f"{spent:.1f} min: {case.experiment}/{case.run}, {case.minutes:g} minutes",
            file=sys.stderr,
        )
        if subprocess.run(case.command(commit), cwd=ROOT, check=False).returncode:
            print(f"FAILED: {case.experiment}/{case.run}", file=sys.stderr)
            failed = 1
            continue
        made = ROOT / RUNS / commit / case.experiment / case.run
        parts = {part.name: part for part in made.glob("parts/*")}  # with views of their own
        for experiment, folder in {case.experiment: made, **parts}.items():
            record = into / experiment / case.file(into).name
            record.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "records.json", record)
    return failed
