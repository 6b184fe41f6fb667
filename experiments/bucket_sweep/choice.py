"""Which size a sweep speaks for."""

from collections.abc import Iterable, Sequence
from typing import Any

from distlab.report.noise import tied
from distlab.report.record import Record

from .config import NAME, OURS, PEER


def optimum(records: Sequence[Record]) -> dict[str, Any]:
    """The best bucket sizes, measured and predicted, and what following the prediction costs."""
    done = [r for r in records if isinstance(r.metrics.get("step_p50_ms"), float)]
    ours = [r for r in done if r.config.get("strategy") == OURS]
    torchs = [r for r in done if r.config.get("strategy") == PEER]
    if not ours:
        return {}
    best = min(ours, key=lambda r: r.metrics["step_p50_ms"])
    choice = min(ours, key=lambda r: r.metrics["predicted_step_ms"])
    found = {
        "best_bucket_mb": _label(best),
        "best_step_ms": best.metrics["step_p50_ms"],
        "predicted_best_bucket_mb": _label(choice),
        "step_at_predicted_best_ms": choice.metrics["step_p50_ms"],
        "regret_pct": 100 * (choice.metrics["step_p50_ms"] / best.metrics["step_p50_ms"] - 1),
        "largest_error_pct": max((r.metrics["error_pct"] for r in ours), key=abs),
        "tied_with_best_mb": [_label(r) for r in ours if r is not best and tied(r.metrics, best.metrics)],
    }
    if torchs:
        peer = min(torchs, key=lambda r: r.metrics["step_p50_ms"])
        found |= {"torch_best_bucket_mb": _label(peer), "torch_best_step_ms": peer.metrics["step_p50_ms"]}
    return found


def _label(record: Record) -> str:
    size = record.config["bucket_size_mb"]
    return "unbounded" if size is None else f"{size:g}"


def best_bucket_size(
    records: Iterable[Record], *, device_name: str, world_size: int, size: str, batch: int
) -> float | None:
    """The measured best bucket size in MiB (None: unbounded) for a model on a machine, for `--bucket-size-mb auto`.

    Where this batch was not swept the nearest counts; another device, model or number of ranks never does.

    Raises:
        ValueError: nothing of the kind was swept; the message says what to run.
    """
    fitting = [
        r
        for r in records
        if r.experiment == NAME
        and r.config.get("strategy") == OURS
        and isinstance(r.metrics.get("step_p50_ms"), float)
        and (r.environment["device_name"], r.config["world_size"], r.config["size"])
        == (device_name, world_size, size)
    ]
    if not fitting:
        raise ValueError(
            f"no bucket sweep of {size} on {world_size} × {device_name} is on record: run launch/bucket_sweep.py "
            f"--size {size} --nproc {world_size} here and name its records with --bucket-sweep, or give a size in MiB"
        )
    nearest = min({r.config["batch"] for r in fitting}, key=lambda known: (abs(known - batch), known))
    best = min((r for r in fitting if r.config["batch"] == nearest), key=lambda r: r.metrics["step_p50_ms"])
    return best.config["bucket_size_mb"]
