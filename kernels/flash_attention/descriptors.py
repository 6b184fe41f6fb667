"""Tensor descriptors (Hopper's TMA) over attention tensors: zeros past a head's last row and past its last column."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .ranges import block_d

ALIGNMENT_BYTES = 16  # of the base address and of every stride
MAX_COORDINATE = 2**31  # coordinates are int32


def row_descriptors(tensors: tuple[torch.Tensor, ...], block_rows: int) -> tuple[TensorDescriptor | None, ...]:
    """One descriptor per (B, H, T, D) tensor with tiles of `block_rows` rows of one head; all None if one cannot be.

    Any layout will do whose rows, heads and batches begin at aligned addresses and are not expanded.
    """
    made = []
    for x in tensors:
        strides = [x.shape[3] if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
        aligned = all(s > 0 and s * x.element_size() % ALIGNMENT_BYTES == 0 for s in strides)
        if x.data_ptr() % ALIGNMENT_BYTES or not aligned:
            return (None,) * len(tensors)
        made.append(TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, block_rows, block_d(x.shape[3])]))
    return tuple(made)


def flat_descriptor(x: torch.Tensor, block: int) -> TensorDescriptor:
    """A descriptor over all elements of a contiguous tensor, in one dimension."""
    return TensorDescriptor(x, [x.numel()], [1], [block])
