"""A row's noise is its own, and what lies inside it is a tie."""

import pytest

from distlab.report import Column, Record, render
from distlab.report.noise import NOISE, TIE, interval_ties, noise_by_row, noise_of, tied, waiting


def row(p20: float, p50: float, p80: float, **more: float) -> dict[str, float]:
    return {"step_p20_ms": p20, "step_p50_ms": p50, "step_p80_ms": p80} | more


def test_a_row_whose_steps_spread_is_not_as_quiet_as_its_medians():
    wide = row(40.0, 60.0, 100.0, noise_floor_pct=5.0)  # p80 is 2.5 × p20
    assert noise_of(wide) == pytest.approx(50)
    assert noise_of(row(59.0, 60.0, 61.0, noise_floor_pct=5.0)) == 5.0
    assert noise_of(wide | {"noise_pct": 1.0}) == 1.0  # the experiment knows better
    assert noise_of({"step_p50_ms": "OOM"}) is None


def test_what_differs_by_less_than_the_noise_of_the_worse_row_is_a_tie():
    quiet, loud = row(99.0, 100.0, 101.0), row(100.0, 110.0, 140.0)
    assert tied(quiet, loud) and tied(loud, quiet)
    assert not tied(quiet, row(109.0, 110.0, 111.0))
    assert not tied(quiet, {"step_p50_ms": "OOM"}) and not tied({}, {})


@pytest.mark.parametrize("low, high, ties", [(0.9, 1.1, True), (1.01, 1.1, False), (1.0, 1.0, False), (None, 2, False)])
def test_an_interval_that_contains_one_is_a_tie(low, high, ties):
    assert interval_ties(low, high) is ties


def test_a_headline_says_how_far_rows_differ_in_noise():
    records = [Record("x", "a", {}, metrics, {}, None) for metrics in (row(99, 100, 101), row(80, 100, 120), {})]
    assert noise_by_row(records) == "noise by row 1.0 to 20.0 %"
    assert noise_by_row(records[:1]) == "noise by row 1.0 %" and noise_by_row(records[2:]) == ""


def test_a_headline_names_the_rows_that_wait_for_the_host_or_counts_them():
    shares = {"a": None, "b": 9, "c": 60, "d": 11, "e": 12, "f": 13}
    records = [Record("x", name, {}, {"gpu_idle_pct": share}, {}, None) for name, share in shares.items()]
    assert waiting(records[:2]) == ""
    assert waiting(records[:4]) == "; the GPU waits for the host: c 60 %, d 11 % of the step"
    assert waiting(records) == "; the GPU waits for the host in 4 of 6 rows, up to 60 % of the step"


def test_a_table_names_ties_and_tells_the_noise_of_rows_that_did_not_record_it():
    records = [Record("x", "a", {}, row(80, 100, 120) | {"ratio": 1.02}, {}, None)]
    ratio = Column("metrics.ratio", "÷", ".2f", note=lambda record: TIE)
    cells = render(records, [NOISE, ratio], "markdown").splitlines()[-1]
    assert cells.replace(" ", "") == "|20.0|1.02tie|"
