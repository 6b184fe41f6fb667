"""The mean of several tensors, written over one of them: what is left to compute of an all-reduce by copy engines.

Math:  own ← (own + Σₖ others[k]) · scale, in fp32, or fp64 for tensors of it, added in the order k = 0, 1, …

Shapes: `n` elements, `K` others; own `(n,)` and others `(K, n)`, contiguous rows. Bytes: (K +
2)·n·itemsize. FLOPs: (K + 1)·n. Nothing is differentiated. The result is rounded once to own's
dtype.
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import cdiv, tl, triton

BLOCK = 2048


@triton.jit
def average_kernel(
    own_ptr,
    others_ptr,
    row_stride,
    count,
    SCALE: tl.constexpr,
    OTHERS: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of own.

    SCALE is a constant, since a number that is passed would be rounded to fp32.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(own_ptr + offsets, mask=inside).to(SUM)
    for k in tl.static_range(OTHERS):
        total += tl.load(others_ptr + k * tl.cast(row_stride, tl.int64) + offsets, mask=inside).to(
            SUM
        )
    tl.store(own_ptr + offsets, (total * SCALE).to(own_ptr.dtype.element_ty), mask=inside)


def average_into(own: Tensor, others: Tensor, scale: float) -> None:
    """own `(n,)` ← (own + the sum of others' rows) · scale, in place.

    Args:
        others: `(K, n)`, rows contiguous, of own's dtype and device.
        scale: 1/(K + 1) for the mean.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    if own.ndim != 1 or others.ndim != 2 or others.shape[1] != own.numel():
        raise ValueError(
            f"own {tuple(own.shape)} and others {tuple(others.shape)}: expected (n,) and (K, n)"
        )
    if own.dtype != others.dtype or own.device != others.device:
        raise ValueError(
            f"own is {own.dtype} on {own.device}, others {others.dtype} on {others.device}: give one of each"
        )
    if not own.is_contiguous() or (own.numel() > 1 and others.stride(1) != 1):
        raise ValueError(
            f"strides {own.stride()} and {others.stride()}: own and each row must be contiguous"
        )
    if own.numel() == 0:
        return
    if not _dispatch.runs_triton(own):
        total = reference.wide(own)
        for other in others:
            total = total + other
        own.copy_(total * scale)
        return
    _dispatch.launch(
        average_kernel,
        (cdiv(own.numel(), BLOCK),),
        own,
        others,
        others.stride(0),
        own.numel(),
        SCALE=scale,
        OTHERS=len(others),
        SUM=tl.float64 if own.dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK,
        num_warps=4,
    )
