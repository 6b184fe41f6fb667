"""Do all strategies train alike, does a killed run go on as if nothing had happened, and what do checkpoints cost?

    distlab run train_curves --nproc 2 --max-restarts 1

trains a model on bytes of text (by default this repository's own sources and pages) under every strategy, with one
data order and one seed. Then the last rank of another such run kills itself in the middle; all ranks are started again
(that is what `--max-restarts` allows), and the run resumes from its checkpoint. At last, blocks of steps with and
without a checkpoint alternate. What has a row under this `--name` is not run again, so the same command with it
continues where it was cut off; torchrun's own `--max-restarts` needs a `--name`. Wrong rows are printed as wrong, and
the exit code stays 0: another would make the ranks start all over.

The runs and their options are in `runs`; here, the limits that curves and checkpoints must keep, and what is shown.
"""

from collections.abc import Sequence
from pathlib import Path

from distlab.experiment import Column, Experiment, Record, View, headline_from
from distlab.report import TIE, Panel, lines, overlaid

from .runs import COST, KILLED, LAST, REFERENCE, ROUNDING, CurvesConfig, compared_on, distance, measure

MOST_COST_PCT = 5  # of a step's time that checkpoints may take



def cost_is_noise(record: Record) -> bool:
    """Whether the blocks without checkpoints differ among themselves by more than checkpoints cost."""
    cost, noise = record.metrics.get("checkpoint_cost_pct"), record.metrics.get("noise_floor_pct")
    return cost is not None and noise is not None and abs(cost) <= noise


def verdicts(records: Sequence[Record]) -> list[str]:
    """What is not as it should be; empty if all is well."""
    by_name = {record.variant: record.metrics for record in records}
    problems = []
    limit, reference = tolerance(records), by_name.get(REFERENCE, {})
    for name, metrics in by_name.items():
        apart = None if name == REFERENCE else distance(metrics, reference)
        if limit and apart is not None and not apart <= limit:
            problems.append(f"{name}: {apart:.4f} nats from {REFERENCE}'s curve, noise is {limit:.4f}")
        if "loss" in metrics and not metrics["loss"][-1] < metrics["loss"][0] and metrics["first_step"] == 0:
            problems.append(
                f"{name}: the loss did not fall ({metrics['loss'][0]:.3f} → {metrics['loss'][-1]:.3f})"
            )
    killed = by_name.get(KILLED)
    if killed and killed["first_step"] == 0:
        problems.append(f"{KILLED}: was not resumed from a checkpoint")
    cost = by_name.get(COST)
    if cost and cost["checkpoint_cost_pct"] > max(MOST_COST_PCT, cost.get("noise_floor_pct", 0.0)):
        problems.append(
            f"checkpoints cost {cost['checkpoint_cost_pct']:.1f} % of step time, more than {MOST_COST_PCT:g} %"
        )
    return problems


def tolerance(records: Sequence[Record]) -> float | None:
    """How far curves may lie apart: twice what rounding alone does (the same mathematics in two micro-batches), and
    at least 0.01 nats.
    """
    by_name = {record.variant: record.metrics for record in records}
    if REFERENCE not in by_name or ROUNDING not in by_name:
        return None
    return max(0.01, 2 * distance(by_name[ROUNDING], by_name[REFERENCE]))

COLUMNS = [
    Column("variant", "run"),
    Column("metrics.first_step", "from step", "d"),
    Column("metrics.final_loss", f"loss, last {LAST}", ".4f"),
    Column("metrics.mean_abs_loss_diff", "mean |Δloss|", ".4f"),
    Column("metrics.max_abs_loss_diff", "max |Δloss|", ".1e"),
    Column("metrics.step_p50_ms", "step p50 ms", ".1f"),
    Column("metrics.step_with_checkpoints_ms", "with checkpoints", ".1f"),
    Column("metrics.checkpoint_cost_pct", "cost %", ".2f", note=lambda r: TIE if cost_is_noise(r) else ""),
    Column("metrics.save_p50_ms", "save() ms", ".1f"),
    Column("metrics.wait_p50_ms", "wait ms", ".0f"),
    Column("metrics.checkpoint_bytes", "GB", ".2f", scale=1e-9),
    Column("metrics.host_bytes_per_rank", "host GiB/rank", ".2f", scale=2**-30),
    Column("metrics.added_device_bytes", "+ device MiB", ".1f", scale=2**-20),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
]


headline = headline_from(
    "{size} ({num_parameters:M} parameters), bytes, batch {batch} (checkpoints: {cost_batch}), {steps} steps, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}{noise}",
    noise=lambda records: "" if (limit := tolerance(records)) is None else f"; noise {limit:.3f} nats",
)


def draw(records: Sequence[Record], path: Path) -> None:
    """All loss curves on one picture, and where one run was killed."""
    series, events = {}, []
    for record in records:
        if "loss" in record.metrics:
            first = record.metrics["first_step"]
            losses = record.metrics["loss"]
            series[record.variant] = (range(first + 1, first + len(losses) + 1), losses)
        if record.variant == KILLED:
            events = [(record.config["kill_at"], "killed"), (record.metrics["first_step"], "resumed from")]
    if series:
        label = "training loss (nats per byte)"
        panel = Panel("", "step", label, overlaid(series), log_x=None, from_zero=False, events=events)
        lines(path, [panel], title=f"Loss of every strategy: {headline(records)}")


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=("variant", "final_loss", "mean_abs_loss_diff", "step_p50_ms", "checkpoint_cost_pct"),
    pictures={"loss.png": draw},
    findings=lambda records: [f"WRONG: {problem}" for problem in verdicts(records)],
    reading="All runs have one data order and one seed, so their curves may differ by rounding only; "
    "the reference in two micro-batches shows how much that is. The killed run continues from its checkpoint: its "
    "first "
    "step is the one after that. The cost of checkpoints comes from interleaved blocks of steps with and without one.",
    noise="The headline has the noise of the curves: the difference that two micro-batches make to the same "
    "mathematics.",
)
PRESETS = {
    "gpu": {"size": "medium", "context": 512, "dtype": "bf16", "strategies": compared_on("cuda")},
    "cpu": {"steps": 60, "kill_at": 35, "checkpoint_every": 15},
    "quick": {
        "size": "tiny", "context": None, "dtype": "fp32", "steps": 12, "kill_at": 6, "checkpoint_every": 3,
        "rounds": 1, "block": 2, "strategies": ("naive", "flat"),
    },
    "smoke": {
        "size": "tiny", "context": 16, "dtype": "fp32", "steps": 4, "kill_at": 3, "checkpoint_every": 2, "batch": 4,
        "cost_batch": 4, "rounds": 1, "block": 2, "strategies": ("flat",), "parts": ("curves", "cost"),
    },
}  # fmt: skip
EXPERIMENT = Experiment(CurvesConfig, measure, VIEW, presets=PRESETS, ranks="many")
