"""Interval algebra.

An interval is ``(start, end)``, half-open, in ms. `union`, `intersect` and `subtract` return
disjoint intervals in ascending order. None of these is empty, and no two of them touch. All
functions accept any list in any order.
"""

import math
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return all points that are in at least one interval."""
    not_empty = [interval for interval in intervals if interval[0] < interval[1]]
    joined: list[Interval] = []
    for start, end in sorted(not_empty):
        if joined and start <= joined[-1][1]:
            # It overlaps or touches the last one. It may also end before that one does.
            last_start, last_end = joined[-1]
            joined[-1] = (last_start, max(last_end, end))
        else:
            joined.append((start, end))
    return joined


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of the union: the time in which at least one interval runs."""
    return sum(end - start for start, end in union(intervals))


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return all points that are in both ``a`` and ``b``."""
    # De Morgan: a ∩ b is the complement of (complement of a) ∪ (complement of b).
    return _complement([*_complement(a), *_complement(b)])


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return all points of ``a`` that are not in ``b``."""
    # De Morgan: a \ b is the complement of (complement of a) ∪ b.
    return _complement([*_complement(a), *b])


def _complement(intervals: Iterable[Interval]) -> list[Interval]:
    """Return all points of the line, from −∞ to ∞, that are in none of the intervals."""
    gaps = []
    gap_start = -math.inf
    for start, end in union(intervals):
        # The first interval of a complement begins at −∞, so there is no gap before it.
        if gap_start < start:
            gaps.append((gap_start, start))
        gap_start = end
    if gap_start < math.inf:
        gaps.append((gap_start, math.inf))
    return gaps
