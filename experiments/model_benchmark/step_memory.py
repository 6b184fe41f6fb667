"""Memory of a step: categories over time, largest blocks, and what a block saves for backward."""

import tempfile
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from distlab.bench.trial import Trial
from distlab.experiment import Column, RankContext, Records, View
from distlab.measure import (
    attempt,
    emitter,
    gradient_bytes,
    memory_timeline,
    named_ranges,
    peak_memory,
    saved_for_backward,
)
from distlab.report import environment, memory_areas, prediction_error, text_column
from distlab.theory.memory.activations import (
    block_activations,
    inference_temporary,
    precision_of,
)
from distlab.theory.model_shape import ModelShape
from distlab.train.step import compiled

from .trials import (
    Rows,
    TrialConfig,
    described,
    headline,
    label_of,
    mib_column,
    ms_column,
    opened,
    prefix,
)

MEMORY = "model_memory"
SCOPES = {"inference": "forward only", "step": "full step"}


def memory(context: RankContext, config: TrialConfig, folder: Path, slug: str) -> dict[str, Rows]:
    """Draw rank 0's memory over a forward without gradients and over a step.

    The rows are the largest blocks at each peak, with the memory held then.
    """
    device, rows = context.device, []
    for mode, scope in SCOPES.items():
        with opened(context, config) as trial:
            with peak_memory(device) as allocator:
                trial(mode)
                # After a first call, which allocates what stays: compiled code, workspaces,
                # optimizer state.
                timeline = over_time(trial, mode)
            # The allocator's history exists on a GPU only, and that of a whole step says most.
            if device.type == "cuda" and mode == "step":
                history = memory_timeline.allocator_history(folder / f"memory_{slug}.pickle")
                # All ranks must step, because a step communicates. Only one writes the file.
                with history if context.is_main else nullcontext():
                    trial(mode)
        # Other ranks have no timeline and no rows.
        if timeline is None:
            continue
        if mode == "inference":
            # The mode has only a forward, so other phases of the trace are left out.
            timeline = replace(timeline, phases={"forward": timeline.phases["forward"]})
        where = described([asdict(config) | config.facts(context)], environment(device))
        ending = "_forward" if mode == "inference" else ""
        picture = folder / f"memory_{slug}{ending}.png"
        memory_areas(
            picture, timeline, title=f"Memory over one {scope.replace('only', 'alone')}: {where}"
        )
        _, categories = timeline.peak()
        total = sum(categories.values())
        shared = {
            f"at_peak_{name.replace(' ', '_')}_bytes": size for name, size in categories.items()
        }
        shared |= {"timeline_peak_bytes": total, "peak_alloc_bytes": allocator.peak_alloc_bytes}
        shared |= {
            "scope": scope,
            "predicted_timeline_peak_bytes": predicted_peak(config, context, mode),
        }
        # Eight blocks show the pattern, and more would make the table long.
        for block in timeline.largest(8):
            metrics = {
                "block_bytes": block.bytes,
                "of_peak_pct": 100 * block.bytes / total,
                "category": block.category,
                "phase": block.phase,
                "from_ms": block.start_ms,
                "to_ms": block.end_ms,
            }
            rows.append((block.origin, metrics | shared))
    return {MEMORY: rows}


def over_time(trial: Trial, mode: str) -> memory_timeline.MemoryTimeline | None:
    """Record memory over one call in the steady state. Only the main rank gets the timeline.

    Call it on every rank.
    """
    # The steady state: nothing of the call before is held, neither gradients nor its loss.
    trial.model.zero_grad(set_to_none=True)
    trial.optimizer.zero_grad(set_to_none=True)
    # The loss keeps its whole graph alive.
    trial.last_loss = None
    if not trial.context.is_main:
        return trial(mode)  # None
    device = trial.context.device
    named = named_ranges(trial.model, emitter("profiler"), trial.optimizer)
    with tempfile.TemporaryDirectory(prefix="distlab-memory-") as temporary, named:
        path = Path(temporary) / "trace.json"
        held = memory_timeline.record_memory(
            partial(trial, mode), trial.model, trial.optimizer, path, device
        )
        return memory_timeline.memory_timeline(path, held, device)


def predicted_peak(config: TrialConfig, context: RankContext, mode: str) -> int | None:
    """Return bytes at the peak by the closed form.

    None for a user's model, for a forward that keeps memory for backward, and for inference whose
    logits never all exist at once.

    A step is one in the steady state. Forward and backward alone have no optimizer state.
    """
    if (
        config.factory is not None
        or mode == "forward"
        or (mode == "inference" and config.model().loss_in_head)
    ):
        return None
    expected = config.planned(config.strategy, mode).memory(
        context.world_size, on_gpu=context.device.type == "cuda"
    )
    if mode == "step":
        return expected.peak.total
    if mode == "forward_backward":
        # AdamW makes its state in its first step, which these modes never take.
        moments = [moment for phase, moment in expected.moments if phase != "optimizer step"]
        return max(moment.total - moment.optimizer_state for moment in moments)
    # Inference has no step, so its temporaries come from a closed form of their own.
    model = config.model()
    precision = precision_of(config.dtype, casts_parameters=False)
    shape = ModelShape.of(model)
    held = expected.after_init.total + expected.before_step.temporary
    # On a CPU autocast keeps the copies of the matrices; see `ops.linear`.
    if context.device.type == "cpu" and precision.copies_weights:
        held += precision.compute * (
            shape.num_layers * shape.block_matrices + shape.embedding_parameters
        )
    return held + inference_temporary(
        shape, config.batch, model.context_length, precision, model.attention
    )


def memory_findings(records: Records) -> list[str]:
    """List the memory held at each peak by category, the allocator's count, and the prediction."""
    lines = []
    peaks = {(label_of(record), record.metrics["scope"]): record.metrics for record in records}
    for (label, scope), m in peaks.items():
        held = {
            name: m[f"at_peak_{name.replace(' ', '_')}_bytes"]
            for name in memory_timeline.CATEGORIES
        }
        parts = [f"{name} {size / 2**20:,.1f}" for name, size in held.items() if size]
        count, predicted = m["peak_alloc_bytes"], m["predicted_timeline_peak_bytes"]
        # A CPU has no allocator that counts.
        allocator = f", by the allocator's count {count / 2**20:,.1f}" if count else ""
        said = f", predicted {predicted / 2**20:,.1f}" if predicted else ""
        lines.append(
            f"{prefix(label)}{scope}: held at the peak, in MiB: {', '.join(parts)}; together "
            f"{m['timeline_peak_bytes'] / 2**20:,.1f}{allocator}{said}."
        )
    return lines


MEMORY_VIEW = View(
    name=MEMORY,
    question="What holds the memory at the peak of a step and of its forward alone, and where was "
    "it allocated?",
    columns=[
        text_column("metrics.scope", "over"),
        Column("variant", "allocated by"),
        mib_column("block_bytes", "MiB"),
        Column("metrics.of_peak_pct", "of peak %", ".1f"),
        text_column("metrics.category", "kind"),
        text_column("metrics.phase", "phase"),
        ms_column("from_ms", "from ms"),
        ms_column("to_ms", "to ms"),
    ],
    headline=headline,
    findings=memory_findings,
    reading="The largest blocks at the peak. The origin is the named part of the model and the "
    "operator that allocated the block. Activations are what forward leaves for backward; "
    "temporary blocks live within a phase, or are made in backward; before is memory that existed "
    "at the start and is neither parameter nor state.",
    prediction="The closed form of distlab.theory.memory for an eager step, and for a forward "
    "without gradients.",
)


SAVED = "model_saved"
# Form of a block → value of `compile`, and the operations with which the blocks run.
FORMS = {"eager": ("off", "torch"), "compiled": ("blocks", "torch"), "ours": ("off", "triton")}


def saved(context: RankContext, trial: TrialConfig) -> dict[str, Rows]:
    """Return the memory that one block in the middle keeps for backward in each form, on rank 0.

    The rows are all of it, and the largest tensors.
    """
    if not context.is_main:
        return {SAVED: []}
    rows = []
    for form, (how, ops) in FORMS.items():
        # One rank without a strategy: what a block saves does not depend on how gradients are sent.
        config = replace(trial, compile="off", strategy="local", ops=ops)
        if form == "ours" and context.device.type == "cuda":
            config = replace(config, attention="flash")
        found = attempt(partial(_saved_in_block, context, config, how))
        # One form that fails leaves the others their rows.
        if found["status"] != "ok":
            rows.append((f"{form}, all", found))
            continue
        blocks = found["saved"]
        # A block in the middle stands for all: the first and the last have other neighbours.
        name = f"blocks.{config.model().num_layers // 2}"
        kept, total = blocks[name], sum(tensor.bytes for tensor in blocks[name])
        whole = {
            "status": "ok",
            "saved_block_bytes": total,
            "tensors": len(kept),
            "of_block_pct": 100.0,
            "saved_all_bytes": sum(tensor.bytes for block in blocks.values() for tensor in block),
            "gradient_block_bytes": found["gradients"][name],
            "predicted_saved_block_bytes": predicted_saved(config, fused=form != "eager"),
        }
        rows.append((f"{form}, all", whole))
        # Five tensors are most of what a block saves.
        for rank, tensor in enumerate(kept[:5], 1):
            metrics = {
                "status": "ok",
                "saved_block_bytes": tensor.bytes,
                "of_block_pct": 100 * tensor.bytes / total,
                "shape": "×".join(map(str, tensor.shape)),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "made_by": tensor.made_by,
            }
            rows.append((f"{form}, {rank}", metrics))
    return {SAVED: rows}


def _saved_in_block(context: RankContext, config: TrialConfig, how: str) -> dict[str, Any]:
    """Return the tensors that each block saves for backward, and the bytes of its gradients."""
    with opened(context, config) as trial:
        # On a CPU the saved tensors are chosen as by `inductor`, without waiting for its C++
        # compiler.
        compiled(
            trial.module,
            how,
            "inductor" if context.device.type == "cuda" else "aot_eager_decomp_partition",
        )
        blocks = {f"blocks.{index}": block for index, block in enumerate(trial.module.blocks)}
        trial.forward().backward()  # compiles, and makes the gradients
        return {
            "saved": saved_for_backward(trial.forward, trial.module, blocks),
            "gradients": gradient_bytes(blocks),
        }


def predicted_saved(config: TrialConfig, *, fused: bool) -> int | None:
    """Return bytes that one block keeps by the closed form, with autocast's copies of its matrices.

    A fused SwiGLU computes silu(w1 x) again.
    """
    # Recomputed blocks save their input alone, which this closed form does not describe.
    if config.checkpointing != "none":
        return None
    model = config.model()
    precision = precision_of(config.dtype, casts_parameters=False)
    shape = ModelShape.of(model)
    kept = block_activations(shape, config.batch, model.context_length, precision, model.attention)
    if precision.copies_weights:
        # Autograd keeps the matrices' copies in the low precision, which backward multiplies with.
        kept += precision.compute * shape.block_matrices
    if fused:
        # One tensor (B·T, d_ff) fewer.
        kept -= precision.compute * config.batch * model.context_length * model.d_ff
    return kept


SAVED_VIEW = View(
    name=SAVED,
    question="What does a block save for backward, eager, compiled and with this lab's kernels?",
    columns=[
        Column("variant", "form"),
        mib_column("saved_block_bytes", "MiB"),
        Column("metrics.of_block_pct", "of block %", ".1f"),
        mib_column("predicted_saved_block_bytes", "predicted"),
        prediction_error("predicted_saved_block_bytes", "saved_block_bytes"),
        Column("metrics.shape", "shape"),
        Column("metrics.dtype", "type"),
        text_column("metrics.made_by", "made by"),
        mib_column("gradient_block_bytes", "gradients MiB"),
        Column("metrics.tensors", "tensors"),
        mib_column("saved_all_bytes", "whole model MiB"),
        text_column("metrics.status", "status"),
    ],
    headline=headline,
    prediction="The closed form of distlab.theory.memory for eager blocks, with autocast's copies "
    "of matrices; compiled and with our kernels without silu(w1 x), which backward computes again.",
    reading="Tensors as they are handed to autograd, parameters left out, each storage once; the "
    "block is the one in the middle. The operator that made a tensor is searched through views and "
    "casts.",
)
