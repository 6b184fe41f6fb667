"""The plan of gradient buckets: which parameter has which place in which bucket.

It knows shapes and dtypes, not tensors, and is tested in one process. `bucketed.py` has the memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.parallel.shard import FlatLayout, view_like

MIB = 2**20


def plan_of(
    parameters: Sequence[Tensor],
    bucket_size_mb: float | None,
    *,
    world_size: int = 1,
    has_flags: bool = True,
) -> "tuple[BucketPlan, ...]":
    """Plan buckets for these parameters; see `plan_buckets`."""
    return plan_buckets(
        [parameter.numel() for parameter in parameters],
        [parameter.dtype for parameter in parameters],
        bucket_size_mb,
        world_size=world_size,
        has_flags=has_flags,
    )


def plan_buckets(
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    bucket_size_mb: float | None,
    *,
    world_size: int = 1,
    has_flags: bool = True,
) -> "tuple[BucketPlan, ...]":
    """Cut the parameters into buckets of one dtype each, of at most `bucket_size_mb` MiB.

    Walks the parameters in reversed registration order, because backward visits a model's layers
    roughly from last to first, and closes a bucket before it would exceed the limit. A parameter
    larger than the limit has a bucket of its own.

    Args:
        numels, dtypes: elements and dtype of each parameter, in registration order.
        bucket_size_mb: limit in MiB of gradients, as torch's `bucket_cap_mb`. None gives one
            unbounded bucket per dtype.
        world_size: number that every bucket's length is padded to a multiple of.
        has_flags: True if each bucket carries its parameters' used flags.

    Returns:
        Buckets in the order in which their last parameter comes, which is the order in which they
        can leave.

    Raises:
        ValueError: a bucket size that is not positive.
    """
    check_bucket_size(bucket_size_mb)
    limit_bytes = float("inf") if bucket_size_mb is None else bucket_size_mb * MIB

    buckets: list[list[int]] = []
    open_bucket: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}  # elements in the open bucket of each dtype
    for index in reversed(range(len(numels))):
        dtype, numel = dtypes[index], numels[index]
        too_large = dtype in filled and (filled[dtype] + numel) * dtype.itemsize > limit_bytes
        if dtype not in filled or too_large:
            open_bucket[dtype] = []
            filled[dtype] = 0
            buckets.append(open_bucket[dtype])
        open_bucket[dtype].append(index)
        filled[dtype] += numel
    # Buckets of several dtypes fill at the same time. The last parameter of a bucket decides.
    buckets.sort(key=lambda indices: -indices[-1])

    plans = []
    for indices in buckets:
        numels_here = [numels[index] for index in indices]
        plans.append(BucketPlan(dtypes[indices[0]], indices, numels_here, world_size, has_flags))
    return tuple(plans)


def check_bucket_size(bucket_size_mb: float | None) -> None:
    """Check that a bucket size is a positive number of MiB, or None for unbounded.

    Raises:
        TypeError: it is not a number, for example a process group that was given by position.
        ValueError: it is not positive.
    """
    if bucket_size_mb is None:
        return
    if not isinstance(bucket_size_mb, int | float):
        raise TypeError(
            f"bucket_size_mb is a {type(bucket_size_mb).__name__}: give a number of MiB or None. A "
            "process group is given by name, process_group=..."
        )
    if not bucket_size_mb > 0:  # also refuses nan
        raise ValueError(
            f"bucket_size_mb={bucket_size_mb}: give a positive number of MiB, or None for one "
            "unbounded bucket"
        )


class BucketPlan(FlatLayout):
    """Layout of one bucket: gradients, then one flag for each, then padding.

    Args:
        dtype: dtype of every element.
        indices: positions of the bucket's parameters in the list that was planned, in the order in
            which gradients are expected.
        numels: elements of these parameters.
        world_size: number of equal slices that the bucket can be cut into.
        has_flags: False leaves the flags out, where they are sent separately.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        indices: Sequence[int],
        numels: Sequence[int],
        world_size: int = 1,
        has_flags: bool = True,
    ):
        super().__init__(numels, world_size, extra=len(indices) if has_flags else 0)
        self.dtype, self.indices, self.has_flags = dtype, tuple(indices), has_flags

    def slice_of(self, rank: int) -> slice:
        """Return the elements of `rank`'s slice."""
        return slice(rank * self.slice_numel, (rank + 1) * self.slice_numel)

    def views(self, buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return each parameter's part of a buffer `(numel,)`, shaped and laid out like it."""
        views = []
        for offset, numel, parameter in zip(self.offsets, self.numels, parameters, strict=True):
            views.append(view_like(buffer[offset : offset + numel], parameter))
        return views
