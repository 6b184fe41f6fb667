"""One row per operation and direction: ours, each peer, and the prediction side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from distlab.report import Column, Record, View
from distlab.report.noise import TIE

from .rows import EXPERIMENT
from .turns import over_ours
from .view import EQUAL_PCT, headline

COMPARISON = "kernel_comparison"
PEERS = ("naive", "builtin", "compile", "template", "liger")
KEPT = ("time_p50_ms", "noise_pct", "of_copy_pct", "of_cublas_pct", "peak_alloc_bytes", "error", "speed_up",
        "predicted_speed_up", "rounds", "copy_gb_per_s", "cublas_tflop_per_s")


def beside_peers(records: Sequence[Record]) -> list[Record]:
    """Records of the experiment, turned: our row with the times of the others as further metrics; the variant is the
    operation."""
    others: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for r in records:
        others.setdefault((r.config["label"], r.config["direction"]), {})[r.variant] = r.metrics
    found = []
    for r in records:
        if r.variant != "ours" or r.experiment != EXPERIMENT:
            continue
        rows = others[r.config["label"], r.config["direction"]]
        times = {f"{peer}_ms": rows[peer].get("time_p50_ms") if peer in rows else None for peer in PEERS}
        timed = [rows[peer] for peer in PEERS if times[f"{peer}_ms"] is not None and r.metrics.get("time_p50_ms")]
        metrics = {name: r.metrics.get(name) for name in KEPT} | times
        metrics["peer_over_ours"] = min((over_ours(peer, r.metrics) for peer in timed), default=None)
        found.append(Record(COMPARISON, r.config["operation"], r.config, metrics, r.environment, r.commit))
    return found




def _tie(record: Record) -> str:
    ratio, noise = record.metrics["peer_over_ours"], record.metrics.get("noise_pct") or 0.0
    return TIE if abs(100 * (ratio - 1)) <= max(EQUAL_PCT, noise) else ""


COLUMNS = [
    Column("config.label", "operation", align="left"), Column("config.direction", ""),
    Column("metrics.time_p50_ms", "ours µs", ",.1f", scale=1000), Column("metrics.noise_pct", "± %", ".1f"),
    *(Column(f"metrics.{peer}_ms", peer, ",.1f", scale=1000, missing="") for peer in PEERS),
    Column("metrics.peer_over_ours", "best peer / ours", ".2f", note=_tie),
    Column("metrics.rounds", "rounds", missing=""),
    Column("metrics.of_copy_pct", "% of copy", ".0f", missing=""),
    Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", missing=""),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30), Column("metrics.error", "error", ".0e"),
    Column("metrics.speed_up", "naive / ours", ".1f", missing=""),
    Column("metrics.predicted_speed_up", "predicted", ".1f", missing=""),
]

def columns_of(records: Sequence[Record]) -> list[Column]:
    """COLUMNS without peers that none of these records knows, and without rounds where none was timed in turns."""
    optional = {f"metrics.{peer}_ms" for peer in PEERS} | {"metrics.rounds"}
    return [column for column in COLUMNS
            if column.key not in optional or any(column.value(r) is not None for r in records)]


VIEW = View(
    name=COMPARISON,
    question="Ours beside every peer, one row per operation and direction",
    columns=columns_of,
    headline=headline,
    reading="Times in µs. Above 1 in `best peer / ours` ours is the faster one; ± is how far two timings of ours, one "
    "before and one after the peers, lie apart. Where `rounds` has a number all were timed in turns in so many rounds: "
    "the ratio is the median over rounds, and ± how far the 95 % interval of ours over ours reaches.",
)
