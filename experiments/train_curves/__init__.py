"""Do all strategies train alike, does a killed run go on as if nothing had happened, and what do checkpoints cost?

    distlab run train_curves --nproc 2 --max-restarts 1

trains a model on bytes of text (by default this repository's own sources and pages) under every strategy, with one
data order and one seed. Then the last rank of another such run kills itself in the middle; all ranks are started again
(that is what `--max-restarts` allows), and the run resumes from its checkpoint. At last, blocks of steps with and
without a checkpoint alternate. What has a row under this `--name` is not run again, so the same command with it
continues where it was cut off; torchrun's own `--max-restarts` needs a `--name`. Wrong rows are printed as wrong, and
the exit code stays 0: another would make the ranks start all over.

The runs are in `runs`, their options in `config`, the limits that curves and checkpoints must keep in `verdicts`.
"""

from collections.abc import Sequence
from pathlib import Path

from distlab.experiment import Experiment, View
from distlab.report import Column, Record
from distlab.report.charts import Panel, lines, overlaid
from distlab.report.noise import TIE

from .config import KILLED, LAST, CurvesConfig, compared_on
from .runs import measure
from .verdicts import cost_is_noise, tolerance, verdicts

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


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    limit = tolerance(records)
    noise = "" if limit is None else f"; noise {limit:.3f} nats"
    return (
        f"{config['size']} ({config['num_parameters'] / 1e6:,.1f} M parameters), bytes, batch {config['batch']} "
        f"(checkpoints: {config['cost_batch']}), {config['steps']} steps, {config['dtype']}, {config['world_size']} × "
        f"{env['device_name']} ({config['backend']}), torch {env['torch']}{noise}"
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
    reading="All runs have one data order and one seed, so their curves may differ only as rounding makes them differ; "
    "how much that is, the reference in two micro-batches shows. The killed run goes on from its checkpoint: its first "
    "step is the one after that. The cost of checkpoints is that of interleaved blocks of steps with and without one.",
    noise="Curves: the distance that the same mathematics in two micro-batches makes, in the headline.",
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
