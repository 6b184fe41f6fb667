"""The pure plan of FSDP: which parameters are gathered together, and which elements each rank keeps.

A unit's parameters lie one after another in one flat buffer, which is cut into N equal slices:

    | weight a            | weight b                 | weight c   |padding|
    | slice of rank 0    | slice of rank 1     | slice of rank 2    |

All-gathering the slices yields the buffer itself, of which the full parameters are views: nothing is copied
after the gather. A rank's *piece* of a parameter is where its slice meets the parameter; it may be empty.
Nothing here holds memory or talks to other ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

ALIGNMENT = 8  # elements; 16 bytes in a 2-byte type, which matrix kernels want of an operand's address


@dataclass(frozen=True)
class FlatPlan:
    """Layout of one flat buffer and its slices.

    Args:
        numels: elements of each parameter.
        world_size: number of slices; the buffer is padded to a multiple of it.
    """

    numels: tuple[int, ...]
    world_size: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter, a multiple of `ALIGNMENT`."""
        offsets, end = [], 0
        for numel in self.numels:
            offsets.append(end)
            end += -(-numel // ALIGNMENT) * ALIGNMENT
        return tuple(offsets)

    @cached_property
    def slice_numel(self) -> int:
        """Elements of one rank's slice, padding included."""
        end = self.offsets[-1] + self.numels[-1] if self.numels else 0
        return -(-end // self.world_size)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.slice_numel * self.world_size

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """First and one-past-last element, within parameter `index`, of what `rank` owns of it."""
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

    def flatten(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape → `(numel,)` in memory order."""
        return tensor.permute(self.memory_order).reshape(-1)

    def unflatten(self, flat: Tensor) -> Tensor:
        """`(numel,)` in memory order → a view of the parameter's shape."""
        return flat.view([self.parameter.shape[d] for d in self.memory_order]).permute(self._inverse_order)

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
            entry.compute_dtype = _compute_dtype(owner, parameter, compute_dtype)
            if parameter.is_floating_point():
                entry.master_dtype = torch.promote_types(parameter.dtype, torch.float32)
            else:
                entry.master_dtype = parameter.dtype
    if not entries:
        raise ValueError("FSDP: the module has no parameters; there is nothing to shard")
    return list(entries.values())


def _compute_dtype(
    owner: nn.Module, parameter: nn.Parameter, compute_dtype: torch.dtype | None
) -> torch.dtype:
    """BatchNorm keeps its type, because its running statistics do; so do integers."""
    keeps = isinstance(owner, nn.modules.batchnorm._BatchNorm) or not parameter.is_floating_point()
    return parameter.dtype if compute_dtype is None or keeps else compute_dtype


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
    `nn.MultiheadAttention`, say, reads its child's weight without calling the child). Parameters owned by the
    root, and those tied across units, form the root's unit, gathered for the whole forward.
    """
    owning = {id(owner) for entry in entries if is_sharded(entry) for owner, _ in entry.owners}
    plans: dict[int, UnitPlan] = {}
    for entry in filter(is_sharded, entries):
        found = {}
        for name in entry.names:
            path, unit = _unit_of(module, name, owning)
            found.setdefault(id(unit), (path, unit))
        path, unit = next(iter(found.values())) if len(found) == 1 else ("", module)
        plans.setdefault(id(unit), UnitPlan(path or "(root)", unit, [])).entries.append(entry)
    return list(plans.values())


def _unit_of(root: nn.Module, name: str, owning: set[int]) -> tuple[str, nn.Module]:
    """(path, module) of the unit that holds the parameter called `name`."""
    steps = list(_walk(root, name))
    below = next((i + 1 for i, (_, m) in enumerate(steps) if isinstance(m, nn.ModuleList)), None)
    if below is not None:  # containers are never called, so a unit is the first module that is none
        below = next(
            (
                i
                for i in range(below, len(steps))
                if not isinstance(steps[i][1], nn.ModuleList | nn.ModuleDict)
            ),
            None,
        )
    if below is None:
        below = next((i for i in range(1, len(steps)) if id(steps[i][1]) in owning), 0)
    return steps[below]


def _walk(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules on the way from the root to the owner of the parameter called `name`."""
    path, module = "", root
    yield path, module
    for part in name.split(".")[:-1]:
        path = f"{path}.{part}" if path else part
        module = module._modules[part]
        yield path, module
