"""Bucketed data parallelism: gradients packed into buckets, each all-reduced as soon as it is full.

    compute        │ forward │ backward ─────────────────── │         │ optimizer │
    communication  │         │      │ bucket 0 │ bucket 1 │ … │ last │           │

Messages are few and large (bandwidth instead of latency), and they are hidden behind backward. Two
parts stay exposed: the last bucket, which can only leave when backward ends, and the communication
that backward was too short to cover.

Each hook copies its gradient once into the bucket, and `.grad` becomes the view of it. Letting
autograd make the gradient and copying it costs two passes over memory. A view that is set
beforehand would cost four (zero it, read it, add, write). On a GPU our linear layers avoid even the
copy: they write their weight's gradient directly into the bucket (`model.ops.gradient_target`).

torch's DistributedDataParallel differs in three ways. Its first bucket is small (1 MiB) so that
communication starts early. After the first step it rebuilds the buckets in the order in which
gradients were seen to arrive; here the order is reversed registration throughout. A parameter
unused on some rank is an error there unless `find_unused_parameters` is given, which costs a walk
through the graph in every step.

`buckets.py` plans which parameter goes where. `copy_engine.py` and `zero.py` exchange the same
buckets in other ways.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel import checks
from distlab.parallel.buckets import BucketPlan, check_bucket_size, plan_of
from distlab.parallel.ddp import DataParallel, UsedFlags
from distlab.parallel.model import Gradients
from distlab.parallel.shard import Shard


class BucketedDDP(DataParallel):
    """Averages gradients bucket by bucket during backward.

    Args:
        module: model to wrap; see `DataParallel` for checks and errors.
        bucket_size_mb: MiB of gradients per bucket, as torch's `bucket_cap_mb`. A parameter larger
            than that has a bucket of its own. None means one unbounded bucket per dtype.
        mesh, process_group: see `DataParallel`.

    Attributes:
        plan: layout of every bucket.
        buckets: the buckets in the order in which they leave.
        exchange: how buckets are averaged.
        placement: where parameters are stored.

    Raises:
        TypeError: a bucket size that is no number.
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
        self.buckets: list[GradientBucket] = []
        self.placement = Placement()
        self.lay_out(self._make_exchange())

    def _make_exchange(self) -> "AllReduce":
        return AllReduce()

    def lay_out(self, exchange: "AllReduce") -> None:
        """Plan the buckets as this exchange needs them, and allocate their memory."""
        withdraw_targets(self.trainable)
        if self.buckets:
            self.exchange.close()
        self.step.unsent.clear()
        self.buckets, self._place = [], {}  # the memory of earlier buckets is freed first
        self.exchange = exchange
        self.shards_gradients = exchange.shards_gradients
        self.accumulates_shards = exchange.frees_buckets
        self.plan: tuple[BucketPlan, ...] = plan_of(
            self.trainable,
            self.bucket_size_mb,
            world_size=exchange.slices,
            has_flags=exchange.has_flags,
        )
        self._used = None if exchange.has_flags else self._separate_flags()
        buffers = exchange.buffers(self.plan)
        for plan, buffer in zip(self.plan, buffers, strict=True):
            stays = not exchange.frees_buckets
            self.buckets.append(GradientBucket(plan, self.trainable, buffer, stays=stays))
        # Parameter index → (its bucket, its position there).
        self._place: dict[int, tuple[GradientBucket, int]] = {}
        for bucket in self.buckets:
            for position, index in enumerate(bucket.plan.indices):
                self._place[index] = (bucket, position)
        self.step.unsent.extend(self.buckets)

    # -- one gradient ------------------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        bucket, position = self._place[index]
        bucket.add(position)  # `.grad` is a view of the bucket now

    def _is_complete(self, message: "GradientBucket") -> bool:
        return message.missing == 0

    def _send(self, message: "GradientBucket") -> None:
        message.work = self.exchange.start(self, message)

    def _synchronize(self) -> None:
        self.step.unsent.extend(self.buckets)  # of the next step
        for bucket in self.buckets:
            self.receive(bucket)
            bucket.unpack()

    def receive(self, bucket: "GradientBucket") -> None:
        """Wait for the mean of a bucket that was sent. A second call does nothing."""
        if bucket.work is not None:
            collectives.wait(bucket.work, self.process_group, "averaging gradients")
            bucket.work = None
            self.exchange.finish(bucket)

    def _had_gradient(self, index: int) -> bool:
        return self.exchange.had_gradient(self.trainable[index])

    def _end_step(self) -> None:
        self.exchange.end_step()
        super()._end_step()

    def _recover(self) -> None:
        super()._recover()
        self.free_zeroed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as `nn.Module.zero_grad`. Under ZeRO-2, also free this rank's part of the means."""
        super().zero_grad(set_to_none)
        self.free_zeroed()

    def free_zeroed(self) -> None:
        """Free the means of parameters whose `.grad` was dropped. Only ZeRO-2 has any."""
        if self.exchange.free_zeroed():
            self.placement.drop_gradients()

    def mean_of(self, index: int) -> Tensor:
        """Return the gradient's place in a bucket; see `DataParallel.mean_of`.

        Under ZeRO-2 it is what stands for the mean in `.grad`.
        """
        if self.exchange.frees_buckets:
            return self.exchange.stand_in(self.trainable[index])
        bucket, position = self._place[index]
        return bucket.view_at(position)

    @torch.no_grad()
    def _take_edited(self) -> None:
        if self.exchange.frees_buckets:
            checks.check_stand_ins(self.named, self.exchange.is_edited)
            super()._take_edited()
            return
        # A gradient that was replaced is copied to its place in the bucket.
        for index, parameter in enumerate(self.trainable):
            view = self.mean_of(index)
            if parameter.grad is not None and parameter.grad is not view:
                parameter.grad = view.copy_(parameter.grad)
        super()._take_edited()

    # -- parameters, wherever they are stored ------------------------------------------------------

    def shard_for(
        self,
        optimizer: Optimizer,
        exchange: "AllReduce",
        place: Callable[["BucketedDDP"], "Placement"],
    ) -> None:
        """Hand gradients and parameters over to an optimizer that steps a slice of each bucket.

        This is ZeRO's one call into the wrapper. From here on `.grad` holds the mean in this rank's
        slice only.

        Args:
            optimizer: the only optimizer that may step the parameters.
            exchange: averages buckets so that each rank gets its slice.
            place: function that moves the parameters into slices, once buckets are laid out.
        """
        self.placement.close()  # that of an earlier optimizer
        self.lay_out(exchange)
        self.placement = place(self)
        self._zero = weakref.ref(optimizer)

    def shards(self) -> list[Shard]:
        """Return the shards this rank holds, one per parameter."""
        return self.placement.shards(super().shards())

    def gradients(self) -> Gradients:
        """See `ParallelModel.gradients`."""
        self.placement.point_gradients()
        return super().gradients()

    def shards_changed(self) -> None:
        """Start to make the parameters whole again."""
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
        self.exchange.close()
        withdraw_targets(self.trainable)
        super().close()


class AllReduce:
    """How buckets are averaged: here every rank gets the whole mean of each.

    Subclasses exchange them in other ways.

    Attributes:
        slices: number of equal slices that each bucket is padded to.
        has_flags: True if each bucket carries its parameters' used flags.
        shards_gradients: True if a rank gets a slice of each mean only.
        frees_buckets: True if a bucket has memory only while it is filled and sent. Afterwards
            the exchange has this rank's slice of the mean, for which a tensor without memory stands
            in `.grad`.
        bytes_outside_allocator: bytes of the buckets that torch's caching allocator does not count.
    """

    slices = 1
    has_flags = True
    shards_gradients = False
    frees_buckets = False
    bytes_outside_allocator = 0

    def buffers(self, plans: Sequence[BucketPlan]) -> Sequence[Tensor | None]:
        """Return memory for each bucket: `(plan.numel,)` zeros, or None for ordinary memory."""
        return [None] * len(plans)

    def start(self, ddp: BucketedDDP, bucket: "GradientBucket") -> Any:
        """Start to average a bucket of this wrapper.

        All ranks start the same buckets in the same order.

        Returns:
            Message in flight, for `collectives.wait`.
        """
        return ddp.all_reduce_mean(bucket.seal())

    def finish(self, bucket: "GradientBucket") -> None:
        """Put the mean into the bucket, if it has arrived elsewhere."""

    def had_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether `.grad` was not None, and was taken away, when backward reached it."""
        return False

    def end_step(self) -> None:
        """Note that all means have arrived."""

    def free_zeroed(self) -> bool:
        """Free means of which no `.grad` is left. Return whether there were any."""
        return False

    def close(self) -> None:
        """Detach the hooks."""


class Placement:
    """Where parameters are stored: here every rank holds and steps all of them.

    ZeRO places slices (`zero.py`).
    """

    def shards(self, whole: list[Shard]) -> list[Shard]:
        """Return the shards that this rank holds and steps.

        Args:
            whole: the parameters as forward sees them.
        """
        return whole

    def point_gradients(self) -> None:
        """Let the `.grad` of each shard be its mean."""

    def drop_gradients(self) -> None:
        """Let the `.grad` of each shard be None."""

    def gather(self) -> None:
        """Make parameters whole again after their shards have changed."""

    def wait(self) -> None:
        """Wait until all parameters are whole."""

    def close(self) -> None:
        """Wait, and leave ordinary parameters behind."""


_Place = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a view


def _own_references() -> int:
    """Return how many references a view has that only `place_for` uses.

    They are those of the list, of the variable and of the argument.
    """
    views = [object()]
    view = views[0]
    return sys.getrefcount(view)


OWN_REFERENCES = _own_references()


class GradientBucket:
    """The memory of one bucket. It packs gradients, and each `.grad` becomes a view of it.

        | grad of parameter 7 | grad of parameter 6 | … | used flags, one element each | padding |

    The flags are part of the message, so they need no message of their own. After the mean, a flag
    above zero says that some rank used the parameter.

    Args:
        plan: layout of the bucket.
        parameters: all planned parameters, of which the plan picks those of this bucket.
        buffer: `(plan.numel,)` zeros. Default: memory allocated here.
        stays: False for a bucket that has memory only from its first gradient until `free()`.

    Attributes:
        buffer: memory of the bucket; None if it has none.
        missing: number of gradients that have not arrived in this step.
        views: each parameter's part of the buffer; read them by `view_at`.
        work: message in flight; None if there is none.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        buffer: Tensor | None = None,
        *,
        stays: bool = True,
    ):
        self.plan = plan
        self.parameters = [parameters[index] for index in plan.indices]
        self.buffer: Tensor | None = buffer
        self.views: list[Tensor] = []
        self._places: list[_Place] = []  # of the views
        self._storage: int | None = None  # torch's number of the memory
        self._targets = [_Target(self, position) for position in range(len(self.parameters))]
        self._used: UsedFlags | None = None
        self.work: Any = None
        if stays:
            if buffer is None:
                buffer = torch.zeros(plan.numel, dtype=plan.dtype, device=self.parameters[0].device)
            self._use(buffer)
            if plan.has_flags:
                flags = buffer[plan.payload : plan.payload + len(plan.indices)]
                self._used = UsedFlags(self.parameters, flags)
        self.unpack()

    def _use(self, buffer: Tensor) -> None:
        self.buffer = buffer
        if not self._places:
            for view in self.plan.views(buffer, self.parameters):
                self._places.append((view.shape, view.stride(), view.storage_offset()))
        self.views = [self._view_of(place) for place in self._places]
        self._storage = buffer.untyped_storage()._cdata

    def _view_of(self, place: "_Place") -> Tensor:
        # `.data` gives each view a version counter of its own, so that an edit of one gradient can
        # be told from the rest.
        return self.buffer.as_strided(*place).data

    def allocate(self) -> None:
        """Give the bucket memory, unless it has some."""
        if self.buffer is None:
            device = self.parameters[0].device
            self._use(torch.empty(self.plan.numel, dtype=self.plan.dtype, device=device))

    def free(self) -> None:
        """Let go of the memory. No `.grad` may be a view of it."""
        self.buffer = None
        self._storage = None
        self.views = []

    def view_at(self, position: int) -> Tensor:
        """Return the place of the gradient at `position` of the plan."""
        if self.buffer is None:
            self.allocate()
        view = self.views[position]
        if view.untyped_storage()._cdata != self._storage:
            # A view is some parameter's `.grad`. `parameter.grad.data = …`, and a cast of the
            # module, give this tensor other memory, of which the message knows nothing.
            view = self.views[position] = self._view_of(self._places[position])
        return view

    def place_for(self, position: int) -> Tensor:
        """Return the place of the gradient at `position` of the plan, to be overwritten.

        A tensor that someone keeps is not overwritten.
        """
        view = self.view_at(position)
        if sys.getrefcount(view) > OWN_REFERENCES:
            # Someone keeps this tensor, `parameter.grad` of an earlier backward. Under torch's DDP
            # it would stay as it is, so it gets memory of its own.
            view.data = view.clone()
            view = self.view_at(position)
        return view

    def add(self, position: int) -> None:
        """Copy the gradient at `position` of the plan to its place, which `.grad` then is."""
        self.missing -= 1
        parameter = self.parameters[position]
        gradient = parameter.grad
        offset = self.view_at(position).storage_offset()
        # No copy if the gradient was written there, or accumulated there.
        same_memory = gradient.untyped_storage()._cdata == self._storage
        if not same_memory or gradient.storage_offset() != offset:
            view = self.place_for(position)
            checks.check_same_kind(gradient, view)
            view.copy_(gradient)
        parameter.grad = self.view_at(position)

    def seal(self) -> Tensor:
        """Pack what has not arrived, and write the flags.

        Returns:
            The buffer, ready to be sent.
        """
        self.allocate()
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self.place_for(position).zero_()
            elif parameter.grad is not self.view_at(position):
                self.add(position)
        if self._used is not None:
            self._used.write()
        return self.buffer

    def unpack(self) -> None:
        """Take the gradients of parameters that only other ranks used, and await the next step's.

        Call it when the mean has arrived. Code that computes a gradient may write it directly to
        its `gradient_target` (`model.ops.gradient_target`).
        """
        if self._used is not None:
            for position in self._used.used_elsewhere():
                self.parameters[position].grad = self.view_at(position)
        self.missing = len(self.parameters)
        for parameter, target in zip(self.parameters, self._targets, strict=True):
            parameter.gradient_target = target


class _Target:
    """Returns the place of a gradient in its bucket, when that is computed.

    A copy of the parameter, and a file that it is saved to, have an empty `torch.Size` instead,
    which `torch.load` accepts. It offers no place.
    """

    def __init__(self, bucket: GradientBucket, position: int):
        self._bucket = weakref.ref(bucket)
        self._position = position

    def __call__(self) -> Tensor | None:
        bucket = self._bucket()
        return None if bucket is None else bucket.place_for(self._position)

    def __reduce__(self) -> Any:
        return torch.Size, ()


def withdraw_targets(parameters: Sequence[nn.Parameter]) -> None:
    """Stop offering bucket memory to the code that computes these gradients."""
    for parameter in parameters:
        parameter.__dict__.pop("gradient_target", None)
