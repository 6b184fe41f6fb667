"""A rank's process from its group to its exit code: messages about failures, and its end."""

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distlab.cli_errors import USAGE_ERROR, message_of, until_stopped
from distlab.comm import collectives
from distlab.comm.context import RankContext, RankEnvironment, rank_context

SILENCE_S = 10.0  # between two lines of progress in a file or a pipe
CLEAR = "\033[K"  # clears a terminal's line from the cursor on


def run_rank(
    work: Callable[[RankContext], int], *, backend: str | None, timeout_s: float, name: str
) -> int:
    """Run `work` on this rank inside its context. Turn exceptions into a message and an exit code.

    Args:
        work: function of this rank's context that returns an exit code.
        backend: see `rank_context`.
        timeout_s: seconds after which a collective fails if a rank does not join it.
        name: name of the command, for messages.

    Returns:
        The result of `work`. 2 after an error that the user can fix, 1 after the loss of another
            rank, 128 + n if signal n asked this rank to stop.
    """
    try:
        place = RankEnvironment.read()
    except ValueError as error:
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    # By default torch starts a thread per core on every rank, and ranks of one host share the
    # cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Later garbage collections, ours between variants and Python's own, skip the objects of torch.
    gc.freeze()

    def work_in_context() -> int:
        try:
            with rank_context(backend=backend, timeout_s=timeout_s) as context:
                try:
                    return work(context)
                except Exception as error:
                    message = message_of(error)
                    if message is None:
                        raise
                    say_once(context, f"{name}: error: {message}")
                    return USAGE_ERROR
        except Exception as error:
            if is_lost_peer(error):
                first_line = str(error).strip().splitlines()[0]
                print(
                    f"{name}: rank {place.rank} lost another rank: it died, or did not join a "
                    f"collective within {timeout_s:g} s (--timeout). Look for that rank's own "
                    f"message. ({first_line})",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
            message = message_of(error)
            if message is None:
                raise
            # Every rank prints it, because there is no group yet in which one rank could.
            print(f"{name}: error: {message}", file=sys.stderr, flush=True)
            return USAGE_ERROR

    return until_stopped(name, work_in_context, speaks=place.rank == 0)


def say_once(context: RankContext, message: str) -> None:
    """Print an error that all ranks have found. Rank 0 prints it, and the others wait for that.

    If they did not wait, the first rank to leave would make torchrun end rank 0 while it prints. A
    rank whose error no other rank has found waits in vain for 5 seconds and then prints it itself.
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


def on_main(context: RankContext, work: Callable[[], Any]) -> Any:
    """Run `work()` on rank 0 and return its result on every rank. Call it on all ranks.

    Raises:
        OSError, ValueError: `work` raised it. All ranks raise it.
    """
    if context.group is None:
        return work()
    mine = None
    if context.is_main:
        try:
            mine = work()
        except (OSError, ValueError) as error:
            # Sent instead of raised, because the other ranks already wait in the gather.
            mine = error
    result = collectives.gather_objects(mine, context.group)[0]
    if isinstance(result, Exception):
        raise result
    return result


class Progress:
    """Current activity of a long command, on stderr of rank 0, with the seconds since the start.

    On a terminal it is one line, which each call rewrites. Elsewhere a line is printed once ten
    seconds have passed.
    """

    def __init__(self, context: RankContext):
        self.speaks = context.is_main
        self.rewrites = sys.stderr.isatty()
        self.begin = time.monotonic()
        self.said = -SILENCE_S

    def __call__(self, text: str) -> None:
        """Print the current activity."""
        now = self._seconds()
        if not self.speaks:
            return
        if self.rewrites:
            width = shutil.get_terminal_size().columns - 1  # a full line would move to the next one
            line = f"[{now:6.1f} s] {text}"[:width]
            print(f"\r{CLEAR}{line}\r", end="", file=sys.stderr, flush=True)
        elif now - self.said >= SILENCE_S:
            self.keep(text)
            self.said = now

    def keep(self, text: str) -> None:
        """Print a line that stays."""
        self.close()
        if self.speaks:
            print(f"[{self._seconds():6.1f} s] {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line. Call it before something else is printed."""
        if self.speaks and self.rewrites:
            print(f"\r{CLEAR}", end="", file=sys.stderr, flush=True)

    def _seconds(self) -> float:
        return time.monotonic() - self.begin


def leave_process(code: int) -> NoReturn:
    """End this rank with `code`, without the interpreter's shutdown.

    One of gloo's threads may not have released the last collective's tensors yet. To release them
    it needs Python's lock. If it asks for the lock during the shutdown, the process aborts (exit
    code −6) although its work is done, and torchrun reports a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error means that another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # gloo raises plain RuntimeErrors, which differ only in their text.
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "timed out",
        "Application timeout caused pair closure",
    )
    text = str(error)
    return any(sign in text for sign in signs)
