"""Row kernels (norms, softmax, weighted sum): in Triton's interpreter on a CPU, compiled where
there is a GPU.
"""

import pytest
import torch

from kernels import reference
from kernels import softmax as softmax_module
from kernels._dispatch import forced, launch
from kernels._rows import Launch, sum_columns
from kernels.layernorm import layer_norm
from kernels.rmsnorm import add_rms_norm, rms_norm
from kernels.softmax import softmax

from .fused import DEVICE, compare, draw
from .near import near


def test_the_norm_is_that_of_the_sum_as_it_is_returned():
    """Backward starts from the rounded sum: forward has to normalise the same values."""
    w = torch.ones(64, device=DEVICE)
    # sums near 2 have a spacing of 2⁻⁹
    residual = torch.ones(4, 64, device=DEVICE, dtype=torch.float16)
    y, total = add_rms_norm(draw(4, 64) * 2**-11 + 1, residual, w)
    assert torch.equal(y, rms_norm(total.float(), w))


def test_add_rms_norm_with_only_one_of_its_results_used():
    x, residual, w = (t.requires_grad_() for t in (draw(3, 8), draw(3, 8, seed=1), draw(8)))
    y, total = add_rms_norm(x, residual, w)
    grads = torch.autograd.grad(total.sum(), (x, residual), retain_graph=True)
    assert all(torch.equal(g, torch.ones_like(g)) for g in grads)
    dx, dresidual = torch.autograd.grad(y.sum(), (x, residual))
    assert torch.equal(dx, dresidual)


@pytest.mark.parametrize("long", [False, True])
def test_the_gradient_of_layer_norms_bias_has_its_own_dtype(long, request, either):
    """50 rows of 2,560: the sum, 128,000, is beyond fp16, which the weight has."""
    if long:
        request.getfixturevalue("in_pieces")
    x, w = draw(50, 6), torch.ones(6, device=DEVICE, dtype=torch.float16).requires_grad_()
    bias = torch.zeros(6, device=DEVICE, requires_grad=True)
    y = layer_norm(x, w, bias)
    dw, db = torch.autograd.grad(y, (w, bias), torch.full_like(y, 2560.0))
    assert (dw.dtype, db.dtype) == (torch.float16, torch.float32)
    assert torch.equal(db, torch.full_like(bias, 128_000.0))


@pytest.mark.parametrize("long", [False, True])
def test_softmax_of_infinities(long, request):
    if long:
        request.getfixturevalue("in_pieces")
    x = draw(3, 80)
    x[0, :70] = float("-inf")
    x[1] = float("-inf")
    x[2] *= 1e4
    ours, theirs = softmax(x), torch.softmax(x, -1)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[1].isnan().all() and (ours[0, :70] == 0).all()


def test_softmax_of_wide_rows_that_stay_in_16_bits():
    """Among parts that have nothing, as under a mask, and numbers whose product with log2 e
    overflows.
    """
    # which has as large numbers
    x = draw(6, 9000, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    x[0, :8999] = x[1] = float("-inf")
    x[2] = x[3, 1:] = torch.finfo(torch.bfloat16).min
    x[4] *= 5e37
    x[5, 7] = float("nan")
    y, expected = torch.empty_like(x), torch.softmax(x.float(), -1)
    launch(softmax_module.wide_forward_kernel, (6,), x, y, 9000, 9000, BLOCK=16384, num_warps=4)
    torch.testing.assert_close(y, expected.to(x.dtype), atol=1e-5, rtol=1e-2, equal_nan=True)
    half = draw(2, 8200, dtype=torch.float16)
    torch.testing.assert_close(
        softmax(half), torch.softmax(half.float(), -1).half(), atol=1e-6, rtol=1e-3
    )


@pytest.mark.parametrize("cols", [16384 + 24, 32768 + 24])
def test_blocks_of_long_rows_are_merged_by_count_and_maximum(cols):
    """Rows in pieces, whose mean is 100, and whose last piece is short and holds the maximum."""
    x = (draw(2, cols) + 100).sort().values
    normal = layer_norm(x, torch.ones(cols, device=DEVICE))
    # fp32 rounds numbers near 100 by up to 4e-6, and sums in another order by more
    torch.testing.assert_close(
        normal.double(), torch.layer_norm(x.double(), (cols,)), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(softmax(x).double(), x.double().softmax(1), atol=1e-6, rtol=0)


def test_forms_of_a_launch_agree(many_rows):
    x, w = draw(11, 50), 1 + 0.1 * draw(50, seed=1)
    upstream = draw(11, 50, seed=3)
    results = []
    for form in (Launch(64), Launch(64, rows=4, stages=2, per_sm=1), Launch(64, rows=2, per_sm=2)):
        with forced(rmsnorm=form, rmsnorm_backward=form, softmax=form):
            leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = rms_norm(leaf, weight)
            results.append((y, *torch.autograd.grad(y, (leaf, weight), upstream), softmax(x)))
    for other in results[1:]:
        near(results[0], other, 2e-6)  # sums of 50 terms in another order


@pytest.mark.parametrize("count", [1, 64, 130])
def test_second_stage_sums_every_share(count):
    parts = draw(2, count, 33)
    near(sum_columns(parts, torch.float32, torch.float32), [*parts.sum(1)], 1e-5)
    half, full = sum_columns(parts, torch.float16, torch.float32)
    assert (
        torch.equal(half, sum_columns(parts[:1], torch.float16)[0]) and full.dtype == torch.float32
    )


def test_softmax_backward_that_reads_one_tensor_twice(monkeypatch):
    monkeypatch.setattr(softmax_module, "ONE_TILE_BACKWARD", 4)
    compare(softmax, reference.softmax, draw(3, 50))


def test_mixed_types_of_residual_and_branch():
    x, residual, w = (
        t.requires_grad_()
        for t in (draw(4, 16, dtype=torch.float16), draw(4, 16, seed=1), draw(16))
    )
    y, total = add_rms_norm(x, residual, w)
    (y.sum() + total.sum()).backward()
    assert (
        total.dtype is torch.float32
        and x.grad.dtype is torch.float16
        and residual.grad.dtype is torch.float32
    )
