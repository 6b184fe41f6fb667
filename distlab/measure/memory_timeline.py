"""Memory over time: each allocation with its time, its purpose and its origin.

`record_memory` runs one training step under torch.profiler with its memory events, which the
allocators of the CPU and of CUDA write alike, and notes at three moments which addresses belong to
parameters, gradients and optimizer state. `memory_timeline` makes an account of it, in which every
byte has one of these categories:

``parameters``, ``optimizer state``
    held when the step begins, or found in the optimizer's state when it ends;
``gradients``
    ``.grad`` of a parameter when backward ends;
``activations``
    allocated in forward and still held when it ends: what backward needs, and the result;
``temporary``
    everything else that the step allocates;
``before``
    what was held when the step began and is none of these: the batch, buckets, workspaces.

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
    Entry,
    Phases,
    read_trace_file,
    recording_trace,
)
from distlab.measure.trace.kernels import OUTSIDE, readable

CATEGORIES = ("before", "parameters", "optimizer state", "gradients", "activations", "temporary")
MAX_ENTRIES = 100_000  # events of the allocator's history: some tens of MB
_RANGE_PREFIX = "distlab:"
_MEMORY = "[memory]"

Addresses = dict[int, tuple[int, str]]  # address → (bytes, category)


class Allocation(NamedTuple):
    """One block of memory.

    Attributes:
        bytes: size of the block.
        start_ms, end_ms: ms from the step's start to its allocation and its release, clipped to the
            step.
        category: name in `CATEGORIES`.
        phase: phase of its allocation: forward, backward, optimizer, outside, or before.
        origin: innermost named range, and the operator that asked for it,
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
    """The account of one step.

    Attributes:
        allocations: by start.
        step_ms: length of the step.
        phases: name → (start, end) in ms.
    """

    allocations: tuple[Allocation, ...]
    step_ms: float
    phases: Mapping[str, tuple[float, float]]

    def curves(self) -> tuple[list[float], dict[str, list[int]]]:
        """Return times of all changes in ms, and for each category the bytes held from then on."""
        changes = defaultdict(Counter, {0.0: Counter()})
        for block in self.allocations:
            changes[block.start_ms][block.category] += block.bytes
            if block.end_ms < self.step_ms:
                changes[block.end_ms][block.category] -= block.bytes
        times = sorted(changes)
        return times, {
            name: list(accumulate(changes[at][name] for at in times)) for name in CATEGORIES
        }

    def peak(self) -> tuple[float, dict[str, int]]:
        """Return the moment (ms) at which most is held, and how much of each category then."""
        times, curves = self.curves()
        totals = [sum(values) for values in zip(*curves.values(), strict=True)]
        at = max(range(len(times)), key=totals.__getitem__)
        return times[at], {name: values[at] for name, values in curves.items()}

    def largest(self, count: int) -> list[Allocation]:
        """Return the largest blocks that are held at the peak, those of before left out."""
        moment = self.peak()[0]
        mine = [
            b for b in self.allocations if b.phase != "before" and b.start_ms <= moment < b.end_ms
        ]
        return sorted(mine, key=lambda block: -block.bytes)[:count]


@dataclass
class Holdings:
    """Addresses held at three moments of a step: address → (bytes, category)."""

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
    """Run ``step(mark)`` once under the profiler, write its trace with memory events to ``path``.

    Args:
        step: one training step that begins without gradients; calls ``mark("forward")``,
            ``mark("backward")`` and ``mark("optimizer")`` as each phase ends.
        path: path of a ``.json`` file.

    Returns:
            the holdings, which `memory_timeline` needs in addition to the trace.
    """
    state = _addresses(_state(optimizer), "optimizer state")
    held = Holdings(start=state | _addresses(parameters_of(model, optimizer), "parameters"))
    phases = Phases()

    def mark(phase: str) -> None:
        phases.mark(phase)
        if phase == "backward":
            gradients = (p.grad for p in parameters_of(model, optimizer) if p.grad is not None)
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

    Raises:
        ValueError: the file holds no memory events of this kind of device, or no ``distlab:step``.
    """
    events = read_trace_file(path)["traceEvents"]
    wanted = 1 if torch.device(device).type == "cuda" else 0  # c10::DeviceType
    changes = [
        e for e in events if e.get("name") == _MEMORY and e["args"].get("Device Type") == wanted
    ]
    spans = [
        e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")
    ]
    steps = [e for e in spans if e["name"] == STEP]
    if not changes or not steps:
        raise ValueError(
            f"{path} holds no memory events of a step on {torch.device(device).type}: record it again"
        )
    begin, length = steps[0]["ts"], steps[0]["dur"] / 1e3
    changes.sort(key=lambda event: event["ts"])
    moments = {
        name: ((e["ts"] - begin) / 1e3, (e["ts"] + e["dur"] - begin) / 1e3)
        for e in spans
        for name in PHASES
        if e["name"] == _RANGE_PREFIX + name
    }
    # Gradients that are views of buckets lie in memory that was there before.
    allocated = {event["args"]["Addr"] for event in changes if event["args"]["Bytes"] > 0}
    buckets = {
        address: block for address, block in held.after_backward.items() if address not in allocated
    }
    held = Holdings(buckets | held.start, held.after_backward, held.end)
    origins = _origins(spans, changes)
    blocks = []
    for event, address, size, start, end in _lifetimes(changes, held, begin, length):
        if event is None:
            category = held.start[address][1] if address in held.start else "before"
            blocks.append(Allocation(size, 0.0, end, category, "before", "held before the step"))
            continue
        phase = next(
            (name for name, (low, high) in moments.items() if low <= start <= high), OUTSIDE
        )
        # An address counts for the block that holds it at the moment.
        backward_end = moments.get("backward", (0.0, -1.0))[1]
        if address in held.after_backward and start <= backward_end <= end:
            category = "gradients"
        elif address in held.end and end >= length:
            category = "optimizer state"
        else:
            category = (
                "activations" if phase == "forward" and end > moments["forward"][1] else "temporary"
            )
        blocks.append(Allocation(size, start, end, category, phase, origins[id(event)]))
    blocks.sort(key=lambda block: block.start_ms)
    return MemoryTimeline(tuple(blocks), length, moments)


def _lifetimes(
    changes: Sequence[Entry], held: Holdings, begin: float, length: float
) -> Iterator[tuple[Entry | None, int, int, float, float]]:
    """Yield (event of the allocation, address, bytes, start, end) of every block.

    The event is None for blocks from before the step.
    """
    open_blocks: dict[int, tuple[Entry | None, int, float]] = {
        address: (None, size, 0.0) for address, (size, _) in held.start.items()
    }
    known = sum(size for size, _ in held.start.values())
    unknown_freed = 0
    for event in changes:
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        moment = min(max((event["ts"] - begin) / 1e3, 0.0), length)
        # freed, or unseen: the CPU's allocator reports no free of older blocks
        if address in open_blocks:
            first, bytes_, start = open_blocks.pop(address)
            yield first, address, bytes_, start, moment
        elif size <= 0:
            unknown_freed -= size
            yield None, address, -size, 0.0, moment
        if size > 0:
            open_blocks[address] = (event, size, moment)
    # What CUDA's allocator held before the first event, beyond what is known by address. The CPU's
    # counts from zero.
    first = changes[0]["args"]
    if first["Device Type"] == 1:
        rest = first["Total Allocated"] - first["Bytes"] - known - unknown_freed
        if rest > 0:
            yield None, -1, rest, 0.0, length
    for address, (event, size, start) in open_blocks.items():
        yield event, address, size, start, length


def _origins(spans: Iterable[Entry], allocations: Iterable[Entry]) -> dict[int, str]:
    """Return id of an allocation's event → innermost named range and operator on its thread."""
    origins = {}
    inside = defaultdict(list)  # per thread, the spans that are open
    for event in sorted(
        [*spans, *allocations], key=lambda e: (e["ts"], e["name"] == _MEMORY, -e.get("dur", 0))
    ):
        stack = inside[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] < event["ts"]:
            stack.pop()
        if event["name"] != _MEMORY:
            stack.append(event)
            continue
        around = [span for span in reversed(stack) if span["ts"] + span["dur"] >= event["ts"]]
        names = [
            [s["name"] for s in around if s["cat"] == kind]
            for kind in ("user_annotation", "cpu_op")
        ]
        parts = [name for name in names[0] if not name.startswith(_RANGE_PREFIX)]
        operators = [readable(name) for name in names[1] if "::empty" not in name]
        origins[id(event)] = ": ".join([*parts[:1], *operators[:1]]) or "unknown"
    return origins


def _addresses(tensors: Iterable[Tensor], kind: str) -> Addresses:
    """Address of each tensor's storage → (bytes, category)."""
    return {address: (size, kind) for address, size in storage_bytes(tensors).items()}


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer's state.

    torch's ZeroRedundancyOptimizer hides it in a local optimizer.
    """
    for values in getattr(optimizer, "optim", optimizer).state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


@contextmanager
def allocator_history(path: AnyPath, max_entries: int = MAX_ENTRIES) -> Iterator[None]:
    """Write the history of the CUDA allocator in the block to ``path``.

    The file is a pickle for pytorch.org/memory_viz.

    Args:
        max_entries: number of allocations and frees to keep, the last ones, which bounds the file.
    """
    # Python's stacks alone: those of C++ are most of the bytes, and resolving them takes minutes.
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
