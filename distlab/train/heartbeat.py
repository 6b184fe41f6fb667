"""What ranks tell each other after every step, one step late, so that nobody waits for it.

    device   │ step n      │ step n+1      │ step n+2
    host     │ launch n+1 … read the loss of n, exchange it │ launch n+2 …

The host reads the loss of a step only after it has launched the next, and the exchange goes through a gloo group
of its own: on a GPU the queue never runs dry. Every rank gets every rank's message, so all take the same decision
at the same step: to stop because one was asked to, or because one has a loss that is no number.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankContext, collectives


class NonFiniteLoss(ValueError):
    """A loss or gradient norm that is no finite number; names the step and the ranks."""


@dataclass(frozen=True)
class Beat:
    """What all ranks know of a finished step.

    Attributes:
        step: its number, from 0.
        loss: mean over ranks of their mean losses, summed in rank order.
        grad_norm: before clipping; None where it was not taken.
        step_ms: since the end of the step before, on this rank's device.
        stop: the signal that some rank was sent, or None.
    """

    step: int
    loss: float
    grad_norm: float | None
    step_ms: float
    stop: int | None


class Moment:
    """Now, on a device's own clock: when everything queued before is done."""

    def __init__(self, device: torch.device):
        self._host = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def ms_since(self, earlier: "Moment") -> float:
        """Milliseconds from an earlier moment to this one; waits until it has come."""
        if self._event is None:
            return 1e3 * (self._host - earlier._host)
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event)


class Heartbeat:
    """Exchanges losses and stop requests.

    Args:
        context: this rank.
        stop: asked after each step for the signal received, 0 for none.
    """

    def __init__(self, context: RankContext, stop: "StopSignals"):
        self._stop = stop
        self._device = context.device
        timeout = timedelta(seconds=context.timeout_s)
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        self._waiting: tuple[int, Tensor, Moment] | None = None
        self._has_norm = False
        self.restart_clock()

    def restart_clock(self) -> None:
        """The next step's time counts from here, not from the end of the step before (call it when settled)."""
        self._ended = Moment(self._device)

    def note(self, step: int, loss: Tensor, grad_norm: Tensor | None) -> Beat | None:
        """Queue this step's numbers; returns what the step before came to.

        Raises:
            NonFiniteLoss: of the step before, on every rank.
        """
        norm = loss if grad_norm is None else grad_norm.to(loss.device)
        values = torch.stack((loss.detach().double(), norm.detach().double()))
        if self._device.type == "cuda":
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        moment = Moment(self._device)
        before, self._waiting = self.settle(), (step, values, moment)
        self._has_norm = grad_norm is not None
        return before

    def settle(self) -> Beat | None:
        """What the last step came to, now; None if that is known already."""
        if self._waiting is None:
            return None
        (step, values, moment), self._waiting = self._waiting, None
        step_ms, self._ended = moment.ms_since(self._ended), moment
        mine = torch.tensor([*values.tolist(), float(self._stop.received)], dtype=torch.float64)
        everybody = torch.empty(3 * self._group.size(), dtype=torch.float64)
        collectives.wait(collectives.all_gather(everybody, mine, self._group), self._group, "exchanging losses")
        losses, norms, signals = everybody.view(-1, 3).T.tolist()
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            ranks = f"rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
            raise NonFiniteLoss(f"step {step}: the loss is {losses[bad[0]]} on {ranks}")
        if not all(map(math.isfinite, norms)):
            raise NonFiniteLoss(
                f"step {step}: the gradient norm is not finite ({norms[0]}), though all losses are"
            )
        stop = next((int(number) for number in signals if number), None)
        norm = norms[0] if self._has_norm else None
        return Beat(step, sum(losses) / len(losses), norm, step_ms, stop)

    def close(self) -> None:
        """Give back the group; nothing can be exchanged any more."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


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
        which get no signals, nothing happens."""
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
