"""The state of a step is one attribute of a wrapper, which can be printed."""

import pytest
import torch
from torch import nn

from distlab.parallel import get_strategy
from distlab.parallel.ddp import Phase
from tests.parallel.test_contract import on_two_ranks

NAMES = ("naive", "flat", "overlap", "bucketed", "zero1", "zero2", "fsdp")


def built(name, context):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    strategy = get_strategy(name)
    return strategy.build(module, context.group, torch.optim.SGD, {"lr": 0.1}, bucket_size_mb=1e-4)


@pytest.mark.parametrize("name", NAMES)
@on_two_ranks
def test_a_step_goes_through_its_phases_and_says_so(context, name):
    wrapper, optimizer = built(name, context)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        assert wrapper.step.phase is Phase.IDLE and "idle" in repr(wrapper.step)
        loss = wrapper(x).sum()
        assert wrapper.step.phase is Phase.FORWARD and "forward" in repr(wrapper.step)
        seen = []
        x.register_hook(lambda _, seen=seen: seen.append(wrapper.step.phase))
        loss.backward()
        assert seen[-1] is Phase.BACKWARD
        assert wrapper.step.phase is Phase.ENDED and "backward ended" in repr(wrapper.step)
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["naive", "bucketed", "zero2", "fsdp"])
@on_two_ranks
def test_a_pass_inside_no_sync_leaves_the_phase_and_is_noted(context, name):
    wrapper, _ = built(name, context)
    with wrapper.no_sync():
        wrapper(torch.ones(2, 4)).sum().backward()
    assert wrapper.step.phase is Phase.IDLE and wrapper.step.accumulated
    assert "no_sync" in repr(wrapper.step)
    wrapper(torch.ones(2, 4)).sum().backward()
    wrapper.finish_gradient_synchronization()
    assert wrapper.step.phase is Phase.IDLE and not wrapper.step.accumulated


@on_two_ranks
def test_evaluation_does_not_begin_a_step(context):
    for name in NAMES:
        wrapper, _ = built(name, context)
        with torch.no_grad():
            wrapper(torch.ones(2, 4))
        assert wrapper.step.phase is Phase.IDLE, name
