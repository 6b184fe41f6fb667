"""Predicted ratio to the naive form: bytes of each of its operations, at the rate of its kind.

The naive form runs on the meta device, where nothing is computed, under a counter at torch's
dispatcher. Torch's kernels for whole tensors reach the copy's bandwidth, those that broadcast a
smaller operand, reduce, or widen the dtype do not; the rates of the four kinds
(`measure.memory_traffic`) are measured in the run itself. The fused kernel is predicted to move the
least bytes, or those it knowingly moves, at the copy's bandwidth. Every number carries the time of
an empty kernel once.
"""

import contextlib
from collections import Counter

import torch

from experiments._traffic import TrafficLog

from .cases import Case, first, leaves, with_gradients


def naive_bytes(case: Case, direction: str) -> Counter[str] | None:
    """Return the traffic of the naive form by kind, one operation at a time. None without one."""
    operation = case.operation
    # The naive form of a stateful operation moves other tensors than its inputs.
    if operation.naive is None or operation.stateful:
        return None
    # Tensors on the meta device have shapes and no data, so nothing is computed.
    inputs = with_gradients(case.inputs("meta"))
    log, found = TrafficLog(), Counter()
    # The forward of a row that times only the backward is not part of it.
    with contextlib.nullcontext() if direction == "bwd" else log:
        out = first(operation.naive(*inputs))
    if direction != "fwd":
        with log:
            torch.autograd.grad(out, leaves(inputs), torch.empty_like(out))
    for operator, (kind, _) in zip(log.items, log.places, strict=True):
        found[kind] += operator.bytes
    return found


def predicted(case: Case, direction: str, limits: dict[str, float]) -> dict[str, float]:
    """Return `predicted_over_naive`, ours over the naive form.

    Empty for matmuls and without a naive form.

    Args:
        case, direction: the row.
        limits: `<kind>_gb_per_s` of each of KINDS and `empty_kernel_ms`, measured.
    """
    operation = case.operation
    # A matmul is bound by arithmetic, so its bytes predict nothing.
    traffic = None if operation.compute_bound else naive_bytes(case, direction)
    if traffic is None:
        return {}
    # Least bytes times the factor of a kernel that moves more on purpose.
    moved = operation.cost(direction).bytes * operation.traffic_factor.get(direction, 1)
    # bytes / (GB/s) is in 1e-9 s, so 1e6 makes it ms.
    naive_ms = sum(count / limits[f"{kind}_gb_per_s"] for kind, count in traffic.items()) / 1e6
    ours_ms = moved / limits["copy_gb_per_s"] / 1e6
    empty = limits["empty_kernel_ms"]
    return {"predicted_over_naive": (ours_ms + empty) / (naive_ms + empty)}
