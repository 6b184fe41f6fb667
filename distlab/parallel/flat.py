"""Flat data parallelism: after backward, all gradients in one buffer, one all-reduce.

    compute        │ forward │ backward │ pack │                        │ optimizer │
    communication  │         │          │      │ p0 p1 p2 … flags       │           │

One large message runs at the link's full bandwidth, yet all of it is still exposed: it starts after
backward.
"""

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.parallel.buckets import GradientBucket, plan_of
from distlab.parallel.data_parallel import DataParallel


class FlatDDP(DataParallel):
    """Averages all gradients in one message per dtype in `finish_gradient_synchronization()`.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
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
        self._buckets = [
            GradientBucket(plan, self.trainable) for plan in plan_of(self.trainable, None)
        ]
        self._used = None  # the buckets carry the flags

    def _synchronize(self) -> None:
        started = {bucket: self.all_reduce(bucket.seal()) for bucket in self._buckets}
        for bucket, message in started.items():
            message.wait()
            bucket.unpack()
