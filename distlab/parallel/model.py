"""The interface of every strategy, ours or torch's, to the rest of the lab.

Trainer, benchmarks, checkpoints and simulation know `ParallelModel` and no strategy. A `Shard` says
which elements of a parameter are stored on a rank. Optimizers that step a share of the parameters
are in `local_optimizer.py`.
"""

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.comm.agreement import agree_on_call
from distlab.parallel import checks
from distlab.parallel.shard import Cut, Loader, Shard, local_part, plain_name, whole


class RunsStages(Protocol):
    """Members of `distlab.parallel.pipeline.Pipeline` that a wrapped model uses."""

    group: ProcessGroup


class ParallelModel(nn.Module, ABC):
    """A module under a strategy. It does not know the optimizer.

    Attributes:
        module: the wrapped module.
        named: trainable parameters with names; empty where nothing checks their gradients.
        process_group: the ranks; None without communication.
        device: device of the parameters.
        compute_dtype: dtype in which forward computes; None for the parameters' own.
        casts_parameters: True if the module's parameters already have that dtype, so that autocast
            is not needed.
        replicas: number of ranks that hold the same shard of a parameter that is not on every rank.
        shards_gradients: True if each rank has the mean gradient of its shards only.
        accumulates_shards: True if finish adds to the means that are there, so that a finish after
            each micro-batch accumulates without the memory of full gradients.
        tensor_group: the ranks that share matrices (`distlab.parallel.tensor_parallel`); None if
            no matrix is shared.
        cuts: part of each shared parameter that this rank keeps, by plain name.
        pipeline: runs this rank's stages (`distlab.parallel.pipeline`); None if this rank has all
            blocks.
        bytes_outside_allocator: bytes of this GPU that torch's caching allocator does not count.
    """

    module: nn.Module
    named: checks.Named = ()
    process_group: ProcessGroup | None
    device: torch.device
    compute_dtype: torch.dtype | None = None
    casts_parameters: bool = False
    replicas: int = 1
    bytes_outside_allocator: int = 0
    shards_gradients: bool = False
    accumulates_shards: bool = False
    tensor_group: ProcessGroup | None = None
    cuts: Mapping[str, Cut] = {}
    pipeline: RunsStages | None = None
    _accumulates = False  # True inside no_sync()
    _editing = False  # True inside elementwise_gradient_edits()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result."""
        return self.module(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward and loss, such that they compute in `compute_dtype`."""
        if self.compute_dtype is None or self.casts_parameters:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    # -- gradients ---------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally the gradients of backward passes inside.

        The next backward outside sends the sum. Sharded strategies keep full gradients for it, as
        large as their masters. FSDP with a mesh keeps shards: it reduce-scatters inside the shard
        group, and the next backward outside sends their sum to the replicas.
        """
        before = self._accumulates
        self._set_accumulates(True)
        try:
            yield
        finally:
            self._set_accumulates(before)

    def _set_accumulates(self, accumulates: bool) -> None:
        self._accumulates = accumulates

    def enter_stage(self, stage: int) -> None:
        """Note that forward and backward passes from now on belong to this stage of a pipeline.

        Only ranks that have several stages need it.
        """

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are means over ranks.

        Call it on every rank after backward, before the step.
        """

    @contextmanager
    def elementwise_gradient_edits(self) -> Iterator[None]:
        """Return a context in which gradients may be changed, each element by itself.

        Use it after `finish_gradient_synchronization()`, on every rank with the same changes:
        `torch.nn.utils.clip_grad_value_`, a factor. Where a rank has the mean of a part only, the
        optimizer's next step raises for edits outside of it, because most edits compute something
        of all elements, such as a norm.

        Raises:
            RuntimeError: gradients that are not synchronized, or have been edited already.
        """
        self.check_step()
        if self.shards_gradients:
            for _, parameter in self.named:
                if parameter.grad is not None:
                    parameter.grad.finished_state = None  # if the block raises, it is half edited
        self._editing = True
        try:
            yield
        finally:
            self._editing = False
        if self.shards_gradients:
            self._take_edited()

    def _take_edited(self) -> None:
        """Take sharded gradients as they are now for the means."""
        checks.mark_finished(self.named)

    def check_step(self, optimizer: Optimizer | None = None) -> None:
        """Raise RuntimeError if `.grad` is not what `finish_gradient_synchronization()` left.

        Args:
            optimizer: optimizer that is about to step.
        """

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the whole mean gradient, over all ranks' shards.

        Call it on every rank after finish. The host does not wait for the result.

        Returns:
            0-dim fp32, the same on every rank; inf or nan if a gradient is.

        Raises:
            RuntimeError: gradients that are not synchronized, or have been edited.
        """
        return self._norm_of(self.gradients())

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint 2-norm is at most `max_norm`.

        The arithmetic is that of `torch.nn.utils.clip_grad_norm_` on the model in one process. The
        norm is rounded to fp32, also that of gradients in fp64.

        Returns:
            The norm before (`grad_norm`).

        Raises:
            ValueError: a `norm_type` other than 2.
            RuntimeError: gradients that are not synchronized, or that were changed since.
        """
        if norm_type != 2.0:
            raise ValueError(
                f"norm_type={norm_type}: only the 2-norm is computed, so leave it out or give 2.0"
            )
        gradients = self.gradients()
        norm = self._norm_of(gradients)
        held = gradients.every()
        if held:
            torch._foreach_mul_(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._note_scaled()
        return norm

    def gradients(self) -> "Gradients":
        """Return this rank's mean gradients.

        Raises:
            RuntimeError: gradients that are not synchronized.
        """
        self.check_step()
        found = Gradients(sharded=[], replicated=[], cut_and_sharded=[], cut=[])
        for shard in self.shards():
            if shard.tensor.grad is None:
                continue
            if shard.name in self.cuts:
                same = found.cut if shard.replicated else found.cut_and_sharded
            else:
                same = found.replicated if shard.replicated else found.sharded
            same.append(local_part(shard.tensor.grad))
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
        """Return the sum of squares over all ranks of the data strategy, each element once."""
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
        """Note that `clip_grad_norm_` has scaled the gradients, which is not a user's edit."""

    # -- parameters --------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """Return the shards this rank holds, one per parameter.

        Checkpoints store them. Optimizer state is keyed by them.
        """
        return [whole(name, parameter) for name, parameter in self.module.named_parameters()]

    def located(self, shard: Shard) -> Shard:
        """Return one of `shards()` as a part of the whole parameter, with the ranks that hold it.

        It differs from the given one only where ranks share matrices or stages.
        """
        if self.tensor_group is None and self.pipeline is None:
            return shard
        which, holders = shard.copies
        if shard.replicated and self.process_group is not None:
            which, holders = self.process_group.rank(), self.process_group.size()
        cut = self.cuts.get(shard.name)
        if self.tensor_group is not None and cut is None:
            # Every rank of the tensor-parallel group holds these elements as well.
            which = which * self.tensor_group.size() + self.tensor_group.rank()
            holders *= self.tensor_group.size()
        shape = shard.shape if cut is None else cut.shape
        return replace(shard, shape=shape, cut=cut, replicated=False, copies=(which, holders))

    def of_all_stages(self, values: list[Any]) -> list[Any]:
        """Return the values of all ranks of the pipeline, in the order of ranks. A collective."""
        if self.pipeline is None:
            return values
        found = []
        for values_of_rank in collectives.gather_objects(values, self.pipeline.group):
            found += values_of_rank
        return found

    def shards_changed(self) -> None:
        """Make parameters whole again after a load has changed the shards, on every rank."""

    def synchronize(self) -> None:
        """Wait until nothing of the last step is in flight."""

    def full_state_dict(self) -> dict[str, Any]:
        """Return all parameters and persistent buffers, whole.

        It has the form of the module's `state_dict()` before wrapping. A collective: call it on
        every rank, and every rank gets the same. Names are the module's own, without `module.` and
        without the `_orig_mod.` of compiled blocks; a tied tensor has each of its names. The
        tensors are copies, on the wrapper's device, so this needs the memory of the whole model.
        Parameters have the dtype that the optimizer steps (fp32 under FSDP, also for a module in
        bf16). Buffers are those of rank 0.

        Raises:
            RuntimeError: a rank does something else instead.
        """
        from distlab.parallel.state_dicts import collect

        agree_on_call(self.process_group, f"{type(self).__name__}.full_state_dict()")
        self.synchronize()
        return collect(self)

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Overwrite all parameters and persistent buffers: the inverse of `full_state_dict()`.

        Call it on every rank with the same state dict, on any device. Names may begin with
        `module.`, as those of a wrapper's `state_dict()` do.

        Raises:
            ValueError: names that are missing or unexpected, or other shapes. Nothing was loaded.
        """
        from distlab.parallel.state_dicts import load

        self.synchronize()
        load(self, state_dict)

    def loaders(self) -> list[Loader]:
        """Return where whole parameters are loaded to, one entry per parameter.

        Where ranks share matrices, "whole" is this rank's part (`cuts`).
        """
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(plain_name(name))
        return [
            Loader(found, parameter.shape, parameter.copy_) for parameter, found in names.items()
        ]

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the parameters, whole over the data-parallel ranks, by their names in the module.

        `full_state_dict()` copies them and adds what ranks of other groups hold. These may be the
        module's own tensors. A tied parameter has each of its names. A collective.
        """
        self.synchronize()
        return dict(self.module.named_parameters(remove_duplicate=False))

    def sync_buffers(self) -> None:
        """Overwrite all buffers, such as BatchNorm statistics, by those of rank 0.

        Blocks. A collective.
        """
        agree_on_call(self.process_group, f"{type(self).__name__}.sync_buffers()")
        collectives.broadcast_all(self.module.buffers(), self.process_group)

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook.

        Args:
            restore: True gives the module whole parameters, as before wrapping. With False the
                module cannot be used any more, and nothing is sent.
        """


class Gradients(NamedTuple):
    """This rank's mean gradients, by which other ranks hold the same elements.

    Attributes:
        sharded: held by no other rank, except by replicas of a shard group.
        replicated: held by every rank.
        cut_and_sharded: sharded, of parameters that ranks of a tensor-parallel group share.
        cut: replicated, of parameters that ranks of a tensor-parallel group share.
    """

    sharded: list[Tensor]
    replicated: list[Tensor]
    cut_and_sharded: list[Tensor]
    cut: list[Tensor]

    def every(self) -> list[Tensor]:
        """Return all of them in one list."""
        return [*self.sharded, *self.replicated, *self.cut_and_sharded, *self.cut]


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, 0-dim fp64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    half = [gradient for gradient in gradients if gradient.itemsize == 2]
    full = [gradient for gradient in gradients if gradient.itemsize > 2]
    # A norm in half precision would be rounded to that dtype.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in half]
    if full:
        norms += torch._foreach_norm(full, 2)
    return torch.stack(norms).double().square().sum()
