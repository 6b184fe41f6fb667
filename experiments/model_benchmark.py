"""How long do the parts of a training step take, and how much memory?

Times forward without gradients, forward, forward and backward, and the full step for every combination of the given
sizes, contexts, batches, types, implementations and strategies; each row is checked against the plainest model of the
same weights, its clock against the wall's, and its speed against the device's peak.
"""

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distlab.comm import RankContext, collectives
from distlab.hardware import peak_flops
from distlab.measure.attempt import attempt
from distlab.measure.guards import check_clock, check_speed, check_work
from distlab.measure.memory import peak_memory
from distlab.measure.nvtx import emitter, named_ranges
from distlab.measure.profile import PHASES
from distlab.measure.timing import MIN_PAIRS, MIN_SAMPLES, PhaseTimer, noise_floor, percentiles, slowest_rank
from distlab.report import plot
from distlab.report.curves import curves
from distlab.report.record import Record, commit, environment
from distlab.report.table import Column
from distlab.report.view import View
from distlab.theory.compute import forward_flops, mfu
from distlab.train.trial import MODES, Trial, TrialConfig, described, errors_against_reference, opened

NAME = "model_benchmark"
PASSES = {"inference": 1, "forward": 1, "forward_backward": 3, "step": 3}  # in units of a forward's FLOPs
TOLERANCE = {
    "fp32": 1e-3,
    "bf16": 0.1,
    "fp16": 0.05,
}  # relative error of all gradients; seen: 1e-6, 2e-2, 3e-3
SWEPT = [field.name for field in fields(TrialConfig) if field.name not in ("bucket_size_mb", "seed")]


@dataclass(frozen=True)
class BenchmarkConfig:
    """Every combination of these; see `TrialConfig` for the options.

    Args:
        modes: of `distlab.train.trial.MODES`; run in that order.
        warmups: numbers of first calls to leave out. All rows of one combination come from one series, so that they
            show what those calls cost. A process is cold only once: compare warm-ups in the first combination.
        repeats: timed calls.

    Raises:
        ValueError: a value that is not allowed.
    """

    size: tuple[str, ...] = ("tiny",)
    batch: tuple[int, ...] = (4,)
    context: tuple[int | None, ...] = (None,)
    dtype: tuple[str, ...] = ("fp32",)
    compile: tuple[str, ...] = ("off",)
    attention: tuple[str, ...] = ("sdpa",)
    ops: tuple[str, ...] = ("torch",)
    checkpointing: tuple[str, ...] = ("none",)
    strategy: tuple[str, ...] = ("local",)
    modes: tuple[str, ...] = MODES
    warmups: tuple[int, ...] = (5,)
    repeats: int = 10
    bucket_size_mb: float = 25.0
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise ValueError(f"mode {unknown or '(none)'}: choose among {', '.join(MODES)}")
        if not self.warmups or min(self.warmups) < 0:
            raise ValueError(f"warmup={self.warmups}: give at least one, none below 0")
        if self.repeats < MIN_SAMPLES:
            raise ValueError(f"repeats={self.repeats}: time at least {MIN_SAMPLES}")
        self.trials()

    def trials(self) -> list[TrialConfig]:
        """All combinations; modes and warm-ups share a trial."""
        choices = itertools.product(*(getattr(self, name) for name in SWEPT))
        rest = {"bucket_size_mb": self.bucket_size_mb, "seed": self.seed}
        found = [TrialConfig(**dict(zip(SWEPT, choice, strict=True)), **rest) for choice in choices]
        if not found:
            raise ValueError("give at least one value of every option")
        return found

    def label(self, trial: TrialConfig) -> str:
        """What tells this trial from the others of the run: the options that have several values."""
        varied = [name for name in SWEPT if len(getattr(self, name)) > 1]
        plain = ("size", "dtype", "attention", "strategy")  # values that say what they are
        texts = [str(getattr(trial, n)) if n in plain else f"{n} {getattr(trial, n)}" for n in varied]
        return ", ".join(texts)


def run(
    config: BenchmarkConfig,
    context: RankContext,
    *,
    default_commit: str | None = None,
    nvtx: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Time every combination; call it on every rank. A combination that fails is a row that says why.

    Args:
        nvtx: attach NVTX ranges, and call cudaProfilerStart before and cudaProfilerStop after, for Nsight Systems.

    Raises:
        ValueError: NVTX without a GPU.
    """
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    records = []
    if nvtx:
        emitter("nvtx")  # refuses where there is no GPU
        torch.cuda.profiler.start()
    for trial in config.trials():
        rows = timed(config, trial, context, nvtx, progress)  # first, while the process is cold
        checked = agreed(partial(checked_on_main, context, trial), context)
        checked = collectives.gather_objects(checked, context.group)[0]
        for (mode, warmup), metrics in rows.items():
            metrics |= {name: checked.get(name) for name in ("loss_rel_error", "grad_rel_error")}
            if metrics["status"] == "ok":
                metrics["status"] = verdict(checked, trial)
            parts = [config.label(trial), mode, f"warm-up {warmup}" if len(config.warmups) > 1 else ""]
            where = trial.recorded(context) | {"mode": mode, "warmup": warmup, "repeats": config.repeats}
            records.append(Record(NAME, ", ".join(filter(None, parts)), where, metrics, **facts))
    if nvtx:
        torch.cuda.profiler.stop()
    return records


def timed(
    config: BenchmarkConfig,
    trial: TrialConfig,
    context: RankContext,
    nvtx: bool,
    progress: Callable[[str], None],
) -> dict[tuple[str, int], dict[str, Any]]:
    """Metrics by mode and warm-up of one combination; what fails has its status alone."""
    modes = [mode for mode in MODES if mode in config.modes]
    found: dict[str, dict[str, Any]] = {}

    def every_mode() -> dict[str, Any]:
        with opened(context, trial) as ready:
            for mode in modes:
                progress(f"{config.label(trial) or trial.size}: {mode}")
                found[mode] = agreed(
                    lambda mode=mode: {"rows": time_mode(ready, mode, config, nvtx)}, context
                )
        return {}

    failure = agreed(every_mode, context)
    rows = {}
    for mode, warmup in itertools.product(modes, config.warmups):
        of_mode = found.get(mode, failure)
        measured = of_mode.get("rows", of_mode["status"])
        rows[mode, warmup] = {"status": measured} if isinstance(measured, str) else measured[warmup]
    return rows


def checked_on_main(context: RankContext, trial: TrialConfig) -> dict[str, Any]:
    """Rank 0's errors; the check needs no other rank, and those would only take its memory and cores."""
    return errors_against_reference(context, trial) if context.is_main else {}


def agreed(measure: Callable[[], dict[str, Any]], context: RankContext) -> dict[str, Any]:
    """`attempt`, with one status on all ranks: a combination fails everywhere if it fails anywhere."""
    found = attempt(measure)
    statuses = collectives.gather_objects(found["status"], context.group)
    failed = [status for status in statuses if status != "ok"]
    if failed:  # what lay on the way to the failure must not make the next combination fail
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"status": failed[0]} if failed else found


def verdict(checked: dict[str, Any], trial: TrialConfig) -> str:
    """`ok`, or why the row must not be believed."""
    if checked["status"] != "ok":
        return f"unchecked ({checked['status']})"
    if not checked["grad_rel_error"] <= TOLERANCE[trial.dtype]:
        return "wrong gradients"
    return "ok"


def time_mode(
    trial: Trial, mode: str, config: BenchmarkConfig, nvtx: bool = False
) -> dict[int, dict[str, Any]] | str:
    """Metrics of one mode, by number of warm-up calls; the status of the first call if it failed on some rank.

    Memory runs out in the first call or not at all, so the ranks agree on it there, before they go on together.

    Raises:
        Implausible: the clock misses part of the work, nothing was computed, or faster than the device can be.
    """
    context = trial.context
    timer = PhaseTimer(context.device)

    def call(times: int) -> dict[str, Any]:
        timer.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            timer.start()
            trial(mode, timer.mark)
        timer.synchronize()
        return {"wall_ms": (time.perf_counter() - begin) * 1e3}

    with ExitStack() as stack:
        memory = stack.enter_context(peak_memory(context.device))
        if nvtx:
            stack.enter_context(torch.cuda.nvtx.range(mode))
            stack.enter_context(named_ranges(trial.model, emitter("nvtx"), trial.optimizer))
        dist.barrier(context.group)
        first = agreed(lambda: call(1), context)
        if first["status"] != "ok":
            return first["status"]
        wall_ms = first["wall_ms"] + call(max(config.warmups) + config.repeats - 1)["wall_ms"]
    samples = timer.steps()
    slowest = partial(slowest_rank, group=context.group, device=context.device)
    phases = {name: slowest([sample[name] for sample in samples]) for name in samples[0]}
    peak = slowest([memory.peak_alloc_bytes or 0])[0]
    # From here on nothing is communicated, so a rank may raise.
    covered = check_clock([sample["step"] for sample in samples], wall_ms, context.device)
    check_work(trial.last_loss, trial.gradients() if mode in ("forward_backward", "step") else None)
    shared = {"peak_alloc_bytes": int(peak) or None, "clock_covered_pct": 100 * covered}
    return {
        warmup: _metrics(trial, mode, phases, warmup, config.repeats) | shared for warmup in config.warmups
    }


def _metrics(
    trial: Trial, mode: str, phases: dict[str, list[float]], warmup: int, repeats: int
) -> dict[str, Any]:
    kept = {name: times[warmup : warmup + repeats] for name, times in phases.items()}
    step = kept["step"]
    found: dict[str, Any] = {"status": "ok", "first_ms": step[0]}
    found |= {"step_mean_ms": float(np.mean(step)), "step_std_ms": float(np.std(step, ddof=1))}
    found |= {f"step_{name}_ms": value for name, value in percentiles(step).items()}
    for phase in PHASES:
        found[f"{phase}_p50_ms"] = percentiles(kept[phase])["p50"] if phase in kept else None
    pairs = len(step) // 2
    halves = step[0 : 2 * pairs : 2], step[1 : 2 * pairs : 2]
    found["noise_floor_pct"] = noise_floor(*halves) if pairs >= MIN_PAIRS else None
    peak, p50 = _peak_flops(trial), found["step_p50_ms"]
    # The guard counts the least that must be done: a causal kernel may skip half of the scores.
    check_speed(step_flops(trial.config, mode, causal=True), min(step), peak)
    flops = step_flops(trial.config, mode)
    found["tflops_per_s"] = flops / p50 / 1e9
    share = mfu(flops, p50 / 1e3, peak)
    found["mfu_pct"] = None if share is None else 100 * share
    tokens = trial.config.batch * trial.shape.context_length * trial.context.world_size
    found["tokens_per_s"] = tokens / (p50 / 1e3)
    found["series_ms"] = phases["step"] if warmup == 0 else None
    return found


def step_flops(config: TrialConfig, mode: str, causal: bool = False) -> int:
    """FLOPs of one call on one rank, without what checkpointing recomputes."""
    shape = config.model()
    forward = forward_flops(
        batch=config.batch, context=shape.context_length, d_model=shape.d_model, d_ff=shape.d_ff,
        num_layers=shape.num_layers, vocab_size=shape.vocab_size, causal=causal,
    )  # fmt: skip
    return forward.total * PASSES[mode]


def _peak_flops(trial: Trial) -> float | None:
    device = trial.context.device
    if device.type != "cuda":
        return None
    dtype = trial.config.dtype
    if dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        dtype = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), dtype)


# -- how it is shown ----------------------------------------------------------------------------------------------


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    return described([record.config for record in records], records[0].environment)


def _ms(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ".2f")


def _exponent(value: float) -> str:
    return f"{value:.0e}"


COLUMNS = [
    Column("variant", "what"),
    _ms("step_mean_ms", "mean ms"), _ms("step_std_ms", "± std"), _ms("step_p20_ms", "p20"), _ms("step_p50_ms", "p50"),
    _ms("step_p80_ms", "p80"), _ms("first_ms", "first"), _ms("forward_p50_ms", "forward"),
    _ms("backward_p50_ms", "backward"), _ms("optimizer_p50_ms", "optimizer"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f"), Column("metrics.tflops_per_s", "TFLOP/s", ",.2f"),
    Column("metrics.mfu_pct", "MFU %", ".1f"), Column("metrics.grad_rel_error", "gradient error", _exponent),
    Column("metrics.noise_floor_pct", "noise %", ".1f"), Column("metrics.status", "status", align="left"),
]  # fmt: skip


def draw_steps(records: Sequence[Record], path: Path) -> None:
    """A bar per row: forward, backward and optimizer, with p20 and p80 of the whole."""
    labels = [record.variant for record in records]
    parts: dict[str, list[float | str | None]] = {phase: [] for phase in PHASES}
    whiskers: list[tuple[float, float] | None] = []
    for record in records:
        metrics = record.metrics
        timed = metrics.get("step_p50_ms") is not None
        for phase, values in parts.items():
            values.append((metrics[f"{phase}_p50_ms"] or 0.0) if timed else metrics["status"])
        whiskers.append((metrics["step_p20_ms"], metrics["step_p80_ms"]) if timed else None)
    plot.stacked_bars(path, labels, parts, title=headline(records), unit="ms (median; whiskers p20 to p80)",
                      whiskers=whiskers)  # fmt: skip


def draw_warmup(records: Sequence[Record], path: Path) -> None:
    """Every call of the series that were measured from the first call on; nothing without such a series."""
    series = {
        r.variant.removesuffix(", warm-up 0"): (
            list(range(len(r.metrics["series_ms"]))),
            r.metrics["series_ms"],
        )
        for r in records
        if r.metrics.get("series_ms")
    }
    if series and len({r.config["warmup"] for r in records}) > 1:
        curves(
            path,
            series,
            title=f"Every call from the first: {headline(records)}",
            x_label="call",
            y_label="ms",
        )


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={"steps.png": draw_steps, "warmup.png": draw_warmup},
    reading="Inference is a forward without gradients; forward keeps what backward needs and stops there; "
    "forward_backward adds backward and the synchronisation of gradients; step adds the optimizer. Every call works on "
    "the next of four batches. Rows with several warm-ups are cut from one series; the column first is a row's first "
    "call.\n\n"
    "The gradient error is ‖g − g_ref‖ / ‖g_ref‖ over all parameters, against a model of the same weights with naive "
    "attention, torch's operations, fp32, nothing compiled. A row whose error is above the tolerance of its type, "
    "whose clock does not cover the wall's, whose gradients are zero, or that is faster than the device's peak, says "
    "so in its status.",
    prediction="None: see ddp_bench, plan and the calculator for predicted steps.",
)
