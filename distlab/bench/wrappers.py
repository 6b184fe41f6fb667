"""Adapter to train a module under a user's own wrapper, which is given by its function's name.

    def parallelize(module, group):     # torch DDP and FSDP2 can be returned as they are
        ...
        return module, finish           # or the callable module alone

`finish()` may return the norm of the whole gradient, by which it clips. If parameters are cut
without DTensor, the callable has a method `gather(name, local)` that returns the whole of a
parameter, or of its gradient, from this rank's part. A third thing that the wrapper may return
builds the optimizer:

    def make_optimizer(parameters, cls, **options):     # cls(parameters, **options) without it
        return ZeroRedundancyOptimizer(parameters, cls, process_group=group, **options)

The form is the one of `distlab check --wrap`.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.bench.task import factory_of
from distlab.parallel import ParallelModel, Strategy, Wrapping
from distlab.parallel.local_optimizer import Params
from distlab.parallel.shard import plain_name

# the method that the trainer calls after the last backward
FINISH = "finish_gradient_synchronization"


class UserWrapper(ParallelModel):
    """A module under a wrapper of the user's own.

    Args:
        module: module to train.
        wrap: function `wrap(module, group)` that returns a callable, (callable, finish), or
            (callable, finish, make_optimizer). It changes the module in place or keeps it. If it
            returns only the callable, `finish_gradient_synchronization()` of the callable is
            called, if it has that method.

    Attributes:
        finish: name of the function that is called after the last backward of a step.
        make_optimizer: function `make_optimizer(parameters, cls, **options)` that returns the
            optimizer. By default it returns `cls(parameters, **options)`.
        can_accumulate: True if the callable has `no_sync()`, which says that it can accumulate
            gradients.

    Raises:
        ValueError: `wrap` returned something else.
    """

    def __init__(self, module: nn.Module, wrap: Callable[..., Any], group: ProcessGroup):
        super().__init__()
        self.module, self.process_group = module, group
        self.device = next(module.parameters()).device
        # Before the wrapper sees the module: the whole shapes, by which a cut parameter is
        # recognised later.
        self._shapes = {plain_name(name): p.shape for name, p in _every_parameter(module)}
        parts = _parts_of(wrap(module, group))
        self._call = parts.call
        self._finish = parts.finish
        self.finish = parts.finish_name
        self.make_optimizer = parts.make_optimizer
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

    return Strategy(name=name, wrap=wrap_by_user, optimizer=_make_optimizer)


def trained_by(name: str, micro_batches: int) -> Strategy:
    """Return a user's wrapper as a strategy of the trainer, whose checkpoints hold all state.

    A checkpoint finds whole parameters, and the state of an optimizer that steps all of them, on
    every rank. Building the strategy raises ValueError for a wrapper that leaves something else,
    and for several micro-batches under a wrapper that does not say that it can accumulate.

    Raises:
        ValueError: there is no such function.
    """
    strategy = wrapped_by(name)

    def wrap_whole(module: nn.Module, how: Wrapping) -> ParallelModel:
        # As in `UserWrapper`: the shapes that checkpoints expect.
        before = {plain_name(key): each.shape for key, each in module.named_parameters()}
        model = strategy.wrap(module, how)
        after = {plain_name(key): each for key, each in module.named_parameters()}
        for key, shape in before.items():
            is_cut = key not in after or hasattr(after[key], "full_tensor")
            if is_cut or after[key].shape != shape:
                raise ValueError(
                    f"--wrap {name}: it leaves a rank a part of {key!r}, and checkpoints need "
                    "whole parameters on every rank: time it with distlab run ddp_bench, or train "
                    "under --strategy fsdp"
                )
        if micro_batches > 1 and not model.can_accumulate:
            raise ValueError(
                f"--wrap {name}: what it returns has no no_sync(), so it may send in each of the "
                f"{micro_batches} backwards of a step: leave --accumulate out, or give it no_sync()"
            )
        return model

    def make_whole(
        model: UserWrapper, cls: type[Optimizer], params: Params | None, options: Mapping[str, Any]
    ) -> Optimizer:
        optimizer = _make_optimizer(model, cls, params, options)
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        trained = {id(each) for each in model.module.parameters() if each.requires_grad}
        if not isinstance(optimizer, cls) or not trained <= stepped:
            raise ValueError(
                f"--wrap {name}: its third value returns a {type(optimizer).__name__}, whose state "
                f"checkpoints do not find; they need a {cls.__name__} that steps all parameters on "
                "every rank"
            )
        return optimizer

    return Strategy(name=name, wrap=wrap_whole, optimizer=make_whole)


def _make_optimizer(
    model: UserWrapper, cls: type[Optimizer], params: Params | None, options: Mapping[str, Any]
) -> Optimizer:
    """Make the optimizer by the wrapper's third value. See `Strategy.optimizer`."""
    parameters = list(model.parameters()) if params is None else params
    return model.make_optimizer(parameters, cls, **options)


def _every_parameter(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module with their names, a tied one under each of its names."""
    return list(module.named_parameters(remove_duplicate=False))


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's whole, by a collective; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class _Parts(NamedTuple):
    """Parts that a wrapper returned, with defaults for those that it left out.

    Attributes:
        call: module to call.
        finish: function that finishes a step.
        finish_name: name of `finish`, for messages.
        make_optimizer: see `UserWrapper`.
    """

    call: Callable[..., Any]
    finish: Callable[[], Any]
    finish_name: str
    make_optimizer: Callable[..., Optimizer]


def _parts_of(made: Any) -> _Parts:
    """Return the parts of what a wrapper returned.

    Raises:
        ValueError: it is something else.
    """
    expected = (
        "the wrapper must return a callable module, (callable module, finish), "
        "or (callable module, finish, make_optimizer)"
    )
    returned = made if isinstance(made, tuple) else (made,)
    if len(returned) not in (1, 2, 3):
        raise ValueError(f"{expected}; it returned {len(returned)} things")
    if not all(callable(each) for each in returned):
        kinds = ", ".join(type(each).__name__ for each in returned)
        raise ValueError(f"{expected}; it returned {kinds}")
    call = returned[0]
    if len(returned) > 1:
        finish = returned[1]
        finish_name = "the second thing that the wrapper returned"
    elif callable(getattr(call, FINISH, None)):
        finish = getattr(call, FINISH)
        finish_name = f"{FINISH}() of the {type(call).__name__} that the wrapper returned"
    else:
        finish = _nothing
        finish_name = f"none: the wrapper returned a {type(call).__name__} without {FINISH}()"
    make_optimizer = returned[2] if len(returned) == 3 else _plain_optimizer
    return _Parts(call, finish, finish_name, make_optimizer)


def _plain_optimizer(parameters: Params, cls: type[Optimizer], **options: Any) -> Optimizer:
    """Make the optimizer of a wrapper that returned no third value."""
    return cls(parameters, **options)


def _number(result: Any) -> float | None:
    """Return a number or a tensor of one element as a float; None for anything else."""
    if isinstance(result, Tensor) and result.numel() == 1:
        return float(whole_tensor(result))
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        return float(result)
    return None


def _nothing() -> None:
    """Finish a step of a wrapper whose backward has done everything."""
