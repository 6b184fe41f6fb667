"""Predict every bucket size, then measure it."""

from typing import Any

from distlab.bench.subject import Workbench
from distlab.comm import RankContext, collectives
from distlab.experiment import Run
from distlab.measure.statistics import percentiles
from distlab.report.noise import noise_of
from distlab.report.record import read_json
from distlab.simulate.calibrate import measured_links
from distlab.train.requirements import PlannedStep, require

from .config import DTYPES, OPTIMUM, OURS, PARTS, BucketSweepConfig
from .prediction import measure_parts, predict
from .view import optimum


def measure(config: BucketSweepConfig, context: RankContext, run: Run) -> None:
    """Predict, then measure; call it on every rank.

    Raises:
        MemoryError: the model with this batch does not fit.
        OSError, ValueError: files of `fit` that cannot be read, or that are of another machine.
    """
    links = None
    if config.fit:
        known = [record for path in config.fit for record in read_json(path)]
        links = measured_links(known, run.header.environment["device_name"], context.backend)
    rows, model = config.rows(), config.model()
    planned = [
        PlannedStep(model, config.batch, row.strategy.name, config.dtype) for row in rows
    ]
    require(planned, context.device, context, some=context.device.type == "cuda")
    bench = Workbench(
        context, model, batch_size=config.batch, compute_dtype=DTYPES[config.dtype], seed=config.seed
    )
    run.progress("timing the local step, backward's gradients, all-reduces and contention")
    local = bench.time_rounds(rows[:1], rounds=1, warmup=config.warmup, steps=max(config.steps, 3))["local"]
    parts = collectives.gather_objects(measure_parts(config, context, local, links), context.group)[0]
    predicted = {row.name: predict(config, parts, row.bucket_size_mb) for row in rows if row.name != "local"}
    timings = bench.time_rounds(
        rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=run.progress
    )
    shared = {"backend": context.backend, "num_parameters": model.num_parameters, "context": model.context_length}
    shared |= {"fit_from_records": links is not None}
    run.add(PARTS, parts.describe(), **shared)
    for row in rows:
        timing = timings[row.name]
        metrics: dict[str, Any] = {"step_p50_ms": "OOM"}
        if not timing.out_of_memory:
            metrics = {f"step_{p}_ms": value for p, value in percentiles(timing.phases["step"]).items()}
            metrics["noise_pct"] = noise_of(metrics)
            metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
        if row.strategy.name == OURS:
            metrics |= predicted[row.name]
            if not timing.out_of_memory:
                metrics["error_pct"] = 100 * (metrics["predicted_step_ms"] / metrics["step_p50_ms"] - 1)
        bucket_size = row.bucket_size_mb if row.strategy.has_buckets else "none"
        run.add(row.name, metrics, **shared, strategy=row.strategy.name, bucket_size_mb=bucket_size)
    run.add(OPTIMUM, optimum(run.records), **shared)
