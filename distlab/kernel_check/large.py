"""One input per operation with a tensor of more than 2³¹ elements, as a GPU has room for.

An offset beyond 2³¹ − 1 does not fit an int32. A kernel that computes `row * stride` in int32 is
right on every smaller tensor. Nothing of this size is computed in float64: only rows at the
beginning, around element 2³¹ and at the end are compared. Rows are independent of each other. Where
a result sums over them, as a mean over targets or the gradient of a weight does, all other rows
have no target and no upstream gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.kernel_check.calls import Function, call_of
from distlab.kernel_check.hostile import DTYPES, Case, rope_table
from distlab.kernel_check.judge import (
    Expected,
    Outcome,
    Run,
    as_tuple,
    every_input_compiled,
    guarded_outcome,
    upstream_of,
)
from distlab.kernel_check.operations import IGNORED, Argument, Operation, Sizes

ELEMENTS = 2**31  # the first element whose offset does not fit an int32
DTYPE = "fp16"
MORE_ROWS = 4  # rows that begin at or after this element
ABOVE = " above 2³¹ elements"  # appended to the description of a fault
# Memory in large tensors: one for each argument and one for its gradient, and these for results,
# their gradients and what the kernel allocates.
MORE_TENSORS = 4


@dataclass(frozen=True)
class Large:
    """Sizes of a large input.

    Attributes:
        tensor: names of the sizes of the tensor that is large. The first is computed.
        others: name → size of all others.
    """

    tensor: tuple[str, ...]
    others: Sizes

    @property
    def per_row(self) -> int:
        """Elements of the large tensor in one row of its first dimension."""
        return math.prod(self.others[name] for name in self.tensor[1:])


ROWS = Large(("N", "D"), {"D": 1024})
HEADS = {"H": 16, "T": 1024, "D": 128}
LARGE = {
    "rope": Large(("B", "T", "D"), {"T": 1024, "D": 128}),
    # The logits, which a kernel that is not fused in this way stores.
    "linear_cross_entropy": Large(("N", "V"), {"D": 64, "V": 2**17}),
    "matmul": Large(("M", "K"), {"K": 1024, "N": 16}),
    "attention": Large(("B", "H", "T", "D"), HEADS | {"S": 1024}),
    "causal_attention": Large(("B", "H", "T", "D"), HEADS),
}  # All other operations have `ROWS`.


def large_case(operation: Operation, *, backward: bool, elements: int = ELEMENTS) -> Case:
    """Return the input whose largest tensor has a little more than `elements` elements."""
    large = LARGE.get(operation.name, ROWS)
    rows = elements // large.per_row + MORE_ROWS
    sizes = {large.tensor[0]: rows, **large.others}
    upstream = "contiguous" if backward else None
    return Case(operation.name, tuple(sizes.items()), DTYPE, upstream=upstream)


def judge_large(
    function: Function,
    operation: Operation,
    case: Case,
    device: torch.device,
    elements: int = ELEMENTS,
) -> Outcome:
    """Run a kernel on a large input and judge some rows of what it returns.

    Args:
        function, operation, device: as in `judge`.
        case: input of `large_case`.
        elements: number of elements that `large_case` was given.

    Returns:
        The outcome. Its status is `not tried` if the device has not enough free memory.
    """
    needed = _bytes_needed(operation, case)
    if device.type == "cuda":
        # The allocator's cached blocks would count as taken.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if free < needed:
            detail = (
                f"tensors{ABOVE} need {needed / 2**30:.0f} GiB of the GPU's memory, and "
                f"{free / 2**30:.0f} GiB are free"
            )
            return Outcome(case, "not tried", detail=detail)
    parts = _parts(operation, case, elements)
    tensors = _drawn(operation, case, parts, device)
    rows = [_rows_of(each, tensor, operation, parts) for each, tensor in _named(operation, tensors)]
    # Before the kernel runs, which may overwrite its inputs.
    expected = Expected(operation, case, rows)
    # The comparison has its own copies on the CPU.
    del rows
    call = call_of(function, operation)

    def work() -> Outcome:
        found = _run(call, operation, case, tensors, parts)
        expected.compare(found)
        return Outcome(case, "right", has_backward=found.has_backward)

    outcome = guarded_outcome(case, device, work)
    if outcome.status == "wrong":
        compared = ", ".join(f"{part.start}, {part.stop - 1}" for part in parts)
        detail = f"{outcome.detail}. Rows are counted among those compared: {compared}"
        return Outcome(case, "wrong", outcome.kind + ABOVE, detail)
    return outcome


def _bytes_needed(operation: Operation, case: Case) -> int:
    large = LARGE.get(operation.name, ROWS)
    sizes = dict(case.sizes)
    elements = math.prod(sizes[name] for name in large.tensor)
    tensors = 2 * len(operation.arguments) + MORE_TENSORS
    return tensors * elements * DTYPES[case.dtype].itemsize


def _parts(operation: Operation, case: Case, elements: int) -> list[slice]:
    """Return the rows to compare: at the beginning, around element `elements` and at the end."""
    large = LARGE.get(operation.name, ROWS)
    rows = dict(case.sizes)[large.tensor[0]]
    border = elements // large.per_row
    return [slice(0, 2), slice(border - 1, border + 1), slice(rows - 2, rows)]


def _has_rows(argument: Argument, operation: Operation) -> bool:
    """Return whether an argument has the dimension that is cut into rows."""
    return argument.shape[0] == operation.arguments[0].shape[0]


def _named(operation: Operation, tensors: Sequence[Tensor]) -> list[tuple[Argument, Tensor]]:
    return list(zip(operation.arguments, tensors, strict=True))


def _rows_of(
    argument: Argument, tensor: Tensor, operation: Operation, parts: Sequence[slice]
) -> Tensor:
    """Return the rows to compare of an argument or its gradient, or all of one without rows."""
    if not _has_rows(argument, operation):
        return tensor
    return torch.cat([tensor[part] for part in parts])


def _drawn(
    operation: Operation, case: Case, parts: Sequence[slice], device: torch.device
) -> list[Tensor]:
    """Return the tensors of a large case, drawn on the device."""
    generator = torch.Generator(device).manual_seed(case.seed)
    sizes = dict(case.sizes)
    dtype = DTYPES[case.dtype]
    tensors = []
    for argument in operation.arguments:
        shape = tuple(sizes[name] for name in argument.shape)
        if argument.role == "targets":
            # Only the rows to compare count in the mean, so their loss can be computed without the
            # others.
            targets = torch.full(shape, IGNORED, device=device)
            for part in parts:
                classes = sizes[argument.of]
                targets[part].random_(classes, generator=generator)
            tensors.append(targets)
            continue
        if argument.role in ("cosines", "sines"):
            tensors.append(rope_table(argument.role, *shape).to(device, torch.float32))
            continue
        values = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        if argument.role in ("weight", "small"):
            values.mul_(0.1)
        if argument.role == "weight":
            values.add_(1)
        tensors.append(values)
    return tensors


def _run(
    call: Function,
    operation: Operation,
    case: Case,
    tensors: Sequence[Tensor],
    parts: Sequence[slice],
) -> Run:
    """Call a kernel and its backward. Return the rows to compare, on the CPU."""
    leaves = []
    for argument, tensor in _named(operation, tensors):
        wants_gradient = case.upstream is not None and argument.has_gradient
        leaves.append(tensor.detach().requires_grad_(wants_gradient))
    with every_input_compiled():
        results = as_tuple(call(*leaves))
    rows = []
    with_graph = []
    upstream = []
    for result in results:
        mine = result.detach()
        if mine.ndim:
            # A slice and not an index: a result with too few rows has a wrong shape, and no more.
            mine = torch.cat([mine[part] for part in parts])
        rows.append(mine)
        if case.upstream is not None and result.requires_grad:
            with_graph.append(result)
            upstream.append(_spread(upstream_of(mine, case), result, parts))
    gradients = {}
    if with_graph:
        with every_input_compiled(), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(with_graph, upstream)
        for argument, leaf in _named(operation, leaves):
            if not argument.has_gradient:
                continue
            gradient = leaf.grad
            if gradient is not None:
                gradient = _rows_of(argument, gradient, operation, parts)
            gradients[argument.name] = gradient
    return Run(tuple(rows), gradients).to_cpu()


def _spread(gradient: Tensor, result: Tensor, parts: Sequence[slice]) -> Tensor:
    """Return the upstream gradient of a whole result: that of the rows to compare, and else 0."""
    if result.ndim == 0:
        return gradient
    whole = torch.zeros_like(result)
    start = 0
    for part in parts:
        target = whole[part]
        target.copy_(gradient[start : start + target.shape[0]])
        start += target.shape[0]
    return whole
