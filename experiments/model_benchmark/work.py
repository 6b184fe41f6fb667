"""Kernels with the most time in forward, backward and optimizer, and kinds of work by time beside their FLOPs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from distlab.bench.timing import TrialConfig, opened
from distlab.comm import collectives
from distlab.experiment import Column, RankContext, Record, View
from distlab.measure import MIN_SAMPLES, FlopsByCategory, PhaseTimer, percentiles
from distlab.measure.trace.capture import PHASES, Phases, load_trace, profile_steps
from distlab.measure.trace.kernels import CATEGORIES, Profile, readable, summarise
from distlab.report import stacked_bars

from .config import BenchmarkConfig
from .view import Rows, headline, ms_column, of_each, prefix

KERNELS, WORK = "model_kernels", "model_work"


def count_flops(context: RankContext, trial: TrialConfig) -> dict[str, int]:
    """FLOPs of one full step by category, counted in eager mode on one rank's model."""
    with opened(context, replace(trial, compile="off", strategy="local")) as plain:
        plain("step")
        with FlopsByCategory() as counted:
            plain("step")
    return dict(counted.flops)


def profile(
    context: RankContext, config: TrialConfig, wanted: BenchmarkConfig, folder: Path, slug: str
) -> dict[str, Rows]:
    """Write the traces of the chosen ranks; rows of kernels and of kinds of work, from the first of them."""
    first, last = wanted.profile_steps
    flops = count_flops(context, config) if context.rank == wanted.profile_ranks[0] else {}
    phases, timer = Phases(), PhaseTimer(context.device)
    found = None
    with opened(context, config) as trial:

        def step() -> None:
            with phases.step():
                trial("step", phases.mark)

        for _ in range(first):
            trial("step")
        timer.synchronize()
        for _ in timer.each(MIN_SAMPLES + 2):  # the same steps without the profiler
            trial("step", timer.mark)
        timer_ms = percentiles([sample["step"] for sample in timer.steps()])["p50"]
        steps = last - first + 1
        if context.rank in wanted.profile_ranks:
            path = folder / f"trace_{slug}_rank{context.rank}.json.gz"
            profile_steps(
                step, steps=steps, path=path, rank=context.rank, world_size=context.world_size,
                device=context.device, finish=partial(dist.barrier, context.group),
            )  # fmt: skip
            found = summarise(load_trace(path))
        else:
            for _ in range(1 + steps):  # the profiler's own warm-up is a step too
                step()
            dist.barrier(context.group)
    chosen, flops = collectives.gather_objects((found, flops), context.group)[wanted.profile_ranks[0]]
    return {KERNELS: _kernel_rows(chosen), WORK: _work_rows(chosen, timer_ms, flops)}


def _kernel_rows(profile: Profile, most: int = 8) -> Rows:
    rows = []
    for phase in PHASES:
        for kernel in profile.top(phase, most):
            metrics = {
                "phase": phase, "category": kernel.category, "calls_per_step": kernel.count, "kernel_ms": kernel.ms,
                "of_kernel_time_pct": 100 * kernel.ms / profile.kernel_ms,
            }  # fmt: skip
            rows.append((short_name(kernel.name), metrics))
    return rows


def short_name(kernel: str, longest: int = 64) -> str:
    """A kernel's name without its return type, template arguments and namespaces."""
    name = (
        readable(kernel)
        .removeprefix("void ")
        .replace("(anonymous namespace)::", "")
        .replace("at::native::", "")
    )
    if "elementwise_kernel" in name:  # what it computes is in its arguments
        inner = [word for word in ("Functor", "_kernel_cuda", "copy") if word in name]
        name = name if not inner else name.replace("binary_internal::", "")
    else:
        name = name.split("<")[0].split("(")[0]
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _work_rows(profile: Profile, timer_ms: float, flops: dict[str, int]) -> Rows:
    times, all_flops = profile.ms_by("category"), sum(flops.values())
    rows = []
    for kind in CATEGORIES:
        ms, operations = times[kind], flops.get(kind, 0)
        if ms or operations:
            metrics = {
                "kernel_ms": ms, "of_kernel_time_pct": 100 * ms / profile.kernel_ms, "flops": operations,
                "of_flops_pct": 100 * operations / all_flops, "tflops_per_s": operations / ms / 1e9 if ms else None,
                "profiler_step_ms": profile.step_ms, "profiler_busy_ms": profile.busy_ms,
                "profiler_kernel_ms": profile.kernel_ms, "timer_step_ms": timer_ms,
                "profiler_error_pct": 100 * (profile.step_ms / timer_ms - 1),
            }  # fmt: skip
            metrics |= {f"{phase}_kernel_ms": profile.ms_by("phase")[phase] for phase in PHASES}
            rows.append((kind, metrics))
    return rows


def draw_work(records: Sequence[Record], path: Path) -> None:
    """Shares of time beside shares of FLOPs, by kind of work."""
    labels = list(dict.fromkeys(record.config["label"] for record in records))
    rows = [f"{label} {what}".strip() for label in labels for what in ("time", "FLOPs")]
    kinds = [kind for kind in CATEGORIES if any(record.variant.endswith(kind) for record in records)]
    parts: dict[str, list[float]] = {kind: [] for kind in kinds}
    for label in labels:
        mine = {
            r.variant.removeprefix(f"{label}: "): r.metrics for r in records if r.config["label"] == label
        }
        for kind in kinds:
            metrics = mine.get(kind, {})
            parts[kind] += [metrics.get("of_kernel_time_pct", 0.0), metrics.get("of_flops_pct", 0.0)]
    stacked_bars(path, rows, parts, title=f"Where time and arithmetic go: {headline(records)}", unit="%")


def work_findings(records: Sequence[Record]) -> list[str]:
    """The profiler's total beside the timer's."""
    return [
        f"{prefix(label)}the profiler's step takes {r.metrics['profiler_step_ms']:.2f} ms and its kernels "
        f"{r.metrics['profiler_kernel_ms']:.2f} ms (forward {r.metrics['forward_kernel_ms']:.2f}, backward "
        f"{r.metrics['backward_kernel_ms']:.2f}, optimizer {r.metrics['optimizer_kernel_ms']:.2f}); the timer's step, "
        f"without the profiler, {r.metrics['timer_step_ms']:.2f} ms ({r.metrics['profiler_error_pct']:+.1f} %)."
        for label, r in of_each(records).items()
    ]


_SHARE = Column("metrics.of_kernel_time_pct", "of time %", ".1f")
KERNEL_VIEW = View(
    name=KERNELS,
    question="Which kernels take the time in forward, backward and optimizer?",
    columns=[Column("metrics.phase", "phase", align="left"), Column("variant", "kernel"),
     Column("metrics.category", "kind", align="left"), Column("metrics.calls_per_step", "calls", ",.0f"),
     ms_column("kernel_ms", "ms per step"), _SHARE],
    headline=headline,
    reading="Kernels of the GPU by the phase in which the host launched them; without a GPU, operators and nodes of "
    "autograd.",
)  # fmt: skip
WORK_VIEW = View(
    name=WORK,
    question="Which kind of work takes the time, and which does the arithmetic?",
    columns=[Column("variant", "kind"), ms_column("kernel_ms", "ms per step"), _SHARE,
     Column("metrics.flops", "GFLOP", ",.2f", scale=1e-9), Column("metrics.of_flops_pct", "of FLOPs %", ".2f"),
     Column("metrics.tflops_per_s", "TFLOP/s", ",.2f")],
    headline=headline,
    pictures={"work.png": draw_work},
    findings=work_findings,
    reading="Kinds are determined by the names of kernels and of the operators that launched them. FLOPs are counted "
    "in an "
    "eager step at torch's dispatcher, matmuls and attention by formula, everything else per element. On a CPU torch "
    "decomposes normalisation into simple operations, and its backward counts as element-wise.",
)  # fmt: skip
