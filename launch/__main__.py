"""`distlab`: one command for every experiment, the trainer and the tools around them.

Without installing, the same is `python -m launch`.

    distlab list                                every experiment: its question, and what it needs
    distlab run NAME [--nproc N] [options]      measure; `distlab run NAME --help` shows how
    torchrun --nproc-per-node N -m launch run NAME [options]
    distlab show RUN… [--table STYLE]           redraw saved runs: table, pictures, page
    distlab runs [WORD…]                        saved runs with their findings; outputs/index.html
    distlab compare RUN RUN… [--fail-above 5%]  changes from the first run to the last, beyond noise
    distlab records --machine NAME              measure the records of records/manifest.toml again
    distlab tables [--check]                    redraw the tables of the pages from records/
    distlab train | sample [options]            train a model; continue a text by a trained one
    distlab check MODEL [--wrap WRAPPER]        are your parallel code's gradients right?
    distlab kernel KERNEL --as OPERATION        is your kernel right on any input, and how fast?
    distlab grade FOLDER                        which invariants does a course submission keep?
    distlab trace FILE… [--against FILE…]       where does a traced step's time go, and why?
    distlab memory SNAPSHOT                     what holds your GPU's memory, and what grows?
    distlab doctor                              what this machine has, and what runs on it
    distlab --version                           the version, and the commit of a checkout
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

# Searched before the user's folder, which may also have a package called launch.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distlab import __version__
from distlab.cli_errors import (
    USAGE_ERROR,
    ended_at_once,
    message_of,
    outlive_readers,
    until_stopped,
)
from distlab.options import Parser, unknown
from launch.registry import (
    ROOT,
    experiments,
    in_columns,
    listing,
    load,
    require_clone,
    terminal_width,
)

if TYPE_CHECKING:
    from distlab.comm import RankContext
    from distlab.experiment import Experiment
    from distlab.report.view import View

Arguments = Sequence[str]
Command = Callable[[Arguments], int]  # → exit code


def main(argv: Arguments | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A bare `distlab` shows the help instead of an error.
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(help_text(terminal_width()))
        return 0
    if command == "--version":
        # Of a checkout alone: an installed copy may lie within somebody else's.
        words = ["git", f"--git-dir={ROOT}/.git", "rev-parse", "--short", "HEAD"]
        # A checkout whose git is missing or broken still has a version, only without a commit.
        try:
            answer = subprocess.run(words, capture_output=True, text=True, check=True)
            commit = f" ({answer.stdout.strip()})"
        except (OSError, subprocess.SubprocessError):
            commit = ""
        print(f"distlab {__version__}{commit}")
        return 0
    if command not in COMMANDS:
        message = unknown(command, COMMANDS)
        if command in experiments():
            message = f"{command!r} is an experiment: did you mean `distlab run {command}`?"
        print(f"distlab: error: {message}", file=sys.stderr)
        return USAGE_ERROR
    if command == "list":  # answered before torch is loaded, so also if torch is broken
        return COMMANDS[command](rest)
    if command == "doctor":
        with say_if_slow("distlab doctor: looking at this machine"):
            return COMMANDS[command](rest)
    # Messages name the experiment as well, because several runs may write into one log.
    called = " ".join(["distlab", command, *(rest[:1] if command == "run" else [])])
    return _to_end(called, lambda: COMMANDS[command](rest))


def console() -> None:
    """Run `main` as a process.

    A rank leaves without the interpreter's shutdown, see `leave_process`.
    """
    # A reader such as `head` may close the pipe early, and that must not end a run with a
    # traceback.
    outlive_readers()
    code = main()
    # A command that has not imported torch.distributed has no threads of gloo to leave behind.
    if "torch.distributed" in sys.modules:
        from distlab.comm.rank_process import leave_process

        leave_process(code)
    sys.exit(code)


def help_text(width: int) -> str:
    """Return the text of `distlab --help`: the docstring of this file.

    Args:
        width: characters of a line.
    """
    lines = []
    for line in (__doc__ or "").splitlines():
        # A command and its meaning are two columns, with two spaces or more between them.
        columns = re.fullmatch(r"( +\S.*?  +)(.*)", line)
        if columns is None:
            lines += textwrap.wrap(line, width) or [""]
        else:
            lines += in_columns(columns[1], columns[2], width)
    return "\n".join(lines)


def list_experiments(arguments: Arguments) -> int:
    """List every experiment with its question and what it needs."""
    Parser("distlab list", description=list_experiments.__doc__).parse_args(arguments)
    print(listing(terminal_width()))
    return 0


def _to_end(name: str, work: Callable[[], int]) -> int:
    """Run `work()` and return its exit code.

    Returns 2 after the one line of an error that the user can fix, and 128 + n if signal n stops
    it.
    """

    def mended() -> int:
        # The process that launched a rank has announced the import already.
        is_rank = "ROLE_RANK" in os.environ
        # Eight ranks that each announce the same import would print eight lines.
        loading = contextlib.nullcontext() if is_rank else say_if_slow(f"{name}: loading torch")
        with ended_at_once(name, speaks=speaks), loading:
            # Imported here, where a signal ends the process at once and a slow import is announced.
            import torch.distributed  # noqa: F401
        try:
            return work()
        except Exception as error:
            # A bug of ours: its traceback is the report.
            if (message := message_of(error)) is None:
                raise
            # Every rank raises the same usage error, and one line of it is enough.
            if _speaks():
                print(f"{name}: error: {message}", file=sys.stderr)
            return USAGE_ERROR

    speaks = os.environ.get("ROLE_RANK", "0") == "0"  # torchrun's number of a rank
    return until_stopped(name, mended, speaks=speaks)


@contextlib.contextmanager
def say_if_slow(text: str) -> Iterator[None]:
    """Print a line on stderr if the `with` block takes longer than a second."""
    timer = threading.Timer(1.0, print, args=(text,), kwargs={"file": sys.stderr, "flush": True})
    # A command that has ended must not stay for the rest of the second.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a process with another thread cannot fork its ranks


def _speaks() -> bool:
    """Return whether this process prints messages that all ranks have."""
    from distlab.comm import RankEnvironment

    try:
        return RankEnvironment.read().rank == 0
    except ValueError:
        # The variables of torchrun are malformed. The rank is unknown then, so the error must be
        # printed here.
        return True


def run(arguments: Arguments) -> int:
    """Run an experiment. Start its ranks if it needs several, unless this process is one."""
    if not arguments or arguments[0].startswith("-"):
        print("distlab run NAME [options]; `distlab list` shows the names", file=sys.stderr)
        return USAGE_ERROR
    name = arguments[0]
    if name in COMMANDS and name not in experiments():
        raise ValueError(f"{name!r} is not an experiment: did you mean `distlab {name}`?")
    module = load(name)
    # Some questions are answered by arithmetic, and begin with a word: `distlab run plan gpus`.
    words = getattr(module, "WORDS", {})
    if words and len(arguments) > 1 and not arguments[1].startswith("-"):
        word = arguments[1]
        if word not in words:
            raise ValueError(unknown(word, words))
        return words[word](arguments[1:])
    # The lines above need no torch, so a wrong name or word is answered at once.
    from distlab.comm import RankEnvironment
    from distlab.experiment import lone_context
    from launch.ranks import run_on_ranks
    from launch.runs import refresh_index

    experiment: Experiment = module.EXPERIMENT
    config, frame = experiment.chosen(experiment.parser().parse_args(arguments[1:]))
    # Ranks that are started again find their run by its name.
    if experiment.ranks == "many" and frame.name is None:
        if RankEnvironment.read().max_restarts:
            raise ValueError(
                "torchrun's --max-restarts needs a --name, under which restarted ranks resume"
            )
        if frame.max_restarts:
            # Restarted ranks get the same arguments, and so the name that the first attempt had.
            arguments = [*arguments, "--name", datetime.now(UTC).strftime("%Y%m%d-%H%M%S")]

    def listed(context: RankContext) -> int:
        code = experiment.run(config, context, frame)
        # Every rank ends here, and only rank 0 may write the index, which is one file.
        if context.is_main:
            refresh_index(frame.out)
        return code

    # An experiment without communication runs in this process, without torchrun's start of seconds.
    if experiment.ranks != "many":
        device = "cpu" if experiment.ranks == "none" else frame.device
        return listed(lone_context(device))
    return run_on_ranks(
        listed,
        ["run", *arguments],
        frame,
        experiment.nproc,
        f"distlab run {experiment.name}",
    )


def show(arguments: Arguments) -> int:
    """Redraw table, pictures and page of saved rows, of one machine or several, without measuring.

    Pictures that rows alone cannot give (timelines, from traces) are copied from the folder of the
    first file.
    """
    parser = Parser("distlab show", description=show.__doc__)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="RUN",
        help="run, as `distlab runs` names it, or a file of records/",
    )
    parser.add_argument("--out", default="outputs", help="folder of all results [%(default)s]")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print only the line of JSON")
    form.add_argument(
        "--table", choices=("text", "markdown"), help="print only the table, in this form"
    )
    args = parser.parse_args(arguments)

    # Help and usage errors were answered above, before these imports load torch.
    from distlab.compare import run_file
    from distlab.report import read_json, reading, write
    from distlab.report.terminal import say
    from distlab.report.view import check_records
    from distlab.runs import REDRAWN, new_folder
    from launch.runs import refresh_index

    # All names are looked up first, so that one that is misspelt leaves no folder.
    files = [run_file(run, args.out, ROOT) for run in args.files]
    records = [record for file in files for record in read_json(file)]
    if not records:
        raise ValueError(f"{', '.join(args.files)}: no records to show")
    # The first record names the experiment. `check_records` refuses records of another one.
    view = view_of(records[0].experiment)
    check_records(view, records)
    with reading(files):  # an error here leaves no folder
        records = view.derived(records)
        # Made and dropped: rows that this version cannot show raise here.
        view.headline_of(records), view.table(records)
        if args.table:
            print(view.table(records, args.table))
            return 0
    with reading(files), new_folder(args.out, view.name) as folder:
        # Pictures of the rows are drawn again by `write`, over these.
        for file in files[0].parent.glob("*.png") if len(files) == 1 else []:
            shutil.copy(file, folder)
        (folder / REDRAWN).write_text(
            "".join(f"{run}\n" for run in args.files), encoding="utf-8", errors="replace"
        )
        page = write(view, records, folder)
    # The page is complete by now. An error of these lines leaves it in its folder.
    with reading(files):
        say(view, records, page, quiet=args.json)
    refresh_index(args.out)
    return 0


def maker_of(name: str) -> str:
    """Return the name of the experiment that makes such records, its own or those of a part.

    Raises:
        ValueError: no experiment makes such records.
    """
    # The experiment of that name comes first, because it is most often the right one.
    for known in sorted(experiments(), key=lambda each: each != name):
        if name in load(known).EXPERIMENT.views():
            return known
    raise ValueError(f"no experiment makes records of {name!r}")


def view_of(name: str) -> View:
    """Return the view of records with that name. Raise ValueError if no experiment makes such."""
    # These two commands are not experiments, so the registry does not know their views.
    if name == "train":
        return importlib.import_module("launch.trainer").VIEW
    if name == "kernel":
        return importlib.import_module("launch.kernel_page").VIEW
    return load(maker_of(name)).EXPERIMENT.views()[name]


def tables(arguments: Arguments) -> int:
    """Redraw the tables of README.md and docs/ from the records, and their code from the source."""
    parser = Parser("distlab tables", description=tables.__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is out of date"
    )
    check = parser.parse_args(arguments).check
    require_clone()

    from distlab.report.docs_tables import redraw_pages

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return redraw_pages(pages, view_of, ROOT, check=check)


def _of(module: str, function: str = "main") -> Command:
    """Return a command that is in another module, which is imported when the command is called."""
    return lambda arguments: getattr(importlib.import_module(module), function)(arguments)


COMMANDS: dict[str, Command] = {
    # Imports of the commands are postponed, so that `distlab list` stays fast and works without
    # torch.
    "list": list_experiments,
    "run": run,
    "show": show,
    "runs": _of("launch.runs", "runs"),
    "compare": _of("launch.runs", "compare"),
    "records": _of("launch.records"),
    "tables": tables,
    "train": _of("launch.trainer"),
    "sample": _of("launch.sample"),
    "check": _of("launch.check"),
    "kernel": _of("launch.kernel"),
    "grade": _of("launch.grade"),
    "memory": _of("launch.memory"),
    "trace": _of("launch.trace"),
    "doctor": _of("distlab.doctor"),
}

if __name__ == "__main__":
    console()
