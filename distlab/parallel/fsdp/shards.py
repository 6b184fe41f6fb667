"""The memory of FSDP: flat buffers that are gathered and freed, and master slices.

A flat buffer's storage is resized to zero bytes when it is freed and back before it is gathered. The tensor
objects stay, so what autograd saved in forward is valid again in backward without any bookkeeping; and the full
parameters have version counters apart from the buffer's, so that autograd does not take the refill for a
modification.

On CUDA everything here is issued from the computing stream. A collective starts after what that stream holds
at its issue, and `wait()` makes the stream wait for the collective: so memory that the stream freed may be
gathered into at once, and memory that a collective uses is freed only after `wait()`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.parallel.fsdp.units import Entry, FlatPlan, UnitPlan


class FlatShard:
    """Parameters of one unit that share their types: this rank's master slice, and the buffer to gather into.

    Args:
        entries: the parameters, alike in both dtypes and in `requires_grad`.
        device: where shards and buffers lie.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, group: ProcessGroup):
        self.entries = list(entries)
        self.group = group
        self.rank = group.rank()
        self.plan = FlatPlan(tuple(entry.parameter.numel() for entry in entries), group.size())
        self._places = [self.plan.place(index, self.rank) for index in range(len(entries))]
        self.trainable = entries[0].parameter.requires_grad
        self.master = torch.zeros(self.plan.slice_numel, dtype=entries[0].master_dtype, device=device)
        self.buffer = torch.empty(self.plan.numel, dtype=entries[0].compute_dtype, device=device)
        # What forward sees, and what the optimizer sees: views of the buffer, and views of the master slice.
        # `.data` gives each full parameter a version counter of its own, which no gather moves.
        self.full = [nn.Parameter(view.data, self.trainable) for view in self._views(self.buffer)]
        self.pieces = [nn.Parameter(view, self.trainable) for view in self._slices(self.master)]
        self.buffer.untyped_storage().resize_(0)
        self._gathering: tuple[Work, Tensor] | None = None
        self._unsent: Tensor | None = None  # full gradients that no_sync() left, in the master's type
        self._reducing: tuple[Work, Tensor, Tensor] | None = None

    def _views(self, flat: Tensor) -> list[Tensor]:
        """`(plan.numel,)` → one view per parameter, of its shape."""
        places = zip(self.entries, self.plan.offsets, self.plan.numels, strict=True)
        return [entry.unflatten(flat[offset : offset + numel]) for entry, offset, numel in places]

    def _slices(self, flat: Tensor) -> list[Tensor]:
        """`(plan.slice_numel,)` → one 1-D view per parameter: its piece, perhaps empty."""
        return [flat[first:last] for first, last in self._places]

    @torch.no_grad()
    def load(self, index: int, full: Tensor) -> None:
        """Overwrite this rank's piece of parameter `index` by its part of `full` (the parameter's shape)."""
        first, last = self.plan.piece(index, self.rank)
        self.pieces[index].copy_(self.entries[index].flatten(full)[first:last])

    @torch.no_grad()
    def gather_masters(self) -> list[Tensor]:
        """Every parameter in full, in the masters' type and its own shape. Blocks; needs the memory of both."""
        flat = torch.empty(self.plan.numel, dtype=self.master.dtype, device=self.master.device)
        collectives.all_gather(flat, self.master, self.group).wait()
        return [view.clone() for view in self._views(flat)]

    # -- parameters ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def issue_gather(self) -> None:
        """Allocate the buffer and start to gather it, cast to the compute dtype before it is sent."""
        self.buffer.untyped_storage().resize_(self.buffer.numel() * self.buffer.element_size())
        sent = self.master.to(self.buffer.dtype)
        self._gathering = (collectives.all_gather(self.buffer, sent, self.group), sent)

    def wait_gather(self) -> None:
        """Wait for the all-gather in flight, if there is one: the buffer then holds the full parameters."""
        gathering, self._gathering = self._gathering, None  # forgotten even if waiting fails
        if gathering is not None:
            gathering[0].wait()

    def free(self) -> None:
        """Give the buffer's memory back; tensors that are views of it become valid again with the next gather."""
        self.wait_gather()  # the collective may still be writing
        self.buffer.untyped_storage().resize_(0)

    # -- gradients -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def pack(self) -> None:
        """Add the full parameters' gradients to the flat gradient, in the masters' type, and drop them.

        A parameter without a gradient counts as zero.

        Raises TypeError for a sparse gradient, with the parameter's name.
        """
        fresh = self._unsent is None
        if self._unsent is None:
            self._unsent = torch.empty(self.plan.numel, dtype=self.master.dtype, device=self.master.device)
        targets, gradients = [], []
        for entry, parameter, view in zip(self.entries, self.full, self._views(self._unsent), strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                if fresh:
                    view.zero_()
            elif gradient.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of '{entry.name}' is sparse; FSDP averages dense gradients: "
                    "build the embedding with sparse=False"
                )
            else:
                targets.append(view)
                gradients.append(gradient)
        if targets and fresh:
            torch._foreach_copy_(targets, gradients)
        elif targets:
            torch._foreach_add_(targets, gradients)

    @torch.no_grad()
    def issue_reduce(self) -> None:
        """Start to send the flat gradient; this rank will receive its slice of the mean."""
        assert self._reducing is None, "one reduce-scatter of a shard at a time"
        if self._unsent is None:
            return
        received = torch.empty_like(self.master)
        work = collectives.reduce_scatter_mean(received, self._unsent, self.group)
        self._reducing, self._unsent = (work, received, self._unsent), None

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait, and put the means into the pieces' `.grad` (added to what is there)."""
        if self._reducing is None:
            return
        work, received, _ = self._reducing
        work.wait()
        self._reducing = None
        for piece, gradient in zip(self.pieces, self._slices(received), strict=True):
            if piece.grad is None:
                piece.grad = gradient
            else:
                piece.grad += gradient

    def drop_gradients(self) -> None:
        """Forget gradients that were not sent (after an exception, or on zero_grad)."""
        self._unsent = None
        for parameter in self.full:
            parameter.grad = None


class Unit:
    """Parameters that are gathered and freed together, because one module's forward needs them.

    Args:
        plan: which module and parameters.
        device, group: see `FlatShard`.
    """

    def __init__(self, index: int, plan: UnitPlan, device: torch.device, group: ProcessGroup):
        self.index, self.name, self.module = index, plan.name, plan.module
        kinds: dict[tuple, list[Entry]] = {}
        for entry in plan.entries:
            key = (entry.compute_dtype, entry.master_dtype, entry.parameter.requires_grad)
            kinds.setdefault(key, []).append(entry)
        self.shards = [FlatShard(entries, device, group) for entries in kinds.values()]
        self.trainable = [shard for shard in self.shards if shard.trainable]
        self.within = {id(module) for module in plan.module.modules()}
        self.allocated = False  # buffers exist, perhaps still being gathered
        self.uses = 0  # forwards whose backward has not come
        self.touched = False  # backward has reached it since its gradients were last packed

    def load_and_register(self) -> None:
        """Take over the values of the parameters, if they have any, and let go of the parameters."""
        for shard in self.shards:
            for index, entry in enumerate(shard.entries):
                if not entry.parameter.is_meta:
                    shard.load(index, entry.parameter.detach())
                entry.forget_values()
        self.register()

    def issue_gather(self) -> None:
        """Start to gather the full parameters, unless they are here or on their way."""
        if not self.allocated:
            self.allocated = True
            with self._named():
                for shard in self.shards:
                    shard.issue_gather()

    def wait_gather(self) -> None:
        """Make the full parameters usable, and what the module's attributes find."""
        for shard in self.shards:
            with self._named():
                shard.wait_gather()
            for entry, parameter in zip(shard.entries, shard.full, strict=True):
                entry.install(parameter)

    def free(self) -> None:
        """Give the full parameters' memory back; the module's attributes find the pieces again."""
        # Attributes find the pieces again: reading a freed buffer would end the process, not raise.
        if self.allocated:
            self.allocated = False
            for shard in self.shards:
                for entry in shard.entries:
                    entry.uninstall()
                shard.free()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say which unit was being gathered when communication failed."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"FSDP: gathering unit '{self.name}' failed; if another rank raised, its message says why"
            ) from error

    def register(self) -> None:
        """Let `parameters()` yield the pieces."""
        for shard in self.shards:
            for entry, piece in zip(shard.entries, shard.pieces, strict=True):
                entry.register(piece)


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, 0-dim fp64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2)).double().square().sum()
