"""How long does a collective take, and is its result right? The library's, and those of `distlab.comm.ring`.

The payload S of a collective is what `recorder` counts: the tensor of an all-reduce or broadcast, the output of an
all-gather, the input of a reduce-scatter. Bandwidths, as nccl-tests define them:

    algbw = S / seconds        busbw = algbw · `traffic`, the share of S that the busiest link carries
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.comm import RankContext, collectives, ring
from distlab.measure.timing import measure, slowest_rank

LIBRARY = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
BY_HAND = ("ring_all_reduce", "ring_all_gather", "ring_reduce_scatter", "whole_all_reduce")
OPERATIONS = LIBRARY + BY_HAND
TINY = 1e-30  # sums grow with every repetition: from here they stay finite
LEAST_REPEATS = 5


def traffic(operation: str, ranks: int) -> float:
    """Share of the payload that a link carries in one direction, by the best algorithm there is.

    The whole-tensor ring counts as an all-reduce, so that its bus bandwidth shows what it wastes.

    Raises:
        ValueError: an unknown operation.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation {operation!r} is unknown; choose among {', '.join(OPERATIONS)}")
    if ranks == 1:
        return 0.0
    if operation == "broadcast":
        return 1.0
    return (2 if operation.endswith("all_reduce") else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class CollectiveTiming:
    """Samples of one collective.

    Attributes:
        operation: its name.
        num_bytes: S, as sent: a multiple of the ranks' number of elements.
        ranks: of the group.
        samples_ms: each that of the slowest rank.
        max_abs_error: of the result against the expected one, over all ranks; values are small integers, so 0.
    """

    operation: str
    num_bytes: int
    ranks: int
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
    case = _case(context, operation, -(-num_bytes // (4 * context.world_size)) * context.world_size)
    error = max(collectives.gather_objects(case.error(), context.group))
    case.refill()
    (first,) = _slowest(measure(case.call, warmup=warmup, repeats=1, device=context.device), context)
    count = min(repeats, max(LEAST_REPEATS, int(budget_s * 1e3 / max(first, 1e-6))))
    samples = _slowest(measure(case.call, warmup=0, repeats=count, device=context.device), context)
    return CollectiveTiming(operation, case.num_bytes, context.world_size, samples, error)


def _slowest(samples: list[float], context: RankContext) -> list[float]:
    return slowest_rank(samples, context.group, context.device)


@dataclass
class _Case:
    """Tensors with values that betray a piece in the wrong place, and the collective on them."""

    call: Callable[[], None]
    source: Tensor  # what this rank contributes
    result: Tensor
    expected: Callable[[], Tensor]
    pattern: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return 4 * max(self.source.numel(), self.result.numel())

    def error(self) -> float:
        self.source.copy_(self.pattern())
        self.call()
        return (self.result - self.expected()).abs_().max().item()

    def refill(self) -> None:
        self.source.copy_(self.pattern()).mul_(TINY)


def _case(context: RankContext, operation: str, numel: int) -> _Case:
    group, rank, ranks, device = context.group, context.rank, context.world_size, context.device
    kind = operation.removeprefix("ring_").removeprefix("whole_")

    def values(of_rank: float, share: slice = slice(None)) -> Tensor:
        return (torch.arange(numel, device=device, dtype=torch.float32)[share] % 251).add_(of_rank)

    piece = numel // ranks
    own = slice(rank * piece, (rank + 1) * piece)
    whole = torch.empty(numel, device=device)
    averages = operation in LIBRARY and collectives.averages_in_reduction(device, group)
    factor = 1 / ranks if averages else 1.0

    def total(share: slice) -> Tensor:
        return values(0, share).mul_(ranks).add_(ranks * (ranks - 1) / 2).mul_(factor)

    if kind == "all_reduce":
        calls = {
            "all_reduce": lambda: collectives.all_reduce_mean(whole, group, prescaled=True).wait(),
            "ring_all_reduce": lambda: ring.all_reduce(whole, group),
            "whole_all_reduce": lambda: ring.all_reduce_whole(whole, group),
        }
        return _Case(calls[operation], whole, whole, lambda: total(slice(None)), lambda: values(rank))
    if kind == "broadcast":
        call = lambda: collectives.broadcast(whole, group).wait()  # noqa: E731
        return _Case(call, whole, whole, lambda: values(0), lambda: values(rank))
    part = torch.empty(piece, device=device)
    if kind == "all_gather":
        calls = {
            "all_gather": lambda: collectives.all_gather(whole, part, group).wait(),
            "ring_all_gather": lambda: ring.all_gather(whole, part, group),
        }
        everyone = torch.arange(ranks, device=device).repeat_interleave(piece)
        return _Case(
            calls[operation], part, whole, lambda: values(0).add_(everyone), lambda: values(rank, own)
        )
    calls = {
        "reduce_scatter": lambda: collectives.reduce_scatter_mean(part, whole, group, prescaled=True).wait(),
        "ring_reduce_scatter": lambda: ring.reduce_scatter(part, whole, group),
    }
    return _Case(calls[operation], whole, part, lambda: total(own), lambda: values(rank))
