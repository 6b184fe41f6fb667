"""FlashAttention-2 on small shapes: in Triton's interpreter on a CPU, compiled where there is a
GPU.

What holds for every operation (half precision, autocast, fake tensors, torch.compile) is in
`test_every_operation.py`. fp32 tolerance 2e-5: sums of at most a few hundred terms of order 1, each
rounded to 6e-8, in another order than the float64 reference.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels._dispatch import forced, interpreted, runs_triton
from kernels.flash_attention import (
    FlashAttention2,
    FlashAttention2PyTorch,
    configs,
    document_bounds,
    flash_attention,
    ops,
)
from kernels.flash_attention.configs import Tile
from tests.commands import python

from .attention_reference import DEVICE, in_float64, inputs, with_gradients
from .near import near, same_bits

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
BOTH = pytest.mark.parametrize(
    "function", [FlashAttention2, FlashAttention2PyTorch], ids=["triton", "torch"]
)


def apply(
    function,
    *,
    causal=False,
    scale=None,
    window=None,
    alignment="top-left",
    document_ids=None,
    softcap=None,
    return_lse=False,
):
    return lambda q, k, v: function.apply(
        q, k, v, causal, scale, window, alignment, "ieee", document_ids, None, softcap, return_lse
    )


def check(function, tensors, **options):
    """Results and gradients against float64.

    Those of the log-sum-exp too where its gradient is the fifth tensor.
    """
    ours = with_gradients(apply(function, return_lse=len(tensors) > 4, **options), *tensors)
    expected = in_float64(*tensors, **options)
    near(ours, expected, 2e-5)
    assert all(
        x.dtype == tensors[0].dtype and torch._debug_has_internal_overlap(x) == 0 for x in ours
    )


CAUSAL, BOTTOM = {"causal": True}, {"causal": True, "alignment": "bottom-right"}
IDS = torch.tensor(
    [[0] * 5 + [1] * 60 + [2] + [0] * 31, [i // 33 for i in range(97)]], device=DEVICE
)
# name → batch, heads and key heads, queries and keys, head dim; options.
# Some lengths and head dims are not multiples of a tile, and q is longer or shorter than k.
# Both alignments of a causal mask occur. A row without a key is 0, has log-sum-exp −inf, and its
# gradients are finite.
CALLS = {
    "one": ((1, 1, 1, 1, 1, 16), {}),
    "few queries": ((1, 1, 1, 2, 17, 16), CAUSAL),
    "head dim 48": ((1, 1, 1, 97, 33, 48), {}),
    "head dim 59": ((1, 1, 1, 64, 64, 59), CAUSAL),
    "head dim 111": ((1, 1, 1, 20, 36, 111), CAUSAL),
    "head dim 128": ((1, 1, 1, 33, 17, 128), CAUSAL),
    "grouped": ((2, 4, 2, 20, 33, 16), CAUSAL),
    "alignment top, long": ((1, 2, 1, 50, 20, 16), CAUSAL),
    "alignment bottom": ((1, 2, 1, 20, 50, 16), BOTTOM),
    "alignment bottom, long": ((1, 2, 1, 50, 20, 16), BOTTOM),
    "window, causal": ((1, 1, 1, 97, 97, 16), CAUSAL | {"window": 20}),
    "window of one key": ((1, 1, 1, 70, 70, 16), {"window": 0}),
    "window, bottom, long": ((1, 2, 1, 97, 30, 16), {"window": 5, "alignment": "bottom-right"}),
    "documents": ((2, 1, 1, 97, 97, 16), {"document_ids": IDS}),
    "documents, window": ((2, 2, 1, 97, 97, 16), CAUSAL | {"document_ids": IDS, "window": 9}),
    # Some scores are cut to a half and some hardly changed. A large softcap changes nothing, and
    # must not cost digits; of a small one all scores are alike.
    "softcap": ((1, 4, 2, 20, 50, 24), {"softcap": 1.5}),
    "softcap, window": ((1, 4, 2, 50, 50, 24), {"softcap": 1.5, "window": 5, "scale": 0.7}),
    "softcap, documents": ((2, 1, 1, 97, 97, 24), {"softcap": 1.5, "document_ids": IDS}),
    **{
        f"softcap {cap}": ((1, 2, 1, 20, 33, 16), CAUSAL | {"softcap": cap}) for cap in (1e-3, 1e30)
    },
}


@BOTH
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(function, name, poisoned):
    """Of attention and its log-sum-exp."""
    sizes, options = CALLS[name]
    q, k, v, do = inputs(*sizes)
    check(function, (q, k, v, do, do.sum(-1)), **options)


# Any strides are allowed, also those of do (test_every_operation.py has expanded tensors). NaN
# around a tensor reveals reads outside of it.
LAYOUTS = {
    # as an einsum may leave them
    "heads innermost": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "NaN all around": lambda x: F.pad(x, (8, 8, 20, 40, 1, 1), value=float("nan"))[
        :, 1:-1, 20:-40, 8:-8
    ],
}


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(function, layout):
    check(function, [*map(LAYOUTS[layout], inputs(2, 2, 2, 20, 33, 20))], causal=True)


@BOTH
def test_losses_of_one_result(function):
    """Of one that takes the log-sum-exp alone, and of one that ignores it."""
    q, k, v, do = inputs(1, 2, 1, 50, 20, 16)
    for place, upstream in enumerate((do, do.sum(-1))):
        ours = with_gradients(
            lambda *x, i=place: apply(function, return_lse=True, **BOTTOM)(*x)[i], q, k, v, upstream
        )
        expected = in_float64(q, k, v, do * (place == 0), do.sum(-1) * (place == 1), **BOTTOM)
        near(ours[1:], expected[2:], 2e-5)


# Empty tensors are allowed: no keys, no queries or no batch.
@BOTH
@pytest.mark.parametrize("batch, queries, keys", [(2, 5, 0), (2, 0, 7), (0, 5, 7)])
def test_empty(function, batch, queries, keys):
    q, k, v, do = inputs(batch, 2, 1, queries, keys, 16)
    o, lse, *gradients = with_gradients(apply(function, return_lse=True), q, k, v, do, do.sum(-1))
    assert (lse == float("-inf")).all()
    for x, y in zip((o, *gradients), (q, q, k, v), strict=True):
        assert x.shape == y.shape and (x == 0).all()


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_past_both_ends_hides_nothing(function, causal):
    """Whatever its size: positions plus window must not leave the 32 bits that kernels count in."""
    tensors = inputs(1, 1, 1, 17, 20, 16)
    expected = with_gradients(apply(function, causal=causal), *tensors)
    for window in (20, 2**31 - 20, 2**70):
        found = with_gradients(apply(function, causal=causal, window=window), *tensors)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), window


@BOTH
def test_bounds_of_documents_made_once(function, monkeypatch):
    """Of ids, or of the offsets in which packed sequences come, an empty document among them.

    A layer makes none.
    """
    q, k, v, do = inputs(1, 1, 1, 97, 97, 16)
    lengths = torch.tensor([5, 60, 0, 1, 31], device=DEVICE)
    ids = torch.repeat_interleave(torch.arange(5, device=DEVICE), lengths)[None]
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    expected = with_gradients(apply(function, causal=True, document_ids=ids), q, k, v, do)
    made = document_bounds(ids), document_bounds(cu_seqlens=offsets.int())
    monkeypatch.setattr("kernels.flash_attention.function.document_bounds", None)
    for bounds in made:
        found = with_gradients(apply(function, causal=True, document_ids=bounds), q, k, v, do)
        same_bits(found, expected)


@BOTH
def test_gradients_of_rows_without_a_key_are_zero_whatever_comes_for_their_log_sum_exp(function):
    """As of exp(lse), a weight when attention over parts of the keys is combined: −inf · 0 there is
    not a number.
    """
    q, k, v, do = inputs(1, 1, 1, 50, 20, 16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o, lse = apply(function, causal=True, alignment="bottom-right", return_lse=True)(q, k, v)
    dlse = torch.where(lse == float("-inf"), float("nan"), 1.0)
    assert dlse.isnan().any()
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    assert (dq[dlse.isnan()] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


@BOTH
@pytest.mark.parametrize("spoilt", [slice(0, 70), slice(70, 200)], ids=["first", "last"])
def test_keys_whose_scores_are_minus_infinity_count_nothing(function, spoilt):
    """Whole tiles of them, too."""
    q, k, v, _ = inputs(1, 1, 1, 20, 200, 16)
    q, k[:, :, spoilt] = q.abs() + 1, float("-inf")
    near(apply(function)(q, k, v), F.scaled_dot_product_attention(q, k, v), 2e-5)


# Logits of about ±1e4 must not overflow, in forward or in backward.
@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logits(function, dtype):
    for length in (1, 2, 33):
        q, k, v, do = inputs(1, 1, 1, length, length, 16, dtype)
        q, k = q * 100, k * 100  # scores of about ±1e4
        for causal in (False, True):
            found = with_gradients(apply(function, causal=causal), q, k, v, do)
            assert all(x.isfinite().all() for x in found)
            near(found[0], in_float64(q, k, v, do, causal=causal)[0], 2e-2)


def test_rows_too_far_apart_for_offsets_of_32_bits_are_copied():
    """Within a tile of 128 rows kernels count elements in 32 bits."""

    def apart(stride):
        return torch.empty_strided(
            (1, 1, 200, 16), (200 * stride, 200 * stride, stride, 1), device="meta"
        )

    assert ops._rows_contiguous(apart(2**24 - 16)).stride(-2) == 2**24 - 16
    assert ops._rows_contiguous(apart(2**24)).stride(-2) == 16
    o, _ = ops.forward_op(*[apart(2**24)] * 3, False, 1.0, None, "top-left", "ieee", None, None)
    assert o.stride(-2) == 16


@pytest.mark.parametrize(
    "layout, length, head_dim", [("contiguous", 64, 16), ("transposed", 50, 16), ("packed", 37, 48)]
)
def test_tensor_descriptors(layout, length, head_dim):
    """The descriptor path of every kernel: layouts, lengths and head dims that are and are not
    those of tiles.

    Heads advance in groups, the last of which is smaller.
    """
    q, k, v, do = inputs(2, 2, 1 if layout == "contiguous" else 2, length, length, head_dim)
    if layout == "transposed":
        q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
    if layout == "packed":
        packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)  # (B, T, 3, H, D)
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    tile = Tile(32, 16, tma=True, head_group=3)
    from kernels.flash_attention.ranges import described

    found, descriptors = described("dkdv", tile, q, k, v, do)
    assert (
        found is tile
        and None not in descriptors
        and all(x.block_shape[2] == 32 for x in descriptors)
    )
    pointers = replace(tile, tma=False), [None, None]
    assert described("dq", tile, q, k[:, :1].expand_as(q)) == pointers
    assert described("dq", tile, q, torch.zeros(1, 1, 8, 17, device=DEVICE)[..., 1:]) == pointers
    wide = torch.zeros(1, 1, 8, 129, device=DEVICE)[..., 1:]
    assert described("dq", tile, wide) == (configs.POINTER_TILES["dq", 128], [None])
    with forced(forward=tile, dkdv=tile, dq=tile):
        check(FlashAttention2, (q, k, v, do), causal=True)
        check(FlashAttention2, (q, k, v, do), window=7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_the_statistics_of_the_plain_form(dtype):
    """Its products are those of fp32, in forward and backward: to the bit what inputs cast by hand
    give.
    """
    q, k, v, do = inputs(1, 2, 1, 70, 70, 16)
    do = do.to(dtype)
    call = apply(FlashAttention2PyTorch, causal=True)
    expected = with_gradients(call, *(x.to(dtype) for x in (q, k, v)), do)
    with torch.autocast(DEVICE, dtype):
        found = with_gradients(call, q, k, v, do)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y.to(x.dtype))


def test_autocast_leaves_alone_what_torch_leaves_alone():
    q, k, v, _ = inputs(1, 1, 1, 5, 5, 16)
    with torch.autocast(DEVICE, torch.float16):
        with pytest.raises(ValueError, match=r"q has dtype torch\.int64; allowed: float32"):
            flash_attention(q.long(), k, v)
        assert (
            FlashAttention2PyTorch.apply(q.double(), k.double(), v.double()).dtype is torch.float64
        )


def test_these_tests_run_the_kernels():
    """Not the plain-torch fallback, whatever was imported before."""
    assert runs_triton(torch.zeros(1, device=DEVICE))


def test_plain_cpu_runs_the_tiled_reference():
    """Without a GPU and without the interpreter the public function still works, and never imports
    a kernel.
    """
    script = """
import sys, torch
from kernels import _dispatch
from kernels._dispatch import interpreted
from kernels.flash_attention import flash_attention
assert not interpreted()
q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
o = flash_attention(q, k, v, causal=True)
o.sum().backward()
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(o, expected)
assert "kernels.flash_attention.forward" not in sys.modules
"""
    done = python("-c", script, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not interpreted(), reason="bfloat16 is only refused by the interpreter")
def test_interpreter_refuses_bfloat16():
    q = torch.randn(1, 1, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        flash_attention(q, q.clone(), q.clone())
