"""Which invariants does a course submission keep?

    distlab grade path/to/submission
    distlab grade path/to/submission --only ddp,fsdp --markdown
    distlab grade submissions/* --jobs 2 --csv > results.csv  # for teachers

A submission is a folder with `tests/adapters.py`, or with a module of hook functions of the same
names (`--adapters package.module`). Every part is optional. The functions run in child processes
with limits on time and memory, in a copy of the folder. No code is printed and none is changed: the
report says which invariants hold, and for each that is broken the input, what was expected and what
was seen. Each submission also has a page. docs/start/course.md tells what is examined.

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
from distlab.grade.hooks import PART_NAMES
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
    # Lines of progress would mix with a table for a program, or with those of another submission.
    is_quiet = options.json or options.markdown or options.csv or len(options.folders) > 1
    progress = Progress(is_quiet=is_quiet)

    def examine(folder: str) -> Report:
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

    # Threads are enough: submissions run in child processes, and the threads wait for them.
    with ThreadPoolExecutor(options.jobs) as pool:
        reports = list(pool.map(examine, options.folders))
    progress.close()
    show(reports, options)
    return 0 if all(report.is_right for report in reports) else 1


def show(reports: Sequence[Report], options: GradeOptions) -> None:
    """Print reports in the form that was asked for. Without such a form, write a page for each."""
    if options.csv:
        rows = [report.csv_row() for report in reports]
        # Reports may have different columns, and a CSV has one header.
        titles = list(dict.fromkeys(title for row in rows for title in row))
        writer = csv.DictWriter(sys.stdout, titles)
        writer.writeheader()
        writer.writerows(rows)
        return
    if options.json:
        for report in reports:
            print(json.dumps(report.to_dict()))
        return
    if options.markdown:
        for report in reports:
            print(report.markdown())
        return
    for report in reports:
        # A message of the submission's may hold what a terminal would obey.
        print(f"{for_terminal(str(report))}\n")
        records = records_of(report, options.device)
        with new_folder(options.out, NAME) as folder:
            page = write(page_view(report), records, folder)
        print(f"report: {page}")
    refresh_index(options.out)
