"""Memory over time: what was allocated when, for what, and by whom.

`record_memory` runs one training step under torch.profiler with its memory events, which the allocators of the CPU
and of CUDA write alike, and notes at three moments which addresses belong to parameters, gradients and optimizer
state. `memory_timeline` makes an account of it, in which every byte has one of these categories:

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

`allocator_history` writes torch's own snapshot besides, for the public viewer (pytorch.org/memory_viz).
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function

from distlab.measure.trace.capture import PHASES, STEP, Phases, activities_on
from distlab.measure.trace.kernels import OUTSIDE, readable

CATEGORIES = ("before", "parameters", "optimizer state", "gradients", "activations", "temporary")
MAX_ENTRIES = 100_000  # events of the allocator's history: some tens of MB
_RANGE_PREFIX = "distlab:"


class Allocation(NamedTuple):
    """One block of memory.

    Attributes:
        bytes: of the block.
        start_ms, end_ms: when it was allocated and freed, from the step's start; clipped to the step.
        category: one of `CATEGORIES`.
        phase: in which it was allocated: forward, backward, optimizer, outside, or before.
        origin: the innermost named range and the operator that asked for it, ``"blocks.3.attention/rope: aten::mul"``.
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
        """Times of all changes in ms, and per category the bytes held from each on (a staircase)."""
        changes: dict[float, dict[str, int]] = {0.0: {}}
        for block in self.allocations:
            for moment, sign in ((block.start_ms, 1), (block.end_ms, -1)):
                if moment < self.step_ms or sign > 0:
                    at = changes.setdefault(moment, {})
                    at[block.category] = at.get(block.category, 0) + sign * block.bytes
        times = sorted(changes)
        held, curves = dict.fromkeys(CATEGORIES, 0), {name: [] for name in CATEGORIES}
        for moment in times:
            for name, change in changes[moment].items():
                held[name] += change
            for name in CATEGORIES:
                curves[name].append(held[name])
        return times, curves

    def peak(self) -> tuple[float, dict[str, int]]:
        """The moment (ms) at which most is held, and how much of each category then."""
        times, curves = self.curves()
        totals = [sum(values) for values in zip(*curves.values(), strict=True)]
        at = max(range(len(times)), key=totals.__getitem__)
        return times[at], {name: values[at] for name, values in curves.items()}

    def largest(self, count: int, *, at_peak: bool = False) -> list[Allocation]:
        """The largest blocks of the step, those of before left out; only those held at the peak if asked."""
        moment = self.peak()[0] if at_peak else None
        mine = [
            block
            for block in self.allocations
            if block.phase != "before" and (moment is None or block.start_ms <= moment < block.end_ms)
        ]
        return sorted(mine, key=lambda block: -block.bytes)[:count]


@dataclass
class Holdings:
    """Who holds which address at three moments of a step: address → (bytes, category)."""

    start: dict[int, tuple[int, str]] = field(default_factory=dict)
    after_backward: dict[int, tuple[int, str]] = field(default_factory=dict)
    end: dict[int, tuple[int, str]] = field(default_factory=dict)


def record_memory(
    step: Callable[[Callable[[str], None]], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike,
    device: torch.device | str,
) -> Holdings:
    """Run ``step(mark)`` once under the profiler, write its trace with memory events to ``path``.

    Args:
        step: one training step that begins without gradients; calls ``mark("forward")``, ``mark("backward")`` and
            ``mark("optimizer")`` as each phase ends.
        path: of a ``.json``.

    Returns:
        what `memory_timeline` needs besides the trace.
    """
    on_cuda = torch.device(device).type == "cuda"
    state = _addresses(_state(optimizer), "optimizer state")
    held = Holdings(start=state | _addresses(_parameters(model, optimizer), "parameters"))
    phases = Phases()

    def mark(phase: str) -> None:
        phases.mark(phase)
        if phase == "backward":
            gradients = (p.grad for p in _parameters(model, optimizer) if p.grad is not None)
            held.after_backward = _addresses(gradients, "gradients")

    with profile(activities=activities_on(device), profile_memory=True, acc_events=True) as profiler:
        with record_function(STEP), phases.step():
            step(mark)
        if on_cuda:
            torch.cuda.synchronize(device)
    held.end = _addresses(_state(optimizer), "optimizer state")
    profiler.export_chrome_trace(str(path))
    return held


def memory_timeline(path: str | os.PathLike, held: Holdings, device: torch.device | str) -> MemoryTimeline:
    """The account of the step that `record_memory` ran.

    Raises:
        ValueError: the file holds no memory events of this kind of device, or no ``distlab:step``.
    """
    data = Path(path).read_bytes()
    events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    wanted = 1 if torch.device(device).type == "cuda" else 0  # c10::DeviceType
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == wanted]
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
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
    buckets = {address: block for address, block in held.after_backward.items() if address not in allocated}
    held = Holdings(buckets | held.start, held.after_backward, held.end)
    origin_of = _Origins(spans)
    blocks = []
    for event, address, size, start, end in _lifetimes(changes, held, begin, length):
        if event is None:
            category = held.start[address][1] if address in held.start else "before"
            blocks.append(Allocation(size, 0.0, end, category, "before", "held before the step"))
            continue
        phase = next((name for name, (low, high) in moments.items() if low <= start <= high), OUTSIDE)
        category = _category(address, start, end, moments, phase, held, length)
        blocks.append(Allocation(size, start, end, category, phase, origin_of(event)))
    blocks.sort(key=lambda block: block.start_ms)
    return MemoryTimeline(tuple(blocks), length, moments)


def _lifetimes(
    changes: Sequence[dict[str, Any]], held: Holdings, begin: float, length: float
) -> Iterator[tuple[dict[str, Any] | None, int, int, float, float]]:
    """(event of the allocation, address, bytes, start, end) of every block; the event is None for what was there."""
    open_blocks: dict[int, tuple[dict[str, Any] | None, int, float]] = {
        address: (None, size, 0.0) for address, (size, _) in held.start.items()
    }
    known = sum(size for size, _ in held.start.values())
    unknown_freed = 0
    for event in changes:
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        moment = min(max((event["ts"] - begin) / 1e3, 0.0), length)
        if size > 0:
            if (
                address in open_blocks
            ):  # its end was not seen: the CPU's allocator reports no free of older blocks
                first, bytes_, start = open_blocks.pop(address)
                yield first, address, bytes_, start, moment
            open_blocks[address] = (event, size, moment)
        elif address in open_blocks:
            first, bytes_, start = open_blocks.pop(address)
            yield first, address, bytes_, start, moment
        else:
            unknown_freed -= size
            yield None, address, -size, 0.0, moment
    # What CUDA's allocator held before the first event, beyond what is known by address. The CPU's counts from zero.
    first = changes[0]["args"]
    if first["Device Type"] == 1:
        rest = first["Total Allocated"] - first["Bytes"] - known - unknown_freed
        if rest > 0:
            yield None, -1, rest, 0.0, length
    for address, (event, size, start) in open_blocks.items():
        yield event, address, size, start, length


def _category(
    address: int,
    start: float,
    end: float,
    moments: Mapping[str, tuple[float, float]],
    phase: str,
    held: Holdings,
    length: float,
) -> str:
    """What a block that the step allocated is for; an address counts for the block that holds it at the moment."""
    ends = {name: moments[name][1] for name in moments}
    if address in held.after_backward and "backward" in ends and start <= ends["backward"] <= end:
        return "gradients"
    if address in held.end and end >= length:
        return "optimizer state"
    if phase == "forward" and end > ends["forward"]:
        return "activations"
    return "temporary"


class _Origins:
    """Finds the operator and the named range around a moment on a thread."""

    def __init__(self, spans: Iterable[dict[str, Any]]) -> None:
        threads: dict[Any, list[dict[str, Any]]] = {}
        for span in spans:
            threads.setdefault(span["tid"], []).append(span)
        self._threads = {}
        for thread, mine in threads.items():
            mine.sort(key=lambda span: (span["ts"], -span["dur"]))
            parents: list[int] = []
            stack: list[int] = []
            for index, span in enumerate(mine):
                while stack and mine[stack[-1]]["ts"] + mine[stack[-1]]["dur"] < span["ts"]:
                    stack.pop()
                parents.append(stack[-1] if stack else -1)
                stack.append(index)
            self._threads[thread] = (mine, parents, [span["ts"] for span in mine])

    def __call__(self, event: dict[str, Any]) -> str:
        mine, parents, starts = self._threads.get(event["tid"], ([], [], []))
        index = bisect.bisect_right(starts, event["ts"]) - 1
        operator, part = "", ""
        while index >= 0:
            span = mine[index]
            if span["ts"] + span["dur"] >= event["ts"]:
                if span["cat"] == "user_annotation" and not span["name"].startswith(_RANGE_PREFIX):
                    part = part or span["name"]
                elif span["cat"] == "cpu_op" and "::empty" not in span["name"]:
                    operator = operator or readable(span["name"])
            index = parents[index]
        return ": ".join(text for text in (part, operator) if text) or "unknown"


def _addresses(tensors: Iterable[Tensor], kind: str) -> dict[int, tuple[int, str]]:
    """Address of each tensor's storage → (bytes, category)."""
    found = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = (storage.nbytes(), kind)
    return found


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from model.parameters()
    for group in optimizer.param_groups:
        yield from group["params"]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Tensors of the optimizer's state, of the inner one where torch's ZeroRedundancyOptimizer hides it."""
    for values in getattr(optimizer, "optim", optimizer).state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


@contextmanager
def allocator_history(path: str | os.PathLike, max_entries: int = MAX_ENTRIES) -> Iterator[None]:
    """Write the CUDA allocator's history of the block to ``path``, a pickle for pytorch.org/memory_viz.

    Args:
        max_entries: the last so many allocations and frees are kept, which bounds the file.

    Raises:
        ValueError: no CUDA device, or ``max_entries`` below one.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "the allocator's history needs a CUDA device and there is none; the picture needs none"
        )
    if max_entries < 1:
        raise ValueError(f"max_entries={max_entries}: keep at least one")
    # Python's stacks alone: those of C++ are most of the bytes, and resolving them takes minutes.
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
