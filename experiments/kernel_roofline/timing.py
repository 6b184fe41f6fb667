"""Device times, alone and interleaved, the ceilings of this run, and what was launched.

Interleaved, so that clock drift affects all variants alike: every round (`distlab.measure.rounds`) times each of them
for a moment, every other round in reverse, and ours stands at both ends of a round. Times of one round are compared.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from distlab.measure import clock, interleave, noise_floor

AGAIN = "ours again"
Rounds = Mapping[str, list[list[float]]]  # variant → times in ms, round by round


def can_be_captured(run: Callable[[], Any]) -> bool:
    """Whether one run asks nothing of the host; a failed capture would leave the device in doubt."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


class Prepared(NamedTuple):
    """What is timed: a graph's replay, or the call itself. `kept` is what the graph reads, and must live as long."""

    call: Callable[[], Any]
    captured: bool
    kept: Any


def prepare(make: Callable[[], Callable[[], Any]], device: str, capture: bool = True) -> Prepared:
    """One run, warm, as a CUDA graph where it can be captured, which a peer that waits for the device cannot.

    `make` is called on the stream that is captured, because a backward runs on the stream of its forward.
    """
    if device != "cuda":
        return Prepared(make(), False, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = make()
        for _ in range(2):
            run()
        capture = capture and can_be_captured(run)
    torch.cuda.synchronize()
    if not capture:
        return Prepared(run, False, None)
    return Prepared(clock.capture(run, stream=stream).replay, True, run)


def device_ms(make: Callable[[], Callable[[], Any]], device: str, repeat_ms: int,
              capture: bool = True) -> dict[str, Any]:
    """p20, p50, p80 of one run. On CUDA a graph is replayed with the L2 flushed in between; where none can be captured
    the calls themselves are timed, and `captured` says so.
    """
    ready = prepare(make, device, capture)
    if device != "cuda":
        return quantiles(clock.measure(ready.call, warmup=1, repeats=3, device="cpu"))
    from triton.testing import do_bench

    times = do_bench(ready.call, warmup=max(10, repeat_ms // 3), rep=repeat_ms, return_mode="all")
    return quantiles(times) | {"captured": ready.captured}


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """`time_p20_ms`, `time_p50_ms` and `time_p80_ms` of any number of times: a long call is timed once."""
    return {f"time_p{p}_ms": float(np.percentile(times, p)) for p in (20, 50, 80)}


def interleaved(calls: Mapping[str, Callable[[], Any]], repeat_ms: float, rounds: int, device: str) -> Rounds:
    """Time the calls in `rounds` rounds, each for `repeat_ms` in all; "ours", if among them, once more as AGAIN."""
    order = list(calls.items()) + [(AGAIN, call) for name, call in calls.items() if name == "ours"]
    typical = {name: statistics.median(_timed(call, 3, device)) for name, call in order}
    counts = {name: max(1, int(repeat_ms / rounds / ms)) for name, ms in typical.items()}
    return interleave({name: partial(_timed, call, counts[name], device) for name, call in order}, rounds)


def _timed(call: Callable[[], Any], count: int, device: str) -> list[float]:
    """Milliseconds of `count` calls after one that is not timed; the L2 holds something else before each."""
    flush = torch.empty(2**28, dtype=torch.int8, device=device).zero_ if device == "cuda" else lambda: None
    timer = clock.PhaseTimer(device)
    call()
    for _ in range(count):
        flush()
        timer.start()
        call()
        timer.mark("call")
    return [step["step"] for step in timer.steps()]


def summary(times: Rounds) -> dict[str, dict[str, float]]:
    """Variant → percentiles of all its times and the number of rounds, and beside ours

    `over_ours` of a peer: the median over rounds of its time over ours in the same round;
    `noise_pct` of ours: how far from 1 the 95 % interval of ours over ours reaches.
    """
    pooled = {name: list(chain(*parts)) for name, parts in times.items() if name != AGAIN}
    if "ours" in pooled:
        pooled["ours"] += chain(*times[AGAIN])
    found = {name: quantiles(samples) | {"rounds": len(times[name])} for name, samples in pooled.items()}
    if "ours" not in times:
        return found
    middle = {name: [statistics.median(part) for part in parts] for name, parts in times.items()}
    mine = [(a + b) / 2 for a, b in zip(middle["ours"], middle[AGAIN], strict=True)]
    for name in pooled.keys() - {"ours"}:
        found[name]["over_ours"] = statistics.median(t / m for t, m in zip(middle[name], mine, strict=True))
    twice = [b / a for a, b in zip(middle["ours"], middle[AGAIN], strict=True)]
    found["ours"]["noise_pct"] = noise_floor(twice, [1.0] * len(twice))
    return found


def over_ours(theirs: Mapping[str, Any], ours: Mapping[str, Any], clock: str = "time") -> float:
    """A peer's time over ours: on the device (`time`) that of the rounds where they were interleaved."""
    interleaved = theirs.get("over_ours") if clock == "time" else None
    return interleaved or theirs[f"{clock}_p50_ms"] / ours[f"{clock}_p50_ms"]


def fits(held: Sequence[int]) -> bool:
    """Whether what variants hold at most, in bytes, can be held at once: a graph keeps what its run allocated.

    Half as much again is left for what is lost between blocks, and for the runs before a capture.
    """
    if not held:  # nothing is known of a CPU's memory, and nothing is captured there
        return True
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return 1.5 * sum(held) <= free


def launched(run: Callable[[], Any]) -> dict[str, Any]:
    """Names and number of the kernels of one run, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    names = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA
             and not e.name.startswith(("Memcpy", "Memset", "Activity", "Lazy", "Optimizer."))]
    return {"kernels": len(names), "kernel_names": sorted({name[:60] for name in names})}


def spills(run: Callable[[], Any]) -> dict[str, int]:
    """Registers and spilled bytes of our kernels in one run: the most of any."""
    from kernels import _triton
    from kernels._compile import resources

    with _triton.compile_only() as compiled:
        run()
    found = [resources(kernel) for kernel in compiled]
    return {name: max((r[name] for r in found), default=0) for name in ("registers", "spill_bytes")}


def ceilings(device: str, repeat_ms: int) -> dict[str, float]:
    """Rates that rows are held against, measured now.

    `copy_gb_per_s` is the faster of cudaMemcpy and torch's element-wise kernel; the rates of the other kinds of torch's
    operations are what `prediction` needs.
    """
    on_gpu = device == "cuda"

    def ms(run: Callable[[], Any]) -> float:
        return device_ms(lambda: run, device, repeat_ms)["time_p50_ms"]

    rows, cols = (65536, 4096) if on_gpu else (16, 4096)
    x = torch.randn(rows, cols, device=device)
    half, narrow, out = x.bfloat16(), torch.randn(rows, 1, device=device), torch.empty_like(x)
    limits = {
        "copy_gb_per_s": 2 * x.nbytes / min(ms(lambda: out.copy_(x)), ms(lambda: torch.abs(x, out=out))) / 1e6,
        "broadcast_gb_per_s": 2 * x.nbytes / ms(lambda: torch.sub(x, narrow, out=out)) / 1e6,
        "reduce_gb_per_s": x.nbytes / ms(lambda: x.sum(-1)) / 1e6,
        "widen_gb_per_s": 1.5 * x.nbytes / ms(lambda: half.float()) / 1e6,
        "rows_gb_per_s": 2 * half.nbytes / ms(lambda: torch.nn.functional.layer_norm(half, (cols,))) / 1e6,
        "empty_kernel_ms": ms(lambda: torch.abs(narrow[:1], out=narrow[:1])),
    }
    size = 8192 if on_gpu else 64
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    limits["cublas_tflop_per_s"] = 2 * size**3 / ms(lambda: torch.mm(a, b)) / 1e9
    tiny = torch.ones(64, 64, device=device, requires_grad=True)
    (tiny @ tiny).sum().backward()  # cuBLAS takes its workspaces now, and no row is charged for them
    return limits
