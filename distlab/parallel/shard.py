"""Which elements of which parameter lie on this rank: the one notion that strategies, optimizers and checkpoints share.

`FlatLayout` plans: parameters one after another in a flat buffer of equal slices, one for each
rank. `Shard` says what a rank holds: a contiguous part of one parameter's elements, named by the
parameter's own name and by where it starts in the unpadded whole. So a checkpoint of one strategy
and world size can be read by another at another world size, without gathering.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# Key of an optimizer's state dict, and of its groups, that says whose shards it holds
# (`shard_states.py`).
NOTED_RANK = "shards"


class FlatLayout:
    """Parameters in a flat buffer of `world_size` equal slices.

    | parameter 0  | parameter 1             | gap | parameter 2 | extra | padding |
    | slice of rank 0      | slice of rank 1      | slice of rank 2               |

    Args:
        numels: elements of each parameter.
        world_size: number of slices.
        align: of each parameter, what its first element's position is a multiple of; default: no
            gaps.
        cut: a slice's length is a multiple of it.
        extra: elements behind the parameters.

    Attributes:
        offsets: position of each parameter's first element.
        payload: elements up to the last parameter's end.
        slice_numel: elements of a slice, padding included.
        numel: elements of the buffer.
    """

    def __init__(
        self,
        numels: Sequence[int],
        world_size: int = 1,
        *,
        align: Sequence[int] = (),
        cut: int = 1,
        extra: int = 0,
    ):
        self.numels, self.world_size = tuple(numels), world_size
        self.offsets: list[int] = []
        self.payload = 0
        for numel, multiple in zip(self.numels, align or [1] * len(self.numels), strict=True):
            self.offsets.append(round_up(self.payload, multiple))
            self.payload = self.offsets[-1] + numel
        self.slice_numel = round_up(-(-(self.payload + extra) // world_size), cut)
        self.numel = self.slice_numel * world_size

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """First and one-past-last element, within parameter `index`, of the shard of `rank`."""
        start = rank * self.slice_numel - self.offsets[index]
        first = min(max(start, 0), self.numels[index])
        return first, min(max(start + self.slice_numel, first), self.numels[index])

    def place(self, index: int, rank: int) -> int:
        """Return where that shard begins in `rank`'s slice; 0 of an empty one."""
        first, last = self.shard_range(index, rank)
        return 0 if first == last else first + self.offsets[index] - rank * self.slice_numel

    def spread(self, index: int, parameter: Tensor, group: ProcessGroup) -> "Spread":
        """Where the parameter at `index` lies, whose slices these ranks have."""
        ranges = (self.shard_range(index, rank) for rank in range(self.world_size))
        return Spread(
            torch.empty_like(parameter, device="meta"),
            [stop - start for start, stop in ranges],
            group,
        )


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


Box = tuple[tuple[int, int], ...]  # (first, one past the last) of each dimension


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a rank of a tensor-parallel group keeps: some ranges along one dimension.

    Attributes:
        shape: of the whole.
        dim: along which it is cut.
        ranges: (first, one past the last), in order; several where it consists of several matrices.
    """

    shape: torch.Size
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part, as contiguous memory of its own."""
        parts = [whole.narrow(self.dim, first, last - first) for first, last in self.ranges]
        return torch.cat(parts, self.dim).contiguous()

    def joined(self, parts: Tensor) -> Tensor:
        """Return the whole out of all ranks' parts `(ranks, …)`, in rank order."""
        sizes = [last - first for first, last in self.ranges]
        pieces = [part.split(sizes, self.dim) for part in parts]
        return torch.cat(
            [piece[number] for number in range(len(sizes)) for piece in pieces], self.dim
        )

    def boxes(self) -> list[Box]:
        """Return the places of its ranges in the whole; one after the other they are this rank's elements in order."""
        assert self.dim == 0 or len(self.ranges) == 1, (
            "several ranges of columns would alternate row by row"
        )
        full = [(0, size) for size in self.shape]
        return [
            tuple(r if dim == self.dim else each for dim, each in enumerate(full))
            for r in self.ranges
        ]


@dataclass(frozen=True, eq=False)
class Spread:
    """Which rank has how much of a parameter that is sharded, for an optimizer whose update takes all of it.

    Sharded strategies leave it in the attribute `spread` of what their optimizer steps
    (`spread_of`). Rank 0 has the first elements in the order of the parameter's memory, rank 1
    those behind them, and so on; some have none.

    Attributes:
        like: on meta, with the whole's shape and strides.
        counts: how many elements each rank has.
        group: the ranks.
    """

    like: Tensor
    counts: list[int]
    group: ProcessGroup

    def __reduce__(self) -> Any:
        """Pickle as something empty that `torch.load` takes: a shard that was stored belongs to no ranks."""
        return torch.Size, ()


def spread_of(parameter: Tensor) -> Spread | None:
    """Where the rest of a shard lies; None of what is whole here."""
    return getattr(parameter, "spread", None) or None


def whole_shape(parameter: Tensor) -> torch.Size:
    """Of the parameter that this is, or is a shard of."""
    spread = spread_of(parameter)
    return parameter.shape if spread is None else spread.like.shape


@dataclass(frozen=True, eq=False)
class Shard:
    """A contiguous part of a flattened parameter (or of its gradient, or of its optimizer's state) on this rank.

    Attributes:
        name: the module's own name of the parameter, without what `torch.compile` of a block puts
            into it.
        shape: of the whole.
        start: first element within the flattened whole; None if the elements here are no contiguous
            part of it.
        tensor: what lies here, of any number of dimensions, perhaps empty. Out of
            `ParallelModel.shards()` it is what the optimizer steps, the key of its `state`.
        replicated: every rank holds these very elements.
        copies: which of how many ranks that hold them this one is, where not every rank does.
        cut: what this rank's model has of the parameter, within which `start` counts then; None:
            all of it.
    """

    name: str
    shape: torch.Size
    start: int | None
    tensor: Tensor
    replicated: bool = False
    copies: tuple[int, int] = (0, 1)
    cut: Cut | None = None

    @property
    def is_first(self) -> bool:
        """Return True if the whole's first element is here, or if the whole has no elements at all.

        The rank that is first stores what belongs to the whole, such as Adam's step.
        """
        has_first = self.cut is None or self.cut.ranges[0][0] == 0
        return (
            has_first and self.start == 0 and (self.values.numel() > 0 or self.shape.numel() == 0)
        )

    def places(self) -> list[tuple[Box, int, slice]]:
        """Where its elements lie in the whole: box, first element within the flattened box, which of `values`."""
        found, offset, count = [], 0, self.values.numel()
        for box in (
            [tuple((0, size) for size in self.shape)] if self.cut is None else self.cut.boxes()
        ):
            size = math.prod(last - first for first, last in box)
            first, last = max(self.start, offset), min(self.start + count, offset + size)
            if first < last:
                found.append((box, first - offset, slice(first - self.start, last - self.start)))
            offset += size
        return found

    @property
    def values(self) -> Tensor:
        """This rank's memory as `(n,)`, a view.

        Raises:
            ValueError: it is not contiguous.
        """
        here = local_part(self.tensor.detach())
        if self.start is None or not here.is_contiguous():
            raise ValueError(
                f"'{self.name}' is not contiguous in memory; checkpoints hold tensors in row-major order"
            )
        return here.view(-1)

    def like(self, name: str, value: Tensor) -> "Shard":
        """Return the same place of another tensor of this shape: a gradient, or a state."""
        return replace(self, name=name, tensor=value)

    def portion(self, rank: int, ranks: int) -> "Shard":
        """What this rank writes: an N-th of what N ranks hold alike, and all of what it alone holds."""
        which, holders = (rank, ranks) if self.replicated else self.copies
        if holders == 1 and not self.replicated:
            return self
        values = self.values
        first, last = which * values.numel() // holders, (which + 1) * values.numel() // holders
        start, tensor = self.start + first, values[first:last]
        return replace(self, start=start, tensor=tensor, replicated=False, copies=(0, 1))


class Loader(NamedTuple):
    """Destination of a whole tensor that is loaded.

    Attributes:
        names: names of the tensor; several if it is tied, of which one suffices.
        shape: shape of the whole; None for extra state, which is not a tensor.
        load: function that takes the whole.
    """

    names: Sequence[str]
    shape: torch.Size | None
    load: Callable[[Any], Any]


def plain_name(name: str) -> str:
    """Return the parameter's name without what `torch.compile` of a block puts into it."""
    return name.replace("_orig_mod.", "")


def whole(name: str, tensor: Tensor) -> Shard:
    """Describe a tensor that lies in full on every rank."""
    return Shard(plain_name(name), tensor.shape, 0, tensor, replicated=True)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor is its own."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """View `flat` with the parameter's shape and strides.

    If the parameter's strides leave holes in memory, the view has the order of its dimensions, and
    no holes. autograd accumulates in place only into a gradient that is laid out like its
    parameter.
    """
    dense = torch.empty_like(parameter, device="meta")
    return flat.as_strided(dense.shape, dense.stride())
