"""A tiny run that the tests of the trainer share."""

import random
from pathlib import Path

import numpy as np
import torch

from distlab.train.config import TrainConfig
from distlab.train.data import SyntheticSequences
from distlab.train.loop import Trainer

STRATEGIES = ["bucketed", "zero1", "zero2", "sharded-optimizer", "fsdp", "fsdp2"]


def tiny(**changes):
    """About 10 ms per step, in several buckets.

    Twelve sequences divide among 1, 2, 3 and 4 ranks.
    """
    model = {"layers": 2, "d_model": 32, "d_ff": 48, "heads": 2, "context": 8, "vocab": 31}
    defaults = model | {
        "batch": 12,
        "steps": 6,
        "warmup": 2,
        "checkpoint_every": 0,
        "bucket_size_mb": 0.01,
    }
    return TrainConfig(**(defaults | changes))


class Run:
    """A trainer of the tiny model that keeps its losses.

    A strategy may take the place of the configured one.
    """

    def __init__(self, context, folder=None, wrapped_by=None, **changes):
        self.losses: dict[int, str] = {}
        self.norms: dict[int, float | None] = {}
        config = tiny(**changes)
        model = config.model()
        self.trainer = Trainer(
            config,
            context,
            strategy=wrapped_by,
            train=SyntheticSequences(model.vocab_size, model.context_length, 0),
            validate=SyntheticSequences(model.vocab_size, model.context_length, 1),
            folder=None if folder is None else Path(folder),
            report=self._report,
        )

    def save(self, steps=0):
        """Train so many steps and have their checkpoint on the disk."""
        for _ in range(steps):
            self.trainer.one_step()
        self.trainer.save()
        self.trainer.checkpoints.wait()

    def _report(self, step):
        self.losses[step.step] = step.loss.hex()
        self.norms[step.step] = step.grad_norm


def draw_from_all_generators():
    """What comes next from every generator that a checkpoint holds."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        torch.rand(()).item(),
    ]


def digest(module):
    return sum(p.detach().double().sum().item() for p in module.parameters())
