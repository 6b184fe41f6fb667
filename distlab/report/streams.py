"""What ran on each stream of one step: a lane per stream, one colour per kind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from distlab.report.figure import FAINT, finish, new_figure, tidy
from distlab.report.plot import COLOURS

KINDS = {"compute": "compute", "communication": "communication", "copy": "copies"}
MOST_LANES = 8  # per step; a CPU trace has a thread for everything


def stream_lanes(
    path: str | os.PathLike,
    steps: Mapping[str, Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]],
    *,
    title: str,
) -> None:
    """Draw steps below each other on one axis of milliseconds.

    Args:
        path: a ``.png`` (or ``.svg``, ``.pdf``), written atomically.
        steps: name of the step → lane → kind (``compute``, ``communication``, ``copy``) → intervals in ms from the
            start of the step; of each step the first eight lanes are drawn.

    Raises:
        ValueError: no lanes, or an unknown kind.
    """
    rows = [
        (name, lane, kinds)
        for name, lanes in steps.items()
        for lane, kinds in list(lanes.items())[:MOST_LANES]
    ]
    unknown = {kind for _, _, kinds in rows for kind in kinds} - set(KINDS)
    if not rows or unknown:
        raise ValueError(
            f"stream_lanes needs lanes of kinds {', '.join(KINDS)}; got {sorted(unknown) or 'none'}"
        )
    from matplotlib.patches import Patch

    figure = new_figure(1.3 + 0.32 * len(rows))
    axes = figure.add_subplot()
    for row, (name, _, kinds) in enumerate(rows):
        for kind, spans in kinds.items():
            bars = [(start, end - start) for start, end in spans]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=COLOURS[KINDS[kind]], linewidth=0, snap=False)
        if row and rows[row - 1][0] != name:
            axes.axhline(row - 0.5, color=FAINT, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{name}: {lane}" for name, lane, _ in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("time since the start of the step (ms)", fontsize=8.5)
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    drawn = [kind for kind in KINDS if any(kinds.get(kind) for _, _, kinds in rows)]
    handles = [Patch(color=COLOURS[KINDS[kind]], label=KINDS[kind]) for kind in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    finish(figure, path, title)
