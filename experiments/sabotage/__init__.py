"""What does a mistake look like, and which check would have caught it?

    distlab run sabotage            # two CPU ranks, about a minute
    distlab run sabotage --quick    # shorter curves

Fifteen classic mistakes, injected one at a time by a subclass or a patch into an otherwise healthy training run. Each
is put to the checks that this lab's commands make (equality with one process, closed form of what is sent, attention
against float64), beside the healthy run, which must pass them all; or the strategy itself raises an error. The picture
shows the symptom: both loss curves.

The mistakes are in `injected` and `mistakes`, the checks in `checks`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distlab.comm import RankContext
from distlab.experiment import Experiment, Options, Run, View, option
from distlab.report import Record
from distlab.report.charts import Panel, Series, lines
from distlab.report.table import Column
from distlab.testing import RanksFailed, run_ranks
from distlab.train.data import SyntheticTokens

from .checks import ATTENTION_TOLERANCE, caught_by, examine, examine_both
from .mistakes import MISTAKES, MODEL

RANKS = 2


@dataclass(frozen=True)
class SabotageConfig(Options):
    """What to run."""

    mistakes: tuple[str, ...] = option(tuple(MISTAKES), "which to make", choices=tuple(MISTAKES))
    steps: int = option(150, "of each loss curve", least=2)
    check_steps: int = option(3, "of the comparison with one process", least=2)


def measure(config: SabotageConfig, context: RankContext, run: Run) -> None:
    """A row per mistake. Each starts ranks of its own, since a mistake may hang or crash those it runs on."""
    for name in config.mistakes:
        if run.done(name):
            continue
        run.progress(name)
        mistake = MISTAKES[name]
        steps = (config.check_steps, config.steps)
        try:
            healthy, broken = run_ranks(examine_both, RANKS, name, *steps, deadline_s=120.0)[0]
        except RanksFailed as failure:
            healthy = run_ranks(examine, RANKS, name, False, *steps)[0]
            broken = {"error": str(failure).strip().splitlines()[-1]}
        caught = caught_by(broken)
        metrics = broken | {
            "caught": mistake.check in caught,
            "caught_by": ", ".join(caught) or "nothing",
            "healthy_passes": not caught_by(healthy),
            "healthy_loss": healthy["loss"],
            "healthy_final_loss": _end(healthy["loss"]),
            "final_loss": _end(broken["loss"]) if "loss" in broken else None,
        }
        own = {"strategy": mistake.healthy, "check": mistake.check, "symptom": mistake.symptom}
        run.add(name, metrics, world_size=RANKS, model=asdict(MODEL), **own)


def _end(losses: Sequence[float]) -> float:
    """The mean of the last tenth, which is less noise than the last loss."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def wrong_rows(records: Sequence[Record]) -> list[str]:
    """What is not as it should be: a mistake that passes, or a healthy run that does not."""
    found = [f"{r.variant}: not caught by {r.config['check']}" for r in records if not r.metrics["caught"]]
    return found + [
        f"{r.variant}: its healthy counterpart is refused" for r in records if not r.metrics["healthy_passes"]
    ]


COLUMNS = [
    Column("variant", "mistake"),
    Column("config.strategy", "in", align="left"),
    Column("metrics.caught_by", "caught by", align="left"),
    Column("metrics.max_abs_param_diff", "max |Δparam|", ".1e"),
    Column("metrics.collectives_beyond_prediction", "calls too many", "+d"),
    Column("metrics.attention_error", "attention error", ".1e"),
    Column("metrics.healthy_final_loss", "healthy loss", ".3f"),
    Column("metrics.final_loss", "loss", ".3f"),
    Column("metrics.ranks_apart", "ranks apart", ".1e"),
    Column("config.symptom", "symptom", align="left"),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    caught = sum(record.metrics["caught"] for record in records)
    config, env = records[0].config, records[0].environment
    return (
        f"{caught} of {len(records)} mistakes caught; {config['steps']} steps on {config['world_size']} gloo ranks of "
        f"{env['device_name']}, torch {env['torch']}"
    )


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel per mistake: its loss beside the healthy one."""
    floor = math.log(SyntheticTokens(MODEL.vocab_size, 1, 1, seed=0, rank=0).branching)
    panels = []
    for record in records:
        healthy, wrong = record.metrics["healthy_loss"], record.metrics.get("loss", [])
        series = [
            Series("healthy", range(1, len(healthy) + 1), healthy, line="-", width=2.6),
            Series("with the mistake", range(1, len(wrong) + 1), wrong, line="-", width=1),
            Series("floor of the data", [1, len(healthy)], [floor, floor], line=":", width=0.8),
        ]
        heading = f"{record.variant}\n→ {record.metrics['caught_by']}"
        axes = {"log_x": None, "from_zero": False, "y_max": 1.5 * max(healthy)}
        panels.append(Panel(heading, "step", "loss, nats per token", series, **axes))
    lines(path, panels, title=f"Mistakes → checks that catch them. {headline(records)}")


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=("variant", "strategy", "caught_by", "max_abs_param_diff", "healthy_final_loss", "final_loss"),
    pictures={"loss.png": draw},
    findings=lambda records: [f"WRONG: {problem}" for problem in wrong_rows(records)],
    reading="Every mistake is injected alone, into a run that is otherwise healthy and whose healthy counterpart must "
    "pass all checks. A loss curve that looks right proves nothing: several of these train on, only worse, or only at "
    "another scale.",
    noise="At two ranks the strategies equal one process bit for bit, so any difference of a parameter is a mistake; "
    f"attention may differ from float64 by {ATTENTION_TOLERANCE:g}.",
)
PRESETS = {
    "quick": {"steps": 30},
    "smoke": {"mistakes": ("no broadcast",), "steps": 2, "check_steps": 2},
}
EXPERIMENT = Experiment(SabotageConfig, measure, VIEW, presets=PRESETS, ranks="none", wrong=wrong_rows)
