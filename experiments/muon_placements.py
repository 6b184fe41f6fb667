"""Where should Muon orthogonalise, and at what cost?

    distlab run muon_placements --nproc 2
    distlab run muon_placements --nproc 2 --size xl --dtype bf16 --batch 128 --micro-batches 16

A row is a strategy with AdamW, or with Muon and a placement: every rank computes all, the owner
computes and broadcasts, parts are gathered, or exchanged with owners. The bytes that
orthogonalising sends are compared with the closed form. Its cost does not depend on the tokens of a
step: with n of them per rank, it is about 3.8·d/(n·ranks) of the model's own FLOPs, d being the
shorter side of a matrix. So a step should have the number of tokens that it has in training.
"""

from dataclasses import dataclass, replace

import torch

from distlab.bench.reference import (
    other_parameters,
    parameter_differences,
    rows_that_ran_eager,
    small,
)
from distlab.bench.step_timing import time_rounds
from distlab.bench.trial import Trial
from distlab.bench.variant import BenchOptions, Variant, require_memory
from distlab.comm import collectives
from distlab.experiment import (
    Column,
    Experiment,
    Metrics,
    RankContext,
    Record,
    Records,
    Run,
    TimingOptions,
    View,
    headline_from,
    option,
)
from distlab.measure import CollectiveRecorder
from distlab.optim import Muon
from distlab.parallel import get_strategy
from distlab.parallel.muon import divide
from distlab.parallel.shard import spread_of, whole_shape
from distlab.report import (
    NOISE,
    PEAK,
    ratio_column,
    ratio_metrics,
    sparse_column,
    step_bars,
)
from distlab.theory.muon import muon_volume, orthogonalize_flops

PLACEMENTS = {  # strategy → placements that it has
    "bucketed": ("all",),
    "sharded-optimizer": ("owner",),
    "zero1": ("gather", "exchange"),
    "zero2": ("gather", "exchange"),
    "fsdp": ("gather", "exchange"),
}
SHARDED = ("gather", "exchange")
# Largest difference of a parameter, as a fraction of the learning rate. bf16 rounds the update.
FAR_OFF = 0.1


@dataclass(frozen=True)
class PlacementsConfig(BenchOptions, TimingOptions):
    """Options of the experiment. Raises ValueError for a value that is not allowed."""

    strategies: tuple[str, ...] = option(
        tuple(PLACEMENTS), "rows to compare", choices=tuple(PLACEMENTS)
    )
    micro_batches: int = option(1, "parts of a rank's batch, one after the other", minimum=1)
    check_steps: int = option(2, "steps of the comparison with one process, 0 for none", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % self.micro_batches:
            raise ValueError(
                f"batch {self.batch} does not divide into {self.micro_batches} micro-batches"
            )

    def rows(self) -> list[Variant]:
        """Return a row for each strategy with AdamW, and with Muon in each of its placements."""
        rows = []
        for name in self.strategies:
            adamw = Variant(f"{name} adamw", get_strategy(name), micro_batches=self.micro_batches)
            rows.append(adamw)
            for placement in PLACEMENTS[name]:
                # With this scale Muon's updates have the size of AdamW's, so one learning rate
                # suits both.
                options = {"adjust_lr_fn": "match_rms_adamw"}
                # Other strategies have a single placement, which is not an option of the optimizer.
                if placement in SHARDED:
                    options["placement"] = placement
                rows.append(
                    replace(
                        adamw,
                        name=f"{name} {placement}",
                        optimizer_cls=Muon,
                        optimizer_options=options,
                    )
                )
        return rows


def measure(config: PlacementsConfig, context: RankContext, run: Run) -> None:
    """Measure every row; call it on every rank.

    Raises:
        MemoryError: the model with this batch does not fit.
    """
    rows = config.rows()
    require_memory(config, rows, context)
    of_muon = [row for row in rows if row.optimizer_cls is Muon]
    task = small(d_model=64, d_ff=128)  # a CPU is slow at products in bf16
    differences = parameter_differences(context, of_muon, config.check_steps, run.progress, task)
    counted: dict[str, Metrics] = {}  # row → volume of its optimizer

    def count(row: Variant, attached: Trial) -> None:
        # The bytes are the same in each round, so the first one is counted.
        if row.optimizer_cls is Muon and row.name not in counted:
            counted[row.name] = sent(placement_of(row), attached, context)

    timings = time_rounds(
        config,
        rows,
        context,
        rounds=config.rounds,
        warmup=config.warmup,
        steps=config.steps,
        progress=run.progress,
        inspect=count,
    )
    facts = config.facts(context)
    for row in rows:
        metrics = timings[row.name].metrics()
        if not timings[row.name].out_of_memory:
            metrics |= counted.get(row.name, {})
            # Rows with AdamW are not checked here, and have no difference.
            metrics["max_abs_param_diff"] = differences.get(row.name)
        run.add(
            row.name,
            metrics,
            **facts,
            strategy=row.strategy.name,
            placement=placement_of(row),
        )


def placement_of(row: Variant) -> str:
    """Return the placement of a row, which is "adamw" for one without Muon."""
    _, _, placement = row.name.partition(" ")
    return placement


def sent(placement: str, attached: Trial, context: RankContext) -> Metrics:
    """Return the bytes that an optimizer's step sends, counted.

    The metrics also hold the closed form of the bytes sent in bf16, and how unequally owners share
    the work.
    """
    # A whole step comes first, since the optimizer needs gradients.
    attached()
    with CollectiveRecorder() as recorder:  # steps again with the same gradients
        attached.optimizer.step()
    # The extra step may have left a gather of parameters in flight.
    attached.model.synchronize()
    # Sharded strategies wrap the optimizer that steps this rank's shards.
    held = getattr(attached.optimizer, "local", None) or attached.optimizer
    # `Muon.split` puts the matrices of the blocks first.
    matrices = held.param_groups[0]["params"]
    flops = sum(orthogonalize_flops(*whole_shape(matrix)) for matrix in matrices)
    metrics = {"optimizer_bytes": recorder.total_bytes, "muon_flops": flops}
    # Without shards every rank has whole matrices, and there is nothing else to compare.
    if placement not in SHARDED:
        return metrics
    spreads = [spread_of(matrix) for matrix in matrices]
    # The function by which the optimizer itself chooses owners, so the closed form has the same.
    shares = divide(spreads, context.world_size)
    # The closed form needs each matrix's owner, which is the rank whose share has its spread.
    owners = []
    for spread in spreads:
        owners.append(next(rank for rank, share in enumerate(shares) if spread in share))
    expected = muon_volume(placement, [spread.counts for spread in spreads], owners, context.rank)
    # Only the matrices are sent in bf16.
    bf16_calls = [call for call in recorder.calls if call.dtype == torch.bfloat16]
    bf16_bytes = sum(call.bytes for call in bf16_calls)
    as_predicted = len(bf16_calls) == expected.collectives and bf16_bytes == expected.bytes
    # Ranks own different matrices, so each of them has another volume.
    right = collectives.all_ranks_agree(as_predicted, context.device, context.group)
    metrics |= {
        "muon_bytes": bf16_bytes,
        "predicted_muon_bytes": expected.bytes,
        "volume_as_predicted": right,
    }
    if placement == "exchange":
        work = []  # FLOPs of each owner
        for share in shares:
            work.append(sum(orthogonalize_flops(*spread.like.shape) for spread in share))
        # The busiest owner ends last, so its FLOPs are the ones that take time.
        metrics |= {"most_work": max(work) * len(work) / sum(work), "muon_flops": max(work)}
    return metrics


def wrong_rows(records: Records) -> list[str]:
    """Name rows that sent other bytes than the closed form, or that differ from one process."""
    problems = []
    for record in records:
        metrics = record.metrics
        if metrics.get("volume_as_predicted") is False:
            problems.append(
                f"{record.variant}: sent {metrics['muon_bytes']} bytes in bf16; the closed form "
                f"says {metrics['predicted_muon_bytes']}"
            )
    problems += rows_that_ran_eager(records)
    return problems + other_parameters(records, FAR_OFF * 0.1)  # the check's learning rate


def compare(records: Records) -> list[Record]:
    """Return the rows, those with Muon compared with AdamW under the same strategy."""
    of_adamw = {}
    for record in records:
        if record.config["placement"] == "adamw":
            # The first row with AdamW of a strategy is the base of its rows with Muon.
            of_adamw.setdefault(record.config["strategy"], record)
    found = []
    for record in records:
        base = of_adamw.get(record.config["strategy"])
        # The base would be compared with itself.
        if record is not base:
            record = record.with_metrics(ratio_metrics("vs_adamw", record, base))
        found.append(record)
    return found


VIEW = View(
    columns=[
        Column("variant", "strategy, optimizer"),
        Column("metrics.step_p50_ms", "step ms", ".1f"),
        NOISE,
        Column("metrics.optimizer_p50_ms", "optimizer ms", ".1f"),
        ratio_column("vs_adamw", "÷ AdamW's", missing=""),
        sparse_column("metrics.optimizer_bytes", "optimizer sends MB", ",.1f", scale=1e-6),
        sparse_column("metrics.muon_bytes", "of which matrices MB", ",.1f", scale=1e-6),
        sparse_column("metrics.muon_flops", "TFLOP for matrices", ".1f", scale=1e-12),
        sparse_column("metrics.most_work", "busiest owner ÷ mean", ".2f"),
        PEAK,
        sparse_column("metrics.max_abs_param_diff", "parameter error", ".1e"),
    ],
    pictures={"step.png": step_bars("forward_backward", "optimizer")},
    headline=headline_from(
        "Muon compared with AdamW: {size} ({num_parameters:M} parameters), batch {batch} × context "
        "{context} per rank, {dtype}, {world_size} × {device_name} ({backend}), torch {torch}"
    ),
    derive=compare,
    terminal=(
        "variant",
        "step_p50_ms",
        "noise_pct",
        "optimizer_p50_ms",
        "vs_adamw",
        "muon_bytes",
        "muon_flops",
    ),
    reading="Under `all` every rank orthogonalises every matrix of the blocks; the owner of a "
    "matrix orthogonalises it and broadcasts the parameter, or gets its parts and sends them back "
    "(`exchange`). What is gathered or exchanged is the update in bf16. Sharded strategies also "
    "gather parameters after the step, as with AdamW.",
    prediction="Bytes in closed form (distlab.theory.muon), asserted on every rank.",
)

QUICK = {"size": "tiny", "dtype": "fp32", "warmup": 1, "steps": 5, "rounds": 1}
EXPERIMENT = Experiment(
    PlacementsConfig,
    measure,
    VIEW,
    presets={
        "gpu": {
            "size": "medium",
            "dtype": "bf16",
            "batch": 128,
            "micro_batches": 8,
            "warmup": 1,
            "steps": 3,
            "rounds": 3,
        },
        "quick": QUICK,
        "smoke": QUICK
        | {"d_model": 32, "d_ff": 64, "heads": 2, "vocab": 64, "context": 16, "batch": 1},
    },
    ranks="many",
    wrong=wrong_rows,
)
