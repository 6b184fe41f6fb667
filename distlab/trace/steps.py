"""Find the steps in a trace: by annotations, by repetition of the work, or as the user says."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distlab.measure.trace.account import main_lane, step_windows
from distlab.measure.trace.capture import STEP
from distlab.measure.trace.intervals import Interval
from distlab.measure.trace.kernels import category
from distlab.measure.trace.reader import Event, Trace

PROFILER_STEP = "ProfilerStep#"
ALIKE = 0.9  # share of a step's work that must come again in the next one
RARE_NAMES = 24  # names whose distances are tried as the length of a step
MATCHED = 16  # kernels (operators) by which the beginning of a step is recognised


@dataclass(frozen=True)
class Steps:
    """Steps of one trace.

    Attributes:
        found_by: how they were found, in words.
        windows: number of the step → its interval in ms, disjoint and in ascending order.
    """

    found_by: str
    windows: dict[int, Interval]


def find_steps(trace: Trace, window: Interval | None = None) -> Steps:
    """Return the steps of a trace.

    Args:
        trace: trace of one rank.
        window: interval in ms, since the first event of the trace, to take as the only step.

    Raises:
        ValueError: the trace has no events, none in the window, or none that takes time.
    """
    work = [event for event in trace.events if event.kind != "range"]
    if not work:
        raise ValueError(
            f"{trace.path} has no kernels, operators or collectives. A schedule without "
            "repeat=1 begins anew after the traced steps, and an export then writes such a file: "
            "give it repeat=1. Without a schedule: profile with ProfilerActivity.CUDA, or "
            "ProfilerActivity.CPU without a GPU, around at least one step"
        )
    end_ms = max(event.end_ms for event in work)
    if window is not None:
        begin, end = window
        if end > end_ms and begin <= end_ms:
            raise ValueError(
                f"the window ends after {end:g} ms, {trace.path} after {end_ms:.1f} ms: give an "
                "end up to that"
            )
        if not any(event.start_ms < end and event.end_ms > begin for event in work):
            raise ValueError(
                f"{trace.path} has no work from {begin:g} to {end:g} ms; it has some from "
                f"{work[0].start_ms:.1f} to {end_ms:.1f} ms after its first event"
            )
        return Steps("--window", {0: window})
    if any(event.name == STEP for event in trace.events):
        numbered = _numbered(step_windows(trace.events))
        if numbered:
            return Steps("distlab:step ranges", numbered)
    annotated = _by_profiler_step(trace)
    if annotated:
        return Steps("ProfilerStep# ranges", annotated)
    repeated = _numbered(_by_repetition(trace.events))
    if repeated:
        return Steps("repetition of the work", repeated)
    whole = (work[0].start_ms, end_ms)
    if whole[0] >= whole[1]:
        raise ValueError(f"{trace.path}: none of its work takes any time; profile again")
    return Steps("nothing: the whole trace counts as one step", {0: whole})


def _numbered(windows: Sequence[Interval]) -> dict[int, Interval]:
    """Number the windows, without those that are empty."""
    return dict(enumerate(window for window in windows if window[0] < window[1]))


def _by_profiler_step(trace: Trace) -> dict[int, Interval]:
    """Return the steps that torch.profiler's schedule annotates.

    The annotations are on the host. If the host runs ahead of the device, a step begins when the
    device has finished what was launched before.
    """
    markers = [event for event in trace.events if event.name.startswith(PROFILER_STEP)]
    markers = [each for each in markers if each.name.removeprefix(PROFILER_STEP).isdigit()]
    main = main_lane(trace.events)
    kernels = [
        event
        for event in trace.events
        if event.kind == "compute" and event.lane == main and event.launched_ms is not None
    ]
    kernels.sort(key=lambda kernel: kernel.launched_ms)
    launches = [kernel.launched_ms for kernel in kernels]
    # A running maximum, so that the search below is right even if a kernel ends before one that was
    # launched earlier.
    ends = list(itertools.accumulate((kernel.end_ms for kernel in kernels), max))

    def on_device(host_ms: float) -> float:
        """Return when the device has finished what was launched before this moment."""
        launched = bisect_left(launches, host_ms)
        return host_ms if launched == 0 else max(host_ms, ends[launched - 1])

    numbers: list[int] = []
    seen: set[int] = set()
    windows: list[Interval] = []
    last_end = -np.inf
    for marker in sorted(markers, key=lambda event: event.start_ms):
        number = int(marker.name.removeprefix(PROFILER_STEP))
        # Ranges may overlap by a few µs, or by much in a damaged file. A moment has one step.
        whole_begin = on_device(marker.start_ms)
        begin = max(whole_begin, last_end)
        end = on_device(marker.end_ms)
        # Two profilers at the same time annotate each step twice.
        is_same = number in seen and end - begin < 0.5 * (end - whole_begin)
        if begin < end and not is_same:
            numbers.append(number)
            seen.add(number)
            windows.append((begin, end))
            last_end = end
    # A second profiler in the same process counts from 0 again.
    if len(seen) < len(numbers):
        return _numbered(windows)
    return dict(zip(numbers, windows, strict=True))


def _by_repetition(events: Sequence[Event]) -> list[Interval]:
    """Return the steps between the points at which the sequence of kernels begins again.

    Without a GPU it is the sequence of operators of the busiest thread.
    """
    lane = main_lane(events)
    if lane is None:
        busy_ms = Counter()
        for event in events:
            if event.kind == "compute":
                busy_ms[event.lane] += event.end_ms - event.start_ms
        lane = max(busy_ms, key=busy_ms.get, default=None)
    sequence = [event for event in events if event.kind == "compute" and event.lane == lane]
    numbers: dict[str, int] = {}
    # Numbers in place of names: comparing a sequence with its shift is then one operation of numpy.
    names = np.array([numbers.setdefault(event.name, len(numbers)) for event in sequence], int)
    of_optimizer = {
        numbers[event.name]
        for event in sequence
        if category(event.name, event.operator) == "optimizer"
    }
    length = _period(names, sorted(of_optimizer))
    if length is None:
        return []
    starts = [sequence[place].start_ms for place in _beginnings(names, length)]
    # From each beginning to the next. The end of the last step is not known, so that step is left
    # out.
    return list(itertools.pairwise(starts))


def _period(names: np.ndarray, of_optimizer: Sequence[int]) -> int | None:
    """Return the number of kernels in a step, or None if the sequence does not repeat.

    Layers repeat inside a step, so a shift by one layer also matches most kernels. But it moves
    kernels that run once per step (embedding, loss) onto others. So each name has one vote, however
    often it runs. A shift by one of many micro-batches matches all but the optimizer, which must
    therefore come again, too.

    Args:
        names: kernels in the order in which they run, as numbers of their names.
        of_optimizer: numbers of the names that belong to an optimizer.
    """
    if len(names) < 4:
        return None
    counts = np.bincount(names)
    # A name that occurs once per step gives the length directly, as the distance of two
    # occurrences.
    rare = [name for name in np.argsort(counts, kind="stable") if counts[name] >= 2]
    candidates = set()
    for name in rare[:RARE_NAMES]:
        places = np.flatnonzero(names == name)[:MATCHED]
        candidates.update((places[1:] - places[0]).tolist())
    for length in sorted(candidates):
        # About two steps must fit into the trace. The second one may be cut a little.
        if length > 0.55 * len(names):
            break
        is_same = names[:-length] == names[length:]
        totals = np.bincount(names[:-length], minlength=len(counts))
        # For each name the share of its kernels that have the same name one period later.
        agreeing = np.bincount(names[:-length][is_same], minlength=len(counts))
        used = totals > 0
        if totals[of_optimizer].sum() > 0 and agreeing[of_optimizer].sum() == 0:
            continue
        if np.mean(agreeing[used] / totals[used]) >= ALIKE:
            return length
    return None


def _beginnings(names: np.ndarray, length: int) -> list[int]:
    """Return where each step begins, by the first kernels of the first step that comes again."""
    matched = min(MATCHED, length)
    place = 0
    while place + length + matched <= len(names):
        here = names[place : place + matched]
        if (here == names[place + length : place + length + matched]).all():
            break
        place += 1
    pattern = names[place : place + matched]
    found = [place]
    while True:
        expected = found[-1] + length
        # Before that, only a part of the last step could look like a beginning.
        if expected >= len(names):
            return found
        # A step may be a few kernels longer or shorter than the others.
        for distance in range(length // 4 + 1):
            near = [expected - distance, expected + distance]
            begin = next((at for at in near if _matches(names, at, pattern)), None)
            if begin is not None:
                found.append(begin)
                break
        else:
            return found


def _matches(names: np.ndarray, at: int, pattern: np.ndarray) -> bool:
    """Return whether the sequence has the pattern at this place. It may end in the middle of it."""
    part = names[at : at + len(pattern)]
    return len(part) > 0 and bool((part == pattern[: len(part)]).all())
