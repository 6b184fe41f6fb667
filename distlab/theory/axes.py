"""What tensor and context parallelism send in a step, forward and backward, in closed form.

Bytes are payload as in `volume`: the full output of an all-gather, the full input of a reduce-scatter, what one rank
contributes to an all-to-all. B sequences of T tokens are those of one group of ranks that share a model, and
recomputation adds what the repeated forward sends.
"""

from distlab.theory.checks import at_least_one
from distlab.theory.model_shape import ModelShape
from distlab.theory.volume import CommunicationVolume


def tensor_volume(
    shape: ModelShape, *, batch: int, context: int, ranks: int, itemsize: int = 4, embedding_itemsize: int = 4
) -> CommunicationVolume:
    """Of ranks that share every matrix, the loss in the head.

    Forward a reduce-scatter behind the embedding, per block two all-gathers and two reduce-scatters, an all-gather
    before the head, all of B·T·d elements, and three all-reduces of B·T fp32 numbers for the loss; backward the same
    transfers the other way, and an all-reduce of d fp32 numbers for each of 2·L + 1 norms.

    Args:
        context: T, of this rank: a part of the sequence where ranks share sequences, too.
        itemsize: bytes of an element between blocks; `embedding_itemsize` of the embedding's result.
    """
    at_least_one(batch=batch, context=context, ranks=ranks)
    if ranks == 1:
        return CommunicationVolume(0, 0)
    layers, d = shape.num_layers, shape.d_model
    inner, outer, norms = 2 * (4 * layers + 1), 2, 2 * layers + 1
    tokens = batch * context
    sent = (inner * itemsize + outer * embedding_itemsize) * tokens * d + 4 * (3 * tokens + norms * d)
    return CommunicationVolume(inner + outer + 3 + norms, sent)


def context_volume(
    shape: ModelShape, *, batch: int, context: int, ranks: int, how: str = "gathered", itemsize: int = 4,
    tensor: int = 1,
) -> CommunicationVolume:  # fmt: skip
    """Of ranks that share sequences; `how` as `distlab.parallel.context_parallel.HOW`.

    Per block, with k the width of keys and t = T/P tokens of a rank:

        gathered   an all-gather of 2·B·T·k elements, backward a reduce-scatter of them
        ulysses    four all-to-alls of B·t·(2·d + 2·k) elements together, and as many backward
        ring       P − 1 messages of 2·B·t·k; backward these again, and P of 2·B·t·k gradients in fp32

    Args:
        context: T, whole.
        tensor: ranks that share the heads.
    """
    at_least_one(batch=batch, context=context, ranks=ranks, tensor=tensor)
    if ranks == 1:
        return CommunicationVolume(0, 0)
    keys, width, tokens = shape.kv_width // tensor, shape.d_model // tensor, batch * context // ranks
    pair = 2 * tokens * keys
    calls, sent = {
        "gathered": (2, 2 * ranks * pair * itemsize),
        "ulysses": (8, 2 * tokens * (2 * width + 2 * keys) * itemsize),
        "ring": (3 * ranks - 2, 2 * (ranks - 1) * pair * itemsize + ranks * pair * max(4, itemsize)),
    }[how]
    return CommunicationVolume(shape.num_layers * calls, shape.num_layers * sent)
