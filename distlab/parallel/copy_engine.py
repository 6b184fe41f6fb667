"""Bucketed data parallelism whose buckets are moved by copy engines instead of NCCL's kernels.

    compute        │ forward │ backward ─────────────────── │  │ optimizer │
    copy engines   │         │     │ bucket 0 │ bucket 1 │ … │  │
                                    pull ─ average ─ push

Plan, packing and flags are those of `BucketedDDP`. Copy engines replace NCCL: they read and write
the peers' buckets over NVLink (`comm.copy_engine`). So backward's matmuls have all the
multiprocessors, which they otherwise share with NCCL's kernels. The GPUs must be on one host and
reach each other's memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.copy_engine import CopyEngineTensors, check_copy_engines
from distlab.parallel.bucketed import AllReduce, BucketedDDP, GradientBucket
from distlab.parallel.buckets import BucketPlan


class CopyEngineDDP(BucketedDDP):
    """`BucketedDDP` for GPUs of one host, averaging by copy engines.

    Args:
        module: model to wrap, on a GPU; see `DataParallel` for checks and errors.
        bucket_size_mb: MiB of gradients per bucket. A transfer costs several launches, so larger
            buckets may be faster.
        process_group: all ranks. Default: the default group.

    Raises:
        ValueError: a bucket size that is not positive, a mesh, no GPU, or GPUs that do not reach
            each other's memory.
    """

    def _make_exchange(self) -> AllReduce:
        if self.mesh is not None:
            raise ValueError(
                "CopyEngineDDP works within one host: leave mesh out, or take BucketedDDP"
            )
        return CopyEngine(self.process_group, self.device)


class CopyEngine(AllReduce):
    """Averaging by copy engines, which take no multiprocessor from the computation.

    Raises:
        ValueError: no CUDA device, or GPUs that do not reach each other's memory (on every rank).
    """

    def __init__(self, group: ProcessGroup, device: torch.device):
        check_copy_engines(device, group)
        self._group, self._device = group, device
        self.slices = group.size()

    def buffers(self, plans: Sequence[BucketPlan]) -> list[Tensor]:
        """Return memory that all ranks map. A collective."""
        numels, dtypes = [plan.numel for plan in plans], [plan.dtype for plan in plans]
        self._engine = CopyEngineTensors(numels, dtypes, self._device, self._group)
        self.bytes_outside_allocator = self._engine.num_bytes
        self._number_of = {id(tensor): number for number, tensor in enumerate(self._engine.tensors)}
        return self._engine.tensors

    def start(self, ddp: BucketedDDP, bucket: GradientBucket) -> Any:
        """See `AllReduce.start`."""
        return self._engine.all_reduce_mean(self._number_of[id(bucket.seal())])
