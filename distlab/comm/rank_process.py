"""A rank's process from its group to its exit code: messages about failures, and how it ends."""

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

SILENCE_S = 10.0  # between two lines of progress where nobody looks on
CLEAR = "\033[K"  # a terminal's line, from the cursor on


def run_rank(
    work: Callable[[RankContext], int], *, backend: str | None, timeout_s: float, name: str
) -> int:
    """Run `work` on this rank inside its context. Turn exceptions into a message and an exit code.

    Returns:
        The result of `work`. 2 after an error that the user can fix, 1 after the loss of another
            rank, 128 + n if signal n asked this rank to stop.
    """
    try:
        place = RankEnvironment.read()
    except ValueError as error:
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # no collection, ours between variants or Python's own, looks through all of torch again
    gc.freeze()

    def work_in_context() -> int:
        try:
            with rank_context(backend=backend, timeout_s=timeout_s) as context:
                try:
                    return work(context)
                except Exception as error:
                    if (message := message_of(error)) is None:
                        raise
                    say_once(context, f"{name}: error: {message}")
                    return USAGE_ERROR
        except Exception as error:
            if is_lost_peer(error):
                first_line = str(error).strip().splitlines()[0]
                print(
                    f"{name}: rank {place.rank} lost another rank: it died, or did not join a collective within "
                    f"{timeout_s:g} s (--timeout). Look for that rank's own message. ({first_line})",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
            if (message := message_of(error)) is None:
                raise
            # no group yet to agree on who says it
            print(f"{name}: error: {message}", file=sys.stderr, flush=True)
            return USAGE_ERROR

    return until_stopped(name, work_in_context, speaks=place.rank == 0)


def say_once(context: RankContext, message: str) -> None:
    """Print what all ranks have found: rank 0 says it, and the others wait until it has been said.

    Without waiting, the first rank to leave makes torchrun end rank 0 in mid-sentence. A rank whose
    error is its own waits in vain for a few seconds and then says it itself.
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
    """Return on every rank the result of `work()` on rank 0. Call it on all ranks.

    Its OSError or ValueError is raised on all ranks.
    """
    if context.group is None:
        return work()
    found = None
    if context.is_main:
        try:
            found = work()
        except (OSError, ValueError) as error:
            found = error
    found = collectives.gather_objects(found, context.group)[0]
    if isinstance(found, Exception):
        raise found
    return found


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
        """Say what is done now."""
        now = self._seconds()
        if self.speaks and self.rewrites:
            line = f"[{now:6.1f} s] {text}"[: shutil.get_terminal_size().columns - 1]
            print(f"\r{CLEAR}{line}\r", end="", file=sys.stderr, flush=True)
        elif self.speaks and now - self.said >= SILENCE_S:
            self.keep(text)
            self.said = now

    def keep(self, text: str) -> None:
        """Print a line that stays."""
        self.close()
        if self.speaks:
            print(f"[{self._seconds():6.1f} s] {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the line away, before something else is printed."""
        if self.speaks and self.rewrites:
            print(f"\r{CLEAR}", end="", file=sys.stderr, flush=True)

    def _seconds(self) -> float:
        return time.monotonic() - self.begin


def leave_process(code: int) -> NoReturn:
    """End this rank with `code`, without the interpreter's shutdown.

    One of gloo's threads may still be about to release the last collective's tensors. That needs
    Python's lock, and asking for it during the shutdown aborts a process whose work was done (exit
    code −6), which torchrun takes for a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error of torch or gloo, a plain RuntimeError, means that a rank is gone."""
    signs = (
        *(
            "Connection closed by peer",
            "Connection reset by peer",
            "Timed out waiting",
            "timed out",
        ),
        "Application timeout caused pair closure",
    )
    known = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return known or isinstance(error, dist.DistError)
