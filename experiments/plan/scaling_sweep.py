"""The sweep: weak and strong scaling of each strategy, predicted, with measured points.

Lines are closed forms (`distlab.simulate.estimate`), points are records of ddp_bench. Options are
in `question.py`.
"""

from pathlib import Path
from typing import Any

from distlab.experiment import Column, Record, Records, Run, View, headline_from
from distlab.hardware import lookup
from distlab.report import (
    Panel,
    Series,
    grouped,
    is_number,
    lines,
    prediction_error,
    read_json,
    sparse_column,
    text_column,
)
from distlab.simulate.estimate import estimate_step

from .question import PlanConfig, place_of

KINDS = ("weak", "strong")
# Scaling ends below this share, in %, of the first point's tokens per second and rank.
STOPS_AT = 90.0


def measure_scaling(config: PlanConfig, run: Run) -> None:
    """Add a row per kind, strategy and number of ranks, with measured figures if there are any."""
    measured = measured_points(config)
    for kind in KINDS:
        for strategy in config.strategies:
            alone = None
            for ranks in sorted(config.ranks):
                split = _split(config, kind, ranks)
                # The batch has fewer sequences than there are ranks, so strong scaling ends here.
                if split is None:
                    continue
                micro_batch, micro_batches = split
                metrics = _predict(config, strategy, ranks, micro_batch, micro_batches)
                per_rank = metrics["predicted_tokens_per_s"] / ranks
                # Efficiency compares with the smallest number of ranks, which is the first.
                alone = alone or per_rank
                metrics["predicted_efficiency_pct"] = 100 * per_rank / alone
                # ddp_bench measures steps of one micro-batch.
                if micro_batches == 1:
                    metrics |= measured.get((strategy, ranks, micro_batch), {})
                run.add(
                    strategy,
                    metrics,
                    kind=kind,
                    world_size=ranks,
                    micro_batch=micro_batch,
                    micro_batches=micro_batches,
                )


def _split(config: PlanConfig, kind: str, ranks: int) -> tuple[int, int] | None:
    """Return (micro-batch, number) per rank.

    None if the global batch leaves ranks without a sequence.
    """
    # Weak scaling gives every rank the same work, whatever their number.
    if kind == "weak":
        return config.per_rank, 1
    per_rank = config.batch // ranks
    if per_rank == 0:
        return None
    most = min(per_rank, config.per_rank)
    # The largest part that divides the rank's share: micro-batches of one step have equal sizes.
    micro_batch = max(size for size in range(1, most + 1) if per_rank % size == 0)
    return micro_batch, per_rank // micro_batch


def _predict(
    config: PlanConfig, strategy: str, ranks: int, micro_batch: int, micro_batches: int
) -> dict[str, float]:
    model = config.shape()
    # A group cannot be larger than the number of ranks.
    group = None if config.shard_group is None else min(config.shard_group, ranks)
    time = estimate_step(
        model,
        strategy,
        config.machine(),
        batch=micro_batch,
        ranks=ranks,
        dtype=config.dtype,
        checkpointing=config.checkpointing,
        micro_batches=micro_batches,
        group=group,
        kernels=config.kernels(),
    )
    tokens = ranks * micro_batch * micro_batches * model.context_length
    return {
        "predicted_step_ms": 1e3 * time.step,
        "predicted_overhead_ms": 1e3 * time.overhead,
        "predicted_comm_ms": 1e3 * time.communication,
        "predicted_tokens_per_s": tokens / time.step,
    }


def measured_points(config: PlanConfig) -> dict[tuple[str, int, int], dict[str, float]]:
    """Return (strategy, ranks, sequences per rank) → measured figures.

    They come from those rows of `config.records` that answer the question. Of several bucket sizes
    the fastest counts.
    """
    shape = config.shape()
    asked = {
        "size": config.model,
        "context": shape.context_length,
        "dtype": config.dtype,
        "num_parameters": shape.num_parameters,
    }
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for path in config.records:
        for record in read_json(path):
            # The name of a row of ddp_bench may end with its bucket size.
            strategy = record.variant.split("-")[0]
            steps = {
                "measured_step_p20_ms": record.metrics.get("step_p20_ms"),
                "measured_step_p50_ms": record.metrics.get("step_p50_ms"),
                "measured_step_p80_ms": record.metrics.get("step_p80_ms"),
            }
            # A row that ran out of memory has a word in the place of a time.
            if strategy not in config.strategies or not is_number(steps["measured_step_p50_ms"]):
                continue
            if not _answers(record, asked, config):
                continue
            point = (strategy, record.config["world_size"], record.config["batch"])
            # Rows of other bucket sizes compete for the same point.
            fastest = found.get(point, steps)
            if steps["measured_step_p50_ms"] <= fastest["measured_step_p50_ms"]:
                found[point] = steps
    return found


def _answers(record: Record, asked: dict[str, Any], config: PlanConfig) -> bool:
    """Return whether a measured row is of the model, the precision and the device in question."""
    same_options = all(record.config.get(name) == value for name, value in asked.items())
    # The name is compared as a datasheet, because drivers spell one GPU in several ways.
    device = lookup(str(record.environment.get("device_name")))
    return same_options and device == config.gpu()


headline = headline_from(
    "{model} on {gpu}, {dtype}: weak scaling with {per_rank} sequences per rank, strong scaling "
    "with {batch} together; lines predicted, dots measured",
    gpu=place_of,
)


def findings(records: Records) -> list[str]:
    """Name where each strategy stops scaling, and files without anything to draw."""
    config = records[0].config
    stops: dict[str, dict[str, int]] = {}  # kind → strategy → the first number of ranks
    # Rows come in ascending order of ranks, so the first one below the limit is kept.
    for record in records:
        if record.metrics["predicted_efficiency_pct"] < STOPS_AT:
            of_kind = stops.setdefault(record.config["kind"], {})
            of_kind.setdefault(record.variant, record.config["world_size"])
    found = []
    for kind, of_kind in stops.items():
        words = [f"{strategy} from {ranks:,} ranks" for strategy, ranks in of_kind.items()]
        found.append(f"{kind} scaling under {STOPS_AT:g} % efficiency: {', '.join(words)}.")
    if config["records"] and not any(_is_measured(record) for record in records):
        found.append(
            f"No row of {', '.join(config['records'])} is of {config['model']} in "
            f"{config['dtype']} on {config['device']} with this context and batch: nothing "
            "measured is drawn. Ask for what the files measured, or name others."
        )
    return found


def _is_measured(record: Record) -> bool:
    return "measured_step_p50_ms" in record.metrics


def draw(records: Records, path: Path) -> None:
    """Draw tokens per second and rank, so that perfect scaling is a level line.

    Error bars reach from p20 to p80.
    """
    ranks = sorted({record.config["world_size"] for record in records})
    # More than about eight ticks would overlap.
    ticks = [(n, f"{n:,}") for n in ranks[:: 1 + len(ranks) // 8]]
    panels: dict[str, list[Series]] = {}  # kind → its series
    for (kind, strategy), rows in grouped(records, _kind_and_strategy).items():
        series = panels.setdefault(kind, [])
        # lines on each other can be told apart
        style = ("-", "--", "-.", ":")[len({each.key for each in series}) % 4]
        sizes = [row.config["world_size"] for row in rows]
        rates = [row.metrics["predicted_tokens_per_s"] / row.config["world_size"] for row in rows]
        series.append(Series(strategy, sizes, rates, line=style))
        measured = [row for row in rows if _is_measured(row)]
        if measured:
            sizes = [row.config["world_size"] for row in measured]
            # A short time is a high rate, so p20 of the time is the upper end.
            high = [_measured_rate(row, "p20") for row in measured]
            middle = [_measured_rate(row, "p50") for row in measured]
            low = [_measured_rate(row, "p80") for row in measured]
            name = f"{strategy}, measured"
            series.append(Series(name, sizes, middle, low, high, like=strategy))
    axes = [
        Panel(f"{kind} scaling", "ranks", "tokens per second and rank", series, x_ticks=ticks)
        for kind, series in panels.items()
    ]
    lines(path, axes, title=headline(records))


def _kind_and_strategy(record: Record) -> tuple[str, str]:
    return record.config["kind"], record.variant


def _measured_rate(record: Record, percentile: str) -> float:
    """Return tokens per second and rank of a measured step.

    Args:
        percentile: `p20`, `p50` or `p80` of its time.
    """
    metrics = record.metrics
    # The prediction's tokens per second times its time give 1,000 × the tokens of a step.
    work = metrics["predicted_tokens_per_s"] * metrics["predicted_step_ms"]
    return work / record.config["world_size"] / metrics[f"measured_step_{percentile}_ms"]


SCALING_VIEW = View(
    name="plan_sweep",
    question="Where does each strategy stop scaling?",
    columns=[
        text_column("config.kind", "scaling"),
        Column("variant", "strategy"),
        Column("config.world_size", "ranks", ",d"),
        Column("config.per_rank", "micro"),
        Column("metrics.predicted_step_ms", "step ms", ",.1f"),
        Column("metrics.predicted_overhead_ms", "overhead ms", ",.1f"),
        Column("metrics.predicted_tokens_per_s", "tokens/s", ",.0f"),
        Column("metrics.predicted_efficiency_pct", "efficiency %", ".0f"),
        sparse_column("metrics.measured_step_p50_ms", "measured ms", ",.1f"),
        prediction_error("predicted_step_ms", "measured_step_p50_ms", "error %", "+.1f"),
    ],
    headline=headline,
    terminal=(
        *("kind", "variant", "world_size", "predicted_step_ms", "predicted_tokens_per_s"),
        *("predicted_efficiency_pct", "measured_step_p50_ms", "measured_step_p50_ms_error_pct"),
    ),
    pictures={"scaling.png": draw},
    findings=findings,
    reading="Weak scaling keeps the batch of each rank, strong scaling that of all ranks together. "
    "A horizontal line is perfect. Where a line bends down, compute no longer covers the "
    "communication. Dots are records of ddp_bench for the same model, context, dtype and device, "
    "from p20 to p80.",
    prediction="Compute from simulated layers, communication in closed form "
    "(distlab.simulate.estimate). `distlab run plan` says whether it fits.",
    noise="The noise of the measured points is in their own records.",
)
