"""Parts of a step, and the causes of its overhead over a step without communication.

The parts add up to the step, and the causes to the overhead.

Every moment of a step belongs to one part, the first that applies: the optimizer's compute, other
compute, communication that no compute covers, a copy, or nothing. The parts of two steps differ by
as much as the steps do:

    overhead = exposed communication + slow-down of compute + copies + optimizer + idle

*Slow-down* is the extra time of the same kernels (operators, on a CPU) in the step that
communicates, because communication uses the same cores and memory. Kernels that run more or less
often than without communication are extra work and count as *copies*: gradients packed into
buckets, scaled, unpacked. *Optimizer* is 0 except for strategies that shard it, where it is
negative. All this is measured under the profiler. Compared with the step times of the benchmark,
the part that stays unexplained is an error of the measurement.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distlab.measure.trace.capture import NEXT, OPTIMIZER, PHASES, STEP, Event
from distlab.measure.trace.intervals import Interval, intersect, subtract, total

KINDS = ("compute", "communication", "copy")


@dataclass(frozen=True)
class StepAccount:
    """One step of one rank in ms: compute, exposed communication, copies and idle time sum to it.

    Attributes:
        step_ms: ms of the step.
        compute_ms: ms in which at least one kernel (operator, on a CPU) computed.
        optimizer_ms: ms of that which belong to the optimizer.
        comm_ms: ms in which communication ran.
        exposed_ms: ms of that in which no compute ran. Copies do not cover communication.
        overlap_pct: share of ``comm_ms`` that compute covers, in %. None without communication.
        copy_ms: ms of copies during which neither ran.
        idle_ms: ms in which nothing ran.
        kernels: name → (count, ms in sum) of the compute outside of the optimizer.
    """

    step_ms: float
    compute_ms: float
    optimizer_ms: float
    comm_ms: float
    exposed_ms: float
    overlap_pct: float | None
    copy_ms: float
    idle_ms: float
    kernels: dict[str, tuple[int, float]]


def step_windows(events: Sequence[Event]) -> list[Interval]:
    """Return the interval of each ``distlab:step``, in order of time.

    It is usually its range. If steps were queued (there is a range ``distlab:next``) on a GPU, the
    host's ranges are earlier than the work: a step then lasts from its first compute kernel to that
    of the next.

    Raises:
        ValueError: there is no such range.
    """
    return [window for _, window in _steps(events)]


def _steps(events: Sequence[Event]) -> list[tuple[Interval, Interval]]:
    """Return (range on the host, window on the device) of each step."""
    named = sorted((e for e in events if e.name in (STEP, NEXT)), key=lambda event: event.start_ms)
    ranges = [(event.start_ms, event.end_ms) for event in named]
    queued = bool(named) and named[-1].name == NEXT
    if not ranges or (queued and len(ranges) == 1):
        raise ValueError(
            f"the trace has no range {STEP!r}: write it with profile_steps, or pass a window"
        )
    kernels = _launched(events)
    if not queued or not kernels:
        ranges = ranges[: len(ranges) - queued]
        return [(span, span) for span in ranges]
    main = main_lane(events)
    begins = [
        min(
            (k.start_ms for k in kernels if k.lane == main and start <= k.launched_ms <= end),
            default=start,
        )
        for start, end in ranges
    ]
    return list(zip(ranges, itertools.pairwise(begins), strict=False))


def main_lane(events: Sequence[Event]) -> str | None:
    """Return the stream of a GPU that computes longest; None without kernels."""
    busy = Counter()
    for kernel in _launched(events):
        busy[kernel.lane] += kernel.end_ms - kernel.start_ms
    return max(busy, key=busy.get, default=None)


def _launched(events: Sequence[Event]) -> list[Event]:
    """Compute kernels of a GPU whose launch is in the trace."""
    return [event for event in events if event.kind == "compute" and event.launched_ms is not None]


def nearest_step(events: Sequence[Event], step_ms: float) -> Interval:
    """Return the window of the step with the duration nearest to `step_ms`.

    That is the median of steps without a profiler.
    """
    return min(step_windows(events), key=lambda window: abs(window[1] - window[0] - step_ms))


def median_step(events: Sequence[Event]) -> Interval:
    """Return the window of the step of median duration (the shorter of the middle two)."""
    windows = sorted(step_windows(events), key=lambda window: window[1] - window[0])
    return windows[(len(windows) - 1) // 2]


def account(events: Sequence[Event], window: Interval | None = None) -> StepAccount:
    """Account for every millisecond of ``window``, by default the median step.

    Raises:
        ValueError: an empty window, or no window and no ``distlab:step`` in the trace.
    """
    window = median_step(events) if window is None else window
    if window[0] >= window[1]:
        raise ValueError(f"the window {window} is empty")
    updates = [(e.start_ms, e.end_ms) for e in events if e.name == OPTIMIZER]
    updating, others = [], []
    for event in (e for e in events if e.kind == "compute"):
        (
            updating if any(start <= event.on_host_ms < end for start, end in updates) else others
        ).append(event)
    kernels = {}  # name → (how often, ms)
    for event in others:
        if window[0] <= event.start_ms < window[1]:
            count, ms = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, ms + event.end_ms - event.start_ms
    compute, comm, copies = (_inside(events, kind, window) for kind in KINDS)
    comm_ms, exposed_ms = total(comm), total(subtract(comm, compute))
    idle = subtract([window], [*compute, *comm, *copies])
    return StepAccount(
        step_ms=window[1] - window[0],
        compute_ms=total(compute),
        optimizer_ms=total(_inside(updating, "compute", window)),
        comm_ms=comm_ms,
        exposed_ms=exposed_ms,
        overlap_pct=100 * (1 - exposed_ms / comm_ms) if comm_ms else None,
        copy_ms=total(subtract(copies, [*compute, *comm])),
        idle_ms=total(idle),
        kernels=kernels,
    )


def lanes(events: Sequence[Event], window: Interval | None = None) -> dict[str, list[Interval]]:
    """Return the lanes of a timeline picture of `window`, by default the median step.

    Times start at 0 ms.

    Returns ``compute``, ``copies``, ``communication`` and ``exposed`` (communication that no
    compute covers), each disjoint and ascending.
    """
    window = median_step(events) if window is None else window
    compute, comm, copies = (_inside(events, kind, window) for kind in KINDS)
    found = {
        "compute": compute,
        "copies": copies,
        "communication": comm,
        "exposed": subtract(comm, compute),
    }
    begin, _ = window
    return {
        lane: [(start - begin, end - begin) for start, end in spans]
        for lane, spans in found.items()
    }


def phase_starts(events: Sequence[Event], window: Interval) -> dict[str, float]:
    """Return when each phase of a step begins to compute, in ms from the start of `window`.

    A kernel belongs to the phase in which the host launched it, so on a GPU a phase begins with its
    first kernel and not when the host gets there. A phase without compute is left out.
    """
    begin, end = window
    found = {}
    for phase in PHASES:
        ranges = [(e.start_ms, e.end_ms) for e in events if e.name == f"distlab:{phase}"]
        starts = [
            event.start_ms - begin
            for event in events
            if event.kind == "compute"
            and begin <= event.start_ms < end
            and any(first <= event.on_host_ms < last for first, last in ranges)
        ]
        if starts:
            found[phase] = min(starts)
    return found


def _inside(events: Iterable[Event], kind: str, window: Interval) -> list[Interval]:
    return intersect(
        ((event.start_ms, event.end_ms) for event in events if event.kind == kind), [window]
    )


def explain(step: StepAccount, local: StepAccount) -> dict[str, float]:
    """Return the causes of the extra time of ``step`` over ``local``, in ms.

    ``local`` is the same step without communication. The causes sum to the difference of the two
    profiled steps.
    """
    extra = 0.0
    for name in step.kernels.keys() | local.kernels.keys():
        count, ms = step.kernels.get(name, (0, 0.0))
        count_local, ms_local = local.kernels.get(name, (0, 0.0))
        if count != count_local:
            extra += ms - ms_local
    optimizer_ms = step.optimizer_ms - local.optimizer_ms
    return {
        "overhead_exposed_ms": step.exposed_ms - local.exposed_ms,
        "overhead_slowdown_ms": step.compute_ms - local.compute_ms - optimizer_ms - extra,
        "overhead_copies_ms": step.copy_ms - local.copy_ms + extra,
        "overhead_optimizer_ms": optimizer_ms,
        "overhead_idle_ms": step.idle_ms - local.idle_ms,
    }


def closes(unexplained_ms: float, step_ms: float) -> bool:
    """Return whether an account is accurate enough: within 5 % of the step, or 1 ms."""
    return abs(unexplained_ms) <= max(0.05 * step_ms, 1.0)
