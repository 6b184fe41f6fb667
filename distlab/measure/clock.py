"""Clocks: repeated timings, phases of a step, the slowest rank, and intervals of ratios.

On CUDA the clock is the stream's: events are recorded between kernels and read after one
synchronisation at the end, so that timing a step adds no synchronisation to it. On the CPU it is
`time.perf_counter`. All times are in ms.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distlab.measure.statistics import percentile_metrics

Instant = torch.cuda.Event | float
Call = Callable[[], object]  # what is timed
Device = torch.device | str


def instant(device: torch.device) -> Instant:
    """Now, on the device's clock: an event on the current stream of a GPU, seconds on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_ms(begin: Instant, end: Instant) -> float:
    """Return milliseconds between two instants of one device. On a GPU, synchronise before."""
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


def synchronize(device: Device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def measure(fn: Call, *, warmup: int, repeats: int, device: Device) -> list[float]:
    """Time ``repeats`` calls of ``fn`` after ``warmup`` untimed ones; one duration in ms per call.

    On CUDA the calls are queued without waiting in between, as in training: a duration is the time
    between the events before and after the call on the current stream.

    Raises:
        ValueError: a negative ``warmup`` or no ``repeats``.
    """
    if warmup < 0 or repeats < 1:
        raise ValueError(f"measure needs warmup >= 0 and repeats >= 1, got {warmup} and {repeats}")
    for _ in range(warmup):
        fn()
    timer = PhaseTimer(device)
    timer.synchronize()  # what the warm-up queued must not be charged to the first repetition
    for _ in timer.each(repeats):
        fn()
        timer.mark("call")
    return [step["call"] for step in timer.steps()]


class PhaseTimer:
    """Milliseconds of each phase of each step, without synchronising inside the step.

    ::

        timer = PhaseTimer(device)
        for batch in batches:
            timer.start()
            loss = forward_and_backward(batch)
            timer.mark("forward_backward")  # the phase that ends here
            optimizer.step()
            timer.mark("optimizer")
        timer.steps()  # [{"forward_backward": 9.1, "optimizer": 2.0, "step": 11.1}, …]

    On CUDA a mark is an event on the *current* stream: work on another stream counts only as far as
    the current stream waits for it, which is what delays the step.
    """

    def __init__(self, device: Device) -> None:
        self.device = torch.device(device)
        self._marks: list[list[tuple[str, Instant]]] = []

    def each(self, steps: int, warmup: int = 0) -> Iterator[int]:
        """Start `warmup` steps, which are dropped, and then `steps`.

        The caller marks the phases of each step.
        """
        for number in range(warmup + steps):
            if number == warmup:
                self.clear()
            self.start()
            yield number

    def start(self) -> None:
        """Begin a step."""
        self._marks.append([("", instant(self.device))])

    def mark(self, phase: str) -> None:
        """End ``phase``, which began at the previous mark.

        A phase marked twice in a step is summed.

        Raises ValueError before `start()`, and for a phase named `step`.
        """
        if not self._marks:
            raise ValueError(
                f"mark({phase!r}) before start(): call start() at the beginning of each step"
            )
        if not phase or phase == "step":
            raise ValueError(f"a phase cannot be named {phase!r}: 'step' is the sum of all phases")
        self._marks[-1].append((phase, instant(self.device)))

    def steps(self) -> list[dict[str, float]]:
        """Phase → ms for each step so far, and ``"step"``: from its start to its last mark.

        Synchronises the device once. The timings stay; `clear` forgets them.
        """
        self.synchronize()
        steps = []
        for marks in self._marks:
            phases = {}
            for (_, begin), (phase, end) in itertools.pairwise(marks):
                phases[phase] = phases.get(phase, 0.0) + elapsed_ms(begin, end)
            steps.append(phases | {"step": elapsed_ms(marks[0][1], marks[-1][1])})
        return steps

    def clear(self) -> None:
        """Forget all steps, such as those of the warm-up."""
        self._marks.clear()

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self.device)


def slowest_rank(
    samples: Sequence[float], group: dist.ProcessGroup | None, device: Device
) -> list[float]:
    """Return the element-wise maximum of the samples over the ranks of ``group``.

    A step is as slow as its slowest rank.

    Every rank must call it with the same number of samples and gets the same answer. One all-gather
    is used and not a MAX reduction, because MAX may drop a NaN depending on the rank that holds it.
    Without a process group the samples are returned.

    Args:
        group: process group, None for the default one.
        device: device of the group's tensors: ``cuda`` for NCCL, ``cpu`` for gloo.
    """
    if not dist.is_initialized():
        return [float(sample) for sample in samples]
    mine = torch.tensor(list(samples), dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone).amax(dim=0).tolist()  # amax keeps NaN


def capture(
    run: Call,
    calls: int = 1,
    stream: torch.cuda.Stream | None = None,
    *,
    beside: torch.cuda.CUDAGraph | None = None,
) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of `calls` runs.

    Each must be warm, because loading a kernel is not allowed in a capture.

    Args:
        stream: stream to capture, None for torch's own. A backward runs on the stream of its
            forward.
        beside: living graph whose memory this one also uses. Replay one at a time, and read no
            result.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=beside and beside.pool(), stream=stream):
        for _ in range(calls):
            run()
    return graph


@dataclass(frozen=True)
class Replays:
    """Timer of a CUDA graph: number of replays → device ms of one call in each replay."""

    graph: torch.cuda.CUDAGraph
    calls: int

    def __call__(self, repeats: int) -> list[float]:
        self.graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / self.calls for a, b in itertools.pairwise(marks)]


def replayed(
    run: Call,
    *,
    graph_ms: float = 2.0,
    calls: tuple[int, int] = (1, 10),
    beside: torch.cuda.CUDAGraph | None = None,
) -> Replays:
    """Capture `run` in a CUDA graph, to be timed. The L2 stays warm.

    Args:
        graph_ms: ms that the calls in the graph take together, so that the start of the graph
            weighs little. Short calls take 0.2 to 0.5 ms when the host issues them.
        calls: least number of calls (if one takes less than `graph_ms`), and largest number.
        beside: living graph that shares its memory, see `capture`.
    """
    torch.cuda.empty_cache()  # what earlier calls cached is of no use to the graph's own pool
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        run()
        begin.record()
        run()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    end.synchronize()
    once = begin.elapsed_time(end)
    count = max(calls[0] if once <= graph_ms else 1, min(calls[1], int(graph_ms / once)))
    return Replays(capture(run, count, beside=beside), count)


def device_percentiles(run: Call, device: Device, repeats: int) -> dict[str, float]:
    """Return `time_p20_ms`, `time_p50_ms` and `time_p80_ms` of `run`.

    On a GPU they are those of replays (`replayed`), elsewhere of calls.
    """
    if torch.device(device).type == "cuda":
        samples = replayed(run, graph_ms=0.5, calls=(10, 20))(repeats)
    else:
        samples = measure(run, warmup=1, repeats=repeats, device=device)
    return percentile_metrics("time", samples)


def call_ms(run: Call, repeats: int = 5, block_ms: float = 10.0) -> dict[str, list[float]]:
    """Return `wall` and `host`, ms per call of `run`, called repeatedly as in a model.

    Each of the `repeats` times is that of a block of calls that take about `block_ms`, begun with
    an idle device: until the device has finished the block, and until the host is free. If both are
    equal, the device waited for the host.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def block(calls: int) -> tuple[float, float]:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        host = time.perf_counter()
        synchronize(device)
        return 1e3 * (time.perf_counter() - begin) / calls, 1e3 * (host - begin) / calls

    run()  # compiles, and is no measure of how many calls a block takes
    count = max(1, min(100, int(block_ms / max(1e-3, block(3)[0]))))
    block(count)
    wall, host = zip(*(block(count) for _ in range(repeats)), strict=True)
    return {"wall": list(wall), "host": list(host)}
