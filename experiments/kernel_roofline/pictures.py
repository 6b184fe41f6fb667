"""The two pictures: every kernel under the ceilings of the run, and bars against the peers."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.hardware import lookup
from distlab.report import Record
from distlab.report.style import GREYS, INK, OKABE_ITO, horizontal, picture

from .turns import over_ours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEERS = {"builtin": "green", "compile": "vermillion", "template": "sky", "liger": "purple"}
DIRECTIONS = {"fwd": ("o", "blue", "forward"), "bwd": ("s", "orange", "backward"),
              "both": ("^", "green", "forward and backward")}
NAMED_BELOW = 0.75  # of what the ceilings allow: such a point is named
LONGEST = 2.5  # bars beyond are cut off and say how long they are


def plot_roofline(records: Sequence[Record], path: Path) -> None:
    """Every kernel of ours as a point under the two measured ceilings; those that stay below are named."""
    mine = [r for r in records if r.variant == "ours" and r.metrics.get("flops") and "tflop_per_s" in r.metrics]
    if not mine:
        return
    title = "Our kernels under the ceilings of the run; named are those below three quarters of them"
    with picture(path, title, 4.5) as figure:
        axes = figure.add_subplot()
        # Every process of a resumed run measures its own ceilings: those that held highest.
        bandwidth, peak = (max(r.metrics[name] for r in mine) for name in ("copy_gb_per_s", "cublas_tflop_per_s"))
        _ceiling(axes, bandwidth, peak, color=INK, linewidth=1.2,
                 label=f"measured: copy {bandwidth:,.0f} GB/s, cuBLAS {peak:,.0f} TFLOP/s")
        spec = lookup(mine[0].environment.get("device_name") or "")
        if spec is not None:
            _ceiling(axes, spec.hbm_bandwidth / 1e9, spec.peak["bf16"] / 1e12, color=GREYS["grey"], linewidth=0.8,
                     linestyle="--", label=f"datasheet of the {spec.name}")
        points = [(r.metrics["flops"] / r.metrics["min_bytes"], r.metrics["tflop_per_s"]) for r in mine]
        for direction, (marker, colour, label) in DIRECTIONS.items():
            chosen = [p for p, r in zip(points, mine, strict=True) if r.config["direction"] == direction]
            if chosen:
                axes.plot(*zip(*chosen, strict=True), marker, color=OKABE_ITO[colour], alpha=0.75, markersize=4,
                          linestyle="none", label=label)
        for (intensity, rate), r in zip(points, mine, strict=True):
            if rate < NAMED_BELOW * min(peak, intensity * bandwidth / 1000):
                left = intensity > 100  # of the point: there is no room on the other side
                axes.annotate(f"{r.config['label']} {r.config['direction']}", (intensity, rate), fontsize=5.5,
                              ha="right" if left else "left",
                              xytext=(-5 if left else 5, -5), textcoords="offset points")
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("FLOPs per byte of least traffic")
        axes.set_ylabel("TFLOP/s")
        axes.legend(loc="upper left", frameon=True)


def _ceiling(axes: "Axes", gb_per_s: float, tflop_per_s: float, **style: object) -> None:
    """The roof: bandwidth times intensity, up to the arithmetic peak."""
    knee = 1000 * tflop_per_s / gb_per_s
    xs = sorted([0.05, knee, max(2 * knee, 20000.0)])
    axes.plot(xs, [min(tflop_per_s, x * gb_per_s / 1000) for x in xs], **style)


def plot_bars(records: Sequence[Record], path: Path) -> None:
    """Time of every peer over ours, one group of bars per operation and direction, in two columns."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for r in records:
        if r.metrics.get("time_p50_ms") and r.variant in ("ours", *PEERS):
            groups.setdefault(f"{r.config['label']} {r.config['direction']}", {})[r.variant] = r.metrics
    rows = [(label, times) for label, times in groups.items() if len(times) > 1 and "ours" in times]
    if not rows:
        return
    half = math.ceil(len(rows) / 2)
    title = "Time of every peer over ours, by operation and direction"
    with picture(path, title, 0.24 * half + 1.0, small=True) as figure:
        columns = figure.subplots(1, 2 if len(rows) > half else 1, squeeze=False)[0]
        for axes, part in zip(columns, (rows[:half], rows[half:]), strict=False):
            _bars(axes, part)
        shown = {name: colour for name, colour in PEERS.items() if any(name in times for _, times in rows)}
        handles = [columns[0].barh([0], [0], color=OKABE_ITO[colour], label=name) for name, colour in shown.items()]
        figure.legend(handles=handles, labels=list(shown), loc="outside lower center", ncols=len(shown))


def _bars(axes: "Axes", rows: list[tuple[str, dict[str, Mapping[str, Any]]]]) -> None:
    height = 0.8 / len(PEERS)
    for row, (_, times) in enumerate(rows):
        present = [name for name in PEERS if name in times]
        for place, name in enumerate(present):
            ratio = over_ours(times[name], times["ours"])
            y = row + (place - (len(present) - 1) / 2) * height
            axes.barh(y, min(ratio, LONGEST), height * 0.9, color=OKABE_ITO[PEERS[name]])
            if ratio > LONGEST:
                axes.text(LONGEST * 0.99, y, f"{ratio:.1f}", ha="right", va="center", fontsize=4.5, color="white")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=5)
    axes.set(xlim=(0, LONGEST), ylim=(len(rows) - 0.4, -0.6))
    axes.set_xlabel("time over ours: right of the line ours is faster", fontsize=6.5)
    horizontal(axes)
    axes.axvline(1, color=INK, linewidth=0.8)
