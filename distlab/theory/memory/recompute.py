"""Activation checkpointing in groups: memory at worst, repeated work, and the best group size.

A group of k blocks keeps its input, c bytes, instead of its blocks' activations, b bytes each.
While it runs backward it needs those of its blocks. With ⌈L/k⌉ groups of L blocks that is, at
worst,

    ⌈L/k⌉·c + k·b,        least near k = √(L·c/b), where the derivative −L·c/k² + b vanishes

(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", sec. 3; they count c = b, hence
√L).

Segments may be cut into segments again, which then run forward once more. With c = b, m levels of
equal cuts keep (m + 1)·L^(1/(m+1)) inputs: 2·√L with one level, about 2·log₂ L when every segment
is halved. A block runs again once per level, so halving takes L·log₂ L runs (Chen et al.).
√L·log₂ L inputs bound all of these from above, for 16 blocks and more.

A block that is recomputed by itself may keep some results in addition to its input (`KEEPS`): those
of attention and matmuls, which then do not run again.
"""

from distlab.theory.flops import forward_flops

# Name of the choice → operations whose results a recomputed block keeps in addition to its input.
# w1 and w3 are gate and up. What costs most to recompute per byte comes first. `selective` keeps
# attention and every other matmul, as torchtitan's policy "op" does. A block of `none` is not
# recomputed.
KEEPS: dict[str, tuple[str, ...]] = {
    "block": (),
    "attention": ("attention",),
    "output": ("attention", "output"),
    "qkv": ("attention", "output", "qkv"),
    "gate-up": ("attention", "output", "qkv", "w1", "w3"),
    "selective": ("attention", "qkv", "w1", "w2"),
}
RECOMPUTATION = (*KEEPS, "none")


def blocks_run_again(num_layers: int, group: int) -> tuple[int, int]:
    """Return (blocks that run forward again, runs of these that stop before their last matmul).

    torch ends a recomputation as soon as every saved tensor is there again. So a group stops before
    the last matmul of its last block, whose result is not saved. With k > 0 there are ⌈L/k⌉ groups.

    Args:
        num_layers: number of blocks, L.
        group: number of blocks in a group, k. 0 for no recomputation.
    """
    if group == 0:
        return 0, 0
    groups = -(-num_layers // group)
    return num_layers, groups


def nested_bytes(
    num_layers: int, segments: tuple[int, ...], *, input_bytes: int, block_bytes: int
) -> int:
    """Return the bytes that segments of segments keep at worst.

    Every level keeps the inputs of its segments. A segment's inner levels exist only while it runs
    backward, so they count once. Each block runs forward again once per level.

    Args:
        num_layers: number of blocks, L.
        segments: blocks per segment, from the outermost level to the innermost: (8, 2) cuts
            segments of 8 blocks into segments of 2.
        input_bytes: bytes of a segment's input, c.
        block_bytes: bytes that a block keeps for its backward, b.
    """
    kept = 0
    blocks = num_layers
    for segment in segments:
        inputs = -(-blocks // segment)  # rounded up
        kept += inputs * input_bytes
        blocks = segment
    return kept + blocks * block_bytes


def recomputed_flops(
    plan: int | tuple[str, ...],
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
    """Return the FLOPs of all that runs again, per rank and micro-batch.

    A block costs its forward's FLOPs (`distlab.theory.flops.forward_flops`), less the operations
    whose results it keeps, and less w2, whose result backward does not need.

    Args:
        plan: number of blocks per group, 0 for none, or for each block what it keeps
            (`activations.Activations.kept`).
        batch, context, d_model, d_ff, num_layers, vocab_size, kv_width, causal: arguments of
            `forward_flops`.

    Raises:
        ValueError: a size or a group below one.
    """
    one_block = forward_flops(
        batch=batch,
        context=context,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=1,
        vocab_size=vocab_size,
        kv_width=kv_width,
        causal=causal,
    )
    # w1, w3 and w2 have d·f elements each.
    matrix_of_feed_forward = one_block.feed_forward // 3
    if isinstance(plan, int):
        blocks, stopped = blocks_run_again(num_layers, plan)
        return blocks * (one_block.total - one_block.head) - stopped * matrix_of_feed_forward
    # Of the projections' 2·d + 2·k columns, the output's are d.
    keys = d_model if kv_width is None else kv_width
    output = one_block.attention_projections * d_model // (2 * (d_model + keys))
    flops_of = {
        "attention": one_block.attention_scores,
        "output": output,
        "qkv": one_block.attention_projections - output,
        "w1": matrix_of_feed_forward,
        "w3": matrix_of_feed_forward,
    }
    # w2 has no entry above: no choice runs it again.
    flops_again = {"none": 0}
    for choice, kept in KEEPS.items():
        flops_again[choice] = sum(flops for name, flops in flops_of.items() if name not in kept)
    return sum(flops_again[choice] for choice in plan)
