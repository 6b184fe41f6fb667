"""Activation checkpointing in groups: memory at worst, repeated work, and the best group size.

A group of k blocks keeps its input, c bytes, instead of its blocks' activations, b bytes each;
while it runs backward it needs those of its blocks. With ⌈L/k⌉ groups of L blocks that is, at
worst,

    ⌈L/k⌉·c + k·b,        least near k = √(L·c/b)

(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", sec. 3; they count c = b, hence
√L).

A block that is recomputed by itself may keep some results in addition to its input (`KEEPS`): those
of attention and matmuls, which then do not run again.
"""

from distlab.theory.flops import forward_flops

# Whose results a recomputed block keeps beside its input, by the name of the choice; w1 and w3 are
# gate and up. What costs most to recompute per byte comes first; `selective` keeps attention and
# every other matmul, as torchtitan's policy "op" does. A block of `none` is not recomputed.
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

    torch ends a recomputation as soon as every saved tensor is there again: a group stops before
    the last matmul of its last block, whose result is not saved.
    """
    return (num_layers, -(-num_layers // group)) if group else (0, 0)


def recomputed_flops(plan: int | tuple[str, ...], *, num_layers: int, **sizes: int) -> int:
    """Return the FLOPs of all that runs again, per rank and micro-batch.

    The sizes are those of `distlab.theory.flops.forward_flops`.

    Args:
        plan: number of blocks per group, 0 for none, or for each block what it keeps
            (`activations.Activations.kept`).

    Raises:
        ValueError: a size or a group below one.
    """
    one = forward_flops(num_layers=1, **sizes)
    if isinstance(plan, int):
        again, stopped = blocks_run_again(num_layers, plan)
        return again * (one.total - one.head) - stopped * one.feed_forward // 3
    output = (
        one.attention_projections
        * sizes["d_model"]
        // (2 * (sizes["d_model"] + sizes.get("kv_width", sizes["d_model"])))
    )
    runs = {  # w2 never: nobody needs its result
        "attention": one.attention_scores,
        "output": output,
        "qkv": one.attention_projections - output,
        "w1": one.feed_forward // 3,
        "w3": one.feed_forward // 3,
    }
    again = {
        level: sum(runs[name] for name in runs if name not in keeps)
        for level, keeps in KEEPS.items()
    }
    return sum((again | {"none": 0})[level] for level in plan)
