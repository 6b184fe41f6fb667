"""What is the bubble of a pipeline, simulated and measured?

    distlab run pipeline_schedules --nproc 2
    distlab run pipeline_schedules --nproc 2 --size medium --dtype bf16 --micro-batches 4 16

All ranks are the stages of one model. A row is a schedule, ours or torch's, with a number of
micro-batches. Every action of ours is timed by itself, without its waiting: from these durations
and the schedule's list the step is simulated, and compared with the measured one. A micro-batch has
the same size in every row.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from distlab.bench.reference import (
    other_parameters,
    parameter_differences,
    rows_that_ran_eager,
    small,
)
from distlab.bench.step_timing import time_rounds
from distlab.bench.trial import Trial
from distlab.bench.variant import BenchOptions, Variant, require_memory
from distlab.comm import collectives
from distlab.experiment import (
    Column,
    Experiment,
    Metrics,
    RankContext,
    Record,
    Records,
    Run,
    TimingOptions,
    View,
    headline_from,
    option,
)
from distlab.measure.clock import Instant, elapsed_ms, instant, synchronize
from distlab.parallel import Layout, get_strategy
from distlab.parallel.schedules import CHUNKS, SCHEDULES, Action, held, idle_share, simulate
from distlab.report import (
    NOISE,
    PEAK,
    prediction_error,
    ratio_column,
    ratio_metrics,
    sparse_column,
    step_bars,
)

OURS = get_strategy("local")  # one rank has each stage
TORCHS = replace(OURS, is_peer=True)  # the layouts of a peer are torch's own
# The median of three leaves one disturbed step out.
REPEATS = 3  # steps whose actions are timed
OFF = prediction_error("simulated_ms", "forward_backward_p50_ms", "error %", "+.1f")


@dataclass(frozen=True)
class SchedulesConfig(BenchOptions, TimingOptions):
    """Options of the experiment. Raises ValueError for a value that is not allowed."""

    batch: int = option(1, "sequences of a micro-batch", minimum=1)
    micro_batches: tuple[int, ...] = option(
        (4, 8), "micro-batches of a step, one or several (a row each)", minimum=1, kind=int
    )
    check_steps: int = option(2, "steps of the comparison with one process, 0 for none", minimum=0)

    def rows(self, ranks: int) -> list[Variant]:
        """Return a row for each schedule with each number of micro-batches, ours and torch's."""
        rows = []
        for count in self.micro_batches:
            for schedule in SCHEDULES:
                # `batch` of a trial is per rank, and all ranks together have one step's
                # micro-batches.
                options = replace(self, batch=-(-self.batch * count // ranks))
                layout = Layout(pipeline=ranks, schedule=schedule)
                for strategy in (OURS, TORCHS):
                    name = f"{schedule} × {count}"
                    if strategy.is_peer:
                        name += " (torch)"
                    rows.append(
                        Variant(name, strategy, options=options, layout=layout, micro_batches=count)
                    )
        return rows


def measure(config: SchedulesConfig, context: RankContext, run: Run) -> None:
    """Measure every row; call it on every rank.

    Raises:
        ValueError: micro-batches that a schedule does not take, or that ranks cannot share.
        MemoryError: the model with this batch does not fit.
    """
    ranks = context.world_size
    if ranks < 2 or any(config.batch * count % ranks for count in config.micro_batches):
        raise ValueError(
            f"pipeline_schedules: {ranks} ranks, micro-batches {config.micro_batches}: give two "
            "ranks or more, and numbers that they divide"
        )
    rows = config.rows(ranks)
    require_memory(config, rows, context)
    # Every schedule can divide this number of layers.
    task = small(num_layers=ranks * max(CHUNKS.values()), d_model=64, d_ff=128)
    # Each schedule once, ours and torch's. More micro-batches take the same paths.
    checked = rows[: 2 * len(SCHEDULES)]
    differences = parameter_differences(context, checked, config.check_steps, run.progress, task)
    seen = {}  # row → durations of each of a rank's actions, in ms

    def watch(row: Variant, attached: Trial) -> None:
        # torch's schedules have no hook around their actions.
        if row.strategy is OURS and row.name not in seen:
            # In steps of their own, so that the timed ones are not observed.
            seen[row.name] = [timed_actions(attached, context) for _ in range(REPEATS)]

    timings = time_rounds(
        config,
        rows,
        context,
        rounds=config.rounds,
        warmup=config.warmup,
        steps=config.steps,
        progress=run.progress,
        inspect=watch,
    )
    facts = config.facts(context)
    for row in rows:
        metrics = timings[row.name].metrics()
        if not timings[row.name].out_of_memory:
            metrics["max_abs_param_diff"] = differences.get(row.name)
            if row.strategy is OURS:
                # Every rank timed its own actions, and the simulation needs those of all.
                of_all_ranks = collectives.gather_objects(seen[row.name], context.group)
                metrics |= bubble(row, of_all_ranks, metrics["forward_backward_p50_ms"])
        own_facts = {
            "schedule": row.layout.schedule,
            "micro_batches": row.micro_batches,
            "batch": config.batch,  # the facts have that of a rank
            "owner": "torch" if row.strategy.is_peer else "ours",
        }
        run.add(row.name, metrics, **facts | own_facts)


def timed_actions(attached: Trial, context: RankContext) -> dict[Action, float]:
    """Return ms of each action of this rank in one step, without its waiting."""
    moments: dict[Action, tuple[Instant, Instant]] = {}
    pipeline = attached.model.pipeline
    # The pipeline calls `observe` around each action's computation, after its input has arrived.
    unobserved, pipeline.observe = pipeline.observe, partial(observed, moments, context.device)
    try:
        attached()
    finally:
        pipeline.observe = unobserved
    # The instants of a GPU are events, and can be read only once they have passed.
    synchronize(context.device)
    return {action: elapsed_ms(begin, end) for action, (begin, end) in moments.items()}


@contextmanager
def observed(
    moments: dict[Action, tuple[Instant, Instant]], device: torch.device, action: Action
) -> Iterator[None]:
    """Note when an action's computation begins and ends."""
    # On a GPU an instant is an event in the stream, so the host does not wait here.
    begin = instant(device)
    yield
    moments[action] = begin, instant(device)


def bubble(
    row: Variant, seen: Sequence[Sequence[Mapping[Action, float]]], window_ms: float
) -> Metrics:
    """Return the idle share of a schedule: in closed form, simulated from durations, and measured.

    Args:
        row: row of the table.
        seen: ms of each action, for each rank and each of some steps.
        window_ms: ms of forward and backward on the slowest rank, as timed.
    """
    durations: dict[Action, float] = {}
    for steps in seen:
        for action in steps[0]:
            # Each action has its own median, because each step may disturb another one.
            durations[action] = median(step[action] for step in steps)
    ranks, count = len(seen), row.micro_batches
    schedule = SCHEDULES[row.layout.schedule](ranks, count)
    timeline = simulate(schedule, durations.__getitem__)
    # Mean over ranks of the time that actions take. What is left of the window is idle.
    busy = sum(durations.values()) / ranks
    chunks = CHUNKS.get(row.layout.schedule, 1)
    idle = closed_form(row.layout.schedule, ranks, count, chunks, durations)
    return {
        "closed_form_idle_pct": 100 * idle,
        "simulated_idle_pct": 100 * idle_share(timeline),
        "idle_pct": 100 * (1 - busy / window_ms),
        # The slowest rank ends the step.
        "simulated_ms": max(steps[-1].end for steps in timeline),
        # A rank with v stages holds a v-th of its blocks for each.
        "held": max(map(held, schedule)) / chunks,
    }


def closed_form(
    name: str, ranks: int, count: int, chunks: int, durations: Mapping[Action, float]
) -> float:
    """Return the idle share if every stage takes the same time: (p − 1)/(v·m + p − 1).

    That of ZB-H1 follows from F, B and W.
    """
    if name != "zero-bubble":
        return (ranks - 1) / (chunks * count + ranks - 1)
    mean = {
        kind: median(ms for action, ms in durations.items() if action.kind == kind)
        # Actions of one kind are taken to last equally long, as the closed form assumes.
        for kind in "FBW"
    }
    # ZB-H1, see `distlab.parallel.schedules`: W fills a part of the bubble of 1F1B.
    idle = (ranks - 1) * (mean["F"] + mean["B"] - mean["W"])
    return idle / (count * sum(mean.values()) + idle)


def compare(records: Records) -> list[Record]:
    """Return the rows, ours compared with torch's of the same schedule and micro-batches."""
    of_torch = {}
    for record in records:
        if record.config["owner"] == "torch":
            of_torch.setdefault(_schedule_of(record), record)
    found = []
    for record in records:
        base = of_torch.get(_schedule_of(record))
        if record is not base:
            record = record.with_metrics(ratio_metrics("vs_torch", record, base))
        found.append(record)
    return found


def _schedule_of(record: Record) -> tuple[str, int]:
    """Return the schedule and the number of micro-batches of a row."""
    return record.config["schedule"], record.config["micro_batches"]


VIEW = View(
    columns=[
        Column("variant", "schedule × micro-batches"),
        Column("metrics.step_p50_ms", "step ms", ".1f"),
        NOISE,
        Column("metrics.forward_backward_p50_ms", "fwd+bwd ms", ".1f"),
        sparse_column("metrics.simulated_ms", "simulated ms", ".1f"),
        OFF,
        sparse_column("metrics.idle_pct", "idle %", ".1f"),
        sparse_column("metrics.simulated_idle_pct", "simulated %", ".1f"),
        sparse_column("metrics.closed_form_idle_pct", "closed form %", ".1f"),
        sparse_column("metrics.held", "micro-batches held", ".1f"),
        PEAK,
        ratio_column("vs_torch", "÷ torch's", missing=""),
        sparse_column("metrics.max_abs_param_diff", "parameter error", ".1e"),
    ],
    pictures={"step.png": step_bars("forward_backward", "optimizer")},
    headline=headline_from(
        "Pipelines: {size} ({num_parameters:M} parameters), micro-batches of {batch} × context "
        "{context}, {dtype}, {world_size} × {device_name} ({backend}), torch {torch}"
    ),
    derive=compare,
    terminal=(
        "variant",
        "step_p50_ms",
        "noise_pct",
        "simulated_ms",
        "idle_pct",
        "simulated_idle_pct",
        "vs_torch",
    ),
    reading="Idle is the part of forward and backward, of the slowest rank, that the ranks' "
    "actions do not fill, on average over ranks; an action is timed on its rank's own clock, from "
    "when its input is there. Simulated is the same for the schedule's list, with each action "
    "taking its measured time and messages none. The closed form assumes stages that take equally "
    "long. Held is the largest number of micro-batches whose activations are on a rank, in units "
    "of a whole stage.",
    prediction="Simulated from the durations of single actions "
    "(distlab.parallel.schedules.simulate), not from steps.",
)


def wrong_rows(records: Records) -> list[str]:
    """Name rows that measured eager code, or that differ from one process."""
    return [*rows_that_ran_eager(records), *other_parameters(records)]


QUICK = {
    "size": "tiny",
    "layers": 8,
    "dtype": "fp32",
    "warmup": 1,
    "steps": 5,
    "rounds": 1,
    "micro_batches": (4,),
}
EXPERIMENT = Experiment(
    SchedulesConfig,
    measure,
    VIEW,
    presets={
        "gpu": {
            "size": "medium",
            "dtype": "bf16",
            "context": 2048,
            "batch": 2,
            "micro_batches": (4, 8, 16),
            "warmup": 3,
            "steps": 6,
            "rounds": 3,
        },
        "cpu": {"size": "tiny", "layers": 8, "context": 128, "batch": 2, "rounds": 3, "steps": 4},
        "quick": QUICK,
        "smoke": QUICK | {"d_model": 32, "d_ff": 64, "heads": 2, "vocab": 64, "context": 16},
    },
    ranks="many",
    wrong=wrong_rows,
)
