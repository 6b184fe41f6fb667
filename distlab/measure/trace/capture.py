"""The profiler's trace: when did each kernel and each collective run.

`profile_steps` writes a Chrome/Perfetto trace per rank; `load_trace` reads it (or any other file of
torch.profiler) into `Event`s of four kinds:

``communication``
    Kernels with ``nccl`` in their name, copies between GPUs and the barriers around them, and
    gloo's ``gloo:*`` intervals. A gloo interval (measured: torch 2.13, six 16 MB all-reduces in
    flight on two ranks) begins when one of the process group's two worker threads *starts
    executing* the collective, not when it is enqueued: the third of six began when the first had
    ended, and the intervals of one thread never overlap. It ends with the collective. So up to two
    overlap, which share the wire, and the busy time is the union of the intervals, not their sum
    (170 against 334 ms there). Like an NCCL kernel, an interval contains waiting for a peer that
    comes late: 117 instead of 15 ms when the peer slept for 100 ms.
``compute``
    On a GPU every other kernel. Without GPU kernels in the trace: ``aten::`` operators, the C++
    nodes of autograd (``AddmmBackward0``) and compiled graphs, by wall clock. Not what runs inside
    a ``c10d`` operator or on gloo's threads, and not the rest of autograd's ``evaluate_function``
    range: Python hooks run inside that, and a hook that waits for a collective would count as
    compute that covers it.
``copy``
    ``gpu_memcpy`` and ``gpu_memset``.
``range``
    Annotations named ``distlab:…``: ``distlab:step`` and the phases inside it.
"""

import gzip
import json
import math
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._profiler import RecordScope
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from distlab.files import AnyPath, atomic_path
from distlab.measure.clock import Call, Device, synchronize
from distlab.measure.trace.intervals import total, union

STEP = "distlab:step"
OPTIMIZER = "distlab:optimizer"
NEXT = "distlab:next"
PHASES = ("forward", "backward", "optimizer")
Entry = dict[str, Any]  # of a trace file
_GPU_COMMUNICATION = re.compile(r"nccl|PtoP|barrier_kernel", re.IGNORECASE)
_CPU_COMPUTE = re.compile(r"aten::|\w+Backward\d+$|## Call CompiledFxGraph")


class Event(NamedTuple):
    """One interval on one lane. Times are in ms since the earliest event of its trace.

    Attributes:
        kind: ``communication``, ``compute``, ``copy`` or ``range``.
        lane: a GPU stream or a CPU thread.
        launched_ms: ms at which the host launched work on a GPU. None elsewhere.
        operator: innermost operator that launched work on a GPU (``aten::mm``). None elsewhere, and
            if operators were not recorded.
    """

    name: str
    kind: str
    lane: str
    start_ms: float
    end_ms: float
    launched_ms: float | None = None
    operator: str | None = None

    @property
    def on_host_ms(self) -> float:
        """Time in ms at which the host started it.

        Work on a GPU may run when the host is already in the next phase.
        """
        return self.start_ms if self.launched_ms is None else self.launched_ms


def activities_on(device: Device) -> list[ProfilerActivity]:
    """Return the activities that torch.profiler records: a device's kernels, and host operators."""
    if torch.device(device).type == "cuda":
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    # torch 2.13's profiler announces its start and end on stderr, above the level of errors.
    # Without CUPTI it has no errors worth the noise. It reads the variable at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return [ProfilerActivity.CPU]


@contextmanager
def recording_trace(device: Device, memory: bool = False) -> Iterator[profile]:
    """Record a trace under torch.profiler, for `export_chrome_trace` only.

    Args:
        device: CUDA activities are recorded if it is a CUDA device.
        memory: record each allocation.
    """
    with profile(
        activities=activities_on(device), profile_memory=memory, acc_events=True
    ) as profiler:
        # `acc_events` spares torch 2.11's warning about cleared events. At the end it would also
        # parse all events into Python objects, which takes longer than the steps did. A trace that
        # is only written needs none of them.
        profiler.profiler.acc_events = False
        yield profiler


class _RangesOnly(autograd_profiler.profile):
    """Profiler of torch without host operators, which double the host's time.

    Ranges, launches and the GPU's work are recorded.
    """

    def _start_trace(self) -> None:
        autograd_profiler._enable_profiler(
            self.config(), self.kineto_activities, {RecordScope.USER_SCOPE}
        )


def profile_steps(
    step: Call,
    *,
    steps: int,
    path: AnyPath,
    rank: int,
    world_size: int,
    device: Device,
    warmup: int = 1,
    finish: Call = lambda: None,
    queued: bool = False,
    operators: bool = True,
) -> None:
    """Run ``step()`` under torch.profiler and write this rank's trace, atomically.

    Each profiled step is a range ``distlab:step`` that begins and ends with an idle device, so that
    all work that it started is inside the range, on every stream. The ranges ``distlab:warmup``
    before it contain the profiler's own start-up.

    With ``queued`` steps follow each other as in training, without waiting for the device in
    between: the host runs ahead, and what one step leaves in flight is hidden by the next. On a GPU
    one more step follows in a range ``distlab:next``, and `account.step_windows` finds on the
    device where each step begins; on a CPU the host does the work, and nothing changes.

    Args:
        step: function of one training step, called ``warmup + steps`` times (one more if queued on
            a GPU). Every rank must do so together.
        path: path of the JSON file, gzipped if it ends in ``.gz``. Process names and ids in it
            carry the rank, so that the files of several ranks can be opened together. Host name and
            paths are left out.
        device: device. CUDA activities are recorded on a CUDA device.
        finish: function that is called after the last step, before the recording ends. It must wait
            for what a step leaves in flight. A gloo collective that outlives its recording crashes
            the process.
        operators: True to record the host's operators also on a GPU. Recording makes the host
            slower, which can delay the steps.

    Raises:
        ValueError: no ``steps`` or a negative ``warmup``.
        OSError: ``path`` cannot be written; what ``step`` raises passes through. Nothing is left at
            ``path``.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(
            f"profile_steps needs steps >= 1 and warmup >= 0, got {steps} and {warmup}"
        )
    on_cuda = torch.device(device).type == "cuda"
    if operators or not on_cuda:
        recording = recording_trace(device)
    else:
        recording = _RangesOnly(use_kineto=True, use_device="cuda")
    with recording as profiler:
        synchronize(device)
        for name in ["distlab:warmup"] * warmup + [STEP] * steps + [NEXT] * (queued and on_cuda):
            with record_function(name):
                step()
                if not queued:
                    synchronize(device)
        finish()
        synchronize(device)
    path, backend = Path(path), dist.get_backend() if dist.is_initialized() else None
    with tempfile.NamedTemporaryFile(suffix=".json") as raw, atomic_path(path) as temporary:
        profiler.export_chrome_trace(raw.name)
        trace = json.loads(Path(raw.name).read_text(encoding="utf-8", errors="replace"))
        data = json.dumps(
            _with_rank(trace, rank, world_size, backend), separators=(",", ":")
        ).encode()
        temporary.write_bytes(
            gzip.compress(data, compresslevel=5, mtime=0) if path.suffix == ".gz" else data
        )


def busy_ms(step: Call) -> tuple[float, float]:
    """Return the ms per step in which a GPU works, and the kernels and copies that a step starts.

    Kernels take equally long while the host is slow, or slowed down by the profiler. Compared with
    the time of a step without a profiler, this says for how long the GPU waits. `step` must be
    warm.
    """
    events = _on_device(step, 2)
    spans = union((e.time_range.start, e.time_range.end) for e in events)
    return total(spans) / 1e3 / 2, len(events) / 2


class CompiledCalls(NamedTuple):
    """Dynamo's part in one step.

    Attributes:
        regions: number of times that a compiled graph ran.
        lookups: number of frames for which Dynamo looked for a compiled graph. Each of them that
            has no region ran eager, for example after `recompile_limit` was reached.
    """

    regions: int
    lookups: int


def compiled_calls(step: Call, finish: Call = lambda: None) -> CompiledCalls:
    """Run `step()` once under the profiler and count the compiled graphs that ran.

    Args:
        step: one training step, warm. Afterwards it runs as before: the profiler changes nothing
            for Dynamo.
        finish: called after the step, before the recording ends; see `profile_steps`.
    """
    with profile(activities=activities_on("cpu"), acc_events=True) as profiler:
        step()
        finish()
    names = Counter(event.name for event in profiler.events())
    regions = sum(
        count for name, count in names.items() if name.startswith("Torch-Compiled Region")
    )
    return CompiledCalls(regions, names["TorchDynamo Cache Lookup"])


def launched(call: Call) -> Counter[str]:
    """Name → how often: the kernels and copies that one call, warm, starts on a GPU."""
    return Counter(event.name for event in _on_device(call, 1))


def _on_device(call: Call, times: int) -> list[Any]:
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    return [
        event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]


class Phases:
    """Ranges ``distlab:forward``, ``distlab:backward``, ``distlab:optimizer`` from a step's marks.

    A mark says which phase ends, as those of `clock.PhaseTimer` do, so the same step serves both::

        phases = Phases()
        with phases.step():  # the first phase begins with the step
            ...
            phases.mark("forward")
            ...
    """

    def __init__(self) -> None:
        self._open = ExitStack()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark a step. Its first phase begins now, its last ends with a mark or with the step."""
        with self._open:
            self._open.enter_context(record_function(f"distlab:{PHASES[0]}"))
            yield

    def mark(self, phase: str) -> None:
        """End `phase` here and begin the next in order."""
        self._open.close()
        following = PHASES.index(phase) + 1
        if following < len(PHASES):
            self._open.enter_context(record_function(f"distlab:{PHASES[following]}"))


def _with_rank(trace: Entry, rank: int, world_size: int, backend: str | None) -> Entry:
    """The trace with rank information and without what tells of the machine it ran on."""
    for private in ("host_name", "traceName"):
        trace.pop(private, None)
    known = {"backend": backend, "rank": rank, "world_size": world_size}
    # which torch writes where it knows them
    trace["distributedInfo"] = known | trace.get("distributedInfo", {})
    for event in trace["traceEvents"]:
        if (pid := event.get("pid")) is not None:
            # Ranks on two hosts, or in two containers, may have the same process id. Linux ids end
            # at 2**22.
            event["pid"] = (
                pid + rank * 10_000_000 if isinstance(pid, int) else f"{pid} (rank {rank})"
            )
        named = {"process_name": "name", "process_labels": "labels"}.get(event.get("name"))
        if event.get("ph") == "M" and named:
            event["args"][named] = f"rank {rank}: {event['args'].get(named, '')}"
    return trace


def read_trace_file(path: AnyPath) -> Any:
    """Return the content of a ``.json`` or ``.json.gz`` file.

    Raises OSError, and the errors of gzip and json for a truncated file.
    """
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def load_trace(path: AnyPath) -> list[Event]:
    """Load the events of a torch.profiler trace (``.json`` or ``.json.gz``), by start time.

    Events inside another of the same lane and kind are left out (``aten::mm`` in ``aten::addmm``).

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is truncated, or another tool wrote it; the message names the path.
    """
    try:
        trace = read_trace_file(path)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is truncated or is not a trace ({error}): profile again"
        ) from None
    raw = trace.get("traceEvents") if isinstance(trace, dict) and "schemaVersion" in trace else None
    if not isinstance(raw, list):
        raise ValueError(
            f"{path} was not written by torch.profiler: no schemaVersion or no traceEvents in it"
        )
    try:
        return _events([entry for entry in raw if entry.get("ph") == "X" and "cat" in entry])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds an event that torch.profiler does not write: {error!r}"
        ) from None


_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def _events(spans: list[Entry]) -> list[Event]:
    """Return every complete event of one of the four kinds, by start (times in µs).

    Events inside another of the same lane and kind are left out, except ranges.
    """
    origin = min((span["ts"] for span in spans), default=0.0)
    gpu_trace = any(span["cat"] == "kernel" for span in spans)
    launches = {
        _argument(s, "correlation"): s["ts"]
        for s in spans
        if s["cat"] in ("cuda_runtime", "cuda_driver")
    }
    operators = {_argument(s, "External id"): s["name"] for s in spans if s["cat"] == "cpu_op"}
    gloo_threads = {span["tid"] for span in spans if span["name"].startswith("gloo:")}
    events = []
    reach = {}  # lane and kind → end of the last event
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start, end = span["ts"], span["ts"] + span["dur"]
        on_gpu, kind = span["cat"] in _ON_GPU, _kind(span)
        lane = f"{'stream' if on_gpu else 'thread'} {span['tid']}"
        covered = end <= reach.get((lane, kind), -math.inf)
        if kind == "compute" and not on_gpu:
            covered |= (
                gpu_trace
                or span["tid"] in gloo_threads
                or end <= reach.get((lane, "c10d"), -math.inf)
            )
        if kind is None or (covered and kind != "range"):
            continue
        reach[lane, kind] = end
        if kind != "c10d":
            launched = launches.get(_argument(span, "correlation")) if on_gpu else None
            events.append(
                Event(
                    span["name"],
                    kind,
                    lane,
                    (start - origin) / 1e3,
                    (end - origin) / 1e3,
                    None if launched is None else (launched - origin) / 1e3,
                    operators.get(_argument(span, "External id")) if on_gpu else None,
                )
            )
    return events


def _argument(span: Entry, name: str) -> int | None:
    """Return an argument of an event.

    `correlation` ties work on the GPU to the call that launched it, `External id` to the call's
    operator.
    """
    return span.get("args", {}).get(name)


def _kind(span: Entry) -> str | None:
    """Return the kind of an event.

    It is `c10d` for operators in which nothing counts as compute, and None for events to leave out.
    """
    on_gpu, name = span["cat"] in _ON_GPU, span["name"]
    if _GPU_COMMUNICATION.search(name) if on_gpu else name.startswith("gloo:"):
        return "communication"
    if on_gpu:
        return "compute" if span["cat"] == "kernel" else "copy"
    if span["cat"] == "user_annotation" and name.startswith("distlab:"):
        return "range"
    if name.startswith("c10d::"):
        return "c10d"
    return "compute" if _CPU_COMPUTE.match(name) else None
