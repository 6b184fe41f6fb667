"""Least work of an operation: the two numbers that a roofline model needs.

Every operation's file ends with a function `cost` that returns a `Cost`. Benchmarks divide it by
the device's peak FLOPs and bandwidth to say how close a kernel comes to the hardware.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Arithmetic that an operation must do and memory traffic that it cannot avoid.

    Args:
        flops: number of floating-point operations. A multiply-add counts as two.
        bytes: number of bytes through device memory when each input is read once and each output
            is written once.
    """

    flops: float
    bytes: float

    @classmethod
    def of_elements(cls, shape: Sequence[int], dtype: Any, flops: float, tensors: float) -> "Cost":
        """Return the cost of one pass over tensors of equal shape and dtype.

        Args:
            shape: dimensions of one tensor.
            dtype: dtype of all tensors.
            flops: floating-point operations per element.
            tensors: number of tensors that are read or written once.
        """
        count = math.prod(shape)
        return cls(flops * count, tensors * count * dtype.itemsize)

    def __add__(self, other: "Cost") -> "Cost":
        """Return the cost of both operations, one after the other."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte, the x axis of a roofline plot."""
        return self.flops / self.bytes
