"""What do the recorder and the named ranges cost a training step, when they are off and when they are on?

    distlab run instrument_cost            # this machine's device, some minutes
    distlab run instrument_cost --quick    # within a minute on a CPU

A model that never had an instrument is compared with a second such model, which shows the noise, with models from which
an instrument was removed again, and with models that have one. The model is one small layer with few words, because
hooks
cost host time, which a step of large matmuls hides. The clock on a CPU is the
processor time of this process, which other work on the machine disturbs least; on a GPU it is the stream's.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import (
    MIN_PAIRS,
    CollectiveRecorder,
    Pace,
    clock,
    emitter,
    interleave,
    named_ranges,
    noise_floor,
    paired_ratio,
    percentiles,
)
from distlab.model import TransformerLM, cross_entropy, preset
from distlab.options import SEED
from distlab.report import TIE, Panel, Series, lines

NEVER, TWIN = "never attached", "never attached, a twin"
INSTRUMENTS = ("ranges", "recorder")
ENDS = ("", "low_", "high_")  # of an interval, in the names of metrics
VARIANTS = (NEVER, TWIN, *(f"{name} {state}" for state in ("off again", "on") for name in INSTRUMENTS))


@dataclass(frozen=True)
class CostConfig(Options):
    """What to time.

    Each round begins with new models, made in a new order, since where a model lies in memory may cost more than what
    is measured; the median of a round's steps is one sample.
    """

    rounds: int = option(600, "with new models each", least=MIN_PAIRS)
    steps: int = option(20, "of every variant in a round, interleaved in a new random order", least=1)
    warmup: int = option(2, "steps of every variant before them", least=0)
    vocab: int = option(256, "words", least=1)
    context: int = option(16, "tokens per sequence", least=1)
    batch: int = option(2, "sequences", least=1)
    seed: int = option(0, "of parameters and of the order", **SEED)


def attached(instrument: str, model: TransformerLM) -> AbstractContextManager[Any]:
    """`model` with one of INSTRUMENTS; ranges go to NVTX where there is a GPU, to torch.profiler elsewhere."""
    if instrument == "recorder":
        return CollectiveRecorder()
    on_gpu = next(model.parameters()).is_cuda
    return named_ranges(model, emitter("nvtx" if on_gpu else "profiler"))


class Subject:
    """One model and one step of it, as a variant has it."""

    def __init__(self, variant: str, config: CostConfig, device: str):
        shape = preset("tiny", num_layers=1, vocab_size=config.vocab, context_length=config.context)
        self.model = TransformerLM(shape, device=device, seed=config.seed)
        count = config.batch * config.context
        self.tokens = (torch.arange(count, device=device) % config.vocab).reshape(config.batch, -1)
        self.device = device
        instrument, _, state = variant.partition(" ")
        with attached(instrument, self.model) if state == "off again" else nullcontext():
            self.step()  # of every variant, so that memory is laid out alike
        # What is on is attached before the clock starts and taken off after it stops.
        self.around = partial(attached, instrument, self.model) if state == "on" else nullcontext

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        cross_entropy(self.model(self.tokens), self.tokens).backward()

    def time(self) -> float:
        """Milliseconds of one step."""
        with self.around():
            if self.device == "cuda":
                return clock.measure(self.step, warmup=0, repeats=1, device=self.device)[0]
            begin = time.process_time_ns()
            self.step()
            return (time.process_time_ns() - begin) / 1e6

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters()]


def measure(config: CostConfig, context: RankContext, run: Run) -> None:
    """One row per variant."""
    with clock.cpu_threads(1):  # so small a step gains nothing by more
        times, apart = time_rounds(config, context.device.type, run.progress)
    for variant in VARIANTS:
        run.add(variant, _metrics(times, variant) | {"max_abs_grad_diff": apart[variant]})


def time_rounds(
    config: CostConfig, device: str, progress: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Of each variant: milliseconds by round, and the largest difference of a gradient from NEVER's."""
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    apart = dict.fromkeys(VARIANTS, 0.0)
    random_order = random.Random(config.seed)

    def shuffled(number: int, names: Sequence[str]) -> list[str]:
        return random_order.sample(names, len(names))

    pace = Pace(config.rounds, "rounds", progress)
    for number in range(config.rounds):
        subjects = {name: Subject(name, config, device) for name in shuffled(number, VARIANTS)}
        calls = {variant: subjects[variant].time for variant in VARIANTS}
        steps = interleave(calls, config.warmup + config.steps, order=shuffled)
        reference = subjects[NEVER].gradients()
        for variant in VARIANTS:
            times[variant].append(statistics.median(steps[variant][config.warmup :]))
            pairs = zip(subjects[variant].gradients(), reference, strict=True)
            apart[variant] = max(apart[variant], *((a - b).abs().max().item() for a, b in pairs))
        pace()
    return times, apart


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


headline = headline_from(
    "Cost of instruments: one layer of tiny, {vocab} words, batch {batch} × context {context}, forward and backward, "
    "{timed:,} steps of each, {device_name}, torch {torch}",
    timed=lambda records: records[0].config["rounds"] * records[0].config["steps"],
)


def findings(records: Sequence[Record]) -> list[str]:
    """What is off, beside what the same model differs from itself by."""
    floor = records[0].metrics["noise_floor_pct"]
    costs = [
        f"{r.variant} {r.metrics['cost_pct']:+.2f} %{_tie(r)}" for r in records if r.variant.endswith("off again")
    ]
    return [
        f"Once taken off: {', '.join(costs)}; a model that never had one differs from another one by {floor:.2f} %."
    ]


def draw(records: Sequence[Record], path: Path) -> None:
    """The cost of each variant with its interval, between the ends of the noise floor."""
    panels = []
    for state in ("off", "on"):
        rows = [r for r in records if r.variant != NEVER and r.variant.endswith(" on") == (state == "on")]
        floor, ends = rows[0].metrics["noise_floor_pct"], [-0.5, len(rows) - 0.5]
        cost, low, high = ([r.metrics[f"cost_{name}pct"] for r in rows] for name in ENDS)
        band = [Series("noise floor", ends, [edge, edge], line="--") for edge in (-floor, floor)]
        series = [Series("cost", range(len(rows)), cost, low, high), *band]
        names = [(place, r.variant.replace(" ", "\n", 1)) for place, r in enumerate(rows)]
        label = "longer than never attached (%)"
        panels.append(Panel(state, "", label, series, log_x=None, from_zero=False, x_ticks=names))
    lines(path, panels, title=headline(records))


VIEW = View(
    columns=[
        Column("variant", "instrument"),
        Column("metrics.step_p20_ms", "step p20 ms", ".3f"),
        Column("metrics.step_p50_ms", "p50", ".3f"),
        Column("metrics.step_p80_ms", "p80", ".3f"),
        Column("metrics.cost_pct", "cost %", "+.2f", note=_tie),
        Column("metrics.cost_low_pct", "from (95 %)", "+.2f"),
        Column("metrics.cost_high_pct", "to", "+.2f"),
        Column("metrics.noise_floor_pct", "noise %", ".2f"),
        Column("metrics.max_abs_grad_diff", "max |Δgrad|", ".0e"),
    ],
    headline=headline,
    terminal=(
        *("variant", "step_p50_ms", "cost_pct", "cost_low_pct", "cost_high_pct", "noise_floor_pct"),
        "max_abs_grad_diff",
    ),
    pictures={"cost.png": draw},
    findings=findings,
    reading="Cost is the ratio to the model that never had an instrument in the same round, less one: its median over "
    "rounds, with the 95 % bootstrap interval. The noise floor is the farthest end of that interval for a twin "
    "that never had an instrument either: a cost below it cannot be seen. The cost of instruments that are on is "
    "paid only "
    "while they are on; the lab's timings are taken with everything off. Gradients are compared bit by bit.",
    prediction="None is needed when off: the same functions run, which a test compares one by one.",
)

EXPERIMENT = Experiment(
    CostConfig, measure, VIEW,
    presets={"quick": {"rounds": 40, "steps": 10}, "smoke": {"rounds": 5, "steps": 1, "warmup": 0}},
)
