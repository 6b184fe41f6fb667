"""The training step: decisions that all ranks take alike, and losses weighted by tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distlab.comm import RankContext
from distlab.parallel import BucketedDDP, Local
from distlab.testing import run_ranks
from distlab.train.scaler import LossScaler
from distlab.train.step import TrainStep, gradients_are_finite, token_mean_loss


def sum_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def poisoned_step(context: RankContext, where: str) -> None:
    """A NaN on rank 1 alone: with DDP it spreads through the mean, with Local it stays on its rank."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    wrapper = BucketedDDP(model, process_group=context.group) if where == "ddp" else Local(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = TrainStep(wrapper, optimizer, sum_loss, skip_nonfinite=True, context=context)
    step([torch.full((1, 2), float("nan") if context.rank == 1 else 1.0)])
    assert step.last_step_skipped
    assert torch.equal(model.weight, torch.ones(1, 2)) and not optimizer.state
    step([torch.ones(1, 2)])
    assert not step.last_step_skipped and not torch.equal(model.weight, torch.ones(1, 2))


@pytest.mark.parametrize("where", ["ddp", "local"])
def test_all_ranks_skip_a_step_with_a_nan_and_change_nothing(where):
    """RELIABILITY 16."""
    run_ranks(poisoned_step, 2, where)


def ragged_batch(context: RankContext) -> float:
    """Rank 0 has 3 tokens, rank 1 has 1: the mean over ranks must weigh each token alike."""
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 5), torch.randint(5, (4,))
    mine = slice(0, 3) if context.rank == 0 else slice(3, 4)
    model = nn.Linear(5, 5, bias=False)
    nn.init.eye_(model.weight)
    wrapper = BucketedDDP(model, process_group=context.group)
    losses = F.cross_entropy(wrapper(logits[mine]), targets[mine], reduction="sum")
    token_mean_loss(losses, len(targets[mine]), context).backward()
    wrapper.finish_gradient_synchronization()
    whole = nn.Linear(5, 5, bias=False)
    nn.init.eye_(whole.weight)
    F.cross_entropy(whole(logits), targets).backward()
    torch.testing.assert_close(model.weight.grad, whole.weight.grad)


def test_a_ragged_last_batch_is_weighted_by_tokens():
    """RELIABILITY 15."""
    run_ranks(ragged_batch, 2)


def no_tokens_at_all(context: RankContext) -> None:
    with pytest.raises(ValueError, match="no rank has a token"):
        token_mean_loss(torch.zeros(()), 0, context)


def test_a_batch_without_tokens_is_an_error_on_every_rank():
    run_ranks(no_tokens_at_all, 2)


def test_clipping_and_accumulation_act_on_the_mean_gradient():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    step = TrainStep(Local(model), torch.optim.SGD(model.parameters(), lr=1.0), sum_loss, max_grad_norm=0.5)
    loss = step([torch.tensor([[2.0]]), torch.tensor([[4.0]])])  # mean gradient 3, clipped to 0.5
    assert loss.item() == 0.0
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.5]]), rtol=1e-5, atol=0)


def test_scaled_gradients_are_clipped_by_their_own_norm(one_rank):
    """Under fp16's loss scale too: the norm is taken, and clipped, as if there were none."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), LossScaler(scale=1024.0)
    step = TrainStep(Local(model), optimizer, sum_loss, max_grad_norm=0.5, scaler=scaler, context=one_rank)
    step([torch.tensor([[3.0]])])
    assert step.grad_norm.item() == 3.0
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.5]]), rtol=1e-5, atol=0)


def test_phases_are_marked_in_order():
    marks = []
    model = nn.Linear(1, 1)
    TrainStep(Local(model), torch.optim.SGD(model.parameters(), lr=0.1), sum_loss, mark=marks.append)(
        [torch.ones(1, 1)]
    )
    assert marks == ["forward_backward", "optimizer"]


def test_skipping_needs_a_context():
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="needs context"):
        TrainStep(Local(model), torch.optim.SGD(model.parameters(), lr=0.1), sum_loss, skip_nonfinite=True)


def test_infinite_and_missing_gradients():
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    assert gradients_are_finite(weights)
    weights[0].grad = torch.tensor([1.0, float("-inf")])
    assert not gradients_are_finite(weights)
