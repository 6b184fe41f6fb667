"""Matrix products, cross-entropy and both together: interpreted on a CPU, compiled where there is a
GPU.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels import cross_entropy as cross_entropy_module
from kernels import linear_cross_entropy as lce_module
from kernels import matmul as matmul_module
from kernels import reference
from kernels._dispatch import forced
from kernels._rows import Launch
from kernels.cross_entropy import cross_entropy, loss_and_gradient
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.matmul import matmul

from .fused import DEVICE, compare, draw
from .near import near

EXACT = {"precision": "ieee"}  # without effect in the interpreter; on a GPU fp32 is then fp32


def test_relu_of_what_is_not_positive(either):
    a = torch.tensor(
        [[float("-inf")], [-1.0], [-0.0], [0.0], [2.0], [float("inf")], [float("nan")]],
        device=DEVICE,
    )
    y = matmul(a, torch.ones(1, 1, device=DEVICE), epilogue="relu", **EXACT)[:, 0]
    assert y[:6].tolist() == [0, 0, 0, 0, 2, float("inf")] and y[6].isnan()
    assert not y[:2].signbit().any()


@pytest.mark.parametrize(
    "epilogue, value",
    [("gelu", 200.0), ("silu", 200.0), ("rms_norm", 200.0), ("relu", 1e-4), ("leaky_relu", 1e-4)],
)
def test_gradients_of_products_that_fp16_does_not_hold(epilogue, value, either):
    """a·b is ∓80,000, beyond fp16, and f of it 0 or, for the norm, ∓1.

    Or it is ∓2e-8, which fp16 rounds to 0.
    """
    a, b = (
        torch.full(shape, value, device=DEVICE, dtype=torch.float16) for shape in ((3, 2), (2, 4))
    )
    b *= torch.tensor([-1] * 4 if epilogue in ("gelu", "silu") else [-1, 1, -1, 1], device=DEVICE)
    compare(
        lambda *t: matmul(*t, epilogue=epilogue),
        lambda *t: reference.matmul(*t, None, epilogue),
        a,
        b,
    )


def test_a_product_under_autocast_is_not_rounded_before_its_epilogue(either):
    a = draw(8, 100) * 0.1
    b = draw(100, 9, seed=1)
    bias = draw(9, seed=2)
    with torch.autocast(DEVICE, torch.float16):
        y = matmul(a, b, bias, epilogue="gelu")
    assert torch.equal(y, matmul(a.half(), b.half(), bias, epilogue="gelu"))


def test_strides_beyond_32_bits():
    """A second tile of the depth lies 2³¹ elements and more beyond the first.

    Little of that memory is touched.
    """
    depth = 33 if DEVICE == "cpu" else 65
    storage = torch.empty((depth - 1) * 2**26 + 2, dtype=torch.float16, device=DEVICE)
    a, b = storage.as_strided((2, depth), (1, 2**26)), draw(depth, 3, dtype=torch.float16)
    a.copy_(draw(2, depth, dtype=torch.float16, seed=1))
    for left, right in ((a, b), (b.T, a.T)):
        y = torch.empty(left.shape[0], right.shape[1], device=DEVICE, dtype=torch.float16)
        matmul_module.launch_pointers(left, right, None, y, None, "ieee")
        assert torch.equal(y, matmul(left.contiguous(), right.contiguous()))


# Regression: a group order with a fixed group size skips tiles where the last group is smaller
@pytest.mark.parametrize("row_tiles, col_tiles", [(1, 1), (9, 3), (15, 2), (16, 5), (3, 7)])
def test_grouped_order_visits_every_tile_once(row_tiles, col_tiles):
    a = torch.arange(1.0, row_tiles * 32 + 1, device=DEVICE)[:, None]
    y = torch.full((row_tiles * 32, col_tiles * 32), float("nan"), device=DEVICE)
    with forced(matmul=Launch(block=32, rows=32)):
        matmul_module.launch_pointers(
            a, torch.ones(1, y.shape[1], device=DEVICE), None, y, None, "ieee"
        )
    assert torch.equal(y, a.expand_as(y))


def test_tiled_and_persistent_kernels():
    a, b, bias = (
        draw(*s, dtype=torch.float16, seed=i) for i, s in enumerate(((72, 40), (40, 88), (88,)))
    )
    exact = reference.matmul(a.double(), b.double(), bias.double(), "gelu")
    for left, right in itertools.product((a, a.T.contiguous().T), (b, b.T.contiguous().T)):
        y = torch.full((72, 88), float("nan"), dtype=torch.float16, device=DEVICE)
        assert matmul_module.launch_persistent(left, right, bias, y, "gelu")
        near(y, exact, 2e-2, 2e-3)  # rounded once to 11 bits, up to 30
        y.fill_(float("nan"))
        matmul_module.launch_pointers(left, right, bias, y, "gelu", "ieee", group=1)
        near(y, exact, 2e-2, 2e-3)
    odd = draw(7, 9, dtype=torch.float16)
    assert not matmul_module.launch_persistent(
        odd, odd.T, None, draw(7, 7, dtype=torch.float16), None
    )


# Regression: every matrix with at most 1,024 rows got small tiles, which took 1.7 of cuBLAS's time.
def test_a_tile_is_large_where_it_leaves_no_multiprocessor_idle():
    def tile(rows, cols, store_bytes=2):
        launch = matmul_module.persistent_tile(rows, cols, 132, store_bytes)
        return launch.rows, launch.block, launch.stages

    assert tile(8192, 8192) == tile(1024, 8192) == tile(8192, 1024) == (128, 256, 4)
    assert tile(8192, 8192, store_bytes=4) == (128, 256, 3)
    assert tile(512, 4096) == (128, 128, 5)  # 128 tiles for 132 multiprocessors
    assert tile(64, 4096) == tile(16, 8192) == (64, 128, 4)


def targets_for(rows, vocabulary, ignored=()):
    t = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(rows))
    t[list(ignored)] = -100
    return t.to(DEVICE)


# The loss is defined at the edges: all labels ignored, masked classes, huge logits, no rows.
def test_cross_entropy_at_the_edges(either):
    z = draw(3, 10).requires_grad_()
    ignored = torch.full((3,), -100, device=DEVICE)
    loss = cross_entropy(z, ignored)
    loss.backward()
    assert loss == 0 and not z.grad.any()
    masked = draw(2, 10)
    masked[:, 4:] = float("-inf")
    t = torch.tensor([0, 3], device=DEVICE)
    torch.testing.assert_close(cross_entropy(masked, t), F.cross_entropy(masked, t))
    assert cross_entropy(1e4 * draw(3, 10), targets_for(3, 10)).isfinite()
    assert (
        cross_entropy(
            torch.empty(0, 5, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
        )
        == 0
    )


@pytest.mark.parametrize(
    "call",
    [
        cross_entropy,
        functools.partial(cross_entropy, reduction="none", label_smoothing=0.1),
        lambda z, t: linear_cross_entropy(z, torch.eye(70, device=z.device), t, chunk_bytes=280),
    ],
    ids=["cross_entropy", "smoothed", "linear_cross_entropy"],
)
def test_a_target_outside_the_vocabulary(call, either, monkeypatch):
    """Named on a CPU; on a GPU, which nobody waits for, its row's loss and gradient are NaN."""
    z, t = draw(4, 70).requires_grad_(), torch.tensor([1, 70, -100, -1], device=DEVICE)
    if DEVICE == "cpu":
        with pytest.raises(
            ValueError,
            match="targets has class 70 in row 1; allowed: 0 to 69, or ignore_index, -100",
        ):
            call(z, t)
        with pytest.raises(ValueError, match="class -3 in row 0"):
            call(z, t - 4)
    for module in (cross_entropy_module, lce_module):
        monkeypatch.setattr(module, "check_classes", lambda *_: None)
    with forced(
        **dict.fromkeys(("cross_entropy_both", "cross_entropy_gradient"), Launch(32, warps=1))
    ):
        loss = call(z, t)
        (grad,) = torch.autograd.grad(loss.sum(), z)
    assert loss.isnan().reshape(-1).tolist() in ([True], [False, True, False, True])
    assert grad[[1, 3]].isnan().all() and grad[0].isfinite().all() and not grad[2].any()


@pytest.mark.parametrize("offset", [1e4, 1e6, 1e7, -1e7])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"reduction": "none"}], ids=str)
def test_cross_entropy_of_large_logits(offset, options, either):
    """What all logits have in common cancels: of 1e7 + z fp32 keeps z to 1, and exact results are
    those of that.
    """
    z, t = (draw(3, 50) * 3).round() + offset, targets_for(3, 50)
    compare(
        lambda z: cross_entropy(z, t, **options),
        lambda z: F.cross_entropy(z, t, **options),
        z,
        tolerance=2e-6,
    )


LOSSES = {
    "mean": cross_entropy,
    "sum": functools.partial(cross_entropy, reduction="sum"),
    "none": functools.partial(cross_entropy, reduction="none"),
    "linear": lambda z, t: linear_cross_entropy(z, torch.eye(40, device=z.device), t),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("factor", [3.0, float("inf"), float("nan")])
def test_ignored_rows_have_no_gradient_whatever_arrives_in_each_backward(name, factor, either):
    """Loss scaling overflows now and then: rows that count nothing stay out of it, whatever they
    hold.

    A loss may be changed in place.
    """
    z, t = draw(3, 40), targets_for(3, 40, ignored=(1,))
    z[1] = float("-inf")
    z.requires_grad_()
    loss = LOSSES[name](z, t)
    loss /= 2
    (expected,) = torch.autograd.grad(LOSSES[name](z, t).sum() * (factor / 2), z)
    for again in range(1 if name == "linear" else 2):
        (grad,) = torch.autograd.grad(loss, z, torch.full_like(loss, factor), retain_graph=True)
        assert not grad[1].any() and grad[[0, 2]].isfinite().all() == (factor == 3), again
        torch.testing.assert_close(grad, expected, atol=1e-7, rtol=1e-6, equal_nan=True)
        grad.zero_()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "reduction": "none"}], ids=str)
def test_the_gradient_in_place_of_the_logits(options, either):
    x, t = draw(3, 50).requires_grad_(), targets_for(3, 50, ignored=(1,))
    z = 2 * x
    loss = cross_entropy(z, t, inplace_backward=True, **options)
    upstream = draw(*loss.shape, seed=1)
    grad, dx = torch.autograd.grad(loss, (z, x), upstream, retain_graph=True)
    assert grad.data_ptr() == z.data_ptr() and not grad.requires_grad
    (expected,) = torch.autograd.grad(cross_entropy(2 * x, t, **options), x, upstream)
    near((2 * grad, dx), (expected, expected), 1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_logits_that_somebody_else_needs_are_not_overwritten(either):
    x, t = draw(3, 50).requires_grad_(), targets_for(3, 50)
    for z in (x, (2 * x)[:, ::2], (2 * x[:, :1]).expand(3, 50)):
        with pytest.raises(ValueError, match=r"inplace_backward.*a leaf or not contiguous"):
            cross_entropy(z, t % z.shape[1], inplace_backward=True)
    z = x.tanh()  # whose backward reads its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(z, t, inplace_backward=True).backward()
    assert not cross_entropy(x.detach(), t, inplace_backward=True).requires_grad
    compiled = torch.compile(
        lambda x: cross_entropy(2 * x, t, inplace_backward=True), backend="aot_eager"
    )
    ours, theirs = (
        torch.autograd.grad(f(x), x)[0] for f in (compiled, lambda x: F.cross_entropy(2 * x, t))
    )
    near(ours, theirs, 1e-6)


def test_linear_cross_entropy_goes_backward_once():
    x, w = draw(3, 8).requires_grad_(), draw(10, 8, seed=1)
    loss = linear_cross_entropy(x, w, targets_for(3, 10))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call it again"):
        loss.backward()


def error_of_chunks(dtype, chunks):
    """Return the relative error of dw, by norms, if that many chunks add to it."""
    x = draw(32, 8, dtype=dtype)
    w = draw(20, 8, dtype=dtype, seed=1) * 0.1
    t = targets_for(32, 20)
    leaf = w.requires_grad_()
    exact = w.detach().double().requires_grad_()
    rows = 32 // chunks
    chunk_bytes = rows * 20 * 2  # logits of 20 classes in 16 bits
    (dw,) = torch.autograd.grad(linear_cross_entropy(x, leaf, t, chunk_bytes=chunk_bytes), leaf)
    (expected,) = torch.autograd.grad(F.cross_entropy(x.double() @ exact.T, t), exact)
    assert dw.dtype == dtype
    return ((dw.double() - expected).norm() / expected.norm()).item()


def test_the_error_of_many_chunks_is_that_of_one(either):
    """dw is rounded once, however many chunks add to it. Triton's interpreter has no bf16."""
    for dtype in (torch.float16, torch.bfloat16)[: 1 if either and DEVICE == "cpu" else 2]:
        assert (
            error_of_chunks(dtype, 32)
            < 1.2 * error_of_chunks(dtype, 1)
            < 3 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("chunk_bytes", [40, 10**9])
def test_an_fp32_weight_under_autocast_gets_the_sum_unrounded(chunk_bytes, either):
    x = draw(6, 8)
    w = draw(10, 8, seed=1)
    t = targets_for(6, 10)
    leaf = w.clone().requires_grad_()
    with torch.autocast(DEVICE, torch.float16):
        loss = linear_cross_entropy(x, leaf, t, chunk_bytes=chunk_bytes)
    (dw,) = torch.autograd.grad(loss, leaf)
    logits = (x.half() @ w.half().T).double()  # rounded, as a linear layer's
    (dz,) = torch.autograd.grad(F.cross_entropy(logits.requires_grad_(), t), logits)
    expected = dz.half().double().T @ x.half().double()
    assert dw.dtype == torch.float32
    near(dw, expected, 2e-4, 1e-3)
    assert not torch.equal(dw, dw.half().float())


def test_linear_cross_entropy_makes_only_the_gradients_that_are_needed():
    x = draw(6, 8)
    w = draw(10, 8, seed=1).requires_grad_()
    t = targets_for(6, 10)
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, w, t)
    assert counter.get_total_flops() == 2 * (2 * 6 * 8 * 10)
    loss.backward()
    assert w.grad is not None
    assert linear_cross_entropy(x, w.detach(), t).grad_fn is None


def test_linear_cross_entropy_never_holds_all_logits(monkeypatch):
    seen = []

    def spy(z, *args, **kwargs):
        seen.append(z.shape[0])
        return loss_and_gradient(z, *args, **kwargs)

    monkeypatch.setattr(lce_module, "loss_and_gradient", spy)
    linear_cross_entropy(draw(10, 4), draw(7, 4, seed=1), targets_for(10, 7), chunk_bytes=3 * 7 * 4)
    assert sum(seen) == 10 and max(seen) <= 3
    # 16 bits: in chunks only while the logits, 2·N·V bytes, take more than dw's sum in fp32, 4·V·D.
    for rows, chunks in ((8, 1), (9, 3)):
        seen.clear()
        x, w = (draw(n, 4, dtype=torch.float16, seed=n).requires_grad_() for n in (rows, 7))
        linear_cross_entropy(x, w, targets_for(rows, 7), chunk_bytes=3 * 7 * 2)
        assert sum(seen) == rows and len(seen) == chunks
