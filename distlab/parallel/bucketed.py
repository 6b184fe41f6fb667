"""Bucketed data parallelism: gradients packed into buckets, each all-reduced as soon as it is full.

    compute        │ forward │ backward ─────────────────── │         │ optimizer │
    communication  │         │      │ bucket 0 │ bucket 1 │ … │ last │           │

Few large messages (bandwidth instead of latency) that hide behind backward. What stays exposed is
the last bucket, which can only leave when backward ends, and whatever communication backward was
too short to cover.

Each hook copies its gradient once into the bucket, and `.grad` becomes the view of it: letting
autograd make the gradient and copying costs two passes over memory, a view set beforehand would
cost four (zero it, read it, add, write). On a GPU our linear layers avoid even the copy: they write
their weight's gradient directly into the bucket (`model.ops.gradient_target`). Buckets leave in
plan order on every rank, whatever order the hooks fire in.

torch's DistributedDataParallel differs in three things: its first bucket is small (1 MiB) so that
communication starts early; after the first step it rebuilds the buckets in the order in which
gradients were seen to arrive (here: reversed registration order throughout); and a parameter unused
on some rank is an error there unless `find_unused_parameters` is given, which costs a walk through
the graph in every step.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distlab.parallel.base import Gradients
from distlab.parallel.buckets import (
    BucketPlan,
    GradientBucket,
    check_bucket_size,
    plan_of,
    withdraw_targets,
)
from distlab.parallel.data_parallel import DataParallel
from distlab.parallel.exchange import AllReduce, Exchange
from distlab.parallel.placement import Whole
from distlab.parallel.shard import Shard


class BucketedDDP(DataParallel):
    """Averages gradients bucket by bucket during backward.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        bucket_size_mb: MiB of gradients per bucket, as torch's `bucket_cap_mb`; a parameter larger
            than that has a bucket of its own; None means one unbounded bucket per dtype.
        mesh, process_group: see `DataParallel`.

    Attributes:
        exchange: how means travel (`exchange.py`).
        placement: where parameters live (`placement.py`).
        plan: what lies in which bucket.
        buckets: in the order in which they leave.

    Raises:
        ValueError: a bucket size that is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ):
        check_bucket_size(bucket_size_mb)
        super().__init__(module, mesh=mesh, process_group=process_group)
        self.bucket_size_mb = bucket_size_mb
        self.placement = Whole()
        self.buckets: list[GradientBucket] = []
        self.lay_out(self._exchange())

    def _exchange(self) -> Exchange:
        return AllReduce(self.process_group, self.all_reduce)

    def lay_out(self, exchange: Exchange) -> None:
        """Plan the buckets as this exchange needs them, and take their memory."""
        withdraw_targets(self.trainable)
        self.buckets, self._place = [], {}  # whose memory goes before other memory comes
        self.unsent.clear()
        self.exchange, self.shards_gradients = exchange, exchange.shards_gradients
        self.plan: tuple[BucketPlan, ...] = plan_of(
            self.trainable, self.bucket_size_mb, **exchange.layout
        )
        self._used = None if self.plan[0].has_flags else self._flags_apart()
        for plan, buffer in zip(self.plan, self.exchange.buffers(self.plan), strict=True):
            self.buckets.append(GradientBucket(plan, self.trainable, buffer))
        self._place = {  # parameter index → (its bucket, its position there)
            index: (bucket, position)
            for bucket in self.buckets
            for position, index in enumerate(bucket.plan.indices)
        }
        self.unsent.extend(self.buckets)

    # -- a gradient's way ----------------------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        bucket, position = self._place[index]
        bucket.add(position)  # `.grad` is a view of the bucket now
        if self.guard.may_send(index):
            while self.unsent and not self.unsent[0].missing:
                self.exchange.start(self.unsent.popleft())

    def _send_next(self) -> None:
        self.exchange.start(self.unsent.popleft())

    def _synchronize(self) -> None:
        self.unsent.extend(self.buckets)
        for bucket in self.buckets:
            self.exchange.finish(bucket)

    def mean_of(self, index: int) -> Tensor:
        """Return the gradient's place in a bucket; see `DataParallel.mean_of`."""
        bucket, position = self._place[index]
        return bucket.views[position]

    @torch.no_grad()
    def adopt_gradients(self) -> None:
        """Copy gradients that were put into `.grad` by hand to their places in the buckets."""
        for index, parameter in enumerate(self.trainable):
            view = self.mean_of(index)
            if parameter.grad is not None and parameter.grad is not view:
                parameter.grad = view.copy_(parameter.grad)

    # -- parameters, wherever they live ----------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """What this rank holds of every parameter."""
        return self.placement.shards(super().shards())

    def gradients(self) -> Gradients:
        """See `ParallelModel.gradients`."""
        self.placement.point_gradients()
        return super().gradients()

    def shards_changed(self) -> None:
        """Make the parameters whole again; reading one waits for it."""
        self.placement.gather()

    def synchronize(self) -> None:
        """Wait until all parameters are whole."""
        self.placement.wait()

    @property
    def bytes_outside_allocator(self) -> int:
        """Bytes of this GPU that the buckets take and torch's caching allocator does not count."""
        return self.exchange.bytes_outside_allocator

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook; see `DataParallel.close`."""
        self.placement.close()
        super().close()
