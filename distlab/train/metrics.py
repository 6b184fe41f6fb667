"""Losses and stop requests that ranks exchange after every step, and the file of the steps.

The exchange is one step late, so that no rank waits for it.

    device   │ step n      │ step n+1      │ step n+2
    host     │ launch n+1 … read the loss of n, exchange it │ launch n+2 …

The host reads the loss of a step only after it has launched the next, and the exchange uses a
separate gloo group. So a GPU's queue never becomes empty. Every rank gets every rank's message, so
all make the same decision at the same step: to stop because a rank was asked to, or because a rank
has a NaN loss.
"""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankContext, collectives
from distlab.files import write_whole
from distlab.measure.clock import Instant, elapsed_ms, instant
from distlab.train.signals import StopSignals

Lines = list[dict[str, Any]]  # lines of a journal, one per step


class NonFiniteLoss(ValueError):
    """A loss or gradient norm that is not finite. The message names the step and the ranks."""


@dataclass(frozen=True)
class StepMetrics:
    """A finished step, as all ranks know it.

    Attributes:
        step: number of optimizer steps done, from 1.
        loss: nats, mean over all tokens of the step: the ranks' means, summed in rank order.
        lr: learning rate of this step.
        grad_norm: norm before clipping. None in a step that the loss scaler skipped.
        step_ms: ms from the end of the step before to the end of this one on this rank's device,
            without validation.
        checkpoint_ms: ms for which `Checkpointer.save` kept the host between the two.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    step_ms: float
    checkpoint_ms: float


class GatheredMetrics:
    """Exchange of losses and stop requests.

    Args:
        context: context of this rank.
        signals: object that is asked after each step for a received signal.
        report: function that is called on every rank with each finished step, one step late.

    Attributes:
        group: process group of all ranks on gloo. None once it is closed.
        stopped_by: number of the signal that some rank was sent, as all ranks know it, or None.
    """

    def __init__(
        self, context: RankContext, signals: StopSignals, report: Callable[[StepMetrics], None]
    ):
        self.stopped_by: int | None = None
        self._signals = signals
        self._report = report
        self._device = context.device
        timeout = timedelta(seconds=context.timeout_s)
        # On gloo, whose messages do not enter the GPU's queue.
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        # The step that was launched last, its (loss, norm) on the host, and the time of its end.
        self._waiting: tuple[StepMetrics, Tensor, Instant] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count the next step's time from here, not from the end of the step before.

        Call it when no work is in flight.
        """
        self._ended = instant(self._device)

    def note(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor | None,
        *,
        lr: float,
        checkpoint_ms: float = 0.0,
    ) -> None:
        """Queue the numbers of the step that was just launched, and finish the step before.

        Raises:
            NonFiniteLoss: the step before had a loss that is not finite. Raised on every rank.
        """
        # A step without a norm sends its loss twice, so that all messages have one size.
        norm = loss if grad_norm is None else grad_norm.to(loss.device)
        # Still on the device, so nothing waits for the step.
        values = torch.stack((loss.detach().double(), norm.detach().double()))
        if self._device.type == "cuda":
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        now = instant(self._device)
        # The step before has ended by now, or will soon, while this one keeps the device busy.
        self.settle()
        known = StepMetrics(step, 0.0, lr, None if grad_norm is None else 0.0, 0.0, checkpoint_ms)
        self._waiting = known, values, now

    def settle(self) -> None:
        """Exchange and report the numbers of the last step now, if that was not done yet."""
        if self._waiting is None:
            return
        known, values, ended = self._waiting
        self._waiting = None
        if self._device.type == "cuda":
            # The copy to the host was queued before this event.
            ended.synchronize()
        step_ms = elapsed_ms(self._ended, ended)
        self._ended = ended
        # A received signal travels with the loss, so that stopping costs no message of its own.
        mine = torch.tensor([*values.tolist(), float(self._signals.received)], dtype=torch.float64)
        # Loss, norm and signal of each rank.
        gathered = torch.empty(3 * self.group.size(), dtype=torch.float64)
        work = collectives.all_gather(gathered, mine, self.group)
        collectives.wait(work, self.group, "exchanging losses")
        losses, norms, signals = gathered.view(-1, 3).T.tolist()
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            ranks = "rank" if len(bad) == 1 else "ranks"
            numbers = ", ".join(str(rank) for rank in bad)
            raise NonFiniteLoss(
                f"step {known.step}: the loss is {losses[bad[0]]} on {ranks} {numbers}"
            )
        if not all(map(math.isfinite, norms)):
            raise NonFiniteLoss(
                f"step {known.step}: the gradient norm is not finite ({norms[0]}), though all "
                "losses are"
            )
        # The first in rank order, so that all ranks end with the same signal.
        self.stopped_by = next((int(number) for number in signals if number), None)
        norm = None if known.grad_norm is None else norms[0]
        self._report(
            # Summed in rank order on every rank: all get the same bits.
            replace(known, loss=sum(losses) / len(losses), grad_norm=norm, step_ms=step_ms)
        )

    def close(self) -> None:
        """Destroy the group. Nothing can be exchanged afterwards."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


class Journal:
    """The file `metrics.jsonl`, a line per step, which one rank writes.

    A restart continues it at the step of the checkpoint.

    Args:
        path: path of the file, which need not exist.
        first_step: number of the first step. Lines of this step and later ones are from a run that
            was lost, and are removed.

    Attributes:
        lines: lines of the file, as this process knows them.
    """

    def __init__(self, path: Path, first_step: int = 0):
        found = read_journal(path) if path.exists() else []
        self.lines = [line for line in found if line["step"] < first_step]
        # Rewritten as a whole, so that a process that dies here leaves the old file or the new one.
        write_whole(path, "".join(json.dumps(line) + "\n" for line in self.lines))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, visible to readers at once."""
        self.lines.append(line)
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            error.filename = self._file.name  # a full disk does not say where
            raise

    def close(self) -> None:
        """Close the file. Every line is on the disk already."""
        self._file.close()


def read_journal(path: Path) -> Lines:
    """Read the lines of a journal, except broken ones, such as the last of a process that died."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            is_step = isinstance(line, dict) and isinstance(line.get("step"), int)
            if is_step and "loss" in line:
                lines.append(line)
    return lines
