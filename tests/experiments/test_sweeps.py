"""The sweeps in small: collectives, bucket sizes, scaling. What they write, what reads it, what they refuse."""

import math
from dataclasses import replace

import pytest
import torch

from distlab.measure import bandwidth
from distlab.model import TransformerLM
from distlab.report.record import Record, read_json
from distlab.simulate.calibrate import measured_links
from distlab.theory.collective_time import CollectiveFit
from experiments import allreduce_sweep, bucket_sweep
from experiments.bucket_sweep import OVER_BEST, BucketSweepConfig


def test_collectives_are_timed_fitted_and_read_again(smoke):
    records, folder = smoke("allreduce_sweep")
    assert len(allreduce_sweep.timings(records)) == 2 * 3 * 3
    assert {r.config["world_size"] for r in records if r.variant.startswith("fit ")} == {2, 3}
    assert {r.variant for r in records if r.variant.startswith("contention ")} == {
        "contention matmul",
        "contention copy",
    }
    assert allreduce_sweep.wrong_rows(records) == []
    first = allreduce_sweep.timings(records)[0]
    broken = replace(first, metrics=first.metrics | {"max_abs_error": math.nan})
    assert allreduce_sweep.findings([broken])[0].startswith(f"WRONG: {first.variant}")
    for record in allreduce_sweep.timings(records):
        m = record.metrics
        assert m["time_p20_ms"] <= m["time_p50_ms"] <= m["time_p80_ms"]
        share = bandwidth.traffic(record.variant, record.config["world_size"])
        assert m["busbw_gb_per_s"] == pytest.approx(m["algbw_gb_per_s"] * share)
        assert m["link_ms"] is None  # no datasheet of this machine
    links = measured_links(
        read_json(folder / "records.json"), records[0].environment["device_name"], "gloo"
    )
    (fit,) = (r for r in records if r.variant == "fit all_reduce" and r.config["world_size"] == 3)
    expected = fit.metrics["pieces"][0]["latency_s"] + 1000 / fit.metrics["pieces"][0]["bytes_per_s"]
    assert links.seconds(1000, 3) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no fit of 'all_gather'"):
        links.seconds(1000, 2, operation="all_gather")
    with pytest.raises(ValueError, match="no collectives measured on 'another GPU'"):
        measured_links(records, "another GPU")


def test_bucket_sizes_are_predicted_measured_and_chosen(smoke):
    by_name = {r.variant: r for r in smoke("bucket_sweep")[0]}
    names = ["bucketed-1", "bucketed-unbounded", "torch-ddp-tuned-1", "torch-ddp-tuned-unbounded"]
    assert list(by_name) == ["parts", "local", *names]
    parts, one = by_name["parts"].metrics, by_name["bucketed-unbounded"].metrics
    assert one["buckets"] == 1 < by_name["bucketed-1"].metrics["buckets"]
    assert parts["packed_parameters"] == len(parts["ready_ms"])  # buckets offer their memory on GPUs only
    assert len(parts["ready_ms"]) > 20 and max(parts["ready_ms"]) <= parts["backward_ms"]
    sent = 4 * (by_name["parts"].config["num_parameters"] + len(parts["ready_ms"]))  # flags ride along
    assert one["predicted_comm_ms"] == pytest.approx(1e3 * CollectiveFit.from_list(parts["pieces"]).seconds(sent))
    # One bucket is sent when all is made and packed: nothing overlaps.
    packed_ms = 4e-6 * by_name["parts"].config["num_parameters"] / parts["pack_gb_per_s"]
    least = one["predicted_comm_ms"] + packed_ms - (parts["backward_ms"] - max(parts["ready_ms"]))
    slowed = one["predicted_comm_ms"] / parts["communication_rate"] + packed_ms
    assert least - 1e-6 <= one["predicted_overhead_ms"] <= slowed + 1e-6
    best = min(names[:2], key=lambda name: by_name[name].metrics["step_p50_ms"])
    assert by_name[best].metrics["over_best"] == 1


def test_a_bucket_leaves_with_its_last_gradient():
    config = BucketSweepConfig(size="tiny")
    ready = list(range(1, 1 + len(list(TransformerLM(config.model(), device="meta").parameters()))))
    parts = {"ready_ms": ready, "backward_ms": ready[-1], "packed": [False] * len(ready), "pack_gb_per_s": 1.0}
    parts |= dict.fromkeys(("compute_rate", "communication_rate", "forward_backward_ms", "optimizer_ms"), 1.0)
    parts["pieces"] = [{"bytes_per_s": math.inf, "latency_s": 0.5e-3}]
    assert bucket_sweep.predict(config, parts, None)["predicted_overhead_ms"] == pytest.approx(0.5)


def test_gradients_that_are_written_in_place_are_not_packed():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]

    def backward():
        assert parameters[1].__dict__.pop("gradient_target").shape == (
            5,
        )  # as a layer that writes there does

    assert bucket_sweep._declined(parameters, backward) == [True, False]
    assert not any("gradient_target" in parameter.__dict__ for parameter in parameters)


def test_a_best_bucket_size_and_what_following_the_prediction_costs():
    def swept(size: float, p50: float, spread: float) -> Record:
        steps = {"step_p20_ms": p50 - spread, "step_p50_ms": p50, "step_p80_ms": p50 + spread}
        config = {"strategy": "bucketed", "bucket_size_mb": size}
        metrics = steps | {"predicted_step_ms": 100 - size}
        return Record("bucket_sweep", f"bucketed-{size:g}", config, metrics, {}, None)

    rows = [swept(1.0, 100.0, 1.0), swept(10.0, 101.0, 3.0), swept(25.0, 120.0, 1.0)]
    OVER_BEST.add(rows)
    assert [OVER_BEST.tie(row) for row in rows] == ["", " tie", ""]
    (line,) = bucket_sweep.findings(rows)  # the largest was predicted to be the best
    assert line.startswith("Best measured: bucketed-1, 100.0 ms. Predicted best: bucketed-25, which takes 1.200 of")
    assert line.endswith("Largest error of a prediction: -37.5 %.")
