"""Hopper's attention kernels on a GPU: they take all that they can, and what they compute is judged
by the rule of test_flash_attention_gpu.py.
"""

import gc
import random
import subprocess
import sys
from functools import partial

import pytest
import torch

from kernels import _dispatch
from kernels.flash_attention import configs, flash_attention, hopper

from .attention_reference import attention, in_float64, inputs, rms, with_gradients
from .near import near
from .test_flash_attention_gpu import (
    called_and_replayed,
    causal_results,
    check_beside_eager,
    check_beside_sdpa,
)
from .test_hopper_attention import HEAD_DIMS

pytestmark = pytest.mark.gpu
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


@pytest.fixture(autouse=True)
def everything(monkeypatch):
    """The Hopper kernels take all that they can, however short."""
    if not torch.cuda.is_available() or configs.generation(torch.cuda.current_device()) != "sm_90":
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(hopper, "LEAST_ROWS", {"forward": 0, "backward": 0})
    monkeypatch.setattr(hopper, "LEAST_ROWS_WIDE", 0)
    _dispatch.forget()
    yield
    _dispatch.forget()


@pytest.mark.parametrize("options", [{}, {"window": 100}], ids=["Hopper", "Triton"])
def test_nothing_is_kept_after_a_call(options):
    """Neither a program nor a descriptor holds the tensors of the call that it was made from.

    Backward runs in this thread: autograd's own drops the gradients some time after it has handed
    them over.
    """
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with torch.autograd.set_multithreading_enabled(False):
            causal_results(*inputs(1, 2, 2, 1024, 1024, 128, torch.bfloat16), **options)
        gc.collect()
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_head_dim
def test_random_shapes(monkeypatch, head_dim, dtype):
    """With lengths on either side of the tiles, rows without keys, keys without queries, in every
    order.
    """
    draw = random.Random(f"{head_dim} {dtype}")
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 384, 1000, 1024, 1025, 4097]
    monkeypatch.setattr(hopper, "dealt_evenly", lambda *_: draw.random() < 0.5)
    monkeypatch.setattr(hopper, "MOST_HEADS", 0)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: draw.choice([3, 132]))
    for seed in range(25 if dtype == torch.bfloat16 else 8):  # what differs is the type
        monkeypatch.setattr(hopper, "L2_BYTES", draw.choice([0, 0, 2**26]))
        monkeypatch.setattr(hopper, "FOUR_CONSUMERS_ROWS", draw.choice([0, 2**40]))
        kv_heads = draw.choice([1, 2])
        sizes = (
            draw.choice([1, 2]),
            kv_heads * draw.choice([1, 2, 3, 6, 7, 8]),
            kv_heads,
            draw.choice(lengths),
            draw.choice(lengths),
        )
        options = {
            "causal": draw.random() < 0.6,
            "alignment": draw.choice(["top-left", "bottom-right"]),
        }
        if draw.random() < 0.2:
            options["scale"] = draw.choice([0.01, 0.3])
        check_beside_eager(inputs(*sizes, head_dim, dtype, seed), **options)


@pytest.mark.parametrize(
    "head_dim, key_count",
    [
        (64, 1),
        (80, 3),
        (96, 127),
        (128, 128),
        (64, 129),
        (128, 4097),
        (80, 65537),
        (128, 65537),
        (256, 129),
        (256, 65537),
    ],
)
def test_key_lengths(key_count, head_dim):
    for causal in (False, True):
        tensors = inputs(1, 2, 1, 129, key_count, head_dim, torch.bfloat16)
        check_beside_eager(tensors, causal=causal, alignment="bottom-right")


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize("queries, keys", [(384, 640), (640, 384), (256, 256)])
@pytest.mark.parametrize(
    "head_dim, four_consumers", [*((head_dim, False) for head_dim in HEAD_DIMS), (64, True)]
)
def test_whole_tiles(monkeypatch, head_dim, four_consumers, queries, keys, alignment):
    """Where the mask is left out of all tiles but a program's first, or of all.

    And keys that no query sees.
    """
    monkeypatch.setattr(hopper, "FOUR_CONSUMERS_ROWS", 0 if four_consumers else 2**40)
    for causal in (False, True):
        check_beside_eager(
            inputs(1, 2, 2, queries, keys, head_dim, torch.bfloat16),
            causal=causal,
            alignment=alignment,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_head_dim
def test_accuracy_beside_sdpa(head_dim, dtype):
    """Each type is causal at every other head dim."""
    causal = (HEAD_DIMS.index(head_dim) % 2 == 0) == (dtype == torch.bfloat16)
    check_beside_sdpa(inputs(2, 4, 4, 2048, 2048, head_dim, dtype), causal)


@every_head_dim
def test_strided_inputs(head_dim):
    """Heads innermost, slices of a fused projection, and a gradient of another layout than the
    output.
    """
    q, k, v, do = inputs(2, 4, 4, 300, 300, head_dim, torch.bfloat16)
    fused = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    turned = do.transpose(1, 2).contiguous().transpose(1, 2)
    packed = causal_results(q, k, v, do)
    strided = causal_results(*views, turned)
    assert [
        torch.equal(x, y) for x, y in zip(packed, strided, strict=True) if x is not packed[1]
    ] == [True] * 3
    exact = in_float64(q, k, v, do, causal=True)
    for x, y in zip(strided, exact, strict=True):
        assert rms(x.double() - y) <= 1e-2 * rms(y)


@every_head_dim
def test_the_gradient_of_the_log_sum_exp(head_dim):
    """It reaches q and k through Δ alone, which both backwards read."""
    tensors = (
        *inputs(2, 4, 2, 300, 257, head_dim, torch.bfloat16),
        torch.randn(2, 4, 300, device="cuda"),
    )
    exact = in_float64(*tensors)
    for deterministic in (False, True):
        call = partial(flash_attention, deterministic=deterministic, return_lse=True)
        ours = with_gradients(call, *tensors)
        assert ours[1].dtype is torch.float32
        for x, y in zip(ours, exact, strict=True):
            assert rms(x.double() - y) <= 1e-2 * rms(y)


@every_head_dim
def test_large_inputs_and_those_that_are_not_finite(head_dim):
    """As SDPA: a NaN in a query reaches its row only.

    One in a key or value every row that sees it.
    """
    q, k, v, do = inputs(1, 2, 2, 300, 300, head_dim, torch.bfloat16)
    results = causal_results(q * 30, k * 30, v, do)
    assert all(x.isfinite().all() for x in results)
    for position in range(3):
        for value in (float("nan"), float("inf")):
            spoilt = [x.clone() for x in (q, k, v)]
            spoilt[position][0, 0, 130] = value
            ours = flash_attention(*spoilt, causal=True)
            peer = attention(*spoilt, causal=True)
            assert torch.equal(ours[:, 1].isfinite(), peer[:, 1].isfinite())
            assert ours[0, 0, :128].isfinite().all()
            assert torch.equal(ours[0, 0, 130:].isnan().any(-1), peer[0, 0, 130:].isnan().any(-1))


@every_head_dim
def test_keys_whose_scores_are_minus_infinity(head_dim):
    """Whole tiles of them, where a program begins: the other keys decide."""
    q, k, v, _ = inputs(1, 2, 2, 384, 384, head_dim, torch.bfloat16)
    q, k[:, :, 128:] = q.abs() + 1, -torch.inf
    for causal in (False, True):
        exact = attention(q.float(), k.float(), v.float(), causal=causal)
        near(flash_attention(q, k, v, causal=causal), exact, 2e-2)


@every_head_dim
def test_a_hundred_repeats(head_dim):
    """None hangs.

    O, dk and dv are bit-identical, dq is too where it is asked for, and above 128 columns.
    """
    tensors = inputs(2, 4, 2, 1000, 1000, head_dim, torch.bfloat16)
    for deterministic in (False, True):
        first = causal_results(*tensors, deterministic=deterministic)
        for _ in range(100):
            again = causal_results(*tensors, deterministic=deterministic)
            same = [torch.equal(x, y) for x, y in zip(first, again, strict=True)]
            same[1] |= not deterministic and head_dim <= 128
            assert all(same)
            near(again[1], first[1], 1e-2, 1.6e-2)


NEIGHBOUR = """
import torch
x = torch.ones(4096, 4096, device="cuda")
while True:
    print((x @ x)[0, 0].item(), flush=True)
"""


def test_a_gpu_that_another_process_uses_too():
    """The GPU stops a kernel anywhere to let the other process on, and writes its barriers back
    when it goes on.
    """
    tensors = inputs(2, 4, 2, 1000, 1000, 128, torch.bfloat16)
    first = causal_results(*tensors)
    neighbours = [
        subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    try:
        for neighbour in neighbours:
            neighbour.stdout.readline()
        for _ in range(100):
            several = [causal_results(*tensors) for _ in range(50)]
            for name, *found in zip(["o", "dq", "dk", "dv"], first, *several, strict=True):
                same = [torch.isclose(x, found[0], atol=1e-2, rtol=1.6e-2).all() for x in found]
                assert torch.stack(same).all(), name
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()


def test_streams_at_once():
    calls = [inputs(1, 8, 8, 2048, 2048, d, torch.bfloat16, d) for d in (64, 128, 256)]
    expected = [causal_results(*c) for c in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results = [[] for _ in calls]
    for _ in range(20):
        for i, (stream, call) in enumerate(zip(streams, calls, strict=True)):
            with torch.cuda.stream(stream):
                results[i].append(causal_results(*call))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        for result in found:
            near(result, wanted, 1e-2, 1.6e-2)


@every_head_dim
def test_cuda_graph_capture(head_dim):
    near(*called_and_replayed(inputs(1, 2, 1, 257, 300, head_dim, torch.bfloat16)), 1e-2, 1.6e-2)


def test_torch_compile():
    tensors = inputs(2, 4, 2, 300, 300, 128, torch.bfloat16)
    compiled = torch.compile(lambda *x: flash_attention(*x, causal=True), fullgraph=True)
    near(with_gradients(compiled, *tensors), causal_results(*tensors), 1e-2, 1.6e-2)


def test_programs_are_recorded():
    """Descriptors of Gluon's are filled with the addresses of each call."""
    tensors = inputs(2, 4, 2, 300, 300, 128, torch.bfloat16)
    first = causal_results(*tensors)
    recorded = [x for x in _dispatch.programs() if x.startswith("# flash_attention")]
    assert len(recorded) == 2
    assert all("[a0]" in x for x in recorded)
    for scale in (1.0, -1.0):  # other addresses, other values
        q, k, v, do = (x.clone() for x in tensors)
        o, _, _, dv = causal_results(q, k, v * scale, do)
        assert torch.equal(o, first[0] * scale)
        torch.testing.assert_close(dv, first[3])
