"""Lines over a logarithmic axis, with measured points on top: scaling pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from distlab.report.figure import INK, LINES, OKABE_ITO, finish, new_figure, tidy

Point = tuple[float, float, float, float]  # x, y, low and high end of the error bar


def log_lines(
    path: str | os.PathLike,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    points: Mapping[str, Mapping[str, Sequence[Point]]] | None = None,
) -> None:
    """Panels side by side, x logarithmic (to base 2) and y from zero; a name has one colour in all of them.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``).
        panels: panel → line → (x, y) of equal length.
        points: panel → line → measured points, drawn as dots with error bars in the line's colour.

    Raises:
        ValueError: no lines, or x and y of unequal lengths.
    """
    lines = [line for panel in panels.values() for line in panel.values()]
    if not lines or any(len(x) != len(y) for x, y in lines):
        raise ValueError("log_lines needs at least one line, with as many x as y")
    figure = new_figure(4.4)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colour = {name: LINES[index % len(LINES)] for index, name in enumerate(names)}
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (panel, content) in zip(all_axes, panels.items(), strict=True):
        for index, (name, (x, y)) in enumerate(content.items()):
            style = ("-", "--", "-.", ":")[index % 4]  # lines that lie on each other can still be told apart
            axes.plot(x, y, style, color=colour[name], linewidth=1.7, label=name)
        for name, measured in ((points or {}).get(panel) or {}).items():
            x, y, low, high = zip(*measured, strict=True)
            spread = [
                [b - a for a, b in zip(low, y, strict=True)],
                [b - a for a, b in zip(y, high, strict=True)],
            ]
            spread = [[max(0.0, length) for length in side] for side in spread]
            axes.errorbar(
                x, y, yerr=spread, fmt="o", markersize=5, capsize=3, linewidth=1.2,
                color=colour.get(name, OKABE_ITO["black"]), markeredgecolor="white",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(panel, loc="left", fontsize=9, color=INK)
        axes.set_xlabel(x_label)
        tidy(axes)
    all_axes[0].set_ylabel(y_label)
    all_axes[0].legend(fontsize=8, frameon=False, loc="lower left")
    finish(figure, path, title)
