"""What to run."""

import itertools
from dataclasses import dataclass
from typing import Any

from distlab.bench.timing import MODES, TrialConfig
from distlab.experiment import Options, option
from distlab.measure import MIN_SAMPLES, emitter
from distlab.model.config import ATTENTION_CHOICES, COMPILE_CHOICES, OPS_CHOICES, PRESETS
from distlab.options import SEED
from distlab.parallel import STRATEGIES
from distlab.precision import DTYPES

SWEPT = ("size", "batch", "context", "dtype", "compile", "attention", "ops", "checkpointing", "strategy")


def _swept(default: tuple, help: str, **limits: Any) -> Any:
    return option(default, f"{help}; several are swept", **limits)


@dataclass(frozen=True)
class BenchmarkConfig(Options):
    """Every combination of the options that take several values, and what to look at in each.

    All rows of one combination come from one series, so that several warm-ups show what those calls cost. A process is
    cold only once: compare warm-ups in the first combination. Raises ValueError for a value that is not allowed.
    """

    size: tuple[str, ...] = _swept(("tiny",), "model presets", choices=tuple(PRESETS))
    batch: tuple[int, ...] = _swept((4,), "sequences per rank", least=1)
    context: tuple[int | None, ...] = _swept(
        (None,), "tokens per sequence, or preset", least=1, words={"preset": None}
    )
    dtype: tuple[str, ...] = _swept(
        ("fp32",), "bf16 and fp16 by autocast over fp32 parameters", choices=tuple(DTYPES)
    )
    compile: tuple[str, ...] = _swept(("off",), "torch.compile: off, model or blocks", choices=COMPILE_CHOICES)
    attention: tuple[str, ...] = _swept(("sdpa",), f"of {', '.join(ATTENTION_CHOICES)}", choices=ATTENTION_CHOICES)
    ops: tuple[str, ...] = _swept(("torch",), "of the other operations: torch or triton", choices=OPS_CHOICES)
    checkpointing: tuple[str, ...] = _swept(("none",), "none, block or every-K: what is recomputed in backward")
    strategy: tuple[str, ...] = _swept(("local",), "with several ranks", choices=tuple(STRATEGIES))
    modes: tuple[str, ...] = option(MODES, "parts of a step, in this order", choices=MODES, flag="--mode")
    warmups: tuple[int, ...] = option((5,), "numbers of first calls to leave out", least=0, flag="--warmup")
    repeats: int = option(10, "timed calls", least=MIN_SAMPLES, flag="--steps")
    bucket_size_mb: float = option(25.0, "MiB, of strategies with buckets", above=0)
    seed: int = option(0, "of parameters and data", **SEED)
    profile: bool = option(False, "traces, and kernels and kinds of work by time")
    profile_ranks: tuple[int, ...] = option((0,), "that write a trace; the first is summarised", least=0)
    profile_steps: tuple[int, ...] = option((3, 5), "first and last step that is traced, from 0", least=0)
    memory: bool = option(
        False, "memory over time; on a GPU the allocator's history too", flag="--memory-snapshot"
    )
    saved: bool = option(False, "what a block saves for backward: eager, compiled, ours")
    nvtx: bool = option(False, "NVTX ranges on parts and messages, for Nsight Systems")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.profile_steps) != 2 or self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(f"profile_steps={self.profile_steps}: give first <= last")
        self.trials()
        if self.nvtx:
            emitter("nvtx")  # refuses where there is no GPU

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError if a rank is to be profiled that does not exist."""
        if self.profile and max(self.profile_ranks) >= world_size:
            raise ValueError(f"profile ranks {self.profile_ranks}: there are ranks 0 to {world_size - 1}")

    def trials(self) -> list[TrialConfig]:
        """All combinations; modes and warm-ups share a trial."""
        choices = itertools.product(*(getattr(self, name) for name in SWEPT))
        rest = {"bucket_size_mb": self.bucket_size_mb, "seed": self.seed}
        return [TrialConfig(**dict(zip(SWEPT, choice, strict=True)), **rest) for choice in choices]

    def label(self, trial: TrialConfig) -> str:
        """What tells this trial from the others of the run: the options that have several values."""
        varied = [name for name in SWEPT if len(getattr(self, name)) > 1]
        plain = ("size", "dtype", "attention", "strategy")  # values that say what they are
        return ", ".join([str(getattr(trial, n)) if n in plain else f"{n} {getattr(trial, n)}" for n in varied])
