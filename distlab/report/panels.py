"""Small multiples of lines: how a metric grows, one panel per configuration and one line per variant."""

from __future__ import annotations

import os
from collections.abc import Sequence

from distlab.report.figure import INK, LINES, MARKERS, finish, label_edges, legend_below, panel_grid
from distlab.report.machines import by_machine, keyed_apart
from distlab.report.record import Record

ABREAST = 4


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
    records = keyed_apart(records)
    shapes = sorted({tuple(r.config[name] for name in by) for r in records}, key=str)
    shapes.sort(key=lambda shape: [(isinstance(part, str), part) for part in shape])
    figure, grid = panel_grid(len(shapes), ABREAST, row_in=2.1)
    emphasised = lambda variant: variant.split(" [")[0] == emphasis  # noqa: E731
    variants = sorted(dict.fromkeys(r.variant for r in records), key=emphasised, reverse=True)  # its line is solid
    handles: dict[str, object] = {}
    for axes, shape in zip(grid, shapes, strict=True):
        for number, variant in enumerate(variants):
            points = sorted(
                (r.config[x], r.metrics[metric])
                for r in records
                if r.variant == variant
                and tuple(r.config[name] for name in by) == shape
                and r.metrics.get(metric) is not None
            )
            if points:
                (handles[variant],) = axes.plot(
                    *zip(*points, strict=True), marker=MARKERS[number % len(MARKERS)], markersize=3, label=variant,
                    color=LINES[number % len(LINES)], linestyle="-" if number < len(LINES) else "--",
                    linewidth=2.2 if emphasised(variant) else 1,
                )  # fmt: skip
        title = ", ".join(f"{name} {value}" for name, value in zip(by, shape, strict=True))
        axes.set_title(title, fontsize=7, color=INK)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    label_edges(grid, ABREAST, x, label)
    if handles:
        legend_below(figure, handles)
    env = records[0].environment
    where = "" if len(by_machine(records)) > 1 else f" ({env.get('device_name', 'unknown device')})"
    finish(figure, path, f"{label}, over {x}{where}", points=9)
