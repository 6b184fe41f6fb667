"""Matmuls of two tiles at the precision that a call asks for.

Tensor cores multiply numbers of few bits: TF32 has 11 and bf16 has 8, fp32 has 24. An fp32 number
is the exact sum of a TF32 number and a rest, or of three bf16 numbers. So an fp32 matmul is a sum
of matmuls of these parts, of which the smallest may be left out.
"""

import triton
import triton.language as tl

from .._dispatch import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _rounded(x, HALF: tl.constexpr, KEPT: tl.constexpr):
    """Return fp32 values rounded to the bits that are set in KEPT, still as fp32.

    HALF: half of the last bit of KEPT. Adding it before cutting rounds to nearest.
    """
    # On the bit pattern: a carry out of the mantissa increments the exponent, which is the right
    # rounding.
    return ((x.to(tl.uint32, bitcast=True) + HALF) & KEPT).to(tl.float32, bitcast=True)


@triton.jit
def _split_tf32(x):
    """Return fp32 values rounded to the 11 bits of TF32, and the exact rest.

    The tensor cores use 11 bits of the rest.
    """
    # TF32 keeps 10 stored bits of mantissa and fp32 23: cut the last 13 bits, 0x1000 is half of
    # them.
    high = _rounded(x, 0x1000, 0xFFFFE000)
    # Exact: the difference is a multiple of x's last bit and has at most 13 bits.
    return high, x - high


@triton.jit
def _bf16(x):
    """Return fp32 values that have 8 bits as bf16, which changes no value.

    Triton's interpreter cannot multiply bf16. There they stay fp32.
    """
    return x if INTERPRETED else x.to(tl.bfloat16)


@triton.jit
def _split_bf16(x):
    """Return three bf16 parts of fp32 values, from the largest to the smallest. Their sum is x."""
    # bf16 is the upper half of fp32: cut 16 bits, 0x8000 is half of them.
    high = _rounded(x, 0x8000, 0xFFFF0000)
    rest = x - high
    middle = _rounded(rest, 0x8000, 0xFFFF0000)
    return _bf16(high), _bf16(middle), _bf16(rest - middle)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Return a·b + acc in fp32, for tiles a (M, K), b (K, N) and acc (M, N), or None for no acc.

    Operands of 16 bits are multiplied as they are. PRECISION applies to fp32 operands:
    - "ieee": fp32 units.
    - "tf32": one matmul of TF32.
    - "tf32x3": three matmuls of the two TF32 parts. The matmul of the two rests is left out, 2⁻²²
      of the whole.
    - "bf16x6": six matmuls of the three bf16 parts. The three matmuls that are left out are at most
      2⁻²⁴ of the whole.
    The last two cost the tensor cores the same, because bf16 is twice as fast. But wgmma reads bf16
    from shared memory along either dimension, and TF32 only along K. Where a tile has the 64 rows
    of a warpgroup, that makes "bf16x6" the faster one.

    The matmuls of the parts are summed separately from `acc`, which is rounded once per tile:
    tensor cores truncate what an accumulator cannot hold, and the loss would grow along the
    sequence.

    Triton's own "tf32x3" also looks for infinities in every element of operands and results, which
    takes more instructions than the matmuls. Here an infinite operand gives NaN. So does one within
    2⁻⁹ of the largest fp32 number (2⁻¹² in "tf32x3"), which rounds to infinity.

    Source of "bf16x6": Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence
    Datatype For Higher-Precision Computations (2019).
    """
    if a.dtype != tl.float32:
        found = tl.dot(a, b, acc)
    elif PRECISION == "ieee" or PRECISION == "tf32":
        found = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        if PRECISION == "tf32x3":
            found = _three(a, b)
        else:
            found = _six(a, b)
        # One fp32 addition per element, rounded to nearest, which the tensor cores' own would not
        # be.
        if acc is not None:
            found = acc + found
    return found


@triton.jit
def _three(a, b):
    """Return a·b in fp32 by three TF32 matmuls."""
    a_high, a_low = _split_tf32(a)
    b_high, b_low = _split_tf32(b)
    if a.shape[1] > b.shape[1]:
        # Long sums with few results: three short chains of instructions run faster than a long one.
        # min(program, 0) is zero, but the compiler does not know. With a plain zero it would chain
        # the matmuls again.
        zeros = tl.zeros([a.shape[0], b.shape[1]], tl.float32) + tl.minimum(tl.program_id(0), 0).to(
            tl.float32
        )
        found = tl.dot(a_low, b_high, zeros, input_precision="tf32")
        found += tl.dot(a_high, b_low, zeros, input_precision="tf32")
        found += tl.dot(a_high, b_high, zeros, input_precision="tf32")
    else:
        # Small products first: a small term is lost if it is added to a large sum.
        found = tl.dot(a_low, b_high, input_precision="tf32")
        found = tl.dot(a_high, b_low, found, input_precision="tf32")
        found = tl.dot(a_high, b_high, found, input_precision="tf32")
    return found


@triton.jit
def _six(a, b):
    """Return a·b in fp32 by six bf16 matmuls."""
    a_high, a_middle, a_low = _split_bf16(a)
    b_high, b_middle, b_low = _split_bf16(b)
    # From the smallest to the largest: a small term is lost if it is added to a large sum.
    found = tl.dot(a_low, b_high)
    found = tl.dot(a_high, b_low, found)
    found = tl.dot(a_middle, b_middle, found)
    found = tl.dot(a_middle, b_high, found)
    found = tl.dot(a_high, b_middle, found)
    return tl.dot(a_high, b_high, found)
