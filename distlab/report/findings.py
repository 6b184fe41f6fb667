"""Sentences that compare timings.

One says faster or slower only where the whole 95 % interval of a ratio does.

A ratio is *ours ÷ the other*, as in `distlab.report.derived`, which also writes the interval. Where
the interval contains 1 or is missing, a sentence says that this run cannot tell, how wide the
interval is, and what would help.
"""

from distlab.measure.interleaved import Ratio as Measured
from distlab.report.record import Record, Records
from distlab.report.table import is_number

FASTER, SLOWER, UNCLEAR = "faster", "slower", "unclear"
MORE_ROUNDS = "more --rounds, or a machine that does nothing else"
TOO_WIDE = "its rounds differ too much for an interval"
NAMED_ROWS = 4  # slower rows that a finding names; the table has all of them


def interval_of(record: Record, name: str) -> Measured | None:
    """Return a ratio of a record with its interval. None if one of the three numbers is missing."""
    ends = [record.metrics.get(f"{name}{end}") for end in ("", "_low", "_high")]
    # One missing number leaves no interval, and so no claim about it.
    if not all(is_number(each) for each in ends):
        return None
    return Measured(*ends)


def verdict_of(record: Record, name: str) -> str:
    """Return FASTER if the whole interval is below 1, SLOWER if it is above, otherwise UNCLEAR."""
    found = interval_of(record, name)
    if found is None:
        return UNCLEAR
    if found.high < 1:
        return FASTER
    if found.low > 1:
        return SLOWER
    return UNCLEAR


def is_too_wide(found: Measured) -> bool:
    """Return whether an interval reaches from below half to above twice the ratio.

    Two rounds that disagree say so little about a third that their interval is no information.
    """
    return found.low < found.ratio / 2 and found.high > 2 * found.ratio


def with_interval(record: Record, name: str, form: str = ".2f") -> str:
    """Return a ratio for a sentence: `1.25 (95 %: 1.20 to 1.30)`.

    An interval that `is_too_wide` is not shown.
    """
    found = interval_of(record, name)
    if found is None:
        # A ratio without an interval is shown, but marked.
        return f"{record.metrics[name]:{form}} (no interval)"
    if is_too_wide(found):
        return f"{found.ratio:{form}} ({TOO_WIDE})"
    return f"{found.ratio:{form}} (95 %: {found.low:{form}} to {found.high:{form}})"


def furthest_behind(slower_by: list[tuple[float, str]]) -> str:
    """Name the rows furthest behind, to follow a count of rows: `: a, b`.

    Args:
        slower_by: ratio and name of each slower row.
    """
    if not slower_by:
        return ""
    worst = [name for _, name in sorted(slower_by, reverse=True)[:NAMED_ROWS]]
    start = ":" if len(slower_by) <= NAMED_ROWS else ". Furthest behind:"
    return f"{start} {', '.join(worst)}"


def why_unclear(records: Records, name: str, remedy: str = MORE_ROUNDS) -> str:
    """Say in a sentence how noisy ratios are that show no difference, and what would help.

    Args:
        records: rows whose ratio is UNCLEAR.
        name: metric of the ratio.
        remedy: noun phrase after "try".
    """
    found = [interval_of(record, name) for record in records]
    intervals = [interval for interval in found if interval is not None]
    if not intervals:
        return f"There is no interval: try {remedy}."
    noise = 0.0
    for interval in intervals:
        # Distance from the ratio to the end of the interval that is further away.
        above = interval.high / interval.ratio - 1
        below = 1 - interval.low / interval.ratio
        noise = max(noise, 100 * max(above, below))
    # Above 10 % a decimal would pretend a precision that noise does not have.
    digits = 1 if noise < 10 else 0
    return f"Noise is up to ± {noise:,.{digits}f} %: try {remedy}."
