"""The sweeps in small: collectives, scaling. What they write, what reads it, what they refuse."""

import math
from dataclasses import replace

import pytest

from distlab.measure import bandwidth
from experiments import allreduce_sweep


def test_collectives_are_timed_fitted_and_read_again(smoke):
    records, _ = smoke("allreduce_sweep")
    assert len(allreduce_sweep.timings(records)) == 2 * 3 * 3
    assert {r.config["world_size"] for r in records if r.variant.startswith("fit ")} == {2, 3}
    assert allreduce_sweep.wrong_rows(records) == []
    first = allreduce_sweep.timings(records)[0]
    broken = replace(first, metrics=first.metrics | {"max_abs_error": math.nan})
    assert allreduce_sweep.wrong_rows([broken])[0].startswith(first.variant)
    for record in allreduce_sweep.timings(records):
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
