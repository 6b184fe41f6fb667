"""The matrix of docs/learn/composition.md: every strategy with compile, checkpointing, autocast and
accumulation.

Each combination trains a small Transformer (or a toy where that is the point) at two ranks and must
give the gradients that the same model under the same transformation gives in one process.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.parallel import FSDP
from distlab.train.data import SyntheticTokens
from distlab.train.step import next_token_loss
from tests.parallel.test_contract import STRATEGIES, every_row, full_gradients, on_two_ranks

AVERAGING = ("naive", "flat", "overlap", "bucketed")
WITH_FSDP = {strategy: STRATEGIES[strategy] for strategy in AVERAGING} | {"fsdp": FSDP}
CONFIG = ModelConfig(
    d_model=16, d_ff=32, num_layers=2, num_heads=2, vocab_size=50, context_length=8
)


WHOLE = "compiled-wrapper"


def _plain(model):
    return model


def _compiled(model):
    return torch.compile(model, backend="aot_eager")


def _compiled_blocks(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


def _checkpointed(model):
    model.checkpoint_blocks = True
    return model


TRANSFORMS: dict[str, Callable[[TransformerLM], nn.Module]] = {
    "plain": _plain,
    "compiled": _compiled,
    "compiled-blocks": _compiled_blocks,
    "checkpointed": _checkpointed,
    WHOLE: _plain,  # the wrapper is compiled instead
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@on_two_ranks
def test_strategies_with_transformed_models(context, transform):
    """Compare strategies with one process under compile, recomputation and autocast.

    A step has three micro-batches under autocast. Random models cover steps without autocast,
    except for compiled models and reentrant checkpoints. Another test covers combinations that FSDP
    refuses.
    """
    torch._dynamo.reset()

    def build():  # strategies share what is compiled
        return TRANSFORMS[transform](TransformerLM(CONFIG, device=context.device, seed=3))

    def backward(model, rank, number, scale=1.0):
        data = SyntheticTokens(50, 2, 8, seed=0, rank=rank, device=context.device)
        with torch.autocast(context.device.type, torch.bfloat16):
            loss = next_token_loss(model, data.batch(number))
        (loss * scale).backward()

    reference = build()
    for rank, number in product(range(context.world_size), range(3)):
        backward(reference, rank, number, 1 / context.world_size)

    def compare(context, strategy):
        wrapper = WITH_FSDP[strategy](build(), process_group=context.group)
        called = _compiled(wrapper) if transform == WHOLE else wrapper
        for number in range(3):
            with wrapper.no_sync() if number < 2 else nullcontext():
                backward(called, context.rank, number)
        wrapper.finish_gradient_synchronization()
        sharded = isinstance(wrapper, FSDP)
        found = (
            full_gradients(wrapper, context) if sharded else dict(wrapper.module.named_parameters())
        )
        for name, parameter in reference.named_parameters():
            # bf16 products round to 8 bits; the two sides scale by 1/2 at different places, which
            # is exact, but sum the ranks in fp32 in another order.
            mine = found[name] if sharded else found[name].grad
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-6)

    wrapped = {"compiled": AVERAGING, WHOLE: ("naive", "bucketed")}.get(transform, WITH_FSDP)
    every_row(context, compare, [(strategy,) for strategy in wrapped])
