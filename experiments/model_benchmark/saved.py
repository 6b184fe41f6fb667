"""What a block saves for backward: eager, compiled and with this lab's kernels."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distlab.bench.timing import TrialConfig, compiled, opened
from distlab.experiment import Column, RankContext, Record, View
from distlab.measure import attempt, gradient_bytes, saved_for_backward
from distlab.theory.memory.activations import PRECISIONS, block_activations
from distlab.theory.model_shape import ModelShape

from .view import Rows, headline, mib_column

NAME = "model_saved"
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
            "predicted_saved_block_bytes": predicted_saved(config) if form == "eager" else None,
        }  # fmt: skip
        rows.append((f"{form}, all", whole))
        for rank, tensor in enumerate(kept[:most], 1):
            metrics = {
                "status": "ok", "saved_block_bytes": tensor.bytes, "of_block_pct": 100 * tensor.bytes / total,
                "shape": "×".join(map(str, tensor.shape)), "dtype": str(tensor.dtype).removeprefix("torch."),
                "made_by": tensor.made_by,
            }  # fmt: skip
            rows.append((f"{form}, {rank}", metrics))
    return {NAME: rows}


def _saved_in_block(context: RankContext, config: TrialConfig, how: str) -> dict[str, Any]:
    with opened(context, config) as trial:
        # On a CPU the saved tensors are chosen as by `inductor`, without waiting for its C++ compiler.
        compiled(trial.module, how, "inductor" if context.device.type == "cuda" else "aot_eager_decomp_partition")
        blocks = {f"blocks.{index}": block for index, block in enumerate(trial.module.blocks)}
        trial.forward().backward()  # what is compiled is compiled, and gradients are there
        return {"saved": saved_for_backward(trial.forward, trial.module, blocks), "gradients": gradient_bytes(blocks)}


def predicted_saved(config: TrialConfig) -> int | None:
    """Bytes that the closed form says one eager block keeps, autocast's copies of its matrices included."""
    if config.checkpointing != "none":
        return None
    model, precision = config.model(), "fp32" if config.dtype == "fp32" else "bf16-autocast"
    kept = block_activations(
        ModelShape.of(model), config.batch, model.context_length, PRECISIONS[precision], model.attention
    )
    copies = 2 * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff) if config.dtype != "fp32" else 0
    return kept + copies


def saved_findings(records: Sequence[Record]) -> list[str]:
    """One block and the whole step, in each form."""
    lines = []
    for record in records:
        m = record.metrics
        if not record.variant.endswith(", all") or m["status"] != "ok":
            continue
        predicted = m["predicted_saved_block_bytes"]
        said = f" (predicted {predicted / 2**20:,.2f})" if predicted else ""
        lines.append(
            f"{record.variant.removesuffix(', all')}: one block saves {m['saved_block_bytes'] / 2**20:,.2f} MiB{said} "
            f"in {m['tensors']} tensors, the whole model with its loss {m['saved_all_bytes'] / 2**20:,.2f} MiB; the "
            f"gradients of a block take {m['gradient_block_bytes'] / 2**20:,.2f} MiB."
        )
    return lines


VIEW = View(
    name=NAME,
    question="What does a block save for backward, eager, compiled and with this lab's kernels?",
    columns=[Column("variant", "form"), mib_column("saved_block_bytes", "MiB"),
     Column("metrics.of_block_pct", "of block %", ".1f"),
     mib_column("predicted_saved_block_bytes", "predicted"), Column("metrics.shape", "shape"),
     Column("metrics.dtype", "type"), Column("metrics.made_by", "made by", align="left"),
     mib_column("gradient_block_bytes", "gradients MiB"), Column("metrics.status", "status", align="left")],
    headline=headline,
    findings=saved_findings,
    prediction="The closed form of distlab.theory.memory for eager blocks, with autocast's copies of matrices.",
    reading="Tensors as they are handed to autograd, parameters left out, each storage once; the block is the one in "
    "the middle. The operator that made a tensor is searched through views and casts.",
)  # fmt: skip
