"""Time every collective on every group."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import first_ranks, rest
from distlab.hardware import lookup
from distlab.measure.bandwidth import disturb, time_collective, traffic
from distlab.measure.memory import free_bytes
from distlab.measure.statistics import percentiles
from distlab.report.record import Record, commit, environment

from .config import NAME, SweepConfig
from .fitting import with_fits
from .rows import CONTENTION


def run(
    config: SweepConfig,
    context: RankContext,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Time everything; call it on every rank. All ranks return the same records.

    Raises:
        ValueError: group sizes that cannot be, see `SweepConfig.groups`.
        MemoryError: on a CPU, a payload that does not fit; on a GPU such a row says OOM.
    """
    _require_memory(config, context)
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    records: list[Record] = []
    for ranks in config.groups(context.world_size):
        with first_ranks(context, ranks) as group:
            if group is not None:
                shared = asdict(config) | {"world_size": ranks, "backend": context.backend}
                for variant, own, metrics in _rows(config, group, progress):
                    records.append(Record(NAME, variant, shared | own, metrics, **facts))
        rest(context, f"sweep-{ranks}", ranks)
    return with_fits(collectives.gather_objects(records, context.group)[0])


def _require_memory(config: SweepConfig, context: RankContext) -> None:
    """Refuse payloads whose tensors, a source and a result on every rank, a CPU does not have room for."""
    frees = collectives.gather_objects(free_bytes(context.device), context.group)
    needed = 2 * max(*config.sizes, config.contention_bytes)
    if context.device.type == "cpu" and None not in frees and needed > min(frees) // context.world_size:
        raise MemoryError(
            f"a payload of {needed // 2:,} bytes takes {needed / 2**30:,.1f} GiB on each of {context.world_size} "
            f"ranks, and {min(frees) // context.world_size / 2**30:,.1f} GiB are free for each: give smaller --sizes "
            "or --contention-mb"
        )


def _rows(
    config: SweepConfig, context: RankContext, progress: Callable[[str], None]
) -> Iterator[tuple[str, dict, dict]]:
    """(variant, own config, metrics) of every row of one group."""
    for operation in config.operations:
        progress(f"{context.world_size} ranks: {operation}")
        for size in config.sizes:
            yield operation, {"operation": operation, "num_bytes": size}, _row(config, context, operation, size)
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


def _computations(config: SweepConfig, device: torch.device) -> dict[str, Callable[[], object]]:
    """What runs beside the all-reduce: one that is bound by arithmetic, one by memory."""
    on_gpu = device.type == "cuda"
    side = config.matrix or (8192 if on_gpu else 384)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b, product = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    source = torch.randn(side * side, device=device)
    target = torch.empty_like(source)
    return {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
