"""Fused kernels compiled on a GPU: bf16, many sizes, poisoned outputs, equal bits, offsets past 2³¹, CUDA graphs.

Errors are measured against float64. bf16 results carry 8 bits: half a unit in the last place of the largest value is
what `limit` allows, besides what sums of many terms add.
"""

import pytest
import torch
import torch.nn.functional as F

from kernels import (
    cross_entropy,
    elementwise,
    layernorm,
    matmul,
    reference,
    rmsnorm,
    rope,
    softmax,
    swiglu,
    weighted_sum,
)
from kernels.adamw import AdamW
from kernels.dropout import dropout
from kernels.linear_cross_entropy import linear_cross_entropy

from .fused import compare

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 7, 50, 1000, 4096, 4097, 8192, 8193, 16384, 16385, 32768, 32769, 200_003]


def gpu(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def limit(dtype, rows=8):
    """Rounding of values up to 8, and sums of weight gradients over the rows."""
    return {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}[dtype] * max(1, rows / 8) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
def test_row_kernels_at_every_width(cols, dtype):
    x, w, b = gpu(8, cols, dtype=dtype), 1 + 0.1 * gpu(cols, dtype=dtype), gpu(cols, dtype=dtype, seed=1)
    near = limit(dtype)
    compare(rmsnorm.rms_norm, reference.rms_norm, x, w, tolerance=near)
    compare(layernorm.layer_norm, reference.layer_norm, x, w, b, tolerance=near)
    compare(softmax.softmax, reference.softmax, x, tolerance=near)
    compare(lambda *t: rmsnorm.add_rms_norm(*t, 1e-5, "silu"), lambda *t: reference.add_rms_norm(*t, 1e-5, "silu"), x,
            gpu(8, cols, dtype=dtype, seed=2), w, tolerance=2 * near)
    compare(weighted_sum.weighted_sum, reference.weighted_sum, x, w, tolerance=near * max(1, cols / 100) ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 50), (1000, 4097), (0, 8)], ids=str)
def test_pointwise_kernels(shape, dtype):
    x, y = gpu(*shape, dtype=dtype), gpu(*shape, dtype=dtype, seed=1)
    compare(elementwise.add, reference.add, x, y, tolerance=limit(dtype))
    compare(elementwise.gelu, reference.gelu, x, tolerance=limit(dtype))
    compare(swiglu.swiglu, reference.swiglu, x, y, tolerance=limit(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_fill_a_persistent_grid(dtype):
    x, w = gpu(5000, 1024, dtype=dtype), gpu(1024, dtype=dtype)
    compare(rmsnorm.rms_norm, reference.rms_norm, x, w, tolerance=limit(dtype, 5000))
    compare(layernorm.layer_norm, reference.layer_norm, x, w, w, tolerance=limit(dtype, 5000))


def test_outputs_are_written_everywhere():
    """Fresh memory is filled with NaN first: an element that no program writes shows."""
    x, w = gpu(300, 4097), gpu(4097)
    for function in (lambda: rmsnorm.rms_norm(x, w), lambda: layernorm.layer_norm(x, w, w), lambda: softmax.softmax(x),
                     lambda: swiglu.swiglu(x, x), lambda: elementwise.gelu(x), lambda: matmul.matmul(x, x.T)):
        poison = [torch.full((300, 4097), float("nan"), device="cuda") for _ in range(3)]
        del poison
        assert function().isfinite().all()


def test_gradients_repeat_bit_for_bit():
    x, w = gpu(3000, 4096, dtype=torch.bfloat16).requires_grad_(), gpu(4096, dtype=torch.bfloat16).requires_grad_()
    first = torch.autograd.grad(rmsnorm.rms_norm(x, w).sum(), (x, w))
    for _ in range(10):
        again = torch.autograd.grad(rmsnorm.rms_norm(x, w).sum(), (x, w))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# RELIABILITY 42
def test_offsets_past_two_to_the_thirty_first():
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    rows = 2**31 // 4096 + 17
    x = torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16)
    x[-5:] = gpu(5, 4096, dtype=torch.bfloat16)
    w, last = gpu(4096, dtype=torch.bfloat16), x[-5:].clone()
    for function in (lambda t: rmsnorm.rms_norm(t, w), lambda t: softmax.softmax(t), elementwise.gelu,
                     lambda t: swiglu.swiglu(t, t), lambda t: layernorm.layer_norm(t, w)):
        assert torch.equal(function(x)[-5:], function(last))


@pytest.mark.parametrize("sizes", [(128, 128, 128), (1000, 72, 136), (4096, 4096, 4096), (513, 1024, 257), (7, 9, 11)],
                         ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epilogue", [None, "gelu"])
def test_matmul(sizes, dtype, epilogue):
    m, k, n = sizes
    a, b, bias = gpu(m, k, dtype=dtype) * k**-0.5, gpu(k, n, dtype=dtype, seed=1), gpu(n, dtype=dtype, seed=2)
    for left, right in ((a, b), (a.T.contiguous().T, b), (a, b.T.contiguous().T)):
        ours = matmul.matmul(left, right, bias, epilogue=epilogue).double()
        exact = reference.matmul(a.double(), b.double(), bias.double(), epilogue)
        torch.testing.assert_close(ours, exact, atol=limit(dtype), rtol=limit(dtype))


def test_matmul_over_many_seeds():
    """Each shipped configuration of Hopper's matrix instructions, repeatedly: miscompiled ones fail now and then."""
    for size in (512, 2048):
        for seed in range(20):
            a, b = (gpu(size, size, dtype=torch.bfloat16, seed=2 * seed + i) for i in range(2))
            ours = matmul.matmul(a, b)
            exact = a.double() @ b.double()
            assert ((ours.double() - exact).abs().max() / exact.abs().max()) < 2**-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 50, 4097, 151_936])
def test_cross_entropy(vocabulary, dtype):
    z, t = 3 * gpu(33, vocabulary, dtype=dtype), torch.arange(33, device="cuda") * 7919 % vocabulary
    t[3] = -100
    for options in ({}, {"label_smoothing": 0.1}):
        compare(lambda z, o=options: cross_entropy.cross_entropy(z, t, **o),
                lambda z, o=options: F.cross_entropy(z, t, **o), z, tolerance=1e-3)


def test_linear_cross_entropy_saves_the_logits():
    n, d, v = 4096, 512, 100_000
    x, w = gpu(n, d, dtype=torch.bfloat16).requires_grad_(), (gpu(v, d, dtype=torch.bfloat16) * 0.05).requires_grad_()
    t = torch.arange(n, device="cuda") * 7919 % v
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(x, w, t, chunk_bytes=2**26)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 0.7 * n * v * 2  # the logits alone are n·v·2 bytes
    exact = F.cross_entropy(x.detach().double() @ w.detach().double().T, t)
    torch.testing.assert_close(loss.double(), exact, atol=1e-2, rtol=1e-2)


def test_rope_and_dropout_in_bf16():
    angles = torch.rand(2048, 64, device="cuda")
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    qk = gpu(2, 2048, 3, 8, 128, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)[:2]
    compare(lambda x: rope.rope(x, cos, sin), lambda x: reference.rope(x, cos.double(), sin.double()), qk,
            tolerance=limit(torch.bfloat16))
    x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert abs((dropout(x, 0.25, seed=1) != 0).float().mean().item() - 0.75) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adamw_over_a_thousand_parameters(dtype):
    ours = [gpu(n % 37 + 1, 100, dtype=dtype, seed=n).requires_grad_() for n in range(1000)]
    theirs = [p.detach().float().requires_grad_() for p in ours]
    mine, torchs = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    mine.step()
    torchs.step()
    near = 1e-6 if dtype is torch.float32 else limit(dtype)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach().float(), q.detach(), atol=near, rtol=near)


def test_kernels_replay_in_a_cuda_graph():
    x, w = gpu(512, 4096), gpu(4096)
    y = rmsnorm.rms_norm(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = softmax.softmax(rmsnorm.rms_norm(x, w))
    x.copy_(gpu(512, 4096, seed=5))
    graph.replay()
    assert torch.equal(captured, softmax.softmax(rmsnorm.rms_norm(x, w)))
    assert not torch.equal(y, rmsnorm.rms_norm(x, w))


def test_compiled_by_inductor_under_autocast():
    x, w = gpu(64, 256).requires_grad_(), gpu(256).requires_grad_()

    def f(x, w):
        return swiglu.swiglu(rmsnorm.rms_norm(x, w), rmsnorm.rms_norm(x, w)).float().sum()

    with torch.autocast("cuda", torch.bfloat16):
        ours, plain = torch.compile(f, fullgraph=True)(x, w), f(x, w)
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-1)
    ours.backward()
    assert x.grad.isfinite().all() and w.grad.dtype is torch.float32


@pytest.mark.multigpu
def test_tensors_on_another_device():
    x, w = gpu(8, 64).to("cuda:1"), gpu(64).to("cuda:1")
    torch.testing.assert_close(rmsnorm.rms_norm(x, w), F.rms_norm(x, (64,), w, 1e-5))
    a = gpu(256, 256, dtype=torch.bfloat16).to("cuda:1")
    torch.testing.assert_close(matmul.matmul(a, a), a @ a, atol=1.0, rtol=2e-2)  # by descriptors
