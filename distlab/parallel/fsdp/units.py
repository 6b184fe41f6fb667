"""The pure plan of FSDP: which parameters are gathered together, and which rows each rank keeps.

A unit's parameters lie one after another in one flat buffer, which is cut into N equal slices:

    | weight a            | weight b                 | weight c   |padding|
    | slice of rank 0    | slice of rank 1     | slice of rank 2    |

All-gathering the slices yields the buffer itself, of which the full parameters are views: nothing is copied
after the gather. A rank's shard of a parameter is where its slice meets the parameter; it may be empty.

Slices are cut between rows only, so that a shard keeps its parameter's dimensions, `(rows, …)`: each parameter
begins at a multiple of its row's length, and a slice is a multiple of all these lengths. The least common
multiple of different lengths can be large, and N of them are padded at most: `plan_buffers` then gives each
length a buffer of its own.

Nothing here holds memory or talks to other ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from distlab.parallel.fsdp.precision import parameter_dtype

ALIGNMENT = 8  # elements; 16 bytes in a 2-byte type, which matrix kernels want of an operand's address
# Saving fewer elements is not worth another buffer: sending 1 MiB of fp32 costs less than a collective's latency.
WORTH_A_BUFFER = 2**18

Sizes = tuple[int, ...]  # of a parameter's dimensions, from the outermost stride to the innermost
Place = tuple[Sizes, Sizes, int]  # sizes, strides and first element, as `Tensor.as_strided` takes them


@dataclass(frozen=True)
class FlatPlan:
    """Layout of one flat buffer and its slices.

    Args:
        sizes: of each parameter.
        world_size: number of slices; all are equally long.
    """

    sizes: tuple[Sizes, ...]
    world_size: int

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(map(math.prod, self.sizes))

    @cached_property
    def row_numels(self) -> tuple[int, ...]:
        """Elements of each parameter's rows, between which it may be cut."""
        return tuple(row_numel(sizes, self.world_size) for sizes in self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter, a multiple of its row and of `ALIGNMENT`."""
        offsets, end = [], 0
        for numel, row in zip(self.numels, self.row_numels, strict=True):
            offsets.append(_round_up(end, math.lcm(row, ALIGNMENT)))
            end = offsets[-1] + numel
        return tuple(offsets)

    @cached_property
    def slice_numel(self) -> int:
        """Elements of one rank's slice, padding included; a multiple of every row."""
        end = self.offsets[-1] + self.numels[-1] if self.numels else 0
        return _round_up(-(-end // self.world_size), math.lcm(*self.row_numels))

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.slice_numel * self.world_size

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """First and one-past-last element, within parameter `index`, of what `rank` owns of it: whole rows."""
        start = rank * self.slice_numel - self.offsets[index]
        first = min(max(start, 0), self.numels[index])
        return first, min(max(start + self.slice_numel, first), self.numels[index])

    def place(self, index: int, rank: int) -> tuple[int, int]:
        """The same elements, counted within `rank`'s slice; an empty piece is empty there too."""
        first, last = self.piece(index, rank)
        if first == last:
            return 0, 0
        shift = self.offsets[index] - rank * self.slice_numel
        return first + shift, last + shift

    def shard_sizes(self, index: int, rank: int) -> Sizes:
        """Sizes of `rank`'s shard of parameter `index`, which has as many dimensions as the parameter.

        `(rows, …)`; `(1, rows, …)` of a parameter that is cut along its second dimension, and so on.
        """
        first, last = self.piece(index, rank)
        cut = cut_dimension(self.sizes[index], self.world_size)
        return (1,) * cut + ((last - first) // self.row_numels[index],) + self.sizes[index][cut + 1 :]


def cut_dimension(sizes: Sizes, world_size: int) -> int:
    """The dimension that a parameter is cut along: the outermost that offers every rank a row.

    The first one of a matrix with N rows or more. A matrix with fewer would leave ranks empty while all slices are
    as long as a row: it is cut along the second dimension, and a shard is a run within a row, or over several, as
    `(1, elements)`. Of experts `(E, rows, columns)` on more than E ranks shards are `(1, rows, columns)`.
    """
    enough = (d for d in range(len(sizes)) if math.prod(sizes[: d + 1]) >= world_size)
    return next(enough, len(sizes) - 1)


def row_numel(sizes: Sizes, world_size: int) -> int:
    """Elements of what lies between two places where a parameter may be cut."""
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
    together = FlatPlan(tuple(sizes), world_size)
    apart = [FlatPlan(tuple(sizes[i] for i in indices), world_size) for indices in by_row.values()]
    saved = together.numel - sum(plan.numel for plan in apart)
    if saved > max(WORTH_A_BUFFER, sum(together.numels) / 64):
        return list(by_row.values())
    return [list(range(len(sizes)))]


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


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
        begins at element `offset` of."""
        strides = [math.prod(max(1, size) for size in sizes[d + 1 :]) for d in range(len(sizes))]
        order = self._inverse_order
        return tuple(sizes[d] for d in order), tuple(strides[d] for d in order), offset

    def forget_values(self) -> None:
        """Keep the parameter's shape, strides and name only, so that its memory can go."""
        self.parameter = nn.Parameter(
            torch.empty_like(self.parameter, device="meta"), self.parameter.requires_grad
        )

    def install(self, parameter: nn.Parameter) -> None:
        """Let the owners' `self.<attribute>` find `parameter` before what `parameters()` yields."""
        for module, attribute in self.owners:
            module.__dict__[attribute] = parameter

    def uninstall(self) -> None:
        """Let the owners' attributes find what is registered again, not the full parameter."""
        for module, attribute in self.owners:
            module.__dict__.pop(attribute, None)

    def register(self, parameter: nn.Parameter, *, made_by_fsdp: bool = True) -> None:
        """Make `parameter` what `parameters()` and `state_dict()` yield here."""
        parameter.made_by_fsdp = made_by_fsdp
        for module, attribute in self.owners:
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
            name = f"{path}.{attribute}" if path else attribute
            entry = entries.setdefault(parameter, Entry(parameter))
            entry.names.append(name)
            if (owner, attribute) not in entry.owners:
                entry.owners.append((owner, attribute))
            dtype = parameter_dtype(owner, parameter, compute_dtype)
            if len(entry.names) == 1 or dtype == compute_dtype:  # a norm's weight may be a bias elsewhere
                entry.compute_dtype = dtype
            if parameter.is_floating_point():
                entry.master_dtype = torch.promote_types(parameter.dtype, torch.float32)
            else:
                entry.master_dtype = parameter.dtype
    if not entries:
        raise ValueError("FSDP: the module has no parameters; there is nothing to shard")
    return list(entries.values())


def is_piece(parameter: nn.Parameter) -> bool:
    """Whether this parameter stands for one that an FSDP took over."""
    return getattr(parameter, "made_by_fsdp", False)


def is_sharded(entry: Entry) -> bool:
    """Matrices and larger are sharded; vectors and scalars (norms, biases) and integers are replicated."""
    return entry.parameter.ndim >= 2 and entry.parameter.is_floating_point()


def plan_units(module: nn.Module, entries: Sequence[Entry]) -> list[UnitPlan]:
    """Group the sharded parameters into units, in registration order.

    A parameter below an `nn.ModuleList` belongs to the child of the outermost one; elsewhere to the module
    that owns it (to the outermost module that owns a matrix itself, if such modules are nested, because
    `nn.MultiheadAttention`, say, reads its child's weight without calling the child). Modules without a forward,
    such as `nn.ParameterList`, are never called: what they own belongs to the module around them. Parameters owned
    by the root, and those tied across units, form the root's unit, gathered for the whole forward.
    """
    names = [name for entry in filter(is_sharded, entries) for name in entry.names]
    owning = {id(steps[_last_called(steps)][1]) for steps in (list(_walk(module, name)) for name in names)}
    plans: dict[int, UnitPlan] = {}
    for entry in filter(is_sharded, entries):
        found = {}
        for name in entry.names:
            path, unit = _unit_of(module, name, owning)
            found.setdefault(id(unit), (path, unit))
        path, unit = next(iter(found.values())) if len(found) == 1 else ("", module)
        plans.setdefault(id(unit), UnitPlan(path or "(root)", unit, [])).entries.append(entry)
    return list(plans.values())


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; containers such as `nn.ModuleList` and `nn.ParameterDict` have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _last_called(steps: Sequence[tuple[str, nn.Module]]) -> int:
    """The innermost module with a forward; the root if there is none."""
    return max((i for i, (_, module) in enumerate(steps) if is_called(module)), default=0)


def _unit_of(root: nn.Module, name: str, owning: set[int]) -> tuple[str, nn.Module]:
    """(path, module) of the unit that holds the parameter called `name`."""
    steps = list(_walk(root, name))
    below = next((i + 1 for i, (_, m) in enumerate(steps) if isinstance(m, nn.ModuleList)), len(steps))
    called = [i for i in range(1, len(steps)) if is_called(steps[i][1])]
    children = [i for i in called if i >= below]
    owners = [i for i in called if id(steps[i][1]) in owning]
    return steps[next(iter([*children, *owners]), 0)]


def _walk(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules on the way from the root to the owner of the parameter called `name`."""
    path, module = "", root
    yield path, module
    for part in name.split(".")[:-1]:
        path = f"{path}.{part}" if path else part
        module = module._modules[part]
        yield path, module
