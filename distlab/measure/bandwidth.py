"""How long does a collective take, and is its result right?

The collectives are the library's and those of `distlab.comm.ring`.

The payload S of a collective is the larger of what a rank contributes and of its result: the tensor
of an all-reduce, broadcast, reduce or all-to-all, the output of an (all-)gather, the input of a
(reduce-)scatter. Bandwidths, as nccl-tests define them:

    algbw = S / seconds        busbw = algbw · `traffic`, the share of S that the busiest link carries

How much do computation and communication slow each other down?

A queue of messages is started, and computation runs at the same time for t seconds, in which it
does work that takes m seconds alone: its rate is p = m/t. The queue lasts longer and is done after
T seconds, instead of C alone. Outside of t it ran undisturbed, so in t the queue has done work that
takes C − (T − t) alone: its rate is q = (C − (T − t))/t. Neither a second clock nor a separate
stream is needed, so gloo and NCCL are measured in the same way.
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

# Each from what this rank contributes to its result, which are one tensor where the collective
# works in place.
_CALLS: dict[str, Callable[[Tensor, Tensor, ProcessGroup], object]] = {
    "all_reduce": lambda whole, _, group: collectives.all_reduce_mean(
        whole, group, prescaled=True
    ).wait(),
    "all_gather": lambda part, whole, group: collectives.all_gather(whole, part, group).wait(),
    "reduce_scatter": lambda whole, part, group: collectives.reduce_scatter_mean(
        part, whole, group, prescaled=True
    ).wait(),
    "broadcast": lambda whole, _, group: collectives.broadcast(whole, group).wait(),
    "reduce": lambda whole, _, group: collectives.reduce(whole, group).wait(),
    "gather": lambda part, whole, group: collectives.gather(whole, part, group).wait(),
    "scatter": lambda whole, part, group: collectives.scatter(part, whole, group).wait(),
    "all_to_all": lambda sent, received, group: collectives.all_to_all(
        received, sent, group
    ).wait(),
    "ring_all_reduce": lambda whole, _, group: ring.all_reduce(whole, group),
    "ring_all_gather": lambda part, whole, group: ring.all_gather(whole, part, group),
    "ring_reduce_scatter": lambda whole, part, group: ring.reduce_scatter(part, whole, group),
    "whole_all_reduce": lambda whole, _, group: ring.all_reduce_whole(whole, group),
}
OPERATIONS = tuple(_CALLS)
BY_HAND = OPERATIONS[8:]  # the others are the library's
TINY = 1e-30  # sums grow with every repetition: from here they stay finite
LEAST_REPEATS = 5


def traffic(operation: str, ranks: int) -> float:
    """Share of the payload that a link carries in one direction, by the best algorithm there is.

    The whole-tensor ring counts as an all-reduce, so that its bus bandwidth shows what it wastes.

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
    return (2 if operation.endswith("all_reduce") else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class CollectiveTiming:
    """Samples of one collective.

    Attributes:
        num_bytes: S in bytes, as sent: a multiple of the ranks' number of elements.
        samples_ms: ms of each call, on the slowest rank.
        max_abs_error: largest error of the result over all ranks. Values are small integers, so it
            is 0.
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
        num_bytes: S; rounded up to a whole number of fp32 elements per rank.
        repeats: at most; fewer (at least five) where they would take longer than `budget_s`.

    Raises:
        ValueError: an unknown operation or no bytes.
        torch.OutOfMemoryError: on every rank, if the tensors do not fit on one.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: give at least one")
    traffic(operation, context.world_size)
    chunk = -(-num_bytes // (4 * context.world_size))
    call, source, result, pattern, expected = _case(context, operation, chunk)
    source.copy_(pattern())
    call()
    error = max(
        collectives.gather_objects((result - expected()).abs_().max().item(), context.group)
    )
    source.copy_(pattern()).mul_(TINY)
    (first,) = _slowest(measure(call, warmup=warmup, repeats=1, device=context.device), context)
    count = min(repeats, max(LEAST_REPEATS, int(budget_s * 1e3 / max(first, 1e-6))))
    samples = _slowest(measure(call, warmup=0, repeats=count, device=context.device), context)
    return CollectiveTiming(4 * chunk * context.world_size, samples, error)


def _slowest(samples: list[float], context: RankContext) -> list[float]:
    return slowest_rank(samples, context.group, context.device)


def _case(
    context: RankContext, operation: str, chunk: int
) -> tuple[Call, Tensor, Tensor, Callable[[], Tensor], Callable[[], Tensor]]:
    """Return a collective on `chunk` elements per rank, with values that reveal misplaced chunks.

    Returns:
            The call, this rank's contribution, the result, and functions that make the values of
        each.
    """
    group, rank, ranks, device = context.group, context.rank, context.world_size, context.device
    kind = operation.removeprefix("ring_").removeprefix("whole_")
    everything, own = slice(None), slice(rank * chunk, (rank + 1) * chunk)
    sent = own if kind in ("all_gather", "gather") else everything
    received = own if kind in ("reduce_scatter", "scatter") else everything
    source = torch.empty(chunk if sent == own else ranks * chunk, device=device)
    in_place = kind in ("all_reduce", "broadcast", "reduce")
    result = (
        source
        if in_place
        else torch.zeros(chunk if received == own else ranks * chunk, device=device)
    )

    def values(share: slice) -> Tensor:
        return torch.arange(ranks * chunk, device=device, dtype=torch.float32)[share] % 251

    def expected() -> Tensor:
        if kind in ("reduce", "gather") and rank > 0:
            return result  # rank 0 alone has one
        found = values(own).repeat(ranks) if kind == "all_to_all" else values(received)
        if kind in ("broadcast", "scatter"):
            return found
        if kind in ("all_gather", "gather", "all_to_all"):  # the k-th part is rank k's
            return found.add_(torch.arange(ranks, device=device).repeat_interleave(chunk))
        averages = operation in (
            "all_reduce",
            "reduce_scatter",
        ) and collectives.averages_in_reduction(device, group)
        return found.mul_(ranks).add_(ranks * (ranks - 1) / 2).mul_(1 / ranks if averages else 1.0)

    return (
        lambda: _CALLS[operation](source, result, group),
        source,
        result,
        lambda: values(sent).add_(rank),
        expected,
    )


def disturb(
    context: RankContext,
    compute: Call,
    send: Callable[[int], Any],
    *,
    least_ms: float,
    rounds: int,
) -> dict[str, float]:
    """Time `compute()` and messages, alone and together. Every rank calls it.

    Returns:
            Metrics: milliseconds of one computation and of one message, alone and at the same time;
        the rates of both, p and q in (0, 1], where 1 means undisturbed; and the spread in % of the
        computation's times during messages around their median.

    Args:
        compute: function that queues work on the current stream. It is called often enough to last
            `least_ms`.
        send: function that begins the message of a given number and returns an object to `wait()`
            for. Enough messages are queued to outlast twice the computation. Two that follow each
            other may not use one tensor, because gloo runs two at a time.
        rounds: number of rounds, over which medians are taken.
    """

    def alone(calls: int) -> list[float]:
        """Return ms of `calls` computations, three times."""
        timer = PhaseTimer(context.device)
        for _ in range(3):
            timer.start()
            for _ in range(calls):
                compute()
            timer.mark("compute")
        return _slowest([step["compute"] for step in timer.steps()], context)

    def queue(messages: int, *, beside: int) -> tuple[float, float]:
        """Return ms until all `messages` have ended, and ms of `beside` computations meanwhile."""
        collectives.all_ranks_agree(True, context.device, context.group)  # start together
        timer = PhaseTimer(context.device)
        timer.synchronize()
        timer.start()
        works = [send(number) for number in range(messages)]
        timer.mark("queued")
        for _ in range(beside):
            compute()
        timer.mark("compute")
        for work in works:
            work.wait()
        timer.mark("rest")
        (step,) = timer.steps()
        total, compute_ms = _slowest([step["step"], step["compute"]], context)
        return total, compute_ms

    for _ in range(2):
        compute()
    once_ms, message_ms = median(alone(1)[1:]), median(queue(1, beside=0)[0] for _ in range(4))
    calls = max(1, round(least_ms / once_ms))
    messages = max(2, round(3 * calls * once_ms / message_ms))
    alone_ms = median(alone(calls))
    queue_ms = median(queue(messages, beside=0)[0] for _ in range(rounds))
    runs = [queue(messages, beside=calls) for _ in range(rounds)]
    times = sorted(compute_ms for _, compute_ms in runs)
    beside_ms = median(times)
    rate = median(rate_beside(queue_ms, total_ms, compute_ms) for total_ms, compute_ms in runs)
    return {
        "compute_alone_ms": alone_ms / calls,
        "compute_beside_ms": beside_ms / calls,
        "comm_alone_ms": queue_ms / messages,
        "comm_beside_ms": queue_ms / messages / rate,
        "compute_rate": min(1.0, alone_ms / beside_ms),
        "communication_rate": rate,
        "compute_noise_pct": 50 * (times[-1] - times[0]) / beside_ms,
    }


def computations(side: int, device: torch.device) -> dict[str, Call]:
    """Return work to run during messages: one bound by arithmetic, one by memory.

    Both use matrices with this side.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b, out = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    source = torch.randn(side * side, device=device)
    target = torch.empty_like(source)
    return {"matmul": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}


def rate_beside(alone_ms: float, total_ms: float, beside_ms: float) -> float:
    """Return q, between 0.05 and 1, for a queue of `alone_ms` that took `total_ms`.

    Computation ran for `beside_ms` of it.
    """
    return min(1.0, max(0.05, (alone_ms - (total_ms - beside_ms)) / beside_ms))
