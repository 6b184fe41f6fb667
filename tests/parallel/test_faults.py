"""Exceptions, deaths and ranks that stop early: an error within the timeout, and never a wrong
result.

Collectives that arrive late are part of random models (`tests/fuzz.py`).
"""

import os
import signal
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlab.testing import RanksFailed, run_ranks
from tests.parallel.cases import CASES, OneProcess, build
from tests.parallel.test_contract import STRATEGIES, assert_same_on_all_ranks, on_two_ranks

TIMEOUT_S = 3.0


class Fragile(nn.Module):
    """Raises in the backward of its middle when told to.

    Its last layer may be in a reentrant checkpoint.
    """

    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x, fail):
        hidden = self.middle(self.first(x))
        if fail:
            hidden.register_hook(_raise_memory_error)
        if self.reentrant:
            return checkpoint(self.last, hidden, use_reentrant=True)
        return self.last(hidden)


def _raise_memory_error(_):
    raise MemoryError("injected in backward")


def fail_then_go_on(context, strategy, failing, numbers):
    """Fail a backward; then micro-batches of these numbers, all but the last under no_sync()."""

    def make():
        torch.manual_seed(0)
        return Fragile()

    def loss(model, rank, number, fail=False):
        return model(torch.full((2, 4), 10.0 * number + rank + 1.0), fail=fail).sum()

    wrapper = STRATEGIES[strategy](make(), process_group=context.group)
    one = OneProcess(make, context.world_size, torch.optim.SGD)
    if context.rank in failing:
        # the original error, not one of communication
        with pytest.raises(MemoryError, match="injected"):
            loss(wrapper, context.rank, 0, fail=True).backward()
    else:
        loss(wrapper, context.rank, 0).backward()
        wrapper.finish_gradient_synchronization()
    wrapper.zero_grad()
    for number in numbers:
        with nullcontext() if number == numbers[-1] else wrapper.no_sync():
            loss(wrapper, context.rank, number).backward()
        one.backward(lambda model, rank, number=number: loss(model, rank, number))
    wrapper.finish_gradient_synchronization()
    for mine, expected in zip(wrapper.module.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
    assert_same_on_all_ranks([p.grad for p in wrapper.module.parameters()], context)


def backward_behind_a_reentrant_checkpoint(context, strategy):
    """The checkpoint's own backward has ended when the one around it raises, or goes on."""
    wrapper = STRATEGIES[strategy](Fragile(reentrant=True), process_group=context.group)
    x = torch.full((2, 4), context.rank + 1.0)
    with pytest.raises(MemoryError, match="injected"):
        wrapper(x, fail=True).sum().backward()
    wrapper.zero_grad(set_to_none=False)
    wrapper(x, fail=False).sum().backward()
    wrapper(x, fail=False)  # it has ended, so that a forward before finish drops nothing
    wrapper.finish_gradient_synchronization()
    rows = 2 * context.world_size
    torch.testing.assert_close(
        wrapper.module.last.bias.grad, torch.full((4,), rows / context.world_size)
    )
    assert wrapper.module.first.bias.grad.any()
    wrapper.close()


@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=["all-ranks", "one-rank"])
@on_two_ranks
def test_micro_batches_accumulated_after_an_exception_in_backward_all_count(context, failing):
    """Check that an exception in backward surfaces, and that the next attempt starts clean.

    No handle or gradient of the failed backward is left. Gradients accumulated under no_sync()
    between the exception and the next synchronised backward are kept.
    """
    for strategy in STRATEGIES:
        for numbers in ((1,), (1, 2, 3)):
            fail_then_go_on(context, strategy, failing, numbers)
        backward_behind_a_reentrant_checkpoint(context, strategy)


def die_in_backward(context):
    model = build("plain", 0, context.device)
    wrapper = STRATEGIES["naive"](model, process_group=context.group)
    for step in range(3):
        if step == 1 and context.rank == 1:
            list(model.parameters())[2].register_hook(
                lambda _: os.kill(os.getpid(), signal.SIGKILL)
            )
        CASES["plain"].loss(wrapper, context.rank, step, context.device).backward()
        wrapper.finish_gradient_synchronization()


def test_a_lost_rank_makes_the_other_fail_within_the_timeout():
    """Check that a lost rank makes the others fail: they neither hang nor succeed.

    tests/test_testing.py covers an exception, a rank that sleeps and one that exits early.
    tests/comm/test_wait_diagnostics.py covers the message on the other ranks.
    """
    run_ranks(str, 2, group_timeout_s=TIMEOUT_S)  # the processes have started
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(die_in_backward, 2, group_timeout_s=TIMEOUT_S)
    assert time.monotonic() - begin < TIMEOUT_S + 12
    assert 0 in caught.value.failures and "exit code -9" in caught.value.failures[1]
