"""What to run, every variant of one run measured, and what a row tells beside its times."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distlab.bench.bucket_size import best_bucket_size
from distlab.bench.reference import parameter_difference
from distlab.bench.timing import BenchOptions, Timing, Variant, Workbench, variants
from distlab.experiment import RankContext, Record, Run, TimingOptions, option
from distlab.hardware import peak_flops
from distlab.measure import (
    MIN_PAIRS,
    Ratio,
    StepAccount,
    account,
    closes,
    explain,
    exposed_all_gathers,
    exposure_ratio,
    is_out_of_memory,
    lanes,
    load_trace,
    own_noise_floor,
    paired_ratio,
    percentiles,
)
from distlab.model import OPS_CHOICES, ModelConfig, TransformerLM
from distlab.parallel import STRATEGIES, strategies_on
from distlab.precision import DTYPES
from distlab.report import environment, noise_of, read_json, timeline
from distlab.theory.flops import mfu, step_flops
from distlab.theory.volume import model_volume

from .view import headline

SWEEPS = Path(__file__).parents[2] / "records" / "bucket_sweep"


@dataclass(frozen=True)
class DDPBenchConfig(BenchOptions, TimingOptions):
    """What to run. Raises ValueError for a value that is not allowed; the message says what is."""

    ops: str = option("torch", "of the model: torch, or triton for this lab's kernels", choices=OPS_CHOICES)
    strategies: tuple[str, ...] = option(strategies_on("cpu"), "what to compare", choices=tuple(STRATEGIES))
    bucket_sizes_mb: tuple[Any, ...] = option(
        (4.0,),
        "MiB per bucket, one or several (a row each); none for unbounded, auto for a bucket sweep's best",
        above=0,
        words={"none": None, "auto": "auto"},
        kind=float,
        flag="--bucket-size-mb",
    )
    bucket_sweep: tuple[str, ...] = option((), "records of bucket_sweep for auto [records/bucket_sweep/*.json]")
    in_turn: bool = option(False, "attach all variants at once, one step each in turn; takes the memory of all")
    check_steps: int = option(2, "steps of the comparison with one process, 0 for none", least=0)
    profile_steps: int = option(1, "steps per trace, of which the median is shown; 0 for none", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps * self.rounds < MIN_PAIRS:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least {MIN_PAIRS} steps")
        if "auto" in self.bucket_sizes_mb and len(self.bucket_sizes_mb) > 1:
            raise ValueError("--bucket-size-mb auto stands alone, or give sizes in MiB")

    def model(self) -> ModelConfig:
        """The preset, with its operations."""
        return replace(super().model(), ops=self.ops)


def measure(config: DDPBenchConfig, context: RankContext, run: Run) -> None:
    """Measure every variant; each rank writes its traces into the run's folder.

    Raises:
        MemoryError: the model with this batch does not fit even without communication.
        ValueError: a strategy that needs a GPU, without one, or no sweep of bucket sizes for `auto`.
    """
    if context.world_size == 1:
        run.progress("one rank: nothing is communicated. For more: --nproc 2")
    sizes = config.bucket_sizes_mb
    if sizes == ("auto",):
        sizes = (_swept_size(config, context),)
        run.progress(f"bucket size by the sweep: {sizes[0] or 'unbounded'}")
    rows = variants(config.strategies, sizes)
    bench = config.workbench(context, rows, some=True)
    differences = {}
    for variant in rows if config.check_steps else []:
        if variant.strategy.synchronizes:
            run.progress(f"checking {variant.name} against one process")
            differences[variant.name] = parameter_difference(context, variant, steps=config.check_steps)
    run.progress(f"building {config.size}: {bench.config.num_parameters / 1e6:,.1f} M parameters")
    try:
        if config.in_turn:
            steps = config.rounds * config.steps
            timings = bench.time_in_turn(rows, warmup=config.warmup, steps=steps, progress=run.progress)
        else:
            timings = bench.time_rounds(
                rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=run.progress
            )
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise MemoryError(_does_not_fit(config, context)) from error
        raise
    if all(timing.out_of_memory for timing in timings.values()):
        raise MemoryError(_does_not_fit(config, context))

    reference = timings.get("local")
    accounts: dict[str, StepAccount] = {}
    drawn: dict[str, Any] = {}  # variant → one step of its trace, for the timeline
    for variant in rows:
        timing = timings[variant.name]
        metrics = timing.metrics()
        if not timing.out_of_memory:
            run.progress(f"explaining {variant.name}")
            metrics |= _rates(config, context, metrics["step_p50_ms"]) | _against_local(timing, reference)
            metrics |= {"noise_floor_pct": own_noise_floor(timing.phases["step"])} | _peer_ratio(timing, timings)
            metrics["noise_pct"] = noise_of(metrics)
            metrics |= sent(bench, variant)
            metrics |= overlap(bench, variant, run.path, config.profile_steps, accounts, drawn)
            metrics["max_abs_param_diff"] = differences.get(variant.name)
        size = variant.bucket_size_mb if variant.strategy.has_buckets else None
        run.add(variant.name, metrics, **bench.facts, bucket_size_mb=size)
    for record in run.records:
        record.metrics.update(explanation(record, accounts))
    run.save()
    if context.is_main:
        draw_timeline(run, context.rank, drawn)


def _swept_size(config: DDPBenchConfig, context: RankContext) -> float | None:
    """The bucket size that a bucket sweep found best for this model on this machine."""
    found = config.bucket_sweep or sorted(map(str, SWEEPS.glob("*.json")))
    return best_bucket_size(
        [record for path in found for record in read_json(path)],
        device_name=environment(context.device)["device_name"],
        world_size=context.world_size,
        size=config.size,
        batch=config.batch,
    )


def _does_not_fit(config: DDPBenchConfig, context: RankContext) -> str:
    return (
        f"{config.size} with batch {config.batch} × context {config.model().context_length} in {config.dtype} "
        f"does not fit in the memory of {context.device} on rank {context.rank}: "
        "pass a smaller --batch, --context or --size"
    )


def _rates(config: DDPBenchConfig, context: RankContext, step_ms: float) -> dict[str, float | None]:
    model, peak = config.model(), None
    if context.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(context.device), DTYPES[config.dtype] or torch.float32)
    share = mfu(step_flops(**model.sizes(config.batch)), step_ms / 1e3, peak)
    tokens = config.batch * model.context_length * context.world_size
    return {"tokens_per_s": tokens / (step_ms / 1e3), "mfu_pct": None if share is None else 100 * share}


def _against_local(timing: Timing, local: Timing | None) -> dict[str, float | None]:
    """What the step takes longer than without communication, and the paired ratio of the two."""
    if local is None or local.out_of_memory:
        return {"exposed_comm_ms": None}
    mine, alone = timing.phases["step"], local.phases["step"]
    exposed = {"exposed_comm_ms": percentiles(mine)["p50"] - percentiles(alone)["p50"]}
    return exposed if timing is local else exposed | _interval("vs_local", paired_ratio(mine, alone))


def _interval(name: str, found: Ratio) -> dict[str, float]:
    return {name: found.ratio, f"{name}_low": found.low, f"{name}_high": found.high}


def _peer_ratio(timing: Timing, timings: dict[str, Timing]) -> dict[str, float]:
    """This variant's step, and its exposed communication, over those of torch DDP's fastest row, paired step by
    step, with their 95 % intervals.
    """
    peers = [t for name, t in timings.items() if name.startswith("torch-ddp") and not t.out_of_memory]
    if not peers:
        return {}
    best = min(peers, key=lambda peer: percentiles(peer.phases["step"])["p50"])
    metrics = _interval("vs_torch_ddp", paired_ratio(timing.phases["step"], best.phases["step"]))
    local = timings.get("local")
    if local is None or local.out_of_memory or timing is local:
        return metrics
    exposed = exposure_ratio(timing.phases["step"], best.phases["step"], local.phases["step"])
    return metrics if exposed is None else metrics | _interval("exposed_vs_torch_ddp", exposed)


def sent(bench: Workbench, variant: Variant) -> dict[str, int | bool | None]:
    """Collectives and bytes of one step, counted, beside the closed form."""
    recorder = bench.record_collectives(variant)
    expected = model_volume(
        variant.strategy.name,
        TransformerLM(bench.config, device="meta").named_parameters(),
        bucket_size_mb=variant.bucket_size_mb,
        world_size=bench.context.world_size,
        compute_itemsize=(bench.compute_dtype or torch.float32).itemsize,
    )
    seen, said = (recorder.count, recorder.total_bytes), expected and (expected.collectives, expected.bytes)
    names = ("collectives_per_step", "comm_bytes_per_step")
    closed = {f"predicted_{name}": value for name, value in zip(names, said or (None, None), strict=True)}
    return dict(zip(names, seen, strict=True)) | closed | {"volume_as_predicted": said and seen == said}


def overlap(
    bench: Workbench,
    variant: Variant,
    folder: Path,
    steps: int,
    accounts: dict[str, StepAccount],
    drawn: dict[str, Any],
) -> dict[str, float | None]:
    """Communication time and the share of it that compute covers, from this rank's trace; both are kept for later."""
    if steps == 0:
        return {"comm_ms": None, "comm_share_pct": None, "overlap_pct": None}
    path = folder / f"trace_{variant.name}_rank{bench.context.rank}.json.gz"
    bench.profile(variant, path, steps)
    events = load_trace(path)
    seen, gathers = account(events), exposed_all_gathers(events)
    accounts[variant.name], drawn[variant.name] = seen, lanes(events)
    return {
        "exposed_all_gather_forward_ms": gathers[0],
        "exposed_all_gather_backward_ms": gathers[1],
        "comm_ms": seen.comm_ms,
        "comm_share_pct": 100 * seen.comm_ms / seen.step_ms,
        "overlap_pct": seen.overlap_pct,
        "uncovered_comm_ms": seen.uncovered_comm_ms,
        "profiled_step_ms": seen.step_ms,
        "idle_ms": seen.idle_ms,
        "longest_idle_ms": seen.longest_idle_ms,
    }


def explanation(record: Record, accounts: dict[str, StepAccount]) -> dict[str, float | bool | None]:
    """What the step takes longer than `local`'s, by cause, and what of the measured difference that leaves open."""
    mine, local = accounts.get(record.variant), accounts.get("local")
    exposed = record.metrics.get("exposed_comm_ms")
    if mine is None or local is None or exposed is None:
        return {}
    found = explain(mine, local)
    unexplained = exposed - sum(found.values())
    return {
        "exposed_uncovered_ms": found["uncovered_comm_ms"],
        "exposed_slowdown_ms": found["slowdown_ms"],
        "exposed_copies_ms": found["copies_ms"],
        "exposed_optimizer_ms": found["optimizer_ms"],
        "exposed_idle_ms": found["idle_ms"],
        "exposed_unexplained_ms": unexplained,
        "exposed_closes": closes(unexplained, record.metrics["step_p50_ms"]),
    }


def draw_timeline(run: Run, rank: int, drawn: Mapping[str, Any]) -> None:
    """Compute above, communication below, of one step of every variant of this rank."""
    if drawn:
        title = f"One step of rank {rank} under the profiler: {headline(run.records)}"
        timeline(run.path / "timeline.png", drawn, title=title)
