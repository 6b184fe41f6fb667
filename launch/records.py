"""`distlab records`: measure the committed records again, as records/manifest.toml lists them.

    distlab records --machine h200x2 --list         records, their commits, and how long each takes
    distlab records --machine h200x2                measure what this commit has not measured yet
    distlab records --machine h200x2 --minutes 9    begin nothing that would end later
    distlab records --machine h200x2 --moved HEAD   measure nothing; say what moved since HEAD

A command that is repeated continues. At its end it reports which rows of the records that it
renewed moved beyond noise.

A record is copied to records/EXPERIMENT/MACHINE-CASE.json when its run has ended well, those of its
parts to records/PART/MACHINE-CASE.json. No record is ever edited. A run that was cut off resumes
under outputs/records/COMMIT where its experiment can. A record with peers of other packages is not
measured where one of them is not installed: it would lose their rows.
"""

import argparse
import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

import torch
from tabulate import tabulate

from distlab.cli_errors import how_to_continue, results_go_to
from distlab.compare import FASTER, SLOWER, TIE, SavedRun, compared, machine_moved, other_set_up
from distlab.options import Parser
from distlab.report.provenance import commit, git
from distlab.report.record import Record, Records, read_json, reading
from distlab.report.table import grouped
from distlab.report.terminal import highlighted
from distlab.runs import in_unit
from distlab.text import for_terminal
from launch.registry import ROOT, load, require_clone

MANIFEST = ROOT / "records" / "manifest.toml"
RUNS = Path("outputs/records")
NO_LIMIT = float("inf")  # minutes, if none are given
ROW_WIDTH = 34  # characters of a row's name in the report, so that a line has at most 100
MOST_ROWS_NAMED = 3  # rows without a verdict that are named


@dataclass(frozen=True)
class Case:
    """One record of the manifest.

    Attributes:
        machine: name of the machine.
        ranks: number of ranks.
        experiment: name of the experiment.
        name: name of the case.
        options: options of the run, as on a command line.
        minutes: minutes that the run takes, about.
        peers: packages that the record compares with, by the names of their imports.
    """

    machine: str
    ranks: int
    experiment: str
    name: str
    options: str
    minutes: float
    peers: tuple[str, ...] = ()

    @property
    def run(self) -> str:
        """Name of the run, and of the record's file without its ending."""
        return f"{self.machine}-{self.name}"

    @property
    def record(self) -> str:
        """Name of the record: EXPERIMENT/MACHINE-CASE."""
        return f"{self.experiment}/{self.run}"

    def commit(self, folder: Path) -> str | None:
        """Return the commit that the record was measured at.

        None if there is no record, or none that can be read. It is measured again then.
        """
        path = file_of(self.record, folder)
        if not path.exists():
            return None
        try:
            # The records of a file are of one run, so the first one's commit is that of all.
            return read_json(path)[0].commit
        except ValueError:
            return None

    def missing_peers(self) -> list[str]:
        """Return the peers that are not installed here."""
        return [peer for peer in self.peers if importlib.util.find_spec(peer) is None]

    def command(self, commit: str) -> list[str]:
        """Return the command that measures it."""
        words = ["run", self.experiment, *shlex.split(self.options)]
        # Experiments without ranks have no --nproc, and refuse it.
        if load(self.experiment).EXPERIMENT.ranks == "many":
            words += ["--nproc", str(self.ranks)]
        # The folder has the commit in its name: a run of another commit would otherwise be
        # continued.
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
    experiments = known[machine]
    # The only entries of a machine that are not experiments.
    ranks = experiments.pop("ranks")
    experiments.pop("gpu", None)
    found = []
    for experiment, entries in experiments.items():
        for name, entry in entries.items():
            case = Case(
                machine=machine,
                ranks=ranks,
                experiment=experiment,
                name=name,
                options=entry["options"],
                minutes=entry["minutes"],
                peers=tuple(entry.get("peers", ())),
            )
            found.append(case)
    return found


def require_machine(machine: str) -> None:
    """Check that this host is the machine: it has its kind of GPU, and one for each rank.

    Without this check an experiment would choose its preset for a CPU, say, and the small run would
    replace a record of the GPU.

    Raises:
        ValueError: this host has too few GPUs, another kind of GPU, or a GPU where the machine has
            none.
    """
    entry = tomllib.loads(MANIFEST.read_text(encoding="utf-8"))[machine]
    kind = entry.get("gpu")
    here = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if kind is None:
        if here:
            raise ValueError(
                f"the records of {machine} are of a host without a GPU, and this one has "
                f"{here[0]}: CUDA_VISIBLE_DEVICES= hides it"
            )
        return
    # A word of the name, such as "NVIDIA H200": a "GH200" is another machine.
    right = [name for name in here if kind in name.split()]
    if len(right) < entry["ranks"]:
        raise ValueError(
            f"the records of {machine} need {entry['ranks']} × {kind}, and this host has "
            f"{', '.join(here) or 'no GPU'}"
        )


def file_of(record: str, folder: Path) -> Path:
    """Return the file of a record.

    Args:
        record: its name, EXPERIMENT/MACHINE-CASE.
        folder: folder of all records.
    """
    return folder / f"{record}.json"


def chosen(records: Sequence[str], words: Sequence[str], machine: str) -> list[str]:
    """Return the records that one of the words names, in their order. Without words, return all.

    Args:
        records: names of records, EXPERIMENT/MACHINE-CASE.
        words: experiments, cases, EXPERIMENT/CASE, names of runs, or patterns of one of these.
        machine: machine of all records.

    Raises:
        ValueError: a word names no record.
    """
    # Each word is checked by itself, so that a typo is reported even if another word matches.
    for word in words:
        if not any(is_named(record, word, machine) for record in records):
            raise ValueError(
                f"--only {word}: no record of {machine} is called so; --list names them"
            )
    if not words:
        return list(records)
    return [record for record in records if any(is_named(record, word, machine) for word in words)]


def is_named(record: str, word: str, machine: str) -> bool:
    """Return whether a word is a name of a record, or a pattern of one."""
    experiment, _, run = record.partition("/")
    case = run.removeprefix(f"{machine}-")
    names = (experiment, case, run, f"{experiment}/{case}", record)
    return any(fnmatchcase(name, word) for name in names)


def main(arguments: Sequence[str]) -> int:
    """Measure a machine's records. Return 1 if a run failed, else 0."""
    args = parser().parse_args(arguments)
    if args.minutes != NO_LIMIT and (args.list or args.moved is not None):
        raise ValueError("--list and --moved measure nothing: leave --minutes out")
    require_clone()
    known = cases(args.machine)
    into = Path(args.into or MANIFEST.parent)
    if args.moved is not None:
        return say_moved_since(args.moved, into, args.machine, args.only)
    names = chosen([case.record for case in known], args.only, args.machine)
    wanted = [case for case in known if case.record in names]
    if args.list:
        for case in wanted:
            measured_at = case.commit(into) or "none"
            print(f"{case.record:<48} {case.minutes:5.1f} min  {measured_at}")
        return 0
    # Listing and --moved work in a tree with changes. Measuring does not, see the next check.
    now = commit(args.commit)
    if now is None or now.endswith("-dirty"):
        raise ValueError(
            f"records are of a commit, and this tree is {now or 'in none'}: commit first, or "
            "--commit SHA"
        )
    require_machine(args.machine)
    # A record of this commit is not measured again, so the command can be repeated until all are
    # done.
    left = [case for case in wanted if case.commit(into) != now]
    with tempfile.TemporaryDirectory() as before:
        failed, renewed = measure(left, now, into, args.minutes, Path(before))
        if renewed:
            say_moved(renewed, Path(before), into)
    return failed


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
        help="records to take: an EXPERIMENT, a CASE, EXPERIMENT/CASE, the name of a run, or a "
        "pattern of one of these, such as 'xl-*'",
    )
    found.add_argument(
        "--minutes",
        type=float,
        default=NO_LIMIT,
        help="minutes to use: a run that would end later is not started",
    )
    found.add_argument("--into", metavar="FOLDER", help="folder for records [records/]")
    found.add_argument("--commit", help="commit of this tree, where there is no git")
    instead = found.add_mutually_exclusive_group()
    instead.add_argument(
        "--list", action="store_true", help="list the records, and measure nothing"
    )
    instead.add_argument(
        "--moved",
        metavar="REV",
        help="say which rows moved beyond noise since this git revision, and measure nothing",
    )
    return found


def measure(
    left: Sequence[Case], commit: str, into: Path, minutes: float, before: Path
) -> tuple[int, list[str]]:
    """Measure the cases that are left, one after the other.

    Args:
        left: cases to measure.
        commit: SHA of the commit that is measured.
        into: folder of all records.
        minutes: minutes to use.
        before: empty folder, which gets the files that new records replace.

    Returns:
        1 if a run failed, else 0, and the names of the new records.
    """
    # The line about a stop by a signal names this folder.
    results_go_to(ROOT / RUNS / commit)
    how_to_continue("the same command goes on from there, where its experiment can")
    begin = time.monotonic()
    failed = 0
    renewed = []
    for case in left:
        if missing := case.missing_peers():
            reason = f"install {', '.join(missing)} first, which it compares with"
            print(f"left: {case.record}: {reason}", file=sys.stderr)
            continue
        spent = (time.monotonic() - begin) / 60
        # Later cases may be shorter, and still fit.
        if spent + case.minutes > minutes:
            print(f"left: {case.record}, {case.minutes:g} minutes", file=sys.stderr)
            continue
        print(f"{spent:.1f} min: {case.record}, {case.minutes:g} minutes", file=sys.stderr)
        # Each run is a process of its own: a crash or a full GPU of one run does not harm the next.
        if subprocess.run(case.command(commit), cwd=ROOT, check=False).returncode:
            print(f"FAILED: {case.record}", file=sys.stderr)
            # The old record stays in place, and the following cases may still succeed.
            failed = 1
            continue
        made = ROOT / RUNS / commit / case.experiment / case.run
        folders = {case.experiment: made}
        # Parts have views of their own. Of a part without a row there are only pictures.
        for records in made.glob("parts/*/records.json"):
            folders[records.parent.name] = records.parent
        for experiment, folder in folders.items():
            name = f"{experiment}/{case.run}"
            file = file_of(name, into)
            if file.exists():
                # Kept for `say_moved`, which compares the new record with it.
                copy(file, file_of(name, before))
            copy(folder / "records.json", file)
            renewed.append(name)
    return failed, renewed


def copy(source: Path, target: Path) -> None:
    """Copy a file, and make the folder that it goes to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def say_moved_since(revision: str, folder: Path, machine: str, words: Sequence[str]) -> int:
    """Print which rows of a machine's records moved since a git revision. Return 0.

    Args:
        revision: commit, branch or tag.
        folder: folder of all records, in a git repository.
        machine: name of the machine.
        words: names of the records to take, as in `chosen`. Empty: all.

    Raises:
        ValueError: git does not have this revision, or a word names no record.
    """
    with tempfile.TemporaryDirectory() as before:
        extract(revision, folder, machine, Path(before))
        # A record that was removed since is only in the first folder, a new one only in the second.
        names = set()
        for root in (Path(before), folder):
            for file in root.glob(f"*/{machine}-*.json"):
                names.add(f"{file.parent.name}/{file.stem}")
        say_moved(chosen(sorted(names), words, machine), Path(before), folder)
    return 0


def extract(revision: str, folder: Path, machine: str, into: Path) -> None:
    """Write a machine's records, as they were at a git revision, to another folder.

    Raises:
        ValueError: git does not have this revision.
    """
    # A revision is the user's text: behind --end-of-options it cannot become an option of git.
    options = ("-1", "--format=%H", "--no-show-signature", "--end-of-options")
    found = git(folder, "log", *options, revision, "--")
    if not found:
        raise ValueError(f"--moved {revision}: git has no such revision of {folder}")
    # Run in `folder`, both commands of git take and print paths relative to it.
    files = git(folder, "ls-tree", "-r", "--name-only", found) or ""
    # Git knows a record that was deleted after the revision, so its list is read instead of the
    # folder.
    for file in files.splitlines():
        if PurePath(file).match(f"*/{machine}-*.json"):
            target = into / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(git(folder, "show", f"{found}:./{file}") or "", encoding="utf-8")


def say_moved(names: Sequence[str], before: Path, after: Path) -> None:
    """Print which rows of some records moved beyond noise, by the rules of `distlab compare`.

    Args:
        names: names of records, EXPERIMENT/MACHINE-CASE.
        before: folder of the earlier records.
        after: folder of the present records.
    """
    new = [name for name in names if not file_of(name, before).exists()]
    gone = [name for name in names if not file_of(name, after).exists()]
    verdicts = Counter()
    records = 0  # number of records that could be compared
    tables = []
    notes = []
    for name in names:
        if name in new or name in gone:
            continue
        found, reasons = compared_files(file_of(name, before), file_of(name, after))
        if reasons:
            notes.append(f"{name} cannot be compared ({'; '.join(reasons)}).")
            # A changed option or machine makes rows incomparable, and the report says so instead of
            # a verdict.
            continue
        verdicts.update(row.metrics["verdict"] for row in found)
        records += 1
        moved = [row for row in found if row.metrics["verdict"] in (SLOWER, FASTER)]
        if moved:
            metric = found[0].config["metric"]
            tables.append(f"{name}, {metric}:\n\n{moved_table(moved)}")
        notes += notes_of(name, found)
    if new:
        notes.append(f"New records: {', '.join(new)}.")
    if gone:
        notes.append(f"Records that are gone: {', '.join(gone)}.")
    worse = verdicts[SLOWER]
    better = verdicts[FASTER]
    result = "Nothing moved beyond noise."
    if worse or better:
        result = f"Moved beyond noise: {worse} worse, {better} better."
    # Rows without a verdict are not counted. `notes_of` names them.
    rows = worse + better + verdicts[TIE]
    print(f"{result} Rows compared: {rows}, in records: {records}.")
    for table in tables:
        print(f"\n{table}")
    if notes:
        print()
    for note in notes:
        print(highlighted(note))


def compared_files(before: Path, after: Path) -> tuple[list[Record], list[str]]:
    """Return the rows of `distlab.compare.compared` for one record.

    If the record cannot be compared, return no rows, and the reasons.
    """
    try:
        with reading([before, after]):
            old = SavedRun.read(before)
            new = SavedRun.read(after)
            reasons = other_set_up(old, new)
            return ([] if reasons else compared([old, new])), reasons
    except ValueError as error:  # for example, an older version wrote the file
        # The temporary folder of the earlier files means nothing to a reader.
        return [], [str(error).replace(str(before), "the earlier file")]


def moved_table(rows: Records) -> str:
    """Return a table of at most 100 columns with the rows of one record that moved."""
    titles = ["row", "old", "new", "change %", "noise %", "verdict"]
    cells = []
    for row in rows:
        metric = row.config["metric"]
        noise_pct = row.metrics["noise_pct"]
        difference_pct = row.metrics["difference_pct"]  # None from zero
        line = [
            for_terminal(row.variant),
            in_unit(row.metrics["run_0"], metric),
            in_unit(row.metrics["run_1"], metric),
            "n/a" if difference_pct is None else f"{difference_pct:+.1f}",
            "n/a" if noise_pct is None else f"{noise_pct:.1f}",
            row.metrics["verdict"],
        ]
        cells.append(line)
    return tabulate(
        cells,
        titles,
        disable_numparse=True,  # cells are formatted already
        colalign=("left", "right", "right", "right", "right", "left"),
        maxcolwidths=[ROW_WIDTH, None, None, None, None, None],
    )


def notes_of(name: str, rows: Records) -> list[str]:
    """Return sentences about a record whose rows have no verdict, or all moved together."""
    notes = []
    for verdict, group in grouped(rows, lambda row: row.metrics["verdict"]).items():
        # Rows with a verdict are counted above, and rows that neither run measured have nothing to
        # report.
        if verdict in (SLOWER, FASTER, TIE, "in neither run"):
            continue
        variants = [row.variant for row in group]
        named = ", ".join(variants[:MOST_ROWS_NAMED])
        more = len(variants) - MOST_ROWS_NAMED
        if more > 0:
            named += f" and {more} more"
        notes.append(f"{name}, {verdict}: {named}.")
    least_pct = machine_moved(rows)
    if least_pct is not None:
        notes.append(
            f"{name}: every row moved in one direction, by {least_pct:+.1f} % at least. That is "
            "the machine, or code that all rows share."
        )
    return notes
