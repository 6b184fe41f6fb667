"""Rows of `ddp_bench` while they are measured: checked against one process, timed, explained.

`measure` in `__init__.py` calls `check_rows`, `time_rows` and `explain_rows` in this order. Before
them, `wrapper_trial.py` has tried and checked the user's wrappers. Each fills in its part of every
`Row`, and `save` writes what is known so far into the run's folder.
Numbers that compare rows with each other are in `comparison.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distlab.bench.reference import parameter_differences
from distlab.bench.step_timing import Timing, profile, time_rounds
from distlab.bench.task import Task
from distlab.bench.trial import Trial
from distlab.bench.variant import Variant
from distlab.check import check
from distlab.cli_errors import how_to_continue
from distlab.comm import RankContext, collectives
from distlab.comm.rank_process import on_main
from distlab.comm.subgroups import hybrid_mesh
from distlab.experiment import Metrics, Record, Run
from distlab.measure import CollectiveRecorder, account, explain, lanes, load_trace
from distlab.measure.trace.account import nearest_step, phase_starts
from distlab.parallel import Strategy
from distlab.report import timeline
from distlab.theory.axes import layout_volume
from distlab.theory.memory.activations import precision_of
from distlab.train.memory_budget import rank_parts
from distlab.train.run import speed
from experiments._own_model import own_facts
from experiments.ddp_bench.comparison import FAILED, REFUSED, RIGHT, WRONG, headline

if TYPE_CHECKING:
    from experiments.ddp_bench import DDPBenchConfig

EXPLAINED_S = 20.0  # time that explaining may always take, however short the rounds were
# Smallest number of traced steps on a CPU, where one step may take twice as long as the next. The
# one nearest to the untraced median is drawn.
TRACED_ON_CPU = 5


@dataclass
class Row:
    """One variant, and what the run has found out about it so far.

    Attributes:
        variant: strategy with its settings.
        refusal: reason why the strategy cannot train the user's model.
        verdict: `verdict` and `verdict_detail`, see `verdict_on`.
        difference: largest difference of a parameter from training in one process.
        sent: collectives and bytes of a step, counted and predicted.
        timing: samples of its steps.
        traced: metrics from the profiler's trace.
        record: row in the run's folder.
    """

    variant: Variant
    refusal: str | None = None
    verdict: Mapping[str, str] = field(default_factory=dict)
    difference: float | None = None
    sent: Metrics | None = None
    timing: Timing | None = None
    traced: Metrics = field(default_factory=dict)
    record: Record | None = None

    @property
    def name(self) -> str:
        """Name of the row in the table."""
        return self.variant.name

    @property
    def is_timed(self) -> bool:
        """True if there are samples of its steps."""
        return self.timing is not None and not self.timing.out_of_memory

    def metrics(self, config: DDPBenchConfig, context: RankContext) -> Metrics:
        """Return the numbers of the row that need no other row."""
        # These rows have words instead of times, and nothing else is known of them.
        if self.refusal is not None:
            return {"step_p50_ms": REFUSED, "refusal": self.refusal}
        if self.verdict.get("verdict") == FAILED:
            return {"step_p50_ms": FAILED, **self.verdict}
        metrics = self.timing.metrics()
        # Nothing but the memory of the failed attempt is known.
        if self.timing.out_of_memory:
            return metrics
        # `--batch` is per rank, also where ranks share a model: a group of them then takes its
        # sequences together. So the speed of all rows is that of the same number of sequences.
        batch = config.batch * context.world_size
        if config.factory is None:
            metrics |= speed(config, batch, context, metrics["step_p50_ms"])
        else:  # the operations and tokens of a user's model are not known
            metrics["examples_per_s"] = 1e3 * batch / metrics["step_p50_ms"]
        metrics |= self.sent
        # The table needs the columns from the first round on, and traces come last.
        metrics |= {"comm_ms": None, "overlap_pct": None}  # until there is a trace
        metrics["max_abs_param_diff"] = self.difference
        return metrics | self.verdict | self.traced


def save(rows: Sequence[Row], config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Write what is known of the rows into the run's folder."""
    for row in rows:
        metrics = row.metrics(config, context)
        # The same row again, with more of it known. Saving after each round keeps what was measured
        # if the run is stopped.
        if row.record is not None:
            row.record = run.replace(row.record, metrics)
            continue
        # A strategy without buckets ignores the option, and its row must not name a size.
        has_buckets = row.timing is not None and row.variant.strategy.has_buckets
        row.record = run.add(
            row.name,
            metrics,
            **config.facts(context),
            **own_facts(config.factory),
            bucket_size_mb=row.variant.bucket_size_mb if has_buckets else None,
        )
    run.save()


def check_rows(rows: Sequence[Row], config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Compare every row that communicates with training in one process.

    The lab's strategies train the tiny preset with SGD in fp32, and a number says how far apart
    parameters are. Under a user's model they are judged as by `distlab check`. A user's wrappers
    have their verdicts already, see `wrapper_trial.py`.
    """
    # A row that never communicates trains each rank alone, so it differs from one process on
    # purpose.
    ours = []
    for row in rows:
        if row.variant.strategy.synchronizes and row.name not in config.wraps:
            ours.append(row)
    if config.factory is not None:
        # One rank has nothing to be compared with, and `--check-steps 0` turns the check off.
        for row in ours if is_checked(config, context) else ():
            run.progress(f"checking {row.name} against one process")
            row.verdict = verdict_on(context, row.variant.strategy, config.task())
        return
    # The check trains a small model of its own, so its cost does not depend on the model of the
    # run.
    differences = parameter_differences(
        context, [row.variant for row in ours], config.check_steps, run.progress
    )
    for row in ours:
        row.difference = differences.get(row.name)


def is_checked(config: DDPBenchConfig, context: RankContext) -> bool:
    """Return whether rows are compared with one process. One rank has no other to differ from."""
    return config.check_steps > 0 and context.world_size > 1


def verdict_on(context: RankContext, strategy: Strategy, task: Task) -> dict[str, str]:
    """Compare two steps with one process as `distlab check` does, with one backward per step.

    Returns:
        `verdict`, for a column: `right`, `WRONG` or `failed`; and `verdict_detail`, a sentence.
        Empty where there is not enough memory for the comparison.
    """
    try:
        # Some check may not fit next to what is allocated. All ranks learn of it together.
        found = collectives.if_it_fits(
            lambda: check(context, task, strategy, micro_batches=1), context.device, context.group
        )
    except ValueError as error:  # a sentence, the same on every rank
        return {"verdict": FAILED, "verdict_detail": str(error)}
    if found is None:
        return {}
    if found.right:
        return {"verdict": RIGHT}
    # A tensor may have several findings, and it is counted once.
    wrong = len({finding.tensor for finding in found.findings})
    signatures = ", ".join(dict.fromkeys(finding.signature for finding in found.findings))
    detail = f"{wrong} of {found.tensors} tensors differ from one process ({signatures})"
    return {"verdict": WRONG, "verdict_detail": detail}


def time_rows(rows: Sequence[Row], config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Time all rows in interleaved rounds, count what each sends, and save them after each round.

    Raises:
        MemoryError: no row fits.
    """
    by_name = {row.name: row for row in rows}

    def count(variant: Variant, trial: Trial) -> None:
        row = by_name[variant.name]
        # `time_rounds` calls this after each block of timed steps.
        if row.sent is None:
            # Every step sends the same, so one count, in the first round, is enough.
            row.sent = sent(config, context, variant, trial.record_collectives())

    def end_round(timings: Mapping[str, Timing]) -> None:
        # If some rows fit, those that do not are shown as OOM.
        if all(timing.out_of_memory for timing in timings.values()):
            raise MemoryError(
                f"{config.factory or config.size} with batch {config.batch} in {config.dtype} does "
                f"not fit in the memory of {context.device} on rank {context.rank}: pass a smaller "
                "--batch, --context or --size"
            )
        for row in rows:
            row.timing = timings[row.name]
        save(rows, config, context, run)
        # A row that ran out of memory has no samples, so the largest number is that of the others.
        samples = max(len(timing.phases["step"]) for timing in timings.values())
        how_to_continue(f"{samples} steps of each row, and not explained: {', '.join(by_name)}")

    time_rounds(
        config,
        [row.variant for row in rows],
        context,
        rounds=config.rounds,
        warmup=config.warmup,
        steps=config.steps,
        progress=run.progress,
        inspect=count,
        ended=end_round,
    )


def sent(
    config: DDPBenchConfig, context: RankContext, variant: Variant, recorder: CollectiveRecorder
) -> Metrics:
    """Return collectives and bytes of one step, counted, and those of the closed form."""
    counted = {"collectives_per_step": recorder.count, "comm_bytes_per_step": recorder.total_bytes}
    if config.factory is not None or variant.name in config.wraps:  # no closed form
        should_send = variant.strategy.synchronizes and context.world_size > 1
        # None, and not False, keeps the column empty for rows that did send.
        return counted | {"sent_nothing": (recorder.count == 0 and should_send) or None}
    layout = variant.layout
    model = config.model()
    # Stages of a pipeline and shards of a head send different amounts. Only rank 0 is recorded.
    part = rank_parts(model, layout, config.checkpointing, variant.micro_batches)[0]
    shard_size = variant.shard_size
    # Without --shard-size the mesh takes the ranks of a host as a group.
    if variant.strategy.takes_mesh:
        shard_size = hybrid_mesh(context.group, shard_size).size(1)
    # Bytes must agree exactly. The closed form knows nothing of the implementation.
    expected = layout_volume(
        variant.strategy,
        part.shape,
        # The ranks that share a model compute one batch together, in micro-batches one after the
        # other.
        batch=config.batch * layout.ranks // variant.micro_batches,
        context=model.context_length,
        world_size=context.world_size,
        sharing=layout.context,
        how=layout.attention,
        precision=precision_of(config.dtype, casts_parameters=variant.strategy.casts_parameters),
        bucket_size_mb=variant.bucket_size_mb,
        shard_size=shard_size,
        micro_batches=variant.micro_batches,
        pipeline=layout.pipeline,
        keeps=part.keeps,
    )
    # This strategy or layout has no closed form.
    if expected is None:
        return counted | {
            "predicted_collectives_per_step": None,
            "predicted_comm_bytes_per_step": None,
            "volume_as_predicted": None,
        }
    expected_count: int | None = expected.collectives
    if variant.strategy.is_peer and config.compile != "off":
        # torch DDP makes its buckets in the order in which gradients come, and compiled blocks give
        # theirs in another.
        expected_count = None
    is_as_predicted = recorder.total_bytes == expected.bytes
    if expected_count is not None:
        is_as_predicted = is_as_predicted and recorder.count == expected_count
    return counted | {
        "predicted_collectives_per_step": expected_count,
        "predicted_comm_bytes_per_step": expected.bytes,
        "volume_as_predicted": is_as_predicted,
    }


def explain_rows(
    rows: Sequence[Row], config: DDPBenchConfig, context: RankContext, run: Run, took_s: float
) -> None:
    """Explain rows by their traces, for at most the time that it took to measure them.

    `local` comes first, then the fastest.

    Args:
        took_s: seconds that the timing took.

    Raises:
        ValueError: a trace failed. The message says for which rows it is missing.
    """
    if config.profile_steps == 0:
        return
    begin = time.monotonic()
    steps = config.profile_steps
    # On a CPU one step varies too much to be taken alone.
    if context.device.type == "cpu":
        steps = max(steps, TRACED_ON_CPU)
    left = [row for row in rows if row.is_timed]
    # `local` first, because the others' overheads are explained by comparison with it.
    # The fastest rows next, since they decide what the run says, and there may not be time for all.
    left.sort(key=lambda row: (row.name != "local", row.record.metrics["step_p50_ms"]))
    picture = StepPicture()
    local = None  # account of the step without communication

    # Explaining may take as long as measuring did, and at least 20 s: short runs would explain
    # nothing.
    def has_time() -> bool:
        return time.monotonic() - begin < max(took_s, EXPLAINED_S)

    try:
        # Rank 0 decides for all, as tracing a row is a step on every rank.
        while left and on_main(context, has_time):
            row = left[0]
            how_to_continue(f"not explained: {_names(left)}")
            run.progress(f"explaining {row.name}")
            # The file has the rank in its name, because all ranks of a host write into one folder.
            path = run.path / f"trace_{row.name}_rank{context.rank}.json.gz"
            # Collective: every rank traces the step. Each writes and reads its own trace, and the
            # run's rows are those of rank 0.
            if profile(config, row.variant, context, path, steps):
                step_ms = row.record.metrics["step_p50_ms"]
                events = load_trace(path)
                # Not the first or the mean step: the one that took about as long as without the
                # profiler.
                window = nearest_step(events, step_ms)
                seen = account(events, window)
                if row.name == "local":
                    local = seen
                row.traced = {
                    "comm_ms": seen.comm_ms,
                    "overlap_pct": seen.overlap_pct,
                    "exposed_ms": seen.exposed_ms,
                    "exposed_gather_ms": seen.exposed_gather_ms,
                    "traced_step_ms": seen.step_ms,
                }
                if context.device.type == "cuda":
                    # The profiler slows the host and not the device. So busy time is that of the
                    # trace, and the step is the untraced one.
                    busy_ms = seen.step_ms - seen.idle_ms
                    row.traced["gpu_idle_pct"] = 100 * max(0.0, 1 - busy_ms / step_ms)
                # Without a trace of `local` there is nothing that the row could be compared with.
                if local is not None:
                    row.traced |= explain(seen, local)
                label = f"{row.name}\n{step_ms:.0f} ms, traced {seen.step_ms:.0f}"
                picture.lanes[label] = lanes(events, window)
                picture.phases[label] = phase_starts(events, window)
                # Each row is saved at once, since the next trace may fail or be stopped.
                save([row], config, context, run)
            else:
                run.notice(f"not explained: {row.name}, for whose trace no memory is left")
            left.remove(row)
    # The timing is already saved. The error says only for which rows the explanation is missing.
    except Exception as error:
        raise ValueError(
            f"not explained: {_names(left)} ({repr(error)[:99]}); the rest is in {run.path}"
        ) from error
    if left:
        run.notice(
            f"not explained, since that would take longer than measuring did: {_names(left)}"
        )
    if context.is_main and picture.lanes:
        title = f"One step of rank {context.rank} under the profiler: {headline(run.records)}"
        timeline(run.path / "timeline.png", picture.lanes, title=title, phases=picture.phases)


@dataclass
class StepPicture:
    """Content of the timeline: for each label, the lanes of a step and the starts of its phases."""

    lanes: dict = field(default_factory=dict)
    phases: dict = field(default_factory=dict)


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.name for row in rows)
