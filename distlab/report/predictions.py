"""What was predicted beside what was measured, found by the names of the metrics.

`predicted_step_ms` belongs to `step_ms`, `measured_step_ms`, or their medians with `_p50` before the unit; so does
`predicted_peak_bytes` to `peak_alloc_bytes`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distlab.report.record import Record
from distlab.report.table import is_number

PREFIX = "predicted_"


class Compared(NamedTuple):
    """One figure of one record.

    Attributes:
        quantity: name of the metric with its unit, without `predicted_`.
        error_pct: predicted over measured, minus one; None where the measured figure is zero and the other is not.
    """

    variant: str
    quantity: str
    predicted: float
    measured: float
    error_pct: float | None


def compared(records: Sequence[Record]) -> list[Compared]:
    """Every predicted figure whose measured one is in the same record."""
    found = []
    for record in records:
        for name, predicted in record.metrics.items():
            quantity = name.removeprefix(PREFIX)
            measured = _measured(record.metrics, quantity)
            if name.startswith(PREFIX) and is_number(predicted) and measured is not None:
                error = 100 * (predicted / measured - 1) if measured else None if predicted else 0.0
                found.append(Compared(record.variant, quantity, predicted, measured, error))
    return found


class Accuracy(NamedTuple):
    """How good the predictions of one quantity are, over all records; errors in % of the measured figure."""

    quantity: str
    figures: int
    median_error_pct: float
    worst_error_pct: float
    worst_variant: str


def accuracy(figures: Sequence[Compared]) -> list[Accuracy]:
    """One line per quantity, in order of appearance; figures without an error are left out."""
    lines = []
    for quantity in dict.fromkeys(figure.quantity for figure in figures):
        known = [f for f in figures if f.quantity == quantity and f.error_pct is not None]
        if known:
            worst = max(known, key=lambda figure: abs(figure.error_pct))
            median = statistics.median(abs(figure.error_pct) for figure in known)
            lines.append(Accuracy(quantity, len(known), median, worst.error_pct, worst.variant))
    return lines


def _measured(metrics: Mapping[str, Any], quantity: str) -> float | None:
    median = quantity.removesuffix("_ms") + "_p50_ms"
    allocated = quantity.removesuffix("_bytes") + "_alloc_bytes"
    names = [name for base in (quantity, median, allocated) for name in (base, f"measured_{base}")]
    return next((metrics[name] for name in names if is_number(metrics.get(name))), None)
