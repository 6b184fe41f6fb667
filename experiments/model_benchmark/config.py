"""What to run."""

import itertools
from dataclasses import dataclass, fields

from distlab.bench.subject import MODES, TrialConfig
from distlab.measure.statistics import MIN_SAMPLES

NAME = "model_benchmark"
SWEPT = [field.name for field in fields(TrialConfig) if field.name not in ("bucket_size_mb", "seed")]


@dataclass(frozen=True)
class BenchmarkConfig:
    """Every combination of these; see `TrialConfig` for the options.

    Args:
        modes: of `distlab.bench.subject.MODES`; run in that order.
        warmups: numbers of first calls to leave out. All rows of one combination come from one series, so that they
            show what those calls cost. A process is cold only once: compare warm-ups in the first combination.
        repeats: timed calls.

    Raises:
        ValueError: a value that is not allowed.
    """

    size: tuple[str, ...] = ("tiny",)
    batch: tuple[int, ...] = (4,)
    context: tuple[int | None, ...] = (None,)
    dtype: tuple[str, ...] = ("fp32",)
    compile: tuple[str, ...] = ("off",)
    attention: tuple[str, ...] = ("sdpa",)
    ops: tuple[str, ...] = ("torch",)
    checkpointing: tuple[str, ...] = ("none",)
    strategy: tuple[str, ...] = ("local",)
    modes: tuple[str, ...] = MODES
    warmups: tuple[int, ...] = (5,)
    repeats: int = 10
    bucket_size_mb: float = 25.0
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise ValueError(f"mode {unknown or '(none)'}: choose among {', '.join(MODES)}")
        if not self.warmups or min(self.warmups) < 0:
            raise ValueError(f"warmup={self.warmups}: give at least one, none below 0")
        if self.repeats < MIN_SAMPLES:
            raise ValueError(f"repeats={self.repeats}: time at least {MIN_SAMPLES}")
        self.trials()

    def trials(self) -> list[TrialConfig]:
        """All combinations; modes and warm-ups share a trial."""
        choices = itertools.product(*(getattr(self, name) for name in SWEPT))
        rest = {"bucket_size_mb": self.bucket_size_mb, "seed": self.seed}
        found = [TrialConfig(**dict(zip(SWEPT, choice, strict=True)), **rest) for choice in choices]
        if not found:
            raise ValueError("give at least one value of every option")
        return found

    def label(self, trial: TrialConfig) -> str:
        """What tells this trial from the others of the run: the options that have several values."""
        varied = [name for name in SWEPT if len(getattr(self, name)) > 1]
        plain = ("size", "dtype", "attention", "strategy")  # values that say what they are
        texts = [str(getattr(trial, n)) if n in plain else f"{n} {getattr(trial, n)}" for n in varied]
        return ", ".join(texts)
