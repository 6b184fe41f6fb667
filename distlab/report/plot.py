"""Pictures from numbers: stacked step times, and a timeline on which a person sees the overlap.

matplotlib is imported inside the functions only, without pyplot: no global figures, no display, and the same
numbers give the same picture. Every picture is `WIDTH_PX` wide and written atomically.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distlab.report.figure import FAINT, GREYS, INK, OKABE_ITO, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a quantity is called decides its colour, so that it is the same in every picture of the lab.
COLOURS = {
    "compute": OKABE_ITO["blue"],
    "communication": OKABE_ITO["sky"],
    "exposed": OKABE_ITO["vermillion"],
    "exposed communication": OKABE_ITO["vermillion"],
    "optimizer": OKABE_ITO["orange"],
    "copies": OKABE_ITO["purple"],
    "forward": OKABE_ITO["sky"],
    "backward": OKABE_ITO["blue"],
    "matrix products": OKABE_ITO["blue"],
    "attention": OKABE_ITO["green"],
    "softmax": OKABE_ITO["vermillion"],
    "normalisation": OKABE_ITO["purple"],
    "element-wise": OKABE_ITO["yellow"],
    "loss": OKABE_ITO["black"],
    "casts and copies": GREYS["grey"],
    "other": GREYS["light grey"],
}
_SPARE = [OKABE_ITO[name] for name in ("green", "yellow", "purple", "sky", "black")]

_DARK = [OKABE_ITO[name] for name in ("black", "blue", "vermillion", "green")]  # white text reads on these

LEGEND_COLUMNS = 5  # more entries take further lines
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind text that crosses grid lines

# Lanes of a timeline: name → (row below the strategy's first, drawn over what is there already, legend).
LANES = {
    "compute": (0, False, "compute"),
    "copies": (0, True, "copies"),
    "communication": (1, False, "communication, covered by compute"),
    "exposed": (1, True, "communication, exposed"),
}


def stacked_bars(
    path: str | os.PathLike,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float | str | None]],
    *,
    title: str,
    unit: str,
    whiskers: Sequence[tuple[float, float] | None] | None = None,
) -> None:
    """One horizontal bar per label, made of the parts in their order, with the total written beside it.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``).
        labels: one per bar, top to bottom.
        parts: part's name → one value per bar in ``unit``. A bar whose parts are all None says ``n/a``, one
            with a text (``"OOM"``) says that text, and one that lacks only some parts is drawn with ``≥``
            before its total. A negative value (a difference below the noise) counts in the total and is not
            drawn.
        whiskers: per bar the low and high end for the total (p20, p80), in ``unit``; None for no whisker.

    Raises:
        ValueError: no bars, or a part or the whiskers are not as many as the labels.
    """
    series = {**parts, "whiskers": whiskers if whiskers is not None else [None] * len(labels)}
    wrong = [name for name, values in series.items() if len(values) != len(labels)]
    if not labels or not parts or wrong:
        raise ValueError(f"stacked_bars needs one value per label ({len(labels)} labels); wrong: {wrong}")
    figure = new_figure(height_in=1.35 + 0.36 * len(labels))
    axes = figure.add_subplot()
    bars = [{name: parts[name][row] for name in parts} for row in range(len(labels))]
    longest = max(sum(v for v in bar.values() if isinstance(v, int | float)) for bar in bars)
    for row, bar in enumerate(bars):
        _stacked_bar(axes, row, bar, series["whiskers"][row], room=0.07 * longest)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.5)
    _finish(figure, axes, path, title, [(name, _colour(name, parts)) for name in parts])


def _stacked_bar(
    axes: Axes, row: int, values: dict[str, Any], whisker: tuple[float, float] | None, room: float
) -> None:
    """One bar; a part at least ``room`` long carries its value."""
    texts = [value for value in values.values() if isinstance(value, str)]
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    if texts or not numbers:
        style = {"color": INK, "style": "italic", "bbox": _PAPER}
        text = texts[0] if texts else "n/a"
        axes.annotate(text, (0, row), (6, 0), textcoords="offset points", va="center", **style)
        return
    left = 0.0
    for name, value in numbers.items():
        drawn = max(value, 0.0)
        colour = _colour(name, values)
        axes.barh(row, drawn, 0.66, left, color=colour, edgecolor="white", linewidth=0.6)
        if drawn > room:
            ink = "white" if colour in _DARK else "black"
            middle = left + drawn / 2
            axes.text(middle, row, _number(value), ha="center", va="center", fontsize=7.5, color=ink)
        left += drawn
    end = left
    if whisker is not None:
        low, high = whisker
        axes.errorbar(
            [left], [row], xerr=[[max(left - low, 0)], [max(high - left, 0)]],
            color=OKABE_ITO["black"], capsize=3, linewidth=1.1,
        )  # fmt: skip
        end = max(end, high)
    total = f"{'' if len(numbers) == len(values) else '≥ '}{_number(sum(numbers.values()))}"
    axes.annotate(total, (end, row), (6, 0), textcoords="offset points", va="center", color=INK, bbox=_PAPER)


def timeline(
    path: str | os.PathLike,
    rows: Mapping[str, Mapping[str, Sequence[Any]]],
    *,
    title: str,
    marks: Mapping[str, Sequence[tuple[str, float, float]]] | None = None,
) -> None:
    """Per strategy a compute lane and a communication lane, all on one axis of milliseconds.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``).
        rows: strategy → lane → intervals. Lanes: ``compute`` and ``copies`` (upper row), ``communication``
            and, over it in a strong colour, ``exposed``, the part that no compute covers (lower row). An
            interval is ``(start_ms, end_ms)`` or has the attributes ``start_ms`` and ``end_ms``; 0 is the
            start of the step.
        marks: strategy → phases ``(name, start_ms, end_ms)``, drawn as light brackets above its lanes.

    Raises:
        ValueError: no rows, an unknown lane, or an interval that ends before it begins.
    """
    lanes = {lane for strategy in rows.values() for lane in strategy}
    if not rows or lanes - set(LANES):
        raise ValueError(f"a timeline needs rows with lanes among {', '.join(LANES)}; got {sorted(lanes)}")
    marks = marks or {}
    figure = new_figure(height_in=1.3 + 0.78 * len(rows))
    axes = figure.add_subplot()
    end = 0.0
    for index, (strategy, content) in enumerate(rows.items()):
        spans = {lane: [_span(interval) for interval in content.get(lane, ())] for lane in LANES}
        _strategy_rows(axes, 3 * index, spans, marks.get(strategy, ()))
        ends = [stop for lane in spans.values() for _, stop in lane]
        end = max([end, *ends, *(stop for _, _, stop in marks.get(strategy, ()))])
        if index:
            axes.axhline(3 * index - 1.06, color=FAINT, linewidth=0.6)
    axes.set_yticks([3 * index + 0.5 for index in range(len(rows))], list(rows))
    axes.set_ylim(3 * len(rows) - 1.06, -1.06)
    axes.set_xlim(0, end * 1.01 or 1)
    axes.set_xlabel("time since the start of the step (ms)")
    axes.grid(axis="x", color=FAINT, linewidth=0.5)
    drawn = {lane for content in rows.values() for lane, spans in content.items() if spans}
    legend = [(LANES[lane][2], COLOURS[lane]) for lane in LANES if lane in drawn]
    _finish(figure, axes, path, title, legend)


def _strategy_rows(axes: Axes, top: int, spans: dict[str, list], marks: Sequence) -> None:
    """Draw one strategy; ``top`` is the y of its compute row, the communication row is one below."""
    for lane, (row, _, _) in LANES.items():
        # No edges and no snapping to pixels: at a thousand kernels per lane both would falsify the gaps.
        axes.broken_barh(
            _merged(spans[lane]), (top + row - 0.42, 0.84), facecolors=COLOURS[lane], linewidth=0, snap=False
        )
    for name, start, stop in marks:
        low, high = top - 0.5, top - 0.58
        axes.plot([start, start, stop, stop], [low, high, high, low], color="#888888", linewidth=0.9)
        middle = (start + stop) / 2
        axes.text(middle, top - 0.6, name, ha="center", va="bottom", fontsize=6.5, color="#666666")
    if not spans["communication"]:
        style = {"fontsize": 7, "color": "#666666", "style": "italic", "bbox": _PAPER}
        axes.annotate(
            "no communication", (0, top + 1), (4, 0), textcoords="offset points", va="center", **style
        )


def _span(interval: Any) -> tuple[float, float]:
    start, stop = (
        (interval.start_ms, interval.end_ms) if hasattr(interval, "start_ms") else (interval[0], interval[1])
    )
    if stop < start:
        raise ValueError(f"the interval ({start}, {stop}) ends before it begins")
    return float(start), float(stop)


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(start, width) of the spans' union; what touches becomes one bar, else a seam would show between
    them.
    """
    bars: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if bars and start <= sum(bars[-1]):
            bars[-1] = (bars[-1][0], max(stop - bars[-1][0], bars[-1][1]))
        else:
            bars.append((start, stop - start))
    return bars


def _colour(name: str, names: Iterable[str]) -> str:
    """The quantity's own colour, or a spare one by its position among the parts that have none."""
    if name in COLOURS:
        return COLOURS[name]
    others = [other for other in names if other not in COLOURS]
    return _SPARE[others.index(name) % len(_SPARE)]


def _number(value: float) -> str:
    """About three significant digits, the same number of decimals for values of the same size."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def _finish(
    figure: Figure, axes: Axes, path: str | os.PathLike, title: str, legend: Sequence[tuple[str, str]]
) -> None:
    """Title, legend below the title, spines, and the file."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in legend],
        loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(legend), LEGEND_COLUMNS), frameon=False, fontsize=8.5,
        borderaxespad=0.2, handlelength=1.2, columnspacing=1.6, borderpad=0.2,
    )  # fmt: skip
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8.5, length=0, axis="y")
    axes.tick_params(colors=INK, labelsize=8.5, axis="x")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    finish(figure, path, title, points=10.5)
