"""The wrapped module: what cannot be wrapped, and what must not change afterwards."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.parallel.base import ParallelModel
from distlab.parallel.guards import hooks
from distlab.parallel.guards.shared_memory import refuse_shared_memory
from distlab.parallel.torch_names import AnswersTorchNames

Named = Sequence[tuple[str, nn.Parameter]]

# -- before wrapping -------------------------------------------------------------------------------------------


def check_module(module: nn.Module, strategy: str, group: ProcessGroup) -> Named:
    """Check that `module` can be wrapped by a data-parallel strategy. A collective.

    Returns:
        Its trainable parameters, which lie on one device; a tied one once.

    Raises:
        ValueError: nothing to train, parameters on several devices, an uninitialized parameter, two
            that share memory, one that is wrapped already, or ranks that disagree (then on every
            rank).
    """
    refuse_uninitialized(module)
    check_ranks_agree(module, group)
    refuse_shared_memory(module)
    trainable = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    if not trainable:
        raise ValueError(
            f"{strategy}: the module has no parameter that requires a gradient; nothing to average"
        )
    the_device([parameter for _, parameter in trainable], strategy)
    for name, parameter in trainable:
        if not parameter.is_floating_point():
            raise ValueError(
                f"'{name}' is {parameter.dtype}; only floating-point parameters are averaged"
            )
        if parameter.dtype not in collectives.SENDABLE:
            raise ValueError(
                f"'{name}' is {parameter.dtype}, in which gradients cannot be averaged: freeze it "
                "(requires_grad=False), or train it in another floating-point dtype"
            )
        if hooks.guards_of([parameter]):
            raise ValueError(
                f"'{name}' belongs to a module that is wrapped already: call close() on that wrapper first"
            )
    return trainable


def the_device(parameters: Iterable[Tensor], strategy: str) -> torch.device:
    """Return the one device of all parameters; raises ValueError if there are several."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ValueError(
            f"{strategy}: parameters lie on {sorted(map(str, devices))}; move the module to one device first"
        )
    return devices.pop()


def check_ranks_agree(module: nn.Module, group: ProcessGroup) -> None:
    """Before anything is sent: every rank must hold the same parameters and buffers.

    Raises:
        ValueError: the same one on every rank; it names the first tensor that differs in name,
            shape, dtype, strides or `requires_grad`.
    """
    mine = [
        f"'{name}' {tuple(t.shape)} {t.dtype} strides {t.stride()} {'' if t.requires_grad else 'not '}trainable"
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    ]
    theirs = collectives.gather_objects(mine, group)
    for rank, other in enumerate(theirs):
        for index, (first, here) in enumerate(zip_longest(theirs[0], other)):
            if first != here:
                raise ValueError(
                    f"ranks hold different models: entry {index} is {first or 'missing'} on rank 0, of "
                    f"{len(theirs[0])} tensors, and {here or 'missing'} on rank {rank}, of {len(other)}; build the "
                    "same model on every rank"
                )


def refuse_uninitialized(module: nn.Module) -> None:
    """Lazy modules (`nn.LazyLinear`, …) know their shapes after their first forward only.

    Raises:
        ValueError: a parameter or buffer without a shape; names it.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' is uninitialized, a lazy module's: run one forward with an example batch before wrapping"
            )


# -- after wrapping --------------------------------------------------------------------------------------------


class Guard:
    """What a wrapper asks once per event, and what both kinds of guard know of their wrapper.

    Args:
        wrapper: which holds its guard and is not held by it.
        named: what it trains, with names.

    Attributes:
        shards_gradients: whether each rank has the mean gradient of its shards only.
    """

    shards_gradients = False

    def __init__(self, wrapper: ParallelModel, named: Named):
        self._wrapper = weakref.ref(wrapper)
        self.process_group: ProcessGroup = wrapper.process_group
        self.named = named
        self._editing = False  # inside elementwise_edits()
        hooks.watch(self, [parameter for _, parameter in named])
        self._registrations = hooks.registrations
        self._stop_checking_loads = weakref.finalize(
            self, check_loads(wrapper.module, named).remove
        )

    def close(self) -> None:
        """Watch nothing any more."""
        self._stop_checking_loads()
        hooks.release(self)

    def check_step(self, optimizer: Optimizer | None = None) -> None:
        """Raise what is wrong with the gradients, and with this optimizer's next step."""

    def note(self) -> None:
        """Take the gradients as they are now for the means."""

    @contextmanager
    def elementwise_edits(self) -> Iterator[None]:
        """Changes inside are right element by element.

        Raises:
            RuntimeError: gradients that are not synchronized, or were edited before.
        """
        self.check_step()
        for _, parameter in self.named if self.shards_gradients else ():
            if parameter.grad is not None:
                # left by an exception, they are half edited
                parameter.grad.synchronized_version = None
        self._editing = True
        try:
            yield
        finally:
            self._editing = False
        self.note()

    def check_unchanged(self) -> None:
        """Raise ValueError if the module trains a parameter that is not watched."""
        watched = {id(parameter) for _, parameter in self.named}
        for name, parameter in self._wrapper().module.named_parameters():
            if parameter.requires_grad and id(parameter) not in watched:
                raise ValueError(
                    f"'{name}' is trained now and was not when the module was wrapped (a layer was replaced, added, "
                    "parametrized or unfrozen), so its gradient would not be averaged: close() this wrapper, wrap the "
                    "module again, and build the optimizer over the new wrapper's parameters"
                )
        self._registrations = hooks.registrations


class Guarded(AnswersTorchNames, ParallelModel):
    """A model under a strategy of ours, which is watched: what all of them refuse in the same way.

    Attributes:
        guard: asked once per event; raises what is wrong.
    """

    guard: Guard

    def elementwise_gradient_edits(self) -> AbstractContextManager[None]:
        """Gradients may be changed inside, after `finish_gradient_synchronization()`, on every rank alike and each
        element by itself: `torch.nn.utils.clip_grad_value_`, a factor.

        Where a rank has the mean of a part only, the optimizer's next step raises for edits outside
        of it, because most edits compute something of all elements (a norm, for one).

        Raises:
            RuntimeError: gradients that are not synchronized, or have been edited already.
        """
        return self.guard.elementwise_edits()

    def check_gradients(self) -> None:
        """Raise RuntimeError if `.grad` is not what the last synchronization left."""
        self.guard.check_step()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Guarded":
        """What `to()`, `half()`, `cuda()` and the like end in: nothing may change, as buffers and ranks rely on it."""
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            with torch.no_grad():
                after = fn(tensor)
            if after is not tensor:
                computes = "give compute_dtype" if self.casts_parameters else "use torch.autocast"
                raise TypeError(
                    f"{type(self).__name__} cannot change '{name}' from {_kind_of(tensor)} to {_kind_of(after)}: "
                    "move or cast the module before wrapping it (to do so now, close() this wrapper, change its "
                    f".module and wrap that again); for the dtype of the computation {computes}"
                )
        return self

    def __getstate__(self) -> NoReturn:
        """What copying and pickling ask."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: hooks and the process group would be lost "
            "silently. Copy or save `.module` and wrap the copy again"
        )


class Attached:
    """A module's hook that stays behind when the module is copied, pickled or saved: there it does nothing.

    Args:
        function: the hook.
    """

    def __init__(self, function: Callable[..., Any] = lambda *args: None):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return Attached, ()


def check_loads(module: nn.Module, named: Named) -> RemovableHandle:
    """Hook `load_state_dict`: with assign=True it swaps parameters, and their hooks would be lost."""

    def check(module: nn.Module, _: Any) -> None:
        now = {id(parameter) for parameter in module.parameters()}
        for name, parameter in named:
            if id(parameter) not in now:
                raise RuntimeError(
                    f"load_state_dict replaced '{name}' (assign=True), so its gradient would no longer be "
                    "averaged: load before wrapping, or without assign"
                )

    return module.register_load_state_dict_post_hook(Attached(check))


def _kind_of(tensor: Tensor) -> str:
    # where memory formats differ
    strides = f", strides {tensor.stride()}" if tensor.dim() >= 4 else ""
    return f"{tensor.dtype} on {tensor.device}{strides}"
