"""What `flash_attention` refuses, and the pure arithmetic of its masks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels._dispatch import forced
from kernels.flash_attention import (
    FlashAttention2,
    FlashAttention2PyTorch,
    configs,
    cost,
    flash_attention,
)
from kernels.flash_attention.options import (
    LARGEST_SCALE,
    LEAST_SCALE,
    Problem,
    band,
    document_bounds,
    visible_pairs,
)

from .attention_reference import mask

Q = torch.zeros(2, 4, 5, 16)
K = torch.zeros(2, 2, 7, 16)


def ids(*shape, dtype=torch.int64):
    """Of one document; options of a call whose keys are as many as its queries."""
    return {"k": Q, "v": Q, "document_ids": torch.zeros(shape, dtype=dtype)}


# A wrong argument raises an error that names it and says which values are allowed.
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"v": K.to("meta")}, ValueError, "v is on meta, q on cpu"),
        ({"k": K.half()}, ValueError, "k has dtype torch.float16, q torch.float32"),
        (
            {"q": Q.double()},
            ValueError,
            "q has dtype torch.float64; allowed: float32, float16, bfloat16",
        ),
        ({"q": Q[0, 0]}, ValueError, r"q has shape \(5, 16\); allowed"),
        ({"k": K[0]}, ValueError, "k has 3 dimensions, q 4"),
        ({"v": K[:, :, :6]}, ValueError, "v has shape"),
        ({"q": Q[:, :3]}, ValueError, "k has 2 heads and q 3"),
        ({"k": K[:, :0], "v": K[:, :0]}, ValueError, "k has 0 heads and q 4"),
        ({"q": torch.zeros(1, 1, 5, 257)}, ValueError, "q has head dim 257; allowed: 1 to 256"),
        ({"q": Q[..., :0]}, ValueError, "q has head dim 0; allowed: 1 to 256"),
        ({"k": [1]}, TypeError, r"k must be a torch\.Tensor, got list"),
        ({"window": -1}, ValueError, "window is -1; allowed: 0 or more"),
        ({"window": 1.5}, TypeError, "window must be an int"),
        (
            {"scale": float("nan")},
            ValueError,
            r"scale is nan; allowed: a number from 1.2e-38 to 1.7e\+38, or None",
        ),
        ({"scale": 10**400}, ValueError, "scale is 10000"),
        ({"scale": True}, ValueError, "scale is True; allowed"),
        (
            {"softcap": 1e-320},
            ValueError,
            "softcap is 1e-320; allowed: .* or None for scores as they are",
        ),
        (
            {"softcap": 1e-30, "scale": 1e30},
            ValueError,
            r"softcap is 1e-30, 1.0e\+60 times smaller than scale",
        ),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"alignment": "left"}, ValueError, "alignment is 'left'; allowed: top-left, bottom-right"),
        (
            {"precision": "fp8"},
            ValueError,
            "precision is 'fp8'; allowed: emulated, ieee, tf32x3, bf16x6, tf32",
        ),
        (ids(2, 5, dtype=torch.float32), TypeError, "document_ids must be an integer tensor"),
        (ids(2, 5) | {"k": K, "v": K}, ValueError, "document_ids needs as many queries as keys"),
        (
            ids(5),
            ValueError,
            r"\(5,\); allowed: \(batch, seq\) = \(2, 5\), or what document_bounds makes",
        ),
        # of bounds, which are 32-bit
        (ids(2, 2, 5), ValueError, r"document_ids has shape \(2, 2, 5\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        flash_attention(**{"q": Q, "k": K, "v": K} | arguments)


def test_the_reference_refuses_as_much():
    with pytest.raises(ValueError, match="k has batch 1, q 2"):
        FlashAttention2PyTorch.apply(Q, K[:1], K[:1])


@pytest.mark.parametrize("function", [FlashAttention2, FlashAttention2PyTorch])
def test_the_least_and_the_largest_scale_can_be_computed_with(function):
    """The products with log2(e) too are float32 numbers.

    The factor belongs to the scores, not to q.
    """
    q, k = torch.full((1, 1, 5, 16), 2.0**5), torch.full((1, 1, 5, 16), 2.0**-12)
    k[0, 0, 3] = -(2.0**-12)
    visible = torch.arange(5.0)[:, None] * (torch.arange(5) != 3)[:, None]
    v = torch.arange(5.0)[:, None].expand(1, 1, 5, 16)
    assert torch.allclose(function.apply(q, k, v, False, LARGEST_SCALE), visible.sum(0) / 4)
    assert torch.allclose(function.apply(q, k, v, False, LEAST_SCALE), v.mean(-2, keepdim=True))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({}, ValueError, "either document_ids or cu_seqlens"),
        (
            {"document_ids": torch.zeros(3).long()},
            ValueError,
            r"document_ids has shape \(3,\); allowed: \(batch",
        ),
        ({"cu_seqlens": [0, 3]}, TypeError, "cu_seqlens must be an integer tensor"),
        ({"cu_seqlens": torch.tensor([[0, 3]])}, ValueError, "one dimension, ascending from 0"),
        (
            {"cu_seqlens": torch.tensor([1, 3])},
            ValueError,
            r"cu_seqlens is \[1, 3\], of shape \(2,\)",
        ),
        ({"cu_seqlens": torch.tensor([0, 3, 2])}, ValueError, "ascending"),
    ],
)
def test_document_bounds_of_what_are_no_documents(arguments, error, message):
    with pytest.raises(error, match=message):
        document_bounds(**arguments)


@given(
    query_count=st.integers(0, 40),
    key_count=st.integers(0, 40),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 45),
    alignment=st.sampled_from(["top-left", "bottom-right"]),
)
def test_visible_pairs_counts_the_mask(query_count, key_count, causal, window, alignment):
    limits = band(query_count, key_count, causal, window, alignment)
    expected = (
        mask(query_count, key_count, causal=causal, window=window, alignment=alignment).sum().item()
    )
    assert visible_pairs(query_count, key_count, *limits) == expected


def test_cost_of_the_record_configuration():
    shape = (1, 16, 16384, 64)
    forward = cost(shape, shape, torch.bfloat16, causal=True)
    assert forward.flops == 4 * 16 * 64 * (16384 * 16385 // 2)
    assert forward.bytes == 4 * 2 * 16 * 16384 * 64 + 4 * 16 * 16384
    assert (
        cost(shape, shape, torch.bfloat16, causal=True, backward=True).flops == 2.5 * forward.flops
    )


def test_a_gpu_on_which_nothing_runs_says_so(monkeypatch):
    """Unknown GPUs search among a few tiles.

    When all of them fail, the last failure is the cause.
    """
    monkeypatch.setattr(configs, "generation", lambda index: "sm_00")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def run(tile):
        raise ValueError(f"no room for {tile.block_m} rows")

    with pytest.raises(RuntimeError, match="no attention configuration runs on this GPU") as error:
        configs.choose("forward", Q, Problem((None, None), 1.0), run)
    assert "rows" in str(error.value.__cause__)


def test_keys_share_rows_only_in_the_documented_way():
    key = configs.Key("sm_90", 32, "tf32x3", 64, 65536)
    for precision in ("tf32", "tf32x3"):
        assert configs.lookup(replace(key, precision=precision)) == configs.TABLE[key]
    wide = replace(key, head_dim=256)
    assert configs.lookup(replace(wide, precision="bf16x6")) == configs.TABLE[wide]
    assert configs.lookup(replace(key, gpu="sm_00")) is None
    arithmetics = [
        (16, "ieee"),
        *((32, precision) for precision in ("ieee", "tf32x3", "bf16x6", "tf32")),
    ]
    for bits, precision in arithmetics:  # no call on sm_90 searches
        for head_dim in (16, 32, 64, 128, 256):
            for rows in configs.ROW_CLASSES:
                assert (
                    configs.lookup(configs.Key("sm_90", bits, precision, head_dim, rows))
                    is not None
                )


def test_a_length_without_a_row_takes_the_next_longer_one_and_else_the_longest(monkeypatch):
    key = configs.Key("sm_90", 16, "ieee", 64, 4096)
    medium, long = (configs.Choice(*[configs.Tile(16, n)] * 3) for n in (16, 32))
    monkeypatch.setattr(
        configs, "TABLE", {replace(key, rows=2048): medium, replace(key, rows=8192): long}
    )
    lookup = configs.lookup.__wrapped__  # without what it remembers of the real table
    found = [lookup(replace(key, rows=rows)) for rows in configs.ROW_CLASSES]
    assert found == [medium, medium, long, long, long, long, long]


def test_emulated_fp32_is_the_arithmetic_that_the_table_has_for_the_call(monkeypatch):
    monkeypatch.setattr(configs, "generation", lambda index: "sm_90")
    monkeypatch.setattr(configs, "interpreted", lambda: False)
    problem = Problem((None, None), 1.0, "emulated")

    def arithmetic(length, head_dim, dtype=torch.float32):
        q = torch.empty(1, 1, length, head_dim, device="meta", dtype=dtype)
        return configs.settled(q, problem).precision

    for head_dim in (16, 100):
        assert [arithmetic(length, head_dim) for length in (8192, 8193, 2**20)] == [
            "tf32x3",
            "bf16x6",
            "bf16x6",
        ]
    assert arithmetic(16384, 256) == "tf32x3"
    assert arithmetic(16384, 128, dtype=torch.bfloat16) == "ieee"
    with forced(dq=configs.Tile(16, 16)):  # a tile of one kernel says nothing of the others'
        assert arithmetic(16384, 128) == "tf32x3"
    asked = Problem((None, None), 1.0, "ieee")
    assert configs.settled(Q, asked) is asked


def test_row_classes_count_the_rows_of_the_whole_call():
    problem = Problem((None, 0), 1.0)
    shapes = {(1, 1, 1024): 1024, (1, 1, 1025): 2048, (2, 4, 1024): 8192, (4, 16, 4096): 65536}
    for shape, rows in shapes.items():
        assert configs.key_of(torch.empty(*shape, 16, device="meta"), problem, "sm_90").rows == rows
