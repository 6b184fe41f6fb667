"""Fused kernels compiled on a GPU: bf16, many sizes, poisoned outputs, equal bits, offsets past
2³¹, CUDA graphs.

Errors are measured against float64. bf16 results carry 8 bits: half a unit in the last place of the
largest value is what `limit` allows, besides what sums of many terms add.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from kernels import reference
from kernels.cross_entropy import cross_entropy
from kernels.elementwise import gelu
from kernels.layernorm import layer_norm
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.matmul import matmul
from kernels.rmsnorm import add_rms_norm, rms_norm
from kernels.softmax import softmax
from kernels.swiglu import swiglu
from kernels.weighted_sum import weighted_sum

from .fused import compare, draw, results
from .near import near, same_bits
from .operations import OPERATIONS, compare_at, shapes_of

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 7, 50, 1000, 4096, 4097, 8192, 8193, 16384, 16385, 32768, 32769, 200_003]


def limit(dtype, rows=8):
    """Return the rounding of values up to 8, and of sums of weight gradients over the rows.

    Rounding errors of a sum grow with the root of its length.
    """
    of_values = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}
    return of_values[dtype] * max(1, rows / 8) ** 0.5


ROWS = (
    "add",
    "gelu",
    "swiglu",
    "rope",
    "softmax",
    "weighted_sum",
    "rms_norm",
    "add_rms_norm_silu",
    "layer_norm",
)


@pytest.mark.parametrize(
    "cols, dtype",
    [
        *((cols, torch.bfloat16) for cols in WIDTHS),
        *((cols, torch.float32) for cols in WIDTHS[1::2]),
        *((cols, torch.float16) for cols in WIDTHS[2::4]),
    ],
    ids=str,
)
def test_rows_of_every_width(cols, dtype, poisoned):
    more = {"add_rms_norm_silu": 2, "weighted_sum": max(1, cols / 100) ** 0.5}
    # element-wise kernels have one block for all
    for name in ROWS if cols in WIDTHS[1::5] else ROWS[4:]:
        compare_at(name, ((8,), cols), dtype, limit(dtype) * more.get(name, 1))


@pytest.mark.parametrize("cols", WIDTHS[1:7])
def test_two_stages_of_rows_of_every_width(cols, many_rows, poisoned):
    for name in ("rms_norm", "add_rms_norm_silu", "layer_norm"):
        compare_at(name, ((8,), cols), torch.bfloat16, 2 * limit(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_fill_a_persistent_grid(dtype):
    for name in ROWS:
        compare_at(name, ((5000,), 1024), dtype, limit(dtype, 5000))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 50, 4097, 151_936])
def test_cross_entropy(vocabulary, dtype):
    for name in ("cross_entropy", "cross_entropy_{'label_smoothing': 0.1}"):
        compare_at(name, ((33,), 1, vocabulary), dtype, 1e-3)


def test_gradients_repeat_bit_for_bit():
    x, w = (
        draw(3000, 4096, dtype=torch.bfloat16).requires_grad_(),
        draw(4096, dtype=torch.bfloat16).requires_grad_(),
    )
    first = results(rms_norm, (x, w))
    for _ in range(10):
        same_bits(results(rms_norm, (x, w)), first)


# An offset in 32 bits would wrap here, and the last rows would be read from a wrong address.
def test_offsets_past_two_to_the_thirty_first():
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    rows = 2**31 // 4096 + 17
    x = torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16)
    x[-5:] = draw(5, 4096, dtype=torch.bfloat16)
    w, last = draw(4096, dtype=torch.bfloat16), x[-5:].clone()
    for function in (
        lambda t: rms_norm(t, w),
        softmax,
        gelu,
        lambda t: swiglu(t, t),
        lambda t: layer_norm(t, w),
    ):
        assert torch.equal(function(x)[-5:], function(last))


def test_rows_of_more_than_sixteen_million_elements():
    """2²⁴ + 9 columns, and rows 2³¹ elements apart: what is last in each row is right."""
    cols = 2**24 + 9
    storage = torch.empty(2 * 2**31 + cols, dtype=torch.float16, device="cuda")
    x = storage.as_strided((3, cols), (2**31, 1))
    x.copy_(draw(3, cols, dtype=torch.float16))
    w, t = 1 + 0.1 * draw(cols, dtype=torch.float16), torch.tensor([0, cols - 1, 7], device="cuda")
    for function in (
        lambda x: rms_norm(x, w),
        lambda x: layer_norm(x, w, w),
        softmax,
        lambda x: swiglu(x, x),
        gelu,
        lambda x: add_rms_norm(x, x, w)[0],
        lambda x: weighted_sum(x, w)[:, None],
        lambda x: cross_entropy(x, t, reduction="none")[:, None],
    ):
        apart, close = (
            results(function, [leaf.requires_grad_()]) for leaf in (x.detach(), x.clone())
        )
        near(apart, close, 1e-2)
    near(rms_norm(x, w)[2], F.rms_norm(x[2].double(), (cols,), w.double(), 1e-5), 1e-2)


@pytest.mark.parametrize(
    "sizes",
    [(128, 128, 128), (1000, 72, 136), (4096, 4096, 4096), (513, 1024, 257), (7, 9, 11)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul(sizes, dtype):
    """Every other size, of those by descriptors and of those by pointers, has an epilogue."""
    m, k, n = sizes
    epilogue = "gelu" if m in (513, 1000) else None
    a = draw(m, k, dtype=dtype) * k**-0.5
    b = draw(k, n, dtype=dtype, seed=1)
    bias = draw(n, dtype=dtype, seed=2)
    for left, right in ((a, b), (a.T.contiguous().T, b), (a, b.T.contiguous().T)):
        ours = matmul(left, right, bias, epilogue=epilogue).double()
        exact = reference.matmul(a.double(), b.double(), bias.double(), epilogue)
        near(ours, exact, limit(dtype))


@pytest.mark.parametrize("size", [256, 2048])
@pytest.mark.parametrize("epilogue", ["gelu", "silu", "leaky_relu", "rms_norm"])
def test_gradients_of_products_beyond_fp16(epilogue, size):
    """a·b is beyond fp16 and computed again for the gradient, in fp32 (through descriptors for both
    sizes).
    """
    cols = 256 if epilogue == "rms_norm" else size
    a = (draw(size, size, dtype=torch.float16) * 60).requires_grad_()
    b = (draw(size, cols, dtype=torch.float16, seed=1) * 60).requires_grad_()
    y = matmul(a, b, epilogue=epilogue)
    exact = [t.detach().double().requires_grad_() for t in (a, b)]
    z = reference.matmul(*exact, None, epilogue)
    product = exact[0] @ exact[1]
    # Beside 0, where the slope of leaky ReLU jumps, fp32 and float64 may lie on different sides.
    clear = y.isfinite() & (product.abs() > 1)
    upstream = torch.where(clear, 1e-3 * draw(size, cols, seed=2), 0.0)
    assert product.abs().max() > 65504 and upstream.any()
    grads = torch.autograd.grad(y, (a, b), upstream.to(y.dtype))
    for x, e in zip(
        grads, torch.autograd.grad(z, exact, upstream.to(y.dtype).double()), strict=True
    ):
        assert x.isfinite().all()
        assert (x.double() - e).abs().max() < 1e-2 * e.abs().max() + 1e-4


def test_matmul_over_many_seeds():
    """Each shipped configuration of Hopper's matrix instructions, repeatedly: miscompiled ones fail
    now and then.
    """
    for size in (512, 2048):
        for seed in range(20):
            a, b = (draw(size, size, dtype=torch.bfloat16, seed=2 * seed + i) for i in range(2))
            ours = matmul(a, b)
            exact = a.double() @ b.double()
            assert ((ours.double() - exact).abs().max() / exact.abs().max()) < 2**-7


@pytest.mark.parametrize(
    "options, dtype, offset",
    [
        ({}, torch.float16, 2.0**15),
        ({}, torch.bfloat16, 2.0**22),
        ({"reduction": "none"}, torch.bfloat16, 2.0**22),
    ],
    ids=str,
)
def test_cross_entropy_of_large_logits_of_16_bits(options, dtype, offset):
    """What a row's logits have in common cancels.

    In bf16, whose numbers are 2¹⁵ apart there, many are equal.
    """
    z = draw(33, 5000).clamp(-4, 4).round().to(dtype) * (offset * torch.finfo(dtype).eps) + offset
    t = z.argmax(1)  # the loss is the logarithm of how many are largest
    compare(
        lambda z: cross_entropy(z, t, **options),
        lambda z: F.cross_entropy(z, t, **options),
        z,
        tolerance=5e-3,
    )


def test_linear_cross_entropy_saves_the_logits():
    n = 4096  # rows
    d = 512  # width
    v = 100_000  # classes
    x = draw(n, d, dtype=torch.bfloat16).requires_grad_()
    w = (draw(v, d, dtype=torch.bfloat16) * 0.05).requires_grad_()
    t = torch.arange(n, device="cuda") * 7919 % v
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(x, w, t, chunk_bytes=2**26)
    loss.backward()
    # the logits alone are n·v·2 bytes
    assert torch.cuda.max_memory_allocated() - before < 0.7 * n * v * 2
    exact = F.cross_entropy(x.detach().double() @ w.detach().double().T, t)
    near(loss, exact, 1e-2)


def test_kernels_replay_in_a_cuda_graph():
    x, w = draw(512, 4096), draw(4096)
    y = rms_norm(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = softmax(rms_norm(x, w))
    x.copy_(draw(512, 4096, seed=5))
    graph.replay()
    assert torch.equal(captured, softmax(rms_norm(x, w)))
    assert not torch.equal(y, rms_norm(x, w))


# Inductor has Triton contract products and sums in another way than Triton by itself, and its own
# cosine.
LAST_BITS = {"rtol": 2e-6, "atol": 1e-5}  # sums over rows
# or in plain torch
ELSEWHERE = {"RMSNormPyTorch", "dropout", "attention", "attention_lse", "attention_torch"}
OPAQUE = (
    "matmul",
    "matmul_gelu",
    "cross_entropy",
    "cross_entropies",
    "linear_cross_entropy",
    "linear_gelu_dropout",
    "seeded_dropout",
)


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float32) for name in sorted(OPERATIONS.keys() - ELSEWHERE)),
        *(
            (name, torch.bfloat16)
            for name in ("swiglu", "rms_norm", "softmax", "matmul_gelu", "linear_cross_entropy")
        ),
    ],
    ids=str,
)
def test_inductor_launches_the_kernels_from_its_own_code(name, dtype):
    function = OPERATIONS[name].function
    torch.compiler.reset()
    inputs = [draw(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes_of(name))]
    ours, sources = run_and_get_code(
        lambda: results(torch.compile(function, fullgraph=True, dynamic=False), inputs)
    )
    assert any("torch.ops.distlab_kernels" in source for source in sources) == (name in OPAQUE)
    torch.testing.assert_close(ours, results(function, inputs), **LAST_BITS)


def test_inductor_keeps_what_two_sums_over_rows_wrote_apart():
    x = draw(300, 256).requires_grad_()
    w = draw(256).requires_grad_()
    b = draw(256).requires_grad_()
    for function, inputs in ((layer_norm, (x, w, b)), (rms_norm, (x, w))):
        compiled = results(torch.compile(function, fullgraph=True), inputs)
        torch.testing.assert_close(compiled, results(function, inputs), **LAST_BITS)


def test_lengths_that_inductor_keeps_variable():
    compiled, w = torch.compile(rms_norm, fullgraph=True, dynamic=True), draw(256)
    for rows in (3, 64, 100):
        x = draw(rows, 256)
        assert torch.equal(compiled(x, w), rms_norm(x, w))


def test_a_launch_that_caps_registers_stays_an_operator_for_inductor():
    x = draw(3, 20000, dtype=torch.bfloat16)
    y, (source,) = run_and_get_code(torch.compile(softmax, fullgraph=True, dynamic=False), x)
    assert "torch.ops.distlab_kernels.softmax_forward" in source and torch.equal(y, softmax(x))


@pytest.mark.multigpu
def test_tensors_on_another_device():
    x, w = draw(8, 64).to("cuda:1"), draw(64).to("cuda:1")
    torch.testing.assert_close(rms_norm(x, w), F.rms_norm(x, (64,), w, 1e-5))
    a = draw(256, 256, dtype=torch.bfloat16).to("cuda:1")
    near(matmul(a, a), a @ a, 1.0, 2e-2)  # by descriptors
