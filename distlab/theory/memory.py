"""Memory of one rank through a training step, by category, and its peak and when that occurs.

With P parameters in fp32, AdamW's two states and N ranks, what stays allocated is (Rajbhandari et al. 2020, "ZeRO",
sec. 3; theirs keeps fp16 parameters and gradients beside an fp32 copy, see `zero_paper_bytes`)

    strategy                     parameters   gradients              optimizer state
    local, naive, overlap        4P           4P, as backward makes them        8P
    flat                         4P           4P as made, and a buffer of 4P*   8P
    bucketed, bucketed-dma       4P           4P in buckets, always there       8P
    torch-ddp                    4P           4P as made, and buckets of 4P     8P
    sharded-optimizer, torch-zero  as bucketed, torch-ddp                       8P/N, whole parameters
    zero1                        4P           4P in buckets, always there       8P/N
    fsdp, fsdp2                  4P/N         4P/N                              8P/N

* Under autocast linear layers write theirs into the buffer; only those of norms and embedding are made outside.

On top come what forward leaves for backward (`activations`), the low-precision copies that autocast makes of the
matrices (kept until each has been used in backward), gathered units, and temporaries. `step_memory` walks a settled
step (the states exist already) from its last forward operation to the optimizer, block by block, and looks for the
peak; what a strategy does is read off its file in `distlab/parallel`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from distlab.theory.activations import FP32, PRECISIONS, Activations, Precision, activations
from distlab.theory.shape import ModelShape

MIB = 2**20
# cuBLAS reserves 32 MiB per stream and thread on Hopper, from the same allocator: forward's thread and autograd's.
# Source: getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
CUBLAS_WORKSPACES = 2 * 32 * MIB
MESSAGE_BYTES = 25 * MIB  # of a broadcast that carries several parameters

REPLICATED = ("local", "naive", "overlap")
BUCKETED = ("bucketed", "bucketed-dma", "sharded-optimizer", "zero1")
TORCH_DDP = ("torch-ddp", "torch-ddp-tuned", "torch-zero")
SHARDED = ("fsdp", "fsdp2")
STRATEGIES = (*REPLICATED, "flat", *BUCKETED, *TORCH_DDP, *SHARDED)

# fp32 numbers per stepped parameter: kept, and needed during the step. Only the foreach form makes temporaries of
# whole size: the square root of the second moment, of all parameters at once.
OPTIMIZERS = {
    "adamw-fused": (2, 0),
    "adamw-foreach": (2, 1),
    "sgd": (0, 0),
    "sgd-momentum": (1, 0),
}


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one rank at one moment, by category.

    Args:
        parameters: masters; on a sharding strategy this rank's slices.
        gradients: held outside of buckets.
        optimizer_state: AdamW's two moments, say.
        buckets: flat buffers of gradients.
        gathered: full parameters that a sharding strategy gathered.
        weight_copies: low-precision copies that autocast made.
        activations: kept for backward.
        temporary: needed at this moment only, workspaces included.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    buckets: int = 0
    gathered: int = 0
    weight_copies: int = 0
    activations: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def states(self) -> int:
        """Parameters, gradients (in buckets or not) and optimizer state: what ZeRO divides."""
        return self.parameters + self.gradients + self.optimizer_state + self.buckets


@dataclass(frozen=True)
class StepMemory:
    """The moments of a settled training step on the fullest rank.

    Args:
        after_init: wrapped, no step taken yet.
        before_step: gradients are averaged, the optimizer has not stepped.
        after_step: the optimizer has stepped; gradients are dropped only by the next step.
        peak: the largest moment of all.
        peak_phase: when: `forward`, `loss`, `backward of loss`, `backward of head`, `backward of block 17`,
            `backward of embedding`, `gradient synchronization` or `optimizer step`.
        moments: all of them in order, (phase, breakdown).
    """

    after_init: Breakdown
    before_step: Breakdown
    after_step: Breakdown
    peak: Breakdown
    peak_phase: str
    moments: tuple[tuple[str, Breakdown], ...]


@dataclass(frozen=True)
class _Setting:
    """Everything that the walk below needs, as numbers."""

    shape: ModelShape
    kept: Activations
    precision: Precision
    strategy: str
    world_size: int
    groups: tuple[int, ...]
    bucket_bytes: float
    state_numbers: int
    step_numbers: int

    @property
    def share(self) -> int:
        """By how much a sharding strategy divides parameters and gradients."""
        return self.world_size if self.strategy in SHARDED else 1

    def sharded(self, numel: int) -> int:
        """Bytes of this rank's fp32 slice of `numel` elements."""
        return FP32 * -(-numel // self.share)


def step_memory(
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    strategy: str = "local",
    world_size: int = 1,
    precision: str | Precision = "bf16-autocast",
    attention: str = "sdpa",
    checkpointing: bool | tuple[int, ...] = False,
    bucket_size_mb: float | None = 25.0,
    optimizer: str = "adamw-fused",
    accumulates: bool = False,
    workspace_bytes: int = CUBLAS_WORKSPACES,
) -> StepMemory:
    """Predict the memory of a training step on one rank, in bytes of the allocator.

    Args:
        batch, context: sequences on this rank, and tokens in each.
        strategy: a registered name, or `fsdp2` for torch's `fully_shard` per block.
        precision: `fp32`, `bf16-autocast` (fp32 parameters), `bf16` (FSDP with that compute dtype), or bytes.
        attention: `naive`, `flash` or `sdpa`.
        checkpointing: whether every block is recomputed in backward; or the blocks per group that is recomputed
            together, outermost level first: `(4,)`, or `(8, 2)` for groups of two within groups of eight.
        bucket_size_mb: matters only for how much is in flight where buckets are sent.
        optimizer: `adamw-fused`, `adamw-foreach`, `sgd`, `sgd-momentum`.
        accumulates: several micro-batches without synchronisation; FSDP then keeps full gradients in fp32.
        workspace_bytes: what libraries take from the same allocator; 0 on a CPU.

    Raises:
        ValueError: an unknown name, or a size below one; the message lists what is allowed.
    """
    setting = _setting(
        shape,
        strategy,
        world_size,
        precision,
        optimizer,
        checkpointing,
        bucket_size_mb,
        batch,
        context,
        attention,
    )
    resident = _resident(setting)
    states = replace(resident, optimizer_state=_optimizer_state(setting))
    if accumulates and strategy in SHARDED:
        states = replace(states, buckets=FP32 * shape.num_parameters)
    moments = [
        (phase, replace(moment, temporary=moment.temporary + workspace_bytes))
        for phase, moment in _walk(setting, states)
    ]
    phase, peak = max(moments, key=lambda item: item[1].total)
    before = replace(states, gradients=_all_gradients(setting), temporary=workspace_bytes)
    return StepMemory(
        after_init=resident,
        before_step=before,
        after_step=before,
        peak=peak,
        peak_phase=phase,
        moments=tuple(moments),
    )


def devices_to_fit(total_bytes: float, device_bytes: float) -> int:
    """How many devices hold `total_bytes` if they divide it evenly.

    Raises:
        ValueError: a device without memory, or negative bytes.
    """
    if total_bytes < 0 or not device_bytes > 0:
        raise ValueError(f"total_bytes={total_bytes}, device_bytes={device_bytes}: give positive bytes")
    return max(1, -(-int(total_bytes) // int(device_bytes)))


def zero_paper_bytes(num_parameters: float, world_size: int, stage: int, *, state_bytes: int = 12) -> float:
    """Model states per rank in the accounting of the ZeRO paper: fp16 parameters and gradients, 2 bytes each, and
    K = 12 bytes of optimizer state (fp32 parameters and Adam's two moments) per parameter.

        stage 0: (2 + 2 + K)·P          stage 1: (2 + 2 + K/N)·P
        stage 2: (2 + (2 + K)/N)·P      stage 3: (2 + 2 + K)/N·P

    Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 GPUs need 120, 31.4, 16.6 and 1.9 GB.

    Raises:
        ValueError: a stage outside 0 to 3, fewer than one rank, or a negative size.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has stages 1, 2 and 3; 0 is no sharding")
    if world_size < 1 or num_parameters < 0:
        raise ValueError(f"num_parameters={num_parameters}, world_size={world_size}: must be positive")
    divided = [
        size if stage < since else size / world_size for size, since in ((2, 3), (2, 2), (state_bytes, 1))
    ]
    return sum(divided) * num_parameters


# -- the walk ------------------------------------------------------------------------------------------------


def _walk(setting: _Setting, states: Breakdown) -> Iterator[tuple[str, Breakdown]]:
    """(phase, bytes) of every moment that could be the fullest, without workspaces."""
    shape, kept = setting.shape, setting.kept
    layers = shape.num_layers
    blocks = -(-layers // setting.groups[0]) * kept.checkpoint if setting.groups else layers * kept.block
    forward = replace(states, activations=blocks + kept.last, weight_copies=_copies(setting))
    unit = _block_matrices(shape)
    yield (
        "forward",
        replace(
            forward,
            activations=_kept_below(setting, layers - 1)[0] + kept.block,
            gathered=_gathered(setting, 2 * unit),
            temporary=kept.block_temporary,
        ),
    )
    head = _gathered(setting, shape.embedding_parameters)
    buckets = states.buckets + _rebuilt(setting)
    temporary = kept.loss + kept.forward_loss_temporary
    yield "loss", replace(forward, buckets=buckets, temporary=temporary)
    held = 0 if setting.groups else _copies(setting)  # with checkpoints no graph keeps the copies
    forward = replace(forward, buckets=buckets, weight_copies=held)
    yield "backward of loss", replace(forward, temporary=kept.loss + kept.loss_temporary)
    temporary = kept.logits_gradient + _weight_gradient(setting, shape.embedding_parameters)
    yield "backward of head", replace(forward, gathered=head + _gathered(setting, unit), temporary=temporary)
    for block in reversed(range(layers)):
        yield f"backward of block {block}", _in_block(setting, states, block)
    yield (
        "backward of embedding",
        replace(
            states,
            gradients=_all_gradients(setting),
            gathered=head,
            temporary=kept.residual_gradient + _full_gradients(setting, shape.embedding_parameters),
        ),
    )
    yield "gradient synchronization", replace(states, gradients=_all_gradients(setting))
    yield (
        "optimizer step",
        replace(states, gradients=_all_gradients(setting), temporary=_step_temporary(setting)),
    )


def _in_block(setting: _Setting, states: Breakdown, block: int) -> Breakdown:
    """The fullest moment of one block's backward: in its feed-forward part, everything of the block still kept, or,
    on a sharding strategy, at its end, when a unit's gradients are packed for sending."""
    shape, kept = setting.shape, setting.kept
    unit = _block_matrices(shape)
    done = (shape.num_layers - 1 - block) * shape.block_parameters + shape.embedding_parameters
    below, recomputed = _kept_below(setting, block)
    casts = setting.precision.compute * unit if setting.precision.copies_weights else 0
    in_flight = FP32 * unit if setting.strategy in SHARDED else 0
    inside = replace(
        states,
        gradients=_grown(setting, done),
        gathered=_gathered(setting, 2 * unit),
        weight_copies=casts * (recomputed + 1),
        activations=below + kept.block,
        temporary=kept.block_temporary
        + kept.residual_gradient
        + _weight_gradient(setting, max(shape.matrices_per_block))
        + in_flight,
    )
    packing = replace(
        inside, activations=below, temporary=kept.residual_gradient + _full_gradients(setting, unit)
    )
    return max(inside, packing, key=lambda moment: moment.total)


def _kept_below(setting: _Setting, block: int) -> tuple[int, int]:
    """(bytes kept of the blocks before this one while it runs backward, how many of them are kept in full).

    With groups, of those before its own only the inputs are; within its own the same again, level by level.
    """
    inputs, rest = 0, block
    for size in setting.groups:
        inputs += rest // size
        rest %= size
    return inputs * setting.kept.checkpoint + rest * setting.kept.block, rest


def _setting(
    shape: ModelShape,
    strategy: str,
    world_size: int,
    precision: str | Precision,
    optimizer: str,
    checkpointing: bool | tuple[int, ...],
    bucket_size_mb: float | None,
    batch: int,
    context: int,
    attention: str,
) -> _Setting:
    for what, value, allowed in (
        ("strategy", strategy, STRATEGIES),
        ("optimizer", optimizer, OPTIMIZERS),
    ):
        if value not in allowed:
            raise ValueError(f"{what}={value!r}: choose one of {', '.join(allowed)}")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be at least 1")
    if isinstance(precision, str):
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
        precision = PRECISIONS[precision]
    kept = activations(shape, batch, context, precision, attention)
    limit = float("inf") if bucket_size_mb is None else bucket_size_mb * MIB
    groups = checkpointing if isinstance(checkpointing, tuple) else (1,) if checkpointing else ()
    if any(size < 1 for size in groups):
        raise ValueError(f"checkpointing={checkpointing}: groups of at least one block")
    return _Setting(shape, kept, precision, strategy, world_size, groups, limit, *OPTIMIZERS[optimizer])


# -- what a strategy holds -----------------------------------------------------------------------------------


def _resident(setting: _Setting) -> Breakdown:
    """Parameters and buffers that exist from construction on."""
    whole = FP32 * setting.shape.num_parameters
    buckets = 0 if setting.strategy in (*REPLICATED, *SHARDED) else whole
    return Breakdown(parameters=setting.sharded(setting.shape.num_parameters), buckets=buckets)


def _optimizer_state(setting: _Setting) -> int:
    """On the fullest rank: whole parameters are dealt out largest first, slices divide evenly."""
    parameters = setting.shape.num_parameters
    if setting.strategy in ("zero1", *SHARDED):
        owned = -(-parameters // setting.world_size)
    elif setting.strategy in ("sharded-optimizer", "torch-zero"):
        owned = max(dealt_out(setting.shape.parameter_numels(), setting.world_size))
    else:
        owned = parameters
    return FP32 * setting.state_numbers * owned


def dealt_out(numels: list[int], ranks: int) -> list[int]:
    """Elements per rank where whole parameters go, largest first, to the rank that owns least."""
    loads = [0] * ranks
    for numel in sorted(numels, reverse=True):
        loads[loads.index(min(loads))] += numel
    return loads


def _grown(setting: _Setting, done: int) -> int:
    """Gradients outside of buckets once backward has finished `done` parameters, head and blocks."""
    # Where `.grad` becomes a view of a bucket at once, nothing gathers outside.
    in_buckets = setting.strategy in (*BUCKETED, "torch-ddp-tuned", "torch-zero")
    return 0 if in_buckets or _in_place(setting) else setting.sharded(done)


def _all_gradients(setting: _Setting) -> int:
    """After backward; the flat buffer takes every gradient over one by one and lets it go."""
    if _in_place(setting):
        return 0 if setting.strategy in BUCKETED else FP32 * setting.shape.embedding_parameters
    return _grown(setting, setting.shape.num_parameters)


def _in_place(setting: _Setting) -> bool:
    """Whether linear layers write their weights' gradients where they are sent from (`model.ops.gradient_target`)."""
    return setting.precision.copies_weights and setting.strategy in ("flat", *BUCKETED)


def _copies(setting: _Setting) -> int:
    """Autocast's copies of all matrices but the embedding, which is looked up and not multiplied."""
    if not setting.precision.copies_weights:
        return 0
    matrices = setting.shape.num_layers * _block_matrices(setting.shape) + setting.shape.embedding_parameters
    return setting.precision.compute * matrices


def _gathered(setting: _Setting, numel: int) -> int:
    """Full parameters of a gathered unit, in the type in which they are sent."""
    if setting.strategy not in SHARDED:
        return 0
    return (FP32 if setting.precision.copies_weights else setting.precision.compute) * numel


def _full_gradients(setting: _Setting, numel: int) -> int:
    """FSDP: a unit's full gradients, and the flat fp32 buffer of the unit before, which is being sent."""
    if setting.strategy not in SHARDED:
        return 0
    return (FP32 if setting.precision.copies_weights else setting.precision.compute) * numel + FP32 * numel


def _weight_gradient(setting: _Setting, numel: int) -> int:
    """One matrix's gradient as the product leaves it, before it is accumulated, packed or cast."""
    if _in_place(setting):
        return 0
    if setting.strategy in SHARDED and not setting.precision.copies_weights:
        return setting.precision.compute * numel
    return FP32 * numel


def _rebuilt(setting: _Setting) -> int:
    """torch DDP rebuilds its buckets in the order in which gradients came. In that step (the second, with a static
    graph the third) the first set lives until backward begins: seen in recorded peaks, torch 2.11."""
    return FP32 * setting.shape.num_parameters if setting.strategy in TORCH_DDP else 0


def _step_temporary(setting: _Setting) -> int:
    """What the optimizer needs besides its state, and the messages in which owners send parameters."""
    stepped = _optimizer_state(setting) // max(1, setting.state_numbers)
    if setting.state_numbers == 0:
        stepped = setting.sharded(setting.shape.num_parameters)
    sent = FP32 * setting.shape.num_parameters if setting.strategy == "sharded-optimizer" else 0
    return max(setting.step_numbers * stepped, sent)


def _block_matrices(shape: ModelShape) -> int:
    return sum(shape.matrices_per_block)
