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
from distlab.parallel.fsdp.not_gathered import NotGathered
from distlab.parallel.fsdp.units import Entry, FlatPlan, UnitPlan, plan_buffers


class FlatShard:
    """Parameters of one unit that share a buffer: this rank's master slice, and the buffer to gather into.

    Args:
        entries: the parameters, alike in both dtypes and in `requires_grad`.
        device: where shards and buffers lie.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, group: ProcessGroup):
        self.entries = list(entries)
        self.group = group
        self.rank = group.rank()
        self.plan = plan = FlatPlan(tuple(entry.sizes for entry in entries), group.size())
        self._places_in_buffer = [
            entry.place_of(entry.sizes, offset) for entry, offset in zip(entries, plan.offsets, strict=True)
        ]
        self._places_in_slice = [
            entry.place_of(plan.shard_sizes(index, self.rank), plan.place(index, self.rank)[0])
            for index, entry in enumerate(entries)
        ]
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
        return [flat.as_strided(*place) for place in self._places_in_buffer]

    def _slices(self, flat: Tensor) -> list[Tensor]:
        """`(plan.slice_numel,)` → one view per parameter: its shard, `(rows, …)` with the parameter's dimensions,
        perhaps empty."""
        return [flat.as_strided(*place) for place in self._places_in_slice]

    @torch.no_grad()
    def load(self, index: int, full: Tensor) -> None:
        """Overwrite this rank's shard of parameter `index` by its rows of `full` (the parameter's shape)."""
        first, last = self.plan.piece(index, self.rank)
        entry, sizes = self.entries[index], self.plan.shard_sizes(index, self.rank)
        self.pieces[index].copy_(entry.unflatten(entry.flatten(full)[first:last], sizes))

    @torch.no_grad()
    def gather_masters(self) -> list[Tensor]:
        """Every parameter in full, in the masters' type and its own shape. Blocks; needs the memory of both."""
        flat = torch.empty(self.plan.numel, dtype=self.master.dtype, device=self.master.device)
        collectives.wait(collectives.all_gather(flat, self.master, self.group), self.group, "gathering parameters")
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
            collectives.wait(gathering[0], self.group, "gathering parameters")

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
        collectives.wait(work, self.group, "averaging gradients")
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
        self.shards = [
            FlatShard([entries[index] for index in indices], device, group)
            for entries in kinds.values()
            for indices in plan_buffers([entry.sizes for entry in entries], group.size())
        ]
        self.trainable = [shard for shard in self.shards if shard.trainable]
        self._not_gathered = [
            (entry, NotGathered(entry.parameter, entry.compute_dtype, device, self._read_outside(entry)))
            for shard in self.shards
            for entry in shard.entries
        ]
        self._watching = False  # forward is running: attributes must not find shards
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
        """Give the full parameters' memory back, after which the module's attributes do not find them."""
        if self.allocated:
            self.allocated = False
            self._uninstall()  # first: reading a freed buffer would end the process, not raise
            for shard in self.shards:
                shard.free()

    def watch(self, watching: bool) -> None:
        """From now on let the module's attributes find, while nothing is gathered, an error (or shards again)."""
        self._watching = watching
        if not self.allocated:
            self._uninstall()

    def _uninstall(self) -> None:
        for entry, not_gathered in self._not_gathered:
            if self._watching:
                entry.install(not_gathered)
            else:
                entry.uninstall()

    def _read_outside(self, entry: Entry) -> str:
        return (
            f"FSDP: forward reads '{entry.name}' while its unit '{self.name}' is not gathered: read it in the forward "
            "of the module that owns it, or let the module that reads it own it too (reader.weight = owner.weight, "
            "before wrapping), and it is gathered for the whole pass"
        )

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say which unit was being gathered when communication failed."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"FSDP: gathering unit '{self.name}' failed: {error}") from error

    def register(self) -> None:
        """Let `parameters()` yield the pieces."""
        for shard in self.shards:
            for entry, piece in zip(shard.entries, shard.pieces, strict=True):
                entry.register(piece)


@contextmanager
def watched(units: Sequence[Unit]) -> Iterator[None]:
    """Inside, whoever reads a parameter that is not gathered is told so; outside, attributes find shards."""
    for unit in units:
        unit.watch(True)
    try:
        yield
    finally:
        for unit in units:
            unit.watch(False)


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, 0-dim fp64."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2)).double().square().sum()
