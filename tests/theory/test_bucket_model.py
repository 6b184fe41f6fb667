"""The bucket model against the pipeline, run bucket by bucket."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.theory import step_time
from distlab.theory.step_time import best_buckets, bucket_overhead

SIZES = st.floats(1e3, 1e10)
BANDWIDTHS = st.floats(1e6, 1e12)
CALLS = st.floats(1e-7, 1e-2)


def pipeline(total, bandwidth, call, buckets, backward):
    done = 0.0
    for number in range(1, buckets + 1):
        ready = number * backward / buckets
        done = max(done, ready) + call + total / buckets / bandwidth
    return done - backward


@given(SIZES, BANDWIDTHS, CALLS, st.integers(1, 60), st.floats(0, 5))
def test_is_the_pipeline(total, bandwidth, call, buckets, backward):
    walked = pipeline(total, bandwidth, call, buckets, backward)
    formula = bucket_overhead(total, bandwidth, call, buckets, backward)
    assert formula == pytest.approx(walked, rel=1e-6, abs=1e-9 * (1 + backward + total / bandwidth))


@given(SIZES, BANDWIDTHS, CALLS, st.floats(1e-6, 5))
def test_no_number_of_buckets_is_better(total, bandwidth, call, backward):
    best = best_buckets(total, bandwidth, call, backward)
    least = bucket_overhead(total, bandwidth, call, best, backward)
    for factor in (0.3, 0.9, 0.99, 1.01, 1.1, 3):
        other = bucket_overhead(total, bandwidth, call, max(1, best * factor), backward)
        assert least <= other * (1 + 1e-9) + 1e-12 * backward


def test_worked_example():
    """As long to make as to send: 1 GB at 100 GB/s, 100 µs a call → 10 buckets of 100 MB, 2 ms."""
    assert best_buckets(1e9, 100e9, 1e-4) == pytest.approx(10)
    assert bucket_overhead(1e9, 100e9, 1e-4, 10) == pytest.approx(2e-3)
    assert bucket_overhead(1e9, 100e9, 1e-4, 7) == pytest.approx(1e9 / (7 * 100e9) + 7 * 1e-4)


def test_edges():
    assert best_buckets(1e9, 1e9, 0.0) == math.inf
    assert best_buckets(1, 1e9, 1.0) == 1
    for wrong in ((1, 0, 0, 1), (-1, 1, 0, 1), (1, 1, -1, 1), (1, 1, 0, 0)):
        with pytest.raises(ValueError, match=r"must be positive|at least 1"):
            bucket_overhead(*wrong)


@given(SIZES, BANDWIDTHS, CALLS, st.integers(1, 40), st.floats(0, 5))
def test_the_general_pipeline_has_the_closed_form_as_a_case(total, bandwidth, call, buckets, backward):
    ready = [k * backward / buckets for k in range(1, buckets + 1)]
    messages = [call + total / buckets / bandwidth] * buckets
    found = step_time.pipeline(ready, messages, backward) - backward
    expected = bucket_overhead(total, bandwidth, call, buckets, backward)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9 * (1 + backward + total / bandwidth))


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0.1, 1), st.floats(0.1, 1), st.integers(1, 5))
def test_contention_in_the_pipeline_is_that_of_two_streams(backward, message, p, q, pieces):
    """All is ready at once: cutting the message changes nothing."""
    rates = {"compute_rate": p, "communication_rate": q}
    found = step_time.pipeline([0.0] * pieces, [message / pieces] * pieces, backward, **rates)
    assert found == pytest.approx(step_time.pipeline([0.0], [message], backward, **rates), abs=1e-9)


def test_a_pipeline_by_hand():
    """Ready at 2 and 3 of 10 s; messages of 1 and 4 s at half speed; backward beside them at 3/4."""
    rates = {"compute_rate": 0.75, "communication_rate": 0.5}
    # 2 alone; 1 s of message lasts 2, backward is at 3.5; 4 s last 8, backward at 9.5; 0.5 alone.
    assert step_time.pipeline([2, 3], [1, 4], 10, **rates) == pytest.approx(2 + 2 + 8 + 0.5)
    assert step_time.pipeline([], [], 10) == 10
    for wrong in (([1], [], 1.0), ([1], [1], -1.0)):
        with pytest.raises(ValueError, match=r"see the docstring|not be negative"):
            step_time.pipeline(*wrong)
    with pytest.raises(ValueError, match=r"rates \(0"):
        step_time.pipeline([1], [1], 1, compute_rate=0)
