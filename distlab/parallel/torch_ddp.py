"""torch's DistributedDataParallel behind the interface of our strategies, so that one loop drives both."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import collectives
from distlab.parallel.buckets import check_bucket_size

UNBOUNDED_MB = 2.0**20  # torch has no "unbounded"; no model's gradients reach a tebibyte


class TorchDDP(nn.Module):
    """The production peer.

    Args:
        module: the model to wrap.
        bucket_size_mb: torch's `bucket_cap_mb`; None for one unbounded bucket.
        process_group: default: the default group.
        options: passed on, e.g. `gradient_as_bucket_view=True, static_graph=True`.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ):
        check_bucket_size(bucket_size_mb)
        super().__init__()
        self.module = module
        cap = UNBOUNDED_MB if bucket_size_mb is None else bucket_size_mb
        group = collectives.resolve_group(process_group)
        self.ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=cap, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager:
        return self.ddp.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """torch waits for its buckets at the end of backward; nothing is left to do."""

    def sync_buffers(self) -> None:
        """Overwrite all buffers by those of rank 0."""
        collectives.broadcast_all(self.module.buffers(), self.ddp.process_group)

    def close(self) -> None:
        """Detach torch's hooks, so that the module can be wrapped again."""
        self.ddp._remove_autograd_hooks()
        del self.ddp
