"""The interface of every strategy, ours or torch's, to the rest of the lab; what a sharded optimizer adds.

Trainer, benchmarks, checkpoints and simulation know these two classes and no strategy. `Shard`s say
which elements lie on a rank: a model's shards are stored and stepped; `stepped()` says which of
them an optimizer steps here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel import order
from distlab.parallel.agreement import agree_on_call
from distlab.parallel.pipeline import Pipeline
from distlab.parallel.shard import Cut, Shard, local_part, plain_name, whole
from distlab.parallel.state_dicts import (
    Place,
    by_own_names,
    entries_of,
    places_of_rest,
    refuse_other_state,
)
from distlab.parallel.tensor_parallel import gather_cuts
from distlab.parallel.torch_names import AnswersTorchNames
from distlab.precision import autocast

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]  # or groups of them


class ParallelModel(nn.Module, ABC):
    """A module under a strategy. It never sees the optimizer.

    Attributes:
        module: what was wrapped.
        process_group: the ranks; None without communication.
        device: of the parameters.
        compute_dtype: what forward computes in; None: the parameters' own.
        casts_parameters: whether the module's parameters already have that dtype, so that autocast
            is not needed.
        replicas: how many ranks hold each shard that is not on every rank.
        shards_gradients: whether each rank has the mean gradient of its shards only.
        tensor_group: the ranks that share matrices (`distlab.parallel.tensor_parallel`); None for
            one alone.
        cuts: what this rank keeps of the parameters that they share, by plain name.
        pipeline: runs this rank's stages (`distlab.parallel.pipeline`); None where it has all
            blocks.
        bytes_outside_allocator: bytes of this GPU that torch's caching allocator does not count.
    """

    module: nn.Module
    process_group: ProcessGroup | None
    device: torch.device
    compute_dtype: torch.dtype | None = None
    casts_parameters: bool = False
    replicas: int = 1
    bytes_outside_allocator: int = 0
    shards_gradients: bool = False
    tensor_group: ProcessGroup | None = None
    cuts: Mapping[str, Cut] = {}
    pipeline: Pipeline | None = None
    _synchronizes = True  # False inside no_sync()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result."""
        return self.module(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward and loss, such that they compute in `compute_dtype`."""
        return autocast(self.device, None if self.casts_parameters else self.compute_dtype)

    # -- gradients -----------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally; the next one outside sends the sum.

        Sharded strategies keep full gradients for it, as large as their masters.
        """
        before = self._synchronizes
        self._set_synchronizes(False)
        try:
            yield
        finally:
            self._set_synchronizes(before)

    def _set_synchronizes(self, synchronizes: bool) -> None:
        self._synchronizes = synchronizes

    def enter_stage(self, stage: int) -> None:
        """What runs from now on is of this stage of a pipeline, of several that this rank has."""

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are means over ranks.

        Call it on every rank after backward, before the step.
        """

    def elementwise_gradient_edits(self) -> AbstractContextManager[None]:
        """Where gradients may be edited element by element, between finish and step; needed by sharded strategies."""
        return nullcontext()

    def check_gradients(self) -> None:
        """Raise RuntimeError if `.grad` is not what `finish_gradient_synchronization()` left."""

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the whole mean gradient, over all ranks' shards.

        Call it on every rank after finish.

        Nothing waits on the host for it.

        Returns:
            0-dim fp32, the same on every rank; inf or nan if a gradient is.

        Raises:
            RuntimeError: gradients that are not synchronized, or have been edited.
        """
        return self._norm_of(self.gradients())

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before (`grad_norm`).

        The arithmetic of `torch.nn.utils.clip_grad_norm_` on the model in one process.

        Raises:
            ValueError: a `norm_type` other than 2.
        """
        if norm_type != 2.0:
            raise ValueError(
                f"norm_type={norm_type}: only the 2-norm is computed, so leave it out or give 2.0"
            )
        gradients = self.gradients()
        norm = self._norm_of(gradients)
        held = [gradient for part in gradients for gradient in part]
        if held:
            torch._foreach_mul_(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._note_scaled()
        return norm

    def gradients(self) -> "Gradients":
        """Return this rank's mean gradients.

        Raises:
            RuntimeError: gradients that are not synchronized.
        """
        self.check_gradients()
        found = Gradients([], [], [], [])
        for shard in self.shards():
            if shard.tensor.grad is not None:
                place = 2 * (shard.name in self.cuts) + shard.replicated
                found[place].append(local_part(shard.tensor.grad))
        return found

    def _norm_of(self, gradients: "Gradients") -> Tensor:
        total = self._square_sum(gradients.sharded, gradients.replicated)
        if self.tensor_group is not None:
            cut = self._square_sum(gradients.cut_and_sharded, gradients.cut)
            total = total + collectives.sum_tensor(cut, self.tensor_group)
        if self.pipeline is not None:
            total = collectives.sum_tensor(total, self.pipeline.group)
        return total.sqrt().float()

    def _square_sum(self, sharded: Sequence[Tensor], replicated: Sequence[Tensor]) -> Tensor:
        """Over all ranks of the data strategy, each element once."""
        total = square_sum(replicated, self.device)
        if self.shards_gradients:
            agree_on_call(
                self.process_group, f"clip_grad_norm_() or grad_norm() of {type(self).__name__}"
            )
            # Over all ranks, not over a shard group: replicas must not differ in the last bit.
            squares = collectives.sum_tensor(square_sum(sharded, self.device), self.process_group)
            total = (squares if self.replicas == 1 else squares / self.replicas) + total
        return total

    def _note_scaled(self) -> None:
        """`clip_grad_norm_` has scaled the gradients, which is no edit of the user's."""

    # -- parameters ----------------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """What this rank holds of every parameter: what checkpoints store, and optimizers' states belong to."""
        return [whole(name, parameter) for name, parameter in self.module.named_parameters()]

    def located(self, shard: Shard) -> Shard:
        """One of `shards()` in the whole parameter, where ranks share matrices, too, and who else holds it."""
        if self.tensor_group is None and self.pipeline is None:
            return shard
        which, holders = shard.copies
        if shard.replicated and self.process_group is not None:
            which, holders = self.process_group.rank(), self.process_group.size()
        cut = self.cuts.get(shard.name)
        # every rank of the tensor-parallel group has these as well
        if self.tensor_group is not None and cut is None:
            which = which * self.tensor_group.size() + self.tensor_group.rank()
            holders *= self.tensor_group.size()
        shape = shard.shape if cut is None else cut.shape
        return replace(shard, shape=shape, cut=cut, replicated=False, copies=(which, holders))

    def of_all_stages(self, values: list[Any]) -> list[Any]:
        """What the ranks of a pipeline have of something, in the order of ranks. A collective."""
        if self.pipeline is None:
            return values
        return [
            each
            for rank in collectives.gather_objects(values, self.pipeline.group)
            for each in rank
        ]

    def shards_changed(self) -> None:
        """Call it on every rank after a step or a load has changed the shards."""

    def synchronize(self) -> None:
        """Wait until nothing of the last step is in flight."""

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return all parameters and persistent buffers, whole, as `state_dict()` of the wrapped module would.

        A collective: call it on every rank, and every rank gets the same. Names are the module's
        own, without `module.` and without the `_orig_mod.` of compiled blocks; a tied tensor has
        each of its names. The tensors are copies, on the wrapper's device, so this needs the memory
        of the whole model. Parameters have the dtype that the optimizer steps (fp32 under FSDP, for
        a module in bf16 as well). Buffers are those of rank 0.

        Raises:
            RuntimeError: a rank does something else instead.
        """
        agree_on_call(self.process_group, f"{type(self).__name__}.full_state_dict()")
        if order.begun:
            order.send_begun(self.process_group)
        self.synchronize()
        parameters = {plain_name(name): value for name, value in self.full_parameters().items()}
        copies: dict[int, Tensor] = {}  # by the identity of what was copied: tied tensors stay tied
        buffers: dict[int, Tensor] = {}
        state: dict[str, Any] = {}
        for name, owner, attribute, kind in entries_of(self.module):
            if kind == "extra":
                state[name] = owner.get_extra_state()
                continue
            tensor = parameters[name] if kind == "parameter" else owner._buffers[attribute]
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
                if kind == "buffer":
                    buffers[id(tensor)] = copies[id(tensor)]
            state[name] = copies[id(tensor)]
        if buffers and self.process_group is not None:
            collectives.broadcast_all(buffers.values(), self.process_group)
        if self.tensor_group is not None:
            state = gather_cuts(state, self.cuts, self.tensor_group)
        if self.pipeline is None:
            return state
        on_host = [
            (name, value.cpu() if isinstance(value, Tensor) else value)
            for name, value in state.items()
        ]
        everyones = self.of_all_stages(on_host)
        return {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in everyones
        }

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Overwrite all parameters and persistent buffers: the inverse of `full_state_dict()`.

        Call it on every rank with the same state dict, on any device. Names may begin with
        `module.`, as those of a wrapper's `state_dict()` do.

        Raises:
            ValueError: names that are missing or unexpected, or other shapes. Nothing was loaded.
        """
        self.synchronize()
        places = [*self._places_of_parameters(), *places_of_rest(self.module)]
        needed = self.of_all_stages([(place.names, place.shape) for place in places])
        given = by_own_names(state_dict, {name for names, _ in needed for name in names})
        refuse_other_state(given, needed)
        for place in places:
            name = next(name for name in place.names if name in given)
            place.load(given[name])

    def _places_of_parameters(self) -> list[Place]:
        """Return where whole parameters are loaded to."""
        places = []
        for names, shape, load in self._own_places():
            cut = next((self.cuts[name] for name in names if name in self.cuts), None)
            if cut is not None:
                shape, load = cut.shape, partial(_load_cut, cut, load)
            places.append(Place(names, shape, load))
        return places

    def _own_places(self) -> list[Place]:
        """Return where this model's parameters, perhaps a tensor-parallel rank's part, are loaded to."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(plain_name(name))
        return [
            Place(found, parameter.shape, parameter.copy_) for parameter, found in names.items()
        ]

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the parameters alone, whole over the data-parallel ranks, by their names in the wrapped module.

        `full_state_dict()` copies them and adds what ranks of other groups hold. These may be the
        module's own tensors. A tied parameter has each of its names. A collective.
        """
        self.synchronize()
        return dict(self.module.named_parameters(remove_duplicate=False))

    def sync_buffers(self) -> None:
        """Overwrite all buffers (BatchNorm statistics, say) by those of rank 0.

        Blocks. A collective.
        """
        agree_on_call(self.process_group, f"{type(self).__name__}.sync_buffers()")
        collectives.broadcast_all(self.module.buffers(), self.process_group)

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook.

        With `restore` the module is as before, with whole parameters; without, it is of no use
        any more, and nothing is sent.
        """


def _load_cut(cut: Cut, load: Callable[[Tensor], Any], value: Tensor) -> None:
    """Load this rank's part of a parameter that ranks of a tensor-parallel group share."""
    load(cut.of(value))


class Gradients(NamedTuple):
    """This rank's mean gradients, by who else holds these very elements.

    Attributes:
        sharded: nobody, but for replicas of a shard group.
        replicated: every rank.
        cut_and_sharded, cut: likewise, of parameters that ranks of a tensor-parallel group share.
    """

    sharded: list[Tensor]
    replicated: list[Tensor]
    cut_and_sharded: list[Tensor]
    cut: list[Tensor]


class LocalOptimizer(AnswersTorchNames, Optimizer, ABC):
    """An optimizer to its user, and another, over this rank's share, inside: what both sharded optimizers are.

    `param_groups` holds the model's parameters, so LR schedulers, `zero_grad` and the user's loops
    see an ordinary optimizer; `local` holds the same groups with this rank's share of them. A
    subclass says in `_mine(group)` which parameters of a group that is, and may act on newly
    arrived parameters in `_take(parameters)`.

    Args:
        params: parameters or groups of them.
        optimizer_cls: of the local optimizer.
        options: its keyword arguments.

    Raises:
        ValueError: no parameters, or one given twice. TypeError: something that is no tensor. By
            torch's checks.
    """

    def __init__(
        self,
        params: Params,
        optimizer_cls: type[Optimizer],
        options: dict[str, Any],
    ):
        # torch's constructor calls our add_param_group before it exists
        self.local: Optimizer | None = None
        super().__init__(params, dict(options))
        self._take([parameter for group in self.param_groups for parameter in group["params"]])
        self.local = optimizer_cls([self._mine(group) for group in self.param_groups], **options)
        self.defaults = self.local.defaults
        self._complete_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, during training too; call it on every rank alike."""
        super().add_param_group(param_group)
        if self.local is not None:
            group = self.param_groups[-1]
            self._take(group["params"])
            self.local.add_param_group(self._mine(group))
            self._complete_groups()

    @property
    def state(self) -> Any:
        """The local optimizer's, by what it steps."""
        return {} if self.local is None else self.local.state

    @state.setter
    def state(self, state: Any) -> None:
        if self.local is not None:  # torch's constructor assigns one, too
            raise ValueError(
                f"{type(self).__name__}.state is this rank's share and cannot be assigned: call load_state_dict(), or "
                "state.clear() to start anew"
            )

    @abstractmethod
    def shards(self, held: Iterable[Shard]) -> list[Shard]:
        """Of the model's trainable shards, what this rank steps; `state` has its entries by `Shard.tensor`."""

    def _take(self, parameters: list[nn.Parameter]) -> None:
        """New parameters arrived; decide whose they are."""

    @abstractmethod
    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's share of its parameters, which may be empty."""

    def _complete_groups(self) -> None:
        """Give groups the options that only the local optimizer's defaults know, and note what they hold."""
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._noted = self._held()

    def _copy_options_inwards(self) -> None:
        """What a scheduler or the user changed in our groups (lr, weight decay, …) holds for the local ones."""
        if self._held() != self._noted:
            raise ValueError(
                f"param_groups of this {type(self).__name__} hold other parameters than it was given: build another "
                "optimizer, or add parameters by add_param_group()"
            )
        for outer, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update(options_of(outer))

    def _held(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]


def stepped(model: ParallelModel, optimizer: Optimizer) -> list[Shard]:
    """Return what this rank's optimizer steps, for every strategy alike."""
    trainable = [shard for shard in model.shards() if shard.tensor.requires_grad]
    # All ranks hold all of a parameter without elements, however it is sharded: one of them writes
    # its step.
    trainable = [replace(s, replicated=True) if s.shape.numel() == 0 else s for s in trainable]
    return optimizer.shards(trainable) if isinstance(optimizer, LocalOptimizer) else trainable


def load_shards(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Give an optimizer the options of each group, and state by `Shard.tensor` of what it steps.

    No communication.

    torch casts states to the dtype and device of what is stepped.
    """
    if isinstance(optimizer, LocalOptimizer):
        for group, changed in zip(optimizer.param_groups, groups, strict=True):
            group.update(options_of(changed))
        optimizer, groups = optimizer.local, optimizer.param_groups
    packed = optimizer.state_dict()  # whose groups number the parameters
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed["state"] = {n: state[p] for n, p in zip(numbers, parameters, strict=True) if p in state}
    for group, changed in zip(packed["param_groups"], groups, strict=True):
        group.update(options_of(changed))
    optimizer.load_state_dict(packed)


def optimizer_name(optimizer: Optimizer) -> str:
    """Name the class that does the arithmetic: `AdamW` inside of `ZeroOptimizer`, too."""
    return type(optimizer.local if isinstance(optimizer, LocalOptimizer) else optimizer).__name__


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options, without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state, its tensors on the CPU."""
    return {key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in state.items()}


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, 0-dim fp64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Norms of half-precision tensors would be rounded to their dtype.
    half = [g for g in gradients if g.itemsize == 2]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in half]
    if len(half) < len(gradients):
        norms += torch._foreach_norm([g for g in gradients if g.itemsize > 2], 2)
    return torch.stack(norms).double().square().sum()
