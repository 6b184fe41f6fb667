"""What a reader gets: the table, who wins where, and how to read it."""

from distlab.report import Column, Record, View

from . import __doc__ as QUESTION
from .pictures import plot_bars, plot_roofline
from .rows import EXPERIMENT
from .turns import over_ours

EQUAL_PCT = 1.0  # differences below this, or below the row's own noise, are none

COLUMNS = [
    Column("config.label", "operation", align="left"), Column("config.direction", ""), Column("variant", "variant"),
    Column("metrics.time_p50_ms", "p50 µs", ".1f", scale=1000),
    Column("metrics.noise_pct", "noise %", ".1f", missing=""), Column("metrics.rounds", "rounds", missing=""),
    Column("metrics.gb_per_s", "GB/s", ",.0f"),
    Column("metrics.of_copy_pct", "% of copy", ".0f", missing=""),
    Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", missing=""),
    Column("metrics.kernels", "kernels"), Column("metrics.registers", "registers", missing=""),
    Column("metrics.spill_bytes", "spilled", missing=""),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30), Column("metrics.error", "error", ".1e"),
    Column("metrics.speed_up", "× naive", ".2f", missing=""),
    Column("metrics.predicted_speed_up", "predicted", ".2f", missing=""), Column("metrics.status", "status"),
]


def headline(records: list[Record]) -> str:
    """What was measured on, and how, for the line above a table."""
    r = records[0]
    in_turns = "in turns where rounds are given, else " * any(x.metrics.get("rounds") for x in records)
    return (f"{r.environment.get('device_name', 'CPU')}, torch {r.environment.get('torch', '?')}; copy "
            f"{_limit(records, 'copy_gb_per_s')} GB/s, cuBLAS {_limit(records, 'cublas_tflop_per_s')} TFLOP/s; "
            f"variants timed {in_turns}one after the other")


def _limit(records: list[Record], name: str) -> str:
    """A ceiling as it was measured: a run that was resumed has one of every process, and rows are held against their
    own."""
    *others, last = dict.fromkeys(f"{x.metrics[name]:,.0f}" for x in records if name in x.metrics) or ["0"]
    return f"{', '.join(others)} and {last}" if others else last


def verdicts(records: list[Record]) -> list[str]:
    """How many rows nobody else wins, one line for each that a peer does, and how far predictions were off."""
    groups: dict[tuple[str, str], dict[str, Record]] = {}
    for r in records:
        if r.metrics.get("status") == "ok":
            groups.setdefault((r.config["label"], r.config["direction"]), {})[r.variant] = r
    lost, alike, held = [], 0, 0
    for (label, direction), rows in groups.items():
        times = {variant: r.metrics["time_p50_ms"] for variant, r in rows.items()}
        mine = times.pop("ours", None)
        if mine is None or not times:
            continue
        held += 1
        ratios = {variant: over_ours(rows[variant].metrics, rows["ours"].metrics) for variant in times}
        best = min(ratios, key=ratios.get)
        behind = 100 * (1 / ratios[best] - 1)
        limit = max(EQUAL_PCT, rows["ours"].metrics.get("noise_pct") or 0)
        alike += abs(behind) <= limit
        if behind > limit:
            lost.append(f"{label} {direction}: {best} is faster by {behind:.1f} %, {1000 * times[best]:.1f} µs against "
                        f"{1000 * mine:.1f}")
    lines = [f"in {held - len(lost)} of {held} rows no peer is faster; in {alike} the fastest peer and ours differ by "
             f"no more than {EQUAL_PCT:g} % or the row's noise"]
    errors = [abs(r.metrics["prediction_error_pct"]) for r in records if "prediction_error_pct" in r.metrics]
    if errors:
        lines.append(f"predicted speed-ups: {sum(e <= 15 for e in errors)} of {len(errors)} within 15 % of measured")
    return lines + lost


VIEW = View(
    name=EXPERIMENT,
    question=QUESTION.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"roofline.png": plot_roofline, "bars.png": plot_bars},
    findings=verdicts,
    reading="Of operations that are bound by memory, GB/s is the least traffic over the time, and its share of the "
    "copy's bandwidth in the same run says how far there is to go; products are held against cuBLAS. Errors are "
    "against float64, relative to the largest value; a row beyond the tolerance of its type says WRONG. Peak is what "
    "the call holds at most: inputs, results and what lies between. In the roofline each number is one of our kernels, "
    "under the two ceilings measured in this run.",
    prediction="The speed-up over the naive form: what the naive form's operators move, counted at torch's dispatcher, "
    "at the rates that copies, broadcasts, reductions and widening casts reach in this run, over the bytes that the "
    "fused kernel moves at the copy's rate.",
    noise="Ours is timed before and after its peers; the time is the mean of the two and the noise their difference. "
    "Rows bound by arithmetic, whose clock the card's power sets, are timed in turns where all variants fit in memory "
    "at once: `rounds` says in how many, and a row without was timed one after the other. In turns, times are of all "
    "rounds, peers are compared with ours within each round, and the noise is how far from 1 the 95 % interval of ours "
    "over ours reaches.",
)
