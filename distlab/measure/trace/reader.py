"""Read traces of torch.profiler: when each kernel and each collective of a step ran.

`load_trace` reads the file of any program into `Event`s, and `read_trace` also what explains them.
An event is one interval on one lane, and has one of four kinds:

``communication``
    On a GPU, kernels and copies of the libraries in `names`. On a CPU, gloo's ``gloo:*`` intervals
    (and those of MPI). Gloo's need care when they are read (measured with torch
    2.13: six 16 MB all-reduces in flight on two ranks):

    - An interval begins when one of the process group's two worker threads *starts executing* the
      collective, not when it is enqueued. The third of six began when the first had ended, and the
      intervals of one thread never overlap.
    - An interval ends with the collective. So up to two overlap, and share the wire. The busy time
      is the union of the intervals, not their sum (170 against 334 ms there).
    - Like an NCCL kernel, an interval contains waiting for a rank that comes late: 117 instead of
      15 ms when the other rank slept for 100 ms.
``compute``
    On a GPU, every other kernel. In a trace without GPU kernels: ``aten::`` operators, the C++
    nodes of autograd (``AddmmBackward0``) and compiled graphs, by wall clock. Operators inside a
    ``c10d`` operator or on a backend's own threads do not count. Neither does the rest of
    autograd's ``evaluate_function`` range: Python hooks run inside it, and a hook that waits for a
    collective would count as compute that covers this collective.
``copy``
    ``gpu_memcpy`` and ``gpu_memset``.
``range``
    Annotations named ``distlab:…`` (``distlab:step`` and the phases inside it), ``ProfilerStep#…``
    of torch.profiler's schedule, and ``Optimizer.step#…`` of torch's optimizers.


In addition, `read_trace` returns `HostSpan`s: what the host did while the device was idle.

The file is decoded event by event (`stream`). Meanwhile an event is a row of numbers in columns of
8 bytes, and names are stored once. This is why a file of 1 GB needs less memory than its size.
"""

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from distlab.files import AnyPath
from distlab.measure.trace.frames import FrameColumns, Frames
from distlab.measure.trace.intervals import Cover, Interval, subtract
from distlab.measure.trace.names import (
    CPU_BACKENDS,
    ITEM_BYTES,
    POINT_TO_POINT,
    gpu_pattern,
    operation_of,
)
from distlab.measure.trace.stream import Entry, Progress, entries

_CPU_COMPUTE = re.compile(r"aten::|\w+Backward\d+$|## Call CompiledFxGraph")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # torch.profiler's categories of work on a GPU
_RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")
_OLD_CATEGORIES = ("Kernel", "Operator", "Runtime")  # of torch's first versions with Kineto
# Operators of c10d that return only after a collective has, or that may.
_C10D = ("c10d::", "_c10d_functional::wait_tensor")
_LAUNCH = re.compile(r"^(cuda|cu|hip|ur|ze)\w*Launch")  # calls of a runtime that start a kernel
# Share of the busiest GPU's compute from which on another one has a part in the steps. Less comes
# from a call that did not say which GPU it means.
_STRAY_SHARE = 0.01
_RANGES = ("distlab:", "ProfilerStep#", "Optimizer.step#")
# Role of a host span → regular expression of its names.
_ROLES = {
    "synchronisation": r"^(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize",
    "item": r"^aten::(_local_scalar_dense|item|is_nonzero|nonzero)$",
    "loader": r"^enumerate\(DataLoader\)|_next_data\b|dataloader.py.*__next__",
    # Python's frames have the name of a built-in function without its module.
    "garbage collection": r"(^|[^a-z])gc([^a-z]|$)|garbage.?collect|^<built-in function collect>$",
    "backward": r"^autograd::engine::evaluate_function",
    "messages": r"^(FSDP|FullyShardedDataParallel|c10d|nccl)\b|^record_param_comms$",
}
_ROLE_PATTERNS = {role: re.compile(pattern) for role, pattern in _ROLES.items()}
_NONE = -1  # number that stands for an argument that an event does not have
_BLOCK = 1 << 16  # events whose columns are Python objects at the same time


class Collective(NamedTuple):
    """Facts about one communication. Each attribute is None if the trace does not have it.

    Attributes:
        operation: `all_reduce`, `all_gather`, … (`names.operation_of`).
        group: name and ranks of the process group.
        ranks: number of ranks in the group.
        size_bytes: bytes of the larger of input and output of one rank.
        sequence: number of the collective in its group, equal on all ranks.
    """

    operation: str
    group: str | None = None
    ranks: int | None = None
    size_bytes: int | None = None
    sequence: int | None = None


class Event(NamedTuple):
    """One interval on one lane. Times are in ms since the earliest event of its trace.

    Attributes:
        name: name of the kernel, operator, collective or range in the trace.
        kind: ``communication``, ``compute``, ``copy`` or ``range``.
        lane: a GPU stream or a CPU thread.
        start_ms, end_ms: ms at which it began and ended on its lane.
        launched_ms: ms at which the host launched work on a GPU. None elsewhere.
        operator: innermost operator that launched work on a GPU (``aten::mm``). None elsewhere, and
            if operators were not recorded.
        grid: size of the grid of a kernel, which tells calls of one kernel on different sizes
            apart. None elsewhere.
        collective: what a communication does, if the trace has it.
    """

    name: str
    kind: str
    lane: str
    start_ms: float
    end_ms: float
    launched_ms: float | None = None
    operator: str | None = None
    grid: tuple[int, ...] | None = None
    collective: Collective | None = None

    @property
    def on_host_ms(self) -> float:
        """Time in ms at which the host started or launched it.

        It tells to which phase an event belongs: work on a GPU may run when the host is already in
        the next phase.
        """
        if self.launched_ms is None:
            return self.start_ms
        return self.launched_ms


class HostSpan(NamedTuple):
    """One interval of the host that can explain why a device is idle.

    Attributes:
        role: ``synchronisation`` (the host waits for the device), ``item`` (it reads a value from
            the device), ``loader``, ``garbage collection``, ``backward`` or ``messages`` (it
            prepares and launches communication).
        name: name in the trace, for a synchronisation with the operator around it.
        start_ms, end_ms: ms since the earliest event of the trace.
    """

    role: str
    name: str
    start_ms: float
    end_ms: float


@dataclass
class Trace:
    """Content of one trace file.

    Attributes:
        path: path of the file that was read.
        events: events of the four kinds, by start.
        host: spans of the host, by start.
        on_gpu: True if the trace has kernels of a GPU.
        rank: rank that the file names, or None.
        device_name: name of the GPU, or None.
        frames: Python frames of the threads that launch work (without a GPU: that compute). None if
            the trace has none.
        notes: sentences about what was left out, or may be missing.
    """

    path: str
    events: list[Event]
    host: list[HostSpan]
    on_gpu: bool
    rank: int | None
    device_name: str | None
    frames: Frames | None
    notes: list[str] = field(default_factory=list)


def load_trace(path: AnyPath) -> list[Event]:
    """Load the events of a torch.profiler trace (``.json`` or ``.json.gz``), by start time.

    Events inside another of the same lane and kind are left out (``aten::mm`` in ``aten::addmm``).

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated, another tool wrote it, it holds the work of several processes
            or GPUs, or that of a GPU without its kernels. The message names the path.
    """
    return read_trace(path).events


def read_trace(
    path: AnyPath, communication: Sequence[str] = (), progress: Progress | None = None
) -> Trace:
    """Read a trace with what explains its events.

    Args:
        path: path of a file of torch.profiler, ``.json`` or ``.json.gz``.
        communication: further regular expressions for names of communication.
        progress: function that receives a sentence about how far the reader is.

    Raises: as `load_trace`.
    """
    columns = _Columns(gpu_pattern(communication), str(path))
    about: Entry = {}
    found = entries(path, progress, about)
    try:
        for entry in found:
            # ph "X" are complete events, which have a start `ts` and a duration `dur`.
            if entry.get("ph") == "X" and "cat" in entry:
                columns.add(entry)
        if "schemaVersion" not in about or "traceEvents" not in about:
            raise ValueError(
                f"{path} was not written by torch.profiler: no schemaVersion or no traceEvents in "
                "it"
            )
        known = about.get("distributedInfo") or {}
        devices = about.get("deviceProperties") or [{}]
        rank = _whole(known.get("rank", columns.rank))
        device_name = devices[0].get("name")
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{path} holds an event that torch.profiler does not write: {error!r}"
        ) from None
    notes = []
    if not columns.on_gpu:
        if columns.is_of_gpu():
            raise ValueError(
                f"{path} has calls of CUDA or NCCL, but no kernels: profile with "
                "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
            )
        if device_name is not None:
            notes.append(
                "the trace has no kernels, so operators on the CPU count as compute; if the model "
                "is on the GPU, profile with ProfilerActivity.CUDA"
            )
    events, host = columns.events(notes)
    return Trace(
        path=str(path),
        events=events,
        host=host,
        on_gpu=columns.on_gpu,
        rank=rank,
        device_name=device_name,
        frames=columns.frames(),
        notes=notes,
    )


def _whole(value: Any) -> int | None:
    """Return a whole number, also of its digits, or None for anything else."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) else None


class _Meaning(NamedTuple):
    """Facts that all events of one category and name have in common.

    Attributes:
        name: number of the name.
        kind: kind of `Event`. `c10d` for operators in which nothing counts as compute, None for
            events that are none.
        role: role of `HostSpan`, or None.
        on_gpu: True for work on a GPU.
        is_launch: True for calls of the runtime, which have a correlation.
        is_operator: True for operators, which have an external id.
    """

    name: int
    kind: str | None
    role: str | None
    on_gpu: bool
    is_launch: bool
    is_operator: bool


class _Columns:
    """Events of a file as columns of numbers, and the names that the numbers stand for.

    Args:
        pattern: expression for communication.
        path: path of the file, for errors.
    """

    def __init__(self, pattern: re.Pattern[str], path: str) -> None:
        self._path = path
        self.on_gpu = False
        self.rank: int | None = None
        self._origin_us = math.inf
        self._pattern = pattern
        self._names: list[str] = []
        self._meanings: list[_Meaning] = []
        self._meaning_of: dict[tuple[str, str], int | None] = {}
        # (process, thread) or (GPU, stream) → number. Streams of two GPUs have equal names.
        self._lanes: dict[tuple[Any, Any], int] = {}
        self._grids: dict[Any, int] = {}
        self._backend_lanes: set[int] = set()  # threads with ranges of `CPU_BACKENDS`
        self._collectives: dict[int, Collective] = {}  # row → what it does
        self._by_operator: dict[int, Collective] = {}  # external id → what it does
        self._meaning = array("l")
        self._lane = array("l")
        self._start_us = array("d")
        self._duration_us = array("d")
        self._correlation = array("q")
        self._external = array("q")
        self._grid = array("l")
        self._frames = FrameColumns()

    def add(self, entry: Entry) -> None:
        """Add one complete event, unless nothing is asked of it."""
        category, name = entry["cat"], entry["name"]
        if not -math.inf < entry["ts"] < math.inf:  # also false for NaN
            raise ValueError(f"{self._path} has an event at {entry['ts']} µs: profile again")
        # Also events that are left out count, so times are those that a viewer shows.
        if entry["ts"] < self._origin_us:
            self._origin_us = entry["ts"]
        try:
            meaning = self._meaning_of[category, name]
        except KeyError:
            meaning = self._meaning_of[category, name] = self._classify(category, name)
        if category == "python_function":
            key = (entry.get("pid"), entry.get("tid"))
            thread = self._lanes.setdefault(key, len(self._lanes))
            self._frames.add(name, thread, entry["ts"], entry["dur"])
        if meaning is None:
            return
        arguments = entry.get("args") or {}
        found = self._meanings[meaning]
        if found.kind == "communication" or name == "record_param_comms":
            self._add_collective(found, name, arguments)
        if not -math.inf < entry["dur"] < math.inf:
            raise ValueError(f"{self._path} has an event of {entry['dur']} µs: profile again")
        # Numbers are stored as they come, so a file with others is refused here.
        self._start_us.append(entry["ts"])
        self._duration_us.append(entry["dur"])
        self._meaning.append(meaning)
        lane = self._lanes.setdefault((entry.get("pid"), entry.get("tid")), len(self._lanes))
        self._lane.append(lane)
        _append_id(self._correlation, arguments.get("correlation", _NONE))
        _append_id(self._external, arguments.get("External id", _NONE))
        grid = arguments.get("grid") if found.on_gpu else None
        grid = tuple(grid) if isinstance(grid, list) else None
        self._grid.append(self._grids.setdefault(grid, len(self._grids)))
        if name.startswith(CPU_BACKENDS):
            self._backend_lanes.add(lane)

    def _classify(self, category: str, name: str) -> int | None:
        """Return the number of a new meaning, or None for events to leave out."""
        if category in _OLD_CATEGORIES:
            raise ValueError(
                f"{self._path} has the category {category!r}, which only old versions of torch "
                "write: profile with torch 2"
            )
        on_gpu = category in _ON_GPU
        self.on_gpu = self.on_gpu or category == "kernel"
        is_launch = category in _RUNTIME
        is_operator = category == "cpu_op"
        role = None
        # A range of the host is also recorded on the device, from its first kernel to its last one.
        if not on_gpu and category != "gpu_user_annotation":
            for each, pattern in _ROLE_PATTERNS.items():
                # Names of operators and kernels do not tell that garbage is collected.
                may_be = each != "garbage collection" or category in (
                    "python_function",
                    "user_annotation",
                )
                if may_be and pattern.search(name):
                    role = each
                    break
        kind = self._kind(category, name)
        if kind is None and role is None and not is_launch and not is_operator:
            return None
        self._names.append(name)
        meaning = _Meaning(len(self._names) - 1, kind, role, on_gpu, is_launch, is_operator)
        self._meanings.append(meaning)
        return len(self._meanings) - 1

    def _kind(self, category: str, name: str) -> str | None:
        """Return the kind of an event, see `_Meaning`."""
        if category in _ON_GPU:
            # The name decides before the category: a copy between GPUs is also a `gpu_memcpy`.
            if self._pattern.search(name):
                return "communication"
            return "compute" if category == "kernel" else "copy"
        if category in _RUNTIME or category == "python_function":
            return None
        if name.startswith(CPU_BACKENDS):
            return "communication"
        if category == "user_annotation" and name.startswith(_RANGES):
            return "range"
        if name.startswith(_C10D):
            return "c10d"
        if category in ("user_annotation", "cpu_op") and _CPU_COMPUTE.match(name):
            return "compute"
        return None

    def _add_collective(self, meaning: _Meaning, name: str, arguments: Entry) -> None:
        """Note what a communication does."""
        called = arguments.get("Collective name")
        if name == "record_param_comms":
            if called is not None and "External id" in arguments:
                self._by_operator[arguments["External id"]] = _collective(called, arguments)
                self.rank = arguments.get("Rank", self.rank)
            return
        row = len(self._meaning)
        if called is not None:
            self._collectives[row] = _collective(called, arguments)
        elif not meaning.on_gpu:
            self._collectives[row] = Collective(operation_of(name))

    def is_of_gpu(self) -> bool:
        """Return whether the host has launched work on a GPU."""
        for category, name in self._meaning_of:
            if category == "user_annotation" and name.startswith("nccl:"):
                return True
            if category in _RUNTIME and _LAUNCH.search(name):
                return True
        return False

    def events(self, notes: list[str]) -> tuple[list[Event], list[HostSpan]]:
        """Return the events and the host's spans, by start.

        Events inside another of the same lane and kind are left out, except ranges.

        Args:
            notes: list that receives sentences about what was left out.

        Raises:
            ValueError: the events are those of several processes or GPUs.
        """
        start_us = np.frombuffer(self._start_us) if self._start_us else np.zeros(0)
        duration_us = np.frombuffer(self._duration_us) if self._start_us else np.zeros(0)
        duration_us = np.maximum(duration_us, 0.0)
        origin = self._origin_us
        start_ms = (start_us - origin) / 1e3
        end_ms = (start_us + duration_us - origin) / 1e3
        # By start, and the longest first: then an outer event comes before those inside it.
        order = np.lexsort((-duration_us, start_us))
        launched_ms, operator = self._launches(start_ms)
        workers = self._worker_lanes(start_us, start_us + duration_us)
        self._refuse_several_processes()
        strays = self._stray_lanes(duration_us, notes)
        launching = self._launching_lanes(kinds=("compute", "communication"))
        lanes = [str(lane) for _, lane in self._lanes]
        grids = list(self._grids)
        meanings = self._meanings

        events, host = [], []
        in_c10d: dict[int, list[Interval]] = {}  # thread → its c10d operators
        computing: dict[int, int] = {}  # index of an event on a CPU that computes → its thread
        last_end = {}  # (lane, kind) → ms at which the last event kept ends
        for begin in range(0, len(order), _BLOCK):
            rows = order[begin : begin + _BLOCK]
            starts, ends = start_ms[rows].tolist(), end_ms[rows].tolist()
            for row, start, end in zip(rows.tolist(), starts, ends, strict=True):
                meaning = meanings[self._meaning[row]]
                name, kind = self._names[meaning.name], meaning.kind
                lane = self._lane[row]
                is_wait = meaning.role in ("synchronisation", "item")
                # A thread that only saves a checkpoint also waits, and delays no kernel.
                is_beside = is_wait and launching and lane not in launching
                if meaning.role is not None and not is_beside:
                    called = name
                    if meaning.role == "synchronisation" and operator[row] != _NONE:
                        # A wait does not say what it is for. The operator around it does, such as a
                        # copy.
                        called = f"{name} in {self._names[operator[row]]}"
                    host.append(HostSpan(meaning.role, called, start, end))
                if kind is None or (lane in strays and kind != "communication"):
                    continue
                nested = end <= last_end.get((lane, kind), -math.inf)
                if nested and kind != "range":
                    continue
                if kind == "compute" and not meaning.on_gpu:
                    is_in_c10d = end <= last_end.get((lane, "c10d"), -math.inf)
                    # With a GPU, operators only launch the work. On a backend's own threads and in
                    # c10d operators they belong to the communication.
                    if self.on_gpu or lane in workers or is_in_c10d:
                        continue
                    computing[len(events)] = lane
                last_end[lane, kind] = end
                if kind == "c10d":
                    # Only noted, to find the operators inside and around it.
                    in_c10d.setdefault(lane, []).append((start, end))
                    continue
                if not meaning.on_gpu:
                    collective = self._collectives.get(row)
                    event = Event(
                        name, kind, f"thread {lanes[lane]}", start, end, collective=collective
                    )
                    events.append(event)
                    continue
                launched = float(launched_ms[row])
                called_by = int(operator[row])
                collective = None
                if kind == "communication":
                    collective = self._collectives.get(row)
                    if collective is None:
                        collective = self._by_operator.get(self._external[row])
                    if collective is None:
                        collective = Collective(operation_of(name))
                event = Event(
                    name=name,
                    kind=kind,
                    lane=f"stream {lanes[lane]}",
                    start_ms=start,
                    end_ms=end,
                    launched_ms=None if math.isnan(launched) else launched,
                    operator=None if called_by == _NONE else self._names[called_by],
                    grid=grids[self._grid[row]],
                    collective=collective,
                )
                events.append(event)
        if not self.on_gpu and in_c10d:
            events = _without_waits(events, computing, in_c10d)
        return events, host

    def _refuse_several_processes(self) -> None:
        """Raise ValueError if several processes have operators or ranges in the file."""
        is_host = np.array([each.is_operator or each.kind == "range" for each in self._meanings])
        if not is_host.any():
            return
        on_host = is_host[np.frombuffer(self._meaning, "l")]
        used = np.unique(np.frombuffer(self._lane, "l")[on_host])
        lanes = list(self._lanes)
        processes = list(dict.fromkeys(str(lanes[lane][0]) for lane in used))
        if len(processes) > 1:
            raise ValueError(
                f"{self._path} holds the work of several processes ({', '.join(processes[:4])}): "
                "give one file per process"
            )

    def _stray_lanes(self, duration_us: np.ndarray, notes: list[str]) -> set[int]:
        """Return the streams of all GPUs but the one that computes.

        Args:
            duration_us: µs of each row.
            notes: list that receives a sentence if other GPUs compute a little.

        Raises:
            ValueError: two GPUs compute.
        """
        if not self.on_gpu:
            return set()
        meaning = np.frombuffer(self._meaning, "l")
        is_compute = [each.on_gpu and each.kind == "compute" for each in self._meanings]
        rows = np.array(is_compute, bool)[meaning]
        lane = np.frombuffer(self._lane, "l")
        ms_of_lane = np.bincount(lane[rows], duration_us[rows] / 1e3, minlength=len(self._lanes))
        ms: dict[Any, float] = {}  # GPU → ms of its kernels
        for (device, _), lane_ms in zip(self._lanes, ms_of_lane.tolist(), strict=True):
            if lane_ms > 0:
                ms[device] = ms.get(device, 0.0) + lane_ms
        if not ms:
            return set()
        busiest = max(ms, key=ms.get)
        busy = {device: each for device, each in ms.items() if each > _STRAY_SHARE * ms[busiest]}
        if len(busy) > 1:
            said = ", ".join(f"GPU {device}: {each:.1f} ms" for device, each in busy.items())
            raise ValueError(
                f"{self._path} has kernels of several GPUs ({said}), and a rank has one: run one "
                "process per GPU, and give the trace of each"
            )
        others = {device: each for device, each in ms.items() if device != busiest}
        if others:
            said = ", ".join(f"GPU {device}: {each:.2f} ms" for device, each in others.items())
            notes.append(f"kernels on other GPUs than {busiest} are left out ({said})")
        on_gpu = np.array([each.on_gpu for each in self._meanings], bool)[meaning]
        lanes = list(self._lanes)
        streams = np.unique(lane[on_gpu]).tolist()
        return {stream for stream in streams if lanes[stream][0] != busiest}

    def _launching_lanes(self, kinds: Sequence[str]) -> set[int]:
        """Return the threads that launch work of some kinds on a GPU."""
        if not self._meaning:
            return set()
        meaning = np.frombuffer(self._meaning, "l")
        correlation = np.frombuffer(self._correlation, "q")
        chosen = [each.on_gpu and each.kind in kinds for each in self._meanings]
        is_chosen = np.array(chosen, bool)[meaning] & (correlation != _NONE)
        is_launch = np.array([each.is_launch for each in self._meanings], bool)[meaning]
        launching = is_launch & np.isin(correlation, correlation[is_chosen])
        return set(np.frombuffer(self._lane, "l")[launching].tolist())

    def frames(self) -> Frames | None:
        """Return the frames of the threads that launch work, or None without frames or work."""
        if not self._frames or not self._meaning:
            return None
        meaning = np.frombuffer(self._meaning, "l")
        lane = np.frombuffer(self._lane, "l")
        if self.on_gpu:
            # Other threads also call the runtime, for example to pin memory.
            threads = self._launching_lanes(kinds=("compute", "communication", "copy"))
        else:
            is_compute = np.array([each.kind == "compute" for each in self._meanings], bool)
            start_us = np.frombuffer(self._start_us)
            workers = self._worker_lanes(start_us, start_us + np.frombuffer(self._duration_us))
            threads = set(lane[is_compute[meaning]].tolist()) - workers
        return self._frames.frames(threads, self._origin_us)

    def _worker_lanes(self, start_us: np.ndarray, end_us: np.ndarray) -> set[int]:
        """Return the threads on which a backend without a GPU executes collectives.

        All operators there, such as the division of an average, run inside of collectives. A
        thread that also has operators elsewhere is one of the program. It can have such ranges as
        well: those of a send and a receive are on the thread that calls them, and last until the
        message has been sent, whatever the thread computes meanwhile.

        Args:
            start_us, end_us: µs at which each row begins and ends.
        """
        meaning = np.frombuffer(self._meaning, "l")
        lane = np.frombuffer(self._lane, "l")
        is_compute = np.array([each.kind == "compute" for each in self._meanings], bool)
        collectives = []
        for each in self._meanings:
            is_range = each.kind == "communication" and not each.on_gpu
            operation = operation_of(self._names[each.name])
            collectives.append(is_range and operation != POINT_TO_POINT)
        is_collective = np.array(collectives, bool)
        workers = set()
        for thread in self._backend_lanes:
            rows = np.flatnonzero(lane == thread)
            inside = rows[is_collective[meaning[rows]]]
            cover = Cover(zip(start_us[inside].tolist(), end_us[inside].tolist(), strict=True))
            operators = rows[is_compute[meaning[rows]]]
            if all(cover.contains(begin) for begin in start_us[operators].tolist()):
                workers.add(thread)
        return workers

    def _launches(self, start_ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each row when the host launched it, and the number of its operator's name.

        `correlation` ties work on the GPU to the call that launched it, `External id` to the
        operator that made this call. Rows without them have NaN and `_NONE`.
        """
        rows = len(start_ms)
        if rows == 0:
            return np.zeros(0), np.zeros(0, int)
        meaning = np.frombuffer(self._meaning, "l")
        correlation = np.frombuffer(self._correlation, "q")
        external = np.frombuffer(self._external, "q")
        is_launch = np.array([each.is_launch for each in self._meanings])[meaning]
        is_operator = np.array([each.is_operator for each in self._meanings])[meaning]
        name = np.array([each.name for each in self._meanings])[meaning]
        launched = np.full(rows, np.nan)
        found, at = _last_of(correlation, is_launch & (correlation != _NONE))
        launched[found] = start_ms[at]
        operator = np.full(rows, _NONE)
        found, at = _last_of(external, is_operator & (external != _NONE))
        operator[found] = name[at]
        return launched, operator


def _append_id(column: array, value: int) -> None:
    """Append an id. One that no signed number holds, as Kineto writes for none, ties nothing."""
    try:
        column.append(value)
    except OverflowError:
        column.append(_NONE)


def _without_waits(
    events: Sequence[Event], computing: dict[int, int], in_c10d: dict[int, list[Interval]]
) -> list[Event]:
    """Return the events, by start, with c10d operators cut out of the compute around them.

    A compiled graph is one event, and may wait for a collective inside.

    Args:
        events: events of a trace without a GPU.
        computing: index of an event that computes → number of its thread.
        in_c10d: number of a thread → intervals of its c10d operators.
    """
    covers = {thread: Cover(intervals) for thread, intervals in in_c10d.items()}
    found = []
    for index, event in enumerate(events):
        cover = covers.get(computing.get(index))
        span = (event.start_ms, event.end_ms)
        inside = [] if cover is None else cover.within(*span)
        if not inside:
            found.append(event)
            continue
        for start, end in subtract([span], inside):
            found.append(event._replace(start_ms=start, end_ms=end))
    return sorted(found, key=lambda event: event.start_ms)


def _last_of(keys: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match every row with the last chosen row that has the same key.

    Returns:
        Mask of the rows that have a match, and the numbers of the matching rows.
    """
    rows = np.flatnonzero(chosen)
    if len(rows) == 0:
        return np.zeros(len(keys), bool), rows
    rows = rows[np.argsort(keys[rows], kind="stable")]
    place = np.searchsorted(keys[rows], keys, side="right") - 1
    match = rows[np.maximum(place, 0)]
    found = (place >= 0) & (keys[match] == keys)
    return found, match[found]


def _collective(called: str, arguments: Entry) -> Collective:
    """Return what a collective does, from the arguments that c10d records."""
    elements = [arguments.get(each) or 0 for each in ("In msg nelems", "Out msg nelems")]
    item_bytes = ITEM_BYTES.get(arguments.get("dtype"))
    size_bytes = None
    if item_bytes is not None and max(elements):
        size_bytes = item_bytes * max(elements)
    names = ("Process Group Description", "Process Group Name", "Process Group Ranks")
    parts = [str(arguments[name]) for name in names if arguments.get(name) not in (None, "")]
    return Collective(
        operation=operation_of(called),
        group=" ".join(parts) or None,
        ranks=_whole(arguments.get("Group size")),
        size_bytes=size_bytes,
        sequence=_whole(arguments.get("Seq")),
    )
