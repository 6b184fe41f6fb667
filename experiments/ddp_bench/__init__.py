"""What does gradient synchronisation cost, and how much is hidden?

    distlab run ddp_bench --quick
    distlab run ddp_bench --nproc 2 --size medium --batch 8 --dtype bf16

Times no communication at all (`local`), the hand-written strategies and torch's DDP in one run, in
interleaved rounds so that clock drift affects all equally, and explains each: what it sent (checked
against the closed form), how long communication ran and how much of that compute covered (from the
profiler), and whether its result equals training in one process.

Read in this order: options and `measure` here, `distlab/bench/variant.py` (a row as data),
`trial.py` (one step of it), `step_timing.py` (interleaved rounds), then `wrapper_trial.py` (a
user's wrapper, tried first), `rows.py` (what is known of a row), `comparison.py` (numbers that need
several rows, and sentences) and `columns.py`.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any

from distlab.bench.compiling import with_more_graphs
from distlab.bench.task import OwnModel, check_name
from distlab.bench.trial import refusals
from distlab.bench.variant import BenchOptions, Variant, require_memory, takes, variants
from distlab.bench.wrappers import wrapped_by
from distlab.comm.rank_process import on_main
from distlab.experiment import Experiment, RankContext, Run, TimingOptions, option
from distlab.model.config import PRESETS, ModelConfig
from distlab.parallel import (
    STRATEGIES,
    Layout,
    check_buckets,
    check_shard_size,
    get_strategy,
    strategies_on,
)
from distlab.train.build import check_layout

from .auto_size import sized
from .columns import VIEW
from .comparison import FAILED, wrong_rows
from .rows import Row, check_rows, explain_rows, save, time_rows
from .wrapper_trial import try_wrappers


@dataclass(frozen=True)
class DDPBenchConfig(OwnModel, BenchOptions, TimingOptions):
    """Options of the benchmark. Raises ValueError for a value that is not allowed."""

    size: str = option(
        "tiny",
        "model preset (--help all lists them); auto takes medium, or the next smaller one that "
        "fits into the free memory with --batch sequences or fewer",
        choices=("auto", *PRESETS),
    )
    strategies: tuple[str, ...] = option(
        strategies_on("cpu", meshes=False), "strategies to compare", choices=tuple(STRATEGIES)
    )
    bucket_sizes_mb: tuple[Any, ...] = option(
        (4.0,),
        "MiB per bucket, one or several (a row each); none for unbounded",
        above=0,
        words={"none": None},
        kind=float,
        flag="--bucket-size-mb",
    )
    shard_size: int | None = option(
        None,
        "ranks that share one model, for hsdp, torch-hsdp and bucketed-two-level [those of a host]",
        minimum=1,
    )
    layouts: tuple[str, ...] = option(
        (),
        "layouts of additional rows, in which ranks share a model: tp2, cp2-ring, pp2, tp2+cp2",
    )
    micro_batches: int = option(4, "parts of a step's batch in rows with a pipeline", minimum=1)
    wraps: tuple[str, ...] = option(
        (), "your own wrapper, my_code:parallelize, one or several (a row each)", flag="--wrap"
    )
    wrap_memory_gib: float | None = option(
        None,
        "GiB of a rank while your wrapper is tried [its part of the free memory]",
        above=0,
        needs="wraps",
    )
    check_steps: int = option(2, "steps of the comparison with one process, 0 for none", minimum=0)
    profile_steps: int = option(
        1, "steps per trace, of which the median is shown; 0 for none", minimum=0
    )

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for options that have no effect."""
        super().check_given(given)
        layouts = map(Layout.parse, given.get("layouts", ()))
        if "micro_batches" in given and not any(layout.pipeline > 1 for layout in layouts):
            raise ValueError("--micro-batches is for rows with a pipeline: add --layouts pp2")
        if "bucket_sizes_mb" in given and "strategies" in given:
            check_buckets({"bucket_size_mb": given["bucket_sizes_mb"][0]}, given["strategies"])

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.wraps:
            check_name(name, "--wrap")
        check_shard_size(self.shard_size, self.strategies)
        for layout in map(Layout.parse, self.layouts):
            check_layout(layout, self.compile, self.micro_batches)
            # A pipeline cuts the batch of all ranks that share the model, not that of one rank.
            if layout.pipeline > 1 and self.batch * layout.ranks % self.micro_batches:
                raise ValueError(
                    f"--layouts {layout}: {self.batch * layout.ranks} sequences, {self.batch} for "
                    f"each of {layout.ranks} ranks, cannot be split into {self.micro_batches} "
                    "equal parts; pass another --micro-batches"
                )
        # A user's model has no known matrices, sequences or stages to share.
        if self.layouts and self.factory is not None:
            raise ValueError(
                "--layouts: ranks share the lab's Transformer; with --model leave them out"
            )
        self.variants()  # raises for a layout that no strategy takes

    def base(self) -> ModelConfig:
        """Return the preset. Until `sized` has replaced `auto`, it is the smallest possible one."""
        return PRESETS["tiny"] if self.size == "auto" else super().base()

    def variants(self) -> list[Variant]:
        """Return the rows of the lab's and torch's strategies, in the order of the table."""
        return variants(
            self.strategies,
            self.bucket_sizes_mb,
            self.shard_size,
            self.layouts,
            self.micro_batches,
        )


def measure(config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Measure every variant; each rank writes its traces into the run's folder.

    Raises:
        MemoryError: the model with this batch fits under no strategy.
        ValueError: a strategy that needs a GPU, without one.
    """
    # A user's model may be compiled, and each row builds it anew in each round. The lab's own rows
    # keep Dynamo's limits: if they exceed them, the table must say that they ran eager.
    with nullcontext() if config.factory is None else with_more_graphs():
        _measure_rows(config, context, run)


def _measure_rows(config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Measure every variant. See `measure`."""
    if context.world_size == 1:
        run.notice("one rank: nothing is communicated. For more: --nproc 2")
    known = config.variants()
    for text in config.layouts:
        layout = Layout.parse(text)
        without = [name for name in config.strategies if not takes(get_strategy(name), layout)]
        if set(without) - {"local"}:
            run.notice(f"no row under {text}: {', '.join(without)}")
    require_memory(config, known, context)
    facts = config.facts(context)

    # Right or wrong? A row that cannot be built is left out of the timing, and says why.
    reasons = refusals(config, known, context)
    rows = [Row(variant, refusal=reasons.get(variant.name)) for variant in known]
    rows += [Row(Variant(name, wrapped_by(name))) for name in config.wraps]
    names = [row.name for row in rows]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            run.notice(f"{name} is given {names.count(name)} times, and measured once")
    # The last row of a name would take the results of the others.
    rows = list({row.name: row for row in rows}.values())
    refused = [row for row in rows if row.refusal is not None]
    # Refused rows are announced now, since the measurement that follows takes minutes.
    for row in refused:
        run.progress(f"{row.name} is left out: {row.refusal}")
    rows = [row for row in rows if row.refusal is None]
    # Before any timing, since a wrapper that hangs would take the whole run with it.
    try_wrappers([row for row in rows if row.name in config.wraps], config, context, run)
    check_rows(rows, config, context, run)
    # A row whose check failed would fail or hang in the timing as well.
    failed = [row for row in rows if row.verdict.get("verdict") == FAILED]
    rows = [row for row in rows if row not in failed]

    # How long? All rows take turns, so that clock drift affects all equally.
    parameters = facts["num_parameters"] / 1e6
    run.progress(f"building {config.factory or config.size}: {parameters:,.1f} M parameters")
    begin = monotonic()
    if rows:
        time_rows(rows, config, context, run)
    took_s = monotonic() - begin
    # After the timed rows, so that the table lists them last.
    save([*refused, *failed], config, context, run)

    # Why? The profiler says what communication costs.
    try:
        explain_rows(rows, config, context, run, took_s)
    except BaseException:  # a signal as well
        if context.is_main:
            run.show()  # show the rows that were measured before the error ends the run
        raise
    on_main(context, run.show)


# The four rows are no communication, the simplest strategy, the lab's usual one and torch's.
QUICK = {
    "strategies": ("local", "naive", "bucketed", "torch-ddp"),
    "rounds": 2,
    "steps": 4,
}
EXPERIMENT = Experiment(
    DDPBenchConfig,
    measure,
    VIEW,
    presets={
        # The GPU is the bottleneck: compiled blocks, and as many tokens as keep it busy. The run
        # ends within two minutes on two H200s, compilation and traces included.
        "gpu": {
            "size": "auto",
            "batch": 8,
            "context": 2048,
            "dtype": "bf16",
            "compile": "blocks",
            "bucket_sizes_mb": (100.0,),
            "warmup": 2,
            "steps": 6,
            # The smallest number that gives each row an interval of its rounds.
            "rounds": 3,
            "strategies": (
                "local",
                "naive",
                "flat",
                "overlap",
                "bucketed",
                "bucketed-dma",
                "zero1",
                "fsdp",
                "torch-ddp-tuned",
                "fsdp2",
            ),
        },
        # As many parameters and modules as xl has and next to nothing to compute: what a step takes
        # longer than local's is what the strategy costs the host.
        "host": {
            "size": "xl",
            "d_model": 64,
            "d_ff": 64,
            "heads": 2,
            "vocab": 64,
            "context": 16,
            "batch": 1,
            "compile": "off",
            "bucket_sizes_mb": (1.0,),
            "rounds": 6,
            "steps": 20,
            "check_steps": 0,
            "profile_steps": 0,
            "strategies": strategies_on("cpu"),
        },
        # Latency against bandwidth: the sizes of the course's handout, then one bucket of all
        # gradients.
        "buckets": {
            "size": "xl",
            "batch": 8,
            "context": 512,
            "dtype": "bf16",
            "compile": "off",
            "bucket_sizes_mb": (1.0, 10.0, 100.0, 1000.0, None),
            "warmup": 2,
            "steps": 4,
            "rounds": 2,
            "check_steps": 0,
            "strategies": ("local", "bucketed"),
        },
        "buckets-cpu": {
            "size": "tiny",
            "batch": 4,
            "context": 64,
            "dtype": "fp32",
            "bucket_sizes_mb": (0.1, 1.0, 10.0, None),
            "steps": 10,
        },
        "quick": QUICK,
        "smoke": QUICK
        | {
            "size": "tiny",
            "d_model": 32,
            "d_ff": 64,
            "heads": 2,
            "vocab": 64,
            "batch": 1,
            "context": 16,
            "compile": "off",
            "bucket_sizes_mb": (0.05,),
            "warmup": 1,
            "steps": 5,
            "rounds": 1,
            "check_steps": 1,
        },
    },
    ranks="many",
    prepare=sized,
    wrong=wrong_rows,
)
