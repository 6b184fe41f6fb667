"""How close is each fused kernel to what the hardware allows?

    distlab run kernel_roofline --quick                     # rows of most interest; small on a CPU
    distlab run kernel_roofline --name full                 # all rows, two minutes; again: resumes
    distlab run kernel_roofline --preset chains             # chains of operations as one kernel
    distlab run kernel_roofline --chain bias gelu multiply  # one of your own

Each operation in each direction × (ours, naive: plain torch one kernel at a time, builtin: torch's own, compile: the
naive form through torch.compile, template: of matmuls, the best of Inductor's Triton templates with cuBLAS left out,
liger: Liger Kernel where it is installed). Wall: the time of a call in a loop, as a model calls it, and the host's part
of it. Device: the median of a CUDA graph's replays with the L2 flushed in between;
GB/s of the *least* traffic and its share of the copy bandwidth of this run; TFLOP/s and its share of cuBLAS in this
run; launched kernels; registers and spills of ours; the largest error against float64, relative to the largest value
(none where results are random, and of the optimizer). Beside the measured speed-up over the naive form stands the
predicted one.

Two rows lose on purpose: `spilling_add_rms_norm_silu`, a chain fused into too few threads' registers, and `add_gelu`,
which torch.compile makes one kernel and ours are two. Chains (`add+rms_norm+silu`, in `chains`) are rows too, with
an account of its traffic.

Rows bound by arithmetic run at a clock that the GPU's power sets: their variants are interleaved, in rounds.

The rows are in `cases`, clocks and ceilings in `timing`, the prediction in `prediction`.
"""

import dataclasses
import gc
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distlab.experiment import Column, Experiment, Options, RankContext, Record, Run, View, option
from distlab.hardware import lookup
from distlab.measure import allocated_bytes, attempt, call_ms, peak_memory
from distlab.report import (
    GREYS,
    INK,
    OKABE_ITO,
    TIE,
    grouped,
    horizontal,
    host_bound,
    picture,
    prediction_error,
)

from . import cases as table
from .cases import VARIANTS, Case, Function, first, leaves, runner, upstream_of, with_gradients
from .chains import CHAINS, OPERATIONS, TRAFFIC, accounts, chain_case
from .prediction import predicted
from .timing import (
    Prepared,
    ceilings,
    device_ms,
    fits,
    interleaved,
    launched,
    over_ours,
    prepare,
    spills,
    summary,
)

# Inductor's matmuls by its own Triton templates, the best of those it tries; without this it takes cuBLAS's.
TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON",
             "triton.enable_persistent_tma_matmul": True}  # fmt: skip
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 4e-2}  # of the largest value: sums, then one rounding


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """One run: operations × directions × variants rows."""

    only: tuple[str, ...] = option((), "these operations [all]")
    chain: tuple[str, ...] = option((), "these one after the other on one tensor instead", choices=tuple(OPERATIONS))
    variants: tuple[str, ...] = option(VARIANTS, "what to time", choices=VARIANTS)
    repeat_ms: int = option(60, "ms of device time per number", least=1)
    rounds: int = option(8, "of interleaved rows; even: as many forwards as in reverse", least=1)
    small: bool = option(False, "small sizes, in fp32")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only and self.chain:
            raise ValueError("--only and --chain: give one of them")
        names = {case.name for case in table.cases(True) + list(map(chain_case, CHAINS))} if self.only else set()
        if unknown := set(self.only) - names:
            raise ValueError(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(sorted(names))}")


CALL_ROUNDS = 7  # of calls in a loop
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
    chosen = [case for case in table.cases(config.small) if not config.only or case.name in config.only]
    limits = ceilings(device, config.repeat_ms)
    named = [chain for chain in CHAINS if not config.only or "+".join(chain) in config.only]
    chosen = [] if config.chain else chosen
    chosen += [chain_case(chain).sized(config.small) for chain in ([config.chain] if config.chain else named)]
    for case, direction in [(each, way) for each in chosen for way in each.directions]:
        known = {"label": case.label, "direction": direction}
        missing = [v for v in config.variants if case.has(v) and not run.done(v, **known)]
        if not missing:
            continue
        run.progress(f"{case.label} {direction}: {', '.join(missing)}")
        shown = known | {"operation": case.name, "shape": list(case.shape), "dtype": case.dtype}
        shown |= {"chain": case.name.split("+")} if callable(case.takes) else {}
        for variant, metrics in Row(case, direction, missing, config, device).measure().items():
            run.add(variant, metrics | _rates(case, direction, metrics, limits), **shown)
        _compare_with_prediction(run, case, direction, limits)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
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
        # How one variant alone is timed; an optimizer's steps are not captured.
        self.timing = {"device": device, "capture": case.name != "adamw"}

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
        held = [metrics["peak_alloc_bytes"] for metrics in self.found.values() if "peak_alloc_bytes" in metrics]
        if self.case.compute and fits(held):
            self._time_interleaved()
        else:
            self._time_one_by_one()
        if self.device == "cuda":
            self._time_calls()
        return self.found

    def _time_calls(self) -> None:
        """Times of all variants called in a loop, as a model calls them; in rounds, because a host's speed drifts."""
        times: dict[str, list[float]] = defaultdict(list)

        def called(variant: str) -> dict[str, float]:
            for clock, (ms,) in call_ms(self._maker(self.functions[variant])(), repeats=1).items():
                times[variant + clock].append(ms)
            return {f"{clock}_p50_ms": statistics.median(times[variant + clock]) for clock in ("wall", "host")}

        for variant in [*self.functions] * CALL_ROUNDS:
            self._add(variant, partial(called, variant))

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
            metrics |= launched(again) | (spills(again) if variant == "ours" else {})
        if metrics["error"] is not None and not metrics["error"] <= TOLERANCE[self.case.dtype]:
            metrics["status"] = "WRONG"
        self.functions[variant] = function  # timed only if this has succeeded
        return metrics

    def _time_one_by_one(self) -> None:
        """Times of each, and of ours once more after its peers: a card that warms up slows down what comes later."""

        def ms(variant: str) -> dict[str, Any]:
            return device_ms(self._maker(self.functions[variant]), repeat_ms=self.config.repeat_ms, **self.timing)

        for variant in self.functions:
            self._add(variant, partial(ms, variant))
        mine = self.found.get("ours", {})
        if "time_p50_ms" not in mine:
            return
        second = ms("ours")
        mine["noise_pct"] = 100 * abs(second["time_p50_ms"] / mine["time_p50_ms"] - 1)
        for name in ("time_p20_ms", "time_p50_ms", "time_p80_ms"):
            mine[name] = (mine[name] + second[name]) / 2

    def _time_interleaved(self) -> None:
        """Times of all variants, made ready before the first round, so that nothing is compiled between two timings."""
        ready: dict[str, Prepared] = {}

        def made_ready(variant: str) -> dict[str, Any]:
            ready[variant] = prepare(self._maker(self.functions[variant]), **self.timing)
            return {"captured": ready[variant].captured}

        for variant in self.functions:
            self._add(variant, partial(made_ready, variant))
        calls = {variant: prepared.call for variant, prepared in ready.items()}
        times = interleaved(calls, self.config.repeat_ms, self.config.rounds, self.device)
        for variant, metrics in summary(times).items():
            self.found[variant] |= metrics


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
             "tflop_per_s": cost.flops / ms / 1e9, "compute_bound": case.compute, **limits}
    rates["of_copy_pct"] = None if case.compute else 100 * rates["gb_per_s"] / limits["copy_gb_per_s"]
    rates["of_cublas_pct"] = 100 * rates["tflop_per_s"] / limits["cublas_tflop_per_s"] if case.compute else None
    return rates


def _compare_with_prediction(run: Run, case: Case, direction: str, limits: dict[str, float]) -> None:
    """Speed-up over the naive form, measured and predicted, into our row."""
    rows = [run.done(variant, label=case.label, direction=direction) for variant in ("ours", "naive")]
    mine, naive = (row.metrics if row else {} for row in rows)
    if "time_p50_ms" in mine and "time_p50_ms" in naive:
        mine["speed_up"] = naive["time_p50_ms"] / mine["time_p50_ms"]
        mine |= predicted(case, direction, limits)
        if "predicted_speed_up" in mine:
            mine["prediction_error_pct"] = 100 * (mine["predicted_speed_up"] / mine["speed_up"] - 1)
        run.save()


if TYPE_CHECKING:
    from matplotlib.axes import Axes

EQUAL_PCT = 1.0  # smaller differences, or those below the row's own noise, are ignored
PEERS = VARIANTS[1:]
COLOURS = {"builtin": "green", "compile": "vermillion", "template": "sky", "liger": "purple"}
DIRECTIONS = {"fwd": ("o", "blue", "forward"), "bwd": ("s", "orange", "backward"),
              "both": ("^", "green", "forward and backward")}
NAMED_BELOW = 0.75  # of what the ceilings allow: such a point is named
LONGEST = 2.5  # bars beyond are cut off and say how long they are


def by_row(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """(operation and shape, direction) → variant → record."""
    groups = grouped(records, lambda r: (r.config["label"], r.config["direction"]))
    return {row: {r.variant: r for r in mine} for row, mine in groups.items()}


def headline(records: Sequence[Record]) -> str:
    """What was measured on, and how, for the line above a table."""
    env = records[0].environment
    where = f"{env.get('device_name', 'CPU')}, torch {env.get('torch', '?')}"
    if not any("copy_gb_per_s" in r.metrics for r in records):
        return where
    interleaved = "interleaved where rounds are given, else " * any(r.metrics.get("rounds") for r in records)
    return (f"{where}; copy {_limit(records, 'copy_gb_per_s')} GB/s, cuBLAS "
            f"{_limit(records, 'cublas_tflop_per_s')} TFLOP/s; variants {interleaved}timed one after the other")


def _limit(records: Sequence[Record], name: str) -> str:
    """A ceiling as it was measured: a run that was resumed has one of every process, and rows are held against their
    own.
    """
    *others, last = dict.fromkeys(f"{x.metrics[name]:,.0f}" for x in records if name in x.metrics) or ["0"]
    return f"{', '.join(others)} and {last}" if others else last


def _ratio_to_best(rows: Mapping[str, Record], clock: str = "time") -> tuple[str, float] | None:
    """The fastest peer that was timed, and its time over ours; None without one, or without ours."""
    timed = {name: r.metrics for name, r in rows.items() if r.metrics.get(f"{clock}_p50_ms")}
    if "ours" not in timed:
        return None
    ratios = {name: over_ours(metrics, timed["ours"], clock) for name, metrics in timed.items() if name != "ours"}
    return min(ratios.items(), key=lambda pair: pair[1], default=None)


def verdicts(records: Sequence[Record]) -> list[str]:
    """How many rows nobody else wins, one line for each that a peer does, and how far predictions were off."""
    lost, alike, compared = [], 0, 0
    for (label, direction), rows in by_row([r for r in records if r.metrics.get("status") == "ok"]).items():
        if (best := _ratio_to_best(rows)) is None:
            continue
        compared += 1
        peer, ratio = best
        mine, behind = rows["ours"].metrics, 100 * (1 / ratio - 1)
        limit = max(EQUAL_PCT, mine.get("noise_pct") or 0)
        alike += abs(behind) <= limit
        if behind > limit:
            theirs = rows[peer].metrics["time_p50_ms"]
            lost.append(f"{label} {direction}: {peer} is faster by {behind:.1f} %, {1000 * theirs:.1f} µs against "
                        f"{1000 * mine['time_p50_ms']:.1f}")
    lines = []
    if compared:
        lines = [f"in {compared - len(lost)} of {compared} rows no peer is faster; in {alike} the fastest peer and "
                 f"ours differ by no more than {EQUAL_PCT:g} % or the row's noise"]
    errors = [abs(r.metrics["prediction_error_pct"]) for r in records if "prediction_error_pct" in r.metrics]
    if errors:
        lines.append(f"predicted speed-ups: {sum(e <= 15 for e in errors)} of {len(errors)} within 15 % of measured")
    return lines + _called_slower(records) + lost


def _called_slower(records: Sequence[Record]) -> list[str]:
    """The rows in which a peer's calls in a loop take less time, with the host's part of ours."""
    best = {row: (_ratio_to_best(rows, "wall"), rows) for row, rows in by_row(records).items()}
    compared = {row: (*found, rows["ours"].metrics) for row, (found, rows) in best.items() if found}
    waits = {row: ", host-bound" * (m["host_p50_ms"] > m["time_p50_ms"]) for row, (_, _, m) in compared.items()}
    slower = [f"{label} {direction} ({peer} {ratio:.2f} ×{waits[label, direction]})"
              for (label, direction), (peer, ratio, _) in compared.items() if ratio < 1 - EQUAL_PCT / 100]
    if not compared:
        return []
    which = f": {', '.join(slower)}" if slower else ""
    return [f"called in a loop, no peer is faster in {len(compared) - len(slower)} of {len(compared)} rows{which}"]


def beside_peers(records: Sequence[Record]) -> list[Record]:
    """A record per operation and direction: our row with the times of the others as further metrics; the variant is
    the operation.
    """
    found = []
    for rows in by_row(records).values():
        if "ours" in rows:
            ours, best = rows["ours"], _ratio_to_best(rows)
            times = {f"{peer}_ms": rows[peer].metrics.get("time_p50_ms") if peer in rows else None for peer in PEERS}
            metrics = {name: ours.metrics.get(name) for name in KEPT} | times
            metrics["peer_over_ours"] = best[1] if best else None
            if metrics["builtin_ms"] and metrics["time_p50_ms"]:
                metrics["over_same_dtype"] = over_ours(rows["builtin"].metrics, ours.metrics)
            if called := _ratio_to_best(rows, "wall"):
                metrics["peer_over_ours_wall"] = called[1]
            found.append(
                Record(COMPARISON.name, ours.config["operation"], ours.config, metrics, ours.environment, ours.commit)
            )
    return found


KEPT = ("wall_p50_ms", "host_p50_ms", "time_p50_ms", "noise_pct", "of_copy_pct", "of_cublas_pct",
        "peak_alloc_bytes", "error", "speed_up", "predicted_speed_up", "rounds", "copy_gb_per_s", "cublas_tflop_per_s")


def _tie(record: Record) -> str:
    ratio, noise = record.metrics["peer_over_ours"], record.metrics.get("noise_pct") or 0.0
    return TIE if abs(100 * (ratio - 1)) <= max(EQUAL_PCT, noise) else ""


COMPARISON_COLUMNS = [
    Column("config.label", "operation", align="left"), Column("config.direction", ""),
    Column("metrics.wall_p50_ms", "wall µs", ",.1f", scale=1000, missing="", optional=True, note=host_bound),
    Column("metrics.peer_over_ours_wall", "best peer / ours, wall", ".2f", missing="", optional=True),
    Column("metrics.time_p50_ms", "ours µs", ",.1f", scale=1000), Column("metrics.noise_pct", "± %", ".1f"),
    *(Column(f"metrics.{peer}_ms", peer, ",.1f", scale=1000, missing="", optional=True) for peer in PEERS),
    Column("metrics.peer_over_ours", "best peer / ours", ".2f", note=_tie),
    Column("metrics.rounds", "rounds", missing="", optional=True),
    Column("metrics.of_copy_pct", "% of copy", ".0f", missing=""),
    Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", missing=""),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30), Column("metrics.error", "error", ".0e"),
    Column("metrics.over_same_dtype", "builtin / ours", ".1f", missing="", optional=True),
    Column("metrics.speed_up", "naive (in fp32) / ours", ".1f", missing=""),
    Column("metrics.predicted_speed_up", "predicted", ".1f", missing=""),
    prediction_error("predicted_speed_up", "speed_up"),
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
        _ceiling(axes, bandwidth, peak, color=INK, linewidth=1.2,
                 label=f"measured: copy {bandwidth:,.0f} GB/s, cuBLAS {peak:,.0f} TFLOP/s")
        spec = lookup(mine[0].environment.get("device_name") or "")
        if spec is not None:
            _ceiling(axes, spec.hbm_bandwidth / 1e9, spec.peak["bf16"] / 1e12, color=GREYS["grey"], linewidth=0.8,
                     linestyle="--", label=f"datasheet of the {spec.name}")
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


def _ceiling(axes: "Axes", gb_per_s: float, tflop_per_s: float, **style: object) -> None:
    """The roof: bandwidth times intensity, up to the arithmetic peak."""
    knee = 1000 * tflop_per_s / gb_per_s
    xs = sorted([0.05, knee, max(2 * knee, 20000.0)])
    axes.plot(xs, [min(tflop_per_s, x * gb_per_s / 1000) for x in xs], **style)


def plot_bars(records: Sequence[Record], path: Path) -> None:
    """Time of every peer over ours, one group of bars per operation and direction, in two columns."""
    timed = [r for r in records if r.metrics.get("time_p50_ms") and r.variant in ("ours", *COLOURS)]
    rows = [(" ".join(row), found) for row, found in by_row(timed).items() if len(found) > 1 and "ours" in found]
    if not rows:
        return
    half = math.ceil(len(rows) / 2)
    title = "Time of every peer over ours, by operation and direction"
    with picture(path, title, 0.24 * half + 1.0, small=True) as figure:
        columns = figure.subplots(1, 2 if len(rows) > half else 1, squeeze=False)[0]
        for axes, part in zip(columns, (rows[:half], rows[half:]), strict=False):
            _bars(axes, part)
        shown = {name: colour for name, colour in COLOURS.items() if any(name in times for _, times in rows)}
        handles = [columns[0].barh([0], [0], color=OKABE_ITO[colour], label=name) for name, colour in shown.items()]
        figure.legend(handles=handles, labels=list(shown), loc="outside lower center", ncols=len(shown))


def _bars(axes: "Axes", rows: list[tuple[str, dict[str, Record]]]) -> None:
    height = 0.8 / len(COLOURS)
    for row, (_, times) in enumerate(rows):
        present = [name for name in COLOURS if name in times]
        for place, name in enumerate(present):
            ratio = over_ours(times[name].metrics, times["ours"].metrics)
            y = row + (place - (len(present) - 1) / 2) * height
            axes.barh(y, min(ratio, LONGEST), height * 0.9, color=OKABE_ITO[COLOURS[name]])
            if ratio > LONGEST:
                axes.text(LONGEST * 0.99, y, f"{ratio:.1f}", ha="right", va="center", fontsize=4.5, color="white")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=5)
    axes.set(xlim=(0, LONGEST), ylim=(len(rows) - 0.4, -0.6))
    axes.set_xlabel("time over ours: right of the line ours is faster", fontsize=6.5)
    horizontal(axes)
    axes.axvline(1, color=INK, linewidth=0.8)


VIEW = View(
    columns=[
        Column("config.label", "operation", align="left"), Column("config.direction", ""), Column("variant", "variant"),
        Column("metrics.wall_p50_ms", "wall µs", ",.1f", scale=1000, optional=True, note=host_bound),
        Column("metrics.host_p50_ms", "host µs", ",.1f", scale=1000, optional=True),
        Column("metrics.time_p50_ms", "device µs", ",.1f", scale=1000),
        Column("metrics.noise_pct", "noise %", ".1f", missing=""), Column("metrics.rounds", "rounds", missing=""),
        Column("metrics.gb_per_s", "GB/s", ",.0f"),
        Column("metrics.of_copy_pct", "% of copy", ".0f", missing=""),
        Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", missing=""),
        Column("metrics.kernels", "kernels"), Column("metrics.registers", "registers", missing=""),
        Column("metrics.spill_bytes", "spilled", missing=""),
        Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30), Column("metrics.error", "error", ".1e"),
        Column("metrics.speed_up", "× naive", ".2f", missing=""),
        Column("metrics.predicted_speed_up", "predicted", ".2f", missing=""),
        prediction_error("predicted_speed_up", "speed_up"), Column("metrics.status", "status"),
    ],
    headline=headline,
    terminal=("label", "direction", "variant", "wall_p50_ms", "time_p50_ms", "of_copy_pct", "status"),
    pictures={"roofline.png": plot_roofline, "bars.png": plot_bars},
    findings=verdicts,
    reading="For memory-bound operations GB/s is the least traffic over the time; its share of the copy's bandwidth "
    "in the same run shows what could still be gained. Matmuls are compared with cuBLAS. Errors are "
    "against float64, relative to the largest value; a row beyond the tolerance of its dtype says WRONG. Peak is what "
    "the call holds at most: inputs, results and what lies between. In the roofline each number is one of our kernels, "
    "under the two ceilings measured in this run.",
    prediction="The speed-up over the naive form: what the naive form's operators move, counted at torch's dispatcher, "
    "at the rates that copies, broadcasts, reductions and widening casts reach in this run, over the bytes that the "
    "fused kernel moves at the copy's rate.",
    noise="Ours is timed before and after its peers; the time is the mean of the two and the noise their difference. "
    "Compute-bound rows, whose clocks drift under the GPU's power limit, are interleaved if all variants fit in "
    "memory together: `rounds` says in how many rounds; rows without a number were timed sequentially. Then times are "
    "over all rounds, peers are compared with ours within each round, and the noise is how far from 1 the 95 % "
    "interval of ours "
    "over ours reaches.",
)
COMPARISON = View(
    name="kernel_comparison",
    question="Ours beside every peer, one row per operation and direction",
    columns=COMPARISON_COLUMNS,
    headline=headline,
    terminal=("label", "direction", "wall_p50_ms", "peer_over_ours_wall", "time_p50_ms", "noise_pct", "peer_over_ours",
              "of_copy_pct"),
    reading="Times in µs; wall is of calls in a loop, the others on the device. Above 1 in `best peer / ours` ours is "
    "faster; ± is the difference between two timings of ours, one before and one after the peers. If `rounds` has a "
    "number, all were interleaved in so many rounds: the ratio is the median over rounds, and ± how far the 95 % "
    "interval of ours over ours reaches. The naive form widens its inputs to fp32, operation by operation, which "
    "inflates the last ratio; builtin is torch's own operators in the inputs' dtype, one for each operation.",
)
EXPERIMENT = Experiment(Config, measure, VIEW, presets=PRESETS, gpus=1, parts=(COMPARISON, TRAFFIC))
