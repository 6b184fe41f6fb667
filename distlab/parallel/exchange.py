"""How the means of buckets travel between the ranks.

    AllReduce      every rank gets the whole mean, in one level or two
    CopyEngine     the same, moved by the GPUs' copy engines
    ReduceScatter  every rank gets its slice of the mean

A strategy calls `start(bucket)` when a bucket is full and `finish(bucket)` when the mean is needed;
neither it nor the placement of the parameters (`placement.py`) asks which exchange it has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.comm.copy_engine import CopyEngineAllReduce, check_copy_engines
from distlab.parallel.buckets import BucketPlan, GradientBucket


class Exchange(ABC):
    """What averages the buckets of one wrapper over a group of ranks.

    Attributes:
        layout: options of `plan_buckets` that it needs.
        shards_gradients: whether a rank gets a part of each mean only.
        bytes_outside_allocator: bytes of the buckets that torch's caching allocator does not count.
    """

    shards_gradients = False
    bytes_outside_allocator = 0

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.layout: dict[str, Any] = {}
        self._works: dict[GradientBucket, Any] = {}

    def buffers(self, plans: Sequence[BucketPlan]) -> Sequence[Tensor | None]:
        """Memory for the buckets, each `(plan.numel,)` zeros; None where any will do."""
        return [None] * len(plans)

    @abstractmethod
    def start(self, bucket: GradientBucket) -> None:
        """Start to average a bucket; all ranks start the same ones in the same order."""

    def finish(self, bucket: GradientBucket) -> None:
        """Wait for the mean, and leave it in the bucket.

        An error names the ranks that did not come.
        """
        collectives.wait(self._works.pop(bucket), self.group, "averaging gradients")
        bucket.unpack()


class AllReduce(Exchange):
    """Every rank gets the whole mean.

    Args:
        all_reduce: starts to average a tensor, such as `comm.two_level.all_reduce_on(groups)`.
    """

    def __init__(self, group: ProcessGroup, all_reduce: Callable[[Tensor], Any]):
        super().__init__(group)
        self._all_reduce = all_reduce

    def start(self, bucket: GradientBucket) -> None:
        """See `Exchange.start`."""
        self._works[bucket] = self._all_reduce(bucket.seal())


class CopyEngine(Exchange):
    """Every rank gets the whole mean, by copy engines, which take no multiprocessor from the computation.

    Raises:
        ValueError: no CUDA device, or GPUs that do not reach each other's memory (on every rank).
    """

    def __init__(self, group: ProcessGroup, device: torch.device):
        super().__init__(group)
        check_copy_engines(device, group)
        self._device = device
        self.layout = {"world_size": group.size()}

    def buffers(self, plans: Sequence[BucketPlan]) -> list[Tensor]:
        """Memory that all ranks map. A collective."""
        numels, dtypes = [plan.numel for plan in plans], [plan.dtype for plan in plans]
        self._engine = CopyEngineAllReduce(numels, dtypes, self._device, self.group)
        self.bytes_outside_allocator = self._engine.num_bytes
        self._number_of = {id(tensor): number for number, tensor in enumerate(self._engine.tensors)}
        return self._engine.tensors

    def start(self, bucket: GradientBucket) -> None:
        """See `Exchange.start`."""
        self._works[bucket] = self._engine.start(self._number_of[id(bucket.seal())])


class ReduceScatter(Exchange):
    """Every rank gets its slice of the mean; the rest of the buffer holds leftovers."""

    shards_gradients = True

    def __init__(self, group: ProcessGroup, device: torch.device):
        super().__init__(group)
        self.layout = {"world_size": group.size(), "has_flags": False}
        self._in_place = collectives.shards_in_place(device, group)
        # of the mean: in the bucket, and as it arrives
        self._slices: dict[GradientBucket, tuple[Tensor, Tensor]] = {}

    def start(self, bucket: GradientBucket) -> None:
        """See `Exchange.start`."""
        if bucket not in self._slices:
            mean = bucket.buffer[bucket.plan.slice_of(self.group.rank())]
            self._slices[bucket] = mean, mean if self._in_place else torch.empty_like(mean)
        _, arriving = self._slices[bucket]
        self._works[bucket] = collectives.reduce_scatter_mean(arriving, bucket.seal(), self.group)

    def finish(self, bucket: GradientBucket) -> None:
        """See `Exchange.finish`."""
        super().finish(bucket)
        mean, arrived = self._slices[bucket]
        if arrived is not mean:
            mean.copy_(arrived)
