"""Bucketed data parallelism: gradients packed into buckets, each all-reduced as soon as it is full.

    compute        │ forward │ backward ─────────────────── │         │ optimizer │
    communication  │         │      │ bucket 0 │ bucket 1 │ … │ last │           │

Few large messages (bandwidth instead of latency) that hide behind backward. What stays exposed is the last
bucket, which can only leave when backward ends, and whatever communication backward was too short to cover.

Each hook scales its gradient and copies it once into the bucket, and `.grad` becomes the view of it: letting
autograd make the gradient and copying costs two passes over memory, a view set beforehand would cost four
(zero it, read it, add, write). Buckets leave in plan order on every rank, whatever order the hooks fire in.

torch's DistributedDataParallel differs in three things: its first bucket is small (1 MiB) so that
communication starts early; after the first step it rebuilds the buckets in the order in which gradients were
seen to arrive (here: reversed registration order throughout); and a parameter unused on some rank is an error
there unless `find_unused_parameters` is given, which costs a walk through the graph in every step.
"""

from torch import nn
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.parallel.base import DataParallel
from distlab.parallel.buckets import BucketPlan, GradientBucket, check_bucket_size, plan_buckets


class BucketedDDP(DataParallel):
    """Averages gradients bucket by bucket during backward.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        bucket_size_mb: MiB of gradients per bucket, as torch's `bucket_cap_mb`; a parameter larger than that
            has a bucket of its own; None means one unbounded bucket per dtype.
        process_group: default: the default group.

    Raises:
        ValueError: a bucket size that is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        process_group: ProcessGroup | None = None,
    ):
        check_bucket_size(bucket_size_mb)
        super().__init__(module, process_group=process_group)
        self.plan: tuple[BucketPlan, ...] = plan_buckets(
            [parameter.numel() for parameter in self.trainable],
            [parameter.dtype for parameter in self.trainable],
            bucket_size_mb,
        )
        scale = collectives.mean_scale(self.device, self.process_group)
        self._buckets = [GradientBucket(bucket, self.trainable, scale) for bucket in self.plan]
        self._place = {  # parameter index → (its bucket, its position there)
            slot.index: (bucket, position)
            for bucket in self._buckets
            for position, slot in enumerate(bucket.plan.slots)
        }
        self._in_flight: list[Work] = []

    def _gradient_ready(self, index: int) -> None:
        bucket, position = self._place[index]
        bucket.pack(position)
        while len(self._in_flight) < len(self._buckets) and self._buckets[len(self._in_flight)].is_full:
            self._issue_next()

    def _issue_next(self) -> None:
        bucket = self._buckets[len(self._in_flight)]
        work = collectives.all_reduce_mean(bucket.seal(), self.process_group, prescaled=True)
        self._in_flight.append(work)

    def _synchronize(self) -> None:
        while len(self._in_flight) < len(self._buckets):
            self._issue_next()
        in_flight, self._in_flight = self._in_flight, []
        for bucket, work in zip(self._buckets, in_flight, strict=True):
            work.wait()
            bucket.unpack()
