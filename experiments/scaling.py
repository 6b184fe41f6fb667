"""Where does each strategy stop scaling, from 1 to 4096 ranks?

    distlab run scaling --quick
    distlab run scaling --model xl --batch 8 --device h200 --records records/ddp_bench/*.json

Weak scaling keeps the batch per rank, strong scaling the batch of all ranks. Lines are predictions
(compute and communication in closed form); dots are records of ddp_bench for the same model,
context, dtype and device, with p20 to p80 as error bars. To add points, run `distlab run ddp_bench
--nproc N` for several N and name the files here.
"""

from dataclasses import dataclass
from pathlib import Path

from distlab.experiment import (
    Column,
    Experiment,
    RankContext,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.hardware import lookup
from distlab.model.config import RECOMPUTATION
from distlab.parallel import check_shard_size
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
from distlab.simulate.estimate import MachineOptions, estimate_step

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "zero1", "fsdp", "hsdp")
KINDS = ("weak", "strong")
STOPS_AT = 90.0  # per cent of the first point's tokens per second and rank


@dataclass(frozen=True)
class ScalingConfig(MachineOptions):
    """Options of the prediction."""

    batch: int = option(
        8, "sequences per rank (weak), and at most in a micro-batch (strong scaling)", least=1
    )
    global_batch: int = option(4096, "sequences of all ranks together (strong scaling)", least=1)
    ranks: tuple[int, ...] = option(tuple(2**k for k in range(13)), "world sizes", least=1)
    strategies: tuple[str, ...] = option(STRATEGIES, "strategies to compare", choices=STRATEGIES)
    group: int | None = option(
        None, "ranks that share a copy of the parameters, for hsdp [a node]", least=1
    )
    recompute: str = option(
        "none", "results that blocks keep; the rest runs again in backward", choices=RECOMPUTATION
    )
    records: tuple[str, ...] = option((), "records of ddp_bench to draw as points")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shard_size(self.group, self.strategies, "--group")
        if self.global_batch < min(self.ranks):
            raise ValueError(
                f"global_batch={self.global_batch} is smaller than the data-parallel size {min(self.ranks)}; the "
                f"nearest choice is {min(self.ranks)}"
            )


def measure(config: ScalingConfig, context: RankContext, run: Run) -> None:
    """Add a row per kind, strategy and number of ranks, with measured figures if there are any."""
    measured = measured_points(config)
    for kind in KINDS:
        for strategy in config.strategies:
            alone = None
            for ranks in sorted(config.ranks):
                split = _split(config, kind, ranks)
                if split is None:
                    continue
                metrics = _predict(config, strategy, ranks, *split)
                alone = alone or metrics["predicted_tokens_per_s"] / ranks
                metrics["predicted_efficiency_pct"] = (
                    100 * metrics["predicted_tokens_per_s"] / ranks / alone
                )
                if split[1] == 1:
                    metrics |= measured.get((strategy, ranks, split[0]), {})
                run.add(
                    strategy,
                    metrics,
                    kind=kind,
                    world_size=ranks,
                    micro_batch=split[0],
                    micro_batches=split[1],
                )


def _split(config: ScalingConfig, kind: str, ranks: int) -> tuple[int, int] | None:
    """Return (micro-batch, number) per rank.

    None if the global batch leaves ranks without a sequence.
    """
    if kind == "weak":
        return config.batch, 1
    per_rank = config.global_batch // ranks
    if per_rank == 0:
        return None
    micro = max(size for size in range(1, min(per_rank, config.batch) + 1) if per_rank % size == 0)
    return micro, per_rank // micro


def _predict(
    config: ScalingConfig, strategy: str, ranks: int, micro: int, micro_batches: int
) -> dict[str, float]:
    model, group = config.shape(), None if config.group is None else min(config.group, ranks)
    time = estimate_step(
        model,
        strategy,
        config.machine(),
        batch=micro,
        ranks=ranks,
        dtype=config.dtype,
        checkpointing=config.recompute,
        micro_batches=micro_batches,
        group=group,
        kernels=config.kernels(),
    )
    tokens = ranks * micro * micro_batches * model.context_length
    return {
        "predicted_step_ms": 1e3 * time.step,
        "predicted_overhead_ms": 1e3 * time.overhead,
        "predicted_comm_ms": 1e3 * time.communication,
        "predicted_tokens_per_s": tokens / time.step,
    }


def measured_points(config: ScalingConfig) -> dict[tuple[str, int, int], dict[str, float]]:
    """Return (strategy, ranks, sequences per rank) → measured figures.

    They come from the records that match the question.

    Of several bucket sizes the fastest counts.
    """
    asked = {"size": config.model, "context": config.shape().context_length, "dtype": config.dtype}
    asked["num_parameters"] = config.shape().num_parameters
    found = {}
    for record in (record for path in config.records for record in read_json(path)):
        steps = {
            f"measured_step_{p}_ms": record.metrics.get(f"step_{p}_ms")
            for p in ("p20", "p50", "p80")
        }
        strategy, device = (
            record.variant.split("-")[0],
            lookup(str(record.environment.get("device_name"))),
        )
        same = (
            asked.items() <= {name: record.config.get(name) for name in asked}.items()
            and device == config.gpu()
        )
        if same and strategy in config.strategies and is_number(steps["measured_step_p50_ms"]):
            known = found.setdefault(
                (strategy, record.config["world_size"], record.config["batch"]), steps
            )
            known |= min(known, steps, key=lambda each: each["measured_step_p50_ms"])
    return found


headline = headline_from(
    "{model} on {gpu}, {dtype}: weak scaling with {batch} sequences per rank, strong scaling with "
    "{global_batch} together; lines predicted, dots measured",
    gpu=lambda records: ScalingConfig.of(records[0].config).place(),
)


def findings(records: Records) -> list[str]:
    """Name where each strategy stops scaling, and files without anything to draw."""
    config, stops = records[0].config, {}
    for record in records:
        if record.metrics["predicted_efficiency_pct"] < STOPS_AT:
            stops.setdefault((record.config["kind"], record.variant), record.config["world_size"])
    lines = [
        f"{kind} scaling under {STOPS_AT:g} % efficiency: "
        + ", ".join(
            f"{name} from {ranks:,} ranks" for (of, name), ranks in stops.items() if of == kind
        )
        + "."
        for kind in dict.fromkeys(kind for kind, _ in stops)
    ]
    if not config["records"] or any("measured_step_p50_ms" in record.metrics for record in records):
        return lines
    return [
        *lines,
        f"No row of {', '.join(config['records'])} is of {config['model']} in {config['dtype']} on {config['device']} "
        "with this context and batch: nothing measured is drawn. Ask for what the files measured, or name others.",
    ]


def draw(records: Records, path: Path) -> None:
    """Draw tokens per second and rank, so that perfect scaling is a level line.

    Error bars reach from p20 to p80.
    """
    ranks = sorted({record.config["world_size"] for record in records})
    ticks = [(n, f"{n:,}") for n in ranks[:: 1 + len(ranks) // 8]]
    panels = {}  # kind → its series
    for (kind, variant), rows in grouped(records, lambda r: (r.config["kind"], r.variant)).items():
        series = panels.setdefault(kind, [])
        # lines on each other can be told apart
        style = ("-", "--", "-.", ":")[len({s.key for s in series}) % 4]
        x, y = zip(
            *((r.config["world_size"], r.metrics["predicted_tokens_per_s"]) for r in rows),
            strict=True,
        )
        series.append(
            Series(variant, x, [rate / n for n, rate in zip(x, y, strict=True)], line=style)
        )
        measured = [r for r in rows if "measured_step_p50_ms" in r.metrics]
        if measured:
            x = [r.config["world_size"] for r in measured]
            # Tokens of a step, times ms per s.
            work = [
                r.metrics["predicted_tokens_per_s"] * r.metrics["predicted_step_ms"]
                for r in measured
            ]
            high, y, low = (
                [
                    t / n / r.metrics[f"measured_step_{p}_ms"]
                    for t, n, r in zip(work, x, measured, strict=True)
                ]
                for p in ("p20", "p50", "p80")
            )
            series.append(Series(f"{variant}, measured", x, y, low, high, like=variant))
    axes = [
        Panel(f"{kind} scaling", "ranks", "tokens per second and rank", series, x_ticks=ticks)
        for kind, series in panels.items()
    ]
    lines(path, axes, title=headline(records))


VIEW = View(
    columns=[
        text_column("config.kind", "scaling"),
        Column("variant", "strategy"),
        Column("config.world_size", "ranks", ",d"),
        Column("config.micro_batch", "micro"),
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
    reading="Weak scaling keeps the batch of each rank, strong scaling that of all ranks together. A horizontal line "
    "is perfect; where a line bends down, compute no longer covers the communication. Dots are records of "
    "ddp_bench for the same model, context, dtype and device, from p20 to p80.",
    prediction="Compute from simulated layers, communication in closed form (distlab.simulate.estimate). Whether it "
    "fits says plan.",
    noise="The noise of the measured points is in their own records.",
)

EXPERIMENT = Experiment(
    ScalingConfig,
    measure,
    VIEW,
    presets={
        "quick": {"strategies": ("bucketed", "fsdp"), "ranks": (1, 2, 8, 64)},
        "smoke": {"strategies": ("bucketed",), "ranks": (1, 8), "model": "tiny"},
    },
    ranks="none",
)
