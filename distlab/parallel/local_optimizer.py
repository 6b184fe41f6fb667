"""Optimizers that step this rank's share of the parameters, and how checkpoints see any optimizer.

`LocalOptimizer` is the base class of `ShardedOptimizer` and `ZeroOptimizer`. To its user it is an
ordinary optimizer over the whole model. Inside, another optimizer steps this rank's share.
`stepped` and `load_shards` work for every optimizer, also torch's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.parallel.checks import AnswersTorchNames
from distlab.parallel.model import ParallelModel
from distlab.parallel.shard import Shard

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]  # parameters, or groups of them


class LocalOptimizer(AnswersTorchNames, Optimizer, ABC):
    """An optimizer over the whole model, around one that steps this rank's share.

    `param_groups` holds the model's parameters, so LR schedulers, `zero_grad` and the user's loops
    see an ordinary optimizer. `local` holds the same groups with this rank's share of them. A
    subclass returns that share in `_share(group)`, and one parameter's share in
    `_share_of(parameter)`. It may note new parameters in `_register(parameters)`.

    Args:
        params: parameters or groups of them.
        optimizer_cls: class of the local optimizer.
        options: keyword arguments of that class.

    Raises:
        ValueError: no parameters, or one given twice. TypeError: an entry that is not a tensor. By
            torch's checks.
    """

    def __init__(self, params: Params, optimizer_cls: type[Optimizer], options: dict[str, Any]):
        # torch's constructor calls add_param_group before the local optimizer exists.
        self.local: Optimizer | None = None
        super().__init__(params, dict(options))
        self._register([parameter for group in self.param_groups for parameter in group["params"]])
        self.local = optimizer_cls([self._share(group) for group in self.param_groups], **options)
        self.defaults = self.local.defaults
        self._complete_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also during training. Call it on every rank with the same group."""
        super().add_param_group(param_group)
        if self.local is not None:
            group = self.param_groups[-1]
            self._register(group["params"])
            self.local.add_param_group(self._share(group))
            self._complete_groups()

    @property
    def state(self) -> Any:
        """State of this rank's share, see `LocalState`."""
        return {} if self.local is None else LocalState(self)

    @state.setter
    def state(self, state: Any) -> None:
        if self.local is not None:  # torch's constructor assigns one as well
            raise ValueError(
                f"{type(self).__name__}.state is this rank's share and cannot be assigned: call "
                "load_state_dict(), or state.clear() to start anew"
            )

    def __getstate__(self) -> NoReturn:
        """Raise TypeError, because the optimizer is being copied or pickled."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: hooks and the process group would "
            "be lost silently. Save its state_dict(), and build another optimizer over the model "
            "that you load it into"
        )

    @abstractmethod
    def shards(self, held: Iterable[Shard]) -> list[Shard]:
        """Return those of the model's trainable shards that this rank steps.

        `state` has their entries, keyed by `Shard.tensor`.
        """

    def _register(self, parameters: list[nn.Parameter]) -> None:
        """Note new parameters, before their share is asked for."""

    @abstractmethod
    def _share_of(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor that the local optimizer steps for a parameter of this optimizer.

        None if other ranks step all of it. Raises KeyError for a tensor that is none of them.
        """

    @abstractmethod
    def _share(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the group with this rank's share of its parameters, which may be empty."""

    def _complete_groups(self) -> None:
        """Give groups the options that only the local optimizer's defaults hold."""
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._held_before = self._held()

    def _copy_options_inwards(self) -> None:
        """Copy hyperparameters (lr, weight decay, …) from our groups to the local optimizer's.

        Schedulers and users change ours.

        Raises:
            ValueError: a group holds other parameters than it was given.
        """
        if self._held() != self._held_before:
            raise ValueError(
                f"param_groups of this {type(self).__name__} hold other parameters than it was "
                "given: build another optimizer, or add parameters by add_param_group()"
            )
        for outer, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update(options_of(outer))

    def _held(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]


Saving = Callable[[Any], dict[str, Any]]
Loading = Callable[[Any, dict[str, Any]], None]


def with_hooks_of_saving(state_dict: Saving) -> Saving:
    """Let a `state_dict` of its own call the hooks that are registered with torch's optimizer."""

    @wraps(state_dict)
    def call(optimizer: Optimizer) -> dict[str, Any]:
        for before in optimizer._optimizer_state_dict_pre_hooks.values():
            before(optimizer)
        found = state_dict(optimizer)
        for after in optimizer._optimizer_state_dict_post_hooks.values():
            changed = after(optimizer, found)
            if changed is not None:
                found = changed
        return found

    return call


def with_hooks_of_loading(load_state_dict: Loading) -> Loading:
    """Let a `load_state_dict` of its own call the hooks that are registered with torch's."""

    @wraps(load_state_dict)
    def call(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict = state_dict.copy()  # hooks may change it
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = before(optimizer, state_dict)
            if changed is not None:
                state_dict = changed
        load_state_dict(optimizer, state_dict)
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    return call


class LocalState(MutableMapping[Any, Any]):
    """State of an optimizer's share, by parameter of the model.

    It reads and changes the local optimizer's state. A parameter is found by the tensor of the
    model, or by the tensor that the local optimizer steps, which is what iterating gives. Of a
    parameter that other ranks step, this rank has an empty state, and changes to it have no effect.
    So a loop over the model's parameters can run on every rank, for example one that logs or resets
    states. A tensor that the optimizer does not have, such as a frozen parameter, has an empty
    state as well, which cannot be set: that raises KeyError.

    Args:
        optimizer: optimizer whose state it is.
    """

    def __init__(self, optimizer: LocalOptimizer):
        self._optimizer = optimizer

    @property
    def _held(self) -> Any:
        # Not kept: loading gives the local optimizer another dictionary.
        return self._optimizer.local.state

    def _own(self, key: Any) -> Any:
        """Return the key in the local optimizer's state, or None if other ranks have it."""
        # Some optimizers keep state under keys that are no tensors.
        if not isinstance(key, Tensor) or key in self._held:
            return key
        return self._optimizer._share_of(key)

    def __getitem__(self, key: Any) -> Any:
        try:
            own = self._own(key)
        except KeyError:
            return {}
        return {} if own is None else self._held[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        own = self._own(key)
        if own is not None:
            self._held[own] = value

    def __delitem__(self, key: Any) -> None:
        own = self._own(key)
        if own is not None:
            del self._held[own]

    def __contains__(self, key: Any) -> bool:
        # Mapping's own would ask __getitem__, which makes an entry.
        try:
            return self._own(key) in self._held
        except KeyError:
            return False

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, or the default. It makes no entry."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return the state of a parameter. Without one, return the default."""
        if key in self:
            return self._held.pop(self._own(key))
        if not default:
            raise KeyError("there is no state of this parameter on this rank")
        return default[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Remove the state of this rank's share."""
        self._held.clear()

    def __repr__(self) -> str:
        return f"LocalState({dict(self._held)!r})"


def stepped(model: ParallelModel, optimizer: Optimizer) -> list[Shard]:
    """Return the shards that this rank's optimizer steps, for every strategy."""
    trainable = []
    for shard in model.shards():
        if not shard.tensor.requires_grad:
            continue
        if shard.shape.numel() == 0:
            # All ranks hold all of a parameter without elements. One of them stores its step.
            shard = replace(shard, replicated=True)
        trainable.append(shard)
    if isinstance(optimizer, LocalOptimizer):
        return optimizer.shards(trainable)
    return trainable


def load_shards(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Give an optimizer the options of each group, and the state of the shards that it steps.

    No communication. torch casts states to the dtype and device of the parameter they belong to.

    Args:
        groups: options of each group of `optimizer`.
        state: state of each parameter, keyed by `Shard.tensor`.
    """
    if isinstance(optimizer, LocalOptimizer):
        for group, changed in zip(optimizer.param_groups, groups, strict=True):
            group.update(options_of(changed))
        optimizer, groups = optimizer.local, optimizer.param_groups
    # torch loads by number: its own state dict says which parameter has which number.
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed["state"] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        if parameter in state:
            packed["state"][number] = state[parameter]
    for group, changed in zip(packed["param_groups"], groups, strict=True):
        group.update(options_of(changed))
    optimizer.load_state_dict(packed)


def optimizer_name(optimizer: Optimizer) -> str:
    """Return the name of the class that does the arithmetic, also inside a `LocalOptimizer`."""
    return type(optimizer.local if isinstance(optimizer, LocalOptimizer) else optimizer).__name__


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options, without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def to_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state with its tensors on the CPU."""
    found = {}
    for key, value in state.items():
        found[key] = value.detach().cpu() if isinstance(value, Tensor) else value
    return found
