"""What every entry point does around its experiment: start ranks, make the context, say clearly what failed."""

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from distlab.comm import RankContext, RankEnvironment, collectives, rank_context
from distlab.comm.context import choose_device
from distlab.report import OutputFolder, View, add_output_options, redraw

USAGE_ERROR = 2
# What a user can mend. Anything else is our mistake and keeps its traceback.
USER_ERRORS = (ValueError, OSError, MemoryError)


def default_ranks(backend: str | None) -> int:
    """One rank per GPU, or two on a machine without."""
    gpus = torch.cuda.device_count() if backend != "gloo" else 0
    return gpus or 2


def start_ranks(
    script: str, arguments: Sequence[str], ranks: int, backend: str | None, max_restarts: int = 0
) -> int:
    """Run `ranks` processes of `script` under torchrun's agent, in this process, and wait for them.

    Args:
        max_restarts: how often all ranks are started again after one failed.

    Returns:
        0, or the exit code of the rank that failed first, after a line that says which and how; 128 + the number
        of the signal that this process was sent.

    Raises:
        ValueError: fewer than one rank, or more NCCL ranks than GPUs.
    """
    if ranks < 1:
        raise ValueError(f"--nproc {ranks}: at least one rank")
    choose_device(backend, 0, ranks)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank, and torchrun need not warn of it
    options = ["--standalone", f"--nproc_per_node={ranks}", f"--max_restarts={max_restarts}"]
    try:
        torchrun.run(torchrun.parse_args([*options, script, *_without_own(arguments)]))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USAGE_ERROR:  # a usage error has had its message
            how = f"signal {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "an error"
            print(f"rank {rank} ended with {how} (exit code {failure.exitcode})", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


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
    parser.add_argument("--nproc", type=int, help="start this many ranks [GPUs, or 2 on a CPU]")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="[nccl where there are GPUs]")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds a collective may take [%(default)s]"
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
    if getattr(args, "source", None) and view is not None:
        return redraw(view, args.source, args.out) if RankEnvironment.read().rank == 0 else 0
    place = RankEnvironment.read()
    try:
        work = prepare()
        if not place.launched:
            ranks = default_ranks(args.backend) if args.nproc is None else args.nproc
            return start_ranks(script, arguments, ranks, args.backend, getattr(args, "max_restarts", 0))
    except ValueError as error:
        if place.rank == 0:
            print(f"{name}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return run_rank(work, backend=args.backend, timeout_s=args.timeout, name=name)


def run_rank(work: Callable[[RankContext], int], *, backend: str | None, timeout_s: float, name: str) -> int:
    """Run `work` on this rank inside its context; turn exceptions into one clear message and an exit code."""
    place = RankEnvironment.read()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    gc.freeze()  # no collection, ours between variants or Python's own, looks through all of torch again
    try:
        with rank_context(backend=backend, timeout_s=timeout_s) as context:
            try:
                return work(context)
            except USER_ERRORS as error:
                say_once(context, f"{name}: error: {error}")
                return USAGE_ERROR
    except USER_ERRORS as error:  # there is no group yet in which to agree on who says it
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    except dist.DistError as error:
        print(lost_peer(name, place.rank, timeout_s, error), file=sys.stderr, flush=True)
        return 1
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        print(lost_peer(name, place.rank, timeout_s, error), file=sys.stderr, flush=True)
        return 1


def say_once(context: RankContext, message: str) -> None:
    """Print what all ranks have found: rank 0 says it, and the others wait until it has been said.

    Without waiting, the first rank to leave makes torchrun end rank 0 in mid-sentence. A rank whose error is its
    own waits in vain for a few seconds and then says it itself.
    """
    store = dist.distributed_c10d._get_default_store()
    if not context.is_main:
        try:
            store.wait(["said"], timedelta(seconds=5))
            return
        except RuntimeError:
            message = f"[rank {context.rank}] {message}"
    print(message, file=sys.stderr, flush=True)
    if context.is_main:
        store.set("said", "yes")


def progress_to_stderr(context: RankContext) -> Callable[[str], None]:
    """A function that prints a line with the seconds since now, on rank 0 alone."""
    begin = time.monotonic()

    def progress(text: str) -> None:
        if context.is_main:
            print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    return progress


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


def leave_process(code: int) -> NoReturn:
    """End this rank with `code`, without the interpreter's shutdown.

    One of gloo's threads may still be about to release the last collective's tensors. That needs Python's lock,
    and asking for it during the shutdown aborts a process whose work was done (exit code −6), which torchrun
    takes for a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether gloo says that another rank is gone; it raises plain RuntimeErrors."""
    signs = (
        *("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "timed out"),
        "Application timeout caused pair closure",
    )
    return any(sign in str(error) for sign in signs)


def lost_peer(name: str, rank: int, timeout_s: float, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0]
    return (
        f"{name}: rank {rank} lost another rank: it died, or did not join a collective within {timeout_s:g} s "
        f"(--timeout). Look for that rank's own message. ({first_line})"
    )
