"""What a person asks of a profile: which kernels take the time, in which phase, and on what kind of work.

Reads the events of a trace (`trace.load_trace`), so a summary can be made again from the file. On a GPU the kernels
are those of the device, by the phase in which the host launched them; without one, the operators.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import record_function

from distlab.measure.category import CATEGORIES, category
from distlab.measure.overlap import intersect, step_windows, total
from distlab.measure.trace import Event

PHASES = ("forward", "backward", "optimizer")
OUTSIDE = "outside"  # of the three, such as zeroing gradients


class Phases:
    """Ranges ``distlab:forward``, ``distlab:backward``, ``distlab:optimizer`` from a step's marks.

    A mark says which phase ends, as those of `timing.PhaseTimer` do, so the same step serves both::

        phases = Phases()
        with phases.step("forward"):  # the first phase begins with the step
            ...
            phases.mark("forward")
            ...
    """

    def __init__(self, order: Sequence[str] = PHASES) -> None:
        self._order = list(order)
        self._open: record_function | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step: its first phase begins now, its last ends with a mark or with the step."""
        self._begin(self._order[0])
        try:
            yield
        finally:
            self._end()

    def mark(self, phase: str) -> None:
        """`phase` ends here and the next in order begins."""
        self._end()
        following = self._order.index(phase) + 1
        if following < len(self._order):
            self._begin(self._order[following])

    def _begin(self, phase: str) -> None:
        self._open = record_function(f"distlab:{phase}")
        self._open.__enter__()

    def _end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


@dataclass(frozen=True)
class Kernel:
    """One kernel (or operator) in one phase.

    Attributes:
        name: as the trace has it.
        category: see `category.category`.
        phase: forward, backward, optimizer or outside.
        count: calls per step.
        ms: per step, the sum over its calls.
    """

    name: str
    category: str
    phase: str
    count: float
    ms: float


@dataclass(frozen=True)
class Profile:
    """A trace in figures, each per step.

    Attributes:
        steps: recorded.
        step_ms: median length of a step under the profiler.
        kernel_ms: sum of all kernels' times; more than `busy_ms` where some run at once.
        busy_ms: time in which at least one kernel ran.
        kernels: the one with the most time first.
    """

    steps: int
    step_ms: float
    kernel_ms: float
    busy_ms: float
    kernels: tuple[Kernel, ...]

    def top(self, phase: str, count: int) -> list[Kernel]:
        """The kernels of a phase with the most time."""
        return [kernel for kernel in self.kernels if kernel.phase == phase][:count]

    def phase_ms(self) -> dict[str, float]:
        """Phase → ms of kernels, phases without any left out."""
        return _summed(self.kernels, lambda kernel: kernel.phase)

    def category_ms(self) -> dict[str, float]:
        """Category → ms of kernels, in the order of `CATEGORIES`, those without any left out."""
        found = _summed(self.kernels, lambda kernel: kernel.category)
        return {name: found[name] for name in CATEGORIES if name in found}


def _summed(kernels: Sequence[Kernel], key: Callable[[Kernel], str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[key(kernel)] += kernel.ms
    return dict(sums)


def summarise(events: Sequence[Event]) -> Profile:
    """The profile of all recorded steps.

    Raises:
        ValueError: no ``distlab:step`` in the trace (see `trace.profile_steps`).
    """
    windows = step_windows(events)
    phases = [e for e in events if e.kind == "range" and e.name.removeprefix("distlab:") in PHASES]
    phases.sort(key=lambda event: event.start_ms)
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    busy = []
    for event in events:
        inside = any(start <= event.start_ms and event.end_ms <= end for start, end in windows)
        if event.kind == "range" or not inside:
            continue
        kind = "communication" if event.kind == "communication" else category(event.name, event.operator)
        times[event.name, kind, _phase_of(event, phases)].append(event.end_ms - event.start_ms)
        busy.append((event.start_ms, event.end_ms))
    steps = len(windows)
    kernels = [Kernel(*key, len(spent) / steps, sum(spent) / steps) for key, spent in times.items()]
    return Profile(
        steps=steps,
        step_ms=statistics.median(end - start for start, end in windows),
        kernel_ms=sum(kernel.ms for kernel in kernels),
        busy_ms=total(intersect(busy, windows)) / steps,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.ms)),
    )


def _phase_of(event: Event, phases: Sequence[Event]) -> str:
    """The phase in which the host started it: a GPU may run it when the host is in the next already."""
    moment = event.start_ms if event.launched_ms is None else event.launched_ms
    for phase in phases:
        if phase.start_ms <= moment <= phase.end_ms:
            return phase.name.removeprefix("distlab:")
    return OUTSIDE
