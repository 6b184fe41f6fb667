"""Time every collective on every group."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest
from distlab.experiment import Options, Run, option
from distlab.hardware import lookup
from distlab.measure.bandwidth import OPERATIONS, disturb, time_collective, traffic
from distlab.measure.memory import free_bytes
from distlab.measure.statistics import percentiles

from .fitting import CONTENTION, with_fits

KIB, MIB = 2**10, 2**20
# 4 KiB … 2 GiB; 1.5 GiB since rings change their ways at 1 GiB, and a piece of a fit takes three sizes
GPU_SIZES = tuple(sorted((*(4 * KIB * 2**k for k in range(20)), 1536 * MIB)))
CPU_SIZES = tuple(4 * KIB * 2**k for k in range(13))  # … 16 MiB


@dataclass(frozen=True)
class SweepConfig(Options):
    """What to time. Raises ValueError for a value that is not allowed; the message says what is."""

    operations: tuple[str, ...] = option(OPERATIONS, "what to time", choices=OPERATIONS)
    sizes: tuple[int, ...] = option(GPU_SIZES, "payload bytes", least=1)
    group_sizes: tuple[int, ...] = option((), "numbers of ranks, each the first so many [2, 4, … all]", least=2)
    warmup: int = option(3, "untimed calls of each", least=0)
    repeats: int = option(20, "timed calls, at most: fewer where the budget is short", least=3)
    budget_s: float = option(1.0, "seconds per row", above=0, flag="--budget")
    contention_mb: float = option(256.0, "MiB of the all-reduces beside computation, 0 for none", least=0)
    matrix: int = option(0, "side of the matmul beside them, 0 for 8192 (bf16), on a CPU 384 (fp32)", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) < 2:
            raise ValueError(f"sizes={self.sizes}: give two or more positive sizes")

    @property
    def contention_bytes(self) -> int:
        return int(self.contention_mb * MIB)

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
    _require_memory(config, context)
    for ranks in groups:
        with first_ranks(context, ranks) as group:
            if group is not None:
                _measure_group(config, group, run)
        rest(context, f"sweep-{ranks}", ranks)
    run.records[:] = with_fits(run.records)  # rank 0 is in every group: its rows are all
    run.save()


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


def _measure_group(config: SweepConfig, context: RankContext, run: Run) -> None:
    """A row per collective and size on one group, and per computation beside an all-reduce."""
    shared = {"world_size": context.world_size, "backend": context.backend}
    for operation in config.operations:
        run.progress(f"{context.world_size} ranks: {operation}")
        for size in config.sizes:
            own = shared | {"operation": operation, "num_bytes": size}
            if not run.done(operation, **own):
                run.add(operation, _row(config, context, operation, size), **own)
    if config.contention_bytes:
        run.progress(f"{context.world_size} ranks: contention")
        for name, compute in _computations(config, context.device).items():
            found = disturb(context, compute, config.contention_bytes)
            rates = {"compute_rate": found.compute_rate, "communication_rate": found.communication_rate}
            own = shared | {"operation": "all_reduce", "num_bytes": config.contention_bytes}
            run.add(CONTENTION + name, asdict(found) | rates, **own)


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
    spec = lookup(torch.cuda.get_device_name(context.device)) if context.device.type == "cuda" else None
    link = spec and spec.nvlink_bandwidth
    metrics["link_ms"] = None if link is None else 1e3 * timing.num_bytes * share / link
    return metrics


def _computations(config: SweepConfig, device: torch.device) -> dict[str, Callable[[], object]]:
    """What runs beside the all-reduce: one that is bound by arithmetic, one by memory."""
    on_gpu = device.type == "cuda"
    side = config.matrix or (8192 if on_gpu else 384)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b, out = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    source = torch.randn(side * side, device=device)
    target = torch.empty_like(source)
    return {"matmul": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
