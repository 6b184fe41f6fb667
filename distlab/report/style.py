"""Look of every picture of the lab: width, palette, fonts and axes, and how it is written.

matplotlib is imported inside the functions only, without pyplot: no global figures, no display, and
the same numbers give the same picture.
"""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distlab.files import atomic_path

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe & Ito's palette (https://jfly.uni-koeln.de/color/), distinguishable with any form of colour
# blindness.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
# Two more, for pictures of ten parts: far from the others and from each other in lightness.
GREY, LIGHT_GREY = "#999999", "#DDDDDD"
INK = "#333333"
FAINT = "#BBBBBB"

# For lines, the first ones furthest apart; yellow is too faint on white.
LINES = [BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK]
# There is one marker more than colours. The eighth line has the first colour and its own marker.
MARKERS = "osD^vPX*"
# For areas, from the bottom up.
AREAS = [BLACK, BLUE, ORANGE, GREEN, SKY, PURPLE, VERMILLION, YELLOW]
DARK = [BLACK, BLUE, VERMILLION, GREEN]  # white text can be read on these

# What a quantity is called decides its colour, so that it is the same in every picture of the lab.
COLOURS = {
    "compute": BLUE,
    "communication": SKY,
    "exposed": VERMILLION,
    "exposed communication": VERMILLION,
    "overhead": VERMILLION,
    "overhead of communication": VERMILLION,
    "optimizer": ORANGE,
    "copies": PURPLE,
    "host waits": YELLOW,
    "host launches": INK,
    "forward": SKY,
    "backward": BLUE,
    "matrix products": BLUE,
    "attention": GREEN,
    "scores": SKY,
    "values": GREY,
    "softmax": VERMILLION,
    "normalisation": PURPLE,
    "element-wise": YELLOW,
    "loss": BLACK,
    "casts and copies": GREY,
    "other": LIGHT_GREY,
    "slower compute": YELLOW,
    "idle": GREEN,
    "not explained": LIGHT_GREY,
}
# Names without a colour of their own take these, in the order of a picture.
_SPARE = [GREEN, YELLOW, PURPLE, SKY, BLACK]

# The two numbers make every picture 8 inches wide, which fits a page at full size.
DPI = 150
WIDTH_PX = 1200
STYLE = {
    "figure.dpi": DPI,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 9.5,
    "figure.titleweight": "bold",
    "text.color": INK,
    "text.parse_math": False,  # a name may hold a dollar sign, which begins no formula
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.markersize": 5,
    "errorbar.capsize": 2.5,
}
# For many small panels.
SMALL = {
    "axes.labelsize": 7.5,
    "axes.titlesize": 7,
    "grid.linewidth": 0.4,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 7.5,
    "lines.markersize": 3,
}


@contextlib.contextmanager
def picture(path: Path, title: str, height_in: float, *, small: bool = False) -> Iterator[Figure]:
    """Yield an empty figure to draw on. At the end it gets its title and is written atomically.

    Args:
        path: path of a ``.png`` (or ``.svg``, ``.pdf``), `WIDTH_PX` wide.
        title: text, which is broken into lines that fit.
        height_in: inches of `DPI` pixels.
        small: True for small letters, for many panels.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # The context restores matplotlib's settings, which a notebook may have changed.
    with matplotlib.rc_context(STYLE | (SMALL if small else {})), warnings.catch_warnings():
        # a name may hold characters that no font has
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure(figsize=(WIDTH_PX / DPI, height_in))
        yield figure
        for axes in figure.axes:
            _number_powers(axes.xaxis)
            _number_powers(axes.yaxis)
        figure.suptitle(textwrap.fill(title, 100), x=0.01, ha="left")
        with atomic_path(path) as temporary:
            # A version of matplotlib in the file would change its bytes without any change of the
            # picture.
            figure.savefig(
                temporary, metadata={"Software": None} if temporary.suffix == ".png" else None
            )


def _number_powers(axis: Axis) -> None:
    """Let a logarithmic axis show plain numbers.

    matplotlib's own format for it is a formula, which would be shown unparsed (`STYLE`).
    """
    from matplotlib.ticker import LogFormatter, LogFormatterSciNotation

    class PlainNumbers(LogFormatter):
        """Numbers at the ticks that the base class chooses: those between powers on short axes."""

        def __call__(self, value: float, position: int | None = None) -> str:
            return f"{value:,.10g}" if super().__call__(value, position) else ""

    for which in ("major", "minor"):
        formatter = getattr(axis, f"get_{which}_formatter")()
        # Ticks with texts of their own have another formatter, and keep it.
        if isinstance(formatter, LogFormatterSciNotation):
            plain = PlainNumbers(base=formatter._base, labelOnlyBase=formatter.labelOnlyBase)
            getattr(axis, f"set_{which}_formatter")(plain)


def horizontal(axes) -> None:
    """Axes for horizontal bars: named rows without ticks or a line, and a grid along x only."""
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def colour_of(name: str, names: Sequence[str]) -> str:
    """Return the quantity's own colour, or a spare one by its position among names without one."""
    # The position is counted among names without a colour, so it does not depend on the others.
    others = [other for other in names if other not in COLOURS]
    return COLOURS.get(name) or _SPARE[others.index(name) % len(_SPARE)]
