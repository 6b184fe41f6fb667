"""Measure every variant of one run."""

from pathlib import Path

import torch

from distlab.bench.bucket_size import best_bucket_size
from distlab.bench.reference import parameter_difference
from distlab.bench.subject import Timing, Workbench, variants
from distlab.comm import RankContext
from distlab.experiment import Run
from distlab.hardware import peak_flops
from distlab.measure.statistics import exposure_ratio, own_noise_floor, paired_ratio, percentiles
from distlab.measure.trace.account import StepAccount
from distlab.measure.validity import is_out_of_memory
from distlab.report.noise import noise_of
from distlab.report.provenance import environment
from distlab.report.record import read_json
from distlab.theory.flops import mfu, step_flops
from distlab.train.requirements import PlannedStep, require

from .account import explanation, overlap, sent
from .config import DTYPES, OOM, DDPBenchConfig
from .view import draw_timeline

SWEEPS = Path(__file__).parents[2] / "records" / "bucket_sweep"


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
    model_config = config.model()
    planned = [
        PlannedStep(model_config, config.batch, row.strategy.name, config.dtype) for row in rows
    ]
    require(planned, context.device, context, some=context.device.type == "cuda")
    differences = {}
    for variant in rows if config.check_steps else []:
        if variant.strategy.synchronizes:
            run.progress(f"checking {variant.name} against one process")
            differences[variant.name] = parameter_difference(context, variant, steps=config.check_steps)
    run.progress(f"building {config.size}: {model_config.num_parameters / 1e6:,.1f} M parameters")
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

    shared = {"num_parameters": model_config.num_parameters, "context": model_config.context_length}
    shared |= {"backend": context.backend}
    reference = timings.get("local")
    accounts: dict[str, StepAccount] = {}
    for variant in rows:
        timing = timings[variant.name]
        if timing.out_of_memory:
            metrics = {"step_p50_ms": OOM}
        else:
            run.progress(f"explaining {variant.name}")
            metrics = _timing_metrics(config, context, timing, reference)
            metrics |= _peer_ratio(timing, timings)
            metrics |= sent(bench, variant)
            metrics |= overlap(bench, variant, run.path, config.profile_steps, accounts)
            metrics["max_abs_param_diff"] = differences.get(variant.name)
        own = {"bucket_size_mb": variant.bucket_size_mb if variant.strategy.has_buckets else None}
        run.add(variant.name, metrics, **shared, **own)
    for record in run.records:
        record.metrics.update(explanation(record, accounts))
    run.save()
    if context.is_main:
        draw_timeline(run, context)


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
    if has_reference and timing is not reference:
        ratio = paired_ratio(samples, reference.phases["step"])
        metrics |= {"vs_local": ratio.ratio, "vs_local_low": ratio.low, "vs_local_high": ratio.high}
    metrics["noise_floor_pct"] = own_noise_floor(samples)
    metrics["noise_pct"] = noise_of(metrics)
    return metrics


def _peer_ratio(timing: Timing, timings: dict[str, Timing]) -> dict[str, float]:
    """This variant's step, and its exposed communication, over those of torch DDP's fastest row, paired step by
    step, with their 95 % intervals.
    """
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
        ends = {"exposed_vs_torch_ddp_low": exposed.low, "exposed_vs_torch_ddp_high": exposed.high}
        metrics |= {"exposed_vs_torch_ddp": exposed.ratio} | ends
    return metrics
