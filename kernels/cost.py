"""The least work of an operation: the two numbers that a roofline needs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The floor of an operation: arithmetic it must do, traffic it cannot avoid.

    Args:
        flops: floating-point operations; a multiply-add counts two.
        bytes: bytes through device memory when each input is read once and each output written once.
    """

    flops: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """FLOPs per byte, the x axis of a roofline."""
        return self.flops / self.bytes
