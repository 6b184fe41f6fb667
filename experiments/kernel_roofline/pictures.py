"""The two pictures: every kernel under the ceilings of the run, and bars against the peers."""

from pathlib import Path

from distlab.hardware import lookup
from distlab.report import Record
from distlab.report.output import atomic_path

from .cases import VARIANTS


def plot_roofline(records: list[Record], path: Path) -> None:
    """Every kernel of ours as a point under the two measured ceilings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mine = [r for r in records if r.variant == "ours" and r.metrics.get("flops") and "tflop_per_s" in r.metrics]
    if not mine:
        return
    bandwidth, peak = (mine[0].metrics[name] for name in ("copy_gb_per_s", "cublas_tflop_per_s"))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = [(r.metrics["flops"] / r.metrics["min_bytes"], r.metrics["tflop_per_s"]) for r in mine]
    intensities = sorted([0.05, 1000 * peak / bandwidth, 20000.0])
    axes.plot(intensities, [min(peak, i * bandwidth / 1000) for i in intensities], color="#333333", linewidth=1.5,
              label=f"copy {bandwidth:,.0f} GB/s, cuBLAS {peak:,.0f} TFLOP/s, measured")
    spec = lookup(mine[0].environment.get("device_name") or "")
    if spec is not None:
        top = spec.peak["bf16"] / 1e12
        knee = sorted([0.05, spec.peak["bf16"] / spec.hbm_bandwidth, 20000.0])
        axes.plot(knee, [min(top, i * spec.hbm_bandwidth / 1e12) for i in knee], "--", color="#999999", linewidth=1,
                  label=f"datasheet of the {spec.name}")
    for direction, marker in (("fwd", "o"), ("bwd", "s"), ("both", "^")):
        chosen = [p for p, r in zip(points, mine, strict=True) if r.config["direction"] == direction]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), marker, markersize=5, linestyle="none",
                      label={"fwd": "forward", "bwd": "backward", "both": "forward and backward"}[direction])
    for number, (point, r) in enumerate(zip(points, mine, strict=True), 1):
        axes.annotate(str(number), point, fontsize=7, xytext=(4, 3), textcoords="offset points")
        axes.plot([], [], " ", label=f"{number} {r.config['label']} {r.config['direction']}")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of least traffic", ylabel="TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=1, handlelength=1.2)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130)


def plot_bars(records: list[Record], path: Path) -> None:
    """Time of every variant over ours, one group of bars per operation and direction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, float]] = {}
    for r in records:
        if r.metrics.get("time_p50_ms"):
            groups.setdefault(f"{r.config['label']} {r.config['direction']}", {})[r.variant] = r.metrics["time_p50_ms"]
    groups = {label: times for label, times in groups.items() if "ours" in times}
    if not groups:
        return
    figure = Figure(figsize=(9, 0.45 * len(groups) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    present = [v for v in VARIANTS if any(v in times for times in groups.values())]
    height = 0.8 / len(present)
    for place, variant in enumerate(present):
        at = [(row + (place - len(present) / 2 + 0.5) * height, times[variant] / times["ours"])
              for row, times in enumerate(groups.values()) if variant in times]
        axes.barh([y for y, _ in at], [x for _, x in at], height, label=variant)
    axes.set_yticks(range(len(groups)), groups, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="#333333", linewidth=0.8)
    longest = max(t / times["ours"] for times in groups.values() for t in times.values())
    axes.set(xlabel="time over ours (right of the line: ours is faster)", xlim=(0, min(6, 1.05 * longest)))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130)
