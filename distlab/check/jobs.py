"""Settings of one comparison of a training step on ranks with one process."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from distlab.bench.task import Task
from distlab.parallel import Strategy

STEPS = 2  # training steps in every check


@dataclass(frozen=True)
class Jobs:
    """Settings of a comparison, except the ranks and the number of micro-batches."""

    task: Task
    candidate: Task
    strategy: Strategy
    same_batch: bool
    seed: int
    optimizer: type[Optimizer] = torch.optim.SGD
    where: bool = False

    def batches(
        self, source: Task, rank: int, step: int, micro_batches: int, device: torch.device
    ) -> list[Any]:
        """Return the micro-batches of one rank in one step, from 0 on."""
        # In tensor and context parallelism every rank computes with the batch of rank 0.
        rank = 0 if self.same_batch else rank
        first = step * micro_batches
        found = []
        # Numbers go on over the steps, so no two steps share a batch.
        for number in range(first, first + micro_batches):
            found.extend(source.batches(rank, number, device))
        # A task may have several micro-batches in a step of its own.
        return found[:1] if micro_batches == 1 else found
