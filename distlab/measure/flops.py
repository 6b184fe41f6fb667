"""Floating-point operations by kind of work, counted at torch's dispatcher while a step runs.

Matmuls and fused attentions are counted by torch's own formulas (`torch.utils.flop_counter`, in
which this lab's kernels are also registered). A multiply-add counts two. Everything else is counted
per element, and each arithmetic or transcendental operation counts one. This is coarse, but it
shows that these operations are per cents of the arithmetic and tens of per cents of the time.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from distlab.measure.collectives import tensors_in
from distlab.measure.trace.kernels import category

# Operations per element of the largest tensor that takes part, counted by hand from the formula of
# each operator. An operator that is not listed counts 1 if it computes element by element or
# reduces, and 0 if it only moves data.
_PER_ELEMENT = {
    "_softmax": 5,  # maximum, difference, exp, sum, quotient
    "_log_softmax": 5,
    "_softmax_backward_data": 4,
    "_log_softmax_backward_data": 4,
    "_fused_rms_norm": 4,  # square, sum, two multiplications
    "_fused_rms_norm_backward": 11,
    "native_layer_norm": 7,
    "native_layer_norm_backward": 14,
    "silu": 4,  # exp, sum, division, multiplication
    "silu_backward": 8,
    "gelu": 8,
    "gelu_backward": 16,
    "_fused_adamw_": 14,
    "_fused_adam_": 14,
    "rms_norm_forward": 5,
    "rms_norm_backward": 12,
    "swiglu_forward": 5,
    "swiglu_backward": 11,
    "rope": 3,
    "cross_entropy_forward": 5,
    "cross_entropy_gradient": 4,
}
_REDUCTIONS = ("sum", "mean", "linalg_vector_norm", "max", "amax", "var_mean")
_MOVES = ("copy", "fill", "zero", "clone")  # only move data, though torch tags some as pointwise
_KERNELS = "distlab_kernels"  # namespace of this lab's operators


class FlopsByCategory(TorchDispatchMode):
    """Counter of the FLOPs inside ``with FlopsByCategory() as counted:``, backward included.

    Compiled graphs run below the dispatcher, so their operations are not seen. They stay compiled.
    To count them, run the same step in eager mode.

    Attributes:
        flops: category (see `trace.kernels.category`) → number of operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled, as `CollectiveRecorder.ignore_compile_internals` does."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops[category(func._schema.name)] += _operations(func, args, kwargs, result)
        return result


def _operations(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """Return the number of floating-point operations of one call of an operator."""
    # By operator and not by overload: variants such as `out` have the same FLOPs.
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return formula(*args, **kwargs, out_val=result)
    _, _, name = func._schema.name.partition("::")
    if name.startswith("_scaled_dot_product"):
        # torch lists no formula for the fused attention of CPUs, but its functions take the same
        # shapes: those of the output's gradient (only in backward), q, k and v.
        shapes = [tensor.shape for tensor in args[:4] if isinstance(tensor, Tensor)]
        if "backward" in name:
            return sdpa_backward_flop_count(*shapes)
        return sdpa_flop_count(*shapes[:3])
    per_element = _operations_per_element(func, name)
    if per_element == 0:
        return 0
    if name.startswith(("_fused_adam", "_foreach_")):
        # They take lists of tensors. The first list is the parameters.
        return per_element * sum(tensor.numel() for tensor in tensors_in(args[0]))
    # Of inputs too: a reduction's result is smaller than the work.
    sizes = [tensor.numel() for tensor in tensors_in((args, result))]
    return per_element * max(sizes, default=0)


def _operations_per_element(func: Any, name: str) -> int:
    """Return the number of operations per element of an operator without a formula.

    Args:
        func: operator.
        name: name of the operator without its namespace.
    """
    if name in _PER_ELEMENT:
        return _PER_ELEMENT[name]
    plain_name = name.removeprefix("_foreach_").rstrip("_")
    if func.namespace not in ("aten", _KERNELS) or plain_name in _MOVES:
        return 0
    pointwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    return 1 if pointwise or plain_name in _REDUCTIONS else 0
