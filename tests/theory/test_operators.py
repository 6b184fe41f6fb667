"""The operators in closed form against the events of the simulated model: FLOPs exactly, bytes nearly."""

import itertools
from dataclasses import replace

import pytest

from distlab.model import ModelConfig
from distlab.simulate.run import simulate_training
from distlab.theory.flops import forward_flops
from distlab.theory.memory.activations import PRECISIONS
from distlab.theory.model_shape import ModelShape
from distlab.theory.operators import Workload

CONFIG = ModelConfig(1024, 2816, 3, 8, vocab_size=5000, context_length=512)
SHAPE = ModelShape.of(CONFIG)


def total(work: Workload, what: str, phase: str = "") -> int:
    operators = work.outside() + work.block() * work.shape.num_layers
    return sum(getattr(each, what) for each in operators if phase in ("", each.phase))


@pytest.mark.parametrize(
    "strategy, dtype, checkpointing, ranks",
    [("local", "bf16", False, 1), ("local", "fp32", False, 1), ("local", "bf16", True, 1), ("fsdp", "bf16", False, 4),
     ("fsdp", "bf16", True, 4)],
)  # fmt: skip
def test_as_the_simulated_model(strategy, dtype, checkpointing, ranks):
    """Bytes within 3 %: rotary tables and scalars are left out, and every unit counts as gathered twice."""
    step = simulate_training(
        CONFIG, strategy, batch=2, world_size=ranks, dtype=dtype, checkpointing=checkpointing
    )
    precision = "fp32" if dtype == "fp32" else "bf16" if strategy == "fsdp" else "bf16-autocast"
    work = Workload(
        SHAPE, 2, 512, PRECISIONS[precision],
        recompute="full" if checkpointing else "none", shards=ranks if strategy == "fsdp" else None,
    )  # fmt: skip
    for phase in ("forward", "backward"):
        events = [event for event in step.operators if event.phase == phase]
        assert total(work, "flops", phase) == sum(event.flops for event in events)
        assert total(work, "bytes", phase) == pytest.approx(sum(event.bytes for event in events), rel=0.03)


def test_grouped_queries_and_recomputation():
    work = Workload(SHAPE, 2, 512, PRECISIONS["bf16"])
    sizes = {"batch": 2, "context": 512, "d_model": 1024, "d_ff": 2816, "num_layers": 3, "vocab_size": 5000}
    assert total(work, "flops", "forward") == forward_flops(**sizes, causal=True).total
    grouped = replace(work, shape=replace(SHAPE, num_kv_heads=2))
    assert total(grouped, "flops", "forward") == forward_flops(**sizes, causal=True, kv_width=256).total
    again = [total(replace(work, recompute=name), "flops") - total(work, "flops") for name in ("selective", "full")]
    kept = 2 * 2 * 512 * (1024 * 1024 + 1024 * 1024 + 1024 * 2816)  # keys, output and w3 run again
    assert again[0] == 3 * kept
    assert again[0] < again[1] < total(work, "flops", "forward")
    levels = ("none", "gate-up", "qkv", "output", "attention", "block")
    flops = [total(replace(work, recompute=level), "flops") for level in levels]
    assert flops == sorted(flops) and flops[-1] - flops[0] == again[1]
    d, f, n = 1024, 2816, 1024
    less = [3 * 2 * n * size for size in (0, 2 * d * f, 3 * d * d, d * d, 512 * d)]
    assert [after - before for before, after in itertools.pairwise(flops)] == less


def test_fused_kernels_move_less():
    eager = Workload(SHAPE, 2, 512, PRECISIONS["bf16"])
    fused, composite = replace(eager, kernels="fused"), replace(eager, kernels="composite")
    assert total(fused, "bytes") < total(eager, "bytes") < total(composite, "bytes")
    assert total(fused, "flops") == total(eager, "flops") == total(composite, "flops")


@pytest.mark.parametrize(
    "wrong, says", [({"kernels": "slow"}, "eager, composite, fused"), ({"recompute": "some"}, "none, selective, full")]
)
def test_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Workload(SHAPE, 2, 512, PRECISIONS["bf16"], **wrong)


def test_heads_that_do_not_group():
    with pytest.raises(ValueError, match="num_kv_heads=3 does not divide num_heads=8"):
        replace(SHAPE, num_kv_heads=3)
