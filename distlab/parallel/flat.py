"""Flat data parallelism: after backward, all gradients in one buffer, one all-reduce.

    compute        │ forward │ backward │ pack │                        │ optimizer │
    communication  │         │          │      │ p0 p1 p2 … flags       │           │

One large message uses the link's full bandwidth, but all of it is exposed, because it starts after
backward.
"""

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.comm import collectives
from distlab.parallel.bucketed import GradientBucket, withdraw_targets
from distlab.parallel.buckets import plan_of
from distlab.parallel.ddp import DataParallel


class FlatDDP(DataParallel):
    """Averages all gradients in one message per dtype in `finish_gradient_synchronization()`.

    Args:
        module: model to wrap; see `DataParallel` for checks and errors.
        mesh, process_group: see `DataParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__(module, mesh=mesh, process_group=process_group)
        plans = plan_of(self.trainable, bucket_size_mb=None)
        self._buckets = [GradientBucket(plan, self.trainable) for plan in plans]
        self._used = None  # the buckets carry the flags

    def _synchronize(self) -> None:
        started = [self.all_reduce_mean(bucket.seal()) for bucket in self._buckets]
        for bucket, work in zip(self._buckets, started, strict=True):
            collectives.wait(work, self.process_group, "averaging gradients")
            bucket.unpack()

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook; see `DataParallel.close`."""
        withdraw_targets(self.trainable)
        super().close()
