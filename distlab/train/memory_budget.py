"""Check on every rank that GPUs and memory suffice for a run, before anything is built.

Without this, a model that cannot fit is built for minutes. On a CPU, where the kernel promises
memory that it does not have, the machine then kills an arbitrary process. The memory that a step
needs is the closed form of `distlab.theory.memory`. A share of it counts as certainly needed, so a
run that might fit is tried.
"""

import itertools
import socket
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import hybrid_mesh
from distlab.measure.memory import free_bytes
from distlab.model.config import (
    KEPT,
    LOGITS_AT_ONCE,
    LOGITS_CHUNK,
    Checkpointing,
    ModelConfig,
    checkpoint_segments,
    kept_levels,
)
from distlab.parallel import STRATEGIES, Layout
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.schedules import CHUNKS, SCHEDULES, held
from distlab.theory.memory.activations import Sharing, precision_of
from distlab.theory.memory.peak import CUBLAS_WORKSPACES, StepMemory, step_memory
from distlab.theory.memory.recompute import Segments
from distlab.theory.model_shape import ModelShape
from distlab.theory.step_time import DEVICES_PER_NODE, sharding_group
from distlab.train.config import TrainConfig

GIB = 2**30
# Share of a predicted peak that is certainly needed. Predictions of eager steps were within 2 % of
# the peak (docs/learn/theory/simulation.md).
CERTAIN = 0.9
# The same for a compiled model. A compiler may keep less, for example no logits in fp32.
CERTAIN_COMPILED = 0.5
# Share of the free memory that `auto` plans to use. Communication buffers and fragmentation take
# some of the rest.
ROOM = 0.92


@dataclass(frozen=True)
class PlannedStep:
    """One kind of step, with all that its memory depends on.

    Args:
        model: shape and operations of the model.
        batch: number of sequences at once on one rank, or on all ranks that share a model.
        strategy: name in the registry.
        dtype: `fp32`, or `bf16`/`fp16` computation over fp32 parameters.
        checkpointing: value of the option. `auto` counts as the choice that needs the least memory.
        micro_batches: number of micro-batches of a step, of `batch` sequences each.
        compiled: True if the model or its blocks are compiled.
        mode: `step`, or a part of one: `forward_backward`, `forward`, `inference`.
        batch_option: value of `--batch` that means one sequence at once on each rank.
        shard_size: number of ranks in a shard group, for strategies on a mesh. None: those of a
            host of 8, see `with_shard_size`.
        layout: sizes of the groups of ranks that share a model.
        optimizer: `adamw` or `muon`.
        bucket_size_mb: MiB of a bucket. It matters only where buckets are freed.
    """

    model: ModelConfig
    batch: int
    strategy: str = "local"
    dtype: str = "fp32"
    checkpointing: str = "none"
    micro_batches: int = 1
    compiled: bool = False
    mode: str = "step"
    batch_option: int = 1
    shard_size: int | None = None
    layout: Layout = DATA_PARALLEL
    optimizer: str = "adamw"
    bucket_size_mb: float | None = 25.0

    def memory(self, world_size: int, *, on_gpu: bool = True) -> StepMemory:
        """Return the memory of a full step on the rank that needs most, in closed form.

        On a GPU, libraries take memory of their own.
        """
        choice = "block" if self.checkpointing == "auto" else self.checkpointing
        parts = rank_parts(self.model, self.layout, choice, self.micro_batches)
        memories = [self.of_rank(part, world_size, on_gpu) for part in parts]
        # The stages of a pipeline have different parts. The fullest one decides.
        return max(memories, key=lambda memory: memory.peak.total)

    def of_rank(self, part: "RankPart", world_size: int, on_gpu: bool = True) -> StepMemory:
        """Return the memory of a full step on a rank that has this part of the model."""
        strategy = STRATEGIES[self.strategy]
        layout = self.layout
        # Ranks that share a model by tp and pp have different parameters, so they do not shard them
        # with each other.
        ranks_per_replica = layout.tensor * layout.pipeline
        shard_ranks = max(1, world_size // ranks_per_replica)
        if strategy.takes_mesh:
            host = sharding_group(strategy, shard_ranks, DEVICES_PER_NODE)
            shard_ranks = self.shard_size or host
        # Ranks that share the vocabulary have all logits of their words at once.
        in_chunks = self.model.loss_in_head and layout.tensor == 1
        return step_memory(
            part.shape,
            batch=self.batch,
            # Ranks that share a sequence hold a part of its tokens each.
            context=-(-self.model.context_length // layout.context),
            strategy=strategy,
            world_size=shard_ranks,
            precision=precision_of(self.dtype, casts_parameters=strategy.casts_parameters),
            attention=self.model.attention,
            checkpointing=part.keeps,
            loss_chunk=LOGITS_CHUNK if in_chunks else None,
            optimizer="muon" if self.optimizer == "muon" else "adamw-fused",
            accumulates=part.accumulates,
            # A CPU's libraries take theirs from the system's allocator.
            workspace_bytes=CUBLAS_WORKSPACES if on_gpu else 0,
            # On a CPU this lab's operations compute in plain torch, which keeps as much as unfused
            # blocks.
            fused=self.compiled or (on_gpu and self.model.ops != "torch"),
            compiled=self.compiled,
            sharing=Sharing(layout.context, layout.attention),
            micro_batches_held=part.held,
            bucket_size_mb=self.bucket_size_mb,
        )

    def least_bytes(self, world_size: int, *, on_gpu: bool) -> int:
        """Return the bytes that a rank certainly needs."""
        memory = self.memory(world_size, on_gpu=on_gpu)
        if self.mode == "inference":
            temporary = max(moment.temporary for _, moment in memory.moments)
            needed = memory.after_init.parameters + temporary
        elif self.mode == "step":
            needed = memory.peak.total
        else:
            # Without an optimizer's step its state is never made.
            needed = memory.peak.total - memory.after_step.optimizer_state
        share = CERTAIN_COMPILED if self.compiled else CERTAIN
        return int(needed * share)

    def __str__(self) -> str:
        batch = self.batch * self.batch_option
        context = self.model.context_length
        return (
            f"{self.model.num_parameters / 1e6:,.1f} M parameters with batch {batch:,} × context "
            f"{context:,} in {self.dtype} under {self.strategy}"
        )


class RankPart(NamedTuple):
    """A rank's part of a model and its work in a step. The ranks of a stage have equal parts.

    Args:
        shape: shape of its blocks.
        keeps: memory that these keep for backward, in the form of `distlab.theory.memory`.
        held: largest number of micro-batches whose activations of a stage are held at once.
        accumulates: True if gradients of earlier micro-batches exist when that number is held.
    """

    shape: ModelShape
    keeps: int | Segments | tuple[str, ...]
    held: int
    accumulates: bool


def stages_of(layout: Layout) -> int:
    """Return the number of stages of all ranks of a pipeline."""
    if layout.pipeline == 1:
        return 1
    return layout.pipeline * CHUNKS.get(layout.schedule, 1)


@cache
def _max_held(schedule: str, ranks: int, micro_batches: int) -> list[int]:
    """Return for each rank the largest number of micro-batches whose activations it holds."""
    return [held(actions) for actions in SCHEDULES[schedule](ranks, micro_batches)]


def rank_parts(
    model: ModelConfig, layout: Layout, checkpointing: Checkpointing = False, micro_batches: int = 1
) -> list[RankPart]:
    """Return a part for each rank of a pipeline, in order. Without a pipeline there is one part.

    Raises:
        ValueError: a number of micro-batches that the schedule does not take.
    """
    ranks = layout.pipeline
    stages = stages_of(layout)
    sizes = layout.stages or [model.num_layers // stages] * stages  # blocks of each stage
    shapes = ModelShape.of(model, layout.tensor).of_pipeline(ranks, sizes)
    keeps = _kept_by_rank(checkpoint_plan(checkpointing, model.num_layers), sizes, ranks)
    if ranks == 1 and layout.schedule == "1f1b":
        # One micro-batch after the other. There may be 10^12 of them, too many for a schedule.
        held_by_rank = [1]
    else:
        held_by_rank = _max_held(layout.schedule, ranks, micro_batches)
    # A rank runs each micro-batch through each of its stages.
    forwards = micro_batches * stages // ranks
    parts = []
    for rank in range(ranks):
        # If fewer are held than there are forwards, a backward has run before the peak.
        accumulates = held_by_rank[rank] < forwards
        parts.append(RankPart(shapes[rank], keeps[rank], held_by_rank[rank], accumulates))
    return parts


def checkpoint_plan(choice: Checkpointing, num_layers: int) -> Segments | tuple[str, ...]:
    """Return the plan for `theory.memory`: segments of blocks, or each block's entry."""
    segments = checkpoint_segments(choice)
    if segments in ((), (1,)):
        return kept_levels(choice, num_layers)
    return Segments(segments)


def _kept_by_rank(
    plan: int | Segments | tuple[str, ...], sizes: Sequence[int], ranks: int
) -> list[int | Segments | tuple[str, ...]]:
    """Return the part of a checkpointing plan for each rank of a pipeline.

    Args:
        plan: result of `checkpoint_plan`. A number holds for all blocks.
        sizes: number of blocks of each stage. Rank r has the stages r, r + ranks, ….
        ranks: number of ranks of the pipeline.
    """
    if not isinstance(plan, tuple):
        return [plan] * ranks
    by_rank: list[tuple[str, ...]] = [()] * ranks
    begin = 0
    for stage, size in enumerate(sizes):
        by_rank[stage % ranks] += plan[begin : begin + size]
        begin += size
    return by_rank


def training_step(config: TrainConfig, world_size: int) -> PlannedStep:
    """Plan a step of the trainer, whose `batch` counts sequences of all ranks and micro-batches."""
    layout = Layout.parse(config.layout)
    parts = max(1, world_size // layout.ranks) * config.accumulate
    batch = -(-config.batch // parts)  # rounded up
    return PlannedStep(
        config.model(),
        batch,
        config.strategy,
        config.dtype,
        checkpointing=config.checkpointing,
        micro_batches=config.accumulate,
        compiled=config.compile != "off",
        batch_option=parts,
        shard_size=config.shard_size,
        layout=layout,
        optimizer=config.optimizer,
        bucket_size_mb=config.bucket_size_mb,
    )


def require(
    planned: Sequence[PlannedStep],
    device: torch.device | str,
    context: RankContext | None = None,
    *,
    some: bool = False,
) -> None:
    """Refuse, on every rank, a run that this machine cannot run. Collective if there is a context.

    Args:
        planned: all kinds of steps that the run takes, one after the other.
        device: device of this rank.
        context: context of this rank. None for a single process.
        some: True if it is enough that one of them fits. On a GPU, a row that does not fit says so
            and the others continue. On a CPU the machine would kill a process.

    Raises:
        ValueError: a strategy that needs a GPU, without one.
        MemoryError: it does not fit. The message says by how much, and which option helps.
    """
    device = torch.device(device)
    for name in dict.fromkeys(plan.strategy for plan in planned):
        if STRATEGIES[name].needs_gpu and device.type != "cuda":
            raise ValueError(
                f"strategy {name!r} needs GPUs, and this run computes on a CPU: choose others"
            )
    shortages = []
    for plan in planned:
        text = shortage(plan, device, context)
        if text is not None:
            shortages.append(text)
    if shortages and (len(shortages) == len(planned) or not some):
        raise MemoryError(shortages[0])


def with_shard_size(plan: PlannedStep, context: RankContext | None) -> PlannedStep:
    """Return the plan with the size of its shard groups on these ranks.

    Collective for a strategy on a mesh, if there is a context. Without one, the plan stays as it
    is.

    Raises:
        ValueError: hosts with different numbers of ranks, as when the strategy is built.
    """
    is_known = plan.shard_size is not None or not STRATEGIES[plan.strategy].takes_mesh
    if context is None or is_known:
        return plan
    # The same mesh as the run's, which also has the run's groups.
    return replace(plan, shard_size=hybrid_mesh(context.group).size(1))


def shortage(
    plan: PlannedStep, device: torch.device | str, context: RankContext | None = None
) -> str | None:
    """Return why a step cannot fit here, and what would fit. None if it may fit.

    The result is the same on every rank.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    ranks = 1 if context is None else context.world_size
    allowed = memory_of_a_rank(device, context)
    if allowed is None:
        return None
    plan = with_shard_size(plan, context)

    def fits(changed: PlannedStep, ranks: int = ranks) -> bool:
        return changed.least_bytes(ranks, on_gpu=on_gpu) <= allowed

    if fits(plan):
        return None
    needed = plan.least_bytes(ranks, on_gpu=on_gpu)
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"{plan} does not fit in the memory of {device}: at least {needed / GIB:,.1f} GiB are "
        f"needed{each} and {allowed / GIB:,.1f} are free, {(needed - allowed) / GIB:,.1f} too few. "
        f"{_what_fits(plan, fits)}"
    )


def memory_of_a_rank(device: torch.device, context: RankContext | None) -> int | None:
    """Return the free bytes that every rank may take on its device. None if they are not known.

    Collective.
    """
    # Ranks of one host share its memory, and may also share a GPU.
    place = f"{socket.gethostname()} {device if device.type == 'cuda' else 'cpu'}"
    mine = (place, free_bytes(device))
    gathered = [mine] if context is None else collectives.gather_objects(mine, context.group)
    free_by_place: dict[str, list[int]] = {}
    for each_place, free in gathered:
        if free is not None:
            free_by_place.setdefault(each_place, []).append(free)
    # Ranks of one place look at slightly different moments, and the smallest number counts.
    shares = [min(frees) // len(frees) for frees in free_by_place.values()]
    # The fullest device decides for all, because all ranks run the same step.
    return min(shares, default=None)


def settled(plan: PlannedStep, context: RankContext) -> str:
    """Return a plan's `checkpointing`, with `auto` replaced by the choice that recomputes least.

    The result is the same on all ranks. Results that cost most to recompute per byte are kept
    first, see `distlab.model.recompute`. The last blocks keep most, because backward frees them
    first.
    """
    if plan.checkpointing != "auto":
        return plan.checkpointing
    plan = with_shard_size(plan, context)
    free = memory_of_a_rank(context.device, context)
    allowed = None if free is None else int(ROOM * free)
    on_gpu = context.device.type == "cuda"
    return least_recomputation(plan, context.world_size, allowed, on_gpu=on_gpu)


def least_recomputation(plan: PlannedStep, ranks: int, allowed: int | None, *, on_gpu: bool) -> str:
    """Return the `checkpointing` that recomputes least in `allowed` bytes of a rank.

    It is `block` if nothing fits.

    Args:
        plan: step that is planned.
        ranks: number of ranks.
        allowed: bytes that a rank may take. None for any number.
        on_gpu: True if the ranks compute on GPUs.
    """
    layers = plan.model.num_layers

    def mixed(low: str, high: str, count: int) -> str:
        """Return the option with which the last `count` blocks keep `high`, the others `low`."""
        if count == 0:
            return low
        if count == layers:
            return high
        return f"{low}:{layers - count},{high}:{count}"

    def fits(choice: str) -> bool:
        if allowed is None:
            return True
        memory = replace(plan, checkpointing=choice).memory(ranks, on_gpu=on_gpu)
        return memory.peak.total <= allowed

    if fits(KEPT[-1]):
        return KEPT[-1]
    found = KEPT[0]
    for low, high in itertools.pairwise(KEPT):
        # The number of blocks that can keep `high`. More blocks need more memory, so the numbers
        # that fit come first, and bisection counts them.
        count = bisect(
            range(1, layers + 1), False, key=lambda blocks: not fits(mixed(low, high, blocks))
        )
        if count:
            found = mixed(low, high, count)
        # Not all blocks can keep `high`, so none can keep more.
        if count < layers:
            break
    return found


def _what_fits(plan: PlannedStep, fits: Callable[..., bool]) -> str:
    """Return a sentence about the option that helps, and the value that it must have.

    Args:
        plan: step that does not fit.
        fits: function `fits(step, ranks)` that says whether a step fits. Default of `ranks`: those
            of this run.
    """
    model = plan.model
    if plan.checkpointing not in ("auto", "block") and fits(replace(plan, checkpointing="block")):
        return "--checkpointing auto would fit"

    # Sizes that fit come before those that do not. Bisection counts the former.
    batch = bisect(
        range(1, plan.batch), False, key=lambda size: not fits(replace(plan, batch=size))
    )

    def with_context(step: PlannedStep, length: int) -> PlannedStep:
        return replace(step, model=replace(model, context_length=length))

    def longest(lengths: range) -> int:
        """Return the largest length that fits, or 0."""
        count = bisect(lengths, False, key=lambda length: not fits(with_context(plan, length)))
        return lengths[count - 1] if count else 0

    # Above a length the loss is computed in chunks, which needs less memory. So lengths that fit
    # come first on each side of it.
    chunked = min(LOGITS_AT_ONCE // (4 * model.vocab_size) + 1, model.context_length)
    length = longest(range(chunked, model.context_length)) or longest(range(1, chunked))
    if length >= 128:
        length = length // 64 * 64  # a rounder number
    remedies = []
    if batch:
        remedies.append(f"--batch {batch * plan.batch_option}")
    if length:
        remedies.append(f"--context {length}")
    if remedies:
        return f"{' or '.join(remedies)} would fit"

    if fits(with_context(replace(plan, batch=1), 1)):
        return "A smaller --batch and a smaller --context together would fit"

    # No size of this model fits here. What follows looks for more ranks.
    sharded = replace(plan, strategy="fsdp", checkpointing="block")
    shortest = with_context(replace(sharded, batch=1), 1)
    more = ""
    for step, also in ((sharded, ""), (shortest, " and a smaller --context")):
        ranks = _fewest_ranks(step, fits)
        if ranks is not None:
            more = (
                f", or --strategy fsdp --checkpointing block on {ranks} ranks with as much "
                f"each{also}"
            )
            break
    return (
        f"The parameters and what is kept of each are too much alone: take a smaller --size{more}"
    )


def _fewest_ranks(step: PlannedStep, fits: Callable[..., bool]) -> int | None:
    """Return the smallest power of two of ranks, from 2 to 1024, on which a step fits."""
    for exponent in range(1, 11):
        if fits(step, 2**exponent):
            return 2**exponent
    return None
