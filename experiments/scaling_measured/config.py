"""What to measure: regimes (weak or strong scaling of a model), strategies, numbers of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distlab.comm.subgroups import doubling_sizes
from distlab.hardware import by_alias
from distlab.measure.statistics import MIN_SAMPLES
from distlab.model import config as model_config
from distlab.model.config import ModelConfig, preset
from distlab.parallel import get_strategy

NAME = "scaling_measured"
DTYPES = {name: model_config.DTYPES[name] for name in ("fp32", "bf16")}
# Predictions know our strategies; torch's peers are held against those that send the same.
PEER_OF = {"torch-ddp": "bucketed", "torch-zero": "sharded-optimizer", "fsdp2": "fsdp"}
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "zero1", "fsdp", *PEER_OF)


@dataclass(frozen=True)
class Regime:
    """`weak`: `batch` sequences per rank; `strong`: `batch` sequences together. Raises ValueError for others."""

    kind: str
    model: str
    batch: int

    def __post_init__(self) -> None:
        if self.kind not in ("weak", "strong") or self.batch < 1:
            raise ValueError(
                f"regime {self.kind}:{self.model}:{self.batch}: say weak or strong, and a batch from 1"
            )

    @classmethod
    def parse(cls, text: str) -> "Regime":
        """From `weak:xl:8`."""
        kind, _, rest = text.partition(":")
        model, _, batch = rest.partition(":")
        if not batch.isdigit():
            raise ValueError(
                f"regime {text!r}: write KIND:MODEL:BATCH, such as weak:xl:8 or strong:medium:16"
            )
        return cls(kind, model, int(batch))

    def per_rank(self, ranks: int) -> int | None:
        """Sequences of each rank; None where they cannot be shared out evenly."""
        if self.kind == "weak":
            return self.batch
        return self.batch // ranks if self.batch % ranks == 0 else None

    def __str__(self) -> str:
        return f"{self.kind}:{self.model}:{self.batch}"


@dataclass(frozen=True)
class MeasureConfig:
    """What to measure.

    Args:
        regimes: in order of importance; what the time does not suffice for is left for `--resume`.
        strategies: names; `local` is always timed too.
        ranks: numbers of ranks; () for 1, 2, 4, … and all. On one rank `local` alone runs.
        context: tokens per sequence; None for the preset's.
        dtype: fp32 or bf16 over fp32 parameters.
        bucket_size_mb: MiB, of the strategies with buckets.
        warmup, steps, rounds: untimed and timed steps per round, and interleaved rounds.
        sweep_bytes: payloads of the collectives' sweep; () leaves it out.
        minutes: no cell is begun that would end later.
        device: short name of the device to predict for; None: this one, and no predictions if it is unknown.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    regimes: tuple[Regime, ...] = (
        Regime("weak", "xl", 8),
        Regime("weak", "xl", 2),
        Regime("strong", "medium", 16),
    )
    strategies: tuple[str, ...] = STRATEGIES
    ranks: tuple[int, ...] = ()
    context: int | None = None
    dtype: str = "bf16"
    bucket_size_mb: float | None = 100.0
    warmup: int = 2
    steps: int = 8
    rounds: int = 1
    sweep_bytes: tuple[int, ...] = tuple(65536 * 4**k for k in range(8))
    minutes: float = 8.0
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        if not self.regimes or not self.strategies:
            raise ValueError("give at least one regime and one strategy")
        if (
            min(self.warmup, self.rounds) < 1
            or self.steps * self.rounds < MIN_SAMPLES
            or not self.minutes > 0
        ):
            raise ValueError(
                f"warmup={self.warmup}, steps={self.steps}, rounds={self.rounds}, minutes={self.minutes}: at least "
                f"one each, {MIN_SAMPLES} timed steps, and some time"
            )
        for strategy in self.strategies:
            get_strategy(strategy)
        for regime in self.regimes:
            self.model(regime)
        if self.device is not None:
            by_alias(self.device)

    def model(self, regime: Regime) -> ModelConfig:
        return preset(regime.model, context_length=self.context)

    def groups(self, world_size: int) -> tuple[int, ...]:
        """Numbers of ranks to measure on. Raises ValueError for one that there is not."""
        groups = self.ranks or doubling_sizes(world_size)
        if min(groups) < 1 or max(groups) > world_size:
            raise ValueError(f"ranks {groups}: between 1 and the {world_size} that were started (--nproc)")
        return tuple(sorted(groups))

    def cells(self, world_size: int) -> Iterator[tuple[Regime, int]]:
        """(regime, ranks), in the order in which they are measured."""
        for regime in self.regimes:
            for ranks in self.groups(world_size):
                if regime.per_rank(ranks):
                    yield regime, ranks


def key(regime: Regime, ranks: int) -> dict[str, Any]:
    """The part of a record's config that says which cell it is of."""
    return {"regime": str(regime), "kind": regime.kind, "size": regime.model, "world_size": ranks}
