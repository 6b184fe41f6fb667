"""What FSDP alone promises, and a model of people's own classes for its tests.

test_contract.py has the kinds of models that it shares with all strategies, test_fsdp_models.py
many more.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distlab.comm.subgroups import hybrid_mesh
from distlab.parallel.fsdp import FSDP
from tests.parallel.cases import OneProcess, build
from tests.parallel.test_contract import full_gradients, on_two_ranks


class OwnLinear(nn.Module):
    """As people write it in a course: a weight, a product, no cast."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x):
        return x @ self.weight.T


class OwnRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight).to(
            x.dtype
        )


class OwnBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = OwnRMSNorm(width)
        self.up = OwnLinear(width, 13)
        self.down = OwnLinear(13, width)
        self.bias = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))) + self.bias


class OwnModel(nn.Module):
    """Seven columns and eleven rows: nothing divides by two, three or four."""

    def __init__(self, tied=False, frozen=()):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(OwnBlock(7) for _ in range(3))
        self.norm = OwnRMSNorm(7)
        self.head = OwnLinear(7, 11)
        if tied:
            self.head.weight = self.embedding.weight
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def own_loss(model, rank, step, device):
    tokens = torch.randint(
        0, 11, (3, 5), generator=torch.Generator().manual_seed(1000 * rank + step)
    ).to(device)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def own_model(seed, device, **options):
    torch.manual_seed(seed)
    return OwnModel(**options).to(device)


def wrapped(context, *dtype, **options):
    """The model under FSDP; the ranks begin with different ones."""
    return FSDP(
        own_model(context.rank, context.device), *dtype, process_group=context.group, **options
    )


def backward_and_finish(fsdp, context, number=0):
    own_loss(fsdp, context.rank, number, context.device).backward()
    fsdp.finish_gradient_synchronization()


@on_two_ranks
def test_construction_from_meta_takes_the_buffers_and_vectors_of_rank_0(context):
    """Of a module built on meta, which ranks need not have drawn alike.

    Test_behaviour.py has the others.
    """

    def write(module):
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(context.rank)

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        module.register_buffer("counts", torch.zeros(3), persistent=False)
    fsdp = FSDP(module, process_group=context.group, init_fn=write, device=context.device)
    for tensor in (*fsdp.buffers(), module[1].weight, module[1].bias, module[0].bias):
        assert not tensor.any(), "rank 0's are zero"
    assert len(list(fsdp.buffers())) == 4


@pytest.mark.parametrize("on_mesh", [False, True])
@on_two_ranks
def test_a_unit_that_only_an_earlier_micro_batch_used_is_sent_too(context, on_mesh):
    """Check that finish sends gradients that only no_sync() has accumulated on this rank."""
    fsdp = FSDP(
        build("unused-on-some", 0, context.device),
        mesh=hybrid_mesh(context.group, 1) if on_mesh else None,
        process_group=context.group,
    )
    one = OneProcess(
        partial(build, "unused-on-some", 0, context.device), context.world_size, torch.optim.SGD
    )

    def loss(model, rank, branch):
        return model(torch.full((2, 6), 1.0 + rank, device=context.device), branch).sum()

    with fsdp.no_sync():
        loss(fsdp, context.rank, "left").backward()
    fsdp.relearn_order()
    loss(fsdp, context.rank, "right").backward()
    fsdp.finish_gradient_synchronization()
    one.backward(lambda model, rank: loss(model, rank, "left") + loss(model, rank, "right"))
    for name, gradient in full_gradients(fsdp, context).items():
        torch.testing.assert_close(gradient, one.model.get_parameter(name).grad)


@on_two_ranks
def test_a_retained_graph_gives_the_same_gradients_again(context):
    """Check that a second backward over a graph gathers again and keeps nothing stale."""
    fsdp = wrapped(context)
    for step in range(0, 4, 2):  # the second time the order is known and units are fetched ahead
        loss = sum(own_loss(fsdp, context.rank, step + i, context.device) for i in range(2))
        found = []
        for again in (True, False):
            fsdp.zero_grad()
            loss.backward(retain_graph=again)
            fsdp.finish_gradient_synchronization()
            found.append([p.grad.clone() for p in fsdp.parameters()])
        assert all(map(torch.equal, *found))
