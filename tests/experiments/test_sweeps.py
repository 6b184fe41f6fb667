"""The sweeps in small: collectives, scaling. What they write, what reads it, what they refuse."""

import math
from dataclasses import replace

import pytest

from distlab.report.record import read_json
from distlab.simulate.calibrate import measured_links
from experiments import allreduce_sweep


def test_collectives_are_timed_fitted_and_read_again(smoke):
    records, folder = smoke("allreduce_sweep")
    assert len(allreduce_sweep.timings(records)) == 2 * 3 * 3
    assert {r.config["world_size"] for r in records if r.variant.startswith("fit ")} == {2, 3}
    assert allreduce_sweep.wrong_rows(records) == []
    first = allreduce_sweep.timings(records)[0]
    broken = replace(first, metrics=first.metrics | {"max_abs_error": math.nan})
    assert allreduce_sweep.findings([broken])[0].startswith(f"WRONG: {first.variant}")
    for record in allreduce_sweep.timings(records):
        assert record.metrics["link_ms"] is None  # no datasheet of this machine
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
