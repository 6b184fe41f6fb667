"""Tables of `kernel_roofline`: variants, ours against every peer, verdicts and the roofline.

It reads records and measures nothing. The tables are VIEW and COMPARISON, at the end. Next: the
table of chains is in `chains`.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from distlab.experiment import Column, Record, View
from distlab.report import (
    FASTER,
    SLOWER,
    TIE,
    UNCLEAR,
    clearly_longer,
    fastest,
    furthest_behind,
    host_bound,
    interval_of,
    noise_of,
    prediction_error,
    ratio_column,
    ratio_metrics,
    row_named,
    tie_mark,
    verdict_of,
    why_unclear,
    with_interval,
)
from distlab.report.style import BLUE, GREEN, INK, ORANGE, picture

from .cases import NO_BACKWARD, VARIANTS

PEERS = VARIANTS[1:-1]  # all variants but ours and the user's own
DIRECTIONS = {
    "fwd": ("o", BLUE, "forward"),
    "bwd": ("s", ORANGE, "backward"),
    "both": ("^", GREEN, "forward and backward"),
}
CLOSE_PCT = 15  # a prediction is close within this percentage of the measured ratio
NAMED_BELOW = 0.75  # the plot names points below this fraction of what the ceilings allow
NAME_GAP = 1.3  # least ratio of the heights of two names in the plot, on its logarithmic axis


def by_row(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """Return (operation and shape, direction) → variant → record."""
    # A row is what is compared with each other: one operation, one shape and one direction.
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault(operation_of(record), {})[record.variant] = record
    return rows


def operation_of(record: Record) -> tuple[str, str]:
    """Return the operation with its shape, and the direction."""
    return record.config["label"], record.config["direction"]


def headline(records: Sequence[Record]) -> str:
    """Return the device and its measured ceilings, for the line above a table."""
    env = records[0].environment
    where = f"{env.get('device_name', 'CPU')}, torch {env.get('torch', '?')}"
    # A record of an older version may have no ceilings.
    if not any("copy_gb_per_s" in r.metrics for r in records):
        return where
    copy = _ceilings_of_all_processes(records, "copy_gb_per_s")
    cublas = _ceilings_of_all_processes(records, "cublas_tflop_per_s")
    return f"{where}; copy {copy} GB/s, cuBLAS {cublas} TFLOP/s"


def _ceilings_of_all_processes(records: Sequence[Record], name: str) -> str:
    """Return the different values of a ceiling, joined by "and".

    Each process of a resumed run measures its own, and its rows are compared with those.
    """
    found = [f"{r.metrics[name]:,.0f}" for r in records if name in r.metrics]
    return " and ".join(dict.fromkeys(found))


OFF = prediction_error("predicted_over_naive", "over_naive")


def fastest_peer(rows: Sequence[Record], clock: str) -> Record | None:
    """Return the peer of a row whose median by this clock, `time` or `wall`, is the smallest."""
    peers = [row for row in rows if row.variant in PEERS]
    return fastest([row for row in peers if is_right(row)], f"{clock}_p50_ms")


def is_right(record: Record) -> bool:
    """Return whether a variant ran and passed its check."""
    return record.metrics.get("status") == "ok"


def compare(records: Sequence[Record]) -> list[Record]:
    """Return the rows, right ones with ratios to the fastest peer, the naive form and torch's."""
    # Wrong variants take no part: a kernel that skips work would be the fastest.
    groups = by_row([record for record in records if is_right(record)])
    found = []
    for record in records:
        if is_right(record):
            rows = list(groups[operation_of(record)].values())
            # The fastest on the device need not be the fastest in a loop, where the host may
            # decide.
            peer = fastest_peer(rows, "time")
            peer_wall = fastest_peer(rows, "wall")
            naive = row_named("naive", rows)
            builtin = row_named("builtin", rows)
            record = record.with_metrics(
                ratio_metrics("over_peer", record, peer, "time")
                | ratio_metrics("over_peer_wall", record, peer_wall, "wall")
                | ratio_metrics("over_naive", record, naive, "time")
                | ratio_metrics("over_builtin", record, builtin, "time")
            )
            # Only a user's kernel is compared with ours. For ours the ratio would be 1.
            if record.variant == "yours":
                ours = row_named("ours", rows)
                record = record.with_metrics(ratio_metrics("over_ours", record, ours, "time"))
        found.append(record)
    return found


def verdicts(records: Sequence[Record]) -> list[str]:
    """Compare ours with the fastest peer on the device and in a loop. Check the predictions."""
    lines = []
    for line in (
        _against_peers(records, "On the device", "over_peer", "time"),
        _against_peers(records, "Called in a loop", "over_peer_wall", "wall"),
    ):
        # A run without peers has no such line.
        if line:
            lines.append(line)
    return yours(records) + lines + _predictions(records)


def yours(records: Sequence[Record]) -> list[str]:
    """Compare a user's kernel with the lab's and with the fastest peer, on the device."""
    lines = []
    for record in records:
        if record.variant != "yours":
            continue
        where = " ".join(operation_of(record))
        if NO_BACKWARD in record.metrics["status"]:
            continue  # its rows say that there is no backward, which is not a mistake
        if not is_right(record):
            lines.append(f"Yours at {where}: {record.metrics['status']}.")
            continue
        parts = []
        for name, other in (("over_ours", "the lab's"), ("over_peer", "the fastest peer's")):
            if name in record.metrics:
                tie = ", a tie" if verdict_of(record, name) == UNCLEAR else ""
                parts.append(f"{with_interval(record, name)} of {other} time{tie}")
        if parts:
            lines.append(f"Yours at {where} takes {' and '.join(parts)}.")
    return lines


def _against_peers(records: Sequence[Record], how: str, ratio: str, clock: str) -> str:
    """Count the rows in which ours is faster and slower than the fastest peer.

    Empty if there is no peer.

    Args:
        how: beginning of the sentence.
        ratio: metric that compares ours with the fastest peer.
        clock: `time` or `wall`, the clock of this ratio.
    """
    found: dict[str, list[Record]] = {FASTER: [], SLOWER: [], UNCLEAR: []}
    slower_by = []  # ratio and name of each row in which a peer is faster
    for row, rows in by_row(records).items():
        ours = rows.get("ours")
        peer = fastest_peer(list(rows.values()), clock)
        if ours is None or peer is None or ratio not in ours.metrics:
            continue
        verdict = verdict_of(ours, ratio)
        found[verdict].append(ours)
        if verdict == SLOWER:
            measured = with_interval(ours, ratio)
            # A row that the host bounds is marked, since a faster kernel would not help it.
            name = f"{' '.join(row)} ({peer.variant}, ours / it {measured}{host_bound(ours)})"
            slower_by.append((ours.metrics[ratio], name))
    faster, unclear = len(found[FASTER]), found[UNCLEAR]
    compared = faster + len(found[SLOWER]) + len(unclear)
    if not compared:
        return ""
    slower = f"slower in {len(slower_by)}{furthest_behind(slower_by)}"
    line = f"{how} ours is faster than the fastest peer in {faster} of {compared} rows, {slower}."
    if unclear:
        line += f" In {len(unclear)} this run cannot tell. {why_unclear(unclear, ratio)}"
    return line


def _predictions(records: Sequence[Record]) -> list[str]:
    """Count predicted ratios that are within CLOSE_PCT of the whole measured interval."""
    close, far, unclear = 0, 0, []
    for record in records:
        predicted = record.metrics.get("predicted_over_naive")
        if record.variant != "ours" or OFF.value(record) is None:
            continue
        # A median within CLOSE_PCT is not enough: noise could have put it there. So the whole
        # interval decides.
        measured = interval_of(record, "over_naive")
        if measured is None:
            unclear.append(record)
            continue
        # Predicted over measured at both ends, in %; a ratio has no end at or below 0 unless its
        # noise is above 100 %.
        low = 100 * (predicted / measured.high - 1)
        high = 100 * (predicted / measured.low - 1) if measured.low > 0 else math.inf
        if low >= -CLOSE_PCT and high <= CLOSE_PCT:
            close += 1
        # The whole interval is outside, so noise cannot be the reason.
        elif low > CLOSE_PCT or high < -CLOSE_PCT:
            far += 1
        else:
            unclear.append(record)
    total = close + far + len(unclear)
    if not total:
        return []
    line = (
        f"Of {total} predicted ratios to the naive form {close} are within {CLOSE_PCT} %, "
        f"{far} are not."
    )
    if unclear:
        line += f" For {len(unclear)} this run cannot tell. {why_unclear(unclear, 'over_naive')}"
    return [line]


def beside_peers(records: Sequence[Record]) -> list[Record]:
    """Return a record per operation and direction: our row, with the times of others as metrics.

    The variant is the operation.
    """
    found = []
    for rows in by_row(records).values():
        # The table is about our kernels, and an operation without one has no row in it.
        if "ours" not in rows:
            continue
        ours = rows["ours"]
        metrics = dict(ours.metrics)
        for peer in PEERS:
            metrics[f"{peer}_ms"] = rows[peer].metrics.get("time_p50_ms") if peer in rows else None
        metrics["noise_pct"] = _noise(ours)
        found.append(
            Record(
                experiment=COMPARISON.name,
                variant=ours.config["operation"],
                config=ours.config,
                metrics=metrics,
                environment=ours.environment,
                commit=ours.commit,
            )
        )
    return found


def _noise(record: Record) -> float | None:
    return noise_of(record.metrics, "time")


def _tie(record: Record) -> str:
    """Return the mark of a tie, or nothing.

    Records of older versions have no interval: the noise of ours decides.
    """
    if "over_peer_low" in record.metrics:
        return tie_mark(record, "over_peer")
    ratio = record.metrics["over_peer"]
    noise = (record.metrics.get("noise_pct") or 0.0) / 100
    # Two rows tie if 1 is within the noise of ours.
    return TIE if ratio * (1 - noise) <= 1 <= ratio * (1 + noise) else ""


def wall_notes(record: Record) -> str:
    """Mark a wall time: ` host` if the host takes longer than the device, ` L2` if it is too short.

    Too short means below the device's time.
    """
    warm = " L2" if clearly_longer(record.metrics, "time", "wall") else ""
    return host_bound(record) + warm


# Columns of both tables
ROW = [Column("config.label", "operation", align="left"), Column("config.direction", "direction")]
WALL = Column(
    "metrics.wall_p50_ms", "wall µs", ",.1f", scale=1000, missing="", optional=True, note=wall_notes
)
WALL_OVER_PEER = ratio_column(
    "over_peer_wall", "ours ÷ best peer, wall", ".2f", missing="", optional=True
)
NOISE = Column("metrics.noise_pct", "noise ± %", ".1f", derived=_noise)
SHARES = [
    Column("metrics.of_copy_pct", "% of copy", ".0f", missing=""),
    Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", missing=""),
]
HELD = [
    Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30),
    Column("metrics.error", "error", ".0e"),
]
NAIVE = [
    ratio_column("over_naive", "ours ÷ naive (in fp32)", ".3f", missing=""),
    Column("metrics.predicted_over_naive", "predicted", ".3f", missing=""),
    OFF,
]
COMPARISON_COLUMNS = [
    *ROW,
    WALL,
    WALL_OVER_PEER,
    Column("metrics.time_p50_ms", "ours µs", ",.1f", scale=1000),
    NOISE,
    *(
        Column(f"metrics.{peer}_ms", peer, ",.1f", scale=1000, missing="", optional=True)
        for peer in PEERS
    ),
    Column("metrics.over_peer", "ours ÷ best peer", ".2f", note=_tie),
    *SHARES,
    *HELD,
    ratio_column("over_builtin", "ours ÷ builtin", ".2f", missing="", optional=True),
    ratio_column("over_ours", "yours ÷ ours", ".2f", missing="", optional=True),
    *NAIVE,
]


def plot_roofline(records: Sequence[Record], path: Path) -> None:
    """Draw every kernel of ours as a point under the two measured ceilings.

    Points far below the ceilings are named.
    """
    # A row that was not timed, or that counts no FLOPs, has no place in the plot.
    mine = [
        r
        for r in records
        if r.variant == "ours" and r.metrics.get("flops") and "tflop_per_s" in r.metrics
    ]
    if not mine:
        return
    title = (
        "Our kernels under the ceilings of the run; named are those below three quarters of them"
    )
    # Every process of a resumed run measures its own ceilings: the plot shows the highest.
    bandwidth = max(r.metrics["copy_gb_per_s"] for r in mine)
    peak = max(r.metrics["cublas_tflop_per_s"] for r in mine)

    def ceiling(intensity: float) -> float:
        """Return the TFLOP/s that the ceilings allow at FLOPs per byte."""
        return min(peak, intensity * bandwidth / 1000)

    with picture(path, title, 4.5) as figure:
        axes = figure.add_subplot()
        # At the knee both ceilings meet. GB/s times FLOPs per byte is GFLOP/s, hence the factor
        # 1,000.
        knee = 1000 * peak / bandwidth
        intensities = sorted([0.05, knee, max(2 * knee, 20000.0)])
        axes.plot(
            intensities,
            [ceiling(intensity) for intensity in intensities],
            color=INK,
            linewidth=1.2,
            label=f"measured: copy {bandwidth:,.0f} GB/s, cuBLAS {peak:,.0f} TFLOP/s",
        )
        for direction, (marker, colour, label) in DIRECTIONS.items():
            chosen = [r for r in mine if r.config["direction"] == direction]
            if chosen:
                axes.plot(
                    [_intensity(r) for r in chosen],
                    [r.metrics["tflop_per_s"] for r in chosen],
                    marker,
                    color=colour,
                    alpha=0.75,
                    markersize=4,
                    linestyle="none",
                    label=label,
                )
        named = [r for r in mine if r.metrics["tflop_per_s"] < NAMED_BELOW * ceiling(_intensity(r))]
        # From the top down. Points can be closer than two lines of text, so each name is at least
        # NAME_GAP below the one before it, and a line leads from it to its point.
        height = math.inf
        for r in sorted(named, key=lambda r: -r.metrics["tflop_per_s"]):
            intensity, rate = _intensity(r), r.metrics["tflop_per_s"]
            height = min(rate, height / NAME_GAP)
            left = intensity > 500  # left of the point: there is no room on its right
            axes.annotate(
                f"{r.config['label']} {r.config['direction']}",
                (intensity, rate),
                fontsize=5.5,
                ha="right" if left else "left",
                va="center",
                xytext=(intensity / 1.5 if left else intensity * 1.5, height),
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": INK},
            )
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("FLOPs per byte of least traffic")
        axes.set_ylabel("TFLOP/s")
        # The points are above the lower right corner: few FLOPs per byte are never fast.
        axes.legend(loc="lower right", frameon=True)


def _intensity(record: Record) -> float:
    """Return FLOPs per byte of least traffic."""
    return record.metrics["flops"] / record.metrics["min_bytes"]


VIEW = View(
    columns=[
        *ROW,
        Column("variant", "variant"),
        WALL,
        Column("metrics.host_p50_ms", "host µs", ",.1f", scale=1000, optional=True),
        Column("metrics.time_p50_ms", "device µs", ",.1f", scale=1000),
        NOISE,
        WALL_OVER_PEER,
        ratio_column("over_peer", "ours ÷ best peer", ".2f", missing="", optional=True),
        Column("metrics.gb_per_s", "GB/s", ",.0f"),
        *SHARES,
        Column("metrics.kernels", "kernels"),
        Column("metrics.kernel_names", "kernel names", ", ".join, align="left", optional=True),
        Column("metrics.registers", "registers", missing=""),
        Column("metrics.spill_bytes", "spilled", missing=""),
        Column("metrics.occupancy_pct", "occupancy %", ".0f", missing="", optional=True),
        *HELD,
        *NAIVE,
        Column("metrics.status", "status"),
    ],
    headline=headline,
    terminal=(
        "label",
        "direction",
        "variant",
        "wall_p50_ms",
        "time_p50_ms",
        "of_copy_pct",
        "status",
    ),
    pictures={"roofline.png": plot_roofline},
    derive=compare,
    findings=verdicts,
    reading="Device times are replays of a CUDA graph with the L2 flushed before each. Wall times "
    "are of calls in a loop, which find in the L2 what the call before left: one below its device "
    "time is marked L2, one that waits for the host is marked host. Ratios are this row's time "
    "over that of another row, below 1 it is faster. For memory-bound operations GB/s is the "
    "least traffic over the time; its share of the copy's bandwidth in this run shows what could "
    "still be gained. Matmuls are compared with cuBLAS. Errors are against float64, relative to "
    "the largest value; a row beyond the tolerance of its dtype says WRONG. Peak is what the call "
    "holds at most: inputs, results and intermediates. In the roofline each number is one of our "
    "kernels, under the two ceilings measured in this run.",
    prediction="The ratio to the naive form: the bytes that the fused kernel moves at the copy's "
    "rate, over what the naive form's operators move, counted at torch's dispatcher, at the rates "
    "that copies, broadcasts, reductions and widening casts reach in this run.",
    noise="All variants of a row are timed once in each of the interleaved rounds. Ratios are "
    "paired by round.",
)
COMPARISON = View(
    name="kernel_comparison",
    question="Our kernels against every peer, one row per operation and direction",
    columns=COMPARISON_COLUMNS,
    headline=headline,
    terminal=(
        "label",
        "direction",
        "wall_p50_ms",
        "over_peer_wall",
        "time_p50_ms",
        "noise_pct",
        "over_peer",
        "of_copy_pct",
    ),
    reading="Times in µs; wall is of calls in a loop, with a warm L2; the others are on the "
    "device, with a cold one. A wall time below its device time is marked L2. Ratios: below 1 "
    "ours is faster. The naive form widens its inputs to fp32, operation by operation, which "
    "makes the last ratio smaller; builtin is torch's own operators in the inputs' dtype, one for "
    "each operation.",
)
