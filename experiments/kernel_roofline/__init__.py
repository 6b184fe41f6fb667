"""How close is each fused kernel to what the hardware allows?

    distlab run kernel_roofline --quick                     # rows of most interest; small on a CPU
    distlab run kernel_roofline --name full                 # all rows, two minutes; again: resumes
    distlab run kernel_roofline --preset chains             # chains of operations as one kernel
    distlab run kernel_roofline --chain bias gelu multiply  # one of your own
    distlab run kernel_roofline --only add --shrink 1 8 64  # the same at smaller sizes

Each operation in each direction × (ours, naive: plain torch one kernel at a time, builtin: torch's own, compile: the
naive form through torch.compile, template: of matmuls, the best of Inductor's Triton templates with cuBLAS left out,
liger: Liger Kernel where it is installed). Wall: the time of a call in a loop, as a model calls it, and the host's part
of it. Device: the time of a CUDA graph's replay with the L2 flushed before it; GB/s of the *least* traffic and its
share of the copy bandwidth of this run; TFLOP/s and its share of cuBLAS in this run; launched kernels; registers and
spills of ours; the largest error against float64, relative to the largest value (none where results are random, and of
the optimizer). Beside the measured ratio to the naive form stands the predicted one.

Two rows lose on purpose: `spilling_add_rms_norm_silu`, a chain fused into too few threads' registers, and `add_gelu`,
which torch.compile makes one kernel and ours are two. Chains (`add+rms_norm+silu`, in `chains`) are rows too, with
an account of its traffic.

All variants of a row are timed in interleaved rounds, because clocks drift with the GPU's power and temperature.

The rows are in `cases`, clocks and ceilings in `timing`, the prediction in `prediction`.
"""

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.experiment import Column, Experiment, Options, RankContext, Record, Run, View, option
from distlab.measure import allocated_bytes, attempt, call_ms, launched, peak_memory, sample_rounds
from distlab.report import (
    TIE,
    Ratio,
    fastest,
    grouped,
    host_bound,
    noise_of,
    prediction_error,
    row_of,
)
from distlab.report.style import INK, OKABE_ITO, picture

from . import cases as table
from .cases import VARIANTS, Case, Function, first, leaves, runner, upstream_of, with_gradients
from .chains import CHAINS, OPERATIONS, TRAFFIC, accounts, chain_case
from .prediction import predicted
from .timing import Prepared, calls_within, ceilings, device_ms, fits, prepare, spills

# Inductor's matmuls by its own Triton templates, the best of those it tries; without this it takes cuBLAS's.
TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON",
             "triton.enable_persistent_tma_matmul": True}  # fmt: skip
NO_KERNELS = ("Memcpy", "Memset", "Activity", "Lazy", "Optimizer.")  # on the profiler's list of the device
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 4e-2}  # of the largest value: sums, then one rounding


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """One run: operations × directions × variants rows."""

    only: tuple[str, ...] = option((), "these operations [all]")
    chain: tuple[str, ...] = option((), "these one after the other on one tensor instead", choices=tuple(OPERATIONS))
    variants: tuple[str, ...] = option(VARIANTS, "what to time", choices=VARIANTS)
    repeat_ms: int = option(60, "ms of device time per number", least=1)
    rounds: int = option(10, "interleaved rounds; even: as many forwards as in reverse", least=3)
    small: bool = option(False, "small sizes, in fp32")
    shrink: tuple[int, ...] = option((1,), "divide first dimensions by these, one after another", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only and self.chain:
            raise ValueError("--only and --chain: give one of them")
        names = {case.name for case in table.cases(True) + list(map(chain_case, CHAINS))} if self.only else set()
        if unknown := set(self.only) - names:
            raise ValueError(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(sorted(names))}")

    def cases(self) -> list[Case]:
        """The operations and chains of the run, in each of their sizes."""
        found = [] if self.chain else table.cases(self.small)
        found += [chain_case(chain).sized(self.small) for chain in ([self.chain] if self.chain else CHAINS)]
        return [
            dataclasses.replace(case, shape=(max(1, case.shape[0] // divisor), *case.shape[1:]))
            for case in found
            if not self.only or case.name in self.only
            for divisor in self.shrink
        ]


SMALL = {"small": True, "variants": ("ours", "naive", "builtin"), "repeat_ms": 1, "rounds": 6}
PRESETS = {
    "quick": {"only": ("rms_norm", "layer_norm", "softmax", "swiglu", "cross_entropy", "matmul")},
    "quick-cpu": SMALL | {"only": ()},
    "chains": {"only": tuple("+".join(chain) for chain in CHAINS)},
    "chains-cpu": {"small": True, "repeat_ms": 1, "variants": SMALL["variants"]},
    "smoke": SMALL | {"only": ("add", "rms_norm", "matmul", "+".join(CHAINS[0]))},
}


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per operation, direction and variant, those of one operation together; then ours beside all."""
    device = context.device.type
    limits = ceilings(device, config.repeat_ms)
    for case, direction in [(each, way) for each in config.cases() for way in each.directions]:
        known = {"label": case.label, "direction": direction}
        missing = [v for v in config.variants if case.has(v) and not run.done(v, **known)]
        if not missing:
            continue
        run.progress(f"{case.label} {direction}: {', '.join(missing)}")
        shown = known | {"operation": case.name, "shape": list(case.shape), "dtype": case.dtype}
        shown |= {"chain": case.name.split("+")} if callable(case.takes) else {}
        for variant, metrics in Row(case, direction, missing, config, device).measure().items():
            metrics |= _rates(case, direction, metrics, limits)
            run.add(variant, metrics | (predicted(case, direction, limits) if variant == "ours" else {}), **shown)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    compare(run.records)
    run.part(COMPARISON.name).records[:] = beside_peers(run.records)
    run.part(TRAFFIC.name).records[:] = accounts(run.records)


class Row:
    """One operation in one direction: what all its variants are given, and what is found of each.

    Args:
        case, direction: the row.
        variants: to measure.
        config: how.
        device: `cuda` or `cpu`.
    """

    def __init__(self, case: Case, direction: str, variants: list[str], config: Config, device: str):
        self.case, self.direction, self.config, self.device = case, direction, config, device
        self.inputs = case.inputs(device)
        self.upstream = upstream_of(first(case.main(*[t.detach() for t in self.inputs])), direction)
        self.found: dict[str, dict[str, Any]] = {variant: {"status": "ok"} for variant in variants}
        self.functions: dict[str, Function] = {}  # of those that were right
        self.captures = case.name != "adamw"  # an optimizer's steps are not

    def measure(self) -> dict[str, dict[str, Any]]:
        """Variant → metrics."""
        if not {"compile", "template"}.isdisjoint(self.found):
            torch._dynamo.reset()  # not between the two: captured graphs launch what either compiled
        try:
            expected = exact(self.case, self.inputs, self.direction, self.upstream)
        except torch.OutOfMemoryError:
            expected = None
        for variant in self.found:
            self._add(variant, partial(self._check, variant, expected))
        del expected
        self._time()
        return self.found

    def _time(self) -> None:
        """Times of all variants in interleaved rounds: on the device, and called in a loop as a model calls them.

        Graphs are captured once if all can be held at once, otherwise again in every round.
        """
        device, held = self.device, [metrics.get("peak_alloc_bytes", 0) for metrics in self.found.values()]
        together = device == "cpu" or fits(sum(held))
        kept: dict[str, Prepared] = {}
        counts: dict[str, int] = {}

        def ready(variant: str) -> Prepared:
            return kept.get(variant) or prepare(self._maker(self.functions[variant]), device, self.captures)

        def begin(variant: str) -> dict[str, Any]:  # compiles, so that no round does
            prepared = ready(variant)
            counts[variant] = calls_within(self.config.repeat_ms / self.config.rounds, prepared.call, device)
            if together:
                kept[variant] = prepared
            return {"captured": prepared.captured}

        def once(variant: str) -> dict[str, list[float]]:
            prepared = ready(variant)
            found = {"time": [device_ms(prepared.call, counts[variant], device)]}
            del prepared  # and its graph, where all do not fit
            return found | (call_ms(self._maker(self.functions[variant])(), 1) if device == "cuda" else {})

        for variant in self.functions:
            self._add(variant, partial(begin, variant))
        calls = {variant: partial(once, variant) for variant in counts}
        for variant, metrics in sample_rounds(calls, self.config.rounds).items():
            self.found[variant] |= metrics

    def _add(self, variant: str, work: Callable[[], dict[str, Any]]) -> None:
        """Add what `work` measures; a peer that is missing, refuses or needs too much memory says so in `status`."""
        metrics = attempt(work).items()
        self.found[variant] |= {name: value for name, value in metrics if (name, value) != ("status", "ok")}

    def _maker(self, function: Function) -> Callable[[], Callable[[], Any]]:
        """Makes what is timed, over copies of the inputs: a peer may overwrite what it is given."""
        mine = with_gradients(self.inputs)
        return lambda: runner(function, mine, self.direction, self.upstream)

    def _check(self, variant: str, expected: list[Tensor] | None) -> dict[str, Any]:
        """Error, memory and launches of one variant, alone on the device."""
        function, fresh = build(self.case, variant), with_gradients(self.inputs)
        before = allocated_bytes(self.device)
        with peak_memory(self.device) as memory:
            results = runner(function, fresh, self.direction, self.upstream)()
        metrics: dict[str, Any] = {"error": worst_error(results, expected)}
        if before is not None:  # inputs, results and what lies between, and nothing that lay there before
            metrics["peak_alloc_bytes"] = memory.peak_alloc_bytes - before + sum(t.nbytes for t in fresh)
        del fresh, results
        if before is not None:
            again = self._maker(function)()
            kernels = [count for name, count in launched(again).items() if not name.startswith(NO_KERNELS)]
            metrics |= {"kernels": sum(kernels)} | (spills(again) if variant == "ours" else {})
        if metrics["error"] is not None and not metrics["error"] <= TOLERANCE[self.case.dtype]:
            metrics["status"] = "WRONG"
        self.functions[variant] = function  # timed only if this has succeeded
        return metrics


def exact(case: Case, inputs: list[Tensor], direction: str, upstream: Tensor) -> list[Tensor] | None:
    """Results in float64, or in fp32 where that is too large to hold; None where they are random."""
    too_large = case.name.startswith("linear_cross_entropy") and math.prod(case.shape) > 10**9
    if case.name in ("dropout", "linear_gelu_dropout", "adamw"):
        return None
    function = case.plain or (lambda x, w, t: torch.nn.functional.cross_entropy(x @ w.T, t))
    dtype = torch.float32 if too_large else torch.float64
    wide = with_gradients([t.to(dtype) if t.is_floating_point() else t for t in inputs])
    if direction == "fwd":
        with torch.no_grad():
            return [first(function(*wide))]
    out = first(function(*wide))
    return list(torch.autograd.grad(out, leaves(wide), upstream.to(out.dtype)))


def build(case: Case, variant: str) -> Function:
    """The function of a variant; compiled ones are compiled for this size, as their users do."""
    if variant in case.variants:
        return case.variants[variant]
    return torch.compile(case.plain, dynamic=False, options=TEMPLATES if variant == "template" else None)


def worst_error(results: Any, expected: list[Tensor] | None) -> float | None:
    """Largest difference of any result, over the largest value of that result."""
    if expected is None:
        return None
    results = results if isinstance(results, tuple | list) else [results]
    return max(((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-30)).item()
               for x, y in zip(results, expected, strict=False))


def _rates(case: Case, direction: str, metrics: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Bandwidth and arithmetic rate of a row, and their shares of the ceilings."""
    if "time_p50_ms" not in metrics:
        return {}
    cost, ms = case.cost(direction), metrics["time_p50_ms"]
    rates = {"min_bytes": cost.bytes, "flops": cost.flops, "gb_per_s": cost.bytes / ms / 1e6,
             "tflop_per_s": cost.flops / ms / 1e9, **limits}
    rates["of_copy_pct"] = None if case.compute else 100 * rates["gb_per_s"] / limits["copy_gb_per_s"]
    rates["of_cublas_pct"] = 100 * rates["tflop_per_s"] / limits["cublas_tflop_per_s"] if case.compute else None
    return rates


PEERS = VARIANTS[1:]
DIRECTIONS = {"fwd": ("o", "blue", "forward"), "bwd": ("s", "orange", "backward"),
              "both": ("^", "green", "forward and backward")}
NAMED_BELOW = 0.75  # of what the ceilings allow: such a point is named


def by_row(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """(operation and shape, direction) → variant → record."""
    groups = grouped(records, lambda r: (r.config["label"], r.config["direction"]))
    return {row: {r.variant: r for r in mine} for row, mine in groups.items()}


def headline(records: Sequence[Record]) -> str:
    """What was measured on, and its ceilings, for the line above a table."""
    env = records[0].environment
    where = f"{env.get('device_name', 'CPU')}, torch {env.get('torch', '?')}"
    if not any("copy_gb_per_s" in r.metrics for r in records):
        return where
    copy, cublas = (  # a run that was resumed has ceilings of every process, and rows are held against their own
        " and ".join(dict.fromkeys(f"{r.metrics[name]:,.0f}" for r in records if name in r.metrics))
        for name in ("copy_gb_per_s", "cublas_tflop_per_s")
    )
    return f"{where}; copy {copy} GB/s, cuBLAS {cublas} TFLOP/s"


def _is_peer(record: Record) -> bool:
    return record.variant != "ours" and record.metrics.get("status") == "ok"


OVER_PEER = Ratio("over_peer", fastest("time_p50_ms", _is_peer), "time")
OVER_PEER_WALL = Ratio("over_peer_wall", fastest("wall_p50_ms", _is_peer), "wall")
OVER_NAIVE = Ratio("over_naive", row_of("naive"), "time")
OVER_BUILTIN = Ratio("over_builtin", row_of("builtin"), "time")
OFF = prediction_error("predicted_over_naive", "over_naive")


def compare(records: Sequence[Record]) -> None:
    """Hold the rows that are right against the fastest peer, the naive form and torch's own."""
    right = [r for r in records if r.metrics.get("status") == "ok"]
    for rows in by_row(right).values():
        for ratio in (OVER_PEER, OVER_PEER_WALL, OVER_NAIVE, OVER_BUILTIN):
            ratio.add([*rows.values()])


def verdicts(records: Sequence[Record]) -> list[str]:
    """In how many rows nobody else is faster, on the device and in a loop, and how far predictions were off."""
    lines = []
    for how, ratio in (("On the device", OVER_PEER), ("Called in a loop", OVER_PEER_WALL)):
        compared, ties, slower = 0, 0, []
        for row, rows in by_row(records).items():
            ours, peer = rows.get("ours"), ratio.baseline([*rows.values()])
            if ours is None or peer is None or ratio.name not in ours.metrics:
                continue
            compared += 1
            ties += bool(ratio.tie(ours))
            if (found := ours.metrics[ratio.name]) > 1 and not ratio.tie(ours):
                slower.append(f"{' '.join(row)} ({peer.variant}, ours / it {found:.2f}{host_bound(ours)})")
        if compared:
            lines.append(f"{how} no peer is faster in {compared - len(slower)} of {compared} rows, {ties} of them ties"
                         f"{': ' if slower else ''}{', '.join(slower)}.")
    errors = [abs(error) for r in records if r.variant == "ours" and (error := OFF.value(r)) is not None]
    if errors:
        close = sum(error <= 15 for error in errors)
        lines.append(f"Of {len(errors)} predicted ratios to the naive form {close} are within 15 %.")
    return lines


def beside_peers(records: Sequence[Record]) -> list[Record]:
    """A record per operation and direction: our row with the times of the others as further metrics; the variant is
    the operation.
    """
    found = []
    for rows in by_row(records).values():
        if "ours" in rows:
            ours = rows["ours"]
            times = {f"{peer}_ms": rows[peer].metrics.get("time_p50_ms") if peer in rows else None for peer in PEERS}
            mine = ours.metrics | times | {"noise_pct": noise_of(ours.metrics, "time")}
            found.append(
                Record(COMPARISON.name, ours.config["operation"], ours.config, mine, ours.environment, ours.commit)
            )
    return found


def _tie(record: Record) -> str:
    """A tie, by the noise of ours where the record is of a version that kept no interval."""
    ratio, noise = record.metrics["over_peer"], (record.metrics.get("noise_pct") or 0.0) / 100
    if "over_peer_low" in record.metrics:
        return OVER_PEER.tie(record)
    return TIE if ratio * (1 - noise) <= 1 <= ratio * (1 + noise) else ""


def wall_notes(record: Record) -> str:
    """Mark a wall time: ` host` where the host takes longer than the device, ` L2` where it is below the device's."""
    wall, device = (record.metrics.get(f"{clock}_p50_ms") for clock in ("wall", "time"))
    return host_bound(record) + (" L2" if wall and device and wall < device else "")


# Of both tables.
ROW = [Column("config.label", "operation", align="left"), Column("config.direction", "")]
WALL = Column("metrics.wall_p50_ms", "wall µs", ",.1f", scale=1000, missing="", optional=True, note=wall_notes)
WALL_OVER_PEER = OVER_PEER_WALL.column("ours / best peer, wall", ".2f", missing="", optional=True)
NOISE = Column("metrics.noise_pct", "± %", ".1f", derived=lambda r: noise_of(r.metrics, "time"))
SHARES = [Column("metrics.of_copy_pct", "% of copy", ".0f", missing=""),
          Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", missing="")]  # fmt: skip
HELD = [Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30), Column("metrics.error", "error", ".0e")]
NAIVE = [OVER_NAIVE.column("ours / naive (in fp32)", ".3f", missing=""),
         Column("metrics.predicted_over_naive", "predicted", ".3f", missing=""), OFF]  # fmt: skip
COMPARISON_COLUMNS = [
    *ROW, WALL, WALL_OVER_PEER, Column("metrics.time_p50_ms", "ours µs", ",.1f", scale=1000), NOISE,
    *(Column(f"metrics.{peer}_ms", peer, ",.1f", scale=1000, missing="", optional=True) for peer in PEERS),
    Column("metrics.over_peer", "ours / best peer", ".2f", note=_tie),
    *SHARES, *HELD, OVER_BUILTIN.column("ours / builtin", ".2f", missing="", optional=True), *NAIVE,
]


def plot_roofline(records: Sequence[Record], path: Path) -> None:
    """Every kernel of ours as a point under the two measured ceilings; those that stay below are named."""
    mine = [r for r in records if r.variant == "ours" and r.metrics.get("flops") and "tflop_per_s" in r.metrics]
    if not mine:
        return
    title = "Our kernels under the ceilings of the run; named are those below three quarters of them"
    with picture(path, title, 4.5) as figure:
        axes = figure.add_subplot()
        # Every process of a resumed run measures its own ceilings: those that held highest.
        bandwidth, peak = (max(r.metrics[name] for r in mine) for name in ("copy_gb_per_s", "cublas_tflop_per_s"))
        knee = 1000 * peak / bandwidth
        intensities = sorted([0.05, knee, max(2 * knee, 20000.0)])
        axes.plot(intensities, [min(peak, x * bandwidth / 1000) for x in intensities], color=INK, linewidth=1.2,
                  label=f"measured: copy {bandwidth:,.0f} GB/s, cuBLAS {peak:,.0f} TFLOP/s")
        points = [(r.metrics["flops"] / r.metrics["min_bytes"], r.metrics["tflop_per_s"]) for r in mine]
        for direction, (marker, colour, label) in DIRECTIONS.items():
            chosen = [p for p, r in zip(points, mine, strict=True) if r.config["direction"] == direction]
            if chosen:
                axes.plot(*zip(*chosen, strict=True), marker, color=OKABE_ITO[colour], alpha=0.75, markersize=4,
                          linestyle="none", label=label)
        for (intensity, rate), r in zip(points, mine, strict=True):
            if rate < NAMED_BELOW * min(peak, intensity * bandwidth / 1000):
                left = intensity > 100  # of the point: there is no room on the other side
                axes.annotate(f"{r.config['label']} {r.config['direction']}", (intensity, rate), fontsize=5.5,
                              ha="right" if left else "left",
                              xytext=(-5 if left else 5, -5), textcoords="offset points")
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("FLOPs per byte of least traffic")
        axes.set_ylabel("TFLOP/s")
        axes.legend(loc="upper left", frameon=True)


VIEW = View(
    columns=[
        *ROW, Column("variant", "variant"), WALL,
        Column("metrics.host_p50_ms", "host µs", ",.1f", scale=1000, optional=True),
        Column("metrics.time_p50_ms", "device µs", ",.1f", scale=1000), NOISE, WALL_OVER_PEER,
        OVER_PEER.column("ours / best peer", ".2f", missing="", optional=True),
        Column("metrics.gb_per_s", "GB/s", ",.0f"), *SHARES,
        Column("metrics.kernels", "kernels"), Column("metrics.registers", "registers", missing=""),
        Column("metrics.spill_bytes", "spilled", missing=""),
        *HELD, *NAIVE, Column("metrics.status", "status"),
    ],
    headline=headline,
    terminal=("label", "direction", "variant", "wall_p50_ms", "time_p50_ms", "of_copy_pct", "status"),
    pictures={"roofline.png": plot_roofline},
    derive=compare,
    findings=verdicts,
    reading="Device times are replays of a CUDA graph with the L2 flushed before each. Wall times are of calls in a "
    "loop, which find in the L2 what the call before left: one below its device time is marked L2, one that waits for "
    "the host is marked host. Ratios are this row's time over that of another row, below 1 it is faster. For "
    "memory-bound operations GB/s is the least traffic over the time; its share of the copy's bandwidth in this run "
    "shows what could still be gained. Matmuls are compared with cuBLAS. Errors are against float64, relative to the "
    "largest value; a row beyond the tolerance of its dtype says WRONG. Peak is what the call holds at most: inputs, "
    "results and what lies between. In the roofline each number is one of our kernels, under the two ceilings measured "
    "in this run.",
    prediction="The ratio to the naive form: the bytes that the fused kernel moves at the copy's rate, over what the "
    "naive form's operators move, counted at torch's dispatcher, at the rates that copies, broadcasts, reductions and "
    "widening casts reach in this run.",
    noise="All variants of a row are timed once in each of the interleaved rounds. Ratios are paired by round.",
)
COMPARISON = View(
    name="kernel_comparison",
    question="Ours beside every peer, one row per operation and direction",
    columns=COMPARISON_COLUMNS,
    headline=headline,
    terminal=("label", "direction", "wall_p50_ms", "over_peer_wall", "time_p50_ms", "noise_pct", "over_peer",
              "of_copy_pct"),
    reading="Times in µs; wall is of calls in a loop, with a warm L2; the others are on the device, with a cold one. A "
    "wall time below its device time is marked L2. Ratios: below 1 ours is faster. The naive form widens its inputs to "
    "fp32, operation by operation, which makes the last ratio smaller; builtin is torch's own operators in the inputs' "
    "dtype, one for each operation.",
)
EXPERIMENT = Experiment(Config, measure, VIEW, presets=PRESETS, gpus=1, parts=(COMPARISON, TRAFFIC))
