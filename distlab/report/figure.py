"""What every picture of the lab has in common: width, palette, ink, grid, title, and how it is written.

matplotlib is imported inside the functions only, without pyplot: no global figures, no display, and the same numbers
give the same picture.
"""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING

from distlab.report.output import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette (https://jfly.uni-koeln.de/color/), distinguishable with any form of colour blindness.
OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}
# Two more, for pictures of ten parts: far from the others and from each other in lightness.
GREYS = {"grey": "#999999", "light grey": "#DDDDDD"}
# For lines, the first ones furthest apart; yellow is too faint on white.
LINES = [OKABE_ITO[name] for name in ("blue", "vermillion", "green", "orange", "purple", "sky", "black")]
MARKERS = "osD^vPX"

DPI = 150
WIDTH_PX = 1200
INK = "#333333"
FAINT = "#BBBBBB"


def new_figure(height_in: float) -> Figure:
    """An empty figure `WIDTH_PX` wide; its height in inches of `DPI` pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_PX / DPI, height_in), dpi=DPI, layout="constrained", facecolor="white")


def panel_grid(count: int, abreast: int, row_in: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, at most `abreast` in a row of `row_in` inches, with small tidy axes."""
    columns = min(count, abreast)
    rows = -(-count // columns)
    figure = new_figure(0.8 + row_in * rows)
    every = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    for axes in every:
        axes.tick_params(labelsize=6, which="both")
        tidy(axes, linewidth=0.4)
    return figure, every


def label_edges(every: list[Axes], abreast: int, x_label: str, y_label: str) -> None:
    """Name the axes of a `panel_grid`: below the lowest panel of each column, and left of each row."""
    columns = min(len(every), abreast)
    for place, axes in enumerate(every):
        if place >= len(every) - columns:
            axes.set_xlabel(x_label, fontsize=7.5)
        if place % columns == 0:
            axes.set_ylabel(y_label, fontsize=7.5)


def tidy(axes: Axes, *, linewidth: float = 0.5) -> None:
    """A faint grid behind what is drawn, and no frame above and to the right."""
    axes.grid(color=FAINT, linewidth=linewidth)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend_below(figure: Figure, handles: dict[str, object], columns: int = 4) -> None:
    """One legend for all panels, name → what was drawn, below them."""
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), columns),
        fontsize=7.5, frameon=False,
    )  # fmt: skip


def finish(figure: Figure, path: str | os.PathLike, title: str, *, points: float = 9.5) -> None:
    """Write the title above and the figure to `path` (``.png``, ``.svg`` or ``.pdf``), whole or not at all.

    Args:
        points: height of the title's letters; its text is broken to fit the width.
    """
    text = textwrap.fill(title, int(950 / points))
    figure.suptitle(text, x=0.01, ha="left", fontsize=points, fontweight="bold", color=INK)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, metadata={"Software": None} if temporary.suffix == ".png" else None)
