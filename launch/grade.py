"""Which invariants does a course submission keep?

    distlab grade path/to/submission
    distlab grade path/to/submission --only ddp,fsdp --markdown
    distlab grade submissions/* --jobs 2 --csv > results.csv  # for teachers

A submission is a folder with `tests/adapters.py`, or with a module of hook functions of the same
names (`--adapters package.module`). Every part is optional. The functions run in child processes
with limits on time and memory, in a copy of the folder. No code is printed and none is changed: the
report says which invariants hold, and for each that is broken the input, what was expected and what
was seen. Each submission also has a page. docs/learn/grade.md tells what is examined.

Exit code 1 when something is broken.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from distlab.grade import Report, grade
from distlab.grade.hooks import PART_NAMES, chosen
from distlab.grade.page import NAME, page_view, records_of
from distlab.options import Options, config_from, option, parser_of
from distlab.report import write
from distlab.runs import new_folder
from distlab.text import for_terminal
from launch.kernel import Progress
from launch.runs import refresh_index


@dataclass(frozen=True)
class GradeOptions(Options):
    """Submissions to examine, and the form of the report."""

    folders: tuple[str, ...] = option((), "folders of submissions", positional=True)
    only: tuple[str, ...] = option(
        (), f"parts to examine: {', '.join(PART_NAMES)}; ddp means all three forms"
    )
    year: int | None = option(None, "year of the suite [all years]", choices=(2024, 2025, 2026))
    adapters: str = option("", "module with the hook functions [tests/adapters.py]")
    device: str = option("cpu", "device to run on; cuda needs a GPU", choices=("cpu", "cuda"))
    seconds: float = option(25.0, "seconds for one experiment", above=0, maximum=3600)
    jobs: int = option(1, "submissions to examine at the same time", minimum=1)
    time: bool = option(False, "then time wrappers next to ours and torch's")
    out: str = option("outputs", "folder of all results")
    json: bool = option(False, "print JSON, a line per submission, and write no page")
    markdown: bool = option(False, "print Markdown, for a pull request, and write no page")
    csv: bool = option(False, "print a row of CSV per submission, and write no page")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `distlab grade`."""
    return parser_of("distlab grade", __doc__, GradeOptions)


def main(arguments: Sequence[str]) -> int:
    """Run `distlab grade`. Return the exit code, which is 1 if something is broken."""
    options = config_from(GradeOptions, parser().parse_args(arguments))
    if not options.folders:
        raise ValueError("give the folder of a submission")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; leave it out")
    # NCCL needs a GPU per rank. With one GPU the ranks share it over gloo.
    backend = "gloo"
    if options.device == "cuda" and torch.cuda.device_count() > 1:
        backend = "nccl"
    if options.json + options.markdown + options.csv > 1:
        raise ValueError("give one of --json, --markdown and --csv")
    if options.csv and options.time:
        raise ValueError("--time has no column in --csv; give --json, --markdown or neither")
    # A name of a part that does not exist concerns all submissions, so it is said at once.
    parts = [part.name for part in chosen(options.only, options.year)]
    # Lines of progress would mix with a table for a program, or with those of another submission.
    is_quiet = options.json or options.markdown or options.csv or len(options.folders) > 1
    progress = Progress(is_quiet=is_quiet)

    def examine(folder: str) -> Report:
        try:
            return grade(
                folder,
                only=options.only,
                year=options.year,
                adapters=options.adapters,
                device=options.device,
                backend=backend,
                seconds=options.seconds,
                is_timed=options.time,
                progress=progress,
            )
        except (OSError, ValueError) as error:
            if len(options.folders) == 1:
                raise
            # One folder that cannot be examined does not cost the others their reports.
            return Report(folder, failure=str(error))

    table = csv.DictWriter(sys.stdout, ["folder", "seconds", *parts, "broken"])
    if options.csv:
        table.writeheader()
    are_right = []
    # Threads are enough: submissions run in child processes, and the threads wait for them.
    with ThreadPoolExecutor(options.jobs) as pool:
        # Each report is printed as soon as those before it are, so that what ends the command
        # later does not take it away.
        for report in pool.map(examine, options.folders):
            progress.close()
            show(report, options, table)
            are_right.append(report.is_right)
    return 0 if all(are_right) else 1


def show(report: Report, options: GradeOptions, table: csv.DictWriter) -> None:
    """Print a report in the form that was asked for. Without such a form, write a page."""
    # A message of the submission's may hold what a terminal would obey, or cannot print.
    if options.csv:
        row = {title: for_terminal(str(value)) for title, value in report.csv_row().items()}
        table.writerow(row)
        sys.stdout.flush()
        return
    if options.json:
        print(json.dumps(report.to_dict()), flush=True)
        return
    if options.markdown:
        print(f"{for_terminal(report.markdown())}\n", flush=True)
        return
    print(f"{for_terminal(str(report))}\n")
    records = records_of(report, options.device)
    try:
        with new_folder(options.out, NAME) as folder:
            page = write(page_view(report), records, folder)
        refresh_index(options.out)
    except OSError as error:
        # The next submission is examined all the same.
        print(f"no page of {report.folder}: {error}", file=sys.stderr, flush=True)
        return
    print(f"report: {page}", flush=True)
