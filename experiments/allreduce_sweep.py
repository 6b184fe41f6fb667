"""How fast are this machine's collectives, how well do two constants describe them, and what do they disturb?

Times the library's all-reduce, all-gather, reduce-scatter and broadcast, and rings made of sends and receives, for
sizes from kilobytes to a gigabyte on the first 2, 4, … ranks of one launch; fits α–β to each (piecewise, by relative
error); and measures how a matrix product and an all-reduce slow each other down, both ways. Every row's result is
checked. The fits are records: `distlab.simulate.calibrate.measured_links` reads them for predictions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest
from distlab.hardware import lookup
from distlab.measure.bandwidth import BY_HAND, LIBRARY, OPERATIONS, time_collective, traffic
from distlab.measure.contention import disturb
from distlab.measure.timing import percentiles
from distlab.report.record import Record, commit, environment
from distlab.report.sweeps import Panel, Series, curves
from distlab.report.table import Column
from distlab.report.view import View
from distlab.theory.collective_fit import CollectiveFit, fit_collective, relative_errors

NAME = "allreduce_sweep"
KIB, MIB, GIB = 2**10, 2**20, 2**30
GPU_SIZES = tuple(4 * KIB * 2**k for k in range(19))  # 4 KiB … 1 GiB
CPU_SIZES = tuple(4 * KIB * 2**k for k in range(13))  # … 16 MiB
FIT, CONTENTION = "fit ", "contention "


@dataclass(frozen=True)
class SweepConfig:
    """What to time.

    Args:
        operations: names of `distlab.measure.bandwidth.OPERATIONS`.
        sizes: payload bytes.
        group_sizes: numbers of ranks, each timed on the first so many; () for 2, 4, … and all.
        warmup, repeats: untimed and timed calls of each; repeats at most, fewer where `budget_s` is short.
        budget_s: seconds a row may take.
        contention_bytes: size of the all-reduces beside computation; 0 leaves contention out.
        matrix: side of the product; 0 for 8192 (bf16) on a GPU and 384 (fp32) on a CPU.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = GPU_SIZES
    group_sizes: tuple[int, ...] = ()
    warmup: int = 3
    repeats: int = 20
    budget_s: float = 1.0
    contention_bytes: int = 256 * MIB
    matrix: int = 0

    def __post_init__(self) -> None:
        for operation in self.operations:
            traffic(operation, 2)
        if not self.operations or len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ValueError(f"sizes={self.sizes}: give two or more positive sizes, and an operation")
        if self.repeats < 3 or self.warmup < 0 or self.contention_bytes < 0 or self.matrix < 0:
            raise ValueError(
                f"repeats={self.repeats} (3 or more), warmup={self.warmup}, contention_bytes="
                f"{self.contention_bytes}, matrix={self.matrix} (not negative)"
            )

    def groups(self, world_size: int) -> tuple[int, ...]:
        """The numbers of ranks to time, of those there are.

        Raises:
            ValueError: none, because one rank sends nothing, or more than there are.
        """
        groups = self.group_sizes or tuple(size for size in doubling_sizes(world_size) if size > 1)
        if not groups or min(groups) < 2 or max(groups) > world_size:
            raise ValueError(
                f"group sizes {groups or '()'} on {world_size} rank(s): collectives need 2 to {world_size or 2} "
                "ranks; start more with --nproc"
            )
        return groups


def run(
    config: SweepConfig,
    context: RankContext,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Time everything; call it on every rank. All ranks return the same records."""
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    records: list[Record] = []
    for ranks in config.groups(context.world_size):
        with first_ranks(context, ranks) as group:
            if group is not None:
                shared = asdict(config) | {"world_size": ranks, "backend": context.backend}
                for variant, own, metrics in _rows(config, group, progress):
                    records.append(Record(NAME, variant, shared | own, metrics, **facts))
        rest(context, f"sweep-{ranks}", ranks)
    return collectives.gather_objects(records, context.group)[0]


def _rows(
    config: SweepConfig, context: RankContext, progress: Callable[[str], None]
) -> Iterator[tuple[str, dict, dict]]:
    """(variant, own config, metrics) of every row of one group."""
    for operation in config.operations:
        progress(f"{context.world_size} ranks: {operation}")
        rows = []
        for size in config.sizes:
            rows.append(({"operation": operation, "num_bytes": size}, _row(config, context, operation, size)))
        timed = [(own, metrics) for own, metrics in rows if metrics.get("time_p50_ms") not in (None, "OOM")]
        fit = _fit(timed)
        for own, metrics in rows:
            if fit is not None and (own, metrics) in timed:
                fitted = 1e3 * fit.seconds(metrics["payload_bytes"])
                metrics["fit_ms"] = fitted
                metrics["fit_error_pct"] = 100 * (fitted / metrics["time_p50_ms"] - 1)
            yield operation, own, metrics
        if fit is not None:
            yield FIT + operation, {"operation": operation}, _fit_metrics(fit, timed, context.world_size)
    if config.contention_bytes:
        progress(f"{context.world_size} ranks: contention")
        for name, compute in _computations(config, context.device).items():
            found = disturb(context, compute, config.contention_bytes)
            metrics = asdict(found) | {
                "compute_rate": found.compute_rate,
                "communication_rate": found.communication_rate,
            }
            yield (
                CONTENTION + name,
                {"operation": "all_reduce", "num_bytes": config.contention_bytes},
                metrics,
            )


def _row(config: SweepConfig, context: RankContext, operation: str, size: int) -> dict[str, object]:
    fits, timing = True, None
    try:
        timing = time_collective(
            context, operation, size, warmup=config.warmup, repeats=config.repeats, budget_s=config.budget_s
        )
    except torch.OutOfMemoryError:
        fits = False
    if not collectives.all_ranks_agree(fits, context.device, context.group):
        return {"time_p50_ms": "OOM"}
    times = {f"time_{p}_ms": value for p, value in percentiles(timing.samples_ms).items()}
    algbw = timing.num_bytes / times["time_p50_ms"] / 1e6
    share = traffic(operation, context.world_size)
    metrics = times | {
        "payload_bytes": timing.num_bytes,
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": algbw * share,
        "max_abs_error": timing.max_abs_error,
        "repeats": len(timing.samples_ms),
    }
    link = _link_bytes_per_s(context.device)
    metrics["link_ms"] = None if link is None else 1e3 * timing.num_bytes * share / link
    return metrics


def _link_bytes_per_s(device: torch.device) -> float | None:
    spec = lookup(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if spec is None else spec.nvlink_bandwidth


def _fit(timed: Sequence[tuple[dict, dict]]) -> CollectiveFit | None:
    points = {metrics["payload_bytes"]: metrics["time_p50_ms"] / 1e3 for _, metrics in timed}
    return fit_collective(list(points), list(points.values())) if len(points) > 1 else None


def _fit_metrics(fit: CollectiveFit, timed: Sequence[tuple[dict, dict]], ranks: int) -> dict[str, object]:
    sizes = [metrics["payload_bytes"] for _, metrics in timed]
    errors = relative_errors(fit, sizes, [metrics["time_p50_ms"] / 1e3 for _, metrics in timed])
    large = [abs(error) for size, error in zip(sizes, errors, strict=True) if size > 1e6]
    share = traffic(timed[0][0]["operation"], ranks)
    return {
        "pieces": fit.to_list(),
        "latency_us": 1e6 * fit.pieces[0].latency_s,
        "fitted_busbw_gb_per_s": fit.pieces[-1].bytes_per_s * share / 1e9,
        "fit_error_max_pct": 100 * max(map(abs, errors)),
        "fit_error_above_1mb_pct": 100 * max(large) if large else None,
        "residuals_pct": [100 * error for error in errors],
    }


def _computations(config: SweepConfig, device: torch.device) -> dict[str, Callable[[], object]]:
    """What runs beside the all-reduce: one that is bound by arithmetic, one by memory."""
    on_gpu = device.type == "cuda"
    side = config.matrix or (8192 if on_gpu else 384)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b, product = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    source = torch.randn(side * side, device=device)
    target = torch.empty_like(source)
    return {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}


COLUMNS = [
    Column("variant", "collective"),
    Column("config.world_size", "ranks"),
    Column("metrics.payload_bytes", "bytes", ",d", missing=""),
    Column("metrics.time_p50_ms", "p50 ms", ".3f", missing=""),
    Column("metrics.time_p80_ms", "p80 ms", ".3f", missing=""),
    Column("metrics.algbw_gb_per_s", "algbw GB/s", ".2f", missing=""),
    Column("metrics.busbw_gb_per_s", "busbw GB/s", ".2f", missing=""),
    Column("metrics.link_ms", "link's peak ms", ".3f", missing=""),
    Column("metrics.fit_ms", "fit ms", ".3f", missing=""),
    Column("metrics.fit_error_pct", "error %", "+.1f", missing=""),
    Column("metrics.max_abs_error", "max |Δ|", ".1e", missing=""),
]


def timings(records: Sequence[Record]) -> list[Record]:
    """The rows that are times of collectives."""
    return [record for record in records if record.variant in OPERATIONS]


def fits(records: Sequence[Record]) -> list[Record]:
    """The rows that are fits."""
    return [record for record in records if record.variant.startswith(FIT)]


def contention(records: Sequence[Record]) -> list[Record]:
    """The rows on contention."""
    return [record for record in records if record.variant.startswith(CONTENTION)]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the tables were measured on."""
    env, backends = records[0].environment, sorted({record.config["backend"] for record in records})
    ranks = sorted({record.config["world_size"] for record in records})
    return (
        f"Collectives on {', '.join(map(str, ranks))} ranks, {env['device_name']} ({', '.join(backends)}), "
        f"torch {env['torch']}"
    )


def wrong_rows(records: Sequence[Record]) -> list[str]:
    """Rows whose result was not what it should be, one line each."""
    return [
        f"{record.variant} of {record.metrics['payload_bytes']:,} bytes on {record.config['world_size']} ranks: "
        f"the result is off by {record.metrics['max_abs_error']:g}"
        for record in timings(records)
        if record.metrics.get("max_abs_error", 0.0) > 1e-4  # averages round, sums of small integers do not
        or record.metrics.get("max_abs_error") != record.metrics.get("max_abs_error")
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """What follows: fits, contention, and what is wrong."""
    lines = [f"WRONG: {problem}" for problem in wrong_rows(records)]
    for record in fits(records):
        m, ranks = record.metrics, record.config["world_size"]
        large = m["fit_error_above_1mb_pct"]
        above = "" if large is None else f", {large:.1f} % above 1 MB"
        lines.append(
            f"{record.config['operation']} on {ranks} ranks: {m['latency_us']:.0f} µs, busbw up to "
            f"{m['fitted_busbw_gb_per_s']:.3g} GB/s, in {len(m['pieces'])} piece(s); largest error "
            f"{m['fit_error_max_pct']:.1f} %{above}"
        )
    for record in contention(records):
        m, what = record.metrics, record.variant.removeprefix(CONTENTION)
        lines.append(
            f"{what} beside an all-reduce on {record.config['world_size']} ranks: {m['compute_alone_ms']:.3f} ms "
            f"become {m['compute_beside_ms']:.3f} (rate {m['compute_rate']:.2f}); the all-reduce's "
            f"{m['comm_alone_ms']:.3f} become {m['comm_beside_ms']:.3f} (rate {m['communication_rate']:.2f})"
        )
    return lines


def draw_bandwidth(records: Sequence[Record], path: Path) -> None:
    """Bus bandwidth against size, a panel per number of ranks."""
    panels = [
        Panel(y_label="bus bandwidth (GB/s)", series=_bandwidth_series(rows), **shared)
        for rows, shared in _by_ranks(records)
    ]
    curves(path, panels, title=headline(records))


def draw_fits(records: Sequence[Record], path: Path) -> None:
    """Times of the library's collectives with their fits, a panel per number of ranks."""
    panels = [
        Panel(y_label="time (ms)", log_y=True, series=_time_series(rows), **shared)
        for rows, shared in _by_ranks(records)
    ]
    panels = [panel for panel in panels if panel.series]
    if panels:
        curves(path, panels, title=f"Measured times and α–β fits in pieces. {headline(records)}")


def _by_ranks(records: Sequence[Record]) -> Iterator[tuple[list[Record], dict]]:
    rows = [r for r in timings(records) if isinstance(r.metrics.get("time_p50_ms"), float)]
    for key in dict.fromkeys((r.config["world_size"], r.config["backend"]) for r in rows):
        mine = [r for r in rows if (r.config["world_size"], r.config["backend"]) == key]
        mine.sort(key=lambda r: r.metrics["payload_bytes"])
        yield mine, {"title": f"{key[0]} ranks, {key[1]}", "x_label": "payload", "x_ticks": _ticks(mine)}


def _bandwidth_series(rows: Sequence[Record]) -> list[Series]:
    series = []
    for name in dict.fromkeys(r.variant for r in rows):
        mine = [r for r in rows if r.variant == name]
        x, y = ([r.metrics[m] for r in mine] for m in ("payload_bytes", "busbw_gb_per_s"))
        like = None if name == "whole_all_reduce" else name.removeprefix("ring_")
        series.append(Series(name, x, y, line=True, dashed=name in BY_HAND, like=like))
    links = [r.metrics["link_ms"] for r in rows if r.variant == "all_reduce" and r.metrics.get("link_ms")]
    if links:
        peak = rows[0].metrics["payload_bytes"] * traffic(rows[0].variant, rows[0].config["world_size"])
        peak = peak / rows[0].metrics["link_ms"] / 1e6
        x = [min(r.metrics["payload_bytes"] for r in rows), max(r.metrics["payload_bytes"] for r in rows)]
        series.append(Series("peak of the link", x, [peak, peak], line=True, like="~"))
    return series


def _time_series(rows: Sequence[Record]) -> list[Series]:
    series = []
    for name in (name for name in LIBRARY if any(r.variant == name for r in rows)):
        mine = [r for r in rows if r.variant == name]
        x = [r.metrics["payload_bytes"] for r in mine]
        low, y, high = ([r.metrics[f"time_{p}_ms"] for r in mine] for p in ("p20", "p50", "p80"))
        series.append(Series(name, x, y, low, high))
        fitted = [r.metrics.get("fit_ms") for r in mine]
        if None not in fitted:
            series.append(Series(f"{name}, fit", x, fitted, line=True, like=name))
    return series


def _ticks(rows: Sequence[Record]) -> list[tuple[float, str]]:
    largest = max(r.metrics["payload_bytes"] for r in rows)
    ticks = ((1, "4 KiB"), (3, "64 KiB"), (5, "1 MiB"), (7, "16 MiB"), (9, "256 MiB"))
    return [(4**k * KIB, text) for k, text in ticks if 4**k * KIB <= 2 * largest]


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={"bandwidth.png": draw_bandwidth, "fit.png": draw_fits},
    findings=findings,
    reading="algbw is the payload over the time; busbw multiplies it by the share of the payload that the busiest link "
    "carries in the best algorithm (2(N−1)/N for an all-reduce, (N−1)/N for gather and scatter, 1 for a broadcast), so "
    "that it can be held against the link's peak. ring_… are made of sends and receives in distlab.comm.ring; "
    "whole_all_reduce forwards whole tensors. Every row's result was checked before it was timed (max |Δ|).\n\n"
    "A rate beside an all-reduce is the speed relative to running alone, of the computation and of the all-reduce.",
    prediction="The fit is α + S/W by relative error, in as few pieces as stay within 8 %; pieces have three sizes or "
    "more. link's peak is the datasheet's NVLink bandwidth with no latency.",
    noise="p20 to p80 of the repetitions are the error bars of the fit's picture.",
)
