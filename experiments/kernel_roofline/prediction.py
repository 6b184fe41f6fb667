"""The ratio to the naive form, predicted: what each of its operations moves, at the rate that its kind reaches.

The naive form runs on the meta device, where nothing is computed, under a counter at torch's dispatcher. Torch's
kernels for whole tensors reach the copy's bandwidth, those that broadcast a smaller operand, reduce, or widen the dtype
do not; the rates of the four kinds (`measure.memory_traffic`) are measured in the run itself. The fused kernel is
predicted to move the least bytes, or those it knowingly moves, at the copy's bandwidth. Every number carries the time
of an empty kernel once.
"""

import contextlib
from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.measure.memory_traffic import kind_of, stored

from .cases import Case, first, leaves, with_gradients


class TrafficCounter(TorchDispatchMode):
    """`bytes`, kind → bytes that dispatched operations read and write; views and empty allocations are left out."""

    FREE = ("view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute", "slice", "select", "detach",
            "alias", "empty", "t.", "as_strided", "split", "unbind", "chunk")

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::")
        if not any(name.startswith(free) for free in self.FREE):
            inputs, outputs = (_tensors(tree) for tree in ((args, kwargs), out))
            everything = {id(t): t for t in (*inputs, *outputs)}.values()
            self.bytes[kind_of(inputs, outputs)] += sum(stored(t) * t.element_size() for t in everything)
        return out


def _tensors(tree: object) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def naive_bytes(case: Case, direction: str) -> Counter[str] | None:
    """Traffic of the naive form by kind, one operation at a time; None where there is no naive form."""
    if "naive" not in case.variants or case.name == "adamw":  # adamw's tensors are not those of its call
        return None
    inputs = with_gradients(case.inputs("meta"))
    counter = TrafficCounter()
    with counter if direction in ("fwd", "both") else contextlib.nullcontext():
        out = first(case.variants["naive"](*inputs))
    if direction in ("bwd", "both"):
        with counter:
            torch.autograd.grad(out, leaves(inputs), torch.empty_like(out))
    return counter.bytes


def predicted(case: Case, direction: str, limits: dict[str, float]) -> dict[str, float]:
    """`predicted_over_naive`, ours over the naive form; empty for matmuls and without a naive form.

    Args:
        case, direction: the row.
        limits: `<kind>_gb_per_s` of each of KINDS and `empty_kernel_ms`, measured.
    """
    traffic = None if case.compute else naive_bytes(case, direction)
    if traffic is None:
        return {}
    least = case.cost(direction).bytes * case.moves.get(direction, 1)
    naive_ms = sum(count / limits[f"{kind}_gb_per_s"] for kind, count in traffic.items()) / 1e6
    empty, ours_ms = limits["empty_kernel_ms"], least / limits["copy_gb_per_s"] / 1e6
    return {"predicted_over_naive": (ours_ms + empty) / (naive_ms + empty)}
