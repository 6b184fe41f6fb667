"""Run a few training steps of a real strategy in a fake world, and keep what the last ones did.

`simulate_step` takes any model and any step. `simulate_training` takes the lab's own: the
Transformer, `TrainStep` and AdamW. `timeline.replay` gives the result a time.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.measure.collectives import CollectiveCall
from distlab.model import ModelConfig, ops
from distlab.model.config import Checkpointing
from distlab.parallel import Layout, ParallelModel, Strategy, get_strategy
from distlab.parallel.build import BUCKET_SIZE_MB
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.meta import compiled_code_runs_eager
from distlab.precision import DTYPES
from distlab.simulate.events import Compute, EventLog, MemoryMoment, Wait
from distlab.simulate.world import fake_world
from distlab.theory.checks import at_least_one
from distlab.train.build import build_training
from distlab.train.step import TrainStep, loss_function

Mark = Callable[[str], None]
MakeStep = Callable[[ParallelModel, Optimizer, Mark], Callable[[], Any]]
# In the first step, strategies learn orders and optimizers make their states. The other two repeat
# each other.
STEPS = 3


@dataclass(frozen=True)
class SimulatedStep:
    """A training step of one rank in the steady state.

    Args:
        world_size: number of simulated ranks.
        calls: collectives of the step, in order.
        items: events of two consecutive steps. The second waits for what the first leaves in
            flight.
        boundary: number of items in the first of the two.
        memory: moments of the last step.
        after_init: bytes by category once the model is wrapped, before any step.
    """

    world_size: int
    calls: tuple[CollectiveCall, ...]
    items: tuple[Compute | CollectiveCall | Wait, ...]
    boundary: int
    memory: tuple[MemoryMoment, ...]
    after_init: dict[str, int]

    @property
    def peak(self) -> MemoryMoment:
        """Moment at which most memory was in use."""
        return max(self.memory, key=lambda moment: moment.total)

    @property
    def comm_bytes(self) -> int:
        """Payload of all collectives of the step, in bytes."""
        return sum(call.bytes for call in self.calls)

    @property
    def operators(self) -> tuple[Compute, ...]:
        """Operators of the last step, in order."""
        return tuple(item for item in self.items[self.boundary :] if isinstance(item, Compute))


def simulate_step(
    strategy: str | Strategy,
    build: ModelConfig | Callable[[], nn.Module],
    make_step: MakeStep,
    *,
    world_size: int,
    rank: int = 0,
    like_nccl: bool = True,
    checkpointing: Checkpointing = False,
    layout: Layout = DATA_PARALLEL,
    compute_dtype: torch.dtype | None = None,
    bucket_size_mb: float | None = BUCKET_SIZE_MB,
    shard_size: int | None = None,
) -> SimulatedStep:
    """Simulate one step with fused AdamW on rank `rank` of `world_size`, without memory or time.

    Args:
        strategy: name in `distlab.parallel.STRATEGIES`, or an entry. Torch's peers are refused.
        build: shape of the lab's Transformer, or a function that makes another module. It is called
            where tensors are fake. Compiled parts of the module run eager.
        make_step: function `make_step(wrapper, optimizer, mark)` that returns a function that
            trains one step and calls `mark("forward_backward")` before its optimizer's step, as
            `TrainStep` does.
        world_size: number of simulated ranks.
        rank: number of the simulated rank, from 0.
        like_nccl: True to answer as NCCL does, see `fake_world`.
        checkpointing, layout, compute_dtype, bucket_size_mb, shard_size: as in `build_training`.

    Raises:
        ValueError: one of torch's strategies, whose C++ reads the parameters' memory, or an
            impossible rank.
    """
    entry = get_strategy(strategy) if isinstance(strategy, str) else strategy
    if entry.is_peer:
        raise ValueError(
            f"{entry.name} cannot be simulated: torch's reducer reads the parameters' memory, and "
            "fake tensors have none; its volume is in closed form in distlab.theory.volume"
        )
    log = EventLog()
    with (
        _collecting_only_what_is_new(),
        fake_world(world_size, rank, like_nccl=like_nccl) as group,
        log.recording(group),
    ):
        _, wrapper, optimizer = build_training(
            build if isinstance(build, ModelConfig) else build(),
            entry,
            group,
            torch.optim.AdamW,
            {"fused": True},
            device="cpu",
            checkpointing=checkpointing,
            layout=layout,
            compute_dtype=compute_dtype,
            bucket_size_mb=bucket_size_mb,
            shard_size=shard_size,
        )
        # Storages in reference cycles of the construction would count as alive until some later
        # step.
        gc.collect()
        log.own_parameters(wrapper.parameters())
        after_init = log.alive()

        def mark(phase: str) -> None:
            log.phase = "optimizer" if phase == "forward_backward" else "forward"

        step = make_step(wrapper, optimizer, mark)
        # Lengths of the log before each step.
        items_before: list[int] = []
        calls_before: list[int] = []
        moments_before: list[int] = []
        # A user's module may be compiled, or parts of it.
        with compiled_code_runs_eager():
            for _ in range(STEPS):
                items_before.append(len(log.items))
                calls_before.append(len(log.calls))
                moments_before.append(len(log.memory))
                log.phase = "forward"
                step()
        # Read the log before the wrapper closes, which may free memory and send.
        items = tuple(log.items[items_before[-2] :])
        calls = tuple(log.calls[calls_before[-1] :])
        memory = tuple(log.memory[moments_before[-1] :])
        wrapper.close(restore=False)
        # Inside the recording, so that their finalizers still find the log.
        del step, wrapper, optimizer
    return SimulatedStep(
        world_size=world_size,
        calls=calls,
        items=items,
        boundary=items_before[-1] - items_before[-2],
        memory=memory,
        after_init=after_init,
    )


def simulate_training(
    config: ModelConfig,
    strategy: str,
    *,
    batch: int,
    world_size: int,
    rank: int = 0,
    dtype: str = "bf16",
    micro_batches: int = 1,
    checkpointing: Checkpointing = False,
    layout: Layout = DATA_PARALLEL,
    bucket_size_mb: float | None = BUCKET_SIZE_MB,
    shard_size: int | None = None,
) -> SimulatedStep:
    """Simulate one step that ddp_bench times: full-length sequences, fused AdamW, `dtype`.

    The step is the one that GPUs run: NCCL's answers (see `fake_world`), linear layers that write
    the gradients of their weights in fp32 directly to their place (see `model.ops.linear`), and
    the operations that `auto` chooses. Torch's fused attention takes the place of this lab's, and
    keeps the same tensors.

    Args:
        config: shape of the model. Sequences have its context length.
        strategy: name in `distlab.parallel.STRATEGIES`.
        batch: sequences per rank.
        world_size: number of simulated ranks.
        rank: number of the simulated rank, from 0. The ranks of a pipeline differ.
        dtype: `fp32`, or `bf16`/`fp16` over fp32 parameters.
        micro_batches: number of micro-batches accumulated in a step, of `batch` sequences each.
        layout: sizes of the groups of ranks that share the model. Such ranks have `batch` sequences
            for each of them.
        checkpointing, bucket_size_mb, shard_size: as in `build_training`.

    Raises:
        ValueError: an unknown strategy or dtype, one of torch's strategies, or a size below one.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    at_least_one(batch=batch)
    config = replace(
        config,
        attention="naive" if config.attention == "naive" else "sdpa",
        ops="torch" if config.ops == "torch" else "triton",
    )

    def make_step(wrapper: ParallelModel, optimizer: Optimizer, mark: Mark) -> Callable[[], Any]:
        sequences = batch * layout.ranks
        tokens_of_a_rank = config.context_length // layout.context
        # Values do not matter. Fake tensors have none.
        tokens = torch.zeros(sequences, tokens_of_a_rank, dtype=torch.int64)
        train = TrainStep(wrapper, optimizer, loss_function(config, layout), mark=mark)

        def step() -> None:
            train([(tokens, tokens)] * micro_batches)

        return step

    # Linear layers choose another path on a CPU, with other operators and other memory.
    with ops.as_on_gpu():
        return simulate_step(
            strategy,
            config,
            make_step,
            world_size=world_size,
            rank=rank,
            checkpointing=checkpointing,
            layout=layout,
            compute_dtype=DTYPES[dtype],
            bucket_size_mb=bucket_size_mb,
            shard_size=shard_size,
        )


@contextmanager
def _collecting_only_what_is_new() -> Iterator[None]:
    """Make whole collections cheap in the block: they leave out the objects that exist already.

    One more follows the block, because finalizers of fake storages write into the log. They must
    run now.
    """
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()
