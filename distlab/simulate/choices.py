"""All ways to run a model's step on a cluster (`choices`), each with its memory and time.

`memory` and `estimated` are closed forms. `simulated` runs the strategy's own code on fake ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from distlab.model import ModelConfig
from distlab.parallel import STRATEGIES as KNOWN
from distlab.parallel import Layout, Strategy
from distlab.parallel.layout import DATA_PARALLEL
from distlab.simulate.estimate import estimate_step, host_time
from distlab.simulate.step import simulate_training
from distlab.simulate.timeline import Machine, replay
from distlab.theory.memory.peak import StepMemory
from distlab.theory.model_shape import divisors
from distlab.theory.step_time import StepTime, has_closed_form
from distlab.train.memory_budget import PlannedStep


def _can_be_chosen(strategy: Strategy) -> bool:
    """Return whether a strategy trains, runs on fake ranks, and has a closed form."""
    runs_on_fake_ranks = not (strategy.is_peer or strategy.needs_gpu)
    return strategy.trains and runs_on_fake_ranks and has_closed_form(strategy)


STRATEGIES = tuple(name for name, strategy in KNOWN.items() if _can_be_chosen(strategy))
RECOMPUTATION = ("none", "selective", "block")  # tried unless others are named
BUCKET_SIZES_MB = (25.0, 400.0)
# Largest number of micro-batches for each of p ranks of a pipeline. With 4p of them, a rank is idle
# for (p − 1) / (4p + p − 1) of its time, less than a fifth.
MOST_MICRO_BATCHES = 4


@dataclass(frozen=True)
class Choice:
    """One way to run a step.

    Args:
        strategy: name in `STRATEGIES`.
        micro_batch, micro_batches: sequences per rank at once, and number of micro-batches in a
            step.
        recompute: recomputation of blocks, see `distlab.model.kept_levels`.
        group: number of ranks that share a copy of the parameters, with a mesh.
        bucket_size_mb: MiB per bucket, for strategies with buckets. Default: torch's.
        layout: sizes of the groups of ranks that share a model. `micro_batch` then counts the
            sequences of all of them, and `group` the ranks that have equal parts of its matrices.
        optimizer: `adamw` or `muon`.
    """

    strategy: str
    micro_batch: int
    micro_batches: int = 1
    recompute: str = "none"
    group: int | None = None
    bucket_size_mb: float = BUCKET_SIZES_MB[0]
    layout: Layout = DATA_PARALLEL
    optimizer: str = "adamw"

    def __str__(self) -> str:
        text = self.strategy
        if self.layout.ranks > 1:
            text += f" {self.layout}"
        if self.group:
            text += f" in {self.group}s"
        if self.bucket_size_mb != BUCKET_SIZES_MB[0]:
            text += f" of {self.bucket_size_mb:g} MiB"
        text += f" × {self.micro_batch}"
        if self.recompute == "block":
            text += " recomputed"
        elif self.recompute != "none":
            text += f" {self.recompute}"
        return text


def choices(
    ranks: int,
    devices_per_node: int,
    per_rank: int,
    strategies: Sequence[str] = STRATEGIES,
    recomputation: Sequence[str] = RECOMPUTATION,
    layout: Layout = DATA_PARALLEL,
) -> Iterator[Choice]:
    """Yield every strategy with every micro-batch that divides a rank's sequences.

    For a pipeline the number of micro-batches is a multiple of its ranks, because interleaved
    schedules take only these, and others need that number to be busy. Strategies with buckets come
    with small and large ones. On a mesh, groups are one node and 2, 4, 8, … nodes that divide the
    ranks and are fewer.

    Args:
        ranks: number of ranks that have equal parts of the matrices.
        devices_per_node: number of such ranks on a node.
        per_rank: sequences per model in a step.
        strategies: names of the strategies to try.
        recomputation: recomputations to try, see `Choice.recompute`.
        layout: sizes of the groups of ranks that share a model.
    """
    groups = []
    # Groups of whole nodes. One group of all ranks would be FSDP without a mesh.
    for doublings in range(ranks.bit_length()):
        group = devices_per_node * 2**doublings
        if group < ranks and ranks % group == 0:
            groups.append(group)
    micro_batches = divisors(per_rank)[::-1]  # the largest first
    if layout.pipeline > 1:
        most = MOST_MICRO_BATCHES * layout.pipeline
        counts = range(layout.pipeline, most + 1, layout.pipeline)
        micro_batches = [micro for micro in micro_batches if per_rank // micro in counts]
    for name in strategies:
        strategy = KNOWN[name]
        groups_to_try = groups if strategy.takes_mesh else [None]
        sizes = BUCKET_SIZES_MB if strategy.has_buckets else BUCKET_SIZES_MB[:1]
        for group, recompute, size, micro in product(
            groups_to_try, recomputation, sizes, micro_batches
        ):
            yield Choice(
                strategy=name,
                micro_batch=micro,
                micro_batches=per_rank // micro,
                recompute=recompute,
                group=group,
                bucket_size_mb=size,
                layout=layout,
            )


def memory(
    config: ModelConfig, choice: Choice, ranks: int, dtype: str = "bf16", *, compiled: bool = False
) -> StepMemory:
    """Return the memory of a rank, in closed form."""
    step = PlannedStep(
        config,
        choice.micro_batch,
        choice.strategy,
        dtype,
        checkpointing=choice.recompute,
        micro_batches=choice.micro_batches,
        compiled=compiled,
        shard_size=choice.group,
        layout=choice.layout,
        optimizer=choice.optimizer,
        bucket_size_mb=choice.bucket_size_mb,
    )
    return step.memory(ranks)


def estimated(
    config: ModelConfig,
    choice: Choice,
    machine: Machine,
    ranks: int,
    dtype: str = "bf16",
    kernels: str | None = None,
) -> StepTime:
    """Return the step's time in closed form. `kernels` is as in `estimate_step`."""
    return estimate_step(
        config,
        choice.strategy,
        machine,
        batch=choice.micro_batch,
        ranks=ranks,
        dtype=dtype,
        checkpointing=choice.recompute,
        micro_batches=choice.micro_batches,
        group=choice.group,
        bucket_size_mb=choice.bucket_size_mb,
        kernels=kernels,
        layout=choice.layout,
        optimizer=choice.optimizer,
    )


def simulated(
    config: ModelConfig, choice: Choice, machine: Machine, ranks: int, dtype: str = "bf16"
) -> float:
    """Return the seconds of a step by events, or the host's time to start it, if that is longer.

    The events are those of the strategy's own code on fake ranks, replayed on the machine.
    """
    step = simulate_training(
        config,
        choice.strategy,
        batch=choice.micro_batch,
        world_size=ranks,
        shard_size=choice.group,
        dtype=dtype,
        checkpointing=choice.recompute,
        micro_batches=choice.micro_batches,
        bucket_size_mb=choice.bucket_size_mb,
    )
    # The host launches ahead while the device computes, so the slower of the two decides.
    device_s = replay(step, machine).step_ms / 1e3
    host_s = host_time(len(step.operators), len(step.calls))
    return max(device_s, host_s)
