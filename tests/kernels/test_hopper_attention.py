"""Hopper's attention kernels: which calls they take, and that they compile for sm_90.

Gluon has no interpreter: without a GPU the kernels are compiled only, and the rest is the way to
them.
"""

from types import SimpleNamespace

import pytest
import torch

from distlab import doctor
from kernels import _dispatch
from kernels._dispatch import forced
from kernels.flash_attention import configs, hopper, ops
from kernels.flash_attention.options import Problem, is_deterministic

from . import compiled

CAUSAL = Problem((None, 0), 0.125)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(hopper, "generation", lambda index: "sm_90")


def served(q, k=None, problem=CAUSAL, direction="backward"):
    k = q if k is None else k
    return hopper.serves(direction, q, k, k, problem, q)


LONG = tensor(2, 32, 4096, 128)
TAKEN = {  # q, and what differs from a causal backward of as many keys
    "causal": (LONG, {}),
    "grouped": (
        LONG,
        {"k": tensor(2, 8, 1111, 128), "problem": Problem((None, 1111 - 4096), 0.125)},
    ),
    "transposed": (tensor(2, 4096, 32, 128, dtype=torch.float16).transpose(1, 2), {}),
    "of a fused projection": (tensor(2, 4096, 3, 32, 128)[:, :, 1].transpose(1, 2), {}),
    "forward": (LONG, {"direction": "forward"}),
    "wide": (tensor(2, 16, 4096, 256), {}),
    "least forward": (tensor(1, 12, 1024, 64), {"direction": "forward"}),
    "least backward": (tensor(1, 12, 400, 128), {}),
    "few keys of heads that share them": (tensor(1, 32, 500, 128), {"k": tensor(1, 8, 500, 128)}),
    "least backward above 128": (tensor(1, 4, 1024, 192), {}),
    "least forward above 128": (tensor(1, 4, 1024, 256), {"direction": "forward"}),
}
LEFT = {
    "short forward": (tensor(1, 11, 1024, 64), {"direction": "forward"}),
    "few queries": (tensor(1, 8, 100, 128), {"k": tensor(1, 8, 4096, 128), "direction": "forward"}),
    "window": (LONG, {"problem": Problem((5, 0), 0.125)}),
    "documents": (LONG, {"problem": Problem((None, 0), 0.125, bounds=tensor(2, 2, 4096))}),
    "softcap": (LONG, {"problem": Problem((None, 0), 0.125, softcap=30.0)}),
    "fp32": (tensor(2, 32, 4096, 128, dtype=torch.float32), {}),
    "head dim 72": (tensor(2, 32, 4096, 72), {}),
    "scale": (LONG, {"problem": Problem(CAUSAL.band, 1e19)}),
    "too few rows for a GPU": (tensor(1, 1, 4096, 128), {}),
    "too few keys": (tensor(1, 8, 4096, 128), {"k": tensor(1, 8, 100, 128)}),
    "too few rows above 128": (tensor(1, 3, 1024, 256), {}),
    "expanded": (tensor(2, 1, 4096, 128).expand(2, 32, 4096, 128), {}),
    "rows 264 bytes apart": (tensor(2, 32, 4096, 132)[..., :128], {}),
    "more rows than coordinates count": (tensor(2**17, 8, 2**11, 64), {}),
}


@pytest.mark.parametrize("name", TAKEN | LEFT)
def test_what_the_hopper_kernels_take_and_leave_to_triton(on_hopper, name):
    q, others = (TAKEN | LEFT)[name]
    assert served(q, **others) == (name in TAKEN and hopper.installed())


def test_unaligned_addresses_and_forced_tiles_are_left_to_triton(on_hopper):
    q = torch.empty(2 * 32 * 512 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 32, 512, 64)
    assert q.data_ptr() % 16 and not served(q) and served(q.clone()) == hopper.installed()
    with forced(dq=configs.Tile(64, 64)):  # of Triton's
        assert not served(q.clone())


def test_machines_that_take_the_triton_path(monkeypatch):
    monkeypatch.setattr(hopper, "generation", lambda index: "sm_100")
    assert (
        not served(LONG) and hopper.unavailable(0) == "those for Hopper need sm_90, this is sm_100"
    )
    monkeypatch.setattr(hopper, "generation", lambda index: "sm_90")
    monkeypatch.setattr(hopper, "installed", lambda: False)
    assert not served(LONG) and "no Gluon" in hopper.unavailable(0)


def test_the_doctor_says_which_kernels_run_and_why(monkeypatch):
    """And its words are those of the constants that decide."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_dispatch, "interpreted", lambda: False)
    for reason in (None, "those for Hopper need sm_90, this is sm_80"):
        monkeypatch.setattr(hopper, "unavailable", lambda index, reason=reason: reason)
        (said,) = (finding.found for finding in doctor.find_triton() if finding.name == "kernels")
        assert (reason or hopper.SERVED) in said
    assert hopper.HEAD_DIMS == HEAD_DIMS and "64, 80, 96, 128, 192 and 256" in hopper.SERVED
    assert f"forward from {hopper.LEAST_ROWS['forward']:,} rows" in hopper.SERVED
    assert f"backward from {hopper.LEAST_ROWS['backward']:,}" in hopper.SERVED
    assert f"above 128 both from {hopper.LEAST_ROWS_WIDE:,}" in hopper.SERVED


@pytest.mark.parametrize(
    "q, k, programs, group",
    [
        ((4, 32, 1024, 64), None, 132, 128),  # the L2 holds all keys and values
        ((2, 32, 2048, 128), None, 132, 1),
        # 128 tiles a head: the first programs' are the long ones
        ((1, 40, 16384, 128), None, 5120, 4),
        ((4, 32, 16384, 128), (4, 8, 16384, 128), 132, 128),  # of few heads
        ((1, 8, 1024, 128), None, 64, 8),  # fewer tiles than multiprocessors
        ((2**7, 40, 2**10, 128), None, 2**15 + 2**13, 64),  # more than it would count
    ],
)
def test_the_order_of_the_forward(monkeypatch, q, k, programs, group):
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    consumers, keys, _ = hopper.forward_shape(tensor(*q))
    assert hopper._order(tensor(*q), tensor(*(k or q)), 0, 64 * consumers, keys) == (
        programs,
        group,
    )


def test_tiles_are_dealt_out_evenly_or_not():
    assert hopper.dealt_evenly(64, 1000, 65, -900, 132, 128, 128)  # most rows see no key
    assert not hopper.dealt_evenly(16, 16384, 16384, 0, 132, 128, 128)
    assert hopper.dealt_evenly(16, 16384, 16384, 16384, 132, 128, 128)  # all as long


@pytest.mark.parametrize("key_count", [384, 400])
@pytest.mark.parametrize("hi", [0, 1, 64, 128, -128, 255, 382, 383, 384, 500])
def test_tiles_that_a_mask_cuts(key_count, hi):
    """Of 512 queries: no other tile has a key that some query of it does not see."""
    for rows in (64, 128):  # queries of a tile
        cut = hopper.backward_cut(key_count, hi, rows == 128)
        for first_key in range(0, key_count, 128):
            first = max(first_key - hi, 0) // rows * rows
            hidden = set()  # first rows of tiles in which a query does not see a key
            for row in range(first, 512, rows):
                last_seen = min(row + hi, key_count - 1)
                if first_key + 127 > last_seen:
                    hidden.add(row)
            may_be_cut = {0: set(), 1: {first}, 2: hidden}
            assert hidden <= may_be_cut[cut]
    # of the forward, whose consumers with tiles of 128 begin at the last key that any sees
    for keys in (64, 128):
        for row in range(0, 512, 64):
            end = min(row // keys * keys + keys + hi, key_count)
            ends = [start + keys for start in range(0, max(end, 1), keys)][::-1]
            whole = ends[hopper.forward_cut(key_count, hi, keys) :]
            assert max(whole, default=0) <= max(min(row + hi + 1, key_count), 0)
    assert [
        hopper.backward_cut(384, 384),
        hopper.backward_cut(384, 0, True),
        hopper.backward_cut(384, 0),
    ] == [0, 1, 2]


def test_heads_of_the_backward_are_grouped_by_what_the_l2_holds():
    """However many query heads a key head has: they are taken one after another."""
    assert [hopper._group(tensor(4, 32, 4096, d)) for d in (64, 128)] == [8, 4]
    assert hopper._group(tensor(1, 32, 2**20, 128)) == 1


@pytest.mark.parametrize(
    "kv_group, key_tiles, causal, full",
    [
        (4, 192, 4, 4),
        (4, 128, 2, 4),  # 128 programs for 132 multiprocessors
        (4, 64, 1, 2),
        (8, 64, 2, 4),
        (6, 66, 2, 3),
        (1, 1, 1, 1),
        (32, 1, 1, 1),  # none is enough: as many as there can be
    ],
)
def test_programs_walk_over_fewer_query_heads_if_they_would_be_too_few(
    monkeypatch, kv_group, key_tiles, causal, full
):
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    for is_full, each in ((False, causal), (True, full)):
        assert hopper._query_heads(kv_group, key_tiles, is_full, torch.device("cuda")) == each


def test_long_forwards_of_64_have_four_consumers():
    short, long = tensor(1, 15, 4096, 64), tensor(1, 16, 4096, 64)
    assert [hopper.forward_shape(q).consumers for q in (short, long)] == [2, 4]
    assert hopper.forward_shape(tensor(1, 16, 4096, 128)).consumers == 2


@pytest.mark.skipif(not hopper.installed(), reason="no Triton with Gluon")
@pytest.mark.parametrize("kv_group, each", [(1, 1), (3, 3), (4, 4), (6, 3), (7, 1), (8, 4)])
def test_programs_walk_over_four_query_heads_at_most_and_what_they_give_is_summed(
    monkeypatch, kv_group, each
):
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 1)
    grids = []

    def launch(kernel, grid, *args, **options):
        grids.append(grid)
        if len(grids) == 1:
            heads, group, walked = args[9:12]
            assert (heads, group, walked) == (2 * kv_group, kv_group, each)
            for part, value in zip(args[7:9], (1.0, 2.0), strict=True):
                assert part.shape == (3, heads // each, 200, 64)
                part.fill_(value)

    # first, as it imports a module that takes `launch` for its own
    monkeypatch.setattr(
        "kernels.flash_attention.backward.launch_delta",
        lambda *_: SimpleNamespace(lse2=torch.zeros(3, 2 * kv_group, 128), delta=None),
    )
    monkeypatch.setattr(hopper._dispatch, "launch", launch)
    monkeypatch.setattr(hopper, "_descriptor", lambda x, *_: x)
    q, k = (
        torch.zeros(3, 2 * kv_group, 100, 64, dtype=torch.bfloat16),
        torch.zeros(3, 2, 200, 64, dtype=torch.bfloat16),
    )
    dk, dv = torch.empty_like(k), torch.empty_like(k)
    hopper.launch_backward(q, k, k, q, None, q, q, dk, dv, CAUSAL)
    assert grids[0] == (2 * 3 * 2 * kv_group // each,)
    assert (dk == kv_group // each).all() and (dv == 2 * kv_group // each).all()


def as_added(dq):
    """(B, H, T, D) → the sum of dQ in memory as the one-pass kernel leaves it, in tiles of
    64 x 64.
    """
    tiles = dq.unflatten(2, (-1, 64)).unflatten(4, (-1, 64)).transpose(3, 4).flatten(0, 3)
    return (
        tiles.reshape(-1, 4, 2, 8, 8, 4, 2)
        .permute(0, 4, 1, 3, 5, 2, 6)
        .reshape(-1, 256)
        .contiguous()
    )


@pytest.mark.skipif(not hopper.installed(), reason="no Triton with Gluon")
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_sums_of_dq_are_cleared_and_put_in_order_wherever_they_go(head_dim):
    """Of 70 rows; batches lie 2³¹ elements apart in all."""
    from kernels.flash_attention.backward import launch_delta
    from kernels.flash_attention.hopper_backward import cast_kernel

    batch = 17
    heads = 1
    columns = configs.block_d(head_dim)
    exact = torch.randn(batch, heads, 128, columns)
    total = as_added(exact)
    dq = torch.empty_strided(
        (batch, heads, 70, head_dim), (2**27, 2**20, columns, 1), dtype=torch.float16
    )

    def cast():
        _dispatch.launch(
            cast_kernel,
            (batch * heads * 2 * (columns // 64),),
            total,
            dq,
            *dq.stride()[:3],
            heads,
            70,
            2,
            0.5,
            HEAD_DIM=head_dim,
            PARTS=columns // 64,
        )

    cast()
    assert torch.equal(dq, (0.5 * exact[:, :, :70, :head_dim]).half())
    total.fill_(torch.nan)
    q = torch.zeros(batch, heads, 70, head_dim, dtype=torch.float16)
    launch_delta(q, q, q, q, torch.zeros(batch, heads, 70), q, total)
    cast()
    assert (dq == 0).all()


def test_the_operators_launch_what_serves_says(monkeypatch):
    """The backward only where nothing asks for bits that are the same in every run, or
    these are.
    """
    launched, hoppers = [], ["hopper.launch_forward", "hopper.launch_backward"]
    others = ["backward.launch_delta", "backward.launch_dkdv", "backward.launch_dq"]
    for name in (*hoppers, *others):
        monkeypatch.setattr(
            f"kernels.flash_attention.{name}", lambda *_, name=name, **more: launched.append(name)
        )
    monkeypatch.setattr(ops._dispatch, "runs_triton", lambda x: True)
    monkeypatch.setattr(hopper, "serves", lambda *_: True)
    q, wide = (torch.zeros(1, 1, 16, head_dim, dtype=torch.float16) for head_dim in (64, 256))
    lse = torch.zeros(1, 1, 16)
    ops._launch_forward(q, q, q, q, lse, CAUSAL)
    for x, deterministic in ((q, False), (q, True), (wide, True)):
        ops._launch_backward(x, x, x, x, lse, x, lse, (x, x, x), CAUSAL, deterministic)
    assert launched == hoppers + others + hoppers[1:]


def test_what_deterministic_means():
    assert is_deterministic(True) and not is_deterministic(None)
    torch.use_deterministic_algorithms(True)
    try:
        assert is_deterministic(None) and not is_deterministic(False)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(TypeError, match="deterministic must be True, False or None, got 'yes'"):
        is_deterministic("yes")


@pytest.mark.skipif(not hopper.installed(), reason="no Triton with Gluon")
def test_the_kernels_compile_within_their_registers_and_shared_memory():
    """Spilled are addresses and counters of loops, a few bytes.

    A spilled accumulator would take 256 bytes each.
    """
    launches = {64: 4 * 4, 80: 4 * 4, 128: 4 * 4, 256: 4 * 4, "long": 3}
    for head_dim, count in launches.items():
        kernels = compiled.results()[f"hopper_{head_dim} 90"]
        assert len(kernels) == count
        for kernel in kernels:
            matmuls = kernel["name"].startswith("hopper")
            assert kernel["serialized"] == 0, kernel
            # 65,536 for three groups of 128 threads
            assert kernel["registers"] <= (168 if matmuls else 128), kernel
            assert kernel["spill_bytes"] <= SPILLS.get((kernel["name"], head_dim), 0), kernel
            assert kernel["shared_bytes"] <= 227 * 1024, kernel
            assert (kernel["wgmma"] >= 48) == matmuls
            assert kernel["unused_barriers"] == [], "Triton puts data where they were made"
            assert (kernel["reductions"] > 0) == (kernel["name"] == "hopper_backward_kernel")
            waits, arrivals = kernel["order"]  # of each consumer; the first one begins
            assert arrivals == [count + (i == 0 < count) for i, count in enumerate(waits)]


SPILLS = {
    ("hopper_backward_kernel", 64): 152,
    ("hopper_backward_kernel", 80): 104,
    ("hopper_backward_kernel", 128): 104,
    ("hopper_forward_kernel", 256): 12,
}
