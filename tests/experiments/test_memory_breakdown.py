"""States counted from the tensors of two gloo ranks, against the closed forms. No allocator counts on a CPU."""

import pytest

from distlab.report.table import render
from experiments import memory_breakdown
from experiments.memory_breakdown import STATES, STRATEGIES
from tests.experiments.frame import measured, refused


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


def test_table_and_picture(records, tmp_path):
    assert "fsdp2" in render(records, memory_breakdown.EXPERIMENT.view.columns)
    memory_breakdown.draw(records, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "'int8' is unknown; allowed: fp32, bf16"),
        (["--batch", "0"], "0: give a whole number of at least 1"),
        (["--strategies", ","], "give at least one"),
        (["--bucket-size-mb", "nan"], "nan: give a finite number above 0"),
    ],
)
def test_bad_input_is_named(capsys, options, message):
    assert message in refused(capsys, "memory_breakdown", *options)
