"""What autograd keeps between forward and backward, and what it briefly needs on top.

Counted operation by operation for the blocks of `ModelShape`, with n = B·T tokens, `c` bytes per element of the
computation, `r` bytes per element of the residual stream and keys of width k, d unless heads share them. Of one block
autograd saves

    the residual stream before each norm                2·r·n·d     (the adds themselves save nothing)
    statistics of both norms                            2·4·n
    the norms' outputs, inputs of qkv and of w1, w3     2·c·n·d
    attention: queries and keys after rotation          c·n·(d + k)
      fused kernels: qkv's output, kept whole by v     c·n·(d + 2·k)
                     output and log-sum-exp             c·n·d + 4·n·H
      naive:         v for every head, the merged heads 2·c·n·d
                     softmax in fp32, and cast to c     (4 + [c≠4]·c)·n·H·T
    w1 x, silu(w1 x), w3 x and silu(w1 x)·w3 x          4·c·n·f

Under autocast r = 4 and c = 2; in one dtype throughout r = c. Korthikanti et al. 2022 ("Reducing Activation
Recomputation in Large Transformer Models", eq. 2) count a GPT-2 block with dropout the same way.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from distlab.theory.checks import at_least_one
from distlab.theory.model_shape import ModelShape

FP32 = 4
ATTENTION = ("naive", "flash", "sdpa")


@dataclass(frozen=True)
class Precision:
    """In which dtypes a step computes and keeps things, as bytes per element.

    Args:
        compute: of matmuls.
        residual: of the residual stream.
        copies_weights: whether matrices are cast for matmuls and the copies kept for backward (autocast).
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
        block: of one block.
        kept: of one block until its backward, by what of it is not recomputed: only its input (`block`), beside it
            attention's output and log-sum-exp (`attention`), the output projection's result (`output`), queries, keys
            and values before rotation (`qkv`), SwiGLU's gate and up (`gate-up`), each with those before; or all
            (`none`).
        last: final norm and head.
        loss: kept by the cross-entropy, log-softmax in fp32.
        loss_temporary: on top of `loss` at the start of backward: gradients of log-softmax and of the logits, fp32.
        head_gradient: of the head's input.
        logits_gradient: what reaches the head, in the dtype of the computation.
        forward_loss_temporary: on top of `loss` while it is computed: the logits, and their fp32 form.
        block_temporary: most that one block's backward needs besides what it frees.
        residual_gradient: the gradient that travels down the residual stream.
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
        """Of one block whose activations are all recomputed: its input."""
        return self.kept["block"]


def block_activations(
    shape: ModelShape, batch: int, context: int, precision: Precision, attention: str = "sdpa"
) -> int:
    """Bytes that autograd keeps of one block; see the table above.

    Args:
        batch, context: B sequences of T tokens on this rank.
        attention: `flash` or `sdpa` (nothing of size T² is kept), or `naive`.

    Raises:
        ValueError: an unknown attention, or a batch or context below one.
    """
    at_least_one(batch=batch, context=context)
    if attention not in ATTENTION:
        raise ValueError(f"attention={attention!r}: choose one of {', '.join(ATTENTION)}")
    n, d, f, heads = batch * context, shape.d_model, shape.d_ff, shape.num_heads
    c, r = precision.compute, precision.residual
    if attention == "naive":
        of_attention = 4 * c * n * d + (FP32 + (c if c != FP32 else 0)) * n * heads * context
    else:
        of_attention = c * n * (3 * d + 3 * shape.kv_width) + FP32 * n * heads
    return 2 * r * n * d + 2 * FP32 * n + 2 * c * n * d + of_attention + 4 * c * n * f


def activations(
    shape: ModelShape, batch: int, context: int, precision: Precision, attention: str = "sdpa"
) -> Activations:
    """All parts for a batch on one rank; arguments and errors as `block_activations`."""
    block = block_activations(shape, batch, context, precision, attention)
    n, d, f, vocabulary = batch * context, shape.d_model, shape.d_ff, shape.vocab_size
    c, r = precision.compute, precision.residual
    casts = c if c != FP32 else 0  # the logits exist in both dtypes
    # silu·up backward: gradients of silu·up and of both factors; silu(w1 x) is not computed again.
    swiglu = 3 * c * n * f
    scores = (2 * FP32 if attention == "naive" else 0) * n * shape.num_heads * context
    # rope's backward in fp32: gradient times table, its roll, and their sum
    rotation = 3 * FP32 * n * (d + shape.kv_width)
    fused = attention != "naive"  # else nothing of attention is kept: backward needs the scores anyway
    more = {
        "block": r * n * d,
        "attention": fused * (c * n * d + FP32 * n * shape.num_heads),
        "output": c * n * d,
        "qkv": c * n * (d + 2 * shape.kv_width),
        "gate-up": 2 * c * n * f,
    }
    return Activations(
        block=block,
        kept=dict(zip(more, itertools.accumulate(more.values()), strict=True)) | {"none": block},
        last=(r + c) * n * d + FP32 * n,
        loss=FP32 * n * vocabulary,
        loss_temporary=2 * FP32 * n * vocabulary,
        head_gradient=c * n * d,
        logits_gradient=c * n * vocabulary,
        forward_loss_temporary=(FP32 + casts) * n * vocabulary,
        block_temporary=max(swiglu, rotation, scores),
        residual_gradient=r * n * d,
    )
