"""Code that makes each mistake.

A mistake is a subclass of a strategy, or a function that is replaced in one (`replaced`), and does
one thing wrong. A mistake of a strategy's user is a subclass that behaves like a training loop that
makes it. Those where ranks share a model replace a function of the layout or of the pipeline while
the ranks run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

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
    ParallelModel,
    ShardedOptimizer,
    ZeroOptimizer,
    context_parallel,
    tensor_parallel,
)
from distlab.parallel.bucketed import AllReduce, GradientBucket
from distlab.parallel.pipeline import Pipeline
from distlab.parallel.regions import Share
from distlab.parallel.schedules import Action, gpipe, zero_bubble
from distlab.parallel.zero import ReduceScatterAndFree
from kernels.flash_attention import FlashAttention2PyTorch, ops, tiled


@contextmanager
def replaced(owner: Any, name: str, wrong: Any) -> Iterator[None]:
    """Replace an attribute while the block runs. This puts a mistake into code that works.

    Args:
        owner: module or class that has the attribute.
        name: name of the attribute.
        wrong: replacement.
    """
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    try:
        yield
    # Other mistakes run in the same process, so the original must come back.
    finally:
        setattr(owner, name, right)


# -- data parallelism ------------------------------------------------------------------------------


def without_broadcast(module: nn.Module, process_group: ProcessGroup | None) -> FlatDDP:
    """Return a strategy whose ranks keep the weights that each has drawn for itself."""
    with replaced(collectives, "broadcast_all", _broadcasts_nothing):
        # The constructor broadcasts, so only it runs with the replacement.
        return FlatDDP(module, process_group=process_group)


def _broadcasts_nothing(tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Stand in for `collectives.broadcast_all`."""


class SumInsteadOfMean(FlatDDP):
    """Strategy that sums gradients, as by `ReduceOp.SUM`, and does not divide."""

    def _synchronize(self) -> None:
        super()._synchronize()
        for parameter in self.trainable:
            # sum = mean × N
            parameter.grad.mul_(self.process_group.size())


class AllButTheLast(AllReduce):
    """All-reduce of full buckets, but not of the last one, which holds the first layers."""

    def start(self, ddp: BucketedDDP, bucket: GradientBucket) -> Any:
        # Buckets are filled from the last layer to the first, so parameter 0 is in the last bucket.
        if bucket.plan.indices[-1] == 0:
            # Packed as in the healthy exchange. Only the sending is left out.
            bucket.seal()
            return _NothingToWaitFor()
        return super().start(ddp, bucket)


class LastBucketStays(BucketedDDP):
    """Strategy `BucketedDDP` with that exchange."""

    def _make_exchange(self) -> AllReduce:
        return AllButTheLast()


class _NothingToWaitFor:
    """Handle of a collective that was never started."""

    def wait(self) -> None:
        pass


class ReducesTheParameter(NaiveDDP):
    """Strategy that averages `parameter` where it should average `parameter.grad`."""

    def _synchronize(self) -> None:
        # The gradient stays as each rank computed it, and only parameters are averaged.
        for parameter in self.trainable:
            collectives.all_reduce_mean(parameter.data, self.process_group).wait()


class NeverWaits(OverlapDDP):
    """Strategy with asynchronous all-reduces whose `wait()` was forgotten.

    In a real run this is a race that is lost now and then. Here it is always lost: the means reach
    the gradients only when the next step begins, long after the optimizer has read them.
    """

    _late: tuple[tuple[Tensor, Any], ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The next step has begun, so the optimizer has read what was there before.
        for _, work in self._late:
            work.wait()
        self._late = ()
        return super().forward(*args, **kwargs)

    def _gradient_ready(self, index: int) -> None:
        # A copy, since the mean must not arrive in `.grad` before the optimizer reads it.
        sent = self.trainable[index].grad.clone()
        self._late = (*self._late, (sent, collectives.all_reduce_mean(sent, self.process_group)))

    # The strategy's own sending is switched off: everything was sent in `_gradient_ready`.
    def _is_complete(self, message: int) -> bool:
        return False

    def _send(self, message: int) -> None:
        pass

    def _synchronize(self) -> None:
        pass


class SumsTiedTwice(NaiveDDP):
    """Strategy that sums per name, of which a tied weight has two, but divides per parameter."""

    def _synchronize(self) -> None:
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            # A tied weight has two names, so it is summed twice: N times the right sum.
            parameter.grad.copy_(collectives.sum_tensor(parameter.grad, self.process_group))
        for parameter in self.trainable:
            parameter.grad.div_(self.process_group.size())


class HookOrder(OverlapDDP):
    """Strategy that sends gradients in the order in which hooks fire.

    The order differs between ranks that use different layers.
    """

    def _gradient_ready(self, index: int) -> None:
        # The strategy keeps a list of messages that are to be sent, which must stay true.
        self.step.unsent.remove(index)
        self._send(index)


class KeepsItsShard(ShardedOptimizer):
    """Optimizer by which each rank updates its own parameters, and sends none."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with replaced(collectives, "broadcast_coalesced", _sends_nothing):
            # The update itself is right, and only its exchange is replaced.
            return super().step(*args, **kwargs)


def _sends_nothing(owned: Sequence[Tensor], group: ProcessGroup, source: int) -> _NothingToWaitFor:
    """Stand in for `collectives.broadcast_coalesced`."""
    return _NothingToWaitFor()


class StaleSums(FlatDDP):
    """Strategy whose buffer is filled by the first micro-batch only.

    Later micro-batches add to `.grad`, which the buffer replaces.
    """

    _packed: Sequence[Tensor] = ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        # Kept from the first micro-batch, and not filled again.
        self._packed = self._packed or [parameter.grad.clone() for parameter in self.trainable]

    def _synchronize(self) -> None:
        for parameter, stale in zip(self.trainable, self._packed, strict=True):
            parameter.grad.copy_(stale)
        self._packed = ()
        super()._synchronize()


class SendsEachMicroBatch(BucketedDDP):
    """Strategy whose `no_sync()` also averages.

    The gradient is right, since a mean that is averaged once more stays the same.
    """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        # The means of the micro-batch stay in `.grad`, and the next one adds to them.
        self.finish_gradient_synchronization()


# -- sharding --------------------------------------------------------------------------------------


def add_to_zeroed_means(exchange: ReduceScatterAndFree, bucket: GradientBucket) -> None:
    """Finish a bucket of ZeRO-2, and add its mean to that of every step before."""
    bucket.free()
    # The sum is where zero_grad(), which drops the exchange's own means, does not find it.
    bucket.sum = getattr(bucket, "sum", 0) + exchange._arriving.pop(bucket)
    exchange._means[bucket] = bucket.sum


class WaitsInOwnersForward(ZeroOptimizer):
    """Optimizer whose all-gather only the forward of the owning module waits for.

    Messages as small as these usually arrive before the parameters are read. So the results of an
    all-gather are held back until the wait, as on a slow network.
    """

    def __init__(self, ddp: BucketedDDP, *args: Any, **options: Any):
        # The optimizer's own waiting must not repair what this class breaks.
        super().__init__(ddp, *args, overlap_gather=True, **options)
        self._slices._overlap.close()
        for module in ddp.module.modules():
            own = set(module.parameters(recurse=False))
            # The module's own parameters, and not those that its forward reads from another module.
            needed = [n for n, bucket in enumerate(ddp.buckets) if own & set(bucket.parameters)]
            module.register_forward_pre_hook(partial(self._wait_before, needed))

    def _wait_before(self, buckets: Sequence[int], module: nn.Module, inputs: Any) -> None:
        """Wait for these buckets before a module's forward."""
        self._slices.wait(buckets)

    def step(self, *args: Any, **kwargs: Any) -> None:
        # Bound before the replacement, which would otherwise call itself.
        slow_gather = partial(_SlowGather, collectives.all_gather)
        with replaced(collectives, "all_gather", slow_gather):
            super().step(*args, **kwargs)


class _SlowGather:
    """All-gather whose result arrives only in `wait()`."""

    def __init__(
        self, gather: Callable[..., Any], output: Tensor, own: Tensor, group: ProcessGroup
    ):
        self._output = output
        # The result goes into a buffer of its own first, which no code reads before the wait.
        self._arrived = torch.empty_like(output)
        self._work = gather(self._arrived, own, group)

    def wait(self) -> None:
        self._work.wait()
        self._output.copy_(self._arrived)


class ForgetsToFinish(FSDP):
    """Training loop without `finish_gradient_synchronization()`."""

    def finish_gradient_synchronization(self) -> None:
        pass


class ClipsItsOwnPart(BucketedDDP):
    """Training loop that clips by torch's function, whose norm differs between ranks under ZeRO."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        # Under ZeRO-1 only this rank's slices of `.grad` are means now, so each rank has another
        # norm.
        nn.utils.clip_grad_norm_(self.trainable, 0.1)


# -- tensor and context parallelism ----------------------------------------------------------------

# The original functions. A mistake replaces them in their modules.
vocabulary_cross_entropy = tensor_parallel.vocabulary_cross_entropy
merge = context_parallel._merge


def summed_behind_the_loss(*args: Any, group: ProcessGroup, **options: Any) -> Tensor:
    """Sum a gradient that every rank already has in full, which makes it P times as large."""
    return Share.apply(vocabulary_cross_entropy(*args, group=group, **options), group)


class CountsNormsTwice(BucketedDDP):
    """Norm that sums squares over ranks that share matrices, also those of whole vectors."""

    def _norm_of(self, gradients: Any) -> Tensor:
        return super()._norm_of(
            # Whole vectors are equal on all ranks, so a sum over ranks counts them P times.
            gradients._replace(replicated=[], cut=[*gradients.replicated, *gradients.cut])
        )


def norms_not_summed(weight: Tensor, group: ProcessGroup) -> Tensor:
    """Leave the gradient of a whole weight as each rank has it, without a sum over ranks."""
    return weight


def shifted_after_the_split(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Shift targets within a chunk.

    The next word of a chunk's last token is on another rank. Here the token gets the first word of
    the rank's next chunk, or none.
    """
    tokens, targets = batch
    # The last position of each chunk has no next word on this rank: -100 leaves it out of the loss.
    return model(tokens, torch.cat((tokens[:, 1:], torch.full_like(targets[:, :1], -100)), 1))


def merged_in_bf16(out: Tensor, lse: Tensor, *part: Tensor) -> None:
    """Round partial results and their log-sum-exp to bf16 between the steps of the ring."""
    merge(out, lse, *part)
    # Both are rounded in place, because the ring goes on with these tensors.
    for kept in (out, lse):
        kept.copy_(kept.bfloat16())


def positions_from_zero(zigzag: Any, tokens: int, device: torch.device) -> Tensor:
    """Return the positions 0, 1, 2, … on every rank, whichever chunks it has."""
    return torch.arange(tokens, device=device, dtype=torch.float32)


def chunks_in_order(ranks: int) -> list[tuple[int, int]]:
    """Give the first two chunks, which see the fewest keys, to the first rank, and so on."""
    return [(2 * rank, 2 * rank + 1) for rank in range(ranks)]


# -- pipelines -------------------------------------------------------------------------------------

run_schedule = Pipeline.run


def not_divided(
    pipeline: Pipeline, model: ParallelModel, loss_fn: Any, batches: Any, scale: float
) -> Tensor:
    """Make gradients of the sum of the micro-batches' losses. The printed loss is their mean."""
    # The pipeline divides the loss by the number of micro-batches, which the factor undoes.
    return run_schedule(pipeline, model, loss_fn, batches, scale * len(batches))


def first_backwards_exchanged(pipeline: Pipeline, batches: int) -> list[Action]:
    """Exchange the first two backwards on the first rank.

    Micro-batch 1's activations then meet the gradient of micro-batch 0, and the reverse.
    """
    actions = gpipe(pipeline.ranks, batches)[pipeline.rank]
    if pipeline.rank == 0:  # the backwards come after all forwards, of which there are `batches`
        actions[batches], actions[batches + 1] = actions[batches + 1], actions[batches]
    return actions


def last_weights_forgotten(pipeline: Pipeline, batches: int) -> list[Action]:
    """Return a schedule that ends with the last B, although each of two ranks has a W left."""
    actions = zero_bubble(pipeline.ranks, batches)[pipeline.rank]
    return [action for action in actions if (action.kind, action.batch) != ("W", batches - 1)]


# -- attention -------------------------------------------------------------------------------------


def healthy_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return this package's tiled attention with several small tiles, for (B, H, T, D) each."""
    with replaced(tiled, "BLOCK", 16):
        return FlashAttention2PyTorch.apply(q, k, v, True)


def without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax as the formula has it, without subtracting the running maximum."""
    # With a maximum of 0, exp(score) is summed as it is.
    wrong = vars(torch) | {"maximum": _maximum_of_zero}
    with replaced(tiled, "torch", SimpleNamespace(**wrong)):
        return healthy_attention(q, k, v)


def _maximum_of_zero(old: Tensor, new: Tensor) -> Tensor:
    """Stand in for `torch.maximum` of the running maximum."""
    return torch.zeros_like(new)


def sees_one_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mask by `k <= q + 1`: every token sees the one that it is to predict."""

    def shifted(*args: Any) -> tuple[int | None, int | None]:
        lo, hi = original(*args)
        return lo, hi + 1

    original = ops.band
    with replaced(ops, "band", shifted):
        return healthy_attention(q, k, v)
