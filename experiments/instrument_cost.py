"""What do the recorder and the named ranges cost a training step, when they are off and when they are on?

    python experiments/instrument_cost.py            # this machine's device, some minutes
    python experiments/instrument_cost.py --quick    # within a minute on a CPU

A model that never had an instrument is held against its twin, which shows what the same thing differs by here, against
models from which an instrument was taken off again, and against models that wear one. One small layer with few
words: what hooks would cost is the host's time, and a step of large products hides it. The clock on a CPU is the
processor time of this process, which other work on the machine disturbs least; on a GPU it is the stream's.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.measure.clock import measure
from distlab.measure.collectives import CollectiveRecorder
from distlab.measure.nvtx import emitter, named_ranges
from distlab.measure.pace import Pace
from distlab.measure.statistics import MIN_PAIRS, noise_floor, paired_ratio, percentiles
from distlab.model import TransformerLM, cross_entropy, preset
from distlab.report import (
    Column,
    Record,
    View,
    Work,
    add_device_option,
    add_output_options,
    commit,
    device_of,
    environment,
    progress,
    run_command,
)
from distlab.report.noise import TIE
from distlab.report.style import OKABE_ITO, picture

NAME = "instrument_cost"
NEVER, TWIN = "never attached", "never attached, a twin"
INSTRUMENTS = ("ranges", "recorder")
ENDS = ("", "low_", "high_")  # of an interval, in the names of metrics
VARIANTS = (NEVER, TWIN, *(f"{name} {state}" for state in ("off again", "on") for name in INSTRUMENTS))


@dataclass(frozen=True)
class CostConfig:
    """What to time.

    Args:
        rounds: each begins with new models, made in a new order, since where a model lies in memory may cost more than
            what is measured; the median of a round's steps is one sample.
        steps: of every variant in a round, one of each in turn, in an order drawn anew each time.
        warmup: steps of every variant before them.
        vocab, context, batch: words, tokens per sequence, and sequences.

    Raises:
        ValueError: fewer rounds than an interval needs, or a negative warm-up.
    """

    rounds: int = 600
    steps: int = 20
    warmup: int = 2
    vocab: int = 256
    context: int = 16
    batch: int = 2
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < MIN_PAIRS or self.steps < 1 or self.warmup < 0:
            raise ValueError(
                f"rounds={self.rounds}, steps={self.steps}, warmup={self.warmup}: give at least {MIN_PAIRS} "
                "rounds of at least one step, and no negative warm-up"
            )


CPU = CostConfig(device="cpu")
QUICK = replace(CPU, rounds=40, steps=10)


@contextmanager
def attached(instrument: str, model: TransformerLM) -> Iterator[None]:
    """`model` with one of INSTRUMENTS; ranges go to NVTX where there is a GPU, to torch.profiler elsewhere."""
    if instrument == "recorder":
        with CollectiveRecorder():
            yield
        return
    on_gpu = next(model.parameters()).is_cuda
    with named_ranges(model, emitter("nvtx" if on_gpu else "profiler")):
        yield


class Subject:
    """One model and one step of it, as a variant has it."""

    def __init__(self, variant: str, config: CostConfig):
        shape = preset("tiny", num_layers=1, vocab_size=config.vocab, context_length=config.context)
        self.model = TransformerLM(shape, device=config.device, seed=config.seed)
        count = config.batch * config.context
        self.tokens = (torch.arange(count, device=config.device) % config.vocab).reshape(config.batch, -1)
        self.device = config.device
        instrument, _, state = variant.partition(" ")
        with attached(instrument, self.model) if state == "off again" else nullcontext():
            self.step()  # of every variant, so that memory is laid out alike
        # What is on is attached before the clock starts and taken off after it stops.
        self.around: Callable[[], Any] = nullcontext
        if state == "on":
            self.around = lambda: attached(instrument, self.model)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        cross_entropy(self.model(self.tokens), self.tokens).backward()

    def time(self) -> float:
        """Milliseconds of one step."""
        with self.around():
            if self.device == "cuda":
                return measure(self.step, warmup=0, repeats=1, device=self.device)[0]
            begin = time.process_time_ns()
            self.step()
            return (time.process_time_ns() - begin) / 1e6

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters()]


def run(
    config: CostConfig,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """One record per variant."""
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    apart = dict.fromkeys(VARIANTS, 0.0)
    order = random.Random(config.seed)
    pace = Pace(config.rounds, "rounds", progress)
    for _ in range(config.rounds):
        subjects = {variant: Subject(variant, config) for variant in order.sample(VARIANTS, len(VARIANTS))}
        steps: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(config.warmup + config.steps):
            for variant in order.sample(VARIANTS, len(VARIANTS)):
                steps[variant].append(subjects[variant].time())
        for variant, samples in steps.items():
            times[variant].append(statistics.median(samples[config.warmup :]))
        reference = subjects[NEVER].gradients()
        for variant, subject in subjects.items():
            pairs = zip(subject.gradients(), reference, strict=True)
            apart[variant] = max(apart[variant], *((a - b).abs().max().item() for a, b in pairs))
        pace()
    facts = {"environment": environment(config.device), "commit": commit(default_commit)}
    return [
        Record(
            NAME,
            variant,
            asdict(config),
            _metrics(times, variant) | {"max_abs_grad_diff": apart[variant]},
            **facts,
        )
        for variant in VARIANTS
    ]


def _metrics(times: dict[str, list[float]], variant: str) -> dict[str, float]:
    """Percentiles over rounds, and the median over rounds of the ratio to NEVER of the same round."""
    ones = [1.0] * len(times[NEVER])

    def over_never(name: str) -> list[float]:
        return [mine / never for mine, never in zip(times[name], times[NEVER], strict=True)]

    found = {f"step_{name}_ms": ms for name, ms in percentiles(times[variant]).items()}
    found["noise_floor_pct"] = found["noise_pct"] = noise_floor(over_never(TWIN), ones)  # of rounds: drift is in both
    if variant != NEVER:
        ratio = paired_ratio(over_never(variant), ones)
        found |= {f"cost_{end}pct": 100 * (value - 1) for end, value in zip(ENDS, ratio, strict=True)}
    return found




def _tie(record: Record) -> str:
    cost = record.metrics.get("cost_pct")
    return TIE if cost is not None and abs(cost) <= record.metrics["noise_floor_pct"] else ""


COLUMNS = [
    Column("variant", "instrument"),
    Column("metrics.step_p20_ms", "step p20 ms", ".3f"),
    Column("metrics.step_p50_ms", "p50", ".3f"),
    Column("metrics.step_p80_ms", "p80", ".3f"),
    Column("metrics.cost_pct", "cost %", "+.2f", note=_tie),
    Column("metrics.cost_low_pct", "from (95 %)", "+.2f"),
    Column("metrics.cost_high_pct", "to", "+.2f"),
    Column("metrics.noise_floor_pct", "noise %", ".2f"),
    Column("metrics.max_abs_grad_diff", "max |Δgrad|", ".0e"),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    return (
        f"Cost of instruments: one layer of tiny, {config['vocab']} words, batch {config['batch']} × context "
        f"{config['context']}, forward and backward, {config['rounds'] * config['steps']:,} steps of each, "
        f"{env['device_name']}, torch {env['torch']}"
    )


def findings(records: Sequence[Record]) -> list[str]:
    """What is off, beside what the same model differs from itself by."""
    floor = records[0].metrics["noise_floor_pct"]
    costs = [
        f"{r.variant} {r.metrics['cost_pct']:+.2f} %{_tie(r)}" for r in records if r.variant.endswith("off again")
    ]
    return [
        f"Once taken off: {', '.join(costs)}; a model that never had one differs from its twin by {floor:.2f} %."
    ]


def draw(records: Sequence[Record], path: Path) -> None:
    """The cost of each variant with its interval, and the noise floor as a band."""
    rows = [record for record in records if record.variant != NEVER]
    panels = {
        "off": [r for r in rows if not r.variant.endswith(" on")],
        "on": [r for r in rows if r.variant.endswith(" on")],
    }
    with picture(path, headline(records), 3.4) as figure:
        for axes, (state, group) in zip(figure.subplots(1, 2, width_ratios=(3, 2)), panels.items(), strict=True):
            floor = group[0].metrics["noise_floor_pct"]
            axes.axvspan(-floor, floor, color=OKABE_ITO["sky"], alpha=0.35, label=f"noise floor, ± {floor:.2f} %")
            for place, metrics in enumerate(record.metrics for record in group):
                cost, low, high = (metrics[f"cost_{name}pct"] for name in ENDS)
                axes.errorbar(
                    cost, place, xerr=[[cost - low], [high - cost]], fmt="o", color=OKABE_ITO["blue"], capsize=4
                )
                axes.annotate(f"{cost:+.2f} %", (cost, place), (0, 8), textcoords="offset points", ha="center",
                              fontsize=8)  # fmt: skip
            axes.set_yticks(range(len(group)), [record.variant for record in group])
            axes.set_ylim(len(group) - 0.4, -0.6)
            axes.margins(x=0.25)
            axes.set_xlabel(f"longer than never attached (%), {state}")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1))


VIEW = View(
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"cost.png": draw},
    findings=findings,
    reading="Cost is the ratio to the model that never had an instrument in the same round, less one: its median over "
    "rounds, with the 95 % bootstrap interval. The noise floor is the farthest end of that interval for a twin "
    "that never had an instrument either: a cost below it cannot be seen. On is the price of looking, paid only while "
    "one looks; the lab's timings are taken with everything off. Gradients are compared bit by bit.",
    prediction="None is needed when off: the same functions run, which a test compares one by one.",
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="fewer rounds, on a CPU")
    p.add_argument("--rounds", type=int, help=f"with new models each [{CPU.rounds}]")
    p.add_argument("--steps", type=int, help=f"of every variant in a round [{CPU.steps}]")
    add_device_option(p)
    add_output_options(p)
    return p


def config_from(args: argparse.Namespace) -> CostConfig:
    """The options over the defaults; raises ValueError for a GPU that is not there."""
    device = "cpu" if args.quick and not args.device else device_of(args)
    given = {"rounds": args.rounds, "steps": args.steps}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if args.quick else CPU, device=device, **given)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write the report."""
    args = parser().parse_args(argv)
    torch.set_num_threads(1)  # so small a step gains nothing by more, and waits for them

    def prepare() -> Work:
        config = config_from(args)
        return lambda folder: run(config, default_commit=args.commit, progress=progress)

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
