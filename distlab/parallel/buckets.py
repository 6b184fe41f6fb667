"""Gradients packed into buckets: the pure plan, and the buffers that execute it.

A plan says which parameter lies where; it knows shapes and dtypes, not tensors, and is tested in one process.
`GradientBucket` holds the memory of one planned bucket:

    | grad of parameter 7 | grad of parameter 6 | … | used flags, one element per parameter | padding |

The flags ride along so that a parameter which some rank did not use needs no message of its own: after the
mean, a flag above zero says "somebody used it".
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.comm.two_level import Message
from distlab.parallel.shard import FlatLayout

MIB = 2**20


class BucketPlan(FlatLayout):
    """The layout of one bucket: gradients, then one flag for each, then padding to a multiple of the world size.

    Args:
        dtype: of every element.
        indices: the parameters' positions in the list that was planned, in the order in which gradients are expected.
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

    @property
    def num_bytes(self) -> int:
        """Bytes handed to the collective."""
        return self.numel * self.dtype.itemsize

    def slice_of(self, rank: int) -> slice:
        """The elements of `rank`'s slice."""
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
        ValueError: it is not positive or not a number.
    """
    if bucket_size_mb is not None and not bucket_size_mb > 0:
        raise ValueError(
            f"bucket_size_mb={bucket_size_mb}: give a positive number of MiB, or None for one unbounded bucket"
        )


def plan_buckets(
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    bucket_size_mb: float | None,
    *,
    order: Sequence[int] | None = None,
    world_size: int = 1,
    has_flags: bool = True,
) -> tuple[BucketPlan, ...]:
    """Cut the parameters into buckets of one dtype each, of at most `bucket_size_mb` MiB of gradients.

    Walks the parameters in `order` and closes a bucket before it would exceed the limit; a parameter larger
    than the limit has a bucket of its own. Buckets are returned in the order in which their last parameter
    comes, which is the order in which they can leave.

    Args:
        numels, dtypes: of each parameter, in registration order.
        bucket_size_mb: limit in MiB, as torch's `bucket_cap_mb`; None for one unbounded bucket per dtype.
        order: parameter indices in the order in which gradients are expected; default: reversed registration,
            because backward visits a model's layers roughly from last to first.
        world_size: every bucket's length is padded to a multiple of it.
        has_flags: whether each bucket carries its parameters' used flags.

    Raises:
        ValueError: a non-positive bucket size.
    """
    check_bucket_size(bucket_size_mb)
    limit = float("inf") if bucket_size_mb is None else bucket_size_mb * MIB
    order = range(len(numels) - 1, -1, -1) if order is None else order

    buckets: list[list[int]] = []
    filled: dict[torch.dtype, int] = {}  # elements in the last bucket of each dtype
    last: dict[torch.dtype, list[int]] = {}
    for index in order:
        dtype, numel = dtypes[index], numels[index]
        if dtype not in last or (filled[dtype] + numel) * dtype.itemsize > limit:
            last[dtype], filled[dtype] = [], 0
            buckets.append(last[dtype])
        last[dtype].append(index)
        filled[dtype] += numel
    position = {index: number for number, index in enumerate(order)}
    buckets.sort(key=lambda indices: position[indices[-1]])
    return tuple(
        BucketPlan(dtypes[indices[0]], indices, [numels[i] for i in indices], world_size, has_flags)
        for indices in buckets
    )


def write_used_flags(flags: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Mark in `flags` `(P,)` which of the P parameters have a gradient here: 1 if so, else 0."""
    flags.fill_(1.0)
    for i, parameter in enumerate(parameters):
        if parameter.grad is None:
            flags[i] = 0


def adopt_foreign_gradients(
    flags: Tensor, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> None:
    """After the mean: give parameters unused here the mean of the others' gradients, if any rank used them.

    Only a rank with an unused parameter reads a flag on the host; the usual step does not block.
    """
    for i, parameter in enumerate(parameters):
        if parameter.grad is None and flags[i].item() > 0:
            parameter.grad = gradients[i]


class GradientBucket:
    """The memory of one bucket: packs gradients, and makes each `.grad` a view of the packed buffer.

    Args:
        plan: the layout.
        parameters: all planned parameters; the plan picks those of this bucket.
        buffer: `(plan.numel,)` zeros that the caller allocated; default: allocated here.

    Attributes:
        missing: gradients that have not arrived in this step.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter], buffer: Tensor | None = None):
        self.plan = plan
        self.parameters = [parameters[index] for index in plan.indices]
        if buffer is None:
            buffer = torch.zeros(plan.numel, dtype=plan.dtype, device=self.parameters[0].device)
        self.buffer = buffer
        # `.data`: each with a version counter of its own, so that changes of one gradient can be told from the rest.
        self.views = [view.data for view in plan.views(self.buffer, self.parameters)]
        self.flags = self.buffer[plan.payload : plan.payload + len(plan.indices)] if plan.has_flags else None
        self._await()

    def add(self, position: int) -> None:
        """The gradient at `position` of the plan has arrived."""
        self.missing -= 1
        _pack(self.parameters[position], self.views[position])

    def seal(self) -> Tensor:
        """Pack what has not arrived, write the flags, and return the buffer, ready to be sent."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                _pack(parameter, view)
        if self.flags is not None:
            write_used_flags(self.flags, self.parameters)
        return self.buffer

    def unpack(self) -> None:
        """After the mean has arrived: adopt gradients of parameters that only other ranks used; await the next ones."""
        if self.flags is not None:
            adopt_foreign_gradients(self.flags, self.parameters, self.views)
        self._await()

    def _await(self) -> None:
        """Let who computes a gradient write it straight into the bucket, if it can (`model.ops.gradient_target`)."""
        self.missing = len(self.views)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.gradient_target = view

    def release(self) -> None:
        """Offer this memory to nobody any more."""
        for parameter in self.parameters:
            parameter.__dict__.pop("gradient_target", None)


def average(
    buckets: Sequence[GradientBucket], all_reduce: Callable[[Tensor], Work | Message], group: ProcessGroup
) -> None:
    """Send all buckets at once, and leave the means over the group's ranks in `.grad`. Blocks on gloo."""
    works = [all_reduce(bucket.seal()) for bucket in buckets]
    for bucket, work in zip(buckets, works, strict=True):
        collectives.wait(work, group, "averaging gradients")
        bucket.unpack()


def _pack(parameter: nn.Parameter, view: Tensor) -> None:
    """Make `.grad` the view of the bucket, with its values, unless they were written or accumulated there."""
    gradient = parameter.grad
    in_bucket = gradient.untyped_storage()._cdata == view.untyped_storage()._cdata
    if not in_bucket or gradient.storage_offset() != view.storage_offset():
        view.copy_(gradient)
    parameter.grad = view


def view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """View `flat` with the parameter's shape, and its strides, or their order where they leave holes in the memory.

    autograd accumulates in place only into a gradient that is laid out like its parameter.
    """
    dense = torch.empty_like(parameter, device="meta")
    return flat.as_strided(dense.shape, dense.stride())
