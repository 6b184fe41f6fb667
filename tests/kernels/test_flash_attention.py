"""FlashAttention-2 on small shapes: in Triton's interpreter on a CPU, compiled where there is a GPU.

fp32 tolerance 2e-5: sums of at most a few hundred terms of order 1, each rounded to 6e-8, in another order than the
float64 reference. fp16 tolerance 4e-3: P, dS and the results are rounded to 11 bits.
"""

import contextlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from experiments._attention import CompiledBackward
from kernels._triton import interpreted, runs_triton
from kernels.flash_attention import (
    FlashAttention2,
    FlashAttention2PyTorch,
    configs,
    document_bounds,
    flash_attention,
    ops,
)
from kernels.flash_attention.configs import Tile

from .attention_reference import attention, in_float64, log_sum_exp, with_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"  # for a CPU, inductor calls a C++ compiler: half a minute
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
BOTH = pytest.mark.parametrize("function", [FlashAttention2, FlashAttention2PyTorch], ids=["triton", "torch"])


def inputs(batch, heads, kv_heads, query_count, key_count, head_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    q = draw(batch, heads, query_count, head_dim)
    k, v = draw(batch, kv_heads, key_count, head_dim), draw(batch, kv_heads, key_count, head_dim)
    return q, k, v, draw(batch, heads, query_count, head_dim)


def apply(function, *, causal=False, scale=None, window=None, alignment="top-left", document_ids=None, softcap=None,
          return_lse=False):
    return lambda q, k, v: function.apply(q, k, v, causal, scale, window, alignment, "ieee", document_ids, None,
                                          softcap, return_lse)


def check(function, tensors, **options):
    """Output and gradients against float64."""
    ours = with_gradients(apply(function, **options), *tensors)
    expected = in_float64(*tensors, **options)
    tolerance = TOLERANCE[tensors[0].dtype]
    for name, x, y in zip(("o", "dq", "dk", "dv"), ours, expected, strict=True):
        assert x.dtype == tensors[0].dtype
        torch.testing.assert_close(x.double(), y, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# RELIABILITY 35: lengths and head dims that are no multiples of a tile, q longer and shorter than k
@BOTH
@pytest.mark.parametrize(
    ("query_count", "key_count", "head_dim", "causal"),
    [(1, 1, 16, False), (2, 17, 16, True), (17, 2, 16, True), (97, 33, 48, False), (33, 97, 40, True),
     (64, 64, 59, True), (40, 40, 80, False), (20, 36, 111, True), (33, 17, 128, True)],
)
def test_lengths_and_head_dims(function, query_count, key_count, head_dim, causal):
    check(function, inputs(1, 1, 1, query_count, key_count, head_dim), causal=causal)


@BOTH
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_and_multi_query(function, kv_heads):
    check(function, inputs(2, 4, kv_heads, 20, 33, 16), causal=True)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_fp16(function, causal):
    check(function, inputs(1, 2, 2, 40, 40, 32, torch.float16), causal=causal)


# RELIABILITY 37: both alignments, both ways; rows without a key are 0 with log-sum-exp −inf and finite gradients
@BOTH
@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize(("query_count", "key_count"), [(20, 50), (50, 20)])
def test_alignment(function, query_count, key_count, alignment):
    tensors = inputs(1, 2, 1, query_count, key_count, 16)
    check(function, tensors, causal=True, alignment=alignment)
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    o = apply(function, causal=True, alignment=alignment)(q, k, v)
    (lse,) = (x for x in o.grad_fn.saved_tensors if x.shape == q.shape[:-1])
    expected = log_sum_exp(q.double(), k.double(), causal=True, alignment=alignment)
    torch.testing.assert_close(lse.double(), expected, atol=2e-5, rtol=2e-5)
    hidden = expected == float("-inf")
    assert hidden.any() == (alignment == "bottom-right" and query_count > key_count)
    assert (o[hidden] == 0).all()


@BOTH
@pytest.mark.parametrize(
    ("query_count", "key_count", "window", "causal", "alignment"),
    [(97, 97, 20, True, "top-left"), (97, 97, 20, False, "top-left"), (70, 70, 0, False, "top-left"),
     (30, 97, 3, False, "bottom-right"), (97, 30, 5, True, "top-left"), (97, 30, 5, False, "bottom-right")],
)
def test_window(function, query_count, key_count, window, causal, alignment):
    check(function, inputs(1, 2, 1, query_count, key_count, 16), causal=causal, window=window, alignment=alignment)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_past_both_ends_hides_nothing(function, causal):
    """Whatever its size: positions plus window must not leave the 32 bits that kernels count in."""
    tensors = inputs(1, 1, 1, 17, 20, 16)
    expected = with_gradients(apply(function, causal=causal), *tensors)
    for window in (20, 2**31 - 20, 2**31 - 1, sys.maxsize, 2**70):
        found = with_gradients(apply(function, causal=causal, window=window), *tensors)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), window


@BOTH
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 9)])
def test_documents(function, causal, window):
    ids = torch.tensor([0] * 5 + [1] * 60 + [2] + [0] * 31, device=DEVICE).repeat(2, 1)
    ids[1] = torch.arange(97, device=DEVICE) // 33
    check(function, inputs(2, 2, 1, 97, 97, 16), causal=causal, window=window, document_ids=ids)


@BOTH
def test_bounds_of_documents_made_once(function):
    """Of ids, or of the offsets in which packed sequences come, an empty document among them."""
    q, k, v, do = inputs(1, 2, 1, 97, 97, 16)
    lengths = torch.tensor([5, 60, 0, 1, 31], device=DEVICE)
    ids = torch.repeat_interleave(torch.arange(5, device=DEVICE), lengths)[None]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    expected = with_gradients(apply(function, causal=True, document_ids=ids), q, k, v, do)
    for bounds in (document_bounds(ids), document_bounds(cu_seqlens=offsets.int())):
        found = with_gradients(apply(function, causal=True, document_ids=bounds), q, k, v, do)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_bounds_made_once_are_all_that_a_layer_is_given(monkeypatch):
    """No launches per layer to find the documents again."""
    q, k, v, _ = inputs(1, 1, 1, 9, 9, 16)
    bounds = document_bounds(torch.zeros(1, 9, dtype=torch.int64, device=DEVICE))
    monkeypatch.setattr("kernels.flash_attention.function.document_bounds", None)
    given = []
    monkeypatch.setattr(ops, "forward_op", lambda *x: given.append(x[-1]) or (q, q[..., 0]))
    flash_attention(q, k, v, document_ids=bounds)
    assert given[0] is bounds


@BOTH
def test_scale(function):
    check(function, inputs(1, 1, 1, 20, 20, 16), scale=0.5, causal=True)


@BOTH
@pytest.mark.parametrize(
    ("query_count", "key_count", "options"),
    [(33, 33, {"causal": True}), (20, 50, {}), (50, 20, {"causal": True, "alignment": "bottom-right"}),
     (50, 50, {"window": 5, "scale": 0.7}), (50, 50, {"document_ids": (torch.arange(50) // 20)[None].to(DEVICE)})],
)
def test_softcap(function, query_count, key_count, options):
    """Some scores are cut to a half and some hardly changed."""
    check(function, inputs(1, 4, 2, query_count, key_count, 24), softcap=1.5, **options)


@BOTH
@pytest.mark.parametrize("softcap", [1e-3, 30, 1e6, 1e30])
def test_softcap_far_from_the_scores(function, softcap):
    """A large one changes nothing, and must not cost digits; of a small one all scores are alike."""
    check(function, inputs(1, 2, 1, 20, 33, 16), causal=True, softcap=softcap)


@BOTH
@pytest.mark.parametrize(
    ("query_count", "key_count", "options"),
    [(33, 33, {"causal": True}), (20, 50, {}), (50, 20, {"causal": True, "alignment": "bottom-right"}),
     (50, 50, {"window": 5, "softcap": 1.5})],
)
def test_log_sum_exp_and_its_gradient(function, query_count, key_count, options):
    """Of a loss that takes both results, of one that takes the log-sum-exp alone, and of one that ignores it."""
    tensors = inputs(1, 4, 2, query_count, key_count, 16)
    weight = torch.randn(1, 4, query_count, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def gradients(call, q, k, v, do, weight, parts):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        o, lse = call(q, k, v)
        seen = lse != float("-inf")
        both = ("o" in parts) * (o * do).sum() + ("lse" in parts) * torch.where(seen, lse * weight, 0.0).sum()
        return o, lse, *torch.autograd.grad(both, (q, k, v), materialize_grads=True)

    def exact(q, k, v):
        return attention(q, k, v, **options), log_sum_exp(q, k, **options)

    for parts in (("o", "lse"), ("lse",), ("o",)):
        ours = gradients(apply(function, return_lse=True, **options), *tensors, weight, parts)
        assert ours[1].shape == (1, 4, query_count) and ours[1].dtype == torch.float32
        expected = gradients(exact, *(x.double() for x in tensors), weight.double(), parts)
        for x, y in zip(ours, expected, strict=True):
            torch.testing.assert_close(x.double(), y.nan_to_num(0.0, neginf=float("-inf")), atol=2e-5, rtol=2e-5)


@BOTH
def test_gradients_of_rows_without_a_key_are_zero_whatever_comes_for_their_log_sum_exp(function):
    """As of exp(lse), a weight when attention over parts of the keys is combined: −inf · 0 there is not a number."""
    q, k, v, do = inputs(1, 1, 1, 50, 20, 16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o, lse = apply(function, causal=True, alignment="bottom-right", return_lse=True)(q, k, v)
    dlse = torch.where(lse == float("-inf"), float("nan"), 1.0)
    assert dlse.isnan().any()
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    assert (dq[dlse.isnan()] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


@BOTH
def test_log_sum_exp_without_heads_and_under_autocast(function):
    q, k, v, _ = (x[:, 0] for x in inputs(2, 1, 1, 9, 12, 16))
    with torch.autocast(DEVICE, torch.float16):
        o, lse = function.apply(q, k, v, False, None, None, "top-left", "ieee", None, None, None, True)
    assert o.dtype is torch.float16 and lse.dtype is torch.float32 and lse.shape == (2, 9)
    torch.testing.assert_close(lse, log_sum_exp(q[:, None], k[:, None])[:, 0], atol=4e-3, rtol=4e-3)


# RELIABILITY 38: no keys, no queries, no batch
@BOTH
@pytest.mark.parametrize("empty", ["keys", "queries", "batch"])
def test_empty(function, empty):
    counts = {"queries": (0, 7), "keys": (5, 0), "batch": (5, 7)}[empty]
    tensors = inputs(0 if empty == "batch" else 2, 2, 1, *counts, 16)
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    o = apply(function)(q, k, v)
    assert o.shape == q.shape
    assert (o == 0).all()
    (lse,) = (x for x in o.grad_fn.saved_tensors if x.shape == q.shape[:-1])
    assert (lse == float("-inf")).all()
    grads = torch.autograd.grad(o, (q, k, v), tensors[3])
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


# RELIABILITY 39: large logits stay finite; nothing outside the tensors is read
@BOTH
def test_large_logits(function):
    q, k, v, do = inputs(1, 1, 1, 20, 20, 16)
    q, k = q * 100, k * 100  # scores of about ±1e4
    check_finite = with_gradients(apply(function, causal=True), q, k, v, do)
    assert all(x.isfinite().all() for x in check_finite)
    torch.testing.assert_close(check_finite[0].double(), in_float64(q, k, v, do, causal=True)[0], atol=2e-2, rtol=0)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_nan_guard_bands_are_unread(function, causal):
    def guarded(x):
        buffer = torch.full((x.shape[0], x.shape[1] + 2, x.shape[2] + 60, x.shape[3] + 16), float("nan"), device=DEVICE)
        inner = buffer[:, 1:-1, 20:-40, 8:-8]
        inner.copy_(x)
        return inner

    check(function, tuple(guarded(x) for x in inputs(1, 2, 2, 21, 37, 48)), causal=causal)


# RELIABILITY 40: any strides, also of do
@BOTH
def test_strides(function):
    def transposed(x):  # (B, T, H, D) in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    tensors = inputs(2, 2, 2, 20, 20, 16)
    check(function, tuple(transposed(x) for x in tensors), causal=True)
    check(function, tuple(x.mT.contiguous().mT for x in tensors), causal=True)
    check(function, (*tensors[:3], tensors[3][:1, :1, :1, :1].expand(2, 2, 20, 16)), causal=True)


@BOTH
def test_rows_that_overlap(function):
    """A sliding view's layout cannot be that of a result, and `empty_like` makes one whose rows have gaps."""
    def unfolded(x):
        return x.flatten()[:25 + x.shape[-2]].contiguous().unfold(-1, 16, 1)[None, None, :x.shape[-2]]

    tensors = tuple(unfolded(x) for x in inputs(1, 1, 1, 9, 9, 16))
    assert tensors[0].stride()[2:] == (1, 1)
    check(function, tensors, causal=True)
    many = tuple(x.as_strided((2, 2, 9, 16), (1, 0, 1, 1)) for x in tensors)
    check(function, many, causal=True)
    o, dq, *_ = with_gradients(apply(function), *many)
    assert all(torch._debug_has_internal_overlap(x) == 0 for x in (o, dq))


@BOTH
def test_heads_innermost_in_memory(function):
    """As an einsum may leave them; a head dim that is padded, which keeps torch's channels-last layout."""
    def innermost(x):
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    q, k, v, do = inputs(1, 2, 2, 9, 9, 20)
    check(function, (q, k, v, innermost(do)))
    check(function, tuple(innermost(x) for x in (q, k, v, do)))


@BOTH
def test_lazily_negated_inputs(function):
    """Of a conjugate the imaginary part is a view whose sign torch keeps beside the memory."""
    tensors = tuple(torch.complex(x, -x).conj().imag for x in inputs(1, 1, 1, 9, 9, 16))
    assert all(x.is_neg() for x in tensors)
    check(function, tensors)


def test_rows_too_far_apart_for_offsets_of_32_bits_are_copied():
    """Within a tile of 128 rows kernels count elements in 32 bits."""
    def apart(stride):
        return torch.empty_strided((1, 1, 200, 16), (200 * stride, 200 * stride, stride, 1), device="meta")

    assert ops._rows_contiguous(apart(2**24 - 16)).stride(-2) == 2**24 - 16
    assert ops._rows_contiguous(apart(2**24)).stride(-2) == 16
    o, _ = ops.forward_op(*[apart(2**24)] * 3, False, 1.0, None, "top-left", "ieee", None, None)
    assert o.stride(-2) == 16


@BOTH
def test_three_dimensions(function):
    q, k, v, do = (x[:, 0] for x in inputs(3, 1, 1, 20, 33, 16))
    check(function, (q, k, v, do), causal=True)
    o = apply(function)(q.requires_grad_(), k, v)
    saved = o.grad_fn.saved_tensors
    assert [tuple(x.shape) for x in saved if x.shape == q.shape[:-1]] == [(3, 20)]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "packed"])
@pytest.mark.parametrize(("length", "head_dim"), [(64, 16), (50, 16), (37, 48)])
def test_tensor_descriptors(layout, length, head_dim):
    """The descriptor path of every kernel: layouts, lengths and head dims that are and are not those of tiles."""
    q, k, v, do = inputs(2, 2, 1 if layout == "contiguous" else 2, length, length, head_dim)
    if layout == "transposed":
        q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
    if layout == "packed":
        packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)  # (B, T, 3, H, D)
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    tile = Tile(32, 16, tma=True)
    from kernels.flash_attention.ranges import described

    found, descriptors = described("dkdv", tile, q, k, v, do)
    assert found is tile and None not in descriptors and all(x.block_shape[2] == 32 for x in descriptors)
    pointers = replace(tile, tma=False), [None, None]
    assert described("dq", tile, q, k[:, :1].expand_as(q)) == pointers
    assert described("dq", tile, q, torch.zeros(1, 1, 8, 17, device=DEVICE)[..., 1:]) == pointers
    wide = torch.zeros(1, 1, 8, 129, device=DEVICE)[..., 1:]
    assert described("dq", tile, wide) == (configs.POINTER_TILES["dq", 128], [None])
    with configs.forced(forward=tile, dkdv=tile, dq=tile):
        check(FlashAttention2, (q, k, v, do), causal=True)
        check(FlashAttention2, (q, k, v, do), window=7)


@pytest.mark.parametrize(
    ("query_count", "key_count", "options"),
    [(20, 50, {}), (70, 33, {"causal": True, "alignment": "bottom-right"}), (48, 48, {"causal": True, "window": 5}),
     (50, 50, {"document_ids": (torch.arange(50) // 20)[None].to(DEVICE)})],
)
def test_nothing_is_read_that_was_not_written(query_count, key_count, options, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *a, **o: torch.full(*a, float("nan"), **o))
    monkeypatch.setattr(torch, "empty_like", lambda x, **o: torch.full_like(x, float("nan"), **o))
    check(FlashAttention2, inputs(1, 2, 1, query_count, key_count, 16), **options)


def test_heads_advance_in_groups():
    """Grouped scheduling with a last, smaller group visits every tile of every head."""
    tile = Tile(16, 16, head_group=2)
    with configs.forced(forward=tile, dkdv=tile, dq=tile):
        check(FlashAttention2, inputs(1, 3, 3, 33, 33, 16), causal=True)


# RELIABILITY 43
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal):
    q, k, v = (x.double().requires_grad_() for x in inputs(1, 2, 1, 5, 7, 4)[:3])
    call = apply(FlashAttention2PyTorch, causal=causal, window=3, softcap=0.8, return_lse=True)
    assert torch.autograd.gradcheck(lambda *x: call(*x)[0], (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: torch.where(call(*x)[1] > -1e9, call(*x)[1], 0.0), (q, k, v))


def test_triton_agrees_with_tiled_torch():
    tensors = inputs(1, 2, 1, 50, 50, 24)
    ours, tiled = (with_gradients(apply(f, causal=True), *tensors) for f in (FlashAttention2, FlashAttention2PyTorch))
    for x, y in zip(ours, tiled, strict=True):
        torch.testing.assert_close(x, y, atol=5e-6, rtol=5e-6)


def test_repeats_are_bit_identical():
    tensors = inputs(2, 2, 1, 33, 33, 16)
    first, second = (with_gradients(apply(FlashAttention2, causal=True), *tensors) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_compile_without_graph_break():
    q, k, v, do = inputs(1, 2, 2, 17, 17, 16)
    compiled = torch.compile(FlashAttention2.apply, fullgraph=True, backend=BACKEND)
    ours = with_gradients(lambda q, k, v: compiled(q, k, v, True), q, k, v, do)
    eager = with_gradients(lambda q, k, v: FlashAttention2.apply(q, k, v, True), q, k, v, do)
    for x, y in zip(ours, eager, strict=True):
        torch.testing.assert_close(x, y)


def test_compile_of_the_public_function():
    q, k, v, do = inputs(1, 2, 1, 17, 20, 16)
    options = {"causal": True, "window": 5, "alignment": "bottom-right"}
    compiled = torch.compile(lambda *x: flash_attention(*x, **options), fullgraph=True, backend="aot_eager")
    for x, y in zip(with_gradients(compiled, q, k, v, do), in_float64(q, k, v, do, **options), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)


def test_compile_of_documents_and_log_sum_exp():
    q, k, v, do = inputs(1, 2, 1, 40, 40, 16)
    bounds = document_bounds(cu_seqlens=torch.tensor([0, 15, 40], dtype=torch.int32, device=DEVICE))

    def call(q, k, v):
        o, lse = flash_attention(q, k, v, causal=True, document_ids=bounds, softcap=2.0, return_lse=True)
        return o * lse[..., None].exp()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(with_gradients(compiled, q, k, v, do), with_gradients(call, q, k, v, do), strict=True):
        torch.testing.assert_close(x, y)


def test_autocast_casts_inside_and_returns_gradients_in_the_input_type():
    q, k, v, do = inputs(1, 2, 2, 20, 20, 16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with torch.autocast(DEVICE, torch.float16):
        o = flash_attention(q, k, v, causal=True)
    assert o.dtype is torch.float16
    grads = torch.autograd.grad(o, (q, k, v), do.half())
    assert {g.dtype for g in grads} == {torch.float32}
    for x, y in zip((o, *grads), in_float64(q, k, v, do, causal=True), strict=True):
        torch.testing.assert_close(x.double(), y, atol=6e-3, rtol=6e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_the_statistics_of_the_plain_form(dtype):
    """Its products are those of fp32, in forward and backward: to the bit what inputs cast by hand give."""
    q, k, v, do = inputs(1, 2, 1, 70, 70, 16)
    do = do.to(dtype)
    call = apply(FlashAttention2PyTorch, causal=True)
    expected = with_gradients(call, *(x.to(dtype) for x in (q, k, v)), do)
    with torch.autocast(DEVICE, dtype):
        found = with_gradients(call, q, k, v, do)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y.to(x.dtype))


@BOTH
def test_autocast_leaves_alone_what_torch_leaves_alone(function):
    q, k, v, _ = inputs(1, 1, 1, 5, 5, 16)
    with torch.autocast(DEVICE, torch.float16):
        with pytest.raises(ValueError, match=r"q has dtype torch\.int64; allowed: float32"):
            function.apply(q.long(), k, v)
        with pytest.raises(ValueError, match=r"k has dtype torch\.int64"):
            function.apply(q, k.long(), v)
        wide = [x.double() for x in (q, k, v)]
        if function is FlashAttention2:
            with pytest.raises(ValueError, match=r"q has dtype torch\.float64; allowed: float32"):
                function.apply(*wide)
        else:
            assert function.apply(*wide).dtype is torch.float64


@BOTH
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_without_data(function, device):
    """Shapes, dtypes and strides of the result and the gradients, for whoever plans without memory."""
    def results(mode, on):
        with mode, torch.autocast(DEVICE, torch.float16):
            q, k, v, do = (x.to(on).transpose(1, 2) for x in inputs(2, 20, 20, 2, 2, 16))
            ids = torch.zeros(2, 20, dtype=torch.int64, device=on)
            options = {"causal": True, "window": 9, "document_ids": ids}
            return with_gradients(apply(function, **options), q, k[:, :1], v[:, :1], do)

    real = results(contextlib.nullcontext(), DEVICE)
    found = results(*((contextlib.nullcontext(), "meta") if device == "meta" else (FakeTensorMode(), DEVICE)))
    for x, y in zip(found, real, strict=True):
        assert x.shape == y.shape
        for i in range(4):
            assert x.shape[i] == 1 or x.stride(i) == y.stride(i)  # for one element torch's own may differ
        assert x.dtype is y.dtype if device == "fake" else x.is_meta


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_backward_is_the_same_function(causal):
    q, k, v, do = inputs(1, 2, 2, 20, 20, 16)
    torch._dynamo.reset()
    with torch.compiler.set_stance(force_backend=BACKEND):
        ours = with_gradients(lambda *x: CompiledBackward.apply(*x, causal), q, k, v, do)
    for x, y in zip(ours, in_float64(q, k, v, do, causal=causal), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    q, k, v, do = inputs(1, 1, 1, 20, 20, 16)

    def block(q, k, v):
        return flash_attention(q * 2, k, v, causal=True)

    plain = with_gradients(block, q, k, v, do)
    again = [x.detach().requires_grad_() for x in (q, k, v)]
    o = checkpoint(block, *again, use_reentrant=reentrant)
    o.backward(do)
    for x, y in zip((o, *(t.grad for t in again)), plain, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("function", [FlashAttention2, FlashAttention2PyTorch, CompiledBackward])
@pytest.mark.parametrize("cast", [False, True])
def test_create_graph_raises_whoever_asks(function, cast):
    """Also where the output's gradient needs none, and where what was saved is a cast copy of the inputs.

    At once: of a loss with a penalty on its gradient, torch.autograd.grad would return the loss's share alone.
    """
    q, k, v, do = inputs(1, 1, 1, 5, 5, 16)
    q.requires_grad_()
    with torch.autocast(DEVICE, torch.float16, enabled=cast), torch.compiler.set_stance("force_eager"):
        for upstream in (None, do.to(torch.float16 if cast else do.dtype).requires_grad_()):
            o = function.apply(q, k, v)
            out = o.sum() if upstream is None else o
            with pytest.raises(RuntimeError, match=f"{function.__name__} was called with create_graph=True"):
                torch.autograd.grad(out, q, upstream, create_graph=True)


def test_compile_of_the_plain_form():
    q, k, v, do = inputs(1, 2, 1, 70, 70, 16)
    call = apply(FlashAttention2PyTorch, causal=True, window=5)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    ours, eager = (with_gradients(f, q, k, v, do) for f in (compiled, call))
    for x, y in zip(ours, eager, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def test_flops_are_counted():
    q, k, v, do = inputs(1, 2, 1, 20, 20, 16)
    q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v, causal=True).backward(do)
    pairs = 20 * 21 // 2
    assert counter.get_total_flops() == 2 * 16 * pairs * (4 + 10)


def test_these_tests_run_the_kernels():
    """Not the plain-torch fallback, whatever was imported before."""
    assert runs_triton(torch.zeros(1, device=DEVICE))


def test_plain_cpu_runs_the_tiled_reference():
    """Without a GPU and without the interpreter the public function still works, and never imports a kernel."""
    script = """
import sys, torch
from kernels._triton import interpreted
from kernels.flash_attention import flash_attention
assert not interpreted()
q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
o = flash_attention(q, k, v, causal=True)
o.sum().backward()
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(o, expected)
assert "kernels.flash_attention.forward" not in sys.modules
"""
    environment = {"PATH": "", "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)


@pytest.mark.skipif(not interpreted(), reason="bfloat16 is only refused by the interpreter")
def test_interpreter_refuses_bfloat16():
    q = torch.randn(1, 1, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        flash_attention(q, q.clone(), q.clone())


def test_reference_itself():
    """The reference agrees with torch's own attention where both apply."""
    q, k, v, _ = inputs(1, 2, 2, 20, 20, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), expected, atol=1e-5, rtol=1e-5)
