"""The study on a small model: same gradients, peaks and recomputation as predicted, the best size named, OOM a row."""

import pytest
import torch

from experiments import activation_checkpointing as study
from experiments.activation_checkpointing import EXPERIMENT, Bench, CheckpointingConfig, one_step

SMALL = CheckpointingConfig(**EXPERIMENT.preset("smoke", on_gpu=False))


def test_every_way_is_measured_beside_its_prediction(smoke):
    records, _ = smoke(EXPERIMENT.name)
    rows = {r.variant: r.metrics for r in records}
    assert list(rows) == ["none", "block", "every-2"]
    assert [m["blocks_run_again"] for m in rows.values()] == [0, 4, 4]
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
    (line,) = study.findings(records)
    assert line.startswith("On fake tensors, the least peak of groups is that of block")


def test_what_does_not_fit_is_a_row(monkeypatch):
    def step(model, *rest):
        if model.checkpoint_blocks == "none":
            raise torch.OutOfMemoryError("out of memory")
        return original(model, *rest)

    original = one_step
    monkeypatch.setattr(study, "one_step", step)
    bench = Bench(SMALL, torch.device("cpu"))
    for choice in ("none", "block"):
        bench.time(choice)
    assert bench.metrics("none")["status"] == "OOM"
    found = bench.metrics("block")
    assert (
        found["status"] == "ok" and "step_over_none" not in found and found["max_rel_grad_norm_diff"] is None
    )
    assert "predicted_step_ms" not in bench.predicted("block")


