"""What to run."""

from dataclasses import dataclass

from distlab.bench.workbench import variants
from distlab.measure.statistics import MIN_PAIRS
from distlab.model.config import ModelConfig, preset
from distlab.parallel import strategies_on
from distlab.train.step import DTYPES

NAME = "ddp_bench"
OOM = "OOM"


@dataclass(frozen=True)
class DDPBenchConfig:
    """What to run.

    Args:
        size: model preset; `tiny` suits CPUs.
        batch: sequences per rank.
        context: tokens per sequence; None for the preset's.
        ops: `torch`, or `triton` for this lab's kernels in the model.
        dtype: `fp32`, or `bf16`/`fp16` computation over fp32 parameters: autocast, for FSDP its compute type.
        strategies: names of the registry.
        bucket_sizes_mb: MiB; with several, each strategy with buckets has a row per size. None is unbounded.
        warmup, steps, rounds: untimed and timed steps per round, and rounds; a variant has steps·rounds samples.
        in_turn: attach all variants at once and let them step in turn (needs the memory of all), instead of one
            after the other in rounds.
        check_steps: steps of the comparison with one process; 0 leaves it out.
        profile_steps: steps per trace; the median one is shown. 0 leaves traces and what they tell out.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "tiny"
    batch: int = 4
    context: int | None = None
    ops: str = "torch"
    dtype: str = "fp32"
    strategies: tuple[str, ...] = strategies_on("cpu")
    bucket_sizes_mb: tuple[float | None, ...] = (4.0,)
    warmup: int = 2
    steps: int = 6
    rounds: int = 2
    in_turn: bool = False
    check_steps: int = 2
    profile_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        if not self.strategies or not self.bucket_sizes_mb:
            raise ValueError("give at least one strategy and one bucket size")
        for name, least in (
            ("batch", 1),
            ("steps", 1),
            ("rounds", 1),
            ("warmup", 1),
            ("check_steps", 0),
            ("profile_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.steps * self.rounds < MIN_PAIRS:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least {MIN_PAIRS} steps")
        for size in self.bucket_sizes_mb:
            if size is not None and not size > 0:
                raise ValueError(f"bucket size {size}: must be a positive number of MiB, or 'none'")
        variants(self.strategies, self.bucket_sizes_mb)
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, ops=self.ops, context_length=self.context)
