"""Times on the device, the ceilings of this run, and the registers of what was launched.

Times in a loop, as a model calls a function, are `distlab.measure.call_ms`. Next: `Row` in
`__init__`, which times all variants of a row with these functions.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distlab import hardware
from distlab.measure import clock, memory_traffic
from distlab.theory.gpu import occupancy


def can_be_captured(run: Callable[[], Any]) -> bool:
    """Return whether one run does not wait for the host.

    A failed capture would leave the device in an unknown state.
    """
    # In this mode a wait for the device raises instead of waiting. A capture would fail at it as
    # well.
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

    A peer that waits for the device cannot be captured.

    Args:
        make: function that returns the run. It is called on the stream that is captured, because a
            backward runs on the stream of its forward.
        device: `cuda` or `cpu`.
        capture: False to time the calls themselves.
    """
    # A CPU has no graphs, and calls are timed as they are.
    if device != "cuda":
        return Prepared(make(), False, None)
    stream = torch.cuda.Stream()
    # The inputs are made on the current stream, and may not be ready yet.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = make()
        # A capture must not compile or tune, so the first calls come before it.
        for _ in range(2):
            run()
        capture = capture and can_be_captured(run)
    torch.cuda.synchronize()
    if not capture:
        return Prepared(run, False, None)
    # The run is kept, because a graph reads the memory of the tensors that the run holds.
    return Prepared(clock.capture(run, stream=stream).replay, True, run)


def device_ms(call: Callable[[], Any], count: int, device: str) -> float:
    """Return the median ms of `count` calls after one untimed call.

    On a GPU the L2 is overwritten before each.
    """
    larger_than_l2 = None
    if device == "cuda":
        # 256 MiB. An H100 and an H200 have an L2 of 50 MB.
        larger_than_l2 = torch.empty(2**28, dtype=torch.int8, device=device)
    timer = clock.PhaseTimer(device)
    # Untimed: the first replay of a graph also uploads it.
    call()
    for _ in range(count):
        if larger_than_l2 is not None:
            # Evicts what the call before left in the L2. Writing the buffer comes before `start`,
            # and is not timed.
            larger_than_l2.zero_()
        timer.start()
        call()
        timer.mark("call")
    # The median ignores single calls that other work on the machine disturbs.
    return statistics.median(step["step"] for step in timer.steps())


def calls_within(ms: float, call: Callable[[], Any], device: str) -> int:
    """Return the number of calls that take about `ms`, at least one."""
    # Three calls give an estimate, which decides only how many are timed.
    return max(1, int(ms / device_ms(call, 3, device)))


def fits(held: int) -> bool:
    """Return whether all variants of a row can be held at once.

    A graph keeps the memory that its run allocated.

    Args:
        held: bytes that all variants hold at most.
    """
    # torch's allocator hands out its cached blocks again, although the driver counts them as used.
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + cached
    # The same amount again is left for memory lost between blocks, the runs before a capture and
    # the calls in a loop.
    return 2 * held <= free


def of_our_kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Return what our kernels in one run need, see `needed`."""
    # Imported here, because importing them decides how kernels run.
    from kernels import _dispatch

    with _dispatch.compile_only() as compiled:
        run()
    return needed(compiled)


def of_triton_kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Return what the Triton kernels of anyone's function need, see `needed`.

    {} if one run launches none. Our kernels that it calls are counted, and compute nothing.
    """
    import triton.runtime.jit

    from kernels import _dispatch

    compiled = []
    # Every launch of Triton, also one in another package, goes through this method.
    launch = triton.runtime.jit.JITFunction.run

    def noting(*arguments: Any, **options: Any) -> Any:
        kernel = launch(*arguments, **options)
        compiled.append(kernel)
        return kernel

    triton.runtime.jit.JITFunction.run = noting
    try:
        with _dispatch.compile_only():  # ours otherwise repeat a recorded launch
            run()
    finally:
        triton.runtime.jit.JITFunction.run = launch
    return needed(compiled)


def needed(compiled: Sequence[Any]) -> dict[str, float]:
    """Return the largest `registers` and `spill_bytes` of any of these compiled kernels.

    {} without kernels, because 0 registers would look like a measurement. `occupancy_pct` is the
    smallest share of an SM's warps that can run at the same time. It is there for GPUs whose
    datasheet is known.
    """
    from kernels._compile import resources

    if not compiled:
        return {}
    spec = None
    if torch.cuda.is_available():  # kernels can be compiled without one
        spec = hardware.lookup(torch.cuda.get_device_name())
    largest: dict[str, float] = {"registers": 0, "spill_bytes": 0}
    for kernel in compiled:
        found = resources(kernel)
        for name in ("registers", "spill_bytes"):
            largest[name] = max(largest[name], found[name])
        if spec is not None:
            threads = 32 * kernel.metadata.num_warps
            resident = occupancy(spec, threads, found["registers"], found["shared_bytes"])
            share = 100 * resident.fraction
            largest["occupancy_pct"] = min(largest.get("occupancy_pct", share), share)
    return largest


def ceilings(device: str, repeat_ms: int) -> dict[str, float]:
    """Return the rates that rows are compared with, measured now.

    Args:
        device: `cuda` or `cpu`.
        repeat_ms: ms of device time per rate.

    Returns:
        `copy_gb_per_s`, the faster of cudaMemcpy and torch's element-wise kernel. `rows_gb_per_s`,
        torch's LayerNorm. `<kind>_gb_per_s` of the other kinds of torch's operators and
        `empty_kernel_ms`, which `prediction` needs. `cublas_tflop_per_s`.
    """
    if device == "cuda":
        # In fp32 1 GiB for the copy, far more than the L2 holds, and a matmul that fills all SMs.
        rows, cols, size = 65536, 4096, 8192
    else:
        rows, cols, size = 16, 4096, 64

    def milliseconds(run: Callable[[], Any]) -> float:
        def make() -> Callable[[], Any]:
            return run

        ready = prepare(make, device)
        return device_ms(ready.call, calls_within(repeat_ms, ready.call, device), device)

    def seconds(run: Callable[[], Any]) -> float:
        return milliseconds(run) / 1e3

    x = torch.randn(rows, cols, device=device)
    bytes_per_s = memory_traffic.rates(x, seconds)
    half, out, tiny = x.bfloat16(), torch.empty_like(x), torch.ones(1, device=device)
    # The factor 2: every byte is read and written.
    elementwise = 2 * x.nbytes / milliseconds(partial(torch.abs, x, out=out)) * 1e3
    # cudaMemcpy is not always the faster of the two. A ceiling that rows exceed would be none.
    bytes_per_s["copy"] = max(bytes_per_s["copy"], elementwise)
    bytes_per_s["rows"] = 2 * half.nbytes / milliseconds(partial(F.layer_norm, half, (cols,))) * 1e3
    limits = {f"{kind}_gb_per_s": rate / 1e9 for kind, rate in bytes_per_s.items()}
    limits["empty_kernel_ms"] = milliseconds(partial(torch.abs, tiny, out=tiny))
    a = torch.randn(size, size, device=device).bfloat16()
    b = torch.randn(size, size, device=device).bfloat16()
    # A matmul of N × N takes 2·N³ FLOPs. Over ms, 1e9 makes it TFLOP/s.
    limits["cublas_tflop_per_s"] = 2 * size**3 / milliseconds(partial(torch.mm, a, b)) / 1e9
    square = torch.ones(64, 64, device=device, requires_grad=True)
    # cuBLAS allocates its workspaces now, so that they do not count as memory of a row.
    (square @ square).sum().backward()
    return limits
