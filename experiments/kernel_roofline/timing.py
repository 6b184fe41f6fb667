"""Times on the device, the ceilings of this run, and what was launched."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from distlab.measure import clock, memory_traffic


def can_be_captured(run: Callable[[], Any]) -> bool:
    """Return whether one run does not wait for the host.

    A failed capture would leave the device in an unknown state.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


class Prepared(NamedTuple):
    """Function to time: a graph's replay, or the call itself.

    `kept` holds the tensors that the graph reads, which must live as long as it does.
    """

    call: Callable[[], Any]
    captured: bool
    kept: Any


def prepare(make: Callable[[], Callable[[], Any]], device: str, capture: bool = True) -> Prepared:
    """Return one warm run, as a CUDA graph if it can be captured.

    A peer that waits for the device cannot.

    `make` is called on the stream that is captured, because a backward runs on the stream of its
    forward.
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


def device_ms(call: Callable[[], Any], count: int, device: str) -> float:
    """Return the median ms of `count` calls after one untimed call.

    The L2 is overwritten before each.
    """
    flush = (
        torch.empty(2**28, dtype=torch.int8, device=device).zero_
        if device == "cuda"
        else lambda: None
    )
    timer = clock.PhaseTimer(device)
    call()
    for _ in range(count):
        flush()
        timer.start()
        call()
        timer.mark("call")
    return statistics.median(step["step"] for step in timer.steps())


def calls_within(ms: float, call: Callable[[], Any], device: str) -> int:
    """Return the number of calls that take about `ms`, at least one."""
    return max(1, int(ms / device_ms(call, 3, device)))


def fits(held: int) -> bool:
    """Return whether `held` bytes, the most that all variants hold, can be held at once.

    A graph keeps the memory that its run allocated.

    The same amount is left for memory lost between blocks, the runs before a capture and the calls
    in a loop.
    """
    free = (
        torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    )
    return 2 * held <= free


def spills(run: Callable[[], Any]) -> dict[str, int]:
    """Registers and spilled bytes of our kernels in one run: the most of any."""
    from kernels import _dispatch
    from kernels._compile import resources

    with _dispatch.compile_only() as compiled:
        run()
    found = [resources(kernel) for kernel in compiled]
    return {name: max((r[name] for r in found), default=0) for name in ("registers", "spill_bytes")}


def ceilings(device: str, repeat_ms: int) -> dict[str, float]:
    """Rates that rows are held against, measured now.

    `copy_gb_per_s` is the faster of cudaMemcpy and torch's element-wise kernel; the rates of the
    other kinds of torch's operations are what `prediction` needs.
    """
    on_gpu = device == "cuda"

    def ms(run: Callable[[], Any]) -> float:
        ready = prepare(lambda: run, device)
        return device_ms(ready.call, calls_within(repeat_ms, ready.call, device), device)

    rows, cols = (65536, 4096) if on_gpu else (16, 4096)
    x = torch.randn(rows, cols, device=device)
    reached = memory_traffic.rates(x, lambda run: ms(run) / 1e3)
    half, out, tiny = x.bfloat16(), torch.empty_like(x), torch.ones(1, device=device)
    reached["copy"] = max(reached["copy"], 2 * x.nbytes / ms(lambda: torch.abs(x, out=out)) * 1e3)
    reached["rows"] = (
        2 * half.nbytes / ms(lambda: torch.nn.functional.layer_norm(half, (cols,))) * 1e3
    )
    limits = {f"{kind}_gb_per_s": rate / 1e9 for kind, rate in reached.items()}
    limits["empty_kernel_ms"] = ms(lambda: torch.abs(tiny, out=tiny))
    size = 8192 if on_gpu else 64
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    limits["cublas_tflop_per_s"] = 2 * size**3 / ms(lambda: torch.mm(a, b)) / 1e9
    square = torch.ones(64, 64, device=device, requires_grad=True)
    # cuBLAS takes its workspaces now, and no row is charged for them
    (square @ square).sum().backward()
    return limits
