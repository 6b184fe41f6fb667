"""States counted from the tensors of two gloo ranks, against the closed forms. No allocator counts on a CPU."""

import pytest

from distlab.report.table import render
from distlab.testing import run_ranks
from experiments import memory_breakdown
from experiments.memory_breakdown import STATES, STRATEGIES, MemoryConfig


def _records(context):
    return memory_breakdown.run(MemoryConfig(batch=1, context=16, steps=3, bucket_size_mb=1.0), context)


@pytest.fixture(scope="module")
def records():
    return run_ranks(_records, 2)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_states_are_predicted(records, strategy):
    metrics = next(r.metrics for r in records if r.variant == strategy)
    for state in STATES:
        assert abs(metrics[f"{state}_error_pct"]) < 5, (state, metrics)
    assert metrics["peak_alloc_bytes"] is None and metrics["peak_alloc_error_pct"] is None


def test_sharding_divides(records):
    of = {record.variant: record.metrics for record in records}
    whole = of["local"]
    assert whole["optimizer_state_bytes"] == 2 * whole["parameters_bytes"]
    for strategy in ("zero1", "fsdp", "fsdp2"):
        assert of[strategy]["optimizer_state_bytes"] == pytest.approx(whole["parameters_bytes"], rel=0.02)
    assert of["zero1"]["parameters_bytes"] == pytest.approx(whole["parameters_bytes"], rel=0.02)
    assert of["fsdp"]["parameters_bytes"] == pytest.approx(whole["parameters_bytes"] / 2, rel=0.02)


def test_table_and_picture(records, tmp_path):
    assert "fsdp2" in render(records, memory_breakdown.COLUMNS)
    memory_breakdown.draw(records, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"dtype": "int8"}, "fp32, bf16"), ({"batch": 0}, "batch=0"), ({"strategies": ()}, "at least one")],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**wrong)
