"""What a training run is: every option, checked once, and which of them a resumed run must repeat."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from distlab.model.config import ModelConfig, preset
from distlab.parallel import STRATEGIES
from distlab.train.schedule import WarmupCosine
from distlab.train.step import DTYPES

# local drifts apart; ZeroRedundancyOptimizer keeps its state where no checkpoint could find it.
TRAINABLE = tuple(name for name, s in STRATEGIES.items() if s.synchronizes and name != "torch-zero")
# What decides the sequence of losses, besides the model and the data.
LASTING = ("batch", "seed", "lr", "lr_floor", "warmup", "weight_decay", "beta2", "clip", "dtype", "dropout")


@dataclass(frozen=True)
class TrainConfig:
    """One run.

    Args:
        size: model preset.
        context: tokens per sequence; None for the preset's.
        vocab: entries of the vocabulary; None for the preset's (256 for text).
        dropout: probability.
        ops: `torch`, or `triton` for this lab's kernels, see `distlab.model.ops.get_ops`.
        strategy: a name of the registry that keeps ranks alike.
        bucket_size_mb: MiB, for strategies with buckets.
        batch: sequences per optimizer step over *all* ranks, so that a run means the same at every world size.
        accumulate: micro-batches that a rank cuts its share into; one synchronisation per optimizer step.
        steps: optimizer steps.
        lr, lr_floor, warmup: see `WarmupCosine`.
        weight_decay, beta2: of AdamW.
        clip: largest norm of the gradient; 0 for no clipping.
        dtype: `fp32`, or `bf16`/`fp16` computation over fp32 parameters (fp16 with a loss scale).
        compile_blocks: `torch.compile` each block.
        checkpoint_blocks: recompute each block's activations in backward.
        seed: of parameters, data order and dropout.
        validate_every: steps between validations; 0 for one at the end.
        validate_sequences: sequences per validation.
        checkpoint_every: steps between checkpoints; 0 for one at the end.
        keep: complete checkpoints that stay.
        synchronous_checkpoints: write within the step instead of behind it.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "tiny"
    context: int | None = None
    vocab: int | None = None
    dropout: float = 0.0
    ops: str = "torch"
    strategy: str = "bucketed"
    bucket_size_mb: float = 25.0
    batch: int = 8
    accumulate: int = 1
    steps: int = 100
    lr: float = 1e-3
    lr_floor: float = 0.1
    warmup: int = 10
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    dtype: str = "fp32"
    compile_blocks: bool = False
    checkpoint_blocks: bool = False
    seed: int = 0
    validate_every: int = 0
    validate_sequences: int = 64
    checkpoint_every: int = 50
    keep: int = 2
    synchronous_checkpoints: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        if self.strategy not in TRAINABLE:
            allowed = (f"{name} (GPUs only)" if STRATEGIES[name].needs_gpu else name for name in TRAINABLE)
            raise ValueError(f"strategy {self.strategy!r} cannot train; allowed: {', '.join(allowed)}")
        for name, least in (
            ("batch", 1), ("accumulate", 1), ("steps", 1), ("warmup", 0), ("weight_decay", 0), ("clip", 0),
            ("seed", 0), ("validate_every", 0), ("validate_sequences", 1), ("checkpoint_every", 0), ("keep", 1),
        ):  # fmt: skip
            if not getattr(self, name) >= least:  # nor is NaN
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        for name, limit in (("seed", 2**63), ("lr", math.inf), ("weight_decay", math.inf)):
            if not getattr(self, name) < limit:
                raise ValueError(f"{name}={getattr(self, name)}: must be a number below {limit}")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2={self.beta2}: must be at least 0 and below 1")
        self.schedule()
        self.model()

    def model(self) -> ModelConfig:
        """The preset with this run's overrides."""
        sizes = {"context_length": self.context, "vocab_size": self.vocab}
        return preset(self.size, dropout=self.dropout, ops=self.ops, **sizes)

    def schedule(self) -> WarmupCosine:
        """The learning rate over the steps of this run."""
        return WarmupCosine(self.lr, self.steps, min(self.warmup, self.steps), self.lr_floor)

    def identity(self, data: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint must share with the run that continues it."""
        lasting = {name: getattr(self, name) for name in LASTING}
        return {"model": asdict(self.model()), "data": data, **lasting}


def refuse_other_run(saved: Any, mine: dict[str, Any], where: str) -> None:
    """Raises ValueError with every option that differs."""
    if not isinstance(saved, dict):
        raise ValueError(f"{where} does not say which run it belongs to")
    differences = []
    for name in mine.keys() | saved.keys():
        there, here = saved.get(name, _MISSING), mine.get(name, _MISSING)
        if isinstance(there, dict) and isinstance(here, dict):
            pairs = {
                f"{name}.{key}": (there.get(key, _MISSING), here.get(key, _MISSING))
                for key in there.keys() | here.keys()
            }
        else:
            pairs = {name: (there, here)}
        differences += [
            f"{key} is {a!r} there and {b!r} here" for key, (a, b) in pairs.items() if not _same(a, b)
        ]
    if differences:
        raise ValueError(
            f"{where} belongs to another run: {'; '.join(sorted(differences))}. Repeat its options, or pass another "
            "--name, or --fresh to begin anew"
        )


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _same(there: Any, here: Any) -> bool:
    """Equal as JSON: a truth value is no number."""
    return there == here and isinstance(there, bool) == isinstance(here, bool)
