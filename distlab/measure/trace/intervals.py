"""Interval algebra.

An interval is ``(start, end)``, half-open, in ms. `union`, `intersect` and `subtract` return
disjoint intervals in ascending order, without empty ones and with touching ones joined; they accept
any list in any order.
"""

import itertools
import math
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return all points that are in at least one interval."""
    joined = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def total(intervals: Iterable[Interval]) -> float:
    """Length of the union: time in which at least one interval runs."""
    return sum(end - start for start, end in union(intervals))


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return all points that are in both ``a`` and ``b``."""
    return _outside([*_outside(a), *_outside(b)])


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return all points of ``a`` that are not in ``b``."""
    return _outside([*_outside(a), *b])


def _outside(intervals: Iterable[Interval]) -> list[Interval]:
    """Return all points of the line, from −∞ to ∞, that are in none of the intervals."""
    edges = [-math.inf, *itertools.chain(*union(intervals)), math.inf]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
