"""The memory of FSDP: units, their flat buffers, and the vectors that every rank keeps whole.

    Unit         parameters that are gathered and freed together, because one module needs them
    FlatParam    those of them that share a flat buffer
    Replicated   norms, biases and other small parameters
    NotGathered  what a module's attribute finds while its unit is sharded

`FlatParam` holds a flat buffer to gather into, this rank's slice of the masters, and a flat
gradient (`layout.py` plans all of them). All-gathering the slices yields the buffer itself, and the
full parameters are views of it, so nothing is copied after the all-gather.

A flat buffer's storage is resized to zero bytes when it is freed, and back before it is gathered.
The tensor objects stay, so a tensor that autograd saved in forward is valid again in backward. The
full parameters have version counters separate from the buffer's, so that autograd does not take the
refill for a modification.

On CUDA everything here is issued from the compute stream. A collective starts after the work that
this stream holds when it is issued, and `wait()` makes the stream wait for the collective. So
memory that the stream freed may be gathered into at once, and memory that a collective uses is
freed only after `wait()`.
"""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_leaves

from distlab.comm import collectives
from distlab.comm.subgroups import MeshGroups
from distlab.parallel.bucketed import GradientBucket
from distlab.parallel.buckets import plan_of
from distlab.parallel.fsdp.layout import Entry, RowLayout, UnitPlan, plan_buffers
from distlab.parallel.shard import part_of_whole


class State(Enum):
    """State of a unit's full parameters."""

    SHARDED = "sharded"  # they have no memory
    UNSHARDING = "unsharding"  # they are being gathered
    UNSHARDED = "unsharded"  # they are in the buffers, and the module's attributes find them


class Unit:
    """Parameters that are gathered and freed together, because one module's forward needs them.

    Args:
        index: position among the units.
        plan: module and parameters.
        device, groups: see `FlatParam`.

    Attributes:
        state: state of the full parameters.
        params: one `FlatParam` per dtype and length of rows.
        trainable: those of them that get gradients.
        full: every entry with its full parameter.
        trained: full parameters that get gradients.
        uses: forwards whose backward has not run yet.
        touched: True if backward has reached the unit since its gradients were last accumulated.
        watching: True while the wrapper's forward runs, in which attributes must not find shards.
    """

    def __init__(self, index: int, plan: UnitPlan, device: torch.device, groups: MeshGroups):
        self.index, self.name, self.module = index, plan.name, plan.module
        kinds: dict[tuple, list[Entry]] = {}
        for entry in plan.entries:
            kind = (entry.compute_dtype, entry.master_dtype, entry.parameter.requires_grad)
            kinds.setdefault(kind, []).append(entry)
        self.params: list[FlatParam] = []
        for entries in kinds.values():
            for indices in plan_buffers([entry.sizes for entry in entries], groups.shard.size()):
                in_buffer = [entries[index] for index in indices]
                self.params.append(FlatParam(in_buffer, device, groups))
        self.trainable = [param for param in self.params if param.trainable]
        self.trained = [full for param in self.trainable for full in param.full]
        self.storages = {param.buffer.untyped_storage()._cdata for param in self.params}
        self.full: list[tuple[Entry, nn.Parameter]] = []
        for param in self.params:
            self.full += zip(param.entries, param.full, strict=True)
        self._attributes = self._list_attributes(device)
        self.state = State.SHARDED
        self.uses = 0
        self.touched = False
        self.watching = False
        for param in self.params:
            for number, entry in enumerate(param.entries):
                if not entry.parameter.is_meta:
                    param.load(number, entry.parameter.detach())
                entry.forget_values()  # before the next unit takes memory
        self.register()

    def __repr__(self) -> str:
        return f"Unit({self.name}: {self.state.value}, {self.uses} uses before backward)"

    def _list_attributes(
        self, device: torch.device
    ) -> list[tuple[nn.Module, str, nn.Parameter, "NotGathered"]]:
        """Return (module, attribute, full parameter, stand-in while sharded) of every place."""
        found = []
        for entry, full in self.full:
            message = (
                f"FSDP: forward reads '{entry.name}' while its unit '{self.name}' is not gathered: "
                "read it in the forward of the module that owns it, or let the module that reads "
                "it own it too (reader.weight = owner.weight, before wrapping), and it is gathered "
                "for the whole pass"
            )
            stand_in = NotGathered(entry.parameter, entry.compute_dtype, device, message)
            for owner, attribute in entry.owners:
                found.append((owner, attribute, full, stand_in))
        return found

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
        """Wait for the full parameters, and let the module's attributes find them."""
        if self.state is State.UNSHARDED:
            return
        try:
            for param in self.params:
                param.wait_for_unshard()
        except RuntimeError as error:
            raise RuntimeError(f"FSDP: gathering unit '{self.name}' failed: {error}") from error
        for owner, attribute, full, _ in self._attributes:
            owner.__dict__[attribute] = full
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Free the full parameters' memory. The module's attributes no longer find them."""
        if self.state is State.SHARDED:
            return
        self.state = State.SHARDED
        # Before memory is freed: reading a freed buffer would end the process instead of raising.
        self.watch(self.watching)
        for param in self.params:
            param.reshard()

    def watch(self, watching: bool) -> None:
        """Let the module's attributes find an error while nothing is gathered, or shards again."""
        self.watching = watching
        if self.state is not State.SHARDED:
            return
        for owner, attribute, _, stand_in in self._attributes:
            if watching:
                owner.__dict__[attribute] = stand_in
            else:
                owner.__dict__.pop(attribute, None)


class FlatParam:
    """Parameters of one unit that share a flat buffer: this rank's masters, and that buffer.

    Args:
        entries: the parameters, of the same two dtypes and the same `requires_grad`.
        device: device of masters and buffers.
        groups: the shard group, and the ranks that hold the same slice.

    Attributes:
        master: this rank's slice, `(layout.slice_numel,)`.
        shards: parameters that the optimizer sees: views of the master slice, `(rows, …)`, perhaps
            empty.
        buffer: `(layout.numel,)`, without memory while sharded.
        full: parameters that forward sees: views of the buffer.
        has_gradient: True if the flat gradient holds what has not been sent.
        group_sum: this rank's slice of what its shard group has averaged inside no_sync(), summed
            over micro-batches. The replicas have not averaged it. None if there is nothing.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, groups: MeshGroups):
        self.entries = list(entries)
        self.group = group = groups.shard
        self.replicate = groups.replicate
        self.rank = group.rank()
        self.layout = layout = RowLayout([entry.sizes for entry in entries], group.size())
        self._places_in_buffer = []
        self._places_in_slice = []
        for index, entry in enumerate(entries):
            self._places_in_buffer.append(entry.place_of(entry.sizes, layout.offsets[index]))
            shard_sizes = layout.shard_sizes(index, self.rank)
            in_slice = layout.place(index, self.rank)
            self._places_in_slice.append(entry.place_of(shard_sizes, in_slice.start))

        self.trainable = entries[0].parameter.requires_grad
        self.master = torch.zeros(layout.slice_numel, dtype=entries[0].master_dtype, device=device)
        self.shards = []
        for index, place in enumerate(self._places_in_slice):
            shard = nn.Parameter(self.master.as_strided(*place), self.trainable)
            shard.spread = layout.spread(index, entries[index].parameter, group)
            self.shards.append(shard)

        self.buffer = torch.empty(layout.numel, dtype=entries[0].compute_dtype, device=device)
        # `.data` gives each full parameter a version counter of its own, which no gather moves.
        self.full = [nn.Parameter(view.data, self.trainable) for view in self._views(self.buffer)]
        self._storage = self.buffer.untyped_storage()
        self._num_bytes = self.buffer.nbytes
        self._storage.resize_(0)

        self.has_gradient = False
        self.group_sum: Tensor | None = None
        if self.trainable:
            self._gradient = torch.empty(layout.numel, dtype=self.master.dtype, device=device)
            self._gradient_views = self._views(self._gradient)
            self._gradient_storage = self._gradient.untyped_storage()
            self._gradient_bytes = self._gradient.nbytes
            self._gradient_storage.resize_(0)
            self._zero = self.master.new_zeros(())

        # Collectives in flight, each with the tensor that it must not lose.
        self._gathering: tuple[Work, Tensor] | None = None
        self._reducing: tuple[Work, Tensor] | None = None
        self._stays_in_group = False  # what the reduce-scatter in flight brings
        self._replicating: tuple[Work, Tensor] | None = None

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return one view of a buffer `(layout.numel,)` per parameter, of its shape."""
        return [flat.as_strided(*place) for place in self._places_in_buffer]

    def _views_of_slice(self, flat: Tensor) -> list[Tensor]:
        """Return one view of a slice `(layout.slice_numel,)` per shard, of its shape."""
        return [flat.as_strided(*place) for place in self._places_in_slice]

    @torch.no_grad()
    def load(self, index: int, full: Tensor) -> None:
        """Overwrite this rank's shard of parameter `index` by its rows of the whole `full`."""
        shard = self.shards[index]
        shard.copy_(part_of_whole(full, shard))

    @torch.no_grad()
    def gather_masters(self) -> list[Tensor]:
        """Return every parameter in full, in the masters' dtype and its own shape.

        Blocks, and needs the memory of both.
        """
        flat = torch.empty(self.layout.numel, dtype=self.master.dtype, device=self.master.device)
        work = collectives.all_gather(flat, self.master, self.group)
        collectives.wait(work, self.group, "gathering parameters")
        return [view.clone() for view in self._views(flat)]

    # -- parameters --------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Allocate the buffer and start to gather it. Masters are cast before they are sent."""
        self._storage.resize_(self._num_bytes)
        sent = self.master.to(self.buffer.dtype)
        self._gathering = (collectives.all_gather(self.buffer, sent, self.group), sent)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather in flight, if there is one, after which the buffer is full."""
        gathering, self._gathering = self._gathering, None  # forgotten even if waiting fails
        if gathering is not None:
            work, _ = gathering
            collectives.wait(work, self.group, "gathering parameters")

    def reshard(self) -> None:
        """Free the buffer's memory. Views of it become valid again with the next gather."""
        if self._gathering is not None:
            self.wait_for_unshard()  # the collective may still be writing
        self._storage.resize_(0)

    # -- gradients ---------------------------------------------------------------------------------

    def accumulate_gradients(self) -> bool:
        """Add the full parameters' gradients to the flat gradient, and drop them.

        The flat gradient has the masters' dtype. A parameter without a gradient counts as zero.

        Returns:
            True if any parameter has a gradient.

        Raises:
            TypeError: a sparse gradient.
        """
        self.drop_zeroed()
        is_first = not self.has_gradient
        self.has_gradient = True
        self._gradient_storage.resize_(self._gradient_bytes)
        targets, gradients = [], []
        for entry, parameter, view in zip(
            self.entries, self.full, self._gradient_views, strict=True
        ):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                if is_first:
                    view.zero_()
                continue
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of '{entry.name}' is sparse; FSDP averages dense gradients: "
                    "build the embedding with sparse=False"
                )
            targets.append(view)
            gradients.append(gradient)
        if not targets:
            return False
        if is_first:
            torch._foreach_copy_(targets, gradients)
        else:
            torch._foreach_add_(targets, gradients)
        return True

    def hold_gradients(self) -> None:
        """Give every shard a `.grad` without memory, which `zero_grad()` can drop.

        It stands for what is kept inside no_sync(): the flat gradient, or the group's sum.
        """
        for shard in self.shards:
            if shard.grad is None:
                shard.grad = self._zero.expand(shard.shape)

    def drop_zeroed(self) -> None:
        """Zero those parts of the kept gradients whose shard's `.grad` was dropped."""
        if self.has_gradient:
            kept = self._gradient_views
        elif self.group_sum is not None:
            kept = self._views_of_slice(self.group_sum)
        else:
            return
        for shard, view in zip(self.shards, kept, strict=True):
            if shard.grad is None:
                view.zero_()

    def reduce_scatter(self, *, stays_in_group: bool = False) -> None:
        """Start to send the flat gradient, if there is one, for this rank's slice of the mean.

        Args:
            stays_in_group: True if the slice is kept in the group's sum, until a later backward's
                slice is averaged between the replicas.
        """
        assert self._reducing is None, "one reduce-scatter of a flat parameter at a time"
        if self.has_gradient:
            received = torch.empty_like(self.master)
            work = collectives.reduce_scatter_mean(received, self._gradient, self.group)
            self._reducing = (work, received)
            self._stays_in_group = stays_in_group
            self.has_gradient = False

    def wait_for_reduce_scatter(self) -> None:
        """Wait for the group's mean, and add it to the group's sum.

        Unless it stays there, send the sum to the replicas, which are waited for later.
        """
        if self._reducing is None:
            return
        work, received = self._reducing
        collectives.wait(work, self.group, "averaging gradients")
        self._reducing = None
        self._gradient_storage.resize_(0)
        if self.group_sum is None:
            self.group_sum = received
        else:
            self.group_sum += received
        if not self._stays_in_group:
            self.average_replicas()

    def average_replicas(self) -> None:
        """Start to average the group's sum between the replicas.

        Without replicas it is the mean over all ranks already.
        """
        group_sum, self.group_sum = self.group_sum, None
        if self.replicate is None:
            self._add_to_grad(group_sum)
        else:
            self.wait_for_all_reduce()  # of an earlier backward
            self._replicating = (collectives.all_reduce_mean(group_sum, self.replicate), group_sum)

    def wait_for_all_reduce(self) -> None:
        """Wait for the mean over the replicas, and add it to the shards' `.grad`."""
        if self._replicating is not None:
            work, received = self._replicating
            collectives.wait(work, self.replicate, "averaging gradients of replicas")
            self._replicating = None
            self._add_to_grad(received)

    def _add_to_grad(self, received: Tensor) -> None:
        for shard, gradient in zip(self.shards, self._views_of_slice(received), strict=True):
            if shard.grad is None or shard.grad._base is self._zero:
                shard.grad = gradient
            else:
                shard.grad += gradient

    def drop_gradients(self) -> None:
        """Forget gradients that were not sent, after an exception or on zero_grad."""
        if self.has_gradient:
            self.has_gradient = False
            self._gradient_storage.resize_(0)
        self.group_sum = None
        for parameter in self.full:
            parameter.grad = None


class Replicated:
    """Masters of the small parameters (norms, biases, integers), whole on every rank.

    One all-reduce per dtype averages their gradients. Where the module computes in another dtype
    than the master's, its attributes find a copy in that dtype. `refresh()` brings it up to date,
    and the copy's gradient is moved to the master as soon as it is complete.

    Attributes:
        masters: every entry with its master.
        trainable: the masters that get gradients.
        cast: masters that forward does not read, with names.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, group: ProcessGroup):
        self.masters: list[tuple[Entry, nn.Parameter]] = []
        self.cast: list[tuple[str, nn.Parameter]] = []
        self._copies: list[nn.Parameter] = []  # of `cast`, which forward reads instead
        self._group = group
        for entry in entries:
            before = entry.parameter
            if before.is_meta:
                values = torch.empty_like(before, device=device, dtype=entry.master_dtype)
            else:
                values = before.detach().to(entry.master_dtype)
            master = nn.Parameter(values, before.requires_grad)
            self.masters.append((entry, master))
            entry.register(master)
            if entry.compute_dtype != master.dtype:
                copy = nn.Parameter(master.detach().to(entry.compute_dtype), master.requires_grad)
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(_move_gradient, master))
                entry.install(copy)
                self._copies.append(copy)
                self.cast.append((entry.name, master))
        self.trainable = [master for _, master in self.masters if master.requires_grad]
        plans = plan_of(self.trainable, bucket_size_mb=None)
        self._buckets = [GradientBucket(plan, self.trainable) for plan in plans]

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters again."""
        # Through `.data`, because a forward before this one may have saved the copy.
        copies = [copy.data for copy in self._copies]
        torch._foreach_copy_(copies, [master for _, master in self.cast])

    def average(self) -> None:
        """Replace every `.grad` by its mean over ranks, and wait for it.

        None stays where no rank has a gradient.
        """
        for bucket in self._buckets:
            bucket.work = collectives.all_reduce_mean(bucket.seal(), self._group)
        for bucket in self._buckets:
            collectives.wait(bucket.work, self._group, "averaging gradients")
            bucket.unpack()


def _move_gradient(master: nn.Parameter, copy: nn.Parameter) -> None:
    """Add the gradient of a low-precision copy to its master's, and drop it. A hook of the copy."""
    gradient, copy.grad = copy.grad.to(master.dtype), None
    master.grad = gradient if master.grad is None else master.grad + gradient


class NotGathered(Tensor):
    """A tensor with the gathered parameter's shape, strides, dtype and device, and an error.

    A module's attribute finds it in forward while its unit is sharded. A shard has the dimensions
    of its parameter, so an operator might well compute with it: a head that reads
    `embedding.weight` would silently give logits of a part of the vocabulary.

    Args:
        like: any tensor of that shape and these strides.
        dtype, device: dtype and device of the gathered parameter.
        message: text of the RuntimeError that any operator on it raises, and asking for its
            address.
    """

    _message: str

    @staticmethod
    def __new__(
        cls, like: Tensor, dtype: torch.dtype, device: torch.device, message: str
    ) -> "NotGathered":
        stand_in = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_size=0,
            dtype=dtype,
            device=device,
            requires_grad=like.requires_grad,
        )
        stand_in._message = message
        return stand_in

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(found._message)

    def data_ptr(self) -> NoReturn:
        """Raise RuntimeError: a kernel that is given this address would read unallocated memory."""
        raise RuntimeError(self._message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"
