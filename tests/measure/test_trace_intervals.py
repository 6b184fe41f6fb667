"""Interval algebra against a brute-force grid, and the account of one step on events made
by hand.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from distlab.measure.trace.account import account, lanes, median_step, step_windows
from distlab.measure.trace.intervals import intersect, subtract, total, union
from distlab.measure.trace.reader import Event

SIZE = 24
intervals = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted).map(tuple), max_size=8
)


def cells(spans):
    """Return the unit cells [i, i+1) that the half-open intervals cover, by their i."""
    found = set()
    for start, end in spans:
        found.update(range(start, end))
    return found


def is_normal(spans):
    """Return True for intervals that are disjoint, ascending, not touching and not empty."""
    ends = itertools.chain.from_iterable(spans)
    return all(a < b for a, b in itertools.pairwise(ends))


@given(intervals, intervals)
def test_the_algebra_agrees_with_a_grid(a, b):
    assert cells(union(a)) == cells(a)
    assert cells(intersect(a, b)) == cells(a) & cells(b)
    assert cells(subtract(a, b)) == cells(a) - cells(b)
    assert total(a) == len(cells(a))
    assert is_normal(union(a)) and is_normal(intersect(a, b)) and is_normal(subtract(a, b))


def event(kind, start, end, name="x", lane="stream 7", launched=None):
    return Event(name, kind, lane, start, end, launched)


def step(start, end):
    return event("range", start, end, "distlab:step", "thread 1")


def test_each_millisecond_of_the_step_is_accounted_for():
    events = [
        step(100, 120),
        event("compute", 90, 104),  # begins before the step
        event("compute", 103, 108),  # overlaps the one before on another stream
        event("communication", 106, 114),
        event("communication", 107, 112, "ncclDevKernel_AllGather_RING_LL", lane="stream 20"),
        event("copy", 113, 116),
        event("compute", 130, 140),
    ]
    found = account(events)
    assert found.step_ms == 20
    assert found.compute_ms == 8
    assert found.comm_ms == 8
    assert found.copy_ms == 2  # beside communication it does not count
    assert found.exposed_ms == 6  # 108 … 114: a copy does not cover communication
    assert found.exposed_gather_ms == 4  # 108 … 112
    assert found.overlap_pct == 25
    assert found.idle_ms == 4  # 116 … 120
    assert lanes(events) == {
        "compute": [(0, 8)],
        "copies": [(13, 16)],
        "communication": [(6, 14)],
        "exposed": [(8, 14)],
    }


def test_the_median_step_is_a_step_that_ran():
    events = [step(0, 10), step(10, 50), step(50, 62), step(62, 73)]
    assert step_windows(events) == [(0, 10), (10, 50), (50, 62), (62, 73)]
    assert median_step(events) == (62, 73)
    assert median_step(events[:3]) == (50, 62)
    assert account(events, (10, 50)).step_ms == 40
