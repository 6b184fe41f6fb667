"""Checks that run before any optimizer steps parameters which a wrapper synchronizes.

An optimizer knows nothing of the wrapper whose gradients it applies: a step before the gradients are averaged, or
after something has edited only this rank's part of them, would let the ranks diverge without an error. So one
global hook asks the wrapper: `wrapper.check_step(optimizer)` raises what is wrong.

Edits are noticed at no cost in memory traffic: torch counts a tensor's in-place changes in its `_version`, which is
compared with what it was after the synchronization.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.parallel.base import ParallelModel

_guarded: "weakref.WeakKeyDictionary[ParallelModel, set[int]]" = weakref.WeakKeyDictionary()  # by their ids


def guard(parameters: Iterable[Tensor], wrapper: ParallelModel) -> None:
    """From now on `wrapper`, which holds these, is asked before an optimizer that holds one of them steps."""
    _guarded[wrapper] = {id(parameter) for parameter in parameters}


def release(wrapper: ParallelModel) -> None:
    """Undo `guard`."""
    _guarded.pop(wrapper, None)


def is_guarded(parameter: Tensor) -> bool:
    """Whether a wrapper that is still there guards it."""
    return any(id(parameter) in guarded for guarded in _guarded.values())


@torch._disable_dynamo  # a compiled step runs the checks each time, instead of what they found when it was traced
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, "replaced") for parameter in held):
        raise RuntimeError(
            f"this {type(optimizer).__name__} holds parameters that FSDP has replaced by shards: wrap first, then "
            "build the optimizer over fsdp.parameters()"
        )
    for wrapper in wrappers_of(held):
        wrapper.check_step(optimizer)


def wrappers_of(parameters: Sequence[Tensor]) -> list[ParallelModel]:
    """The wrappers that guard one of these."""
    return [wrapper for wrapper, ids in list(_guarded.items()) if any(id(p) in ids for p in parameters)]


def _refuse_shards(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let `GradScaler.step` raise on every rank where ranks would look for overflow in different shards."""

    @wraps(step)
    def checked(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if scaler.is_enabled() and any(wrapper._shards_gradients for wrapper in wrappers_of(held)):
            raise RuntimeError(
                f"{type(scaler).__name__} decides by the gradients of this rank, and these are shards, so ranks could "
                "skip different steps: use distlab.train.scaler.LossScaler with distlab.train.step.TrainStep"
            )
        return step(scaler, optimizer, *args, **kwargs)

    return checked


register_optimizer_step_pre_hook(_before_step)
GradScaler.step = _refuse_shards(GradScaler.step)  # torch has no hook there, and unscaling leaves no trace


# -- modules that change after wrapping ------------------------------------------------------------------------

_registrations = 0  # of parameters and modules, in any module of this process


def _count_registration(*_: Any) -> None:
    global _registrations
    _registrations += 1


register_module_parameter_registration_hook(_count_registration)
register_module_module_registration_hook(_count_registration)


def check_module(wrapper: ParallelModel) -> None:
    """Raise ValueError if the module trains a parameter that was not wrapped. Free if nothing was registered since."""
    if wrapper._registrations == _registrations or wrapper not in _guarded:
        return
    for name, parameter in wrapper.module.named_parameters():
        if parameter.requires_grad and id(parameter) not in _guarded[wrapper]:
            raise ValueError(
                f"'{name}' is trained now and was not when the module was wrapped (a layer was replaced, added, "
                "parametrized or unfrozen), so its gradient would not be averaged: close() this wrapper, wrap the "
                "module again, and build the optimizer over the new wrapper's parameters"
            )
    wrapper._registrations = _registrations


# -- several wrappers in one backward --------------------------------------------------------------------------

_begun: "weakref.WeakKeyDictionary[ParallelModel, None]" = weakref.WeakKeyDictionary()  # in the order of backward


def begin(wrapper: ParallelModel) -> list[ParallelModel]:
    """Note that backward has come to `wrapper`; returns those of its group that it came to before."""
    ahead = begun(wrapper.process_group)
    _begun[wrapper] = None
    return ahead


def begun(group: ProcessGroup) -> list[ParallelModel]:
    """Wrappers of a group that backward has come to and that have not finished, in this order."""
    return [wrapper for wrapper in list(_begun) if wrapper.process_group is group]


def send_begun(group: ProcessGroup, last: Sequence[ParallelModel] = ()) -> None:
    """Let every wrapper of the group that backward has come to send all of its step, and then these.

    Called before anything else is sent, since on another rank, which used all parameters, they have sent in backward.
    """
    for wrapper in dict.fromkeys([*begun(group), *last]):
        wrapper._send_rest()


def end(wrapper: ParallelModel) -> None:
    """Undo `begin`."""
    _begun.pop(wrapper, None)


# -- edits of synchronized gradients ---------------------------------------------------------------------------


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


def changes_since(gradient: Tensor | None) -> int | None:
    """How often a gradient was changed in place since it was noted; None if it never was."""
    noted = getattr(gradient, "synchronized_version", None)
    return None if noted is None else gradient._version - noted


def find_edited(named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """The name of a parameter whose gradient was changed or replaced since, or None; to drop one is no edit."""
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is not None and getattr(gradient, "synchronized_version", None) != gradient._version:
            return name
    return None
