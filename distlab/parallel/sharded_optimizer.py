"""The simple form of optimizer sharding: each rank updates the parameters it owns and broadcasts them.

    compute        │ forward │ backward │ step own │                               │
    communication  │  (gradients averaged)         │ broadcast from 0 │ from 1 │ …   │

Every rank holds all gradients, averaged by any of the DDPs, and the optimizer's state for its own
parameters only: with AdamW 2/N instead of 2 numbers per parameter. Against ZeRO stage 1
(Rajbhandari et al. 2020, sec. 5) this sends more, an all-reduce (2 volumes around the ring) plus a
broadcast (1 volume), where a reduce-scatter and an all-gather (1 volume each) would do; that form
is `ZeroOptimizer`. In exchange it works with *any* optimizer, that takes parameters one by one,
because they stay whole.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel import order
from distlab.parallel.agreement import agree_on_call, collective, prepare
from distlab.parallel.base import LocalOptimizer, Params, load_shards, to_cpu
from distlab.parallel.guards.optimizers import group_of, is_elementwise, refuse_lbfgs
from distlab.parallel.shard import Shard
from distlab.parallel.state_dicts import refuse_other_shapes, refuse_shards


class ShardedOptimizer(LocalOptimizer):
    """Any optimizer, its state divided among the ranks.

    `param_groups` holds all parameters, `state` that of this rank's.

    Args:
        params: parameters or groups of them, the same on every rank; gradients are averaged by the
            caller.
        optimizer_cls: such as `torch.optim.AdamW`.
        process_group: default: that of the wrapper which averages the parameters' gradients, else
            the default group.
        kwargs: for `optimizer_cls`.

    Raises:
        ValueError: no parameters, another group than their wrapper's, or L-BFGS, which couples
            them.
        TypeError: something that is no tensor.
    """

    def __init__(
        self,
        params: Params,
        optimizer_cls: type[Optimizer],
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ):
        refuse_lbfgs(optimizer_cls)
        self._group = process_group
        self._owner: dict[nn.Parameter, int] = {}
        self._load: list[int] = []  # elements owned by each rank
        super().__init__(params, optimizer_cls, kwargs)
        prepare(self._group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters, then exchange: afterwards all parameters are equal on all ranks.

        Args:
            closure: evaluated by the local optimizer, once on every rank (as often as the optimizer
                asks).
            kwargs: for the local optimizer's `step`.

        Returns:
            What the local optimizer returns: the closure's loss, or None.
        """
        self._copy_options_inwards()
        loss = self.local.step(closure, **kwargs)
        if order.begun:
            order.send_begun(self._group)
        in_flight = []
        for rank in range(self._group.size()):
            # A frozen parameter whose gradient is still there is stepped, as by any optimizer.
            stepped = (p for p in self._owner if p.requires_grad or p.grad is not None)
            owned = [p for p in stepped if self._owner[p] == rank]
            in_flight.append(collectives.broadcast_coalesced(owned, self._group, source=rank))
        for messages in in_flight:
            messages.wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, in the form of the unsharded optimizer, which can load it.

        A collective: call it on every rank; every rank gets the whole state, on the CPU.
        """
        call = "ShardedOptimizer.state_dict()"
        agree_on_call(self._group, call)
        self._copy_options_inwards()
        packed = super().state_dict()
        mine = {number: to_cpu(state) for number, state in packed["state"].items()}
        state: dict[int, Any] = {}
        for shard in collectives.gather_objects(mine, self._group, collective(call)):
            state |= shard
        return packed | {"state": dict(sorted(state.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state saved by the unsharded optimizer, or by a sharded one at any world size.

        Raises:
            ValueError: other groups, groups of other sizes, state of other shapes, or one rank's
                shards.
        """
        refuse_shards(state_dict)
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            given = [len(group["params"]) for group in saved]
            raise ValueError(f"the saved groups hold {given} parameters, this optimizer's {sizes}")
        index_of = {}  # the saved optimizer's numbering, which need not begin at 0 → ours
        for group in saved:
            index_of |= {number: len(index_of) + i for i, number in enumerate(group["params"])}
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {}
        for number, value in state_dict["state"].items():
            parameter = parameters[index_of[number]]
            # others, such as Adafactor, have state of other shapes
            if is_elementwise(type(self.local)):
                refuse_other_shapes(value, f"parameter {index_of[number]}", parameter)
            state[parameter] = value
        load_shards(self, saved, state)

    def shards(self, held: Iterable[Shard]) -> list[Shard]:
        """Return the shards that this rank owns: parameters are on all ranks, their state is on the owner alone."""
        rank = self._group.rank()
        return [
            replace(shard, replicated=False)
            for shard in held
            if self._owner.get(shard.tensor) == rank
        ]

    # -- who owns what -------------------------------------------------------------------------------------

    def _take(self, parameters: list[nn.Parameter]) -> None:
        """Largest first, each to the rank that owns least: loads differ by at most the largest parameter."""
        self._group = group_of(parameters, self._group)
        self._load = self._load or [0] * self._group.size()
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            rank = min(range(len(self._load)), key=self._load.__getitem__)
            self._owner[parameter] = rank
            self._load[rank] += parameter.numel()

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's parameters; some ranks' groups may be empty."""
        rank = self._group.rank()
        return group | {"params": [p for p in group["params"] if self._owner[p] == rank]}
