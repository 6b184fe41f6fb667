"""Plans of FSDP, without memory: which parameters are gathered together, in which dtype, and where
each one is in a flat buffer.

    list_entries    every parameter once, with all modules that hold it
    plan_units      which parameters are gathered and freed together: one unit per block
    plan_buffers    which parameters of a unit share a flat buffer
    RowLayout       a flat buffer of N equal slices that end between rows
    plan_casts      dtypes of the inputs and outputs of modules under `compute_dtype`

    | weight a            | weight b                 | weight c   |padding|
    | slice of rank 0    | slice of rank 1     | slice of rank 2    |

A rank's shard of a parameter is the part of it inside the rank's slice, and may be empty. It keeps
its parameter's dimensions, `(rows, …)`: each parameter begins at a multiple of its row's length,
and a slice is a multiple of all these lengths. The least common multiple of different lengths can
be large, and up to N times that is padding. `plan_buffers` then gives each length a separate
buffer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from distlab.parallel.shard import FlatLayout, memory_order

# Elements that every parameter's offset is a multiple of: 16 bytes in a 2-byte dtype, the alignment
# that matmul kernels need of an operand's address.
ALIGNMENT = 8
# Elements. Saving fewer is not worth another buffer: sending 1 MiB of fp32 costs less than a
# collective's latency.
WORTH_A_BUFFER = 2**18

Sizes = tuple[int, ...]  # of a parameter's dimensions, from the outermost stride to the innermost
# Sizes, strides and first element of a view, as `Tensor.as_strided` takes them.
Place = tuple[Sizes, Sizes, int]
# Dtypes of a module's floating-point inputs and outputs; None leaves outputs as they are.
Casts = tuple[torch.dtype, torch.dtype | None]

# -- parameters before they are wrapped ------------------------------------------------------------


def is_matrix(parameter: Tensor) -> bool:
    """Return True for what is sharded: matrices and larger tensors of floating point.

    Vectors and scalars (norms, biases), integers and complex numbers are replicated.
    """
    return parameter.ndim >= 2 and parameter.is_floating_point()


@dataclass(eq=False)
class Entry:
    """One distinct parameter: the parameter before wrapping, and every place that holds it.

    Args:
        parameter: parameter of any shape and strides.
        names: dotted names of the parameter, several if it is tied.
        owners: (module, attribute) of each place.
        compute_dtype: dtype that its owners see in forward.
    """

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    compute_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """Return the name under which `named_parameters()` lists it."""
        return self.names[0]

    @property
    def master_dtype(self) -> torch.dtype:
        """Return the dtype that the optimizer steps: fp32 or wider; integers as they are."""
        dtype = self.parameter.dtype
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

    @property
    def is_sharded(self) -> bool:
        """Return `is_matrix` of the parameter. All others are replicated."""
        return is_matrix(self.parameter)

    @cached_property
    def memory_order(self) -> tuple[int, ...]:
        """Return the dimensions from the outermost stride to the innermost.

        So a transposed weight stays transposed in the flat buffer.
        """
        return memory_order(self.parameter)

    @cached_property
    def _inverse_order(self) -> tuple[int, ...]:
        order = self.memory_order
        return tuple(sorted(range(len(order)), key=order.__getitem__))

    @cached_property
    def sizes(self) -> Sizes:
        """Return the sizes of the dimensions in memory order."""
        return tuple(self.parameter.shape[dimension] for dimension in self.memory_order)

    def place_of(self, sizes: Sizes, offset: int) -> Place:
        """Return the view in a flat buffer of a tensor with the parameter's dimensions.

        Args:
            sizes: sizes of its dimensions in memory order.
            offset: element of the buffer at which it begins.
        """
        dense = torch.empty(sizes, device="meta").permute(self._inverse_order)
        return dense.shape, dense.stride(), offset

    def forget_values(self) -> None:
        """Keep the parameter's shape, strides and name only, so that its memory is freed."""
        like = torch.empty_like(self.parameter, device="meta")
        self.parameter = nn.Parameter(like, self.parameter.requires_grad)

    def install(self, parameter: Tensor) -> None:
        """Let the owners' `self.<attribute>` find `parameter` before the registered one."""
        for module, attribute in self.owners:
            module.__dict__[attribute] = parameter

    def register(self, parameter: nn.Parameter, *, made_by_fsdp: bool = True) -> None:
        """Make `parameter` the one that `parameters()`, `state_dict()` and the attributes yield."""
        parameter.made_by_fsdp = made_by_fsdp
        for module, attribute in self.owners:
            module.__dict__.pop(attribute, None)
            module._parameters[attribute] = parameter


def list_entries(module: nn.Module, compute_dtype: torch.dtype | None) -> list[Entry]:
    """Return every distinct parameter in registration order, with all its names and owners.

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
            # A tied vector may be a norm's weight in one module and a bias in another.
            if len(entry.names) == 1 or dtype == compute_dtype:
                entry.compute_dtype = dtype
    if not entries:
        raise ValueError("FSDP: the module has no parameters; there is nothing to shard")
    return list(entries.values())


# -- units -----------------------------------------------------------------------------------------


@dataclass
class UnitPlan:
    """A unit: parameters that are gathered together, and the module whose forward needs them."""

    name: str
    module: nn.Module
    entries: list[Entry]


def plan_units(module: nn.Module, entries: Sequence[Entry]) -> list[UnitPlan]:
    """Group the sharded parameters into units, in registration order.

    A parameter below an `nn.ModuleList` belongs to the child of the outermost one. Elsewhere it
    belongs to the module that owns it, or to the outermost module that owns a matrix itself if such
    modules are nested: `nn.MultiheadAttention`, for example, reads its child's weight without
    calling the child. The result of `torch.compile` counts as one that owns a matrix, because hooks
    cannot run inside its graph. Modules without a forward, such as `nn.ParameterList`, are
    never called, so their parameters belong to the module around them. Parameters of the root, and
    those tied across units, form the root's unit, which is gathered for the whole forward.
    """
    sharded = [entry for entry in entries if entry.is_sharded]
    paths = {}
    for entry in sharded:
        for name in entry.names:
            paths[name] = _modules_on_the_way(module, name)
    owning = set()
    for steps in paths.values():
        _, owner = steps[_last_called(steps)]
        owning.add(id(owner))
    plans: dict[int, UnitPlan] = {}
    for entry in sharded:
        units = [_unit_of(paths[name], owning) for name in entry.names]
        path, unit = units[0]
        if any(other is not unit for _, other in units):  # tied across units
            path, unit = "", module
        plan = plans.setdefault(id(unit), UnitPlan(path or "(root)", unit, []))
        plan.entries.append(entry)
    return list(plans.values())


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward. Containers such as `nn.ModuleList` have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _modules_on_the_way(root: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return (path, module) from the root to the owner of the parameter called `name`."""
    parts = name.split(".")
    paths = [".".join(parts[:depth]) for depth in range(len(parts))]
    return [(path, root.get_submodule(path)) for path in paths]


def _last_called(steps: Sequence[tuple[str, nn.Module]]) -> int:
    """Return the position of the innermost module with a forward; the root's if there is none."""
    called = [position for position, (_, module) in enumerate(steps) if is_called(module)]
    return max(called, default=0)


def _unit_of(steps: Sequence[tuple[str, nn.Module]], owning: set[int]) -> tuple[str, nn.Module]:
    """Return (path, module) of the unit that holds a parameter.

    Args:
        steps: modules on the way to the parameter's owner.
        owning: ids of the innermost modules with a forward that own a sharded parameter.
    """
    in_list = len(steps)  # position of the child of the outermost nn.ModuleList
    for position, (_, module) in enumerate(steps):
        if isinstance(module, nn.ModuleList):
            in_list = position + 1
            break
    called = [position for position in range(1, len(steps)) if is_called(steps[position][1])]
    blocks = [position for position in called if position >= in_list]
    compiled = [position for position in called if "_orig_mod" in steps[position][1]._modules]
    owners = [position for position in called if id(steps[position][1]) in owning]
    # The outermost of both: a module that owns a matrix may read that of a compiled child, too.
    candidates = [*blocks, *sorted([*compiled, *owners]), 0]
    return steps[candidates[0]]


# -- flat buffers ----------------------------------------------------------------------------------


def plan_buffers(sizes: Sequence[Sizes], world_size: int) -> list[list[int]]:
    """Decide which parameters share a buffer, and return them as indices in order.

    All share one, unless a buffer for each length of rows saves more than 1/64 of their elements
    and more than `WORTH_A_BUFFER` (each buffer is one more collective). A buffer of one length is
    padded by less than N of its rows, in addition to the parameters' alignment where a row is not a
    multiple of 8 elements.
    """
    of_length: dict[int, list[int]] = {}
    for index, each in enumerate(sizes):
        of_length.setdefault(row_numel(each, world_size), []).append(index)
    one = RowLayout(sizes, world_size)
    numel_of_several = 0
    for indices in of_length.values():
        numel_of_several += RowLayout([sizes[index] for index in indices], world_size).numel
    saved = one.numel - numel_of_several
    if saved > max(WORTH_A_BUFFER, sum(one.numels) / 64):
        return list(of_length.values())
    return [list(range(len(sizes)))]


class RowLayout(FlatLayout):
    """Parameters in a flat buffer that is cut between their rows only.

    Args:
        sizes: sizes of each parameter in memory order.
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
        """Return the sizes of `rank`'s shard of parameter `index`.

        The shard has as many dimensions as the parameter: `(rows, …)`, or `(1, rows, …)` if the
        parameter is cut along its second dimension, and so on.
        """
        first, last = self.shard_range(index, rank)
        cut = cut_dimension(self.sizes[index], self.world_size)
        rows = (last - first) // self.row_numels[index]
        return (1,) * cut + (rows,) + self.sizes[index][cut + 1 :]


def cut_dimension(sizes: Sizes, world_size: int) -> int:
    """Return the dimension along which a parameter is sharded.

    It is the outermost that has a row for every rank: the first one of a matrix with N rows or
    more. A matrix with fewer would leave ranks empty while all slices are as long as a row. It is
    sharded along the second dimension, and a shard is contiguous within a row, or over several, as
    `(1, elements)`. Experts `(E, rows, columns)` on more than E ranks have shards
    `(1, rows, columns)`.
    """
    for dimension in range(len(sizes)):
        if math.prod(sizes[: dimension + 1]) >= world_size:
            return dimension
    return len(sizes) - 1


def row_numel(sizes: Sizes, world_size: int) -> int:
    """Return the number of elements between two neighbouring places where a shard may end."""
    return max(1, math.prod(sizes[cut_dimension(sizes, world_size) + 1 :]))


# -- dtypes under compute_dtype --------------------------------------------------------------------


def parameter_dtype(
    owner: nn.Module, parameter: nn.Parameter, compute_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the dtype in which `owner`'s forward finds `parameter`.

    Matrices are sent, so they are cast: that halves what is sent. A bias enters the matmul, so it
    is cast with the matrix. Other vectors (norms) are never sent and stay in the master's dtype: a
    weight near one rounded to bf16 would be off by up to 0.4 %, the same way in every token.
    BatchNorm keeps its dtype, because its running statistics do; so do integers.
    """
    if compute_dtype is None or not parameter.is_floating_point() or isinstance(owner, _BatchNorm):
        return parameter.dtype
    # A matrix in the module or below it may be combined with its vectors.
    for each in owner.parameters():
        if is_matrix(each):
            return compute_dtype
    master_dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.promote_types(master_dtype, compute_dtype)


def plan_casts(owners: Iterable[nn.Module], compute_dtype: torch.dtype) -> dict[nn.Module, Casts]:
    """Return the dtypes of the floating-point inputs and outputs of modules with parameters.

    A module that holds vectors only computes in their dtype, because most of torch's operations
    refuse operands of two dtypes, and returns the compute dtype. A class that says
    `takes_mixed_dtypes = True` gets its inputs in the compute dtype next to its fp32 parameters,
    which spares both casts. It must return its input's dtype.
    """
    casts: dict[nn.Module, Casts] = {}
    for owner in owners:
        dtypes = []
        for parameter in owner._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                dtypes.append(parameter_dtype(owner, parameter, compute_dtype))
        if not dtypes:
            continue
        if isinstance(owner, _BatchNorm):
            casts[owner] = (dtypes[0], None)
        elif compute_dtype in dtypes or getattr(owner, "takes_mixed_dtypes", False):
            casts[owner] = (compute_dtype, None)
        else:
            casts[owner] = (dtypes[0], compute_dtype)
    return casts
