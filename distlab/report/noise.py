"""What a row says of its own noise, and which differences are therefore none.

Noise is a row's own: on one machine a row may repeat itself within 1 % and the next not within 20 %. An experiment
that knows it better writes it as `noise_pct`; otherwise it is the larger of two figures: `noise_floor_pct`, what the
row measured against itself (even against odd steps, say), and half of what its samples spread from p20 to p80. Two rows
that differ by less than the noise of the worse one are a tie; where samples were paired, their 95 % interval decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from distlab.report.record import Record
from distlab.report.table import Column, is_number

TIE = " tie"


def noise_of(metrics: Mapping[str, Any], quantity: str = "step") -> float | None:
    """Noise of a row's median of `quantity`, in %; None if the row holds nothing to tell it by."""
    if is_number(metrics.get("noise_pct")):
        return metrics["noise_pct"]
    found = [metrics["noise_floor_pct"]] if is_number(metrics.get("noise_floor_pct")) else []
    p20, p50, p80 = (metrics.get(f"{quantity}_{p}_ms") for p in ("p20", "p50", "p80"))
    if all(map(is_number, (p20, p50, p80))) and p50 > 0:
        found.append(100 * (p80 - p20) / 2 / p50)
    return max(found, default=None)


def tied(mine: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows' median steps differ by no more than the noise of the worse one."""
    first, second = (metrics.get("step_p50_ms") for metrics in (mine, other))
    noises = [noise_of(metrics) for metrics in (mine, other)]
    if not (is_number(first) and is_number(second)) or None in noises:
        return False
    return abs(first - second) <= max(noises) / 100 * min(first, second)


def interval_ties(low: Any, high: Any) -> bool:
    """Whether an interval of a ratio contains 1, and is one: a row over itself is exactly 1 and no tie."""
    return is_number(low) and is_number(high) and low <= 1 <= high and low < high


def noise_by_row(records: Sequence[Record]) -> str:
    """For a headline: `noise by row 1.2 to 5.0 %`; empty where no row tells."""
    found = [noise for record in records if (noise := noise_of(record.metrics)) is not None]
    if not found:
        return ""
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return f"noise by row {low} %" if low == high else f"noise by row {low} to {high} %"


def host_bound(record: Record) -> str:
    """A mark for a row whose calls keep the host longer than the device; empty where either was not measured."""
    host = record.metrics.get("host_p50_ms")
    device = record.metrics.get("fwd_bwd_device_p50_ms", record.metrics.get("time_p50_ms"))
    return " host" if is_number(host) and is_number(device) and host > device else ""


def waiting(records: Sequence[Record]) -> str:
    """For a headline: the rows that leave the GPU idle for more than a tenth of their step; empty for none."""
    idle = {record.variant: record.metrics.get("gpu_idle_pct") or 0.0 for record in records}
    found = {variant: share for variant, share in idle.items() if share > 10}
    if not found:
        return ""
    which = ": " + ", ".join(f"{variant} {share:.0f} %" for variant, share in found.items())
    if len(found) > 3:
        which = f" in {len(found)} of {len(idle)} rows, up to {max(found.values()):.0f} %"
    return f"; the GPU waits for the host{which} of the step"


NOISE = Column("metrics.noise_pct", "± %", ".1f", missing="", derived=lambda record: noise_of(record.metrics))

