"""How each mistake is made: a subclass of a strategy, or a patch around one, that does one thing wrong.

The last three are mistakes of a strategy's user; a subclass that makes them stands for a training loop that does.

Mistakes in the data or in the task alone need no code here; `mistakes` lists them with the others.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.parallel import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlapDDP,
    ShardedOptimizer,
    ZeroOptimizer,
)
from kernels.flash_attention import FlashAttention2PyTorch, function, tiled

# -- data parallelism ------------------------------------------------------------------------------------------


def without_broadcast(module: nn.Module, **options: Any) -> FlatDDP:
    """Ranks keep the weights that each has drawn for itself."""
    with patch.object(collectives, "broadcast_all", lambda tensors, group: None):
        return FlatDDP(module, **options)


class SumInsteadOfMean(FlatDDP):
    """`ReduceOp.SUM`, and no division afterwards."""

    def _synchronize(self) -> None:
        super()._synchronize()
        for parameter in self.trainable:
            parameter.grad.mul_(self.process_group.size())


class LastBucketStays(BucketedDDP):
    """Full buckets are sent, the one that is left over at the end of backward is not."""

    def _issue_next(self) -> None:
        if len(self._in_flight) < len(self._buckets) - 1:
            super()._issue_next()
        else:
            self._buckets[-1].seal()
            self._in_flight.append(_NothingToWaitFor())


class _NothingToWaitFor:
    def wait(self) -> None:
        pass


class ReducesTheParameter(NaiveDDP):
    """The hook averages `parameter` where it should average `parameter.grad`."""

    def _synchronize(self) -> None:
        for parameter in self.trainable:
            collectives.all_reduce_mean(parameter.data, self.process_group).wait()


class NeverWaits(OverlapDDP):
    """Asynchronous all-reduces whose `wait()` was forgotten.

    In reality a race, lost now and then. Here it is always lost: the means land in the gradients only when the next
    step begins, long after the optimizer has read them.
    """

    _late: tuple[tuple[Tensor, Any], ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for _, work in self._late:
            work.wait()
        self._late = ()
        return super().forward(*args, **kwargs)

    def _gradient_ready(self, index: int) -> None:
        sent = self.trainable[index].grad.clone()
        self._late = (*self._late, (sent, collectives.all_reduce_mean(sent, self.process_group)))

    def _synchronize(self) -> None:
        pass


class SumsTiedTwice(NaiveDDP):
    """Sums over names, under which a tied weight stands twice; divides over parameters, where it stands once."""

    def _synchronize(self) -> None:
        ranks = self.process_group.size()
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.grad.copy_(collectives.sum_tensor(parameter.grad, self.process_group))
        for parameter in self.trainable:
            parameter.grad.div_(ranks)


class HookOrder(OverlapDDP):
    """Gradients leave in the order in which hooks fire, which differs between ranks that use different layers."""

    def _gradient_ready(self, index: int) -> None:
        self._order.remove(index)
        self._order.insert(len(self._in_flight), index)
        self._issue_next()

    def _synchronize(self) -> None:
        super()._synchronize()
        self._order.sort(reverse=True)


class KeepsItsShard(ShardedOptimizer):
    """Each rank updates its parameters, and none is sent."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        with patch.object(
            collectives, "broadcast_coalesced", lambda owned, group, source: _NothingToWaitFor()
        ):
            return super().step(closure, **kwargs)


class StaleSums(FlatDDP):
    """The buffer is filled by the first micro-batch's hooks; later micro-batches add to `.grad`, which it replaces."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self._packed: dict[int, Tensor] = {}

    def _on_gradient(self, index: int) -> None:
        self._packed.setdefault(index, self.trainable[index].grad.clone())
        super()._on_gradient(index)

    def _synchronize(self) -> None:
        for index, stale in self._packed.items():
            self.trainable[index].grad.copy_(stale)
        self._packed = {}
        super()._synchronize()


# -- sharding --------------------------------------------------------------------------------------------------


class WaitsInOwnersForward(ZeroOptimizer):
    """Only the forward of the module that owns parameters waits for their all-gather.

    Messages as small as these usually arrive before the parameters are read. So the results of an all-gather are held
    back until the wait, as on a slow network.
    """

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        gather = collectives.all_gather
        with patch.object(collectives, "all_gather", lambda *args: _SlowGather(gather, *args)):
            result = super().step(closure, **kwargs)
        for parameter in self._ddp.trainable:
            parameter.__class__ = nn.Parameter  # reading one, from whatever place, waits no more
        return result


class _SlowGather:
    def __init__(self, gather: Callable[..., Any], output: Tensor, own: Tensor, group: ProcessGroup):
        self._output, self._arrived = output, torch.empty_like(output)
        self._work = gather(self._arrived, own, group)

    def wait(self) -> None:
        self._work.wait()
        self._output.copy_(self._arrived)


class ForgetsToFinish(FSDP):
    """A training loop without `finish_gradient_synchronization()`."""

    def finish_gradient_synchronization(self) -> None:
        pass


class ClipsItsOwnPart(BucketedDDP):
    """A training loop that clips by torch's function, whose norm differs between ranks under ZeRO."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        nn.utils.clip_grad_norm_(self.trainable, 0.1)


# -- attention -------------------------------------------------------------------------------------------------


def healthy_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The package's tiled attention with tiles small enough for several of them: (B, H, T, D) each."""
    with patch.object(tiled, "BLOCK", 16):
        return FlashAttention2PyTorch.apply(q, k, v, True)


class _TorchWithoutMaximum:
    """torch, where a maximum is always 0: exp(score) is summed as it is."""

    def __getattr__(self, name: str) -> Any:
        return (lambda old, new: torch.zeros_like(new)) if name == "maximum" else getattr(torch, name)


def without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax as the formula has it, without subtracting the running maximum."""
    with patch.object(tiled, "torch", _TorchWithoutMaximum()):
        return healthy_attention(q, k, v)


def sees_one_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask `k <= q + 1`: every token sees the one that it is to predict."""

    def shifted(*args: Any) -> tuple[int | None, int | None]:
        lo, hi = original(*args)
        return lo, hi + 1

    original = function.band
    with patch.object(function, "band", shifted):
        return healthy_attention(q, k, v)
