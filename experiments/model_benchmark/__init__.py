"""What time and memory does each part of a training step take?

    distlab run model_benchmark --size small --batch 4 --context 128 --warmup 0 1 2 5
    distlab run model_benchmark --size medium --dtype fp32 bf16 --attention naive sdpa flash
    distlab run model_benchmark --quick --profile --memory-snapshot --saved
    distlab run model_benchmark --preset profile     # kinds of work, contexts of 256 to 4,096
    distlab run model_benchmark --preset memory      # memory over contexts, in fp32 and bf16
    distlab run model_benchmark --preset recomputation  # of activations: memory, time

Times forward without gradients, forward, forward and backward, and the full step for every
combination of the given sizes, contexts, batches, dtypes, implementations and strategies; each row
is checked against the plainest model of the same weights, its clock against the wall's, and its
speed against the device's peak.

On request the full step of each combination is taken apart, from the profiler's traces: the kernels
with the most time in forward, backward, optimizer and inference; the kinds of work by time and by
FLOPs in each phase; the parts of the model (`by_part`), measured and predicted; memory over time by
category, with the largest blocks and their origin; and the memory that a block saves for backward,
eager, compiled and with this lab's kernels. That is in `taken_apart`.
"""

import itertools
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from distlab.bench.trial import MODES
from distlab.comm import collectives
from distlab.experiment import Column, Experiment, Metrics, RankContext, Records, Run, View
from distlab.measure import attempt
from distlab.measure.trace.capture import PHASES
from distlab.report import NOISE, gib_column, prediction_error, stacked_bars, text_column, waiting
from distlab.train.memory_budget import require
from experiments._own_model import own_facts

from .by_part import PART_VIEW
from .step_memory import MEMORY_VIEW, SAVED_VIEW, memory, predicted_peak, saved
from .taken_apart import KERNEL_VIEW, WORK_VIEW, profile
from .time_modes import agreed, timed, verdict
from .trials import (
    BenchmarkConfig,
    TrialConfig,
    errors_against_reference,
    headline,
    ms_column,
    prefix,
)


def measure(config: BenchmarkConfig, context: RankContext, run: Run) -> None:
    """Time every combination, then take its step apart; call it on every rank.

    What fails is a row that says why.

    With `nvtx`, cudaProfilerStart is called before and cudaProfilerStop after the timed calls, for
    Nsight Systems.

    Raises:
        ValueError: a strategy that needs a GPU.
        MemoryError: no combination fits.
    """
    modes = [mode for mode in MODES if mode in config.modes]
    if config.factory is None:
        planned = [
            trial.planned(trial.strategy, mode) for trial in config.trials() for mode in modes
        ]
        # One combination that fits is enough. Those that do not are rows that say OOM.
        require(planned, context.device, context, some=True)
    if config.nvtx:
        torch.cuda.profiler.start()
    for trial in config.trials():
        names = {}  # (mode, warm-up) → name of the row
        for mode, warmup in itertools.product(modes, config.warmups):
            # With one warm-up the name would repeat it in every row.
            of_warmup = f"warm-up {warmup}" if len(config.warmups) > 1 else ""
            named = filter(None, [config.label(trial), mode, of_warmup])
            names[mode, warmup] = ", ".join(named)
        # A combination is timed as a whole, because its warm-ups are cut from one series.
        if all(map(run.done, names.values())):
            continue
        rows = timed(config, trial, context, run.progress)  # first, while the process is cold
        # By rank 0: the check needs no other rank, and those would only take its memory and cores.
        if config.factory is None and context.is_main:
            checked = agreed(partial(errors_against_reference, context, trial), context)
        else:
            checked = agreed(dict, context)
        # Only rank 0 has the errors, and all ranks add the same rows.
        checked = collectives.gather_objects(checked, context.group)[0]
        for (mode, warmup), metrics in rows.items():
            metrics |= {name: checked.get(name) for name in ("loss_rel_error", "grad_rel_error")}
            # A row that is invalid already keeps its reason.
            if metrics["status"] == "ok":
                metrics["status"] = verdict(checked, trial)
            metrics["predicted_peak_bytes"] = predicted_peak(trial, context, mode)
            run.add(
                names[mode, warmup],
                metrics,
                **asdict(trial) | trial.facts(context) | own_facts(trial.factory),
                mode=mode,
                warmup=warmup,
            )
    if config.nvtx:
        torch.cuda.profiler.stop()
    # Only after all timing: profilers and memory history would slow what is timed.
    for trial in config.trials():
        take_apart(config, trial, context, run)


def take_apart(config: BenchmarkConfig, trial: TrialConfig, context: RankContext, run: Run) -> None:
    """Add the rows that were asked for about one combination's full step.

    They go to the parts of the run. Call it on every rank.

    Traces, pictures and the allocator's history are written to the run's folder. What fails is
    reported, and has no rows.
    """
    label = config.label(trial)
    # A label is empty if only one combination is measured.
    name = label or trial.factory or trial.size
    slug = re.sub("[^A-Za-z0-9_.]+", "-", name)
    parts = {}  # what is done → what does it: view → rows
    if config.profile:
        parts["profiling"] = partial(profile, context, trial, run.path, slug)
    if config.memory:
        parts["recording the memory of"] = partial(memory, context, trial, run.path, slug)
    if config.saved:
        parts["listing what is saved for backward by"] = partial(saved, context, trial)
    for what, part in parts.items():
        run.progress(f"{what} {name}")
        # One part that fails must not end the others.
        found = attempt(part)
        status = found.pop("status")
        if status != "ok":
            run.notice(f"{what} {name}: {status}")
        for view, rows in found.items():
            # Several rows may have one variant, so each also gets a number.
            for row, (variant, metrics) in enumerate(rows):
                where = asdict(trial) | trial.facts(context) | {"label": label, "row": row}
                run.part(view).add(f"{prefix(label)}{variant}", metrics, **where)


def draw_steps(records: Records, path: Path) -> None:
    """Draw a bar per setting: forward, backward and optimizer of the fullest mode.

    Whiskers are p20 and p80 of the whole.
    """
    # Modes are nested, so the fullest of them has all phases.
    fullest = max((record.config["mode"] for record in records), key=MODES.index)
    records = [record for record in records if record.config["mode"] == fullest]
    rows = [record.metrics for record in records]
    parts = {phase: [_bar(metrics, phase) for metrics in rows] for phase in PHASES}
    stacked_bars(
        path,
        [record.variant for record in records],
        parts,
        title=headline(records),
        unit="ms (median; whiskers p20 to p80)",
        whiskers=[_whiskers(metrics) for metrics in rows],
    )


def _is_timed(metrics: Metrics) -> bool:
    """Return whether a row has times. One that failed has only its status."""
    return metrics.get("step_p50_ms") is not None


def _bar(metrics: Metrics, phase: str) -> float | str:
    """Return the ms of a phase, 0 for one that the mode does not have, or why there is no time."""
    if not _is_timed(metrics):
        return metrics["status"]
    return metrics.get(f"{phase}_p50_ms") or 0.0


def _whiskers(metrics: Metrics) -> tuple[float, float] | None:
    """Return p20 and p80 of the whole call."""
    if not _is_timed(metrics):
        return None
    return metrics["step_p20_ms"], metrics["step_p80_ms"]


def headline_with_waiting(records: Records) -> str:
    """Return what was measured, and in which rows the GPU waits for the host."""
    return headline(records) + waiting(records)


VIEW = View(
    columns=[
        Column("variant", "what"),
        ms_column("step_mean_ms", "mean ms"),
        ms_column("step_std_ms", "± std ms"),
        ms_column("step_p20_ms", "p20 ms"),
        ms_column("step_p50_ms", "p50 ms"),
        ms_column("step_p80_ms", "p80 ms"),
        ms_column("first_ms", "first ms"),
        ms_column("forward_p50_ms", "forward ms"),
        ms_column("backward_p50_ms", "backward ms"),
        ms_column("optimizer_p50_ms", "optimizer ms"),
        Column("metrics.forward_mean_ms", "forward mean ms", ".2f", optional=True),
        Column("metrics.forward_std_ms", "± std forward ms", ".2f", optional=True),
        Column("metrics.backward_mean_ms", "backward mean ms", ".2f", optional=True),
        Column("metrics.backward_std_ms", "± std backward ms", ".2f", optional=True),
        Column("metrics.optimizer_mean_ms", "optimizer mean ms", ".2f", optional=True),
        Column("metrics.optimizer_std_ms", "± std optimizer ms", ".2f", optional=True),
        gib_column("metrics.peak_alloc_bytes", "peak GiB", ".2f"),
        gib_column(
            "metrics.predicted_peak_bytes", "predicted GiB", ".2f", missing="", optional=True
        ),
        prediction_error("predicted_peak_bytes", "peak_alloc_bytes", form="+.1f"),
        Column("metrics.tokens_per_s", "tokens/s", ",.0f"),
        Column("metrics.examples_per_s", "examples/s", ",.1f", optional=True),
        Column("metrics.tflops_per_s", "TFLOP/s", ",.2f"),
        Column("metrics.mfu_pct", "MFU %", ".1f"),
        Column("metrics.gpu_idle_pct", "GPU idle %", ".0f", optional=True),
        Column("metrics.grad_rel_error", "gradient error", ".0e"),
        NOISE,
        text_column("metrics.status", "status"),
    ],
    headline=headline_with_waiting,
    terminal=(
        "variant",
        "step_p50_ms",
        "noise_pct",
        "peak_alloc_bytes",
        "predicted_peak_bytes",
        "tokens_per_s",
        "mfu_pct",
        "status",
    ),
    pictures={"steps.png": draw_steps},
    reading="Inference is a forward without gradients; forward keeps what backward needs and stops "
    "there; forward_backward adds backward and the synchronisation of gradients; step adds the "
    "optimizer. Every call works on the next of four batches. Rows with several warm-ups are cut "
    "from one series; the column first is a row's first call.\n\n"
    "The gradient error is ‖g − g_ref‖ / ‖g_ref‖ over all parameters, against a model of the same "
    "weights with naive attention, torch's operations, fp32, nothing compiled. A row whose error "
    "is above the tolerance of its dtype, whose clock does not cover the wall's, whose gradients "
    "are zero, or that is faster than the device's peak, says so in its status.",
    prediction="Peaks in closed form (distlab.theory.memory). For predicted steps see plan and "
    "predict.",
)
# Where the time and the memory of a step and of a forward alone go, over contexts.
PROFILED = {
    "size": ("medium",),
    "batch": (2,),
    "context": (256, 512, 1024, 2048, 4096),
    "dtype": ("bf16",),
    "modes": ("inference", "step"),
    "warmups": (2,),
    "repeats": 5,
}
ON_CPU = {"size": ("tiny",), "batch": (1,), "dtype": ("fp32",), "context": (64, 256), "repeats": 3}
EXPERIMENT = Experiment(
    BenchmarkConfig,
    measure,
    VIEW,
    presets={
        "quick": {"warmups": (1,)},
        "profile": PROFILED | {"attention": ("naive", "sdpa"), "profile": True},
        "profile-cpu": ON_CPU,
        "memory": PROFILED
        | {"context": (256, 1024, 2048), "dtype": ("fp32", "bf16"), "memory": True},
        "memory-cpu": ON_CPU,
        "recomputation": {
            "size": ("xl",),
            "batch": (4,),
            "context": (1024,),
            "dtype": ("bf16",),
            "modes": ("forward_backward",),
            "checkpointing": (
                "none",
                "block",
                "every-2",
                "every-4",
                "every-8",
                "every-16",
                "every-32",
                "every-8-1",
            ),
        },
        "recomputation-cpu": ON_CPU
        | {
            "layers": (8,),
            "batch": (4,),
            "context": (128,),
            "vocab": (256,),
            "memory": True,
            "checkpointing": ("none", "block", "every-2", "every-4", "every-4-1"),
        },
        "smoke": {
            "batch": (1,),
            "context": (16,),
            "warmups": (1,),
            "repeats": 3,
            "modes": ("forward", "step"),
        },
    },
    ranks="many",
    nproc=1,
    parts=(KERNEL_VIEW, WORK_VIEW, PART_VIEW, MEMORY_VIEW, SAVED_VIEW),
)
