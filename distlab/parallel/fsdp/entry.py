"""The parameters before they are wrapped: each one once, with every place of the module that holds it."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from distlab.parallel.fsdp.casts import parameter_dtype
from distlab.parallel.fsdp.layout import Sizes

# sizes, strides and first element, as `Tensor.as_strided` takes them
Place = tuple[Sizes, Sizes, int]


@dataclass(eq=False)
class Entry:
    """One distinct parameter: the parameter before wrapping, and every place of the module that holds it.

    Args:
        parameter: any shape and strides.
        names: its dotted names, more than one if it is tied.
        owners: (module, attribute) of each place.
        compute_dtype: what its owners see in forward.
    """

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    compute_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """The name under which `named_parameters()` lists it."""
        return self.names[0]

    @property
    def master_dtype(self) -> torch.dtype:
        """What the optimizer steps: fp32 or wider; integers as they are."""
        dtype = self.parameter.dtype
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

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
        """Flatten a tensor with the parameter's dimensions, whole or a shard → its elements `(n,)` in memory order."""
        return tensor.permute(self.memory_order).reshape(-1)

    def unflatten(self, flat: Tensor, sizes: Sizes | None = None) -> Tensor:
        """`(n,)` in memory order → a view of the parameter's shape, or of a shard's, whose `sizes` are given."""
        return flat.view(self.sizes if sizes is None else sizes).permute(self._inverse_order)

    def place_of(self, sizes: Sizes, offset: int) -> Place:
        """Where a tensor with the parameter's dimensions, of these sizes in memory order, lies in a flat buffer that it
        begins at element `offset` of.
        """
        dense = torch.empty(sizes, device="meta").permute(self._inverse_order)
        return dense.shape, dense.stride(), offset

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
            # a norm's weight may be a bias elsewhere
            if len(entry.names) == 1 or dtype == compute_dtype:
                entry.compute_dtype = dtype
    if not entries:
        raise ValueError("FSDP: the module has no parameters; there is nothing to shard")
    return list(entries.values())
