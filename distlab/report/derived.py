"""Numbers derived from measured ones: noise, ratios with their interval, errors of predictions.

Functions take rows and return numbers or new rows. A row that was measured is never changed.

Noise is a row's own: on one machine a row may repeat itself within 1 % and the next not within 20
%. An experiment that knows it better writes it as `noise_pct`. A row that was timed in three rounds
or more has the 95 % interval of its rounds' medians, by Student's t: steps that follow each other
depend on each other, for example by the GPU's clock. What repeats in every round it cannot show.
Otherwise noise is the larger of two figures: the noise floor, what one half of the row's samples
measures against the other (`own_noise_floor`), and half of what they spread from p20 to p80.

A ratio is *ours ÷ the other*, below 1 is faster. It has a 95 % interval: of rows timed in rounds by
their rounds (`rounds_ratio`), else of five pairs of samples or more by the bootstrap, of two to
four by Student's t, otherwise the noise of the worse row to both sides. Two rows are a tie where
that contains 1. A ratio of rows whose noise is unknown has no interval.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from distlab.measure.interleaved import MIN_PAIRS, own_noise_floor, paired_ratio, unpaired_ratio
from distlab.measure.interleaved import Ratio as Measured
from distlab.report.record import Record, Records
from distlab.report.table import Column, gib_column, is_number, sparse_column

TIE = " tie"
# number of values → 97.5 % quantile of Student's t, of one degree less
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
MIN_ROUNDS = 3  # two rounds may agree by chance


def noise_of(metrics: Mapping[str, Any], quantity: str = "step") -> float | None:
    """Return the noise of a row's median of `quantity`, in %. None if it is unknown."""
    # An experiment that knows its noise better has written it itself.
    if is_number(metrics.get("noise_pct")):
        return metrics["noise_pct"]
    samples = metrics.get(f"{quantity}_samples_ms")
    rounds = metrics.get("rounds")
    if samples and is_number(rounds) and rounds >= MIN_ROUNDS:
        return _noise_of_rounds(samples, rounds)
    floor = own_noise_floor(samples) if samples else metrics.get("noise_floor_pct")
    # The larger of the two figures counts, since each can miss a part of the noise.
    found = [floor] if is_number(floor) else []
    p20, p50, p80 = (metrics.get(f"{quantity}_{p}_ms") for p in ("p20", "p50", "p80"))
    if is_number(p20) and is_number(p50) and is_number(p80) and p50 > 0:
        found.append(100 * (p80 - p20) / 2 / p50)
    return max(found, default=None)


def _noise_of_rounds(samples: Sequence[float], rounds: int) -> float:
    """Return half the 95 % interval of a row's rounds, in % of its median.

    Args:
        samples: of all rounds, one after the other, of each equally many.
        rounds: number of rounds.
    """
    reach = _reach(_medians_of(samples, rounds))
    return 100 * reach / statistics.median(samples)


def _medians_of(samples: Sequence[float], rounds: int) -> list[float]:
    """Return the median of each round, of samples that lie one round after the other."""
    per_round = len(samples) // rounds
    medians = []
    for first in range(0, rounds * per_round, per_round):
        medians.append(statistics.median(samples[first : first + per_round]))
    return medians


def _reach(values: Sequence[float]) -> float:
    """Return how far the 95 % interval of a mean reaches to each side, by Student's t."""
    # More values than the table has would make t a little smaller.
    t = STUDENT_T[min(len(values), max(STUDENT_T))]
    return t * statistics.stdev(values) / math.sqrt(len(values))


def with_noise(records: Records) -> list[Record]:
    """Return the records with `noise_pct`, where they hold the samples of their step."""
    found = []
    for record in records:
        if record.metrics.get("step_samples_ms"):
            record = record.with_metrics({"noise_pct": noise_of(record.metrics)})
        found.append(record)
    return found


def row_named(variant: str, records: Records) -> Record | None:
    """Return the first row of this variant. None if there is none."""
    for record in records:
        if record.variant == variant:
            return record
    return None


def fastest(records: Records, metric: str) -> Record | None:
    """Return the row with the smallest value of a metric. None if no row has a number there."""
    # A row that ran out of memory has a text in the place of a number.
    timed = [record for record in records if is_number(record.metrics.get(metric))]
    return min(timed, key=lambda record: record.metrics[metric], default=None)


def ratio_metrics(
    name: str, row: Record, base: Record | None, quantity: str = "step"
) -> dict[str, float]:
    """Return the ratio of one row to another, and the ends of its interval, as metrics.

    They are `NAME`, `NAME_low` and `NAME_high`. Without paired samples the interval is the noise of
    the worse row. Where the noise of one is unknown, there is only `NAME`. Where a row was not
    timed or there is no base, there is none of the three.

    Args:
        name: name of the ratio.
        row: row whose time is divided.
        base: row by whose time it is divided.
        quantity: prefix of metrics. The ratio is of `QUANTITY_p50_ms`, and its interval comes from
            the paired samples in `QUANTITY_samples_ms`.
    """
    if base is None:
        return {}
    measured = _ratio_of(row, base, quantity)
    if measured is not None:
        return {
            name: measured.ratio,
            f"{name}_low": measured.low,
            f"{name}_high": measured.high,
        }
    # Without an interval the ratio alone is kept, and no verdict follows from it.
    mine, other = (each.metrics.get(f"{quantity}_p50_ms") for each in (row, base))
    if not is_number(mine) or not is_number(other) or not other:
        return {}
    return {name: mine / other}


def _ratio_of(row: Record, base: Record, quantity: str) -> Measured | None:
    """Return the ratio of two rows with its interval. None if either is unknown."""
    samples = [each.metrics.get(f"{quantity}_samples_ms") or () for each in (row, base)]
    pairs = min(len(each) for each in samples)  # a row that ran out of memory has fewer
    mine, other = (each[:pairs] for each in samples)
    rounds = row.metrics.get("rounds")
    if pairs > 0 and is_number(rounds) and rounds == base.metrics.get("rounds") and rounds > 1:
        return rounds_ratio(mine, other, rounds)
    if pairs > 1:
        return _ratio_of_pairs(mine, other)
    mine, other = (each.metrics.get(f"{quantity}_p50_ms") for each in (row, base))
    if not is_number(mine) or not is_number(other) or not other:
        return None
    ratio = mine / other
    # A row over itself is 1 without any doubt.
    if row is base:
        return Measured(ratio, ratio, ratio)
    noises = [noise_of(each.metrics, quantity) for each in (row, base)]
    if None in noises:
        return None
    noise = max(noises) / 100
    return Measured(ratio, ratio * (1 - noise), ratio * (1 + noise))


def with_ratios(
    name: str, records: Records, base: Record | None, quantity: str = "step"
) -> list[Record]:
    """Return the rows with their ratio to one row, see `ratio_metrics`."""
    return [record.with_metrics(ratio_metrics(name, record, base, quantity)) for record in records]


def tie_mark(record: Record, name: str) -> str:
    """Return ` tie` if a ratio's interval contains 1. A row over itself is 1 and not a tie."""
    low = record.metrics.get(f"{name}_low")
    high = record.metrics.get(f"{name}_high")
    if not is_number(low) or not is_number(high):
        return ""
    # A row over itself has an interval without width.
    return TIE if low <= 1 <= high and low < high else ""


def ratio_column(
    name: str,
    title: str,
    form: str = ".3f",
    *,
    missing: str = "n/a",
    optional: bool = False,
    about: str = "",
) -> Column:
    """Return the column of a ratio, in which ties are named."""
    return Column(
        f"metrics.{name}",
        title,
        form,
        missing=missing,
        optional=optional,
        note=partial(tie_mark, name=name),
        about=about,
    )


def few_pairs_ratio(a: Sequence[float], b: Sequence[float]) -> Measured:
    """Return median(a) / median(b) of few pairs with a 95 % interval by Student's t.

    A bootstrap of so few pairs hardly varies, and what they spread covers the ratio of equal rows
    in about half of the runs. The interval is of the mean of the pairs' logarithms: timings are
    closer to lognormal than to normal.
    """
    logs = [math.log(mine / other) for mine, other in zip(a, b, strict=True)]
    mean = statistics.mean(logs)
    reach = _reach(logs)
    ratio = statistics.median(a) / statistics.median(b)
    # The ratio of medians may be outside, where one pair is far from the others.
    return Measured(ratio, min(ratio, math.exp(mean - reach)), max(ratio, math.exp(mean + reach)))


def rounds_ratio(a: Sequence[float], b: Sequence[float], rounds: int) -> Measured:
    """Return median(a) / median(b) of rows timed in interleaved rounds, with its 95 % interval.

    Steps of one round depend on each other: another program disturbs several, or the GPU's clock
    goes up and down. So from three rounds on a round counts once, by its medians. The ratios of two
    rounds tell little about a third. If their intervals overlap, the interval is that of all pairs
    of samples. Otherwise it is that of two pairs, which is wide.

    Args:
        a: samples of the first row, one round after the other.
        b: samples of the second, as many.
        rounds: number of rounds, two or more, of equally many samples.
    """
    ratio = statistics.median(a) / statistics.median(b)
    _, low, high = few_pairs_ratio(_medians_of(a, rounds), _medians_of(b, rounds))
    per_round = len(a) // rounds
    if rounds < MIN_ROUNDS and per_round > 1:
        first = _ratio_of_pairs(a[:per_round], b[:per_round])
        second = _ratio_of_pairs(a[per_round:], b[per_round:])
        if first.low <= second.high and second.low <= first.high:
            return _ratio_of_pairs(a, b)
    return Measured(ratio, min(low, ratio), max(high, ratio))


def ratio_of_runs(new: Record, old: Record, quantity: str = "step") -> Measured | None:
    """Return the ratio of a row in two runs, new ÷ old, with its 95 % interval.

    The runs share no moments, so nothing forms pairs. If both were timed in three rounds or more, a
    round counts once, as in `rounds_ratio`. Otherwise each run's samples are resampled. None if
    either has fewer than five.
    """
    samples = [each.metrics.get(f"{quantity}_samples_ms") or () for each in (new, old)]
    if min(len(each) for each in samples) < MIN_PAIRS:
        return None
    rounds = [each.metrics.get("rounds") for each in (new, old)]
    if not all(is_number(number) and number >= MIN_ROUNDS for number in rounds):
        return unpaired_ratio(*samples)
    logs = []
    for each, number in zip(samples, rounds, strict=True):
        logs.append([math.log(ms) for ms in _medians_of(each, number)])
    mean = statistics.mean(logs[0]) - statistics.mean(logs[1])
    # Each run's mean is uncertain by itself. This is a little wider than Welch's interval.
    reach = math.hypot(_reach(logs[0]), _reach(logs[1]))
    ratio = statistics.median(samples[0]) / statistics.median(samples[1])
    return Measured(ratio, min(ratio, math.exp(mean - reach)), max(ratio, math.exp(mean + reach)))


def _ratio_of_pairs(a: Sequence[float], b: Sequence[float]) -> Measured:
    """Return the ratio of two rows by their pairs of samples, two or more, each counted once."""
    # The bootstrap needs five pairs or more.
    return paired_ratio(a, b) if len(a) >= MIN_PAIRS else few_pairs_ratio(a, b)


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
    noises = [noise_of(record.metrics) for record in records]
    found = [noise for noise in noises if noise is not None]
    if not found:
        return ""
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return f"noise by row {low} %" if low == high else f"noise by row {low} to {high} %"


def clearly_longer(metrics: Mapping[str, Any], clock: str, other: str) -> bool:
    """Return True where most times of a row by one clock are longer than most by another.

    That is p20 of the one above p80 of the other. Of records that hold medians only, the medians
    are compared.
    """
    # p20 above p80 means that 80 % of the one are longer than 80 % of the other.
    for longer, shorter in (("p20", "p80"), ("p50", "p50")):
        first, second = metrics.get(f"{clock}_{longer}_ms"), metrics.get(f"{other}_{shorter}_ms")
        if is_number(first) and is_number(second):
            return first > second
    return False


def host_bound(record: Record) -> str:
    """Return a mark for a row whose calls keep the host longer than the device.

    Empty if either was not measured.
    """
    # Attention has a time for forward and backward together, and other kernels have one time.
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
    # A list of many rows would not fit into a headline.
    if len(found) > 3:
        which = f" in {len(found)} of {len(idle)} rows, up to {max(found.values()):.0f} %"
    return f"; the GPU waits for the host{which} of the step"


PEAK = gib_column("metrics.peak_alloc_bytes", "peak GiB", ".1f")
NOISE = sparse_column(
    "metrics.noise_pct",
    "noise ± %",
    ".1f",
    derived=lambda record: noise_of(record.metrics),
    about=(
        "noise of the row's median: from three rounds on, the 95 % interval of the rounds' "
        "medians; otherwise the larger of half its spread from p20 to p80 and what it measures "
        "against itself"
    ),
)
