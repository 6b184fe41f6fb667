"""Sentences that compare timings: a claim needs the whole interval, and a doubt says how noisy the
run is.
"""

import pytest

from distlab.report import (
    FASTER,
    SLOWER,
    UNCLEAR,
    Record,
    interval_of,
    verdict_of,
    why_unclear,
    with_interval,
)


def row(ratio, low=None, high=None):
    metrics = {"ratio": ratio}
    if low is not None:
        metrics |= {"ratio_low": low, "ratio_high": high}
    return Record("x", "ours", {}, metrics, {}, None)


@pytest.mark.parametrize(
    "numbers, verdict",
    [
        ((0.9, 0.85, 0.95), FASTER),
        ((1.2, 1.01, 1.3), SLOWER),
        ((1.2, 0.99, 1.3), UNCLEAR),
        ((1.2, 1.0, 1.3), UNCLEAR),
        ((1.0, 1.0, 1.0), UNCLEAR),
        ((9.0,), UNCLEAR),  # without an interval
    ],
)
def test_a_verdict_needs_the_whole_interval(numbers, verdict):
    assert verdict_of(row(*numbers), "ratio") == verdict


def test_a_ratio_is_shown_with_its_interval():
    assert with_interval(row(1.25, 1.2, 1.3), "ratio") == "1.25 (95 %: 1.20 to 1.30)"
    assert with_interval(row(1.25), "ratio", ".1f") == "1.2 (no interval)"
    of_two_rounds = with_interval(row(1.24, 0.03, 43.1), "ratio")
    assert of_two_rounds == "1.24 (its rounds differ too much for an interval)"
    assert interval_of(row("OOM", 1.0, 1.0), "ratio") is None


def test_a_doubt_names_the_widest_interval_and_what_would_help():
    told = why_unclear(
        [row(1.0, 0.98, 1.01), row(1.0, 0.7, 1.5), row(1.0)], "ratio", "more --repeats"
    )
    assert told == "Noise is up to ± 50 %: try more --repeats."
    assert why_unclear([row(1.0)], "ratio").startswith("There is no interval: try more --rounds")
