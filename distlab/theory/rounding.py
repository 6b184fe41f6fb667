"""Floating-point formats as arithmetic on integers: rounding, stalled sums, and underflow.

A format with m stored bits of mantissa has numbers 2^(e−m) apart between 2^e and 2^(e+1); below its
smallest normal number the distance stays what it is there (subnormal numbers). Rounding is to the
nearest, ties to even (IEEE 754).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FloatFormat:
    """One sign bit, `exponent_bits` and `mantissa_bits` stored ones.

    Raises:
        ValueError: fewer than two exponent bits or no mantissa, or more than Python's floats can
            represent.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int

    def __post_init__(self) -> None:
        if not (2 <= self.exponent_bits <= 8 and 1 <= self.mantissa_bits <= 24):
            raise ValueError(f"{self}: give 2 to 8 bits of exponent and 1 to 24 of mantissa")

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2 - 2.0**-self.mantissa_bits) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest(self) -> float:
        """The smallest positive number; half of it and less rounds to zero."""
        return self.smallest_normal * 2.0**-self.mantissa_bits

    def spacing(self, x: float) -> float:
        """The distance from |x| to the next larger number."""
        exponent = math.frexp(max(abs(x), self.smallest_normal))[1] - 1
        return 2.0 ** (exponent - self.mantissa_bits)

    def nearest(self, x: float) -> float:
        """Return `x` rounded to this format."""
        if x == 0 or not math.isfinite(x):
            return x
        spacing = self.spacing(x)
        # Python's round goes to even, and the division is exact
        rounded = round(abs(x) / spacing) * spacing
        return math.copysign(rounded if rounded <= self.largest else math.inf, x)


FORMATS = {
    "fp32": FloatFormat("fp32", 8, 23),
    "fp16": FloatFormat("fp16", 5, 10),
    "bf16": FloatFormat("bf16", 8, 7),
}


def repeated_sum(
    addend: float, times: int, accumulator: FloatFormat, held_in: FloatFormat
) -> float:
    """Return the sum of `addend`, held in one format, added `times` times in another format.

    The accumulator rounds after each addition.
    """
    total, addend = 0.0, held_in.nearest(addend)
    for _ in range(times):
        total = accumulator.nearest(total + addend)
    return total


def stalls_at(addend: float, accumulator: FloatFormat) -> float:
    """Return the power of two from which adding `addend` changes nothing.

    It is then less than half the distance of neighbours.
    """
    return 2.0 ** math.ceil(math.log2(abs(addend)) + 1 + accumulator.mantissa_bits)


def overflow_share(sigma: float, width: int, limit: float) -> float:
    """Return the probability that one of `width` normal values exceeds `limit` in size.

    `sigma` is their deviation.
    """
    return 1 - math.erf(limit / (sigma * math.sqrt(2))) ** width


def safe_loss_scales(vocab_size: int, tokens: int) -> tuple[float, float]:
    """Return the (smallest, largest) loss scale that keeps gradients of logits within fp16.

    The model is at initialisation.

    The mean cross-entropy over `tokens` has gradients (p − target)/tokens; an untrained model has p
    ≈ 1/vocab_size. The small ones must not round to zero, and those of the targets, −1/tokens, not
    overflow.
    """
    low = FORMATS["fp16"]
    return vocab_size * tokens * low.smallest / 2, tokens * low.largest
