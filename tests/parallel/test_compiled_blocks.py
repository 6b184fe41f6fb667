"""Compiled blocks stay compiled under every strategy, however many there are.

Dynamo compiles the code of a block once and guards the graph by what the code has read. If two
blocks differ in anything that a hook brings into the graph, each is compiled anew, and after
`recompile_limit` graphs all blocks run eager, without a word. Six blocks show it under a limit of
two graphs, also where two stages of a pipeline have three each. Torch's own limit of eight would
take twelve blocks and twice the time.
"""

import pytest
import torch
from torch import nn

from distlab.measure.trace.capture import compiled_calls
from distlab.model import ModelConfig
from distlab.parallel import Layout, get_strategy, strategies_on
from distlab.train.build import build_training
from distlab.train.step import TrainStep, loss_in_head
from kernels import nn as kernels_nn

BLOCKS = 6
few_graphs = torch._dynamo.config.patch(recompile_limit=2)
CONFIG = ModelConfig(
    d_model=16, d_ff=16, num_layers=BLOCKS, num_heads=2, vocab_size=32, context_length=8
)
BUCKET_MB = 0.002  # smaller than a block, so that each block has buckets of its own
# torch-ddp stands for it
ON_CPU = [name for name in strategies_on("cpu", meshes=False) if name != "torch-ddp-tuned"]
ALONE = Layout()
LAYOUTS = ("tp2", "cp2-ring", "cp2-ulysses", "pp2")


def last_step(context, model, optimizer, loss_of, batches):
    """Train three steps and count the compiled graphs of the last."""
    train = TrainStep(model, optimizer, loss_of)
    for _ in range(2):
        train(batches)

    def finish():
        model.synchronize()
        torch.distributed.barrier(context.group)

    return compiled_calls(lambda: train(batches), finish)


def train_transformer(context, name, checkpointing=False, layout=ALONE):
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(context.rank))
    batches = [(tokens[:, :-1], tokens[:, 1:])] * layout.pipeline
    strategy = get_strategy(name)
    built = build_training(
        CONFIG,
        strategy,
        context.group,
        torch.optim.AdamW,
        {"lr": 1e-4},
        device=context.device,
        compile="blocks",
        checkpointing=checkpointing,
        # torch's DDP compiles no bucket below 1 MiB
        bucket_size_mb=25.0 if strategy.is_peer else BUCKET_MB,
        layout=layout,
    )
    axes = layout.axes(context.group)
    if layout.context > 1:
        batches = [axes.share(batch) for batch in batches]
    seen = last_step(context, built.model, built.optimizer, loss_in_head, batches)
    built.model.close(restore=False)
    return seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", range(3))
@few_graphs
@torch.compiler.set_stance(force_backend="eager")
def test_every_strategy(context, part):
    rows = [(name, False) for name in ON_CPU]
    # whose hooks run again when a block is recomputed
    rows += [("zero1", "block"), ("fsdp", "block")]
    seen = {}
    # in parts, because each takes seconds of Dynamo's time
    for name, checkpointing in rows[part::3]:
        # another strategy's graph would serve, made without this one's hooks
        torch.compiler.reset()
        seen[name, checkpointing] = train_transformer(context, name, checkpointing)
    eager = {
        name: calls
        for name, calls in seen.items()
        if calls.regions < BLOCKS or calls.lookups > calls.regions
    }
    assert not eager, seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@few_graphs
@torch.compiler.set_stance(force_backend="eager")
def test_every_layout(context, layout):
    torch.compiler.reset()
    layout = Layout.parse(layout)
    calls = train_transformer(context, "bucketed", layout=layout)
    assert calls.regions >= BLOCKS and calls.lookups == calls.regions, calls


class KernelBlock(nn.Module):
    """A block of the lab's modules, as a user builds one."""

    def __init__(self, width):
        super().__init__()
        self.norm = kernels_nn.RMSNorm(width)
        self.up = nn.Linear(width, width)

    def forward(self, x):
        return x + self.up(self.norm(x))


class KernelStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(KernelBlock(16)) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.ranks(2)
@few_graphs
@torch.compiler.set_stance(force_backend="eager")
def test_blocks_of_kernel_modules(context):
    seen = {}
    for name in ("naive", "zero1", "zero2", "fsdp"):
        torch.compiler.reset()
        module = KernelStack()
        model, optimizer = get_strategy(name).build(
            module, context.group, torch.optim.AdamW, {"lr": 1e-4}, bucket_size_mb=BUCKET_MB
        )
        seen[name] = last_step(
            context, model, optimizer, lambda net, x: net(x).square().mean(), [torch.ones(2, 16)]
        )
        model.close(restore=False)
    assert all(
        calls.regions >= BLOCKS and calls.lookups == calls.regions for calls in seen.values()
    ), seen
