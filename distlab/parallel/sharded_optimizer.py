"""The simple form of optimizer sharding: each rank updates the parameters it owns and broadcasts them.

    compute        │ forward │ backward │ step own │                               │
    communication  │  (gradients averaged)         │ broadcast from 0 │ from 1 │ …   │

Every rank holds all gradients, averaged by any of the DDPs, and the optimizer's state for its own parameters
only: with AdamW 2/N instead of 2 numbers per parameter. Against ZeRO stage 1 (Rajbhandari et al. 2020, sec. 5)
this sends more, an all-reduce (2 volumes around the ring) plus a broadcast (1 volume), where a reduce-scatter and
an all-gather (1 volume each) would do; that form is `ZeroOptimizer`. In exchange it works with *any* optimizer,
because parameters stay whole.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm import collectives


class ShardedOptimizer(Optimizer):
    """Any optimizer, its state divided among the ranks.

    `param_groups` holds all parameters, so that LR schedulers and `zero_grad` see an ordinary optimizer; an inner
    optimizer holds the same groups with this rank's parameters. `state` is the inner one's.

    Args:
        params: parameters or groups of them, the same on every rank; gradients are averaged by the caller.
        optimizer_cls: such as `torch.optim.AdamW`.
        process_group: default: the default group.
        kwargs: for `optimizer_cls`.

    Raises:
        ValueError: no parameters. TypeError: something that is no tensor. Both from torch's own checks.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_cls: type[Optimizer],
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ):
        self._group = collectives.resolve_group(process_group)
        self._owner: dict[nn.Parameter, int] = {}
        self._load = [0] * self._group.size()  # elements owned by each rank
        self._inner: Optimizer | None = None  # torch's constructor calls our add_param_group before it exists
        super().__init__(params, dict(kwargs))
        self._assign([parameter for group in self.param_groups for parameter in group["params"]])
        self._inner = optimizer_cls([self._mine(group) for group in self.param_groups], **kwargs)
        self.defaults = self._inner.defaults
        for group in self.param_groups:
            self._complete(group)
        self.state = self._inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters, then exchange: afterwards all parameters are equal on all ranks.

        Args:
            closure: evaluated by the inner optimizer, once on every rank (as often as the optimizer asks).
            kwargs: for the inner optimizer's `step`.

        Returns:
            What the inner optimizer returns: the closure's loss, or None.
        """
        self._copy_options_inwards()
        loss = self._inner.step(closure, **kwargs)
        in_flight = []
        for rank in range(self._group.size()):
            owned = [p for p, owner in self._owner.items() if owner == rank and p.requires_grad]
            in_flight.append(collectives.broadcast_coalesced(owned, self._group, source=rank))
        for messages in in_flight:
            messages.wait()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, during training too; call it on every rank alike."""
        super().add_param_group(param_group)
        if self._inner is None:
            return
        group = self.param_groups[-1]
        self._assign(group["params"])
        self._inner.add_param_group(self._mine(group))
        self._complete(group)

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, in the form of the unsharded optimizer, which can load it.

        A collective: call it on every rank; every rank gets the whole state, on the CPU.
        """
        self._copy_options_inwards()
        mine = {
            index: {key: _to_cpu(value) for key, value in self.state[parameter].items()}
            for index, parameter in enumerate(self._all_parameters())
            if parameter in self.state
        }
        state: dict[int, Any] = {}
        for shard in collectives.gather_objects(mine, self._group):
            state |= shard
        groups, start = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(options | {"params": list(range(start, start + count))})
            start += count
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state saved by the unsharded optimizer, or by a sharded one at any world size.

        Raises:
            ValueError: other groups, or groups of other sizes.
        """
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            given = [len(group["params"]) for group in saved]
            raise ValueError(f"the saved groups hold {given} parameters, this optimizer's {sizes}")
        index_of = {}  # the saved optimizer's numbering, which need not begin at 0 → ours
        for group in saved:
            index_of |= {number: len(index_of) + i for i, number in enumerate(group["params"])}
        parameters = self._all_parameters()
        for group, source in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in source.items() if key != "params"})
        self._copy_options_inwards()

        inner = self._inner.state_dict()
        place = {parameter: number for number, parameter in enumerate(_parameters(self._inner))}
        inner["state"] = {
            place[parameters[index_of[number]]]: value
            for number, value in state_dict["state"].items()
            if parameters[index_of[number]] in place
        }
        self._inner.load_state_dict(inner)  # casts each tensor to its parameter's type and device
        self.state = self._inner.state

    # -- who owns what -------------------------------------------------------------------------------------

    def _assign(self, parameters: list[nn.Parameter]) -> None:
        """Largest first, each to the rank that owns least: loads differ by at most the largest parameter."""
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            rank = min(range(len(self._load)), key=self._load.__getitem__)
            self._owner[parameter] = rank
            self._load[rank] += parameter.numel()

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's parameters; some ranks' groups may be empty."""
        rank = self._group.rank()
        return group | {"params": [p for p in group["params"] if self._owner[p] == rank]}

    def _all_parameters(self) -> list[nn.Parameter]:
        return _parameters(self)

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the options that only the inner optimizer's defaults know."""
        for key, value in self.defaults.items():
            group.setdefault(key, value)

    def _copy_options_inwards(self) -> None:
        """What a scheduler or the user changed in our groups (lr, weight decay, …) holds for the inner ones."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
