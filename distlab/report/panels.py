"""Small multiples of lines: how a metric grows, one panel per configuration and one line per variant."""

from __future__ import annotations

import os
from collections.abc import Sequence

from distlab.report.machines import keyed_apart
from distlab.report.output import atomic_path
from distlab.report.record import Record

COLUMNS = 4


def panels(
    records: Sequence[Record],
    path: str | os.PathLike,
    metric: str,
    label: str,
    *,
    x: str = "length",
    by: Sequence[str] = ("dtype", "head_dim"),
    emphasis: str = "ours",
) -> None:
    """Draw `metrics[metric]` against `config[x]`, both logarithmic; records without the metric are left out, and
    lines of different machines are different lines.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``), written atomically.
        label: the metric's name and unit, for the vertical axes.
        by: the fields of the config that make a panel.
        emphasis: the variant with the thick line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = keyed_apart(records)
    shapes = sorted({tuple(r.config[name] for name in by) for r in records}, key=str)
    shapes.sort(key=lambda shape: [(isinstance(part, str), part) for part in shape])
    columns = min(len(shapes), COLUMNS)
    rows = -(-len(shapes) // columns)
    figure = Figure(figsize=(4 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    variants = list(dict.fromkeys(r.variant for r in records))
    for place, shape in enumerate(shapes):
        axes = figure.add_subplot(rows, columns, place + 1)
        for number, variant in enumerate(variants):
            points = sorted(
                (r.config[x], r.metrics[metric])
                for r in records
                if r.variant == variant
                and tuple(r.config[name] for name in by) == shape
                and r.metrics.get(metric) is not None
            )
            if points:
                width = 2.2 if variant.split(" [")[0] == emphasis else 1
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=3,
                    label=variant,
                    color=f"C{number}",
                    linewidth=width,
                )
        title = ", ".join(f"{name} {value}" for name, value in zip(by, shape, strict=True))
        axes.set(title=title, xlabel=x, ylabel=label, xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    handles = {
        name: line
        for axes in figure.axes
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.axes[0].legend(handles.values(), handles.keys(), fontsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)
