"""Time of a step: kernels and kinds of work, in forward, backward, optimizer and inference."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distlab.bench.trial import Trial
from distlab.comm import collectives
from distlab.experiment import Column, RankContext, Records, View
from distlab.measure import MIN_SAMPLES, Event, PhaseTimer, percentiles
from distlab.measure.trace.capture import PHASES, Phases, profile_steps
from distlab.measure.trace.kernels import CATEGORIES, Profile, readable, summarise
from distlab.measure.trace.reader import load_trace
from distlab.report import grouped, stacked_bars, text_column

from .by_part import PART_VIEW, counted_parts, measured_parts, part_rows, rates, trace_ranges
from .trials import Rows, TrialConfig, headline, label_of, ms_column, opened, prefix

KERNELS, WORK = "model_kernels", "model_work"
# The first steps compile and fill caches. Three traced ones show how much a step varies.
UNTIMED_STEPS, TRACED_STEPS = 3, 3


def profile(context: RankContext, config: TrialConfig, folder: Path, slug: str) -> dict[str, Rows]:
    """Write rank 0's traces, and return the rows of kernels, of kinds of work and of parts."""
    counted = None
    if context.is_main:
        # Eager, because a compiled step has no operators at the dispatcher, and on rank 0 alone,
        # because counting needs no other rank.
        with opened(context, replace(config, compile="off", strategy="local")) as plain:
            # The first step makes the optimizer's state, which later ones do not.
            plain("step")
            counted = counted_parts(plain, rates(plain))
    timer = PhaseTimer(context.device)
    # The compiled trial is opened after the eager one is closed, since both may not fit.
    with opened(context, config) as trial:
        for _ in timer.each(MIN_SAMPLES + 2, UNTIMED_STEPS):  # the same steps without the profiler
            trial("step", timer.mark)
        steps_ms = [sample["step"] for sample in timer.steps()]
        timer_ms = percentiles(steps_ms)["p50"]
        # Of so few steps the range is about the 95 % interval of their median.
        timer_noise_pct = max(100 * abs(ms / timer_ms - 1) for ms in steps_ms)
        traced = partial(_traced, context, trial, folder)
        # All ranks step, since a step communicates. Only rank 0 is traced.
        training_events = traced(f"trace_{slug}", TRACED_STEPS)
        inference_events = traced(f"inference_{slug}", 1, "inference")
        by_part = None
        if config.compile == "off":  # compiled code has no ranges inside
            with trace_ranges(trial):
                by_part = traced(f"parts_{slug}", 1)
    rows = {}
    # Only rank 0 counted, so only rank 0 has rows.
    if counted is not None:
        predicted, matmuls, flops = counted
        training, inference = summarise(training_events), summarise(inference_events)
        # A forward without gradients does the same arithmetic.
        flops["inference"] = flops["forward"]
        # Forwards without gradients, whose phase is inference.
        forwards = tuple(replace(kernel, phase="inference") for kernel in inference.kernels)
        phases = dict.fromkeys(PHASES, training) | {
            "inference": replace(inference, kernels=forwards)
        }
        rows = {
            KERNELS: _kernel_rows(phases),
            WORK: _work_rows(phases, timer_ms, timer_noise_pct, flops),
        }
        if by_part is not None:
            rows[PART_VIEW.name] = part_rows(measured_parts(by_part), predicted, matmuls)
    # All ranks return the rows of rank 0, so that their records stay equal.
    return collectives.gather_objects(rows, context.group)[0]


def _traced(
    context: RankContext, trial: Trial, folder: Path, name: str, steps: int, mode: str = "step"
) -> list[Event]:
    """Trace some steps. Return the events on rank 0, whose trace is written, and [] on others."""
    phases = Phases()

    def step() -> None:
        with phases.step():
            trial(mode, phases.mark)

    # Every rank makes the same number of steps, because their collectives must match.
    if not context.is_main:
        for _ in range(1 + steps):  # the profiler's own warm-up is a step too
            step()
        # The traced rank joins this barrier at its end, see `finish` below.
        dist.barrier(context.group)
        return []
    path = folder / f"{name}_rank0.json.gz"
    profile_steps(
        step,
        steps=steps,
        path=path,
        rank=context.rank,
        world_size=context.world_size,
        device=context.device,
        finish=partial(dist.barrier, context.group),
    )
    return load_trace(path)


def _kernel_rows(profiles: Mapping[str, Profile]) -> Rows:
    """Return a row for each of the 8 kernels with the most time in each phase."""
    rows = []
    for phase, profile in profiles.items():
        # Eight kernels take most of the time of a phase, and the trace has all of them.
        for kernel in profile.top(phase, 8):
            metrics = {
                "phase": phase,
                "category": kernel.category,
                "calls_per_step": kernel.count,
                "kernel_ms": kernel.ms,
                "of_kernel_time_pct": 100 * kernel.ms / profile.kernel_ms,
            }
            rows.append((short_name(kernel.name), metrics))
    return rows


def short_name(kernel: str) -> str:
    """Return a kernel's name without return type, template arguments and namespaces.

    It has at most 64 characters.
    """
    name = (
        readable(kernel)
        .removeprefix("void ")
        .replace("(anonymous namespace)::", "")
        .replace("at::native::", "")
    )
    if "elementwise_kernel" in name:  # what it computes is in its arguments
        name = name.replace("binary_internal::", "")
    else:
        # Template arguments may be hundreds of characters, and say little to a reader.
        name = name.split("<")[0].split("(")[0]
    return name if len(name) <= 64 else name[:63] + "…"


def _work_rows(
    profiles: Mapping[str, Profile],
    timer_ms: float,
    timer_noise_pct: float,
    flops: Mapping[str, Mapping[str, int]],
) -> Rows:
    """Return a row for each kind of work that each phase has."""
    training, rows = profiles["forward"], []
    shared = {
        "profiler_step_ms": training.step_ms,
        "profiler_kernel_ms": training.kernel_ms,
        "timer_step_ms": timer_ms,
        "timer_noise_pct": timer_noise_pct,
        # A profiler that slows the step would spoil what its trace says.
        "profiler_error_pct": 100 * (training.step_ms / timer_ms - 1),
    }
    for phase, profile in profiles.items():
        times, calls = Counter[str](), Counter[str]()
        for kernel in profile.kernels:
            if kernel.phase == phase:
                times[kernel.category] += kernel.ms
                calls[kernel.category] += kernel.count
        for kind in CATEGORIES:
            ms, operations = times[kind], flops[phase].get(kind, 0)
            # A kind may have time without FLOPs, as copies have, or FLOPs in a kernel of another
            # kind.
            if ms or operations:
                metrics = {
                    "phase": phase,
                    "kernel_ms": ms,
                    "of_kernel_time_pct": 100 * ms / (times.total() or 1),
                    "calls_per_step": calls[kind],
                    "flops": operations,
                    "of_flops_pct": 100 * operations / (sum(flops[phase].values()) or 1),
                    "tflops_per_s": operations / ms / 1e9 if ms else None,
                    "phase_kernel_ms": times.total(),
                }
                rows.append((kind, metrics | shared))
    return rows


def draw_work(records: Records, path: Path) -> None:
    """Draw shares of time and of FLOPs by kind of work, in each phase.

    With several combinations only forward and backward are drawn.
    """
    bars = dict.fromkeys((r.config["label"], r.metrics["phase"]) for r in records)
    if len({label for label, _ in bars}) > 1:
        # A picture holds two bars for each of many combinations, and not more.
        bars = dict.fromkeys(bar for bar in bars if bar[1] in ("forward", "backward"))
    known = {}  # (label, phase, kind of work) → metrics
    for record in records:
        label = label_of(record)
        kind = record.variant.removeprefix(prefix(label))
        known[label, record.metrics["phase"], kind] = record.metrics
    rows = []
    for label, phase in bars:
        rows += [f"{prefix(label)}{phase}, time", f"{prefix(label)}{phase}, FLOPs"]
    parts = {}
    for kind in CATEGORIES:
        shares = []
        for label, phase in bars:
            metrics = known.get((label, phase, kind), {})
            shares += [metrics.get("of_kernel_time_pct", 0.0), metrics.get("of_flops_pct", 0.0)]
        if any((label, phase, kind) in known for label, phase in bars):
            parts[kind] = shares
    stacked_bars(
        path, rows, parts, title=f"Where time and arithmetic go: {headline(records)}", unit="%"
    )


def work_findings(records: Records) -> list[str]:
    """Compare the profiler's step with the timer's, and say if the timer's noise explains it."""
    lines = []
    for label, rows in grouped(records, label_of).items():
        m = rows[0].metrics
        ms_by_phase = {row.metrics["phase"]: row.metrics["phase_kernel_ms"] for row in rows}
        phases = ", ".join(f"{phase} {ms:.2f}" for phase, ms in ms_by_phase.items())
        lines.append(
            f"{prefix(label)}the profiler's step takes {m['profiler_step_ms']:.2f} ms and its "
            f"kernels {m['profiler_kernel_ms']:.2f} ms ({phases}); the timer's step, without the "
            f"profiler, {m['timer_step_ms']:.2f} ms ({m['profiler_error_pct']:+.1f} %)."
            f"{_what_the_profiler_costs(m)}"
        )
    return lines


def _what_the_profiler_costs(metrics: Mapping[str, Any]) -> str:
    """Say that the noise of the timer's steps hides the profiler's cost.

    Empty if it does not, and for records without noise.
    """
    noise = metrics.get("timer_noise_pct")
    if noise is None or abs(metrics["profiler_error_pct"]) > noise:
        return ""
    return (
        f" Steps without the profiler differ by up to ± {noise:.1f} %, so this run cannot tell "
        "whether the profiler slows them: try a machine that does nothing else."
    )


_SHARE = Column("metrics.of_kernel_time_pct", "of time %", ".1f")
_CALLS = Column("metrics.calls_per_step", "calls", ",.0f")
KERNEL_VIEW = View(
    name=KERNELS,
    question="Which kernels take the time in forward, backward and optimizer, and in inference?",
    columns=[
        text_column("metrics.phase", "phase"),
        Column("variant", "kernel"),
        text_column("metrics.category", "kind"),
        _CALLS,
        ms_column("kernel_ms", "ms per step"),
        _SHARE,
    ],
    headline=headline,
    reading="Kernels of the GPU by the phase in which the host launched them; without a GPU, "
    "operators and nodes of autograd.",
)
WORK_VIEW = View(
    name=WORK,
    question="Which kind of work takes the time, and which does the arithmetic?",
    columns=[
        text_column("metrics.phase", "phase"),
        Column("variant", "kind"),
        _CALLS,
        ms_column("kernel_ms", "ms per step"),
        _SHARE,
        Column("metrics.flops", "GFLOP", ",.2f", scale=1e-9),
        Column("metrics.of_flops_pct", "of FLOPs %", ".2f"),
        Column("metrics.tflops_per_s", "TFLOP/s", ",.2f"),
    ],
    headline=headline,
    pictures={"work.png": draw_work},
    findings=work_findings,
    reading="Shares are of a phase. Inference is a forward without gradients, profiled alone. "
    "Kinds are determined by the names of kernels and of the operators that launched them. FLOPs "
    "are counted in an eager step at torch's dispatcher, matmuls and attention by formula, "
    "everything else per element. On a CPU torch decomposes normalisation into simple operations, "
    "and its backward counts as element-wise.",
)
