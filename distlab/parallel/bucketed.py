"""Bucketed data parallelism: gradients packed into buckets, each all-reduced as soon as it is full.

    compute        │ forward │ backward ─────────────────── │         │ optimizer │
    communication  │         │      │ bucket 0 │ bucket 1 │ … │ last │           │

Few large messages (bandwidth instead of latency) that hide behind backward. What stays exposed is the last
bucket, which can only leave when backward ends, and whatever communication backward was too short to cover.

Each hook copies its gradient once into the bucket, and `.grad` becomes the view of it: letting
autograd make the gradient and copying costs two passes over memory, a view set beforehand would cost four
(zero it, read it, add, write). On a GPU our linear layers avoid even the copy: they write their weight's gradient
directly into the bucket (`model.ops.gradient_target`). Buckets leave in plan order on every rank, whatever order the
hooks fire in.

torch's DistributedDataParallel differs in three things: its first bucket is small (1 MiB) so that
communication starts early; after the first step it rebuilds the buckets in the order in which gradients were
seen to arrive (here: reversed registration order throughout); and a parameter unused on some rank is an error
there unless `find_unused_parameters` is given, which costs a walk through the graph in every step.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.comm.two_level import Message
from distlab.parallel.buckets import BucketPlan, GradientBucket, check_bucket_size, plan_buckets
from distlab.parallel.data_parallel import DataParallel
from distlab.parallel.shard import Shard
from distlab.parallel.sharded_buckets import ShardedBuckets


class BucketedDDP(DataParallel):
    """Averages gradients bucket by bucket during backward.

    Args:
        module: the model to wrap; see `DataParallel` for checks and errors.
        bucket_size_mb: MiB of gradients per bucket, as torch's `bucket_cap_mb`; a parameter larger than that
            has a bucket of its own; None means one unbounded bucket per dtype.
        mesh, process_group: see `DataParallel`.

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
        self._in_flight: list[Work | Message] = []
        self._buckets: list[GradientBucket] = []  # none before `allocate()`
        self._sharded: ShardedBuckets | None = None
        self._lay_out()

    def _lay_out(self, **padding: Any) -> None:
        """Plan the buckets; their memory is taken at the first forward."""
        self._release()
        self.plan: tuple[BucketPlan, ...] = plan_buckets(
            [parameter.numel() for parameter in self.trainable],
            [parameter.dtype for parameter in self.trainable],
            self.bucket_size_mb,
            **padding,
        )
        self._place = {  # parameter index → (its bucket's number, its position there)
            index: (number, position)
            for number, plan in enumerate(self.plan)
            for position, index in enumerate(plan.indices)
        }

    def allocate(self) -> None:
        """Take the buckets' memory, unless they have it."""
        if not self._buckets:
            self._buckets = self._take_memory()

    def _take_memory(self) -> list[GradientBucket]:
        return [GradientBucket(bucket, self.trainable) for bucket in self.plan]

    def shard(self) -> ShardedBuckets:
        """From now on reduce-scatter the buckets, and keep this rank's slices of the parameters (`ZeroOptimizer`).

        Each rank gets its slice of every mean and nothing else: see `ShardedBuckets`.

        Raises:
            ValueError: a wrapper on a mesh.
        """
        if self.mesh is not None:
            raise ValueError(
                "ZeroOptimizer shards over all ranks, and this BucketedDDP has a mesh: leave its mesh out, or take "
                "FSDP(module, mesh=…), which shards inside a group"
            )
        for name, module in self.module.named_modules():
            if getattr(module, "max_norm", None) is not None:
                raise ValueError(
                    f"ZeroOptimizer: '{name}' renormalises its rows in forward (max_norm), each rank those of its own "
                    "batch, which the next step loses: leave max_norm out, and renormalise after optimizer.step()"
                )
        if self._sharded is not None:
            self._sharded.close()
        self._lay_out(world_size=self.process_group.size(), has_flags=False)
        self.allocate()
        self._shards_gradients = True
        self._sharded = ShardedBuckets(self, self._buckets)
        return self._sharded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result."""
        if not torch.compiler.is_compiling() and not self._buckets and torch.is_grad_enabled():
            self.allocate()
        return super().forward(*args, **kwargs)

    # -- what only a sharded one does differently ------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """All parameters, whole; once sharded this rank's slices, whose `.grad` are the means."""
        held = super().shards()
        if self._sharded is None:
            return held
        self._sharded.point_gradients()
        return [*self._sharded.shards.values(), *held[len(self.trainable) :]]

    def shards_changed(self) -> None:
        """All-gather the parameters, if they are sharded; reading one waits for it."""
        if self._sharded is not None:
            self._sharded.start_gathering()

    def synchronize(self) -> None:
        """Wait until all parameters are whole."""
        if self._sharded is not None:
            self._sharded.wait()

    def elementwise_gradient_edits(self) -> AbstractContextManager[None]:
        """See `ZeroOptimizer.elementwise_gradient_edits`."""
        if self._sharded is None:
            return super().elementwise_gradient_edits()
        return self._sharded.elementwise_edits()

    def check_step(self, optimizer: Optimizer) -> None:
        """See `DataParallel.check_step`; also raises for an optimizer that takes a part of the mean for the whole."""
        super().check_step(optimizer)
        if self._sharded is not None:
            self._sharded.check_optimizer(optimizer)

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook; see `DataParallel.close`."""
        if self._sharded is not None:
            self._sharded.close()
        super().close()
        self._release()

    def _release(self) -> None:
        for bucket in self._buckets:
            bucket.release()
        self._buckets = []

    # -- a gradient's way ----------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        if self._sharded is not None:
            self._sharded.check_added(index)
        super()._on_gradient(index)

    def _gradient_ready(self, index: int) -> None:
        self.allocate()  # the module was called without this wrapper
        number, position = self._place[index]
        self._buckets[number].add(position)
        gradient = self.trainable[index].grad  # a view of the bucket
        self._ready[index] = gradient, gradient._version
        while not self._all_sent() and not self._buckets[len(self._in_flight)].missing and self._may_send():
            self._issue_next()

    def _issue_next(self) -> None:
        """Send the first bucket that has not been sent; all ranks send them in the order of the plan."""
        number = len(self._in_flight)
        buffer = self._buckets[number].seal()
        if self._sharded is None:
            work = self._all_reduce(buffer)
        else:
            received = self._sharded.received[number]
            work = collectives.reduce_scatter_mean(received, buffer, self.process_group)
        self._in_flight.append(work)

    def _all_sent(self) -> bool:
        return len(self._in_flight) == len(self._buckets)

    def _send_rest(self) -> None:
        self.allocate()
        if self._sharded is not None:
            self._sharded.check_sent_again(self._ready)
        super()._send_rest()

    def _synchronize(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for bucket, work in zip(self._buckets, in_flight, strict=True):
            self._wait(work)
            bucket.unpack()
        if self._sharded is not None:
            self._sharded.take_means()
