"""States counted from the tensors of two gloo ranks, against the closed forms.

No allocator counts on a CPU.
"""

import pytest

from experiments.memory_breakdown import STRATEGIES


def test_states_are_predicted_and_sharding_divides(smoke):
    of = {record.variant: record.metrics for record in smoke("memory_breakdown")[0]}
    assert list(of) == list(STRATEGIES)
    for strategy, metrics in of.items():
        for state in ("parameters", "gradients", "optimizer_state"):
            assert metrics[f"predicted_{state}_bytes"] == pytest.approx(
                metrics[f"{state}_bytes"], rel=0.05
            ), strategy
        assert metrics["peak_alloc_bytes"] is None
    whole = of["local"]
    assert whole["optimizer_state_bytes"] == 2 * whole["parameters_bytes"]
    for strategy in ("zero1", "fsdp", "fsdp2"):
        assert of[strategy]["optimizer_state_bytes"] == pytest.approx(
            whole["parameters_bytes"], rel=0.02
        )
    assert of["fsdp"]["parameters_bytes"] == pytest.approx(whole["parameters_bytes"] / 2, rel=0.02)
