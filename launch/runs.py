"""`distlab runs` and `distlab compare`: see distlab/runs.py and distlab/compare.py."""

import argparse
import importlib
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from distlab.compare import (
    SavedRun,
    compared,
    differences,
    failures,
    findings,
    gone,
    machine_moved,
    undecided,
    view_of,
)
from distlab.options import Parser
from distlab.report import Record, Records, reading, write
from distlab.report.record import plain
from distlab.report.terminal import WIDTH, highlighted, say
from distlab.runs import as_text, files_of, listed, new_folder, result_of, write_index
from distlab.text import for_terminal
from launch.registry import ROOT, experiments, load

# Command that is no experiment → module whose function `result` words the result of its records.
WORDED_BY = {
    "grade": "distlab.grade.page",
    "kernel": "launch.kernel_page",
    "memory": "distlab.snapshot.page",
    "trace": "distlab.trace.page",
}
MOST_RUNS = 20  # largest number of runs that are listed
CANNOT_TELL = 3  # exit code of a comparison whose noise hides what it was asked for


def runs(arguments: Sequence[str]) -> int:
    """List your runs, the newest first, and make outputs/index.html."""
    parser = runs_parser()
    args = parser.parse_args(arguments)
    out = Path(args.out)
    # The default folder need not exist yet. One that was named and does not exist is a mistake.
    if args.out != parser.get_default("out") and not out.is_dir():
        raise ValueError(
            f"--out {out} is not a folder: give one that holds results, or leave it out for outputs"
        )
    if not re.fullmatch(r"(\d{4}(-\d{2}(-\d{2})?)?)?", args.since):
        raise ValueError(f"--since {args.since}: give a date such as 2026-11 or 2026-11-22")
    known = listed(files_of([ROOT / "records"] if args.records else [out]), defaults_of, result_for)
    words = [word.lower() for word in args.words]
    rows = [
        # Paths in the list are relative to the folder of results, because its lines are short.
        {name: text.replace(f"{out}/", "").replace(f"{ROOT}/", "") for name, text in row.items()}
        for row in known
        if all(word in " ".join(row.values()).lower() for word in words)
        # Dates in ISO form sort as text, so a prefix such as 2026-11 is a bound as well.
        and row["when (UTC)"] >= args.since
    ]
    if not rows:
        such = f" with {' '.join(args.words)}" if args.words else ""
        such += f" since {args.since}" if args.since else ""
        if args.records:
            print(f"no committed records{such}")
            return 0
        print(
            f"no runs{such} under {out}/; `distlab run NAME` makes one, and `distlab list` shows "
            "the names"
        )
        return 0
    print(as_text(rows[:MOST_RUNS], shutil.get_terminal_size((WIDTH, 24)).columns))
    if len(rows) > MOST_RUNS:
        print(
            f"{len(rows) - MOST_RUNS} older runs are not shown: give words that a line must contain"
        )
    if out.is_dir():
        # The lines above are of the committed records with --records, and cut to what was asked
        # for.
        print(f"page: {write_index(out, listed(files_of([out]), defaults_of, result_for))}")
    return 0


def runs_parser() -> argparse.ArgumentParser:
    """Return the parser of `distlab runs`."""
    parser = Parser("distlab runs", description=runs.__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="words that a line must contain: experiment, machine, commit, …",
    )
    parser.add_argument(
        "--since",
        default="",
        metavar="DATE",
        help="date of the oldest run, such as 2026-11 or 2026-11-22",
    )
    parser.add_argument(
        "--records", action="store_true", help="list the committed records, not the runs in --out"
    )
    parser.add_argument("--out", default="outputs", help="folder of all results [%(default)s]")
    return parser


def compare(arguments: Sequence[str]) -> int:
    """Compare runs of one experiment: the last one given with the first, the baseline."""
    args = compare_parser().parse_args(arguments)
    saved = [SavedRun.read(run, args.out, ROOT) for run in args.runs]
    files = [run.path for run in saved]
    with reading(files):
        rows = compared(saved, args.against)
        view = view_of(saved, rows[0].config["metric"])
        # Differences are computed before anything is printed, so an error is the only output.
        differing = differences(saved)
        # Raises for rows that cannot be shown, before there is a folder.
        view.headline_of(rows), view.table(rows)
    if not args.json:
        for line in differing:
            print(highlighted(line))
        print()
    with reading(files), new_folder(args.out, view.name) as folder:
        page = write(view, rows, folder)
    refresh_index(args.out)

    def sentences(rows: Records) -> list[str]:
        # On a terminal, the differences are printed above.
        return [*differing, *findings(rows)] if args.json else findings(rows)

    say(replace(view, findings=sentences), rows, page, quiet=args.json)
    if args.fail_above is None:
        return 0
    # The comparison is printed in any case. --fail-above only decides the exit code, for CI.
    code, reason = judged(rows, args.fail_above)
    if reason:
        print(for_terminal(f"distlab compare: {reason}"), file=sys.stderr)
    return code


def judged(rows: Records, limit_pct: float) -> tuple[int, str]:
    """Return the exit code of `--fail-above` and its reason, as the option's help says."""
    more = f"worse by more than {limit_pct:g} %"
    remedy = (
        "Measure both runs with more --steps or --rounds on a quieter machine, or compare "
        "--against a row that did not change"
    )
    failed, unsure = failures(rows, limit_pct), undecided(rows, limit_pct)
    moved = machine_moved(rows) is not None
    # A row that is gone fails in any case. Slower rows do not if all moved together: that is the
    # machine, and no row stands out.
    if gone(rows) or (failed and not moved):
        return 1, f"{more}, or gone: {', '.join(failed)}"
    if moved:
        return (
            CANNOT_TELL,
            f"all rows moved together, so this cannot tell whether one is {more}. {remedy}",
        )
    if unsure:
        return CANNOT_TELL, f"cannot tell whether these are {more}: {', '.join(unsure)}. {remedy}"
    return 0, ""


def compare_parser() -> argparse.ArgumentParser:
    """Return the parser of `distlab compare`."""
    parser = Parser("distlab compare", description=compare.__doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help=(
            "run, as `distlab runs` names it, its folder, its records.json, or a file of records/; "
            "the baseline first"
        ),
    )
    parser.add_argument(
        "--against",
        metavar="ROW",
        help="row that did not change, such as torch-ddp: compare ratios to it, step by step, "
        "which cancels drift of the machine",
    )
    parser.add_argument(
        "--fail-above",
        type=_percent,
        metavar="5%",
        help="exit code 1 if a row is gone, or worse by more: the lower end of its 95 %% interval "
        "is above this limit; 3 if the interval of a worse row or of a tie reaches above it, the "
        "noise is unknown, or all rows moved together, which is the machine; else 0. Without "
        "samples of both runs the interval is the difference and its noise to both sides",
    )
    parser.add_argument("--out", default="outputs", help="folder of all results [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    return parser


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        # An unreadable number takes the same path as one out of range, so both get one message.
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a finite percentage of at least 0, such as 5%"
        )
    return value


def refresh_index(out: str | Path) -> None:
    """Rewrite the list of all runs.

    An error is printed and not raised, because the run that has just ended is complete.
    """
    try:
        write_index(Path(out), listed(files_of([Path(out)]), defaults_of, result_for))
    except Exception as error:
        print(
            f"{out}/index.html could not be made: {type(error).__name__}: {error}", file=sys.stderr
        )


def result_for(records: Records) -> str:
    """Return the result of a run in a few words, as its experiment words it, if it does."""
    name = records[0].experiment if records else ""
    if name in WORDED_BY:
        return importlib.import_module(WORDED_BY[name]).result(records)
    experiment = load(name).EXPERIMENT if name in experiments() else None
    result = None if experiment is None else experiment.view.result
    return result_of(records) if result is None else result(records)


def defaults_of(record: Record) -> Mapping[str, Any]:
    """Return the default options of an experiment on the kind of device of a record, else {}."""
    return _defaults(record.experiment, bool(record.environment.get("cuda")))


# The list of runs asks for the same experiment's defaults once per run.
@lru_cache(maxsize=64)
def _defaults(name: str, on_gpu: bool) -> Mapping[str, Any]:
    experiment = load(name).EXPERIMENT if name in experiments() else None
    if experiment is None:
        return {}
    # The preset of the device is what a run without options has.
    return plain(vars(experiment.config(**experiment.preset("", on_gpu))))
