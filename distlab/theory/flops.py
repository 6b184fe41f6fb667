"""Floating-point operations of a training step of the Transformer, by part, and MFU.

A multiply-add counts two. Only matmuls count: norms, softmax, SwiGLU's element-wise part and RoPE
are below one per cent, and the embedding is a look-up. The backward of a matmul Y = X W is two
matmuls of the same size, dX = dY Wᵀ and dW = Xᵀ dY, hence twice the forward.

Convention: that of PaLM (Chowdhery et al. 2022, appendix B), the one most MFU figures use:
attention counts in full, although a causal kernel skips the masked half, and recomputation under
activation checkpointing does not count. The usual 6·N FLOPs per token is the part of it without the
scores. `causal=True` halves scores and values, which is the work a good causal kernel really does;
say which one a table uses.

Shapes: `B` batch, `T` context, `L` layers, `d` d_model, `f` d_ff, `k` width of the keys, `V`
vocabulary.
"""

from dataclasses import dataclass

from distlab.theory.checks import at_least_one


@dataclass(frozen=True)
class TransformerFlops:
    """FLOPs of one pass over a batch, by part of the model.

    Args:
        attention_projections: queries, keys, values and output, 4·B·T·d·(d + k) per layer; 8·B·T·d²
            where k = d.
        attention_scores: scores and weighted values, 4·B·T²·d per layer (2·B·T²·d if causal).
        feed_forward: SwiGLU's three matrices, 6·B·T·d·f per layer.
        head: logits, 2·B·T·d·V.
    """

    attention_projections: int
    attention_scores: int
    feed_forward: int
    head: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(vars(self).values())


def forward_flops(
    *,
    batch: int,
    context: int,
    d_model: int,
    d_ff: int,
    num_layers: int,
    vocab_size: int,
    kv_width: int | None = None,
    causal: bool = False,
) -> TransformerFlops:
    """FLOPs of one forward pass over `batch` sequences of `context` tokens.

    The number of heads plays no part: H heads of width d/H cost what one of width d costs. Where
    heads share keys and values, these are of `kv_width` (default d) and their projections cost
    less; scores cost the same.

    Raises:
        ValueError: a size below one.
    """
    at_least_one(
        batch=batch,
        context=context,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        vocab_size=vocab_size,
    )
    tokens, keys = batch * context, d_model if kv_width is None else kv_width
    return TransformerFlops(
        attention_projections=num_layers * 2 * tokens * d_model * (2 * d_model + 2 * keys),
        attention_scores=num_layers * (2 if causal else 4) * tokens * context * d_model,
        feed_forward=num_layers * 2 * tokens * 3 * d_model * d_ff,
        head=2 * tokens * d_model * vocab_size,
    )


def step_flops(**sizes: int) -> int:
    """Return the FLOPs of forward and backward together, per rank and micro-batch.

    The arguments are those of `forward_flops`.

    The optimizer is left out: some ten operations per parameter, against six per parameter *and
    token*.
    """
    return 3 * forward_flops(**sizes).total


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation: FLOPs per second over the device's peak, as a fraction.

    MFU counts the FLOPs that the model needs (`step_flops`). With the FLOPs of the hardware, which
    include recomputation (`memory.recompute.recomputed_flops`), it is HFU, hardware FLOPs
    utilisation (Chowdhery et al. 2022): with full checkpointing about 4/3 of MFU.

    Args:
        flops: FLOPs on one device.
        seconds: seconds that they took.
        peak: dense FLOP/s of that device in the dtype of the matmuls
            (`distlab.hardware.peak_flops`). None if the device is unknown.

    Returns:
        None without a peak: a guessed one gives figures above 100 %.

    Raises:
        ValueError: a time or a peak that is not positive, negative FLOPs.
    """
    if flops < 0 or not seconds > 0 or (peak is not None and not peak > 0):
        raise ValueError(
            f"flops={flops}, seconds={seconds}, peak={peak}: time and peak must be positive"
        )
    return None if peak is None else flops / seconds / peak
