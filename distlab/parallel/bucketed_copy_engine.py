"""Bucketed data parallelism whose buckets are moved by copy engines instead of NCCL's kernels.

    compute        │ forward │ backward ─────────────────── │  │ optimizer │
    copy engines   │         │     │ bucket 0 │ bucket 1 │ … │  │
                                    pull ─ average ─ push

Plan, packing and flags are those of `BucketedDDP`. Copy engines replace NCCL: they read and write the peers' buckets
over NVLink (`comm.copy_engine`), and backward's matmuls have all the multiprocessors, which they share with NCCL's
kernels otherwise. The GPUs must be on one host and reach each other's memory.
"""

from typing import Any

from distlab.comm.copy_engine import CopyEngineAllReduce, check_copy_engines
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.buckets import GradientBucket
from distlab.parallel.sharded_buckets import ShardedBuckets


class CopyEngineDDP(BucketedDDP):
    """`BucketedDDP` for GPUs of one host, averaging by copy engines.

    Args:
        module: the model to wrap, on a GPU; see `DataParallel` for checks and errors.
        bucket_size_mb: MiB of gradients per bucket; a transfer costs several launches, so larger ones may be faster.
        process_group: default: the default group.

    Raises:
        ValueError: a bucket size that is not positive, a mesh, no GPU, or GPUs that do not reach each other's memory.
    """

    @property
    def bytes_outside_allocator(self) -> int:
        """Bytes of this GPU that the buckets take and torch's caching allocator does not count."""
        return self._exchange.num_bytes

    def shard(self) -> ShardedBuckets:
        """Refused: what `ZeroOptimizer` needs is a reduce-scatter.

        Raises:
            ValueError: always.
        """
        raise ValueError("CopyEngineDDP only all-reduces: give ZeroOptimizer a BucketedDDP")

    def _lay_out(self, **padding: Any) -> None:
        if self.mesh is not None:
            raise ValueError("CopyEngineDDP works within one host: leave mesh out, or take BucketedDDP")
        check_copy_engines(self.device, self.process_group)
        super()._lay_out(world_size=self.process_group.size(), **padding)
        self.allocate()  # here, where all ranks are, because they map each other's memory

    def _take_memory(self) -> list[GradientBucket]:
        numels, dtypes = [bucket.numel for bucket in self.plan], [bucket.dtype for bucket in self.plan]
        self._exchange = CopyEngineAllReduce(numels, dtypes, self.device, self.process_group)
        return [
            GradientBucket(bucket, self.trainable, buffer)
            for bucket, buffer in zip(self.plan, self._exchange.tensors, strict=True)
        ]

    def _issue_next(self) -> None:
        number = len(self._in_flight)
        self._buckets[number].seal()
        self._in_flight.append(self._exchange.start(number))
