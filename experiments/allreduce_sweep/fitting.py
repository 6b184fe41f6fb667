"""Which rows of a sweep are what, and the fits of its measured times."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from distlab.measure.bandwidth import OPERATIONS, traffic
from distlab.report.record import Record
from distlab.theory.collective_time import CollectiveFit, fit_collective, relative_errors

FIT, CONTENTION = "fit ", "contention "


def timings(records: Sequence[Record]) -> list[Record]:
    """The rows that are times of collectives."""
    return [record for record in records if record.variant in OPERATIONS]


def fits(records: Sequence[Record]) -> list[Record]:
    """The rows that are fits."""
    return [record for record in records if record.variant.startswith(FIT)]


def contention(records: Sequence[Record]) -> list[Record]:
    """The rows on contention."""
    return [record for record in records if record.variant.startswith(CONTENTION)]


def with_fits(records: Sequence[Record]) -> list[Record]:
    """The records with a fit after the times of each collective on each group, which carry its seconds and errors.

    Fits that are there already are made anew: `with_fits(read_json(path))` brings an older sweep up to date. Times of
    a payload that did not fit in memory are left out, and fewer than two of them have no fit.
    """
    found = []
    rows = [record for record in records if not record.variant.startswith(FIT)]
    for (operation, _), group in itertools.groupby(rows, lambda r: (r.variant, r.config["world_size"])):
        mine = list(group)
        timed = [r for r in timings(mine) if r.metrics.get("time_p50_ms") not in (None, "OOM")]
        if len({r.metrics["payload_bytes"] for r in timed}) < 2:
            found += mine
            continue
        points = {r.metrics["payload_bytes"]: r.metrics["time_p50_ms"] / 1e3 for r in timed}
        fit = fit_collective(list(points), list(points.values()))
        found += [replace(r, metrics=r.metrics | _fitted(fit, r)) if r in timed else r for r in mine]
        config = {name: value for name, value in mine[0].config.items() if name != "num_bytes"}
        metrics = _metrics(fit, points, traffic(operation, config["world_size"]))
        found.append(replace(mine[0], variant=FIT + operation, config=config, metrics=metrics))
    return found


def _fitted(fit: CollectiveFit, record: Record) -> dict[str, float]:
    ms = 1e3 * fit.seconds(record.metrics["payload_bytes"])
    return {"fit_ms": ms, "fit_error_pct": 100 * (ms / record.metrics["time_p50_ms"] - 1)}


def _metrics(fit: CollectiveFit, points: dict[float, float], share: float) -> dict[str, object]:
    errors = relative_errors(fit, list(points), list(points.values()))
    large = [abs(error) for size, error in zip(points, errors, strict=True) if size > 1e6]
    return {
        "pieces": fit.to_list(),
        "latency_us": 1e6 * fit.pieces[0].latency_s,
        "fitted_busbw_gb_per_s": fit.pieces[-1].bytes_per_s * share / 1e9,
        "fit_error_max_pct": 100 * max(map(abs, errors)),
        "fit_error_above_1mb_pct": 100 * max(large) if large else None,
        "residuals_pct": [100 * error for error in errors],
    }
