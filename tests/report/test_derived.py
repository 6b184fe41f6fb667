"""A row's noise is its own, a ratio has an interval, and what contains 1 is a tie."""

import math
from itertools import chain
from random import Random
from statistics import median

import pytest

from distlab.measure import percentile_metrics
from distlab.report import Record
from distlab.report.derived import (
    TIE,
    fastest,
    host_bound,
    noise_of,
    ratio_metrics,
    ratio_of_runs,
    row_named,
    tie_mark,
    waiting,
    with_noise,
    with_ratios,
)


def row(p20, p50, p80, **more):
    return {"step_p20_ms": p20, "step_p50_ms": p50, "step_p80_ms": p80} | more


def test_a_row_whose_steps_spread_is_not_as_quiet_as_its_medians():
    wide = row(40.0, 60.0, 100.0, noise_floor_pct=5.0)  # p80 is 2.5 × p20
    assert noise_of(wide) == pytest.approx(50)
    assert noise_of(row(59.0, 60.0, 61.0, noise_floor_pct=5.0)) == 5.0
    assert noise_of(wide | {"noise_pct": 1.0}) == 1.0  # the experiment knows better
    assert noise_of({"step_p50_ms": "OOM"}) is None


def named(variant, metrics):
    return Record("x", variant, {}, metrics, {}, None)


def held(*rows):
    """Rows against the first of them, with their ratios."""
    records = [named("ours" if number else "base", dict(each)) for number, each in enumerate(rows)]
    return with_ratios("ratio", records, row_named("base", records))


def tie(record):
    return tie_mark(record, "ratio")


def test_without_pairs_the_noise_of_the_worse_row_decides_on_a_tie():
    quiet, loud = row(99.0, 100.0, 101.0), row(100.0, 110.0, 140.0)
    for rows in ((quiet, loud), (loud, quiet)):
        assert tie(held(*rows)[1]) == TIE
    far = held(quiet, row(109.0, 110.0, 111.0))[1]
    assert tie(far) == "" and far.metrics["ratio"] == pytest.approx(1.1)
    assert "ratio" not in held(quiet, {"step_p50_ms": "OOM"})[1].metrics
    assert tie(held(loud)[0]) == ""  # a row over itself


def test_a_ratio_of_rows_whose_noise_is_unknown_has_no_interval():
    found = held({"step_p50_ms": 1.0}, {"step_p50_ms": 2.0})[1]
    assert found.metrics["ratio"] == 2.0 and "ratio_low" not in found.metrics and tie(found) == ""


@pytest.mark.parametrize("pairs", [2, 3, 4, 5, 12])
def test_equal_rows_are_told_apart_in_about_one_run_of_twenty(pairs, monkeypatch):
    """Of 400 made-up runs: with few pairs also, which no bootstrap serves."""
    monkeypatch.setattr("distlab.measure.interleaved.RESAMPLES", 300)
    random = Random(pairs)
    told_apart = 0
    for _ in range(400):
        rows = []
        for _ in range(2):
            samples = [random.lognormvariate(0, 0.3) for _ in range(pairs)]
            spread = (
                percentile_metrics("step", samples)
                if pairs >= 3
                else {"step_p50_ms": median(samples)}
            )
            rows.append(spread | {"step_samples_ms": samples})
        metrics = held(*rows)[1].metrics
        told_apart += not metrics["ratio_low"] <= 1 <= metrics["ratio_high"]
    assert told_apart <= 0.1 * 400  # a bootstrap of 5 pairs reaches 7 %


def test_paired_samples_are_compared_pair_by_pair():
    """A drift that hits both widens nothing.

    Of a row with fewer samples those count that have a pair.
    """
    drift = [1.5**number for number in range(8)]
    base = row(1.0, 5.0, 20.0, step_samples_ms=drift)
    found = held(base, row(1.0, 5.0, 20.0, step_samples_ms=[1.1 * ms for ms in drift[:6]]))[1]
    assert [found.metrics[name] for name in ("ratio", "ratio_low", "ratio_high")] == pytest.approx(
        [1.1] * 3
    )


def test_the_fastest_row_is_one_that_was_timed():
    rows = [named(name, {"step_p50_ms": ms}) for name, ms in zip("abc", (3, 2, "OOM"), strict=True)]
    assert fastest(rows, "step_p50_ms") is rows[1]
    assert fastest(rows[2:], "step_p50_ms") is None
    assert with_ratios("ratio", rows, None) == rows


@pytest.mark.parametrize(
    "low, high, ties", [(0.9, 1.1, True), (1.01, 1.1, False), (1.0, 1.0, False), (None, 2, False)]
)
def test_an_interval_that_contains_one_is_a_tie(low, high, ties):
    assert bool(tie(named("a", {"ratio_low": low, "ratio_high": high}))) is ties


def test_noise_is_written_where_a_row_holds_its_samples():
    """One half of them against the other."""
    measured = [named("a", row(99, 100, 101)), named("a", {"step_samples_ms": [1.0, 1.2] * 6})]
    records = with_noise(measured)
    assert "noise_pct" not in measured[1].metrics
    assert "noise_pct" not in records[0].metrics
    assert records[1].metrics["noise_pct"] == pytest.approx(20)


def test_rounds_say_how_well_a_row_repeats_itself():
    """Steps that go up and down in each round are no noise, and rounds that differ are."""
    swinging = [100.0, 104.0, 100.5, 103.5]
    rounds = [swinging, swinging[::-1], swinging, swinging[::-1]]
    steps = {"step_samples_ms": list(chain(*rounds))}
    assert noise_of(steps) > 1.5 and noise_of(steps | {"rounds": 4}) == 0
    apart = [[step + 2 * number for step in swinging] for number in range(4)]  # 102, 104, 106, 108
    steps = {"step_samples_ms": list(chain(*apart)), "rounds": 4}
    t, deviation = 3.182, 2.582
    assert noise_of(steps) == pytest.approx(100 * t * deviation / 4**0.5 / 105, rel=1e-3)
    # Two medians may agree by chance.
    assert noise_of({"step_samples_ms": list(chain(*rounds[:3])), "rounds": 3}) == 0
    assert noise_of({"step_samples_ms": list(chain(*rounds[:3])), "rounds": 2}) > 1.5


@pytest.mark.parametrize("rounds, least", [(2, 0.8), (3, 0.9), (4, 0.9), (6, 0.9)])
@pytest.mark.parametrize("round_sigma, step_sigma", [(0.05, 0.005), (0.0, 0.02)])
def test_the_interval_contains_the_truth_if_whole_rounds_are_disturbed(
    rounds, least, round_sigma, step_sigma
):
    """As by another program, and if nothing is. Both rows are equally fast. An interval of single
    steps contains 1 in about half of the disturbed runs.
    """
    random = Random(rounds)

    def made_up():
        samples = []
        for _ in range(rounds):
            disturbed = random.gauss(0, round_sigma)
            samples += [math.exp(disturbed + random.gauss(0, step_sigma)) for _ in range(6)]
        return named("a", {"step_samples_ms": samples, "rounds": rounds})

    hits = 0
    for _ in range(100):
        metrics = ratio_metrics("ratio", made_up(), made_up())
        hits += metrics["ratio_low"] <= 1 <= metrics["ratio_high"]
    assert hits >= 100 * least


def test_the_interval_of_two_runs_knows_that_rounds_are_disturbed():
    random = Random(2)

    def made_up():
        samples = []
        for _ in range(4):
            disturbed = random.gauss(0, 0.05)
            samples += [math.exp(disturbed + random.gauss(0, 0.005)) for _ in range(6)]
        return named("a", {"step_samples_ms": samples, "rounds": 4})

    hits = 0
    for _ in range(100):
        _, low, high = ratio_of_runs(made_up(), made_up())
        hits += low <= 1 <= high
    assert hits >= 93
    short = named("a", {"step_samples_ms": [1.0] * 4, "rounds": 4})
    assert ratio_of_runs(short, made_up()) is None


def test_rounds_that_agree_resolve_a_small_difference():
    """Steps that go up and down by 4 % do not hide 1 %."""
    swinging = [100.0, 104.0, 100.5, 103.5]
    slow = named("slow", {"step_samples_ms": [1.01 * ms for ms in swinging * 4], "rounds": 4})
    fast = named("fast", {"step_samples_ms": swinging * 4, "rounds": 4})
    metrics = ratio_metrics("ratio", slow, fast)
    assert metrics["ratio_low"] > 1.009 and metrics["ratio_high"] < 1.011


def test_a_headline_names_the_rows_that_wait_for_the_host_or_counts_them():
    shares = {"a": None, "b": 9, "c": 60, "d": 11, "e": 12, "f": 13}
    records = [named(name, {"gpu_idle_pct": share}) for name, share in shares.items()]
    assert waiting(records[:2]) == ""
    assert waiting(records[:4]) == "; the GPU waits for the host: c 60 %, d 11 % of the step"
    assert waiting(records) == "; the GPU waits for the host in 4 of 6 rows, up to 60 % of the step"


@pytest.mark.parametrize(
    "host, device, bound",
    [
        ((2.0, 2.1, 2.2), (1.0, 1.1, 1.2), True),
        ((1.0, 2.1, 3.0), (0.5, 1.9, 2.5), False),  # the medians differ less than each of them
        ((None, 2.1, None), (None, 1.9, None), True),
        ((None, 2.1, None), (None, None, None), False),
    ],
)
def test_a_row_waits_for_the_host_where_most_of_its_times_do(host, device, bound):
    metrics = {}
    for percentile, host_ms, device_ms in zip(("p20", "p50", "p80"), host, device, strict=True):
        metrics[f"host_{percentile}_ms"] = host_ms
        metrics[f"time_{percentile}_ms"] = device_ms
    assert bool(host_bound(named("ours", metrics))) is bound
