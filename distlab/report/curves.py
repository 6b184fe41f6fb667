"""Lines over steps: loss curves of several runs on one picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from distlab.report.figure import INK, OKABE_ITO, finish, new_figure, tidy

STYLES = ["-", "--", ":", "-."]


def curves(
    path: str | os.PathLike,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    events: Mapping[str, float] | None = None,
) -> None:
    """One line per entry; eight colours, then the same dashed.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``).
        series: name → (x, y) of equal length, drawn in order; a line that another covers stays visible beside it,
            because later ones are thinner.
        events: name → x, drawn as vertical lines.

    Raises:
        ValueError: no lines, or x and y of unequal lengths.
    """
    if not series or any(len(x) != len(y) for x, y in series.values()):
        raise ValueError("curves needs at least one line, with as many x as y")
    figure = new_figure(4.2)
    axes = figure.add_subplot()
    colours = [colour for name, colour in OKABE_ITO.items() if name != "yellow"]
    for index, (name, (x, y)) in enumerate(series.items()):
        width = 3.2 - 2.4 * index / max(1, len(series) - 1) if len(series) > 1 else 1.6
        style = STYLES[index // len(colours) % len(STYLES)]
        axes.plot(x, y, style, color=colours[index % len(colours)], linewidth=width, label=name)
    for name, x in (events or {}).items():
        axes.axvline(x, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(name, (x, 1), (3, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
                      va="top", fontsize=8, color=INK)  # fmt: skip
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    tidy(axes)
    if len(series) > 1:
        axes.legend(fontsize=8, frameon=False)
    finish(figure, path, title)
