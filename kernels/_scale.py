"""Multiply a gradient that was made for an upstream gradient of 1 by the actual one.

The upstream gradient of a loss is usually 1, but it is in device memory, and the host would have to
wait to see it. So the kernel reads it, and returns without touching the gradient if it is 1. Only
other factors cost a pass over the gradient.
"""

import torch
from torch import Tensor

from . import _dispatch
from ._dispatch import cdiv, tl, triton
from ._rows import Launch, store_rounded


@triton.jit
def scale_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """Multiply x by factor, in the blocks i, i + P, i + 2·P, … in program i of P.

    A factor of 1 changes nothing, and elements that are 0 stay 0 for every factor.
    """
    # One element that every program reads, instead of a number that the host would have to wait
    # for.
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            # int64: x may have 2³¹ elements or more.
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < count
            x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
            # Rows that are ignored have gradient 0, and 0·∞ would be NaN.
            x = tl.where(x == 0.0, x, x * factor)
            store_rounded(x_ptr + offsets, x, inside)


@_dispatch.operator("scale_", mutates_args=("x",), opaque=True)
def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply x by factor in place.

    Elements that are 0 stay 0 where the factor is infinite or NaN, which loss scaling can make it:
    rows that are ignored have gradient 0 in any case.

    Args:
        x: contiguous tensor of any shape.
        factor: one element of any floating dtype on x's device.
    """
    if _dispatch.idle(x):
        return
    if not _dispatch.runs_triton(x):
        zero = x == 0
        x.mul_(factor.to(torch.float32)).masked_fill_(zero, 0)
        return
    # A fixed number of programs: those that find a factor of 1 should be few and return at once.
    launch = Launch(block=4096, warps=8, per_sm=8)
    blocks = cdiv(x.numel(), launch.block)
    launch.start(scale_kernel, (launch.programs(blocks, x.device),), x, factor, x.numel())
