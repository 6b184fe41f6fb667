"""Kinds of memory traffic of an operator, by the sizes and dtypes of its inputs and outputs.

torch's kernels for whole tensors of one dtype reach the bandwidth of a copy; those that broadcast a
smaller operand, reduce, or widen the dtype do not (on an H100 80 %, and two thirds, of it).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

KINDS = ("copy", "broadcast", "reduce", "widen")


def kind_of(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """Return the entry of KINDS that an operation belongs to."""
    largest = max((t.numel() for t in inputs), default=0)
    written = max((t.numel() for t in outputs), default=0)
    if written < largest:
        return "reduce"
    if any(1 < stored(t) < written for t in inputs):
        return "broadcast"
    widths = [t.element_size() for t in inputs if t.numel() == written]
    return "widen" if widths and outputs[0].element_size() > max(widths) else "copy"


def rates(x: Tensor, seconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Return the bytes per second that torch's operators of each of KINDS reach on a matrix.

    Args:
        x: fp32 matrix.
        seconds: function that times a call.
    """
    narrow, half, out = x[:, :1].clone(), x.bfloat16(), torch.empty_like(x)
    moved = {  # bytes over those of the matrix, and the call
        "copy": (2, lambda: out.copy_(x)),
        "broadcast": (2, lambda: torch.sub(x, narrow, out=out)),
        "reduce": (1, lambda: x.sum(-1)),
        "widen": (1.5, half.float),
    }
    return {kind: times * x.nbytes / seconds(call) for kind, (times, call) in moved.items()}


def stored(t: Tensor) -> int:
    """Number of elements in memory: an expanded tensor has fewer than its shape says."""
    return min(t.numel(), t.untyped_storage().nbytes() // t.element_size())
