"""Flat ring, tree or two levels: what does an all-reduce cost on a cluster, and from which size does the flat ring win?

    distlab run cluster_collectives --clusters dgx-h100:128x8 p4d:16x8

Closed form (`distlab.theory.collective_time.Fabric`) beside a simulation of every message
(`distlab.simulate.collectives`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.hardware import cluster
from distlab.report import Panel, Series, grouped, lines
from distlab.simulate import collectives as events
from distlab.simulate.estimate import LINK_SHARE
from distlab.theory.collective_time import Fabric

ALGORITHMS = {"flat ring": "flat_ring", "tree": "tree", "two-level": "two_level"}
DEFAULT = ("dgx-h200:1x2", "dgx-h200:1x4", *(f"{name}:128x8" for name in ("dgx-a100", "p4d", "dgx-h100", "dgx-b200")))


@dataclass(frozen=True)
class CollectivesConfig(Options):
    """Where and how much."""

    clusters: tuple[str, ...] = option(DEFAULT, "NAME:HOSTSxGPUS", metavar="CLUSTER")
    sizes_bytes: tuple[int, ...] = option(tuple(4 * 10**k for k in range(3, 10)), "payloads", least=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.clusters:
            cluster(name)


def measure(config: CollectivesConfig, context: RankContext, run: Run) -> None:
    """A row per cluster, size and algorithm."""
    for name in config.clusters:
        spec = cluster(name)
        fabric = Fabric.of(spec, LINK_SHARE)
        run.progress(name)
        for size in config.sizes_bytes:
            for algorithm, function in ALGORITHMS.items():
                closed, simulated = getattr(fabric, function)(size), getattr(events, function)(fabric, size)
                metrics = {
                    "predicted_ms": 1e3 * closed,
                    "simulated_ms": 1e3 * simulated,
                    "simulated_error_pct": 100 * (simulated / closed - 1) if closed else 0.0,
                    "crossover_bytes": fabric.crossover(),
                    "crossover_one_ring_bytes": fabric.crossover(1),
                }
                run.add(algorithm, metrics, cluster=name, num_bytes=size)


headline = headline_from(
    "All-reduces on {where}, links at {share:.0%} of the datasheets",
    where=lambda records: ", ".join(dict.fromkeys(record.config["cluster"] for record in records)),
    share=lambda records: LINK_SHARE,
)


def _size(num_bytes: float) -> str:
    """Where two levels win, in words."""
    return "nowhere" if num_bytes == 0 else "always" if num_bytes == math.inf else f"below {num_bytes / 1e6:,.0f} MB"


def findings(records: Sequence[Record]) -> list[str]:
    """The crossover of each cluster, and the simulation's largest distance from the closed form."""
    found = []
    for name, rows in grouped(records, lambda r: r.config["cluster"]).items():
        if cluster(name).hosts == 1:
            continue
        m, worst = rows[0].metrics, max(abs(float(r.metrics["simulated_error_pct"])) for r in rows)
        found.append(
            f"{name}: two levels beat flat rings that leave through every card "
            f"{_size(float(m['crossover_bytes']))}, and one ring that leaves through one card "
            f"{_size(float(m['crossover_one_ring_bytes']))}; simulated within {worst:.2g} % of the closed form."
        )
    return found


def draw(records: Sequence[Record], path: Path) -> None:
    """Time over size, a panel per cluster."""
    panels = []
    for name, rows in grouped(records, lambda r: r.config["cluster"]).items():
        series = []
        for algorithm, mine in grouped(rows, lambda r: r.variant).items():
            x = [r.config["num_bytes"] for r in mine]
            series.append(Series(algorithm, x, [r.metrics["simulated_ms"] for r in mine], line="-"))
        ticks = [(10.0**k, f"1e{k}") for k in range(3, 11, 2)]
        panels.append(Panel(name, "bytes", "ms", series, x_ticks=ticks))
    lines(path, panels, title=headline(records))


VIEW = View(
    columns=[
        Column("config.cluster", "cluster", align="left"),
        Column("config.num_bytes", "bytes", ",d"),
        Column("variant", "algorithm"),
        Column("metrics.predicted_ms", "closed form ms", ",.3f"),
        Column("metrics.simulated_ms", "simulated ms", ",.3f"),
        Column("metrics.simulated_error_pct", "error %", "+.2f"),
    ],
    headline=headline,
    pictures={"collectives.png": draw},
    findings=findings,
    reading="A row per cluster, payload and algorithm. The launch of a library's all-reduce, some 30 µs, is in none.",
    prediction="Bandwidths are the datasheets' at the share that a calibrated machine reached, hops are NCCL's own "
    "figures (distlab.hardware).",
    noise="Nothing was measured here.",
)

EXPERIMENT = Experiment(
    CollectivesConfig, measure, VIEW,
    presets={"smoke": {"clusters": ("dgx-h100:2x8",), "sizes_bytes": (4000, 4_000_000)}},
    ranks="none",
)
