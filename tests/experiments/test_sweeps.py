"""Collectives in small: what the sweep writes and reads, and what messages cost a computation."""

import math
from dataclasses import replace

import pytest

from distlab.experiment import lone_context
from distlab.measure import bandwidth
from distlab.report import Record, read_json
from experiments.collectives import EXPERIMENT, contention, sweep
from launch.__main__ import maker_of, view_of
from tests.commands import ROOT


def test_collectives_are_timed_fitted_and_read_again(smoke):
    records, _ = smoke("collectives")
    assert len(sweep.timings(records)) == 2 * 3 * 3
    assert {r.config["world_size"] for r in records if r.variant.startswith("fit ")} == {2, 3}
    assert sweep.wrong_timings(records) == []
    first = sweep.timings(records)[0]
    broken = replace(first, metrics=first.metrics | {"max_abs_error": math.nan})
    assert sweep.wrong_timings([broken])[0].startswith(first.variant)
    for record in sweep.timings(records):
        m = record.metrics
        share = bandwidth.traffic(record.variant, record.config["world_size"])
        assert m["busbw_gb_per_s"] == pytest.approx(m["algbw_gb_per_s"] * share)
        assert m["link_ms"] is None  # no datasheet of this machine
    (fit,) = (r for r in records if r.variant == "fit all_reduce" and r.config["world_size"] == 3)
    first = fit.metrics["pieces"][0]
    expected = first["latency_s"] + 4096 / first["bytes_per_s"]
    (small,) = (
        r
        for r in records
        if r.variant == "all_reduce" and r.config == fit.config | {"num_bytes": 4096}
    )
    # sent are whole elements per rank
    assert small.metrics["fit_ms"] == pytest.approx(1e3 * expected, rel=1e-2)


def test_what_messages_cost_the_computation_beside_them(smoke):
    _, folder = smoke("collectives")
    records = read_json(folder / "parts" / "contention" / "records.json")
    # two computations during two ways to send
    assert len(records) == 4 and {r.experiment for r in records} == {"contention"}
    for record in records:
        metrics = record.metrics
        assert metrics["max_abs_error"] == 0 and 0 < metrics["compute_rate"] <= 1
        assert metrics["lost_ms_per_gb"] * record.config["megabytes"] >= 0


def test_a_message_that_brings_too_little_is_called_wrong_and_its_cost_is_of_its_time():
    found = {"comm_alone_ms": 2.0, "comm_beside_ms": 4.0, "compute_rate": 0.75}
    costs = contention.costs(found, "all-gather-copy-engines", 10**9, ranks=2)
    assert costs == {
        "alone_busbw_gb_per_s": 250.0,
        "beside_busbw_gb_per_s": 125.0,
        "lost_ms_per_gb": 1.0,
    }
    errors = ({"max_abs_error": error} for error in (0.0, math.nan))
    records = [
        Record("contention", "copy", {"megabytes": 4.0}, metrics, {}, None) for metrics in errors
    ]
    assert contention.wrong_messages(records) == ["copy of 4 MiB: off by nan"]
    assert view_of("contention").findings_of(records) == ["WRONG: copy of 4 MiB: off by nan"]


def test_a_wrong_message_ends_the_run_with_exit_code_1(smoke, tmp_path):
    records, folder = smoke("collectives")
    run = EXPERIMENT.open(EXPERIMENT.config(), lone_context("cpu"), tmp_path)
    run.records += records
    part = run.part("contention")
    part.records += read_json(folder / "parts" / "contention" / "records.json")
    assert EXPERIMENT.finish(run, json_only=True) == 0
    part.records[0].metrics["max_abs_error"] = 1.0
    assert EXPERIMENT.finish(run, json_only=True) == 1


def test_a_way_that_needs_nccl_is_refused_on_gloo():
    config = EXPERIMENT.config(ways=("all-gather", "all-reduce-4-ctas"))
    assert config.ways_on("nccl") == config.ways
    with pytest.raises(ValueError, match="--ways all-reduce-4-ctas: needs NCCL"):
        config.ways_on("gloo")


def test_records_of_the_two_former_experiments_are_of_this_one():
    sweeps = read_json(ROOT / "records/collectives/h200x2-gloo.json")
    assert {maker_of(record.experiment) for record in sweeps} == {"collectives"}
    costs = read_json(ROOT / "records/contention/h100x2-256mb.json")
    assert {maker_of(record.experiment) for record in costs} == {"collectives"}
