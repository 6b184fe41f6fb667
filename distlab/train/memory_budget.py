"""Check on every rank that GPUs and memory suffice for a run, before anything is built.

Without this, a model that cannot fit is built for minutes. On a CPU, where the kernel promises
memory that it does not have, the machine then kills an arbitrary process. Memory is the closed form
of `distlab.theory.memory`, and a share of it counts as certainly needed: a run that might fit is
tried.
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
from distlab.measure.memory import free_bytes
from distlab.model.config import (
    KEPT,
    LOGITS_AT_ONCE,
    LOGITS_CHUNK,
    Checkpointing,
    ModelConfig,
    checkpoint_plan,
)
from distlab.parallel import STRATEGIES, Layout
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.schedules import CHUNKS, SCHEDULES, held
from distlab.theory.memory.activations import Sharing
from distlab.theory.memory.peak import CUBLAS_WORKSPACES, StepMemory, step_memory
from distlab.theory.model_shape import ModelShape
from distlab.train.config import TrainConfig

GIB = 2**30
# of a predicted peak; predictions of eager steps were within 2 % of it
# (docs/learn/theory/simulation.md)
CERTAIN = 0.9
# of the free memory, that `auto` plans to use: communication buffers and fragmentation take some of
# it
ROOM = 0.92
# of a whole model a compiler may keep less than of its blocks: no logits in fp32, say
CERTAIN_COMPILED = 0.5


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
        shard_size: number of ranks in a shard group, for strategies on a mesh. None: not known, at
            most all.
        layout: sizes of the groups of ranks that share a model.
        optimizer: `adamw` or `muon`.
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

    def memory(self, world_size: int, *, on_gpu: bool = True) -> StepMemory:
        """Return the memory of a full step on the rank that needs most, in closed form.

        On a GPU, libraries take memory of their own.
        """
        choice = "block" if self.checkpointing == "auto" else self.checkpointing
        parts = rank_parts(self.model, self.layout, choice, self.micro_batches)
        return max(
            (self.of_rank(part, world_size, on_gpu) for part in parts),
            key=lambda memory: memory.peak.total,
        )

    def of_rank(self, part: "RankPart", world_size: int, on_gpu: bool = True) -> StepMemory:
        """Return the same of a rank that has this part."""
        strategy = STRATEGIES[self.strategy]
        precision = (
            "fp32"
            if self.dtype == "fp32"
            else "bf16"
            if strategy.casts_parameters
            else "bf16-autocast"
        )
        layout = self.layout
        ranks = layout.tensor * layout.pipeline  # that have different parameters
        # ranks that share the words have all their logits
        in_chunks = self.model.loss_in_head and layout.tensor == 1
        return step_memory(
            part.shape,
            batch=self.batch,
            context=-(-self.model.context_length // layout.context),
            strategy=strategy,
            world_size=(strategy.takes_mesh and self.shard_size) or max(1, world_size // ranks),
            precision=precision,
            attention=self.model.attention,
            checkpointing=part.keeps,
            loss_chunk=LOGITS_CHUNK if in_chunks else None,
            optimizer="muon" if self.optimizer == "muon" else "adamw-fused",
            accumulates=part.accumulates,
            workspace_bytes=CUBLAS_WORKSPACES if on_gpu else 0,
            fused=self.compiled or (on_gpu and self.model.ops != "torch"),
            compiled=self.compiled,
            sharing=Sharing(layout.context, layout.attention),
            micro_batches_held=part.held,
        )

    def least_bytes(self, world_size: int, *, on_gpu: bool) -> int:
        """Bytes that a rank certainly needs."""
        memory = self.memory(world_size, on_gpu=on_gpu)
        if self.mode == "inference":
            held = memory.after_init.parameters + max(
                moment.temporary for _, moment in memory.moments
            )
        else:
            held = memory.peak.total - (
                0 if self.mode == "step" else memory.after_step.optimizer_state
            )
        return int(held * (CERTAIN_COMPILED if self.compiled else CERTAIN))

    def __str__(self) -> str:
        batch, context = self.batch * self.batch_option, self.model.context_length
        size = f"{self.model.num_parameters / 1e6:,.1f} M parameters"
        return f"{size} with batch {batch:,} × context {context:,} in {self.dtype} under {self.strategy}"


class RankPart(NamedTuple):
    """A rank's part of a model and its work in a step. The ranks of a stage have equal parts.

    Args:
        shape: shape of its blocks.
        keeps: memory that these keep for backward, in the form of `distlab.theory.memory`.
        held: number of micro-batches, the most whose activations of a stage are held at once.
        accumulates: True if gradients of earlier micro-batches exist when that number is held.
    """

    shape: ModelShape
    keeps: int | tuple[str, ...]
    held: int
    accumulates: bool


def stages_of(layout: Layout) -> int:
    """Stages of all ranks of a pipeline."""
    return layout.pipeline * CHUNKS.get(layout.schedule, 1) if layout.pipeline > 1 else 1


@cache
def _most_held(schedule: str, ranks: int, micro_batches: int) -> list[int]:
    return [held(actions) for actions in SCHEDULES[schedule](ranks, micro_batches)]


def rank_parts(
    model: ModelConfig, layout: Layout, checkpointing: Checkpointing = False, micro_batches: int = 1
) -> list[RankPart]:
    """Return a part for each rank of a pipeline, in order; without one, that of every rank.

    Raises:
        ValueError: a number of micro-batches that the schedule does not take.
    """
    ranks, stages = layout.pipeline, stages_of(layout)
    sizes = layout.stages or [model.num_layers // stages] * stages
    shapes = ModelShape.of(model, layout.tensor).of_pipeline(ranks, sizes)
    plan = checkpoint_plan(checkpointing, model.num_layers)
    keeps = [plan] * ranks
    if isinstance(plan, tuple):
        ends = list(itertools.accumulate(sizes))
        of_stages = [plan[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        keeps = [sum(of_stages[rank::ranks], ()) for rank in range(ranks)]
    # A lone rank takes one micro-batch after the other, and there may be 10^12 of them.
    most = (
        [1]
        if ranks == 1 and layout.schedule == "1f1b"
        else _most_held(layout.schedule, ranks, micro_batches)
    )
    forwards = micro_batches * stages // ranks
    return [RankPart(*part, part[-1] < forwards) for part in zip(shapes, keeps, most, strict=True)]


def training_step(config: TrainConfig, world_size: int) -> PlannedStep:
    """Plan a step of the trainer, whose `batch` counts sequences of all ranks and micro-batches."""
    layout = Layout.parse(config.layout)
    parts = max(1, world_size // layout.ranks) * config.accumulate
    return PlannedStep(
        config.model(),
        -(-config.batch // parts),
        config.strategy,
        config.dtype,
        checkpointing=config.checkpointing,
        micro_batches=config.accumulate,
        compiled=config.compile != "off",
        batch_option=parts,
        shard_size=config.shard_size,
        layout=layout,
        optimizer=config.optimizer,
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
        some: True if it is enough that one of them fits, because a row that does not fit says so
            and the others continue. That is so on a GPU. On a CPU the machine kills a process,
            unless such a row is left out.

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
    short = [shortage(plan, device, context) for plan in planned]
    missing = [text for text in short if text is not None]
    if missing and (len(missing) == len(short) or not some):
        raise MemoryError(missing[0])


def shortage(
    plan: PlannedStep, device: torch.device | str, context: RankContext | None = None
) -> str | None:
    """Return why a step cannot fit here, and what would. None if it may, on every rank alike."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    ranks = 1 if context is None else context.world_size
    allowed = memory_of_a_rank(device, context)
    if allowed is None:
        return None

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
    mine = (
        f"{socket.gethostname()} {device if device.type == 'cuda' else 'cpu'}",
        free_bytes(device),
    )
    everyone = [mine] if context is None else collectives.gather_objects(mine, context.group)
    shares = {}  # what each rank of a place may take of what is free there
    for place, free in everyone:
        if free is not None:
            shares.setdefault(place, []).append(free)
    return min((min(frees) // len(frees) for frees in shares.values()), default=None)


def settled(plan: PlannedStep, context: RankContext) -> str:
    """Return a plan's `checkpointing`, the same on all ranks.

    `auto` becomes the choice that recomputes least in free memory.

    Results that cost most to recompute per byte are kept first, see `distlab.model.recompute`. The
    last blocks keep most, because backward frees them first.
    """
    if plan.checkpointing != "auto":
        return plan.checkpointing
    free, on_gpu = memory_of_a_rank(context.device, context), context.device.type == "cuda"
    return least_recomputation(
        plan, context.world_size, None if free is None else int(ROOM * free), on_gpu=on_gpu
    )


def least_recomputation(plan: PlannedStep, ranks: int, allowed: int | None, *, on_gpu: bool) -> str:
    """Return the `checkpointing` that recomputes least in `allowed` bytes of a rank (None: any).

    It is `block` if nothing fits.
    """
    layers = plan.model.num_layers

    def mixed(low: str, high: str, count: int) -> str:
        parts = [
            f"{level}:{blocks}"
            for level, blocks in ((low, layers - count), (high, count))
            if blocks
        ]
        return ",".join(parts) if len(parts) > 1 else parts[0].partition(":")[0]

    def fits(choice: str) -> bool:
        return (
            allowed is None
            or replace(plan, checkpointing=choice).memory(ranks, on_gpu=on_gpu).peak.total
            <= allowed
        )

    if fits(KEPT[-1]):
        return KEPT[-1]
    found = KEPT[0]
    for low, high in itertools.pairwise(KEPT):
        count = bisect(
            range(1, layers + 1), False, key=lambda blocks: not fits(mixed(low, high, blocks))
        )
        found = mixed(low, high, count) if count else found
        if count < layers:
            break
    return found


def _what_fits(plan: PlannedStep, fits: Callable[..., bool]) -> str:
    """Return the option that helps, and the value that it must have."""
    model = plan.model
    if plan.checkpointing not in ("auto", "block") and fits(replace(plan, checkpointing="block")):
        return "--checkpointing auto would fit"
    # Sizes from 1 on, those that fit before those that do not: bisection counts the former.
    batch = bisect(
        range(1, plan.batch), False, key=lambda size: not fits(replace(plan, batch=size))
    )

    def longest(lengths: range) -> int:
        count = bisect(
            lengths,
            False,
            key=lambda n: not fits(replace(plan, model=replace(model, context_length=n))),
        )
        return lengths[count - 1] if count else 0

    # Above a length the loss is computed in chunks, which needs less.
    short = min(LOGITS_AT_ONCE // (4 * model.vocab_size) + 1, model.context_length)
    length = longest(range(short, model.context_length)) or longest(range(1, short))
    options = {
        "--batch": batch * plan.batch_option,
        "--context": length if length < 128 else length // 64 * 64,
    }
    if batch or length:
        return (
            f"{' or '.join(f'{name} {size}' for name, size in options.items() if size)} would fit"
        )
    if fits(replace(plan, batch=1, model=replace(model, context_length=1))):
        return "A smaller --batch and a smaller --context together would fit"
    sharded = replace(plan, strategy="fsdp", checkpointing="block")
    shortest = replace(sharded, batch=1, model=replace(model, context_length=1))
    for step, also in ((sharded, ""), (shortest, " and a smaller --context")):
        enough = next((ranks for ranks in (2**k for k in range(1, 11)) if fits(step, ranks)), None)
        if enough:
            more = f", or --strategy fsdp --checkpointing block on {enough} ranks with as much each{also}"
            break
    else:
        more = ""
    return (
        f"The parameters and what is kept of each are too much alone: take a smaller --size{more}"
    )
