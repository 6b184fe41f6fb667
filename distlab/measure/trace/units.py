"""A step unit by unit: how long forward and backward of each block took, and what of that was no compute.

`annotate_units` writes a mark into the trace where forward enters a unit (a child of an `nn.ModuleList`, or a module
outside of these that has parameters of its own) and where backward reaches its output. `unit_times` cuts the step at
the marks: on a GPU where the first kernel begins that the host launched after a mark. So the parts add up to the step;
what happens between two marks (waiting for a unit's parameters, recomputing it) is the unit's.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from distlab.measure.collectives import tensors_in
from distlab.measure.trace.account import account, host_range, main_lane, median_step
from distlab.measure.trace.capture import OPTIMIZER, Event

UNIT = "distlab:unit "


def units(model: nn.Module, path: tuple[str, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """The units with their names, without what wrappers add to these; what is compiled is not entered."""
    for name, child in model.named_children():
        here = (*path, name)
        if isinstance(model, nn.ModuleList) or any(True for _ in child.parameters(recurse=False)):
            yield ".".join(word for word in here if word != "module"), child
        elif name != "_orig_mod":
            yield from units(child, here)


def annotate_units(model: nn.Module) -> list[RemovableHandle]:
    """Mark in the trace where forward and backward enter each unit, until the handles are removed.

    A forward inside of backward, which recomputes, is not marked.
    """

    def in_forward() -> bool:
        return torch._C._current_graph_task_id() == -1

    def mark(text: str) -> None:
        with record_function(UNIT + text):
            pass

    def before(name: str) -> None:
        if in_forward():
            mark(f"forward {name}")

    def after(name: str, output: object) -> None:
        if in_forward():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: mark(f"backward {name}"))

    handles = []
    for name, unit in units(model):
        handles += [
            unit.register_forward_pre_hook(lambda *_, name=name: before(name), prepend=True),
            unit.register_forward_hook(lambda _, inputs, output, name=name: after(name, output)),
        ]
    return handles


def unit_times(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Unit, and `optimizer` → what the median step spent on it, in the order of forward; together they are the step.

    Of each, `forward_ms` and `backward_ms` (or `optimizer_ms`) in which something computed, `exposed_ms` of
    communication that no compute covers, `copy_ms` and `idle_ms`.

    Raises:
        ValueError: no step in the trace, or no marks in the step.
    """
    window = median_step(events)
    host = host_range(events, window)
    marks = [
        (event.start_ms, "optimizer optimizer" if event.name == OPTIMIZER else event.name.removeprefix(UNIT))
        for event in sorted((e for e in events if e.kind == "range"), key=lambda e: e.start_ms)
        if host[0] <= event.start_ms < host[1] and (event.name.startswith(UNIT) or event.name == OPTIMIZER)
    ]
    if not marks:
        raise ValueError("the step has no marks of units: call annotate_units before it is profiled")
    moments, lane = [at for at, _ in marks], main_lane(events)
    begins = dict(enumerate(moments)) if lane is None else {}  # on the device, of what follows each mark
    for event in events if lane is not None else ():
        if event.lane == lane and event.launched_ms is not None and host[0] <= event.launched_ms <= host[1]:
            number = max(bisect_right(moments, event.launched_ms) - 1, 0)
            begins[number] = min(event.start_ms, begins.get(number, event.start_ms))
    numbers = sorted(begins)
    edges = [window[0], *(begins[number] for number in numbers[1:]), window[1]]
    inside = [event for event in events if event.start_ms < window[1] and event.end_ms > window[0]]
    found: dict[str, dict[str, float]] = {}
    for number, (start, end) in zip(numbers, itertools.pairwise(edges), strict=True):
        if start < end:
            phase, _, unit = marks[number][1].partition(" ")
            part = account([e for e in inside if e.start_ms < end and e.end_ms > start], (start, end))
            times = found.setdefault(unit, {})
            for name, ms in (
                (f"{phase}_ms", part.compute_ms), ("exposed_ms", part.exposed_ms), ("copy_ms", part.copy_ms),
                ("idle_ms", part.idle_ms),
            ):  # fmt: skip
                times[name] = times.get(name, 0.0) + ms
    return found
