"""Time every collective on every group, and fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import first_ranks, rest
from distlab.hardware import lookup
from distlab.measure.bandwidth import time_collective, traffic
from distlab.measure.contention import disturb
from distlab.measure.timing import percentiles
from distlab.report.record import Record, commit, environment
from distlab.theory.collective_fit import CollectiveFit, fit_collective, relative_errors

from .config import NAME, SweepConfig
from .rows import CONTENTION, FIT


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
