"""What does gradient synchronisation cost, and how much is hidden?

    distlab run ddp_bench --quick
    distlab run ddp_bench --nproc 2 --size medium --batch 8 --dtype bf16

Times no communication at all (`local`), the hand-written strategies and torch's DDP in one run, in
interleaved rounds so that clock drift affects all equally, and explains each: what it sent (checked
against the closed form), how long communication ran and how much of that compute covered (from the
profiler), and whether its result equals training in one process.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distlab.bench.reference import parameter_differences, small
from distlab.bench.task import OwnModel, Task, check_name
from distlab.bench.timing import BenchOptions, Timing, Trial, Variant, Workbench, variants
from distlab.bench.wrappers import wrapped_by
from distlab.check import check
from distlab.cli_errors import how_to_continue
from distlab.comm import collectives
from distlab.comm.rank_process import on_main
from distlab.experiment import Experiment, RankContext, Record, Run, TimingOptions, option
from distlab.measure import CollectiveRecorder, account, explain, lanes, load_trace
from distlab.measure.trace.account import nearest_step, phase_starts
from distlab.model.config import PRESETS, ModelConfig
from distlab.parallel import STRATEGIES, Layout, Strategy, check_shard_size, strategies_on
from distlab.precision import DTYPES
from distlab.report import timeline
from distlab.theory.axes import layout_volume
from distlab.train.build import check_layout
from distlab.train.memory_budget import ROOM, memory_of_a_rank, rank_parts
from distlab.train.run import speed
from experiments._own_model import own_facts

from .view import FAILED, REFUSED, RIGHT, VIEW, headline, wrong_rows

EXPLAINED_S = 20.0  # may explaining always take, however short the rounds were
# the Transformer on which a user's wrapper is checked
SMALL = small(num_layers=2, d_model=64, d_ff=128)
TRACED_ON_CPU = 5  # steps at least, of which the one nearest the untraced median is drawn


# Models that `--size auto` may choose, the largest first. On an H100 and on an H200, 8 × 2,048 tokens
# of `medium` with compiled blocks keep the GPU busy for more than 90 % of a step. Larger models do
# that as well, but their run takes longer than two minutes.
# Each with the divisor of --batch: a half of the batch still keeps the GPU busier than a smaller model.
AUTO_CHOICES = (
    ("medium", 1),
    ("medium", 2),
    ("small", 1),
    ("small", 2),
    ("small", 4),
    ("tiny", 1),
    ("tiny", 4),
)


@dataclass(frozen=True)
class DDPBenchConfig(OwnModel, BenchOptions, TimingOptions):
    """Options of the benchmark. Raises ValueError for a value that is not allowed."""

    size: str = option(
        "tiny",
        "model preset (--help all lists them); auto takes medium, or the next smaller one that fits into "
        "the free memory with --batch sequences or fewer",
        choices=("auto", *PRESETS),
    )
    strategies: tuple[str, ...] = option(
        strategies_on("cpu", meshes=False), "strategies to compare", choices=tuple(STRATEGIES)
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
        None,
        "ranks that share one model, for hsdp, torch-hsdp and bucketed-two-level [those of a host]",
        least=1,
    )
    layouts: tuple[str, ...] = option(
        (),
        "layouts of additional rows, in which ranks share a model: tp2, cp2-ring, pp2, tp2+cp2; each step has the "
        "same sequences",
    )
    micro_batches: int = option(4, "parts of a step's batch in rows with a pipeline", least=1)
    wraps: tuple[str, ...] = option(
        (), "your own wrapper, my_code:parallelize, one or several (a row each)", flag="--wrap"
    )
    check_steps: int = option(2, "steps of the comparison with one process, 0 for none", least=0)
    profile_steps: int = option(
        1, "steps per trace, of which the median is shown; 0 for none", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.wraps:
            check_name(name, "--wrap")
        check_shard_size(self.shard_size, self.strategies)
        for layout in map(Layout.parse, self.layouts):
            check_layout(layout, self.compile, self.micro_batches)
            if layout.pipeline > 1 and self.batch * layout.ranks % self.micro_batches:
                raise ValueError(
                    f"--layouts {layout}: {self.batch * layout.ranks} sequences, {self.batch} for each of "
                    f"{layout.ranks} ranks, cannot be split into {self.micro_batches} equal parts; pass another "
                    "--micro-batches"
                )
        if self.layouts and self.factory is not None:
            raise ValueError(
                "--layouts: ranks share the lab's Transformer; with --model leave them out"
            )

    def base(self) -> ModelConfig:
        """Return the preset. Until `sized` has replaced `auto`, it is the smallest possible one."""
        return PRESETS["tiny"] if self.size == "auto" else super().base()


def sized(config: DDPBenchConfig, context: RankContext) -> DDPBenchConfig:
    """Replace `--size auto` by the largest model and batch that fit, and bf16 by fp16 if needed.

    Older GPUs need fp16.

    All ranks agree: the rank with the least free memory decides. If nothing fits, the smallest
    choice is returned, and the run ends with the message of a model that does not fit.
    """
    if config.size != "auto":
        return config
    if config.factory is not None:
        # a model of one's own: the preset's size only fills the field
        return replace(config, size="tiny")
    if config.dtype == "bf16" and not computes_in_bf16(context.device):
        config = replace(config, dtype="fp16")
    free = memory_of_a_rank(context.device, context)
    choices = [
        replace(config, size=size, batch=max(1, config.batch // divisor))
        for size, divisor in AUTO_CHOICES
    ]
    for choice in choices:
        if free is None or peak_bytes(choice, context) <= ROOM * free:
            return choice
    return choices[-1]


def peak_bytes(config: DDPBenchConfig, context: RankContext) -> int:
    """Return the predicted peak memory of the row that needs most, in bytes on each rank."""
    on_gpu = context.device.type == "cuda"
    plans = [config.planned(strategy) for strategy in config.strategies]
    return max(plan.memory(context.world_size, on_gpu=on_gpu).peak.total for plan in plans)


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether the device has instructions for bf16; GPUs before Ampere emulate it slowly."""
    if device.type != "cuda":
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


def measure(config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Measure every variant; each rank writes its traces into the run's folder.

    Raises:
        MemoryError: the model with this batch fits under no strategy.
        ValueError: a strategy that needs a GPU, without one.
    """
    if context.world_size == 1:
        run.notice("one rank: nothing is communicated. For more: --nproc 2")
    rows = variants(
        config.strategies,
        config.bucket_sizes_mb,
        config.shard_size,
        config.layouts,
        config.micro_batches,
    )
    bench = config.workbench(context, rows)
    facts = config.facts(context)
    refused = config.refusals(context, rows)
    for name, reason in refused.items():
        run.progress(f"{name} is left out: {reason}")
    rows = [row for row in rows if row.name not in refused]
    task = None if config.factory is None else config.task()
    wrapped = [Variant(name, wrapped_by(name)) for name in config.wraps]
    verdicts = {}  # row → its verdict, in the fields of a record's metrics
    differences = {}  # row → the largest difference of a parameter from one process
    synchronized = [row for row in rows if row.strategy.synchronizes]
    if config.check_steps and context.world_size > 1:
        checked = wrapped if task is None else [*synchronized, *wrapped]
        for row in checked:
            run.progress(f"checking {row.name} against one process")
            verdicts[row.name] = verdict_on(context, row.strategy, SMALL if task is None else task)
    if task is None:
        differences = parameter_differences(context, synchronized, config.check_steps, run.progress)
    failed = {
        name: found["verdict_detail"]
        for name, found in verdicts.items()
        if found["verdict"] == FAILED
    }
    rows += [row for row in wrapped if row.name not in failed]
    run.progress(
        f"building {config.factory or config.size}: {facts['num_parameters'] / 1e6:,.1f} M parameters"
    )
    begin = time.monotonic()
    noted = time_rows(bench, rows, run, differences, verdicts)
    took_s = time.monotonic() - begin
    for name, reason in refused.items():
        run.add(name, {"step_p50_ms": REFUSED, "refusal": reason}, **facts, bucket_size_mb=None)
    for name in failed:
        run.add(name, {"step_p50_ms": FAILED} | verdicts[name], **facts, bucket_size_mb=None)
    timed = {row.name: row for row in rows if "step_samples_ms" in noted[row.name].metrics}
    try:
        explain_rows(config, bench, timed, noted, run, took_s)
    except BaseException:  # a signal as well
        if context.is_main:
            run.show()  # what was measured, before the error
        raise
    on_main(context, run.show)


def verdict_on(context: RankContext, strategy: Strategy, task: Task) -> dict[str, str]:
    """Compare two steps with one process as `distlab check` does, with one backward per step.

    Returns:
        `verdict`, for a column: `right`, `WRONG` or `failed`; and `verdict_detail`, a sentence.
        Empty where there is not enough memory for the comparison.
    """
    try:
        found = collectives.if_it_fits(
            lambda: check(context, task, strategy, micro_batches=1), context.device, context.group
        )
    except ValueError as error:  # a sentence, the same on every rank
        return {"verdict": FAILED, "verdict_detail": str(error)}
    if found is None:
        return {}
    if found.right:
        return {"verdict": RIGHT}
    wrong = len({finding.tensor for finding in found.findings})
    signatures = ", ".join(dict.fromkeys(finding.signature for finding in found.findings))
    return {
        "verdict": "WRONG",
        "verdict_detail": f"{wrong} of {found.tensors} tensors differ from one process ({signatures})",
    }


def time_rows(
    bench: Workbench,
    rows: Sequence[Variant],
    run: Run,
    differences: Mapping[str, float | None],
    verdicts: Mapping[str, Mapping[str, str]],
) -> dict[str, Record]:
    """Time all rows in interleaved rounds, count what each sends, and save them after each round.

    Returns row → its record.
    """
    config, context = bench.options, bench.context
    counted, noted = {}, {}  # row → what it sent; row → its record

    def count(variant: Variant, attached: Trial) -> None:
        if variant.name not in counted:
            counted[variant.name] = sent(bench, variant, attached.record_collectives())

    def speeds(step_ms: float) -> dict[str, float | None]:
        batch = config.batch * context.world_size
        if config.factory is not None:  # whose operations and tokens nobody counts
            return {"examples_per_s": batch / (step_ms / 1e3)}
        return speed(config, batch, context, step_ms)

    def note(timings: Mapping[str, Timing]) -> None:
        if all(timing.out_of_memory for timing in timings.values()):
            raise MemoryError(
                f"{config.factory or config.size} with batch {config.batch} in {config.dtype} does not fit in the "
                f"memory of {context.device} on rank {context.rank}: pass a smaller --batch, --context or --size"
            )
        for variant in rows:
            name, metrics = variant.name, timings[variant.name].metrics()
            if not timings[name].out_of_memory:
                metrics |= speeds(metrics["step_p50_ms"]) | counted[name]
                metrics |= {
                    "comm_ms": None,
                    "overlap_pct": None,
                    "max_abs_param_diff": differences.get(name),
                }
                metrics |= verdicts.get(name, {})
            size = variant.bucket_size_mb if variant.strategy.has_buckets else None
            noted[name] = noted.get(name) or run.add(
                name,
                metrics,
                **config.facts(context),
                **own_facts(config.factory),
                bucket_size_mb=size,
            )
            noted[name].metrics.clear()
            noted[name].metrics.update(metrics)
        run.save()
        samples = max(len(timing.phases["step"]) for timing in timings.values())
        how_to_continue(f"{samples} steps of each row, and not explained: {', '.join(noted)}")

    bench.time_rounds(
        rows,
        rounds=config.rounds,
        warmup=config.warmup,
        steps=config.steps,
        progress=run.progress,
        inspect=count,
        ended=note,
    )
    return noted


def explain_rows(
    config: DDPBenchConfig,
    bench: Workbench,
    rows: Mapping[str, Variant],
    noted: Mapping[str, Record],
    run: Run,
    took_s: float,
) -> None:
    """Explain rows by their traces, for at most the time that it took to measure them.

    `local` comes first, then the fastest.

    Raises:
        ValueError: a trace failed. The message says for which rows it is missing.
    """
    if config.profile_steps == 0:
        return
    context, begin = bench.context, time.monotonic()
    steps = config.profile_steps
    if context.device.type == "cpu":  # where one step may take twice as long as the next
        steps = max(steps, TRACED_ON_CPU)
    accounts, drawn, phases = {}, {}, {}  # row → account, lanes and phases of its trace
    left = sorted(rows, key=lambda name: (name != "local", noted[name].metrics["step_p50_ms"]))
    try:
        while left and on_main(
            context, lambda: time.monotonic() - begin < max(took_s, EXPLAINED_S)
        ):
            how_to_continue(f"not explained: {', '.join(left)}")
            name, metrics = left[0], noted[left[0]].metrics
            run.progress(f"explaining {name}")
            path = run.path / f"trace_{name}_rank{context.rank}.json.gz"
            if bench.profile(rows[name], path, steps):
                events = load_trace(path)
                window = nearest_step(events, metrics["step_p50_ms"])
                seen = accounts[name] = account(events, window)
                label = f"{name}\n{metrics['step_p50_ms']:.0f} ms, traced {seen.step_ms:.0f}"
                drawn[label] = lanes(events, window)
                phases[label] = phase_starts(events, window)
                metrics.update(
                    comm_ms=seen.comm_ms, overlap_pct=seen.overlap_pct, exposed_ms=seen.exposed_ms
                )
                metrics["traced_step_ms"] = seen.step_ms
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
        raise ValueError(
            f"not explained: {', '.join(left)} ({repr(error)[:99]}); the rest is in {run.path}"
        ) from error
    if left:
        run.notice(
            f"not explained, since that would take longer than measuring did: {', '.join(left)}"
        )
    if context.is_main and drawn:
        title = f"One step of rank {context.rank} under the profiler: {headline(run.records)}"
        timeline(run.path / "timeline.png", drawn, title=title, phases=phases)


def sent(
    bench: Workbench, variant: Variant, recorder: CollectiveRecorder
) -> dict[str, int | bool | None]:
    """Collectives and bytes of one step, counted, and those of the closed form."""
    counted = {"collectives_per_step": recorder.count, "comm_bytes_per_step": recorder.total_bytes}
    if bench.options.factory is not None or variant.name in bench.options.wraps:
        silent = (
            recorder.count == 0 and variant.strategy.synchronizes and bench.context.world_size > 1
        )
        return counted | {"sent_nothing": silent or None}
    layout, model = variant.layout, bench.options.model()
    # rank 0's
    part = rank_parts(model, layout, bench.options.checkpointing, variant.micro_batches)[0]
    expected = layout_volume(
        variant.strategy,
        part.shape,
        batch=bench.options.batch * layout.ranks // variant.micro_batches,
        context=model.context_length,
        world_size=bench.context.world_size,
        sharing=layout.context,
        how=layout.attention,
        itemsize=(DTYPES[bench.options.dtype] or torch.float32).itemsize,
        casts_parameters=variant.strategy.casts_parameters,
        bucket_size_mb=variant.bucket_size_mb,
        shard_size=variant.shard_size,
        micro_batches=variant.micro_batches,
        pipeline=layout.pipeline,
        keeps=part.keeps,
    )
    said = dict(
        zip(
            counted,
            (expected.collectives, expected.bytes) if expected else (None, None),
            strict=True,
        )
    )
    if variant.strategy.is_peer and bench.options.compile != "off":
        # torch DDP makes its buckets in the order in which gradients come, and compiled blocks give
        # theirs in another.
        said["collectives_per_step"] = None
    predicted = {f"predicted_{name}": value for name, value in said.items()}
    as_predicted = expected and all(value in (None, counted[name]) for name, value in said.items())
    return counted | predicted | {"volume_as_predicted": as_predicted}


QUICK = {
    "strategies": ("local", "naive", "bucketed", "torch-ddp"),
    "rounds": 2,
    "steps": 4,
}
EXPERIMENT = Experiment(
    DDPBenchConfig,
    measure,
    VIEW,
    presets={
        # The GPU is the bottleneck: compiled blocks, and as many tokens as keep it busy. The run ends
        # within two minutes on two H200s, compilation and traces included.
        "gpu": {
            "size": "auto",
            "batch": 8,
            "context": 2048,
            "dtype": "bf16",
            "compile": "blocks",
            "bucket_sizes_mb": (100.0,),
            "warmup": 2,
            "steps": 6,  # in two rounds: building and compiling a row takes longer than its steps
            "rounds": 2,
            "strategies": (
                "local",
                "naive",
                "flat",
                "overlap",
                "bucketed",
                "bucketed-dma",
                "zero1",
                "fsdp",
                "torch-ddp-tuned",
                "fsdp2",
            ),
        },
        # As many parameters and modules as xl has and next to nothing to compute: what a step takes
        # longer than local's is what the strategy costs the host.
        "host": {
            "size": "xl",
            "d_model": 64,
            "d_ff": 64,
            "heads": 2,
            "vocab": 64,
            "context": 16,
            "batch": 1,
            "compile": "off",
            "bucket_sizes_mb": (1.0,),
            "rounds": 6,
            "steps": 20,
            "check_steps": 0,
            "profile_steps": 0,
            "strategies": strategies_on("cpu"),
        },
        "quick": QUICK,
        "smoke": QUICK
        | {
            "size": "tiny",
            "d_model": 32,
            "d_ff": 64,
            "heads": 2,
            "vocab": 64,
            "batch": 1,
            "context": 16,
            "compile": "off",
            "bucket_sizes_mb": (0.05,),
            "warmup": 1,
            "steps": 5,
            "rounds": 1,
            "check_steps": 1,
        },
    },
    ranks="many",
    prepare=sized,
    wrong=wrong_rows,
)
