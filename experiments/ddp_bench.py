"""What does gradient synchronisation cost, and how much is hidden?

    distlab run ddp_bench --quick
    distlab run ddp_bench --nproc 2 --size medium --batch 8 --dtype bf16

Times no communication at all (`local`), the hand-written strategies and torch's DDP in one run, in interleaved rounds
so that clock drift affects all equally, and explains each: what it sent (checked against the closed form), how long
communication ran and how much of that compute covered (from the profiler), and whether its result equals
training in one process.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distlab.bench.reference import other_parameters, parameter_difference
from distlab.bench.task import OwnModel
from distlab.bench.timing import BenchOptions, Timing, Trial, Variant, Workbench, peak_of, variants
from distlab.cli_errors import how_to_continue
from distlab.comm import collectives
from distlab.comm.rank_process import on_main
from distlab.experiment import (
    Column,
    Experiment,
    RankContext,
    Record,
    Run,
    TimingOptions,
    View,
    headline_from,
    option,
)
from distlab.measure import (
    CollectiveRecorder,
    account,
    closes,
    explain,
    is_out_of_memory,
    lanes,
    load_trace,
)
from distlab.parallel import STRATEGIES, Layout, Strategy, check_shard_size, strategies_on
from distlab.precision import DTYPES
from distlab.report import (
    NOISE,
    Ratio,
    fastest,
    is_number,
    noise_by_row,
    noise_of,
    row_of,
    stacked_bars,
    timeline,
    waiting,
)
from distlab.theory.axes import layout_volume
from distlab.theory.flops import mfu, step_flops
from distlab.train.build import check_layout
from distlab.train.memory_budget import rank_parts

OOM, REFUSED = "OOM", "refused"
NOISY_PCT = 10  # of a row, above which no account is expected to close
HOST_BOUND_PCT = 50  # of the step without work on the GPU
EXPLAINED_S = 20.0  # may explaining always take, however short the rounds were
OVERHEAD_PCT = 10  # of a step, above which communication is in the way
CAUSES = {
    "exposed communication": "overhead_exposed_ms",
    "slower compute": "overhead_slowdown_ms",
    "copies": "overhead_copies_ms",
    "idle": "overhead_idle_ms",
}

PARTS = (*CAUSES.values(), "overhead_optimizer_ms")


@dataclass(frozen=True)
class DDPBenchConfig(OwnModel, BenchOptions, TimingOptions):
    """What to run. Raises ValueError for a value that is not allowed; the message says what is."""

    strategies: tuple[str, ...] = option(
        strategies_on("cpu", meshes=False), "what to compare", choices=tuple(STRATEGIES)
    )
    bucket_sizes_mb: tuple[Any, ...] = option(
        (4.0,),
        "MiB per bucket, one or several (a row each); none for unbounded",
        above=0,
        words={"none": None},
        kind=float,
        flag="--bucket-size-mb",
    )
    shard_size: int | None = option(
        None, "ranks that share one model, for hsdp, torch-hsdp and bucketed-two-level [those of a host]", least=1
    )
    layouts: tuple[str, ...] = option(
        (), "rows of ranks that share a model, too: tp2, cp2-ring, pp2, tp2+cp2; each step has the same sequences"
    )
    micro_batches: int = option(4, "parts of a step's batch in rows with a pipeline", least=1)
    check_steps: int = option(2, "steps of the comparison with one process, 0 for none", least=0)
    profile_steps: int = option(1, "steps per trace, of which the median is shown; 0 for none", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shard_size(self.shard_size, self.strategies)
        for layout in self.layouts:
            check_layout(Layout.parse(layout), self.compile, self.micro_batches)
        if self.layouts and self.factory is not None:
            raise ValueError("--layouts: ranks share the lab's Transformer; with --model leave them out")


def measure(config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Measure every variant; each rank writes its traces into the run's folder.

    Raises:
        MemoryError: the model with this batch fits under no strategy.
        ValueError: a strategy that needs a GPU, without one.
    """
    if context.world_size == 1:
        run.notice("one rank: nothing is communicated. For more: --nproc 2")
    rows = variants(
        config.strategies, config.bucket_sizes_mb, config.shard_size, config.layouts, config.micro_batches
    )
    bench = config.workbench(context, rows)
    facts = config.facts(context)
    refused = config.refusals(context, rows)
    for name, reason in refused.items():
        run.progress(f"{name} is left out: {reason}")
    rows = [row for row in rows if row.name not in refused]
    task = None if config.factory is None else config.task()
    differences = {}
    for variant in rows if config.check_steps else []:
        if variant.strategy.synchronizes:
            run.progress(f"checking {variant.name} against one process")
            compare = partial(parameter_difference, context, variant, steps=config.check_steps, task=task)
            differences[variant.name] = collectives.if_it_fits(compare, context.device, context.group)
    run.progress(f"building {config.factory or config.size}: {facts['num_parameters'] / 1e6:,.1f} M parameters")
    counted, noted = {}, {}  # row → what it sends, and its record

    def count(variant: Variant, attached: Trial) -> None:
        if variant.name not in counted:
            counted[variant.name] = sent(bench, variant, attached.record_collectives())

    def note(timings: Mapping[str, Timing]) -> None:
        """Save the rows, with the times of complete rounds."""
        if all(timing.out_of_memory for timing in timings.values()):
            raise torch.OutOfMemoryError
        for variant in rows:
            name, timing = variant.name, timings[variant.name]
            metrics = timing.metrics()
            if not timing.out_of_memory:
                metrics |= _rates(config, context, metrics["step_p50_ms"]) | counted[name]
                metrics |= dict.fromkeys(("comm_ms", "overlap_pct"))
                metrics["max_abs_param_diff"] = differences.get(name)
            size = variant.bucket_size_mb if variant.strategy.has_buckets else None
            noted[name] = noted.get(name) or run.add(name, metrics, **facts, bucket_size_mb=size)
            noted[name].metrics.clear()
            noted[name].metrics.update(metrics)
        run.save()
        samples = max(len(timing.phases["step"]) for timing in timings.values())
        how_to_continue(f"{samples} steps of each row, and not explained: {', '.join(noted)}")

    begin = time.monotonic()
    try:
        bench.time_rounds(
            rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=run.progress, inspect=count,
            ended=note,
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"{config.factory or config.size} with batch {config.batch} in {config.dtype} does not fit in the memory "
            f"of {context.device} on rank {context.rank}: pass a smaller --batch, --context or --size"
        ) from error
    took_s = time.monotonic() - begin
    for name, reason in refused.items():
        run.add(name, {"step_p50_ms": REFUSED, "refusal": reason}, **facts, bucket_size_mb=None)
    on_main(context, run.show)
    timed = {row.name: row for row in rows if "step_samples_ms" in noted[row.name].metrics}
    explain_rows(config, bench, timed, noted, run, took_s)


def explain_rows(
    config: DDPBenchConfig,
    bench: Workbench,
    rows: Mapping[str, Variant],
    noted: Mapping[str, Record],
    run: Run,
    took_s: float,
) -> None:
    """Say of rows what their traces show, for as long as it took to measure them: `local`, then the fastest first.

    Raises:
        ValueError: that failed; the message says of which rows it is missing.
    """
    if config.profile_steps == 0:
        return
    context, begin = bench.context, time.monotonic()
    accounts, drawn = {}, {}  # row → account and picture of its trace
    left = sorted(rows, key=lambda name: (name != "local", noted[name].metrics["step_p50_ms"]))
    try:
        while left and on_main(context, lambda: time.monotonic() - begin < max(took_s, EXPLAINED_S)):
            how_to_continue(f"not explained: {', '.join(left)}")
            name, metrics = left[0], noted[left[0]].metrics
            run.progress(f"explaining {name}")
            path = run.path / f"trace_{name}_rank{context.rank}.json.gz"
            if bench.profile(rows[name], path, config.profile_steps):
                events = load_trace(path)
                seen = accounts[name] = account(events)
                drawn[name] = lanes(events)
                metrics.update(comm_ms=seen.comm_ms, overlap_pct=seen.overlap_pct, exposed_ms=seen.exposed_ms)
                if context.device.type == "cuda":
                    busy_ms = seen.step_ms - seen.idle_ms
                    metrics["gpu_idle_pct"] = 100 * max(0.0, 1 - busy_ms / metrics["step_p50_ms"])
                if "local" in accounts:
                    metrics.update(explain(seen, accounts["local"]))
                run.save()
            else:
                run.notice(f"not explained: {name}, for whose trace no memory is left")
            left.remove(name)
    except Exception as error:
        raise ValueError(f"not explained: {', '.join(left)} ({repr(error)[:99]}); the rest is in {run.path}") from error
    if left:
        run.notice(f"not explained, since that would take longer than measuring did: {', '.join(left)}")
    if context.is_main and drawn:
        title = f"One step of rank {context.rank} under the profiler: {headline(run.records)}"
        timeline(run.path / "timeline.png", drawn, title=title)


def _rates(config: DDPBenchConfig, context: RankContext, step_ms: float) -> dict[str, float | None]:
    if config.factory is not None:  # whose operations and tokens nobody counts
        return {"examples_per_s": config.batch * context.world_size / (step_ms / 1e3)}
    model = config.model()
    share = mfu(step_flops(**model.sizes(config.batch)), step_ms / 1e3, peak_of(context.device, config.dtype))
    tokens = config.batch * model.context_length * context.world_size
    return {"tokens_per_s": tokens / (step_ms / 1e3), "mfu_pct": None if share is None else 100 * share}


def sent(bench: Workbench, variant: Variant, recorder: CollectiveRecorder) -> dict[str, int | bool | None]:
    """Collectives and bytes of one step, counted, beside the closed form."""
    counted = {"collectives_per_step": recorder.count, "comm_bytes_per_step": recorder.total_bytes}
    if bench.options.factory is not None:
        silent = recorder.count == 0 and variant.strategy.synchronizes and bench.context.world_size > 1
        return counted | {"sent_nothing": silent or None}
    layout, itemsize = variant.layout, (DTYPES[bench.options.dtype] or torch.float32).itemsize
    model = bench.options.model()
    part = rank_parts(model, layout, bench.options.checkpointing, variant.micro_batches)[0]  # rank 0's
    expected = layout_volume(
        variant.strategy,
        part.shape,
        batch=bench.options.batch * layout.ranks // variant.micro_batches,
        context=model.context_length,
        world_size=bench.context.world_size,
        sharing=layout.context,
        how=layout.attention,
        itemsize=itemsize,
        casts_parameters=variant.strategy.casts_parameters,
        bucket_size_mb=variant.bucket_size_mb,
        shard_size=variant.shard_size,
        micro_batches=variant.micro_batches,
        pipeline=layout.pipeline,
        keeps=part.keeps,
    )
    said = dict(zip(counted, (expected.collectives, expected.bytes) if expected else (None, None), strict=True))
    predicted = {f"predicted_{name}": value for name, value in said.items()}
    return counted | predicted | {"volume_as_predicted": expected and counted == said}


def strategy_of(row: str) -> Strategy | None:
    """Find the strategy of a row, whose name a bucket size may follow; None of a record whose strategy is gone."""
    names = [name for name in STRATEGIES if f"{row}-".startswith(f"{name}-")]
    return STRATEGIES.get(max(names, key=len, default=None))


LOCAL = row_of("local")
TORCH = fastest("step_p50_ms", lambda r: (s := strategy_of(r.variant)) and s.is_peer and s.updates == "all")
OVER_LOCAL = Ratio("vs_local", LOCAL)
OVER_TORCH = Ratio("vs_torch_ddp", TORCH)


def compare(records: Sequence[Record]) -> None:
    """Hold the rows that ran and are right against `local` and torch DDP's fastest, and say what of the overhead their
    traces leave open.
    """
    sound = [record for record in records if not wrong_rows([record])]
    for ratio in (OVER_LOCAL, OVER_TORCH):
        ratio.add(sound)
    local = LOCAL(sound)
    for metrics in (record.metrics for record in sound if local and "vs_local" in record.metrics):
        metrics["overhead_ms"] = metrics["step_p50_ms"] - local.metrics["step_p50_ms"]
        if "overhead_exposed_ms" in metrics:
            unexplained = metrics["overhead_ms"] - sum(metrics[name] for name in PARTS)
            metrics["overhead_unexplained_ms"] = unexplained
            metrics["overhead_closes"] = closes(unexplained, metrics["step_p50_ms"])


def examples_of(records: Sequence[Record]) -> str:
    """Batch, and context where there is one, in a few words."""
    config = records[0].config
    return f"batch {config.get('batch')}" + (f" × context {c}" if (c := config.get("context")) else "")


headline = headline_from(
    "{size} ({num_parameters:M} parameters), {examples} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}{noise}{waiting}",
    examples=examples_of,
    noise=lambda records: f"; {noise}" if (noise := noise_by_row(records)) else "",
    waiting=lambda records: waiting([r for r in records if r.variant == "local"]),
)


def unexplained_rows(records: Sequence[Record]) -> list[str]:
    """Rows of whose overhead the trace leaves more than 5 % of the step and 1 ms unexplained.

    The account is of steps under the profiler, so a row within its noise is let pass; where the GPU waits for the host
    most of the time, which the headline says, the profiler's own calls decide and no account can close.
    """
    if any((r.metrics.get("gpu_idle_pct") or 0.0) > HOST_BOUND_PCT for r in records if r.variant == "local"):
        return []
    return [
        record.variant
        for record in records
        if record.metrics.get("overhead_closes") is False
        and abs(record.metrics["overhead_unexplained_ms"])
        > (noise_of(record.metrics) or 0.0) / 100 * record.metrics["step_p50_ms"]
    ]


def open_accounts(records: Sequence[Record]) -> list[str]:
    """One line for the rows that are not explained; none on a CPU, or where a row is noisier than 10 %."""
    noisy = any((noise_of(record.metrics) or 0.0) > NOISY_PCT for record in records)
    if noisy or records[0].config.get("backend") == "gloo" or not (rows := unexplained_rows(records)):
        return []
    return [f"(The trace explains the overhead of {', '.join(rows)} only in part; the page says how much is open, "
            "and more --profile-steps, or a machine that does nothing else, may close it.)"]


def wrong_rows(records: Sequence[Record]) -> list[str]:
    """What is wrong with the results, one line each: volumes off the closed form, parameters off the reference."""
    problems = []
    for record in records:
        metrics = record.metrics
        if metrics.get("volume_as_predicted") is False:
            problems.append(
                f"{record.variant}: sent {metrics['collectives_per_step']} collectives, "
                f"{metrics['comm_bytes_per_step']} bytes; the closed form says "
                f"{metrics['predicted_collectives_per_step']} and {metrics['predicted_comm_bytes_per_step']}"
            )
        if metrics.get("sent_nothing"):
            problems.append(
                f"{record.variant}: sent nothing, so no row is compared with it; torch's static_graph DDP does that "
                "where forward returns a type that pytree does not know"
            )
    return problems + other_parameters(records)


def what_communication_costs(records: Sequence[Record]) -> list[str]:
    """Say whether the fastest of our strategies that overlap hides its communication, or what most of the rest is."""
    overlapping = [r for r in ours(records, "overhead_ms") if not strategy_of(r.variant).after_backward]
    if not overlapping:
        return []
    best = min(overlapping, key=lambda r: r.metrics["step_p50_ms"])
    share = 100 * best.metrics["overhead_ms"] / best.metrics["step_p50_ms"]
    hidden = share <= OVERHEAD_PCT or OVER_LOCAL.tie(best)
    causes = {text: ms for text, name in CAUSES.items() if is_number(ms := best.metrics.get(name)) and ms > 0}
    told = best.metrics.get("overhead_closes") and not hidden
    most = max(causes, key=causes.__getitem__, default=None) if told else None
    return [
        f"Communication is {'hidden' if hidden else 'in the way'}: {best.variant}, the fastest of ours that overlaps, "
        f"has {best.metrics['overhead_ms']:.1f} ms overhead, {max(share, 0.0):.0f} % of its step"
        f"{f', most of it {most} ({causes[most]:.1f} ms)' if most else ''}."
    ]


def against_the_peer(records: Sequence[Record]) -> list[str]:
    """Say where the fastest of our strategies stands beside torch DDP's fastest row."""
    compared = ours(records, "vs_torch_ddp")
    if not compared:
        return []
    best = min(compared, key=lambda r: r.metrics["vs_torch_ddp"])
    ratio = best.metrics["vs_torch_ddp"]
    than = f"takes {ratio:.3f} times as long as torch DDP's fastest row"
    return [f"{best.variant}, the fastest of ours, {than}{': a tie' if OVER_TORCH.tie(best) else ''}."]


def ours(records: Sequence[Record], metric: str) -> list[Record]:
    """Select the rows of this lab's strategies, of those that communicate, that have this number."""
    known = [r for r in records if is_number(r.metrics.get(metric))]
    return [r for r in known if (s := strategy_of(r.variant)) and s.synchronizes and not s.is_peer]


def what_it_does(record: Record) -> str | None:
    """Say in a few words what the strategy of a row does."""
    return (strategy := strategy_of(record.variant)) and strategy.does


def draw_step_times(records: Sequence[Record], path: Path) -> None:
    """Stacked bars: compute, optimizer, and the overhead by its causes; whiskers from p20 to p80 of the step.

    A bar ends at the step's median; compute is what local's optimizer leaves of its step. What the rest takes longer is
    divided in the proportions of the trace's account; without one it is a single part, `overhead`.
    """
    local = next((r.metrics for r in records if r.variant == "local" and is_number(r.metrics.get("step_p50_ms"))), None)
    compute_ms = local["step_p50_ms"] - local["optimizer_p50_ms"] if local else None
    names = ["compute", "optimizer", *CAUSES, "overhead"]

    def cells(metrics: Mapping[str, Any]) -> list[float | str | None]:
        if isinstance(metrics["step_p50_ms"], str) or compute_ms is None:
            return [metrics["step_p50_ms"] if isinstance(metrics["step_p50_ms"], str) else None] * len(names)
        longer = metrics["step_p50_ms"] - metrics["optimizer_p50_ms"] - compute_ms
        causes = [max(metrics.get(cause) or 0.0, 0.0) for cause in CAUSES.values()]
        whole = sum(causes)
        parts = [longer * cause / whole for cause in causes] + [0.0] if whole else [0.0] * len(causes) + [longer]
        return [compute_ms, metrics["optimizer_p50_ms"], *parts]

    rows = [cells(record.metrics) for record in records]
    drawn = {name: values for name, values in zip(names, zip(*rows, strict=True), strict=True)
             if name in names[:2] or any(not is_number(value) or value for value in values)}  # fmt: skip
    ends = [[record.metrics.get(f"step_{p}_ms") for p in ("p20", "p80")] for record in records]
    stacked_bars(
        path, [record.variant for record in records],
        drawn,
        title=f"Where a step's time goes: {headline(records)}", unit="ms",
        whiskers=[None if row[0] in (OOM, REFUSED, None) else end for row, end in zip(rows, ends, strict=True)],
    )  # fmt: skip


VIEW = View(
    columns=[
        Column("variant", "strategy"),
        Column("metrics.step_p20_ms", "step p20 ms", ".1f", about="a fifth of the steps took less"),
        Column("metrics.step_p50_ms", "p50 ms", ".1f", about="the median step"),
        Column("metrics.step_p80_ms", "p80 ms", ".1f", about="a fifth of the steps took more"),
        NOISE,
        Column(
            "metrics.forward_backward_p50_ms", "fwd+bwd+sync ms", ".1f",
            about="median of forward, backward and the wait for communication",
        ),
        Column("metrics.optimizer_p50_ms", "optimizer ms", ".1f", about="median of the optimizer's step"),
        Column(
            "metrics.overhead_ms", "overhead ms", ".1f", note=OVER_LOCAL.tie,
            about="what a step takes longer than `local`'s; a tie where the 95 % interval of their ratio contains 1",
        ),
        Column("metrics.comm_ms", "comm ms", ".1f", about="time of all communication in the trace of rank 0"),
        Column("metrics.exposed_ms", "exposed ms", ".1f", about="the part of it that no compute covers"),
        Column("metrics.overlap_pct", "overlap %", ".0f", about="the share of communication that compute covers"),
        Column(
            "metrics.gpu_idle_pct", "GPU idle %", ".0f", optional=True,
            about="the part of an untraced step for which the trace shows no work on the GPU",
        ),
        Column(
            "metrics.collectives_per_step", "calls", "d",
            about="collectives of a step, counted at torch's dispatcher",
        ),
        Column("metrics.comm_bytes_per_step", "sent MB", ",.1f", scale=1e-6, about="handed to them by a rank"),
        Column("metrics.tokens_per_s", "tokens/s", ",.0f", about="of all ranks"),
        Column("metrics.examples_per_s", "examples/s", ",.1f", optional=True, about="of all ranks"),
        Column("metrics.mfu_pct", "MFU %", ".1f", optional=True, about="FLOPs of the model over the device's peak"),
        Column(
            "metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30, optional=True,
            about="most that torch's allocator held",
        ),
        OVER_TORCH.column(
            "÷ torch",
            about="over torch DDP's fastest row, paired step by step; a tie where the 95 % interval contains 1",
        ),
        Column(
            "metrics.max_abs_param_diff", "max |Δparam|", ".1e",
            about="the largest difference of any parameter from training in one process, after a few steps of fp32 SGD "
            "on the tiny preset",
        ),
        Column(
            "metrics.overhead_exposed_ms", "overhead: exposed ms", ".1f", optional=True,
            about="the part of the overhead that is exposed communication",
        ),
        Column(
            "metrics.overhead_slowdown_ms", "overhead: slower compute ms", ".1f", optional=True,
            about="compute that communication slows",
        ),
        Column(
            "metrics.overhead_copies_ms", "overhead: copies ms", ".1f", optional=True,
            about="copies into buckets and out of them",
        ),
        Column(
            "metrics.overhead_optimizer_ms", "overhead: optimizer ms", "+.1f", optional=True,
            about="negative where the optimizer is sharded",
        ),
        Column("metrics.overhead_idle_ms", "overhead: idle ms", "+.1f", optional=True, about="nothing runs"),
        Column(
            "metrics.overhead_unexplained_ms", "overhead: unexplained ms", "+.1f", optional=True,
            about="what of the overhead is in no part of the trace's account",
        ),
        Column("config.does", "what it does", derived=what_it_does, align="left", optional=True),
    ],
    headline=headline,
    derive=compare,
    terminal=(
        *("variant", "step_p50_ms", "noise_pct", "overhead_ms", "peak_alloc_bytes", "vs_torch_ddp", "does"),
    ),
    pictures={"step_time.png": draw_step_times},
    findings=lambda records: [
        *(f"WRONG: {problem}" for problem in wrong_rows(records)),
        *(f"Left out: {record.metrics['refusal']}." for record in records if record.metrics.get("refusal")),
        *what_communication_costs(records),
        *against_the_peer(records),
        *open_accounts(records),
    ],
    reading="Overhead is divided among its causes by the profiler's trace of rank 0. The bars end at the median of the "
    "untraced steps, and divide what a step takes longer than local's in the proportions of that account.\n\n"
    "In the timeline compute is above, communication below; what is exposed is orange.",
    prediction="Collectives and bytes per step in closed form (distlab.theory.volume). Step times are predicted "
    "by `distlab run predict`, before a measurement.",
)

QUICK = {
    "strategies": ("local", "naive", "bucketed", "torch-ddp"),
    "rounds": 2, "steps": 4, "check_steps": 2, "profile_steps": 1,
}  # fmt: skip
EXPERIMENT = Experiment(
    DDPBenchConfig, measure, VIEW,
    presets={
        "gpu": {
            "size": "medium", "dtype": "bf16", "bucket_sizes_mb": (100.0,), "warmup": 3, "steps": 8, "rounds": 3,
            "strategies": strategies_on("cuda", meshes=False),
        },
        # As many parameters and modules as xl has and next to nothing to compute: what a step takes longer than
        # local's is what the strategy costs the host.
        "host": {
            "size": "xl", "d_model": 64, "d_ff": 64, "heads": 2, "vocab": 64, "context": 16, "batch": 1,
            "bucket_sizes_mb": (1.0,), "rounds": 6, "steps": 20, "check_steps": 0, "profile_steps": 0,
            "strategies": strategies_on("cpu"),
        },
        "quick": QUICK,
        "smoke": QUICK | {
            "size": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "vocab": 64, "batch": 1, "context": 16,
            "bucket_sizes_mb": (0.05,), "warmup": 1, "steps": 5, "rounds": 1, "check_steps": 1,
        },
    },
    ranks="many",
    wrong=wrong_rows,
)  # fmt: skip
