"""The head that computes the loss, under strategies that shard or share its weight."""

from unittest.mock import patch

import pytest
import torch

from distlab.comm import RankContext
from distlab.model import TransformerLM, preset
from distlab.parallel import get_strategy
from distlab.testing import run_ranks
from distlab.train.step import TrainStep, adamw, loss_function

STRATEGIES = ("bucketed", "zero1", "sharded-optimizer", "fsdp")


def trained(context: RankContext, strategy_name: str, ops: str, tied: bool) -> tuple[list[float], dict]:
    """Losses of three steps of two micro-batches, and the whole parameters after them; ranks begin differently."""
    config = preset("tiny", num_layers=1, d_model=16, d_ff=24, num_heads=2, vocab_size=23, context_length=6,
                    tie_embeddings=tied, ops=ops)  # fmt: skip
    strategy = get_strategy(strategy_name)
    optimizer_cls, options = adamw(ops)
    # eps far above rounding: with the usual one a gradient of 1e-9 moves a weight as far as any other, either way.
    options |= {"lr": 0.02, "eps": 1e-2}
    model = TransformerLM(config, seed=context.rank)
    wrapper, optimizer = strategy.build(model, context.group, optimizer_cls, options, bucket_size_mb=0.002)
    step = TrainStep(wrapper, optimizer, loss_function(config))
    drawn = torch.randint(23, (2, 2, 2, 6), generator=torch.Generator().manual_seed(context.rank))
    losses = [step([tuple(batch) for batch in drawn]).item() for _ in range(3)]
    return losses, {name: value.detach().clone() for name, value in wrapper.full_parameters().items()}


def beside_torchs(context: RankContext, tied: bool) -> list[tuple[list[float], dict]]:
    """Torch's operations, then ours under each strategy; ours in plain torch, which costs a tenth of interpreting."""
    plain = trained(context, "bucketed", "torch", tied)
    with patch("kernels._triton.runs_triton", lambda tensor: False):
        return [plain, *(trained(context, name, "triton", tied) for name in STRATEGIES)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_computed_by_the_head_trains_alike_under_every_strategy(tied):
    """Our operations and AdamW, the loss in the head: losses and weights are those of torch's operations."""
    for (losses, weights), *others in run_ranks(beside_torchs, 2, tied):
        assert losses[2] < losses[1] < losses[0]
        for strategy, (other_losses, other_weights) in zip(STRATEGIES, others, strict=True):
            assert other_losses == pytest.approx(losses, abs=1e-5), strategy
            assert other_weights.keys() == weights.keys()
            for name, weight in weights.items():
                # Sums in another order, 6e-8 of terms below 1, through three steps of 0.02 · g / (|g| + 0.01).
                difference = (other_weights[name] - weight).abs().max().item()
                assert difference < 2e-5, (strategy, name)
