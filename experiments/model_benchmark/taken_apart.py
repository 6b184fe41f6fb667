"""A step taken apart: kernels and kinds of work by time, memory by category, and what a block saves for backward."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distlab.bench.timing import Trial, TrialConfig, described, opened
from distlab.comm import collectives
from distlab.experiment import Column, RankContext, Record, View
from distlab.measure import (
    MIN_SAMPLES,
    Event,
    PhaseTimer,
    attempt,
    gradient_bytes,
    memory_timeline,
    peak_memory,
    percentiles,
    saved_for_backward,
)
from distlab.measure.trace.capture import PHASES, Phases, load_trace, profile_steps
from distlab.measure.trace.kernels import CATEGORIES, Profile, readable, summarise
from distlab.report import environment, memory_areas, prediction_error, stacked_bars
from distlab.theory.memory.activations import PRECISIONS, block_activations, inference_temporary
from distlab.theory.model_shape import ModelShape
from distlab.train.step import compiled

from .by_part import PART_VIEW, counted_parts, measured_parts, part_rows, rates, trace_ranges

Rows = list[tuple[str, dict[str, Any]]]  # variant and metrics, of one part

def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    return described([record.config for record in records], records[0].environment)


def of_each(records: Sequence[Record]) -> dict[str, Record]:
    """The first record of every combination."""
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record.config["label"], record)
    return found


def prefix(label: str) -> str:
    """What stands before the rows of the combination with this label."""
    return f"{label}: " if label else ""


def ms_column(metric: str, title: str) -> Column:
    """A column of milliseconds."""
    return Column(f"metrics.{metric}", title, ".2f")


def mib_column(metric: str, title: str) -> Column:
    """A column of MiB, from bytes."""
    return Column(f"metrics.{metric}", title, ",.1f", scale=2**-20)


KERNELS, WORK = "model_kernels", "model_work"
UNTIMED_STEPS, TRACED_STEPS = 3, 3


def profile(context: RankContext, config: TrialConfig, folder: Path, slug: str) -> dict[str, Rows]:
    """Write rank 0's traces; rows of kernels, of kinds of work and of parts."""
    counted = None
    if context.is_main:
        with opened(context, replace(config, compile="off", strategy="local")) as plain:
            plain("step")
            counted = counted_parts(plain, rates(plain))
    timer = PhaseTimer(context.device)
    with opened(context, config) as trial:
        for _ in timer.each(MIN_SAMPLES + 2, UNTIMED_STEPS):  # the same steps without the profiler
            trial("step", timer.mark)
        timer_ms = percentiles([sample["step"] for sample in timer.steps()])["p50"]
        run = partial(_traced, context, trial, folder)
        events = run(f"trace_{slug}", TRACED_STEPS), run(f"inference_{slug}", 1, "inference")
        by_part = None
        if config.compile == "off":  # compiled code has no ranges inside
            with trace_ranges(trial):
                by_part = run(f"parts_{slug}", 1)
    rows: dict[str, Rows] = {}
    if counted is not None:
        predicted, matmuls, flops = counted
        training, inference = (summarise(each) for each in events)
        flops["inference"] = flops["forward"]
        phases = {phase: training for phase in PHASES} | {"inference": _renamed(inference)}
        rows = {KERNELS: _kernel_rows(phases), WORK: _work_rows(phases, timer_ms, flops)}
        if by_part is not None:
            rows[PART_VIEW.name] = part_rows(measured_parts(by_part), predicted, matmuls)
    return collectives.gather_objects(rows, context.group)[0]


def _traced(
    context: RankContext, trial: Trial, folder: Path, name: str, steps: int, mode: str = "step"
) -> list[Event]:
    """The events of some steps on rank 0, whose trace is written; none on the others."""
    phases = Phases()

    def step() -> None:
        with phases.step():
            trial(mode, phases.mark)

    if not context.is_main:
        for _ in range(1 + steps):  # the profiler's own warm-up is a step too
            step()
        dist.barrier(context.group)
        return []
    path = folder / f"{name}_rank0.json.gz"
    profile_steps(
        step, steps=steps, path=path, rank=context.rank, world_size=context.world_size,
        device=context.device, finish=partial(dist.barrier, context.group),
    )  # fmt: skip
    return load_trace(path)


def _renamed(profile: Profile) -> Profile:
    """A profile of forwards without gradients, whose phase is inference."""
    return replace(profile, kernels=tuple(replace(kernel, phase="inference") for kernel in profile.kernels))


def _kernel_rows(profiles: Mapping[str, Profile], most: int = 8) -> Rows:
    return [
        (short_name(kernel.name), {
            "phase": phase, "category": kernel.category, "calls_per_step": kernel.count, "kernel_ms": kernel.ms,
            "of_kernel_time_pct": 100 * kernel.ms / profile.kernel_ms,
        })
        for phase, profile in profiles.items() for kernel in profile.top(phase, most)
    ]  # fmt: skip


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


def _work_rows(profiles: Mapping[str, Profile], timer_ms: float, flops: Mapping[str, Mapping[str, int]]) -> Rows:
    training, rows = profiles["forward"], []
    shared = {
        "profiler_step_ms": training.step_ms,
        "profiler_kernel_ms": training.kernel_ms, "timer_step_ms": timer_ms,
        "profiler_error_pct": 100 * (training.step_ms / timer_ms - 1),
    }  # fmt: skip
    for phase, profile in profiles.items():
        times, calls = Counter[str](), Counter[str]()
        for kernel in profile.kernels:
            if kernel.phase == phase:
                times[kernel.category] += kernel.ms
                calls[kernel.category] += kernel.count
        for kind in CATEGORIES:
            ms, operations = times[kind], flops[phase].get(kind, 0)
            if ms or operations:
                metrics = {
                    "phase": phase, "kernel_ms": ms, "of_kernel_time_pct": 100 * ms / (times.total() or 1),
                    "calls_per_step": calls[kind],
                    "flops": operations, "of_flops_pct": 100 * operations / (sum(flops[phase].values()) or 1),
                    "tflops_per_s": operations / ms / 1e9 if ms else None, "phase_kernel_ms": times.total(),
                }  # fmt: skip
                rows.append((kind, metrics | shared))
    return rows


def draw_work(records: Sequence[Record], path: Path) -> None:
    """Shares of time beside shares of FLOPs, by kind of work, in each phase; of several combinations in forward
    and backward.
    """
    bars = dict.fromkeys((r.config["label"], r.metrics["phase"]) for r in records)
    if len(of_each(records)) > 1:
        bars = dict.fromkeys(bar for bar in bars if bar[1] in ("forward", "backward"))
    known = {
        (r.config["label"], r.metrics["phase"], r.variant.removeprefix(prefix(r.config["label"]))): r.metrics
        for r in records
    }
    shares = {"time": "of_kernel_time_pct", "FLOPs": "of_flops_pct"}
    rows = [f"{prefix(label)}{phase}, {what}" for label, phase in bars for what in shares]
    parts = {
        kind: [known.get((*bar, kind), {}).get(share, 0.0) for bar in bars for share in shares.values()]
        for kind in CATEGORIES
        if any((*bar, kind) in known for bar in bars)
    }
    stacked_bars(path, rows, parts, title=f"Where time and arithmetic go: {headline(records)}", unit="%")


def work_findings(records: Sequence[Record]) -> list[str]:
    """The profiler's total beside the timer's."""
    lines = []
    for label, r in of_each(records).items():
        phases = {e.metrics["phase"]: e.metrics["phase_kernel_ms"] for e in records if e.config["label"] == label}
        lines.append(
            f"{prefix(label)}the profiler's step takes {r.metrics['profiler_step_ms']:.2f} ms and its kernels "
            f"{r.metrics['profiler_kernel_ms']:.2f} ms ("
            f"{', '.join(f'{phase} {phases[phase]:.2f}' for phase in PHASES if phase in phases)}; inference "
            f"{phases.get('inference', 0):.2f}); the timer's step, without the profiler, "
            f"{r.metrics['timer_step_ms']:.2f} ms ({r.metrics['profiler_error_pct']:+.1f} %)."
        )
    return lines


_SHARE = Column("metrics.of_kernel_time_pct", "of time %", ".1f")
_CALLS = Column("metrics.calls_per_step", "calls", ",.0f")
KERNEL_VIEW = View(
    name=KERNELS,
    question="Which kernels take the time in forward, backward and optimizer, and in inference?",
    columns=[Column("metrics.phase", "phase", align="left"), Column("variant", "kernel"),
     Column("metrics.category", "kind", align="left"), _CALLS,
     ms_column("kernel_ms", "ms per step"), _SHARE],
    headline=headline,
    reading="Kernels of the GPU by the phase in which the host launched them; without a GPU, operators and nodes of "
    "autograd.",
)  # fmt: skip
WORK_VIEW = View(
    name=WORK,
    question="Which kind of work takes the time, and which does the arithmetic?",
    columns=[Column("metrics.phase", "phase", align="left"), Column("variant", "kind"), _CALLS,
     ms_column("kernel_ms", "ms per step"), _SHARE,
     Column("metrics.flops", "GFLOP", ",.2f", scale=1e-9), Column("metrics.of_flops_pct", "of FLOPs %", ".2f"),
     Column("metrics.tflops_per_s", "TFLOP/s", ",.2f")],
    headline=headline,
    pictures={"work.png": draw_work},
    findings=work_findings,
    reading="Shares are of a phase. Inference is a forward without gradients, profiled alone. Kinds are determined by "
    "the names of kernels and of the operators that launched them. FLOPs are counted in an "
    "eager step at torch's dispatcher, matmuls and attention by formula, everything else per element. On a CPU torch "
    "decomposes normalisation into simple operations, and its backward counts as element-wise.",
)  # fmt: skip


MEMORY = "model_memory"


SCOPES = {"inference": "forward only", "step": "full step"}


def memory(
    context: RankContext, config: TrialConfig, folder: Path, slug: str, most: int = 8
) -> dict[str, Rows]:
    """Draw rank 0's memory over a forward without gradients and over a step; the largest blocks at each peak as rows,
    with what is held then.
    """
    device, rows = context.device, []
    for mode, scope in SCOPES.items():
        with opened(context, config) as trial:
            with peak_memory(device) as allocator:
                trial(mode)
                timeline = trial.memory_timeline(mode)
            if device.type == "cuda" and mode == "step":
                history = memory_timeline.allocator_history(folder / f"memory_{slug}.pickle")
                with history if context.is_main else nullcontext():
                    trial(mode)
        if timeline is None:
            continue
        if mode == "inference":
            timeline = replace(timeline, phases={"forward": timeline.phases["forward"]})
        where = described([asdict(config) | config.facts(context)], environment(device))
        picture = folder / f"memory_{slug}{'_forward' * (mode == 'inference')}.png"
        memory_areas(picture, timeline, title=f"Memory over one {scope.replace('only', 'alone')}: {where}")
        _, categories = timeline.peak()
        total = sum(categories.values())
        shared = {f"at_peak_{name.replace(' ', '_')}_bytes": size for name, size in categories.items()}
        shared |= {"timeline_peak_bytes": total, "peak_alloc_bytes": allocator.peak_alloc_bytes}
        shared |= {"scope": scope, "predicted_timeline_peak_bytes": predicted_peak(config, context, mode)}
        rows += [
            (block.origin, {
                "block_bytes": block.bytes, "of_peak_pct": 100 * block.bytes / total, "category": block.category,
                "phase": block.phase, "from_ms": block.start_ms, "to_ms": block.end_ms,
            } | shared)
            for block in timeline.largest(most)
        ]  # fmt: skip
    return {MEMORY: rows} if rows else {}


def predicted_peak(config: TrialConfig, context: RankContext, mode: str) -> int | None:
    """Bytes at the peak by the closed form; None for a user's model, and for a forward that keeps what backward needs.

    A step is a settled one; of forward and backward alone no optimizer state is there.
    """
    if config.factory is not None or mode == "forward":
        return None
    expected = config.planned(config.strategy, mode).memory(context.world_size, on_gpu=context.device.type == "cuda")
    if mode == "step":
        return expected.peak.total
    if mode == "forward_backward":
        moments = [moment for phase, moment in expected.moments if phase != "optimizer step"]
        return max(moment.total - moment.optimizer_state for moment in moments)
    model, precision = config.model(), PRECISIONS["fp32" if config.dtype == "fp32" else "bf16-autocast"]
    sizes = config.batch, model.context_length, precision, model.attention
    shape, held = ModelShape.of(model), expected.after_init.total + expected.before_step.temporary
    if context.device.type == "cpu" and precision.copies_weights:  # autocast keeps them there; see `ops.linear`
        held += precision.compute * (shape.num_layers * sum(shape.matrices_per_block) + shape.embedding_parameters)
    return held + inference_temporary(shape, *sizes)


def memory_findings(records: Sequence[Record]) -> list[str]:
    """What is held at each peak, by category, whether the allocator says the same, and what was predicted."""
    lines = []
    for (label, scope), m in {(r.config["label"], r.metrics["scope"]): r.metrics for r in records}.items():
        held = {name: m[f"at_peak_{name.replace(' ', '_')}_bytes"] for name in memory_timeline.CATEGORIES}
        parts = [f"{name} {size / 2**20:,.1f}" for name, size in held.items() if size]
        count, predicted = m["peak_alloc_bytes"], m["predicted_timeline_peak_bytes"]
        allocator = f", by the allocator's count {count / 2**20:,.1f}" if count else ""
        said = f", predicted {predicted / 2**20:,.1f}" if predicted else ""
        lines.append(
            f"{prefix(label)}{scope}: held at the peak, in MiB: {', '.join(parts)}; together "
            f"{m['timeline_peak_bytes'] / 2**20:,.1f}{allocator}{said}."
        )
    return lines


MEMORY_VIEW = View(
    name=MEMORY,
    question="What holds the memory at the peak of a step and of its forward alone, and where was it allocated?",
    columns=[Column("metrics.scope", "over", align="left"), Column("variant", "allocated by"),
     mib_column("block_bytes", "MiB"),
     Column("metrics.of_peak_pct", "of peak %", ".1f"), Column("metrics.category", "kind", align="left"),
     Column("metrics.phase", "phase", align="left"), ms_column("from_ms", "from ms"), ms_column("to_ms", "to ms")],
    headline=headline,
    findings=memory_findings,
    reading="The largest blocks at the peak. The origin is the named part of the model and the "
    "operator that allocated the block. Activations are what forward leaves for backward; temporary blocks live within "
    "a phase, or are made in backward; before is memory that existed at the start and is neither parameter nor state.",
    prediction="The closed form of distlab.theory.memory for an eager step, and for a forward without gradients.",
)  # fmt: skip


SAVED = "model_saved"
FORMS = {  # how the blocks are run, and with which operations
    "eager": ("off", {"ops": "torch"}),
    "compiled": ("blocks", {"ops": "torch"}),
    "ours": ("off", {"ops": "triton"}),
}


def saved(context: RankContext, trial: TrialConfig, most: int = 5) -> dict[str, Rows]:
    """What one block in the middle keeps for backward in each form, on rank 0: all of it, and the largest tensors."""
    rows: Rows = []
    for form, (how, changes) in FORMS.items() if context.is_main else ():
        if form == "ours" and context.device.type == "cuda":
            changes = changes | {"attention": "flash"}
        config = replace(trial, compile="off", strategy="local", **changes)
        found = attempt(partial(_saved_in_block, context, config, how))
        if found["status"] != "ok":
            rows.append((f"{form}, all", found))
            continue
        blocks = found["saved"]
        name = f"blocks.{config.model().num_layers // 2}"
        kept, total = blocks[name], sum(tensor.bytes for tensor in blocks[name])
        whole = {
            "status": "ok", "saved_block_bytes": total, "tensors": len(kept), "of_block_pct": 100.0,
            "saved_all_bytes": sum(tensor.bytes for block in blocks.values() for tensor in block),
            "gradient_block_bytes": found["gradients"][name],
            "predicted_saved_block_bytes": predicted_saved(config, fused=form != "eager"),
        }  # fmt: skip
        rows.append((f"{form}, all", whole))
        for rank, tensor in enumerate(kept[:most], 1):
            metrics = {
                "status": "ok", "saved_block_bytes": tensor.bytes, "of_block_pct": 100 * tensor.bytes / total,
                "shape": "×".join(map(str, tensor.shape)), "dtype": str(tensor.dtype).removeprefix("torch."),
                "made_by": tensor.made_by,
            }  # fmt: skip
            rows.append((f"{form}, {rank}", metrics))
    return {SAVED: rows}


def _saved_in_block(context: RankContext, config: TrialConfig, how: str) -> dict[str, Any]:
    with opened(context, config) as trial:
        # On a CPU the saved tensors are chosen as by `inductor`, without waiting for its C++ compiler.
        compiled(trial.module, how, "inductor" if context.device.type == "cuda" else "aot_eager_decomp_partition")
        blocks = {f"blocks.{index}": block for index, block in enumerate(trial.module.blocks)}
        trial.forward().backward()  # what is compiled is compiled, and gradients are there
        return {"saved": saved_for_backward(trial.forward, trial.module, blocks), "gradients": gradient_bytes(blocks)}


def predicted_saved(config: TrialConfig, *, fused: bool) -> int | None:
    """Bytes that the closed form says one block keeps, autocast's copies of its matrices included; a fused SwiGLU
    computes silu(w1 x) again.
    """
    if config.checkpointing != "none":
        return None
    model, precision = config.model(), PRECISIONS["fp32" if config.dtype == "fp32" else "bf16-autocast"]
    shape = ModelShape.of(model)
    kept = block_activations(shape, config.batch, model.context_length, precision, model.attention)
    silu = precision.compute * config.batch * model.context_length * model.d_ff
    return kept + precision.compute * precision.copies_weights * sum(shape.matrices_per_block) - fused * silu


SAVED_VIEW = View(
    name=SAVED,
    question="What does a block save for backward, eager, compiled and with this lab's kernels?",
    columns=[Column("variant", "form"), mib_column("saved_block_bytes", "MiB"),
     Column("metrics.of_block_pct", "of block %", ".1f"),
     mib_column("predicted_saved_block_bytes", "predicted"),
     prediction_error("predicted_saved_block_bytes", "saved_block_bytes"), Column("metrics.shape", "shape"),
     Column("metrics.dtype", "type"), Column("metrics.made_by", "made by", align="left"),
     mib_column("gradient_block_bytes", "gradients MiB"),
     Column("metrics.tensors", "tensors"), mib_column("saved_all_bytes", "whole model MiB"),
     Column("metrics.status", "status", align="left")],
    headline=headline,
    prediction="The closed form of distlab.theory.memory for eager blocks, with autocast's copies of matrices; "
    "compiled and with our kernels without silu(w1 x), which backward computes again.",
    reading="Tensors as they are handed to autograd, parameters left out, each storage once; the block is the one in "
    "the middle. The operator that made a tensor is searched through views and casts.",
)  # fmt: skip
