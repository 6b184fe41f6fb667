"""Gradients packed into buckets: the pure plan, and the buffers that execute it.

A plan says which parameter lies where; it knows shapes and dtypes, not tensors, and is tested in
one process. `GradientBucket` holds the memory of one planned bucket:

    | grad of parameter 7 | grad of parameter 6 | … | used flags, one element per parameter | padding |

The flags ride along so that a parameter which some rank did not use needs no message of its own:
after the mean, a flag above zero says "somebody used it".
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distlab.parallel.shard import FlatLayout

MIB = 2**20


class BucketPlan(FlatLayout):
    """The layout of one bucket: gradients, then one flag for each, then padding to a multiple of the world size.

    Args:
        dtype: of every element.
        indices: the parameters' positions in the list that was planned, in the order in which
            gradients are expected.
        numels: elements of these parameters.
        world_size: the bucket can be cut into as many equal slices.
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
        """Of a buffer `(numel,)`, each parameter's part, shaped and laid out like the parameter."""
        return [
            view_like(buffer[offset : offset + numel], parameter)
            for offset, numel, parameter in zip(self.offsets, self.numels, parameters, strict=True)
        ]


def check_bucket_size(bucket_size_mb: float | None) -> None:
    """Refuse a bucket size that is no positive number of MiB (None means unbounded).

    Raises:
        TypeError: it is no number, for example a process group that was given by position.
        ValueError: it is not positive.
    """
    if bucket_size_mb is not None and not isinstance(bucket_size_mb, int | float):
        raise TypeError(
            f"bucket_size_mb is a {type(bucket_size_mb).__name__}: give a number of MiB or None. A process group is "
            "given by name, process_group=..."
        )
    if bucket_size_mb is not None and not bucket_size_mb > 0:
        raise ValueError(
            f"bucket_size_mb={bucket_size_mb}: give a positive number of MiB, or None for one unbounded bucket"
        )


def plan_buckets(
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    bucket_size_mb: float | None,
    *,
    world_size: int = 1,
    has_flags: bool = True,
) -> tuple[BucketPlan, ...]:
    """Cut the parameters into buckets of one dtype each, of at most `bucket_size_mb` MiB of gradients.

    Walks the parameters in reversed registration order, because backward visits a model's layers
    roughly from last to first, and closes a bucket before it would exceed the limit; a parameter
    larger than the limit has a bucket of its own. Buckets are returned in the order in which their
    last parameter comes, which is the order in which they can leave.

    Args:
        numels, dtypes: of each parameter, in registration order.
        bucket_size_mb: limit in MiB, as torch's `bucket_cap_mb`; None for one unbounded bucket per
            dtype.
        world_size: every bucket's length is padded to a multiple of it.
        has_flags: whether each bucket carries its parameters' used flags.

    Raises:
        ValueError: a non-positive bucket size.
    """
    check_bucket_size(bucket_size_mb)
    limit = float("inf") if bucket_size_mb is None else bucket_size_mb * MIB

    buckets: list[list[int]] = []
    filled: dict[torch.dtype, int] = {}  # elements in the last bucket of each dtype
    last: dict[torch.dtype, list[int]] = {}
    for index in reversed(range(len(numels))):
        dtype, numel = dtypes[index], numels[index]
        if dtype not in last or (filled[dtype] + numel) * dtype.itemsize > limit:
            last[dtype], filled[dtype] = [], 0
            buckets.append(last[dtype])
        last[dtype].append(index)
        filled[dtype] += numel
    buckets.sort(key=lambda indices: -indices[-1])
    return tuple(
        BucketPlan(dtypes[indices[0]], indices, [numels[i] for i in indices], world_size, has_flags)
        for indices in buckets
    )


def plan_of(
    parameters: Sequence[Tensor], bucket_size_mb: float | None, **options: Any
) -> tuple[BucketPlan, ...]:
    """`plan_buckets` of these parameters; `options` are its other arguments."""
    numels, dtypes = (
        [parameter.numel() for parameter in parameters],
        [parameter.dtype for parameter in parameters],
    )
    return plan_buckets(numels, dtypes, bucket_size_mb, **options)


class UsedFlags:
    """Which parameters some rank used: one flag for each, averaged beside the gradients.

    A parameter that this rank did not use is sent as zeros. After the mean, its flag says whether
    another rank used it: then it has a gradient here too; one that no rank used keeps `.grad =
    None`, and optimizers leave it alone.

    Args:
        parameters: P of them.
        flags: `(P,)`, of any floating-point dtype.

    Attributes:
        unused: positions of the parameters that this rank did not use in this step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flags: Tensor):
        self.flags = flags
        self._parameters = parameters
        self.unused: list[int] = []

    def write(self) -> Tensor:
        """Write 1 for every parameter that has a gradient here, else 0; returns the flags, to be averaged."""
        self.unused = [
            index for index, parameter in enumerate(self._parameters) if parameter.grad is None
        ]
        self.flags.fill_(1.0)
        for index in self.unused:
            self.flags[index] = 0
        return self.flags

    def adopt(self, mean_of: Callable[[int], Tensor]) -> None:
        """After the mean: give parameters unused here the mean of the others' gradients, if any rank used them.

        Only a rank with an unused parameter reads a flag on the host; the usual step does not
        block.
        """
        for index in self.unused:
            if self.flags[index].item() > 0:
                self._parameters[index].grad = mean_of(index)


class GradientBucket:
    """The memory of one bucket: packs gradients, and makes each `.grad` a view of the packed buffer.

    Args:
        plan: the layout.
        parameters: all planned parameters; the plan picks those of this bucket.
        buffer: `(plan.numel,)` zeros; None: made here.

    Attributes:
        missing: gradients that have not arrived in this step.
        views: each parameter's part of the buffer.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[nn.Parameter], buffer: Tensor | None = None
    ):
        self.plan = plan
        self.parameters = [parameters[index] for index in plan.indices]
        if buffer is None:
            buffer = torch.zeros(plan.numel, dtype=plan.dtype, device=self.parameters[0].device)
        self.buffer = buffer
        # `.data`: each with a version counter of its own, so that changes of one gradient can be
        # told from the rest.
        self.views = [view.data for view in plan.views(self.buffer, self.parameters)]
        flags = self.buffer[plan.payload : plan.payload + len(plan.indices)]
        self._used = UsedFlags(self.parameters, flags) if plan.has_flags else None
        self.unpack()

    def add(self, position: int) -> None:
        """Copy the gradient at `position` of the plan to its place, which `.grad` is from then on."""
        self.missing -= 1
        parameter, view = self.parameters[position], self.views[position]
        gradient = parameter.grad
        in_bucket = gradient.untyped_storage()._cdata == view.untyped_storage()._cdata
        # else written or accumulated there
        if not in_bucket or gradient.storage_offset() != view.storage_offset():
            view.copy_(gradient)
        parameter.grad = view

    def seal(self) -> Tensor:
        """Pack what has not arrived, write the flags, and return the buffer, ready to be sent."""
        for position, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                self.add(position)
        if self._used is not None:
            self._used.write()
        return self.buffer

    def unpack(self) -> None:
        """After the mean has arrived: adopt gradients of parameters that only other ranks used; await the next ones.

        Who computes a gradient may write it straight into the bucket, if it can
        (`model.ops.gradient_target`).
        """
        if self._used is not None and self._used.unused:
            self._used.adopt(self.views.__getitem__)
        self.missing = len(self.views)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.gradient_target = view


def withdraw_targets(parameters: Sequence[nn.Parameter]) -> None:
    """Offer no bucket's memory to who computes these gradients any more."""
    for parameter in parameters:
        parameter.__dict__.pop("gradient_target", None)


def view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """View `flat` with the parameter's shape, and its strides, or their order where they leave holes in the memory.

    autograd accumulates in place only into a gradient that is laid out like its parameter.
    """
    dense = torch.empty_like(parameter, device="meta")
    return flat.as_strided(dense.shape, dense.stride())
