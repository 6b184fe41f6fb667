"""Bus bandwidth against size, and times with their fits."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from distlab.measure.bandwidth import BY_HAND, LIBRARY, traffic
from distlab.report.charts import Panel, Series, lines
from distlab.report.record import Record

from .config import KIB
from .rows import headline, timings


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
    return [(4**k * KIB, text) for k, text in ticks if 4**k * KIB <= 2 * largest]
