"""Kinds of memory traffic of an operator, by the sizes and dtypes of its inputs and outputs.

torch's kernels for whole tensors of one dtype reach the bandwidth of a copy. Others are slower. On
an H100, kernels that broadcast a smaller operand or reduce reach 80 % of that bandwidth, and those
that widen the dtype two thirds of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

KINDS = ("copy", "broadcast", "reduce", "widen")


def kind_of(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """Return the entry of KINDS that an operation belongs to."""
    read = max((tensor.numel() for tensor in inputs), default=0)
    written = max((tensor.numel() for tensor in outputs), default=0)
    if written < read:
        return "reduce"
    # An operand of one element is a scalar, which costs no traffic.
    if any(1 < stored(tensor) < written for tensor in inputs):
        return "broadcast"
    input_widths = [tensor.element_size() for tensor in inputs if tensor.numel() == written]
    if input_widths and outputs[0].element_size() > max(input_widths):
        return "widen"
    return "copy"


def rates(x: Tensor, seconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Return the bytes per second that torch's operators of each of KINDS reach on a matrix.

    Args:
        x: fp32 matrix.
        seconds: function that returns the seconds of one run of a call.
    """
    column = x[:, :1].clone()
    half = x.bfloat16()
    out = torch.empty_like(x)

    def copy() -> Tensor:
        return out.copy_(x)

    def broadcast() -> Tensor:
        return torch.sub(x, column, out=out)

    def reduce() -> Tensor:
        return x.sum(-1)

    # A copy and a broadcast read and write the matrix. A reduction only reads it. To widen a matrix
    # reads two bytes and writes four for each element. The small operands are left out.
    return {
        "copy": 2 * x.nbytes / seconds(copy),
        "broadcast": 2 * x.nbytes / seconds(broadcast),
        "reduce": x.nbytes / seconds(reduce),
        "widen": 1.5 * x.nbytes / seconds(half.float),
    }


def stored(tensor: Tensor) -> int:
    """Return the number of elements in memory. An expanded tensor has fewer than its shape says."""
    in_storage = tensor.untyped_storage().nbytes() // tensor.element_size()
    return min(tensor.numel(), in_storage)
