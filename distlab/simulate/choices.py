"""All ways to run a model's step on a cluster, with memory and time, estimated and simulated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from distlab.model import ModelConfig
from distlab.parallel import STRATEGIES as KNOWN
from distlab.parallel import Layout
from distlab.parallel.layout import DATA_PARALLEL
from distlab.simulate.estimate import estimate_step, host_time
from distlab.simulate.step import simulate_training
from distlab.simulate.timeline import Machine, replay
from distlab.theory.memory.peak import StepMemory
from distlab.theory.model_shape import divisors
from distlab.theory.step_time import StepTime, has_closed_form
from distlab.train.memory_budget import PlannedStep

# What a timeline can be made of on fake ranks, and what trains.
STRATEGIES = tuple(
    name
    for name, strategy in KNOWN.items()
    if strategy.trains
    and not (strategy.is_peer or strategy.needs_gpu)
    and has_closed_form(strategy)
)
RECOMPUTATION = ("none", "selective", "block")  # tried unless others are named
BUCKET_SIZES_MB = (25.0, 400.0)
# for each rank of a pipeline: beyond them a fifth of its time at most is idle
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
        group = f" in {self.group}s" if self.group else ""
        group += (
            f" of {self.bucket_size_mb:g} MiB" if self.bucket_size_mb != BUCKET_SIZES_MB[0] else ""
        )
        recomputed = {"none": "", "block": " recomputed"}.get(self.recompute, f" {self.recompute}")
        shared = f" {self.layout}" if self.layout.ranks > 1 else ""
        return f"{self.strategy}{shared}{group} × {self.micro_batch}{recomputed}"


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
    schedules take only these, and others need that number to be busy. Strategies with buckets come with
    small and large ones. On a mesh, groups are one node and 2, 4, 8, … nodes that divide the ranks
    and are fewer.

    `ranks` and `devices_per_node` are those of equal parts of the matrices, `per_rank` the
    sequences of a model.
    """
    groups = [devices_per_node * 2**k for k in range(ranks.bit_length())]
    groups = [group for group in groups if group < ranks and ranks % group == 0]
    every_micro = divisors(per_rank)[::-1]
    for strategy in strategies:
        sizes = BUCKET_SIZES_MB if KNOWN[strategy].has_buckets else BUCKET_SIZES_MB[:1]
        ways = product(groups if KNOWN[strategy].takes_mesh else [None], recomputation, sizes)
        micros = every_micro
        if layout.pipeline > 1:
            counts = range(
                layout.pipeline, MOST_MICRO_BATCHES * layout.pipeline + 1, layout.pipeline
            )
            micros = [micro for micro in every_micro if per_rank // micro in counts]
        for (group, recompute, size), micro in product(ways, micros):
            yield Choice(strategy, micro, per_rank // micro, recompute, group, size, layout)


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
    """The step's time in closed form; `kernels` as for `estimate_step`."""
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
    return max(replay(step, machine).step_ms / 1e3, host_time(len(step.operators), len(step.calls)))
