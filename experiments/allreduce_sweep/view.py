"""What a reader gets: table, findings, pictures."""

from collections.abc import Sequence

from distlab.report.record import Record
from distlab.report.table import Column
from distlab.report.view import View

from . import __doc__ as QUESTION
from .config import NAME
from .pictures import draw_bandwidth, draw_fits
from .rows import CONTENTION, contention, fits, headline, timings

COLUMNS = [
    Column("variant", "collective"),
    Column("config.world_size", "ranks"),
    Column("metrics.payload_bytes", "bytes", ",d", missing=""),
    Column("metrics.time_p50_ms", "p50 ms", ".3f", missing=""),
    Column("metrics.time_p80_ms", "p80 ms", ".3f", missing=""),
    Column("metrics.algbw_gb_per_s", "algbw GB/s", ".2f", missing=""),
    Column("metrics.busbw_gb_per_s", "busbw GB/s", ".2f", missing=""),
    Column("metrics.link_ms", "link's peak ms", ".3f", missing=""),
    Column("metrics.fit_ms", "fit ms", ".3f", missing=""),
    Column("metrics.fit_error_pct", "error %", "+.1f", missing=""),
    Column("metrics.max_abs_error", "max |Δ|", ".1e", missing=""),
]


def wrong_rows(records: Sequence[Record]) -> list[str]:
    """Rows whose result was not what it should be, one line each."""
    return [
        f"{record.variant} of {record.metrics['payload_bytes']:,} bytes on {record.config['world_size']} ranks: "
        f"the result is off by {record.metrics['max_abs_error']:g}"
        for record in timings(records)
        if record.metrics.get("max_abs_error", 0.0) > 1e-4  # averages round, sums of small integers do not
        or record.metrics.get("max_abs_error") != record.metrics.get("max_abs_error")
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """What follows: fits, contention, and what is wrong."""
    lines = [f"WRONG: {problem}" for problem in wrong_rows(records)]
    for record in fits(records):
        m, ranks = record.metrics, record.config["world_size"]
        large = m["fit_error_above_1mb_pct"]
        above = "" if large is None else f", {large:.1f} % above 1 MB"
        lines.append(
            f"{record.config['operation']} on {ranks} ranks: {m['latency_us']:.0f} µs, busbw up to "
            f"{m['fitted_busbw_gb_per_s']:.3g} GB/s, in {len(m['pieces'])} piece(s); largest error "
            f"{m['fit_error_max_pct']:.1f} %{above}"
        )
    for record in contention(records):
        m, what = record.metrics, record.variant.removeprefix(CONTENTION)
        lines.append(
            f"{what} beside an all-reduce on {record.config['world_size']} ranks: {m['compute_alone_ms']:.3f} ms "
            f"become {m['compute_beside_ms']:.3f} (rate {m['compute_rate']:.2f}); the all-reduce's "
            f"{m['comm_alone_ms']:.3f} become {m['comm_beside_ms']:.3f} (rate {m['communication_rate']:.2f})"
        )
    return lines


VIEW = View(
    name=NAME,
    question=QUESTION.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"bandwidth.png": draw_bandwidth, "fit.png": draw_fits},
    findings=findings,
    reading="algbw is the payload over the time; busbw multiplies it by the share of the payload that the busiest link "
    "carries in the best algorithm (2(N−1)/N for an all-reduce, (N−1)/N for gather and scatter, 1 for a broadcast), so "
    "that it can be held against the link's peak. ring_… are made of sends and receives in distlab.comm.ring; "
    "whole_all_reduce forwards whole tensors. Every row's result was checked before it was timed (max |Δ|).\n\n"
    "A rate beside an all-reduce is the speed relative to running alone, of the computation and of the all-reduce.",
    prediction="The fit is α + S/W by relative error, in as few pieces as stay within 8 %; pieces have three sizes or "
    "more. link's peak is the datasheet's NVLink bandwidth with no latency.",
    noise="p20 to p80 of the repetitions are the error bars of the fit's picture.",
)
