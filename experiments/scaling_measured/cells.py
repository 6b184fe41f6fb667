"""One cell: all strategies of one regime on one group of ranks, or the collectives on one group."""

from collections.abc import Callable
from typing import Any

import torch

from distlab.bench.subject import Variant, Workbench
from distlab.comm import RankContext, collectives
from distlab.measure.bandwidth import time_collective
from distlab.measure.statistics import percentiles
from distlab.parallel import get_strategy
from distlab.report.noise import noise_of
from distlab.theory.collective_time import fit_collective, relative_errors
from distlab.train.requirements import PlannedStep, require

from .config import DTYPES, MeasureConfig, Regime, key

GRADIENTS_IN_PIECES = ("zero1", "fsdp", "fsdp2")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")

Rows = list[tuple[str, dict[str, Any], dict[str, Any]]]  # variant, its part of the config, metrics


def sweep(config: MeasureConfig, context: RankContext) -> Rows:
    """Bus bandwidths and the fit of each collective on one group, as `simulate.calibrate.measured_links` reads them."""
    rows = []
    for operation in COLLECTIVES:
        timed = [
            time_collective(context, operation, size, repeats=8, budget_s=0.3) for size in config.sweep_bytes
        ]
        sizes = [timing.num_bytes for timing in timed]
        seconds = [percentiles(timing.samples_ms)["p50"] / 1e3 for timing in timed]
        fit = fit_collective(sizes, seconds)
        errors = [100 * error for error in relative_errors(fit, sizes, seconds)]
        own = {"regime": "collectives", "kind": "collectives", "operation": operation, "sizes": sizes}
        own |= {"world_size": context.world_size, "backend": context.backend}
        metrics = {
            "pieces": fit.to_list(),
            "seconds": seconds,
            "fit_error_max_pct": max(map(abs, errors)),
            "algbw_gb_per_s": max(size / time for size, time in zip(sizes, seconds, strict=True)) / 1e9,
            "max_abs_error": max(timing.max_abs_error for timing in timed),
        }
        rows.append((f"fit {operation}", own, metrics))
    return rows


def measure(
    config: MeasureConfig, regime: Regime, context: RankContext, progress: Callable[[str], None]
) -> Rows:
    """All strategies of one regime on one group."""
    model, batch = config.model(regime), regime.per_rank(context.world_size)
    names = ("local", *(config.strategies if context.world_size > 1 else ()))
    planned = [PlannedStep(model, batch, name, config.dtype, config.bucket_size_mb) for name in names]
    require(planned, context.device, context, some=context.device.type == "cuda")
    bench = Workbench(context, model, batch_size=batch, compute_dtype=DTYPES[config.dtype], seed=config.seed)
    rows = [Variant(name, get_strategy(name), config.bucket_size_mb) for name in names]
    identical: dict[str, dict[str, bool | None]] = {}

    def compare(variant: Variant, attached: Any) -> None:
        if variant.strategy.synchronizes and variant.name not in identical:
            identical[variant.name] = compare_ranks(context, variant, attached)

    timings = bench.time_rounds(
        rows,
        rounds=config.rounds,
        warmup=config.warmup,
        steps=config.steps,
        inspect=compare,
        progress=progress,
    )
    found = []
    for row in rows:
        timing, metrics = timings[row.name], {"step_p50_ms": "OOM"}
        if not timing.out_of_memory:
            metrics = {f"step_{p}_ms": value for p, value in percentiles(timing.phases["step"]).items()}
            metrics["noise_pct"] = noise_of(metrics)
            tokens = context.world_size * batch * model.context_length
            metrics["tokens_per_s"] = 1e3 * tokens / metrics["step_p50_ms"]
            metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
        own = key(regime, context.world_size) | {"batch": batch, "backend": context.backend}
        own |= {"context": model.context_length, "num_parameters": model.num_parameters}
        found.append((row.name, own, metrics | identical.get(row.name, {})))
    return found


def compare_ranks(context: RankContext, variant: Variant, attached: Any) -> dict[str, bool | None]:
    """Whether parameters and gradients are bit for bit the same on all ranks. Every rank calls it.

    Gradients are None for strategies that leave each rank only its piece of them.
    """
    parameters = attached.model.full_parameters().values()
    same = _same_bits(context, parameters)
    gradients = None
    if variant.strategy.name not in GRADIENTS_IN_PIECES:
        gradients = _same_bits(context, [p.grad for p in parameters if p.grad is not None])
    return {"parameters_identical": same, "gradients_identical": gradients}


@torch.no_grad()
def _same_bits(context: RankContext, tensors: Any) -> bool:
    differs = torch.zeros((), dtype=torch.bool, device=context.device)
    for tensor in tensors:
        own = tensor.detach().contiguous()
        first = own.clone()
        collectives.broadcast(first, context.group).wait()
        differs |= (first.view(torch.uint8) != own.view(torch.uint8)).any()
    return collectives.all_ranks_agree(not differs.item(), context.device, context.group)
