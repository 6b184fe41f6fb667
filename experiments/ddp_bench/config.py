"""What to run."""

from dataclasses import dataclass
from typing import Any

from distlab.experiment import TimingOptions, option
from distlab.measure.statistics import MIN_PAIRS
from distlab.model.config import DTYPES, OPS_CHOICES, PRESETS, ModelConfig, preset
from distlab.options import SEED
from distlab.parallel import STRATEGIES, strategies_on

OOM = "OOM"


@dataclass(frozen=True)
class DDPBenchConfig(TimingOptions):
    """What to run. Raises ValueError for a value that is not allowed; the message says what is."""

    size: str = option("tiny", "model preset", choices=tuple(PRESETS))
    batch: int = option(4, "sequences per rank", least=1)
    context: int | None = option(None, "tokens per sequence [the preset's]", least=1)
    ops: str = option("torch", "of the model: torch, or triton for this lab's kernels", choices=OPS_CHOICES)
    dtype: str = option("fp32", "fp32, or bf16 or fp16 computation over fp32 parameters", choices=tuple(DTYPES))
    strategies: tuple[str, ...] = option(strategies_on("cpu"), "what to compare", choices=tuple(STRATEGIES))
    bucket_sizes_mb: tuple[Any, ...] = option(
        (4.0,),
        "MiB per bucket, one or several (a row each); none for unbounded, auto for a bucket sweep's best",
        above=0,
        words={"none": None, "auto": "auto"},
        kind=float,
        flag="--bucket-size-mb",
    )
    bucket_sweep: tuple[str, ...] = option((), "records of bucket_sweep for auto [records/bucket_sweep/*.json]")
    in_turn: bool = option(False, "attach all variants at once, one step each in turn; takes the memory of all")
    check_steps: int = option(2, "steps of the comparison with one process, 0 for none", least=0)
    profile_steps: int = option(1, "steps per trace, of which the median is shown; 0 for none", least=0)
    seed: int = option(0, "of parameters and data", **SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps * self.rounds < MIN_PAIRS:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least {MIN_PAIRS} steps")
        if "auto" in self.bucket_sizes_mb and len(self.bucket_sizes_mb) > 1:
            raise ValueError("--bucket-size-mb auto stands alone, or give sizes in MiB")
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, ops=self.ops, context_length=self.context)


QUICK = {
    "strategies": ("local", "naive", "bucketed", "torch-ddp"),
    "rounds": 2, "steps": 4, "check_steps": 2, "profile_steps": 1,
}  # fmt: skip
PRESETS_OF_OPTIONS = {
    "gpu": {
        "size": "medium", "dtype": "bf16", "bucket_sizes_mb": (100.0,), "warmup": 3, "steps": 8, "rounds": 3,
        "strategies": strategies_on("cuda"),
    },
    "quick": QUICK,
    "smoke": QUICK | {
        "size": "tiny", "batch": 1, "context": 16, "bucket_sizes_mb": (1.0,), "warmup": 1, "steps": 5, "rounds": 1,
        "check_steps": 1,
    },
}  # fmt: skip
