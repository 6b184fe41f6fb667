"""What to measure (regimes, weak or strong scaling of a model; strategies; numbers of ranks), and what that is expected
to take, in closed form; simulated in a process of its own, before anything is timed.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from distlab.comm.subgroups import doubling_sizes
from distlab.experiment import Record, TimingOptions, option
from distlab.hardware import by_alias, lookup
from distlab.measure.statistics import MIN_SAMPLES
from distlab.model.config import ModelConfig, preset
from distlab.options import SEED
from distlab.parallel import STRATEGIES as KNOWN
from distlab.report import commit, environment
from distlab.simulate.estimate import Machine, estimate_step, machine_of

# Predictions know our strategies; torch's peers are held against those that send the same.
PEER_OF = {"torch-ddp": "bucketed", "torch-zero": "sharded-optimizer", "fsdp2": "fsdp"}
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "zero1", "fsdp", *PEER_OF)


@dataclass(frozen=True)
class Regime:
    """`weak`: `batch` sequences per rank; `strong`: `batch` sequences together."""

    kind: str
    model: str
    batch: int

    @classmethod
    def parse(cls, text: str) -> "Regime":
        """From `weak:xl:8`. Raises ValueError for another form."""
        kind, model, batch, *more = [*text.split(":"), "", ""]
        if kind not in ("weak", "strong") or not batch.isdigit() or int(batch) < 1 or any(more):
            raise ValueError(
                f"regime {text!r}: write KIND:MODEL:BATCH, such as weak:xl:8 or strong:medium:16; say weak or strong, "
                "and a batch from 1"
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
class MeasureConfig(TimingOptions):
    """What to measure. Raises ValueError for a value that is not allowed; the message says what is."""

    regimes: tuple[str, ...] = option(
        ("weak:xl:8", "weak:xl:2", "strong:medium:16"),
        "in order of importance; what the time does not suffice for is left for another run under the same --name",
        metavar="KIND:MODEL:BATCH",
    )
    strategies: tuple[str, ...] = option(STRATEGIES, "to time beside local", choices=tuple(KNOWN))
    ranks: tuple[int, ...] = option((), "numbers of ranks [1, 2, 4, … all]; on one rank local alone runs", least=1)
    context: int | None = option(None, "tokens per sequence [the preset's]", least=1)
    dtype: str = option("bf16", "fp32, or bf16 computation over fp32 parameters", choices=("fp32", "bf16"))
    bucket_size_mb: float = option(100.0, "MiB, of the strategies with buckets", above=0)
    steps: int = option(8, "timed steps per round", least=1)
    rounds: int = option(1, "interleaved rounds", least=1)
    sweep_bytes: tuple[int, ...] = option(
        tuple(65536 * 4**k for k in range(8)), "payloads of the collectives' sweep", least=1
    )
    minutes: float = option(8.0, "no cell is begun that would end later", above=0)
    predict_for: str | None = option(
        None, "predict for this device, such as h200 [the one here, if it is known]", flag="--device"
    )
    seed: int = option(0, "of parameters and data", **SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps * self.rounds < MIN_SAMPLES:
            raise ValueError(f"steps={self.steps}, rounds={self.rounds}: time at least {MIN_SAMPLES} steps")
        for regime in map(Regime.parse, self.regimes):
            self.model(regime)
        if self.predict_for is not None:
            by_alias(self.predict_for)

    def model(self, regime: Regime) -> ModelConfig:
        return preset(regime.model, context_length=self.context)

    def groups(self, world_size: int) -> tuple[int, ...]:
        """Numbers of ranks to measure on. Raises ValueError for one that there is not."""
        groups = self.ranks or doubling_sizes(world_size)
        if max(groups) > world_size:
            raise ValueError(f"ranks {groups}: between 1 and the {world_size} that were started (--nproc)")
        return tuple(sorted(groups))

    def cells(self, world_size: int) -> Iterator[tuple[Regime, int]]:
        """(regime, ranks), in the order in which they are measured."""
        for regime in map(Regime.parse, self.regimes):
            for ranks in self.groups(world_size):
                if regime.per_rank(ranks):
                    yield regime, ranks


def key(regime: Regime, ranks: int) -> dict[str, Any]:
    """The part of a record's config that says which cell it is of."""
    return {"regime": str(regime), "kind": regime.kind, "size": regime.model, "world_size": ranks}


def predictions(config: MeasureConfig, world_size: int, device_name: str) -> list[Record]:
    """A record per regime, number of ranks and strategy: constants of the datasheet at the shares of its peaks that
    two GPUs of a kind were calibrated to reach (`distlab.simulate.estimate`). Empty where the device is unknown.

    Simulates, so it needs a process without a process group.
    """
    spec = by_alias(config.predict_for) if config.predict_for else lookup(device_name)
    if spec is None:
        return []
    machine = machine_of(spec, dtype=config.dtype)
    facts = {"environment": environment("cpu"), "commit": commit()}
    records = []
    for regime, ranks in config.cells(world_size):
        alone = _estimate(config, regime, machine, "local", 1)
        for strategy in ("local", *(config.strategies if ranks > 1 else ())):
            step_ms = _estimate(config, regime, machine, PEER_OF.get(strategy, strategy), ranks)
            metrics = {"predicted_step_ms": step_ms, "predicted_efficiency_pct": 100 * alone / step_ms}
            if regime.kind == "strong":
                metrics["predicted_efficiency_pct"] /= ranks
            records.append(
                Record("scaling_measured", strategy, key(regime, ranks) | {"device": spec.name}, metrics, **facts)
            )
    return records


def _estimate(config: MeasureConfig, regime: Regime, machine: Machine, strategy: str, ranks: int) -> float:
    time = estimate_step(
        config.model(regime),
        strategy,
        machine,
        batch=regime.per_rank(ranks),
        ranks=ranks,
        dtype=config.dtype,
        bucket_size_mb=config.bucket_size_mb,
    )
    return 1e3 * time.step


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a fresh interpreter. Raises RuntimeError with what it wrote to stderr if it fails."""
    code = "import pickle, sys; f, a = pickle.load(sys.stdin.buffer); pickle.dump(f(*a), sys.stdout.buffer)"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((function, arguments)),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        raise RuntimeError(f"predictions failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return pickle.loads(done.stdout)
