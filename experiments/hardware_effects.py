"""What do strides, bank conflicts, branches and a last wave cost?

    distlab run hardware_effects                             # on a GPU
    distlab run hardware_effects --parts strides             # one effect
    TRITON_INTERPRET=1 distlab run hardware_effects --quick  # without a GPU: are the kernels right?

One small kernel per effect (`experiments/_lesson_kernels.py`, `_lesson_banks.py`), run so that nothing else matters;
every row beside what `distlab.theory` says of it, as a multiple of the effect's first row:

- strides: a copy that reads every stride-th element. HBM comes 64 bytes at a time, needed or not.
- banks: a tile of 32 × 32 words through shared memory, written by rows and read by columns, with its columns exchanged
  by column xor (row mod phases). One phase leaves a column in one bank of 32, 32 phases spread it over all.
- divergence: the same arithmetic in up to four branches. A warp executes each branch that any of its lanes takes.
- waves: equal programs on all multiprocessors. One more than there are places takes a whole further wave.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from distlab.measure import attempt, device_percentiles
from distlab.report import Panel, Series, lines
from distlab.theory.gpu import wave_quantisation
from distlab.theory.warp_access import BANKS, WARP, bank_conflicts, swizzle, warp_divergence
from experiments._lesson_kernels import busy_kernel, divergent_kernel, strided_kernel
from kernels._dispatch import launch
from kernels._triton import check_runs, interpreted, multiprocessors

PARTS = ("strides", "banks", "divergence", "waves")
STRIDES = (1, 2, 4, 8, 16, 32)
PHASES = (32, 16, 8, 4, 2, 1)
BRANCHES = {"one branch": (WARP, 1), "four, by warp": (WARP, 4), "two, by half warp": (WARP // 2, 2),
            "two, by lane": (1, 2), "four, by lane": (1, 4)}  # fmt: skip
SIDE = 32  # of the tile that goes through shared memory
CHECKED_ROUNDS = 5  # after more of them every element is 2
BLOCK = 1024  # one element for each of 32 warps' lanes
ACCESS = 64  # bytes: two sectors, the least that HBM3 gives


@dataclass(frozen=True)
class Config(Options):
    """Which effects, how much work."""

    parts: tuple[str, ...] = option(PARTS, "effects", choices=PARTS)
    elements: int = option(2**25, "that a strided copy writes, a multiple of 1,024", least=BLOCK, most=2**25)
    rounds: int = option(20_000, "of arithmetic, or through shared memory", least=CHECKED_ROUNDS)
    repeats: int = option(9, "timings of a row", least=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elements % BLOCK:
            raise ValueError(f"elements={self.elements}: this copy has no ragged blocks; give a multiple of {BLOCK:,}")


@dataclass(frozen=True)
class Case:
    """One row: what it is called and drawn at, what theory expects of it, its kernel, and how that is checked.

    Args:
        x: its place on the axis.
        factor: expected time over that of the part's first row.
        call: launches the kernel for some rounds; None where this machine cannot.
        wrong: largest error of the call's result after some rounds.
    """

    name: str
    x: float
    factor: float
    call: Callable[[int], Any] | None
    wrong: Callable[[int], float]


def strides(config: Config, device: torch.device) -> Iterator[Case]:
    """Bytes that memory moves for warps side by side, over those of stride 1; the last row begins within a sector."""
    count = config.elements
    x = torch.arange(count * max(STRIDES) + BLOCK, device=device, dtype=torch.int32)
    y = torch.empty(count, device=device, dtype=torch.int32)

    def run(_: int, stride: int, offset: int) -> None:  # eight elements per thread: enough bytes under way at stride 1
        launch(strided_kernel, (count // BLOCK,), x, y, stride, offset, BLOCK=BLOCK, num_warps=4)

    def moved(stride: int, offset: int) -> int:
        """Read and written for 64 warps."""
        elements, size = range(64 * WARP), x.element_size()
        return ACCESS * len({(offset + i * stride) * size // ACCESS for i in elements}) + size * len(elements)

    for stride, offset in (*((stride, 0) for stride in STRIDES), (1, 4)):
        expected = x[offset :: stride][:count]
        name = f"stride {stride}" + f", {offset * x.element_size()} bytes off" * bool(offset)
        yield Case(name, stride, moved(stride, offset) / moved(1, 0), partial(run, stride=stride, offset=offset),
                   lambda _, e=expected: (y - e).abs().max().item())  # fmt: skip


def banks(config: Config, device: torch.device) -> Iterator[Case]:
    """Rounds of writing a tile's rows, one each, and of reading its columns, over those without a conflict."""
    programs = 8 * multiprocessors(device)  # enough warps that the shared memory itself is the limit
    y = torch.empty(programs, SIDE, SIDE, device=device)
    start = torch.arange(SIDE * SIDE, device=device, dtype=torch.float32).view(SIDE, SIDE)

    def run(rounds: int, phases: int) -> None:
        from experiments._lesson_banks import transpose_kernel

        launch(transpose_kernel, (programs,), y, rounds, PHASES=phases)

    for phases in PHASES:
        reads = bank_conflicts([row * SIDE + swizzle(row % phases, 0) for row in range(WARP)])
        yield Case(f"{phases} phase{'s' * (phases > 1)}", BANKS / phases, (1 + reads) / 2,
                   None if interpreted() else partial(run, phases=phases),
                   lambda rounds: (y - (rounds * start + rounds * (rounds - 1) / 2)).abs().max().item())  # fmt: skip


def error_after(y: Tensor, rounds: int) -> float:
    """The largest error of y, 0, 1, 2, … after `rounds` of x ← x / 2 + 1, over their number."""
    exact = 2 + (torch.arange(len(y), device=y.device, dtype=torch.float64) - 2) / 2**rounds
    return (y - exact).abs().max().item() / len(y)


def divergence(config: Config, device: torch.device) -> Iterator[Case]:
    """Branches that a warp executes."""
    programs = multiprocessors(device)
    y = torch.empty(programs * BLOCK, device=device)

    def run(rounds: int, width: int, ways: int) -> None:
        launch(divergent_kernel, (programs,), y, rounds, WIDTH=width, WAYS=ways, BLOCK=BLOCK, num_warps=32)

    for place, (name, (width, ways)) in enumerate(BRANCHES.items()):
        branches = [lane // width % ways for lane in range(WARP)]
        call = None if interpreted() else partial(run, width=width, ways=ways)
        yield Case(name, place, warp_divergence(branches, [1.0] * ways).cycles, call, partial(error_after, y))


def waves(config: Config, device: torch.device) -> Iterator[Case]:
    """Programs that keep a multiprocessor busy: two on one take twice as long as one."""
    sms = multiprocessors(device)
    y = torch.empty(4 * sms * BLOCK, device=device)

    def run(rounds: int, blocks: int) -> None:
        launch(busy_kernel, (blocks,), y, rounds, BLOCK=BLOCK, num_warps=32)

    for blocks in (sms, sms // 2, sms + 1, sms * 3 // 2, 2 * sms, 2 * sms + 1, 3 * sms, 4 * sms):
        yield Case(f"{blocks} programs", blocks / sms, wave_quantisation(blocks, sms).waves,
                   partial(run, blocks=blocks), partial(error_after, y[: blocks * BLOCK]))  # fmt: skip


def measured(case: Case, config: Config, device: torch.device) -> dict[str, Any]:
    """Error after few rounds, then times."""
    if case.call is None:
        return {"status": "needs a GPU"}
    case.call(CHECKED_ROUNDS)
    error = case.wrong(CHECKED_ROUNDS)
    times = device_percentiles(partial(case.call, config.rounds), device, config.repeats)
    return {"error": error, "status": "ok" if error <= 1e-5 else "WRONG"} | times


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per effect and case, with its time over that of the effect's first row."""
    check_runs(context.device)
    for part, cases in zip(PARTS, (strides, banks, divergence, waves), strict=True):
        if part not in config.parts or any(r.config["part"] == part for r in run.records):
            continue
        run.progress(part)
        base = None
        for case in cases(config, context.device):
            metrics = {"predicted_factor": case.factor} | attempt(partial(measured, case, config, context.device))
            if "time_p50_ms" in metrics:
                base = base or metrics["time_p50_ms"]
                metrics["factor"] = metrics["time_p50_ms"] / base
                metrics["prediction_error_pct"] = 100 * (case.factor / metrics["factor"] - 1)
            run.add(case.name, metrics, part=part, x=case.x)


AXES = {"strides": "stride", "banks": "rounds of a read", "divergence": "as in the table", "waves": "programs per SM"}


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel per effect: measured and predicted, over the effect's first row."""
    panels = []
    for part in dict.fromkeys(r.config["part"] for r in records):
        rows = sorted((r for r in records if r.config["part"] == part), key=lambda r: r.config["x"])
        timed = [r for r in rows if "factor" in r.metrics]
        series = [Series("predicted", [r.config["x"] for r in rows], [r.metrics["predicted_factor"] for r in rows],
                         line="-" if part != "divergence" else "", marked=part == "divergence", hollow=True),
                  Series("measured", [r.config["x"] for r in timed], [r.metrics["factor"] for r in timed])]  # fmt: skip
        panels.append(Panel(part, AXES[part], "× the first row", [s for s in series if s.x],
                            log_x=2 if part in ("strides", "banks") else None))  # fmt: skip
    lines(path, panels, title=headline(records))


def findings(records: Sequence[Record]) -> list[str]:
    """The worst of each effect, and how far predictions were off."""
    if not records[0].environment.get("cuda"):
        return ["Interpreted: the predictions and the errors count, and no time does."]
    said, rows = [], [r for r in records if "factor" in r.metrics]
    for part in dict.fromkeys(r.config["part"] for r in rows):
        worst = max((r for r in rows if r.config["part"] == part), key=lambda r: r.metrics["factor"])
        said.append(f"{part}: {worst.variant} takes {worst.metrics['factor']:.1f} ×, predicted "
                    f"{worst.metrics['predicted_factor']:.1f} ×.")  # fmt: skip
    off = [abs(r.metrics["prediction_error_pct"]) for r in rows if r.metrics["factor"] != 1]
    return [*said, f"Predicted factors: {sum(e <= 15 for e in off)} of {len(off)} within 15 % of measured."]


headline = headline_from("{device_name}, torch {torch}, triton {triton}")
VIEW = View(
    columns=[
        Column("variant", "case"), Column("metrics.time_p50_ms", "µs", ",.1f", scale=1000),
        Column("metrics.time_p20_ms", "p20", ",.1f", scale=1000),
        Column("metrics.time_p80_ms", "p80", ",.1f", scale=1000), Column("metrics.factor", "× first", ".2f"),
        Column("metrics.predicted_factor", "predicted", ".2f"),
        Column("metrics.prediction_error_pct", "off %", "+.0f"), Column("metrics.error", "error", ".0e"),
        Column("metrics.status", "status"),
    ],
    headline=headline,
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
    "what a grid of tiles must be compared with (`distlab run calculator waves`).",
    terminal=("time_p50_ms", "time_p20_ms", "time_p80_ms", "factor", "predicted_factor", "prediction_error_pct",
              "error", "status"),
    pictures={"effects.png": draw},
    findings=findings,
    prediction="Bytes of memory, and `distlab.theory.warp_access` and `theory.gpu`: rounds, branches and waves.",
)  # fmt: skip
SMALL = {"elements": BLOCK, "rounds": CHECKED_ROUNDS, "repeats": 3}
EXPERIMENT = Experiment(
    Config, measure, VIEW, presets={"quick": {"repeats": 5}, "quick-cpu": SMALL, "smoke": SMALL}, gpus=1,
    wrong=lambda records: [f"{r.variant} is wrong" for r in records if r.metrics["status"] == "WRONG"],
)  # fmt: skip
