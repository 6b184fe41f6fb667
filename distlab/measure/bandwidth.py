"""How long does a collective take, and is its result right?

The collectives are the library's and those of `distlab.comm.ring`. `time_collective` measures one.

The payload S of a collective is the larger of what a rank contributes and of its result: the tensor
of an all-reduce, broadcast, reduce or all-to-all, the output of an (all-)gather, the input of a
(reduce-)scatter. Bandwidths, as nccl-tests define them:

    algbw = S / seconds
    busbw = algbw · `traffic`, the share of S that the busiest link carries

How much do computation and communication slow each other down?

`disturb` starts a queue of messages. At the same time, computation runs for t seconds. Alone, the
same computation takes m seconds, so its rate is p = m/t. The queue takes T seconds, instead of C
alone. Outside of t it ran undisturbed, for T − t seconds. So in t it did work that takes
C − (T − t) seconds alone, and its rate is q = (C − (T − t))/t. This needs neither a second clock
nor a separate stream, so gloo and NCCL are measured in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import RankContext, collectives, ring
from distlab.measure.clock import Call, PhaseTimer, measure, slowest_rank

TINY = 1e-30  # sums in place grow with every repetition. From values this small they stay finite
LEAST_REPEATS = 5


# One function per operation. `source` is what this rank contributes, and `result` what it gets.
# Where a collective works in place, the two are one tensor.


def _all_reduce(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.all_reduce_mean(source, group, prescaled=True).wait()


def _all_gather(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.all_gather(result, source, group).wait()


def _reduce_scatter(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.reduce_scatter_mean(result, source, group, prescaled=True).wait()


def _broadcast(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.broadcast(source, group).wait()


def _reduce(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.reduce(source, group).wait()


def _gather(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.gather(result, source, group).wait()


def _scatter(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.scatter(result, source, group).wait()


def _all_to_all(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    collectives.all_to_all(result, source, group).wait()


def _ring_all_reduce(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    ring.all_reduce(source, group)


def _ring_all_gather(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    ring.all_gather(result, source, group)


def _ring_reduce_scatter(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    ring.reduce_scatter(result, source, group)


def _whole_all_reduce(source: Tensor, result: Tensor, group: ProcessGroup) -> None:
    ring.all_reduce_whole(source, group)


_Collective = Callable[[Tensor, Tensor, ProcessGroup], None]
_LIBRARY: dict[str, _Collective] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
_HAND_WRITTEN: dict[str, _Collective] = {
    "ring_all_reduce": _ring_all_reduce,
    "ring_all_gather": _ring_all_gather,
    "ring_reduce_scatter": _ring_reduce_scatter,
    "whole_all_reduce": _whole_all_reduce,
}
_COLLECTIVES = _LIBRARY | _HAND_WRITTEN
OPERATIONS = tuple(_COLLECTIVES)
BY_HAND = tuple(_HAND_WRITTEN)


def traffic(operation: str, ranks: int) -> float:
    """Return the share of the payload that a link carries in one direction.

    It is that of the best algorithm there is, as nccl-tests derive it (doc/PERFORMANCE.md). The
    whole-tensor ring counts as an all-reduce, so that its bus bandwidth shows what it wastes.

    Raises:
        ValueError: an unknown operation.
    """
    if operation not in OPERATIONS:
        raise ValueError(
            f"operation {operation!r} is unknown; choose among {', '.join(OPERATIONS)}"
        )
    if ranks == 1:
        return 0.0
    if operation in ("broadcast", "reduce"):
        return 1.0
    # Each rank keeps its own of the `ranks` parts and sends, or receives, the others. An all-reduce
    # does so twice: it is a reduce-scatter and an all-gather.
    passes = 2 if operation.endswith("all_reduce") else 1
    return passes * (ranks - 1) / ranks


@dataclass(frozen=True)
class CollectiveTiming:
    """Samples of one collective.

    Attributes:
        num_bytes: S in bytes, as sent: a whole number of elements per rank.
        samples_ms: ms of each call, on the slowest rank.
        max_abs_error: maximum error of the result over all ranks. Values are small integers, so it
            is 0 if the result is right.
    """

    num_bytes: int
    samples_ms: list[float]
    max_abs_error: float


def time_collective(
    context: RankContext,
    operation: str,
    num_bytes: int,
    *,
    warmup: int = 3,
    repeats: int = 20,
    budget_s: float = 1.0,
) -> CollectiveTiming:
    """Check the result once, then time repetitions. Every rank of `context` calls it.

    Args:
        context: ranks that take part, and the device of their tensors.
        operation: name in `OPERATIONS`.
        num_bytes: S in bytes, rounded up to a whole number of fp32 elements per rank.
        warmup: number of calls before the timed ones.
        repeats: maximum number of timed calls. There are fewer (at least five) if they would take
            longer than `budget_s`.
        budget_s: seconds for the timed calls.

    Raises:
        ValueError: an unknown operation or no bytes.
        torch.OutOfMemoryError: on every rank, if the tensors do not fit on one.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: give at least one")
    traffic(operation, context.world_size)  # raises for an unknown operation
    bytes_per_element = 4 * context.world_size  # one fp32 element on each rank
    chunk = -(-num_bytes // bytes_per_element)  # rounded up
    case = _case(context, operation, chunk)

    # Values that reveal misplaced chunks serve for one call. Repeated sums of them would overflow.
    case.source.copy_(case.values_to_send())
    case.call()
    error = (case.result - case.expected()).abs_().max().item()
    errors = collectives.gather_objects(error, context.group)

    case.source.copy_(case.values_to_send()).mul_(TINY)
    # The first call's time decides how many calls fit into the budget. All ranks see the same time.
    first = measure(case.call, warmup=warmup, repeats=1, device=context.device)
    (first_ms,) = _slowest(first, context)
    fitting = int(budget_s * 1e3 / max(first_ms, 1e-6))
    count = min(repeats, max(LEAST_REPEATS, fitting))
    samples = measure(case.call, warmup=0, repeats=count, device=context.device)
    return CollectiveTiming(
        num_bytes=bytes_per_element * chunk,
        samples_ms=_slowest(samples, context),
        max_abs_error=max(errors),
    )


def _slowest(samples: list[float], context: RankContext) -> list[float]:
    return slowest_rank(samples, context.group, context.device)


# Collectives in which a rank contributes, or gets, one chunk instead of all chunks.
_SEND_ONE_CHUNK = ("all_gather", "gather")
_RECEIVE_ONE_CHUNK = ("reduce_scatter", "scatter")
_ALL_CHUNKS = slice(None)


@dataclass(frozen=True)
class _Case:
    """One collective, with values that reveal chunks in a wrong place.

    Attributes:
        context: ranks that take part.
        operation: name in `OPERATIONS`.
        chunk: number of elements per rank.
        source: what this rank contributes.
        result: tensor of the result. It is `source` if the collective works in place.
    """

    context: RankContext
    operation: str
    chunk: int
    source: Tensor
    result: Tensor

    @property
    def kind(self) -> str:
        """Name of the collective, without its implementation."""
        return _kind(self.operation)

    def call(self) -> None:
        """Run the collective and wait for it."""
        _COLLECTIVES[self.operation](self.source, self.result, self.context.group)

    def values_to_send(self) -> Tensor:
        """Return the values for `source`: each element is its position plus the rank."""
        part = self._own if self.kind in _SEND_ONE_CHUNK else _ALL_CHUNKS
        return self._positions(part).add_(self.context.rank)

    def expected(self) -> Tensor:
        """Return the right values of `result`, for `values_to_send` on all ranks."""
        rank, ranks, device = self.context.rank, self.context.world_size, self.context.device
        if self.kind in ("reduce", "gather") and rank > 0:
            return self.result  # only rank 0 has a result to check
        if self.kind == "all_to_all":
            # The k-th part is the one that rank k has for this rank.
            found = self._positions(self._own).repeat(ranks)
        else:
            part = self._own if self.kind in _RECEIVE_ONE_CHUNK else _ALL_CHUNKS
            found = self._positions(part)
        if self.kind in ("broadcast", "scatter"):
            return found  # from rank 0, which adds 0
        if self.kind in ("all_gather", "gather", "all_to_all"):
            # The k-th part comes from rank k, which adds k.
            sender = torch.arange(ranks, device=device).repeat_interleave(self.chunk)
            return found.add_(sender)
        # The sum over all ranks: the same position from each, and 0 + 1 + … + (ranks − 1).
        found = found.mul_(ranks).add_(ranks * (ranks - 1) / 2)
        # The library's two may already divide by the ranks. The rings never do.
        library_mean = self.operation in ("all_reduce", "reduce_scatter")
        if library_mean and collectives.averages_in_reduction(device, self.context.group):
            found.mul_(1 / ranks)
        return found

    @property
    def _own(self) -> slice:
        """Positions of this rank's chunk."""
        start = self.context.rank * self.chunk
        return slice(start, start + self.chunk)

    def _positions(self, part: slice) -> Tensor:
        """Return the positions modulo 251 of a part of all chunks."""
        numel = self.context.world_size * self.chunk
        positions = torch.arange(numel, device=self.context.device, dtype=torch.float32)
        # Small integers, of which fp32 sums are exact. 251 is a prime: it does not divide the usual
        # sizes of chunks, so two chunks differ.
        return positions[part] % 251


def _kind(operation: str) -> str:
    """Return the collective that an operation implements: `ring_all_reduce` → `all_reduce`."""
    return operation.removeprefix("ring_").removeprefix("whole_")


def _case(context: RankContext, operation: str, chunk: int) -> _Case:
    """Allocate the tensors of a collective on `chunk` elements per rank."""
    kind = _kind(operation)
    everything = context.world_size * chunk
    source_numel = chunk if kind in _SEND_ONE_CHUNK else everything
    source = torch.empty(source_numel, device=context.device)
    if kind in ("all_reduce", "broadcast", "reduce"):
        result = source  # in place
    else:
        result_numel = chunk if kind in _RECEIVE_ONE_CHUNK else everything
        result = torch.zeros(result_numel, device=context.device)
    return _Case(context=context, operation=operation, chunk=chunk, source=source, result=result)


def disturb(
    context: RankContext,
    compute: Call,
    send: Callable[[int], Any],
    *,
    least_ms: float,
    rounds: int,
) -> dict[str, float]:
    """Time `compute()` and messages, alone and together. Every rank calls it.

    Args:
        context: ranks that take part.
        compute: function that queues work on the current stream. It is called often enough to last
            `least_ms`.
        send: function that begins the message of a given number and returns an object to `wait()`
            for. Two messages that follow each other may not use one tensor, because gloo runs two
            at a time.
        least_ms: ms of computation in each round, about.
        rounds: number of rounds, over which medians are taken.

    Returns:
        Metrics. `…_alone_ms` and `…_beside_ms`: ms of one computation and of one message, alone and
        at the same time. `…_rate`: p and q, from 0 to 1, where 1 means undisturbed.
        `compute_noise_pct`: half the range of the computation's times during messages, in % of
        their median.
    """

    def alone(calls: int) -> list[float]:
        """Return the ms of `calls` computations, three times."""
        timer = PhaseTimer(context.device)
        for _ in range(3):
            timer.start()
            for _ in range(calls):
                compute()
            timer.mark("compute")
        return _slowest([step["compute"] for step in timer.steps()], context)

    def queue(messages: int, *, compute_calls: int) -> tuple[float, float]:
        """Return the ms of a queue of messages, and of the computations during it."""
        collectives.all_ranks_agree(True, context.device, context.group)  # all ranks start together
        timer = PhaseTimer(context.device)
        timer.synchronize()
        timer.start()
        # Messages first, so that they are in flight when the computation starts.
        works = [send(number) for number in range(messages)]
        timer.mark("queued")
        for _ in range(compute_calls):
            compute()
        timer.mark("compute")
        for work in works:
            work.wait()
        timer.mark("rest")
        (step,) = timer.steps()
        total_ms, compute_ms = _slowest([step["step"], step["compute"]], context)
        return total_ms, compute_ms

    def queue_alone(messages: int, times: int) -> float:
        """Return the median ms of a queue of messages without computation."""
        totals = []
        for _ in range(times):
            total_ms, _ = queue(messages, compute_calls=0)
            totals.append(total_ms)
        return median(totals)

    for _ in range(2):
        compute()  # warm-up
    # Without the first, which may still compile or allocate.
    once_ms = median(alone(1)[1:])
    message_ms = queue_alone(1, times=4)
    calls = max(1, round(least_ms / once_ms))
    # Three times as long as the computation alone: the queue must outlast the computation, which
    # the messages slow down.
    messages = max(2, round(3 * calls * once_ms / message_ms))

    alone_ms = median(alone(calls))
    queue_ms = queue_alone(messages, times=rounds)
    compute_times, rates = [], []
    for _ in range(rounds):
        total_ms, compute_ms = queue(messages, compute_calls=calls)
        compute_times.append(compute_ms)
        rates.append(rate_beside(queue_ms, total_ms, compute_ms))
    beside_ms = median(compute_times)
    rate = median(rates)
    compute_range_ms = max(compute_times) - min(compute_times)
    return {
        "compute_alone_ms": alone_ms / calls,
        "compute_beside_ms": beside_ms / calls,
        "comm_alone_ms": queue_ms / messages,
        "comm_beside_ms": queue_ms / messages / rate,
        # Noise can make the computation faster next to messages than alone.
        "compute_rate": min(1.0, alone_ms / beside_ms),
        "communication_rate": rate,
        # Half of the range, as a percentage: 100 / 2.
        "compute_noise_pct": 50 * compute_range_ms / beside_ms,
    }


def computations(side: int, device: torch.device) -> dict[str, Call]:
    """Return work to run during messages: one bound by arithmetic, one by memory.

    Args:
        side: rows and columns of the matrices that both use.
        device: device of the matrices.
    """
    # Most CPUs emulate bf16, and would time the conversions.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    out = torch.randn(side, side, device=device).to(dtype)
    source = torch.randn(side * side, device=device)
    target = torch.empty_like(source)

    def matmul() -> None:
        torch.mm(a, b, out=out)

    def copy() -> None:
        target.copy_(source)

    return {"matmul": matmul, "copy": copy}


def rate_beside(alone_ms: float, total_ms: float, beside_ms: float) -> float:
    """Return the rate q of a queue during computation, from 0.05 to 1.

    Args:
        alone_ms: ms of the queue without computation, C in the module's docstring.
        total_ms: ms of the queue with computation, T.
        beside_ms: ms of the computation, t.
    """
    done_meanwhile_ms = alone_ms - (total_ms - beside_ms)
    # Noise can make it more than 1, or less than 0. Times are divided by it, so it is not 0.
    return min(1.0, max(0.05, done_meanwhile_ms / beside_ms))
