"""Where does each strategy stop scaling? From 1 to 4096 ranks: predicted everywhere, measured where records exist.

    python -m experiments.scaling --model xl --batch 8 --device h200 --records records/ddp_bench/*.json

Weak scaling keeps the batch per rank, strong scaling the batch of all ranks. Lines are predictions (compute from
simulated layers, communication in closed form); dots are records of ddp_bench for the same model, context, type and
device, with p20 to p80 as error bars. To add points, record them with ddp_bench and name the files here.

    python -m experiments.scaling --measure

measures instead: 1, 2, 4, … of this host's ranks in one launch (experiments/scaling_measured).
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from distlab.hardware import by_alias, lookup
from distlab.model import ModelConfig, preset
from distlab.report import Record, View, Work, add_output_options, commit, environment, read_json, run_command
from distlab.report.charts import Panel, Series, lines
from distlab.report.options import whole
from distlab.report.table import Column
from distlab.simulate.estimate import Machine, estimate_step, machine_of
from distlab.theory.memory.peak import step_memory
from distlab.theory.model_shape import ModelShape

NAME = "scaling"
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "zero1", "fsdp")
KINDS = ("weak", "strong")


@dataclass(frozen=True)
class ScalingConfig:
    """What to predict.

    Args:
        model: a preset.
        batch: sequences per rank (weak scaling), and most of a micro-batch (strong scaling).
        global_batch: sequences of all ranks together (strong scaling).
        context: tokens per sequence; None for the preset's.
        ranks: world sizes.
        strategies: names.
        device, link, between, devices_per_node, dtype: see `distlab.simulate.estimate.machine_of`.
        records: files of ddp_bench whose points to draw.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    model: str = "xl"
    batch: int = 8
    global_batch: int = 4096
    context: int | None = None
    ranks: tuple[int, ...] = tuple(2**k for k in range(13))
    strategies: tuple[str, ...] = STRATEGIES
    device: str = "h200"
    link: str = "nvlink"
    between: str = "ib-ndr"
    devices_per_node: int = 8
    dtype: str = "bf16"
    records: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ValueError(f"strategies {unknown} are unknown; choose among {', '.join(STRATEGIES)}")
        if not self.ranks or min(self.ranks) < 1 or self.batch < 1:
            raise ValueError(f"ranks={self.ranks}, batch={self.batch}: give positive numbers")
        if self.global_batch < min(self.ranks):
            raise ValueError(
                f"global_batch={self.global_batch} is smaller than the data-parallel size {min(self.ranks)}; the "
                f"nearest choice is {min(self.ranks)}"
            )
        self.shape()
        self.machine()

    def shape(self) -> ModelConfig:
        return preset(self.model, context_length=self.context)

    def machine(self) -> Machine:
        return machine_of(
            by_alias(self.device),
            link=self.link,
            between=self.between,
            devices_per_node=self.devices_per_node,
            dtype=self.dtype,
        )


def run(config: ScalingConfig) -> list[Record]:
    """A record per kind, strategy and number of ranks; with the measured figures where there are any."""
    facts = {"environment": environment("cpu"), "commit": commit(None)}
    measured = measured_points(config)
    records = []
    for kind in KINDS:
        for strategy in config.strategies:
            alone = None
            for ranks in sorted(config.ranks):
                split = _split(config, kind, ranks)
                if split is None:
                    continue
                metrics = _predict(config, strategy, ranks, *split)
                alone = alone or metrics["predicted_tokens_per_s"] / ranks
                metrics["predicted_efficiency_pct"] = 100 * metrics["predicted_tokens_per_s"] / ranks / alone
                if split[1] == 1:
                    metrics |= measured.get((strategy, ranks, split[0]), {})
                if metrics.get("measured_step_p50_ms"):
                    error = metrics["predicted_step_ms"] / metrics["measured_step_p50_ms"] - 1
                    metrics["error_pct"] = 100 * error
                own = {"kind": kind, "world_size": ranks, "micro_batch": split[0], "micro_batches": split[1]}
                records.append(Record(NAME, strategy, asdict(config) | own, metrics, **facts))
    return records


def _split(config: ScalingConfig, kind: str, ranks: int) -> tuple[int, int] | None:
    """(micro-batch, how many) per rank; None where the global batch leaves ranks without a sequence."""
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
    model, gpu = config.shape(), by_alias(config.device)
    time = estimate_step(
        model,
        strategy,
        config.machine(),
        batch=micro,
        ranks=ranks,
        dtype=config.dtype,
        micro_batches=micro_batches,
    )
    memory = step_memory(
        ModelShape.of(model),
        batch=micro,
        context=model.context_length,
        strategy=strategy,
        world_size=ranks,
        precision={"fp32": "fp32", "bf16": "bf16" if strategy == "fsdp" else "bf16-autocast"}[config.dtype],
        accumulates=micro_batches > 1,
    )
    tokens = ranks * micro * micro_batches * model.context_length
    return {
        "predicted_step_ms": 1e3 * time.step,
        "predicted_exposed_comm_ms": 1e3 * time.exposed,
        "predicted_comm_ms": 1e3 * time.communication,
        "predicted_tokens_per_s": tokens / time.step,
        "predicted_peak_bytes": memory.peak.total,
        "fits": memory.peak.total <= 0.94 * gpu.hbm_bytes,
    }


def measured_points(config: ScalingConfig) -> dict[tuple[str, int, int], dict[str, float]]:
    """(strategy, ranks, sequences per rank) → measured figures, from the records that match the question.

    Of several bucket sizes the fastest counts.
    """
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for record in _matching(config):
        step = record.metrics.get("step_p50_ms")
        strategy = record.variant.split("-")[0]
        if strategy not in config.strategies or not isinstance(step, int | float):
            continue
        key = (strategy, record.config["world_size"], record.config["batch"])
        if key not in found or step < found[key]["measured_step_p50_ms"]:
            found[key] = {
                f"measured_step_{p}_ms": record.metrics[f"step_{p}_ms"] for p in ("p20", "p50", "p80")
            }
    return found


def _matching(config: ScalingConfig) -> Iterable[Record]:
    asked = {"size": config.model, "context": config.shape().context_length, "dtype": config.dtype}
    for path in config.records:
        for record in read_json(path):
            known = lookup(str(record.environment.get("device_name")))
            same = all(record.config.get(name) == value for name, value in asked.items())
            if same and known == by_alias(config.device):
                yield record


COLUMNS = [
    Column("config.kind", "scaling", align="left"),
    Column("variant", "strategy"),
    Column("config.world_size", "ranks", ",d"),
    Column("config.micro_batch", "micro"),
    Column("metrics.predicted_step_ms", "step ms", ",.1f"),
    Column("metrics.predicted_exposed_comm_ms", "exposed ms", ",.1f"),
    Column("metrics.predicted_tokens_per_s", "tokens/s", ",.0f"),
    Column("metrics.predicted_efficiency_pct", "efficiency %", ".0f"),
    Column("metrics.predicted_peak_bytes", "peak GiB", ".1f", scale=2**-30),
    Column("metrics.fits", "fits", align="left"),
    Column("metrics.measured_step_p50_ms", "measured ms", ",.1f", missing=""),
    Column("metrics.error_pct", "error %", "+.1f", missing=""),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what was predicted, and for what."""
    config = ScalingConfig(**{field.name: records[0].config[field.name] for field in fields(ScalingConfig)})
    return (
        f"{config.model} on {by_alias(config.device).name} ({config.link}, {config.between}), {config.dtype}: weak "
        f"scaling with {config.batch} sequences per rank, strong scaling with {config.global_batch} together; "
        "lines predicted, dots measured"
    )


def findings(records: Sequence[Record]) -> list[str]:
    """That files were named of which nothing could be drawn."""
    config = records[0].config
    if not config["records"] or any("measured_step_p50_ms" in record.metrics for record in records):
        return []
    return [
        f"No row of {', '.join(config['records'])} is of {config['model']} in {config['dtype']} on {config['device']} "
        "with this context and batch: nothing measured is drawn. Ask for what the files measured, or name others."
    ]


def draw(records: Sequence[Record], path: Path) -> None:
    """Tokens per second and rank, so that perfect scaling is a level line; error bars from p20 to p80."""
    ranks = sorted({record.config["world_size"] for record in records})
    ticks = [(n, f"{n:,}") for n in ranks[:: 1 + len(ranks) // 8]]
    panels: dict[str, list[Series]] = {}
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.config["kind"], record.variant), []).append(record)
    for (kind, variant), rows in groups.items():
        series = panels.setdefault(kind, [])
        style = ("-", "--", "-.", ":")[len({s.key for s in series}) % 4]  # lines on each other can be told apart
        x, y = zip(*((r.config["world_size"], r.metrics["predicted_tokens_per_s"]) for r in rows), strict=True)
        series.append(Series(variant, x, [rate / n for n, rate in zip(x, y, strict=True)], line=style))
        measured = [r for r in rows if "measured_step_p50_ms" in r.metrics]
        if measured:
            x = [r.config["world_size"] for r in measured]
            # Tokens of a step, times ms per s.
            work = [r.metrics["predicted_tokens_per_s"] * r.metrics["predicted_step_ms"] for r in measured]
            high, y, low = (
                [t / n / r.metrics[f"measured_step_{p}_ms"] for t, n, r in zip(work, x, measured, strict=True)]
                for p in ("p20", "p50", "p80")
            )
            series.append(Series(f"{variant}, measured", x, y, low, high, like=variant))
    axes = [
        Panel(f"{kind} scaling", "ranks", "tokens per second and rank", series, x_ticks=ticks)
        for kind, series in panels.items()
    ]
    lines(path, axes, title=headline(records))


VIEW = View(
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"scaling.png": draw},
    findings=findings,
    reading="Weak scaling keeps the batch of each rank, strong scaling that of all ranks together. A level line is "
    "perfect; where one turns down, communication that compute no longer covers has taken over. Dots are records of "
    "ddp_bench for the same model, context, type and device, from p20 to p80.",
    prediction="Compute from simulated layers, communication in closed form (distlab.simulate.estimate).",
    noise="That of the measured points: see their own records.",
)


def _measure(arguments: Sequence[str]) -> int:
    """Start the ranks of launch/scaling.py, which takes the other options, and say how torchrun would."""
    script = Path(__file__).parents[1] / "launch" / "scaling.py"
    form = "torchrun --standalone --nproc_per_node=RANKS launch/scaling.py"
    print(f"the same by torchrun: {' '.join([form, *arguments])}", file=sys.stderr, flush=True)
    if not script.exists():
        print(f"{NAME}: error: {script} is not there: run this in a checkout", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, str(script), *arguments]).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "--measure" in given:
        return _measure([argument for argument in given if argument != "--measure"])
    default = ScalingConfig()
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default.model, help="a preset")
    parser.add_argument("--batch", type=whole(), default=default.batch, help="sequences per rank")
    parser.add_argument("--global-batch", type=whole(), default=default.global_batch)
    parser.add_argument("--context", type=whole())
    parser.add_argument("--ranks", type=whole(), nargs="+", default=default.ranks)
    parser.add_argument("--strategies", type=lambda text: tuple(text.split(",")), default=STRATEGIES)
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--link", default=default.link)
    parser.add_argument("--between", default=default.between)
    parser.add_argument("--devices-per-node", type=whole(), default=default.devices_per_node)
    parser.add_argument("--dtype", default=default.dtype, choices=("bf16", "fp32"))
    parser.add_argument("--records", nargs="*", default=(), help="files of ddp_bench to draw as points")
    parser.add_argument("--quick", action="store_true", help="two strategies on 1 to 64 ranks")
    add_output_options(parser, measures=False)
    parser.add_argument(
        "--measure", action="store_true", help="measure on this host's ranks: launch/scaling.py"
    )
    args = parser.parse_args(arguments)
    if args.quick:
        args.strategies, args.ranks = ("bucketed", "fsdp"), (1, 2, 8, 64)
    args.ranks, args.records = tuple(args.ranks), tuple(args.records)

    def prepare() -> Work:
        config = ScalingConfig(**{field.name: getattr(args, field.name) for field in fields(ScalingConfig)})
        return lambda folder: run(config)

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
