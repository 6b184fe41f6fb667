"""Several wrappers on the same ranks: messages of one are never taken for those of another."""

import copy

import pytest
import torch
from torch import nn

from distlab.parallel import BucketedDDP, ShardedOptimizer, get_strategy
from tests.parallel.cases import OneProcess, drawn
from tests.parallel.test_contract import on_two_ranks, run

SMALL = 1e-4  # MiB: a bucket for each matrix


class Skipping(nn.Module):
    """Two layers of one size, of which a rank may leave out the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skip=False):
        return self.first(x) if skip else self.second(self.first(x))


def wrapped(kind, module, context):
    return get_strategy(kind).build(
        module, context.group, torch.optim.SGD, {"lr": 0.5}, bucket_size_mb=SMALL
    )


def in_one_backward(context, kinds, joint):
    inputs = [drawn(rank, 3, 4) for rank in range(context.world_size)]

    def losses(models, rank, lazy):
        """The second forward comes after what is done with the first loss."""
        skips = [other == rank for other in lazy]
        if joint:
            yield models[1](models[0](inputs[rank], skips[0]), skips[1]).square().mean()
        else:
            for model, skip in zip(models, skips, strict=True):
                yield model(inputs[rank], skip).square().mean()

    def two():
        torch.manual_seed(0)
        return nn.ModuleList([Skipping(), Skipping()])

    for first in (0, 1):  # which wrapper finishes first
        made = [wrapped(kind, module, context) for kind, module in zip(kinds, two(), strict=True)]
        one = OneProcess(two, context.world_size, torch.optim.SGD, lr=0.5)
        # the rank that leaves a layer of each model out
        for lazy in ((0, None), (None, 0), (1, 0), (None, None)):
            lazy = tuple(
                None if kind == "fsdp" else rank for kind, rank in zip(kinds, lazy, strict=True)
            )
            for _, optimizer in made:
                optimizer.zero_grad()
            one.zero_grad()
            for loss in losses([wrapper for wrapper, _ in made], context.rank, lazy):
                loss.backward()
            one.backward(lambda models, rank, lazy=lazy: sum(losses(models, rank, lazy)))
            for wrapper, _ in made[first:] + made[:first]:
                wrapper.finish_gradient_synchronization()
            for optimizer in (*(optimizer for _, optimizer in made), one.optimizer):
                optimizer.step()
        for (wrapper, _), module in zip(made, one.model, strict=True):
            for mine, expected in zip(
                wrapper.full_parameters().values(), module.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, expected)


PAIRS = [
    *((kind, kind) for kind in ("overlap", "bucketed", "sharded-optimizer", "zero1", "zero2")),
    ("overlap", "bucketed"),
    ("bucketed", "naive"),
    ("zero1", "overlap"),
    ("fsdp", "bucketed"),
    ("zero1", "fsdp"),
    ("zero2", "bucketed"),
    ("zero1", "zero2"),
]


@on_two_ranks
def test_a_layer_that_one_rank_does_not_use_mixes_no_messages(context):
    """Else the bucket that waits for it would be averaged with one of the other wrapper."""
    for kinds in PAIRS:
        for joint in (True, False):
            in_one_backward(context, kinds, joint)


@on_two_ranks
def test_a_step_beside_an_unfinished_wrapper_mixes_no_messages(context):
    x = drawn(context.rank, 3, 4)
    for kind in ("zero1", "zero2", "sharded-optimizer"):
        ends = []
        for late in (False, True):
            torch.manual_seed(0)
            (one, first), (other, second) = (wrapped(kind, Skipping(), context) for _ in range(2))
            one(x).square().mean().backward()
            one.finish_gradient_synchronization()
            other(x, context.rank == 0).square().mean().backward()
            for action in (first.step, other.finish_gradient_synchronization)[:: -1 if late else 1]:
                action()
            second.step()
            ends.append([*one.full_parameters().values(), *other.full_parameters().values()])
        assert all(map(torch.equal, *ends))


def late(context):
    first, second = (wrapped("bucketed", Skipping(), context)[0] for _ in range(2))
    x = torch.ones(2, 4)
    first.module.second(x).sum().backward()
    second(x).sum().backward()
    second.finish_gradient_synchronization()  # which sends all of the first, too
    with pytest.raises(
        RuntimeError, match=r"'first\.\w+' came after its message had left, as another wrapper"
    ):
        first.module.first(x).sum().backward()


def test_a_gradient_behind_its_message_is_refused():
    run(late, 2)


@on_two_ranks
def test_a_sharded_optimizer_takes_the_group_of_its_wrapper(context):
    """On all ranks it would overwrite one subgroup's model by another's."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0], [1])]
    group = groups[context.rank]
    torch.manual_seed(context.rank)
    wrapper = BucketedDDP(nn.Linear(4, 4), process_group=group)
    for parameters in (wrapper.parameters(), [{"params": list(wrapper.parameters())}]):
        optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.5)
        expected = copy.deepcopy(wrapper.module)
        for model in (wrapper, expected):
            model(torch.ones(2, 4)).square().sum().backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        torch.optim.SGD(expected.parameters(), lr=0.5).step()
        assert torch.equal(wrapper.module.weight, expected.weight)
        wrapper.zero_grad()
    with pytest.raises(
        ValueError, match=r"wrapper on ranks \[\d\], .*among ranks \[0, 1\]: leave process_group"
    ):
        ShardedOptimizer(wrapper.parameters(), torch.optim.SGD, context.group, lr=0.5)
