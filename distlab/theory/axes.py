"""Volume of tensor, context and pipeline parallelism, forward and backward, in closed form.

Bytes are payload as in `volume`: the full output of an all-gather, the full input of a
reduce-scatter, the contribution of one rank to an all-to-all. A message between neighbours counts
where it leaves and where it arrives. B sequences of T tokens are those of one micro-batch of the
ranks that share a model. A recomputed block repeats the messages of its forward, except the
reduce-scatter at the end of it, or of its group, whose result no gradient needs.
"""

from typing import Any

from distlab.theory.checks import at_least_one
from distlab.theory.forms import Form
from distlab.theory.model_shape import ModelShape
from distlab.theory.volume import CommunicationVolume, step_volume

FP32 = 4  # bytes of a number of the loss, and of a norm's gradient: see `tensor_volume`
FP64 = 8  # of the loss that a pipeline's ranks share


def layout_volume(
    strategy: Form,
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    world_size: int,
    sharing: int = 1,
    how: str = "gathered",
    itemsize: int = 4,
    casts_parameters: bool = False,
    micro_batches: int = 1,
    pipeline: int = 1,
    keeps: int | tuple[str, ...] = 0,
    **options: Any,
) -> CommunicationVolume | None:
    """Return all that a rank sends in a step: for the data strategy and for the other axes.

    The data strategy sends the matrices that the other axes leave to the rank. None if there is no
    closed form for the strategy.

    Args:
        shape: shape of this rank's part of the model.
        batch, context: B sequences of a group of ranks that share a model, and T tokens of each,
            whole.
        world_size: number of all ranks.
        sharing: number of ranks that share sequences. `how` is as in `context_volume`.
        itemsize: bytes of an element of the computation. `casts_parameters` is True if parameters
            arrive in that dtype (FSDP).
        micro_batches: number of micro-batches of a step.
        pipeline: number of ranks that have the stages.
        keeps: recomputation, as `checkpointing` of `theory.memory`.
        options: `bucket_size_mb` and `shard_size` of `step_volume`.
    """
    blocks, groups = _recomputed(keeps, shape.num_layers)
    numels = shape.parameter_numels()
    of_strategy = step_volume(
        strategy,
        numels,
        [FP32] * len(numels),
        units=shape.parameter_units(),
        shapes=shape.parameter_shapes(),
        world_size=world_size // (shape.tensor * pipeline),
        compute_itemsize=itemsize,
        micro_batches=micro_batches,
        **options,
    )
    if of_strategy is None:
        return None
    embedding = itemsize if casts_parameters else FP32
    of_tensor = tensor_volume(
        shape,
        batch=batch,
        context=context // sharing,
        itemsize=itemsize,
        embedding_itemsize=embedding,
        again=4 * blocks - groups,
    )
    of_context = context_volume(
        shape, batch=batch, context=context, ranks=sharing, how=how, itemsize=itemsize, again=blocks
    )
    of_pipeline = pipeline_volume(
        shape,
        batch=batch,
        context=context // sharing,
        micro_batches=micro_batches,
        itemsize=embedding,
    )
    return of_strategy + (of_tensor + of_context) * micro_batches + of_pipeline


def _recomputed(keeps: int | tuple[str, ...], num_layers: int) -> tuple[int, int]:
    """Blocks whose forward runs again, and the groups in which it does."""
    if isinstance(keeps, tuple):
        blocks = len(keeps) - keeps.count("none")
        return blocks, blocks
    return (num_layers, -(-num_layers // keeps)) if keeps else (0, 0)


def tensor_volume(
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    itemsize: int = 4,
    embedding_itemsize: int = 4,
    again: int = 0,
) -> CommunicationVolume:
    """Return the volume of ranks that share every matrix of `shape`, with the loss in the head.

    Forward sends a reduce-scatter after the embedding, per block two all-gathers and two
    reduce-scatters, an all-gather before the head, all of B·T·d elements, and three all-reduces of
    B·T fp32 numbers for the loss. Backward sends the same transfers the other way, and an
    all-reduce of d fp32 numbers for each of 2·L + 1 norms. The loss takes fp32 whatever the dtype
    of the logits, and norms keep fp32 weights under every strategy, so neither depends on
    `itemsize`. A rank of a pipeline without the embedding, or without the head, sends nothing for
    it.

    Args:
        context: T of this rank: a part of the sequence if ranks also share sequences.
        itemsize: bytes of an element between blocks. `embedding_itemsize` is that of the
            embedding's result.
        again: number of transfers of blocks that recomputation repeats.
    """
    at_least_one(batch=batch, context=context)
    if shape.tensor == 1:
        return CommunicationVolume(0, 0)
    d, tokens = shape.d_model, batch * context
    inner, outer = 2 * (4 * shape.num_layers + shape.has_head) + again, 2 * shape.has_embedding
    losses = 3 * shape.has_head
    sent = (inner * itemsize + outer * embedding_itemsize) * tokens * d + FP32 * (
        losses * tokens + shape.norms * d
    )
    return CommunicationVolume(inner + outer + losses + shape.norms, sent)


def context_volume(
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    ranks: int,
    how: str = "gathered",
    itemsize: int = 4,
    again: int = 0,
) -> CommunicationVolume:
    """Return the volume of ranks that share sequences.

    `how` is an entry of `distlab.parallel.context_parallel.HOW`.

    Per block, with d and k the widths of queries and keys on a rank, and t = T/P of its tokens:

        gathered   an all-gather of 2·B·T·k elements, backward a reduce-scatter of them
            ulysses    four all-to-alls of B·t·(2·d + 2·k) elements in sum, the same backward
        ring       P − 1 messages of 2·B·t·k; backward these again, and P of 2·B·t·k gradients in fp32

    Args:
        context: T of the whole sequence.
        again: number of blocks whose forward recomputation repeats.
    """
    at_least_one(batch=batch, context=context, ranks=ranks)
    if ranks == 1:
        return CommunicationVolume(0, 0)
    keys, width, tokens = shape.kv_width, shape.width, batch * context // ranks
    pair = 2 * tokens * keys
    forward, backward = {  # messages and bytes of a block
        "gathered": ((1, ranks * pair * itemsize),) * 2,
        "ulysses": ((4, tokens * (2 * width + 2 * keys) * itemsize),) * 2,
        "ring": (
            (ranks - 1, (ranks - 1) * pair * itemsize),
            (2 * ranks - 1, (ranks - 1) * pair * itemsize + ranks * pair * max(FP32, itemsize)),
        ),
    }[how]
    layers = shape.num_layers
    return (
        CommunicationVolume(*forward) * (layers + again) + CommunicationVolume(*backward) * layers
    )


def pipeline_volume(
    shape: ModelShape, *, batch: int, context: int, micro_batches: int, itemsize: int = 4
) -> CommunicationVolume:
    """Return the volume of a rank of a pipeline.

    Each of its stages sends for each micro-batch an activation and a gradient of B·T·d elements at
    either end that has a neighbour. The loss is an all-reduce of one fp64 number.

    Over all ranks and both counts of a message, 4·m·(p·v − 1) messages.

    Args:
        context: T of this rank, as in `tensor_volume`.
        itemsize: bytes of an element of the residual stream.
    """
    at_least_one(batch=batch, context=context, micro_batches=micro_batches)
    boundaries = 2 * shape.stages - shape.has_embedding - shape.has_head
    if not boundaries:
        return CommunicationVolume(0, 0)
    activation = batch * context // shape.tensor * shape.d_model * itemsize
    messages = 2 * micro_batches * boundaries
    return CommunicationVolume(messages + 1, messages * activation + FP64)
