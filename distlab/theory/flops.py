"""Floating-point operations of a training step of the Transformer, by part, and MFU.

A multiply-add counts two, so a matmul of (n × d) by (d × f) takes 2·n·d·f. Only matmuls count:
norms, softmax, SwiGLU's element-wise part and RoPE are below one per cent, and the embedding is a
look-up. The backward of a matmul Y = X W is two matmuls of the same size, dX = dY Wᵀ and
dW = Xᵀ dY. So backward takes twice the forward, and a step three times.

Convention: that of PaLM (Chowdhery et al. 2022, appendix B), which most MFU figures use. Attention
counts in full, although a causal kernel skips the masked half. Recomputation under activation
checkpointing does not count. The usual 6·N FLOPs per token is the part of it without the scores.
`causal=True` halves scores and values, which is the work that a good causal kernel really does. Say
which one a table uses.

Shapes: `B` batch, `T` context, `L` layers, `d` d_model, `f` d_ff, `k` width of the keys, `V`
vocabulary.
"""

from dataclasses import dataclass

from distlab.theory.checks import at_least_one


@dataclass(frozen=True)
class TransformerFlops:
    """FLOPs of one pass over a batch, by part of the model.

    Args:
        attention_projections: FLOPs of queries, keys, values and output, 4·B·T·d·(d + k) per layer.
            8·B·T·d² where k = d.
        attention_scores: FLOPs of scores and weighted values, 4·B·T²·d per layer, 2·B·T²·d if
            causal.
        feed_forward: FLOPs of SwiGLU's three matrices, 6·B·T·d·f per layer.
        head: FLOPs of the logits, 2·B·T·d·V.
    """

    attention_projections: int
    attention_scores: int
    feed_forward: int
    head: int

    @property
    def total(self) -> int:
        """FLOPs of all parts together."""
        return self.attention_projections + self.attention_scores + self.feed_forward + self.head


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
    """Return the FLOPs of one forward pass.

    The number of heads plays no part: H heads of width d/H cost what one of width d costs. Where
    heads share keys and values, the projections of these cost less. Scores cost the same.

    Args:
        batch: number of sequences, B.
        context: number of tokens of each sequence, T.
        d_model: width of the residual stream, d.
        d_ff: inner width of the feed-forward block, f.
        num_layers: number of blocks, L.
        vocab_size: number of rows of the head, V.
        kv_width: width of the keys of all heads, k, and of the values. None: d.
        causal: True to count the scores that a causal mask leaves, half of all.

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
    tokens = batch * context
    keys = d_model if kv_width is None else kv_width
    projected_columns = 2 * d_model + 2 * keys  # queries and output, keys and values
    matmuls_of_scores = 1 if causal else 2  # scores and weighted values, half of each if causal
    return TransformerFlops(
        # 2·n·inputs·outputs of each matmul, with n = B·T tokens.
        attention_projections=num_layers * 2 * tokens * d_model * projected_columns,
        attention_scores=num_layers * 2 * matmuls_of_scores * tokens * context * d_model,
        feed_forward=num_layers * 2 * tokens * 3 * d_model * d_ff,
        head=2 * tokens * d_model * vocab_size,
    )


def step_flops(
    *,
    batch: int,
    context: int,
    d_model: int,
    d_ff: int,
    num_layers: int,
    vocab_size: int,
    kv_width: int | None = None,
    causal: bool = False,
) -> int:
    """Return the FLOPs of forward and backward together, per rank and micro-batch.

    Backward takes twice the forward. The optimizer is left out: it takes some ten operations per
    parameter, a step six per parameter *and token*.

    Args:
        batch, context, d_model, d_ff, num_layers, vocab_size, kv_width, causal: arguments of
            `forward_flops`.

    Raises:
        ValueError: a size below one.
    """
    forward = forward_flops(
        batch=batch,
        context=context,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        vocab_size=vocab_size,
        kv_width=kv_width,
        causal=causal,
    )
    return 3 * forward.total


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilization: FLOPs per second over the device's peak, as a fraction.

    MFU counts the FLOPs that the model needs (`step_flops`). With the FLOPs of the hardware, which
    include recomputation (`memory.recompute.recomputed_flops`), it is HFU, hardware FLOPs
    utilization (Chowdhery et al. 2022). With full checkpointing it is about 4/3 of MFU, or less
    if the last matmul of each block is skipped.

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
