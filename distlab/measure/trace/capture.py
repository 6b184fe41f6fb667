"""Record traces of torch.profiler: `profile_steps` writes a Chrome/Perfetto trace per rank.

Its steps are ranges ``distlab:step``. `reader` reads the file.
"""

import gzip
import json
import os
import tempfile
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
from distlab.measure.trace.intervals import total

STEP = "distlab:step"
OPTIMIZER = "distlab:optimizer"
NEXT = "distlab:next"
PHASES = ("forward", "backward", "optimizer")
Entry = dict[str, Any]  # one event of a trace file, or the whole file, as JSON
# Metadata events whose argument is what a viewer shows for a process: event → argument.
_PROCESS_TITLES = {"process_name": "name", "process_labels": "labels"}


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
    activities = activities_on(device)
    # `acc_events=True` avoids a warning of torch 2.11 about cleared events.
    with profile(activities=activities, profile_memory=memory, acc_events=True) as profiler:
        # At the end, `acc_events` would also parse all events into Python objects, which takes
        # longer than the steps did. A trace that is only written needs none of them.
        profiler.profiler.acc_events = False
        yield profiler


class _RangesOnly(autograd_profiler.profile):
    """torch's profiler without operators of the host, because recording them doubles its time.

    Ranges, launches and the GPU's work are recorded.
    """

    def _start_trace(self) -> None:
        # torch's own method passes no scopes, which means all of them.
        scopes = {RecordScope.USER_SCOPE}
        autograd_profiler._enable_profiler(self.config(), self.kineto_activities, scopes)


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

    Each profiled step is a range ``distlab:step`` that begins and ends with an idle device. So all
    work that the step started is inside the range, on every stream. The ranges ``distlab:warmup``
    before it contain the profiler's own start-up.

    With ``queued``, steps follow each other as in training, without waiting for the device in
    between. The host runs ahead, and the next step hides what a step leaves in flight. On a GPU one
    more step follows in a range ``distlab:next``, and `account.step_windows` finds on the device
    where each step begins. On a CPU the host does the work, so nothing changes.

    Args:
        step: function of one training step, called ``warmup + steps`` times (one more if queued on
            a GPU). Every rank must do so together.
        steps: number of profiled steps.
        path: path of the JSON file, gzipped if it ends in ``.gz``. Process names and ids in it
            carry the rank, so that the files of several ranks can be opened together. Host name and
            paths are left out.
        rank: rank of this process, written into the file.
        world_size: number of ranks, written into the file.
        device: device. CUDA activities are recorded on a CUDA device.
        warmup: number of steps before the profiled ones.
        finish: function that is called after the last step, before the recording ends. It must wait
            for what a step leaves in flight. A gloo collective that outlives its recording crashes
            the process.
        queued: True to let the steps follow each other without waiting for the device.
        operators: True to record the host's operators also on a GPU. Recording makes the host
            slower, which can delay the steps.

    Raises:
        ValueError: no ``steps`` or a negative ``warmup``.
        OSError: ``path`` cannot be written.
        Exception: any exception of ``step``. Nothing is left at ``path``.
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
    range_names = ["distlab:warmup"] * warmup + [STEP] * steps
    if queued and on_cuda:
        range_names.append(NEXT)
    with recording as profiler:
        synchronize(device)
        for name in range_names:
            with record_function(name):
                step()
                if not queued:
                    synchronize(device)
        finish()
        synchronize(device)
    path = Path(path)
    backend = dist.get_backend() if dist.is_initialized() else None
    with tempfile.NamedTemporaryFile(suffix=".json") as raw, atomic_path(path) as temporary:
        profiler.export_chrome_trace(raw.name)
        trace = json.loads(Path(raw.name).read_text(encoding="utf-8", errors="replace"))
        trace = _with_rank(trace, rank, world_size, backend)
        data = json.dumps(trace, separators=(",", ":")).encode()
        if path.suffix == ".gz":
            data = gzip.compress(data, compresslevel=5, mtime=0)
        temporary.write_bytes(data)


def busy_ms(step: Call) -> tuple[float, float]:
    """Return the ms per step in which a GPU works, and the number of kernels and copies per step.

    Kernels take equally long while the host is slow, or slowed down by the profiler. So the time of
    a step without a profiler, less this time, is how long the GPU waits. `step` must be warm.
    """
    steps = 2
    events = _on_device(step, steps)
    # torch's times are in µs. Kernels of several streams overlap, and count once.
    busy_us = total((event.time_range.start, event.time_range.end) for event in events)
    return busy_us / 1e3 / steps, len(events) / steps


class CompiledCalls(NamedTuple):
    """Number of compiled graphs that ran in one step, and of those that Dynamo looked for.

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
        step: function of one training step, warm. Afterwards it runs as before: the profiler
            changes nothing for Dynamo.
        finish: function that is called after the step, before the recording ends, as in
            `profile_steps`.
    """
    with autograd_profiler.profile(use_kineto=True) as profiler:
        step()
        finish()
    # Not `profiler.events()`, which builds torch's tree of all operators: half a second for names.
    names = Counter(event.name() for event in profiler.kineto_results.events())
    regions = 0
    for name, count in names.items():
        # The name goes on with the number of the graph.
        if name.startswith("Torch-Compiled Region"):
            regions += count
    return CompiledCalls(regions=regions, lookups=names["TorchDynamo Cache Lookup"])


def launched(call: Call) -> Counter[str]:
    """Return name → count of the kernels and copies that one call, warm, starts on a GPU."""
    return Counter(event.name for event in _on_device(call, 1))


def _on_device(call: Call, times: int) -> list[Any]:
    """Return torch's events of the work on a GPU that `times` calls start."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [event for event in profiler.events() if event.device_type == cuda]


class Phases:
    """Ranges ``distlab:forward``, ``distlab:backward``, ``distlab:optimizer`` from a step's marks.

    A mark says which phase ends, like the marks of `clock.PhaseTimer`. So the same step works with
    both::

        phases = Phases()
        with phases.step():  # the first phase begins with the step
            ...
            phases.mark("forward")
            ...
    """

    def __init__(self) -> None:
        self._open = ExitStack()  # holds the range of the current phase, or nothing

    @contextmanager
    def step(self) -> Iterator[None]:
        """Begin the first phase now. The last phase ends with a mark or with the step."""
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
    """Add the rank to a trace, and remove the names of the machine and the folder it ran in."""
    for private in ("host_name", "traceName"):
        trace.pop(private, None)
    # torch writes `distributedInfo` itself if it knows it. Its values win.
    known = {"backend": backend, "rank": rank, "world_size": world_size}
    trace["distributedInfo"] = known | trace.get("distributedInfo", {})
    for event in trace["traceEvents"]:
        pid = event.get("pid")
        # Ranks on two hosts, or in two containers, may have the same process id. Linux ids end at
        # 2**22 (4.2 million), so 10 million more per rank keep them apart.
        if isinstance(pid, int):
            event["pid"] = pid + rank * 10_000_000
        elif pid is not None:
            event["pid"] = f"{pid} (rank {rank})"
        # ph "M" are metadata events.
        if event.get("ph") == "M" and event.get("name") in _PROCESS_TITLES:
            argument = _PROCESS_TITLES[event["name"]]
            title = event["args"].get(argument, "")
            event["args"][argument] = f"rank {rank}: {title}"
    return trace
