"""Memory of one rank through a training step, by category, and its peak and when that occurs.

With P parameters in fp32, AdamW's two states and N ranks, what stays allocated is (Rajbhandari et
al. 2020, "ZeRO", sec. 3; theirs keeps fp16 parameters and gradients in addition to an fp32 copy,
see `zero_paper_bytes`)

    sends and updates           parameters  gradients                        optimizer state
    nothing, gradients          4P          4P, as backward makes them       8P
    all at once                 4P          4P as made, and a buffer of 4P*  8P
    buckets                     4P          4P in buckets, always there      8P
    buckets, torch's defaults   4P          4P as made, and buckets of 4P    8P
    buckets, owned parameters   4P          as buckets                       8P/N, whole parameters
    buckets, slices (ZeRO-1)    4P          4P in buckets, always there      8P/N
    the same, freed (ZeRO-2)    4P          4P/N, and two buckets            8P/N
    units (FSDP)                4P/N        4P/N                             8P/N**

* Under autocast linear layers write theirs into the buffer; only those of norms and embedding are
  made outside.
** FSDP cuts between rows and pads (`volume.sharded_buffers`), and keeps norms whole on every rank.

In addition there are the results of forward that backward needs (`activations`), the low-precision
copies that autocast makes of the matrices (kept until each has been used in backward), gathered
units, and temporaries. `step_memory` follows a step in the steady state (the states exist already)
from its last forward operation to the optimizer, block by block, and looks for the peak. The rules
of a strategy are those of its file in `distlab/parallel`. A rank of a pipeline follows one stage,
in addition to the other micro-batches that it holds. Each of them has its activations and its own
copies of the matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distlab.theory.checks import at_least_one, one_of
from distlab.theory.forms import Form
from distlab.theory.memory import states as held
from distlab.theory.memory.activations import (
    ALONE,
    FP32,
    PRECISIONS,
    Precision,
    Sharing,
    activations,
)
from distlab.theory.memory.recompute import Segments
from distlab.theory.memory.states import (
    CUBLAS_WORKSPACES,
    OPTIMIZERS,
    Breakdown,
)
from distlab.theory.model_shape import ModelShape

# With at least twice this number of blocks, the walk looks only at some of the blocks.
BLOCKS_SEEN = 128


@dataclass(frozen=True)
class StepMemory:
    """Moments of a training step in the steady state, on the fullest rank.

    Args:
        after_init: bytes after wrapping, before the first step.
        before_step: bytes when gradients are averaged and the optimizer has not stepped.
        after_step: bytes when the optimizer has stepped. The next step drops the gradients.
        peak: bytes of the largest moment of all.
        peak_phase: name of that moment: `forward`, `loss`, `backward of loss`, `backward of head`,
            `backward of block 17`, `backward of embedding`, `gradient synchronization` or
            `optimizer step`.
        moments: (phase, breakdown) of each moment, in order.
    """

    after_init: Breakdown
    before_step: Breakdown
    after_step: Breakdown
    peak: Breakdown
    peak_phase: str
    moments: tuple[tuple[str, Breakdown], ...]


def step_memory(
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    strategy: Form,
    world_size: int = 1,
    precision: str | Precision = "bf16-autocast",
    attention: str = "sdpa",
    checkpointing: int | Segments | tuple[str, ...] = 0,
    loss_chunk: int | None = None,
    optimizer: str = "adamw-fused",
    accumulates: bool = False,
    workspace_bytes: int = CUBLAS_WORKSPACES,
    fused: bool = False,
    compiled: bool = False,
    sharing: Sharing = ALONE,
    micro_batches_held: int = 1,
    bucket_size_mb: float | None = 25.0,
) -> StepMemory:
    """Predict the memory of a training step on one rank, in bytes of the allocator.

    Args:
        shape: shape of this rank's part of the model.
        batch, context: number of sequences on this rank, and of tokens in each. Of shared
            sequences, the tokens of this rank.
        strategy: entry of the strategy. torch's `fully_shard` is applied to each block.
        world_size: number of ranks that the strategy divides by, data × context, under hybrid
            sharding those of a shard group.
        precision: `fp32`, `bf16-autocast` (fp32 parameters), `bf16` (FSDP with that compute dtype),
            or bytes per element.
        attention: `naive`, `flash` or `sdpa`.
        checkpointing: number of blocks that are recomputed together in backward. 0 for none, True
            for each by itself. `Segments` for segments of segments. A tuple names what each block
            of this rank keeps, a name in `Activations.kept`.
        loss_chunk: bytes of logits, the most that exist at a time, if the loss is computed in the
            head, which makes the gradients in the forward. None: the head returns all logits.
        optimizer: name of an optimizer, an entry of `states.OPTIMIZERS`.
        accumulates: True for several micro-batches without synchronisation. FSDP then keeps full
            gradients in fp32, hybrid sharding those of this rank's shards.
        fused: True if blocks are compiled, or run as fused kernels. They keep a little less
            (`block_activations`).
        compiled: True if they are compiled (`activations`).
        workspace_bytes: bytes that libraries take from the same allocator, 0 on a CPU.
        sharing: way in which ranks share sequences.
        micro_batches_held: number of micro-batches, the most whose activations of a stage this rank
            of a pipeline holds at once. Those that wait for the rest of a split backward count in
            full. Logits that wait, in GPipe, do not count.
        bucket_size_mb: MiB of a bucket, None for unbounded. It matters only where buckets are
            freed.

    Raises:
        ValueError: an unknown name, or a size below one. The message lists what is allowed.
    """
    one_of("optimizer", optimizer, OPTIMIZERS)
    if isinstance(precision, str):
        one_of("precision", precision, PRECISIONS)
        precision = PRECISIONS[precision]
    at_least_one(world_size=world_size, micro_batches_held=micro_batches_held)
    kept = activations(shape, batch, context, precision, attention, fused, compiled, sharing)
    levels: tuple[str, ...] = ()
    segments = Segments(())
    if isinstance(checkpointing, tuple):
        levels = checkpointing
    else:
        segments = Segments.of(checkpointing)
    if levels and (len(levels) != shape.num_layers or set(levels) - kept.kept.keys()):
        raise ValueError(
            f"checkpointing={checkpointing}: one of {', '.join(kept.kept)} "
            f"for each of {shape.num_layers} blocks"
        )
    layers = -(-shape.num_layers // shape.stages)  # blocks of the largest stage
    numbers = OPTIMIZERS[optimizer]
    # Muon keeps fewer numbers of a block's matrix than of an embedding. The walk needs one average.
    share_of_matrices = shape.num_layers * shape.block_matrices / shape.num_parameters
    setting = held.Setting(
        shape=shape,
        kept=kept,
        precision=precision,
        strategy=strategy,
        world_size=world_size,
        segments=segments,
        state_numbers=(
            share_of_matrices * numbers.of_matrices + (1 - share_of_matrices) * numbers.of_others
        ),
        step_numbers=numbers.in_step,
        # The walk follows one stage of this rank, the one whose backward comes first.
        levels=levels[-layers:],
        loss_chunk=loss_chunk,
        layers=layers,
        accumulates=accumulates,
        bucket_size_mb=bucket_size_mb,
    )
    resident = held.resident(setting)
    states = replace(resident, optimizer_state=held.optimizer_state(setting))
    if accumulates and setting.shards_parameters and not setting.sums_are_sharded:
        # Full gradients of FSDP's earlier micro-batches. They stay throughout, as buckets do.
        states = replace(states, buckets=FP32 * shape.num_parameters)
    moments = []
    # The walk follows one of the micro-batches held. The others wait meanwhile.
    for phase, moment in _walk(setting, states, micro_batches_held - 1):
        with_workspaces = replace(moment, temporary=moment.temporary + workspace_bytes)
        moments.append((phase, with_workspaces))
    peak_phase, peak = max(moments, key=lambda item: item[1].total)
    before = replace(states, gradients=held.all_gradients(setting), temporary=workspace_bytes)
    return StepMemory(
        after_init=resident,
        before_step=before,
        after_step=before,
        peak=peak,
        peak_phase=peak_phase,
        moments=tuple(moments),
    )


def devices_to_fit(total_bytes: float, device_bytes: float) -> int:
    """Return the number of devices that hold `total_bytes` if they divide it evenly.

    Args:
        total_bytes: bytes to hold.
        device_bytes: bytes of one device.

    Raises:
        ValueError: a device without memory, or negative bytes.
    """
    if total_bytes < 0 or not device_bytes > 0:
        raise ValueError(
            f"total_bytes={total_bytes}, device_bytes={device_bytes}: give positive bytes"
        )
    return max(1, -(-int(total_bytes) // int(device_bytes)))


def zero_paper_bytes(num_parameters: float, world_size: int, stage: int) -> float:
    """Return the model states per rank in the accounting of the ZeRO paper.

    fp16 parameters and gradients take 2 bytes each, and optimizer state (fp32 parameters and Adam's
    two moments) K = 12 bytes per parameter.

        stage 0: (2 + 2 + K)·P          stage 1: (2 + 2 + K/N)·P
        stage 2: (2 + (2 + K)/N)·P      stage 3: (2 + 2 + K)/N·P

    Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 GPUs need 120, 31.4, 16.6 and 1.9 GB.

    Args:
        num_parameters: number of parameters, P.
        world_size: number of ranks, N.
        stage: stage of ZeRO. 0 means not sharded.

    Raises:
        ValueError: a stage outside 0 to 3, fewer than one rank, or a negative size.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has stages 1, 2 and 3; 0 means not sharded")
    if world_size < 1 or num_parameters < 0:
        raise ValueError(
            f"num_parameters={num_parameters}, world_size={world_size}: give at least one rank and "
            "no negative size"
        )
    # Bytes per parameter. Each stage of ZeRO also divides what the stages before it divide.
    parameters = 2 / world_size if stage >= 3 else 2
    gradients = 2 / world_size if stage >= 2 else 2
    optimizer_state = 12 / world_size if stage >= 1 else 12
    return (parameters + gradients + optimizer_state) * num_parameters


# -- the walk --------------------------------------------------------------------------------------


def _walk(
    setting: held.Setting, states: Breakdown, waiting: int
) -> Iterator[tuple[str, Breakdown]]:
    """Yield (phase, bytes) of every moment that could be the peak, without workspaces.

    Args:
        setting: numbers of the step.
        states: bytes that stay allocated throughout.
        waiting: micro-batches that have been forward through a stage and not yet back.
    """
    kept_bytes, blocks_in_full = _kept_of_stage(setting)
    copied_bytes = 0
    if setting.precision.copies_weights:
        copied = blocks_in_full * setting.shape.block_matrices
        copied_bytes = setting.precision.compute * copied
    for phase, moment in _micro_batch(setting, states):
        with_waiting = replace(
            moment,
            activations=moment.activations + waiting * kept_bytes,
            weight_copies=moment.weight_copies + waiting * copied_bytes,
        )
        yield phase, with_waiting
    done = replace(states, gradients=held.all_gradients(setting))
    yield "gradient synchronization", done
    yield "optimizer step", replace(done, temporary=held.step_temporary(setting))


def _micro_batch(setting: held.Setting, states: Breakdown) -> Iterator[tuple[str, Breakdown]]:
    """Yield (phase, bytes) of one micro-batch through a stage and back."""
    shape, kept, layers = setting.shape, setting.kept, setting.layers
    states = replace(states, gradients=held.gradients_after(setting, 0))
    kept_bytes, _ = _kept_of_stage(setting)
    if shape.has_head:
        # Of the stage's last operations, final norm and head, nothing is recomputed.
        kept_bytes += kept.last
    forward = replace(states, activations=kept_bytes, weight_copies=held.weight_copies(setting))
    kept_below_last, _ = _kept_below(setting, layers - 1)
    in_last_block = replace(
        forward,
        activations=kept_below_last + kept.block,
        gathered=held.gathered(setting, 2 * setting.block_buffer),  # this block's and the next
        temporary=kept.block_temporary,
    )
    yield "forward", in_last_block
    if shape.has_head:
        yield from _head(setting, states, forward)
    stride = max(1, layers // BLOCKS_SEEN)
    for block in range(layers - 1, -1, -stride):
        yield f"backward of block {block}", _in_block(setting, states, block)
    if shape.has_embedding:
        of_embedding = held.full_gradients(
            setting, shape.embedding_parameters, setting.embedding_buffer
        )
        in_embedding = replace(
            states,
            gradients=held.all_gradients(setting),
            buckets=states.buckets
            + held.buckets_in_backward(
                setting,
                shape.num_parameters - shape.embedding_parameters,
                shape.embedding_parameters,
            ),
            gathered=held.gathered(setting, setting.embedding_buffer),
            temporary=kept.residual_gradient + of_embedding,
        )
        yield "backward of embedding", in_embedding


def _head(
    setting: held.Setting, states: Breakdown, forward: Breakdown
) -> Iterator[tuple[str, Breakdown]]:
    """Yield (phase, bytes) of head and loss, forward and back.

    Args:
        setting: numbers of the step.
        states: bytes that stay allocated throughout.
        forward: bytes after the forward of the blocks.
    """
    shape, kept, precision = setting.shape, setting.kept, setting.precision
    gathered_head = held.gathered(setting, setting.embedding_buffer)
    gathered_block = held.gathered(setting, setting.block_buffer)
    buckets = states.buckets
    if setting.strategy.is_peer and setting.strategy.sends == "buckets":
        # torch's DDP rebuilds its buckets in the order in which gradients came. In that step (the
        # second, with a static graph the third) NCCL's collectives hold the first set, unless
        # torch's watchdog has let go of them: seen in recorded peaks, torch 2.11, and never after a
        # pause of 0.3 s and another collective.
        buckets += FP32 * shape.num_parameters
    copies = held.weight_copies(setting)
    if setting.segments.sizes:
        copies = 0  # with checkpoints no graph keeps the copies
    elif setting.levels:
        copies = copies * setting.levels.count("none") // setting.layers

    if setting.loss_chunk is None:
        in_loss = replace(
            forward, buckets=buckets, temporary=kept.loss + kept.forward_loss_temporary
        )
        after_loss = replace(forward, buckets=buckets, weight_copies=copies)
        if shape.tensor > 1:
            # The loss is in the head, whose matrix is gathered.
            in_loss = replace(in_loss, gathered=gathered_head)
            after_loss = replace(after_loss, gathered=gathered_head + gathered_block)
        yield "loss", in_loss
        yield (
            "backward of loss",
            replace(after_loss, temporary=kept.loss + kept.loss_temporary),
        )
        head_gradient = held.weight_gradient(setting, shape.embedding_parameters)
        temporary = kept.logits_gradient + head_gradient
    else:
        # The head's gradient is summed in fp32 over the chunks, and then rounded if its weight came
        # in another dtype.
        summed = FP32 * shape.embedding_parameters
        logits = min(setting.loss_chunk, kept.logits_gradient)
        temporary = kept.head_gradient + summed + logits
        head_gradient = summed
        if precision.compute != FP32 and not precision.copies_weights:
            head_gradient = precision.compute * shape.embedding_parameters
            temporary += head_gradient
        yield (
            "loss",
            replace(forward, buckets=buckets, gathered=gathered_head, temporary=temporary),
        )
        after_loss = replace(forward, buckets=buckets, weight_copies=copies)
        temporary = kept.head_gradient + head_gradient
    in_head = replace(after_loss, gathered=gathered_head + gathered_block, temporary=temporary)
    of_head = held.buckets_in_backward(setting, 0, shape.embedding_parameters)
    if of_head and not held.in_place(setting):
        # The bucket is allocated when the gradient is complete, and that of the logits is gone.
        yield "backward of head", in_head
        in_head = replace(in_head, temporary=head_gradient)
    in_head = replace(in_head, buckets=in_head.buckets + of_head)
    yield "backward of head", in_head


def _in_block(setting: held.Setting, states: Breakdown, block: int) -> Breakdown:
    """Return the peak of one block's backward.

    It is in its feed-forward part, with everything of the block still kept. On a sharding strategy
    it may be at the end, when a unit's gradients are packed for sending.

    Args:
        setting: numbers of the step.
        states: bytes that stay allocated throughout.
        block: index of the block in its stage.
    """
    shape, kept = setting.shape, setting.kept
    matrices, buffer = shape.block_matrices, setting.block_buffer
    is_last_block = block == setting.layers - 1
    # Backward runs from the end: the head, then the blocks behind this one.
    blocks_done = setting.layers - 1 - block
    done = blocks_done * shape.block_parameters
    if shape.has_head:
        done += shape.embedding_parameters
    kept_below, blocks_in_full = _kept_below(setting, block)
    copied_bytes = 0
    if setting.precision.copies_weights:
        # Graphs hold the casts of blocks that are kept in full, and this block's graph holds its
        # own.
        copied_bytes = setting.precision.compute * matrices * (blocks_in_full + 1)
    in_flight = 0
    if setting.shards_parameters:
        # The gradients of the unit before are being sent, from an fp32 buffer.
        sent = setting.embedding_buffer if is_last_block else buffer
        in_flight = FP32 * sent
        if setting.sums_are_sharded:
            # They arrive next to the sum that they are added to.
            in_flight += FP32 * (sent // setting.world_size)
    largest_gradient = held.weight_gradient(setting, max(shape.matrices_per_block))
    of_block = held.buckets_in_backward(setting, done, shape.block_parameters)
    inside = replace(
        states,
        buckets=states.buckets + of_block,
        gradients=held.gradients_after(setting, done),
        gathered=held.gathered(setting, 2 * buffer),  # this block's and the next
        weight_copies=copied_bytes,
        activations=kept_below + kept.block,
        temporary=kept.block_temporary + kept.residual_gradient + largest_gradient + in_flight,
    )
    # At the end of its backward the block's activations are gone. Its whole gradients exist next to
    # the buffer into which they are copied.
    packing = replace(
        inside,
        activations=kept_below,
        temporary=kept.residual_gradient + held.full_gradients(setting, matrices, buffer),
    )
    return max(inside, packing, key=lambda moment: moment.total)


def _kept_of_stage(setting: held.Setting) -> tuple[int, int]:
    """Return (bytes kept of a stage's blocks, number of blocks that are kept in full)."""
    if setting.segments.sizes:
        groups = -(-setting.layers // setting.segments.sizes[0])
        return groups * setting.kept.checkpoint, 0
    return _kept_below(setting, setting.layers)


def _kept_below(setting: held.Setting, block: int) -> tuple[int, int]:
    """Return (bytes kept of the blocks before this one in its backward, number kept in full).

    With groups, blocks before the group of this one keep only the group's input. Those of its own
    group have been recomputed and are kept in full. If this group has groups inside it, the same
    holds for these.

    Args:
        setting: numbers of the step.
        block: index of the block in its stage.
    """
    kept = setting.kept
    if setting.levels:
        levels = setting.levels[:block]
        return sum(kept.kept[level] for level in levels), levels.count("none")
    inputs, in_full = 0, block
    for size in setting.segments.sizes:
        groups, in_full = divmod(in_full, size)
        inputs += groups
    return inputs * kept.checkpoint + in_full * kept.block, in_full
