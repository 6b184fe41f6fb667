"""What was predicted beside what was measured, found by the names of the metrics.

`predicted_step_ms` belongs to `step_ms`, `measured_step_ms`, or their medians with `_p50` before the unit; so does
`predicted_peak_bytes` to `peak_alloc_bytes`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.report.record import Record

PREFIX = "predicted_"


@dataclass(frozen=True)
class Compared:
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
            measured = _measured(record.metrics, name)
            if _is_number(predicted) and measured is not None:
                error = (
                    100 * (predicted / measured - 1) if measured else (0.0 if predicted == measured else None)
                )
                found.append(Compared(record.variant, name.removeprefix(PREFIX), predicted, measured, error))
    return found


@dataclass(frozen=True)
class Accuracy:
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


def _measured(metrics: Mapping[str, Any], name: str) -> float | None:
    if not name.startswith(PREFIX):
        return None
    base = name.removeprefix(PREFIX)
    median = base.removesuffix("_ms") + "_p50_ms"
    allocated = base.removesuffix("_bytes") + "_alloc_bytes"
    for candidate in (base, median, allocated):
        for key in (candidate, f"measured_{candidate}"):
            if _is_number(metrics.get(key)):
                return metrics[key]
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
