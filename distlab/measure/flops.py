"""Floating-point operations by kind of work, counted at torch's dispatcher while a step runs.

Matmuls and fused attentions are counted by torch's own formulas (`torch.utils.flop_counter`, in
which this lab's kernels are registered too): a multiply-add is two. Everything else is counted per
element, an arithmetic or transcendental operation being one: coarse, but it shows what matters,
that these are per cents of the arithmetic and tens of per cents of the time.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from distlab.measure.collectives import tensors_in
from distlab.measure.trace.kernels import category

# Operations per element of the largest tensor that takes part. What is not listed is 1 if it
# computes element by element or reduces, and 0 if it only moves data.
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
_KERNELS = "distlab_kernels"


class FlopsByCategory(TorchDispatchMode):
    """Count the FLOPs inside ``with FlopsByCategory() as counted:``, backward included.

    Compiled graphs run below the dispatcher and are not seen. They stay compiled: count the same
    step in eager mode.

    Attributes:
        flops: category (see `category`) → operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled; see `CollectiveRecorder.ignore_compile_internals`."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops[category(func._schema.name)] += _operations(func, args, kwargs, result)
        return result


def _operations(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return formula(*args, **kwargs, out_val=result)
    name = func._schema.name.partition("::")[2]
    if name.startswith("_scaled_dot_product"):  # torch lists no formula for the one of CPUs
        shapes = [tensor.shape for tensor in args[:4] if isinstance(tensor, Tensor)]
        return (
            sdpa_backward_flop_count(*shapes)
            if "backward" in name
            else sdpa_flop_count(*shapes[:3])
        )
    per_element = _PER_ELEMENT.get(name)
    if per_element is None:
        plain = name.removeprefix("_foreach_").rstrip("_")
        moves = func.namespace not in ("aten", _KERNELS) or plain in (
            "copy",
            "fill",
            "zero",
            "clone",
        )
        counts = (
            torch.Tag.pointwise in func.tags or plain in _REDUCTIONS or name.startswith("_foreach_")
        )
        if moves or not counts:
            return 0
        per_element = 1
    # lists of tensors; the first is the parameters
    if name.startswith(("_fused_adam", "_foreach_")):
        return per_element * sum(tensor.numel() for tensor in tensors_in(args[0]))
    return per_element * max((tensor.numel() for tensor in tensors_in((args, result))), default=0)
