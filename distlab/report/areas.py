"""Stacked areas over time: what held how much memory when."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from distlab.report.figure import INK, OKABE_ITO, finish, new_figure, tidy

_COLOURS = [
    OKABE_ITO[name] for name in ("black", "blue", "orange", "green", "sky", "purple", "vermillion", "yellow")
]


def stacked_areas(
    path: str | os.PathLike,
    times: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    end: float,
    spans: Mapping[str, tuple[float, float]] | None = None,
    notes: Sequence[tuple[float, float, str]] = (),
) -> None:
    """Layers on top of each other, each constant from one time to the next; a layer of zeros is left out.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``).
        times: ascending, where something changes.
        layers: name → height from each time on; eight at most, the first at the bottom.
        end: where the last step of the staircase ends.
        spans: name → (start, end), written along the upper edge with a line where each ends.
        notes: (x, y, text), drawn as a dot with a text beside it.

    Raises:
        ValueError: no times, more than eight layers, or a layer that is not as long as `times`.
    """
    if (
        not times
        or len(layers) > len(_COLOURS)
        or any(len(values) != len(times) for values in layers.values())
    ):
        raise ValueError(f"stacked_areas needs up to {len(_COLOURS)} layers with one value per time")
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    at = [*times, end]
    base = [0.0] * len(at)
    for colour, (name, values) in zip(_COLOURS, layers.items(), strict=False):
        if not any(values):
            continue
        top = [low + value for low, value in zip(base, [*values, values[-1]], strict=True)]
        axes.fill_between(at, base, top, step="post", color=colour, linewidth=0, label=name)
        base = top
    highest = max(base)
    for name, (start, stop) in (spans or {}).items():
        axes.axvline(stop, color=INK, linewidth=0.7, linestyle=":")
        axes.text((start + stop) / 2, 1.13 * highest, name, ha="center", va="center", fontsize=8.5, color=INK)
    for x, y, text in notes:
        axes.plot([x], [y], "o", color=INK, markersize=4)
        side, offset = ("right", -7) if x > 0.6 * end else ("left", 7)
        axes.annotate(text, (x, y), (offset, 7), textcoords="offset points", ha=side, fontsize=8.5, color=INK)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.2 * highest)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    tidy(axes)
    handles, names = axes.get_legend_handles_labels()
    # The legend in the order of the picture, from the top down.
    axes.legend(
        handles[::-1], names[::-1], fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    finish(figure, path, title)
