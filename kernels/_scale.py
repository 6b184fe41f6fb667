"""A gradient that was made for an upstream of 1, multiplied by the actual upstream.

The upstream of a loss is usually 1, but it lies in device memory: to look at it the host would have
to wait. So the kernel looks, and leaves without touching the gradient; only other factors cost a
pass over it.
"""

import torch
from torch import Tensor

from . import _dispatch
from ._dispatch import cdiv, tl, triton
from ._rows import Launch, store_rounded


@triton.jit
def scale_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """x *= factor over every num_programs-th block, unless the factor is 1; zeros stay, whatever the factor."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < count
            x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
            x = tl.where(x == 0.0, x, x * factor)
            store_rounded(x_ptr + offsets, x, inside)


@_dispatch.operator("scale_", mutates_args=("x",), opaque=True)
def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor, in place; x contiguous, of any shape, factor one element of any floating dtype on its device.

    Zeros stay zeros where the factor is infinite or NaN, as loss scaling makes it: rows that are
    ignored have none.
    """
    if _dispatch.idle(x):
        return
    if not _dispatch.runs_triton(x):
        zero = x == 0
        x.mul_(factor.to(torch.float32)).masked_fill_(zero, 0)
        return
    launch = Launch(block=4096, warps=8, per_sm=8)
    blocks = cdiv(x.numel(), launch.block)
    launch.start(scale_kernel, (launch.programs(blocks, x.device),), x, factor, x.numel())
