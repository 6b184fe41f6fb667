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


# No hook of these reaches a block, or only one that another strategy has as well.
HOOKED_AS_OTHERS = {"local", "bucketed-two-level", "sharded-optimizer", "torch-ddp", "torch-zero"}
ROWS = [(name, False) for name in ON_CPU if name not in HOOKED_AS_OTHERS]
# Their hooks run again when a block is recomputed.
ROWS += [("zero1", "block"), ("fsdp", "block")]
OTHER_ROWS = [(name, False) for name in ON_CPU if name in HOOKED_AS_OTHERS]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "rows",
    [
        # In parts, because each row takes seconds of Dynamo's time.
        pytest.param(ROWS[0::2], id="0"),
        pytest.param(ROWS[1::2], id="1"),
        pytest.param(OTHER_ROWS, id="hooked as others", marks=pytest.mark.commands),
    ],
)
@few_graphs
@torch.compiler.set_stance(force_backend="eager")
def test_every_strategy(context, rows):
    seen = {}
    for name, checkpointing in rows:
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
