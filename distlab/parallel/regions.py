"""Where a tensor passes from one way of being shared to another: autograd Functions, forward and backward.

    S  sharded: each rank has its part          R  replicated: every rank has the same
    P  partial: the value is the sum over ranks

    Function    forward    backward of the gradient
    Enter       S → R      P → S      all-gather; reduce-scatter
    Leave       P → S      S → R      reduce-scatter; all-gather
    Share       R → R      P → R      nothing; all-reduce: a weight that ranks use on different parts of a sequence
    Total       P → R      R → R      all-reduce; nothing: every rank computes the same loss from the sum
    Gather      S → R      R → S      all-gather; its own part: what follows is the same on every rank
    SwapHeads   sequence ↔ heads      all-to-all; all-to-all

Whether a gradient arrives as R or P is what the five with a sum or without one differ in, and what
a loss does not show: an all-reduce too many doubles every gradient and leaves the loss as it is.

Each dimension `dim` is divided evenly by rank. Compiled code calls these as they are, in between
its graphs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from distlab.comm import collectives


def gathered(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Every rank's `x`, concatenated along `dim` in rank order."""
    parts = x.new_empty((group.size(), *x.shape))
    collectives.wait(
        collectives.all_gather(parts.view(-1), x.contiguous().view(-1), group), group, "gathering"
    )
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def summed_part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part, along `dim`, of the sum over the ranks."""
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    work = collectives.reduce_scatter_sum(mine.view(-1), parts.view(-1), group)
    collectives.wait(work, group, "summing parts")
    return mine


def summed(x: Tensor, group: ProcessGroup, *, largest: bool = False) -> Tensor:
    """Return the sum over the ranks, or element by element the largest, as a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    collectives.wait(collectives.all_reduce(x, group, largest=largest), group, "summing")
    return x


def own_part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part along `dim`, a view."""
    return x.unflatten(dim, (group.size(), -1)).select(dim, group.rank())


class Enter(Function):
    """S → R along `dim`; the gradient arrives as partial sums, P → S."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return summed_part(dy, ctx.group, ctx.dim), None, None


class Leave(Function):
    """P → S along `dim`; the gradient arrives sharded, S → R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return summed_part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return gathered(dy, ctx.group, ctx.dim), None, None


class Share(Function):
    """R → R, a weight that each rank uses on its part of the sequence; its gradients are summed, P → R."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        return summed(dw, ctx.group), None


class Total(Function):
    """P → R; every rank knows the gradient, R → R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class Gather(Enter):
    """S → R along `dim` as `Enter`, for what every rank then does alike: R → S."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return own_part(dy, ctx.group, ctx.dim).contiguous(), None, None


class SwapHeads(Function):
    """`(B, H, t, D)` of a part of the sequence → `(B, H/P, P·t, D)` of a share of the heads, or back.

    Parts of the sequence stand in rank order. Its gradient takes the way back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        given, taken = (1, 2) if to_heads else (2, 1)
        sent = x.unflatten(given, (group.size(), -1)).movedim(given, 0).contiguous()
        got = torch.empty_like(sent)
        collectives.wait(
            collectives.all_to_all(got.view(-1), sent.view(-1), group), group, "swapping heads"
        )
        return got.movedim(0, taken).flatten(taken, taken + 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return SwapHeads.apply(dy, ctx.group, not ctx.to_heads), None, None
