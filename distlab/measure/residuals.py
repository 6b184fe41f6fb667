"""What autograd saves for backward, block by block, and what gradients take.

A saved tensor is seen as it is handed to autograd (`torch.autograd.graph.saved_tensors_hooks`): by eager operators,
by hand-written Functions and by compiled graphs alike, which is what makes the three comparable. Parameters are left
out (they are there anyway), and a storage that several nodes save counts once, for the block that saved it first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

OUTSIDE = "outside the blocks"


@dataclass(frozen=True)
class Saved:
    """One tensor kept for backward.

    Attributes:
        shape, dtype: of the tensor; its storage may be larger.
        bytes: of its storage.
        made_by: the autograd node that computed it (``SiluBackward0``), through views and casts, with ``(cast)`` if
            there was one; ``leaf`` for what was given from outside or is a parameter's copy, and ``detached`` where
            the history does not say: masks, statistics, the inside of a compiled graph.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    made_by: str


def saved_for_backward(
    forward: Callable[[], object], model: nn.Module, blocks: Mapping[str, nn.Module]
) -> dict[str, list[Saved]]:
    """Run ``forward()`` once and list what it saves, by the block in which it happens.

    Args:
        forward: runs the model with gradients enabled; its result is kept until all is listed.
        model: whose parameters (and buffers) do not count.
        blocks: name → module; modules that run one after the other and not inside each other.

    Returns:
        name → its saved tensors, the largest first; `OUTSIDE` holds what was saved elsewhere: embedding, norm, head
        and loss. Under activation checkpointing a block's input counts and what is recomputed does not.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    seen: set[int] = set()
    found: dict[str, list[Saved]] = defaultdict(list)
    kept: list[Any] = []  # storages stay alive, so that no address is used twice
    inside = [OUTSIDE]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            kept.append(storage)
            found[inside[-1]].append(
                Saved(tuple(tensor.shape), tensor.dtype, storage.nbytes(), _maker(tensor))
            )
        return tensor

    with ExitStack() as undo:
        for name, block in blocks.items():
            before = block.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            after = block.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
            undo.callback(before.remove)
            undo.callback(after.remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept.append(forward())
    return {name: sorted(found[name], key=lambda saved: -saved.bytes) for name in [*blocks, OUTSIDE]}


_VIEWS = ("View", "UnsafeView", "T", "Transpose", "Permute", "Expand", "Squeeze", "Unsqueeze", "Unbind", "Split",
          "SplitWithSizes", "Reshape", "ReshapeAlias", "Alias", "AsStrided", "Select", "Slice")  # fmt: skip


def _maker(tensor: Tensor) -> str:
    node, cast = tensor.grad_fn, ""
    if node is None:
        return "leaf" if tensor.requires_grad else "detached"
    while (kind := node.name().rstrip("0123456789").removesuffix("Backward")) in (*_VIEWS, "ToCopy"):
        cast = " (cast)" if kind == "ToCopy" else cast
        following = [inner for inner, _ in node.next_functions if inner is not None]
        if not following:
            break
        node = following[0]
    name = "leaf" if "AccumulateGrad" in node.name() else node.name()
    return name + cast


def gradient_bytes(blocks: Mapping[str, nn.Module]) -> dict[str, int]:
    """Bytes of the gradients of each block's parameters, those without a gradient left out."""
    return {
        name: sum(p.grad.numel() * p.grad.element_size() for p in block.parameters() if p.grad is not None)
        for name, block in blocks.items()
    }
