"""Volume of tensor, context and pipeline parallelism, forward and backward, in closed form.

As in `volume`, each function states the rule of one axis a second time and uses none of its code.

Bytes are payload as in `volume`: the full output of an all-gather, the full input of a
reduce-scatter, the contribution of one rank to an all-to-all. A message between neighbours counts
where it leaves and where it arrives. B sequences of T tokens are those of one micro-batch of the
ranks that share a model. A recomputed block repeats the messages of its forward, except the
reduce-scatter at the end of it, or of its group, whose result no gradient needs.
"""

from distlab.theory.checks import at_least_one
from distlab.theory.forms import Form
from distlab.theory.memory.activations import FP32, PRECISIONS, Precision
from distlab.theory.memory.recompute import Segments, blocks_run_again
from distlab.theory.model_shape import ModelShape
from distlab.theory.volume import CommunicationVolume, step_volume

FP64 = 8  # bytes of the loss that a pipeline's ranks share
NOTHING = CommunicationVolume(0, 0)


def layout_volume(
    strategy: Form,
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    world_size: int,
    sharing: int = 1,
    how: str = "gathered",
    precision: Precision = PRECISIONS["fp32"],
    micro_batches: int = 1,
    pipeline: int = 1,
    keeps: int | Segments | tuple[str, ...] = 0,
    bucket_size_mb: float | None = 25.0,
    shard_size: int | None = None,
) -> CommunicationVolume | None:
    """Return all that a rank sends in a step: for the data strategy and for the other axes.

    The data strategy sends the matrices that the other axes leave to the rank. None if there is no
    closed form for the strategy.

    Args:
        strategy: entry of the data strategy.
        shape: shape of this rank's part of the model.
        batch: B, number of sequences of a group of ranks that share a model.
        context: T, number of tokens of each whole sequence.
        world_size: number of all ranks.
        sharing: number of ranks that share sequences.
        how: transport of keys and values, as in `context_volume`.
        precision: bytes per element of the computation and of the residual stream. Between stages,
            and out of the embedding, activations are those of the residual stream.
        micro_batches: number of micro-batches of a step.
        pipeline: number of ranks that have the stages.
        keeps: recomputation, as `checkpointing` of `theory.memory`.
        bucket_size_mb, shard_size: arguments of `step_volume`.

    Raises:
        ValueError: a size below one, or a `shard_size` that does not divide the ranks.
    """
    numels = shape.parameter_numels()
    # In a pipeline all micro-batches but the last accumulate locally, under ZeRO-2 also.
    sends_once = strategy.frees_gradients and pipeline > 1
    of_strategy = step_volume(
        strategy,
        numels,
        [FP32] * len(numels),
        units=shape.parameter_units(),
        shapes=shape.parameter_shapes(),
        # Ranks that share sequences hold the same matrices, so the data strategy averages over them
        # also.
        world_size=world_size // (shape.tensor * pipeline),
        compute_itemsize=precision.compute,
        micro_batches=1 if sends_once else micro_batches,
        bucket_size_mb=bucket_size_mb,
        shard_size=shard_size,
    )
    if of_strategy is None:
        return None
    of_tensor, of_context = micro_batch_volumes(
        shape,
        batch=batch,
        context=context,
        sharing=sharing,
        how=how,
        precision=precision,
        keeps=keeps,
    )
    of_pipeline = pipeline_volume(
        shape,
        batch=batch,
        context=context // sharing,
        micro_batches=micro_batches,
        itemsize=precision.residual,
    )
    # The data strategy sends once per step, the other axes once per micro-batch. `pipeline_volume`
    # has counted the micro-batches already.
    return of_strategy + (of_tensor + of_context) * micro_batches + of_pipeline


def micro_batch_volumes(
    shape: ModelShape,
    *,
    batch: int,
    context: int,
    sharing: int = 1,
    how: str = "gathered",
    precision: Precision = PRECISIONS["fp32"],
    keeps: int | Segments | tuple[str, ...] = 0,
) -> tuple[CommunicationVolume, CommunicationVolume]:
    """Return the volumes of tensor and of context parallelism in one micro-batch.

    Args:
        shape, batch, context, sharing, how, precision, keeps: arguments of `layout_volume`.

    Raises:
        ValueError: a size below one.
    """
    blocks, groups = _recomputed(keeps, shape.num_layers)
    # Blocks have four transfers in the forward. A recomputed one repeats them, except the last
    # reduce-scatter of its group.
    of_tensor = tensor_volume(
        shape,
        batch=batch,
        context=context // sharing,
        itemsize=precision.compute,
        embedding_itemsize=precision.residual,
        again=4 * blocks - groups,
    )
    of_context = context_volume(
        shape,
        batch=batch,
        context=context,
        ranks=sharing,
        how=how,
        itemsize=precision.compute,
        again=blocks,
    )
    return of_tensor, of_context


def _recomputed(keeps: int | Segments | tuple[str, ...], num_layers: int) -> tuple[int, int]:
    """Return (blocks whose forward runs again, groups in which it does)."""
    if isinstance(keeps, tuple):
        # Blocks that are chosen one by one are groups of one.
        blocks = len(keeps) - keeps.count("none")
        return blocks, blocks
    return blocks_run_again(num_layers, Segments.of(keeps))


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
    it. Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", sec. 4.2.

    Args:
        shape: shape of this rank's part of the model.
        batch: number of sequences, B.
        context: T of this rank: a part of the sequence if ranks also share sequences.
        itemsize: bytes of an element between blocks.
        embedding_itemsize: bytes of an element of the embedding's result.
        again: number of transfers of blocks that recomputation repeats.

    Raises:
        ValueError: a size below one.
    """
    at_least_one(batch=batch, context=context)
    if shape.tensor == 1:
        return NOTHING
    tokens = batch * context
    activation = tokens * shape.d_model  # elements
    # Each transfer of the forward has its counterpart in the backward.
    of_blocks = 2 * 4 * shape.num_layers + again
    of_head = 2 if shape.has_head else 0
    of_embedding = 2 if shape.has_embedding else 0
    # Of each row: its largest logit, the sum of its exponentials, and the target's logit, which one
    # rank has.
    of_loss = 3 if shape.has_head else 0
    sent_bytes = (of_blocks + of_head) * activation * itemsize
    sent_bytes += of_embedding * activation * embedding_itemsize
    sent_bytes += of_loss * tokens * FP32
    # Each rank has computed the gradient of whole norms from its tokens only, so they are summed.
    sent_bytes += shape.norms * shape.d_model * FP32
    calls = of_blocks + of_head + of_embedding + of_loss + shape.norms
    return CommunicationVolume(calls, sent_bytes)


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

    Per block, with d and k the widths of queries and keys on a rank, and t = T/P of its tokens:

        gathered   an all-gather of 2·B·T·k elements, backward a reduce-scatter of them
        ulysses    four all-to-alls of B·t·(2·d + 2·k) elements in sum, the same backward
        ring       P − 1 messages of 2·B·t·k, backward these again, and P of 2·B·t·k gradients in
                   fp32

    Sources: Grattafiori et al. 2024, "The Llama 3 Herd of Models", sec. 3.3.2 (gathered); Jacobs et
    al. 2023, "DeepSpeed Ulysses"; Liu et al. 2023, "Ring Attention".

    Args:
        shape: shape of this rank's part of the model.
        batch: number of sequences, B.
        context: T of the whole sequence.
        ranks: number of ranks that share a sequence, P.
        how: transport of keys and values, an entry of `distlab.parallel.context_parallel.HOW`.
        itemsize: bytes of an element of keys and values.
        again: number of blocks whose forward recomputation repeats.

    Raises:
        ValueError: a size below one.
    """
    at_least_one(batch=batch, context=context, ranks=ranks)
    if ranks == 1:
        return NOTHING
    tokens = batch * context // ranks  # B·t
    keys_and_values = 2 * tokens * shape.kv_width  # elements of one rank
    queries_and_result = 2 * tokens * shape.width
    # (messages, elements) of a block's forward
    forwards = {
        "gathered": (1, ranks * keys_and_values),
        "ulysses": (4, queries_and_result + keys_and_values),
        "ring": (ranks - 1, (ranks - 1) * keys_and_values),
    }
    messages, elements = forwards[how]
    forward = CommunicationVolume(messages, elements * itemsize)
    backward = forward
    if how == "ring":
        # The gradients of keys and values travel with them, all the way round, in fp32 at least.
        # P hops and not P − 1: after the last rank has added its part, the sum returns to the rank
        # that owns the keys.
        gradient_bytes = ranks * keys_and_values * max(FP32, itemsize)
        backward += CommunicationVolume(ranks, gradient_bytes)
    return forward * (shape.num_layers + again) + backward * shape.num_layers


def pipeline_volume(
    shape: ModelShape, *, batch: int, context: int, micro_batches: int, itemsize: int = 4
) -> CommunicationVolume:
    """Return the volume of a rank of a pipeline.

    Each of its stages sends for each micro-batch an activation and a gradient of B·T·d elements at
    either end that has a neighbour. The loss is an all-reduce of one fp64 number.

    Over p ranks of v stages, m micro-batches and both counts of a message, that is 4·m·(p·v − 1)
    messages. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", sec. 3.2.

    Args:
        shape: shape of this rank's stages.
        batch: number of sequences of a micro-batch, B.
        context: T of this rank, as in `tensor_volume`.
        micro_batches: number of micro-batches of a step, m.
        itemsize: bytes of an element of the residual stream.

    Raises:
        ValueError: a size below one.
    """
    at_least_one(batch=batch, context=context, micro_batches=micro_batches)
    # Every stage has two ends. The first has no neighbour before it, and the last none behind it.
    boundaries = 2 * shape.stages - shape.has_embedding - shape.has_head
    if not boundaries:
        return NOTHING
    activation_bytes = batch * context // shape.tensor * shape.d_model * itemsize
    messages = 2 * micro_batches * boundaries  # an activation and a gradient
    return CommunicationVolume(messages + 1, messages * activation_bytes + FP64)
