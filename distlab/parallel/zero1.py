"""ZeRO stage 1: gradients are reduce-scattered, each rank steps its shard, parameters are all-gathered.

    compute        │ forward ─────── │ backward ───────────────── │   │ step 1/N │ forward ─────── …
    communication  │                 │  reduce-scatter b0 │ b1 │ … bn │          │ all-gather bn │ … │ b0 │

The optimizer's state, and the work of its step, are divided by the number of ranks N, and nothing
is sent twice: a reduce-scatter and an all-gather are the two halves of the all-reduce they replace
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sec. 5.1 and 7.1). The all-gather of the updated parameters runs under the next forward, in the
order in which forward needs them; see `gathering.py`.

Parameters live in flat buffers laid out like the gradient buckets; a rank has the same slice of
both. Its local optimizer sees 1-D shards of the parameters in its slices, which is why it must be
element-wise, or know what to do with shards (`muon.py`).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel.agreement import agree_on_call, collective
from distlab.parallel.base import LocalOptimizer, Params, load_shards, options_of, to_cpu
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.buckets import view_like
from distlab.parallel.exchange import ReduceScatter
from distlab.parallel.guards.optimizers import check_zero, refuse_other_groups, takes_shards
from distlab.parallel.placement import Slices
from distlab.parallel.shard import Shard
from distlab.parallel.state_dicts import refuse_other_shapes, refuse_shards


class ZeroOptimizer(LocalOptimizer):
    """An element-wise optimizer, or `distlab.optim.Muon`, over this rank's slices of a `BucketedDDP`'s parameters.

    Gradients. After `finish_gradient_synchronization()` a `.grad` holds the mean in this rank's
    shard and leftovers elsewhere. So it must be zeroed before every step's first backward, the norm
    is clipped by `clip_grad_norm_` here, and other edits belong inside
    `elementwise_gradient_edits()`; everything else raises.

    Parameters. `step()` returns while they are being gathered, and the next forward waits module by
    module. None is read before it has arrived: any read in Python waits for it (`in_flight.py`),
    and code compiled by `torch.compile` runs when all that it may read has arrived. To keep the
    overlap, compile blocks (`torch.compile(block)`) before building this optimizer; after
    `block.compile()`, the wrapper's forward waits for all parameters at once. Call `synchronize()`
    before parameters are read below Python (`docs/learn/limits.md`).

    Args:
        ddp: its bucket plan is taken over; from now on it reduce-scatters.
        optimizer_cls: such as `torch.optim.AdamW`. Where its body says `takes_shards = True`, it is
            given this rank's shards of all parameters, empty ones too, and reads in their attribute
            `spread` where the rest lies.
        params: parameters or groups of the wrapped module; default: all that are trainable, in one
            group.
        elementwise: a class that is none of torch's treats every element by itself, too; so says
            `elementwise = True` in its body.
        kwargs: for `optimizer_cls`.

    Raises:
        TypeError: `ddp` is no `BucketedDDP`.
        ValueError: an optimizer that is not known to be element-wise, a parameter that the wrapper
            does not train, or one given twice.
    """

    def __init__(
        self,
        ddp: BucketedDDP,
        optimizer_cls: type[Optimizer],
        *,
        params: Params | None = None,
        elementwise: bool = False,
        **kwargs: Any,
    ):
        check_zero(ddp, optimizer_cls, elementwise)
        self._takes_shards = takes_shards(optimizer_cls)
        ddp.placement.close()  # that of an optimizer before this one
        ddp.lay_out(ReduceScatter(ddp.process_group, ddp.device))
        ddp.placement = self._slices = Slices(ddp)
        ddp.guard.watch_parts(self)
        self._ddp = ddp
        super().__init__(ddp.trainable if params is None else params, optimizer_cls, kwargs)

    @torch._disable_dynamo  # its checks read versions, and reading a parameter waits
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's shards and start the all-gathers; reading a parameter waits for it.

        Args:
            closure: evaluated once, before the step, with gradients enabled; it must finish the
                synchronisation.
            kwargs: for the local optimizer's `step`.

        Returns:
            The closure's value, or None.

        Raises:
            RuntimeError: gradients were not finished, or edited since outside of
                `elementwise_gradient_edits()`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ddp.guard.check_step(self)  # again: a closure or a hook of this step has run since
        self._copy_options_inwards()
        self._slices.point_gradients()
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        # for a graph that has saved them; gathering does not count
        torch.autograd.graph.increment_version(stepped)
        self.local.step(**kwargs)
        self._slices.gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer; gradients alone are touched, so nothing waits."""
        # parameters in flight: a microsecond for each access else
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    def elementwise_gradient_edits(self) -> AbstractContextManager[None]:
        """Inside, between `finish_gradient_synchronization()` and `step()`, gradients may be edited element by element.

        For example `torch.nn.utils.clip_grad_value_` or a multiplication. What needs all of a
        gradient at once gets another answer on each rank, as only this rank's part is the mean: for
        the norm there is `clip_grad_norm_`.

        Raises:
            RuntimeError: a gradient was edited before.
        """
        return self._ddp.elementwise_gradient_edits()

    def synchronize(self) -> None:
        """Wait until all parameters are whole; for what reads their memory below Python (see the class)."""
        self._ddp.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Call the wrapper's `clip_grad_norm_`: by the norm over all ranks, which it returns."""
        return self._ddp.clip_grad_norm_(max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, unpadded and by parameter name; an unsharded optimizer over them can load it.

        A collective: call it on every rank; every rank gets all of it, on the CPU.
        """
        call = "ZeroOptimizer.state_dict()"
        agree_on_call(self._ddp.process_group, call)
        self._copy_options_inwards()
        tensors = {
            name: self._slices.shard_of[parameter].tensor for name, parameter in self._ddp.named
        }
        mine = {
            name: to_cpu(self.state[tensor])
            for name, tensor in tensors.items()
            if tensor in self.state
        }
        # in the order of ranks, and so of the parameter's elements
        parts: dict[str, list[dict[str, Any]]] = {}
        for states in collectives.gather_objects(mine, self._ddp.process_group, collective(call)):
            for name, state in states.items():
                parts.setdefault(name, []).append(state)
        state = {
            name: _join(parts[name], parameter)
            for name, parameter in self._ddp.named
            if name in parts
        }
        return {"state": state, "param_groups": self._groups_by_name()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a whole state saved at any world size: by name, or numbered as an unsharded optimizer's.

        An unsharded optimizer numbers its parameters in the order of its groups. It has the same
        groups as this one, or a single one of all parameters of the module, frozen ones among them.

        Raises:
            ValueError: groups that hold other parameters, or state in another shape than its
                parameter's.
        """
        refuse_shards(state_dict)
        saved, state_of = self._by_name(state_dict)
        refuse_other_groups(saved, [group["params"] for group in self._groups_by_name()])
        state = {}
        for name, parameter in self._ddp.named:
            if name in state_of:
                tensor, start = (
                    self._slices.shard_of[parameter].tensor,
                    self._slices.starts[parameter],
                )
                part = slice(start, start + tensor.numel())
                refuse_other_shapes(state_of[name], name, parameter)
                state[tensor] = _cut(state_of[name], parameter, part)
        load_shards(self, saved, state)

    def shards(self, held: Iterable[Shard]) -> list[Shard]:
        """Return the shards with elements, and parameters that have none on any rank: they have a step as well."""
        return [shard for shard in held if shard.tensor.numel() > 0 or shard.shape.numel() == 0]

    def close(self) -> None:
        """Wait for the parameters and detach the hooks; the wrapper has its own `close()`."""
        self._slices.close()

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        shards = self._slices.shard_of
        if any(parameter not in shards for parameter in group["params"]):
            raise ValueError("a parameter is not among those that the wrapped module trains")
        held = [shards[parameter] for parameter in group["params"]]
        if not self._takes_shards:
            held = self.shards(held)
        return group | {"params": [shard.tensor for shard in held]}

    def _by_name(self, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the groups and the state of a state dict, with names for numbers.

        Raises:
            ValueError: other numbers of parameters than this optimizer's.
        """
        saved, state = state_dict["param_groups"], state_dict["state"]
        numbers = [group["params"] for group in saved]
        if any(isinstance(number, str) for group in numbers for number in group):
            return saved, state
        names = [group["params"] for group in self._groups_by_name()]
        everything = [name for name, _ in self._ddp.module.named_parameters()]
        sizes = [len(group) for group in numbers]
        name_of: dict[int, str] = {}
        if sizes == [len(group) for group in names]:
            for numbered, named in zip(numbers, names, strict=True):
                name_of |= dict(zip(numbered, named, strict=True))
        elif sizes == [len(everything)] and len(names) == 1:
            name_of = dict(zip(numbers[0], everything, strict=True))
        else:
            raise ValueError(
                f"the saved groups hold {sizes} parameters by number, and this optimizer's groups "
                f"{[len(group) for group in names]} of a module that has {len(everything)}: load a state whose "
                "optimizer had the same groups"
            )
        mine = {name for group in names for name in group}
        groups = [
            group
            | {"params": [name_of[number] for number in group["params"] if name_of[number] in mine]}
            for group in saved
        ]
        return groups, {name_of[number]: value for number, value in state.items()}

    def _groups_by_name(self) -> list[dict[str, Any]]:
        name_of = {parameter: name for name, parameter in self._ddp.named}
        return [
            options_of(group) | {"params": [name_of[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]


def _join(parts: list[dict[str, Any]], parameter: nn.Parameter) -> dict[str, Any]:
    """Put the optimizer states of a parameter's shards together to the whole's."""
    return {
        key: view_like(torch.cat([state[key] for state in parts]), parameter)
        if isinstance(value, Tensor) and value.ndim > 0
        else value
        for key, value in parts[0].items()
    }


def _cut(state: dict[str, Any], parameter: nn.Parameter, part: slice) -> dict[str, Any]:
    """A shard's part of a whole parameter's state; what is not one number per element is kept as it is."""
    found = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim > 0 and value.numel() == parameter.numel():
            in_memory = value.new_empty(value.numel())
            view_like(in_memory, parameter).copy_(value.view(parameter.shape))
            value = in_memory[part]
        found[key] = value
    return found
