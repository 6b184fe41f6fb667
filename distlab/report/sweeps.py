"""Measured points over predicted lines, in panels side by side: sweeps over sizes and over ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from distlab.report.figure import INK, LINES, MARKERS, finish, legend_below, new_figure, tidy


@dataclass(frozen=True)
class Series:
    """One line or one set of points.

    Args:
        label: for the legend; equal labels share an entry, a colour and a marker.
        x, y: of equal length.
        low, high: ends of the error bars of points.
        line: a line, for what was predicted; else points, for what was measured.
        dashed: a dashed line, or hollow points: a second kind (a peer, another implementation).
        like: the label whose colour it takes, such as the own strategy of a peer.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    line: bool = False
    dashed: bool = False
    like: str | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        title: above it.
        x_label, y_label: with units.
        series: what to draw.
        log_x: base of the horizontal axis, None for linear.
        log_y: whether the vertical axis is logarithmic.
        from_zero: else, whether it begins at zero.
        x_ticks: (place, text) where numbers would not do.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: int | None = 2
    log_y: bool = False
    from_zero: bool = True
    x_ticks: Sequence[tuple[float, str]] = field(default=())


def curves(path: str | os.PathLike, panels: Sequence[Panel], *, title: str, height_in: float = 4.6) -> None:
    """Draw the panels side by side; what has one label has one colour in all of them.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``), written atomically.

    Raises:
        ValueError: no panels, a panel without series, or x and y of unequal lengths.
    """
    every = [series for panel in panels for series in panel.series]
    if not panels or not all(panel.series for panel in panels) or any(len(s.x) != len(s.y) for s in every):
        raise ValueError("curves needs at least one panel, series in each, and as many x as y")
    figure = new_figure(height_in)
    keys = list(dict.fromkeys(series.like or series.label for series in every))
    handles: dict[str, object] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for series in panel.series:
            place = keys.index(series.like or series.label)
            drawn = _draw(axes, series, LINES[place % len(LINES)], MARKERS[place % len(MARKERS)])
            handles.setdefault(series.label, drawn)
        _dress(axes, panel)
    legend_below(figure, handles)
    finish(figure, path, title)


def _draw(axes, series: Series, colour: str, marker: str):
    if series.line:
        style = "--" if series.dashed else "-"
        return axes.plot(series.x, series.y, style, color=colour, linewidth=1.5, label=series.label)[0]
    spread = None
    if series.low is not None and series.high is not None:
        pairs = zip(series.low, series.y, series.high, strict=True)
        spread = list(zip(*((max(0.0, y - low), max(0.0, high - y)) for low, y, high in pairs), strict=True))
    return axes.errorbar(
        series.x, series.y, yerr=spread, fmt=marker, markersize=5, capsize=2.5, linewidth=1.0, color=colour,
        markerfacecolor="white" if series.dashed else colour, label=series.label,
    )  # fmt: skip


def _dress(axes, panel: Panel) -> None:
    if panel.log_x:
        axes.set_xscale("log", base=panel.log_x)
    if panel.log_y:
        axes.set_yscale("log")
    else:
        if panel.from_zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if panel.x_ticks:
        axes.set_xticks([place for place, _ in panel.x_ticks], [text for _, text in panel.x_ticks])
        axes.set_xticks([], minor=True)
    axes.set_title(panel.title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(panel.x_label, fontsize=8.5)
    axes.set_ylabel(panel.y_label, fontsize=8.5)
    axes.tick_params(labelsize=8, colors=INK)
    tidy(axes)
