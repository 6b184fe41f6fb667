"""The study of what instruments cost: on is on, off is off, and the noise floor is the twin's."""

import pytest

from experiments import instrument_cost
from experiments.instrument_cost import EXPERIMENT, NEVER, TWIN, VARIANTS, CostConfig, Subject, findings
from tests.experiments.frame import measured, refused

SMALL = CostConfig(**EXPERIMENT.preset("smoke", on_gpu=False))


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_on_wears_the_instrument_and_off_wore_it(monkeypatch):
    worn = []
    attached = instrument_cost.attached

    def noted(instrument, model):
        worn.append((instrument, hooks(model)))
        return attached(instrument, model)

    monkeypatch.setattr(instrument_cost, "attached", noted)
    never = Subject(NEVER, SMALL, "cpu")
    assert never.time() > 0 and not worn
    off = Subject("ranges off again", SMALL, "cpu")
    assert worn == [("ranges", 0)] and not hooks(off.model)
    on = Subject("ranges on", SMALL, "cpu")
    with on.around():
        assert hooks(on.model) > 5
    assert not hooks(on.model)


def test_a_run_and_its_page(tmp_path):
    records = measured(EXPERIMENT, tmp_path)
    assert [record.variant for record in records] == list(VARIANTS)
    assert all(record.metrics["max_abs_grad_diff"] == 0 for record in records)  # instruments only look
    twin = records[VARIANTS.index(TWIN)].metrics
    ends = abs(twin["cost_low_pct"]), abs(twin["cost_high_pct"])
    assert all(r.metrics["noise_floor_pct"] == pytest.approx(max(ends)) for r in records)
    assert "cost_pct" not in records[VARIANTS.index(NEVER)].metrics
    assert (tmp_path / "instrument_cost" / "run" / "cost.png").exists()
    assert "Once taken off" in findings(records)[0]


def test_what_is_not_allowed(capsys):
    assert "--rounds: 4: give a whole number of at least 5" in refused(capsys, "instrument_cost", "--rounds", "4")


@pytest.mark.gpu
def test_what_was_taken_off_costs_nothing():
    """Below 0.5 % on a GPU, whose host is what one small layer waits for."""
    times, _ = instrument_cost.time_rounds(CostConfig(rounds=100), "cuda", lambda text: None)
    off = [instrument_cost._metrics(times, variant) for variant in VARIANTS if variant.endswith("off again")]
    assert all(metrics["cost_low_pct"] < 0.5 and metrics["cost_pct"] < 2 for metrics in off), off
