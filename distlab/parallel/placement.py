"""Where the parameters of a `BucketedDDP` live.

    Whole    every rank has and steps all of them
    Slices   every rank has all of them for forward, and steps one slice of each bucket (ZeRO stage 1)

    bucket b    │ parameter 7 │ parameter 6        │ parameter 5 │ padding │
    slices      │ rank 0          │ rank 1          │ rank 2              │

Slices end inside parameters: rank 1 above has a shard of parameter 6 and nothing else, rank 2 the
rest of it and all of parameter 5.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distlab.comm import collectives
from distlab.parallel import order
from distlab.parallel.buckets import GradientBucket
from distlab.parallel.gathering import Gathering
from distlab.parallel.guards.assignments import place_of, refuse_assigned
from distlab.parallel.shard import Shard, plain_name

if TYPE_CHECKING:
    from distlab.parallel.bucketed import BucketedDDP


class Whole:
    """Every rank has every parameter, and steps it."""

    def shards(self, whole: list[Shard]) -> list[Shard]:
        """What this rank holds and steps, of parameters that are `whole` in forward."""
        return whole

    def point_gradients(self) -> None:
        """Let the `.grad` of what is stepped be the mean."""

    def gather(self) -> None:
        """Start to make parameters whole after a step; reading one waits for it."""

    def wait(self) -> None:
        """Wait until all parameters are whole."""

    def close(self) -> None:
        """Wait, and leave ordinary parameters behind."""


class Slices(Whole):
    """Parameters moved into flat buffers laid out like the gradient buckets; a rank steps the same slice of both.

    Args:
        ddp: the wrapper; its plan is padded to equal slices.

    Attributes:
        shard_of: by parameter, this rank's shard: 1-D (0-D of a scalar, as its optimizer's state
            must be), a view of the flat buffer, perhaps empty, and a parameter to the optimizer.
        starts: by parameter, its shard's first element, counted in the order of the parameter's
            memory.
    """

    def __init__(self, ddp: "BucketedDDP"):
        self._group = ddp.process_group
        # parameter, its shard, that shard's mean
        self._means: list[tuple[nn.Parameter, nn.Parameter, Tensor]] = []
        self.starts: dict[nn.Parameter, int] = {}
        self.shard_of: dict[nn.Parameter, Shard] = {}
        names = {parameter: name for name, parameter in ddp.named}
        self._own = [
            (number, *self._move(bucket, names)) for number, bucket in enumerate(ddp.buckets)
        ]
        self._in_place = collectives.shards_in_place(ddp.device, self._group)
        self._placed = [(name, parameter, place_of(parameter)) for name, parameter in ddp.named]
        self._gathering = Gathering(ddp, [bucket.parameters for bucket in ddp.buckets], self._group)

    @torch.no_grad()
    def _move(
        self, bucket: GradientBucket, names: dict[nn.Parameter, str]
    ) -> tuple[Tensor, Tensor]:
        """Move the parameters of a bucket into one buffer; note this rank's shards of them, and where means lie.

        Returns:
            The buffer, and this rank's slice of it.
        """
        plan, rank = bucket.plan, self._group.rank()
        flat = torch.zeros(plan.numel, dtype=plan.dtype, device=bucket.buffer.device)
        for position, view in enumerate(plan.views(flat, bucket.parameters)):
            parameter = bucket.parameters[position]
            parameter.data = view.copy_(parameter)
            start, stop = plan.shard_range(position, rank)
            here = slice(plan.offsets[position] + start, plan.offsets[position] + stop)
            shape = parameter.shape if parameter.ndim == 0 and start < stop else (-1,)
            value = nn.Parameter(flat[here].view(shape))
            value.spread = plan.spread(position, parameter, self._group)
            # Muon asks for the matrices of other ranks as well. A parameter without elements has a
            # step to count.
            if start < stop or parameter.ndim == 2 or parameter.numel() == 0:
                self._means.append((parameter, value, bucket.buffer[here].view(shape)))
            self.starts[parameter] = start
            first = start if parameter.is_contiguous() else None
            self.shard_of[parameter] = Shard(
                plain_name(names[parameter]), parameter.shape, first, value
            )
        return flat, flat[plan.slice_of(rank)]

    def shards(self, whole: list[Shard]) -> list[Shard]:
        """See `Whole.shards`: slices of the trained parameters.

        Raises:
            RuntimeError: a parameter was given other memory.
        """
        refuse_assigned(self._placed)
        return [self.shard_of.get(shard.tensor, shard) for shard in whole]

    def point_gradients(self) -> None:
        """Let each shard's `.grad` be its part of the mean, or None where no rank used the parameter.

        Waits for the parameters of the last step.

        Raises:
            RuntimeError: a parameter was given other memory.
        """
        if self._gathering.works:
            self._gathering.wait()
        refuse_assigned(self._placed)
        for parameter, shard, mean in self._means:
            shard.grad = None if parameter.grad is None else mean

    @torch.no_grad()
    def gather(self) -> None:
        """Send this rank's slices on their way, the first layers' first (they lie in the last bucket)."""
        if order.begun:
            order.send_begun(self._group)
        for number, flat, own in reversed(self._own):
            work = collectives.all_gather(flat, own if self._in_place else own.clone(), self._group)
            self._gathering.start(number, work)
        if self._gathering.at_once:
            self._gathering.wait(self._gathering.at_once)

    def wait(self) -> None:
        """See `Whole.wait`."""
        self._gathering.wait()

    def close(self) -> None:
        """See `Whole.close`."""
        self._gathering.close()
