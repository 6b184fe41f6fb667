"""End a run at SIGTERM, SIGINT, SIGHUP or SIGQUIT after its step, with a checkpoint."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from distlab.cli_errors import answered

GRACE_S = 5.0  # time in which the main thread must notice a signal


class StopSignals:
    """Handler that remembers a signal and lets the step end.

    A main thread that waits in a collective for a dead rank never sees a signal. Then the process
    ends after `GRACE_S`, so that torchrun does not wait 30 s before it kills it.

    Args:
        answers: True to print a line when the signal arrives, because a step may take long. One
            rank does.

    Attributes:
        received: number of the signal, or 0.
    """

    def __init__(self, *, answers: bool = False) -> None:
        self.received = 0
        self.answers = answers

    @contextmanager
    def caught(self) -> Iterator["StopSignals"]:
        """Catch signals while the block runs, and restore the earlier handlers afterwards.

        Only the main thread gets signals. In other threads nothing happens.
        """
        with answered(self._note, self._hear):
            yield self

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal. Python calls this in the main thread."""
        self.received = number

    def _hear(self, number: int) -> None:
        """Answer the signal in another thread, and end a process whose main thread is stuck."""
        if self.answers:
            self.answers = False  # once
            name = signal.Signals(number).name
            print(
                f"asked to stop ({name}): this step is finished, then a checkpoint written",
                file=sys.stderr,
                flush=True,
            )
        deadline = time.monotonic() + GRACE_S
        # Python runs `_note` between two bytecodes of the main thread, which never comes inside a
        # stuck call.
        while not self.received and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self.received:
            print(
                "asked to stop while waiting for another rank; ending now",
                file=sys.stderr,
                flush=True,
            )
            # Without cleaning up, since that would wait for the stuck main thread.
            os._exit(128 + number)
