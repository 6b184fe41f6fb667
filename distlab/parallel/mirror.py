"""An optimizer to its user, and another, over this rank's share, inside: what both sharded optimizers are.

`param_groups` of the outer one holds the model's parameters, so LR schedulers, `zero_grad` and the user's loops see
an ordinary optimizer; the inner one holds the same groups with this rank's share of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class MirroredOptimizer(Optimizer, ABC):
    """Keeps the inner optimizer's groups and options like the outer ones'.

    A subclass says in `_mine(group)` which parameters of a group the inner optimizer gets, and may act on newly
    arrived parameters in `_take(parameters)`.

    Args:
        params: parameters or groups of them.
        optimizer_cls: of the inner optimizer.
        options: its keyword arguments.

    Raises:
        ValueError: no parameters, or one given twice. TypeError: something that is no tensor. By torch's checks.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_cls: type[Optimizer],
        options: dict[str, Any],
    ):
        self._inner: Optimizer | None = None  # torch's constructor calls our add_param_group before it exists
        super().__init__(params, dict(options))
        self._take([parameter for group in self.param_groups for parameter in group["params"]])
        self._inner = optimizer_cls([self._mine(group) for group in self.param_groups], **options)
        self.defaults = self._inner.defaults
        for group in self.param_groups:
            self._complete(group)
        self.state = self._inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, during training too; call it on every rank alike."""
        super().add_param_group(param_group)
        if self._inner is not None:
            group = self.param_groups[-1]
            self._take(group["params"])
            self._inner.add_param_group(self._mine(group))
            self._complete(group)

    def _take(self, parameters: list[nn.Parameter]) -> None:
        """New parameters arrived; decide whose they are."""

    @abstractmethod
    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's share of its parameters, which may be empty."""

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the options that only the inner optimizer's defaults know."""
        for key, value in self.defaults.items():
            group.setdefault(key, value)

    def _copy_options_inwards(self) -> None:
        """What a scheduler or the user changed in our groups (lr, weight decay, …) holds for the inner ones."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(options_of(outer))

    def load_owned(self, saved_groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> None:
        """Take over options of all groups, and state for what this rank steps, by the inner parameter (the keys
        of `self.state`). No communication."""
        self._load_inner(saved_groups, state)

    def _load_inner(self, saved_groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> None:
        """Take over saved options, and state by inner parameter (torch casts it to type and device)."""
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update(options_of(saved))
        self._copy_options_inwards()
        inner = self._inner.state_dict()
        owned = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        inner["state"] = {number: state[p] for number, p in enumerate(owned) if p in state}
        self._inner.load_state_dict(inner)
        self.state = self._inner.state


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's optimizer state, its tensors on the CPU."""
    return {key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in state.items()}
