"""Predict every bucket size, then measure it."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from distlab.bench.subject import Workbench
from distlab.comm import RankContext, collectives
from distlab.measure.statistics import percentiles
from distlab.report.noise import noise_of
from distlab.report.record import Record, commit, environment
from distlab.simulate.calibrate import MeasuredLinks
from distlab.train.requirements import PlannedStep, require

from .choice import optimum
from .config import DTYPES, NAME, OPTIMUM, OURS, PARTS, BucketSweepConfig
from .parts import measure_parts
from .prediction import predict


def run(
    config: BucketSweepConfig,
    context: RankContext,
    *,
    links: MeasuredLinks | None = None,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Predict, then measure; call it on every rank. All ranks return the same records.

    Args:
        links: measured on this kind of machine before; None times all-reduces here.

    Raises:
        MemoryError: the model with this batch does not fit.
    """
    planned = [
        PlannedStep(config.model(), config.batch, row.strategy.name, config.dtype, row.bucket_size_mb)
        for row in config.rows()
    ]
    require(planned, context.device, context, some=context.device.type == "cuda")
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    shared = asdict(config) | {"world_size": context.world_size, "backend": context.backend}
    shared |= {
        "num_parameters": config.model().num_parameters,
        "context": config.model().context_length,
        "fit_from_records": links is not None,
    }
    rows, bench = config.rows(), _bench(config, context)
    progress("timing the local step, backward's gradients, all-reduces and contention")
    local = bench.time_rounds(rows[:1], rounds=1, warmup=config.warmup, steps=max(config.steps, 3))["local"]
    parts = collectives.gather_objects(measure_parts(config, context, local, links), context.group)[0]
    predicted = {row.name: predict(config, parts, row.bucket_size_mb) for row in rows if row.name != "local"}
    timings = bench.time_rounds(
        rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=progress
    )
    records = [Record(NAME, PARTS, shared, parts.describe(), **facts)]
    for row in rows:
        timing = timings[row.name]
        own = {"strategy": row.strategy.name}
        own["bucket_size_mb"] = row.bucket_size_mb if row.strategy.has_buckets else "none"
        metrics: dict[str, Any] = {"step_p50_ms": "OOM"}
        if not timing.out_of_memory:
            metrics = {f"step_{p}_ms": value for p, value in percentiles(timing.phases["step"]).items()}
            metrics["noise_pct"] = noise_of(metrics)
            metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
        if row.strategy.name == OURS:
            metrics |= predicted[row.name]
            if not timing.out_of_memory:
                metrics["error_pct"] = 100 * (metrics["predicted_step_ms"] / metrics["step_p50_ms"] - 1)
        records.append(Record(NAME, row.name, shared | own, metrics, **facts))
    records.append(Record(NAME, OPTIMUM, shared, optimum(records), **facts))
    return collectives.gather_objects(records, context.group)[0]


def _bench(config: BucketSweepConfig, context: RankContext) -> Workbench:
    return Workbench(
        context,
        config.model(),
        batch_size=config.batch,
        compute_dtype=DTYPES[config.dtype],
        seed=config.seed,
    )
