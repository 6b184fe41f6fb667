"""The head that computes the loss, under strategies that shard or share its weight."""

from unittest.mock import patch

import pytest
import torch

from distlab.model import TransformerLM, preset
from distlab.parallel import get_strategy
from distlab.train.step import TrainStep, adamw, loss_function
from tests.parallel.test_contract import on_two_ranks

STRATEGIES = ("bucketed", "zero1", "zero2", "sharded-optimizer", "fsdp")


def trained(context, strategy_name, ops, tied):
    """Losses of three steps of two micro-batches, and the whole parameters after them.

    Ranks begin differently.
    """
    config = preset(
        "tiny",
        num_layers=1,
        d_model=16,
        d_ff=24,
        num_heads=2,
        vocab_size=23,
        context_length=6,
        tie_embeddings=tied,
        ops=ops,
    )
    strategy = get_strategy(strategy_name)
    optimizer_cls, options = adamw(ops)
    # eps far above rounding: with the usual one a gradient of 1e-9 moves a weight as far as any
    # other, either way.
    options |= {"lr": 0.02, "eps": 1e-2}
    model = TransformerLM(config, seed=context.rank)
    wrapper, optimizer = strategy.build(
        model, context.group, optimizer_cls, options, bucket_size_mb=0.002
    )
    step = TrainStep(wrapper, optimizer, loss_function(config))
    drawn = torch.randint(23, (2, 2, 2, 6), generator=torch.Generator().manual_seed(context.rank))
    micro_batches = [(tokens, targets) for tokens, targets in drawn]
    losses = [step(micro_batches).item() for _ in range(3)]
    parameters = {}
    for name, value in wrapper.full_parameters().items():
        parameters[name] = value.detach().clone()
    return losses, parameters


@pytest.mark.parametrize("tied", [False, True])
@on_two_ranks
def test_a_loss_computed_by_the_head_trains_alike_under_every_strategy(context, tied):
    """Our operations and AdamW, the loss in the head: losses and weights are those of torch's
    operations.

    Ours in plain torch, which costs a tenth of interpreting.
    """
    losses, weights = trained(context, "bucketed", "torch", tied)
    assert losses[2] < losses[1] < losses[0]
    for strategy in STRATEGIES:
        with patch("kernels._dispatch.runs_triton", lambda tensor: False):
            other_losses, other_weights = trained(context, strategy, "triton", tied)
        assert other_losses == pytest.approx(losses, abs=1e-5), strategy
        assert other_weights.keys() == weights.keys()
        for name, weight in weights.items():
            # Sums in another order, 6e-8 of terms below 1, through three steps of 0.02 · g / (|g| +
            # 0.01).
            assert (other_weights[name] - weight).abs().max() < 2e-5, (strategy, name)
