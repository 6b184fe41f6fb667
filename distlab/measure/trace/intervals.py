"""Interval algebra.

An interval is ``(start, end)``, half-open, in ms. `union`, `intersect` and `subtract` return
disjoint intervals in ascending order. None of these is empty, and no two of them touch. All
functions accept any list in any order.
"""

import bisect
import itertools
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


class Cover:
    """The union of intervals, which answers in logarithmic time how much of a span it covers.

    Attributes:
        intervals: disjoint intervals in ascending order.
    """

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.intervals = union(intervals)
        self._starts = [start for start, _ in self.intervals]
        lengths = (end - start for start, end in self.intervals)
        self._before = list(itertools.accumulate(lengths, initial=0.0))

    def contains(self, point: float) -> bool:
        """Return whether a point is in the union."""
        return self.around(point) is not None

    def length(self, start: float, end: float) -> float:
        """Return the length of the part of the union that is between `start` and `end`."""
        return max(0.0, self._up_to(end) - self._up_to(start))

    def within(self, start: float, end: float) -> list[Interval]:
        """Return the parts of the union that are between `start` and `end`."""
        place = max(bisect.bisect_right(self._starts, start) - 1, 0)
        found = []
        while place < len(self.intervals) and self._starts[place] < end:
            low, high = self.intervals[place]
            if high > start:
                found.append((max(low, start), min(high, end)))
            place += 1
        return found

    def around(self, point: float) -> Interval | None:
        """Return the interval that contains a point, or None."""
        place = bisect.bisect_right(self._starts, point) - 1
        if place >= 0 and point < self.intervals[place][1]:
            return self.intervals[place]
        return None

    def _up_to(self, point: float) -> float:
        """Return the length of the part of the union that is before `point`."""
        place = bisect.bisect_right(self._starts, point) - 1
        if place < 0:
            return 0.0
        start, end = self.intervals[place]
        return self._before[place] + min(point, end) - start


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
