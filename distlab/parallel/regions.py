"""Autograd functions that change how ranks share a tensor, in forward and in backward.

    S  sharded: each rank has its part          R  replicated: every rank has the same values
    P  partial: the value is the sum over ranks

                forward                              backward
    Enter       S → R, all-gather                    P → S, reduce-scatter
    Leave       P → S, reduce-scatter                S → R, all-gather
    Share       R → R, sends nothing                 P → R, all-reduce
    Total       P → R, all-reduce                    R → R, sends nothing
    Gather      S → R, all-gather                    R → S, sends nothing
    SwapHeads   sequence ↔ heads, all-to-all         heads ↔ sequence, all-to-all

`Share` is for a weight that ranks apply to different parts of a sequence. `Total` is for a sum from
which every rank computes the same loss. `Gather` is for a result that every rank uses in the same
way.

The functions differ in how a gradient arrives: as P, which backward sums over the ranks, or as R,
which it does not. The loss does not show a wrong choice. One all-reduce too many multiplies every
gradient by the number of ranks and leaves the loss unchanged.

Each function divides the dimension `dim` into equal parts, in rank order. Compiled models call
these functions between their graphs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from distlab.comm import collectives

# -- functions with gradients ---------------------------------------------------------------------


class Enter(Function):
    """Gather along `dim`, S → R. Backward sums partial gradients, P → S."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        return gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return summed_part(dy, ctx.group, ctx.dim), None, None


class Leave(Function):
    """Sum partial values and keep this rank's part along `dim`, P → S. Backward gathers, S → R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        return summed_part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return gathered(dy, ctx.group, ctx.dim), None, None


class Share(Function):
    """Return a weight that each rank applies to its part of the sequence, R → R.

    Backward sums the gradients of the parts, P → R.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        return summed(dw, ctx.group), None


class Total(Function):
    """Sum partial values, P → R. Every rank already has the gradient, R → R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class Gather(Enter):
    """Gather along `dim` as `Enter` does, S → R, for a result that every rank uses in the same way.

    Every rank then has the same gradient, and backward takes this rank's part of it, R → S.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return own_part(dy, ctx.group, ctx.dim).contiguous(), None, None


class SwapHeads(Function):
    """Exchange a part of the sequence for a part of the heads, or the reverse.

    With `to_heads`: `(B, H, t, D)` → `(B, H/P, P·t, D)`, with the parts of the sequence in rank
    order. Without: `(B, H/P, P·t, D)` → `(B, H, t, D)`. Backward is the reverse exchange.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group = group
        ctx.to_heads = to_heads
        heads_dim, sequence_dim = 1, 2
        divided_dim = heads_dim if to_heads else sequence_dim
        joined_dim = sequence_dim if to_heads else heads_dim
        by_rank = x.unflatten(divided_dim, (group.size(), -1)).movedim(divided_dim, 0)
        sent = by_rank.contiguous()
        received = torch.empty_like(sent)
        work = collectives.all_to_all(received.view(-1), sent.view(-1), group)
        collectives.wait(work, group, "swapping heads")
        return received.movedim(0, joined_dim).flatten(joined_dim, joined_dim + 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return SwapHeads.apply(dy, ctx.group, not ctx.to_heads), None, None


# -- the collectives, without gradients -----------------------------------------------------------


def gathered(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return every rank's `x`, concatenated along `dim` in rank order."""
    parts = x.new_empty((group.size(), *x.shape))
    work = collectives.all_gather(parts.view(-1), x.contiguous().view(-1), group)
    collectives.wait(work, group, "gathering")
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def summed_part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part, along `dim`, of the sum over the ranks."""
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    work = collectives.reduce_scatter_sum(mine.view(-1), parts.view(-1), group)
    collectives.wait(work, group, "summing parts")
    return mine


def summed(x: Tensor, group: ProcessGroup, *, largest: bool = False) -> Tensor:
    """Return the sum over the ranks as a new tensor. With `largest`: the element-wise maximum."""
    x = x.clone(memory_format=torch.contiguous_format)
    work = collectives.all_reduce(x, group, largest=largest)
    collectives.wait(work, group, "summing")
    return x


def own_part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part along `dim`, a view."""
    return x.unflatten(dim, (group.size(), -1)).select(dim, group.rank())
