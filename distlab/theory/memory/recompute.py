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

torch ends a recomputation as soon as every saved tensor is there again. A segment's own level has
saved only the inputs of the segments inside it, so it stops before the last of these. The innermost
level stops before the last matmul of its last block, whose result is not saved. This holds without
autocast. Under autocast on a GPU, the lab's linear layer saves its tensors after its matmul, so the
last matmul also runs (`distlab.theory.operators`).

A block that is recomputed by itself may keep some results in addition to its input (`KEEPS`): those
of attention and matmuls, which then do not run again.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Segments:
    """Segments of blocks that are recomputed together, and segments of these.

    Attributes:
        sizes: blocks per segment, from the outermost level to the innermost: (8, 2) cuts segments
            of 8 blocks into segments of 2. Empty for no recomputation.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, plan: "int | Segments") -> "Segments":
        """Return the segments of a plan. A number k is one level of groups of k blocks, 0 none.

        Raises:
            ValueError: a size below one.
        """
        if isinstance(plan, Segments):
            segments = plan
        else:
            segments = cls((int(plan),) if plan else ())
        if min(segments.sizes, default=1) < 1:
            raise ValueError(f"{plan}: groups of at least one block, or 0 for none")
        return segments


def blocks_run_again(num_layers: int, segments: Segments) -> tuple[int, int]:
    """Return (runs of a block's forward in backward, how many of these stop early).

    Without autocast, a run that stops early leaves out the block's last matmul.

    Args:
        num_layers: number of blocks, L.
        segments: what is recomputed together.
    """
    if not segments.sizes:
        return 0, 0
    size, *sizes_inside = segments.sizes
    runs = stopped = 0
    for start in range(0, num_layers, size):
        blocks = min(size, num_layers - start)  # the last segment may be shorter
        if not sizes_inside:
            runs += blocks
            stopped += 1
            continue
        last_inside = blocks % sizes_inside[0] or sizes_inside[0]
        runs_inside, stopped_inside = blocks_run_again(blocks, Segments(tuple(sizes_inside)))
        runs += max(0, blocks - last_inside) + runs_inside
        stopped += stopped_inside
    return runs, stopped


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
    plan: int | Segments | tuple[str, ...],
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
    whose results it keeps, and less w2. Backward does not need the result of w2, and without
    autocast it does not run. Under autocast on a GPU it does, and is not counted here.

    Args:
        plan: number of blocks per group, 0 for none, or segments of segments, or for each block
            what it keeps (`activations.Activations.kept`).
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
    if not isinstance(plan, tuple):
        blocks, stopped = blocks_run_again(num_layers, Segments.of(plan))
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
