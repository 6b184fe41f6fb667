"""Flat data parallelism: after backward, all gradients in one buffer, one all-reduce.

    compute        │ forward │ backward │ pack │                        │ optimizer │
    communication  │         │          │      │ p0 p1 p2 … flags       │           │

One large message runs at the link's full bandwidth, yet all of it is still exposed: it starts after backward.
"""

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.parallel.buckets import GradientBucket, average, plan_buckets
from distlab.parallel.data_parallel import DataParallel


class FlatDDP(DataParallel):
    """Averages all gradients in one message per dtype in `finish_gradient_synchronization()`.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        mesh, process_group: see `DataParallel`.
    """

    def __init__(
        self, module: nn.Module, *, mesh: DeviceMesh | None = None, process_group: ProcessGroup | None = None
    ):
        super().__init__(module, mesh=mesh, process_group=process_group)
        plan = plan_buckets(
            [parameter.numel() for parameter in self.trainable],
            [parameter.dtype for parameter in self.trainable],
            bucket_size_mb=None,
        )
        self._buckets = [GradientBucket(bucket, self.trainable) for bucket in plan]

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook; see `DataParallel.close`."""
        super().close()
        for bucket in self._buckets:
            bucket.release()

    def _synchronize(self) -> None:
        average(self._buckets, self._all_reduce, self.process_group)
