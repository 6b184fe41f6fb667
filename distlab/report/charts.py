"""Kinds of chart, each from numbers alone: lines in panels, bars, timelines and stacked areas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distlab.report.style import (
    AREAS,
    BLACK,
    COLOURS,
    DARK,
    FAINT,
    INK,
    LINES,
    MARKERS,
    colour_of,
    horizontal,
    picture,
)

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from distlab.report.record import Records

ABREAST = 4  # small panels in a row, at most
# Line style → the styles that replace it, one after the other, each time that the colours begin
# again. So the eighth line, which has the first one's colour, has another style.
AGAIN = {"-": ("-", "-.", "--", ":"), "--": ("--", ":")}
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # box of text over grid lines
# A part of a bar shows its value if it is longer than this fraction of the longest bar.
LEAST_SHARE = 0.07


@dataclass(frozen=True)
class Series:
    """One line or one set of points.

    Args:
        label: text in the legend. Equal labels share an entry, a colour and a marker.
        x, y: numbers, equally many. A y that is not finite leaves a gap, and a series without a
            finite y says so.
        low, high: numbers at the ends of error bars.
        line: style that joins the points, `-`, `--`, `-.` or `:`. Empty for points alone.
        marked: True to mark the points on a line.
        hollow: True for empty points, for a second kind (a peer, another implementation).
        width: points, width of the line.
        like: label whose colour and marker it takes, such as the measured points of a predicted
            line.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    line: str = ""
    marked: bool = False
    hollow: bool = False
    width: float = 1.5
    like: str | None = None

    @property
    def key(self) -> str:
        """Key of its colour and marker."""
        return self.like or self.label


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        title: text above the panel.
        x_label, y_label: texts with units.
        series: lines and points to draw.
        log_x: base of the horizontal axis, None for linear.
        log_y: True for a logarithmic vertical axis.
        from_zero: True to begin a linear vertical axis at zero.
        y_max: largest value at which the vertical axis may end.
        x_ticks: (place, text), for axes with texts instead of numbers.
        events: (x, text), drawn as vertical lines.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: int | None = 2
    log_y: bool = False
    from_zero: bool = True
    y_max: float | None = None
    x_ticks: Sequence[tuple[float, str]] = ()
    events: Sequence[tuple[float, str]] = ()


def lines(path: Path, panels: Sequence[Panel], *, title: str) -> None:
    """Draw up to three panels next to each other, or more small ones in rows of at most four.

    Equal labels have one colour in all panels. The one legend is below.

    Args:
        path: path of a ``.png`` (or ``.svg``, ``.pdf``), written atomically.
        panels: pairs of axes, row by row from the left.
        title: text above the panels.
    """
    # Up to three panels get a page's full height, and more of them must share it.
    is_small = len(panels) > 3
    rows = math.ceil(len(panels) / ABREAST)
    abreast = math.ceil(len(panels) / rows)  # so that the last row is not nearly empty
    height_in = 0.8 + 1.9 * rows if is_small else 4.4
    keys = []  # keys of all panels; the position of a series' key decides its colour
    for panel in panels:
        for series in panel.series:
            if series.key not in keys:
                keys.append(series.key)
    handles: dict[str, Any] = {}  # label → the first line that has it
    with picture(path, title, height_in, small=is_small) as figure:
        for place, panel in enumerate(panels):
            axes = figure.add_subplot(rows, abreast, place + 1)
            for series in panel.series:
                line = _draw(axes, series, keys.index(series.key))
                if series.label not in handles:
                    handles[series.label] = line
            _dress(axes, panel)
            if is_small and panel.log_x and not panel.x_ticks:
                # More numbers, such as 16,384 and 65,536, would touch.
                axes.locator_params(axis="x", numticks=4)
            # Panels in one column share a horizontal axis, so only the lowest one names it.
            has_none_below = place + abreast >= len(panels)
            if has_none_below:
                axes.set_xlabel(panel.x_label)
            begins_row = place % abreast == 0
            # A panel whose vertical axis is that of its left neighbour need not repeat the name.
            if begins_row or panel.y_label != panels[place - 1].y_label:
                axes.set_ylabel(panel.y_label)
        # A single entry would only repeat the title.
        if len(handles) > 1:
            figure.legend(
                handles.values(),
                handles.keys(),
                loc="outside lower center",
                ncols=min(len(handles), 4),
            )


def _draw(axes: Axes, series: Series, place: int) -> Any:
    """Draw a series, with its error bars. Return the line.

    Args:
        axes: pair of axes to draw on.
        series: numbers to draw.
        place: position of the series' key among all keys of the picture, for colour and marker.
    """
    # The colours repeat after seven series. Marker and style then tell the series apart.
    colour = LINES[place % len(LINES)]
    is_marked = series.marked or not series.line
    marker = MARKERS[place % len(MARKERS)] if is_marked else "none"
    # A style without a replacement is used in every round of the colours.
    styles = AGAIN.get(series.line, (series.line or "none",))
    round_of_colours = place // len(LINES)
    (drawn,) = axes.plot(
        series.x,
        series.y,
        linestyle=styles[round_of_colours % len(styles)],
        linewidth=series.width,
        color=colour,
        label=series.label,
        marker=marker,
        markerfacecolor="white" if series.hollow else colour,
    )
    if series.low is not None:
        # matplotlib takes distances, and refuses negative ones. A number outside of its interval
        # has a bar to one side only.
        below = [max(0.0, y - low) for low, y in zip(series.low, series.y, strict=True)]
        above = [max(0.0, high - y) for high, y in zip(series.high, series.y, strict=True)]
        axes.errorbar(
            series.x, series.y, yerr=[below, above], fmt="none", ecolor=colour, elinewidth=1
        )
    if not any(math.isfinite(y) for y in series.y):
        # Say so on the axes, because nothing is drawn and the legend would promise a line.
        kind = "finite " if len(series.y) else ""
        note = f"{series.label}: no {kind}value"
        axes.annotate(note, (0.3, 0.8), xycoords="axes fraction", fontsize=6, color=colour)
    return drawn


def _dress(axes: Axes, panel: Panel) -> None:
    """Set scales, limits, ticks, events and title of a panel whose series are drawn."""
    if panel.log_x:
        axes.set_xscale("log", base=panel.log_x)
    if panel.log_y:
        axes.set_yscale("log")
    else:
        # matplotlib's own format may put an offset such as +1e3 at the axis, which is easily
        # overlooked.
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        if panel.from_zero:
            # A linear axis that does not begin at zero exaggerates differences.
            axes.set_ylim(bottom=0)
    # Cut the axis only where the numbers reach beyond it.
    if panel.y_max is not None and axes.get_ylim()[1] > panel.y_max:
        axes.set_ylim(0, panel.y_max)
    if panel.x_ticks:
        places, texts = zip(*panel.x_ticks, strict=True)
        axes.set_xticks(places, texts)
        # Minor ticks of a logarithmic axis would write numbers between the texts.
        axes.set_xticks([], minor=True)
    for x, text in panel.events:
        axes.axvline(x, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            text,
            (x, 1),
            (3, -3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=8,
        )
    axes.set_title(panel.title)


def overlaid(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[Series]:
    """Return lines of a panel that may cover each other.

    Later lines are thinner, so that all stay visible.

    Args:
        curves: name → (x, y), equally many numbers.
    """
    found = []
    for index, (name, (x, y)) in enumerate(curves.items()):
        # The first line is 3.2 points wide and the last one at least 0.8.
        width = 3.2 - 2.4 * index / len(curves)
        found.append(Series(name, x, y, line="-", width=width))
    return found


def step_bars(*phases: str) -> Callable[[Records, Path], None]:
    """Return a picture of records: a bar for each, made of the medians of phases of its step.

    Args:
        phases: names of the phases. A record has the metric `PHASE_p50_ms` of each, or lacks it.
    """

    def draw(records: Records, path: Path) -> None:
        labels = [record.variant for record in records]
        parts = {}
        for phase in phases:
            # None leaves the part empty, and `≥` then marks the total as incomplete.
            parts[phase] = [record.metrics.get(f"{phase}_p50_ms") for record in records]
        stacked_bars(path, labels, parts, title="Medians of a step", unit="ms")

    return draw


def stacked_bars(
    path: Path,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float | str | None]],
    *,
    title: str,
    unit: str,
    whiskers: Sequence[tuple[float, float] | None] = (),
    totals: Sequence[float | None] = (),
) -> None:
    """Draw one horizontal bar per label, made of the parts in their order.

    The total is written next to the bar. If there are several parts, the value of each long part is
    written inside it.

    Args:
        path: path of a ``.png`` (or ``.svg``, ``.pdf``).
        labels: texts, one per bar, top to bottom.
        parts: part's name → one value per bar in ``unit``. A bar whose parts are all None says
            ``n/a``, one with a text (``"OOM"``) says that text, and one that lacks only some parts
            is drawn with ``≥`` before its total. A negative value (a difference below the noise)
            counts in the total and is not drawn.
        whiskers: for each bar the low and high end for the total (p20, p80), in ``unit``. None for
            no whisker.
        totals: for each bar the number that is written and that the whisker surrounds, in ``unit``,
            if it is not the sum of the parts. None for the sum.
        title: text above the bars.
        unit: text below the axis.

    Raises:
        ValueError: parts have different numbers of values.
    """
    bars = list(zip(*parts.values(), strict=True))
    # A bar with a text has no numbers, and so no length.
    numbers = [_numbers_of(bar) for bar in bars]
    longest = max(0.0, *(sum(own) for own in numbers))
    given_totals = totals or [None] * len(labels)
    ends = [0.0] * len(labels)  # where each bar ends so far; a whisker moves it
    with picture(path, title, 1.35 + 0.36 * len(labels)) as figure:
        axes = figure.add_subplot()
        for name, values in parts.items():
            # A bar with a text instead of numbers, and a part that a bar lacks, have no length.
            known = []
            for own, value in zip(numbers, values, strict=True):
                known.append(value if own and value is not None else 0.0)
            lengths = [max(value, 0.0) for value in known]
            colour = colour_of(name, list(parts))
            drawn = axes.barh(
                range(len(labels)),
                lengths,
                0.66,
                ends,
                color=colour,
                ec="white",
                lw=0.6,
                label=name,
            )
            inside = []
            for value in known:
                is_written = value > LEAST_SHARE * longest and len(parts) > 1
                inside.append(_number(value) if is_written else "")
            # The text must be readable on the colour of its part.
            ink = "white" if colour in DARK else "black"
            axes.bar_label(drawn, inside, label_type="center", fontsize=7.5, color=ink)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        for row, whisker in enumerate(whiskers):
            if whisker is None or not numbers[row]:
                continue
            # The whisker is around the number that is written, which need not be the end of the
            # bar.
            middle = ends[row] if given_totals[row] is None else given_totals[row]
            low, high = whisker
            # matplotlib takes distances, and refuses negative ones.
            below, above = max(middle - low, 0), max(high - middle, 0)
            # Below the middle of the bar, where the numbers of its parts are.
            axes.errorbar(
                middle, row + 0.23, xerr=[[below], [above]], color=BLACK, capsize=2.5, linewidth=1.1
            )
            ends[row] = max(ends[row], middle + above)  # the total is written to its right
        for row, bar in enumerate(bars):
            axes.annotate(
                _text_of(bar, given_totals[row]),
                (ends[row], row),
                (6, 0),
                textcoords="offset points",
                va="center",
                bbox=_BEHIND,
                style="normal" if numbers[row] else "italic",
            )
        axes.set_yticks(range(len(labels)), labels)
        # The first label is at the top, so the vertical axis runs downwards.
        axes.set(ylim=(len(labels) - 0.5, -0.5), xlabel=unit)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        horizontal(axes)
        _legend_above(axes)


def _numbers_of(bar: Sequence[float | str | None]) -> list[float]:
    """Return the numbers of a bar's parts. A bar with a text, such as `OOM`, has none."""
    if any(isinstance(value, str) for value in bar):
        return []
    return [value for value in bar if value is not None]


def _text_of(bar: Sequence[float | str | None], given_total: float | None) -> str:
    """Return what is written next to a bar: its total, its text, or `n/a`.

    Args:
        bar: values of its parts.
        given_total: number to write instead of the sum of the parts. None for the sum.
    """
    own = _numbers_of(bar)
    if own:
        total = sum(own) if given_total is None else given_total
        at_least = "" if len(own) == len(bar) else "≥ "  # a part is not known
        return f"{at_least}{_number(total)}"
    texts = [value for value in bar if isinstance(value, str)]
    if texts and texts[0]:
        return texts[0]
    return "n/a"


def _legend_above(axes: Axes, columns: int = 5) -> None:
    """Draw the legend above the axes, on the left.

    Args:
        axes: what the legend is of.
        columns: entries in a line.
    """
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.6,
        borderpad=0.2,
    )


def _number(value: float) -> str:
    """Format a number with about three significant digits. Counts stay as they are.

    Values of the same size have the same number of decimals.
    """
    if isinstance(value, int):
        return str(value)
    # The rounded size decides the decimals, and the value itself is written.
    size = float(f"{abs(value):.3g}")  # rounded, because 9.996 is written as 10.0
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


# Lanes of a strategy's timeline: name → (0 for the upper row and 1 for the lower one, legend).
# Later ones are drawn over earlier ones.
LANES = {
    "compute": (0, "compute"),
    "copies": (0, "copies"),
    "communication": (1, "communication, covered by compute"),
    "exposed": (1, "communication, exposed"),
    "host waits": (2, "host waits"),
    "host launches": (2, "host launches"),
}


def timeline(
    path: Path,
    rows: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    title: str,
    phases: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Draw two or three rows of intervals for each strategy, all on one axis of milliseconds.

    The upper row is compute, the next one communication, the third one the host, if it is given.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``).
        rows: strategy → lane → disjoint intervals ``(start_ms, end_ms)`` from the start of the
            step. Lanes: ``compute`` and ``copies`` (upper row), ``communication`` and, over it in a
            strong colour, ``exposed``, the part that no compute covers (lower row). Optionally
            ``host waits`` and ``host launches`` (third row). A launch has no length and is drawn as
            a line.
        title: text above the axes.
        phases: strategy → name of a phase → ms at which it begins. A vertical line marks each.
    """
    has_host = any("host launches" in content for content in rows.values())
    pitch = 4 if has_host else 3  # rows of a strategy and a gap
    with picture(path, title, 1.3 + 0.26 * pitch * len(rows)) as figure:
        axes = figure.add_subplot()
        labelled: set[str] = set()  # lanes that the legend has
        tops = range(0, pitch * len(rows), pitch)
        for top, (name, content) in zip(tops, rows.items(), strict=True):
            if phases is not None:
                _draw_phases(axes, top, top + pitch - 1.5, phases.get(name, {}))
            _draw_lanes(axes, top, content, labelled)
            # A faint line separates a strategy from the one above it.
            if top > 0:
                axes.axhline(top - 1, color=FAINT, linewidth=0.6)
        axes.set_yticks([top + pitch / 2 - 1 for top in tops], list(rows))
        axes.margins(x=0.01)
        axes.set(
            xlabel="time since the start of the step (ms)", ylim=(pitch * len(rows) - 1.06, -1.06)
        )
        axes.set_xlim(left=0)
        horizontal(axes)
        _legend_above(axes, columns=4 if has_host else 5)


def _draw_phases(axes: Axes, top: int, bottom: float, begins: Mapping[str, float]) -> None:
    """Draw a vertical line with a name where each phase of a strategy begins.

    Args:
        axes: axes to draw on.
        top: place of the strategy's upper row.
        bottom: where the lines end.
        begins: name of the phase → ms at which it begins.
    """
    for phase, begin in begins.items():
        # The line starts above the upper row, where the name of the phase is written.
        axes.plot([begin, begin], [top - 0.6, bottom], color=INK, linewidth=0.8)
        axes.annotate(
            phase,
            (begin, top - 0.48),
            (2, 0),
            textcoords="offset points",
            va="bottom",
            fontsize=6,
            bbox=_BEHIND,
        )


def _draw_lanes(
    axes: Axes,
    top: int,
    content: Mapping[str, Sequence[tuple[float, float]]],
    labelled: set[str],
) -> None:
    """Draw the intervals of one strategy.

    Args:
        axes: axes to draw on.
        top: place of the strategy's upper row.
        content: lane → intervals ``(start_ms, end_ms)``.
        labelled: lanes that the legend already has. New ones are added.
    """
    for lane, (row, legend) in LANES.items():
        bars = [(start, stop - start) for start, stop in content.get(lane, ())]
        if not bars:
            continue
        # A lane that several strategies have is one entry of the legend.
        label = None if lane in labelled else legend
        labelled.add(lane)
        if lane == "host launches":
            starts = [start for start, _ in bars]
            axes.vlines(
                starts,
                top + row - 0.42,
                top + row + 0.42,
                colors=COLOURS[lane],
                linewidth=0.4,
                label=label,
            )
            continue
        # No edges and no snapping to pixels: at a thousand kernels per lane both would falsify the
        # gaps.
        axes.broken_barh(
            bars,
            (top + row - 0.42, 0.84),
            facecolors=COLOURS[lane],
            linewidth=0,
            snap=False,
            label=label,
        )
    # An empty row would look like a mistake of the picture.
    if not content.get("communication"):
        axes.annotate(
            "no communication",
            (0, top + 1),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="#666666",
            style="italic",
            bbox=_BEHIND,
        )


def memory_areas(path: Path, memory: Any, *, title: str) -> None:
    """Draw memory over one step by category, of a `measure.memory_timeline.MemoryTimeline`.

    Categories without memory are left out. Phases are written along the upper edge, and a dot marks
    the peak.

    Args:
        path: path of a ``.png`` (or ``.svg``, ``.pdf``).
        memory: the account of one step.
        title: text above the axes.
    """
    times, layers = memory.curves()
    peak_ms, categories = memory.peak()
    peak_bytes = sum(categories.values())
    # The unit follows the peak, so the numbers have one to four digits.
    unit, unit_bytes = ("GiB", 2**30) if peak_bytes >= 2**30 else ("MiB", 2**20)
    names, heights, colours = [], [], []
    # A category has its colour by its place, also where another one is left out.
    for colour, (name, values) in zip(AREAS, layers.items(), strict=False):
        if any(values):
            names.append(name)
            # The last value holds until the end of the step.
            heights.append([value / unit_bytes for value in (*values, values[-1])])
            colours.append(colour)
    sums = [sum(column) for column in zip(*heights, strict=True)]
    highest = max(sums, default=0)
    with picture(path, title, 4.6) as figure:
        axes = figure.add_subplot()
        axes.stackplot(
            [*times, memory.step_ms],
            heights,
            colors=colours,
            labels=names,
            step="post",
            linewidth=0,
        )
        # A phase ends where the next one begins, so one line for each is enough.
        for name, (start, stop) in memory.phases.items():
            axes.axvline(stop, color=INK, linewidth=0.7, linestyle=":")
            axes.text(
                (start + stop) / 2, 1.13 * highest, name, ha="center", va="center", fontsize=8.5
            )
        peak = peak_bytes / unit_bytes
        axes.plot(peak_ms, peak, "o", color=INK, markersize=4)
        # Text at a late peak is written to its left, where it does not leave the axes.
        is_late = peak_ms > 0.6 * memory.step_ms
        side, offset = ("right", -7) if is_late else ("left", 7)
        axes.annotate(
            f"peak {peak:.1f} {unit}",
            (peak_ms, peak),
            (offset, 7),
            textcoords="offset points",
            ha=side,
            fontsize=8.5,
        )
        x_label = "time since the start of the step (ms; stretched by the recording)"
        axes.set(
            xlim=(0, memory.step_ms),
            # The space above the highest value is left for the names of the phases.
            ylim=(0, 1.2 * highest),
            xlabel=x_label,
            ylabel=f"held ({unit})",
        )
        # The legend in the order of the picture, from the top down.
        axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1, 0.5))
