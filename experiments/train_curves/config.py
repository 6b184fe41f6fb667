"""What is run: the names of the runs and the options of all of them."""

import dataclasses
from dataclasses import dataclass

from distlab.experiment import Options, option
from distlab.parallel import strategies_on
from distlab.train.config import TRAINABLE, TrainConfig

REFERENCE = "bucketed"
ROUNDING, KILLED, COST = "bucketed, 2 micro-batches", "bucketed, killed", "checkpoints"
LAST = 20  # steps whose mean loss is compared
PARTS = ("curves", "kill", "cost")


def compared_on(device_type: str) -> tuple[str, ...]:
    """The strategies that are compared on `cuda` or `cpu`: all that can train there, torch's DDP once."""
    return tuple(name for name in strategies_on(device_type) if name in TRAINABLE and name != "torch-ddp-tuned")


@dataclass(frozen=True)
class CurvesConfig(Options):
    """What to run. Raises ValueError for a value that is not allowed; `TrainConfig` checks what it takes."""

    size: str = option("tiny", "model preset")
    context: int | None = option(None, "tokens per sequence [the preset's]")
    dtype: str = option("fp32", "of the computation")
    steps: int = option(200, "of each curve")
    batch: int = option(16, "sequences of all ranks")
    lr: float = option(3e-4, "learning rate")
    seed: int = option(0, "of parameters and data")
    strategies: tuple[str, ...] = option(compared_on("cpu"), f"to train with; {REFERENCE} is added")
    parts: tuple[str, ...] = option(PARTS, "what to run; kill needs --max-restarts 1", choices=PARTS)
    kill_at: int = option(110, "step after which the last rank kills itself")
    checkpoint_every: int = option(50, "steps between the checkpoints of that run")
    cost_batch: int = option(64, "sequences of all ranks, for the cost of checkpoints")
    block: int = option(50, "steps of a block with or without a checkpoint", least=2)
    rounds: int = option(3, "pairs of blocks", least=1)
    deterministic: bool = option(True, "ask torch for deterministic kernels: two runs are equal bit for bit")
    text_file: str | None = option(None, "a text file [this repository's sources and pages]", flag="--text")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.kill_at < self.steps:
            raise ValueError(f"kill_at={self.kill_at}, steps={self.steps}: 1 < kill_at < steps")
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
