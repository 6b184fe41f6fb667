"""Memory that autograd keeps between forward and backward, and temporaries in addition.

Counted operation by operation for the blocks of `ModelShape`, with n = B·T tokens, `c` bytes per
element of the computation, `r` bytes per element of the residual stream and keys of width k (d
unless heads share them). Each line is the number of elements that an operation's backward needs,
times their bytes. Of one block autograd saves

    the residual stream before each norm                2·r·n·d    (the adds save nothing)
    statistics of both norms                            2·4·n
    the norms' outputs, inputs of qkv and of w1, w3     2·c·n·d
    attention: queries and keys after rotation          c·n·(d + k)
      fused kernels: qkv's output, kept whole by v      c·n·(d + 2·k)
                     output and log-sum-exp             c·n·d + 4·n·H
      naive:         a copy of v, the merged heads      c·n·(d + k)
                     softmax in fp32, and cast to c     (4 + [c≠4]·c)·n·H·T
    w1 x, silu(w1 x), w3 x and silu(w1 x)·w3 x          4·c·n·f    (3·c·n·f in a compiled block or a
                                                                   fused kernel, which computes
                                                                   silu(w1 x) again)

A block that is recomputed keeps its input, r·n·d, and the results of attention and matmuls that
`recompute.KEEPS` names.

If T ranks share matrices (`ModelShape.tensor`), d, k, f, H and V of results are those of a rank,
and the residual stream, its gradient and the norms' statistics have n/T tokens. Inputs of matmuls
are whole, c·n·d. The loss keeps the logits and their exponentials. If P ranks share sequences, n
counts the tokens of one, and attention keeps, with its queries and keys after rotation and its
result in both orders of heads and tokens,

    gathered      the keys and values of all            c·n·(3·d + (2·P + 1)·k)
    ulysses       all three of H/P heads                c·n·(3·d + 2·k)
    ring          qkv's output, kept whole by v         c·n·(4·d + 3·k)

Under autocast r = 4 and c = 2. In one dtype throughout r = c. Source: Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", eq. 2, who count a GPT-2 block with
dropout in the same way. A test compares the sums with what autograd really saves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distlab.theory.checks import at_least_one, one_of
from distlab.theory.memory.recompute import KEEPS
from distlab.theory.model_shape import ModelShape

FP32 = 4
ATTENTION = ("naive", "flash", "sdpa", "auto")


@dataclass(frozen=True)
class Precision:
    """Dtypes in which a step computes and keeps tensors, as bytes per element.

    Args:
        compute: bytes of an element of matmuls.
        residual: bytes of an element of the residual stream.
        copies_weights: True if matrices are cast for matmuls and the copies kept for backward
            (autocast).
    """

    compute: int = FP32
    residual: int = FP32
    copies_weights: bool = False


PRECISIONS = {
    "fp32": Precision(),
    # fp32 parameters; autocast casts each matrix once per forward, and the matmuls keep the copies.
    "bf16-autocast": Precision(compute=2, residual=4, copies_weights=True),
    # Parameters that arrive in bf16 (FSDP with a compute dtype): all of the forward runs in it.
    "bf16": Precision(compute=2, residual=2),
}


def precision_of(dtype: str, *, casts_parameters: bool) -> Precision:
    """Return the precision of a step over fp32 parameters.

    Args:
        dtype: dtype of the computation, `fp32`, `bf16` or `fp16`.
        casts_parameters: True if parameters arrive in that dtype (FSDP). False under autocast.
    """
    if dtype == "fp32":
        return PRECISIONS["fp32"]
    return PRECISIONS["bf16" if casts_parameters else "bf16-autocast"]


@dataclass(frozen=True)
class Activations:
    """Bytes kept for backward, by part, and temporaries.

    Args:
        block: bytes of one block.
        kept: bytes of one block until its backward, for each choice of what is not recomputed: an
            entry of `recompute.KEEPS`, or `none` for a block that is not recomputed.
        last: bytes of final norm and head.
        loss: bytes that the cross-entropy keeps: log-softmax in fp32.
        loss_temporary: bytes in addition to `loss` at the start of backward: gradients of
            log-softmax and of the logits, fp32.
        head_gradient: bytes of the gradient of the head's input.
        logits_gradient: bytes of the gradient that reaches the head, in the dtype of the
            computation.
        forward_loss_temporary: bytes in addition to `loss` while it is computed: the logits, and
            their fp32 form.
        block_temporary: bytes, the most that one block's backward needs in addition to those it
            frees.
        residual_gradient: bytes of the gradient of the residual stream.
    """

    block: int
    kept: Mapping[str, int]
    last: int
    loss: int
    loss_temporary: int
    head_gradient: int
    logits_gradient: int
    forward_loss_temporary: int
    block_temporary: int
    residual_gradient: int

    @property
    def checkpoint(self) -> int:
        """Bytes that one block keeps if all its activations are recomputed: its input."""
        return self.kept["block"]


@dataclass(frozen=True)
class Sharing:
    """Way in which ranks share sequences.

    Args:
        ranks: number of ranks, P.
        how: transport of keys and values, an entry of `distlab.parallel.context_parallel.HOW`.
    """

    ranks: int = 1
    how: str = "gathered"

    def attention_widths(self, width: int, keys: int) -> int:
        """Return the elements per token that fused attention keeps, see the tables above.

        Args:
            width: width of the queries of a rank's heads, d.
            keys: width of the keys of a rank's heads, k.
        """
        if self.ranks == 1:
            return 3 * width + 3 * keys
        elements = {
            "gathered": 3 * width + (2 * self.ranks + 1) * keys,
            "ulysses": 3 * width + 2 * keys,
            "ring": 4 * width + 3 * keys,
        }
        return elements[self.how]


ALONE = Sharing()


def block_activations(
    shape: ModelShape,
    batch: int,
    context: int,
    precision: Precision,
    attention: str = "sdpa",
    fused: bool = False,
    sharing: Sharing = ALONE,
) -> int:
    """Return the bytes that autograd keeps of one block, see the table above.

    Args:
        shape: shape of this rank's part of the model.
        batch: number of sequences on this rank.
        context: number of this rank's tokens in each sequence.
        precision: bytes per element.
        attention: `flash`, `sdpa` or `auto`, either of these (nothing of size T² is kept), or
            `naive`.
        fused: True if the block is compiled, or runs as fused kernels.
        sharing: way in which ranks share sequences.

    Raises:
        ValueError: an unknown attention, or a batch or context below one.
    """
    at_least_one(batch=batch, context=context)
    one_of("attention", attention, ATTENTION)
    n = batch * context
    n_residual = n // shape.tensor  # tokens of the residual stream on this rank
    d, f = shape.d_model, shape.inner
    c, r = precision.compute, precision.residual

    # The inputs of both norms. The additions between them save nothing: a sum's gradient is that of
    # both addends.
    residual_stream = 2 * r * n_residual * d
    norm_statistics = 2 * FP32 * n_residual
    norm_outputs = 2 * c * n * d
    if attention == "naive":
        # The softmax's backward needs its fp32 result, and the product with v a cast of it.
        softmax_itemsize = FP32 + _copy_itemsize(c)
        # Queries and keys after rotation, d + k, and merged heads and a copy of v, d + k again.
        in_attention = 2 * c * n * (shape.width + shape.kv_width)
        in_attention += softmax_itemsize * n * shape.heads * context
    else:
        log_sum_exp = FP32 * n * shape.heads
        in_attention = c * n * sharing.attention_widths(shape.width, shape.kv_width) + log_sum_exp
    # w1 x, w3 x and their gated product, the input of w2. Unfused, silu(w1 x) is a tensor of its
    # own.
    feed_forward = (3 if fused else 4) * c * n * f
    return residual_stream + norm_statistics + norm_outputs + in_attention + feed_forward


def activations(
    shape: ModelShape,
    batch: int,
    context: int,
    precision: Precision,
    attention: str = "sdpa",
    fused: bool = False,
    compiled: bool = False,
    sharing: Sharing = ALONE,
) -> Activations:
    """Return all parts for a batch on one rank.

    Args:
        shape, batch, context, precision, attention, fused, sharing: arguments of
            `block_activations`.
        compiled: True if blocks are compiled. A compiled block does not store the result of w2,
            which `recompute.KEEPS` names and backward does not need.

    Raises:
        ValueError: as `block_activations`.
    """
    block = block_activations(shape, batch, context, precision, attention, fused, sharing)
    n = batch * context
    n_residual = n // shape.tensor  # tokens of the residual stream on this rank
    d, f = shape.d_model, shape.inner
    c, r = precision.compute, precision.residual
    naive = attention == "naive"
    shared = shape.tensor > 1
    logits = n * shape.words

    # What a recomputed block may keep, by the name of the operation.
    results = {
        # Nothing of naive attention: backward needs the scores anyway.
        "attention": 0 if naive else c * n * shape.width + FP32 * n * shape.heads,
        "qkv": c * n * (shape.width + 2 * shape.kv_width),
        "output": c * n * d,
        "w1": c * n * f,
        "w3": c * n * f,
        "w2": 0 if compiled else c * n * d,
    }
    # The residual stream at the block's start: the recomputation's only input besides the
    # parameters.
    block_input = r * n_residual * d
    kept = {}
    for choice, names in KEEPS.items():
        kept[choice] = block_input + sum(results[name] for name in names)
    kept["none"] = block

    # The largest temporaries of a block's backward. SwiGLU: the gradients of silu·up and of both
    # factors; silu(w1 x) is not computed again.
    of_swiglu = 3 * c * n * f
    # Rotation in fp32: gradient times table, roll, sum. Fused it keeps these in registers.
    of_rotation = 0 if fused else 3 * FP32 * n * (shape.width + shape.kv_width)
    # The gradients of the softmax's result and of the scores.
    of_scores = 2 * FP32 * n * shape.heads * context if naive else 0
    block_temporary = max(of_swiglu, of_rotation, of_scores)
    if shared:
        block_temporary += c * n * d  # gradient where shared matrices begin or end, of all tokens

    # Ranks that share the head keep logits and exponentials, see
    # `distlab.parallel.tensor_parallel`.
    loss = (2 if shared else 1) * FP32 * logits
    return Activations(
        block=block,
        kept=kept,
        # Of the final norm its input, its result (the head's input) and one statistic per token.
        last=r * n_residual * d + c * n * d + FP32 * n_residual,
        loss=loss,
        loss_temporary=2 * FP32 * logits,
        head_gradient=c * n * d,
        logits_gradient=c * logits,
        forward_loss_temporary=(FP32 + _copy_itemsize(c)) * logits,
        block_temporary=block_temporary,
        residual_gradient=r * n_residual * d,
    )


def inference_temporary(
    shape: ModelShape, batch: int, context: int, precision: Precision, attention: str = "sdpa"
) -> int:
    """Return the most bytes that an eager forward without gradients holds beyond the parameters.

    It is the largest of three moments. In attention: the residual stream, qkv's output, queries and
    keys after rotation, and the result. Naive attention also holds the scores twice in the dtype of
    the computation and once in fp32 (in fp32: twice), and the mask. In SwiGLU: gate, its silu, up
    and the result. In the loss: logits, in fp32, and their log-softmax. A matrix in use also has
    its cast.

    Args:
        shape, batch, context, precision, attention: arguments of `block_activations`.
    """
    n = batch * context
    d, f = shape.d_model, shape.d_ff
    c, r = precision.compute, precision.residual

    qkv = c * n * (d + 2 * shape.kv_width)
    rotated = c * n * (d + shape.kv_width)
    if attention == "naive":
        scores = n * shape.num_heads * context
        mask = context * context  # one byte per element
        result = 2 * FP32 * scores + mask
    else:
        result = c * n * d
    in_attention = r * n * d + qkv + rotated + result

    # The stream before the block, which the caller still holds, the stream after attention, and the
    # norm's result. Behind them the four tensors of width f.
    in_swiglu = 2 * r * n * d + c * n * d + 4 * c * n * f
    if precision.copies_weights:
        in_swiglu += c * d * f

    in_loss = (2 * FP32 + _copy_itemsize(c)) * n * shape.vocab_size
    return max(in_attention, in_swiglu, in_loss)


def _copy_itemsize(compute: int) -> int:
    """Return the bytes per element of a second copy in the dtype of the computation. 0 for fp32."""
    return compute if compute != FP32 else 0
