"""Matmuls of a tile by themselves, and inputs that are not finite."""

import pytest
import torch
import triton
import triton.language as tl

from kernels._dispatch import forced
from kernels.flash_attention import flash_attention
from kernels.flash_attention.configs import Tile
from kernels.flash_attention.products import _split_bf16, _split_tf32, product

from .attention_reference import inputs, with_gradients
from .fused import DEVICE, draw
from .near import near

NAN, INFINITY = float("nan"), float("inf")


@triton.jit
def product_kernel(
    a_ptr,
    b_ptr,
    acc_ptr,
    out_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    m = tl.arange(0, M)
    k = tl.arange(0, K)
    n = tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    at = m[:, None] * N + n[None, :]
    if ADD:
        found = product(a, b, tl.load(acc_ptr + at), PRECISION)
    else:
        found = product(a, b, None, PRECISION)
    tl.store(out_ptr + at, found)


@triton.jit
def split_kernel(x_ptr, high_ptr, middle_ptr, low_ptr, COUNT: tl.constexpr, THREE: tl.constexpr):
    at = tl.arange(0, COUNT)
    if THREE:
        high, middle, low = _split_bf16(tl.load(x_ptr + at))
        tl.store(middle_ptr + at, middle)
    else:
        high, low = _split_tf32(tl.load(x_ptr + at))
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, low)


def multiply(a, b, acc, precision):
    out = torch.full((a.shape[0], b.shape[1]), NAN, device=DEVICE)
    product_kernel[(1,)](
        a, b, out if acc is None else acc, out, *a.shape, b.shape[1], acc is not None, precision
    )
    return out


CHAINS = pytest.mark.parametrize(
    "k, n", [(64, 16), (16, 64)], ids=["three short chains", "one long chain"]
)


@CHAINS
@pytest.mark.parametrize("add", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6", "ieee"])
def test_a_product_is_as_accurate_as_fp32(k, n, add, precision):
    """To 2⁻¹⁹ of what is summed.

    One product of operands rounded to TF32 is off by some 2⁻¹⁵ of it.
    """
    a, b = draw(16, k), draw(k, n, seed=1)
    acc = draw(16, n, seed=2) if add else None
    exact, summed = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if add:
        exact, summed = exact + acc.double(), summed + acc.double().abs()
    assert ((multiply(a, b, acc, precision).double() - exact).abs() <= 2**-19 * summed).all()


@CHAINS
@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6"])
def test_infinite_operands_are_never_a_finite_number_and_large_ones_are_right(k, n, precision):
    a, b = draw(16, k), draw(k, n, seed=1)
    a[3, 5], b[2, 4] = INFINITY, -INFINITY
    touched = torch.zeros(16, n, dtype=torch.bool, device=DEVICE)
    touched[3], touched[:, 4] = True, True
    found = multiply(a, b, None, precision)
    assert found[touched].isnan().all() and found[~touched].isfinite().all()
    a[3, 5], b[2, 4] = 1e30, -1e30
    a[:, 2] = a[:, 2].clamp(-1, 1)  # 1e30 squared is no fp32 number
    a[3, 2], b[5, 4] = 1.0, 1.0
    error = (multiply(a, b, None, precision).double() - a.double() @ b.double()).abs()
    assert (error <= 2**-19 * (a.double().abs() @ b.double().abs())).all()


@pytest.mark.parametrize("three", [False, True], ids=["TF32", "bf16"])
def test_the_parts_of_a_number_are_short_and_their_sum_is_exact(three):
    """TF32 has 11 bits and the second part is whatever is left.

    All three parts of the other split have 8 bits.
    """
    x = torch.cat([draw(1020), torch.tensor([0.0, 1e30, -1e-30, 3.0], device=DEVICE)])
    high, middle, low = (torch.zeros_like(x) for _ in range(3))
    split_kernel[(1,)](x, high, middle, low, len(x), three)
    assert torch.equal(high.double() + middle.double() + low.double(), x.double())
    for part in (high, middle, low) if three else (high,):
        assert (part.view(torch.int32) & (0xFFFF if three else 0x1FFF) == 0).all()
    assert (middle.abs() <= 2**-8 * x.abs()).all()
    assert (low.abs() <= (2**-16 if three else 2**-11) * x.abs()).all()


def test_an_infinite_input_shows_in_its_row_only():
    """Output, log-sum-exp and gradient of the query whose score is not a number, the others as
    without it.
    """
    q, k, v, do = inputs(1, 1, 1, 48, 48, 16)
    expected = with_gradients(lambda *x: flash_attention(*x, causal=True), q, k, v, do)
    q[..., 40, 3] = INFINITY
    with forced(forward=Tile(16, 16)):
        leaf = q.clone().requires_grad_()
        o = flash_attention(leaf, k, v, causal=True)
        (lse,) = (x for x in o.grad_fn.saved_tensors if x.shape == q.shape[:-1])
        (dq,) = torch.autograd.grad(o, leaf, do)
    for x in (o, dq, lse[..., None]):
        assert x[..., 40, :].isnan().all()
    others = torch.arange(48, device=DEVICE) != 40
    near(o[..., others, :], expected[0][..., others, :], 2e-5)
    near(dq[..., others, :], expected[1][..., others, :], 2e-5)
