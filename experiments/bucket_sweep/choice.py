"""Which size a sweep speaks for."""

from collections.abc import Sequence
from typing import Any

from distlab.report.noise import tied
from distlab.report.record import Record

from .config import OURS, PEER


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
