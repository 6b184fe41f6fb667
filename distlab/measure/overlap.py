"""How much communication is hidden behind compute: interval algebra, and its use on one step of a trace.

An interval is ``(start, end)``, half-open, in ms. `union`, `intersect` and `subtract` return disjoint
intervals in ascending order, without empty ones and with touching ones joined; they accept any list in any
order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distlab.measure.trace import NEXT, STEP, Event

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All points that lie in at least one interval."""
    joined: list[Interval] = []
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
    """All points that lie in both ``a`` and ``b``."""
    left, right = union(a), union(b)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """All points of ``a`` that lie outside ``b``."""
    left = union(a)
    if not left:
        return []
    gaps: list[Interval] = []
    cursor = left[0][0]
    for start, end in union(b):
        gaps.append((cursor, start))
        cursor = max(cursor, end)
    gaps.append((cursor, left[-1][1]))
    return intersect(left, gaps)


@dataclass(frozen=True)
class Overlap:
    """One step of one rank, in ms of wall clock.

    Attributes:
        step_ms: length of the step.
        compute_ms, comm_ms, copy_ms: time in which at least one such thing ran.
        uncovered_comm_ms: time in which communication ran and no compute did. Copies cover nothing.
        overlap_pct: share of ``comm_ms`` that compute covers, in %; None without communication.
        idle_ms: time in which none of the three ran.
    """

    step_ms: float
    compute_ms: float
    comm_ms: float
    copy_ms: float
    uncovered_comm_ms: float
    overlap_pct: float | None
    idle_ms: float


def step_windows(events: Sequence[Event]) -> list[Interval]:
    """When each ``distlab:step`` ran, in order of time.

    Usually its range. Where steps were queued (there is a range ``distlab:next``) on a GPU, the host's ranges lie
    before the work: a step then lasts from its first compute kernel to that of the next.

    Raises:
        ValueError: there is no such range.
    """
    return [window for _, window in _steps(events)]


def _steps(events: Sequence[Event]) -> list[tuple[Interval, Interval]]:
    """(range on the host, window on the device) of each step."""
    named = sorted((e for e in events if e.name in (STEP, NEXT)), key=lambda event: event.start_ms)
    ranges = [(event.start_ms, event.end_ms) for event in named]
    queued = bool(named) and named[-1].name == NEXT
    if not ranges or (queued and len(ranges) == 1):
        raise ValueError(f"the trace has no range {STEP!r}: write it with profile_steps, or pass a window")
    kernels = _main_lane([e for e in events if e.kind == "compute" and e.launched_ms is not None])
    if not queued or not kernels:
        ranges = ranges[: len(ranges) - queued]
        return [(span, span) for span in ranges]
    begins = [
        min((k.start_ms for k in kernels if start <= k.launched_ms <= end), default=start)
        for start, end in ranges
    ]
    return list(zip(ranges, itertools.pairwise(begins), strict=False))


def _main_lane(kernels: Sequence[Event]) -> list[Event]:
    """The kernels of the stream that computes longest."""
    busy: dict[str, float] = {}
    for kernel in kernels:
        busy[kernel.lane] = busy.get(kernel.lane, 0.0) + kernel.end_ms - kernel.start_ms
    return [kernel for kernel in kernels if kernel.lane == max(busy, key=busy.get)]


def median_step(events: Sequence[Event]) -> Interval:
    """The window of the step of median duration (the shorter of the middle two)."""
    windows = sorted(step_windows(events), key=lambda window: window[1] - window[0])
    return windows[(len(windows) - 1) // 2]


def analyse(events: Sequence[Event], window: Interval | None = None) -> Overlap:
    """Account for every millisecond of ``window``, by default the median step.

    Raises:
        ValueError: an empty window, or no window and no ``distlab:step`` in the trace.
    """
    window = median_step(events) if window is None else window
    if window[0] >= window[1]:
        raise ValueError(f"the window {window} is empty")
    compute, comm, copies = (_inside(events, kind, window) for kind in ("compute", "communication", "copy"))
    comm_ms, uncovered_ms = total(comm), total(subtract(comm, compute))
    return Overlap(
        step_ms=window[1] - window[0],
        compute_ms=total(compute),
        comm_ms=comm_ms,
        copy_ms=total(copies),
        uncovered_comm_ms=uncovered_ms,
        overlap_pct=100 * (1 - uncovered_ms / comm_ms) if comm_ms else None,
        idle_ms=total(subtract([window], [*compute, *comm, *copies])),
    )


def lanes(events: Sequence[Event], window: Interval | None = None) -> dict[str, list[Interval]]:
    """What a timeline picture shows of ``window``, by default the median step; 0 ms is the window's start.

    Returns ``compute``, ``copies``, ``communication`` and ``exposed`` (communication that no compute covers),
    each disjoint and ascending.
    """
    window = median_step(events) if window is None else window
    compute, comm, copies = (_inside(events, kind, window) for kind in ("compute", "communication", "copy"))
    found = {"compute": compute, "copies": copies, "communication": comm, "exposed": subtract(comm, compute)}
    return {
        lane: [(start - window[0], end - window[0]) for start, end in spans] for lane, spans in found.items()
    }


def exposed_all_gathers(
    events: Sequence[Event], window: Interval | None = None
) -> tuple[float | None, float | None]:
    """Time in ms in which only all-gathers ran, no compute: (until the forward ended, after it).

    None for both without an all-gather in ``window`` (by default the median step), or without the range that
    `trace.annotate_forward` writes.
    """
    window = median_step(events) if window is None else window
    named = [
        e for e in events if e.kind == "communication" and "allgather" in e.name.lower().replace("_", "")
    ]
    gathers = _inside(named, "communication", window)
    ends = [window[0] + end for name, _, end in phases(events, window) if name == "forward"]
    if not gathers or not ends:
        return None, None
    alone = subtract(gathers, _inside(events, "compute", window))
    boundary = max(ends)
    return total(intersect(alone, [(window[0], boundary)])), total(intersect(alone, [(boundary, window[1])]))


def phases(events: Sequence[Event], window: Interval | None = None) -> list[tuple[str, float, float]]:
    """The ``distlab:`` ranges inside ``window`` other than the step, as (name, start, end); 0 ms is its
    start.

    On a GPU the host runs ahead, so a phase there reaches from the start of the first to the end of the last
    compute kernel that the host launched during the range (by any thread: autograd has its own).
    """
    window = median_step(events) if window is None else window
    host = window
    if any(event.name == STEP for event in events):
        host = next((span for span, device in _steps(events) if device == window), window)
    kernels = [event for event in events if event.kind == "compute" and event.launched_ms is not None]
    found = []
    for event in events:
        inside = host[0] <= event.start_ms and event.end_ms <= host[1]
        if event.kind != "range" or event.name == STEP or not inside:
            continue
        mine = [kernel for kernel in kernels if event.start_ms <= kernel.launched_ms <= event.end_ms]
        start = min((kernel.start_ms for kernel in mine), default=event.start_ms)
        end = max((kernel.end_ms for kernel in mine), default=event.end_ms)
        found.append((event.name.removeprefix("distlab:"), start - window[0], end - window[0]))
    return found


def idle_gaps(events: Sequence[Event], window: Interval | None = None) -> list[Interval]:
    """When nothing ran, longest first; 0 ms is the window's start, which by default is the median step's."""
    window = median_step(events) if window is None else window
    busy = [span for kind in ("compute", "communication", "copy") for span in _inside(events, kind, window)]
    gaps = [(start - window[0], end - window[0]) for start, end in subtract([window], busy)]
    return sorted(gaps, key=lambda gap: gap[0] - gap[1])


def streams(events: Sequence[Event], window: Interval | None = None) -> dict[str, dict[str, list[Interval]]]:
    """What ran on each stream (or CPU thread) in ``window``: lane → kind → disjoint intervals, from 0 ms.

    Lanes in order of their busy time, the busiest first.
    """
    window = median_step(events) if window is None else window
    found: dict[str, dict[str, list[Interval]]] = {}
    for lane in dict.fromkeys(event.lane for event in events if event.kind != "range"):
        mine = [event for event in events if event.lane == lane]
        spans = {kind: _inside(mine, kind, window) for kind in ("compute", "communication", "copy")}
        if any(spans.values()):
            found[lane] = {
                kind: [(start - window[0], end - window[0]) for start, end in intervals]
                for kind, intervals in spans.items()
                if intervals
            }
    busy = {lane: total(s for spans in kinds.values() for s in spans) for lane, kinds in found.items()}
    return dict(sorted(found.items(), key=lambda item: -busy[item[0]]))


def _inside(events: Iterable[Event], kind: str, window: Interval) -> list[Interval]:
    return intersect(((event.start_ms, event.end_ms) for event in events if event.kind == kind), [window])
