"""What do launch parameters decide, and how are they found?

    distlab run tuning                                   # all five parts, on a GPU
    distlab run tuning --parts "group size"              # one of them
    TRITON_INTERPRET=1 distlab run tuning --quick        # without a GPU: the same kernels, small

- element-wise: an addition over BLOCK × warps × stages. What counts is how many bytes are under way at a time.
- matmul keys, attention keys: `triton.autotune` with the keys that its result depends on, and once without some: the
  same calls in the same order, and what a stale choice costs.
- group size: the shipped matmul kernels, tiled, grouped and persistent, over how many rows of tiles advance together,
  with the share of loads that the L2 should serve.
- shipped matmul: other tiles forced upon the shipped matmul; the first row is what ships.

The launch parameters of the shipped attention are tried by `python -m kernels.flash_attention.tune`.
"""

import itertools
import time
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
from distlab.hardware import lookup
from distlab.measure import attempt, device_percentiles
from distlab.measure.clock import synchronize
from distlab.report import Panel, Series, lines
from distlab.theory.gpu import l2_hit_share, occupancy, tile_order
from experiments import _lesson_attention as attention
from experiments._lesson_kernels import matmul_kernel, stream_kernel
from kernels import matmul
from kernels._compile import resources
from kernels._dispatch import launch
from kernels._language import triton
from kernels._rows import Launch, forced
from kernels._triton import check_runs, compile_only, generation, interpreted, multiprocessors

PARTS = ("element-wise", "matmul keys", "attention keys", "group size", "shipped matmul")
TOLERANCE = 1e-2  # of the largest value: bf16 results, or products of TF32
BLOCKS, WARPS, STAGES = (256, 1024, 4096), (1, 4, 16), (1, 4)
MATMUL_TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (64, 32, 64, 4, 4))
ATTENTION_TILES = ((64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2))
GROUPS = (1, 2, 4, 8, 16, 32)
SHIPPED = ((256, 128, 8, 4), (256, 128, 8, 3), (128, 128, 8, 4), (128, 128, 4, 4), (128, 64, 4, 4))  # columns × rows


@dataclass(frozen=True)
class Config(Options):
    """Which parts, of which size."""

    parts: tuple[str, ...] = option(PARTS, "parts", choices=PARTS)
    elements: int = option(2**26, "of the addition, a power of two", least=2**12, most=2**30)
    size: int = option(8192, "rows, columns and depth of the matmuls of the last two parts", least=64)
    length: int = option(4096, "tokens of attention", least=128)
    repeats: int = option(7, "timings of a row", least=3)
    small: bool = option(False, "small matmuls of the keys, few launches")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elements & (self.elements - 1) or self.length % 128:
            raise ValueError(f"elements={self.elements}, length={self.length}: these kernels have no ragged blocks; "
                             "give a power of two and a multiple of 128")


@dataclass
class Bench:
    """What all parts measure with."""

    config: Config
    run: Run
    device: torch.device

    def __post_init__(self) -> None:
        self.dtype = torch.float16 if interpreted() else torch.bfloat16
        self.spec = lookup(str(self.run.header.environment["device_name"]))

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A normal tensor."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def time(self, call: Callable[[], Any]) -> dict[str, float]:
        """Percentiles of the device's time."""
        return device_percentiles(call, self.device, self.config.repeats)

    def row(self, part: str, variant: str, call: Callable[[], Any], result: Callable[[], Tensor], expected: Tensor,
            amount: float, unit: str, **known: Any) -> dict[str, Any]:  # fmt: skip
        """Run, check, time and add one row; `amount` per millisecond is its rate in `unit`. Returns its metrics."""

        def measured() -> dict[str, Any]:
            call()
            error = ((result().double() - expected).abs().max() / expected.abs().max()).item()
            times = self.time(call)
            rate = {unit: amount / times["time_p50_ms"]}
            return {"error": error, "status": "ok" if error <= TOLERANCE else "WRONG"} | times | rate

        metrics = attempt(measured) | {name: known.pop(name) for name in list(known) if name in METRICS}
        if (told := metrics.get("predicted_ms")) and "time_p50_ms" in metrics:
            metrics["prediction_error_pct"] = 100 * (told / metrics["time_p50_ms"] - 1)
        self.run.add(variant, metrics, part=part, **known)
        return metrics


METRICS = ("predicted_ms", "in_flight_kib", "registers", "hit_pct", "tuned", "first_call_ms")


def element_wise(bench: Bench) -> None:
    """An addition by programs that fill all places for warps, over BLOCK × warps × stages.

    Little's law predicts: bytes under way / latency, and never more than a copy's rate. Both are measured here.
    """
    count, sms = bench.config.elements, multiprocessors(bench.device)
    x, y = bench.random(count), bench.random(count)
    z, expected = torch.empty_like(x), x.double() + y.double()

    def add(block: int, warps: int, stages: int, programs: int, blocks: int) -> None:
        launch(stream_kernel, (programs,), x, y, z, blocks, BLOCK=block, STAGES=stages, num_warps=warps)

    copy_ms = bench.time(lambda: torch.neg(x, out=z))["time_p50_ms"]
    # One warp that waits for each block of 1,024, over more than the L2 keeps: the latency of a load from memory.
    steps = min(count // 1024, 4 if interpreted() else 2**15)
    latency_ms = bench.time(partial(add, 1024, 1, 1, 1, steps))["time_p50_ms"] / steps
    small = bench.config.small
    for block, warps, stages in itertools.product(BLOCKS[:2] if small else BLOCKS, WARPS[:2] if small else WARPS,
                                                  STAGES[:2] if small else STAGES):  # fmt: skip
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
            moved = 3 * x.nbytes
            known = {"registers": used["registers"], "in_flight_kib": flying / sms / 1024,
                     "predicted_ms": max(1.5 * copy_ms, moved * latency_ms / (1.5 * flying))}  # fmt: skip
        bench.row("element-wise", f"{block} × {warps} warps × {stages} stages", call, lambda: z, expected,
                  3 * x.nbytes / 1e6, "gb_per_s", block=block, warps=warps, stages=stages, **known)  # fmt: skip


def autotuned(kernel: Any, tiles: Sequence[tuple[int, ...]], names: Sequence[str], keys: Sequence[str]) -> Any:
    """`triton.autotune` over (values of `names`…, warps, stages); the interpreter, which times nothing, gets one."""
    configs = [triton.Config(dict(zip(names, values, strict=True)), num_warps=warps, num_stages=stages)
               for *values, warps, stages in tiles]  # fmt: skip
    return triton.autotune(configs[: 1 if interpreted() else None], key=list(keys))(kernel)


def tuned_calls(bench: Bench, part: str, kernel: Any, keys: dict[str, tuple[str, ...]], tiles: Sequence,
                names: Sequence[str], calls: Sequence[tuple]) -> None:  # fmt: skip
    """The same calls under autotuners that differ in their keys; each call (label, grid, arguments, constants, result,
    expected, FLOPs) as a row. Predicted is the time with the right keys.
    """
    best: dict[str, float] = {}
    for which, key in keys.items():
        tuner = autotuned(kernel, tiles, names, key)
        for label, grid, arguments, constants, result, expected, flops in calls:
            before, begin = len(tuner.cache), time.perf_counter()
            call = partial(tuner[grid], *arguments, **constants)
            call()
            synchronize(bench.device)
            known = {"first_call_ms": 1e3 * (time.perf_counter() - begin), "tuned": len(tuner.cache) - before}
            if label in best:
                known["predicted_ms"] = best[label]
            config = getattr(tuner, "best_config", None) or tuner.configs[0]
            chosen = " × ".join(str(config.kwargs[name]) for name in names) + f", {config.num_warps} warps"
            found = bench.row(part, f"{which}: {label}", call, lambda result=result: result, expected, flops / 1e9,
                              "tflop_per_s", keys=list(key), chosen=chosen, **known)  # fmt: skip
            best.setdefault(label, found.get("time_p50_ms", 0.0))


def matmul_keys(bench: Bench) -> None:
    """A matmul whose first call is narrow: with `rows` as the only key all later ones get the narrow tile."""
    side, narrow = (64, 32) if bench.config.small else (4096, 64)
    calls = []
    for rows, cols, depth in ((side, narrow, side), (side, side, side), (side, side, narrow)):
        a, b = bench.random(rows, depth), bench.random(depth, cols)
        y = torch.empty(rows, cols, device=bench.device, dtype=bench.dtype)
        calls.append((f"{rows} × {depth} × {cols}",
                      lambda meta, r=rows, c=cols: (-(-r // meta["BLOCK_M"]) * -(-c // meta["BLOCK_N"]),),
                      (a, b, y, rows, cols, depth), {"GROUP": 8}, y, a.double() @ b.double(),
                      matmul.cost((rows, depth, cols), bench.dtype).flops))  # fmt: skip
    tiles = ((32, 32, 32, 4, 3),) if bench.config.small else MATMUL_TILES
    keys = {"keys rows, cols, depth": ("rows", "cols", "depth"), "key rows": ("rows",)}
    tuned_calls(bench, "matmul keys", matmul_kernel, keys, tiles, ("BLOCK_M", "BLOCK_N", "BLOCK_K"), calls)


def attention_keys(bench: Bench) -> None:
    """Attention of head dim 64, then 128, then in fp32. Triton adds the dtypes of tensors to every key by itself; of a
    head dim that is a constant, or of the dtype behind a tensor descriptor, it knows nothing.
    """
    length, heads = bench.config.length, 1 if bench.config.small else 16
    head_dims = (16, 32) if bench.config.small else (64, 128)
    calls = []
    for head_dim, dtype in (*((d, bench.dtype) for d in head_dims), (head_dims[0], torch.float32)):
        q, k, v = (bench.random(heads, length, head_dim, dtype=dtype) for _ in range(3))
        o, lse2 = torch.empty_like(q), torch.empty(heads, length, device=bench.device)
        expected = torch.nn.functional.scaled_dot_product_attention(*(x[0].double() for x in (q, k, v)), is_causal=True)
        name = f"d = {head_dim}, {str(dtype).removeprefix('torch.')}"
        calls.append((name, lambda meta: (length // meta["BLOCK_M"], heads),
                      (q, k, v, None, None, o, lse2, length, head_dim**-0.5 * attention.LOG2_E),
                      {"SKIP": True, "SPLIT": True, "TMA": False, "D": head_dim}, o[0], expected,
                      2 * heads * length**2 * head_dim))  # fmt: skip
    tiles = ((64, 64, 4, 3),) if bench.config.small else ATTENTION_TILES
    keys = {"keys length, D": ("length", "D"), "key length": ("length",)}
    tuned_calls(bench, "attention keys", attention.forward_kernel, keys, tiles, ("BLOCK_M", "BLOCK_N"), calls)


def square(bench: Bench) -> tuple[Tensor, Tensor, Tensor, float]:
    """a, b, what their product is to be, and the FLOPs of it."""
    size = bench.config.size
    a, b = bench.random(size, size), bench.random(size, size)
    return a, b, a.double() @ b.double(), matmul.cost((size, size, size), bench.dtype).flops


def group_size(bench: Bench) -> None:
    """The shipped kernels over how many rows of tiles advance together; cuBLAS first, whose rate the prediction has.

    Predicted: the longer of the arithmetic at cuBLAS's rate and what the L2 does not serve at a copy's.
    """
    a, b, expected, flops = square(bench)
    y, size, sms = torch.empty_like(a), bench.config.size, multiprocessors(bench.device)
    copy_ms = bench.time(lambda: torch.neg(a, out=y))["time_p50_ms"]
    add = partial(bench.row, "group size", expected=expected, result=lambda: y, amount=flops / 1e9, unit="tflop_per_s")
    cublas_ms = add("cuBLAS", lambda: torch.mm(a, b, out=y)).get("time_p50_ms", 0.0)
    forms: dict[str, Callable[[int], Any]] = {
        "tiled": lambda group: matmul.launch_pointers(a, b, None, y, None, "ieee", matmul.tiled_kernel, group),
        "grouped": lambda group: matmul.launch_pointers(a, b, None, y, None, "ieee", group=group),
        "persistent": lambda group: matmul.launch_persistent(a, b, None, y, None, group),
    }
    for form, call in forms.items():
        stored = 2 if form == "persistent" else 0
        tile, _ = matmul.tile_for(generation(bench.device.index), 2, size <= 1024, 0, stored)
        tiles = -(-size // tile.rows), -(-size // tile.block)
        for group in (1,) if form == "tiled" else GROUPS[: 2 if bench.config.small else None]:
            hits = l2_hit_share(tile_order(*tiles, group), sms)
            missed = (1 - hits) * tiles[0] * tiles[1] * (tile.rows + tile.block) * size * 2
            known = {"hit_pct": 100 * hits, "predicted_ms": max(cublas_ms, missed / (2 * a.nbytes) * copy_ms)}
            add(f"{form}, {group}", partial(call, group), form=form, group=group, **known)


def shipped_matmul(bench: Bench) -> None:
    """Other tiles for the shipped matmul, on Hopper its persistent kernel; the first is what ships there."""
    a, b, expected, flops = square(bench)
    y = torch.empty_like(a)
    for block, rows, warps, stages in ((32, 32, 4, 3),) if bench.config.small else SHIPPED:
        tile = Launch(block, rows, warps, stages)

        def call(tile: Launch = tile) -> None:
            with forced(matmul=tile, matmul_persistent=tile), torch.no_grad():
                if not matmul.launch_persistent(a, b, None, y, None):
                    matmul.launch_pointers(a, b, None, y, None, "ieee")

        bench.row("shipped matmul", f"{rows} × {block}, {warps} warps, {stages} stages", call, lambda: y, expected,
                  flops / 1e9, "tflop_per_s")  # fmt: skip


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per launch; parts of which rows are there already are left as they are."""
    check_runs(context.device)
    work = (element_wise, matmul_keys, attention_keys, group_size, shipped_matmul)
    for part, function in zip(PARTS, work, strict=True):
        if part in config.parts and not any(r.config["part"] == part for r in run.records):
            run.progress(part)
            torch.manual_seed(0)
            function(Bench(config, run, context.device))


def rows_of(records: Sequence[Record], part: str) -> list[Record]:
    """The rows of a part that were timed."""
    return [r for r in records if r.config["part"] == part and "time_p50_ms" in r.metrics]


def panels(records: Sequence[Record]) -> Iterator[Panel]:
    """GB/s over bytes under way, and TFLOP/s over the group size, with what was predicted."""
    if rows := [r for r in rows_of(records, "element-wise") if "in_flight_kib" in r.metrics]:
        rows.sort(key=lambda r: r.metrics["in_flight_kib"])
        x = [r.metrics["in_flight_kib"] for r in rows]
        y = [r.metrics["gb_per_s"] for r in rows]
        told = [r.metrics["gb_per_s"] * r.metrics["time_p50_ms"] / r.metrics["predicted_ms"] for r in rows]
        series = [Series("measured", x, y), Series("predicted", x, told, line="-")]
        yield Panel("element-wise", "KiB under way per multiprocessor", "GB/s", series)
    if rows := [r for r in rows_of(records, "group size") if "group" in r.config]:
        forms = {form: [r for r in rows if r.config["form"] == form] for form in ("tiled", "grouped", "persistent")}
        series = [Series(form, [r.config["group"] for r in mine], [r.metrics["tflop_per_s"] for r in mine], line="-",
                         marked=True) for form, mine in forms.items() if mine]  # fmt: skip
        yield Panel("group size", "rows of tiles that advance together", "TFLOP/s", series)


def draw(records: Sequence[Record], path: Path) -> None:
    """The two curves, where there are such rows."""
    if found := list(panels(records)):
        lines(path, found, title=headline(records))


def findings(records: Sequence[Record]) -> list[str]:
    """Best and worst of the element-wise launches, what stale keys cost, what the group size brings."""
    if not records[0].environment.get("cuda"):
        return ["Interpreted: the errors count, and no time does."]
    said = []
    if rows := rows_of(records, "element-wise"):
        slow, fast = (pick(rows, key=lambda r: r.metrics["gb_per_s"]) for pick in (min, max))
        said.append(f"element-wise: {fast.variant} reaches {fast.metrics['gb_per_s']:,.0f} GB/s, {slow.variant} "
                    f"{slow.metrics['gb_per_s']:,.0f}.")  # fmt: skip
    for part in ("matmul keys", "attention keys"):
        stale = [r for r in rows_of(records, part) if "predicted_ms" in r.metrics]
        if stale:
            worst = max(stale, key=lambda r: r.metrics["time_p50_ms"] / r.metrics["predicted_ms"])
            ratio = worst.metrics["time_p50_ms"] / worst.metrics["predicted_ms"]
            said.append(f"{part}: the worst stale choice takes {ratio:.2f} × the right one ({worst.variant}).")
    if rows := [r for r in rows_of(records, "group size") if r.config.get("form") == "persistent"]:
        fast, slow = (pick(rows, key=lambda r: r.metrics["time_p50_ms"]) for pick in (min, max))
        ratio = slow.metrics["time_p50_ms"] / fast.metrics["time_p50_ms"]
        said.append(f"group size: {fast.variant} is the best of its kernel, {slow.variant} takes {ratio:.2f} ×.")
    return said


headline = headline_from("{device_name}, torch {torch}, triton {triton}")
VIEW = View(
    columns=[
        Column("variant", "launch"), Column("metrics.time_p50_ms", "µs", ",.1f", scale=1000),
        Column("metrics.time_p20_ms", "p20", ",.1f", scale=1000),
        Column("metrics.time_p80_ms", "p80", ",.1f", scale=1000),
        Column("metrics.gb_per_s", "GB/s", ",.0f"), Column("metrics.tflop_per_s", "TFLOP/s", ",.0f"),
        Column("metrics.in_flight_kib", "KiB under way", ",.0f", missing="", optional=True),
        Column("metrics.registers", "registers", missing="", optional=True),
        Column("metrics.hit_pct", "L2 hits %", ".1f", missing="", optional=True),
        Column("metrics.predicted_ms", "predicted µs", ",.1f", scale=1000, missing="", optional=True),
        Column("metrics.prediction_error_pct", "off %", "+.0f", missing="", optional=True),
        Column("config.chosen", "chosen", align="left", optional=True),
        Column("metrics.tuned", "tuned", missing="", optional=True),
        Column("metrics.first_call_ms", "first call ms", ",.0f", missing="", optional=True),
        Column("metrics.error", "error", ".0e"), Column("metrics.status", "status", optional=True),
    ],
    headline=headline,
    parted_by="config.part",
    reading="element-wise: a memory of some 3 TB/s and half a microsecond of latency needs 1.5 MB under way at any "
    "time, more than 10 KiB per multiprocessor. Small blocks on few warps do not ask for so much; stages ask "
    "for the next block before this one has come. Beyond that, launches are alike, and large blocks only cost "
    "registers. Predicted is Little's law, with a latency that is measured by one warp alone, on an idle "
    "memory: under load it is longer.\n\n"
    "keys: a tuner remembers its choice by the values of its keys and times nothing until they change. A key "
    "that is missing does not fail; it gives another call's tile, which costs time or does not fit at all. "
    "`tuned` counts new choices, and the first call shows what one costs. Triton adds the dtypes of tensors to "
    "every key by itself, so that fp32 is tuned anew under either; of a head dim that is a constant, and of the "
    "dtype behind a tensor descriptor, it knows nothing. Predicted is the time of the same call with the right "
    "keys.\n\n"
    "group size: programs that run together read strips of a and b; with one row of tiles they share a strip of "
    "a and need many of b, with as many rows as columns they share both. Past that, hits fall again. Where the "
    "prediction stays at cuBLAS's time, the memory is fast enough for every order, and differences are those of "
    "the L2's own rate.\n\n"
    "Errors are against float64, over the largest value; in the interpreter times say nothing.",
    terminal=("time_p50_ms", "gb_per_s", "tflop_per_s", "in_flight_kib", "hit_pct", "predicted_ms",
              "prediction_error_pct", "tuned", "error"),
    pictures={"tuning.png": draw},
    findings=findings,
    prediction="From a copy, a latency and cuBLAS's matmul of this run; see how to read.",
)  # fmt: skip
SMALL = {"small": True, "elements": 2**12, "size": 64, "length": 128, "repeats": 3}
EXPERIMENT = Experiment(
    Config, measure, VIEW, presets={"quick": {"repeats": 3}, "quick-cpu": SMALL, "smoke": SMALL}, gpus=1,
    wrong=lambda records: [f"{r.variant} is wrong" for r in records if r.metrics["status"] == "WRONG"],
)  # fmt: skip
