"""Adapter to train a module under a user's own wrapper, which is given by its function's name.

    def parallelize(module, group):     # torch DDP and FSDP2 can be returned as they are
        ...
        return module, finish           # or the callable module alone

`finish()` may return the norm of the whole gradient, by which it clips. If parameters are cut without
DTensor, the callable has a method `gather(name, local)` that returns the whole of a parameter, or of
its gradient, from this rank's part.

The form is the one of `distlab check --wrap`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.bench.task import factory_of
from distlab.parallel import ParallelModel, Strategy, Wrapping
from distlab.parallel.shard import plain_name

# the method that the trainer calls after the last backward
FINISH = "finish_gradient_synchronization"


class UserWrapper(ParallelModel):
    """A module under a wrapper of the user's own.

    Args:
        module: module to train.
        wrap: function `wrap(module, group)` that returns a callable, or (callable, finish). It
            changes the module in place or keeps it. If it returns only the callable,
            `finish_gradient_synchronization()` of the callable is called, if it has that method.

    Attributes:
        finish: name of the function that is called after the last backward of a step.
        can_accumulate: True if the callable has `no_sync()`, which says that it can accumulate
            gradients.

    Raises:
        ValueError: `wrap` returned something else.
    """

    def __init__(self, module: nn.Module, wrap: Callable[..., Any], group: ProcessGroup):
        super().__init__()
        self.module, self.process_group = module, group
        self.device = next(module.parameters()).device
        self._shapes = {plain_name(name): p.shape for name, p in _every_parameter(module)}
        self._call, self._finish, self.finish = _call_and_finish(wrap(module, group))
        self._finished: Any = None  # the result of the last `finish()`
        self.can_accumulate = callable(getattr(self._call, "no_sync", None))
        cut = [self.is_cut(name, parameter) for name, parameter in _every_parameter(module)]
        self._gather = getattr(self._call, "gather", None) if any(cut) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the wrapper's own `no_sync()`; without one, every micro-batch synchronises."""
        return getattr(self._call, "no_sync", nullcontext)()

    def finish_gradient_synchronization(self) -> None:
        self._finished = self._finish()

    def own_norm(self) -> tuple[float | None, bool]:
        """Return the norm of the whole gradient that the wrapper gives; call it on every rank.

        It is the number that `finish()` returned in this step. Without one, it is the result of
        `grad_norm()` or of `clip_grad_norm_(inf)`, which clips nothing, if the callable has such a
        method.

        Returns:
            The norm, None if there is none, and whether `finish()` returned it.
        """
        norm = _number(self._finished)
        if norm is not None:
            return norm, True
        if callable(getattr(self._call, "grad_norm", None)):
            return _number(self._call.grad_norm()), False
        if callable(getattr(self._call, "clip_grad_norm_", None)):
            return _number(self._call.clip_grad_norm_(math.inf)), False
        return None, False

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the parameters, as in `ParallelModel.full_parameters`."""
        named = _every_parameter(self.module)
        return {name: self.whole(name, p.detach()) for name, p in named}

    def is_cut(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor has another shape than the whole parameter with this name."""
        return tensor.shape != self._shapes.get(plain_name(name), tensor.shape)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter, or of a tensor that is cut like it. A collective.

        A DTensor gathers itself. Of other tensors the callable's method `gather(name, local)` makes
        the whole. It is asked for every parameter, but only if the wrapper has cut one of them:
        a shard with padding can have the shape of its whole.

        Args:
            name: the parameter's name in the module.
            tensor: this rank's part.

        Raises:
            ValueError: `gather` returned another shape.
        """
        if self._gather is None or hasattr(tensor, "full_tensor"):
            return whole_tensor(tensor)
        gathered = self._gather(name, tensor)
        if not isinstance(gathered, Tensor) or self.is_cut(name, gathered):
            given = tuple(gathered.shape) if isinstance(gathered, Tensor) else type(gathered)
            raise ValueError(
                f"gather('{name}', local) returned {given} in place of a tensor of shape "
                f"{tuple(self._shapes[plain_name(name)])}"
            )
        return gathered


def wrapped_by(name: str) -> Strategy:
    """Return a user's wrapper, named `package.module:function`, as a strategy.

    Raises:
        ValueError: there is no such function.
    """
    return as_strategy(name, factory_of(name, "--wrap"))


def as_strategy(name: str, wrap: Callable[..., Any]) -> Strategy:
    """Return a user's function `wrap(module, group)` as a strategy."""

    def wrap_by_user(module: nn.Module, how: Wrapping) -> UserWrapper:
        return UserWrapper(module, wrap, how.process_group)

    return Strategy(name=name, wrap=wrap_by_user)


def _every_parameter(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module with their names, a tied one under each of its names."""
    return list(module.named_parameters(remove_duplicate=False))


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's whole, by a collective; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _call_and_finish(made: Any) -> tuple[Callable[..., Any], Callable[[], Any], str]:
    """Return the module to call, the function that finishes a step, and the name of the latter."""
    expected = "the wrapper must return a callable module, or (callable module, finish)"
    if isinstance(made, tuple):
        if len(made) != 2:
            raise ValueError(f"{expected}; it returned {len(made)} things")
        call, finish = made
        told = "the second thing that the wrapper returned"
    else:
        call = made
        finish = getattr(call, FINISH, None)
        told = f"{FINISH}() of the {type(call).__name__} that the wrapper returned"
        if finish is None:
            finish = _nothing
            told = f"none: the wrapper returned a {type(call).__name__} without {FINISH}()"
    if not callable(call) or not callable(finish):
        kinds = ", ".join(
            type(each).__name__ for each in (made if isinstance(made, tuple) else (made,))
        )
        raise ValueError(f"{expected}; it returned {kinds}")
    return call, finish, told


def _number(result: Any) -> float | None:
    """Return a number or a tensor of one element as a float; None for anything else."""
    if isinstance(result, Tensor) and result.numel() == 1:
        return float(whole_tensor(result))
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        return float(result)
    return None


def _nothing() -> None:
    """Finish a step of a wrapper whose backward has done everything."""
