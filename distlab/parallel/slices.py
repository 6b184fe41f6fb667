"""Parameters in flat buffers laid out like gradient buckets, of which each rank owns a slice (ZeRO stage 1).

    bucket b    │ parameter 7 │ parameter 6        │ parameter 5 │ padding │
    slices      │ rank 0          │ rank 1          │ rank 2              │

A slice cuts through parameters: rank 1 above owns a piece of parameter 6 and nothing else, rank 2 the rest of it and
all of parameter 5.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Work

from distlab.comm import collectives
from distlab.parallel.bucketed import BucketedDDP


class Piece:
    """The part of one parameter that this rank owns.

    Args:
        parameter: its values, 1-D, a view of the flat buffer, and a parameter to the optimizer.
        gradient: where its part of the mean gradient arrives, 1-D.
        start: its first element within the flattened whole parameter.
    """

    def __init__(self, parameter: nn.Parameter, gradient: Tensor, start: int):
        self.parameter = parameter
        self.gradient = gradient
        self.start = start

    def cut(self, value: Any, numel: int) -> Any:
        """This piece of a whole parameter's state; what is not one number per element is kept as it is."""
        if isinstance(value, Tensor) and value.ndim > 0 and value.numel() == numel:
            return value.flatten()[self.start : self.start + self.parameter.numel()]
        return value


class SlicedParameters:
    """Makes a wrapper's parameters views of flat buffers, and gathers the buffers when slices have changed.

    Args:
        ddp: reduce-scatters from now on (`BucketedDDP.shard_gradients`).
    """

    def __init__(self, ddp: BucketedDDP):
        ddp.shard_gradients()
        self._group = ddp.process_group
        self._plan = ddp.plan
        self._gathering: dict[int, Work] = {}
        self.pieces: dict[nn.Parameter, list[Piece]] = {parameter: [] for parameter in ddp.trainable}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._flat = [self._move(number, ddp) for number in range(len(ddp.plan))]

    @torch.no_grad()
    def _move(self, number: int, ddp: BucketedDDP) -> Tensor:
        """Move the parameters of a bucket into one buffer; note this rank's pieces."""
        plan, rank = self._plan[number], self._group.rank()
        parameters = [ddp.trainable[slot.index] for slot in plan.slots]
        flat = torch.zeros(plan.numel, dtype=plan.dtype, device=ddp.device)
        for parameter, view in zip(parameters, plan.views(flat, parameters), strict=True):
            parameter.data = view.copy_(parameter)
            self._bucket_of[parameter] = number
        low, _ = plan.shard_range(rank)
        for slot, start, stop in plan.segments(rank):
            values = nn.Parameter(flat[slot.offset + start : slot.offset + stop])
            first = slot.offset + start - low
            gradient = ddp.gradient_shards[number][first : first + stop - start]
            self.pieces[ddp.trainable[slot.index]].append(Piece(values, gradient, start))
        return flat

    def all_pieces(self) -> list[Piece]:
        """This rank's pieces of all parameters."""
        return [piece for pieces in self.pieces.values() for piece in pieces]

    def point_gradients(self) -> None:
        """Let each piece's `.grad` be its part of the mean, or None where no rank used the parameter."""
        for parameter, pieces in self.pieces.items():
            for piece in pieces:
                piece.parameter.grad = None if parameter.grad is None else piece.gradient

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Send this rank's slices on their way, the first layers' first (they lie in the last bucket)."""
        in_place = collectives.shards_in_place(self._flat[0].device, self._group)
        for number in reversed(range(len(self._flat))):
            flat = self._flat[number]
            own = flat[slice(*self._plan[number].shard_range(self._group.rank()))]
            self._gathering[number] = collectives.all_gather(
                flat, own if in_place else own.clone(), self._group
            )

    def buckets_of(self, module: nn.Module) -> set[int]:
        """The buckets that a module's own parameters lie in."""
        return {self._bucket_of[p] for p in module.parameters(recurse=False) if p in self._bucket_of}

    def wait(self, buckets: set[int] | None = None) -> None:
        """Wait until the parameters of these buckets are whole; None waits for all."""
        for number in self._gathering.keys() & (self._gathering.keys() if buckets is None else buckets):
            self._gathering.pop(number).wait()


def join(pieces: list[tuple[int, dict[str, Any]]], shape: torch.Size) -> dict[str, Any]:
    """Put the optimizer states of a parameter's pieces, (first element, state), together to that of the whole."""
    in_order = [state for _, state in sorted(pieces, key=lambda piece: piece[0])]
    return {
        key: torch.cat([state[key] for state in in_order]).view(shape)
        if isinstance(value, Tensor) and value.ndim > 0
        else value
        for key, value in in_order[0].items()
    }
