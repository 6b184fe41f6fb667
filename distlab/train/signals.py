"""End a run at SIGTERM, SIGINT, SIGHUP or SIGQUIT after its step, with a checkpoint."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from distlab.cli_errors import answered

GRACE_S = 5.0  # until the main thread must have noticed


class StopSignals:
    """Handler that remembers such a signal and does not end the process.

    A main thread that waits in a collective for a dead rank never sees a signal. Then the process
    ends after `GRACE_S`, so that the agent does not wait 30 s before it kills it.

    Args:
        answers: True to print a line when the signal arrives, because a step may take long. One of
            several ranks does.
    """

    def __init__(self, *, answers: bool = False) -> None:
        self.received = 0
        self.answers = answers

    @contextmanager
    def caught(self) -> Iterator["StopSignals"]:
        """Catch them inside; the handlers before come back afterwards.

        In threads other than the main one, which get no signals, nothing happens.
        """
        with answered(self._note, self._hear):
            yield self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def _hear(self, number: int) -> None:
        if self.answers:
            self.answers = False  # once
            name = signal.Signals(number).name
            print(
                f"asked to stop ({name}): this step is finished, then a checkpoint written",
                file=sys.stderr,
                flush=True,
            )
        deadline = time.monotonic() + GRACE_S
        while not self.received and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self.received:
            print(
                "asked to stop while waiting for another rank; ending now",
                file=sys.stderr,
                flush=True,
            )
            os._exit(128 + number)
