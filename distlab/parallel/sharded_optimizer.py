"""The simple form of optimizer sharding: each rank updates the parameters it owns, then broadcasts.

    compute        │ forward │ backward │ step own │                               │
    communication  │  (gradients averaged)         │ broadcast from 0 │ from 1 │ …   │

Every rank holds all gradients, averaged by any of the DDPs, and the optimizer's state for its own
parameters only: with AdamW 2/N instead of 2 numbers per parameter.

Compared with ZeRO stage 1 (Rajbhandari et al. 2020, sec. 5; here `ZeroOptimizer`) this sends more:
an all-reduce (2 volumes around the ring) and a broadcast (1 volume), where a reduce-scatter and an
all-gather (1 volume each) would do. In exchange it works with any optimizer that takes parameters
one by one, because they stay whole.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.comm.agreement import agree_on_call, collective, prepare
from distlab.parallel import checks
from distlab.parallel.ddp import send_unfinished
from distlab.parallel.local_optimizer import (
    LocalOptimizer,
    Params,
    load_shards,
    options_of,
    to_cpu,
    with_hooks_of_loading,
    with_hooks_of_saving,
)
from distlab.parallel.shard import Shard
from distlab.parallel.state_dicts import refuse_other_shapes, refuse_shards


class ShardedOptimizer(LocalOptimizer):
    """Any optimizer, its state divided among the ranks.

    `param_groups` holds all parameters. `state` holds only the state of this rank's parameters, and
    is empty for all others.

    Args:
        params: parameters or groups of them, the same on every rank. The caller averages their
            gradients.
        optimizer_cls: class such as `torch.optim.AdamW`.
        process_group: ranks that share the parameters. Default: the group of the wrapper that
            averages their gradients, else the default group.
        kwargs: keyword arguments of `optimizer_cls`.

    Raises:
        ValueError: no parameters, another group than their wrapper's, or L-BFGS, which couples
            them.
        TypeError: an entry that is not a tensor.
    """

    def __init__(
        self,
        params: Params,
        optimizer_cls: type[Optimizer],
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ):
        checks.refuse_lbfgs(optimizer_cls)
        self._group = process_group
        self._owner: dict[nn.Parameter, int] = {}
        self._load: list[int] = []  # elements owned by each rank
        super().__init__(params, optimizer_cls, kwargs)
        prepare(self._group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and broadcast them.

        Afterwards all parameters are equal on all ranks.

        Args:
            closure: evaluated by the local optimizer, once on every rank (as often as the optimizer
                asks).
            kwargs: keyword arguments of the local optimizer's `step`.

        Returns:
            What the local optimizer returns: the closure's loss, or None.
        """
        self._copy_options_inwards()
        loss = self.local.step(closure, **kwargs)
        send_unfinished(self._group)  # a wrapper's messages come before ours on every rank
        # A frozen parameter that still has a gradient is stepped, as by any optimizer.
        stepped = [p for p in self._owner if p.requires_grad or p.grad is not None]
        in_flight = []
        for rank in range(self._group.size()):
            owned = [p for p in stepped if self._owner[p] == rank]
            in_flight.append(collectives.broadcast_coalesced(owned, self._group, source=rank))
        for messages in in_flight:
            messages.wait()
        return loss

    @with_hooks_of_saving
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, in the form of the unsharded optimizer.

        That optimizer can load it. A collective: call it on every rank. Every rank gets the whole
        state, on the CPU.
        """
        call = "ShardedOptimizer.state_dict()"
        agree_on_call(self._group, call)
        self._copy_options_inwards()
        number_of: dict[Tensor, int] = {}  # numbered in the order of the groups, as torch does
        groups = []
        for group in self.param_groups:
            numbers = [number_of.setdefault(each, len(number_of)) for each in group["params"]]
            groups.append(options_of(group) | {"params": numbers})
        mine = {}
        for parameter, state_here in self.state.items():
            if state_here:  # a read of a state before the first step leaves an empty one
                mine[number_of[parameter]] = to_cpu(state_here)
        state: dict[int, Any] = {}
        for state_of_rank in collectives.gather_objects(mine, self._group, collective(call)):
            state |= state_of_rank
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @with_hooks_of_loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by the unsharded optimizer, or by a sharded one at any world size.

        Raises:
            ValueError: the state dict holds only the shards of one rank, or groups of another
                number or size, or a tensor whose shape is not its parameter's.
        """
        refuse_shards(state_dict)
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            given = [len(group["params"]) for group in saved]
            raise ValueError(f"the saved groups hold {given} parameters, this optimizer's {sizes}")
        # Number in the saved state → our index. The saved numbers need not begin at 0.
        index_of: dict[int, int] = {}
        for group in saved:
            for number in group["params"]:
                index_of[number] = len(index_of)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {}
        for number, value in state_dict["state"].items():
            parameter = parameters[index_of[number]]
            # Other optimizers, such as Adafactor, have state of other shapes.
            if checks.is_elementwise(type(self.local)):
                refuse_other_shapes(value, f"parameter {index_of[number]}", parameter)
            state[parameter] = value
        load_shards(self, saved, state)

    def shards(self, held: Iterable[Shard]) -> list[Shard]:
        """Return the shards that this rank owns.

        Parameters are on all ranks. Their state is on the owner alone.
        """
        rank = self._group.rank()
        owned = [shard for shard in held if self._owner.get(shard.tensor) == rank]
        return [replace(shard, replicated=False) for shard in owned]

    # -- which rank owns which parameter -----------------------------------------------------------

    def _register(self, parameters: list[nn.Parameter]) -> None:
        """Give each new parameter to the rank that owns the fewest elements, largest first.

        Loads then differ by at most the largest parameter.
        """
        if self._group is None:
            wrappers = checks.wrappers_of(parameters)
            self._group = wrappers[0].process_group if wrappers else None
        self._group = collectives.resolve_group(self._group)
        checks.check_group(self._group, parameters)
        if not self._load:
            self._load = [0] * self._group.size()
        for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
            rank = self._load.index(min(self._load))
            self._owner[parameter] = rank
            self._load[rank] += parameter.numel()

    def _share_of(self, parameter: Tensor) -> Tensor | None:
        return parameter if self._owner[parameter] == self._group.rank() else None

    def _share(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the group with this rank's parameters. Some ranks' groups may be empty."""
        rank = self._group.rank()
        return group | {"params": [p for p in group["params"] if self._owner[p] == rank]}
