"""Activation checkpointing in groups: what is kept at worst, what runs again, and which group size keeps least.

A group of k blocks keeps its input, c bytes, instead of its blocks' activations, b bytes each; while it runs backward
it needs those of its blocks. With ⌈L/k⌉ groups of L blocks that is, at worst,

    ⌈L/k⌉·c + k·b,        least near k = √(L·c/b)

(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", sec. 3; they count c = b, hence √L). Groups inside
groups replace b by the same expression of the nested groups, but run blocks once more.
"""

import math

from distlab.theory.checks import at_least_one
from distlab.theory.flops import forward_flops


def kept_bytes(num_layers: int, groups: tuple[int, ...], block: int, checkpoint: int) -> int:
    """Most that blocks keep at once, in bytes: the inputs of groups, and the activations of the innermost one.

    Args:
        num_layers: L, blocks.
        groups: blocks per group, outermost level first; empty for no checkpointing.
        block, checkpoint: bytes that one block keeps, and that an input takes (`activations`).

    Raises:
        ValueError: a group of less than one block.
    """
    at_least_one(num_layers=num_layers, groups=min(groups, default=1))
    if not groups:
        return num_layers * block
    size = min(groups[0], num_layers)
    # The group's own input is the first of what its innermost blocks keep.
    return (-(-num_layers // size) - 1) * checkpoint + kept_bytes(size, groups[1:], block, checkpoint)


def best_group_size(num_layers: int, block: int, checkpoint: int) -> int:
    """The group size of a single level that keeps least, the smallest where several do; arguments as `kept_bytes`."""
    sizes = range(1, num_layers + 1)
    return min(sizes, key=lambda size: kept_bytes(num_layers, (size,), block, checkpoint))


def best_group_size_estimate(num_layers: int, block: int, checkpoint: int) -> float:
    """√(L·c/b), where the expression above would be least if sizes were no integers."""
    return math.sqrt(num_layers * checkpoint / block)


def blocks_run_again(num_layers: int, groups: tuple[int, ...]) -> tuple[int, int]:
    """(blocks that run forward again, how many of these runs stop before their last matmul).

    torch ends a recomputation as soon as everything that was saved is there again. So the innermost group stops before
    the last matmul of its last block, whose result nobody saved; and a group with groups inside does not run the last
    of these at all, since their inputs are all that it saved.

    Raises:
        ValueError: a group of less than one block.
    """
    at_least_one(num_layers=num_layers, groups=min(groups, default=1))
    if not groups:
        return 0, 0
    again = stopped = 0
    for start in range(0, num_layers, groups[0]):
        size = min(groups[0], num_layers - start)
        if len(groups) == 1:
            again, stopped = again + size, stopped + 1
            continue
        inside, inside_stopped = blocks_run_again(size, groups[1:])
        last = size - (-(-size // groups[1]) - 1) * groups[1]
        again, stopped = again + size - last + inside, stopped + inside_stopped
    return again, stopped


def recomputed_flops(plan: tuple[int, ...] | tuple[str, ...], *, num_layers: int, **sizes: int) -> int:
    """FLOPs of all that runs again, per rank and micro-batch; sizes as `distlab.theory.flops.forward_flops`.

    Args:
        plan: blocks per group, outermost level first, or what each block keeps (`activations.Activations.kept`).

    Raises:
        ValueError: a size or a group below one.
    """
    one = forward_flops(num_layers=1, **sizes)
    levels = [level for level in plan if isinstance(level, str)]
    if not levels:
        again, stopped = blocks_run_again(num_layers, plan)
        return again * (one.total - one.head) - stopped * one.feed_forward // 3
    output = one.attention_projections * sizes["d_model"] // (
        2 * (sizes["d_model"] + sizes.get("kv_width", sizes["d_model"]))
    )
    runs = {  # in the order in which they are kept; of the feed-forward two matmuls of three
        "block": one.attention_scores, "attention": output, "output": one.attention_projections - output,
        "qkv": one.feed_forward * 2 // 3, "gate-up": 0,
    }  # fmt: skip
    rest = {level: sum(list(runs.values())[number:]) for number, level in enumerate(runs)} | {"none": 0}
    return sum(rest[level] for level in levels)
