"""Run a few training steps of a real strategy in a fake world, and keep what the last ones did."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distlab.measure.collectives import CollectiveCall
from distlab.parallel import ParallelModel, Strategy, get_strategy
from distlab.simulate.events import Compute, EventLog, MemoryMoment, Wait
from distlab.simulate.world import fake_world

Mark = Callable[[str], None]
MakeStep = Callable[[ParallelModel, Optimizer, Mark], Callable[[], Any]]
STEPS = 3  # orders are learned and optimizer states made in the first; the other two repeat each other


@dataclass(frozen=True)
class SimulatedStep:
    """A settled training step of one rank.

    Args:
        world_size: ranks.
        calls: the collectives of the step, in order.
        items: events of two consecutive settled steps (what the first leaves in flight, the second waits for).
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
    build: Callable[[], nn.Module],
    make_step: MakeStep,
    *,
    world_size: int,
    rank: int = 0,
    bucket_size_mb: float | None = 25.0,
    compute_dtype: torch.dtype | None = None,
    optimizer_cls: type[Optimizer] = torch.optim.AdamW,
    optimizer_options: dict[str, Any] | None = None,
    like_nccl: bool = True,
) -> SimulatedStep:
    """What one step does on rank `rank` of `world_size`, without its memory or its time.

    Args:
        strategy: a name of `distlab.parallel.STRATEGIES`, or an entry; torch's peers are refused.
        build: makes the module; called where tensors are fake.
        make_step: `make_step(wrapper, optimizer, mark)` returns a function that trains one step and calls
            `mark("forward_backward")` before its optimizer's step, as `TrainStep` does.
        compute_dtype: of forward; see `Strategy.build`.
        optimizer_options: default for AdamW: the fused kernel.
        like_nccl: see `fake_world`.

    Raises:
        ValueError: torch's strategies, whose C++ reads the parameters' memory; an impossible rank.
    """
    entry = get_strategy(strategy) if isinstance(strategy, str) else strategy
    if entry.is_peer:
        raise ValueError(
            f"{entry.name} cannot be simulated: torch's reducer reads the parameters' memory, and fake tensors have "
            "none; its volume is in closed form in distlab.theory.volume"
        )
    if optimizer_options is None:
        optimizer_options = {"fused": True} if optimizer_cls is torch.optim.AdamW else {}
    log = EventLog()
    with _collecting_only_what_is_new(), fake_world(world_size, rank, like_nccl=like_nccl) as group, log.recording():
        wrapper, optimizer = entry.build(
            build(), group, optimizer_cls, optimizer_options, compute_dtype=compute_dtype, bucket_size_mb=bucket_size_mb
        )
        gc.collect()
        log.own_parameters(wrapper.parameters())
        after_init = dict(log._alive)

        def mark(phase: str) -> None:
            log.phase = "optimizer" if phase == "forward_backward" else "forward"

        step = make_step(wrapper, optimizer, mark)
        begins: list[tuple[int, int, int]] = []  # items, calls, moments before each step
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


@contextmanager
def _collecting_only_what_is_new() -> Iterator[None]:
    """Whole collections are cheap within: they leave out what exists already. One more at the end, because finalizers
    of fake storages write into the log: let them do it now.
    """
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()
