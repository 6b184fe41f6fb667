"""Account for the time of a step, and for its overhead over a step without communication.

**A step.** Every moment of a step belongs to exactly one part. It is the first of these that
applies, so the parts add up to the step:

1. compute: at least one kernel runs (`StepAccount.optimizer_ms` is the optimizer's part of it);
2. exposed communication: a collective runs, and no kernel covers it;
3. copies: only a copy runs;
4. idle: nothing runs.

**An overhead.** Two steps differ by as much as their parts differ, so these causes add up to the
difference of the two profiled steps:

    overhead = exposed communication + slow-down of compute + copies + optimizer + idle

- *Slow-down* is the extra time of the same kernels (operators, on a CPU) in the step that
  communicates, because communication uses the same cores and memory.
- *Copies* contain extra work: kernels that run more or less often than without communication.
  Examples are gradients packed into buckets, scaled and unpacked.
- *Optimizer* is 0 except for strategies that shard the optimizer. For these it is negative.

**An account closes** if the causes, measured under the profiler, explain the overhead that the
benchmark measured without a profiler. The rest is an error of the measurement (`closes`).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distlab.measure.trace.capture import NEXT, OPTIMIZER, PHASES, STEP
from distlab.measure.trace.intervals import Cover, Interval, intersect, subtract, total
from distlab.measure.trace.names import operation_of
from distlab.measure.trace.reader import Event


@dataclass(frozen=True)
class StepAccount:
    """Time of one step of one rank, in ms, by part.

    Compute, exposed communication, copies and idle time add up to the step.

    Attributes:
        step_ms: ms of the step.
        compute_ms: ms in which at least one kernel (operator, on a CPU) computed.
        optimizer_ms: ms of `compute_ms` that belong to the optimizer.
        comm_ms: ms in which communication ran.
        exposed_ms: ms of `comm_ms` in which no compute ran. Copies do not cover communication.
        exposed_gather_ms: ms of `exposed_ms` in which an all-gather ran, for which parameters are
            usually the reason.
        overlap_pct: share of `comm_ms` that compute covers, in %. None without communication.
        copy_ms: ms of copies during which neither compute nor communication ran.
        idle_ms: ms in which nothing ran.
        kernels: name → (number of calls, sum of their ms), for compute outside of the optimizer.
    """

    step_ms: float
    compute_ms: float
    optimizer_ms: float
    comm_ms: float
    exposed_ms: float
    exposed_gather_ms: float
    overlap_pct: float | None
    copy_ms: float
    idle_ms: float
    kernels: dict[str, tuple[int, float]]


def account(events: Sequence[Event], window: Interval | None = None) -> StepAccount:
    """Account for every millisecond of ``window``, by default the median step.

    Raises:
        ValueError: an empty window, or no window and no ``distlab:step`` in the trace.
    """
    if window is None:
        window = median_step(events)
    begin, end = window
    if begin >= end:
        raise ValueError(f"the window {window} is empty")

    optimizer_events, other_events = _split_by_optimizer(events)
    compute = _inside(events, "compute", window)
    comm = _inside(events, "communication", window)
    copies = _inside(events, "copy", window)
    gathers = _inside(filter(_is_all_gather, events), "communication", window)
    # The parts are cut in the order of the module's docstring: each is what those before it leave.
    exposed = subtract(comm, compute)
    only_copies = subtract(copies, [*compute, *comm])
    idle = subtract([window], [*compute, *comm, *copies])

    comm_ms = total(comm)
    exposed_ms = total(exposed)
    overlap_pct = None
    if comm_ms:
        overlap_pct = 100 * (1 - exposed_ms / comm_ms)
    return StepAccount(
        step_ms=end - begin,
        compute_ms=total(compute),
        optimizer_ms=total(_inside(optimizer_events, "compute", window)),
        comm_ms=comm_ms,
        exposed_ms=exposed_ms,
        exposed_gather_ms=total(subtract(gathers, compute)),
        overlap_pct=overlap_pct,
        copy_ms=total(only_copies),
        idle_ms=total(idle),
        kernels=_time_by_kernel(other_events, window),
    )


def _is_all_gather(event: Event) -> bool:
    return operation_of(event.name) == "all_gather"


def explain(step: StepAccount, local: StepAccount) -> dict[str, float]:
    """Return the causes of the extra time of ``step`` over ``local``, in ms.

    The causes add up to the difference of the two profiled steps.

    Args:
        step: account of a step that communicates.
        local: account of the same step without communication.
    """
    # A kernel that runs equally often in both steps is the same work: more time for it is a
    # slow-down. A kernel that runs more or less often is extra work of the strategy.
    extra_work_ms = 0.0
    for name in step.kernels.keys() | local.kernels.keys():
        count, ms = step.kernels.get(name, (0, 0.0))
        local_count, local_ms = local.kernels.get(name, (0, 0.0))
        if count != local_count:
            extra_work_ms += ms - local_ms
    optimizer_ms = step.optimizer_ms - local.optimizer_ms
    compute_ms = step.compute_ms - local.compute_ms
    return {
        "overhead_exposed_ms": step.exposed_ms - local.exposed_ms,
        "overhead_slowdown_ms": compute_ms - optimizer_ms - extra_work_ms,
        "overhead_copies_ms": step.copy_ms - local.copy_ms + extra_work_ms,
        "overhead_optimizer_ms": optimizer_ms,
        "overhead_idle_ms": step.idle_ms - local.idle_ms,
    }


def closes(unexplained_ms: float, overhead_ms: float, step_ms: float) -> bool:
    """Return whether the causes add up to the overhead well enough: within half of it.

    Half of the overhead counts up to 5 % of the step. The causes may always miss it by 1 % of the
    step, since two runs of one step differ by about that. They may also miss it by 1 ms, since the
    profiler's own overhead is a larger share of a short step. These limits are our choice, not
    theory.

    Args:
        unexplained_ms: ms of overhead without a profiler, less the sum of the causes (`explain`).
        overhead_ms: ms of overhead without a profiler.
        step_ms: ms of the step without a profiler.
    """
    at_most_half = min(0.5 * abs(overhead_ms), 0.05 * step_ms)
    return abs(unexplained_ms) <= max(at_most_half, 0.01 * step_ms, 1.0)


def step_windows(events: Sequence[Event]) -> list[Interval]:
    """Return the interval of each ``distlab:step``, in order of time.

    It is usually the range itself. If steps were queued on a GPU (the trace then ends with a range
    ``distlab:next``), the host's ranges are earlier than the work. A step then lasts from its first
    compute kernel to that of the next step.

    Raises:
        ValueError: there is no such range.
    """
    markers = [event for event in events if event.name in (STEP, NEXT)]
    markers.sort(key=lambda event: event.start_ms)
    queued = bool(markers) and markers[-1].name == NEXT
    # `distlab:next` only marks where the last step ends.
    steps = markers[:-1] if queued else markers
    if not steps:
        raise ValueError(
            f"the trace has no range {STEP!r}: write it with profile_steps, or pass a window"
        )
    kernels = _launched(events)
    if not queued or not kernels:
        # Each step waited for the device inside its range, or the host itself did the work.
        return [(step.start_ms, step.end_ms) for step in steps]
    # Kernels of one stream run in the order of their launch, so the first kernel of the next step
    # is behind all of this one. Other streams may run ahead.
    main = main_lane(events)
    main_kernels = [kernel for kernel in kernels if kernel.lane == main]
    begins = [_first_kernel_ms(main_kernels, marker) for marker in markers]
    return list(itertools.pairwise(begins))


def _first_kernel_ms(kernels: Iterable[Event], marker: Event) -> float:
    """Return when the first kernel that was launched inside a range of the host began.

    Without such a kernel, return the range's own start.

    Args:
        kernels: compute kernels of one stream.
        marker: range ``distlab:step`` or ``distlab:next``.
    """
    starts = [
        kernel.start_ms
        for kernel in kernels
        if marker.start_ms <= kernel.launched_ms <= marker.end_ms
    ]
    return min(starts, default=marker.start_ms)


def main_lane(events: Sequence[Event]) -> str | None:
    """Return the stream of a GPU that computes longest. None without kernels."""
    busy_ms = Counter()
    for kernel in _launched(events):
        busy_ms[kernel.lane] += kernel.end_ms - kernel.start_ms
    return max(busy_ms, key=busy_ms.get, default=None)


def _launched(events: Sequence[Event]) -> list[Event]:
    """Return the compute kernels of a GPU whose launch is in the trace."""
    return [event for event in events if event.kind == "compute" and event.launched_ms is not None]


def nearest_step(events: Sequence[Event], step_ms: float) -> Interval:
    """Return the window of the step whose duration is nearest to `step_ms`.

    Args:
        events: events of a trace.
        step_ms: ms of a step, usually the median of steps without a profiler.
    """
    return min(step_windows(events), key=lambda window: abs(window[1] - window[0] - step_ms))


def median_step(events: Sequence[Event]) -> Interval:
    """Return the window of the step of median duration (the shorter of the middle two)."""
    windows = sorted(step_windows(events), key=lambda window: window[1] - window[0])
    return windows[(len(windows) - 1) // 2]


def lanes(events: Sequence[Event], window: Interval | None = None) -> dict[str, list[Interval]]:
    """Return the lanes of a timeline picture of `window`, by default the median step.

    Times start at 0 ms.

    Returns:
        ``compute``, ``copies``, ``communication`` and ``exposed`` (communication that no compute
        covers), each with disjoint intervals in ascending order.
    """
    if window is None:
        window = median_step(events)
    compute = _inside(events, "compute", window)
    comm = _inside(events, "communication", window)
    found = {
        "compute": compute,
        "copies": _inside(events, "copy", window),
        "communication": comm,
        "exposed": subtract(comm, compute),
    }
    begin, _ = window
    shifted = {}
    for lane, spans in found.items():
        shifted[lane] = [(start - begin, end - begin) for start, end in spans]
    return shifted


def phase_starts(events: Sequence[Event], window: Interval) -> dict[str, float]:
    """Return when each phase of a step begins to compute, in ms from the start of `window`.

    A kernel belongs to the phase in which the host launched it. So on a GPU a phase begins with its
    first kernel, and not when the host reaches it. A phase without compute is left out.
    """
    begin, end = window
    in_window = [e for e in events if e.kind == "compute" and begin <= e.start_ms < end]
    found = {}
    for phase in PHASES:
        ranges = _ranges_named(events, f"distlab:{phase}")
        starts = [event.start_ms for event in in_window if ranges.contains(event.on_host_ms)]
        if starts:
            found[phase] = min(starts) - begin
    return found


def _split_by_optimizer(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Split the compute events into those of the optimizer and all others."""
    ranges = _ranges_named(events, OPTIMIZER)
    if not ranges.intervals:
        # A trace of another program: torch's optimizers annotate their steps.
        ranges = _ranges_named(events, "Optimizer.step#")
    optimizer_events, other_events = [], []
    for event in events:
        if event.kind != "compute":
            continue
        if ranges.contains(event.on_host_ms):
            optimizer_events.append(event)
        else:
            other_events.append(event)
    return optimizer_events, other_events


def _ranges_named(events: Iterable[Event], name: str) -> Cover:
    """Return the intervals on the host of all ranges whose name begins with `name`."""
    found = []
    for event in events:
        if event.kind == "range" and event.name.startswith(name):
            found.append((event.start_ms, event.end_ms))
    return Cover(found)


def _time_by_kernel(events: Iterable[Event], window: Interval) -> dict[str, tuple[int, float]]:
    """Return name → (number of calls, sum of their ms) of the events that begin in `window`."""
    begin, end = window
    kernels = {}
    for event in events:
        if begin <= event.start_ms < end:
            count, ms = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = (count + 1, ms + event.end_ms - event.start_ms)
    return kernels


def _inside(events: Iterable[Event], kind: str, window: Interval) -> list[Interval]:
    """Return the times in `window` at which at least one event of this kind runs."""
    spans = [(event.start_ms, event.end_ms) for event in events if event.kind == kind]
    return intersect(spans, [window])
