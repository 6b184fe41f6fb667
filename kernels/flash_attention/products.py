"""Matmuls of a tile at the precision that a call asks for."""

import triton
import triton.language as tl

from .._dispatch import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _rounded(x, HALF: tl.constexpr, KEPT: tl.constexpr):
    """fp32 rounded to the bits of KEPT, of whose last one HALF is the half; still fp32."""
    return ((x.to(tl.uint32, bitcast=True) + HALF) & KEPT).to(tl.float32, bitcast=True)


@triton.jit
def _split_tf32(x):
    """fp32 → (x rounded to the 11 bits of TF32, the rest): the sum is exact, and 11 bits of the rest are used."""
    high = _rounded(x, 0x1000, 0xFFFFE000)
    return high, x - high


@triton.jit
def _bf16(x):
    """Numbers of 8 bits in the dtype that has them; Triton's interpreter cannot multiply it."""
    return x if INTERPRETED else x.to(tl.bfloat16)


@triton.jit
def _split_bf16(x):
    """fp32 → three bf16, whose sum is exact."""
    high = _rounded(x, 0x8000, 0xFFFF0000)
    rest = x - high
    middle = _rounded(rest, 0x8000, 0xFFFF0000)
    return _bf16(high), _bf16(middle), _bf16(rest - middle)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """a (M, K) · b (K, N) in fp32, added to `acc` (M, N) in fp32 unless that is None.

    Operands of 16 bits are multiplied as they are, and fp32 as PRECISION says: "ieee", "tf32",
    "tf32x3" or "bf16x6".

    "tf32x3" takes the two parts of each fp32 operand and leaves out the matmul of the small ones,
    2⁻²² of the whole. "bf16x6" takes three parts and leaves out the three matmuls of at most 2⁻²⁴.
    Both cost the tensor cores the same, bf16 being twice as fast, but wgmma reads bf16 from shared
    memory along either dimension and TF32 only along K. Where a tile has the 64 rows of a warpgroup
    that makes bf16x6 the faster one.

    The matmuls are summed separately from `acc`, which is rounded once per tile: tensor cores
    truncate what an accumulator cannot hold, and the loss would add up along the sequence. Triton's
    own "tf32x3" looks for infinities in every element of operands and results besides, which takes
    more instructions than the matmuls. Here an infinite operand gives NaN, and so does one within
    2⁻⁹ of the largest fp32 number (2⁻¹² in "tf32x3"), which rounds to infinity.

    Source of the sixfold matmul: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial
    Intelligence Datatype For Higher-Precision Computations (2019).
    """
    if a.dtype != tl.float32:
        found = tl.dot(a, b, acc)
    elif PRECISION == "ieee" or PRECISION == "tf32":
        found = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        alone = _three(a, b) if PRECISION == "tf32x3" else _six(a, b)
        found = alone if acc is None else acc + alone
    return found


@triton.jit
def _three(a, b):
    a_high, a_low = _split_tf32(a)
    b_high, b_low = _split_tf32(b)
    # long sums of few elements: three short chains of instructions, not one long
    if a.shape[1] > b.shape[1]:
        # zero, but not to the compiler's eyes, which would chain the matmuls again
        zeros = tl.zeros([a.shape[0], b.shape[1]], tl.float32) + tl.minimum(tl.program_id(0), 0).to(
            tl.float32
        )
        found = tl.dot(a_low, b_high, zeros, input_precision="tf32")
        found += tl.dot(a_high, b_low, zeros, input_precision="tf32")
        found += tl.dot(a_high, b_high, zeros, input_precision="tf32")
    else:
        found = tl.dot(a_low, b_high, input_precision="tf32")
        found = tl.dot(a_high, b_low, found, input_precision="tf32")
        found = tl.dot(a_high, b_high, found, input_precision="tf32")
    return found


@triton.jit
def _six(a, b):
    a_high, a_middle, a_low = _split_bf16(a)
    b_high, b_middle, b_low = _split_bf16(b)
    found = tl.dot(a_low, b_high)  # the smallest first
    found = tl.dot(a_high, b_low, found)
    found = tl.dot(a_middle, b_middle, found)
    found = tl.dot(a_middle, b_high, found)
    found = tl.dot(a_high, b_middle, found)
    return tl.dot(a_high, b_high, found)
