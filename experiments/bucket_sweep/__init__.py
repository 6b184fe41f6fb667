"""Which bucket size is best here, and could one have known? Step time against bucket size, measured and predicted.

    distlab run bucket_sweep                                           all GPUs, or two CPU ranks
    distlab run bucket_sweep --nproc 2 --size xl --batch 2

Before anything is timed with buckets, the parts are: when backward has made each gradient, what all-reduces cost
(a fit, from records of allreduce_sweep or taken here), how backward and an all-reduce slow each other down, and what
packing costs. From these the step with every bucket size is predicted, then it is measured, and torch DDP's beside.

What to sweep, the parts and the step that they predict are in `prediction`, table, best size, findings and
picture in `view`.
"""

from distlab.comm import collectives
from distlab.experiment import Experiment, RankContext, Run
from distlab.report import noise_of, read_json
from distlab.simulate.calibrate import measured_links

from .prediction import OPTIMUM, OURS, PARTS, BucketSweepConfig, measure_parts, predict
from .view import VIEW, optimum


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
    rows = config.rows()
    bench = config.workbench(context, rows, some=True)
    run.progress("timing the local step, backward's gradients, all-reduces and contention")
    local = bench.time_rounds(rows[:1], rounds=1, warmup=config.warmup, steps=max(config.steps, 3))["local"]
    parts = collectives.gather_objects(measure_parts(config, context, local, links), context.group)[0]
    predicted = {row.name: predict(config, parts, row.bucket_size_mb) for row in rows if row.name != "local"}
    timings = bench.time_rounds(
        rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=run.progress
    )
    shared = bench.facts | {"fit_from_records": links is not None}
    run.add(PARTS, parts, **shared)
    for row in rows:
        timing = timings[row.name]
        metrics = timing.metrics()
        metrics["noise_pct"] = noise_of(metrics)
        if row.strategy.name == OURS:
            metrics |= predicted[row.name]
            if not timing.out_of_memory:
                metrics["error_pct"] = 100 * (metrics["predicted_step_ms"] / metrics["step_p50_ms"] - 1)
        bucket_size = row.bucket_size_mb if row.strategy.has_buckets else "none"
        run.add(row.name, metrics, **shared, strategy=row.strategy.name, bucket_size_mb=bucket_size)
    run.add(OPTIMUM, optimum(run.records), **shared)


QUICK = {
    "size": "tiny", "dtype": "fp32", "batch": 2, "context": 32, "bucket_sizes_mb": (1.0, 4.0, None), "warmup": 1,
    "steps": 4, "rounds": 1,
}  # fmt: skip
PRESETS = {
    "gpu": {"size": "medium", "batch": 8, "dtype": "bf16", "warmup": 3, "steps": 8},
    "cpu": {"steps": 5, "bucket_sizes_mb": (0.25, 1.0, 2.0, 4.0, 10.0, None)},
    "quick": QUICK,
    "smoke": QUICK | {"batch": 1, "context": 16, "bucket_sizes_mb": (1.0, None), "steps": 3},
}
EXPERIMENT = Experiment(BucketSweepConfig, measure, VIEW, presets=PRESETS, ranks="many")
