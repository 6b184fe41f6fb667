"""Whose state a sharded optimizer takes at load: this rank's, or its part of the whole, and nothing
else silently.
"""

import copy
import io

import pytest
import torch
from torch import nn

from distlab.checkpoint.train_state import group_options
from distlab.optim import Muon
from distlab.parallel import FSDP, STRATEGIES
from tests.parallel.test_contract import on_two_ranks

OPTIONS = {"lr": 0.05}


class Net(nn.Module):
    """Matrices of several shapes, one of them transposed in memory, a vector, and perhaps a frozen
    layer.
    """

    def __init__(self, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
        self.blocks[1].weight = nn.Parameter(self.blocks[1].weight.detach().t().contiguous().t())
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def built(context, strategy, optimizer_cls, **kwargs):
    return STRATEGIES[strategy].build(Net(**kwargs), context.group, optimizer_cls, dict(OPTIONS))


def step(model, optimizer, number):
    """Train on the same data on every rank, so that one process has the same gradients."""
    optimizer.zero_grad()
    model(
        torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    ).square().sum().backward()
    getattr(model, "finish_gradient_synchronization", lambda: None)()
    optimizer.step()


def in_one_process(optimizer_cls, frozen):
    """Train the module alone.

    Returns it, its optimizer, and both as they were after the first step.
    """
    module = Net(frozen)
    groups = optimizer_cls.split(module) if optimizer_cls is Muon else module.parameters()
    optimizer = optimizer_cls(groups, **OPTIONS)
    step(module, optimizer, 1)
    weights, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(module, optimizer, 2)
    step(module, optimizer, 3)
    return module, weights, state


@pytest.mark.parametrize("frozen", [False, True])
@on_two_ranks
def test_the_state_of_one_process_is_continued_by_shards(context, frozen):
    for optimizer_cls in (torch.optim.AdamW, Muon):
        module, weights, state = in_one_process(optimizer_cls, frozen)
        for strategy in ("zero1", "zero2", "fsdp", "hsdp", "sharded-optimizer", "bucketed"):
            model, optimizer = built(context, strategy, optimizer_cls, frozen=frozen)
            step(model, optimizer, 9)  # what it had is overwritten
            if strategy in ("fsdp", "hsdp"):
                model.load_full_params(weights)
            else:
                getattr(optimizer, "synchronize", lambda: None)()
                model.module.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
            step(model, optimizer, 2)
            step(model, optimizer, 3)
            for (name, value), expected in zip(
                model.full_parameters().items(), module.parameters(), strict=True
            ):
                torch.testing.assert_close(
                    value, expected, rtol=0, atol=2e-6, msg=f"{strategy} {name}"
                )
            model.close(restore=False)


@on_two_ranks
def test_the_shards_of_another_rank_are_refused(context):
    """A file that rank 0 wrote, read by all: shapes agree wherever ranks divide the rows."""
    for optimizer_cls in (torch.optim.AdamW, torch.optim.SGD, Muon):
        model, optimizer = built(context, "fsdp", optimizer_cls)
        step(model, optimizer, 1)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        files = [None, None]
        torch.distributed.all_gather_object(files, file.getvalue())
        for rank in range(2):
            saved = torch.load(io.BytesIO(files[rank]))
            if rank == context.rank:
                optimizer.load_state_dict(saved)
                continue
            with pytest.raises(
                ValueError,
                match=f"shards of rank {rank} of 2, and this is rank {context.rank} of 2",
            ):
                optimizer.load_state_dict(saved)
            saved["shards"] = {"rank": context.rank, "ranks": 3}
            with pytest.raises(
                ValueError, match=f"rank {context.rank} of 3, and this is rank {context.rank} of 2"
            ):
                optimizer.load_state_dict(saved)
        step(model, optimizer, 2)
        model.close(restore=False)


@on_two_ranks
def test_state_of_other_parameters_is_refused_at_load(context):
    """Of another order, or other groups.

    It failed in the next step, by two sizes that do not match.
    """
    for optimizer_cls in (torch.optim.AdamW, torch.optim.RMSprop):
        module = Net()
        other = optimizer_cls([*module.parameters()][::-1], **OPTIONS)
        step(module, other, 1)
        for strategy, message in (
            (
                "zero1",
                r"the saved .* of 'blocks\.0\.weight' has shape \(4,\), and the parameter \(6, 4\)",
            ),
            ("fsdp", r"has .* of parameter 0 in shape \(4,\)\. The parameter has shape \(6, 4\)"),
        ):
            model, optimizer = built(context, strategy, optimizer_cls)
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(other.state_dict())
            model.close(restore=False)
    model, optimizer = built(context, "zero1", torch.optim.AdamW)
    few = torch.optim.AdamW([*Net().parameters()][:2], **OPTIONS)
    with pytest.raises(
        ValueError, match=r"hold \[2\] parameters by number, and this optimizer's groups \[4\] of a"
    ):
        optimizer.load_state_dict(few.state_dict())


@on_two_ranks
def test_an_optimizer_that_no_hook_has_seen_yet(context):
    """Built by hand and loaded before its first step, as scripts that resume do."""
    module, weights, state = in_one_process(torch.optim.AdamW, False)

    def by_hand():
        model = FSDP(Net(), process_group=context.group)
        return model, torch.optim.AdamW(model.parameters(), **OPTIONS)

    model, optimizer = by_hand()  # takes its part of the whole state
    model.load_full_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    step(model, optimizer, 2)
    step(model, optimizer, 3)
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, module.state_dict()[name], rtol=0, atol=2e-6, msg=name)

    states = [None, None]
    torch.distributed.all_gather_object(states, optimizer.state_dict(), context.group)
    mine, others = states[context.rank], states[1 - context.rank]
    model, resumed = by_hand()
    resumed.load_state_dict(mine)
    assert "shards" not in group_options(model, resumed)[0]
    step(model, resumed, 1)
    assert "shards" not in resumed.param_groups[0]
    model, resumed = by_hand()
    resumed.load_state_dict(others)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"shards of rank {1 - context.rank} of 2"):
            resumed.step()


@on_two_ranks
def test_one_ranks_shards_are_not_taken_for_the_whole_state(context):
    model, optimizer = built(context, "fsdp", torch.optim.AdamW)
    step(model, optimizer, 1)
    shards = optimizer.state_dict()
    for strategy in ("zero1", "sharded-optimizer"):
        _, other = built(context, strategy, torch.optim.AdamW)
        with pytest.raises(
            ValueError, match=f"shards of rank {context.rank} of 2, and this optimizer"
        ):
            other.load_state_dict(copy.deepcopy(shards))
    factored = {}
    for _ in range(2):  # state in other shapes than the parameters', which is right there
        model, other = built(context, "sharded-optimizer", torch.optim.Adafactor)
        if factored:
            other.load_state_dict(factored)
        step(model, other, 1)
        factored = other.state_dict()
    _, other = built(context, "bucketed", torch.optim.AdamW)
    other.load_state_dict(copy.deepcopy(shards))
    with pytest.raises(ValueError, match=f"shards of rank {context.rank} of 2, and this optimizer"):
        other.step()
    _, other = built(context, "sharded-optimizer", torch.optim.AdamW)
    del shards["shards"]
    with pytest.raises(ValueError, match=r"'parameter 0' has shape .*, and the parameter \(6, 4\)"):
        other.load_state_dict(shards)
