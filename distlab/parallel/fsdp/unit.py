"""A unit: parameters that are gathered and freed together, because one module's forward needs them; and their memory.

`FlatParam` holds a flat buffer to gather into, this rank's slice of the masters, and a flat
gradient (`layout.py` says what lies where). All-gathering the slices yields the buffer itself, and
the full parameters are views of it: nothing is copied after the all-gather.

A flat buffer's storage is resized to zero bytes when it is freed and back before it is gathered.
The tensor objects stay, so what autograd saved in forward is valid again in backward without any
bookkeeping; and the full parameters have version counters separate from the buffer's, so that
autograd does not treat the refill as a modification.

On CUDA everything here is issued from the compute stream. A collective starts after what that
stream holds at its issue, and `wait()` makes the stream wait for the collective: so memory that the
stream freed may be gathered into at once, and memory that a collective uses is freed only after
`wait()`.
"""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor, nn
from torch.distributed import Work

from distlab.comm import collectives
from distlab.comm.subgroups import MeshGroups
from distlab.parallel.fsdp.entry import Entry
from distlab.parallel.fsdp.layout import RowLayout, plan_buffers
from distlab.parallel.fsdp.not_gathered import NotGathered
from distlab.parallel.fsdp.units import UnitPlan


class FlatParam:
    """Parameters of one unit that share a buffer: this rank's slice of the masters, and the buffer to gather into.

    Args:
        entries: the parameters, alike in both dtypes and in `requires_grad`.
        device: where masters and buffers lie.
        groups: the shard group, and the ranks that hold the same slice.

    Attributes:
        master: this rank's slice, `(layout.slice_numel,)`.
        shards: what the optimizer sees, by parameter: views of the master slice, perhaps empty.
        buffer: `(layout.numel,)`, of no memory while sharded.
        full: what forward sees: views of the buffer.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, groups: MeshGroups):
        self.entries = list(entries)
        self.group = group = groups.shard
        self.replicate = groups.replicate
        self.rank = group.rank()
        self.layout = layout = RowLayout([entry.sizes for entry in entries], group.size())
        self._places_in_buffer = [
            entry.place_of(entry.sizes, offset)
            for entry, offset in zip(entries, layout.offsets, strict=True)
        ]
        self._places_in_slice = [
            entry.place_of(layout.shard_sizes(index, self.rank), layout.place(index, self.rank))
            for index, entry in enumerate(entries)
        ]
        self.trainable = entries[0].parameter.requires_grad
        self.master = torch.zeros(layout.slice_numel, dtype=entries[0].master_dtype, device=device)
        self.buffer = torch.empty(layout.numel, dtype=entries[0].compute_dtype, device=device)
        # `.data` gives each full parameter a version counter of its own, which no gather moves.
        self.full = [nn.Parameter(view.data, self.trainable) for view in self._views(self.buffer)]
        # `(rows, …)` with the parameter's dimensions, perhaps empty.
        shards = [self.master.as_strided(*place) for place in self._places_in_slice]
        self.shards = [nn.Parameter(shard, self.trainable) for shard in shards]
        for index, shard in enumerate(self.shards):
            shard.spread = layout.spread(index, entries[index].parameter, group)
        self._storage, self._num_bytes = self.buffer.untyped_storage(), self.buffer.nbytes
        self._storage.resize_(0)
        self._gathering: tuple[Work, Tensor] | None = None
        self._reducing: tuple[Work, Tensor] | None = None
        self._replicating: tuple[Work, Tensor] | None = None
        # the flat gradient, in the master's dtype, holds what has not been sent
        self.has_gradient = False
        if self.trainable:
            self._gradient = torch.empty(layout.numel, dtype=self.master.dtype, device=device)
            self._gradient_views = self._views(self._gradient)
            self._gradient_storage, self._gradient_bytes = (
                self._gradient.untyped_storage(),
                self._gradient.nbytes,
            )
            self._gradient_storage.resize_(0)
            self._zero = self.master.new_zeros(())

    def _views(self, flat: Tensor) -> list[Tensor]:
        """`(layout.numel,)` → one view per parameter, of its shape."""
        return [flat.as_strided(*place) for place in self._places_in_buffer]

    @torch.no_grad()
    def load(self, index: int, full: Tensor) -> None:
        """Overwrite this rank's shard of parameter `index` by its rows of `full` (the parameter's shape)."""
        first, last = self.layout.shard_range(index, self.rank)
        entry, sizes = self.entries[index], self.layout.shard_sizes(index, self.rank)
        self.shards[index].copy_(entry.unflatten(entry.flatten(full)[first:last], sizes))

    @torch.no_grad()
    def gather_masters(self) -> list[Tensor]:
        """Every parameter in full, in the masters' dtype and its own shape.

        Blocks; needs the memory of both.
        """
        flat = torch.empty(self.layout.numel, dtype=self.master.dtype, device=self.master.device)
        collectives.wait(
            collectives.all_gather(flat, self.master, self.group),
            self.group,
            "gathering parameters",
        )
        return [view.clone() for view in self._views(flat)]

    # -- parameters ----------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Allocate the buffer and start to gather it, cast to the compute dtype before it is sent."""
        self._storage.resize_(self._num_bytes)
        sent = self.master.to(self.buffer.dtype)
        self._gathering = (collectives.all_gather(self.buffer, sent, self.group), sent)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather in flight, if there is one: the buffer then holds the full parameters."""
        gathering, self._gathering = self._gathering, None  # forgotten even if waiting fails
        if gathering is not None:
            collectives.wait(gathering[0], self.group, "gathering parameters")

    def reshard(self) -> None:
        """Give the buffer's memory back; tensors that are views of it become valid again with the next gather."""
        if self._gathering is not None:
            self.wait_for_unshard()  # the collective may still be writing
        self._storage.resize_(0)

    # -- gradients -----------------------------------------------------------------------------------------

    def accumulate_gradients(self) -> bool:
        """Add the full parameters' gradients to the flat gradient, in the masters' dtype, and drop them.

        A parameter without a gradient counts as zero; returns whether any has one.

        Raises TypeError for a sparse gradient, with the parameter's name.
        """
        if self.has_gradient:
            self.drop_zeroed()
        fresh, self.has_gradient = not self.has_gradient, True
        self._gradient_storage.resize_(self._gradient_bytes)
        targets, gradients = [], []
        for entry, parameter, view in zip(
            self.entries, self.full, self._gradient_views, strict=True
        ):
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
        return bool(targets)

    def hold_gradients(self) -> None:
        """Give every shard a `.grad`, of no memory, so that `zero_grad()` can drop what the flat gradient keeps."""
        for shard in self.shards:
            if shard.grad is None:
                shard.grad = self._zero.expand(shard.shape)

    def drop_zeroed(self) -> None:
        """Drop of a flat gradient that is kept what belongs to shards whose `.grad` was dropped."""
        for shard, view in zip(self.shards, self._gradient_views, strict=True):
            if shard.grad is None:
                view.zero_()

    def reduce_scatter(self) -> None:
        """Start to send the flat gradient, if there is one; this rank will receive its slice of the mean."""
        assert self._reducing is None, "one reduce-scatter of a flat parameter at a time"
        if self.has_gradient:
            received = torch.empty_like(self.master)
            self._reducing = (
                collectives.reduce_scatter_mean(received, self._gradient, self.group),
                received,
            )
            self.has_gradient = False

    def wait_for_reduce_scatter(self) -> None:
        """Wait, and put the means into the shards' `.grad` (added to what is there); those of a shard group are sent to
        its replicas first.
        """
        if self._reducing is None:
            return
        work, received = self._reducing
        collectives.wait(work, self.group, "averaging gradients")
        self._reducing = None
        self._gradient_storage.resize_(0)
        if self.replicate is None:
            self._add_to_grad(received)
        else:
            self.wait_for_all_reduce()  # of an earlier backward
            self._replicating = (collectives.all_reduce_mean(received, self.replicate), received)

    def wait_for_all_reduce(self) -> None:
        """Wait for the means over the replicas, too, and put them into the shards' `.grad`."""
        if self._replicating is not None:
            work, received = self._replicating
            collectives.wait(work, self.replicate, "averaging gradients of replicas")
            self._replicating = None
            self._add_to_grad(received)

    def _add_to_grad(self, received: Tensor) -> None:
        for shard, place in zip(self.shards, self._places_in_slice, strict=True):
            gradient = received.as_strided(*place)
            if shard.grad is None or shard.grad._base is self._zero:
                shard.grad = gradient
            else:
                shard.grad += gradient

    def drop_gradients(self) -> None:
        """Forget gradients that were not sent (after an exception, or on zero_grad)."""
        if self.has_gradient:
            self.has_gradient = False
            self._gradient_storage.resize_(0)
        for parameter in self.full:
            parameter.grad = None


class State(Enum):
    """Where a unit's full parameters are."""

    SHARDED = "sharded"  # nowhere
    UNSHARDING = "unsharding"  # being gathered
    UNSHARDED = "unsharded"  # in the buffers, and what the module's attributes find


class Unit:
    """Parameters that are gathered and freed together, because one module's forward needs them.

    Args:
        plan: which module and parameters.
        device, groups: see `FlatParam`.

    Attributes:
        state: of the full parameters.
        uses: forwards whose backward has not run yet.
        full: every entry with its full parameter.
        trained: full parameters that get gradients.
        touched: backward has reached it since its gradients were last accumulated.
        watching: forward is running, in which attributes must not find shards.
    """

    def __init__(self, index: int, plan: UnitPlan, device: torch.device, groups: MeshGroups):
        self.index, self.name, self.module = index, plan.name, plan.module
        kinds: dict[tuple, list[Entry]] = {}
        for entry in plan.entries:
            key = (entry.compute_dtype, entry.master_dtype, entry.parameter.requires_grad)
            kinds.setdefault(key, []).append(entry)
        self.params = [
            FlatParam([entries[index] for index in indices], device, groups)
            for entries in kinds.values()
            for indices in plan_buffers([entry.sizes for entry in entries], groups.shard.size())
        ]
        self.trainable = [param for param in self.params if param.trainable]
        self.trained = [full for param in self.trainable for full in param.full]
        self.storages = {param.buffer.untyped_storage()._cdata for param in self.params}
        self.full = [
            pair for param in self.params for pair in zip(param.entries, param.full, strict=True)
        ]
        # of the parameters, what is found there when they are gathered, and when they are not
        self._places = [
            (owner, attribute, full, not_gathered)
            for entry, full in self.full
            for not_gathered in [
                NotGathered(entry.parameter, entry.compute_dtype, device, self._read_outside(entry))
            ]
            for owner, attribute in entry.owners
        ]
        self.watching = False
        self.state = State.SHARDED
        self.uses = 0
        self.touched = False
        for param in self.params:  # lets go of full parameters before the next unit takes memory
            for number, entry in enumerate(param.entries):
                if not entry.parameter.is_meta:
                    param.load(number, entry.parameter.detach())
                entry.forget_values()
        self.register()

    def register(self) -> None:
        """Let `parameters()` yield the shards."""
        for param in self.params:
            for entry, shard in zip(param.entries, param.shards, strict=True):
                entry.register(shard)

    def unshard(self) -> None:
        """Start to gather the full parameters, unless they are there or on their way."""
        if self.state is State.SHARDED:
            self.state = State.UNSHARDING
            for param in self.params:
                param.unshard()

    def wait_for_unshard(self) -> None:
        """Make the full parameters usable, and what the module's attributes find."""
        if self.state is State.UNSHARDED:
            return
        try:
            for param in self.params:
                param.wait_for_unshard()
        except RuntimeError as error:
            raise RuntimeError(f"FSDP: gathering unit '{self.name}' failed: {error}") from error
        for owner, attribute, full, _ in self._places:
            owner.__dict__[attribute] = full
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Give the full parameters' memory back, after which the module's attributes do not find them."""
        if self.state is not State.SHARDED:
            self.state = State.SHARDED
            # first: reading a freed buffer would end the process, not raise
            self.watch(self.watching)
            for param in self.params:
                param.reshard()

    def watch(self, watching: bool) -> None:
        """From now on let the module's attributes find, while nothing is gathered, an error (or shards again)."""
        self.watching = watching
        if self.state is State.SHARDED:
            for owner, attribute, _, not_gathered in self._places:
                if watching:
                    owner.__dict__[attribute] = not_gathered
                else:
                    owner.__dict__.pop(attribute, None)

    def _read_outside(self, entry: Entry) -> str:
        return (
            f"FSDP: forward reads '{entry.name}' while its unit '{self.name}' is not gathered: read it in the forward "
            "of the module that owns it, or let the module that reads it own it too (reader.weight = owner.weight, "
            "before wrapping), and it is gathered for the whole pass"
        )
