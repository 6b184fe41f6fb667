"""What was predicted beside what was measured, found by the names of the metrics.

`predicted_step_ms` belongs to `step_ms`, `measured_step_ms`, or their medians with `_p50` before the unit; so does
`predicted_peak_bytes` to `peak_alloc_bytes`.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distlab.report.record import Record
from distlab.report.table import Column, grouped, is_number

PREFIX = "predicted_"


def _figure(value: float) -> str:
    return format(value, ",d" if isinstance(value, int) else ",.4g" if abs(value) < 1e4 else ",.0f")


COMPARED = (
    Column("variant", "variant"),
    Column("config.quantity", "quantity", align="left"),
    Column("metrics.predicted", "predicted", _figure),
    Column("metrics.measured", "measured", _figure),
    Column("metrics.error_pct", "error %", "+.1f"),
)
ACCURACY = (
    Column("config.quantity", "quantity", align="left"),
    Column("metrics.figures", "figures"),
    Column("metrics.median_error_pct", "median |error| %", ".1f"),
    Column("metrics.error_pct", "worst error %", "+.1f"),
    Column("variant", "worst at"),
)


def compared(records: Sequence[Record]) -> list[Record]:
    """A row per predicted figure whose measured one is in the same record; `error_pct` is predicted over measured,
    minus one, and None where the measured figure is zero and the other is not.
    """
    found = []
    for record in records:
        for name, predicted in record.metrics.items():
            quantity = name.removeprefix(PREFIX)
            measured = _measured(record.metrics, quantity)
            if name.startswith(PREFIX) and is_number(predicted) and measured is not None:
                error = 100 * (predicted / measured - 1) if measured else None if predicted else 0.0
                metrics = {"predicted": predicted, "measured": measured, "error_pct": error}
                found.append(replace(record, config={"quantity": quantity}, metrics=metrics))
    return found


def accuracy(figures: Sequence[Record]) -> list[Record]:
    """A row per quantity of `compared`'s, in order of appearance: its worst figure, with the median size of all errors;
    figures without an error are left out.
    """
    known = [figure for figure in figures if figure.metrics["error_pct"] is not None]
    rows = []
    for group in grouped(known, lambda figure: figure.config["quantity"]).values():
        worst = max(group, key=lambda figure: abs(figure.metrics["error_pct"]))
        median = statistics.median(abs(figure.metrics["error_pct"]) for figure in group)
        metrics = worst.metrics | {"figures": len(group), "median_error_pct": median}
        rows.append(replace(worst, variant=worst.variant if worst.metrics["error_pct"] else "none", metrics=metrics))
    return rows


def _measured(metrics: Mapping[str, Any], quantity: str) -> float | None:
    median = quantity.removesuffix("_ms") + "_p50_ms"
    allocated = quantity.removesuffix("_bytes") + "_alloc_bytes"
    names = [name for base in (quantity, median, allocated) for name in (base, f"measured_{base}")]
    return next((metrics[name] for name in names if is_number(metrics.get(name))), None)
