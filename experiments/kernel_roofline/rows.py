"""Measuring: correctness first, then time, memory and launches of every variant of a case."""

import contextlib
import dataclasses
import gc
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.report import Record, environment, read_json, write_json

from . import cases as table
from .cases import VARIANTS, Case, Function, first, leaves, runner, upstream_of, with_gradients
from .prediction import predicted
from .timing import Prepared, ceilings, device_ms, launched, prepare, spills
from .turns import fits, in_turns, summary

EXPERIMENT = "kernel_roofline"
# Inductor's products by its own Triton templates, the best of those it tries; without this it takes cuBLAS's.
TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON",
             "triton.enable_persistent_tma_matmul": True}
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 4e-2}  # of the largest value: sums, then one rounding


@dataclasses.dataclass(frozen=True)
class Config:
    """One run.

    Args:
        device: "cuda", or "cpu" for the smoke test, where times are the host's.
        small: sizes of the smoke test.
        only: names of operations; empty for all.
        variants: which to run.
        repeat_ms: device time per number.
        rounds: of the rows that are timed in turns; even, so that forward and back are as many.
    """

    device: str = "cuda"
    small: bool = False
    only: tuple[str, ...] = ()
    variants: tuple[str, ...] = VARIANTS
    repeat_ms: int = 60
    rounds: int = 8


QUICK = Config(only=("rms_norm", "layer_norm", "softmax", "swiglu", "cross_entropy", "matmul"))
SMOKE = Config(device="cpu", small=True, variants=("ours", "naive", "builtin"), repeat_ms=1, rounds=6)


def run(config: Config, path: Path | None = None, commit_id: str | None = None,
        progress: Callable[[str], None] = lambda text: None) -> list[Record]:
    """Measure every row that `path` does not hold yet; `path` is rewritten after each operation."""
    records = read_json(path) if path is not None and path.exists() else []
    done = {(r.config["label"], r.config["direction"], r.variant) for r in records}
    where, limits = environment(config.device), ceilings(config.device, config.repeat_ms)
    for case in table.cases(config.small):
        if config.only and case.name not in config.only:
            continue
        for direction in case.directions:
            wanted = [v for v in config.variants if case.has(v)]
            missing = [v for v in wanted if (case.label, direction, v) not in done]
            if not missing:
                continue
            progress(f"{case.label} {direction}: {', '.join(missing)}")
            records += _rows_of(case, direction, missing, config, limits, where, commit_id)
            _compare_with_prediction(records, case, direction, limits)
            if config.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            if path is not None:
                write_json(records, path)
    return records


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation in one direction: what all its variants are given."""

    case: Case
    direction: str
    config: Config
    inputs: list[Tensor]
    upstream: Tensor

    def maker(self, function: Function) -> Callable[[], Callable[[], Any]]:
        """Makes what is timed, over copies of the inputs: a peer may overwrite what it is given."""
        mine = with_gradients(self.inputs)
        return lambda: runner(function, mine, self.direction, self.upstream)

    @property
    def timing(self) -> dict[str, Any]:
        """How one variant alone is timed; an optimizer's steps are not captured."""
        return {"device": self.config.device, "capture": self.case.name != "adamw"}


def _rows_of(case: Case, direction: str, variants: list[str], config: Config, limits: dict[str, float],
             where: dict[str, Any], commit_id: str | None) -> Iterator[Record]:
    if not {"compile", "template"}.isdisjoint(variants):
        torch._dynamo.reset()  # not between the two: captured graphs launch what either compiled
    inputs = case.inputs(case.shape, getattr(torch, case.dtype), config.device)
    upstream = upstream_of(first(case.variants["ours"](*[t.detach() for t in inputs])), direction)
    row = Row(case, direction, config, inputs, upstream)
    try:
        expected = exact(case, inputs, direction, upstream)
    except torch.OutOfMemoryError:
        expected = None
    found: dict[str, dict[str, Any]] = {variant: {"status": "ok"} for variant in variants}
    functions: dict[str, Function] = {}
    for variant, metrics in found.items():
        with _failures_into(metrics):
            function = build(case, variant)
            metrics |= check(row, function, expected, ours=variant == "ours")
            functions[variant] = function
    del expected
    held = [metrics["peak_alloc_bytes"] for metrics in found.values() if "peak_alloc_bytes" in metrics]
    time = _time_in_turns if case.compute and fits(held) else _time_one_by_one
    time(row, functions, found)
    for variant, metrics in found.items():
        shown = {"label": case.label, "operation": case.name, "shape": list(case.shape), "dtype": case.dtype,
                 "direction": direction}
        yield Record(EXPERIMENT, variant, shown, metrics | _rates(case, direction, metrics, limits), where, commit_id)


@contextlib.contextmanager
def _failures_into(metrics: dict[str, Any]) -> Iterator[None]:
    """A peer that is missing, refuses or needs too much memory: a row that says so, not the end of the run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except torch.OutOfMemoryError:
        metrics["status"] = "OOM"
    except Exception as error:
        metrics["status"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:90]}"


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
    on_gpu, metrics = row.config.device == "cuda", {}
    fresh = with_gradients(row.inputs)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    results = runner(function, fresh, row.direction, row.upstream)()
    if on_gpu:  # inputs, results and what lies between, and nothing that lay there before
        own = sum(t.nbytes for t in fresh)
        metrics["peak_alloc_bytes"] = torch.cuda.max_memory_allocated() - before + own
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
        with _failures_into(found[variant]):
            found[variant] |= ms(variant)
    mine = found.get("ours", {})
    if "time_p50_ms" not in mine:
        return
    second = ms("ours")
    mine["noise_pct"] = 100 * abs(second["time_p50_ms"] / mine["time_p50_ms"] - 1)
    for name in ("time_p20_ms", "time_p50_ms", "time_p80_ms"):
        mine[name] = (mine[name] + second[name]) / 2


def _time_in_turns(row: Row, functions: dict[str, Function], found: dict[str, dict[str, Any]]) -> None:
    """Times of all variants, made ready before the first round, so that nothing is compiled between two turns."""
    ready: dict[str, Prepared] = {}
    for variant, function in functions.items():
        with _failures_into(found[variant]):
            ready[variant] = prepare(row.maker(function), **row.timing)
    calls = {variant: prepared.call for variant, prepared in ready.items()}
    times = in_turns(calls, row.config.repeat_ms, row.config.rounds, row.config.device)
    for variant, metrics in summary(times).items():
        found[variant] |= metrics | {"captured": ready[variant].captured}


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


def _compare_with_prediction(records: list[Record], case: Case, direction: str, limits: dict[str, float]) -> None:
    """Speed-up over the naive form, measured and predicted, into our row."""
    rows = {r.variant: r.metrics for r in records if (r.config["label"], r.config["direction"]) ==
            (case.label, direction)}
    mine, naive = rows.get("ours", {}), rows.get("naive", {})
    if "time_p50_ms" not in mine or "time_p50_ms" not in naive:
        return
    mine["speed_up"] = naive["time_p50_ms"] / mine["time_p50_ms"]
    mine |= predicted(case, direction, limits)
    if "predicted_speed_up" in mine:
        mine["prediction_error_pct"] = 100 * (mine["predicted_speed_up"] / mine["speed_up"] - 1)
