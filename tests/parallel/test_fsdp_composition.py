"""FSDP with the rest: torch's fully_shard, checkpointing, compiled blocks, meta, state."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from distlab.comm import RankContext
from distlab.measure.collectives import CollectiveRecorder
from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.parallel.fsdp import FSDP
from distlab.parallel.fsdp.unit import State
from distlab.train.data import SyntheticTokens
from distlab.train.step import next_token_loss
from tests.parallel.test_contract import BACKENDS, assert_same_on_all_ranks, run
from tests.parallel.test_fsdp import OneProcess, full_gradients, own_loss, own_model

CONFIG = ModelConfig(d_model=16, d_ff=32, num_layers=3, num_heads=2, vocab_size=51, context_length=8)
TIED = ModelConfig(
    d_model=16, d_ff=32, num_layers=2, num_heads=2, vocab_size=51, context_length=8, tie_embeddings=True
)


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
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_torchs_fully_shard(world_size, backend):
    """RELIABILITY 28, 32: the production peer, clipping included."""
    run(beside_torch, world_size, backend=backend)


class Segments(nn.Module):
    """Checkpoints that do not coincide with units: inside one, over two, and ending in plain operators."""

    def __init__(self, use_reentrant: bool = False):
        super().__init__()
        self.inner = own_model(0, torch.device("cpu"))
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.inner
        x = model.embedding(tokens)
        x = checkpoint(self._two_blocks, x, use_reentrant=self.use_reentrant)
        x = checkpoint(lambda x: torch.tanh(model.blocks[2](x)), x, use_reentrant=self.use_reentrant)
        return model.head(model.norm(x))

    def _two_blocks(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner.blocks[1](self.inner.blocks[0](x)))


def segments(context: RankContext) -> None:
    fsdp = FSDP(Segments().to(context.device), process_group=context.group)
    one = OneProcess(lambda: Segments().to(context.device), context.world_size, torch.optim.SGD, lr=0.1)
    for number in range(3):
        fsdp.zero_grad()
        one.zero_grad()
        with CollectiveRecorder() as recorder:
            own_loss(fsdp, context.rank, number, context.device).backward()
            fsdp.finish_gradient_synchronization()
        one.backward(lambda model, rank, number=number: own_loss(model, rank, number, context.device))
        assert not any(unit.state is not State.SHARDED for unit in fsdp._units)
        if number > 0:  # recomputation gathers nothing twice: five units, forward and backward
            counts = {op: calls for op, (calls, _) in recorder.by_op().items()}
            assert counts == {"all_gather": 10, "reduce_scatter": 5, "all_reduce": 1}
        gradients = full_gradients(fsdp, context)
        for name, parameter in one.model.named_parameters():
            assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_across_and_inside_units(backend):
    """RELIABILITY 10, 28: recomputation runs forward hooks inside backward, and may stop early."""
    run(segments, 2, backend=backend)


def reentrant(context: RankContext) -> None:
    fsdp = FSDP(Segments(use_reentrant=True), process_group=context.group)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        own_loss(fsdp, context.rank, 0, context.device).backward()


def test_reentrant_checkpoints_are_refused():
    """RELIABILITY 10: a clear error instead of a gradient that is never sent."""
    run(reentrant, 2)


def transformed(context: RankContext, how: str) -> None:
    dtype = torch.bfloat16

    def make() -> TransformerLM:
        model = TransformerLM(TIED, device=context.device, seed=3, checkpoint_blocks=how == "checkpointed")
        if how == "compiled-blocks":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, backend="aot_eager")
        return model

    fsdp = FSDP(make(), dtype, process_group=context.group)
    one = OneProcess(make, context.world_size, torch.optim.SGD, dtype, lr=0.1)
    for number in range(3):
        fsdp.zero_grad()
        one.zero_grad()
        with torch.autocast(context.device.type, torch.bfloat16, enabled=how == "autocast"):
            lm_loss(fsdp, context.rank, number, context.device).backward()
        fsdp.finish_gradient_synchronization()
        with torch.autocast(context.device.type, torch.bfloat16, enabled=how == "autocast"):
            one.backward(lambda model, rank, number=number: lm_loss(model, rank, number, context.device))
        gradients = full_gradients(fsdp, context)
        for name, parameter in one.model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled-blocks", "autocast"])
def test_transformer_with_transformations(how):
    """RELIABILITY 28, 30, 31. In fp32, with weights that are not tied, test_composition.py has it beside the others."""
    run(transformed, 2, how)


def from_meta(context: RankContext, config: ModelConfig) -> None:
    built = TransformerLM(config, device="meta")
    largest = 0

    def initialize(module: nn.Module) -> None:
        nonlocal largest
        module.reset_parameters(seed=5)
        sizes = [p.untyped_storage().nbytes() for p in module.parameters() if p.ndim > 1]
        largest = sum(size > 0 for size in sizes)

    fsdp = FSDP(built, process_group=context.group, init_fn=initialize, device=context.device)
    assert largest == 1  # of all matrices, only the last one drawn holds memory
    direct = TransformerLM(config, device=context.device, seed=5)
    full = fsdp.gather_full_params()
    for name, parameter in direct.named_parameters(remove_duplicate=False):
        assert torch.equal(full[name], parameter), name
    lm_loss(fsdp, context.rank, 0, context.device).backward()
    fsdp.finish_gradient_synchronization()
    assert all(p.grad is not None for p in fsdp.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_deferred_initialisation_equals_direct_construction(world_size, config, backend):
    """Issue 4: a model larger than one device can be built; the same bits, one matrix in memory at a time."""
    run(from_meta, world_size, config, backend=backend)


def reset_every_module(module: nn.Module) -> None:
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()


class Standard(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)])
        self.head = nn.Linear(4, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def standard_from_meta(context: RankContext) -> None:
    with torch.device("meta"):
        built = Standard()
    torch.manual_seed(1)
    fsdp = FSDP(built, process_group=context.group, init_fn=reset_every_module, device=context.device)
    torch.manual_seed(1)
    direct = Standard()
    full = fsdp.gather_full_params()
    for name, parameter in direct.named_parameters():
        assert torch.equal(full[name], parameter), name
    for mine, theirs in zip(fsdp.module.buffers(), direct.buffers(), strict=True):
        assert torch.equal(mine, theirs)

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
            built = Standard()
        with pytest.raises(RuntimeError, match=message):
            FSDP(built, process_group=context.group, init_fn=init_fn, device=context.device)


def test_deferred_initialisation_of_torchs_modules():
    """`reset_parameters()` of every module in order draws what construction draws."""
    run(standard_from_meta, 2)


def save_and_load(context: RankContext) -> None:
    def make(seed: int) -> FSDP:
        return FSDP(own_model(seed, context.device, tied=True), process_group=context.group)

    def train(fsdp: FSDP, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        own_loss(fsdp, context.rank, number, context.device).backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()

    first, second = make(0), make(1)
    optimizers = [torch.optim.AdamW(fsdp.parameters(), lr=0.01) for fsdp in (first, second)]
    train(first, optimizers[0], 0)
    assert list(first.state_dict()) == [
        f"module.{name}" for name, _ in first.module.named_parameters(remove_duplicate=False)
    ]
    second.load_state_dict(first.state_dict())  # the sharded state: same rank, same world size
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # it would share the moments
    for fsdp, optimizer in zip((first, second), optimizers, strict=True):
        train(fsdp, optimizer, 1)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    full = first.gather_full_params()
    third = make(2)
    third.load_full_params(full)
    plain = own_model(3, context.device, tied=True)
    plain.load_state_dict(full)
    first.close()
    assert first.module.head.weight is first.module.embedding.weight
    tokens = torch.arange(10, device=context.device).view(2, 5)
    assert torch.equal(third(tokens), plain(tokens))
    assert torch.equal(first.module(tokens), plain(tokens))
    assert_same_on_all_ranks(list(first.module.parameters()), context)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sharded_and_full_states(backend):
    """The sharded state continues bit for bit; the full one loads into the plain module; close() restores it."""
    run(save_and_load, 2, backend=backend)
