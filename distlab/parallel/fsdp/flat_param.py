"""The layout and the memory of FSDP: which parameters are gathered together, where they lie, and in which buffers.

A unit's parameters lie one after another in one flat buffer, which is divided into N equal slices:

    | weight a            | weight b                 | weight c   |padding|
    | slice of rank 0    | slice of rank 1     | slice of rank 2    |

All-gathering the slices yields the buffer itself, and the full parameters are views of it: nothing is copied
after the all-gather. A rank's shard of a parameter is the part of it inside the rank's slice; it may be empty.

Slices end between rows only, so that a shard keeps its parameter's dimensions, `(rows, …)`: each parameter
begins at a multiple of its row's length, and a slice is a multiple of all these lengths. The least common
multiple of different lengths can be large, and up to N times that is padding: `plan_buffers` then gives each
length a separate buffer.

A flat buffer's storage is resized to zero bytes when it is freed and back before it is gathered. The tensor
objects stay, so what autograd saved in forward is valid again in backward without any bookkeeping; and the full
parameters have version counters separate from the buffer's, so that autograd does not treat the refill as a
modification.

On CUDA everything here is issued from the compute stream. A collective starts after what that stream holds
at its issue, and `wait()` makes the stream wait for the collective: so memory that the stream freed may be
gathered into at once, and memory that a collective uses is freed only after `wait()`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from distlab.comm import collectives
from distlab.comm.subgroups import MeshGroups
from distlab.parallel.buckets import GradientBucket, plan_of
from distlab.parallel.exchange import AllReduce
from distlab.parallel.shard import FlatLayout

ALIGNMENT = 8  # elements; 16 bytes in a 2-byte dtype, the alignment that matmul kernels need of an operand's address
# Saving fewer elements is not worth another buffer: sending 1 MiB of fp32 costs less than a collective's latency.
WORTH_A_BUFFER = 2**18

Sizes = tuple[int, ...]  # of a parameter's dimensions, from the outermost stride to the innermost
Place = tuple[Sizes, Sizes, int]  # sizes, strides and first element, as `Tensor.as_strided` takes them

# -- layout ----------------------------------------------------------------------------------------------------


class RowLayout(FlatLayout):
    """Parameters in a flat buffer that is cut between their rows only.

    Args:
        sizes: of each parameter.
        world_size: number of slices.
    """

    def __init__(self, sizes: Sequence[Sizes], world_size: int):
        self.sizes = tuple(sizes)
        self.row_numels = [row_numel(each, world_size) for each in sizes]
        super().__init__(
            [math.prod(each) for each in sizes],
            world_size,
            align=[math.lcm(row, ALIGNMENT) for row in self.row_numels],
            cut=math.lcm(*self.row_numels),
        )

    def shard_sizes(self, index: int, rank: int) -> Sizes:
        """Sizes of `rank`'s shard of parameter `index`, which has as many dimensions as the parameter.

        `(rows, …)`; `(1, rows, …)` of a parameter that is cut along its second dimension, and so on.
        """
        first, last = self.shard_range(index, rank)
        cut = cut_dimension(self.sizes[index], self.world_size)
        return (1,) * cut + ((last - first) // self.row_numels[index],) + self.sizes[index][cut + 1 :]


def cut_dimension(sizes: Sizes, world_size: int) -> int:
    """The dimension that a parameter is sharded along: the outermost that has a row for every rank.

    The first one of a matrix with N rows or more. A matrix with fewer would leave ranks empty while all slices are
    as long as a row: it is sharded along the second dimension, and a shard is contiguous within a row, or over several,
    as `(1, elements)`. Of experts `(E, rows, columns)` on more than E ranks shards are `(1, rows, columns)`.
    """
    enough = (d for d in range(len(sizes)) if math.prod(sizes[: d + 1]) >= world_size)
    return next(enough, len(sizes) - 1)


def row_numel(sizes: Sizes, world_size: int) -> int:
    """Elements between two neighbouring places where a shard may end."""
    return max(1, math.prod(sizes[cut_dimension(sizes, world_size) + 1 :]))


def plan_buffers(sizes: Sequence[Sizes], world_size: int) -> list[list[int]]:
    """Which parameters share a buffer, as indices in order.

    All share one, unless a buffer for each length of rows saves more than 1/64 of their elements, and more than
    `WORTH_A_BUFFER` (each buffer is one more collective). Then a buffer is padded by less than N of its rows,
    besides the parameters' alignment where a row is no multiple of 8 elements.
    """
    by_row: dict[int, list[int]] = {}
    for index, each in enumerate(sizes):
        by_row.setdefault(row_numel(each, world_size), []).append(index)
    together = RowLayout(sizes, world_size)
    apart = [RowLayout([sizes[i] for i in indices], world_size) for indices in by_row.values()]
    saved = together.numel - sum(layout.numel for layout in apart)
    if saved > max(WORTH_A_BUFFER, sum(together.numels) / 64):
        return list(by_row.values())
    return [list(range(len(sizes)))]


@dataclass(eq=False)
class Entry:
    """One distinct parameter: the parameter before wrapping, and every place of the module that holds it.

    Args:
        parameter: any shape and strides.
        names: its dotted names, more than one if it is tied.
        owners: (module, attribute) of each place.
        compute_dtype: what its owners see in forward.
        master_dtype: what the optimizer steps.
    """

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    compute_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """The name under which `named_parameters()` lists it."""
        return self.names[0]

    @property
    def is_sharded(self) -> bool:
        """Matrices and larger are sharded; vectors and scalars (norms, biases) and integers are replicated."""
        return self.parameter.ndim >= 2 and self.parameter.is_floating_point()

    @cached_property
    def memory_order(self) -> tuple[int, ...]:
        """Dimensions from the outermost stride to the innermost: keeps a transposed weight transposed."""
        strides = self.parameter.stride()
        return tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))

    @cached_property
    def _inverse_order(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.memory_order)), key=self.memory_order.__getitem__))

    @cached_property
    def sizes(self) -> Sizes:
        """Of the dimensions, in memory order."""
        return tuple(self.parameter.shape[d] for d in self.memory_order)

    def flatten(self, tensor: Tensor) -> Tensor:
        """A tensor with the parameter's dimensions, whole or a shard → its elements `(n,)` in memory order."""
        return tensor.permute(self.memory_order).reshape(-1)

    def unflatten(self, flat: Tensor, sizes: Sizes | None = None) -> Tensor:
        """`(n,)` in memory order → a view of the parameter's shape, or of a shard's, whose `sizes` are given."""
        return flat.view(self.sizes if sizes is None else sizes).permute(self._inverse_order)

    def place_of(self, sizes: Sizes, offset: int) -> Place:
        """Where a tensor with the parameter's dimensions, of these sizes in memory order, lies in a flat buffer that it
        begins at element `offset` of.
        """
        strides = [math.prod(max(1, size) for size in sizes[d + 1 :]) for d in range(len(sizes))]
        order = self._inverse_order
        return tuple(sizes[d] for d in order), tuple(strides[d] for d in order), offset

    def forget_values(self) -> None:
        """Keep the parameter's shape, strides and name only, so that its memory can go."""
        self.parameter = nn.Parameter(
            torch.empty_like(self.parameter, device="meta"), self.parameter.requires_grad
        )

    def install(self, parameter: Tensor) -> None:
        """Let the owners' `self.<attribute>` find `parameter` before what `parameters()` yields."""
        for module, attribute in self.owners:
            module.__dict__[attribute] = parameter

    def register(self, parameter: nn.Parameter, *, made_by_fsdp: bool = True) -> None:
        """Make `parameter` what `parameters()` and `state_dict()` yield here, and what the owners' attributes find."""
        parameter.made_by_fsdp = made_by_fsdp
        for module, attribute in self.owners:
            module.__dict__.pop(attribute, None)
            module._parameters[attribute] = parameter


@dataclass
class UnitPlan:
    """A unit: the module whose forward needs these parameters gathered."""

    name: str
    module: nn.Module
    entries: list[Entry]


def list_entries(module: nn.Module, compute_dtype: torch.dtype | None) -> list[Entry]:
    """Every distinct parameter in registration order, with all its names and owners.

    Raises:
        ValueError: the module has no parameters.
    """
    entries: dict[nn.Parameter, Entry] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            entry = entries.setdefault(parameter, Entry(parameter))
            entry.names.append(f"{path}.{attribute}" if path else attribute)
            if (owner, attribute) not in entry.owners:
                entry.owners.append((owner, attribute))
            dtype = parameter_dtype(owner, parameter, compute_dtype)
            if len(entry.names) == 1 or dtype == compute_dtype:  # a norm's weight may be a bias elsewhere
                entry.compute_dtype = dtype
            floating = parameter.is_floating_point()
            entry.master_dtype = (
                torch.promote_types(parameter.dtype, torch.float32) if floating else parameter.dtype
            )
    if not entries:
        raise ValueError("FSDP: the module has no parameters; there is nothing to shard")
    return list(entries.values())


def parameter_dtype(
    owner: nn.Module, parameter: nn.Parameter, compute_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype that `owner`'s forward finds `parameter` in.

    Matrices are sent, so they are cast: that halves what is sent. A bias enters the matmul, so it is cast with the
    matrix. What else is a vector (norms) is never sent and stays in the master's dtype: a weight near one rounded to
    bf16 would be off by up to 0.4 %, the same way in every token. BatchNorm keeps its dtype, because its running
    statistics do; so do integers.
    """
    if compute_dtype is None or not parameter.is_floating_point() or isinstance(owner, _BatchNorm):
        return parameter.dtype
    # A matrix in the module or below it may be combined with its vectors.
    if any(p.ndim >= 2 and p.is_floating_point() for p in owner.parameters()):
        return compute_dtype
    return torch.promote_types(torch.promote_types(parameter.dtype, torch.float32), compute_dtype)


def plan_units(module: nn.Module, entries: Sequence[Entry]) -> list[UnitPlan]:
    """Group the sharded parameters into units, in registration order.

    A parameter below an `nn.ModuleList` belongs to the child of the outermost one; elsewhere to the module
    that owns it (to the outermost module that owns a matrix itself, if such modules are nested, because
    `nn.MultiheadAttention`, say, reads its child's weight without calling the child). Modules without a forward,
    such as `nn.ParameterList`, are never called: their parameters belong to the module around them. Parameters owned
    by the root, and those tied across units, form the root's unit, gathered for the whole forward.
    """
    sharded = [entry for entry in entries if entry.is_sharded]
    paths = {name: _walk(module, name) for entry in sharded for name in entry.names}
    owning = {id(steps[_last_called(steps)][1]) for steps in paths.values()}
    plans: dict[int, UnitPlan] = {}
    for entry in sharded:
        units = [_unit_of(paths[name], owning) for name in entry.names]
        together = len({id(unit) for _, unit in units}) == 1
        path, unit = units[0] if together else ("", module)
        plans.setdefault(id(unit), UnitPlan(path or "(root)", unit, [])).entries.append(entry)
    return list(plans.values())


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; containers such as `nn.ModuleList` and `nn.ParameterDict` have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _last_called(steps: Sequence[tuple[str, nn.Module]]) -> int:
    """The innermost module with a forward; the root if there is none."""
    return max((i for i, (_, module) in enumerate(steps) if is_called(module)), default=0)


def _unit_of(steps: Sequence[tuple[str, nn.Module]], owning: set[int]) -> tuple[str, nn.Module]:
    """(path, module) of the unit that holds a parameter, of the modules on the way to it."""
    below = next((i + 1 for i, (_, m) in enumerate(steps) if isinstance(m, nn.ModuleList)), len(steps))
    called = [i for i in range(1, len(steps)) if is_called(steps[i][1])]
    children = [i for i in called if i >= below]
    owners = [i for i in called if id(steps[i][1]) in owning]
    return steps[next(iter([*children, *owners]), 0)]


def _walk(root: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules on the way from the root to the owner of the parameter called `name`."""
    parts = name.split(".")
    paths = [".".join(parts[:depth]) for depth in range(len(parts))]
    return [(path, root.get_submodule(path)) for path in paths]


# -- memory ----------------------------------------------------------------------------------------------------


class Memory:
    """The memory of a tensor, which comes and goes while the tensor and the views of it stay."""

    def __init__(self, tensor: Tensor):
        self._storage, self._nbytes = tensor.untyped_storage(), tensor.nbytes
        self.free()

    def allocate(self) -> None:
        """Take it, with any values, unless it is there."""
        self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Give it back."""
        self._storage.resize_(0)


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
            entry.place_of(entry.sizes, offset) for entry, offset in zip(entries, layout.offsets, strict=True)
        ]
        self._places_in_slice = [
            entry.place_of(layout.shard_sizes(index, self.rank), layout.place(index, self.rank)[0])
            for index, entry in enumerate(entries)
        ]
        self.trainable = entries[0].parameter.requires_grad
        self.master = torch.zeros(layout.slice_numel, dtype=entries[0].master_dtype, device=device)
        self.buffer = torch.empty(layout.numel, dtype=entries[0].compute_dtype, device=device)
        # `.data` gives each full parameter a version counter of its own, which no gather moves.
        self.full = [nn.Parameter(view.data, self.trainable) for view in self._views(self.buffer)]
        self.shards = [nn.Parameter(view, self.trainable) for view in self._slices(self.master)]
        self._memory = Memory(self.buffer)
        self._gathering: tuple[Work, Tensor] | None = None
        self._reducing: tuple[Work, Tensor] | None = None
        self._replicating: tuple[Work, Tensor] | None = None
        self.has_gradient = False  # the flat gradient, in the master's dtype, holds what has not been sent
        if self.trainable:
            self._gradient = torch.empty(layout.numel, dtype=self.master.dtype, device=device)
            self._gradient_views = self._views(self._gradient)
            self._gradient_memory = Memory(self._gradient)
            self._zero = self.master.new_zeros(())

    def _views(self, flat: Tensor) -> list[Tensor]:
        """`(layout.numel,)` → one view per parameter, of its shape."""
        return [flat.as_strided(*place) for place in self._places_in_buffer]

    def _slices(self, flat: Tensor) -> list[Tensor]:
        """`(layout.slice_numel,)` → one view per parameter: its shard, `(rows, …)` with the parameter's dimensions,
        perhaps empty.
        """
        return [flat.as_strided(*place) for place in self._places_in_slice]

    @torch.no_grad()
    def load(self, index: int, full: Tensor) -> None:
        """Overwrite this rank's shard of parameter `index` by its rows of `full` (the parameter's shape)."""
        first, last = self.layout.shard_range(index, self.rank)
        entry, sizes = self.entries[index], self.layout.shard_sizes(index, self.rank)
        self.shards[index].copy_(entry.unflatten(entry.flatten(full)[first:last], sizes))

    @torch.no_grad()
    def gather_masters(self) -> list[Tensor]:
        """Every parameter in full, in the masters' dtype and its own shape. Blocks; needs the memory of both."""
        flat = torch.empty(self.layout.numel, dtype=self.master.dtype, device=self.master.device)
        collectives.wait(collectives.all_gather(flat, self.master, self.group), self.group, "gathering parameters")
        return [view.clone() for view in self._views(flat)]

    # -- parameters ----------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Allocate the buffer and start to gather it, cast to the compute dtype before it is sent."""
        self._memory.allocate()
        sent = self.master.to(self.buffer.dtype)
        self._gathering = (collectives.all_gather(self.buffer, sent, self.group), sent)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather in flight, if there is one: the buffer then holds the full parameters."""
        gathering, self._gathering = self._gathering, None  # forgotten even if waiting fails
        if gathering is not None:
            collectives.wait(gathering[0], self.group, "gathering parameters")

    def reshard(self) -> None:
        """Give the buffer's memory back; tensors that are views of it become valid again with the next gather."""
        self.wait_for_unshard()  # the collective may still be writing
        self._memory.free()

    # -- gradients -----------------------------------------------------------------------------------------

    def accumulate_gradients(self) -> bool:
        """Add the full parameters' gradients to the flat gradient, in the masters' dtype, and drop them.

        A parameter without a gradient counts as zero; returns whether any has one.

        Raises TypeError for a sparse gradient, with the parameter's name.
        """
        self.drop_zeroed()
        fresh, self.has_gradient = not self.has_gradient, True
        self._gradient_memory.allocate()
        targets, gradients = [], []
        for entry, parameter, view in zip(self.entries, self.full, self._gradient_views, strict=True):
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
        for shard, view in zip(self.shards, self._gradient_views if self.has_gradient else (), strict=False):
            if shard.grad is None:
                view.zero_()

    def reduce_scatter(self) -> None:
        """Start to send the flat gradient, if there is one; this rank will receive its slice of the mean."""
        assert self._reducing is None, "one reduce-scatter of a flat parameter at a time"
        if self.has_gradient:
            received = torch.empty_like(self.master)
            self._reducing = (collectives.reduce_scatter_mean(received, self._gradient, self.group), received)
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
        self._gradient_memory.free()
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
        for shard, gradient in zip(self.shards, self._slices(received), strict=True):
            if shard.grad is None or shard.grad._base is self._zero:
                shard.grad = gradient
            else:
                shard.grad += gradient

    def drop_gradients(self) -> None:
        """Forget gradients that were not sent (after an exception, or on zero_grad)."""
        if self.has_gradient:
            self.has_gradient = False
            self._gradient_memory.free()
        for parameter in self.full:
            parameter.grad = None


class NotGathered(Tensor):
    """What a module's attribute finds in forward while its unit is sharded: the gathered parameter's shape, strides,
    dtype and device, and an error.

    A rank's shard has the dimensions of its parameter, so that an operator might well compute with it: a head that
    reads `embedding.weight` would give logits of a part of the vocabulary, without a word.

    Args:
        like: any tensor of that shape and these strides.
        dtype, device: of the gathered parameter.
        message: what any operator on it, or asking for its address, raises as RuntimeError.
    """

    _message: str

    @staticmethod
    def __new__(cls, like: Tensor, dtype: torch.dtype, device: torch.device, message: str) -> "NotGathered":
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
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(found._message)

    def data_ptr(self) -> NoReturn:
        """Raises RuntimeError: a kernel that is given addresses would read where nothing is."""
        raise RuntimeError(self._message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"


class Replicated:
    """Masters of the small parameters (norms, biases), whole on every rank; one all-reduce per dtype averages them.

    Where the module computes in another dtype than the master's, its attributes find a copy in that dtype,
    which `refresh()` brings up to date; the copy's gradient is moved to the master as soon as it is complete.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device, group: ProcessGroup):
        self.entries = list(entries)
        self.group = group
        self.masters: list[nn.Parameter] = []
        self.cast: list[tuple[str, nn.Parameter]] = []  # masters that forward does not read
        self._casts: list[tuple[nn.Parameter, nn.Parameter]] = []
        for entry in entries:
            before = entry.parameter
            if before.is_meta:
                values = torch.empty_like(before, device=device, dtype=entry.master_dtype)
            else:
                values = before.detach().to(entry.master_dtype)
            master = nn.Parameter(values, before.requires_grad)
            self.masters.append(master)
            entry.register(master)
            if entry.compute_dtype != master.dtype:
                copy = nn.Parameter(master.detach().to(entry.compute_dtype), master.requires_grad)
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(_move_gradient, master))
                entry.install(copy)
                self._casts.append((copy, master))
                self.cast.append((entry.name, master))
        self.trainable = [master for master in self.masters if master.requires_grad]
        self._buckets = [GradientBucket(plan, self.trainable) for plan in plan_of(self.trainable, None)]
        self._exchange = AllReduce(group, lambda flat: collectives.all_reduce_mean(flat, group))

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters again. Through `.data`, because a forward before this one may have saved the copy."""
        if self._casts:
            torch._foreach_copy_(
                [copy.data for copy, _ in self._casts], [master for _, master in self._casts]
            )

    def average(self) -> None:
        """Replace every `.grad` by its mean over ranks; None stays where no rank has a gradient. Blocks."""
        for bucket in self._buckets:
            self._exchange.start(bucket)
        for bucket in self._buckets:
            self._exchange.finish(bucket)


def _move_gradient(master: nn.Parameter, copy: nn.Parameter) -> None:
    """A hook: adds the gradient of a low-precision copy to its master's and drops it."""
    gradient, copy.grad = copy.grad.to(master.dtype), None
    master.grad = gradient if master.grad is None else master.grad + gradient
