"""One call of attention timed: on the device, and until the host has issued it."""

import itertools
import time
from collections.abc import Callable

import torch

GRAPH_MS, MAX_CALLS = 2.0, 10  # of calls in one timed graph; short ones take 0.2 to 0.5 ms when the host issues them


def replay_ms(run: Callable[[], object], repeats: int) -> list[float]:
    """Device time in ms of `run` in `repeats` replays of a CUDA graph, captured after two warm-ups.

    The graph holds as many calls of a short `run` as make starting it negligible.
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
    calls = max(1, min(MAX_CALLS, int(GRAPH_MS / begin.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    del graph
    torch.cuda.empty_cache()
    return [a.elapsed_time(b) / calls for a, b in itertools.pairwise(marks)]


def host_ms(run: Callable[[], object], repeats: int) -> list[float]:
    """Time the host needs to issue `run` once, the device left to follow."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return times
