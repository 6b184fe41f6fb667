"""Checks that run before any optimizer steps parameters which a wrapper synchronizes.

An optimizer knows nothing of the wrapper whose gradients it applies: a step before the gradients are averaged, or
after something has edited only this rank's part of them, would let the ranks diverge without an error. So one
global hook asks the wrapper: `wrapper.check_step(optimizer)` raises what is wrong.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary


class ChecksStep(Protocol):
    """A wrapper that checks before its parameters are stepped."""

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise if stepping now would be wrong."""


_wrapper_of = WeakTensorKeyDictionary()  # parameter → weak reference to its wrapper
_changes = 0  # how often the dictionary above was changed
_found: "weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[weakref.ref]]]" = weakref.WeakKeyDictionary()


def guard(parameters: Iterable[Tensor], wrapper: ChecksStep) -> None:
    """From now on `wrapper.check_step(optimizer)` runs before an optimizer that holds one of these steps."""
    global _changes
    reference = weakref.ref(wrapper)
    for parameter in parameters:
        _wrapper_of[parameter] = reference
    _changes += 1


def release(parameters: Iterable[Tensor]) -> None:
    """Undo `guard`."""
    global _changes
    for parameter in parameters:
        _wrapper_of.pop(parameter, None)
    _changes += 1


def is_guarded(parameter: Tensor) -> bool:
    """Whether a wrapper that is still there guards it."""
    reference = _wrapper_of.get(parameter)
    return reference is not None and reference() is not None


@torch._disable_dynamo  # a compiled step runs the checks each time, instead of what they found when it was traced
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for reference in _wrappers(optimizer):
        wrapper = reference()
        if wrapper is not None:
            wrapper.check_step(optimizer)


def _wrappers(optimizer: Optimizer) -> list[weakref.ref]:
    """The wrappers of an optimizer's parameters, looked up again only when either may have changed."""
    state = (_changes, [len(group["params"]) for group in optimizer.param_groups])
    known = _found.get(optimizer)
    if known is None or known[0] != state:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        references = {_wrapper_of[p] for p in parameters if p in _wrapper_of}
        known = _found[optimizer] = (state, list(references))
    return known[1]


register_optimizer_step_pre_hook(_before_step)
