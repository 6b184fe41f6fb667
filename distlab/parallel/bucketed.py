"""Bucketed data parallelism: gradients packed into buckets, each all-reduced as soon as it is full.

    compute        │ forward │ backward ─────────────────── │         │ optimizer │
    communication  │         │      │ bucket 0 │ bucket 1 │ … │ last │           │

Few large messages (bandwidth instead of latency) that hide behind backward. What stays exposed is the last
bucket, which can only leave when backward ends, and whatever communication backward was too short to cover.

Each hook scales its gradient and copies it once into the bucket, and `.grad` becomes the view of it: letting
autograd make the gradient and copying costs two passes over memory, a view set beforehand would cost four
(zero it, read it, add, write). Our linear layers spare even the copy on a GPU: they write their weight's gradient where
the bucket wants it (`model.ops.gradient_target`). Buckets leave in plan order on every rank, whatever order the hooks
fire in.

torch's DistributedDataParallel differs in three things: its first bucket is small (1 MiB) so that
communication starts early; after the first step it rebuilds the buckets in the order in which gradients were
seen to arrive (here: reversed registration order throughout); and a parameter unused on some rank is an error
there unless `find_unused_parameters` is given, which costs a walk through the graph in every step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel.base import DataParallel
from distlab.parallel.buckets import (
    BucketPlan,
    GradientBucket,
    adopt_foreign_gradients,
    check_bucket_size,
    plan_buckets,
    write_used_flags,
)
from distlab.parallel.partial_gradients import PartialGradients


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
        self.bucket_size_mb = bucket_size_mb
        self._in_flight: list[Work] = []
        self.gradient_shards: list[Tensor] | None = None
        self.partial_gradients: PartialGradients | None = None
        self._lay_out()

    def _lay_out(self, **padding: Any) -> None:
        """Plan the buckets and take their memory."""
        self.plan: tuple[BucketPlan, ...] = plan_buckets(
            [parameter.numel() for parameter in self.trainable],
            [parameter.dtype for parameter in self.trainable],
            self.bucket_size_mb,
            **padding,
        )
        self._buckets = self._take_memory()
        self._place = {  # parameter index → (its bucket, its position there)
            slot.index: (bucket, position)
            for bucket in self._buckets
            for position, slot in enumerate(bucket.plan.slots)
        }

    def _take_memory(self) -> list[GradientBucket]:
        scale = collectives.mean_scale(self.device, self.process_group)
        return [GradientBucket(bucket, self.trainable, scale) for bucket in self.plan]

    def shard_gradients(self) -> None:
        """From now on reduce-scatter the buckets: each rank gets its slice of every mean and nothing else.

        `gradient_shards[b]`, this rank's slice of bucket b, then holds means after
        `finish_gradient_synchronization()`. The same memory is part of `.grad`, whose other parts hold leftovers;
        see `PartialGradients`. The used flags go in one message of their own.
        """
        self._lay_out(world_size=self.process_group.size(), has_flags=False)
        rank = self.process_group.rank()
        self.gradient_shards = [
            bucket.buffer[slice(*bucket.plan.shard_range(rank))] for bucket in self._buckets
        ]
        in_place = collectives.shards_in_place(self.device, self.process_group)
        self._received = [shard if in_place else torch.empty_like(shard) for shard in self.gradient_shards]
        self._flags = torch.empty(len(self.trainable), device=self.device)
        places = [self._place[index] for index in range(len(self.trainable))]
        views = [bucket.views[position] for bucket, position in places]
        self.partial_gradients = PartialGradients(self.trainable_names, self.trainable, views)

    def check_step(self, optimizer: Optimizer) -> None:
        """See `DataParallel.check_step`; also raises for an optimizer that takes a part of the mean for the whole."""
        super().check_step(optimizer)
        if self.partial_gradients is not None:
            self.partial_gradients.check_optimizer(optimizer)

    def close(self) -> None:
        """Detach every hook; see `DataParallel.close`."""
        super().close()
        for bucket in self._buckets:
            bucket.release()

    def _on_gradient(self, index: int) -> None:
        if self.partial_gradients is not None:
            self.partial_gradients.check_added(index)
        super()._on_gradient(index)

    def _gradient_ready(self, index: int) -> None:
        bucket, position = self._place[index]
        bucket.pack(position)
        while len(self._in_flight) < len(self._buckets) and self._buckets[len(self._in_flight)].is_full:
            self._issue_next()

    def _issue_next(self) -> None:
        number = len(self._in_flight)
        self._in_flight.append(self._send(number, self._buckets[number].seal()))

    def _send(self, number: int, buffer: Tensor) -> Work:
        group = self.process_group
        if self.gradient_shards is None:
            return collectives.all_reduce_mean(buffer, group, prescaled=True)
        return collectives.reduce_scatter_mean(self._received[number], buffer, group, prescaled=True)

    def _synchronize(self) -> None:
        if self.partial_gradients is not None:
            for index, ready in enumerate(self._ready):
                if not ready:
                    self.partial_gradients.check_sent_again(index)
        while len(self._in_flight) < len(self._buckets):
            self._issue_next()
        in_flight, self._in_flight = self._in_flight, []
        for bucket, work in zip(self._buckets, in_flight, strict=True):
            self._wait(work)
            bucket.unpack()
        if self.partial_gradients is not None:
            self._take_shards()

    @torch.no_grad()
    def _take_shards(self) -> None:
        """After the reduce-scatters: put what arrived into place, and adopt gradients that only other ranks have."""
        for shard, received in zip(self.gradient_shards, self._received, strict=True):
            if received is not shard:
                shard.copy_(received)
        write_used_flags(self._flags, self.trainable, 1.0)
        self._wait(collectives.all_reduce_mean(self._flags, self.process_group))
        adopt_foreign_gradients(self._flags, self.trainable, self.partial_gradients.views)
        self.partial_gradients.note()
