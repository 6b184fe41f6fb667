"""What time and memory does each part of a training step take?

    distlab run model_benchmark --size small --batch 4 --context 128 --warmup 0 1 2 5
    distlab run model_benchmark --size medium --dtype fp32 bf16 --attention naive sdpa flash
    distlab run model_benchmark --quick --profile --memory-snapshot --saved
    distlab run model_benchmark --preset profile     # kinds of work, contexts of 256 to 4,096
    distlab run model_benchmark --preset memory      # memory over contexts, in fp32 and bf16
    distlab run model_benchmark --preset recomputation  # of activations: memory, time

Times forward without gradients, forward, forward and backward, and the full step for every combination of the given
sizes, contexts, batches, dtypes, implementations and strategies; each row is checked against the plainest model of the
same weights, its clock against the wall's, and its speed against the device's peak.

On request the full step of each combination is taken apart, from the profiler's traces: the kernels with the most time
in forward, backward, optimizer and inference, the kinds of work by time beside their FLOPs in each phase, and the
parts of the model (`by_part`), measured beside predicted; memory over time by category,
with the largest blocks and who asked for them; and what a block saves for backward, eager, compiled and with this lab's
kernels. That is in `taken_apart`.
"""

import gc
import itertools
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
import torch.distributed as dist

from distlab.bench.reference import errors_against_reference
from distlab.bench.task import OwnModel
from distlab.bench.timing import MODES, Trial, TrialConfig, opened, peak_of
from distlab.comm import collectives
from distlab.experiment import Column, Experiment, Options, RankContext, Record, Run, View, option
from distlab.measure import (
    MIN_SAMPLES,
    Pace,
    PhaseTimer,
    attempt,
    busy_ms,
    check_clock,
    check_speed,
    check_work,
    emitter,
    named_ranges,
    peak_memory,
    percentiles,
    slowest_rank,
)
from distlab.measure.trace.capture import PHASES
from distlab.options import SEED
from distlab.report import NOISE, prediction_error, stacked_bars, waiting
from distlab.theory.flops import forward_flops, mfu
from distlab.train.memory_budget import require, shortage

from .by_part import PART_VIEW
from .taken_apart import (
    KERNEL_VIEW,
    MEMORY_VIEW,
    SAVED_VIEW,
    WORK_VIEW,
    Rows,
    headline,
    memory,
    ms_column,
    predicted_peak,
    prefix,
    profile,
    saved,
)

SWEPT = (
    *("size", "batch", "context", "vocab", "d_model", "d_ff", "layers", "heads", "kv_heads"),
    *("dtype", "compile", "attention", "ops", "checkpointing", "strategy"),
)


def _swept(name: str) -> tuple[str, Any, Any]:
    """A trial's option as one that takes several values: name, type and field."""
    one = next(field for field in fields(TrialConfig) if field.name == name)
    limits = {limit: one.metadata[limit] for limit in ("least", "choices")}
    limits |= {"words": {"preset": None}} if one.default is None else {}
    swept = option((one.default,), f"{one.metadata['help']}; several are swept", **limits)
    return name, tuple[get_type_hints(TrialConfig)[name], ...], swept


Swept = make_dataclass("Swept", map(_swept, SWEPT), bases=(Options,), frozen=True)


@dataclass(frozen=True)
class BenchmarkConfig(OwnModel, Swept):
    """Every combination of the options that take several values, and what to look at in each.

    All rows of one combination come from one series, so that several warm-ups show what those calls cost. A process is
    cold only once: compare warm-ups in the first combination. Raises ValueError for a value that is not allowed.
    """

    modes: tuple[str, ...] = option(MODES, "parts of a step, in this order", choices=MODES, flag="--mode")
    warmups: tuple[int, ...] = option((5,), "numbers of first calls to leave out", least=0, flag="--warmup")
    repeats: int = option(10, "timed calls", least=MIN_SAMPLES, flag="--steps")
    bucket_size_mb: float = option(25.0, "MiB, of strategies with buckets", above=0)
    seed: int = option(0, "of parameters and data", **SEED)
    profile: bool = option(False, "traces, and kernels and kinds of work by time")
    memory: bool = option(
        False, "memory over time; on a GPU the allocator's history too", flag="--memory-snapshot"
    )
    saved: bool = option(False, "what a block saves for backward: eager, compiled, ours")
    nvtx: bool = option(False, "NVTX ranges on parts and messages, for Nsight Systems")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trials()
        if self.factory is not None and self.saved:
            raise ValueError("--saved takes the lab's Transformer apart block by block; with --model leave it out")
        if self.nvtx:
            emitter("nvtx")  # refuses where there is no GPU

    def trials(self) -> list[TrialConfig]:
        """All combinations; modes and warm-ups share a trial."""
        choices = itertools.product(*(getattr(self, name) for name in SWEPT))
        rest = {"bucket_size_mb": self.bucket_size_mb, "seed": self.seed, "factory": self.factory}
        return [TrialConfig(**dict(zip(SWEPT, choice, strict=True)), **rest) for choice in choices]

    def label(self, trial: TrialConfig) -> str:
        """What tells this trial from the others of the run: the options that have several values."""
        varied = [name for name in SWEPT if len(getattr(self, name)) > 1]
        plain = ("size", "dtype", "attention", "strategy")  # values that say what they are
        return ", ".join([str(getattr(trial, n)) if n in plain else f"{n} {getattr(trial, n)}" for n in varied])


OOM = "OOM"
PASSES = {"inference": 1, "forward": 1, "forward_backward": 3, "step": 3}  # in units of a forward's FLOPs
TOLERANCE = {
    "fp32": 1e-3,
    "bf16": 0.1,
    "fp16": 0.05,
}  # relative error of all gradients; seen: 1e-6, 2e-2, 3e-3


def measure(config: BenchmarkConfig, context: RankContext, run: Run) -> None:
    """Time every combination, then take its step apart; call it on every rank. What fails is a row that says why.

    With `nvtx`, cudaProfilerStart is called before and cudaProfilerStop after the timed calls, for Nsight Systems.

    Raises:
        ValueError: a strategy that needs a GPU.
        MemoryError: no combination fits.
    """
    modes = [mode for mode in MODES if mode in config.modes]
    if config.factory is None:
        planned = [trial.planned(trial.strategy, mode) for trial in config.trials() for mode in modes]
        require(planned, context.device, context, some=True)
    if config.nvtx:
        torch.cuda.profiler.start()
    for trial in config.trials():
        names = {}
        for mode, warmup in itertools.product(modes, config.warmups):
            parts = [config.label(trial), mode, f"warm-up {warmup}" if len(config.warmups) > 1 else ""]
            names[mode, warmup] = ", ".join(filter(None, parts))
        if all(map(run.done, names.values())):
            continue
        rows = timed(config, trial, context, run.progress)  # first, while the process is cold
        # By rank 0: the check needs no other rank, and those would only take its memory and cores.
        check = config.factory is None and context.is_main
        checked = agreed(partial(errors_against_reference, context, trial) if check else dict, context)
        checked = collectives.gather_objects(checked, context.group)[0]
        for (mode, warmup), metrics in rows.items():
            metrics |= {name: checked.get(name) for name in ("loss_rel_error", "grad_rel_error")}
            if metrics["status"] == "ok":
                metrics["status"] = verdict(checked, trial)
            metrics["predicted_peak_bytes"] = predicted_peak(trial, context, mode)
            run.add(names[mode, warmup], metrics, **asdict(trial) | trial.facts(context), mode=mode, warmup=warmup)
    if config.nvtx:
        torch.cuda.profiler.stop()
    for trial in config.trials():
        take_apart(config, trial, context, run)


def take_apart(config: BenchmarkConfig, trial: TrialConfig, context: RankContext, run: Run) -> None:
    """Rows of what is wanted of one combination's full step, in the parts of the run; call it on every rank.

    Traces, pictures and the allocator's history are written to the run's folder. What fails is reported, and has no
    rows.
    """
    label = config.label(trial)
    name = label or trial.factory or trial.size
    slug = re.sub("[^A-Za-z0-9_.]+", "-", name)
    parts: dict[str, Callable[[], dict[str, Rows]]] = {}
    if config.profile:
        parts["profiling"] = partial(profile, context, trial, run.path, slug)
    if config.memory:
        parts["recording the memory of"] = partial(memory, context, trial, run.path, slug)
    if config.saved:
        parts["listing what is saved for backward by"] = partial(saved, context, trial)
    for what, part in parts.items():
        run.progress(f"{what} {name}")
        found = attempt(part)
        if (status := found.pop("status")) != "ok":
            run.notice(f"{what} {name}: {status}")
        for view, rows in found.items():
            for row, (variant, metrics) in enumerate(rows):  # of one kernel there may be several
                where = asdict(trial) | trial.facts(context) | {"label": label, "row": row}
                run.part(view).add(f"{prefix(label)}{variant}", metrics, **where)


def timed(
    config: BenchmarkConfig,
    trial: TrialConfig,
    context: RankContext,
    progress: Callable[[str], None],
) -> dict[tuple[str, int], dict[str, Any]]:
    """Metrics by mode and warm-up of one combination; what fails has its status alone."""
    modes = [mode for mode in MODES if mode in config.modes]
    found: dict[str, dict[str, Any]] = {}

    def every_mode() -> dict[str, Any]:
        with opened(context, trial) as ready:
            for mode in modes:
                if mode in found:
                    continue
                label = f"{config.label(trial) or trial.factory or trial.size}: {mode}"
                progress(label)
                pace = Pace(max(config.warmups) + config.repeats, label, progress)
                found[mode] = agreed(
                    lambda mode=mode, pace=pace: {"rows": time_mode(ready, mode, config, pace)}, context
                )
        return {}

    for mode in modes if config.factory is None else ():
        if shortage(trial.planned(trial.strategy, mode), context.device, context) is not None:
            found[mode] = {"status": OOM}
    failure = {} if len(found) == len(modes) else agreed(every_mode, context)
    rows = {}
    for mode, warmup in itertools.product(modes, config.warmups):
        of_mode = found.get(mode, failure)
        measured = of_mode.get("rows", of_mode["status"])
        rows[mode, warmup] = {"status": measured} if isinstance(measured, str) else measured[warmup]
    return rows


def agreed(measure: Callable[[], dict[str, Any]], context: RankContext) -> dict[str, Any]:
    """`attempt`, with one status on all ranks: a combination fails everywhere if it fails anywhere."""
    found = attempt(measure)
    failed = [status for status in collectives.gather_objects(found["status"], context.group) if status != "ok"]
    if failed:  # what lay on the way to the failure must not make the next combination fail
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"status": failed[0]} if failed else found


def verdict(checked: dict[str, Any], trial: TrialConfig) -> str:
    """`ok`, or why the row must not be believed."""
    if checked["status"] != "ok":
        return f"unchecked ({checked['status']})"
    if trial.factory is not None:  # which has no plainer form to be held against; ddp_bench checks its gradients
        return "ok"
    if not checked["grad_rel_error"] <= TOLERANCE[trial.dtype]:
        return "wrong gradients"
    return "ok"


def time_mode(
    trial: Trial,
    mode: str,
    config: BenchmarkConfig,
    pace: Callable[[], None] = lambda: None,
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
            pace()
        timer.synchronize()
        return {"wall_ms": (time.perf_counter() - begin) * 1e3}

    with ExitStack() as stack:
        memory = stack.enter_context(peak_memory(context.device))
        if config.nvtx:
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
    busy = busy_ms(partial(trial, mode))[0] if context.device.type == "cuda" else None
    # From here on nothing is communicated, so a rank may raise.
    covered = check_clock([sample["step"] for sample in samples], wall_ms, context.device)
    there = mode in ("forward_backward", "step")
    check_work(trial.last_loss, itertools.chain(*trial.model.gradients()) if there else None)
    shared = {"peak_alloc_bytes": int(peak) or None, "clock_covered_pct": 100 * covered}
    rows = {warmup: _metrics(trial, mode, phases, warmup, config.repeats) | shared for warmup in config.warmups}
    for row in rows.values() if busy is not None else ():
        row["gpu_idle_pct"] = 100 * max(0.0, 1 - busy / row["step_p50_ms"])
    return rows


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
    found["step_samples_ms"] = step
    peak, p50 = peak_of(trial.context.device, trial.options.dtype), found["step_p50_ms"]
    if trial.options.factory is not None:
        found["examples_per_s"] = trial.options.batch * trial.context.world_size / (p50 / 1e3)
        return found
    # The guard counts the least that must be done: a causal kernel may skip half of the scores.
    check_speed(step_flops(trial.options, mode, causal=True), min(step), peak)
    flops = step_flops(trial.options, mode)
    found["tflops_per_s"] = flops / p50 / 1e9
    share = mfu(flops, p50 / 1e3, peak)
    found["mfu_pct"] = None if share is None else 100 * share
    found["tokens_per_s"] = (trial.options.batch * trial.shape.context_length * trial.context.world_size) / (p50 / 1e3)
    return found


def step_flops(config: TrialConfig, mode: str, causal: bool = False) -> int:
    """FLOPs of one call on one rank, without what checkpointing recomputes."""
    return forward_flops(**config.model().sizes(config.batch), causal=causal).total * PASSES[mode]


def draw_steps(records: Sequence[Record], path: Path) -> None:
    """A bar per setting: forward, backward and optimizer of the fullest mode, with p20 and p80 of the whole."""
    fullest = max((record.config["mode"] for record in records), key=MODES.index)
    records = [record for record in records if record.config["mode"] == fullest]
    rows = [record.metrics for record in records]
    timed = [metrics.get("step_p50_ms") is not None for metrics in rows]
    parts = {
        phase: [(m.get(f"{phase}_p50_ms") or 0.0) if ok else m["status"] for m, ok in zip(rows, timed, strict=True)]
        for phase in PHASES
    }
    ends = [(m["step_p20_ms"], m["step_p80_ms"]) if ok else None for m, ok in zip(rows, timed, strict=True)]
    unit, labels = "ms (median; whiskers p20 to p80)", [record.variant for record in records]
    stacked_bars(path, labels, parts, title=headline(records), unit=unit, whiskers=ends)


VIEW = View(
    columns=[
        Column("variant", "what"),
        ms_column("step_mean_ms", "mean ms"), ms_column("step_std_ms", "± std"), ms_column("step_p20_ms", "p20"),
        ms_column("step_p50_ms", "p50"),
        ms_column("step_p80_ms", "p80"), ms_column("first_ms", "first"), ms_column("forward_p50_ms", "forward"),
        ms_column("backward_p50_ms", "backward"), ms_column("optimizer_p50_ms", "optimizer"),
        Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30),
        Column("metrics.predicted_peak_bytes", "predicted", ".2f", scale=2**-30, missing="", optional=True),
        prediction_error("predicted_peak_bytes", "peak_alloc_bytes", form="+.1f"),
        Column("metrics.tokens_per_s", "tokens/s", ",.0f"),
        Column("metrics.examples_per_s", "examples/s", ",.1f", optional=True),
        Column("metrics.tflops_per_s", "TFLOP/s", ",.2f"),
        Column("metrics.mfu_pct", "MFU %", ".1f"), Column("metrics.gpu_idle_pct", "GPU idle %", ".0f", optional=True),
        Column("metrics.grad_rel_error", "gradient error", ".0e"),
        NOISE, Column("metrics.status", "status", align="left"),
    ],
    headline=lambda records: headline(records) + waiting(records),
    terminal=(
        *("variant", "step_p50_ms", "noise_pct", "peak_alloc_bytes", "predicted_peak_bytes", "tokens_per_s"),
        *("mfu_pct", "status"),
    ),
    pictures={"steps.png": draw_steps},
    reading="Inference is a forward without gradients; forward keeps what backward needs and stops there; "
    "forward_backward adds backward and the synchronisation of gradients; step adds the optimizer. Every call works on "
    "the next of four batches. Rows with several warm-ups are cut from one series; the column first is a row's first "
    "call.\n\n"
    "The gradient error is ‖g − g_ref‖ / ‖g_ref‖ over all parameters, against a model of the same weights with naive "
    "attention, torch's operations, fp32, nothing compiled. A row whose error is above the tolerance of its dtype, "
    "whose clock does not cover the wall's, whose gradients are zero, or that is faster than the device's peak, says "
    "so in its status.",
    prediction="Peaks in closed form (distlab.theory.memory). For predicted steps see plan and predict.",
)
# Where the time and the memory of a step and of a forward alone go, over contexts.
PROFILED = {
    "size": ("medium",), "batch": (2,), "context": (256, 512, 1024, 2048, 4096), "dtype": ("bf16",),
    "modes": ("inference", "step"), "warmups": (2,), "repeats": 5,
}  # fmt: skip
ON_CPU = {"size": ("tiny",), "batch": (1,), "dtype": ("fp32",), "context": (64, 256), "repeats": 3}
EXPERIMENT = Experiment(
    BenchmarkConfig, measure, VIEW,
    presets={
        "quick": {"warmups": (1,)},
        "profile": PROFILED | {"attention": ("naive", "sdpa"), "profile": True},
        "profile-cpu": ON_CPU,
        "memory": PROFILED | {"context": (256, 1024, 2048), "dtype": ("fp32", "bf16"), "memory": True},
        "memory-cpu": ON_CPU,
        "recomputation": {
            "size": ("xl",), "batch": (4,), "context": (1024,), "dtype": ("bf16",), "modes": ("forward_backward",),
            "checkpointing": ("none", "block", "every-2", "every-4", "every-8", "every-16", "every-32"),
        },
        "recomputation-cpu": ON_CPU | {
            "layers": (8,), "batch": (4,), "context": (128,), "vocab": (256,), "memory": True,
            "checkpointing": ("none", "block", "every-2", "every-4"),
        },
        "smoke": {"batch": (1,), "context": (16,), "warmups": (1,), "repeats": 3, "modes": ("forward", "step")},
    },
    ranks="many",
    nproc=1,
    parts=(KERNEL_VIEW, WORK_VIEW, PART_VIEW, MEMORY_VIEW, SAVED_VIEW),
)  # fmt: skip
