"""Shards: the elements of each parameter that a rank owns.

Strategies, optimizers and checkpoints share this description. `Shard` is a contiguous part of one
parameter. It carries the parameter's own name and the position of its first element in the unpadded
whole. A checkpoint can therefore be read under another strategy and world size without gathering.

`FlatLayout` plans shards: it puts parameters one after another into a flat buffer and gives each
rank an equal slice. `Cut` describes what tensor parallelism leaves on a rank. `Spread` tells an
optimizer that needs whole matrices which ranks hold the other parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# Key in an optimizer's state dict, and in each of its groups. Its value is the rank whose shards
# they hold (`state_dicts.py`).
NOTED_RANK = "shards"

Box = tuple[tuple[int, int], ...]  # (first, one past the last) of each dimension


@dataclass(frozen=True, eq=False)
class Shard:
    """A contiguous part, on this rank, of a flattened parameter, gradient or optimizer state.

    Attributes:
        name: the module's own name of the parameter, without the prefix that `torch.compile` of a
            block inserts.
        shape: shape of the whole parameter.
        start: position of the first element in the flattened whole. None if these elements are not
            a contiguous part of it.
        tensor: this rank's elements, with any number of dimensions. It may be empty. In a result of
            `ParallelModel.shards()` it is the tensor that the optimizer steps, and the key of the
            optimizer's `state`.
        replicated: True if every rank holds the same elements.
        copies: (index, number) of this rank among the ranks that hold the same elements, if only
            some ranks hold them.
        cut: the part of the parameter that this rank's model has. `start` then counts within that
            part. None: the model has all of it.
    """

    name: str
    shape: torch.Size
    start: int | None
    tensor: Tensor
    replicated: bool = False
    copies: tuple[int, int] = (0, 1)
    cut: Cut | None = None

    @property
    def values(self) -> Tensor:
        """Return this rank's memory as `(n,)`, a view.

        Raises:
            ValueError: the memory is not contiguous.
        """
        local = local_part(self.tensor.detach())
        if self.start is None or not local.is_contiguous():
            raise ValueError(
                f"'{self.name}' is not contiguous in memory; checkpoints hold tensors in row-major "
                "order"
            )
        return local.view(-1)

    @property
    def is_first(self) -> bool:
        """Return True if the first element of the whole is here, or if the whole has no elements.

        The rank for which this is True stores the state that belongs to the whole parameter, for
        example Adam's step.
        """
        if self.cut is not None and self.cut.ranges[0][0] != 0:
            return False
        if self.start != 0:
            return False
        return self.values.numel() > 0 or self.shape.numel() == 0

    def places(self) -> list[tuple[Box, int, slice]]:
        """Return the places of this shard's elements in the whole parameter.

        Returns:
            One entry for each box of the whole that the shard overlaps: the box, the position in
            the flattened box of the first element, and the slice of `values` that belongs there.
        """
        stop = self.start + self.values.numel()
        if self.cut is None:
            boxes = [_full_box(self.shape)]
        else:
            boxes = self.cut.boxes()
        found = []
        box_start = 0  # `start` counts the elements of all boxes, one box after another
        for box in boxes:
            box_stop = box_start + math.prod(last - first for first, last in box)
            first = max(self.start, box_start)
            last = min(stop, box_stop)
            if first < last:
                held = slice(first - self.start, last - self.start)
                found.append((box, first - box_start, held))
            box_start = box_stop
        return found

    def like(self, name: str, value: Tensor) -> Shard:
        """Return the same place of another tensor of this shape: a gradient, or optimizer state."""
        return replace(self, name=name, tensor=value)

    def portion(self, rank: int, ranks: int) -> Shard:
        """Return the part of this shard that this rank writes to a checkpoint.

        A rank writes all elements that it alone holds. If N ranks hold the same elements, each of
        them writes 1/N.

        Args:
            rank: this rank.
            ranks: number of ranks that hold every replicated shard.
        """
        if self.replicated:
            index, holders = rank, ranks
        elif self.copies[1] > 1:
            index, holders = self.copies
        else:
            return self
        values = self.values
        first = index * values.numel() // holders
        last = (index + 1) * values.numel() // holders
        return replace(
            self,
            start=self.start + first,
            tensor=values[first:last],
            replicated=False,
            copies=(0, 1),
        )


def whole(name: str, tensor: Tensor) -> Shard:
    """Return the shard of a tensor that every rank holds in full."""
    return Shard(plain_name(name), tensor.shape, 0, tensor, replicated=True)


class Loader(NamedTuple):
    """Destination of a whole tensor that is loaded.

    Attributes:
        names: names of the tensor. A tied tensor has several, and a state dict needs one of them.
        shape: shape of the whole tensor. None for extra state, which is not a tensor.
        load: function that loads the whole tensor.
    """

    names: Sequence[str]
    shape: torch.Size | None
    load: Callable[[Any], Any]


def plain_name(name: str) -> str:
    """Return the parameter's name without the prefix that `torch.compile` of a block inserts."""
    return name.replace("_orig_mod.", "")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# -- parameters that a tensor-parallel group shares -----------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The ranges of one dimension of a parameter that a rank of a tensor-parallel group keeps.

    Attributes:
        shape: shape of the whole parameter.
        dim: dimension along which the parameter is cut.
        ranges: (first, one past the last) of each range, in order. A parameter that consists of
            several matrices, such as q, k and v, has one range for each of them.
    """

    shape: torch.Size
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole parameter, as a contiguous copy."""
        parts = [whole.narrow(self.dim, first, last - first) for first, last in self.ranges]
        return torch.cat(parts, self.dim).contiguous()

    def joined(self, parts: Tensor) -> Tensor:
        """Return the whole parameter from all ranks' parts `(ranks, …)`, in rank order."""
        sizes = [last - first for first, last in self.ranges]
        pieces_of_ranks = [part.split(sizes, self.dim) for part in parts]
        # The whole has the first range of every rank, then the second range of every rank, …
        in_order = []
        for index in range(len(sizes)):
            for pieces in pieces_of_ranks:
                in_order.append(pieces[index])
        return torch.cat(in_order, self.dim)

    def boxes(self) -> list[Box]:
        """Return the place of each range in the whole.

        The boxes' elements, one box after another, are this rank's elements in memory order.
        """
        assert self.dim == 0 or len(self.ranges) == 1, (
            "several ranges of columns would alternate row by row"
        )
        full = _full_box(self.shape)
        return [(*full[: self.dim], each, *full[self.dim + 1 :]) for each in self.ranges]


def _full_box(shape: torch.Size) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple((0, size) for size in shape)


# -- optimizers that need whole matrices ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spread:
    """Division of one parameter's elements among the ranks of a group.

    An optimizer whose update needs the whole parameter gathers the other ranks' parts with it.

    Sharded strategies store it in the attribute `spread` of the tensors that their optimizer steps
    (`spread_of`). Rank 0 has the first elements in the order of the parameter's memory, rank 1 the
    next ones, and so on. Some ranks may have none.

    Attributes:
        like: tensor on the meta device with the shape and strides of the whole parameter.
        counts: number of elements on each rank, in the order of the ranks of `group`.
        group: process group whose ranks share the parameter.
    """

    like: Tensor
    counts: list[int]
    group: ProcessGroup

    def __reduce__(self) -> Any:
        """Pickle as an empty `torch.Size`, which `torch.load` accepts.

        A process group cannot be stored, and a shard that was loaded belongs to no group.
        """
        return torch.Size, ()


def spread_of(parameter: Tensor) -> Spread | None:
    """Return how ranks share this shard's parameter. None if this tensor is a whole parameter."""
    # `or None`: a shard that was pickled has an empty `torch.Size` here.
    return getattr(parameter, "spread", None) or None


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the whole parameter that this tensor is, or is a shard of."""
    spread = spread_of(parameter)
    return parameter.shape if spread is None else spread.like.shape


def part_of_whole(whole: Tensor, shard: Tensor) -> Tensor:
    """Return the elements of a whole tensor that belong to a shard, laid out like the shard.

    A view of `whole`, if that is laid out like the whole parameter.

    Args:
        whole: values for the whole parameter, such as its state, of its shape.
        shard: tensor that the optimizer steps, with its attribute `spread`.
    """
    spread = shard.spread
    first = sum(spread.counts[: spread.group.rank()])
    # Shards follow one another in the order of the parameter's memory.
    flat = whole.permute(memory_order(spread.like)).contiguous().view(-1)
    return view_like(flat[first : first + shard.numel()], shard)


# -- the plan of a flat buffer --------------------------------------------------------------------


class FlatLayout:
    """Parameters in a flat buffer of `world_size` equal slices.

    | parameter 0  | parameter 1             | gap | parameter 2 | extra | padding |
    | slice of rank 0      | slice of rank 1      | slice of rank 2               |

    Args:
        numels: number of elements of each parameter.
        world_size: number of slices.
        align: for each parameter, the number that the position of its first element is a multiple
            of. Default: no gaps.
        cut: number that the length of a slice is a multiple of.
        extra: number of elements after the parameters.

    Attributes:
        offsets: position of each parameter's first element.
        payload: number of elements up to the end of the last parameter.
        slice_numel: number of elements of a slice, padding included.
        numel: number of elements of the buffer.
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
        self.numels = tuple(numels)
        self.world_size = world_size
        self.offsets: list[int] = []
        self.payload = 0
        alignments = align or [1] * len(self.numels)
        for numel, alignment in zip(self.numels, alignments, strict=True):
            offset = round_up(self.payload, alignment)
            self.offsets.append(offset)
            self.payload = offset + numel
        even_slice = -(-(self.payload + extra) // world_size)  # rounded up
        self.slice_numel = round_up(even_slice, cut)
        self.numel = self.slice_numel * world_size

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return the shard of `rank` as a range of the elements of parameter `index`.

        Returns:
            The first element and one past the last. They are equal if the shard is empty.
        """
        numel = self.numels[index]
        start = rank * self.slice_numel - self.offsets[index]
        first = min(max(start, 0), numel)
        last = min(max(start + self.slice_numel, first), numel)
        return first, last

    def place(self, index: int, rank: int) -> slice:
        """Return the place of that shard in the slice of `rank`. That of an empty one is `0:0`."""
        first, last = self.shard_range(index, rank)
        if first == last:
            return slice(0, 0)
        start = self.offsets[index] + first - rank * self.slice_numel
        return slice(start, start + last - first)

    def spread(self, index: int, parameter: Tensor, group: ProcessGroup) -> Spread:
        """Return how the ranks of `group`, which own the slices, share parameter `index`."""
        counts = []
        for rank in range(self.world_size):
            first, last = self.shard_range(index, rank)
            counts.append(last - first)
        return Spread(torch.empty_like(parameter, device="meta"), counts, group)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """View `flat` with the parameter's shape and strides.

    If the parameter's strides leave holes in memory, the view has the order of its dimensions, and
    no holes. autograd accumulates in place only into a gradient that is laid out like its
    parameter.
    """
    dense = torch.empty_like(parameter, device="meta")
    return flat.as_strided(dense.shape, dense.stride())


def memory_order(parameter: Tensor) -> tuple[int, ...]:
    """Return the dimensions of `view_like(flat, parameter)`, from the outermost stride inwards."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))
