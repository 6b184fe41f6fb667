"""The least work of an operation: the two numbers that a roofline needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """The floor of an operation: arithmetic it must do, traffic it cannot avoid.

    Args:
        flops: floating-point operations; a multiply-add counts two.
        bytes: bytes through device memory when each input is read once and each output written
            once.
    """

    flops: float
    bytes: float

    @classmethod
    def of_elements(cls, shape: Sequence[int], dtype: Any, flops: float, tensors: float) -> "Cost":
        """Of a pass over tensors of this shape and dtype, with so many FLOPs per element."""
        count = math.prod(shape)
        return cls(flops * count, tensors * count * dtype.itemsize)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """FLOPs per byte, the x axis of a roofline."""
        return self.flops / self.bytes
