"""Mean of several tensors, written over one of them.

It is the computation that remains of an all-reduce after copy engines have brought every rank's
chunk here.

Mathematics:  own ← (own + Σₖ others[k])·scale, added in the order k = 0, 1, …
The arithmetic is fp32, or fp64 for fp64 tensors. The result is rounded once to own's dtype.

Shapes: n elements, K other tensors. own (n,); others (K, n) with contiguous rows.
Bytes: (K + 2)·n·itemsize. FLOPs: (K + 1)·n. Nothing is differentiated.
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import cdiv, tl, triton

BLOCK = 2048  # elements per program


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
    """Compute one block of own per program.

    SCALE: a constant of the kernel, because Triton would round a float argument to fp32.
    OTHERS: K, a constant so that the loop over the tensors is unrolled.
    SUM: type of the sum.
    """
    # int64, also in the product below: offsets may exceed 2³¹ elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Cuts the last program. Elements that are cut off are undefined and not stored.
    inside = offsets < count
    # The own tensor first, then the others. A fixed order of additions makes the result the same
    # from run to run.
    total = tl.load(own_ptr + offsets, mask=inside).to(SUM)
    for k in tl.static_range(OTHERS):
        other_ptr = others_ptr + k * tl.cast(row_stride, tl.int64)
        total += tl.load(other_ptr + offsets, mask=inside).to(SUM)
    tl.store(own_ptr + offsets, (total * SCALE).to(own_ptr.dtype.element_ty), mask=inside)


def average_into(own: Tensor, others: Tensor, scale: float) -> None:
    """Replace own by (own + the sum of the rows of others)·scale.

    Args:
        own: tensor (n,), contiguous.
        others: tensor (K, n) of own's dtype and device, with contiguous rows.
        scale: factor, 1/(K + 1) for the mean.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    if own.ndim != 1 or others.ndim != 2 or others.shape[1] != own.numel():
        raise ValueError(
            f"own {tuple(own.shape)} and others {tuple(others.shape)}: expected (n,) and (K, n)"
        )
    if own.dtype != others.dtype or own.device != others.device:
        raise ValueError(
            f"own is {own.dtype} on {own.device}, others {others.dtype} on {others.device}: "
            "give one of each"
        )
    if not own.is_contiguous() or (own.numel() > 1 and others.stride(1) != 1):
        raise ValueError(
            f"strides {own.stride()} and {others.stride()}: own and each row must be contiguous"
        )
    if own.numel() == 0:
        return
    # The same order of additions and one rounding, in plain torch.
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
        # Averages of 16-bit gradients would lose digits with every addition in their own dtype.
        SUM=tl.float64 if own.dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK,
        num_warps=4,
    )
