"""Combinations of the options: trials, errors against the plainest model, and names in tables."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, make_dataclass, replace
from typing import Any, get_type_hints

import torch

from distlab.bench.reference import relative_errors
from distlab.bench.task import OwnModel
from distlab.bench.trial import MODES, Trial
from distlab.bench.variant import BenchOptions, Variant
from distlab.experiment import Column, Metrics, Options, RankContext, Record, Records, option
from distlab.measure import MIN_SAMPLES, emitter
from distlab.options import SEED, declared_options
from distlab.parallel import STRATEGIES, check_buckets, get_strategy
from distlab.train.scaler import LossScaler

Rows = list[tuple[str, Metrics]]  # variant and metrics, of one part


@dataclass(frozen=True)
class TrialConfig(OwnModel, BenchOptions):
    """Benchmark of one strategy. fp16 has a scaled loss.

    Buckets, if it has any, have `bucket_size_mb` MiB.
    """

    strategy: str = option(
        "local", "strategy by which ranks train together", choices=tuple(STRATEGIES)
    )
    bucket_size_mb: float = option(25.0, "MiB per bucket, for strategies with buckets", above=0)


SWEPT = (
    *("size", "batch", "context", "vocab", "d_model", "d_ff", "layers", "heads", "kv_heads"),
    *("dtype", "compile", "attention", "ops", "checkpointing", "strategy"),
)


# The two classes would otherwise repeat help, limits and choices of 15 options.
def _swept(name: str) -> tuple[str, Any, Any]:
    """Return a trial's option as one that takes several values: name, type and field."""
    one = next(each for each in declared_options(TrialConfig) if each.name == name)
    # None stands for the preset's own value. On the command line that is the word `preset`.
    swept = option(
        (one.default,),
        f"{one.declaration.help}; several are swept",
        minimum=one.declaration.minimum,
        choices=one.declaration.choices,
        words={"preset": None} if one.default is None else None,
    )
    return name, tuple[get_type_hints(TrialConfig)[name], ...], swept


# The class is made at run time, because its fields follow from those of `TrialConfig`.
Swept = make_dataclass("Swept", map(_swept, SWEPT), bases=(Options,), frozen=True)


@dataclass(frozen=True)
class BenchmarkConfig(OwnModel, Swept):
    """Every combination of the options that take several values, and what to look at in each.

    All rows of one combination come from one series, so that several warm-ups show what those calls
    cost. A process is cold only once: compare warm-ups in the first combination. Raises ValueError
    for a value that is not allowed.
    """

    modes: tuple[str, ...] = option(
        MODES, "parts of a step, in this order", choices=MODES, flag="--mode"
    )
    warmups: tuple[int, ...] = option(
        (5,), "numbers of first calls to leave out", minimum=0, flag="--warmup"
    )
    repeats: int = option(10, "timed calls", minimum=MIN_SAMPLES, flag="--steps")
    bucket_size_mb: float = option(25.0, "MiB per bucket, for strategies with buckets", above=0)
    seed: int = option(0, "seed of parameters and data", **SEED)
    profile: bool = option(False, "write traces, and kernels and kinds of work by time")
    memory: bool = option(
        False,
        "write memory over time, and a GPU's allocations",
        flag="--memory-snapshot",
    )
    saved: bool = option(False, "measure what a block saves for backward: eager, compiled, ours")
    nvtx: bool = option(False, "put NVTX ranges on parts and messages, for Nsight Systems")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Building the trials checks their values, so a wrong one is reported before the first is
        # timed.
        self.trials()
        if self.factory is not None and self.saved:
            raise ValueError(
                "--saved takes the lab's Transformer apart block by block; with --model leave it "
                "out"
            )
        if self.nvtx:
            emitter("nvtx")  # raises if there is no GPU

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for options of the Transformer or of buckets that have no use here."""
        super().check_given(given)
        check_buckets(given, given.get("strategy", cls.strategy))

    def trials(self) -> list[TrialConfig]:
        """Return all combinations. Modes and warm-ups share a trial."""
        trials = []
        # The last option varies fastest, so rows of one size are next to each other.
        for choice in itertools.product(*(getattr(self, name) for name in SWEPT)):
            trials.append(
                TrialConfig(
                    **dict(zip(SWEPT, choice, strict=True)),
                    bucket_size_mb=self.bucket_size_mb,
                    seed=self.seed,
                    factory=self.factory,
                )
            )
        return trials

    def label(self, trial: TrialConfig) -> str:
        """Return this trial's values of the options that have several values."""
        varied = [name for name in SWEPT if len(getattr(self, name)) > 1]
        plain = ("size", "dtype", "attention", "strategy")  # values that say what they are
        return ", ".join(
            [str(getattr(trial, n)) if n in plain else f"{n} {getattr(trial, n)}" for n in varied]
        )


@contextmanager
def opened(context: RankContext, config: TrialConfig) -> Iterator[Trial]:
    """Yield a trial as configured, which is closed at the end."""
    variant = Variant(config.strategy, get_strategy(config.strategy), config.bucket_size_mb)
    try:
        with closing(Trial(context, config, variant, scaled=config.dtype == "fp16")) as trial:
            yield trial
    finally:
        # The next trial, with other shapes, must be compiled as in a process of its own. A user's
        # model may be compiled as well.
        if config.compile != "off" or config.factory is not None:
            torch.compiler.reset()
        # Leave the memory to other processes on the GPU. Without a GPU this does nothing.
        torch.cuda.empty_cache()


def errors_against_reference(context: RankContext, config: TrialConfig) -> dict[str, float]:
    """Return the errors of loss and gradients against the plainest model.

    That is fp32, with naive attention and torch's operations, eager.

    Same weights, same batch, in one process, before any strategy. The reference recomputes its
    blocks, so that naive attention needs the memory of one.

    Returns:
        The result of `relative_errors`.
    """
    # Checkpointing changes no value, so any choice stands for "auto".
    checkpointing = "block" if config.checkpointing == "auto" else config.checkpointing
    ours = replace(config, strategy="local", checkpointing=checkpointing)
    plain = replace(
        ours, attention="naive", ops="torch", dtype="fp32", compile="off", checkpointing="block"
    )
    losses, gradients = [], []
    for each in (ours, plain):
        with opened(context, each) as trial:
            trial("forward_backward")
            losses.append(trial.last_loss.item())
            gradients.append([parameter.grad for parameter in trial.module.parameters()])
    # fp16 scales the loss, and so its gradients, which must be divided again.
    return relative_errors(
        *losses, *gradients, LossScaler().scale if config.dtype == "fp16" else 1.0
    )


# -- in words --------------------------------------------------------------------------------------


def described(configs: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> str:
    """Return a line with the settings that several trials share, from their records."""
    # What differs between the trials is in the names of the rows.
    shared = {k: v for k, v in configs[0].items() if all(config.get(k) == v for config in configs)}
    count = (
        f" ({shared['num_parameters'] / 1e6:,.1f} M parameters)"
        if "num_parameters" in shared
        else ""
    )
    named = (
        "batch",
        "context",
        "dtype",
        "strategy",
        "attention",
        "ops",
        "compile",
        "checkpointing",
    )
    named = named if shared.get("factory") is None else ("batch", "dtype", "strategy", "compile")
    plain = ("dtype", "strategy")  # values that say what they are
    texts = [
        str(shared[name]) if name in plain else f"{name} {shared[name]}"
        for name in named
        if name in shared
    ]
    parts = [f"{shared.get('size', 'several sizes')}{count}", *texts]
    devices = f"{shared.get('world_size', 1)} × {environment['device_name']}"
    return f"{', '.join(parts)}; {devices}, torch {environment['torch']}"


def headline(records: Records) -> str:
    """Return one line that says what the table below it was measured on."""
    return described([record.config for record in records], records[0].environment)


def label_of(record: Record) -> str:
    """Return the label of the combination that a row belongs to."""
    return record.config["label"]


def prefix(label: str) -> str:
    """Return the beginning of the names of rows of the combination with this label."""
    return f"{label}: " if label else ""


def ms_column(metric: str, title: str, missing: str = Column.missing) -> Column:
    """Return a column of milliseconds."""
    return Column(f"metrics.{metric}", title, ".2f", missing=missing)


def mib_column(metric: str, title: str) -> Column:
    """Return a column of MiB, from bytes."""
    return Column(f"metrics.{metric}", title, ",.1f", scale=2**-20)
