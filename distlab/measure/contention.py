"""How much do computation and communication slow each other down?

A queue of all-reduces is put on the wire, and computation runs beside it for t seconds, in which it does what takes
m seconds alone: its rate is p = m/t. The queue outlasts it and is done after T seconds, instead of C alone. All that
lies outside of t ran undisturbed, so in t the queue has done what takes C − (T − t) alone: its rate is
q = (C − (T − t))/t. No second clock and no stream of its own is needed, so gloo and NCCL are measured alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from distlab.comm import RankContext, collectives
from distlab.measure.timing import PhaseTimer, slowest_rank


@dataclass(frozen=True)
class Disturbance:
    """Milliseconds of one computation and one all-reduce, alone and beside each other."""

    compute_alone_ms: float
    compute_beside_ms: float
    comm_alone_ms: float
    comm_beside_ms: float

    @property
    def compute_rate(self) -> float:
        """p in (0, 1]; 1 means undisturbed."""
        return min(1.0, self.compute_alone_ms / self.compute_beside_ms)

    @property
    def communication_rate(self) -> float:
        """q in (0, 1]."""
        return min(1.0, self.comm_alone_ms / self.comm_beside_ms)


def disturb(
    context: RankContext,
    compute: Callable[[], object],
    num_bytes: int,
    *,
    least_ms: float = 20.0,
    rounds: int = 3,
) -> Disturbance:
    """Time `compute()` and all-reduces of `num_bytes`, alone and together. Every rank calls it.

    Args:
        compute: queues work on the current stream; called often enough to last `least_ms`.
        num_bytes: of each all-reduce; as many are queued as outlast twice the computation.
        rounds: medians are taken over so many.
    """
    # Sums of zeros stay zeros; where the backend averages, ones stay ones and draw the power of real data.
    value = 1.0 if collectives.averages_in_reduction(context.device, context.group) else 0.0
    # gloo runs two messages at a time, which must not be one tensor.
    tensors = [torch.full((max(1, num_bytes // 4),), value, device=context.device) for _ in range(2)]
    bench = _Bench(context, compute, tensors)
    once_ms, message_ms = median(bench.alone(1)[1:]), median(bench.queue(1, beside=0)[0] for _ in range(4))
    calls = max(1, round(least_ms / once_ms))
    messages = max(2, round(3 * calls * once_ms / message_ms))
    alone_ms = median(bench.alone(calls))
    queue_ms = median(bench.queue(messages, beside=0)[0] for _ in range(rounds))
    runs = [bench.queue(messages, beside=calls) for _ in range(rounds)]
    beside_ms = median(compute_ms for _, compute_ms in runs)
    rate = median(rate_beside(queue_ms, total_ms, compute_ms) for total_ms, compute_ms in runs)
    return Disturbance(alone_ms / calls, beside_ms / calls, queue_ms / messages, queue_ms / messages / rate)


def rate_beside(alone_ms: float, total_ms: float, beside_ms: float) -> float:
    """q, between 0.05 and 1: a queue of `alone_ms` took `total_ms`, of which `beside_ms` beside computation."""
    return min(1.0, max(0.05, (alone_ms - (total_ms - beside_ms)) / beside_ms))


class _Bench:
    def __init__(self, context: RankContext, compute: Callable[[], object], tensors: list[torch.Tensor]):
        self.context, self.compute, self.tensors = context, compute, tensors
        for _ in range(2):
            compute()

    def alone(self, calls: int, rounds: int = 3) -> list[float]:
        """ms of `calls` computations, once per round."""
        timer = PhaseTimer(self.context.device)
        for _ in range(rounds):
            timer.start()
            for _ in range(calls):
                self.compute()
            timer.mark("compute")
        return self._slowest([step["compute"] for step in timer.steps()])

    def queue(self, messages: int, *, beside: int) -> tuple[float, float]:
        """ms from the first of `messages` to the end of all, and of `beside` computations meanwhile."""
        context = self.context
        collectives.all_ranks_agree(True, context.device, context.group)  # start together
        timer = PhaseTimer(context.device)
        timer.synchronize()
        timer.start()
        works = [
            collectives.all_reduce_mean(self.tensors[number % 2], context.group, prescaled=True)
            for number in range(messages)
        ]
        timer.mark("queued")
        for _ in range(beside):
            self.compute()
        timer.mark("compute")
        for work in works:
            work.wait()
        timer.mark("rest")
        (step,) = timer.steps()
        total, compute = self._slowest([step["step"], step["compute"]])
        return total, compute

    def _slowest(self, samples: list[float]) -> list[float]:
        return slowest_rank(samples, self.context.group, self.context.device)
