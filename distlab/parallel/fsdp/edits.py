"""Edits of synchronized gradients: which are noticed, and what a GradScaler is told.

A rank holds a shard of each matrix' gradient. What is computed of all elements here, such as a norm or whether one of
them overflowed, differs from rank to rank, and the replicated parameters, stepped by it, would drift apart.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.comm import collectives


def note_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Remember the gradients as they are now, each in an attribute of its own: the version of its values."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            gradient.synchronized_version = gradient._version  # operations in place count it up


def forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `note_gradients`: whatever they are now counts as edited."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.synchronized_version = None


def find_edited(named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """The name of a parameter whose gradient was changed or replaced since, or None; to drop one is no edit."""
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is not None and getattr(gradient, "synchronized_version", None) != gradient._version:
            return name
    return None


def stepped_by_scaler(optimizer: Optimizer) -> bool:
    """Whether a `GradScaler` is calling `optimizer.step()`.

    Its operation that unscales gradients does not count up their versions, so its step is recognised: by what it
    leaves in an optimizer that skips by itself (a fused one), else by the function that calls.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler._maybe_opt_step.__code__:
            return True
        frame = frame.f_back
    return False


class OverflowOfAllRanks(TorchDispatchMode):
    """Inside, `GradScaler.unscale_` finds an overflow on every rank if any rank has one, so that all skip the step.

    Attributes:
        asked: whether that has happened.
    """

    def __init__(self, group: ProcessGroup):
        super().__init__()
        self._group = group
        self.asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            found: Tensor = args[1]
            found.copy_(collectives.sum_tensor(found, self._group).clamp(max=1.0))
            self.asked = True
        return result
