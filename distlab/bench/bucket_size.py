"""Which bucket size a recorded sweep found best."""

from collections.abc import Iterable
from typing import Any


def best_bucket_size(
    records: Iterable[Any], *, device_name: str, world_size: int, size: str, batch: int
) -> float | None:
    """The measured best bucket size in MiB (None: unbounded) for a model on a machine, for `--bucket-size-mb auto`.

    Where this batch was not swept the nearest counts; another device, model or number of ranks never does.

    Raises:
        ValueError: nothing of the kind was swept; the message says what to run.
    """
    fitting = [
        r
        for r in records
        if r.experiment == "bucket_sweep"
        and r.config.get("strategy") == "bucketed"
        and isinstance(r.metrics.get("step_p50_ms"), float)
        and (r.environment["device_name"], r.config["world_size"], r.config["size"])
        == (device_name, world_size, size)
    ]
    if not fitting:
        raise ValueError(
            f"no bucket sweep of {size} on {world_size} × {device_name} is on record: run `distlab run bucket_sweep "
            f"--size {size} --nproc {world_size}` here and name its records with --bucket-sweep, or give a size in MiB"
        )
    nearest = min({r.config["batch"] for r in fitting}, key=lambda known: (abs(known - batch), known))
    best = min((r for r in fitting if r.config["batch"] == nearest), key=lambda r: r.metrics["step_p50_ms"])
    return best.config["bucket_size_mb"]
