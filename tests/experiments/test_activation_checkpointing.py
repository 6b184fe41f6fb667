"""The study on a small model: same gradients, peaks and recomputation as predicted, the best size named, OOM a row."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distlab.report import read_json
from experiments import activation_checkpointing as study
from experiments.activation_checkpointing_pieces import measuring
from experiments.activation_checkpointing_pieces.config import NAME, QUICK, CheckpointingConfig
from experiments.activation_checkpointing_pieces.measuring import Bench, run
from experiments.activation_checkpointing_pieces.prediction import one_step, predicted

SMALL = replace(QUICK, layers=4, context=32, vocab=32, groups=("block", "every-4-2"))


@pytest.fixture(scope="module")
def records():
    return run(SMALL)


def test_every_way_is_measured_beside_its_prediction(records):
    rows = {r.variant: r.metrics for r in records}
    assert list(rows) == ["none", "block", "every-4-2"]
    assert [m["blocks_run_again"] for m in rows.values()] == [0, 4, 6]
    for metrics in rows.values():
        assert metrics["status"] == "ok" and metrics["max_rel_grad_norm_diff"] == 0
        assert metrics["counted_peak_bytes"] == pytest.approx(
            metrics["predicted_counted_peak_bytes"], rel=0.05
        )
        assert metrics["step_p20_ms"] <= metrics["step_p50_ms"] <= metrics["step_p80_ms"]
    peaks = [m["counted_peak_bytes"] for m in rows.values()]
    assert peaks[0] > peaks[2] > peaks[1]
    steps = [m["predicted_step_ms"] for m in rows.values()]
    assert steps[0] == rows["none"]["step_p50_ms"] and steps == sorted(steps)
    words = study.findings(records)
    assert (
        "groups of 1 keep fewest" in words[0]
        and "least with groups of 1." in words[0]
        and "least peak of a single level is that of block" in words[1]
    )


def test_what_does_not_fit_is_a_row(monkeypatch):
    def step(model, *rest):
        if not model.checkpoint_blocks:
            raise torch.OutOfMemoryError("out of memory")
        return original(model, *rest)

    original = one_step
    monkeypatch.setattr(measuring, "one_step", step)
    bench = Bench(replace(SMALL, steps=3))
    for choice in ("none", "block"):
        bench.time(choice)
    assert bench.metrics("none")["status"] == "OOM"
    found = bench.metrics("block")
    assert (
        found["status"] == "ok" and "step_over_none" not in found and found["max_rel_grad_norm_diff"] is None
    )
    assert "predicted_step_ms" not in predicted(SMALL, "block", bench.times.get("none"))


def test_command_writes_the_report(tmp_path, capsys, records, monkeypatch):
    monkeypatch.setattr(study, "run", lambda config, **_: records)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # other tests run in this process
    assert study.main(["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    folder = Path(json.loads(capsys.readouterr().out.splitlines()[-1])["out"])
    assert {"records.json", "checkpointing.png", "report.html"} <= {path.name for path in folder.iterdir()}
    again = tmp_path / "again"
    assert study.main(["--from", str(folder / "records.json"), "--out", str(again)]) == 0
    (folder,) = (again / NAME).iterdir()
    assert [r.variant for r in read_json(folder / "records.json")] == ["none", "block", "every-4-2"]
    capsys.readouterr()
    assert study.main(["--groups", "every-0", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "choose none, block, every-K" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int8"}, "fp32, bf16"),
        ({"batch": 0}, "batch=0"),
        ({"steps": 1, "rounds": 1}, "at least 3 steps"),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        CheckpointingConfig(**wrong)
