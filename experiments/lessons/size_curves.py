"""From which size on does a kernel run at the hardware's speed?

    distlab run size_curves                              # addition, softmax, matmul; on a GPU
    distlab run size_curves --parts matmul-rows          # one curve
    distlab run size_curves --quick                      # shorter; few small sizes without a GPU

Six curves: vector addition over its length, softmax of 4,096 rows over its columns, and matmul over the size of square
matrices and over rows, columns and depth alone, the other two at 4,096. Each point is called again and again from a
CUDA graph, so that what fits stays in the L2: p20, p50 and p80 of the replays. What a call in a loop costs beside them,
and what plain torch would, is `kernel_roofline`'s.

Beside it stands a prediction from numbers measured in the same run: the time of an empty kernel and of our addition of
64 elements, the rates of a copy within the L2 and beyond, and of both tiles of our matmul at 4,096³, forced there.

    memory      empty kernel + bytes / (rate of the L2 where everything fits into half of it, else of a long copy)
    softmax     the same for the columns of its tile, the next power of two, since idle lanes have no bytes under way
    matmul      empty kernel + waves · time of one tile on one multiprocessor, and not below its bytes' time
    each        and not below the addition of 64 elements

Half, because an L2 of this size is two, each of which also holds what its own multiprocessors read from the other's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
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
from distlab.hardware import GPUSpec, lookup
from distlab.measure import attempt, device_percentiles, replay_ms
from distlab.report import Panel, Series, grouped, lines, prediction_error
from distlab.theory.gpu import wave_quantisation
from kernels import _triton, elementwise, matmul, softmax
from kernels._rows import Launch, forced, power_of_two
from kernels.cost import Cost

ROWS = 4096
# Curve → (what the axis shows, sizes of a GPU, sizes of a CPU); rows and columns are cut finer than a tile's 128 × 256.
CURVES: dict[str, tuple[str, Sequence[int], Sequence[int]]] = {
    "add": ("elements", [2**n for n in range(10, 28)], (2**10, 2**14)),
    "softmax": ("columns of 4,096 rows", [m * 2**n for n in range(8, 15) for m in (2, 3)], (96, 128)),
    "matmul-square": ("each side", [256, *range(512, 8193, 512)], (32, 64)),
    "matmul-rows": ("rows", range(64, 4097, 64), (32, 48)),
    "matmul-columns": ("columns", range(128, 4097, 128), (32, 48)),
    "matmul-depth": ("depth", [2**n for n in range(6, 14)], (32, 64)),
}
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}  # of the largest value: sums, then one rounding


@dataclass(frozen=True)
class Config(Options):
    """Which curves."""

    parts: tuple[str, ...] = option(tuple(CURVES), "curves", choices=tuple(CURVES))
    repeats: int = option(20, "timings of a point", least=3)
    dtype: str = option("bfloat16", "of all tensors", choices=tuple(TOLERANCE))
    small: bool = option(False, "few small sizes")


@dataclass(frozen=True)
class Point:
    """One size of one curve: its inputs, what is compared, and the least it computes and moves."""

    inputs: tuple[Tensor, ...]
    variants: dict[str, Callable[..., Tensor]]
    cost: Cost
    shape: tuple[int, ...]


def point(curve: str, size: int, dtype: torch.dtype, device: str, others: int = ROWS) -> Point:
    """The point of a curve at a size; `others` are the rows of softmax and the sides of a matmul that stay."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    if curve == "add":
        variants = {"ours": elementwise.add, "torch": torch.add}
        return Point((random(size), random(size)), variants, elementwise.add_cost((size,), dtype), (size,))
    if curve == "softmax":
        shape = (others, size)
        variants = {"ours": softmax.softmax, "torch": partial(torch.softmax, dim=-1)}
        return Point((random(*shape),), variants, softmax.cost(shape, dtype), shape)
    side = {"matmul-square": (size, size, size), "matmul-rows": (size, others, others),
            "matmul-columns": (others, others, size), "matmul-depth": (others, size, others)}[curve]  # fmt: skip
    rows, depth, cols = side
    variants = {"ours": matmul.matmul, "torch": torch.matmul}
    return Point((random(rows, depth), random(depth, cols)), variants, matmul.cost(side, dtype), side)


def limits(device: str, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """What predictions are made of, measured now on kernels of torch's; empty on a CPU, where none are made.

    Returns:
        `empty_kernel_ms`, `least_ms` of 64 elements, `l2_gb_per_s` (a copy within 16 MiB), `copy_gb_per_s`, and
        `large_tile_tflop_per_s` and `small_tile_tflop_per_s` of our matmul.
    """
    if device != "cuda":
        return {}

    def ms(run: Callable[[], Any]) -> float:
        return median(replay_ms(run, repeats, tidy=False, calls=(10, 20)))

    few, near, far = (torch.ones(n, device=device, dtype=dtype) for n in (64, 2**22, 2**29))
    outs = [torch.empty_like(x) for x in (few, near, far)]
    empty = ms(lambda: torch.neg(few[:1], out=outs[0][:1]))
    rates = [2 * x.nbytes / (ms(partial(torch.neg, x, out=out)) - empty) / 1e6
             for x, out in ((near, outs[1]), (far, outs[2]))]  # fmt: skip
    a, b = (torch.randn(ROWS, ROWS, device=device).to(dtype) for _ in range(2))
    known = {"empty_kernel_ms": empty, "least_ms": ms(lambda: elementwise.add(few, few)), "l2_gb_per_s": rates[0],
             "copy_gb_per_s": rates[1]}  # fmt: skip
    for size in ("large", "small"):
        tile, _ = tile_of(size == "small", dtype.itemsize)
        with forced(matmul_persistent=tile):
            known[f"{size}_tile_tflop_per_s"] = 2 * ROWS**3 / ms(lambda: matmul.matmul(a, b)) / 1e9
    return known


def tile_of(small: bool, itemsize: int, generation: str | None = None) -> tuple[Launch, int]:
    """Of our matmul, on this GPU unless another's generation is given."""
    return matmul.tile_for(generation or _triton.generation(torch.cuda.current_device()), itemsize, small, 0, itemsize)


def predicted_ms(cost: Cost, shape: tuple[int, ...], itemsize: int, known: dict[str, float], spec: GPUSpec,
                 generation: str | None = None) -> dict[str, float]:  # fmt: skip
    """`predicted_ms` of ours, and for a matmul also its `tiles`, `waves` and `wave_pct`, the share of places filled."""
    rate = known["l2_gb_per_s"] if cost.bytes <= spec.l2_bytes / 2 else known["copy_gb_per_s"]
    moving = cost.bytes / rate / 1e6 * (power_of_two(shape[1]) / shape[1] if len(shape) == 2 else 1)
    if len(shape) != 3:
        return {"predicted_ms": max(known["least_ms"], known["empty_kernel_ms"] + moving)}
    rows, depth, cols = shape
    small = min(rows, cols) <= 1024
    tile, _ = tile_of(small, itemsize, generation)
    tiles = -(-rows // tile.rows) * -(-cols // tile.block)
    waves = wave_quantisation(tiles, spec.sms)
    per_sm = known[f"{'small' if small else 'large'}_tile_tflop_per_s"] * 1e9 / spec.sms
    of_one = 2 * tile.rows * tile.block * depth / per_sm
    found = known["empty_kernel_ms"] + max(moving, waves.waves * of_one)
    return {"predicted_ms": max(known["least_ms"], found), "tiles": tiles, "waves": waves.waves,
            "wave_pct": 100 * waves.efficiency}  # fmt: skip


def checked(call: Callable[[], Tensor], expected: Tensor, device: str, config: Config) -> dict[str, Any]:
    """Error and times of one variant."""
    with torch.no_grad():
        error = ((call().double() - expected).abs().max() / expected.abs().max()).item()
        status = "ok" if error <= TOLERANCE[config.dtype] else "WRONG"
        times = device_percentiles(call, device, config.repeats)
    return {"error": error, "status": status} | times


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per curve, size and variant."""
    device, dtype = context.device.type, getattr(torch, config.dtype)
    spec = lookup(str(run.header.environment["device_name"]))
    known = limits(device, dtype, config.repeats) if spec else {}
    for curve in config.parts:
        axis, large, small = CURVES[curve]
        run.progress(f"{curve}: {len(small if config.small else large)} sizes")
        for size in small if config.small else large:
            torch.manual_seed(size)
            here = point(curve, size, dtype, device, 64 if config.small else ROWS)
            exact = {"add": torch.add, "softmax": partial(torch.softmax, dim=-1)}.get(curve, torch.matmul)
            expected = exact(*(x.double() for x in here.inputs))
            for variant, function in here.variants.items():
                if run.done(variant, part=curve, size=size):
                    continue
                metrics = attempt(partial(checked, partial(function, *here.inputs), expected, device, config))
                if "time_p50_ms" in metrics:
                    metrics |= rates(here.cost, metrics, by_memory=len(here.shape) != 3)
                if variant == "ours" and spec and "time_p50_ms" in metrics:
                    metrics |= predicted_ms(here.cost, here.shape, dtype.itemsize, known, spec)
                run.add(variant, known | metrics, part=curve, size=size, axis=axis, shape=list(here.shape))


def rates(cost: Cost, metrics: dict[str, Any], by_memory: bool) -> dict[str, float]:
    """GB/s of the least traffic, or TFLOP/s, at the median and at both ends."""
    amount, name = (cost.bytes / 1e6, "gb_per_s") if by_memory else (cost.flops / 1e9, "tflop_per_s")
    ends = {"p50": "", "p80": "_low", "p20": "_high"}
    return {f"{name}{end}": amount / metrics[f"time_{p}_ms"] for p, end in ends.items()}


def curves(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Each curve with the rows that were timed."""
    timed = [r for r in records if "time_p50_ms" in r.metrics]
    yield from grouped(timed, lambda r: r.config["part"]).items()


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel per curve: GB/s or TFLOP/s over the size, p20 to p80; ours predicted as a line."""
    panels = []
    for part, rows in curves(records):
        name = "tflop_per_s" if part.startswith("matmul") else "gb_per_s"
        series = []
        for variant, mine in grouped(rows, lambda r: r.variant).items():
            x, (y, low, high) = [r.config["size"] for r in mine], (
                [r.metrics[f"{name}{end}"] for r in mine] for end in ("", "_low", "_high"))  # fmt: skip
            series.append(Series(variant, x, y, low, high, hollow=variant != "ours"))
            told = [r for r in mine if "predicted_ms" in r.metrics]
            if told:
                ours = [r.metrics[name] * r.metrics["time_p50_ms"] / r.metrics["predicted_ms"] for r in told]
                series.append(Series("ours, predicted", [r.config["size"] for r in told], ours, line="-", like="ours"))
        log = 2 if part in ("add", "softmax", "matmul-depth") else None
        unit = "TFLOP/s" if part.startswith("matmul") else "GB/s"
        if series:
            panels.append(Panel(f"{part}: {rows[0].config['axis']}", "", unit, series, log_x=log))
    lines(path, panels, title=f"Rate over size: {headline(records)}")


def findings(records: Sequence[Record]) -> list[str]:
    """Where each curve of ours comes within a tenth of its best, and how far predictions were off."""
    said = []
    for part, rows in curves(records):
        ours = [r for r in rows if r.variant == "ours"]
        name, unit = ("tflop_per_s", "TFLOP/s") if part.startswith("matmul") else ("gb_per_s", "GB/s")
        if len(ours) > 1:
            best = max(ours, key=lambda r: r.metrics[name])
            near = next(r for r in ours if r.metrics[name] >= 0.9 * best.metrics[name])
            said.append(f"{part}: best {best.metrics[name]:,.0f} {unit} at {best.config['size']:,}, a tenth below it "
                        f"from {near.config['size']:,} on; last {ours[-1].metrics[name]:,.0f}.")  # fmt: skip
    errors = [error for r in records if (error := OFF.value(r)) is not None]
    if errors:
        said.append(f"Predicted times: {sum(abs(e) <= 15 for e in errors)} of {len(errors)} within 15 % of measured.")
    return said


OFF = prediction_error("predicted_ms", "time_p50_ms")
headline = headline_from("{dtype}, {device_name}, torch {torch}, triton {triton}")
VIEW = View(
    columns=[
        Column("config.size", "size", ",d"), Column("variant", "variant"),
        *(Column(f"metrics.time_{p}_ms", f"{p} µs", ",.1f", scale=1000) for p in ("p50", "p20", "p80")),
        Column("metrics.gb_per_s", "GB/s", ",.0f"), Column("metrics.tflop_per_s", "TFLOP/s", ",.1f"),
        Column("metrics.predicted_ms", "predicted µs", ",.1f", scale=1000, missing="", optional=True),
        OFF,
        Column("metrics.waves", "waves", missing="", optional=True),
        Column("metrics.wave_pct", "filled %", ".0f", missing="", optional=True),
        Column("metrics.error", "error", ".0e"),
    ],
    headline=headline,
    parted_by="config.part",
    reading="Read a curve from the left. Flat time, rising rate: a kernel's start costs more than its work. "
    "Then the L2 serves: the rate of an addition rises above the memory's and falls once three tensors no "
    "longer fit. Beyond, the memory's rate. Softmax pays for columns up to the next power of two with idle lanes, "
    "not with traffic. Matmul over rows is a saw: a tile of 128 rows costs as much when one row of it is used "
    "(tile quantisation), and a last wave of few tiles as much as a full one (wave quantisation); depth only "
    "lengthens each tile's loop. Predictions miss below 5 µs, where a kernel waits for a chain of loads rather than "
    "for bytes; around half the size of the L2, which keeps a part of what does not fit; where a row of softmax is so "
    "wide that a multiprocessor holds one, and loads none while it stores; and where a matmul's loop is short beside "
    "the start and end of its tiles. Errors are against float64, over the largest value.",
    terminal=("size", "time_p50_ms", "gb_per_s", "tflop_per_s", "predicted_ms", "time_p50_ms_error_pct",
              "waves", "error"),
    pictures={"curves.png": draw},
    findings=findings,
    prediction="From two small kernels, two copies and two matmuls of this run, see above; of ours.",
)  # fmt: skip
SMALL = {"small": True, "dtype": "float32", "repeats": 3}
EXPERIMENT = Experiment(
    Config, measure, VIEW, presets={"cpu": SMALL, "quick": {"repeats": 5}, "quick-cpu": SMALL, "smoke": SMALL},
    wrong=lambda records: [f"{r.config['part']} {r.variant} is wrong" for r in records
                           if r.metrics["status"] == "WRONG"],
)  # fmt: skip
