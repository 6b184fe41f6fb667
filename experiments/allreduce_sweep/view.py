"""What a reader gets: table, findings, bus bandwidth against size, and times with their fits."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from distlab.measure.bandwidth import BY_HAND, LIBRARY, traffic
from distlab.report.charts import Panel, Series, lines
from distlab.report.record import Record
from distlab.report.table import Column
from distlab.report.view import View

from .fitting import CONTENTION, contention, fits, timings

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


def headline(records: Sequence[Record]) -> str:
    """One line that says what the tables were measured on."""
    env, backends = records[0].environment, sorted({record.config["backend"] for record in records})
    ranks = sorted({record.config["world_size"] for record in records})
    return (
        f"Collectives on {', '.join(map(str, ranks))} ranks, {env['device_name']} ({', '.join(backends)}), "
        f"torch {env['torch']}"
    )


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
    found = [f"WRONG: {problem}" for problem in wrong_rows(records)]
    for record in fits(records):
        m, ranks = record.metrics, record.config["world_size"]
        large = m["fit_error_above_1mb_pct"]
        above = "" if large is None else f", {large:.1f} % above 1 MB"
        found.append(
            f"{record.config['operation']} on {ranks} ranks: {m['latency_us']:.0f} µs, busbw up to "
            f"{m['fitted_busbw_gb_per_s']:.3g} GB/s, in {len(m['pieces'])} piece(s); largest error "
            f"{m['fit_error_max_pct']:.1f} %{above}"
        )
    for record in contention(records):
        m, what = record.metrics, record.variant.removeprefix(CONTENTION)
        found.append(
            f"{what} beside an all-reduce on {record.config['world_size']} ranks: {m['compute_alone_ms']:.3f} ms "
            f"become {m['compute_beside_ms']:.3f} (rate {m['compute_rate']:.2f}); the all-reduce's "
            f"{m['comm_alone_ms']:.3f} become {m['comm_beside_ms']:.3f} (rate {m['communication_rate']:.2f})"
        )
    return found


def draw_bandwidth(records: Sequence[Record], path: Path) -> None:
    """Bus bandwidth against size, a panel per number of ranks."""
    panels = [
        Panel(y_label="bus bandwidth (GB/s)", series=_bandwidth_series(rows), **shared)
        for rows, shared in _by_ranks(records)
    ]
    lines(path, panels, title=headline(records))


def draw_fits(records: Sequence[Record], path: Path) -> None:
    """Times of the library's collectives with their fits, a panel per number of ranks."""
    panels = [
        Panel(y_label="time (ms)", log_y=True, series=_time_series(rows), **shared)
        for rows, shared in _by_ranks(records)
    ]
    panels = [panel for panel in panels if panel.series]
    if panels:
        lines(path, panels, title=f"Measured times and α–β fits in pieces. {headline(records)}")


def _by_ranks(records: Sequence[Record]) -> Iterator[tuple[list[Record], dict]]:
    rows = [r for r in timings(records) if isinstance(r.metrics.get("time_p50_ms"), float)]
    for key in dict.fromkeys((r.config["world_size"], r.config["backend"]) for r in rows):
        mine = [r for r in rows if (r.config["world_size"], r.config["backend"]) == key]
        mine.sort(key=lambda r: r.metrics["payload_bytes"])
        yield mine, {"title": f"{key[0]} ranks, {key[1]}", "x_label": "payload", "x_ticks": _ticks(mine)}


def _bandwidth_series(rows: Sequence[Record]) -> list[Series]:
    series = []
    for name in dict.fromkeys(r.variant for r in rows):
        mine = [r for r in rows if r.variant == name]
        x, y = ([r.metrics[m] for r in mine] for m in ("payload_bytes", "busbw_gb_per_s"))
        like = None if name == "whole_all_reduce" else name.removeprefix("ring_")
        series.append(Series(name, x, y, line="--" if name in BY_HAND else "-", like=like))
    links = [r.metrics["link_ms"] for r in rows if r.variant == "all_reduce" and r.metrics.get("link_ms")]
    if links:
        peak = rows[0].metrics["payload_bytes"] * traffic(rows[0].variant, rows[0].config["world_size"])
        peak = peak / rows[0].metrics["link_ms"] / 1e6
        x = [min(r.metrics["payload_bytes"] for r in rows), max(r.metrics["payload_bytes"] for r in rows)]
        series.append(Series("peak of the link", x, [peak, peak], line="-", like="~"))
    return series


def _time_series(rows: Sequence[Record]) -> list[Series]:
    series = []
    for name in (name for name in LIBRARY if any(r.variant == name for r in rows)):
        mine = [r for r in rows if r.variant == name]
        x = [r.metrics["payload_bytes"] for r in mine]
        low, y, high = ([r.metrics[f"time_{p}_ms"] for r in mine] for p in ("p20", "p50", "p80"))
        series.append(Series(name, x, y, low, high))
        fitted = [r.metrics.get("fit_ms") for r in mine]
        if None not in fitted:
            series.append(Series(f"{name}, fit", x, fitted, line="-", like=name))
    return series


def _ticks(rows: Sequence[Record]) -> list[tuple[float, str]]:
    largest = max(r.metrics["payload_bytes"] for r in rows)
    ticks = ((1, "4 KiB"), (3, "64 KiB"), (5, "1 MiB"), (7, "16 MiB"), (9, "256 MiB"))
    return [(4**k * 1024, text) for k, text in ticks if 4**k * 1024 <= 2 * largest]


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=(
        *("variant", "world_size", "payload_bytes", "time_p50_ms", "busbw_gb_per_s", "fit_error_pct", "max_abs_error"),
    ),
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
