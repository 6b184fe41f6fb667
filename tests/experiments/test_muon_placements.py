"""Muon's placements beside AdamW: what is sent, and what a wrong row says."""

import pytest

from distlab.report import Record
from distlab.theory.muon import orthogonalize_flops
from experiments.muon_placements import PLACEMENTS, wrong_rows


def test_every_placement_stands_beside_adamw(smoke):
    records, _ = smoke("muon_placements")
    by_name = {record.variant: record.metrics for record in records}
    expected = set()
    for name, placements in PLACEMENTS.items():
        expected.update(f"{name} {how}" for how in ("adamw", *placements))
    assert set(by_name) == expected
    for name, metrics in by_name.items():
        assert ("vs_adamw" in metrics) == ("adamw" not in name), name
        if name.endswith(("gather", "exchange")):
            assert metrics["volume_as_predicted"]
            assert metrics["muon_bytes"] == metrics["predicted_muon_bytes"] > 0
    assert by_name["bucketed all"]["optimizer_bytes"] == 0
    assert by_name["sharded-optimizer owner"]["optimizer_bytes"] > 0
    assert 1 <= by_name["zero1 exchange"]["most_work"] <= 2


def test_flops_are_those_of_the_shorter_side():
    assert (
        orthogonalize_flops(3, 2, 1)
        == orthogonalize_flops(2, 3, 1)
        == 2 * (2 * 2 * 3 * 2 + 2 * 2 * 2)
    )


@pytest.mark.parametrize(
    "metrics, said",
    [
        (
            {"volume_as_predicted": False, "muon_bytes": 3, "predicted_muon_bytes": 4},
            "the closed form says 4",
        ),
        ({"max_abs_param_diff": 0.02}, "differ from one process"),
        ({"max_abs_param_diff": float("nan")}, "differ"),
    ],
)
def test_a_wrong_row(metrics, said):
    (line,) = wrong_rows([Record("muon_placements", "fsdp gather", {}, metrics, {}, None)])
    assert said in line
