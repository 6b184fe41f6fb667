"""Floating-point formats as arithmetic on integers: rounding, stalled sums, and underflow.

A format with m stored bits of mantissa has numbers 2^(e−m) apart between 2^e and 2^(e+1). Below its
smallest normal number the distance stays what it is there (subnormal numbers). Rounding is to the
nearest, ties to even. Source: IEEE 754.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FloatFormat:
    """Floating-point format with one sign bit.

    The top exponent is reserved for infinity and NaN, as in IEEE 754. fp8 e4m3, whose largest
    number is 448, does not follow this rule.

    Args:
        name: name of the format.
        exponent_bits: number of bits of the exponent.
        mantissa_bits: number of stored bits of the mantissa, m.

    Raises:
        ValueError: fewer than two exponent bits or no mantissa, or more than Python's floats can
            represent.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int

    def __post_init__(self) -> None:
        # Sums are computed in doubles, 53 bits, and then rounded again. With p = m + 1 bits that
        # equals one rounding where 2·p + 2 ≤ 53 (Figueroa 1995, "When is double rounding
        # innocuous?").
        if not (2 <= self.exponent_bits <= 8 and 1 <= self.mantissa_bits <= 24):
            raise ValueError(f"{self}: give 2 to 8 bits of exponent and 1 to 24 of mantissa")

    @property
    def largest(self) -> float:
        """Largest finite number."""
        # The exponent above it is reserved for infinity and NaN. The mantissa 2 − 2⁻ᵐ has all bits
        # set.
        largest_exponent = 2 ** (self.exponent_bits - 1) - 1
        return (2 - 2.0**-self.mantissa_bits) * 2.0**largest_exponent

    @property
    def smallest_normal(self) -> float:
        """Smallest number with full precision."""
        # 2^(1 − bias) with bias = 2^(exponent_bits − 1) − 1. The exponent field 0 marks subnormal
        # numbers.
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest(self) -> float:
        """Smallest positive number. Half of it and less rounds to zero."""
        return self.smallest_normal * 2.0**-self.mantissa_bits

    def spacing(self, x: float) -> float:
        """Return the distance from |x| to the next larger number."""
        # frexp gives a mantissa in [1/2, 1), so its exponent is one above that of 1.m. Below the
        # smallest normal number the distance stays the same.
        exponent = math.frexp(max(abs(x), self.smallest_normal))[1] - 1
        return 2.0 ** (exponent - self.mantissa_bits)

    def nearest(self, x: float) -> float:
        """Return `x` rounded to this format."""
        if x == 0 or not math.isfinite(x):
            return x
        spacing = self.spacing(x)
        # Python's round goes to even, and the division by a power of two is exact.
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
    """Add one number to a sum many times, and return the sum. It is rounded after each addition.

    Args:
        addend: value of the number, not yet rounded to `held_in`.
        times: number of additions.
        accumulator: format to which the sum is rounded.
        held_in: format to which the number is rounded before it is added.
    """
    total = 0.0
    addend = held_in.nearest(addend)
    for _ in range(times):
        total = accumulator.nearest(total + addend)
    return total


def stalls_at(addend: float, accumulator: FloatFormat) -> float:
    """Return the power of two from which adding `addend` changes nothing.

    From 2^e on neighbours are 2^(e−m) apart, and the addend is at most half of that distance.

    Args:
        addend: value that is added in each step, not 0.
        accumulator: format to which the sum is rounded after each step.
    """
    # |addend| ≤ 2^(e−m)/2, solved for e: e ≥ log₂|addend| + 1 + m.
    return 2.0 ** math.ceil(math.log2(abs(addend)) + 1 + accumulator.mantissa_bits)


def overflow_share(sigma: float, width: int, limit: float) -> float:
    """Return the probability that one of several normal values exceeds a limit in size.

    All stay within it with the probability of one to the power of their number.

    Args:
        sigma: standard deviation of the values.
        width: number of values.
        limit: largest size that does not count.
    """
    within = math.erf(limit / (sigma * math.sqrt(2)))  # probability of one value
    return 1 - within**width


def safe_loss_scales(vocab_size: int, tokens: int) -> tuple[float, float]:
    """Return the (smallest, largest) loss scale that keeps gradients of logits within fp16.

    The mean cross-entropy over the tokens has gradients (p − target)/tokens. A model at
    initialisation has p ≈ 1/vocab_size. Its small gradients must not round to zero, and those of
    the targets, −1/tokens, must not overflow.

    Args:
        vocab_size: number of words.
        tokens: number of tokens in a batch.
    """
    fp16 = FORMATS["fp16"]
    rounds_to_zero = fp16.smallest / 2
    # scale/(V·tokens) > smallest/2 for the small gradients, scale/tokens ≤ largest for the
    # targets'.
    return vocab_size * tokens * rounds_to_zero, tokens * fp16.largest
