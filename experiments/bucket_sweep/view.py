"""What a reader gets: table, the best bucket size, findings, and step time against bucket size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.experiment import Column, Record, View, headline_from
from distlab.report import NOISE, TIE, Panel, Series, is_number, lines, measured, tied

from .prediction import OPTIMUM, OURS, PARTS, PEER

COLUMNS = [
    Column("variant", "strategy"),
    Column("metrics.buckets", "buckets", "d", missing=""),
    Column("metrics.step_p20_ms", "step p20 ms", ".1f", missing=""),
    Column("metrics.step_p50_ms", "p50", ".1f", missing=""),
    Column("metrics.step_p80_ms", "p80", ".1f", missing=""),
    NOISE,
    Column("metrics.predicted_step_ms", "predicted ms", ".1f", missing=""),
    Column("metrics.error_pct", "error %", "+.1f", missing=""),
    Column("metrics.predicted_comm_ms", "predicted comm ms", ".1f", missing=""),
    Column("metrics.predicted_exposed_comm_ms", "exposed", ".1f", missing=""),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30, missing=""),
]


headline = headline_from(
    "Bucket sizes: {size} ({num_parameters:M} parameters), batch {batch} × context {context} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}"
)


def optimum(records: Sequence[Record]) -> dict[str, Any]:
    """The best bucket sizes, measured and predicted, and what following the prediction costs."""
    done = [r for r in records if isinstance(r.metrics.get("step_p50_ms"), float)]
    ours = [r for r in done if r.config.get("strategy") == OURS]
    torchs = (r for r in done if r.config.get("strategy") == PEER)
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
    if peer := min(torchs, key=lambda r: r.metrics["step_p50_ms"], default=None):
        found |= {"torch_best_bucket_mb": _label(peer), "torch_best_step_ms": peer.metrics["step_p50_ms"]}
    return found


def _label(record: Record) -> str:
    size = record.config["bucket_size_mb"]
    return "unbounded" if size is None else f"{size:g}"


def findings(records: Sequence[Record]) -> list[str]:
    """The optimum both ways, and the parts that the prediction is made of."""
    lines = []
    for record in records:
        m = record.metrics
        if record.variant == OPTIMUM and m:
            tie = TIE if m["predicted_best_bucket_mb"] in m.get("tied_with_best_mb", ()) else ""
            ties = f" (tie with {', '.join(m['tied_with_best_mb'])})" if m.get("tied_with_best_mb") else ""
            lines.append(
                f"Best measured: {m['best_bucket_mb']} MiB{ties}, {m['best_step_ms']:.1f} ms. Predicted best: "
                f"{m['predicted_best_bucket_mb']} MiB, which takes {m['step_at_predicted_best_ms']:.1f} ms "
                f"({m['regret_pct']:+.1f} %{tie}). Largest error of a prediction: "
                f"{m['largest_error_pct']:+.1f} %."
            )
            if "torch_best_step_ms" in m:
                lines.append(
                    f"torch DDP's best: {m['torch_best_bucket_mb']} MiB, {m['torch_best_step_ms']:.1f} ms."
                )
        if record.variant == PARTS:
            lines.append(
                f"Parts: forward and backward {m['forward_backward_ms']:.1f} ms, of which backward "
                f"{m['backward_ms']:.1f}; the first gradient after {m['first_gradient_ms']:.1f} ms; beside an "
                f"all-reduce backward runs at {m['compute_rate']:.2f} of its speed and the all-reduce at "
                f"{m['communication_rate']:.2f}; packing at {m['pack_gb_per_s']:.0f} GB/s, of "
                f"{m.get('packed_parameters', len(m['ready_ms']))} of {len(m['ready_ms'])} parameters."
            )
    return lines


def draw(records: Sequence[Record], path: Path) -> None:
    """Step time against bucket size: points measured, line predicted."""
    rows = [r for r in records if r.config.get("strategy") in (OURS, PEER)]
    sizes = [r.config["bucket_size_mb"] for r in rows]
    finite = sorted({size for size in sizes if size is not None})
    beyond = 4 * finite[-1] if finite else 1.0
    ticks = [(size, f"{size:g}") for size in finite] + [(beyond, "all")] * (None in sizes)
    series = []
    for strategy, label in ((OURS, "bucketed, measured"), (PEER, "torch DDP, measured")):
        mine = [r for r in rows if r.config["strategy"] == strategy and is_number(r.metrics["step_p50_ms"])]
        x = [beyond if r.config["bucket_size_mb"] is None else r.config["bucket_size_mb"] for r in mine]
        if mine:
            peer = strategy == PEER
            series += measured(label, x, mine, "step", "bucketed, predicted", "predicted_step_ms", hollow=peer)
    local = next((r.metrics.get("step_p50_ms") for r in records if r.variant == "local"), None)
    if isinstance(local, float):
        series.append(Series("no communication", [min(finite or [1.0]), beyond], [local, local], line="--"))
    panel = Panel("", "bucket size (MiB)", "step (ms)", series, log_x=10, x_ticks=ticks)
    lines(path, [panel], title=headline(records))


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=(
        *("variant", "buckets", "step_p50_ms", "noise_pct", "predicted_step_ms", "error_pct"),
        *("predicted_exposed_comm_ms", "peak_alloc_bytes"),
    ),
    pictures={"bucket_sweep.png": draw},
    findings=findings,
    reading="A small bucket is sent early and costs a latency; a large one is sent late, and the last is fully "
    "exposed. "
    "If communication takes longer than backward, it must above all start early and not be slowed. “all” is "
    "one unbounded bucket: nothing overlaps.",
    prediction="Every bucket is complete when its last gradient is computed and, unless it was written there, packed; "
    "buckets are sent in order, each for the time of the fit; during a transfer, backward and the transfer run at the "
    "rates measured beside each other (distlab.theory.step_time.pipeline). Nothing is fitted to a measured "
    "step with buckets.",
    noise="Error bars reach from p20 to p80 of the steps.",
)
