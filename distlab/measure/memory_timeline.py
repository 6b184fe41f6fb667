"""Memory over time: each allocation with its time, its purpose and its origin.

`record_memory` runs one training step under torch.profiler with its memory events, which the
allocators of the CPU and of CUDA write in the same form. At three moments it also notes which
addresses belong to parameters, gradients and optimizer state. `memory_timeline` turns both into an
account, in which every byte has one of these categories:

``parameters``, ``optimizer state``
    held when the step begins, or found in the optimizer's state when it ends;
``gradients``
    ``.grad`` of a parameter when backward ends;
``activations``
    allocated in forward and still held when it ends: tensors that backward needs, and the result;
``temporary``
    everything else that the step allocates;
``before``
    held when the step began, and none of these: the batch, buckets, workspaces.

`allocator_history` also writes torch's own snapshot, for the public viewer
(pytorch.org/memory_viz).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from distlab.files import AnyPath
from distlab.measure.clock import Device, synchronize
from distlab.measure.memory import parameters_of, storage_bytes
from distlab.measure.trace.capture import (
    PHASES,
    STEP,
    Phases,
    recording_trace,
)
from distlab.measure.trace.kernels import OUTSIDE, readable
from distlab.measure.trace.stream import Entry, entries

CATEGORIES = ("before", "parameters", "optimizer state", "gradients", "activations", "temporary")
MAX_ENTRIES = 100_000  # events of the allocator's history: some tens of MB
_RANGE_PREFIX = "distlab:"
_MEMORY = "[memory]"  # name of torch.profiler's events of allocations and frees
_CPU, _CUDA = 0, 1  # c10::DeviceType, as memory events contain it

Addresses = dict[int, tuple[int, str]]  # address → (bytes, category)


class Allocation(NamedTuple):
    """One block of memory.

    Attributes:
        bytes: size of the block.
        start_ms, end_ms: ms from the step's start to its allocation and to its release, clipped to
            the step.
        category: name in `CATEGORIES`.
        phase: phase of its allocation: forward, backward, optimizer, outside, or before.
        origin: names of the innermost range and of the operator that allocated it, such as
            ``"blocks.3.attention/rope: aten::mul"``.
    """

    bytes: int
    start_ms: float
    end_ms: float
    category: str
    phase: str
    origin: str


@dataclass(frozen=True)
class MemoryTimeline:
    """Account of the memory of one step.

    Attributes:
        allocations: blocks of memory, by start.
        step_ms: ms of the step.
        phases: name → (start, end) in ms from the step's start.
    """

    allocations: tuple[Allocation, ...]
    step_ms: float
    phases: Mapping[str, tuple[float, float]]

    def curves(self) -> tuple[list[float], dict[str, list[int]]]:
        """Return times of all changes in ms, and for each category the bytes held from then on."""
        changes = defaultdict(Counter)  # ms → category → bytes that are added or released then
        changes[0.0] = Counter()
        for block in self.allocations:
            changes[block.start_ms][block.category] += block.bytes
            # A block that outlives the step is clipped to its end, and is not released there.
            if block.end_ms < self.step_ms:
                changes[block.end_ms][block.category] -= block.bytes
        times = sorted(changes)
        curves = {}
        for category in CATEGORIES:
            curves[category] = list(accumulate(changes[time][category] for time in times))
        return times, curves

    def peak(self) -> tuple[float, dict[str, int]]:
        """Return the time of the peak in ms, and the bytes of each category then."""
        times, curves = self.curves()
        totals = [sum(values) for values in zip(*curves.values(), strict=True)]
        peak = totals.index(max(totals))
        return times[peak], {category: values[peak] for category, values in curves.items()}

    def largest(self, count: int) -> list[Allocation]:
        """Return the `count` largest blocks that the step allocated and holds at the peak."""
        peak_ms, _ = self.peak()
        held = []
        for block in self.allocations:
            if block.phase != "before" and block.start_ms <= peak_ms < block.end_ms:
                held.append(block)
        return sorted(held, key=lambda block: -block.bytes)[:count]


@dataclass
class Holdings:
    """Addresses of tensors at three moments of a step: address → (bytes, category).

    Attributes:
        start: parameters and optimizer state when the step begins.
        after_backward: gradients when backward ends.
        end: optimizer state when the step ends.
    """

    start: Addresses = field(default_factory=dict)
    after_backward: Addresses = field(default_factory=dict)
    end: Addresses = field(default_factory=dict)


def record_memory(
    step: Callable[[Callable[[str], None]], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: AnyPath,
    device: Device,
) -> Holdings:
    """Run ``step(mark)`` once under the profiler, and write its trace with memory events.

    Args:
        step: function of one training step that begins without gradients. It calls
            ``mark("forward")``, ``mark("backward")`` and ``mark("optimizer")`` as each phase ends.
        model: model, or a strategy's wrapper around one.
        optimizer: optimizer that the step calls.
        path: path of a ``.json`` file.
        device: device whose activities are recorded.

    Returns:
        The holdings, which `memory_timeline` needs in addition to the trace.
    """
    state = _addresses(_state(optimizer), "optimizer state")
    parameters = _addresses(parameters_of(model, optimizer), "parameters")
    held = Holdings(start=state | parameters)
    phases = Phases()

    def mark(phase: str) -> None:
        phases.mark(phase)
        if phase == "backward":
            gradients = (p.grad for p in parameters_of(model, optimizer) if p.grad is not None)
            # Now, because the optimizer's step may free gradients and reuse their addresses.
            held.after_backward = _addresses(gradients, "gradients")

    with recording_trace(device, memory=True) as profiler:
        with record_function(STEP), phases.step():
            step(mark)
        synchronize(device)
    held.end = _addresses(_state(optimizer), "optimizer state")
    profiler.export_chrome_trace(str(path))
    return held


def memory_timeline(path: AnyPath, held: Holdings, device: Device) -> MemoryTimeline:
    """Return the account of the step that `record_memory` ran.

    Args:
        path: path of the trace that `record_memory` wrote.
        held: holdings that `record_memory` returned.
        device: device whose memory to account for.

    Raises:
        ValueError: the file holds no memory events of this kind of device, or no ``distlab:step``.
    """
    device_type = torch.device(device).type
    wanted = _CUDA if device_type == "cuda" else _CPU
    changes = []  # allocations and frees of this kind of device
    spans = []  # operators and named ranges
    for event in entries(path):
        if event.get("name") == _MEMORY and event["args"].get("Device Type") == wanted:
            changes.append(event)
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            spans.append(event)
    steps = [span for span in spans if span["name"] == STEP]
    if not changes or not steps:
        raise ValueError(
            f"{path} holds no memory events of a step on {device_type}: record it again"
        )
    changes.sort(key=lambda event: event["ts"])
    begin_us = steps[0]["ts"]
    step_ms = steps[0]["dur"] / 1e3

    phases = _phase_windows(spans, begin_us)
    held = _with_buckets(held, changes)
    origins = _origins(spans, changes)
    allocations = []
    for block in _lifetimes(changes, held, begin_us, step_ms):
        if block.event is None:
            category, phase, origin = "before", "before", "held before the step"
            if block.address in held.start:
                _, category = held.start[block.address]
        else:
            phase = _phase_at(block.start_ms, phases)
            category = _category(block, phase, held, phases, step_ms)
            origin = origins[id(block.event)]
        allocation = Allocation(
            bytes=block.bytes,
            start_ms=block.start_ms,
            end_ms=block.end_ms,
            category=category,
            phase=phase,
            origin=origin,
        )
        allocations.append(allocation)
    allocations.sort(key=lambda allocation: allocation.start_ms)
    return MemoryTimeline(allocations=tuple(allocations), step_ms=step_ms, phases=phases)


class _Block(NamedTuple):
    """Lifetime of one block of memory.

    Attributes:
        event: event of its allocation. None for a block from before the step.
        address: address. -1 for memory that is known only as a number of bytes.
        bytes: size.
        start_ms, end_ms: ms from the step's start, clipped to the step.
    """

    event: Entry | None
    address: int
    bytes: int
    start_ms: float
    end_ms: float


def _phase_windows(spans: Iterable[Entry], begin_us: float) -> dict[str, tuple[float, float]]:
    """Return phase → (start, end) in ms from the step's start."""
    windows = {}
    for span in spans:
        phase = span["name"].removeprefix(_RANGE_PREFIX)
        if span["name"].startswith(_RANGE_PREFIX) and phase in PHASES:
            start_ms = (span["ts"] - begin_us) / 1e3
            end_ms = (_end_us(span) - begin_us) / 1e3
            windows[phase] = (start_ms, end_ms)
    return windows


def _phase_at(moment_ms: float, phases: Mapping[str, tuple[float, float]]) -> str:
    """Return the phase that runs at a time."""
    for phase, (start, end) in phases.items():
        if start <= moment_ms <= end:
            return phase
    return OUTSIDE


def _with_buckets(held: Holdings, changes: Iterable[Entry]) -> Holdings:
    """Add the buckets of a strategy to what is held from the start.

    Gradients that are views of buckets are stored in memory from before the step: the step never
    allocates their address.
    """
    allocated = {event["args"]["Addr"] for event in changes if event["args"]["Bytes"] > 0}
    buckets = {}
    for address, block in held.after_backward.items():
        if address not in allocated:
            buckets[address] = block
    return Holdings(
        start=buckets | held.start,
        after_backward=held.after_backward,
        end=held.end,
    )


def _category(
    block: _Block,
    phase: str,
    held: Holdings,
    phases: Mapping[str, tuple[float, float]],
    step_ms: float,
) -> str:
    """Return the category of a block that the step allocated, in `phase`."""
    # The allocator uses an address again and again. The gradient is the block that holds the
    # address at the moment at which it was noted.
    _, backward_end = phases.get("backward", (0.0, -1.0))
    held_after_backward = block.start_ms <= backward_end <= block.end_ms
    if block.address in held.after_backward and held_after_backward:
        return "gradients"
    if block.address in held.end and block.end_ms >= step_ms:
        return "optimizer state"
    if phase == "forward":
        _, forward_end = phases["forward"]
        if block.end_ms > forward_end:
            return "activations"
    return "temporary"


def _lifetimes(
    changes: Sequence[Entry], held: Holdings, begin_us: float, step_ms: float
) -> Iterator[_Block]:
    """Yield every block of memory that is held at some time in the step.

    Args:
        changes: allocations (positive bytes) and frees (negative bytes), by time.
        held: addresses that are known.
        begin_us: time of the step's start in the trace.
        step_ms: ms of the step.
    """
    open_blocks: dict[int, tuple[Entry | None, int, float]] = {}  # address → event, bytes, start
    known_bytes = 0
    for address, (size, _) in held.start.items():
        open_blocks[address] = (None, size, 0.0)
        known_bytes += size
    unknown_freed_bytes = 0
    for event in changes:
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        # Trace times are in µs.
        moment = min(max((event["ts"] - begin_us) / 1e3, 0.0), step_ms)
        if address in open_blocks:
            # Either it is freed, or it was freed before without an event (the CPU's allocator
            # reports no free of blocks from before the recording) and is now allocated again.
            first_event, first_size, start = open_blocks.pop(address)
            yield _Block(first_event, address, first_size, start, moment)
        elif size <= 0:
            # It frees a block from before the step that we do not know.
            unknown_freed_bytes -= size
            yield _Block(None, address, -size, 0.0, moment)
        if size > 0:
            open_blocks[address] = (event, size, moment)
    # CUDA's events contain the total of the process. What it held before the first event, beyond
    # the blocks above, stays until the end. The CPU's allocator counts from zero.
    first = changes[0]["args"]
    if first["Device Type"] == _CUDA:
        held_before = first["Total Allocated"] - first["Bytes"]
        rest = held_before - known_bytes - unknown_freed_bytes
        if rest > 0:
            yield _Block(None, -1, rest, 0.0, step_ms)
    for address, (event, size, start) in open_blocks.items():
        yield _Block(event, address, size, start, step_ms)


def _origins(spans: Iterable[Entry], changes: Iterable[Entry]) -> dict[int, str]:
    """Return the origin of each memory event (`Allocation.origin`), by the event's `id()`."""

    def order(event: Entry) -> tuple[float, bool, float]:
        # At one time, a span comes before the memory events and the spans inside it.
        return event["ts"], event["name"] == _MEMORY, -event.get("dur", 0)

    origins = {}
    open_spans = defaultdict(list)  # thread → spans that run now, the innermost last
    for event in sorted([*spans, *changes], key=order):
        stack = open_spans[event["tid"]]
        while stack and _end_us(stack[-1]) < event["ts"]:
            stack.pop()
        if event["name"] == _MEMORY:
            # A span below the top of the stack may also have ended.
            around = [span for span in reversed(stack) if _end_us(span) >= event["ts"]]
            origins[id(event)] = _origin(around)
        else:
            stack.append(event)
    return origins


def _origin(around: Iterable[Entry]) -> str:
    """Return "range: operator" of the innermost of each. A part that is missing is left out.

    Args:
        around: spans around a memory event, the innermost first.
    """
    innermost_range = None
    innermost_operator = None
    for span in around:
        name = span["name"]
        if span["cat"] == "user_annotation":
            # Phases are known already (`Allocation.phase`).
            if innermost_range is None and not name.startswith(_RANGE_PREFIX):
                innermost_range = name
        # `aten::empty` allocates for the operator around it.
        elif innermost_operator is None and "::empty" not in name:
            innermost_operator = readable(name)
    parts = [part for part in (innermost_range, innermost_operator) if part is not None]
    return ": ".join(parts) or "unknown"


def _end_us(span: Entry) -> float:
    return span["ts"] + span["dur"]


def _addresses(tensors: Iterable[Tensor], category: str) -> Addresses:
    """Return the address of each tensor's storage → (bytes, category)."""
    return {address: (size, category) for address, size in storage_bytes(tensors).items()}


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer's state."""
    # torch's ZeroRedundancyOptimizer keeps its state in a local optimizer, `optim`.
    local = getattr(optimizer, "optim", optimizer)
    for values in local.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                yield value


@contextmanager
def allocator_history(path: AnyPath, max_entries: int = MAX_ENTRIES) -> Iterator[None]:
    """Write the history of the CUDA allocator in the block to ``path``.

    The file is a pickle for pytorch.org/memory_viz.

    Args:
        path: path of the pickle to write when the block ends.
        max_entries: number of allocations and frees to keep, the last ones, which bounds the file.
    """
    # Without C++ stacks: they are most of the bytes, and resolving them takes minutes.
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        # Recording costs time in every later allocation of this process.
        torch.cuda.memory._record_memory_history(enabled=None)
