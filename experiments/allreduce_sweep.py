"""How fast are this machine's collectives?

    distlab run allreduce_sweep                              # all GPUs, or two CPU ranks
    distlab run allreduce_sweep --nproc 4 --group-sizes 2 4

Times the library's eight collectives, from all-reduce to all-to-all, and rings made of sends and
receives, for sizes from kilobytes to two gigabytes on the first 2, 4, … ranks of one launch, and
fits α–β to each (piecewise, by relative error). Every row's result is checked.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from distlab.comm import collectives
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest
from distlab.experiment import (
    Column,
    Experiment,
    Metrics,
    Options,
    RankContext,
    Record,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.hardware import lookup
from distlab.measure import (
    BY_HAND,
    OPERATIONS,
    free_bytes,
    percentile_metrics,
    time_collective,
    traffic,
)
from distlab.report import Panel, Series, grouped, lines, prediction_error, sparse_column
from distlab.theory.collective_time import fit_collective

FIT = "fit "
KIB, MIB = 2**10, 2**20
# 4 KiB … 2 GiB; 1.5 GiB since rings change their ways at 1 GiB, and a piece of a fit takes three
# sizes
GPU_SIZES = tuple(sorted((*(4 * KIB * 2**k for k in range(20)), 1536 * MIB)))
TICKS = (
    (4 * KIB, "4 KiB"),
    (64 * KIB, "64 KiB"),
    (MIB, "1 MiB"),
    (16 * MIB, "16 MiB"),
    (256 * MIB, "256 MiB"),
)
CPU_SIZES = tuple(4 * KIB * 2**k for k in range(13))  # … 16 MiB


@dataclass(frozen=True)
class SweepConfig(Options):
    """Options of the sweep. Raises ValueError for a value that is not allowed."""

    operations: tuple[str, ...] = option(OPERATIONS, "collectives to time", choices=OPERATIONS)
    sizes: tuple[int, ...] = option(GPU_SIZES, "payload bytes", least=1)
    group_sizes: tuple[int, ...] = option(
        (), "numbers of first ranks to use, a group each [2, 4, … all]", least=2
    )
    warmup: int = option(3, "untimed calls of each", least=0)
    repeats: int = option(20, "timed calls, at most: fewer if the budget is short", least=3)
    budget_s: float = option(1.0, "seconds per row", above=0, flag="--budget")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) < 2:
            raise ValueError(f"sizes={self.sizes}: give two or more positive sizes")

    def groups(self, world_size: int) -> tuple[int, ...]:
        """The numbers of ranks to time, of those there are.

        Raises:
            ValueError: none, because one rank sends nothing, or more than there are.
        """
        if world_size < 2:
            raise ValueError("one rank alone sends nothing: start two or more with --nproc")
        groups = self.group_sizes or tuple(size for size in doubling_sizes(world_size) if size > 1)
        if max(groups) > world_size:
            raise ValueError(
                f"group sizes {groups} on {world_size} ranks: collectives need 2 to {world_size} ranks; start more "
                "with --nproc"
            )
        return groups


def measure(config: SweepConfig, context: RankContext, run: Run) -> None:
    """Time everything that has no row yet; call it on every rank.

    Raises:
        ValueError: group sizes that cannot be, see `SweepConfig.groups`.
        MemoryError: on a CPU, a payload that does not fit; on a GPU such a row says OOM.
    """
    groups = config.groups(context.world_size)
    # On a CPU a payload, of which every rank holds a source and a result, must fit.
    frees = collectives.gather_objects(free_bytes(context.device), context.group)
    needed = 2 * max(config.sizes)
    if (
        context.device.type == "cpu"
        and None not in frees
        and needed > min(frees) // context.world_size
    ):
        raise MemoryError(
            f"a payload of {needed // 2:,} bytes takes {needed / 2**30:,.1f} GiB on each of {context.world_size} "
            f"ranks, and {min(frees) // context.world_size / 2**30:,.1f} GiB are free for each: give smaller --sizes"
        )
    for ranks in groups:
        with first_ranks(context, ranks) as group:
            if group is not None:
                _measure_group(config, group, run)
        rest(context, f"sweep-{ranks}", ranks)
    run.records[:] = with_fits(run.records)  # rank 0 is in every group: its rows are all
    run.save()


def _measure_group(config: SweepConfig, context: RankContext, run: Run) -> None:
    """A row per collective and size on one group."""
    shared = {"world_size": context.world_size, "backend": context.backend}
    for operation in config.operations:
        run.progress(f"{context.world_size} ranks: {operation}")
        for size in config.sizes:
            own = shared | {"operation": operation, "num_bytes": size}
            if not run.done(operation, **own):
                run.add(operation, _row(config, context, operation, size), **own)


def _row(config: SweepConfig, context: RankContext, operation: str, size: int) -> Metrics:
    timed = partial(
        time_collective, context, operation, size, warmup=config.warmup, repeats=config.repeats
    )
    timing = collectives.if_it_fits(
        partial(timed, budget_s=config.budget_s), context.device, context.group
    )
    if timing is None:
        return {"time_p50_ms": "OOM"}
    times = percentile_metrics("time", timing.samples_ms)
    algbw = timing.num_bytes / times["time_p50_ms"] / 1e6
    share = traffic(operation, context.world_size)
    metrics = times | {
        "payload_bytes": timing.num_bytes,
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": algbw * share,
        "max_abs_error": timing.max_abs_error,
        "repeats": len(timing.samples_ms),
    }
    spec = (
        lookup(torch.cuda.get_device_name(context.device))
        if context.device.type == "cuda"
        else None
    )
    link = spec and spec.nvlink_bandwidth
    metrics["link_ms"] = None if link is None else 1e3 * timing.num_bytes * share / link
    return metrics


def timings(records: Records) -> list[Record]:
    """The rows that are times of collectives."""
    return [record for record in records if record.variant in OPERATIONS]


def with_fits(records: Records) -> list[Record]:
    """Return the records with a fit after the times of each collective on each group.

    A fit carries its seconds and errors. Existing fits are made anew: `with_fits(read_json(path))`
    updates an older sweep. Times of a payload that did not fit in memory are left out, and fewer
    than two of them have no fit.
    """
    found = []
    rows = [record for record in records if not record.variant.startswith(FIT)]
    for (operation, _), mine in grouped(
        rows, lambda r: (r.variant, r.config["world_size"])
    ).items():
        timed = [r for r in timings(mine) if r.metrics.get("time_p50_ms") not in (None, "OOM")]
        if len({r.metrics["payload_bytes"] for r in timed}) < 2:
            found += mine
            continue
        points = {r.metrics["payload_bytes"]: r.metrics["time_p50_ms"] / 1e3 for r in timed}
        fit = fit_collective(list(points), list(points.values()))
        for r in mine:
            if r in timed:
                ms = 1e3 * fit.seconds(r.metrics["payload_bytes"])
                r = replace(r, metrics=r.metrics | {"fit_ms": ms})
            found.append(r)
        config = {name: value for name, value in mine[0].config.items() if name != "num_bytes"}
        metrics = fit.metrics(list(points), list(points.values()))
        share = traffic(operation, config["world_size"])
        metrics["fitted_busbw_gb_per_s"] = fit.pieces[-1].bytes_per_s * share / 1e9
        found.append(replace(mine[0], variant=FIT + operation, config=config, metrics=metrics))
    return found


headline = headline_from(
    "Collectives on {ranks} ranks, {device_name} ({backends}), torch {torch}",
    ranks=lambda records: ", ".join(map(str, sorted({r.config["world_size"] for r in records}))),
    backends=lambda records: ", ".join(sorted({r.config["backend"] for r in records})),
)


def wrong_rows(records: Records) -> list[str]:
    """Rows whose result was not what it should be, one line each."""
    return [
        f"{record.variant} of {record.metrics['payload_bytes']:,} bytes on {record.config['world_size']} ranks: "
        f"the result is off by {record.metrics['max_abs_error']:g}"
        for record in timings(records)
        # averages round, sums of small integers do not
        if not record.metrics.get("max_abs_error", 0.0) <= 1e-4
    ]


def draw_bandwidth(records: Records, path: Path) -> None:
    """Bus bandwidth against the payload, a panel per number of ranks and backend."""
    rows = [r for r in timings(records) if isinstance(r.metrics.get("time_p50_ms"), float)]
    panels = []
    for (ranks, backend), mine in grouped(
        rows, lambda r: (r.config["world_size"], r.config["backend"])
    ).items():
        mine.sort(key=lambda r: r.metrics["payload_bytes"])
        ticks = [tick for tick in TICKS if tick[0] <= 2 * mine[-1].metrics["payload_bytes"]]
        series = _bandwidth_series(mine)
        panels.append(
            Panel(
                f"{ranks} ranks, {backend}",
                "payload",
                "bus bandwidth (GB/s)",
                series,
                x_ticks=ticks,
            )
        )
    lines(path, panels, title=headline(records))


def _bandwidth_series(rows: Records) -> list[Series]:
    series = []
    for name, mine in grouped(rows, lambda r: r.variant).items():
        x, y = ([r.metrics[m] for r in mine] for m in ("payload_bytes", "busbw_gb_per_s"))
        like = None if name == "whole_all_reduce" else name.removeprefix("ring_")
        series.append(Series(name, x, y, line="--" if name in BY_HAND else "-", like=like))
    link = next((r for r in rows if r.variant == "all_reduce" and r.metrics.get("link_ms")), None)
    if link is not None:
        payload = link.metrics["payload_bytes"]
        peak = (
            payload
            * traffic("all_reduce", link.config["world_size"])
            / link.metrics["link_ms"]
            / 1e6
        )
        x = [end(r.metrics["payload_bytes"] for r in rows) for end in (min, max)]
        series.append(Series("peak of the link", x, [peak, peak], line=":", like="~"))
    return series


VIEW = View(
    columns=[
        Column("variant", "collective"),
        Column("config.world_size", "ranks"),
        sparse_column("metrics.payload_bytes", "bytes", ",d"),
        sparse_column("metrics.time_p50_ms", "time ms", ".3f"),
        sparse_column("metrics.time_p80_ms", "time p80 ms", ".3f"),
        sparse_column("metrics.algbw_gb_per_s", "algbw GB/s", ".2f"),
        sparse_column("metrics.busbw_gb_per_s", "busbw GB/s", ".2f"),
        sparse_column("metrics.link_ms", "link's peak ms", ".3f"),
        sparse_column("metrics.fit_ms", "fit ms", ".3f"),
        prediction_error("fit_ms", "time_p50_ms", "error %", "+.1f"),
        sparse_column("metrics.max_abs_error", "max |Δ|", ".1e"),
        sparse_column("metrics.latency_us", "α µs", ".0f"),
        sparse_column("metrics.fitted_busbw_gb_per_s", "W as busbw GB/s", ".3g"),
        sparse_column("metrics.fit_error_max_pct", "largest error %", ".1f"),
    ],
    headline=headline,
    terminal=(
        "variant",
        "world_size",
        "payload_bytes",
        "time_p50_ms",
        "busbw_gb_per_s",
        "time_p50_ms_error_pct",
        "max_abs_error",
    ),
    pictures={"bandwidth.png": draw_bandwidth},
    reading="algbw is the payload over the time; busbw multiplies it by the share of the payload that the busiest link "
    "carries in the best algorithm (2(N−1)/N for an all-reduce, (N−1)/N for gather and scatter, 1 for a broadcast), so "
    "that it can be held against the link's peak. ring_… are made of sends and receives in distlab.comm.ring; "
    "whole_all_reduce forwards whole tensors. Every row's result was checked before it was timed (max |Δ|).",
    prediction="The fit is α + S/W by relative error, in as few pieces as stay within 8 %; pieces have three sizes or "
    "more. link's peak is the datasheet's NVLink bandwidth with no latency.",
    noise="From p50 to p80 of the repetitions.",
)

EXPERIMENT = Experiment(
    SweepConfig,
    measure,
    VIEW,
    presets={
        "cpu": {"sizes": CPU_SIZES},
        "quick": {"sizes": tuple(4 * KIB * 8**k for k in range(4)), "repeats": 5, "budget_s": 0.1},
        "smoke": {
            "operations": ("all_reduce", "broadcast"),
            "sizes": (4096, 65536, 262144),
            "group_sizes": (2,),
            "warmup": 1,
            "repeats": 3,
            "budget_s": 0.05,
        },
    },
    ranks="many",
    wrong=wrong_rows,
)
