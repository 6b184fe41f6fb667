"""Measuring: correctness first, then time, memory and launches of every variant of a case."""

import dataclasses
import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.experiment import Options, RankContext, Run, option
from distlab.measure.validity import attempt

from . import cases as table
from .cases import VARIANTS, Case, Function, first, leaves, runner, upstream_of, with_gradients
from .prediction import predicted
from .timing import Prepared, ceilings, device_ms, fits, interleaved, launched, prepare, spills, summary
from .tuning import LAUNCHES, TUNED, dump_ptx, tune
from .view import COMPARISON, beside_peers

# Inductor's matmuls by its own Triton templates, the best of those it tries; without this it takes cuBLAS's.
TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON",
             "triton.enable_persistent_tma_matmul": True}  # fmt: skip
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 4e-2}  # of the largest value: sums, then one rounding


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """One run: operations × directions × variants rows."""

    only: tuple[str, ...] = option((), "these operations [all]")
    variants: tuple[str, ...] = option(VARIANTS, "what to time", choices=VARIANTS)
    repeat_ms: int = option(60, "ms of device time per number", least=1)
    rounds: int = option(8, "of interleaved rows; even: as many forwards as in reverse", least=1)
    small: bool = option(False, "small sizes, in fp32")
    tune: bool = option(False, "time launch parameters of the operations of --only instead")
    dump_ptx: str | None = option(None, "write the PTX of one kernel instead", choices=tuple(LAUNCHES))

    def __post_init__(self) -> None:
        super().__post_init__()
        names = {case.name for case in table.cases(True)} if self.only else set()
        if unknown := set(self.only) - names:
            raise ValueError(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(sorted(names))}")
        if self.tune and (self.small or not self.only or set(self.only) - set(TUNED)):
            raise ValueError(f"--tune: name operations of full size with --only, of {', '.join(TUNED)}")


SMALL = {"small": True, "variants": ("ours", "naive", "builtin"), "repeat_ms": 1, "rounds": 6}
PRESETS = {
    "quick": {"only": ("rms_norm", "layer_norm", "softmax", "swiglu", "cross_entropy", "matmul")},
    "quick-cpu": SMALL | {"only": ()},
    "smoke": SMALL | {"only": ("add", "rms_norm", "matmul")},
}


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per operation, direction and variant, those of one operation and direction together; then ours beside all.

    With `tune` a row per launch parameters, with `dump_ptx` one of what the compiler made, beside a file.
    """
    device = context.device.type
    if config.dump_ptx:
        dump_ptx(config.dump_ptx, run)
        return
    chosen = [case for case in table.cases(config.small) if not config.only or case.name in config.only]
    if config.tune:
        tune(chosen, device, config.repeat_ms, run)
        return
    limits = ceilings(device, config.repeat_ms)
    for case, direction in [(each, way) for each in chosen for way in each.directions]:
        known = {"label": case.label, "direction": direction}
        missing = [v for v in config.variants if case.has(v) and not run.done(v, **known)]
        if not missing:
            continue
        run.progress(f"{case.label} {direction}: {', '.join(missing)}")
        shown = known | {"operation": case.name, "shape": list(case.shape), "dtype": case.dtype}
        for variant, metrics in _measure_variants(case, direction, missing, config, device).items():
            run.add(variant, metrics | _rates(case, direction, metrics, limits), **shown)
        _compare_with_prediction(run, case, direction, limits)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    run.part(COMPARISON.name).records[:] = beside_peers(run.records)


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation in one direction: what all its variants are given."""

    case: Case
    direction: str
    config: Config
    device: str
    inputs: list[Tensor]
    upstream: Tensor

    def maker(self, function: Function) -> Callable[[], Callable[[], Any]]:
        """Makes what is timed, over copies of the inputs: a peer may overwrite what it is given."""
        mine = with_gradients(self.inputs)
        return lambda: runner(function, mine, self.direction, self.upstream)

    @property
    def timing(self) -> dict[str, Any]:
        """How one variant alone is timed; an optimizer's steps are not captured."""
        return {"device": self.device, "capture": self.case.name != "adamw"}


def _measure_variants(
    case: Case, direction: str, variants: list[str], config: Config, device: str
) -> dict[str, dict[str, Any]]:
    """Variant → metrics."""
    if not {"compile", "template"}.isdisjoint(variants):
        torch._dynamo.reset()  # not between the two: captured graphs launch what either compiled
    inputs = case.inputs(case.shape, getattr(torch, case.dtype), device)
    upstream = upstream_of(first(case.variants["ours"](*[t.detach() for t in inputs])), direction)
    row = Row(case, direction, config, device, inputs, upstream)
    try:
        expected = exact(case, inputs, direction, upstream)
    except torch.OutOfMemoryError:
        expected = None
    found: dict[str, dict[str, Any]] = {variant: {"status": "ok"} for variant in variants}
    functions: dict[str, Function] = {}

    def checked(variant: str, expected: list[Tensor] | None) -> dict[str, Any]:
        function = build(case, variant)
        metrics = check(row, function, expected, ours=variant == "ours")
        functions[variant] = function  # timed only if this has succeeded
        return metrics

    for variant, metrics in found.items():
        _add(metrics, partial(checked, variant, expected))
    del expected
    held = [metrics["peak_alloc_bytes"] for metrics in found.values() if "peak_alloc_bytes" in metrics]
    time = _time_interleaved if case.compute and fits(held) else _time_one_by_one
    time(row, functions, found)
    return found


def _add(metrics: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
    """Add what `work` measures; a peer that is missing, refuses or needs too much memory has the reason in `status`."""
    metrics |= {name: value for name, value in attempt(work).items() if (name, value) != ("status", "ok")}


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


def check(row: Row, function: Function, expected: list[Tensor] | None, ours: bool) -> dict[str, Any]:
    """Error, memory and launches of one variant, alone on the device."""
    on_gpu, metrics = row.device == "cuda", {}
    fresh = with_gradients(row.inputs)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    results = runner(function, fresh, row.direction, row.upstream)()
    if on_gpu:  # inputs, results and what lies between, and nothing that lay there before
        metrics["peak_alloc_bytes"] = torch.cuda.max_memory_allocated() - before + sum(t.nbytes for t in fresh)
    metrics["error"] = worst_error(results, expected)
    del fresh, results
    if on_gpu:
        again = row.maker(function)()
        metrics |= launched(again) | (spills(again) if ours else {})
    if metrics["error"] is not None and not metrics["error"] <= TOLERANCE[row.case.dtype]:
        metrics["status"] = "WRONG"
    return metrics


def _time_one_by_one(row: Row, functions: dict[str, Function], found: dict[str, dict[str, Any]]) -> None:
    """Times of each, and of ours once more after its peers: a card that warms up slows down what comes later."""

    def ms(variant: str) -> dict[str, Any]:
        return device_ms(row.maker(functions[variant]), repeat_ms=row.config.repeat_ms, **row.timing)

    for variant in functions:
        _add(found[variant], partial(ms, variant))
    mine = found.get("ours", {})
    if "time_p50_ms" not in mine:
        return
    second = ms("ours")
    mine["noise_pct"] = 100 * abs(second["time_p50_ms"] / mine["time_p50_ms"] - 1)
    for name in ("time_p20_ms", "time_p50_ms", "time_p80_ms"):
        mine[name] = (mine[name] + second[name]) / 2


def _time_interleaved(row: Row, functions: dict[str, Function], found: dict[str, dict[str, Any]]) -> None:
    """Times of all variants, made ready before the first round, so that nothing is compiled between two timings."""
    ready: dict[str, Prepared] = {}

    def made_ready(variant: str) -> dict[str, Any]:
        ready[variant] = prepare(row.maker(functions[variant]), **row.timing)
        return {"captured": ready[variant].captured}

    for variant in functions:
        _add(found[variant], partial(made_ready, variant))
    calls = {variant: prepared.call for variant, prepared in ready.items()}
    times = interleaved(calls, row.config.repeat_ms, row.config.rounds, row.device)
    for variant, metrics in summary(times).items():
        found[variant] |= metrics


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
