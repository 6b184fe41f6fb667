"""What to sweep."""

from dataclasses import dataclass

from distlab.bench.subject import Variant, variants
from distlab.experiment import TimingOptions, option
from distlab.measure.statistics import MIN_SAMPLES
from distlab.model.config import DTYPES, PRESETS, ModelConfig, preset
from distlab.options import SEED

OURS, PEER, PARTS, OPTIMUM = "bucketed", "torch-ddp-tuned", "parts", "optimum"


@dataclass(frozen=True)
class BucketSweepConfig(TimingOptions):
    """What to sweep. Raises ValueError for a value that is not allowed; the message says what is."""

    size: str = option("tiny", "model preset", choices=tuple(PRESETS))
    batch: int = option(4, "sequences per rank", least=1)
    context: int | None = option(None, "tokens per sequence [the preset's]", least=1)
    dtype: str = option("fp32", "fp32, or bf16 or fp16 computation over fp32 parameters", choices=tuple(DTYPES))
    bucket_sizes_mb: tuple[float | None, ...] = option(
        (1.0, 10.0, 25.0, 100.0, 400.0, 1000.0, None),
        "MiB per bucket; none for unbounded",
        above=0,
        words={"none": None},
        flag="--bucket-size-mb",
    )
    peer: bool = option(True, "sweep torch DDP too")
    fit: tuple[str, ...] = option((), "records of allreduce_sweep on this kind of machine [timed here]", metavar="FILE")
    seed: int = option(0, "of parameters and data", **SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.bucket_sizes_mb) < 2:
            raise ValueError(f"bucket sizes {self.bucket_sizes_mb}: give two or more to compare")
        if self.steps * self.rounds < MIN_SAMPLES:
            raise ValueError(f"steps={self.steps}, rounds={self.rounds}: time at least {MIN_SAMPLES} steps")
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, context_length=self.context)

    def rows(self) -> list[Variant]:
        """local, ours and torch's with every bucket size."""
        return variants(["local", OURS, *([PEER] if self.peer else [])], self.bucket_sizes_mb)
