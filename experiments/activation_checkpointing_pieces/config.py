"""What to run."""

from dataclasses import dataclass

from distlab.model import ModelConfig, checkpoint_groups, preset
from distlab.model import config as model_config

NAME = "activation_checkpointing"
DTYPES = {name: model_config.DTYPES[name] for name in ("fp32", "bf16")}
BASE = "none"  # what the others are held against


@dataclass(frozen=True)
class CheckpointingConfig:
    """What to run.

    Args:
        size, layers, context, vocab: the model; None leaves the preset's.
        batch: sequences.
        dtype: `fp32`, or `bf16` autocast over fp32 parameters.
        groups: ways to group blocks, see `distlab.model.checkpoint_groups`; `none` is added where it is missing.
        warmup, steps, rounds: untimed and timed steps of each way per round, and rounds.
        count: count the peak on fake tensors too (seconds to a quarter of a minute each).
        device: where to compute.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "xl"
    layers: int | None = None
    context: int | None = 1024
    vocab: int | None = None
    batch: int = 4
    dtype: str = "bf16"
    groups: tuple[str, ...] = (
        BASE, "block", "every-2", "every-4", "every-8", "every-16", "every-32", "every-8-2", "every-8-1",
    )  # fmt: skip
    warmup: int = 1
    steps: int = 5
    rounds: int = 2
    count: bool = False
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        for name, least in (("batch", 1), ("warmup", 1), ("steps", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.steps * self.rounds < 3:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least 3 steps")
        for choice in self.groups:
            checkpoint_groups(choice)
        self.model()

    def model(self) -> ModelConfig:
        sizes = {"num_layers": self.layers, "context_length": self.context, "vocab_size": self.vocab}
        return preset(self.size, **sizes)

    def choices(self) -> tuple[str, ...]:
        """The ways to group, the base first."""
        return tuple(dict.fromkeys([BASE, *self.groups]))


CPU = CheckpointingConfig(
    size="tiny", layers=16, context=128, vocab=256, dtype="fp32", count=True, device="cpu", steps=4,
    groups=(BASE, "block", "every-2", "every-4", "every-8", "every-16", "every-4-2", "every-8-2"),
)  # fmt: skip
QUICK = CheckpointingConfig(
    size="tiny", layers=8, context=128, vocab=256, dtype="fp32", count=True, device="cpu", steps=3, rounds=1,
    groups=(BASE, "block", "every-2", "every-4", "every-4-2"),
)  # fmt: skip
