"""Bucketed data parallelism whose buckets are moved by copy engines instead of NCCL's kernels.

    compute        │ forward │ backward ─────────────────── │  │ optimizer │
    copy engines   │         │     │ bucket 0 │ bucket 1 │ … │  │
                                    pull ─ average ─ push

Plan, packing and flags are those of `BucketedDDP`. Copy engines replace NCCL: they read and write
the peers' buckets over NVLink (`comm.copy_engine`), and backward's matmuls have all the
multiprocessors, which they share with NCCL's kernels otherwise. The GPUs must be on one host and
reach each other's memory.
"""

from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.exchange import CopyEngine, Exchange


class CopyEngineDDP(BucketedDDP):
    """`BucketedDDP` for GPUs of one host, averaging by copy engines.

    Args:
        module: the model to wrap, on a GPU; see `DataParallel` for checks and errors.
        bucket_size_mb: MiB of gradients per bucket; a transfer costs several launches, so larger
            ones may be faster.
        process_group: default: the default group.

    Raises:
        ValueError: a bucket size that is not positive, a mesh, no GPU, or GPUs that do not reach
            each other's memory.
    """

    def _exchange(self) -> Exchange:
        if self.mesh is not None:
            raise ValueError(
                "CopyEngineDDP works within one host: leave mesh out, or take BucketedDDP"
            )
        return CopyEngine(self.process_group, self.device)
