"""The sweep of `collectives`: a row per collective, payload and group of ranks, and a fit of each.

What happens next to a computation is measured in `contention.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from distlab.comm import collectives
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest
from distlab.experiment import (
    Column,
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

# The prefix tells rows of fits from rows of times, which have the name of a collective alone.
FIT = "fit "
KIB = 2**10
MIB = 2**20
# Each size of a CPU is twice the one before, from 4 KiB to 16 MiB. Those of a GPU go to 2 GiB.
CPU_SIZES = tuple(4 * KIB * 2**k for k in range(13))
# 1.5 GiB is added because rings change their algorithm at 1 GiB, and a piece of a fit takes three
# sizes.
GPU_SIZES = (*(4 * KIB * 2**k for k in range(19)), 1536 * MIB, 2048 * MIB)
TICKS = (
    (4 * KIB, "4 KiB"),
    (64 * KIB, "64 KiB"),
    (MIB, "1 MiB"),
    (16 * MIB, "16 MiB"),
    (256 * MIB, "256 MiB"),
)


@dataclass(frozen=True)
class SweepOptions(Options):
    """Options of the sweep. Raises ValueError for a value that is not allowed."""

    operations: tuple[str, ...] = option(OPERATIONS, "collectives to time", choices=OPERATIONS)
    sizes: tuple[int, ...] = option(GPU_SIZES, "payload bytes", minimum=1)
    group_sizes: tuple[int, ...] = option(
        (), "numbers of first ranks to use, a group each [2, 4, … all]", minimum=2
    )
    warmup: int = option(3, "untimed calls of each", minimum=0)
    repeats: int = option(20, "timed calls, at most: fewer if the budget is short", minimum=3)
    budget_s: float = option(1.0, "seconds per row", above=0, flag="--budget")

    def __post_init__(self) -> None:
        super().__post_init__()
        # A line through fewer than two points is not determined.
        if len(self.sizes) < 2:
            raise ValueError(f"sizes={self.sizes}: give two or more positive sizes")

    def groups(self, world_size: int) -> tuple[int, ...]:
        """Return the sizes of the groups to time on `world_size` ranks.

        Raises:
            ValueError: there is one rank, which sends nothing, or a group has more ranks than there
                are.
        """
        if world_size < 2:
            raise ValueError("one rank alone sends nothing: start two or more with --nproc")
        groups = self.group_sizes
        if not groups:
            # Groups of 2, 4, 8, … show how a collective scales, and the last has all ranks.
            groups = tuple(size for size in doubling_sizes(world_size) if size > 1)
        if max(groups) > world_size:
            raise ValueError(
                f"group sizes {groups} on {world_size} ranks: collectives need 2 to {world_size} "
                "ranks; start more with --nproc"
            )
        return groups


def measure_groups(
    config: SweepOptions, groups: Sequence[int], context: RankContext, run: Run
) -> None:
    """Time everything that has no row yet, on the first ranks. Call it on every rank.

    Args:
        config: options of the sweep.
        groups: number of ranks of each group. A group has the first ranks of the job.
        context: context of this rank in the whole job.
        run: run that takes the rows.

    Raises:
        MemoryError: on a CPU, a payload that does not fit. On a GPU such a row says OOM.
    """
    # On a GPU an allocation that fails raises an error, which makes a row. On a CPU the process is
    # killed.
    if context.device.type == "cpu":
        _require_memory(max(config.sizes), context)
    for ranks in groups:
        # Every rank makes the group, since that is collective. It is None on ranks outside of it.
        with first_ranks(context, ranks) as group:
            if group is not None:
                _measure_group(config, group, run)
        # Idle ranks sleep until the group is done. Waiting in a collective would load the cores and
        # GPUs that are measured.
        rest(context, f"sweep-{ranks}", ranks)
    # Rank 0 is in every group, so it has all rows.
    run.records[:] = with_fits(run.records)
    run.save()


def _require_memory(payload: int, context: RankContext) -> None:
    """Raise MemoryError if the ranks of this host cannot hold a payload of these bytes."""
    free = collectives.gather_objects(free_bytes(context.device), context.group)
    if None in free:
        return  # this system does not say how much is free
    # Ranks share the memory of a host.
    free_per_rank = min(free) // context.world_size
    needed = 2 * payload  # a source and a result
    if needed > free_per_rank:
        raise MemoryError(
            f"a payload of {payload:,} bytes takes {needed / 2**30:,.1f} GiB on each of "
            f"{context.world_size} ranks, and {free_per_rank / 2**30:,.1f} GiB are free for each: "
            "give smaller --sizes"
        )


def _measure_group(config: SweepOptions, context: RankContext, run: Run) -> None:
    """Add a row per collective and size on one group."""
    for operation in config.operations:
        run.progress(f"{context.world_size} ranks: {operation}")
        for size in config.sizes:
            facts = {
                "world_size": context.world_size,
                "backend": context.backend,
                "operation": operation,
                "num_bytes": size,
            }
            # Rows of an earlier run of this name are kept. All ranks of the group have the same
            # rows, and so the same answer.
            if not run.done(operation, **facts):
                run.add(operation, _row(config, context, operation, size), **facts)


def _row(config: SweepOptions, context: RankContext, operation: str, size: int) -> Metrics:
    """Return the metrics of one collective with a payload of `size` bytes."""
    timed = partial(
        time_collective,
        context,
        operation,
        size,
        warmup=config.warmup,
        repeats=config.repeats,
        budget_s=config.budget_s,
    )
    # One rank may run out of memory alone. All ranks learn of it and leave together.
    timing = collectives.if_it_fits(timed, context.device, context.group)
    if timing is None:
        # The word takes the place of the time, so that the table shows it there.
        return {"time_p50_ms": "OOM"}
    times = percentile_metrics("time", timing.samples_ms)
    # `num_bytes` is the payload that was sent: `size` is rounded to whole elements on each rank.
    algbw = timing.num_bytes / times["time_p50_ms"] / 1e6
    share = traffic(operation, context.world_size)
    return times | {
        "payload_bytes": timing.num_bytes,
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": algbw * share,
        "max_abs_error": timing.max_abs_error,
        "repeats": len(timing.samples_ms),
        "link_ms": _link_ms(timing.num_bytes * share, context.device),
    }


def _link_ms(carried: float, device: torch.device) -> float | None:
    """Return ms in which NVLink carries these bytes at its peak. None without a known link."""
    if device.type != "cuda":
        return None
    spec = lookup(torch.cuda.get_device_name(device))
    if spec is None or spec.nvlink_bandwidth is None:
        return None
    # The datasheet's bandwidth is in bytes per second, and the factor turns seconds into ms.
    return 1e3 * carried / spec.nvlink_bandwidth


def timings(records: Records) -> list[Record]:
    """Return the rows that are times of collectives."""
    return [record for record in records if record.variant in OPERATIONS]


def _is_timed(record: Record) -> bool:
    """Return whether a row is the time of a collective that fitted into memory."""
    return record.variant in OPERATIONS and isinstance(record.metrics.get("time_p50_ms"), float)


def _collective_and_ranks(record: Record) -> tuple[str, int]:
    return record.variant, record.config["world_size"]


def _ranks_and_backend(record: Record) -> tuple[int, str]:
    return record.config["world_size"], record.config["backend"]


def _collective(record: Record) -> str:
    return record.variant


def _payload(record: Record) -> int:
    return record.metrics["payload_bytes"]


def with_fits(records: Records) -> list[Record]:
    """Return the records, with a fit after the rows of each collective on each number of ranks.

    The fit is a row of its own, with the pieces, the latency and the largest error. Each row with
    a time also gets the fitted time, `fit_ms`. Existing fits are made anew:
    `with_fits(read_json(path))` updates an older sweep. A row whose payload did not fit in memory
    is kept, but the fit does not use it. A collective that was timed with fewer than two payloads
    gets no fit.
    """
    # Existing fits are dropped, because they may have been made from fewer rows.
    rows = [record for record in records if not record.variant.startswith(FIT)]
    found = []
    for group in grouped(rows, _collective_and_ranks).values():
        # Payload in bytes → seconds. A payload that occurs twice counts once, with its last time.
        seconds = {}
        for record in group:
            if _is_timed(record):
                # Time is stored in ms, and the fit takes seconds.
                seconds[_payload(record)] = record.metrics["time_p50_ms"] / 1e3
        found += group if len(seconds) < 2 else _fitted(group, seconds)
    return found


def _fitted(group: Records, seconds: dict[int, float]) -> list[Record]:
    """Return the rows of one collective on one group with their fitted times, and the fit.

    Args:
        group: rows of the collective.
        seconds: payload in bytes → measured seconds.
    """
    payloads = list(seconds)
    measured = list(seconds.values())
    fit = fit_collective(payloads, measured)
    found = []
    for record in group:
        metrics = record.metrics
        if _is_timed(record):
            metrics = metrics | {"fit_ms": 1e3 * fit.seconds(_payload(record))}
        found.append(replace(record, metrics=metrics))
    first = group[0]
    # The fit is of all payloads, so it has none of its own.
    config = {name: value for name, value in first.config.items() if name != "num_bytes"}
    metrics = fit.metrics(payloads, measured)
    largest = fit.pieces[-1].bytes_per_s  # bandwidth of the largest payloads
    share = traffic(first.variant, config["world_size"])
    # The bandwidth of the payload becomes that of the busiest link, as in the other rows.
    metrics["fitted_busbw_gb_per_s"] = largest * share / 1e9
    # A fit is a row of its own, without a payload. Its name keeps it out of `timings`.
    found.append(replace(first, variant=FIT + first.variant, config=config, metrics=metrics))
    return found


def _all_ranks(records: Records) -> str:
    return ", ".join(map(str, sorted({record.config["world_size"] for record in records})))


def _all_backends(records: Records) -> str:
    return ", ".join(sorted({record.config["backend"] for record in records}))


headline = headline_from(
    "Collectives on {ranks} ranks, {device_name} ({backends}), torch {torch}",
    ranks=_all_ranks,
    backends=_all_backends,
)


def wrong_timings(records: Records) -> list[str]:
    """Return a line for each collective whose result was not what it should be."""
    found = []
    for record in timings(records):
        # An average rounds, a sum of small integers does not. A row without memory has no error.
        # NaN is wrong, so the comparison must be true of a right one.
        error = record.metrics.get("max_abs_error", 0.0)
        if not error <= 1e-4:
            found.append(
                f"{record.variant} of {_payload(record):,} bytes on "
                f"{record.config['world_size']} ranks: the result is off by {error:g}"
            )
    return found


def draw_bandwidth(records: Records, path: Path) -> None:
    """Draw bus bandwidth against the payload, in a panel per number of ranks and backend."""
    rows = [record for record in records if _is_timed(record)]
    # Backends have different links, so each has a panel of its own.
    panels = []
    for (ranks, backend), group in grouped(rows, _ranks_and_backend).items():
        group.sort(key=_payload)
        largest = _payload(group[-1])
        panel = Panel(
            f"{ranks} ranks, {backend}",
            "payload",
            "bus bandwidth (GB/s)",
            _bandwidth_series(group),
            # A tick far beyond the last payload would stretch the axis.
            x_ticks=[(size, text) for size, text in TICKS if size <= 2 * largest],
        )
        panels.append(panel)
    lines(path, panels, title=headline(records))


def _bandwidth_series(rows: Records) -> list[Series]:
    """Return a line per collective, and one for the peak of the link if that is known.

    Args:
        rows: timed rows of one group, in ascending order of their payloads.
    """
    series = []
    for name, group in grouped(rows, _collective).items():
        payloads = [_payload(record) for record in group]
        bandwidths = [record.metrics["busbw_gb_per_s"] for record in group]
        style = "--" if name in BY_HAND else "-"
        # A ring has the colour of the library's collective. Whole tensors have no such partner.
        like = None if name == "whole_all_reduce" else name.removeprefix("ring_")
        series.append(Series(name, payloads, bandwidths, line=style, like=like))
    for record in rows:
        if record.variant == "all_reduce" and record.metrics.get("link_ms"):
            # The peak in GB/s follows from the time at the peak, which is the only thing that
            # records keep.
            share = traffic("all_reduce", record.config["world_size"])
            peak = _payload(record) * share / record.metrics["link_ms"] / 1e6
            ends = [_payload(rows[0]), _payload(rows[-1])]
            series.append(Series("peak of the link", ends, [peak, peak], line=":", like="~"))
            break  # every row has the same peak
    return series


SWEEP_VIEW = View(
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
    reading="algbw is the payload over the time. busbw multiplies it by the share of the payload "
    "that the busiest link carries in the best algorithm (2(N−1)/N for an all-reduce, (N−1)/N for "
    "gather and scatter, 1 for a broadcast), so that it can be compared with the link's peak. "
    "ring_… are made of sends and receives in distlab.comm.ring. whole_all_reduce forwards whole "
    "tensors. Every row's result was checked before it was timed (max |Δ|).",
    prediction="The fit is α + S/W by relative error, in as few pieces as stay within 8 %. Pieces "
    "have three sizes or more. link's peak is the datasheet's NVLink bandwidth with no latency.",
    noise="From p50 to p80 of the repetitions.",
)
