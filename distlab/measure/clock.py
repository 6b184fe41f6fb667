"""Clocks: repeated timings, phases of a step, the slowest rank, and replays of CUDA graphs.

On CUDA the clock is the stream's: events are recorded between kernels and read after one
synchronisation at the end, so that timing a step adds no synchronisation to it. On the CPU it is
`time.perf_counter`. All times are in ms. `interleaved` turns them into percentiles and intervals.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distlab.measure.interleaved import percentile_metrics

Instant = torch.cuda.Event | float  # a recorded event on a GPU, seconds on a CPU
Call = Callable[[], object]  # the function to time
Device = torch.device | str


def instant(device: torch.device) -> Instant:
    """Return the time now on the device's clock.

    It is an event on the current stream of a GPU, and seconds on a CPU.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_ms(begin: Instant, end: Instant) -> float:
    """Return the ms between two instants of one device. On a GPU, synchronise before."""
    if isinstance(begin, float):
        return (end - begin) * 1e3
    return begin.elapsed_time(end)


def synchronize(device: Device) -> None:
    """Wait until the device has done all queued work. On a CPU, return at once."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def measure(fn: Call, *, warmup: int, repeats: int, device: Device) -> list[float]:
    """Time ``repeats`` calls of ``fn`` after ``warmup`` untimed ones, and return the ms of each.

    On CUDA the calls are queued without waiting in between, as in training. A duration is the time
    between the events before and after the call on the current stream.

    Args:
        fn: function to time.
        warmup: number of calls before the timed ones.
        repeats: number of timed calls.
        device: device whose clock is used.

    Raises:
        ValueError: a negative ``warmup`` or no ``repeats``.
    """
    if warmup < 0 or repeats < 1:
        raise ValueError(f"measure needs warmup >= 0 and repeats >= 1, got {warmup} and {repeats}")
    for _ in range(warmup):
        fn()
    timer = PhaseTimer(device)
    timer.synchronize()  # otherwise the first repetition also waits for the warm-up's kernels
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

    On CUDA a mark is an event on the *current* stream. Work on another stream counts only as far as
    the current stream waits for it, because only this delays the step.
    """

    def __init__(self, device: Device) -> None:
        self.device = torch.device(device)
        # For each step: its start, named "", and then the end of each phase with the phase's name.
        self._steps: list[list[tuple[str, Instant]]] = []

    def each(self, steps: int, warmup: int = 0) -> Iterator[int]:
        """Start each of `warmup` steps, which are dropped, and then of `steps` steps.

        Yield the number of each step. The caller marks its phases.
        """
        for number in range(warmup + steps):
            if number == warmup:
                self.clear()
            self.start()
            yield number

    def start(self) -> None:
        """Begin a step."""
        self._steps.append([("", instant(self.device))])

    def mark(self, phase: str) -> None:
        """End ``phase``, which began at the previous mark.

        A phase marked twice in a step is summed.

        Raises:
            ValueError: a mark before `start()`, or a phase named `step`.
        """
        if not self._steps:
            raise ValueError(
                f"mark({phase!r}) before start(): call start() at the beginning of each step"
            )
        if not phase or phase == "step":
            raise ValueError(f"a phase cannot be named {phase!r}: 'step' is the sum of all phases")
        self._steps[-1].append((phase, instant(self.device)))

    def steps(self) -> list[dict[str, float]]:
        """Return phase → ms of each step so far, and ``"step"``: from its start to its last mark.

        Synchronise the device once. The timings stay until `clear`.
        """
        self.synchronize()
        steps = []
        for marks in self._steps:
            times_ms = {}
            for (_, begin), (phase, end) in itertools.pairwise(marks):
                # Summed, because a phase of several micro-batches is marked once for each.
                times_ms[phase] = times_ms.get(phase, 0.0) + elapsed_ms(begin, end)
            _, first = marks[0]
            _, last = marks[-1]
            times_ms["step"] = elapsed_ms(first, last)
            steps.append(times_ms)
        return steps

    def clear(self) -> None:
        """Drop the timings of all steps, for example of the warm-up."""
        self._steps.clear()

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self.device)


def slowest_rank(
    samples: Sequence[float], group: dist.ProcessGroup | None, device: Device
) -> list[float]:
    """Return the element-wise maximum of the samples over the ranks of ``group``.

    A step is as slow as its slowest rank.

    Every rank must call it with the same number of samples, and gets the same answer. Without a
    process group the samples are returned.

    Args:
        samples: ms, or another quantity of which the largest counts.
        group: process group, None for the default one.
        device: device of the group's tensors: ``cuda`` for NCCL, ``cpu`` for gloo.
    """
    if not dist.is_initialized():
        return [float(sample) for sample in samples]
    mine = torch.tensor(list(samples), dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    # Not a MAX reduction: it may drop a NaN, depending on the rank that holds it. `amax` keeps it.
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone).amax(dim=0).tolist()


def capture(
    run: Call,
    calls: int = 1,
    stream: torch.cuda.Stream | None = None,
    *,
    beside: torch.cuda.CUDAGraph | None = None,
) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of `calls` runs.

    `run` must be warm, because loading a kernel is not allowed in a capture.

    Args:
        run: function to capture.
        calls: number of runs in the graph.
        stream: stream to capture, None for torch's own. A backward runs on the stream of its
            forward.
        beside: living graph whose memory this one also uses. Replay one at a time, and read no
            result.
    """
    pool = None
    if beside is not None:
        pool = beside.pool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        for _ in range(calls):
            run()
    return graph


@dataclass(frozen=True)
class Replays:
    """Timer of the calls in a CUDA graph.

    Attributes:
        graph: captured graph.
        calls: number of calls in the graph.
    """

    graph: torch.cuda.CUDAGraph
    calls: int

    def __call__(self, repeats: int) -> list[float]:
        """Replay the graph `repeats` times, and return the device's ms per call in each replay."""
        self.graph.replay()  # not timed: the first replay also uploads the graph
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        # N + 1 events around N replays: the end of one is the beginning of the next.
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        torch.cuda.synchronize()
        replays = itertools.pairwise(marks)
        return [begin.elapsed_time(end) / self.calls for begin, end in replays]


def replayed(
    run: Call,
    *,
    graph_ms: float = 2.0,
    calls: tuple[int, int] = (1, 10),
    beside: torch.cuda.CUDAGraph | None = None,
) -> Replays:
    """Capture `run` in a CUDA graph, and return its timer. The L2 stays warm between the calls.

    Args:
        run: function to time.
        graph_ms: ms that the calls in the graph take together, so that the start of the graph
            weighs little. Short calls take 0.2 to 0.5 ms when the host issues them.
        calls: minimum number of calls (if one takes less than `graph_ms`), and maximum number.
        beside: living graph that shares its memory, see `capture`.
    """
    torch.cuda.empty_cache()  # a graph has its own pool, and cannot use blocks cached outside of it
    # Warm up on a side stream, as torch requires before a capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        run()
        begin.record()
        run()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    end.synchronize()
    # Of the second run. The first also compiles.
    once_ms = begin.elapsed_time(end)
    min_calls, max_calls = calls
    if once_ms > graph_ms:
        min_calls = 1  # one call is long enough by itself
    count = max(min_calls, min(max_calls, int(graph_ms / once_ms)))
    graph = capture(run, count, beside=beside)
    return Replays(graph=graph, calls=count)


def device_percentiles(run: Call, device: Device, repeats: int) -> dict[str, float]:
    """Return `time_p20_ms`, `time_p50_ms` and `time_p80_ms` of `run`.

    On a GPU they are those of a graph's replays (`replayed`), elsewhere of calls.

    Args:
        run: function to time.
        device: device that it runs on.
        repeats: number of timed replays or calls, at least three.
    """
    if torch.device(device).type == "cuda":
        # At least ten calls per graph, because its launch takes as long as some short kernels.
        samples = replayed(run, graph_ms=0.5, calls=(10, 20))(repeats)
    else:
        samples = measure(run, warmup=1, repeats=repeats, device=device)
    return percentile_metrics("time", samples)


def call_ms(run: Call, repeats: int = 5, block_ms: float = 10.0) -> dict[str, list[float]]:
    """Return `wall` and `host`, ms per call of `run`, called repeatedly as in a model.

    Each block of calls begins with an idle device. `wall` lasts until the device has finished the
    block, and `host` until the host is free. If both are equal, the device waited for the host.

    Args:
        run: function to time.
        repeats: number of timed blocks.
        block_ms: ms that a block of calls takes, about.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def block(calls: int) -> tuple[float, float]:
        """Return ms per call until the device is done, and until the host is free."""
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        host_done = time.perf_counter()
        synchronize(device)
        device_done = time.perf_counter()
        return 1e3 * (device_done - begin) / calls, 1e3 * (host_done - begin) / calls

    run()  # compiles, so its time does not tell how many calls a block takes
    estimate_ms, _ = block(3)
    estimate_ms = max(1e-3, estimate_ms)  # a clock may not advance during a very short call
    # Below the number of launches that the driver queues: then the host would wait, and `host`
    # would equal `wall`.
    count = max(1, min(100, int(block_ms / estimate_ms)))
    block(count)  # warm-up
    wall, host = [], []
    for _ in range(repeats):
        wall_ms, host_ms = block(count)
        wall.append(wall_ms)
        host.append(host_ms)
    return {"wall": wall, "host": host}
