"""The training step: clipping, accumulation, the loss scale, and its phases."""

import pytest
import torch
from torch import nn

from distlab.bench.reference import parameter_difference
from distlab.bench.task import Task
from distlab.bench.variant import variants
from distlab.model import TransformerLM, preset
from distlab.parallel import Local
from distlab.train.data import SyntheticTokens
from distlab.train.scaler import LossScaler
from distlab.train.step import TrainStep
from tests.parallel.test_contract import on_two_ranks


def sum_loss(model, x):
    return model(x).sum()


@pytest.mark.parametrize(
    "micro_batches, limit, scale",
    [
        ([2.0, 4.0], 0.5, None),  # the mean gradient is 3
        ([3.0], 0.5, 1024.0),
        ([1e-6], 1e-6, None),  # a norm as small as the epsilon: half of it, as torch does
        ([1e-6], 1e-6, 4.0),
    ],
    ids=["mean", "scaled", "epsilon", "epsilon-scaled"],
)
def test_the_mean_gradient_is_clipped_by_its_own_norm(one_rank, micro_batches, limit, scale):
    """Under fp16's loss scale too: the norm is taken, and clipped, as if there were none."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=1.0),
        scale and LossScaler(scale=scale),
    )
    step = TrainStep(
        Local(model), optimizer, sum_loss, max_grad_norm=limit, scaler=scaler, context=one_rank
    )
    norm = sum(micro_batches) / len(micro_batches)
    assert step([torch.tensor([[x]]) for x in micro_batches]).item() == 0.0
    assert step.grad_norm.item() == pytest.approx(norm)
    expected = -limit * norm / (norm + 1e-6)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[expected]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("strategy", ["torch-ddp", "torch-ddp-tuned", "torch-zero", "bucketed"])
@on_two_ranks
def test_peers_accumulate_as_one_process_does(context, strategy):
    """Two steps of three micro-batches, whose first backward of all is under no_sync.

    torch's static graph failed where its first backward did not synchronize.
    """
    config = preset(
        "tiny", num_layers=2, d_model=32, d_ff=48, num_heads=2, vocab_size=31, context_length=8
    )

    def thrice(rank, step, device):
        data = SyntheticTokens(
            config.vocab_size, 2, config.context_length, seed=0, rank=rank, device=device
        )
        return [data.batch(3 * step + number) for number in range(3)]

    task = Task(lambda seed, device: TransformerLM(config, device=device, seed=seed), thrice)
    (variant,) = variants([strategy], [0.02])
    assert parameter_difference(context, variant, steps=2, task=task) < 1e-6
