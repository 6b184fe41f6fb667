"""What do memory, warps, waves and launch parameters decide?

    distlab run gpu_lessons                             # all six parts, on a GPU
    distlab run gpu_lessons --parts strides waves       # two of them
    TRITON_INTERPRET=1 distlab run gpu_lessons --quick  # without a GPU: are the kernels right?

Effects of the hardware: small kernels (`_lesson_kernels.py`, `_lesson_banks.py`), run so that nothing else matters.
Each time is a multiple of the part's first row, beside the multiple that `distlab.theory` predicts:

- strides: a copy that reads every stride-th element. HBM comes 64 bytes at a time, needed or not.
- banks: a tile of 32 × 32 words through shared memory, written by rows and read by columns, with its columns exchanged
  by column xor (row mod phases). One phase leaves a column in one bank of 32, 32 phases spread it over all.
- divergence: the same arithmetic in up to four branches. A warp executes each branch that any of its lanes takes.
- waves: equal programs on all multiprocessors. One more than there are places takes a whole further wave.
- levels: the same bytes read from registers, shared memory, L2 and HBM, each by programs that wait for nothing else.

Launch parameters, as a rate:

- element-wise: an addition over BLOCK × warps × stages. What counts is how many bytes are under way at a time.

The launch parameters of the shipped attention are tried by `python -m kernels.flash_attention.tune`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.hardware import lookup
from distlab.measure import attempt, device_percentiles
from distlab.report import Ratio, noise_of, prediction_error
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
from kernels._dispatch import check_runs, compile_only, interpreted, launch, multiprocessors

STRIDES = (1, 2, 4, 8, 16, 32)
PHASES = (32, 16, 8, 4, 2, 1)
BRANCHES = {"one branch": (WARP, 1), "four, by warp": (WARP, 4), "two, by half warp": (WARP // 2, 2),
            "two, by lane": (1, 2), "four, by lane": (1, 4)}  # fmt: skip
SIDE = 32  # of the tile that goes through shared memory
CHECKED_ROUNDS = 5  # after more of them every element is 2
BLOCK = 1024  # one element for each of 32 warps' lanes
L2_SPAN = 2**21  # fp32 elements that the L2 of any data-centre GPU keeps
ACCESS = 64  # bytes: two sectors, the least that HBM3 gives
BLOCKS, WARPS, STAGES = (256, 1024, 4096), (1, 4, 16), (1, 4)
TOLERANCE = 1e-2  # of the largest value of an addition in bf16
EXACT = 1e-5  # of an effect's kernel, in fp32

EFFECTS = ("strides", "banks", "divergence", "waves", "levels")
PARTS = (*EFFECTS, "element-wise")


@dataclass(frozen=True)
class Config(Options):
    """Which parts, how much work."""

    parts: tuple[str, ...] = option(PARTS, "parts", choices=PARTS)
    elements: int = option(2**25, "that a copy or an addition writes, a power of two", least=2**12, most=2**25)
    rounds: int = option(20_000, "of arithmetic, or through shared memory", least=CHECKED_ROUNDS)
    repeats: int = option(9, "timings of a row", least=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elements & (self.elements - 1):
            raise ValueError(f"elements={self.elements}: these kernels have no ragged blocks; give a power of two")


@dataclass
class Bench:
    """What all parts measure with."""

    config: Config
    run: Run
    device: torch.device

    def __post_init__(self) -> None:
        self.dtype = torch.float16 if interpreted() else torch.bfloat16
        self.spec = lookup(str(self.run.header.environment["device_name"]))
        self.sms = multiprocessors(self.device)

    def time(self, call: Callable[[], Any]) -> dict[str, float]:
        """Percentiles of the device's time."""
        return device_percentiles(call, self.device, self.config.repeats)

    def effect(self, part: str, variant: str, factor: float | None, call: Callable[[int], Any] | None,
               error: Callable[[], float], read_bytes: int = 0) -> None:  # fmt: skip
        """Add a row of a hardware's effect.

        Args:
            factor: predicted time over that of the part's first row; None where no document says.
            call: launches the kernel for some rounds; None where this machine cannot.
            error: the largest of the call's result after CHECKED_ROUNDS.
            read_bytes: in each round; 0 where the rate does not matter.
        """

        def measured() -> dict[str, Any]:
            call(CHECKED_ROUNDS)
            return checked(error(), EXACT) | self.time(partial(call, self.config.rounds))

        metrics = attempt(measured) if call else {"status": "needs a GPU"}
        if read_bytes and "time_p50_ms" in metrics:
            metrics["gb_per_s"] = read_bytes * self.config.rounds / metrics["time_p50_ms"] / 1e6
        self.run.add(variant, {"predicted_factor": factor} | metrics, part=part)

def checked(error: float, tolerance: float) -> dict[str, Any]:
    """An error, and what it says of the row."""
    return {"error": error, "status": "ok" if error <= tolerance else "WRONG"}


def strides(bench: Bench) -> None:
    """Bytes that memory moves for warps side by side, over those of stride 1; the last row begins within a sector."""
    count = bench.config.elements
    x = torch.arange(count * max(STRIDES) + BLOCK, device=bench.device, dtype=torch.int32)
    y = torch.empty(count, device=bench.device, dtype=torch.int32)

    def run(_: int, stride: int, offset: int) -> None:  # eight elements per thread: enough bytes under way at stride 1
        launch(strided_kernel, (count // BLOCK,), x, y, stride, offset, BLOCK=BLOCK, num_warps=4)

    def moved(stride: int, offset: int) -> int:
        """Read and written for 64 warps."""
        elements, size = range(64 * WARP), x.element_size()
        return ACCESS * len({(offset + i * stride) * size // ACCESS for i in elements}) + size * len(elements)

    for stride, offset in (*((stride, 0) for stride in STRIDES), (1, 4)):
        expected = x[offset :: stride][:count]
        name = f"stride {stride}" + f", {offset * x.element_size()} bytes off" * bool(offset)
        bench.effect("strides", name, moved(stride, offset) / moved(1, 0),
                     partial(run, stride=stride, offset=offset),
                     lambda e=expected: (y - e).abs().max().item())  # fmt: skip


def banks(bench: Bench) -> None:
    """Rounds of writing a tile's rows, one each, and of reading its columns, over those without a conflict."""
    programs = 8 * bench.sms  # enough warps that the shared memory itself is the limit
    y = torch.empty(programs, BLOCK, device=bench.device)
    for phases in PHASES:
        reads = bank_conflicts([row * SIDE + swizzle(row % phases, 0) for row in range(WARP)])
        bench.effect("banks", f"{phases} phase{'s' * (phases > 1)}", (1 + reads) / 2,
                     None if interpreted() else partial(transpose, y, phases),
                     partial(sum_error, y, (CHECKED_ROUNDS - 1) / 2))  # fmt: skip


def transpose(y: Tensor, phases: int, rounds: int) -> None:
    """Send a tile for each row of y through shared memory."""
    from experiments.lessons._lesson_banks import transpose_kernel

    launch(transpose_kernel, (len(y),), y, rounds, PHASES=phases)


def sum_error(y: Tensor, start: float) -> float:
    """The largest error of rows of CHECKED_ROUNDS times start, start + 1, and so on."""
    return (y - CHECKED_ROUNDS * (start + torch.arange(BLOCK, device=y.device))).abs().max().item()


def error_of(y: Tensor) -> float:
    """The largest error of y, 0, 1, 2, … after CHECKED_ROUNDS of x ← x / 2 + 1, over their number."""
    exact = 2 + (torch.arange(len(y), device=y.device, dtype=torch.float64) - 2) / 2**CHECKED_ROUNDS
    return (y - exact).abs().max().item() / len(y)


def divergence(bench: Bench) -> None:
    """Branches that a warp executes."""
    y = torch.empty(bench.sms * BLOCK, device=bench.device)

    def run(rounds: int, width: int, ways: int) -> None:
        launch(divergent_kernel, (bench.sms,), y, rounds, WIDTH=width, WAYS=ways, BLOCK=BLOCK, num_warps=32)

    for name, (width, ways) in BRANCHES.items():
        branches = [lane // width % ways for lane in range(WARP)]
        call = None if interpreted() else partial(run, width=width, ways=ways)
        bench.effect("divergence", name, warp_divergence(branches, [1.0] * ways).cycles, call,
                     partial(error_of, y))  # fmt: skip


def waves(bench: Bench) -> None:
    """Programs that keep a multiprocessor busy: two on one take twice as long as one."""
    sms = bench.sms
    y = torch.empty(4 * sms * BLOCK, device=bench.device)

    for blocks in (sms, sms // 2, sms + 1, sms * 3 // 2, 2 * sms, 2 * sms + 1, 3 * sms, 4 * sms):
        bench.effect("waves", f"{blocks} programs", wave_quantisation(blocks, sms).waves,
                     partial(busy, y[: blocks * BLOCK]), partial(error_of, y[: blocks * BLOCK]))  # fmt: skip


def busy(y: Tensor, rounds: int) -> None:
    """Launch a program of 32 warps for each BLOCK of y."""
    launch(busy_kernel, (len(y) // BLOCK,), y, rounds, BLOCK=BLOCK, num_warps=32)


def levels(bench: Bench) -> None:
    """Read as many bytes from registers, shared memory, L2 and HBM, by programs that fill all places.

    An FMA reads a register that it wrote; a round through shared memory writes as much as it reads.
    """
    x = torch.arange(BLOCK, device=bench.device).float().repeat(8 * bench.config.elements // BLOCK)
    y, spec = torch.empty(8 * bench.sms, BLOCK, device=bench.device), bench.spec
    peaks = (2 * spec.peak["fp32"], spec.shared_bandwidth / 2, spec.l2_bandwidth, spec.hbm_bandwidth) if spec else ()

    def read(rounds: int, span: int) -> None:
        launch(reread_kernel, (len(y),), x, y, rounds, SPAN=span, BLOCK=BLOCK, num_warps=4)

    for (level, call, error), peak in itertools.zip_longest((
        ("registers", partial(busy, y.view(-1)), partial(error_of, y.view(-1))),
        ("shared memory", None if interpreted() else partial(transpose, y, SIDE), partial(sum_error, y, 2.0)),
        ("L2", partial(read, span=min(L2_SPAN, len(x))), partial(sum_error, y, 0.0)),
        ("HBM", partial(read, span=len(x)), partial(sum_error, y, 0.0)),
    ), peaks):  # fmt: skip
        bench.effect("levels", level, peak and peaks[0] / peak, call, error, y.nbytes)


def element_wise(bench: Bench) -> None:
    """An addition by programs that fill all places for warps, over BLOCK × warps × stages.

    Little's law predicts: bytes under way / latency, and never more than a copy's rate. Both are measured here.
    """
    count, sms = bench.config.elements, bench.sms
    x, y = torch.randn(2, count, device=bench.device).to(bench.dtype)
    z, expected, moved = torch.empty_like(x), x.double() + y.double(), 3 * x.nbytes

    def add(block: int, warps: int, stages: int, programs: int, blocks: int) -> None:
        launch(stream_kernel, (programs,), x, y, z, blocks, BLOCK=block, STAGES=stages, num_warps=warps)

    def added(call: Callable[[], Any]) -> dict[str, Any]:
        call()
        error = (z.double() - expected).abs().max() / expected.abs().max()
        times = bench.time(call)
        return checked(error.item(), TOLERANCE) | times | {"gb_per_s": moved / times["time_p50_ms"] / 1e6}

    copy_ms = bench.time(lambda: torch.neg(x, out=z))["time_p50_ms"]
    # One warp that waits for each block of 1,024, over more than the L2 keeps: the latency of a load from memory.
    steps = min(count // 1024, 4 if interpreted() else 2**15)
    latency_ms = bench.time(partial(add, 1024, 1, 1, 1, steps))["time_p50_ms"] / steps
    for block, warps, stages in itertools.product(BLOCKS, WARPS, STAGES):
        blocks = count // block
        programs = min(blocks, sms * (64 // warps if bench.spec else 1))
        call, known = partial(add, block, warps, stages, programs, blocks), {}
        if bench.spec:
            with compile_only() as compiled:
                call()
            used = resources(compiled[0])
            resident = occupancy(bench.spec, 32 * warps, max(1, used["registers"]), used["shared_bytes"]).blocks
            ahead = stages - 1 if block * x.element_size() >= 4 * 32 * warps else 1  # cp.async copies 4 bytes or more
            loads = 2 * x.element_size() * block * max(1, ahead)  # of one program
            flying = loads * min(programs, resident * sms)
            known = {"registers": used["registers"], "in_flight_kib": flying / sms / 1024,
                     "predicted_ms": max(1.5 * copy_ms, moved * latency_ms / (1.5 * flying))}  # fmt: skip
        metrics = attempt(partial(added, call)) | known
        bench.run.add(f"{block} × {warps} warps × {stages} stages", metrics, part="element-wise", block=block,
                      warps=warps, stages=stages)  # fmt: skip


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per effect's case and per launch; parts of which rows are there already are left as they are."""
    check_runs(context.device)
    work = (strides, banks, divergence, waves, levels, element_wise)
    for part, function in zip(PARTS, work, strict=True):
        if part in config.parts and not any(r.config["part"] == part for r in run.records):
            run.progress(part)
            torch.manual_seed(0)
            function(Bench(config, run, context.device))


def rows_of(records: Sequence[Record], part: str) -> list[Record]:
    """The rows of a part that were timed."""
    return [r for r in records if r.config["part"] == part and "time_p50_ms" in r.metrics]


FACTOR = Ratio("factor", lambda rows: rows[0] if rows else None, "time")
FACTOR_OFF = prediction_error("predicted_factor", "factor")
TIME_OFF = prediction_error("predicted_ms", "time_p50_ms")


def compare(records: Sequence[Record]) -> None:
    """Write each effect's times over that of its first row."""
    for part in EFFECTS:
        FACTOR.add(rows_of(records, part))


VIEW = View(
    columns=[
        Column("variant", "case"), Column("metrics.time_p50_ms", "µs", ",.1f", scale=1000),
        Column("metrics.noise_pct", "± %", ".1f", derived=lambda record: noise_of(record.metrics, "time")),
        Column("metrics.factor", "× first", ".2f"), Column("metrics.predicted_factor", "predicted", ".2f"),
        Column("metrics.gb_per_s", "GB/s", ",.0f"),
        Column("metrics.in_flight_kib", "KiB under way", ",.0f", missing=""),
        Column("metrics.registers", "registers", missing=""),
        Column("metrics.predicted_ms", "predicted µs", ",.1f", scale=1000, missing=""),
        FACTOR_OFF, TIME_OFF,
        Column("metrics.error", "error", ".0e"), Column("metrics.status", "status"),
    ],
    headline=headline_from("{device_name}, torch {torch}, triton {triton}"),
    derive=compare,
    parted_by="config.part",
    reading="Each effect is counted, not fitted: × first is a time over that of the table's first row.\n\n"
    "strides: a warp asks for 4 sectors of 32 bytes at stride 1 and for 32 from stride 8 on; an access to HBM is two "
    "sectors, so that reading costs sixteen times as much from stride 16 on; writing stays as it is. That is what a "
    "transposed or sliced tensor costs a kernel that walks along the wrong dimension. Where more is measured, pages of "
    "memory are opened for few bytes each. A few bytes off costs a sector per warp, which its neighbour needs too.\n\n"
    "banks: 32 lanes that read 32 words of one bank wait for each other. The swizzle costs an xor, and no memory; a "
    "column of padding does the same for 3 % more. Less than predicted is measured, because a round of the loop "
    "also has barriers and additions: on an H200 they take 0.4 of an access without conflicts.\n\n"
    "divergence: which lanes take which branch decides, not how many branches there are: by warp they are free. Short "
    "branches are cheaper than this, because compilers turn them into selections.\n\n"
    "waves: the time is a staircase. Half of the programs take as long as all, and one more as long as twice as many: "
    "what a grid of tiles must be compared with (`distlab run calculator waves`).\n\n"
    "levels: an SM does 128 FMAs per clock, each of which reads what the one before wrote, and shared memory gives or "
    "takes 128 bytes per clock; L2 and HBM serve all SMs. Predicted are the documents' peaks; of an H100's L2 none "
    "says.\n\n"
    "element-wise: a memory of some 3 TB/s and half a microsecond of latency needs 1.5 MB under way at any "
    "time, more than 10 KiB per multiprocessor. Small blocks on few warps do not ask for so much; stages ask "
    "for the next block before this one has come. Beyond that, launches are alike, and large blocks only cost "
    "registers. Predicted is Little's law, with a latency that is measured by one warp alone, on an idle "
    "memory: under load it is longer.\n\n"
    "Errors of launches are against float64, over the largest value; in the interpreter times say nothing.",
    terminal=("time_p50_ms", "factor", "predicted_factor", "gb_per_s", "in_flight_kib", "predicted_ms",
              "factor_error_pct", "time_p50_ms_error_pct", "error", "status"),
    findings=lambda records: [] if records[0].environment.get("cuda") else [
        "Interpreted: the predictions and the errors count, and no time does."],
    prediction="Effects: bytes of memory, and `theory.warp_access` and `theory.gpu`: rounds, branches and waves. "
    "Launches: from a copy and a latency of this run; see how to read.",
)  # fmt: skip
SMALL = {"elements": 2**12, "rounds": CHECKED_ROUNDS, "repeats": 3}
EXPERIMENT = Experiment(
    Config, measure, VIEW, presets={"quick": {"repeats": 5}, "quick-cpu": SMALL, "smoke": SMALL}, gpus=1,
    wrong=lambda records: [f"{r.variant} is wrong" for r in records if r.metrics["status"] == "WRONG"],
)  # fmt: skip
