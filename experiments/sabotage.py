"""What does a mistake look like, and which check would have caught it?

    python experiments/sabotage.py            # two CPU ranks, about a minute
    python experiments/sabotage.py --quick    # shorter curves

Fifteen classic mistakes, injected one at a time by a subclass or a patch into an otherwise healthy training run. Each
is put to the checks that this lab's commands make (equality with one process, closed form of what is sent, attention
against float64), beside the healthy run, which must pass them all; or the strategy itself raises an error. The picture
shows the symptom: both loss curves.

The mistakes are in `sabotage_pieces/injected.py` and `mistakes.py` beside this file, the checks in `checks.py`.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.report import Record, View, Work, add_output_options, commit, environment, progress, run_command
from distlab.report.charts import Panel, Series, lines
from distlab.report.table import Column
from distlab.testing import RanksFailed, run_ranks
from distlab.train.data import SyntheticTokens
from experiments.sabotage_pieces.checks import ATTENTION_TOLERANCE, caught_by, examine
from experiments.sabotage_pieces.mistakes import MISTAKES, MODEL

NAME = "sabotage"
RANKS = 2


@dataclass(frozen=True)
class SabotageConfig:
    """What to run.

    Args:
        mistakes: names from `MISTAKES`.
        steps: of each loss curve.
        check_steps: of the comparison with one process.

    Raises:
        ValueError: an unknown mistake, or too few steps.
    """

    mistakes: tuple[str, ...] = tuple(MISTAKES)
    steps: int = 150
    check_steps: int = 3

    def __post_init__(self) -> None:
        unknown = [name for name in self.mistakes if name not in MISTAKES]
        if unknown or not self.mistakes:
            raise ValueError(f"mistakes {unknown or 'none'}: choose among {', '.join(map(repr, MISTAKES))}")
        if self.steps < 2 or self.check_steps < 2:
            raise ValueError(f"steps={self.steps}, check_steps={self.check_steps}: at least 2 of each")


def run(config: SabotageConfig, progress: Callable[[str], None] = lambda text: None,
        default_commit: str | None = None) -> list[Record]:  # fmt: skip
    """One record per mistake. Starts its own two ranks: a mistake may hang or crash those it runs on."""
    facts = {"environment": environment("cpu"), "commit": commit(default_commit)}
    shared = dataclasses.asdict(config) | {"world_size": RANKS, "model": dataclasses.asdict(MODEL)}
    del shared["mistakes"]
    records = []
    for name in config.mistakes:
        progress(name)
        mistake = MISTAKES[name]
        healthy = run_ranks(examine, RANKS, name, False, config.check_steps, config.steps)[0]
        try:
            broken = run_ranks(examine, RANKS, name, True, config.check_steps, config.steps)[0]
        except RanksFailed as failure:
            broken = {"error": str(failure).strip().splitlines()[-1]}
        metrics = broken | {
            "caught": mistake.check in caught_by(broken),
            "caught_by": ", ".join(caught_by(broken)) or "nothing",
            "healthy_passes": not caught_by(healthy),
            "healthy_loss": healthy["loss"],
            "healthy_final_loss": _end(healthy["loss"]),
            "final_loss": _end(broken["loss"]) if "loss" in broken else None,
        }
        own = {"strategy": mistake.healthy, "check": mistake.check, "symptom": mistake.symptom}
        records.append(Record(NAME, name, shared | own, metrics, **facts))
    return records


def _end(losses: Sequence[float]) -> float:
    """The mean of the last tenth, which is less noise than the last loss."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def problems(records: Sequence[Record]) -> list[str]:
    """What is not as it should be: a mistake that passes, or a healthy run that does not."""
    found = [f"{r.variant}: not caught by {r.config['check']}" for r in records if not r.metrics["caught"]]
    return found + [
        f"{r.variant}: its healthy twin is refused" for r in records if not r.metrics["healthy_passes"]
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
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"loss.png": draw},
    findings=lambda records: [f"WRONG: {problem}" for problem in problems(records)],
    reading="Every mistake is injected alone, into a run that is otherwise healthy and whose twin must pass all "
    "checks. A loss curve that looks right proves nothing: several of these train on, only worse, or only at another "
    "scale.",
    noise="At two ranks the strategies equal one process bit for bit, so any difference of a parameter is a mistake; "
    f"attention may differ from float64 by {ATTENTION_TOLERANCE:g}.",
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--mistakes", default="all", help=f"comma-separated: {', '.join(MISTAKES)} [all]")
    p.add_argument("--steps", type=int, help="of each loss curve [150]")
    p.add_argument("--quick", action="store_true", help="30 steps")
    add_output_options(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write records and picture; 1 if a mistake passed."""
    args = parser().parse_args(argv)
    names = tuple(MISTAKES) if args.mistakes == "all" else tuple(args.mistakes.split(","))

    def prepare() -> Work:
        config = SabotageConfig(names, args.steps or (30 if args.quick else 150))
        return lambda folder: run(config, progress, args.commit)

    return run_command(VIEW, args, prepare, passed=lambda records: not problems(records))


if __name__ == "__main__":
    sys.exit(main())
