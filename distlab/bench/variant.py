"""Rows of a benchmark: the model and data that they share, and the strategy of each.

A `Variant` is data. It becomes something that can be timed in `trial.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from distlab.bench.task import Task, num_parameters, own_task, synthetic_task
from distlab.comm import RankContext
from distlab.model.config import OPS_CHOICES, ModelOptions, preset
from distlab.options import SEED, option
from distlab.parallel import Layout, Strategy, get_strategy
from distlab.parallel.build import BUCKET_SIZE_MB
from distlab.parallel.layout import DATA_PARALLEL
from distlab.train.memory_budget import PlannedStep, require


@dataclass(frozen=True)
class BenchOptions(ModelOptions):
    """The model and the data that a benchmark steps.

    Raises ValueError for a value that is not allowed.
    """

    factory: ClassVar[str | None] = None  # name of a user's model, see `OwnModel`
    ops: str = option(
        "torch",
        "operations of the model: torch, or triton for this lab's kernels",
        choices=OPS_CHOICES,
    )
    batch: int = option(4, "sequences per rank", minimum=1)
    seed: int = option(0, "seed of parameters and data", **SEED)

    def task(self) -> Task:
        """Return the training task: the Transformer on synthetic tokens, or the user's model.

        Raises:
            ValueError: a factory that fails or returns something else, see `distlab.bench.task`.
        """
        if self.factory is not None:
            return own_task(self.factory, self.batch, self.seed)
        return synthetic_task(self.model(), self.batch, self.seed)

    def facts(self, context: RankContext) -> dict[str, Any]:
        """Return the facts about model and ranks that a record holds in addition to the options."""
        facts: dict[str, Any] = {"world_size": context.world_size, "backend": context.backend}
        if self.factory is not None:
            facts["num_parameters"] = num_parameters(self.factory)
            facts["context"] = None
            facts["size"] = self.factory
            return facts
        model = self.model()
        facts["num_parameters"] = model.num_parameters
        facts["context"] = model.context_length
        return facts

    def planned(self, strategy: str = "local", mode: str = "step") -> PlannedStep:
        """Return a step under this strategy, or a part of one, for predictions of memory."""
        return PlannedStep(
            self.model(),
            self.batch,
            strategy,
            self.dtype,
            checkpointing=self.checkpointing,
            compiled=self.compile != "off",
            mode=mode,
        )


@dataclass(frozen=True)
class Variant:
    """A strategy with its bucket size, as one row of a table.

    Args:
        name: name of the row: the strategy's, with the bucket size appended if there are several.
        strategy: strategy that wraps the model.
        bucket_size_mb: MiB per bucket. Ignored by strategies without buckets.
        shard_size: ranks in a shard group, or None for those of a host. Ignored by strategies
            without a mesh.
        options: options of the model, if they differ from the benchmark's.
        layout: sizes of the groups of ranks that share the model. Such ranks have the sequences of
            all of them.
        micro_batches: number of parts of a step's batch, for a pipeline.
        optimizer_cls: class of the optimizer.
        optimizer_options: keyword arguments of the optimizer.
    """

    name: str
    strategy: Strategy
    bucket_size_mb: float | None = BUCKET_SIZE_MB
    shard_size: int | None = None
    options: BenchOptions | None = None
    layout: Layout = DATA_PARALLEL
    micro_batches: int = 1
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"fused": True})


def variants(
    strategies: Sequence[str],
    bucket_sizes_mb: Sequence[float | None],
    shard_size: int | None = None,
    layouts: Sequence[str] = (),
    micro_batches: int = 1,
) -> list[Variant]:
    """Return a row for each strategy, then for each strategy under each layout that it takes.

    A strategy with buckets has a row per bucket size, such as `bucketed-100`. A row under a layout
    is called `fsdp-tp2`. One with a pipeline has `micro_batches` micro-batches.

    Raises:
        ValueError: an unknown strategy, or a layout that none of the strategies takes.
    """
    rows = []
    for name in strategies:
        strategy = get_strategy(name)
        # Without buckets all sizes are the same measurement, so there is one row.
        sizes = bucket_sizes_mb if strategy.has_buckets else bucket_sizes_mb[:1]
        for size in sizes:
            label = "unbounded" if size is None else f"{size:g}"
            row_name = f"{strategy.name}-{label}" if len(sizes) > 1 else strategy.name
            rows.append(Variant(row_name, strategy, size, shard_size))
    under_layouts = []
    for text in layouts:
        layout = Layout.parse(text)
        taking = [row for row in rows if takes(row.strategy, layout)]
        if not taking:
            raise ValueError(
                f"--layouts {text}: {', '.join(strategies)} cannot be combined with it; add fsdp "
                "or bucketed to --strategies"
            )
        for row in taking:
            under_layouts.append(
                replace(
                    row,
                    name=f"{row.name}-{layout}",
                    layout=layout,
                    micro_batches=micro_batches if layout.pipeline > 1 else 1,
                )
            )
    return rows + under_layouts


def takes(strategy: Strategy, layout: Layout) -> bool:
    """Return whether a strategy has a row under a layout."""
    # `local` communicates nothing, and a layout shares work by communication.
    return strategy.synchronizes and strategy.refusal(layout) is None


def require_memory(options: BenchOptions, rows: Sequence[Variant], context: RankContext) -> None:
    """Raise an error before anything is built if the rows cannot run. Call it on every rank.

    Raises:
        ValueError: a strategy that needs a GPU, without one.
        MemoryError: no row fits a GPU, or some row does not fit this machine's memory.
    """
    planned = []
    for row in rows:
        own = row.options or options
        plan = replace(
            options.planned(row.strategy.name),
            shard_size=row.shard_size,
            # The size of a micro-batch, rounded up.
            batch=-(-own.batch * row.layout.ranks // row.micro_batches),
            micro_batches=row.micro_batches,
            layout=row.layout,
            bucket_size_mb=row.bucket_size_mb,
        )
        if options.factory is not None:
            # The memory of a user's model is unknown. Only the strategies are checked.
            plan = replace(plan, model=preset("tiny"), batch=1)
        planned.append(plan)
    require(planned, context.device, context, some=context.device.type == "cuda")
