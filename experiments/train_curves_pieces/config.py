"""What is run: the names of the runs and the options of all of them."""

import dataclasses
from dataclasses import dataclass

from distlab.parallel import strategies_on
from distlab.train.config import TRAINABLE, TrainConfig

NAME = "train_curves"
REFERENCE = "bucketed"
ROUNDING, KILLED, COST = "bucketed, 2 micro-batches", "bucketed, killed", "checkpoints"
LAST = 20  # steps whose mean loss is compared


def compared_on(device_type: str) -> tuple[str, ...]:
    """The strategies that are compared on `cuda` or `cpu`: all that can train there, torch's DDP once."""
    return tuple(name for name in strategies_on(device_type) if name in TRAINABLE and name != "torch-ddp-tuned")


@dataclass(frozen=True)
class CurvesConfig:
    """What to run.

    Args:
        size, context, dtype, steps, batch, lr, seed: as in `TrainConfig`; the batch counts all ranks' sequences.
        strategies: to train with; the reference is added where it is missing.
        parts: of `curves`, `kill` and `cost`.
        kill_at: step after which the last rank kills itself.
        checkpoint_every: steps between the checkpoints of that run.
        cost_batch, block, rounds: of the cost: sequences over all ranks, steps per block, pairs of blocks.
        deterministic: ask torch for deterministic kernels, so that two runs are equal bit for bit.

    Raises:
        ValueError: a value that is not allowed.
    """

    size: str = "tiny"
    context: int | None = None
    dtype: str = "fp32"
    steps: int = 200
    batch: int = 16
    lr: float = 3e-4
    seed: int = 0
    strategies: tuple[str, ...] = compared_on("cpu")
    parts: tuple[str, ...] = ("curves", "kill", "cost")
    kill_at: int = 110
    checkpoint_every: int = 50
    cost_batch: int = 64
    block: int = 50
    rounds: int = 3
    deterministic: bool = True

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in ("curves", "kill", "cost")]
        if unknown or not self.parts:
            raise ValueError(f"parts {self.parts}: choose among curves, kill, cost")
        if not 1 < self.kill_at < self.steps or self.block < 2 or self.rounds < 1:
            raise ValueError(
                f"kill_at={self.kill_at}, steps={self.steps}, block={self.block}, rounds={self.rounds}: "
                "1 < kill_at < steps, a block of at least 2 steps, and at least one round"
            )
        if "kill" in self.parts and not 0 < self.checkpoint_every < self.kill_at:
            raise ValueError(
                f"checkpoint_every={self.checkpoint_every}, kill_at={self.kill_at}: what is killed must have written a "
                "checkpoint before"
            )
        for strategy in self.strategies:
            self.training(strategy)
        self.training(REFERENCE, batch=self.cost_batch)

    def training(self, strategy: str, **changes: object) -> TrainConfig:
        base = TrainConfig(
            size=self.size, context=self.context, vocab=256, strategy=strategy, batch=self.batch, steps=self.steps,
            lr=self.lr, warmup=max(1, self.steps // 10), dtype=self.dtype, seed=self.seed, checkpoint_every=0,
        )  # fmt: skip
        return dataclasses.replace(base, **changes)
