"""A command that one process runs: options, work, report. What several ranks run starts in `launch/ranks.py`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from distlab.ending import USAGE_ERROR, how_to_continue, message_of, until_stopped
from distlab.report.output import OutputFolder
from distlab.report.record import Record, read_json, reading
from distlab.report.view import View, check_records, say, write

Work = Callable[[Path], Sequence[Record]]  # what is left to do once the options are right: the run's folder → records


def progress(text: str) -> None:
    """A line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def run_command(
    view: View,
    args: argparse.Namespace,
    prepare: Callable[[], Work],
    *,
    passed: Callable[[Sequence[Record]], object] = lambda records: True,
) -> int:
    """Do what an experiment's `main` does once it has parsed its options, and return the exit code.

    Args:
        args: with the options of `add_output_options`.
        prepare: checks the options, before there is a folder, and returns the work. A ValueError or OSError of
            either is the user's to mend, and becomes one line on stderr.
        passed: whether the records say that all went well.

    Returns:
        0; 1 if the run did not pass; 2 after a user's mistake; 128 + the number of a signal that stopped it.
    """

    def run() -> int:
        if args.source:
            return redraw(view, args.source, args.out)
        work = prepare()
        stamp = getattr(args, "stamp", None)
        folder = OutputFolder(args.out, view.name, stamp)
        if hasattr(args, "stamp"):
            how_to_continue(f"the same command with --stamp {folder.path.name} continues")
        records = work(folder.path)
        page = write(view, records, folder)
        say(view, records, page)
        return 0 if passed(records) else 1

    return run_to_end(view.name, run)


def run_to_end(name: str, work: Callable[[], int]) -> int:
    """`work()`'s exit code; 2 after the one line of an error that a person can mend; 128 + n if signal n stops it.

    What a command's `main` does where `run_command` does not suit it.
    """

    def mended() -> int:
        try:
            return work()
        except Exception as error:
            if (message := message_of(error)) is None:
                raise
            print(f"{name}: error: {message}", file=sys.stderr)
            return USAGE_ERROR

    return until_stopped(name, mended)


def add_output_options(
    parser: argparse.ArgumentParser, *, measures: bool = True, resumes: bool = False
) -> None:
    """Where a run's results go, and `--from`; `--commit` of one that measures; `--stamp` of one that can be resumed."""
    parser.add_argument("--out", default="outputs", help="folder of all results [%(default)s]")
    if resumes:
        parser.add_argument("--stamp", help="name of this run; a name that exists is resumed")
    if measures:
        parser.add_argument("--commit", help="recorded where the tree has no git")
    add_from_option(parser)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """The option `--device`, for `device_of`."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="[cuda where there is one]")


def device_of(args: argparse.Namespace) -> str:
    """The device asked for by `--device`, or cuda where there is one.

    Raises:
        ValueError: a GPU that is not there.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; leave it out, or give cpu")
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def add_from_option(parser: argparse.ArgumentParser) -> None:
    """The option `--from`, which every experiment has: draw saved records anew instead of measuring."""
    parser.add_argument(
        "--from",
        dest="source",
        nargs="+",
        metavar="RECORDS",
        help="write table, pictures and report.html of these records.json anew, without measuring",
    )


def redraw(view: View, sources: Sequence[str | Path], out: str | Path) -> int:
    """What `--from` does: read records, of one machine or of several, and write a folder of them under `out`.

    Pictures that records alone cannot give (timelines, from traces) are taken from beside the first file.

    Returns:
        0, or 2 after a line on stderr that says what is wrong with a file.
    """

    def draw() -> int:
        records = [record for source in sources for record in read_json(source)]
        check_records(view, records)
        with reading(sources):  # before there is a folder
            view.headline_of(records), view.table(records)
        folder = OutputFolder(out, view.name)
        for picture in sorted(Path(sources[0]).parent.glob("*.png")) if len(sources) == 1 else []:
            shutil.copy(picture, folder.path)
        with reading(sources):
            page = write(view, records, folder)
        say(view, records, page)
        return 0

    return run_to_end(view.name, draw)
