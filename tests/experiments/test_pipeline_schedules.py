"""Pipelines' schedules, simulated and measured: rows of both, and what is derived from actions'
durations.
"""

import pytest

from distlab.bench.variant import Variant
from distlab.parallel import Layout, get_strategy
from distlab.parallel.schedules import SCHEDULES
from experiments.pipeline_schedules import bubble


def test_each_schedule_of_ours_stands_beside_torchs(smoke):
    records, _ = smoke("pipeline_schedules")
    by_name = {record.variant: record.metrics for record in records}
    ours = {f"{name} × 4" for name in SCHEDULES}
    torchs = {f"{name} × 4 (torch)" for name in SCHEDULES}
    assert set(by_name) == ours | torchs
    for name, metrics in by_name.items():
        assert metrics["max_abs_param_diff"] < 1e-6, name
        assert ("vs_torch" in metrics) == ("simulated_ms" in metrics) == ("torch" not in name), name
        if "simulated_ms" in metrics:
            assert 0 < metrics["simulated_idle_pct"] < 100 and metrics["simulated_ms"] > 0
    assert by_name["gpipe × 4"]["held"] == 4 and by_name["1f1b × 4"]["held"] == 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_stages_have_the_bubble_of_the_closed_form(name):
    """Actions that take 2, 3 and 1 ms on every rank, in a step as long as the simulated one."""
    seconds = {"F": 2.0, "B": 3.0 if name == "zero-bubble" else 4.0, "W": 1.0}
    seen = []
    for actions in SCHEDULES[name](2, 4):
        seen.append([{action: seconds[action.kind] for action in actions}])
    row = Variant(
        "x", get_strategy("local"), layout=Layout(pipeline=2, schedule=name), micro_batches=4
    )
    simulated = bubble(row, seen, window_ms=1.0)["simulated_ms"]
    found = bubble(row, seen, window_ms=simulated)
    assert found["idle_pct"] == pytest.approx(found["simulated_idle_pct"])
    assert found["simulated_idle_pct"] == pytest.approx(found["closed_form_idle_pct"])
