"""torch's DistributedDataParallel behind the interface of our strategies, so that one loop drives both."""

import gc
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
        process_group: default: the default group.
        options: torch's own, e.g. `bucket_cap_mb=100.0, gradient_as_bucket_view=True, static_graph=True`. With
            none, torch's defaults: buckets of 25 MiB after a first one of 1 MiB.
    """

    def __init__(self, module: nn.Module, *, process_group: ProcessGroup | None = None, **options: Any):
        super().__init__()
        self.module = module
        group = collectives.resolve_group(process_group)
        self.ddp = DistributedDataParallel(module, process_group=group, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager:
        """Backward passes inside accumulate locally, as in torch."""
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
        gc.collect()  # a reference cycle would keep its buckets' memory


def tuned_torch_ddp(
    module: nn.Module, bucket_size_mb: float | None = 25.0, *, process_group: ProcessGroup | None = None
) -> TorchDDP:
    """torch DDP as its documentation advises where the graph never changes.

    Gradients are views of the buckets (no copy back) and the graph is declared static (no search for unused
    parameters, and buckets rebuilt in observed order). Giving `bucket_cap_mb`, even torch's own 25, makes the
    first bucket as large as the others.

    Args:
        bucket_size_mb: torch's `bucket_cap_mb`, MiB; None for one unbounded bucket.

    Raises:
        ValueError: a bucket size that is not positive.
    """
    check_bucket_size(bucket_size_mb)
    cap = UNBOUNDED_MB if bucket_size_mb is None else bucket_size_mb
    options = {"bucket_cap_mb": cap, "gradient_as_bucket_view": True, "static_graph": True}
    return TorchDDP(module, process_group=process_group, **options)
