"""Several backward passes per step: no_sync, and what happens without it."""

import pytest
import torch

from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel import STRATEGIES as REGISTRY
from distlab.parallel import get_strategy, strategies_on
from tests.parallel.cases import CASES, build, by_op
from tests.parallel.test_contract import run


def no_sync_and_then_a_step(context, strategy, nested):
    """Either an exception ends a no_sync() before the only micro-batch, or the first two of three
    micro-batches are under a no_sync() that is entered once more for the first."""
    entry = get_strategy(strategy)
    model, whole = build("plain", 0, context.device), build("plain", 0, context.device)
    wrapper, optimizer = entry.build(
        model, context.group, torch.optim.SGD, {"lr": 1.0}, shard_size=2
    )
    loss = CASES["plain"].loss
    # torch's static graph must see a synchronised one first
    loss(wrapper, context.rank, 9, context.device).backward()
    wrapper.finish_gradient_synchronization()
    optimizer.zero_grad()
    numbers = (0, 1, 2) if nested else (2,)
    if nested:
        with CollectiveRecorder() as recorder, wrapper.no_sync():
            with wrapper.no_sync():
                loss(wrapper, context.rank, 0, context.device).backward()
            loss(wrapper, context.rank, 1, context.device).backward()
        sent = set(by_op(recorder))
        assert "all_reduce" not in sent, strategy
        # FSDP on a mesh keeps shards, so it reduce-scatters inside its group.
        assert ("reduce_scatter" in sent) == (entry.sends == "units" and entry.takes_mesh), strategy
    else:
        with pytest.raises(KeyError), wrapper.no_sync():
            raise KeyError("user code")
    loss(wrapper, context.rank, 2, context.device).backward()
    wrapper.finish_gradient_synchronization()
    optimizer.step()
    for rank in range(context.world_size):
        for number in numbers:
            (loss(whole, rank, number, context.device) / context.world_size).backward()
    mine = wrapper.full_parameters()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            mine[name], parameter - parameter.grad, msg=f"{strategy}: {name}"
        )


def with_every_strategy(context, nested):
    for name in strategies_on("cpu"):  # torch's peers too
        if REGISTRY[name].synchronizes and (context.world_size == 2 or REGISTRY[name].takes_mesh):
            no_sync_and_then_a_step(context, name, nested)


def test_no_sync_restores_itself_after_an_exception():
    run(with_every_strategy, 2, False)


def test_a_no_sync_inside_another_does_not_end_it():
    run(with_every_strategy, 2, True)


def test_no_sync_on_a_mesh_sends_nothing_between_shard_groups():
    run(with_every_strategy, 4, True)
