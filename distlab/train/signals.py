"""SIGTERM, SIGINT, SIGHUP and SIGQUIT end a run after its step, with a checkpoint, instead of in the middle of it."""

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
    """Remembers such a signal instead of dying of it.

    A main thread that waits in a collective for a dead rank never gets to see a signal; then the
    process ends after `GRACE_S`, and the agent need not wait 30 s before it kills it.

    Args:
        answers: whether a line says at once that the signal has come, since a step may take long;
            of several ranks one does.
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
