"""Hold `distlab check` against wrappers that are known to be wrong or right, in three dtypes, at
several ranks.

    python -m tests.check_matrix --ranks 2 3 8 --dtypes fp32 bf16 fp16

Prints per case whether a mistake was found or missed, whether a right wrapper was accused, and the
name that was given. Exits with 1 if anything is missed or accused. `tests/test_check.py` runs one
case of each kind.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distlab.bench.task import own_task
from distlab.bench.wrappers import as_strategy
from distlab.check import check, signatures
from distlab.parallel import BucketedDDP, Strategy, get_strategy
from distlab.testing import run_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# -- models ----------------------------------------------------------------------------------------


def classified(
    module: nn.Module, dtype: torch.dtype, shape: tuple[int, ...] = (6,)
) -> tuple[Any, ...]:
    """Return a factory's three parts for a module that tells five classes of inputs of this shape
    apart.
    """

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, *shape, generator=generator)
        return inputs.to(dtype), torch.randint(5, (size,), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    return module, batch, loss


def mlp(dtype: torch.dtype) -> tuple[Any, ...]:
    """Two linear layers with a LayerNorm."""
    module = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 5))
    return classified(module.to(dtype), dtype)


def alike(dtype: torch.dtype) -> tuple[Any, ...]:
    """Layers of equal shape, whose gradients can be exchanged."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    return classified(module.to(dtype), dtype)


def convolution(dtype: torch.dtype) -> tuple[Any, ...]:
    """A bias in front of BatchNorm: its exact gradient is zero."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    return classified(module.to(dtype), dtype, (3, 8, 8))


def groups(dtype: torch.dtype) -> tuple[Any, ...]:
    """A bias in front of a GroupNorm of one channel per group: its exact gradient is zero."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 5)
    )
    return classified(module.to(dtype), dtype, (3, 6, 6))


def tied(dtype: torch.dtype) -> tuple[Any, ...]:
    """One matrix in two layers."""
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return classified(nn.Sequential(first, nn.GELU(), last, nn.Linear(6, 5)).to(dtype), dtype)


def frozen(dtype: torch.dtype) -> tuple[Any, ...]:
    """A first layer that does not train."""
    module, batch, loss = mlp(dtype)
    module[0].requires_grad_(False)
    return module, batch, loss


def mixed(dtype: torch.dtype) -> tuple[Any, ...]:
    """A first layer in another dtype than the last."""
    del dtype
    module = nn.Sequential(
        nn.Linear(6, 12).bfloat16(), ToFloat(), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 5)
    )
    return classified(module, torch.bfloat16)


class ToFloat(nn.Module):
    """Casts to fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Attention(nn.Module):
    """Attention with biases: that of the keys has a gradient of exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (
            each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return self.head(x + self.out((scores @ v).transpose(1, 2).flatten(2)))


def attention(dtype: torch.dtype) -> tuple[Any, ...]:
    """A language model of one layer."""

    def batch(size: int, generator: torch.Generator) -> Tensor:
        return torch.randint(40, (size, 13), generator=generator)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).float().mT, tokens[:, 1:])

    return Attention().to(dtype), batch, loss


class Running(nn.Module):
    """Subtracts a running mean of its inputs, also in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        # A new tensor: backward may need the old one.
        self.average = (0.5 * self.average + 0.5 * x.detach().mean(0)).to(x.dtype)
        return x - self.average


def running(dtype: torch.dtype) -> tuple[Any, ...]:
    """Forward reads a buffer that it updates."""
    module = nn.Sequential(Running(6), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))
    return classified(module.to(dtype), dtype)


class Counted(nn.Module):
    """Returns the sum of the losses of those targets that are not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(inputs).float().mT, targets, reduction="sum")


def batch_with_ignored(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences of inputs and targets, of which each batch ignores another share."""
    inputs = torch.randn(size, 8, 6, generator=generator)
    targets = torch.randint(5, (size, 8), generator=generator)
    share = torch.rand(1, generator=generator)
    ignored = torch.rand(size, 8, generator=generator) < share
    ignored[0, 0] = False
    return inputs, targets.masked_fill(ignored, -100)


def counted(dtype: torch.dtype) -> tuple[Any, ...]:
    """A loss that returns (sum, count), where micro-batches differ in the number of targets."""

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = batch_with_ignored(size, generator)
        return inputs.to(dtype), targets

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return model(*batch), (batch[1] != -100).sum()

    return Counted().to(dtype), batch, loss


# -- wrappers --------------------------------------------------------------------------------------


def broadcast(module: nn.Module, group: Any) -> None:
    """Give every rank the values of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, 0, group)


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that have a gradient."""
    return [(name, p) for name, p in module.named_parameters() if p.grad is not None]


class Wrapped(nn.Module):
    """Calls functions around forward and after the last backward. It says that it can accumulate.

    Args:
        finish: `finish(self)`, after the last backward of a step.
        before: `before(self)`, before each forward.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any,
        finish: Callable[["Wrapped"], None],
        before: Callable[["Wrapped"], None] = lambda wrapped: None,
    ):
        super().__init__()
        self.module = module
        self.group = group
        self.finish = finish
        self.before = before
        self.calls = 0  # forwards in this step
        self.steps = 0
        self.kept: dict[str, Tensor] = {}
        broadcast(module, group)

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        self.before(self)
        return self.module(*args)

    def no_sync(self) -> Any:
        """Return a context in which nothing is different: `finish` alone sends."""
        return torch.enable_grad()

    def finish_gradient_synchronization(self) -> None:
        """Finish the step."""
        self.steps += 1
        self.finish(self)
        self.calls = 0


def average(wrapped: Wrapped) -> None:
    """Replace every gradient by its mean."""
    for _, parameter in trained(wrapped.module):
        dist.all_reduce(parameter.grad, group=wrapped.group)
        parameter.grad /= wrapped.group.size()


Wrap = Callable[[nn.Module, Any], Any]


def finishing(
    finish: Callable[[Wrapped], None], before: Callable[[Wrapped], None] = lambda wrapped: None
) -> Wrap:
    """Return a wrapper with this finish."""
    return lambda module, group: Wrapped(module, group, finish, before)


def reducing(reduce: Callable[[str, Tensor, Any], None]) -> Wrap:
    """Return a wrapper whose finish reduces one gradient after the other."""

    def finish(wrapped: Wrapped) -> None:
        for name, parameter in trained(wrapped.module):
            reduce(name, parameter.grad, wrapped.group)

    return finishing(finish)


def mean(name: str, gradient: Tensor, group: Any) -> None:
    """Average one gradient in its dtype."""
    dist.all_reduce(gradient, group=group)
    gradient /= group.size()


# Right ones.


def ddp(module: nn.Module, group: Any) -> nn.Module:
    """Return torch's DDP as it is."""
    return DistributedDataParallel(module, process_group=group)


def fsdp2(module: nn.Module, group: Any) -> nn.Module:
    """Return torch's FSDP2, all in one unit."""
    broadcast(module, group)
    return fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))


def divided_first(name: str, gradient: Tensor, group: Any) -> None:
    """Divide, then add."""
    gradient /= group.size()
    dist.all_reduce(gradient, group=group)


def added_backwards(name: str, gradient: Tensor, group: Any) -> None:
    """Add from the last rank to the first, in the gradient's dtype."""
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    dist.all_gather(parts, gradient, group=group)
    gradient.zero_()
    for part in reversed(parts):
        gradient += part
    gradient /= group.size()


def added_in_fp32(name: str, gradient: Tensor, group: Any) -> None:
    """Add in fp32."""
    wide = gradient.float()
    mean(name, wide, group)
    gradient.copy_(wide)


def overlapped(module: nn.Module, group: Any) -> Any:
    """Send in a hook of each gradient, wait and divide in finish: right with one backward per step.

    A second backward sends the first one's sum again, which is wrong however fast messages are.
    """
    broadcast(module, group)
    works: dict[nn.Parameter, Any] = {}

    def send(parameter: nn.Parameter) -> None:
        works[parameter] = dist.all_reduce(parameter.grad, group=group, async_op=True)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(send)

    def finish() -> None:
        for parameter, work in works.items():
            work.wait()
            parameter.grad /= group.size()
        works.clear()

    return module, finish


class OwnMethod(nn.Module):
    """The handout's form: a module with `finish_gradient_synchronization()`, returned alone."""

    def __init__(self, module: nn.Module, group: Any):
        super().__init__()
        self.module = module
        _, self.finish = overlapped(module, group)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def finish_gradient_synchronization(self) -> None:
        self.finish()


def buffers_of_main(wrapped: Wrapped) -> None:
    """Give all ranks rank 0's buffers."""
    for buffer in wrapped.module.buffers():
        dist.broadcast(buffer, 0, wrapped.group)


def average_then_buffers(wrapped: Wrapped) -> None:
    """Average, then give all ranks rank 0's buffers."""
    average(wrapped)
    buffers_of_main(wrapped)


# Wrong ones.


def not_broadcast(module: nn.Module, group: Any) -> Any:
    """Leave ranks with the weights that each has drawn."""

    def finish() -> None:
        for name, parameter in trained(module):
            mean(name, parameter.grad, group)

    return module, finish


def summed(name: str, gradient: Tensor, group: Any) -> None:
    """Add, and do not divide."""
    dist.all_reduce(gradient, group=group)


def divided_twice(name: str, gradient: Tensor, group: Any) -> None:
    """Divide once too often."""
    mean(name, gradient, group)
    gradient /= group.size()


def unreduced(name: str, gradient: Tensor, group: Any) -> None:
    """Send nothing."""


def never_summed(name: str, gradient: Tensor, group: Any) -> None:
    """Divide, and send nothing."""
    gradient /= group.size()


def zeroed(name: str, gradient: Tensor, group: Any) -> None:
    """Lose the gradient."""
    gradient.zero_()


def of_main(name: str, gradient: Tensor, group: Any) -> None:
    """Take rank 0's gradient for the mean."""
    dist.broadcast(gradient, 0, group)


def one_missing(name: str, gradient: Tensor, group: Any) -> None:
    """Add without the last rank."""
    if group.rank() == group.size() - 1:
        gradient.zero_()
    mean(name, gradient, group)


def one_missing_renormalized(name: str, gradient: Tensor, group: Any) -> None:
    """Average over all ranks but the last."""
    one_missing(name, gradient, group)
    gradient *= group.size() / max(group.size() - 1, 1)


def times_micro_batches(name: str, gradient: Tensor, group: Any) -> None:
    """Do not divide by the micro-batches."""
    mean(name, gradient, group)
    gradient *= group.size() + 1


def one_bias_missing(name: str, gradient: Tensor, group: Any) -> None:
    """Do not send the last layer's bias."""
    if name != "3.bias":
        mean(name, gradient, group)


def scaled(name: str, gradient: Tensor, group: Any) -> None:
    """Multiply by a factor that is none of the usual ones."""
    mean(name, gradient, group)
    gradient *= 1.4


def scaled_by_rank(name: str, gradient: Tensor, group: Any) -> None:
    """Multiply by another factor on each rank."""
    mean(name, gradient, group)
    gradient *= 1.4 + group.rank()


def weighed(name: str, gradient: Tensor, group: Any) -> None:
    """Let rank 0 weigh 1.6 times what it should, and the others less."""
    ranks = group.size()
    gradient *= (1.6 if group.rank() == 0 else 1 - 0.6 / (ranks - 1)) / ranks
    dist.all_reduce(gradient, group=group)


def noisy(name: str, gradient: Tensor, group: Any) -> None:
    """Add noise of a third of the gradient, the same on all ranks."""
    mean(name, gradient, group)
    generator = torch.Generator().manual_seed(gradient.numel())
    noise = torch.randn(gradient.shape, generator=generator)
    gradient += (noise * gradient.float().square().mean().sqrt() / 3).to(gradient.dtype)


def one_element(name: str, gradient: Tensor, group: Any) -> None:
    """Change the sign of the largest element of each tensor."""
    mean(name, gradient, group)
    flat = gradient.view(-1)
    flat[flat.abs().argmax()] *= -1


def in_bf16(name: str, gradient: Tensor, group: Any) -> None:
    """Reduce an fp32 gradient in bf16."""
    sent = gradient.bfloat16()
    mean(name, sent, group)
    gradient.copy_(sent)


def garbage(name: str, gradient: Tensor, group: Any) -> None:
    """Write what does not belong there into a gradient that is zero, or else add it."""
    mean(name, gradient, group)
    if name in ("0.bias", "k.bias"):
        gradient += 0.01


def keep_first(wrapped: Wrapped) -> None:
    """Keep what the first micro-batch gave."""
    if wrapped.calls == 2:
        wrapped.kept = {name: p.grad.clone() for name, p in trained(wrapped.module)}


def send_first(wrapped: Wrapped) -> None:
    """Average what was kept."""
    for name, parameter in trained(wrapped.module):
        if name in wrapped.kept:
            parameter.grad.copy_(wrapped.kept[name])
    wrapped.kept = {}
    average(wrapped)


def drop_earlier(wrapped: Wrapped) -> None:
    """Lose what earlier micro-batches gave."""
    for _, parameter in trained(wrapped.module):
        parameter.grad.zero_()


def a_step_late(wrapped: Wrapped) -> None:
    """Give the previous step's mean, in the first step zeros."""
    average(wrapped)
    fresh = {name: p.grad.clone() for name, p in trained(wrapped.module)}
    for name, parameter in trained(wrapped.module):
        parameter.grad.copy_(wrapped.kept.get(name, torch.zeros_like(parameter)))
    wrapped.kept = fresh


def stale_after(wrapped: Wrapped) -> None:
    """Give the first step's mean from the second on."""
    average(wrapped)
    for name, parameter in trained(wrapped.module):
        if name in wrapped.kept:
            parameter.grad.copy_(wrapped.kept[name])
        wrapped.kept[name] = parameter.grad.clone()


def not_reset(wrapped: Wrapped) -> None:
    """Add the previous step's mean."""
    average(wrapped)
    for name, parameter in trained(wrapped.module):
        fresh = parameter.grad.clone()
        if name in wrapped.kept:
            parameter.grad += wrapped.kept[name]
        wrapped.kept[name] = fresh


def averaged_over_steps(wrapped: Wrapped) -> None:
    """Mix with the previous step's mean."""
    average(wrapped)
    for name, parameter in trained(wrapped.module):
        if name in wrapped.kept:
            parameter.grad.mul_(0.5).add_(wrapped.kept[name], alpha=0.5)
        wrapped.kept[name] = parameter.grad.clone()


def remember(wrapped: Wrapped) -> None:
    """Average, and keep the values before the update."""
    average(wrapped)
    wrapped.kept = {name: p.detach().clone() for name, p in trained(wrapped.module)}


@torch.no_grad()
def update_again(wrapped: Wrapped) -> None:
    """Make the last update once more."""
    if wrapped.calls == 1 and wrapped.kept:
        for name, parameter in wrapped.module.named_parameters():
            if name in wrapped.kept:
                parameter.data += parameter.data - wrapped.kept[name]


def lr_times_ranks(module: nn.Module, group: Any) -> Any:
    """Scale the learning rate by the number of ranks."""
    wrapped = Wrapped(module, group, average)

    def make_optimizer(parameters: Any, cls: Any, lr: float, **options: Any) -> Any:
        return cls(parameters, lr=group.size() * lr, **options)

    return wrapped, wrapped.finish_gradient_synchronization, make_optimizer


@torch.no_grad()
def undo_update(wrapped: Wrapped) -> None:
    """Undo the last update."""
    if wrapped.calls == 1 and wrapped.kept:
        for name, parameter in wrapped.module.named_parameters():
            if name in wrapped.kept:
                parameter.data.copy_(wrapped.kept[name])


@torch.no_grad()
def undo_on_last_rank(wrapped: Wrapped) -> None:
    """Undo the last update on one rank."""
    if wrapped.group.rank() == wrapped.group.size() - 1:
        undo_update(wrapped)


@torch.no_grad()
def decay(wrapped: Wrapped) -> None:
    """Shrink all values."""
    average(wrapped)
    for _, parameter in trained(wrapped.module):
        parameter.data *= 0.98


@torch.no_grad()
def change_frozen(wrapped: Wrapped) -> None:
    """Zero what does not train, in the last step."""
    average(wrapped)
    if wrapped.steps == 2:
        for parameter in wrapped.module.parameters():
            if not parameter.requires_grad:
                parameter.zero_()


@torch.no_grad()
def damage_buffers(wrapped: Wrapped) -> None:
    """Change the buffers of the last rank."""
    average(wrapped)
    if wrapped.group.rank() == wrapped.group.size() - 1:
        for buffer in wrapped.module.buffers():
            if buffer.is_floating_point():
                buffer += 1


def exchanged(wrapped: Wrapped) -> None:
    """Send two layers of equal shape in another order on the last rank."""
    order = [parameter for _, parameter in trained(wrapped.module)]
    if wrapped.group.rank() == wrapped.group.size() - 1:
        # Weight and bias of the first layer against those of the second.
        order[:4] = order[2:4] + order[:2]
    for parameter in order:
        mean("", parameter.grad, wrapped.group)


def tied_twice(wrapped: Wrapped) -> None:
    """Reduce over names, so a tied matrix twice."""
    for _, parameter in wrapped.module.named_parameters(remove_duplicate=False):
        dist.all_reduce(parameter.grad, group=wrapped.group)
    for _, parameter in trained(wrapped.module):
        parameter.grad /= wrapped.group.size()


class MeanOfMeans(Wrapped):
    """Divides each gradient of a sum by the targets of its micro-batch or rank, then averages.

    Args:
        over: what weighs alike: "micro-batches" or "ranks".
    """

    def __init__(self, module: nn.Module, group: Any, over: str):
        super().__init__(module, group, self.average)
        self.over = over
        self.count = torch.zeros(())  # targets of this rank in this step

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count = (targets != -100).sum()
        self.count += count
        loss = super().forward(inputs, targets)
        if self.over == "micro-batches":
            loss.register_hook(lambda gradient: gradient / count)
        return loss

    def average(self, wrapped: Wrapped) -> None:
        """Average what was divided. The trainer still divides by the mean of the ranks' counts."""
        for _, parameter in trained(self.module):
            parameter.grad /= self.calls if self.over == "micro-batches" else self.count
        average(wrapped)
        dist.all_reduce(self.count, group=self.group)
        for _, parameter in trained(self.module):
            parameter.grad *= self.count / self.group.size()
        self.count = torch.zeros(())


def mean_of_micro_batches(module: nn.Module, group: Any) -> nn.Module:
    """Weigh all micro-batches alike."""
    return MeanOfMeans(module, group, "micro-batches")


def mean_of_ranks(module: nn.Module, group: Any) -> nn.Module:
    """Weigh all ranks alike."""
    return MeanOfMeans(module, group, "ranks")


# Wrappers that return the norm by which they clip. Here nothing is clipped.


def squares_of(parameters: Any) -> Tensor:
    """Return the sum of squares of the gradients, of DTensors that of this rank's part."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        gradient = parameter.grad
        if hasattr(gradient, "to_local"):
            gradient = gradient.to_local()
        total += gradient.double().square().sum()
    return total


def summed_over(group: Any, value: Tensor) -> Tensor:
    """Return the sum of a number over the ranks."""
    dist.all_reduce(value, group=group)
    return value


def ddp_with_norm(module: nn.Module, group: Any) -> Any:
    """torch's DDP and torch's clipping."""
    clip = partial(nn.utils.clip_grad_norm_, list(module.parameters()), 1e9)
    return ddp(module, group), clip


def fsdp2_with_norm(module: nn.Module, group: Any) -> Any:
    """FSDP2 and torch's clipping, which returns a DTensor."""
    sharded = fsdp2(module, group)
    return sharded, partial(nn.utils.clip_grad_norm_, list(sharded.parameters()), 1e9)


def bucketed_with_norm(module: nn.Module, group: Any) -> nn.Module:
    """distlab's DDP, which has `grad_norm()`."""
    return BucketedDDP(module, process_group=group)


class WithClipping(Wrapped):
    """Has the method that clips, and not the norm as the result of finish."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of this rank, which are those of all ranks."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


def with_clipping(module: nn.Module, group: Any) -> nn.Module:
    """Average by hand, clip by torch."""
    return WithClipping(module, group, average)


class WithWrongNorm(Wrapped):
    """Has a method `grad_norm()` that gives each of P ranks' equal squares a place in the sum."""

    def grad_norm(self) -> Tensor:
        """Add the squares of all ranks."""
        return summed_over(self.group, squares_of(self.module.parameters())).sqrt()


def norm_times_ranks(module: nn.Module, group: Any) -> nn.Module:
    """Count replicated gradients P times."""
    return WithWrongNorm(module, group, average)


def norm_of_mixed_shards(module: nn.Module, group: Any) -> Any:
    """Shard the first layer, replicate the others, and add the squares of all over ranks."""
    broadcast(module, group)
    fully_shard(module[0], mesh=DeviceMesh.from_group(group, "cpu"))

    def finish() -> Tensor:
        for parameter in module[1:].parameters():
            mean("", parameter.grad, group)
        return summed_over(group, squares_of(module.parameters())).sqrt()

    return module, finish


def norm_before_averaging(module: nn.Module, group: Any) -> Any:
    """Take the norm of each rank's own gradient."""
    broadcast(module, group)

    def finish() -> float:
        norm = squares_of(module.parameters()).sqrt().item()
        for parameter in module.parameters():
            mean("", parameter.grad, group)
        return norm

    return module, finish


def norm_of_shards(norm: Callable[[Tensor, Any], Tensor]) -> Wrap:
    """Return FSDP2, whose finish makes a norm of the sum of squares of this rank's shards."""

    def wrap(module: nn.Module, group: Any) -> Any:
        sharded = fsdp2(module, group)
        return sharded, lambda: norm(squares_of(sharded.parameters()), group)

    return wrap


def of_all_shards(squares: Tensor, group: Any) -> Tensor:
    """Add the squares, then take the root."""
    return summed_over(group, squares).sqrt()


def of_own_shard(squares: Tensor, group: Any) -> Tensor:
    """Take the root of this rank's squares."""
    return squares.sqrt()


def of_all_but_first(squares: Tensor, group: Any) -> Tensor:
    """Leave out the shards of rank 0. Those of the last rank may be empty."""
    is_first = group.rank() == 0
    return summed_over(group, squares * (not is_first)).sqrt()


def roots_added(squares: Tensor, group: Any) -> Tensor:
    """Add roots in place of squares."""
    return summed_over(group, squares.sqrt())


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model under a wrapper.

    Attributes:
        name: unique.
        model: factory that takes a dtype.
        wrap: wrapper, or the name of a strategy.
        right: whether it is right.
        signatures: the names that are right in fp32, or how they begin; none: any.
        dtypes: in which it is what `right` says.
        least_ranks: number of ranks from which on it is.
        accumulates: whether it is right with several micro-batches per step.
    """

    name: str
    model: Callable[[torch.dtype], tuple[Any, ...]]
    wrap: Wrap | str
    right: bool = True
    signatures: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    least_ranks: int = 2
    accumulates: bool = True


def _right() -> list[Case]:
    models = (mlp, convolution, groups, attention, tied, frozen, running, mixed)
    cases = [Case(f"by hand, {model.__name__}", model, reducing(mean)) for model in models]
    cases += [Case(f"torch DDP, {model.__name__}", model, ddp) for model in models]
    cases += [
        Case(f"FSDP2, {model.__name__}", model, fsdp2)
        for model in (mlp, convolution, groups, attention)
    ]
    for name in ("naive", "bucketed", "zero1", "zero2", "fsdp"):
        cases += [Case(f"{name}, mlp", mlp, name), Case(f"{name}, counted", counted, name)]
    cases += [
        Case(f"{name}, attention", attention, name)
        for name in ("bucketed", "zero1", "fsdp", "fsdp2")
    ]
    cases += [
        Case("by hand, counted", counted, reducing(mean)),
        Case("torch DDP, counted", counted, ddp),
        Case("FSDP2, counted", counted, fsdp2),
        Case("norm of DDP, counted", counted, ddp_with_norm),
        Case("norm of FSDP2", mlp, fsdp2_with_norm),
        Case("norm of bucketed, counted", counted, bucketed_with_norm),
        Case("norm of a method", attention, with_clipping),
        Case("norm of all shards", mlp, norm_of_shards(of_all_shards)),
        Case("bucketed, convolution", convolution, "bucketed"),
        Case("divided first", attention, reducing(divided_first)),
        Case("added backwards", attention, reducing(added_backwards)),
        Case("added in fp32", attention, reducing(added_in_fp32)),
        Case("buffers of rank 0 in finish", running, finishing(average_then_buffers)),
        Case("buffers of rank 0 in forward", running, finishing(average, buffers_of_main)),
        Case("overlapped", attention, overlapped, accumulates=False),
        Case("overlapped, convolution", convolution, overlapped, accumulates=False),
        Case("overlapped, own method", mlp, OwnMethod, accumulates=False),
    ]
    return cases


def _wrong() -> list[Case]:
    def wrong(name: str, model: Any, wrap: Any, *named: str, **limits: Any) -> Case:
        return Case(name, model, wrap, right=False, signatures=named, **limits)

    missing = (signatures.MISSING, signatures.OWN_DIVIDED, signatures.ONE_RANK)
    return [
        wrong("not broadcast", mlp, not_broadcast, signatures.NOT_BROADCAST),
        wrong("summed", attention, reducing(summed), signatures.SUMMED),
        wrong("summed, convolution", convolution, reducing(summed), signatures.SUMMED),
        wrong("summed, mixed", mixed, reducing(summed), signatures.SUMMED),
        wrong("divided twice", attention, reducing(divided_twice), signatures.DIVIDED),
        wrong("divided twice, mixed", mixed, reducing(divided_twice), signatures.DIVIDED),
        wrong("unreduced", attention, reducing(unreduced), signatures.OWN),
        wrong("unreduced, mixed", mixed, reducing(unreduced), signatures.OWN),
        wrong("unreduced, frozen", frozen, reducing(unreduced), signatures.OWN),
        wrong("never summed", mlp, reducing(never_summed), signatures.OWN_DIVIDED),
        wrong("zeroed", mlp, reducing(zeroed), signatures.ABSENT),
        wrong("zeroed, mixed", mixed, reducing(zeroed), signatures.ABSENT),
        wrong("of rank 0", attention, reducing(of_main), signatures.ONE_RANK),
        wrong("one missing", attention, reducing(one_missing), *missing),
        wrong("one missing, groups", groups, reducing(one_missing), *missing),
        wrong("one missing, renormalized", mlp, reducing(one_missing_renormalized), *missing),
        wrong("times M", mlp, reducing(times_micro_batches), signatures.MICRO_SUMMED),
        wrong("one bias missing", mlp, reducing(one_bias_missing), signatures.OWN),
        wrong("scaled", mlp, reducing(scaled), signatures.SCALED),
        wrong("scaled by rank", mlp, reducing(scaled_by_rank), signatures.APART),
        wrong("weighed", attention, reducing(weighed), signatures.WEIGHED),
        wrong("weighed, counted", counted, reducing(weighed), signatures.WEIGHED),
        wrong("noisy", attention, reducing(noisy), signatures.UNKNOWN),
        wrong("one element", mlp, reducing(one_element), signatures.UNKNOWN),
        wrong("in bf16", mlp, reducing(in_bf16), signatures.ROUNDED, dtypes=("fp32",)),
        wrong("garbage, convolution", convolution, reducing(garbage), signatures.UNKNOWN),
        wrong("garbage, attention", attention, reducing(garbage), signatures.UNKNOWN),
        wrong("first micro-batch", mlp, finishing(send_first, keep_first), signatures.FIRST),
        wrong("last micro-batch", mlp, finishing(average, drop_earlier), signatures.LAST),
        wrong("a step late", mlp, finishing(a_step_late), signatures.PREVIOUS),
        wrong("stale after", mlp, finishing(stale_after), signatures.PREVIOUS),
        wrong("not reset", mlp, finishing(not_reset), signatures.ADDED),
        wrong("averaged over steps", mlp, finishing(averaged_over_steps), signatures.MIXED),
        wrong("stepped twice", mlp, finishing(remember, update_again), signatures.STEPPED_TWICE),
        wrong(
            "lr × P",
            mlp,
            lr_times_ranks,
            *(signatures.STEPPED_TWICE_OR_LR, signatures.STEPPED_P_TIMES),
        ),
        wrong("not stepped", mlp, finishing(remember, undo_update), signatures.NOT_STEPPED),
        wrong("not sent", mlp, finishing(remember, undo_on_last_rank), signatures.NOT_SENT),
        wrong("decay", attention, finishing(decay), signatures.DECAYED),
        wrong("frozen changed", frozen, finishing(change_frozen), signatures.FROZEN),
        wrong("buffers damaged", convolution, finishing(damage_buffers), signatures.BUFFER),
        wrong("exchanged", alike, finishing(exchanged), signatures.OTHER_TENSOR),
        wrong("mean of micro-batches", counted, mean_of_micro_batches, signatures.MEANS),
        wrong("mean of ranks", counted, mean_of_ranks, signatures.MEANS),
        wrong("summed, counted", counted, reducing(summed), signatures.SUMMED),
        wrong("norm times P", attention, norm_times_ranks, signatures.NORM_TIMES_RANKS),
        wrong("norm of mixed shards", mlp, norm_of_mixed_shards, signatures.NORM_TIMES_RANKS),
        wrong("norm before averaging", mlp, norm_before_averaging, signatures.NORM_LOCAL),
        wrong(
            "norm before averaging, counted", counted, norm_before_averaging, signatures.NORM_LOCAL
        ),
        wrong("norm of own shard", mlp, norm_of_shards(of_own_shard), signatures.NORM_LOCAL),
        wrong("norm without a shard", mlp, norm_of_shards(of_all_but_first), signatures.NORM_PART),
        wrong("norm by roots", mlp, norm_of_shards(roots_added), signatures.NORM_ROOTS),
        wrong("tied twice", tied, finishing(tied_twice), signatures.TIED),
    ]


CASES = {case.name: case for case in (*_right(), *_wrong())}


def strategy_of(case: Case) -> Strategy:
    """Return the wrapper as a strategy."""
    if isinstance(case.wrap, str):
        return get_strategy(case.wrap)
    return as_strategy(case.name, case.wrap)


FACTORIES = {}
for _case in CASES.values():
    for _name, _dtype in DTYPES.items():
        FACTORIES[f"{_case.model.__name__}_{_name}"] = partial(_case.model, _dtype)
globals().update(FACTORIES)  # so that they have names of the form package.module:function


def judge(context: Any, names: list[str], dtype: str) -> list[Any]:
    """Return the verdict on each case, or the error in its place. Runs on every rank."""
    found = []
    for name in names:
        case = CASES[name]
        task = own_task(f"{__name__}:{case.model.__name__}_{dtype}", 4)
        try:
            found.append(check(context, task, strategy_of(case)))
        except (ValueError, OSError) as error:
            found.append(error)
    return found


def chosen(ranks: int, dtype: str, part: str = "") -> list[str]:
    """Return the names of the cases for this number of ranks in this dtype.

    Args:
        ranks: number of ranks.
        dtype: name in `DTYPES`.
        part: part of the names.
    """
    names = []
    for name, case in CASES.items():
        runs_here = dtype in case.dtypes and ranks >= case.least_ranks
        if runs_here and part in name:
            names.append(name)
    return names


def outcome(case: Case, dtype: str, verdict: Any) -> tuple[str, str]:
    """Return what is to be said of a verdict, and the names that it gave."""
    if isinstance(verdict, Exception):
        return "ERROR", str(verdict)
    names = sorted({finding.signature for finding in verdict.findings})
    if case.right:
        good = verdict.right and bool(verdict.accumulation) != case.accumulates
        return ("right" if good else "FALSE ALARM"), "; ".join(names)
    if verdict.right:
        return "MISSED", ""
    named = (
        dtype != "fp32"
        or not case.signatures
        or all(name.startswith(case.signatures) for name in names)
    )
    return ("found" if named else "found, MISNAMED"), "; ".join(names)


def main() -> int:
    """Run the cases and print them; return 1 if one is missed or accused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 8])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--only", default="", help="part of the names of cases")
    options = parser.parse_args()
    failed = 0
    total = 0
    for ranks in options.ranks:
        for dtype in options.dtypes:
            rows = []
            names = chosen(ranks, dtype, options.only)
            verdicts = run_ranks(judge, ranks, names, dtype, deadline_s=1800.0)[0]
            for name, verdict in zip(names, verdicts, strict=True):
                said, signature = outcome(CASES[name], dtype, verdict)
                rows.append((name, dtype, ranks, said, signature[:100]))
                failed += said.isupper() or "MISNAMED" in said
                total += 1
            print(tabulate(rows, ("case", "dtype", "ranks", "verdict", "name")), flush=True)
    print(f"{total} cases, {failed} missed, accused or misnamed")
    return int(failed > 0)


if __name__ == "__main__":
    # As an imported module, whose functions the rank processes know by name.
    from tests import check_matrix

    sys.exit(check_matrix.main())
