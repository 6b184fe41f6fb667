"""The operators in closed form against the events of the simulated model: FLOPs exactly, bytes
nearly.
"""

import pytest

from distlab.hardware import H100_SXM
from distlab.model import ModelConfig, config, preset
from distlab.simulate.step import simulate_training
from distlab.theory.fusion import kernel_counts, transformer_block
from distlab.theory.memory.activations import PRECISIONS, precision_of
from distlab.theory.memory.recompute import RECOMPUTATION
from distlab.theory.model_shape import ModelShape
from distlab.theory.operators import Workload

CONFIG = ModelConfig(1024, 2816, 2, 8, vocab_size=5000, context_length=512, num_kv_heads=2)
SHAPE = ModelShape.of(CONFIG)


def total(work, what, phase=""):
    operators = work.outside() + work.block() * work.shape.num_layers
    return sum(getattr(each, what) for each in operators if phase in ("", each.phase))


@pytest.mark.parametrize(
    "strategy, dtype, keep, ranks",
    [
        *(("local", "bf16", keep, 1) for keep in RECOMPUTATION),
        ("local", "fp32", "none", 1),
        *(("fsdp", "bf16", keep, 4) for keep in ("none", "selective")),
    ],
)
def test_as_the_simulated_model(strategy, dtype, keep, ranks):
    """Bytes within 3 %: rotary tables and scalars are left out, and every unit counts as gathered
    twice.
    """
    step = simulate_training(
        CONFIG, strategy, batch=2, world_size=ranks, dtype=dtype, checkpointing=keep
    )
    precision = precision_of(dtype, casts_parameters=strategy == "fsdp")
    shards = ranks if strategy == "fsdp" else None
    work = Workload(SHAPE, 2, 512, precision, keep=keep, shards=shards)
    for phase in ("forward", "backward"):
        events = [event for event in step.operators if event.phase == phase]
        assert total(work, "flops", phase) == sum(event.flops for event in events)
        assert total(work, "bytes", phase) == pytest.approx(
            sum(event.bytes for event in events), rel=0.03
        )


def test_theory_and_model_name_alike_what_blocks_keep():
    assert set(RECOMPUTATION) == set(config.RECOMPUTATION)


@pytest.mark.parametrize("precision, autocast", [("fp32", False), ("bf16-autocast", True)])
def test_both_counts_of_theory_agree(precision, autocast):
    """The advisor's graph of a block and the operators of a step, forward.

    In one kernel each what can be.
    """
    model = preset("medium")
    graph = transformer_block(
        8, 1024, model.d_model, model.d_ff, model.num_heads, 2 if autocast else 4, autocast
    )
    counts = kernel_counts(graph, H100_SXM)
    for kernels, name in (("eager", "eager"), ("fused", "ours"), ("fused", "compiled")):
        block = Workload(ModelShape.of(model), 8, 1024, PRECISIONS[precision], kernels).block()
        assert (
            sum(operator.launches for operator in block if operator.phase == "forward")
            == counts[name]
        )
