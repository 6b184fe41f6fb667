"""Starting the ranks of a command, and saying which of them failed and how."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from distlab.comm import RankContext, RankEnvironment, collectives
from distlab.comm.context import LONGEST_TIMEOUT_S, choose_device
from distlab.comm.rank_process import is_lost_peer, leave_process, progress_to_stderr, run_rank
from distlab.ending import USAGE_ERROR, hand_signals_over, message_of
from distlab.measure.memory import free_bytes
from distlab.report import OutputFolder, View, add_output_options, redraw
from distlab.report.options import real, whole

__all__ = [
    "add_rank_options",
    "is_lost_peer",
    "launch",
    "leave_process",
    "progress_to_stderr",
    "run_rank",
    "shared_folder",
    "start_ranks",
]

RANK_BYTES = 300 * 2**20  # resident in a process that has imported torch and done nothing else


def default_ranks(backend: str | None) -> int:
    """One rank per GPU, or two on a machine without."""
    gpus = torch.cuda.device_count() if backend != "gloo" else 0
    return gpus or 2


def start_ranks(
    arguments: Sequence[str], ranks: int, backend: str | None, max_restarts: int = 0, script: str | None = None
) -> int:
    """Run `ranks` processes under torchrun's agent, in this process, and wait for them.

    Args:
        arguments: of each; without a script, those of the command `distlab`.
        max_restarts: how often all ranks are started again after one failed.

    Returns:
        0, or the exit code of the rank that failed first, after a line that says which and how; 128 + the number
        of the signal that this process was sent.

    Raises:
        ValueError: fewer than one rank or than no restarts, more NCCL ranks than GPUs, or more ranks than this
            machine's memory holds.
    """
    if ranks < 1:
        raise ValueError(f"--nproc {ranks}: at least one rank")
    if max_restarts < 0:
        raise ValueError(f"--max-restarts {max_restarts}: at least 0")
    choose_device(backend, 0, ranks)
    free = free_bytes("cpu")
    if free is not None and ranks > max(2, free // RANK_BYTES):
        raise ValueError(
            f"--nproc {ranks}: a rank's process takes {RANK_BYTES / 2**30:.1f} GiB before it does anything, and "
            f"{free / 2**30:.1f} GiB are free; start at most {max(2, free // RANK_BYTES)} here"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank, and torchrun need not warn of it
    options = ["--standalone", f"--nproc_per_node={ranks}", f"--max_restarts={max_restarts}"]
    if "LOGLEVEL" not in os.environ:  # what its agent logs of signals and exit codes is said below and by ranks
        for module in ("agent.server.api", "multiprocessing.api"):
            logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    hand_signals_over()
    try:
        program = ["--module", "launch"] if script is None else [script]
        torchrun.run(torchrun.parse_args([*options, *program, *_without_own(arguments)]))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:  # before the agent listens to signals
        return 128 + signal.SIGINT
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USAGE_ERROR:  # a usage error has had its message
            print(f"rank {rank} {_how_it_ended(failure.exitcode)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def run_on_ranks(
    work: Callable[[RankContext], int], arguments: Sequence[str], options: Any, ranks: int | None, name: str
) -> int:
    """Run `work` on this rank; where this process is none, start the ranks of `distlab ARGUMENTS`.

    Args:
        options: with `nproc`, `backend`, `timeout` and `max_restarts`, see `distlab.experiment.RankOptions`.
        ranks: how many, where `nproc` is None; None: one per GPU, or two on a machine without.
        name: for messages.

    Returns:
        The exit code.
    """
    if not RankEnvironment.read().launched:
        count = options.nproc or ranks or default_ranks(options.backend)
        return start_ranks(arguments, count, options.backend, options.max_restarts)
    return run_rank(work, backend=options.backend, timeout_s=options.timeout, name=name)


def _how_it_ended(code: int) -> str:
    """Of a rank's exit code, in words; 128 + n is how a rank ends that answered signal n."""
    number = -code if code < 0 else code - 128
    if number not in list(signal.Signals):
        return f"ended with an error (exit code {code})"
    verb = "ended with" if code < 0 else "was stopped by"
    hint = "; if nobody sent it, the kernel did, because memory ran out" if code == -signal.SIGKILL else ""
    return f"{verb} signal {signal.Signals(number).name} (exit code {code}){hint}"


def _without_own(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--nproc N` and `--max-restarts N`, which torchrun would take for its own options."""
    kept, skip = [], False
    for argument in arguments:
        name = argument.split("=")[0]
        own = not skip and name in ("--nproc", "--max-restarts")
        if not skip and not own:
            kept.append(argument)
        skip = own and "=" not in argument
    return kept


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """The options that every entry point has: where and how the ranks run, and where the results go."""
    parser.add_argument("--nproc", type=whole(), help="start this many ranks [GPUs, or 2 on a CPU]")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="[nccl where there are GPUs]")
    seconds = real(above=0, most=LONGEST_TIMEOUT_S)
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, help="seconds a collective may take [%(default)s]"
    )
    add_output_options(parser)


def launch(
    prepare: Callable[[], Callable[[RankContext], int]],
    args: argparse.Namespace,
    *,
    script: str,
    arguments: Sequence[str],
    name: str,
    view: View | None = None,
) -> int:
    """What `main()` does: check, start the ranks unless this is one already, run the work on this rank.

    Args:
        prepare: checks the options and returns the work; its ValueError is the user's to mend, and said once.
        args: parsed, with the options of `add_rank_options`, and `max_restarts` where there is such an option.
        script, arguments: the entry point's file and the command line, for starting the ranks.
        name: for messages.
        view: of the experiment, for `--from`, which measures nothing.
    """
    speaks = True
    try:
        place = RankEnvironment.read()
        speaks = place.rank == 0
        if getattr(args, "source", None) and view is not None:
            return redraw(view, args.source, args.out) if speaks else 0
        work = prepare()
        if not place.launched:
            ranks = default_ranks(args.backend) if args.nproc is None else args.nproc
            return start_ranks(arguments, ranks, args.backend, getattr(args, "max_restarts", 0), script)
    except (ValueError, OSError) as error:
        if speaks:
            print(f"{name}: error: {message_of(error)}", file=sys.stderr)
        return USAGE_ERROR
    return run_rank(work, backend=args.backend, timeout_s=args.timeout, name=name)


def shared_folder(context: RankContext, root: str, name: str) -> OutputFolder:
    """Rank 0 makes the folder of this run, the others join it; if it cannot be written, every rank raises."""
    made: OutputFolder | OSError | None = None
    if context.is_main:
        try:
            made = OutputFolder(root, name)
        except OSError as error:
            made = error
    made = collectives.gather_objects(made, context.group)[0]
    if isinstance(made, OSError):
        raise made
    return made
