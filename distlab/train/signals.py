"""SIGTERM and SIGINT end a run after its step, with a checkpoint, instead of in the middle of it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignals:
    """Remembers a SIGTERM or SIGINT instead of dying of it.

    A main thread that waits in a collective for a dead rank never gets to see a signal; then the process ends
    after `grace_s`, and the agent need not wait 30 s before it kills it.

    Args:
        grace_s: seconds until the main thread must have noticed.
        answers: whether a line says at once that the signal has come, since a step may take long; of several ranks
            one does.
    """

    def __init__(self, grace_s: float = 5.0, *, answers: bool = False) -> None:
        self.received = 0
        self.grace_s, self.answers = grace_s, answers

    @contextmanager
    def caught(self) -> Iterator["StopSignals"]:
        """Catch them inside; the handlers before come back afterwards. In threads other than the main one,
        which get no signals, nothing happens.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old = signal.set_wakeup_fd(writer)  # written by the C handler, whatever the main thread is doing
        watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writer)
            watcher.join()
            os.close(reader)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def _watch(self, reader: int) -> None:
        answered = not self.answers
        while arrived := os.read(reader, 1):
            if not answered and arrived[0] in (signal.SIGTERM, signal.SIGINT):
                answered = True
                name = signal.Signals(arrived[0]).name
                print(f"asked to stop ({name}): this step is finished, then a checkpoint written", file=sys.stderr,
                      flush=True)  # fmt: skip
            deadline = time.monotonic() + self.grace_s
            while not self.received and time.monotonic() < deadline:
                time.sleep(0.05)
            if not self.received and arrived[0] in (signal.SIGTERM, signal.SIGINT):
                print("asked to stop while waiting for another rank; ending now", file=sys.stderr, flush=True)
                os._exit(128 + arrived[0])
