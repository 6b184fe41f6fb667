"""Matrix products of a tile in the arithmetic that a call asks for."""

import triton
import triton.language as tl


@triton.jit
def _split_tf32(x):
    """fp32 → (x rounded to the 11 bits of TF32, the rest): the sum is exact, and 11 bits of the rest are used."""
    rounded = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    high = rounded.to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """a (M, K) · b (K, N) in fp32, added to `acc` (M, N) in fp32 unless that is None.

    Operands of 16 bits are multiplied as they are, and fp32 as PRECISION says: "ieee", "tf32" or "tf32x3".

    "tf32x3" takes the two parts of each fp32 operand and leaves out the product of the small ones, 2⁻²² of the whole.
    The three are summed apart from `acc`, which is rounded once per tile: tensor cores cut off what an accumulator
    cannot hold, and the loss would add up along the sequence. Triton's own "tf32x3" looks for infinities in every
    element of operands and results besides, which takes more instructions than the products. Here an infinite operand
    gives NaN, and so does one within 2⁻¹² of the largest fp32 number, which rounds to infinity.
    """
    if PRECISION == "tf32x3" and a.dtype == tl.float32:
        a_high, a_low = _split_tf32(a)
        b_high, b_low = _split_tf32(b)
        if a.shape[1] > b.shape[1]:  # long sums of few elements: three short chains of instructions, not one long
            # zero, but not to the compiler's eyes, which would chain the products again
            zeros = tl.zeros([a.shape[0], b.shape[1]], tl.float32) + tl.minimum(tl.program_id(0), 0).to(tl.float32)
            found = tl.dot(a_low, b_high, zeros, input_precision="tf32")
            found += tl.dot(a_high, b_low, zeros, input_precision="tf32")
            found += tl.dot(a_high, b_high, zeros, input_precision="tf32")
        else:
            found = tl.dot(a_low, b_high, input_precision="tf32")
            found = tl.dot(a_high, b_low, found, input_precision="tf32")
            found = tl.dot(a_high, b_high, found, input_precision="tf32")
        if acc is not None:
            found = acc + found
    elif acc is None:
        found = tl.dot(a, b, input_precision=PRECISION)
    else:
        found = tl.dot(a, b, acc, input_precision=PRECISION)
    return found
