"""FSDP with the rest: torch's fully_shard, checkpointing, compiled blocks, meta, state."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distlab.comm import RankContext
from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.parallel.fsdp import FSDP
from distlab.train.data import SyntheticTokens
from distlab.train.step import next_token_loss
from tests.parallel.test_contract import BACKENDS, run
from tests.parallel.test_fsdp import own_loss
from tests.parallel.test_fsdp_models import Segments

CONFIG = ModelConfig(d_model=16, d_ff=32, num_layers=3, num_heads=2, vocab_size=51, context_length=8)


def lm_loss(model: nn.Module, rank: int, number: int, device: torch.device) -> Tensor:
    data = SyntheticTokens(51, 2, 8, seed=0, rank=rank, device=device)
    return next_token_loss(model, data.batch(number))


def beside_torch(context: RankContext) -> None:
    mesh = init_device_mesh(context.device.type, (context.world_size,))
    theirs = TransformerLM(CONFIG, device=context.device, seed=3)
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    ours = FSDP(TransformerLM(CONFIG, device=context.device, seed=3), process_group=context.group)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in (theirs, ours)]
    for number in range(5):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            lm_loss(model, context.rank, number, context.device).backward()
            if model is ours:
                ours.finish_gradient_synchronization()
                norm = ours.clip_grad_norm_(1.0)
            else:
                expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).full_tensor()
            optimizer.step()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    full = ours.gather_full_params()
    for name, parameter in theirs.named_parameters():
        # Two sums in other orders per step, five steps.
        torch.testing.assert_close(full[name], parameter.full_tensor(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_torchs_fully_shard(backend):
    """RELIABILITY 28, 32: the production peer, clipping included."""
    run(beside_torch, 2, backend=backend)


def reentrant(context: RankContext) -> None:
    fsdp = FSDP(Segments(use_reentrant=True), process_group=context.group)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        own_loss(fsdp, context.rank, 0, context.device).backward()


def test_reentrant_checkpoints_are_refused():
    """RELIABILITY 10: a clear error instead of a gradient that is never sent."""
    run(reentrant, 2)


def refused_on_meta(context: RankContext) -> None:
    def back_and_forth(module: nn.Module) -> None:
        module.head.weight.fill_(0)
        module.embedding.weight.fill_(0)
        module.head.weight.fill_(1)

    for init_fn, message in [
        (torch.no_grad()(back_and_forth), "returns to 'head.weight'"),
        (torch.no_grad()(lambda m: m.head.weight.copy_(m.embedding.weight)), "in one operator"),
        (lambda m: m.head.reset_parameters(), "left .*embedding.weight"),
    ]:
        with torch.device("meta"):
            built = nn.Sequential(OrderedDict(embedding=nn.Embedding(9, 4), head=nn.Linear(4, 9)))
        with pytest.raises(RuntimeError, match=message):
            FSDP(built, process_group=context.group, init_fn=init_fn, device=context.device)


def test_deferred_initialisation_that_is_not_in_order_is_refused():
    """test_build.py has `reset_parameters()` of every module, under every strategy."""
    run(refused_on_meta, 2)
