"""Which dtypes a module computes in under `compute_dtype`: its parameters, its inputs, its outputs."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

Casts = tuple[torch.dtype, torch.dtype | None]  # of inputs and outputs; None: as they are


def parameter_dtype(
    owner: nn.Module, parameter: nn.Parameter, compute_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the dtype that `owner`'s forward finds `parameter` in.

    Matrices are sent, so they are cast: that halves what is sent. A bias enters the matmul, so it
    is cast with the matrix. What else is a vector (norms) is never sent and stays in the master's
    dtype: a weight near one rounded to bf16 would be off by up to 0.4 %, the same way in every
    token. BatchNorm keeps its dtype, because its running statistics do; so do integers.
    """
    if compute_dtype is None or not parameter.is_floating_point() or isinstance(owner, _BatchNorm):
        return parameter.dtype
    # A matrix in the module or below it may be combined with its vectors.
    if any(p.ndim >= 2 and p.is_floating_point() for p in owner.parameters()):
        return compute_dtype
    return torch.promote_types(torch.promote_types(parameter.dtype, torch.float32), compute_dtype)


def plan_casts(owners: Iterable[nn.Module], compute_dtype: torch.dtype) -> dict[nn.Module, Casts]:
    """Dtypes of the floating-point tensors that each module with parameters is given, and returns (None: as they are).

    A module that holds vectors only computes in their dtype, because most of torch's operations
    refuse operands of two dtypes, and returns the compute dtype. One whose class says
    `takes_mixed_dtypes = True` gets its inputs in the compute dtype beside its fp32 parameters,
    which spares both casts; it must return its input's dtype.
    """
    casts = {}
    for owner in owners:
        dtypes = [
            parameter_dtype(owner, parameter, compute_dtype)
            for parameter in owner._parameters.values()
            if parameter is not None and parameter.is_floating_point()
        ]
        if not dtypes:
            continue
        if isinstance(owner, _BatchNorm):
            casts[owner] = (dtypes[0], None)
        elif compute_dtype in dtypes or getattr(owner, "takes_mixed_dtypes", False):
            casts[owner] = (compute_dtype, None)
        else:
            casts[owner] = (dtypes[0], compute_dtype)
    return casts


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    if kwargs:
        kwargs = {name: _cast(dtype, value) for name, value in kwargs.items()}
    return tuple([_cast(dtype, value) for value in args]), kwargs


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    if type(output) is tuple:
        return tuple(_cast(dtype, value) for value in output)
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype is dtype or not value.is_floating_point():
        return value
    return value.to(dtype)


def hook_casts(casts: Mapping[nn.Module, Casts]) -> Iterator[RemovableHandle]:
    """Give these modules their floating-point tensors, and take their outputs, in the dtypes stated."""
    for module, (inputs, outputs) in casts.items():
        yield module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)
        if outputs is not None:
            yield module.register_forward_hook(partial(_cast_outputs, outputs))
