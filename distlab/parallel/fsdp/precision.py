"""Which parameters, inputs and outputs have which dtype under a compute dtype.

Matrices are sent, so they are cast: that halves what is sent. A bias enters the matrix product, so it is cast with the
matrix. What else is a vector (norms) is never sent and stays in the master's dtype: a weight near one rounded to bf16
would be off by up to 0.4 %, the same way in every token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Casts:
    """Dtypes of the floating-point tensors that a module is given and that it returns; None leaves them alone."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None = None


def parameter_dtype(
    owner: nn.Module, parameter: nn.Parameter, compute_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype that `owner`'s forward finds `parameter` in.

    BatchNorm keeps its dtype, because its running statistics do; so do integers.
    """
    if compute_dtype is None or not parameter.is_floating_point() or isinstance(owner, _BatchNorm):
        return parameter.dtype
    if _holds_matrix(owner):
        return compute_dtype
    return torch.promote_types(torch.promote_types(parameter.dtype, torch.float32), compute_dtype)


def plan_casts(owners: Iterable[nn.Module], compute_dtype: torch.dtype) -> dict[nn.Module, Casts]:
    """What each module that owns parameters is given and returns.

    A module that holds vectors only computes in their dtype, because most of torch's operations refuse operands of two
    dtypes, and returns the compute dtype. One whose class says `takes_mixed_dtypes = True` gets its inputs in the
    compute dtype beside its fp32 parameters, which spares both casts; it must return its input's dtype.
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
            casts[owner] = Casts(dtypes[0])
        elif compute_dtype in dtypes or getattr(owner, "takes_mixed_dtypes", False):
            casts[owner] = Casts(compute_dtype)
        else:
            casts[owner] = Casts(dtypes[0], compute_dtype)
    return casts


def _holds_matrix(module: nn.Module) -> bool:
    """Whether a matrix lies in the module or below it, which its vectors may then be combined with."""
    return any(p.ndim >= 2 and p.is_floating_point() for p in module.parameters())
