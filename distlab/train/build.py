"""Build what is trained: model on meta → recomputation → compile → strategy → optimizer.

Trainer, benchmarks and simulation call this file, so that all of them step the same thing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.model.config import Checkpointing, ModelConfig
from distlab.model.ops import attention_parts
from distlab.model.transformer import TransformerLM
from distlab.parallel import Layout, ParallelModel, Strategy
from distlab.parallel.build import BUCKET_SIZE_MB
from distlab.parallel.context_parallel import Parts
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.pipeline import stage_sizes
from distlab.parallel.schedules import SCHEDULES
from distlab.train.step import compiled


class Training(NamedTuple):
    """Objects that a step needs.

    Attributes:
        module: model, neither compiled nor wrapped.
        model: module under its strategy.
        optimizer: optimizer of the strategy.
    """

    module: nn.Module
    model: ParallelModel
    optimizer: Optimizer


def build_training(
    source: ModelConfig | nn.Module,
    strategy: Strategy,
    group: ProcessGroup,
    optimizer_cls: type[Optimizer],
    optimizer_options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    checkpointing: Checkpointing = False,
    compile: str = "off",
    compute_dtype: torch.dtype | None = None,
    bucket_size_mb: float | None = BUCKET_SIZE_MB,
    shard_size: int | None = None,
    keep_gathered: bool = False,
    layout: Layout = DATA_PARALLEL,
) -> Training:
    """Build a model under its strategy, with its optimizer.

    Args:
        source: shape of the lab's Transformer, whose values are drawn from `seed` on `device`, or a
            module that has its values.
        checkpointing: recomputation of the Transformer's blocks, as `checkpoint_blocks` of
            `TransformerLM`.
        compile: form of compilation, see `distlab.train.step.compiled`.
        compute_dtype: as in `Strategy.build`, like the next four.
        bucket_size_mb: MiB per bucket.
        shard_size: ranks in a shard group.
        keep_gathered: True to keep gathered parameters until the end of the step.
        layout: sizes of the groups of ranks that share the model.

    Raises:
        ValueError: as in `Strategy.build` and `TransformerLM`.
    """
    module = source
    init = None
    if isinstance(source, ModelConfig):
        if strategy.is_peer and (strategy.casts_parameters or layout.ranks > 1):
            # A Triton kernel takes no DTensor, and no tables that fsdp2 has cast.
            source = replace(source, ops="torch")
        # On meta, so that a strategy that shards never holds the whole model.
        module = TransformerLM(source, device="meta", checkpoint_blocks=checkpointing)
        transformer = module

        def init(_: nn.Module) -> None:
            transformer.reset_parameters(seed)

    # Ranks that share sequences compute attention over parts of the keys.
    parts = Parts(*attention_parts()) if layout.context > 1 else None
    model, optimizer = strategy.build(
        # Before the strategy: its hooks and messages must stay outside of the compiled graphs.
        compiled(module, compile),
        group,
        optimizer_cls,
        optimizer_options,
        init=init,
        # A user's module is on its device and has its values already.
        device=device if init is not None else None,
        compute_dtype=compute_dtype,
        layout=layout,
        parts=parts,
        bucket_size_mb=bucket_size_mb,
        shard_size=shard_size,
        keep_gathered=keep_gathered,
    )
    return Training(module, model, optimizer)


def check_layout(layout: Layout, compile: str, micro_batches: int) -> None:
    """Raise ValueError for a compilation or a number of micro-batches that a layout does not allow.

    Ranks that share a model do not take one that is compiled as a whole. Compiled blocks do not
    take a split backward. A schedule may not take the number of micro-batches.
    """
    # Raises for a number of micro-batches that this schedule does not take.
    SCHEDULES[layout.schedule](layout.pipeline, micro_batches)
    if layout.schedule == "zero-bubble" and compile != "off":
        raise ValueError(
            "zero-bubble splits the backward of each matrix, which compiled code does not: take "
            "--compile off, or another schedule"
        )
    if layout.ranks > 1 and compile == "model":
        raise ValueError(
            f"layout {layout} sends messages inside of blocks, which a graph of the whole model "
            "cannot hold: take --compile blocks"
        )


def check_shared_model(model: ModelConfig, layout: Layout) -> None:
    """Raise ValueError for a model that the ranks of a layout cannot share, before they start.

    Ranks of a pipeline need this before: if one stage refuses, the others only see that its
    messages do not arrive. The vocabulary is not checked, because a text's bytes may still replace
    it.
    """
    if layout.pipeline > 1:
        stage_sizes(model.num_layers, layout.pipeline, layout.schedule, layout.stages)
        if model.tie_embeddings:
            raise ValueError(
                f"layout {layout}: the head shares the embedding's matrix, which is on another "
                "stage: choose a layout without pp, or a model whose embeddings are not tied"
            )
    if layout.tensor > 1 and model.dropout > 0:
        raise ValueError(
            f"layout {layout}: dropout would draw other masks on each rank that shares matrices: "
            "give --dropout 0, or a layout without tp"
        )
    heads = (("heads", model.num_heads), ("heads of keys", model.kv_heads))
    for what, size in (*heads, ("rows of the feed-forward matrices", model.d_ff)):
        if size % layout.tensor:
            raise ValueError(
                f"layout {layout}: {layout.tensor} ranks cannot share {size} {what} evenly: choose "
                f"a number of tp that divides {size}"
            )
    # Each rank of a sequence has an early and a late chunk of it, which balances causal attention.
    chunks = 2 * layout.context if layout.context > 1 else 1
    equal_parts = chunks * layout.tensor
    if model.context_length % equal_parts:
        raise ValueError(
            f"layout {layout}: sequences of {model.context_length} tokens cannot be shared in "
            f"{equal_parts} equal parts: give --context a multiple of {equal_parts}"
        )
    if layout.attention == "ulysses":
        for what, size in heads:
            size_per_rank = size // layout.tensor
            if size_per_rank % layout.context:
                raise ValueError(
                    f"layout {layout}: Ulysses lets {layout.context} ranks share {size_per_rank} "
                    f"{what}, which is not possible evenly: take cp{layout.context} (gathered) or "
                    f"cp{layout.context}-ring"
                )
