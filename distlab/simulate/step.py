"""Run a few training steps of a real strategy in a fake world, and keep what the last ones did.

`simulate_step` takes any model and step; `simulate_training` is the lab's own: the Transformer,
`TrainStep` and AdamW.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.measure.collectives import CollectiveCall
from distlab.model import ModelConfig, ops
from distlab.parallel import Layout, ParallelModel, Strategy, get_strategy
from distlab.parallel.layout import DATA_PARALLEL
from distlab.precision import DTYPES
from distlab.simulate.events import Compute, EventLog, MemoryMoment, Wait
from distlab.simulate.world import fake_world
from distlab.theory.checks import at_least_one
from distlab.train.build import build_training
from distlab.train.step import TrainStep, loss_function

Mark = Callable[[str], None]
MakeStep = Callable[[ParallelModel, Optimizer, Mark], Callable[[], Any]]
# orders are learned and optimizer states made in the first; the other two repeat each other
STEPS = 3


@dataclass(frozen=True)
class SimulatedStep:
    """A settled training step of one rank.

    Args:
        world_size: ranks.
        calls: the collectives of the step, in order.
        items: events of two consecutive settled steps (what the first leaves in flight, the second
            waits for).
        boundary: number of items in the first of the two.
        memory: the moments of the last step.
        after_init: bytes by category once wrapped and before any step.
    """

    world_size: int
    calls: tuple[CollectiveCall, ...]
    items: tuple[Compute | CollectiveCall | Wait, ...]
    boundary: int
    memory: tuple[MemoryMoment, ...]
    after_init: dict[str, int]

    @property
    def peak(self) -> MemoryMoment:
        """The moment at which most memory was in use."""
        return max(self.memory, key=lambda moment: moment.total)

    @property
    def comm_bytes(self) -> int:
        """Payload of all collectives of the step."""
        return sum(call.bytes for call in self.calls)

    @property
    def operators(self) -> tuple[Compute, ...]:
        """The operators of the last step, in order."""
        return tuple(item for item in self.items[self.boundary :] if isinstance(item, Compute))


def simulate_step(
    strategy: str | Strategy,
    build: ModelConfig | Callable[[], nn.Module],
    make_step: MakeStep,
    *,
    world_size: int,
    rank: int = 0,
    like_nccl: bool = True,
    **options: Any,
) -> SimulatedStep:
    """Simulate one step with fused AdamW on rank `rank` of `world_size`, without memory or time.

    Args:
        strategy: name in `distlab.parallel.STRATEGIES`, or an entry. Torch's peers are refused.
        build: shape of the lab's Transformer, or a function that makes another module. It is called
            where tensors are fake.
        make_step: function `make_step(wrapper, optimizer, mark)` that returns a function that
            trains one step and calls `mark("forward_backward")` before its optimizer's step, as
            `TrainStep` does.
        like_nccl: True to answer as NCCL does, see `fake_world`.
        options: `checkpointing`, `layout`, `compute_dtype`, `bucket_size_mb` and `shard_size` of
            `build_training`.

    Raises:
        ValueError: torch's strategies, whose C++ reads the parameters' memory; an impossible rank.
    """
    entry = get_strategy(strategy) if isinstance(strategy, str) else strategy
    if entry.is_peer:
        raise ValueError(
            f"{entry.name} cannot be simulated: torch's reducer reads the parameters' memory, and fake tensors have "
            "none; its volume is in closed form in distlab.theory.volume"
        )
    log = EventLog()
    with (
        _collecting_only_what_is_new(),
        fake_world(world_size, rank, like_nccl=like_nccl) as group,
        log.recording(),
    ):
        _, wrapper, optimizer = build_training(
            build if isinstance(build, ModelConfig) else build(),
            entry,
            group,
            torch.optim.AdamW,
            {"fused": True},
            device="cpu",
            **options,
        )
        gc.collect()
        log.own_parameters(wrapper.parameters())
        after_init = dict(log._alive)

        def mark(phase: str) -> None:
            log.phase = "optimizer" if phase == "forward_backward" else "forward"

        step = make_step(wrapper, optimizer, mark)
        begins = []  # items, calls, moments before each step
        for _ in range(STEPS):
            begins.append((len(log.items), len(log.calls), len(log.memory)))
            log.phase = "forward"
            step()
        items, all_calls, memory = tuple(log.items), tuple(log.calls), tuple(log.memory)
        wrapper.close(restore=False)
        del step, wrapper, optimizer
    _, (first, _, _), (second, calls, moments) = begins
    return SimulatedStep(
        world_size,
        all_calls[calls:],
        items[first:],
        second - first,
        memory[moments:],
        after_init,
    )


def simulate_training(
    config: ModelConfig,
    strategy: str,
    *,
    batch: int,
    world_size: int,
    dtype: str = "bf16",
    micro_batches: int = 1,
    layout: Layout = DATA_PARALLEL,
    **options: Any,
) -> SimulatedStep:
    """Simulate one step that ddp_bench times: full-length sequences, fused AdamW, `dtype`.

    All is as on GPUs: NCCL's answers (see `fake_world`), linear layers that write their weights'
    gradients in fp32 directly to their place (see `model.ops.linear`), the choice of `auto`, and
    torch's fused attention in place of this lab's, which keeps the same tensors.

    Args:
        config: shape of the model. Sequences have its context length.
        batch: sequences per rank.
        dtype: `fp32`, or `bf16`/`fp16` over fp32 parameters.
        micro_batches: number of micro-batches accumulated in a step, of `batch` sequences each.
        layout: sizes of the groups of ranks that share the model. Such ranks have `batch` sequences
            for each of them.
        options: `rank`, whose step is simulated (those of a pipeline differ), and `checkpointing`,
            `bucket_size_mb` and `shard_size` of `simulate_step`.

    Raises:
        ValueError: an unknown strategy or dtype, one of torch's strategies, a size below one.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    at_least_one(batch=batch)
    attention = "naive" if config.attention == "naive" else "sdpa"
    config = replace(
        config, attention=attention, ops="torch" if config.ops == "torch" else "triton"
    )

    def make_step(wrapper: ParallelModel, optimizer: Optimizer, mark: Mark) -> Callable[[], Any]:
        tokens = torch.zeros(
            batch * layout.ranks, config.context_length // layout.context, dtype=torch.int64
        )
        train = TrainStep(wrapper, optimizer, loss_function(config, layout), mark=mark)
        return lambda: train([(tokens, tokens)] * micro_batches)

    with mock.patch.object(ops, "on_gpu", lambda x: True):
        return simulate_step(
            strategy,
            config,
            make_step,
            world_size=world_size,
            layout=layout,
            compute_dtype=DTYPES[dtype],
            **options,
        )


@contextmanager
def _collecting_only_what_is_new() -> Iterator[None]:
    """Whole collections are cheap within: they leave out what exists already.

    One more at the end, because finalizers of fake storages write into the log: let them do it now.
    """
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()
