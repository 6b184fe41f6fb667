"""What to sweep."""

from dataclasses import dataclass

from distlab.bench.subject import Variant, variants
from distlab.measure.statistics import MIN_SAMPLES
from distlab.model.config import DTYPES, ModelConfig, preset

NAME = "bucket_sweep"
SIZES = (1.0, 10.0, 25.0, 100.0, 400.0, 1000.0, None)
OURS, PEER, PARTS, OPTIMUM = "bucketed", "torch-ddp-tuned", "parts", "optimum"


@dataclass(frozen=True)
class BucketSweepConfig:
    """What to sweep.

    Args:
        size, batch, context, dtype: as ddp_bench's.
        bucket_sizes_mb: MiB; None is unbounded.
        peer: whether torch DDP's sweep is measured beside.
        warmup, steps, rounds: untimed and timed steps per round, and rounds, interleaved.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "tiny"
    batch: int = 4
    context: int | None = None
    dtype: str = "fp32"
    bucket_sizes_mb: tuple[float | None, ...] = SIZES
    peer: bool = True
    warmup: int = 2
    steps: int = 5
    rounds: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        if len(self.bucket_sizes_mb) < 2:
            raise ValueError(f"bucket sizes {self.bucket_sizes_mb}: give two or more to compare")
        if min(self.batch, self.warmup, self.rounds) < 1 or self.steps * self.rounds < MIN_SAMPLES:
            raise ValueError(
                f"batch={self.batch}, warmup={self.warmup}, steps={self.steps}, rounds={self.rounds}: at least one "
                f"each, and {MIN_SAMPLES} timed steps"
            )
        self.rows()
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, context_length=self.context)

    def rows(self) -> list[Variant]:
        """local, ours and torch's with every bucket size."""
        for size in self.bucket_sizes_mb:
            if size is not None and not size > 0:
                raise ValueError(f"bucket size {size}: must be a positive number of MiB, or 'none'")
        return variants(["local", OURS, *([PEER] if self.peer else [])], self.bucket_sizes_mb)
