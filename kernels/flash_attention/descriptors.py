"""Tensor descriptors (Hopper's TMA) over attention tensors.

The rows of a (B, H, T, D) tensor of almost any layout are rows of one matrix whose width is the row stride: (B·H·T, D)
for the contiguous layout, (B·T, H·D) for a transposed (B, T, H, D). A head then begins at row start // stride and
column start % stride, where start = b·stride_b + h·stride_h. A tile past a head's last row would read the next head, so
the loops use descriptors only where the length is a multiple of the tile.
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT_BYTES = 16  # of the base address and of every row
MAX_COORDINATE = 2**31  # coordinates are int32


def _matrix_width(x: torch.Tensor) -> int | None:
    """Row stride of x if its heads are blocks of one matrix with aligned rows, else None."""
    batch, heads, _, head_dim = x.shape
    stride_b, stride_h, width, _ = x.stride()
    if batch == 1:
        stride_b = 0
    if heads == 1:
        stride_h = 0
    if width < head_dim or width * x.element_size() % ALIGNMENT_BYTES or x.data_ptr() % ALIGNMENT_BYTES:
        return None
    side_by_side = stride_h < width and (heads - 1) * stride_h + head_dim <= width
    if stride_b % width or not (stride_h % width == 0 or side_by_side):
        return None
    if stride_h % width and stride_h * x.element_size() % ALIGNMENT_BYTES:
        return None
    return width


def row_descriptors(tensors: tuple[torch.Tensor, ...], block_rows: int) -> tuple[TensorDescriptor | None, ...]:
    """One descriptor per (B, H, T, D) tensor with tiles (block_rows, D); all None if one of them does not allow it."""
    nothing = (None,) * len(tensors)
    made = []
    for x in tensors:
        batch, heads, count, head_dim = x.shape
        width = _matrix_width(x)
        if width is None or count % block_rows or head_dim & (head_dim - 1) or head_dim < ALIGNMENT_BYTES:
            return nothing
        # the furthest element, in units of rows
        last = (batch - 1) * x.stride(0) + (heads - 1) * x.stride(1) + (count - 1) * width
        if last // width >= MAX_COORDINATE or width >= MAX_COORDINATE:
            return nothing
        made.append(TensorDescriptor(x, [last // width + 1, width], [width, 1], [block_rows, head_dim]))
    return tuple(made)


def flat_descriptor(x: torch.Tensor, block: int) -> TensorDescriptor:
    """A descriptor over all elements of a contiguous tensor, in one dimension."""
    return TensorDescriptor(x, [x.numel()], [1], [block])
