"""ZeroOptimizer: the same training as an unsharded optimizer, with a share of state and work on
each rank.
"""

import pytest
import torch
from torch import nn

from distlab.parallel import BucketedDDP, NaiveDDP, ZeroOptimizer
from distlab.parallel.checks import ELEMENTWISE, is_elementwise
from kernels.adamw import AdamW as FusedAdamW
from tests.parallel.cases import CASES, build
from tests.parallel.test_contract import on_two_ranks


@on_two_ranks
def test_a_step_between_forward_and_backward_raises(context):
    """As under any optimizer: the gather overwrites what autograd has saved."""
    # several buckets
    wrapper = BucketedDDP(build("plain", 0, context.device), 1e-4, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1)
    CASES["plain"].loss(wrapper, 0, 0, context.device).backward()
    wrapper.finish_gradient_synchronization()
    loss = CASES["plain"].loss(wrapper, 0, 1, context.device)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Scaled(torch.optim.SGD):
    """A class of one's own, which may look at whole tensors: this one takes no more than its base
    does.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter *= 0.9
        return super().step(closure)


class Said(Scaled):
    elementwise = True


class Inherited(Said):
    """Whose own step its base knows nothing of."""


@pytest.mark.parametrize("cls", [*sorted(ELEMENTWISE, key=str), FusedAdamW, Said])
def test_elementwise_optimizers_are_accepted(cls):
    assert is_elementwise(cls)


@pytest.mark.parametrize(
    "cls", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, Scaled, Inherited]
)
def test_others_must_say_that_they_are(cls):
    assert not is_elementwise(cls)


@on_two_ranks
def test_mistakes_are_refused(context):
    wrapper = BucketedDDP(nn.Linear(2, 2), process_group=context.group)
    for cls in (torch.optim.Adafactor, Scaled, Inherited):
        match = rf"{cls.__name__} is not known to be .*elementwise=True.*ShardedOptimizer"
        with pytest.raises(ValueError, match=match):
            ZeroOptimizer(wrapper, cls, lr=0.1)
    # which runs on GPUs only, and says so itself
    ZeroOptimizer(wrapper, torch.optim.AdamW, capturable=True)
    ZeroOptimizer(wrapper, Scaled, elementwise=True, lr=0.1)
    with pytest.raises(TypeError, match="takes over a BucketedDDP"):
        ZeroOptimizer(
            NaiveDDP(nn.Linear(2, 2), process_group=context.group), torch.optim.SGD, lr=0.1
        )
    with pytest.raises(ValueError, match="not among those that the wrapped module trains"):
        ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1, params=[nn.Parameter(torch.ones(1))])
    twice = [{"params": wrapper.trainable}, {"params": wrapper.trainable}]
    with pytest.raises(ValueError, match="more than one parameter group"):
        ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1, params=twice)
