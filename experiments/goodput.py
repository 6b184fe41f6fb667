"""How much of a week's run is work that lasts? Stragglers, failures, and how often to save a checkpoint.

    distlab run goodput --model 8B --cluster dgx-h100:1024 --strategy hsdp --batch 1 --recompute block

Failures come as often per GPU as in Llama 3's training, unless `--gpu-hours` says otherwise. Intervals by Young's
and Daly's rules stand beside the best of the simulated ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.experiment import Column, Experiment, RankContext, Record, Run, View, headline_from, option
from distlab.model.config import RECOMPUTATION
from distlab.report import Panel, Series, lines
from distlab.simulate import reliability
from distlab.simulate.estimate import MachineOptions, estimate_step
from distlab.theory.reliability import GPU_HOURS_BETWEEN_FAILURES, Failures, Jitter

STRATEGIES = ("bucketed", "zero1", "fsdp", "hsdp")
STATE_BYTES = 12  # of a checkpoint per parameter: fp32 parameters and AdamW's two moments
WEEK_S = 7 * 86_400.0


@dataclass(frozen=True)
class GoodputConfig(MachineOptions):
    """What runs, and what goes wrong."""

    model: str = option("8B", "a preset, or a JSON file of a model's sizes")
    cluster: str | None = option("dgx-h100:1024", "NAME:HOSTSxGPUS")
    strategy: str = option("hsdp", "of this lab", choices=STRATEGIES)
    batch: int = option(1, "sequences per GPU", least=1)
    recompute: str = option("block", "what blocks keep; the rest runs again in backward", choices=RECOMPUTATION)
    step_jitter: float = option(0.02, "log-normal spread of a host's step times", least=0)
    host_jitter: float = option(0.01, "the same between hosts, fixed for the run", least=0)
    gpu_hours: float = option(round(GPU_HOURS_BETWEEN_FAILURES), "of one GPU between failures", above=0)
    storage_gb_per_s: float = option(2.0, "that a host writes of a checkpoint", above=0)
    restart_s: float = option(600.0, "from a failure to the first new step", least=0)
    runs: int = option(100, "simulated weeks", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster is None:
            raise ValueError("goodput needs a cluster: --cluster dgx-h100:1024")


def measure(config: GoodputConfig, context: RankContext, run: Run) -> None:
    """A row per interval."""
    hosts, shape = config.hosts(), config.shape()
    time = estimate_step(
        shape, config.strategy, config.machine(), batch=config.batch, ranks=hosts.gpus, dtype=config.dtype,
        checkpointing=config.recompute, kernels=config.kernels(),
    )  # fmt: skip
    jitter = Jitter(config.step_jitter, config.host_jitter)
    run.progress("drawing steps")
    even = time.step - time.exposed
    steps = reliability.step_times(even, time.exposed, hosts.hosts, jitter, steps=500)
    saving = STATE_BYTES * shape.num_parameters / hosts.hosts / (1e9 * config.storage_gb_per_s)
    failures = Failures.of_gpus(hosts.gpus, saving, config.restart_s, config.gpu_hours)
    run.progress("drawing failures")
    best = reliability.best_interval(failures, runs=max(1, config.runs // 4))
    intervals = {"Young": failures.young(), "Daly": failures.daly(), "best simulated": best}
    intervals |= {"Daly ÷ 4": failures.daly() / 4, "Daly × 4": 4 * failures.daly()}
    tokens = config.batch * shape.context_length * hosts.gpus
    for name, interval in intervals.items():
        week = reliability.run(failures, interval, runs=config.runs)
        metrics = {
            "interval_s": interval,
            "predicted_goodput_pct": 100 * failures.goodput(interval),
            "simulated_goodput_pct": 100 * week.goodput,
            "lost_pct": 100 * week.lost,
            "saving_pct": 100 * week.saving,
            "down_pct": 100 * week.down,
            "failures_per_week": week.failures,
            "time_between_failures_h": failures.between / 3600,
            "checkpoint_s": saving,
            "even_step_ms": 1e3 * time.step,
            "predicted_step_ms": 1e3 * (even * jitter.slowest(hosts.hosts) + time.exposed),
            "simulated_step_ms": 1e3 * float(steps.mean()),
            "tokens_per_week": week.goodput * WEEK_S * tokens / float(steps.mean()),
        }
        run.add(name, metrics, gpus=hosts.gpus, interval=name)


def findings(records: Sequence[Record]) -> list[str]:
    """What stragglers and failures take."""
    m = {record.variant: record.metrics for record in records}["Daly"]
    return [
        f"Steps of {m['even_step_ms']:,.0f} ms become {m['simulated_step_ms']:,.0f} ms where all wait for the slowest "
        f"host ({m['predicted_step_ms']:,.0f} in closed form).",
        f"A failure every {m['time_between_failures_h']:.1f} hours; a checkpoint of {m['checkpoint_s']:.1f} s every "
        f"{m['interval_s'] / 60:.1f} minutes leaves a goodput of {m['simulated_goodput_pct']:.1f} % "
        f"({m['predicted_goodput_pct']:.1f} % in closed form), {m['tokens_per_week']:.3g} tokens in a week.",
    ]


def draw(records: Sequence[Record], path: Path) -> None:
    """Goodput over the interval."""
    rows = sorted(records, key=lambda r: r.metrics["interval_s"])
    x = [r.metrics["interval_s"] / 60 for r in rows]
    series = [
        Series("closed form", x, [r.metrics["predicted_goodput_pct"] for r in rows], line="-"),
        Series("simulated", x, [r.metrics["simulated_goodput_pct"] for r in rows]),
    ]
    ticks = [(minutes, f"{minutes:.3g}") for minutes in x[::2]]
    panel = Panel("goodput of a week", "minutes between checkpoints", "%", series, x_ticks=ticks, from_zero=False)
    lines(path, [panel], title=headline(records))


headline = headline_from("{model} on {cluster}, {strategy}, {batch} sequences per GPU, a week")

VIEW = View(
    columns=[
        Column("variant", "interval"),
        Column("metrics.interval_s", "seconds", ",.0f"),
        Column("metrics.predicted_goodput_pct", "goodput %", ".2f"),
        Column("metrics.simulated_goodput_pct", "simulated %", ".2f"),
        Column("metrics.lost_pct", "done again %", ".2f"),
        Column("metrics.saving_pct", "saving %", ".2f"),
        Column("metrics.down_pct", "down %", ".2f"),
        Column("metrics.failures_per_week", "failures", ".1f"),
        Column("metrics.tokens_per_week", "tokens", ".3g"),
    ],
    headline=headline,
    pictures={"goodput.png": draw},
    findings=findings,
    reading="A row per interval between checkpoints. Goodput is the share of the week in work that lasts; the rest is "
    "done again after a failure, spent saving, or down.",
    prediction="Closed forms of distlab.theory.reliability; failures per GPU as reported for Llama 3's training.",
    noise="The simulated columns are means over the drawn weeks.",
)

EXPERIMENT = Experiment(
    GoodputConfig, measure, VIEW, presets={"smoke": {"runs": 4, "cluster": "dgx-h100:16"}}, ranks="none"
)
