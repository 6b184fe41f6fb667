"""The collectives give the mean, in every form a strategy uses, and wait only when asked to."""

import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import collectives
from tests.parallel.test_contract import BACKENDS, on_two_ranks, run


def means(context):
    group, device, n = context.group, context.device, context.world_size
    mean = (n + 1) / 2
    plain = torch.full((5,), context.rank + 1.0, device=device)
    collectives.all_reduce_mean(plain, group).wait()
    assert torch.allclose(plain, torch.full_like(plain, mean))

    scale = 1.0 if collectives.averages_in_reduction(device, group) else 1.0 / n
    scaled = torch.full((5,), (context.rank + 1.0) * scale, device=device)
    collectives.all_reduce_mean(scaled, group, prescaled=True).wait()
    assert torch.equal(scaled, plain)

    whole = torch.arange(n * 3.0, device=device) + context.rank
    shard = torch.empty(3, device=device)
    collectives.reduce_scatter_mean(shard, whole, group).wait()
    first = 3.0 * context.rank + (n - 1) / 2
    assert torch.allclose(shard, torch.arange(first, first + 3, device=device))

    gathered = torch.empty(2 * n, device=device)
    collectives.all_gather(gathered, torch.full((2,), float(context.rank), device=device), group).wait()
    assert gathered.tolist() == [float(rank) for rank in range(n) for _ in range(2)]

    value = torch.full((2,), float(context.rank), device=device)
    collectives.broadcast(value, group, source=n - 1).wait()
    assert value.tolist() == [n - 1.0] * 2
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_collective_gives_its_mean_or_its_copy(world_size, backend):
    run(means, world_size, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@on_two_ranks
def test_ranks_come_to_one_answer(context, backend):
    group, device = context.group, context.device
    matrix = torch.full((2, 3), float(context.rank), device=device).t()  # not contiguous
    collectives.broadcast_all([matrix], group)
    assert not matrix.any()
    assert collectives.all_ranks_agree(True, device, group)
    assert not collectives.all_ranks_agree(context.rank != 1, device, group)
    assert collectives.sum_over_ranks(context.rank + 0.5, device, group) == 2
    assert collectives.gather_objects({"rank": context.rank}, group) == [{"rank": 0}, {"rank": 1}]


@on_two_ranks
def test_a_collective_returns_before_it_is_done(context):
    """On gloo `all_reduce_mean` returns before the slow peer has joined: it does not block."""
    if context.rank == 1:
        time.sleep(0.5)
    work = collectives.all_reduce_mean(torch.ones(4), context.group)
    assert context.rank == 1 or not work.is_completed()
    work.wait()


def test_no_group_is_an_error_that_says_how_to_get_one():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"(?s)init_process_group.*rank_context"):
        collectives.resolve_group(None)
