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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distlab.files import AnyPath
from distlab.measure.trace.frames import FrameColumns, Frames
from distlab.measure.trace.intervals import Cover
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
    """

    path: str
    events: list[Event]
    host: list[HostSpan]
    on_gpu: bool
    rank: int | None
    device_name: str | None
    frames: Frames | None


def load_trace(path: AnyPath) -> list[Event]:
    """Load the events of a torch.profiler trace (``.json`` or ``.json.gz``), by start time.

    Events inside another of the same lane and kind are left out (``aten::mm`` in ``aten::addmm``).

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated, or another tool wrote it. The message names the path.
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
    columns = _Columns(gpu_pattern(communication))
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
        rank = known.get("rank", columns.rank)
        device_name = devices[0].get("name")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds an event that torch.profiler does not write: {error!r}"
        ) from None
    events, host = columns.events()
    return Trace(
        path=str(path),
        events=events,
        host=host,
        on_gpu=columns.on_gpu,
        rank=rank,
        device_name=device_name,
        frames=columns.frames(),
    )


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
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.on_gpu = False
        self.rank: int | None = None
        self._origin_us = math.inf
        self._pattern = pattern
        self._names: list[str] = []
        self._meanings: list[_Meaning] = []
        self._meaning_of: dict[tuple[str, str], int | None] = {}
        self._lanes: dict[Any, int] = {}  # thread or stream → number
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
        # Also events that are left out count, so times are those that a viewer shows.
        if entry["ts"] < self._origin_us:
            self._origin_us = entry["ts"]
        try:
            meaning = self._meaning_of[category, name]
        except KeyError:
            meaning = self._meaning_of[category, name] = self._classify(category, name)
        if category == "python_function":
            thread = self._lanes.setdefault(entry.get("tid"), len(self._lanes))
            self._frames.add(name, thread, entry["ts"], entry["dur"])
        if meaning is None:
            return
        arguments = entry.get("args") or {}
        found = self._meanings[meaning]
        if found.kind == "communication" or name == "record_param_comms":
            self._add_collective(found, name, arguments)
        # Numbers are stored as they come, so a file with others is refused here.
        self._start_us.append(entry["ts"])
        self._duration_us.append(entry["dur"])
        self._meaning.append(meaning)
        lane = self._lanes.setdefault(entry.get("tid"), len(self._lanes))
        self._lane.append(lane)
        self._correlation.append(arguments.get("correlation", _NONE))
        self._external.append(arguments.get("External id", _NONE))
        grid = arguments.get("grid") if found.on_gpu else None
        grid = tuple(grid) if isinstance(grid, list) else None
        self._grid.append(self._grids.setdefault(grid, len(self._grids)))
        if name.startswith(CPU_BACKENDS):
            self._backend_lanes.add(lane)

    def _classify(self, category: str, name: str) -> int | None:
        """Return the number of a new meaning, or None for events to leave out."""
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
        if name.startswith("c10d::"):
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

    def events(self) -> tuple[list[Event], list[HostSpan]]:
        """Return the events and the host's spans, by start.

        Events inside another of the same lane and kind are left out, except ranges.
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
        lanes = [str(lane) for lane in self._lanes]
        grids = list(self._grids)
        meanings = self._meanings

        events, host = [], []
        last_end = {}  # (lane, kind) → ms at which the last event kept ends
        for begin in range(0, len(order), _BLOCK):
            rows = order[begin : begin + _BLOCK]
            starts, ends = start_ms[rows].tolist(), end_ms[rows].tolist()
            for row, start, end in zip(rows.tolist(), starts, ends, strict=True):
                meaning = meanings[self._meaning[row]]
                name, kind = self._names[meaning.name], meaning.kind
                if meaning.role is not None:
                    called = name
                    if meaning.role == "synchronisation" and operator[row] != _NONE:
                        # A wait does not say what it is for. The operator around it does, such as a
                        # copy.
                        called = f"{name} in {self._names[operator[row]]}"
                    host.append(HostSpan(meaning.role, called, start, end))
                if kind is None:
                    continue
                lane = self._lane[row]
                nested = end <= last_end.get((lane, kind), -math.inf)
                if nested and kind != "range":
                    continue
                if kind == "compute" and not meaning.on_gpu:
                    in_c10d = end <= last_end.get((lane, "c10d"), -math.inf)
                    # With a GPU, operators only launch the work. On a backend's own threads and in
                    # c10d operators they belong to the communication.
                    if self.on_gpu or lane in workers or in_c10d:
                        continue
                last_end[lane, kind] = end
                if kind == "c10d":
                    continue  # only noted, to find the operators inside it
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
        return events, host

    def frames(self) -> Frames | None:
        """Return the frames of the threads that launch work, or None without frames or work."""
        if not self._frames or not self._meaning:
            return None
        meaning = np.frombuffer(self._meaning, "l")
        lane = np.frombuffer(self._lane, "l")
        if self.on_gpu:
            # Other threads also call the runtime, for example to pin memory.
            correlation = np.frombuffer(self._correlation, "q")
            is_on_gpu = np.array([each.on_gpu for each in self._meanings], bool)[meaning]
            is_launch = np.array([each.is_launch for each in self._meanings], bool)[meaning]
            launching = is_launch & np.isin(correlation, correlation[is_on_gpu])
            threads = set(lane[launching].tolist())
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
        ranks=arguments.get("Group size"),
        size_bytes=size_bytes,
        sequence=arguments.get("Seq"),
    )
