"""torch's process-wide hooks: installed for the first wrapper that is watched, removed after the last one.

An optimizer knows nothing of the wrapper whose gradients it applies: a step before the gradients
are averaged, or after something has edited only this rank's part of them, would let the ranks
diverge without an error. So one global hook asks the wrapper's guard (`module.Guard`):
`guard.check_step(optimizer)` raises what is wrong. Another one counts the parameters and modules
that are registered anywhere, so that a module is searched for new layers only after that.

The state of this module is that of torch's hooks, of which a process has one set.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.parallel.state_dicts import check_loaded

if TYPE_CHECKING:
    from distlab.parallel.guards.module import Guard

# of parameters and modules, in any module of this process, while something is watched
registrations = 0
# parameters by their ids
_watched: "weakref.WeakKeyDictionary[Guard, set[int]]" = weakref.WeakKeyDictionary()
_undo: list[Callable[[], None]] = []  # removes the hooks; empty while there are none


def watch(guard: "Guard", parameters: Iterable[Tensor]) -> None:
    """From now on `guard` is asked before an optimizer that holds one of these steps."""
    if not _undo:
        _install()
    _watched[guard] = {id(parameter) for parameter in parameters}
    weakref.finalize(guard, _uninstall_after_the_last).atexit = False


def release(guard: "Guard") -> None:
    """Undo `watch`."""
    _watched.pop(guard, None)
    _uninstall_after_the_last()


def guards_of(parameters: Sequence[Tensor]) -> "list[Guard]":
    """List the guards that watch one of these."""
    return [guard for guard, ids in list(_watched.items()) if any(id(p) in ids for p in parameters)]


@torch._disable_dynamo  # a compiled step runs the checks each time, instead of what they found when it was traced
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, "replaced") for parameter in held):
        raise RuntimeError(
            f"this {type(optimizer).__name__} holds parameters that FSDP has replaced by shards: wrap first, then "
            "build the optimizer over fsdp.parameters()"
        )
    check_loaded(optimizer)
    for guard, ids in list(_watched.items()):
        if any(id(parameter) in ids for parameter in held):
            guard.check_step(optimizer)


def _count_registration(*_: Any) -> None:
    global registrations
    registrations += 1


def _refuse_shards(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let `GradScaler.step` raise on every rank where ranks would look for overflow in different shards."""

    @wraps(step)
    def checked(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if scaler.is_enabled() and any(guard.shards_gradients for guard in guards_of(held)):
            raise RuntimeError(
                f"{type(scaler).__name__} decides by the gradients of this rank, and these are shards, so ranks could "
                "skip different steps: use distlab.train.scaler.LossScaler with distlab.train.step.TrainStep"
            )
        return step(scaler, optimizer, *args, **kwargs)

    return checked


def _install() -> None:
    before, checked = GradScaler.step, _refuse_shards(GradScaler.step)
    GradScaler.step = checked  # torch has no hook there, and unscaling leaves no trace
    _undo.extend(
        [
            partial(_restore, before, checked),
            register_optimizer_step_pre_hook(_before_step).remove,
            register_module_parameter_registration_hook(_count_registration).remove,
            register_module_module_registration_hook(_count_registration).remove,
        ]
    )


def _restore(before: Callable[..., Any], checked: Callable[..., Any]) -> None:
    # else somebody has wrapped it again, and without a guard it checks nothing
    if GradScaler.step is checked:
        GradScaler.step = before


def _uninstall_after_the_last() -> None:
    if not list(_watched):
        while _undo:
            _undo.pop()()
