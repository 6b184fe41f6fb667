"""Healthy and broken side by side: one small panel per case, the same few lines in each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from distlab.report.figure import INK, OKABE_ITO, finish, label_edges, legend_below, panel_grid

ABREAST = 4


def twin_curves(
    path: str | os.PathLike,
    cells: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    levels: Mapping[str, float] | None = None,
) -> None:
    """A grid of panels, four abreast; the legend stands once, below.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``).
        cells: heading of a panel → name of a line → its values over 1, 2, 3, …; values that are not finite leave a
            gap, and a line without any finite value says so. The first line is the thick one, and decides the
            panel's height: what goes far beyond it leaves the panel.
        levels: name → height, drawn as a dotted line in every panel.

    Raises:
        ValueError: no cells.
    """
    if not cells:
        raise ValueError("twin_curves needs at least one cell")
    figure, grid = panel_grid(len(cells), ABREAST, row_in=1.8)
    names = list(dict.fromkeys(name for lines in cells.values() for name in lines))
    palette = [OKABE_ITO[colour] for colour in ("sky", "vermillion", "green", "purple")]
    handles = {}
    for axes, (heading, lines) in zip(grid, cells.items(), strict=True):
        for name, values in lines.items():
            number = names.index(name)
            colour = palette[number % len(palette)]
            width = 1.0 if number else 2.6
            steps = range(1, len(values) + 1)
            (handles[name],) = axes.plot(steps, values, color=colour, linewidth=width, label=name)
            if not any(math.isfinite(value) for value in values):
                note = f"{name}: no {'finite ' if len(values) else ''}value"
                axes.annotate(note, (0.3, 0.8), xycoords="axes fraction", fontsize=6, color=colour)
        for name, level in (levels or {}).items():
            handles[name] = axes.axhline(level, color=INK, linewidth=0.7, linestyle=":", label=name)
        highest = max((value for value in lines[names[0]] if math.isfinite(value)), default=1.0)
        if axes.get_ylim()[1] > 1.5 * highest:
            axes.set_ylim(0, 1.5 * highest)
        axes.set_title(heading, fontsize=6.5, color=INK)
    label_edges(grid, ABREAST, x_label, y_label)
    legend_below(figure, handles)
    finish(figure, path, title, points=9)
