"""Why is a step longer than the same step without communication? An account that must close.

Every moment of a step belongs to one part, the first that applies: the optimizer's compute, other compute,
communication that no compute covers, a copy, or nothing. The parts of two steps differ by as much as the steps do:

    exposed = uncovered communication + slow-down of compute + copies + optimizer + idle

*Slow-down* is what the kernels (operators, on a CPU) that both steps run take longer in the one that communicates,
because both use the same cores and memory. Kernels that run more or less often than without communication are extra
work and count as *copies*: gradients packed into buckets, scaled, unpacked. *Optimizer* is 0 but for strategies that
shard it, for which it is negative. All this happens under the profiler; held against the step times of the benchmark,
what stays unexplained is an error of the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distlab.measure.overlap import Interval, intersect, median_step, subtract, total, union
from distlab.measure.trace import OPTIMIZER, Event


@dataclass(frozen=True)
class StepAccount:
    """One step, in ms; the parts sum to ``step_ms``.

    Attributes:
        compute_ms: compute outside of the optimizer.
        optimizer_ms: compute of the optimizer.
        uncovered_comm_ms: communication beside which no compute ran.
        copy_ms: copies beside which neither ran.
        idle_ms: nothing ran.
        kernels: name → (how often, ms in sum) of the compute outside of the optimizer.
    """

    step_ms: float
    compute_ms: float
    optimizer_ms: float
    uncovered_comm_ms: float
    copy_ms: float
    idle_ms: float
    kernels: dict[str, tuple[int, float]]


@dataclass(frozen=True)
class Exposure:
    """What a step with communication takes longer than one without, by cause, in ms."""

    uncovered_comm_ms: float
    slowdown_ms: float
    copies_ms: float
    optimizer_ms: float
    idle_ms: float

    @property
    def explained_ms(self) -> float:
        """The sum: what the two profiled steps differ by."""
        return self.uncovered_comm_ms + self.slowdown_ms + self.copies_ms + self.optimizer_ms + self.idle_ms


def account(events: Sequence[Event], window: Interval | None = None) -> StepAccount:
    """Divide ``window``, by default the median step, among the parts.

    Raises ValueError if there is no step in the trace and no window is given.
    """
    window = median_step(events) if window is None else window
    updates = [(e.start_ms, e.end_ms) for e in events if e.name == OPTIMIZER]

    def inside(chosen: Sequence[Event]) -> list[Interval]:
        return intersect(((e.start_ms, e.end_ms) for e in chosen), [window])

    compute = [e for e in events if e.kind == "compute"]
    # On a GPU what counts is when the host launched it; on a CPU, when it ran.
    in_optimizer = [_belongs(event, updates) for event in compute]
    optimizer = inside([e for e, belongs in zip(compute, in_optimizer, strict=True) if belongs])
    others = [e for e, belongs in zip(compute, in_optimizer, strict=True) if not belongs]
    rest = subtract(inside(others), optimizer)
    comm = inside([e for e in events if e.kind == "communication"])
    copies = inside([e for e in events if e.kind == "copy"])
    uncovered = subtract(comm, union([*optimizer, *rest]))
    alone = subtract(copies, union([*optimizer, *rest, *comm]))
    kernels: dict[str, tuple[int, float]] = {}
    for event in others:
        if window[0] <= event.start_ms < window[1]:
            count, ms = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, ms + event.end_ms - event.start_ms
    parts = [total(part) for part in (rest, optimizer, uncovered, alone)]
    step = window[1] - window[0]
    return StepAccount(step, *parts, step - sum(parts), kernels)


def _belongs(event: Event, ranges: Sequence[Interval]) -> bool:
    moment = event.start_ms if event.launched_ms is None else event.launched_ms
    return any(start <= moment < end for start, end in ranges)


def explain(step: StepAccount, local: StepAccount) -> Exposure:
    """Where ``step``'s extra time against ``local``, the same without communication, comes from."""
    extra = 0.0
    for name in step.kernels.keys() | local.kernels.keys():
        count, ms = step.kernels.get(name, (0, 0.0))
        count_local, ms_local = local.kernels.get(name, (0, 0.0))
        if count != count_local:
            extra += ms - ms_local
    return Exposure(
        uncovered_comm_ms=step.uncovered_comm_ms - local.uncovered_comm_ms,
        slowdown_ms=step.compute_ms - local.compute_ms - extra,
        copies_ms=step.copy_ms - local.copy_ms + extra,
        optimizer_ms=step.optimizer_ms - local.optimizer_ms,
        idle_ms=step.idle_ms - local.idle_ms,
    )


def closes(unexplained_ms: float, step_ms: float, *, share: float = 0.05, least_ms: float = 1.0) -> bool:
    """Whether an account is good enough: within 5 % of the step, or 1 ms."""
    return abs(unexplained_ms) <= max(share * step_ms, least_ms)
