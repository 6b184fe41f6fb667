"""Compare runs of one experiment: their differences, and the rows that differ beyond their noise.

A difference counts where it is larger than twice the noise of the noisier row (`report.derived`:
each median may be off by as much; once for ratios to another row of the same run, in which drift
cancels) and, if both runs kept their samples, the 95 % interval of the ratio of medians does not
contain 1. The interval alone would not do: samples of one run share its moment of the machine, so
it is too narrow for what two runs differ by. On a busy host the same code twice differed by 1.3 to
1.9 times the noise of a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distlab.measure.interleaved import (
    MIN_PAIRS,
    Ratio,
    own_noise_floor,
    percentiles,
)
from distlab.report.derived import noise_of, ratio_of_runs
from distlab.report.record import Metrics, Record, Records, plain, read_json
from distlab.report.table import Column, grouped, is_number, shared_options, text_column
from distlab.report.view import View
from distlab.runs import (
    ROWS,
    higher_is_better,
    in_unit,
    main_metric,
    rows_of,
    short,
    shown,
    when_of,
)

RATIO = "step_ratio"
# A difference that prints as 0.0 % is none. Counted bytes differ by as little from run to run.
SAME_PCT = 0.05
# Entries of an environment that may differ without a note: they differ from run to run, and change
# no figure.
ALIKE = (
    "date",
    "command",
    "device_name",
    "device_count",
)
SLOWER, FASTER, TIE, UNSURE = "worse", "better", "tie", "noise unknown"
# Rows have moved together if at least 3 rows differ by more than 3 %, all in one direction.
MOVED_ROWS, MOVED_PCT = 3, 3.0
# Options that decide how exactly a row is known, and not what is measured.
OBSERVED_OFTEN = ("rounds", "profile_steps", "check_steps")
MOST_NAMED = 6  # rows of one verdict that sentences name; the table has all of them
MOST_COLUMNS = 4  # runs that have a column each; of more runs, only the first and the last

# First bytes of files that another command reads: compressed traces, and snapshots of memory.
GZIP, PICKLE = b"\x1f\x8b", b"\x80"

Key = tuple[str, ...]


@dataclass(frozen=True)
class SavedRun:
    """The rows of one run, and their file."""

    path: Path
    records: list[Record]

    @staticmethod
    def read(run: str | Path, *roots: str | Path) -> SavedRun:
        """Read a run that `rows_of` finds.

        Raises ValueError for a path that is not a run, or a run without rows.
        """
        path = run_file(run, *roots)
        records = read_json(path)
        if not records:
            raise ValueError(f"{run}: no rows were measured; run it again")
        return SavedRun(path, records)

    @property
    def first(self) -> Record:
        """First row, which has the environment of all rows."""
        return self.records[0]


def run_file(run: str | Path, *roots: str | Path) -> Path:
    """Return the file of a run's rows, as `rows_of` finds it.

    Raises:
        ValueError: there is none, or the file is one that another command reads.
    """
    path = rows_of(run, *roots)
    with open(path, "rb") as file:
        # torch.profiler writes its events after a few KB about the devices.
        begin = file.read(2**16)
    if begin.startswith(GZIP) or b'"traceEvents"' in begin:
        raise ValueError(f"{run} is a trace, not a run: `distlab trace {run}` explains it")
    if begin.startswith(PICKLE):
        raise ValueError(f"{run} is a snapshot, not a run: `distlab memory {run}` explains it")
    return path


def compared(runs: Sequence[SavedRun], control: str | None = None) -> list[Record]:
    """Return a row per variant: its value in every run, and the difference of the last run.

    The values are those of `main_metric`, in the fields `run_0`, ….

    `difference_pct` is of the medians, and None from zero; `low_pct` and `high_pct` end its 95 %
    interval where both runs kept samples; `noise_pct` is the larger of the two rows', `least_pct`
    what a difference must exceed to count; `verdict` one of worse, better, tie, noise unknown, or
    what is missing.

    Args:
        runs: the baseline first.
        control: name of a row that did not change. Every row is then divided by it, step by step,
            which cancels the drift of the machine between two runs.

    Raises:
        ValueError: fewer than two runs, runs of different experiments, one without the last one's
            metric, or a control that a run has no samples of.
    """
    if len(runs) < 2:
        raise ValueError("give two runs or more, the baseline first; `distlab runs` lists them")
    # A dictionary by experiment shows with one look whether there are several.
    experiments = {run.first.experiment: run for run in runs}
    if len(experiments) > 1:
        said = ", ".join(f"{run.path} is of {name}" for name, run in experiments.items())
        raise ValueError(f"{said}: only runs of one experiment can be compared")
    if control is not None:
        # Ratios take the place of the rows' metrics, so everything below works alike.
        runs = [replace(run, records=_over(run, control)) for run in runs]
    # Of the last run: it decides which number is of interest, and an older one may lack it.
    metric = main_metric(runs[-1].records) if control is None else RATIO
    for run in runs:
        if not any(is_number(record.metrics.get(metric)) for record in run.records):
            raise ValueError(
                f"{run.path} has no {metric}: it was written by another version, or measured "
                "otherwise"
            )
    tables = _keyed(runs)
    rows = []
    # Rows of any run, so that one that is gone is named.
    for key in dict.fromkeys(itertools.chain(*tables)):
        found = [table.get(key) for table in tables]
        values = [None if record is None else record.metrics.get(metric) for record in found]
        metrics = {f"run_{number}": value for number, value in enumerate(values)}
        metrics |= _verdict(found[0], found[-1], metric)
        facts = {"metric": metric, "runs": [str(run.path) for run in runs]}
        # Two machines are named both, so that the page does not claim one.
        machine = " and ".join(dict.fromkeys(_machine(run) for run in runs))
        where = dict(runs[-1].first.environment) | {"device_name": machine}
        rows.append(Record("compare", " ".join(key), facts, metrics, where, runs[-1].first.commit))
    return rows


def _over(run: SavedRun, control: str) -> list[Record]:
    """Return the rows as ratios to the row named `control`."""
    known = {record.variant: record.metrics.get("step_samples_ms") for record in run.records}
    if not known.get(control):
        raise ValueError(
            f"{run.path} has no samples of {control!r}, to compare with; rows that have: "
            f"{', '.join(name for name, samples in known.items() if samples) or 'none'}"
        )
    rows = []
    for record in run.records:
        samples = known[record.variant]
        metrics = {}
        if samples:
            # Samples of one position were taken in one round.
            ratios = [mine / other for mine, other in zip(samples, known[control], strict=True)]
            # drift has cancelled, so what samples spread is no bound
            noise = own_noise_floor(ratios)
            metrics = {
                RATIO: percentiles(ratios)["p50"],
                f"{RATIO}_samples_ms": ratios,
                "noise_pct": noise,
            }
        rows.append(replace(record, metrics=metrics))
    return rows


def differences(runs: Sequence[SavedRun]) -> list[str]:
    """List the differences other than results: machines first, then code and options."""
    found = []
    machines = {_machine(run) for run in runs}
    if len(machines) > 1:
        found.append(
            f"DIFFERENT MACHINES: {' and '.join(sorted(machines))}; what differs below is the "
            "machines' difference too"
        )
    places = [
        {"commit": run.first.commit or "unknown"}
        | {name: value for name, value in run.first.environment.items() if name not in ALIKE}
        for run in runs
    ]
    options = [shared_options(run.records) for run in runs]
    # Environment and options are compared alike, and options are marked as such.
    for kind, known in (("", places), ("option ", options)):
        for name in known[0]:
            values = [plain(each.get(name)) for each in known]
            # An entry that one run lacks came with another version. It does not make the set-up
            # another one.
            if any(value != values[0] for value in values) and all(name in each for each in known):
                found.append(f"{kind}{name}: {' → '.join(map(shown, values))}")
    return found


def other_set_up(old: SavedRun, new: SavedRun) -> list[str]:
    """List why results of two runs cannot be compared: another machine, or rows of other options.

    Two kinds of options change no row, and are left out: one with a list of values, which says
    which rows there are, and one that says how often something is observed.
    """
    found = []
    # A machine is a kind of device and the number of them.
    if _machine(old) != _machine(new):
        found.append(f"{_machine(old)} → {_machine(new)}")
    old_rows, new_rows = _keyed([old, new])
    differing = {}  # name of the option → sentence
    for key, before in old_rows.items():
        if key not in new_rows:
            continue
        now = new_rows[key].config
        for name, value in before.config.items():
            # An option that one of the runs lacks came or went with a version of the code.
            is_same = name not in now or plain(now[name]) == plain(value)
            if not is_same and not isinstance(value, list) and name not in OBSERVED_OFTEN:
                differing[name] = f"option {name}: {shown(value)} → {shown(now[name])}"
    return [*found, *differing.values()]


def findings(rows: Records) -> list[str]:
    """Report rows that differ beyond noise, rows that are missing, and rows that moved together."""
    found = verdicts(rows)
    moved = machine_moved(rows)
    if moved is not None:
        metric = rows[0].config["metric"]
        found.append(
            f"Every row's {metric} moved in one direction, by {moved:+.1f} % at least: that is the "
            "machine or what all rows share, rather than one strategy."
        )
    return found


def verdicts(rows: Records) -> list[str]:
    """Report rows that differ beyond noise, rows that do not, and rows that are missing."""
    by_verdict = grouped(rows, lambda row: row.metrics["verdict"])
    found = []
    for verdict in (SLOWER, FASTER):
        moved = sorted(by_verdict.pop(verdict, []), key=_size_of_difference, reverse=True)
        for row in moved[:MOST_NAMED]:
            found.append(f"{row.variant} is {verdict}: {_sentence(row)}")
        more = len(moved) - MOST_NAMED
        if more > 0:
            found.append(f"{more} more rows are {verdict}, by less: the table has them.")
    if TIE in by_verdict:
        found.append(f"Inside the noise: {_listed(by_verdict.pop(TIE))}.")
    for verdict, group in by_verdict.items():
        found.append(f"{verdict.capitalize()}: {_listed(group)}.")
    return found


def _size_of_difference(row: Record) -> float:
    """Return the size of a row's difference in %. From zero it is larger than any other."""
    difference_pct = row.metrics["difference_pct"]
    return math.inf if difference_pct is None else abs(difference_pct)


def _listed(rows: Records) -> str:
    """Name rows, the first few of many."""
    names = ", ".join(row.variant for row in rows[:MOST_NAMED])
    more = len(rows) - MOST_NAMED
    return f"{names} and {more} more" if more > 0 else names


def machine_moved(rows: Records) -> float | None:
    """Return the smallest difference in %, with its sign, if all rows moved in one direction.

    That needs 3 rows or more, each moved by over 3 %. None otherwise.
    """
    moved = [
        row.metrics["difference_pct"] for row in rows if is_number(row.metrics["difference_pct"])
    ]
    # Fewer rows may move together by chance.
    if len(moved) >= MOVED_ROWS and (min(moved) > MOVED_PCT or max(moved) < -MOVED_PCT):
        # The change nearest to zero is what all rows have in common.
        return min(moved, key=abs)
    return None


def gone(rows: Records) -> list[str]:
    """Return the rows that only the first run has."""
    return [row.variant for row in rows if row.metrics["verdict"].startswith("only in the first")]


def failures(rows: Records, limit_pct: float) -> list[str]:
    """Return the rows that are certainly worse by more than the limit, and those that are gone.

    Certainly: the lower end of their interval is above the limit.
    """
    worse = [
        row.variant
        for row in rows
        # The lower end must be above the limit, so noise alone cannot fail a run.
        if row.metrics["verdict"] == SLOWER and worse_by(row)[0] > limit_pct
    ]
    return [*worse, *gone(rows)]


def undecided(rows: Records, limit_pct: float) -> list[str]:
    """Return the rows that may be worse by more than the limit, each with its worst case.

    Their interval reaches above the limit, whether they are found worse or a tie.
    """
    found = []
    for row in rows:
        if row.metrics["verdict"] == UNSURE:
            found.append(f"{row.variant} (noise unknown)")
        elif row.metrics["verdict"] in (SLOWER, TIE):
            least, most = worse_by(row)
            # The limit is within the interval, so the row may be on either side of it.
            if least <= limit_pct < most:
                bound = f"up to {most:.1f} %" if math.isfinite(most) else "from zero"
                found.append(f"{row.variant} ({bound})")
    return found


def worse_by(row: Record) -> tuple[float, float]:
    """Return the interval of how much worse a row may be, in %; negative numbers are better.

    It is the 95 % interval of the table where both runs kept samples, else the difference and its
    noise to both sides. A tie may hide at least its noise.
    """
    m = row.metrics
    difference, noise = m["difference_pct"], m["least_pct"] or 0.0
    if difference is None:  # from zero, so that no percentage bounds it
        if higher_is_better(row.config["metric"]):
            return -math.inf, -math.inf
        return (0.0 if m["verdict"] == TIE else math.inf), math.inf
    low, high = m["low_pct"], m["high_pct"]
    if low is None or high is None:
        low, high = difference - noise, difference + noise
    if higher_is_better(row.config["metric"]):
        # For a rate, lower is worse.
        low, high = -high, -low
    if m["verdict"] == TIE:
        # A tie without samples still hides a change as large as its noise.
        low, high = min(low, -noise), max(high, noise)
    return low, high


def view_of(runs: Sequence[SavedRun], metric: str) -> View:
    """Return the table, sentences and notes that show a comparison."""
    # More runs would need more columns than a terminal has.
    shown = range(len(runs)) if len(runs) <= MOST_COLUMNS else (0, len(runs) - 1)
    titles = {number: "baseline" if number == 0 else f"run {number + 1}" for number in shown}
    named = "; ".join(
        f"{title}: {run.path.parent.name}/{run.path.name} ".replace(f"/{ROWS}", "")
        + f"({short(run.first.commit)}, {when_of(run.path, run.first)[:16]})"
        for title, run in ((title, runs[number]) for number, title in titles.items())
    )
    differing = differences(runs)
    return View(
        name="compare",
        question=f"{runs[0].first.experiment}: what changed in {metric}?",
        columns=[
            Column("variant", "row"),
            *(
                Column(f"metrics.run_{number}", title, lambda value: in_unit(value, metric))
                for number, title in titles.items()
            ),
            Column("metrics.difference_pct", "difference %", "+.1f"),
            Column("metrics.low_pct", "from (95 %)", "+.1f"),
            Column("metrics.high_pct", "to", "+.1f"),
            Column("metrics.noise_pct", "noise %", ".1f"),
            text_column("metrics.verdict", "verdict"),
        ],
        headline=lambda rows: named,
        findings=lambda rows: [*differing, *findings(rows)],
        reading="Medians, the last run against the first. A row is worse or better where the "
        "difference is larger than twice the noise of the noisier run, since either may be off by "
        "it (once for ratios to a row), and, with samples of both, its 95 % interval does not "
        "contain 0. That interval is of each run's rounds if both have three or more, otherwise of "
        "10,000 resamples of each run's own steps. Everything else is a tie. Noise is the 95 % "
        "interval of the medians of three rounds or more. Of fewer it is half of what the samples "
        "spread from p20 to p80, or what a run measured against itself, whichever is more.",
        prediction="None: this compares what was measured.",
        noise="The noise column holds the larger of the two runs'.",
    )


def _keyed(runs: Sequence[SavedRun]) -> list[dict[Key, Record]]:
    """Return the rows of each run by variant, and by the options that vary within a variant."""
    # Runs of one row each are compared also if the rows' names differ. The name of a training run's
    # row is its strategy.
    if all(len(run.records) == 1 for run in runs):
        name = " → ".join(dict.fromkeys(run.first.variant for run in runs))
        return [{(name,): run.first} for run in runs]
    names = _telling_apart(runs)
    tables = []
    for run in runs:
        tables.append({_key(record, names): record for record in run.records})
    return tables


def _telling_apart(runs: Sequence[SavedRun]) -> list[str]:
    """Return the options that tell rows of one variant apart, as few as do."""
    if not any(len({r.variant for r in run.records}) < len(run.records) for run in runs):
        return []  # variants have one row each, also if the runs had other options
    records = [record for run in runs for record in run.records]
    names = []
    for name in dict.fromkeys(name for record in records for name in record.config):
        if any(len({str(r.config.get(name)) for r in run.records}) > 1 for run in runs):
            names.append(name)
    # An option that follows from the others makes names longer and tells nothing apart, as a length
    # beside the shape. The last ones go first, because experiments name the main ones first.
    for name in reversed(names):
        fewer = [each for each in names if each != name]
        if len({_key(r, fewer) for r in records}) == len({_key(r, names) for r in records}):
            names = fewer
    return names


def _key(record: Record, names: Sequence[str]) -> Key:
    """Return a row's variant, and its values of these options."""
    values = []
    for name in names:
        if record.config.get(name) is not None:
            values.append(f"{name} {record.config[name]}")
    return (record.variant, *values)


def _verdict(old: Record | None, new: Record | None, metric: str) -> Metrics:
    """Return how a row's metric changed, within which noise, and what that means.

    Args:
        old: row of the first run. None if that run lacks it.
        new: row of the last run. None if that run lacks it.
        metric: name of the metric.
    """
    first = None if old is None else old.metrics.get(metric)
    last = None if new is None else new.metrics.get(metric)
    is_in_first = is_number(first) and first >= 0
    # Times, rates and sizes are not negative, so such a value is an error of the measurement.
    is_in_last = is_number(last) and last >= 0
    if not (is_in_first and is_in_last):
        nothing = dict.fromkeys(("difference_pct", "low_pct", "high_pct", "noise_pct", "least_pct"))
        if is_in_first:
            verdict = "only in the first run"
        elif is_in_last:
            verdict = "only in the last run"
        else:
            verdict = "in neither run"
        return nothing | {"verdict": verdict}
    if (first == 0) != (last == 0):
        return _verdict_at_zero(first, last, new if last else old, metric)
    # Samples are stored under the name of the metric without its percentile.
    quantity = metric.removesuffix("_p50_ms")
    noises = [noise_of(record.metrics, quantity) for record in (old, new)]
    noise = max((each for each in noises if each is not None), default=None)
    measured = ratio_of_runs(new, old, quantity)
    if measured is not None:
        ratio = measured
    elif first == last:
        ratio = Ratio(1.0, None, None)  # also of two zeros, such as spilled bytes
    else:
        ratio = Ratio(last / first, None, None)
    # A ratio to a control has one noise. A difference of two runs has that of both.
    least = noise
    if noise is not None and metric != RATIO:
        least = 2 * noise
    percent: dict[str, float | None] = {}
    # The ratio's three numbers become percentages of change.
    for name, value in zip(("difference_pct", "low_pct", "high_pct"), ratio, strict=True):
        percent[name] = None if value is None else 100 * (value - 1)
    is_inside_interval = ratio.low is not None and ratio.low <= 1 <= ratio.high
    is_inside_noise = least is not None and abs(percent["difference_pct"]) <= least
    is_nothing = abs(percent["difference_pct"]) < SAME_PCT
    has_unknown_noise = noise is None and ratio.low is None
    # Either reason makes a tie, since each bound alone is too narrow.
    if is_nothing or is_inside_interval or is_inside_noise:
        verdict = TIE
    elif has_unknown_noise and not metric.endswith("_bytes"):  # bytes are counted
        verdict = UNSURE
    else:
        verdict = FASTER if (last > first) == higher_is_better(metric) else SLOWER
    return percent | {"noise_pct": noise, "least_pct": least, "verdict": verdict}


def _verdict_at_zero(first: float, last: float, row: Record, metric: str) -> Metrics:
    """Return what a change from or to zero means, like `_verdict`.

    From zero it has no percentage. Without a known noise it is certain if the value is counted, or
    if enough samples are all above zero.

    Args:
        first, last: values of the two runs, one of them zero.
        row: row of the run in which the value is not zero.
        metric: name of the metric.
    """
    quantity = metric.removesuffix("_p50_ms")
    noise_pct = noise_of(row.metrics, quantity)
    samples = row.metrics.get(f"{quantity}_samples_ms") or ()
    if noise_pct is not None:
        is_certain = 2 * noise_pct < 100  # the difference is the whole value
    else:
        is_certain = metric.endswith("_bytes") or (len(samples) >= MIN_PAIRS and min(samples) > 0)
    if is_certain:
        verdict = FASTER if (last > first) == higher_is_better(metric) else SLOWER
    elif noise_pct is None and len(samples) < MIN_PAIRS:
        verdict = UNSURE
    else:
        verdict = TIE
    return {
        "difference_pct": None if first == 0 else -100.0,
        "low_pct": None,
        "high_pct": None,
        "noise_pct": noise_pct,
        "least_pct": None if noise_pct is None else 2 * noise_pct,
        "verdict": verdict,
    }


def _sentence(row: Record) -> str:
    m, metric = row.metrics, row.config["metric"]
    first, *_, last = (value for name, value in m.items() if name.startswith("run_"))
    # A difference from zero has no percentage.
    difference = f", {m['difference_pct']:+.1f} %" if m["difference_pct"] is not None else ""
    between = (
        f", 95 % between {m['low_pct']:+.1f} and {m['high_pct']:+.1f} %"
        if m["low_pct"] is not None
        else ""
    )
    noise = f", noise {m['noise_pct']:.1f} %" if m["noise_pct"] is not None else ""
    return (
        f"{metric} {in_unit(first, metric)} → {in_unit(last, metric)}{difference}{between}{noise}."
    )


def _machine(run: SavedRun) -> str:
    known = run.first.environment
    device = known.get("device_name") or "unknown device"
    count = known.get("device_count") or 1
    return f"{device}, {count} on the host"
