"""Memory that autograd keeps between forward and backward, and temporaries in addition.

Counted operation by operation for the blocks of `ModelShape`, with n = B·T tokens, `c` bytes per
element of the computation, `r` bytes per element of the residual stream and keys of width k, d
unless heads share them. Of one block autograd saves

    the residual stream before each norm                2·r·n·d     (the adds themselves save nothing)
    statistics of both norms                            2·4·n
    the norms' outputs, inputs of qkv and of w1, w3     2·c·n·d
    attention: queries and keys after rotation          c·n·(d + k)
      fused kernels: qkv's output, kept whole by v      c·n·(d + 2·k)
                     output and log-sum-exp             c·n·d + 4·n·H
      naive:         a copy of v, the merged heads      c·n·(d + k)
                     softmax in fp32, and cast to c     (4 + [c≠4]·c)·n·H·T
    w1 x, silu(w1 x), w3 x and silu(w1 x)·w3 x          4·c·n·f     (a compiled block or a fused kernel computes
                                                                     silu(w1 x) again: 3·c·n·f)

A block that is recomputed keeps its input, r·n·d, and the results of attention and matmuls that
`recompute.KEEPS` names.

If T ranks share matrices (`ModelShape.tensor`), d, k, f, H and V of results are those of a rank,
and the residual stream, its gradient and the norms' statistics have n/T tokens. Inputs of matmuls
are whole, c·n·d. The loss keeps the logits and their exponentials. If P ranks share sequences, n
counts the tokens of one, and attention keeps, with its queries and keys after rotation and its
result in both orders of heads and tokens,

    gathered      the keys and values of all              c·n·(3·d + (2·P + 1)·k)
    ulysses       all three of H/P heads                c·n·(3·d + 2·k)
    ring          qkv's output, kept whole by v            c·n·(4·d + 3·k)

Under autocast r = 4 and c = 2; in one dtype throughout r = c. Korthikanti et al. 2022 ("Reducing
Activation Recomputation in Large Transformer Models", eq. 2) count a GPT-2 block with dropout the
same way.
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


@dataclass(frozen=True)
class Activations:
    """Bytes kept for backward, by part, and temporaries.

    Args:
        block: bytes of one block.
        kept: bytes of one block until its backward, for each choice of what is not recomputed: an
            entry of `recompute.KEEPS`, or `none` for a block that is not recomputed.
        last: bytes of final norm and head.
        loss: bytes that the cross-entropy keeps, log-softmax in fp32.
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
        """Bytes of one block whose activations are all recomputed: its input."""
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
        """Return the elements per token that fused attention keeps, see the tables above."""
        if self.ranks == 1:
            return 3 * width + 3 * keys
        return {
            "gathered": 3 * width + (2 * self.ranks + 1) * keys,
            "ulysses": 3 * width + 2 * keys,
            "ring": 4 * width + 3 * keys,
        }[self.how]


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
    """Bytes that autograd keeps of one block; see the table above.

    Args:
        batch, context: B sequences of T tokens on this rank, of longer ones a part.
        attention: `flash`, `sdpa` or `auto`, either of these (nothing of size T² is kept), or
            `naive`.
        fused: compiled, or run as fused kernels.

    Raises:
        ValueError: an unknown attention, or a batch or context below one.
    """
    at_least_one(batch=batch, context=context)
    one_of("attention", attention, ATTENTION)
    n, d, f, heads = batch * context, shape.d_model, shape.inner, shape.heads
    c, r, part = precision.compute, precision.residual, n // shape.tensor
    if attention == "naive":
        of_attention = 2 * c * n * (shape.width + shape.kv_width)
        of_attention += (FP32 + (c if c != FP32 else 0)) * n * heads * context
    else:
        of_attention = (
            c * n * sharing.attention_widths(shape.width, shape.kv_width) + FP32 * n * heads
        )
    return (
        2 * r * part * d
        + 2 * FP32 * part
        + 2 * c * n * d
        + of_attention
        + (3 if fused else 4) * c * n * f
    )


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
    """All parts for a batch on one rank; arguments and errors as `block_activations`.

    A compiled block does not store what `recompute.KEEPS` names and nothing needs: w2's result.
    """
    block = block_activations(shape, batch, context, precision, attention, fused, sharing)
    n, d, f, vocabulary = batch * context, shape.d_model, shape.inner, shape.words
    c, r, part = precision.compute, precision.residual, n // shape.tensor
    casts = c if c != FP32 else 0  # the logits exist in both dtypes
    # silu·up backward: gradients of silu·up and of both factors; silu(w1 x) is not computed again.
    swiglu = 3 * c * n * f
    scores = (2 * FP32 if attention == "naive" else 0) * n * shape.heads * context
    # rope's backward in fp32: gradient times table, roll, sum; fused it keeps these in registers.
    rotation = 0 if fused else 3 * FP32 * n * (shape.width + shape.kv_width)
    # Nothing of naive attention is kept: backward needs the scores anyway.
    of_attention = (c * n * shape.width + FP32 * n * shape.heads) * (attention != "naive")
    matmuls = {
        "qkv": shape.width + 2 * shape.kv_width,
        "output": d,
        "w1": f,
        "w3": f,
        "w2": 0 if compiled else d,
    }
    results = {"attention": of_attention} | {name: c * n * width for name, width in matmuls.items()}
    shared = shape.tensor > 1  # the loss then keeps logits and exponentials; see `tensor_parallel`
    return Activations(
        block=block,
        kept={
            name: r * part * d + sum(results[each] for each in keeps)
            for name, keeps in KEEPS.items()
        }
        | {"none": block},
        last=r * part * d + c * n * d + FP32 * part,
        loss=(1 + shared) * FP32 * n * vocabulary,
        loss_temporary=2 * FP32 * n * vocabulary,
        head_gradient=c * n * d,
        logits_gradient=c * n * vocabulary,
        forward_loss_temporary=(FP32 + casts) * n * vocabulary,
        block_temporary=max(swiglu, rotation, scores) + shared * c * n * d,
        residual_gradient=r * part * d,
    )


def inference_temporary(
    shape: ModelShape, batch: int, context: int, precision: Precision, attention: str = "sdpa"
) -> int:
    """Return the most bytes that an eager forward without gradients holds beyond the parameters.

    The arguments are those of `block_activations`.

    The largest of three moments. In attention: the residual stream, qkv's output, queries and keys
    after rotation, and the result; naive attention also holds the scores twice in the dtype of the
    computation and once in fp32 (in fp32: twice), and the mask. In SwiGLU: gate, its silu, up and
    the result. In the loss: logits, in fp32, and their log-softmax. A matrix in use also has its
    cast.
    """
    n, d, f, c, r = (
        batch * context,
        shape.d_model,
        shape.d_ff,
        precision.compute,
        precision.residual,
    )
    scores = n * shape.num_heads * context
    naive = (2 * FP32 * scores + context * context) * (attention == "naive")
    rotated, qkv = c * n * (d + shape.kv_width), c * n * (d + 2 * shape.kv_width)
    in_attention = r * n * d + qkv + rotated + (naive or c * n * d)
    in_swiglu = 2 * r * n * d + c * n * d + 4 * c * n * f + c * precision.copies_weights * d * f
    in_loss = (FP32 * 2 + (c if c != FP32 else 0)) * n * shape.vocab_size
    return max(in_attention, in_swiglu, in_loss)
