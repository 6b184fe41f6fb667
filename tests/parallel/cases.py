"""Models and per-rank losses for the contract suite, and the one-process reference they are held
against.

Every rank trains on different data and starts from different weights, so that a missing broadcast
or a missing reduction cannot pass unnoticed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoBranches(nn.Module):
    """A trunk and two heads; a forward uses the heads it is told to, such as "left right"."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)
        self.never = nn.Linear(8, 3)

    def forward(self, x, branches):
        hidden = F.relu(self.trunk(x))
        return sum(getattr(self, branch)(hidden) for branch in branches.split())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class MixedTypes(nn.Module):
    """fp32, bf16 and fp64 parameters: three buckets' worth of types in one model."""

    def __init__(self):
        super().__init__()
        self.fp32 = nn.Linear(6, 5)
        self.bf16 = nn.Linear(5, 5).to(torch.bfloat16)
        self.fp64 = nn.Linear(5, 2).to(torch.float64)

    def forward(self, x):
        return self.fp64(self.bf16(self.fp32(x).to(torch.bfloat16)).to(torch.float64))


class OddStrides(nn.Module):
    """A transposed weight, a channels_last convolution and a weight with holes between its rows."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(8, 6).mul(0.3).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.sliced = nn.Parameter(torch.randn(4, 10).mul(0.3)[:, ::2])

    def forward(self, x):
        image = (x @ self.transposed)[:, :3, None, None].expand(-1, 3, 5, 5)
        return self.conv(image).mean((2, 3)) @ self.sliced


def _frozen():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    return model


def _plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def _batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _inputs(rank, step):
    return drawn(1000 * rank + step, 4, 6)


def _square_loss(model, rank, step, device):
    return model(_inputs(rank, step).to(device)).square().mean()


def _token_loss(model, rank, step, device):
    tokens = torch.randint(
        0, 11, (3, 5), generator=torch.Generator().manual_seed(1000 * rank + step)
    )
    logits = model(tokens.to(device))
    return F.cross_entropy(logits.flatten(0, 1), tokens.to(device).roll(1, 1).flatten())


def _branch_loss(model, rank, step, device):
    """Rank 1 uses the right head where the others use the left, so their gradients become ready
    differently.
    """
    branch = "right" if (rank + step) % 2 else "left"
    return model(_inputs(rank, step).to(device), branches=branch).square().mean()


def _same_branch_loss(model, rank, step, device):
    """All ranks use the left head: the right one is unused everywhere."""
    return model(_inputs(rank, step).to(device), "left").square().mean()


@dataclass(frozen=True)
class Case:
    """`build()` makes the model from the global generator, `loss(model, rank, step, device)` a
    step's loss.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int, torch.device], Tensor] = _square_loss


CASES = {
    "plain": Case(_plain),
    "tied": Case(Tied, _token_loss),
    "frozen": Case(_frozen),
    "unused-on-some": Case(TwoBranches, _branch_loss),
    "unused-everywhere": Case(TwoBranches, _same_branch_loss),
    "batch-norm": Case(_batch_norm),
    "mixed-dtypes": Case(MixedTypes),
    "odd-strides": Case(OddStrides),
}


def build(case, seed, device):
    # else two equal convolutions may differ in their last bit
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(seed)
    return CASES[case].build().to(device)


def cast_matrices(module, dtype):
    """The module with what FSDP casts in `dtype`: not the vectors of modules that hold no
    matrix.
    """
    if dtype is None:
        return module
    for each in module.modules():
        has_matrix = any(parameter.ndim >= 2 for parameter in each.parameters())
        if not has_matrix:
            continue
        for parameter in each._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(dtype)
    return module


class OneProcess:
    """The micro-batches of all ranks on copies of one fp32 model, averaged in rank order; any
    optimizer.

    Args:
        make: builds the model, each time with the same values. Not copied: deepcopy closes the
            holes between strided rows, and the product rounds differently.
        compute_dtype: the copies' matrices, and the vectors of modules that hold matrices, have
            this dtype; gradients are averaged in fp32.
    """

    def __init__(self, make, world_size, optimizer_cls, compute_dtype=None, **options):
        self.model = make()
        self.replicas = [cast_matrices(make(), compute_dtype) for _ in range(world_size)]
        self.optimizer = optimizer_cls(
            [p for p in self.model.parameters() if p.requires_grad], **options
        )

    def backward(self, loss):
        """`loss(model, rank)` on every replica; afterwards the model has the mean gradients."""
        for replica in self.replicas:
            replica.load_state_dict(self.model.state_dict())
        for rank, replica in enumerate(self.replicas):
            loss(replica, rank).backward()
        for mine, *same in zip(
            *(model.parameters() for model in (self.model, *self.replicas)), strict=True
        ):
            if mine.requires_grad and any(p.grad is not None for p in same):
                total = torch.zeros_like(mine)
                for parameter in same:
                    total += 0 if parameter.grad is None else parameter.grad.to(mine.dtype)
                mine.grad = total / len(same)

    def zero_grad(self):
        for model in [self.model, *self.replicas]:
            model.zero_grad()


class Reference(OneProcess):
    """The same of a case, with plain SGD."""

    def __init__(self, case, world_size, device, lr=0.1):
        super().__init__(partial(build, case, 0, device), world_size, torch.optim.SGD, lr=lr)
        self.loss, self.device = CASES[case].loss, device

    def backward(self, step):
        """Add every rank's micro-batch of this step."""
        super().backward(lambda model, rank: self.loss(model, rank, step, self.device))

    def step(self):
        self.optimizer.step()
        self.zero_grad()


def by_op(recorder):
    """Return operation → (calls, bytes) of the calls of a `CollectiveRecorder`."""
    calls = Counter()
    sent_bytes = Counter()
    for call in recorder.calls:
        calls[call.op] += 1
        sent_bytes[call.op] += call.bytes
    return {op: (calls[op], sent_bytes[op]) for op in calls}
