"""FlashAttention-2 compiled on a GPU: many shapes, every shipped configuration, determinism, 64-bit
offsets, memory.

Errors are measured against float64 and judged by the error of attention computed by PyTorch in the
same type on the same inputs: at most 2 × (output) or 3 × (gradients) its maximum, and at most 1.5 ×
its RMS, plus an allowance of two parts, because PyTorch's error is zero where a few keys make its
form exact:

- what rounding the exact result costs: half an ulp of its largest value, and at RMS a fifth of eps
  times its RMS (a uniform error within half an ulp, 1/√12 of an ulp, where an ulp is about 0.7 eps
  of a value). In fp32 the sums themselves round: n terms added one after the other are off by √n
  roundings of partial sums (Higham and Mary 2019), which are on average half as large as the sum.
  dK and dV add up to thousands of queries.
- what fp32 loses in dP − Δ, two sums of head dim products of order one, whatever the size of the
  gradient: 1e-6 at RMS (√64 · 2⁻²³) and 1e-5 at the worst element.

In fp32, where random shapes are judged beside attention written out with the whole score matrix,
the RMS may be 3 × as large: that form keeps the normalised softmax, which every flash backward,
torch's fused one too, computes again from the log-sum-exp; beside torch's it is 1.5 × here too. A
gradient that is zero in exact arithmetic, that of a softmax over one key, has to stay below 1e-3:
PyTorch gets an exact zero there, the flash algorithm the difference of two sums in different order.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels import _dispatch
from kernels._dispatch import generation
from kernels.flash_attention import FlashAttention2, configs, flash_attention
from kernels.flash_attention.options import Problem

from .attention_reference import attention, in_float64, inputs, rms, with_gradients
from .near import near, same_bits

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def causal_results(*tensors, **options):
    """Results and gradients of causal attention."""
    return with_gradients(lambda *x: flash_attention(*x, causal=True, **options), *tensors)


def judge(ours, peer, exact, rms_factor=1.5):
    """The rule of the module docstring for (o, dq, dk, dv)."""
    queries, keys = (
        exact[0].shape[-2] * exact[0].shape[1] // max(exact[2].shape[1], 1),
        exact[2].shape[-2],
    )
    summed = {"o": keys, "dq": keys, "dk": queries, "dv": queries}
    for name, x, p, y in zip(("o", "dq", "dk", "dv"), ours, peer, exact, strict=True):
        # roundings that add up: one of the result, or √n/2 of the sum of n keys (o, dq) or queries
        # (dk, dv)
        roundings = max(1.0, summed[name] ** 0.5 / 2) if x.dtype == torch.float32 else 1.0
        unit = roundings * torch.finfo(x.dtype).eps
        x, p = x.double(), p.double()
        assert x.isfinite().all(), name
        worst, limit = (x - y).abs().max(), (2 if name == "o" else 3) * (p - y).abs().max()
        limit = limit + max(1e-5, unit / 2 * y.abs().max().item())
        if name in ("dq", "dk") and rms(y) < 1e-9:
            assert worst <= 1e-3, (name, worst)
            continue
        assert worst <= limit, (name, worst, limit)
        assert rms(x - y) <= rms_factor * rms(p - y) + 1e-6 + unit / 5 * rms(y), (
            name,
            rms(x - y),
            rms(p - y),
        )


def random_cases(name, count):
    """`count` reproducible (tensor sizes, options), from one to a thousand rows, q and k of
    different lengths.
    """
    draw = random.Random(name)
    lengths = [1, 2, 17, 97, 113, 128, 200, 203, 256, 512, 1023, 1024, 1025]
    for _ in range(count):
        kv_heads = draw.choice([1, 2])
        sizes = (
            draw.choice([1, 2]),
            kv_heads * draw.choice([1, 3]),
            kv_heads,
            draw.choice(lengths),
            draw.choice(lengths),
        )
        options = {"causal": draw.random() < 0.5}
        if draw.random() < 0.25:
            options["window"] = draw.choice([0, 1, 17, 64, 300])
        if draw.random() < 0.3:
            options["alignment"] = "bottom-right"
        yield sizes, options


# head dim, dtype, options of all calls, how many calls. What windows and alignments make of a
# kernel does not depend on the head dim: two take many calls. bf16 and fp16 differ in the type
# only: fp16 takes a few head dims, as does fp32 in each arithmetic.
RANDOM = [
    *(
        (d, torch.bfloat16, {}, 8 if d in (64, 128) else 4)
        for d in (16, 40, 59, 64, 80, 111, 128, 256)
    ),
    *((d, torch.float16, {}, 4) for d in (40, 64, 111)),
    *((d, torch.float32, {"precision": "ieee"}, 3) for d in (16, 64)),
    *((d, torch.float32, {"precision": "tf32x3"}, 3) for d in (40, 64)),
    *((d, torch.float32, {"precision": "bf16x6"}, 3) for d in (16, 40, 80, 128)),
    (64, torch.bfloat16, {"softcap": 0.5}, 4),
    (80, torch.float16, {"softcap": 30.0}, 4),
    (128, torch.bfloat16, {"softcap": 30.0}, 4),
    (64, torch.float32, {"softcap": 0.5}, 3),
]


# For any length and head dim, the error is at most a few times that of PyTorch in this dtype.
@pytest.mark.parametrize("head_dim, dtype, fixed, count", RANDOM, ids=str)
def test_random_shapes(head_dim, dtype, fixed, count):
    for seed, (sizes, options) in enumerate(random_cases(f"{head_dim} {dtype} {fixed}", count)):
        check_beside_eager(inputs(*sizes, head_dim, dtype, seed), **options, **fixed)


@pytest.mark.parametrize("head_dim, precision", [(136, "tf32x3"), (256, "ieee")])
def test_wide_heads_in_fp32(head_dim, precision):
    for causal in (False, True):
        check_beside_eager(
            inputs(1, 2, 1, 200, 177, head_dim, torch.float32), causal=causal, precision=precision
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_the_log_sum_exp(dtype):
    """With a window, which no kernel but these takes."""
    tensors = *inputs(2, 4, 2, 300, 300, 64, dtype), torch.randn(2, 4, 300, device="cuda")
    options = {"causal": True, "window": 40}
    ours = with_gradients(lambda *x: flash_attention(*x, **options, return_lse=True), *tensors)
    for x, y in zip(ours, in_float64(*tensors, **options), strict=True):
        assert rms(x.double() - y) <= (1e-5 if dtype == torch.float32 else 1e-2) * rms(y)


def check_beside_eager(tensors, precision="emulated", **options):
    exact = in_float64(*tensors, **options)
    peer = with_gradients(lambda *x: attention(*x, **options), *tensors)
    ours = with_gradients(lambda *x: flash_attention(*x, **options, precision=precision), *tensors)
    judge(ours, peer, exact, rms_factor=3.0 if tensors[0].dtype == torch.float32 else 1.5)


def check_beside_sdpa(tensors, causal, **arithmetic):
    peer = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal), *tensors)
    ours = with_gradients(lambda *x: flash_attention(*x, causal=causal, **arithmetic), *tensors)
    judge(ours, peer, in_float64(*tensors, causal=causal))


@pytest.mark.parametrize(
    "head_dim, dtype, causal",
    [
        *((head_dim, dtype, True) for head_dim in (32, 64, 128) for dtype in DTYPES),
        *zip((32, 64, 128), DTYPES, (False,) * 3, strict=True),
    ],
    ids=str,
)
def test_accuracy_beside_sdpa(head_dim, dtype, causal):
    """Compare the error with that of torch's fused attention. Both use IEEE arithmetic in fp32."""
    check_beside_sdpa(inputs(2, 4, 4, 1024, 1024, head_dim, dtype), causal, precision="ieee")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_accuracy_of_long_calls_in_fp32_beside_sdpa(head_dim):
    """The arithmetic that is the default there, of six products of bf16."""
    check_beside_sdpa(inputs(1, 1, 1, 16384, 16384, head_dim, torch.float32), True)


@pytest.mark.parametrize(
    "head_dim, dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32)]
)
def test_documents(head_dim, dtype):
    tensors = inputs(2, 2, 1, 700, 700, head_dim, dtype)
    ids = torch.randint(0, 2, (2, 700), device="cuda").cumsum(1) // 50
    check_beside_eager(tensors, "bf16x6", causal=True, document_ids=ids)


# Keys that differ in their rows only and have the same tiles are one case: its sizes are not those
# of the key.
SHIPPED = {(replace(key, rows=0), choice): key for key, choice in configs.TABLE.items()}


@pytest.mark.parametrize("key", SHIPPED.values(), ids=str)
def test_every_shipped_configuration(key):
    """Several seeds, outputs poisoned before each run, against float64.

    The tiles must not depend on luck.
    """
    if key.gpu != generation(torch.cuda.current_device()):
        pytest.skip(
            f"a configuration for {key.gpu}, this is {generation(torch.cuda.current_device())}"
        )
    from kernels.flash_attention import backward, forward

    choice = configs.TABLE[key]
    problem = Problem((None, 0), key.head_dim**-0.5, key.precision)
    dtype = torch.float32 if key.bits == 32 else torch.bfloat16
    tolerance = 1e-2
    if key.bits == 32:
        tolerance = 5e-3 if key.precision == "tf32" else 1e-5
    for seed in range(4):
        q, k, v, do = inputs(1, 3, 3, 640, 640, key.head_dim, dtype, seed)
        o, dq, dk, dv = found = [torch.full_like(q, float("nan")) for _ in range(4)]
        lse = torch.full(q.shape[:-1], float("nan"), device="cuda")
        forward.launch_forward(q, k, v, o, lse, problem, choice.forward)
        saved = backward.launch_delta(q, k, v, o, lse, do)
        backward.launch_dkdv(saved, dk, dv, problem, choice.dkdv)
        backward.launch_dq(saved, dq, problem, choice.dq)
        for name, x, y in zip(
            ("o", "dq", "dk", "dv"), found, in_float64(q, k, v, do, causal=True), strict=True
        ):
            assert rms(x.double() - y) <= tolerance * rms(y), name


# A race between blocks of a kernel would change bits from one call to the next.
@pytest.mark.parametrize(
    "batch, length, head_dim, dtype",
    [
        (60, 300, 64, torch.bfloat16),
        (1, 512, 16, torch.bfloat16),
        (1, 512, 32, torch.bfloat16),
        (1, 512, 128, torch.bfloat16),
        (1, 512, 64, torch.float32),
        (1, 8192, 128, torch.float32),
    ],
)
def test_repeats_are_bit_identical(batch, length, head_dim, dtype):
    """Of one head and of many."""
    tensors = inputs(batch, 2, 2, length, length, head_dim, dtype)
    first = causal_results(*tensors, deterministic=True)
    for _ in range(100):
        again = causal_results(*tensors, deterministic=True)
        same_bits(first, again)


# An offset in 32 bits would wrap here, and the last heads would be read from a wrong address.
def test_more_than_two_to_the_31_elements():
    """The last heads of a tensor whose offsets need 64 bits equal the same heads computed alone."""
    # the generator only; the large ones are filled in place
    tensors = inputs(1, 1, 1, 1, 1, 64, torch.bfloat16)
    shape = (2**16 + 16, 1, 512, 64)
    assert torch.Size(shape).numel() > 2**31
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=tensors[0].dtype) for _ in range(4))
    whole = causal_results(q, k, v, do)
    alone = causal_results(*(x[-8:].clone() for x in (q, k, v, do)))
    for x, y in zip(whole, alone, strict=True):
        near(x[-8:], y, 1e-2, 1.6e-2)  # bf16; the two sizes may use different tiles


@pytest.mark.parametrize(
    "length, width",
    [(2**16, 2**15 + 64), (2**16 - 24, 2**15 + 64), (65, 2**26)],
    ids=["descriptors", "pointers", "within a tile"],
)
def test_rows_more_than_two_to_the_31_elements_apart(length, width):
    """One head whose last row lies beyond 2³¹ elements; a window keeps the arithmetic small."""
    buffer = torch.empty(length, width, device="cuda", dtype=torch.bfloat16)
    assert (length - 1) * width > 2**31
    buffer[:, :256].normal_()
    tensors = [buffer[None, None, :, i * 64 : (i + 1) * 64] for i in range(4)]
    packed = (x.clone(memory_format=torch.contiguous_format) for x in tensors)
    torch.testing.assert_close(
        causal_results(*tensors, window=100), causal_results(*packed, window=100)
    )


def test_compile_in_bf16_under_autocast():
    q, k, v, do = inputs(1, 2, 2, 300, 300, 64, torch.float32)
    compiled = torch.compile(FlashAttention2.apply, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        ours = with_gradients(lambda q, k, v: compiled(q, k, v, True).float(), q, k, v, do)
    for x, y in zip(ours, in_float64(q, k, v, do, causal=True), strict=True):
        assert x.dtype is torch.float32
        assert rms(x.double() - y) <= 2e-2 * rms(y)


def called_and_replayed(tensors):
    """Results and gradients of a call, and what a CUDA graph of it holds when it has run twice."""
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    expected = causal_results(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_attention(q, k, v, causal=True)
        grads = torch.autograd.grad(o, (q, k, v), tensors[3])
    for _ in range(2):
        graph.replay()
    return expected, (o, *grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_graph_capture(dtype):
    """Nothing on the way to the kernels waits for the GPU."""
    same_bits(*called_and_replayed(inputs(1, 2, 1, 256, 256, 64, dtype)))


def test_unknown_gpus_search_once(monkeypatch):
    """A GPU that is not in the table times a few tiles at the first call and then remembers the
    fastest.
    """
    monkeypatch.setattr(configs, "generation", lambda index: "sm_00")
    monkeypatch.setattr(configs, "_searched", {})
    _dispatch.forget()
    tensors = inputs(1, 2, 2, 300, 300, 64, torch.bfloat16)
    check_beside_eager(tensors, causal=True)
    assert {kernel for kernel, _ in configs._searched} == set(configs.Choice._fields)
    monkeypatch.setattr(configs, "_fastest", None)  # a second search would fail
    check_beside_eager(tensors, causal=True)
