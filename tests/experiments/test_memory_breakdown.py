"""States counted from the tensors of two gloo ranks, against the closed forms. No allocator counts on a CPU."""

import pytest

from experiments import memory_breakdown
from experiments.memory_breakdown import STATES, STRATEGIES
from tests.experiments.frame import measured


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return measured(memory_breakdown.EXPERIMENT, tmp_path_factory.mktemp("memory"), strategies=STRATEGIES)


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
