"""What does gradient synchronisation cost, and how much of it can be hidden?

Times no communication at all (`local`), the hand-written strategies and torch's DDP in one run, interleaved so
that drift hits all alike, and explains each: what it sent (checked against the closed form), how long
communication ran and how much of that compute covered (from the profiler), and whether its result equals
training in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from distlab.comm import RankContext, collectives
from distlab.hardware import peak_flops
from distlab.measure.exposure import StepAccount, account, closes, explain
from distlab.measure.overlap import analyse, exposed_all_gathers, idle_gaps, lanes
from distlab.measure.timing import MIN_PAIRS, exposure_ratio, noise_floor, paired_ratio, percentiles
from distlab.measure.trace import load_trace
from distlab.model.config import ModelConfig, preset
from distlab.model.transformer import TransformerLM
from distlab.parallel import strategies_on
from distlab.report import plot, view
from distlab.report.record import OutputFolder, Record, commit, environment
from distlab.report.table import Column
from distlab.theory.communication import step_volume
from distlab.theory.compute import mfu, step_flops
from distlab.train.workbench import (
    Timing,
    Variant,
    Workbench,
    is_out_of_memory,
    parameter_difference,
    variants,
)

NAME = "ddp_bench"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OOM = "OOM"


@dataclass(frozen=True)
class DDPBenchConfig:
    """What to run.

    Args:
        size: model preset; `tiny` suits CPUs.
        batch: sequences per rank.
        context: tokens per sequence; None for the preset's.
        ops: `torch`, or `triton` for this lab's kernels in the model.
        dtype: `fp32`, or `bf16`/`fp16` computation over fp32 parameters: autocast, for FSDP its compute type.
        strategies: names of the registry.
        bucket_sizes_mb: MiB; with several, each strategy with buckets has a row per size. None is unbounded.
        warmup, steps, rounds: untimed and timed steps per round, and rounds; a variant has steps·rounds samples.
        in_turn: attach all variants at once and let them step in turn (needs the memory of all), instead of one
            after the other in rounds.
        check_steps: steps of the comparison with one process; 0 leaves it out.
        profile_steps: steps per trace; the median one is shown. 0 leaves traces and what they tell out.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "tiny"
    batch: int = 4
    context: int | None = None
    ops: str = "torch"
    dtype: str = "fp32"
    strategies: tuple[str, ...] = strategies_on("cpu")
    bucket_sizes_mb: tuple[float | None, ...] = (4.0,)
    warmup: int = 2
    steps: int = 6
    rounds: int = 2
    in_turn: bool = False
    check_steps: int = 2
    profile_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        if not self.strategies or not self.bucket_sizes_mb:
            raise ValueError("give at least one strategy and one bucket size")
        for name, least in (
            ("batch", 1),
            ("steps", 1),
            ("rounds", 1),
            ("warmup", 1),
            ("check_steps", 0),
            ("profile_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.steps * self.rounds < MIN_PAIRS:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least {MIN_PAIRS} steps")
        for size in self.bucket_sizes_mb:
            if size is not None and not size > 0:
                raise ValueError(f"bucket size {size}: must be a positive number of MiB, or 'none'")
        variants(self.strategies, self.bucket_sizes_mb)
        self.model()

    def model(self) -> ModelConfig:
        overrides = {} if self.context is None else {"context_length": self.context}
        return preset(self.size, ops=self.ops, **overrides)


def run(
    config: DDPBenchConfig,
    context: RankContext,
    folder: OutputFolder | None = None,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure every variant; call it on every rank. All ranks return the same records.

    Args:
        folder: where each rank writes its traces; None profiles nothing and leaves those metrics None.
        default_commit: for a machine without git.
        progress: called with a line now and then.

    Raises:
        MemoryError: the model with this batch does not fit even without communication.
    """
    rows = variants(config.strategies, config.bucket_sizes_mb)
    model_config = config.model()
    differences = {}
    for variant in rows if config.check_steps else []:
        if variant.strategy.synchronizes:
            progress(f"checking {variant.name} against one process")
            differences[variant.name] = parameter_difference(context, variant, steps=config.check_steps)
    progress(f"building {config.size}: {model_config.num_parameters / 1e6:,.1f} M parameters")
    try:
        bench = Workbench(
            context,
            model_config,
            batch_size=config.batch,
            compute_dtype=DTYPES[config.dtype],
            seed=config.seed,
        )
        if config.in_turn:
            steps = config.rounds * config.steps
            timings = bench.time_in_turn(rows, warmup=config.warmup, steps=steps, progress=progress)
        else:
            timings = bench.time_rounds(
                rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=progress
            )
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise MemoryError(_does_not_fit(config, context)) from error
        raise
    if all(timing.out_of_memory for timing in timings.values()):
        raise MemoryError(_does_not_fit(config, context))

    records = []
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    shared = asdict(config) | {"world_size": context.world_size, "backend": context.backend}
    shared |= {"num_parameters": model_config.num_parameters, "context": model_config.context_length}
    reference = timings.get("local")
    accounts: dict[str, StepAccount] = {}
    for variant in rows:
        timing = timings[variant.name]
        if timing.out_of_memory:
            metrics = {"step_p50_ms": OOM}
        else:
            progress(f"explaining {variant.name}")
            metrics = _timing_metrics(config, context, timing, reference)
            metrics |= _peer_ratio(timing, timings)
            metrics |= _sent(bench, variant)
            metrics |= _overlap(bench, variant, folder, config.profile_steps, accounts)
            metrics["max_abs_param_diff"] = differences.get(variant.name)
        own = {"bucket_size_mb": variant.bucket_size_mb if variant.strategy.has_buckets else None}
        records.append(Record(NAME, variant.name, shared | own, metrics, **facts))
    for record in records:
        record.metrics.update(_explanation(record, accounts))
    # Clocks differ between ranks by what the profiler adds; the table is rank 0's.
    return collectives.gather_objects(records, context.group)[0]


def _does_not_fit(config: DDPBenchConfig, context: RankContext) -> str:
    return (
        f"{config.size} with batch {config.batch} × context {config.model().context_length} in {config.dtype} "
        f"does not fit in the memory of {context.device} on rank {context.rank}: "
        "pass a smaller --batch, --context or --size"
    )


def _timing_metrics(
    config: DDPBenchConfig, context: RankContext, timing: Timing, reference: Timing | None
) -> dict[str, float | int | None]:
    metrics: dict[str, float | int | None] = {}
    for phase, samples in timing.phases.items():
        metrics |= {f"{phase}_{p}_ms": value for p, value in percentiles(samples).items()}
    step_ms = metrics["step_p50_ms"]
    model = config.model()
    shape = {"batch": config.batch, "context": model.context_length, "vocab_size": model.vocab_size}
    shape |= {"d_model": model.d_model, "d_ff": model.d_ff, "num_layers": model.num_layers}
    peak = None
    if context.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(context.device), DTYPES[config.dtype] or torch.float32)
    share = mfu(step_flops(**shape), step_ms / 1e3, peak)
    tokens = config.batch * model.context_length * context.world_size
    metrics["tokens_per_s"] = tokens / (step_ms / 1e3)
    metrics["mfu_pct"] = None if share is None else 100 * share
    metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
    has_reference = reference is not None and not reference.out_of_memory
    local_ms = percentiles(reference.phases["step"])["p50"] if has_reference else None
    metrics["exposed_comm_ms"] = None if local_ms is None else step_ms - local_ms
    samples = timing.phases["step"]
    if len(samples) >= 2 * MIN_PAIRS:  # the same variant against itself: even against odd steps
        half = len(samples) // 2
        metrics["noise_floor_pct"] = noise_floor(samples[0::2][:half], samples[1::2][:half])
    return metrics


def _peer_ratio(timing: Timing, timings: dict[str, Timing]) -> dict[str, float]:
    """This variant's step, and its exposed communication, over those of torch DDP's fastest row, paired step by
    step, with their 95 % intervals."""
    peers = [t for name, t in timings.items() if name.startswith("torch-ddp") and not t.out_of_memory]
    if not peers:
        return {}
    best = min(peers, key=lambda peer: percentiles(peer.phases["step"])["p50"])
    ratio = paired_ratio(timing.phases["step"], best.phases["step"])
    metrics = {"vs_torch_ddp": ratio.ratio, "vs_torch_ddp_low": ratio.low, "vs_torch_ddp_high": ratio.high}
    local = timings.get("local")
    if local is None or local.out_of_memory or timing is local:
        return metrics
    exposed = exposure_ratio(timing.phases["step"], best.phases["step"], local.phases["step"])
    if exposed is not None:
        metrics |= {"exposed_vs_torch_ddp": exposed.ratio, "exposed_vs_torch_ddp_high": exposed.high}
    return metrics


def _sent(bench: Workbench, variant: Variant) -> dict[str, int | bool | None]:
    """Collectives and bytes of one step, counted, beside the closed form."""
    recorder = bench.record_collectives(variant)
    named = list(TransformerLM(bench.config, device="meta").named_parameters())
    sizes = [(parameter.numel(), parameter.element_size()) for _, parameter in named]
    expected = step_volume(
        variant.strategy.name,
        [numel for numel, _ in sizes],
        [itemsize for _, itemsize in sizes],
        bucket_size_mb=variant.bucket_size_mb,
        world_size=bench.context.world_size,
        units=[_unit(name) if parameter.ndim > 1 else None for name, parameter in named],
        compute_itemsize=(bench.compute_dtype or torch.float32).itemsize,
    )
    metrics: dict[str, int | bool | None] = {
        "collectives_per_step": recorder.count,
        "comm_bytes_per_step": recorder.total_bytes,
        "predicted_collectives_per_step": expected.collectives if expected else None,
        "predicted_comm_bytes_per_step": expected.bytes if expected else None,
    }
    metrics["volume_as_predicted"] = (
        (recorder.count, recorder.total_bytes) == (expected.collectives, expected.bytes) if expected else None
    )
    return metrics


def _unit(parameter_name: str) -> str:
    """What a matrix of the Transformer is gathered with: its block, or itself outside of blocks."""
    parts = parameter_name.split(".")
    return ".".join(parts[:2] if parts[0] == "blocks" else parts)


def _overlap(
    bench: Workbench,
    variant: Variant,
    folder: OutputFolder | None,
    steps: int,
    accounts: dict[str, StepAccount],
) -> dict[str, float | None]:
    """Communication time and the share of it that compute covers, from this rank's trace; its account is kept."""
    if folder is None or steps == 0:
        return {"comm_ms": None, "comm_share_pct": None, "overlap_pct": None}
    path = trace_path(folder, variant.name, bench.context.rank)
    bench.profile(variant, path, steps)
    events = load_trace(path)
    seen, gathers, gaps = analyse(events), exposed_all_gathers(events), idle_gaps(events)
    accounts[variant.name] = account(events)
    return {
        "exposed_all_gather_forward_ms": gathers[0],
        "exposed_all_gather_backward_ms": gathers[1],
        "comm_ms": seen.comm_ms,
        "comm_share_pct": 100 * seen.comm_ms / seen.step_ms,
        "overlap_pct": seen.overlap_pct,
        "uncovered_comm_ms": seen.uncovered_comm_ms,
        "profiled_step_ms": seen.step_ms,
        "idle_ms": seen.idle_ms,
        "longest_idle_ms": gaps[0][1] - gaps[0][0] if gaps else 0.0,
    }


def _explanation(record: Record, accounts: dict[str, StepAccount]) -> dict[str, float | bool | None]:
    """What the step takes longer than `local`'s, by cause, and what of the measured difference that leaves open."""
    mine, local = accounts.get(record.variant), accounts.get("local")
    exposed = record.metrics.get("exposed_comm_ms")
    if mine is None or local is None or exposed is None:
        return {}
    found = explain(mine, local)
    unexplained = exposed - found.explained_ms
    return {
        "exposed_uncovered_ms": found.uncovered_comm_ms,
        "exposed_slowdown_ms": found.slowdown_ms,
        "exposed_copies_ms": found.copies_ms,
        "exposed_optimizer_ms": found.optimizer_ms,
        "exposed_idle_ms": found.idle_ms,
        "exposed_unexplained_ms": unexplained,
        "exposed_closes": closes(unexplained, record.metrics["step_p50_ms"]),
    }


def trace_path(folder: OutputFolder, variant: str, rank: int) -> Path:
    return folder.path / f"trace_{variant}_rank{rank}.json.gz"


COLUMNS = [
    Column("variant", "strategy"),
    Column("metrics.step_p20_ms", "step p20 ms", ".1f"),
    Column("metrics.step_p50_ms", "p50", ".1f"),
    Column("metrics.step_p80_ms", "p80", ".1f"),
    Column("metrics.forward_backward_p50_ms", "fwd+bwd+sync ms", ".1f"),
    Column("metrics.optimizer_p50_ms", "optimizer ms", ".1f"),
    Column("metrics.exposed_comm_ms", "exposed ms", ".1f"),
    Column("metrics.comm_ms", "comm ms", ".1f"),
    Column("metrics.comm_share_pct", "of step %", ".0f"),
    Column("metrics.overlap_pct", "overlap %", ".0f"),
    Column("metrics.collectives_per_step", "calls", "d"),
    Column("metrics.comm_bytes_per_step", "sent MB", ",.1f", scale=1e-6),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f"),
    Column("metrics.mfu_pct", "MFU %", ".1f"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
    Column("metrics.vs_torch_ddp", "÷ torch", ".3f"),
    Column("metrics.vs_torch_ddp_high", "≤ (95 %)", ".3f"),
    Column("metrics.max_abs_param_diff", "max |Δparam|", ".1e"),
]


GATHERS = [
    Column("metrics.exposed_all_gather_forward_ms", "all-gather alone fwd ms", ".1f"),
    Column("metrics.exposed_all_gather_backward_ms", "bwd ms", ".1f"),
]


RATIO = [
    Column("metrics.exposed_vs_torch_ddp", "exposed ÷ torch's", ".2f"),
    Column("metrics.exposed_vs_torch_ddp_high", "≤ (95 %)", ".2f"),
]


EXPLANATION = [
    Column("metrics.exposed_uncovered_ms", "exposed: alone ms", ".1f"),
    Column("metrics.exposed_slowdown_ms", "slower compute", ".1f"),
    Column("metrics.exposed_copies_ms", "copies", ".1f"),
    Column("metrics.exposed_optimizer_ms", "optimizer", "+.1f"),
    Column("metrics.exposed_idle_ms", "idle", "+.1f"),
    Column("metrics.exposed_unexplained_ms", "unexplained", "+.1f"),
]


def columns(records: Sequence[Record]) -> list[Column]:
    """COLUMNS, and where records have them: the exposed time over torch's, all-gathers, and what exposed time is."""
    gathers = any(record.metrics.get("exposed_all_gather_forward_ms") is not None for record in records)
    against = any("exposed_vs_torch_ddp" in record.metrics for record in records)
    explained = any("exposed_closes" in record.metrics for record in records)
    groups = ((RATIO, against), (GATHERS, gathers), (EXPLANATION, explained))
    return [*COLUMNS, *(column for group, wanted in groups if wanted for column in group)]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    floors = [record.metrics.get("noise_floor_pct") for record in records if record.variant == "local"]
    floor = f"; noise floor {floors[0]:.1f} %" if floors and floors[0] is not None else ""
    return (
        f"{config['size']} ({config['num_parameters'] / 1e6:,.1f} M parameters), batch {config['batch']} × "
        f"context {config['context']} per rank, {config['dtype']}, {config['world_size']} × "
        f"{env['device_name']} ({config['backend']}), torch {env['torch']}{floor}"
    )


def write(records: Sequence[Record], folder: OutputFolder, context: RankContext) -> Path:
    """Everything of this run into the folder; call it on one rank. Returns the report's path."""
    rows = {}
    for record in records:
        path = trace_path(folder, record.variant, context.rank)
        if path.exists():
            rows[record.variant] = lanes(load_trace(path))
    if rows:
        title = f"One step of rank {context.rank} under the profiler: {headline(records)}"
        plot.timeline(folder.path / "timeline.png", rows, title=title)
    return view.write(VIEW, records, folder)


def draw_step_times(records: Sequence[Record], path: Path) -> None:
    """Stacked bars: compute, exposed communication, optimizer; whiskers from p20 to p80 of the step."""
    local = next((r.metrics for r in records if r.variant == "local"), None)
    compute_ms = local.get("forward_backward_p50_ms") if local else None
    parts: dict[str, list[float | str | None]] = {"compute": [], "exposed communication": [], "optimizer": []}
    whiskers: list[tuple[float, float] | None] = []
    for record in records:
        metrics = record.metrics
        if metrics["step_p50_ms"] == OOM or compute_ms is None:
            cells = [OOM if metrics["step_p50_ms"] == OOM else None] * 3
            whiskers.append(None)
        else:
            both, update = metrics["forward_backward_p50_ms"], metrics["optimizer_p50_ms"]
            cells = [compute_ms, both - compute_ms, update]
            whiskers.append((metrics["step_p20_ms"], metrics["step_p80_ms"]))
        for part, cell in zip(parts.values(), cells, strict=True):
            part.append(cell)
    labels = [record.variant for record in records]
    title = f"Where a step's time goes: {headline(records)}"
    plot.stacked_bars(path, labels, parts, title=title, unit="ms", whiskers=whiskers)


VIEW = view.View(
    NAME,
    __doc__.splitlines()[0],
    columns,
    headline,
    pictures={"step_time.png": draw_step_times},
    findings=lambda records: [
        *(f"WRONG: {problem}" for problem in wrong_rows(records)),
        *(f"UNEXPLAINED: {row}" for row in unexplained_rows(records)),
    ],
    reading="Exposed communication is what a step takes longer than the same step without communication (local). "
    "Communication time and overlap, the share of it that compute covers, come from the profiler's trace of rank 0; "
    "calls and bytes are counted at torch's dispatcher. The ratio to torch is over torch DDP's fastest row, paired "
    "step by step; beside it stands the upper end of its 95 % bootstrap interval. The last column is the largest "
    "difference of any parameter from training in one process after a few steps of fp32 SGD on the tiny preset.\n\n"
    "In the timeline compute is above, communication below; what compute does not hide is orange.",
    prediction="Collectives and bytes per step in closed form (distlab.theory.communication). Step times are predicted "
    "by experiments.predict_steps, before a measurement.",
)


def unexplained_rows(records: Sequence[Record]) -> list[str]:
    """Rows whose exposed communication the trace explains to less than 5 % of the step or 1 ms, one line each.

    The account is of steps under the profiler, so a row within its noise floor is let pass.
    """

    def noise_ms(metrics: dict[str, float]) -> float:
        return (metrics.get("noise_floor_pct") or 0.0) / 100 * metrics["step_p50_ms"]

    return [
        f"{record.variant}: {record.metrics['exposed_unexplained_ms']:+.1f} ms of "
        f"{record.metrics['exposed_comm_ms']:.1f} ms exposed communication are in no part of its trace's account"
        for record in records
        if record.metrics.get("exposed_closes") is False
        and abs(record.metrics["exposed_unexplained_ms"]) > noise_ms(record.metrics)
    ]


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
        difference = metrics.get("max_abs_param_diff")
        if difference is not None and not difference < 1e-5:  # fp32 SGD at rate 0.1: some 1e-8 from rounding
            problems.append(f"{record.variant}: parameters differ from one process by {difference:.1e}")
    return problems
