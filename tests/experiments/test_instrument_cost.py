"""The study of what instruments cost: on is on, off is off, and the noise floor is the twin's."""

from dataclasses import replace

import pytest
import torch

from distlab.report import read_json
from experiments import instrument_cost
from experiments.instrument_cost import NEVER, QUICK, TWIN, VARIANTS, CostConfig, Subject

SMALL = replace(QUICK, rounds=5, steps=1, warmup=0)


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_on_wears_the_instrument_and_off_wore_it(monkeypatch):
    worn = []
    attached = instrument_cost.attached

    def noted(instrument, model):
        worn.append((instrument, hooks(model)))
        return attached(instrument, model)

    monkeypatch.setattr(instrument_cost, "attached", noted)
    never = Subject(NEVER, SMALL)
    assert never.time() > 0 and not worn
    off = Subject("ranges off again", SMALL)
    assert worn == [("ranges", 0)] and not hooks(off.model)
    on = Subject("ranges on", SMALL)
    with on.around():
        assert hooks(on.model) > 5
    assert not hooks(on.model)


def test_a_run_and_its_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # other tests run in this process
    assert instrument_cost.main(["--quick", "--rounds", "5", "--steps", "1", "--out", str(tmp_path)]) == 0
    (folder,) = (tmp_path / "instrument_cost").iterdir()
    records = read_json(folder / "records.json")
    assert [record.variant for record in records] == list(VARIANTS)
    assert all(record.metrics["max_abs_grad_diff"] == 0 for record in records)  # instruments only look
    twin = records[VARIANTS.index(TWIN)].metrics
    ends = abs(twin["cost_low_pct"]), abs(twin["cost_high_pct"])
    assert all(r.metrics["noise_floor_pct"] == pytest.approx(max(ends)) for r in records)
    assert "cost_pct" not in records[VARIANTS.index(NEVER)].metrics
    assert (folder / "cost.png").exists() and (folder / "report.html").exists()
    assert "Once taken off" in capsys.readouterr().out


def test_what_is_not_allowed(capsys):
    with pytest.raises(ValueError, match="at least 5"):
        CostConfig(rounds=4)
    assert instrument_cost.main(["--quick", "--rounds", "0"]) == 2
    assert "rounds=0" in capsys.readouterr().err


@pytest.mark.gpu
def test_what_was_taken_off_costs_nothing():
    """Below 0.5 % on a GPU, whose host is what one small layer waits for."""
    off = [r for r in instrument_cost.run(CostConfig(rounds=100)) if r.variant.endswith("off again")]
    assert all(r.metrics["cost_low_pct"] < 0.5 and r.metrics["cost_pct"] < 2 for r in off), off
