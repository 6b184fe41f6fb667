"""Effects of the hardware, and of launch parameters: kernels run so that nothing else matters."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.measure import attempt
from distlab.theory.gpu import occupancy, wave_quantisation
from distlab.theory.warp_access import WARP, bank_conflicts, swizzle, warp_divergence
from experiments.lessons._lesson_kernels import (
    busy_kernel,
    divergent_kernel,
    reread_kernel,
    stream_kernel,
    strided_kernel,
)
from kernels._compile import resources
from kernels._dispatch import compile_only, interpreted, launch

from .lesson_bench import CHECKED_ROUNDS, Bench, checked

STRIDES = (1, 2, 4, 8, 16, 32)
PHASES = (32, 16, 8, 4, 2, 1)
# Name → number of neighbouring lanes that take the same branch, and number of branches.
BRANCHES = {
    "one branch": (WARP, 1),
    "four, by warp": (WARP, 4),
    "two, by half warp": (WARP // 2, 2),
    "two, by lane": (1, 2),
    "four, by lane": (1, 4),
}
SIDE = 32  # words of a side of the tile that goes through shared memory
BLOCK = 1024  # one element for each of 32 warps' lanes
L2_SPAN = 2**21  # fp32 elements that the L2 of any data-centre GPU keeps
ACCESS = 64  # bytes: two sectors, the least that HBM3 gives
BLOCKS, WARPS, STAGES = (256, 1024, 4096), (1, 4, 16), (1, 4)
TOLERANCE = 1e-2  # relative to the largest value of an addition in bf16


def strides(bench: Bench) -> None:
    """Compare the bytes that memory moves for warps with strides, over those of stride 1.

    The last row begins within a sector.
    """
    count = bench.config.elements
    # Every stride reads from the same tensor, whose length is that of the largest.
    x = torch.arange(count * max(STRIDES) + BLOCK, device=bench.device, dtype=torch.int32)
    y = torch.empty(count, device=bench.device, dtype=torch.int32)

    # Eight elements per thread, so that enough bytes are under way at stride 1.
    def run(_: int, stride: int, offset: int) -> None:
        launch(strided_kernel, (count // BLOCK,), x, y, stride, offset, BLOCK=BLOCK, num_warps=4)

    def error(stride: int, offset: int) -> float:
        expected = x[offset::stride][:count]
        return (y - expected).abs().max().item()

    def moved(stride: int, offset: int) -> int:
        """Return the bytes read and written for 64 warps."""
        elements, size = range(64 * WARP), x.element_size()
        # The accesses that the warps' addresses fall into. Each moves ACCESS bytes, whatever is
        # used of them.
        accesses = {(offset + i * stride) * size // ACCESS for i in elements}
        return ACCESS * len(accesses) + size * len(elements)

    cases = [(stride, 0) for stride in STRIDES]
    # The last case starts 16 bytes into an access, so its warps touch one more.
    for stride, offset in (*cases, (1, 4)):
        name = f"stride {stride}"
        if offset:
            name += f", {offset * x.element_size()} bytes off"
        bench.effect(
            "strides",
            name,
            factor=moved(stride, offset) / moved(1, 0),
            call=partial(run, stride=stride, offset=offset),
            error=partial(error, stride, offset),
        )


def banks(bench: Bench) -> None:
    """Compare rounds of writing a tile's rows and reading its columns with conflict-free ones."""
    programs = 8 * bench.sms  # enough warps that the shared memory itself is the limit
    y = torch.empty(programs, BLOCK, device=bench.device)
    for phases in PHASES:
        # A column: the words of one column in all rows, at their places after the swizzle.
        reads = bank_conflicts([row * SIDE + swizzle(row % phases, 0) for row in range(WARP)])
        bench.effect(
            "banks",
            "1 phase" if phases == 1 else f"{phases} phases",
            # Writing a row has no conflicts and takes 1. Reading takes `reads`.
            factor=(1 + reads) / 2,
            call=None if interpreted() else partial(transpose, y, phases),
            error=partial(sum_error, y, (CHECKED_ROUNDS - 1) / 2),
        )


def transpose(y: Tensor, phases: int, rounds: int) -> None:
    """Send a tile for each row of y through shared memory."""
    from experiments.lessons._lesson_banks import transpose_kernel

    launch(transpose_kernel, (len(y),), y, rounds, PHASES=phases)


def sum_error(y: Tensor, start: float) -> float:
    """Return the largest error of rows of CHECKED_ROUNDS times start, start + 1, and so on."""
    exact = CHECKED_ROUNDS * (start + torch.arange(BLOCK, device=y.device))
    return (y - exact).abs().max().item()


def error_of(y: Tensor) -> float:
    """Return the largest error of y = 0, 1, 2, … after CHECKED_ROUNDS of x ← x / 2 + 1.

    It is divided by their number.
    """
    # x ← x/2 + 1 halves the distance from its fixed point, 2.
    exact = 2 + (torch.arange(len(y), device=y.device, dtype=torch.float64) - 2) / 2**CHECKED_ROUNDS
    return (y - exact).abs().max().item() / len(y)


def divergence(bench: Bench) -> None:
    """Compare the times of warps whose lanes take one to four branches."""
    y = torch.empty(bench.sms * BLOCK, device=bench.device)

    def run(rounds: int, width: int, ways: int) -> None:
        launch(
            divergent_kernel,
            (bench.sms,),
            y,
            rounds,
            WIDTH=width,
            WAYS=ways,
            BLOCK=BLOCK,
            num_warps=32,
        )

    for name, (width, ways) in BRANCHES.items():
        # The same expression as in the kernel, for the lanes of one warp.
        branches = [lane // width % ways for lane in range(WARP)]
        # The interpreter has no warps, so divergence cannot be seen there.
        call = None if interpreted() else partial(run, width=width, ways=ways)
        bench.effect(
            "divergence",
            name,
            factor=warp_divergence(branches, [1.0] * ways).cycles,
            call=call,
            error=partial(error_of, y),
        )


def waves(bench: Bench) -> None:
    """Compare numbers of programs that each keep a multiprocessor busy.

    Two on one multiprocessor take twice as long as one.
    """
    sms = bench.sms
    y = torch.empty(4 * sms * BLOCK, device=bench.device)

    # The first row is one program for each multiprocessor, the unit of all others.
    for blocks in (sms, sms // 2, sms + 1, sms * 3 // 2, 2 * sms, 2 * sms + 1, 3 * sms, 4 * sms):
        used = y[: blocks * BLOCK]
        bench.effect(
            "waves",
            f"{blocks} programs",
            factor=wave_quantisation(blocks, sms).waves,
            call=partial(busy, used),
            error=partial(error_of, used),
        )


def busy(y: Tensor, rounds: int) -> None:
    """Launch a program of 32 warps for each BLOCK of y."""
    launch(busy_kernel, (len(y) // BLOCK,), y, rounds, BLOCK=BLOCK, num_warps=32)


def levels(bench: Bench) -> None:
    """Read the same number of bytes from registers, shared memory, L2 and HBM.

    The programs fill all places. An FMA reads a register that it wrote. A round through shared
    memory writes the same number of bytes as it reads.
    """
    # Every block holds 0 … BLOCK − 1, so the sums are known whichever blocks a program reads.
    x = torch.arange(BLOCK, device=bench.device).float().repeat(8 * bench.config.elements // BLOCK)
    y = torch.empty(8 * bench.sms, BLOCK, device=bench.device)
    spec = bench.spec

    def read(rounds: int, span: int) -> None:
        launch(reread_kernel, (len(y),), x, y, rounds, SPAN=span, BLOCK=BLOCK, num_warps=4)

    def factor(peak: float | None) -> float | None:
        """Return the predicted time of a level over that of registers."""
        # Registers give one operand of 4 bytes per multiply-add, which is two FLOPs: 2 · peak
        # bytes/s.
        return peak and 2 * spec.peak["fp32"] / peak

    bench.effect(
        "levels",
        "registers",
        factor=factor(spec and 2 * spec.peak["fp32"]),
        call=partial(busy, y.view(-1)),
        error=partial(error_of, y.view(-1)),
        read_bytes=y.nbytes,
    )
    bench.effect(
        "levels",
        "shared memory",
        # A round writes the same number of bytes as it reads, so half of the bandwidth counts.
        factor=factor(spec and spec.shared_bandwidth / 2),
        call=None if interpreted() else partial(transpose, y, SIDE),
        error=partial(sum_error, y, 2.0),
        read_bytes=y.nbytes,
    )
    bench.effect(
        "levels",
        "L2",
        factor=factor(spec and spec.l2_bandwidth),
        call=partial(read, span=min(L2_SPAN, len(x))),
        error=partial(sum_error, y, 0.0),
        read_bytes=y.nbytes,
    )
    bench.effect(
        "levels",
        "HBM",
        factor=factor(spec and spec.hbm_bandwidth),
        call=partial(read, span=len(x)),
        error=partial(sum_error, y, 0.0),
        read_bytes=y.nbytes,
    )


def element_wise(bench: Bench) -> None:
    """Time an addition by programs that fill all places, over BLOCK × warps × stages.

    Little's law predicts the rate: bytes under way / latency, and never more than a copy's rate.
    Both are measured here.
    """
    count, sms = bench.config.elements, bench.sms
    x, y = torch.randn(2, count, device=bench.device).to(bench.dtype)
    z = torch.empty_like(x)
    expected = x.double() + y.double()
    moved = 3 * x.nbytes  # two tensors read, one written

    def add(block: int, warps: int, stages: int, programs: int, blocks: int) -> None:
        launch(
            stream_kernel, (programs,), x, y, z, blocks, BLOCK=block, STAGES=stages, num_warps=warps
        )

    def added(call: Callable[[], Any]) -> dict[str, Any]:
        call()
        error = (z.double() - expected).abs().max() / expected.abs().max()
        metrics = checked(error.item(), TOLERANCE) | bench.time(call)
        metrics["gb_per_s"] = moved / metrics["time_p50_ms"] / 1e6
        return metrics

    # torch's own element-wise kernel stands for the rate of a copy: it reads one tensor and writes
    # one.
    copy_ms = bench.time(partial(torch.neg, x, out=z))["time_p50_ms"]
    # One warp that waits for each block of 1,024, over more than the L2 keeps: the latency of a
    # load from memory.
    steps = min(count // 1024, 4 if interpreted() else 2**15)
    latency_ms = bench.time(partial(add, 1024, 1, 1, 1, steps))["time_p50_ms"] / steps
    for block, warps, stages in itertools.product(BLOCKS, WARPS, STAGES):
        blocks = count // block
        # 64 warps are all places of a multiprocessor.
        programs = min(blocks, sms * (64 // warps if bench.spec else 1))
        call = partial(add, block, warps, stages, programs, blocks)
        known = {}  # metrics that need the GPU's data sheet
        if bench.spec:
            with compile_only() as compiled:
                # Registers are known only after compilation, so the kernel is compiled first.
                call()
            used = resources(compiled[0])
            resident = occupancy(
                bench.spec, 32 * warps, max(1, used["registers"]), used["shared_bytes"]
            ).blocks
            # cp.async copies at least 4 bytes per thread, so smaller tiles are not loaded ahead.
            ahead = stages - 1 if block * x.element_size() >= 4 * 32 * warps else 1
            # Bytes that one program has under way, of two inputs.
            loads = 2 * x.element_size() * block * max(1, ahead)
            flying = loads * min(programs, resident * sms)
            known = {
                "registers": used["registers"],
                "in_flight_kib": flying / sms / 1024,
                # A copy moves two tensors and an addition three, of which two are loads.
                "predicted_ms": max(1.5 * copy_ms, moved * latency_ms / (1.5 * flying)),
            }
        metrics = attempt(partial(added, call)) | known
        bench.run.add(
            f"{block} × {warps} warps × {stages} stages",
            metrics,
            part="element-wise",
            block=block,
            warps=warps,
            stages=stages,
        )
