"""Columns that are derived from others: noise, ratios with their interval, errors of predictions.

Nothing that measures computes one.

Noise is a row's own: on one machine a row may repeat itself within 1 % and the next not within 20
%. An experiment that knows it better writes it as `noise_pct`; otherwise it is the larger of two
figures: the noise floor, what the row's samples measure against themselves (even against odd ones),
and half of what they spread from p20 to p80.

A ratio is *ours ÷ the other*, below 1 is faster. It has a 95 % interval: of five pairs of samples
or more by the bootstrap, of two to four by Student's t, otherwise the noise of the worse row to
both sides. Two rows are a tie where that contains 1. A ratio of rows whose noise is unknown has no
interval.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.measure.statistics import MIN_PAIRS, own_noise_floor, paired_ratio
from distlab.measure.statistics import Ratio as Measured
from distlab.report.record import Record, Records
from distlab.report.table import Column, gib_column, grouped, is_number, sparse_column

TIE = " tie"
# number of pairs → 97.5 % quantile of Student's t, of one degree less
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182}
Baseline = Callable[[Records], Record | None]


def noise_of(metrics: Mapping[str, Any], quantity: str = "step") -> float | None:
    """Noise of a row's median of `quantity`, in %; None if the row holds nothing to tell it by."""
    if is_number(metrics.get("noise_pct")):
        return metrics["noise_pct"]
    samples = metrics.get(f"{quantity}_samples_ms")
    floor = own_noise_floor(samples) if samples else metrics.get("noise_floor_pct")
    found = [floor] if is_number(floor) else []
    p20, p50, p80 = (metrics.get(f"{quantity}_{p}_ms") for p in ("p20", "p50", "p80"))
    if all(map(is_number, (p20, p50, p80))) and p50 > 0:
        found.append(100 * (p80 - p20) / 2 / p50)
    return max(found, default=None)


def add_noise(records: Records) -> None:
    """Write `noise_pct` into rows that hold the samples of their step."""
    for record in records:
        if record.metrics.get("step_samples_ms"):
            record.metrics["noise_pct"] = noise_of(record.metrics)


def row_of(variant: str) -> Baseline:
    """Return a rule for a baseline: the row of this variant."""
    return lambda rows: next((row for row in rows if row.variant == variant), None)


def fastest(metric: str, among: Callable[[Record], object]) -> Baseline:
    """Return a rule for a baseline: the one of some rows that takes the least time."""

    def pick(rows: Records) -> Record | None:
        timed = [row for row in rows if is_number(row.metrics.get(metric)) and among(row)]
        return min(timed, key=lambda row: row.metrics[metric], default=None)

    return pick


@dataclass(frozen=True)
class Ratio:
    """A metric of a row and its baseline, one over the other.

    Attributes:
        name: name of the ratio. `NAME_low` and `NAME_high` are the ends of its interval.
        baseline: function from the rows that are compared to the row that divides all of them.
        quantity: prefix of metrics. The ratio is of `QUANTITY_p50_ms`, and its interval comes from
            the paired samples in `QUANTITY_samples_ms`.
    """

    name: str
    baseline: Baseline
    quantity: str = "step"

    def add(self, rows: Records) -> None:
        """Write ratio and interval into rows that are compared with each other."""
        if (base := self.baseline(rows)) is not None:
            for row in rows:
                self._write(row, base)

    def add_within(self, key: Callable[[Record], object], rows: Records) -> None:
        """Write the ratio into rows that have a baseline with the same key.

        The baseline itself gets none.
        """
        for group in grouped(rows, key).values():
            if (base := self.baseline(group)) is not None:
                for row in group:
                    if row is not base:
                        self._write(row, base)

    def _write(self, row: Record, base: Record) -> None:
        found = self.of(row, base)
        if found is None:
            return
        names = (self.name, f"{self.name}_low", f"{self.name}_high")
        row.metrics.update(zip(names, found, strict=False))

    def of(self, row: Record, base: Record) -> Sequence[float] | None:
        """Return the ratio of one row to another, and the two ends of its interval.

        Without paired samples the interval is the noise of the worse row. Where the noise of one is
        unknown, the ratio comes alone. Where either row was not timed, the answer is None.
        """
        samples = [each.metrics.get(f"{self.quantity}_samples_ms") or () for each in (row, base)]
        pairs = min(map(len, samples))  # one that ran out of memory has fewer
        mine, other = (each[:pairs] for each in samples)
        if pairs >= MIN_PAIRS:
            return paired_ratio(mine, other)
        if pairs in STUDENT_T:
            return few_pairs_ratio(mine, other)
        mine, other = (each.metrics.get(f"{self.quantity}_p50_ms") for each in (row, base))
        if not (is_number(mine) and is_number(other)) or not other:
            return None
        ratio = mine / other
        if row is base:
            return ratio, ratio, ratio
        noises = [noise_of(each.metrics, self.quantity) for each in (row, base)]
        if None in noises:
            return (ratio,)
        noise = max(noises) / 100
        return ratio, ratio * (1 - noise), ratio * (1 + noise)

    def tie(self, record: Record) -> str:
        """Return ` tie` if the interval contains 1. A row over itself is 1 and not a tie."""
        low, high = (record.metrics.get(f"{self.name}_{end}") for end in ("low", "high"))
        return TIE if is_number(low) and is_number(high) and low <= 1 <= high and low < high else ""

    def column(self, title: str, form: str = ".3f", **more: Any) -> Column:
        """Return its column, in which ties are named."""
        return Column(f"metrics.{self.name}", title, form, note=self.tie, **more)


def few_pairs_ratio(a: Sequence[float], b: Sequence[float]) -> Measured:
    """Return median(a) / median(b) of two to four pairs with a 95 % interval by Student's t.

    A bootstrap of so few pairs hardly varies, and what they spread covers the ratio of equal rows
    in about half of the runs. The interval is of the mean of the pairs' logarithms: timings are
    closer to lognormal than to normal.
    """
    logs = [math.log(mine / other) for mine, other in zip(a, b, strict=True)]
    mean = statistics.mean(logs)
    reach = STUDENT_T[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    ratio = statistics.median(a) / statistics.median(b)
    # The ratio of medians may be outside, where one pair is far from the others.
    return Measured(ratio, min(ratio, math.exp(mean - reach)), max(ratio, math.exp(mean + reach)))


def prediction_error(
    predicted: str, measured: str, title: str = "off %", form: str = "+.0f"
) -> Column:
    """Return a column with the error of a prediction in % of the measured value.

    A cell is empty if either is missing.
    """

    def error(record: Record) -> float | None:
        said, found = (record.metrics.get(name) for name in (predicted, measured))
        return 100 * (said / found - 1) if is_number(said) and is_number(found) and found else None

    return sparse_column(f"metrics.{measured}_error_pct", title, form, derived=error, optional=True)


def noise_by_row(records: Records) -> str:
    """Return a headline `noise by row 1.2 to 5.0 %`, or nothing if no row has noise."""
    found = [noise for record in records if (noise := noise_of(record.metrics)) is not None]
    if not found:
        return ""
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return f"noise by row {low} %" if low == high else f"noise by row {low} to {high} %"


def clearly_longer(metrics: Mapping[str, Any], clock: str, other: str) -> bool:
    """Return True where most times of a row by one clock are longer than most by another.

    That is p20 of the one above p80 of the other. Of records that hold medians only, the medians
    are compared.
    """
    for longer, shorter in (("p20", "p80"), ("p50", "p50")):
        first, second = metrics.get(f"{clock}_{longer}_ms"), metrics.get(f"{other}_{shorter}_ms")
        if is_number(first) and is_number(second):
            return first > second
    return False


def host_bound(record: Record) -> str:
    """Return a mark for a row whose calls keep the host longer than the device.

    Empty if either was not measured.
    """
    device = "fwd_bwd_device" if "fwd_bwd_device_p50_ms" in record.metrics else "time"
    return " host" if clearly_longer(record.metrics, "host", device) else ""


def waiting(records: Records) -> str:
    """Return a headline about rows that leave the GPU idle for more than a tenth of their step.

    Empty if there are none.
    """
    idle = {record.variant: record.metrics.get("gpu_idle_pct") or 0.0 for record in records}
    found = {variant: share for variant, share in idle.items() if share > 10}
    if not found:
        return ""
    which = ": " + ", ".join(f"{variant} {share:.0f} %" for variant, share in found.items())
    if len(found) > 3:
        which = f" in {len(found)} of {len(idle)} rows, up to {max(found.values()):.0f} %"
    return f"; the GPU waits for the host{which} of the step"


PEAK = gib_column("metrics.peak_alloc_bytes", "peak GiB", ".1f")
NOISE = sparse_column(
    "metrics.noise_pct",
    "noise ± %",
    ".1f",
    derived=lambda record: noise_of(record.metrics),
    about="noise of the row: the larger of half its spread from p20 to p80 and what it measures against itself",
)
