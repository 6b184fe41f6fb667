"""What do memory, warps, waves and the form of a kernel decide?

    distlab run gpu_lessons                             # all parts, on a GPU
    distlab run gpu_lessons --parts strides waves       # two of them
    TRITON_INTERPRET=1 distlab run gpu_lessons --quick  # without a GPU: are the kernels right?

Effects of the hardware: small kernels (`_lesson_kernels.py`, `_lesson_banks.py`), run so that
nothing else matters. Each time is a multiple of the part's first row, next to the multiple that
`distlab.theory` predicts:

- strides: a copy that reads every stride-th element. HBM comes 64 bytes at a time, needed or not.
- banks: a tile of 32 × 32 words through shared memory, written by rows and read by columns, with
  its columns exchanged by column xor (row mod phases). One phase leaves a column in one bank of 32,
  32 phases spread it over all.
- divergence: the same arithmetic in up to four branches. A warp executes each branch that any of
  its lanes takes.
- waves: equal programs on all multiprocessors. One more than there are places takes a whole further
  wave.
- levels: the same bytes read from registers, shared memory, L2 and HBM, each by programs that wait
  for nothing else.

Launch parameters, as a rate:

- element-wise: an addition over BLOCK × warps × stages. What counts is how many bytes are under way
  at a time.

Forms of one computation (`kernel_forms.py`), each a multiple of the part's first, next to the
multiple of the bytes that it moves:

- sums: over rows, and over everything, by a second launch that adds partial sums, or by atomic
  additions.
- variance: of rows that do not fit on chip: read twice, or once, by Welford's recurrence or from
  sums of squares.
- programs: softmax by a program per row, or by a few per multiprocessor that take turns.
- gelu-prologue, softmax-prologue: before a matmul, stored, or computed again by every program that
  multiplies it.
- saved: what GeLU's backward needs, stored by forward or computed again.
- warps: RMSNorm of long rows by 1 to 32 warps: registers, spills, time.
- operands: 2 to 32 tensors combined by one kernel: registers, time.
- tiles: a matmul in tiles of 16 × 16 to 128 × 256, with the bytes that they read.
- tile-order: the tiles of a matmul row by row, and in groups of rows, with the share of loads that
  the L2 should serve.
- keys: a matmul under `triton.autotune`, with every key that its best tile depends on, and with one
  key only.
- backward-keys: the same of attention's dK and dV. The missing key is the head dim.
- cuda-add, cuda-softmax, cuda-matmul, cuda-attention: in Triton, in CUDA C++ (`cuda.py`) and by
  torch: lines, time.

The launch parameters of the shipped attention are tried by `python -m
kernels.flash_attention.tune`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
from distlab.report import (
    noise_of,
    prediction_error,
    ratio_metrics,
)
from kernels._dispatch import check_runs

from .cuda import IN_CUDA
from .effects import banks, divergence, element_wise, levels, strides, waves
from .kernel_forms import FORMS
from .lesson_bench import CHECKED_ROUNDS, Bench

PARTS = {
    "strides": strides,
    "banks": banks,
    "divergence": divergence,
    "waves": waves,
    "levels": levels,
    "element-wise": element_wise,
    **FORMS,
    **IN_CUDA,
}


@dataclass(frozen=True)
class GpuLessonsConfig(Options):
    """Options of a run: the parts, and the amount of work."""

    parts: tuple[str, ...] = option(tuple(PARTS), "parts to run", choices=tuple(PARTS))
    elements: int = option(
        2**25,
        "elements that a copy or an addition writes, a power of two",
        minimum=2**12,
        maximum=2**25,
    )
    rounds: int = option(
        20_000, "rounds of arithmetic, or through shared memory", minimum=CHECKED_ROUNDS
    )
    repeats: int = option(9, "number of timings of a row", minimum=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elements & (self.elements - 1):
            raise ValueError(
                f"elements={self.elements}: these kernels have no ragged blocks; give a power of "
                "two"
            )


def measure(config: GpuLessonsConfig, context: RankContext, run: Run) -> None:
    """Add a row per effect's case and per launch. Parts that have rows are left as they are."""
    check_runs(context.device)
    done = {record.config["part"] for record in run.records}
    for part, function in PARTS.items():
        if part in config.parts and part not in done:
            run.progress(part)
            # Each part draws the same values, whether the parts before it ran or not.
            torch.manual_seed(0)
            function(Bench(config, run, context.device))


def compare(records: Sequence[Record]) -> list[Record]:
    """Return the rows, each compared with the first row of its part."""
    first = {}  # part → its first timed row
    for record in records:
        if "time_p50_ms" in record.metrics:
            first.setdefault(record.config["part"], record)
    found = []
    for record in records:
        base = first.get(record.config["part"])
        if "time_p50_ms" in record.metrics:
            record = record.with_metrics(ratio_metrics("factor", record, base, "time"))
        found.append(record)
    return found


def noise_of_time(record: Record) -> float | None:
    """Return the noise of a row's time, in %, for a record that was written without it."""
    return noise_of(record.metrics, "time")


def findings(records: Sequence[Record]) -> list[str]:
    """Say of an interpreted run what its numbers are worth."""
    if records[0].environment.get("cuda"):
        return []
    return ["Interpreted: the predictions and the errors count, and no time does."]


def wrong(records: Sequence[Record]) -> list[str]:
    """Name the kernels whose error is above the tolerance."""
    return [f"{r.variant} is wrong" for r in records if r.metrics["status"] == "WRONG"]


VIEW = View(
    columns=[
        Column("variant", "case"),
        Column("metrics.time_p50_ms", "time µs", ",.1f", scale=1000),
        Column(
            "metrics.noise_pct",
            "noise ± %",
            ".1f",
            derived=noise_of_time,
        ),
        Column("metrics.factor", "÷ first", ".2f"),
        Column("metrics.predicted_factor", "predicted ÷ first", ".2f"),
        Column("metrics.gb_per_s", "GB/s", ",.0f"),
        Column("metrics.in_flight_kib", "KiB under way", ",.0f", missing=""),
        Column("metrics.registers", "registers", missing=""),
        Column("metrics.spill_bytes", "spilled", missing=""),
        Column("metrics.read_gb", "GB read by tiles", ",.1f", missing=""),
        Column("metrics.hit_pct", "predicted L2 hits %", ".1f", missing=""),
        Column("metrics.same_bits", "same bits", missing=""),
        Column("metrics.predicted_ms", "predicted µs", ",.1f", scale=1000, missing=""),
        prediction_error("predicted_factor", "factor", "off % of ÷ first"),
        prediction_error("predicted_ms", "time_p50_ms", "off % of time"),
        Column("metrics.error", "error", ".0e"),
        Column("metrics.status", "status"),
    ],
    headline=headline_from("{device_name}, torch {torch}, triton {triton}"),
    derive=compare,
    parted_by="config.part",
    reading="Each effect is counted, not fitted: ÷ first is a time over that of the table's first "
    "row.\n\n"
    "strides: a warp asks for 4 sectors of 32 bytes at stride 1 and for 32 from stride 8 on; an "
    "access to HBM is two sectors, so that reading costs sixteen times more from stride 16 on. "
    "Writing stays as it is. That is what a transposed or sliced tensor costs a kernel that walks "
    "along the wrong dimension. Where more is measured, pages of memory are opened for few bytes "
    "each. A few bytes off costs a sector per warp, which its neighbour also needs.\n\n"
    "banks: 32 lanes that read 32 words of one bank wait for each other. The swizzle costs an xor, "
    "and no memory; a column of padding does the same for 3 % more. Less than predicted is "
    "measured, because a round of the loop also has barriers and additions: on an H200 they take "
    "0.4 of an access without conflicts.\n\n"
    "divergence: which lanes take which branch decides, not how many branches there are: by warp "
    "they are free. Short branches are cheaper than this, because compilers turn them into "
    "selections.\n\n"
    "waves: the time is a staircase. Half of the programs take as long as all, and one more as "
    "long as twice as many: what a grid of tiles must be compared with (`distlab run plan "
    "waves`).\n\n"
    "levels: an SM does 128 FMAs per clock, each of which reads what the one before wrote, and "
    "shared memory gives or takes 128 bytes per clock; L2 and HBM serve all SMs. Predicted are the "
    "documents' peaks; of an H100's L2 none says.\n\n"
    "element-wise: a memory of some 3 TB/s and half a microsecond of latency needs 1.5 MB under "
    "way at any time, more than 10 KiB per multiprocessor. Small blocks on few warps do not ask "
    "for so much; stages ask for the next block before this one has come. Beyond that, launches "
    "are alike, and large blocks only cost registers. Predicted is Little's law, with a latency "
    "that is measured by one warp alone, on an idle memory: under load it is longer.\n\n"
    "sums: the second launch is short, and its order is fixed; atomic additions come in any order, "
    "into memory that a launch has set to zero. Same bits: four calls gave one result.\n\n"
    "variance: the recurrence divides for every element; sums of squares lose the digits of the "
    "square of the mean that come before those of the variance.\n\n"
    "programs: one that takes turns waits for its rows, and stages make up for a part of that "
    "only; of programs for one row each many are resident, and others run while one waits.\n\n"
    "prologues: that f(x) is not written and read again is paid by computing it for every 128 "
    "columns, where the matmul waits for it: a fusion that loses.\n\n"
    "tiles: a tile of R × C reads R + C values for R · C products, so small tiles wait for the L2. "
    "From some size on, the arithmetic decides. tile-order: the tiles that run at the same time "
    "share strips of a and of b. One row of tiles shares a strip of a and needs every strip of "
    "b.\n\n"
    "keys: a tuner tries its tiles once for each value of its keys. Both tuners here first see a "
    "matmul of the same rows and few columns. With the rows as the only key, the choice for few "
    "columns is kept. backward-keys: both tuners first see heads of 32. A program keeps dK and dV "
    "of its keys in registers, and for 128 keys of heads of 128 four warps have too few.\n\n"
    "saved: six tensors moved, or five. operands: K tensors and the result. warps: a thread has at "
    "most 255 registers; what is more goes to memory, and comes back.\n\n"
    "cuda: lines are those of a kernel and of the functions that it calls, without comments and "
    "empty lines; what matmul and attention share in CUDA C++ counts in both. Triton spares the "
    "shuffles of a reduction, and by `tl.load` and `tl.dot` which lane holds which element, copies "
    "that run ahead, and padding against bank conflicts. It makes wgmma on Hopper, where the "
    "mma.sync of the file leaves a part of the tensor cores idle.\n\n"
    "Errors of launches and forms are against float64, over the largest value; in the interpreter "
    "times say nothing.",
    terminal=(
        "time_p50_ms",
        "factor",
        "predicted_factor",
        "gb_per_s",
        "in_flight_kib",
        "registers",
        "spill_bytes",
        "read_gb",
        "hit_pct",
        "same_bits",
        "predicted_ms",
        "factor_error_pct",
        "time_p50_ms_error_pct",
        "error",
        "status",
    ),
    findings=findings,
    prediction="Effects: bytes of memory, and `theory.warp_access` and `theory.gpu`: rounds, "
    "branches and waves. Launches: from a copy and a latency of this run; see how to read.",
)
SMALL = {"elements": 2**12, "rounds": CHECKED_ROUNDS, "repeats": 3}
EXPERIMENT = Experiment(
    GpuLessonsConfig,
    measure,
    VIEW,
    presets={"quick": {"repeats": 5}, "quick-cpu": SMALL, "smoke": SMALL},
    gpus=1,
    wrong=wrong,
)
