"""Cell after cell (one regime on one number of ranks) on sub-groups of the ranks; what has its rows is kept."""

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from distlab.bench.timing import Variant, variants, workbench
from distlab.comm import collectives
from distlab.comm.rank_process import on_main
from distlab.comm.subgroups import first_ranks, rest
from distlab.experiment import RankContext, Run
from distlab.measure.bandwidth import time_collective
from distlab.report import noise_of, read_json, write_json
from distlab.theory.collective_time import fit_collective

from .prediction import MeasureConfig, Regime, in_own_process, key, predictions

PREDICTIONS = "predictions.json"
SHARDED_GRADIENTS = ("zero1", "fsdp", "fsdp2")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def measure(config: MeasureConfig, context: RankContext, run: Run) -> None:
    """Predict, then measure what has no rows yet; call it on every rank."""
    begin = time.monotonic()
    groups = config.groups(context.world_size)
    on_main(context, partial(_predict, config, context, run))
    lasted: dict[str, float] = {}
    cells = [(None, ranks) for ranks in groups if ranks > 1] + list(config.cells(context.world_size))
    with ExitStack() as stack:
        members = {ranks: stack.enter_context(first_ranks(context, ranks)) for ranks in groups}
        for number, (regime, ranks) in enumerate(cells):
            name = "collectives" if regime is None else str(regime)
            # Rows of a cell are written one by one: with the last all are there. Rank 0 has those of every cell.
            last = f"fit {COLLECTIVES[-1]}" if regime is None else _names(config, ranks)[-1]
            done = run.done(last, regime=name, world_size=ranks) is not None
            enough = 60 * config.minutes - (time.monotonic() - begin) > lasted.get(name, 0.0)
            done, enough = collectives.gather_objects((done, enough), context.group)[0]
            if done or not enough:
                if not done:
                    run.progress(f"{name} on {ranks} ranks: no time left; go on with --name {run.path.name}")
                continue
            run.progress(f"{name} on {ranks} ranks")
            started = time.monotonic()
            group = members[ranks]
            if group is not None:
                sweep(config, group, run) if regime is None else time_cell(config, regime, group, run)
            rest(context, f"scaling-{number}", ranks)
            lasted[name] = time.monotonic() - started
            if context.is_main:
                _complete(run)


def _predict(config: MeasureConfig, context: RankContext, run: Run) -> None:
    """Write the predictions, unless the run that was cut off has."""
    if not (run.path / PREDICTIONS).exists():
        arguments = config, context.world_size, str(run.header.environment["device_name"])
        write_json(in_own_process(predictions, *arguments), run.path / PREDICTIONS)


def _complete(run: Run) -> None:
    """Add to the rows their efficiency, and what had been predicted."""
    expected = {
        (r.config["regime"], r.config["world_size"], r.variant): r.metrics
        for r in read_json(run.path / PREDICTIONS)
    }
    alone = {
        r.config["regime"]: r.metrics["step_p50_ms"]
        for r in run.records
        if r.variant == "local" and r.config["world_size"] == 1 and r.metrics["step_p50_ms"] != "OOM"
    }
    for record in run.records:
        regime, ranks = record.config["regime"], record.config["world_size"]
        step = record.metrics.get("step_p50_ms")
        record.metrics.update(expected.get((regime, ranks, record.variant), {}))
        if isinstance(step, float) and regime in alone:
            share = ranks if record.config["kind"] == "strong" else 1
            record.metrics["efficiency_pct"] = 100 * alone[regime] / step / share
        if isinstance(step, float) and "predicted_step_ms" in record.metrics:
            record.metrics["error_pct"] = 100 * (record.metrics["predicted_step_ms"] / step - 1)
    run.save()


def _names(config: MeasureConfig, ranks: int) -> tuple[str, ...]:
    """The strategies of a cell."""
    return ("local", *(name for name in config.strategies if name != "local" and ranks > 1))


def sweep(config: MeasureConfig, context: RankContext, run: Run) -> None:
    """Bus bandwidths and the fit of each collective on one group, as `simulate.calibrate.measured_links` reads them."""
    for operation in COLLECTIVES:
        timed = [
            time_collective(context, operation, size, repeats=8, budget_s=0.3) for size in config.sweep_bytes
        ]
        sizes, seconds = [timing.num_bytes for timing in timed], [timing.p50_s for timing in timed]
        own = {"regime": "collectives", "kind": "collectives", "operation": operation, "sizes": sizes}
        own |= {"world_size": context.world_size, "backend": context.backend}
        metrics = fit_collective(sizes, seconds).metrics(sizes, seconds) | {
            "seconds": seconds,
            "algbw_gb_per_s": max(size / time for size, time in zip(sizes, seconds, strict=True)) / 1e9,
            "max_abs_error": max(timing.max_abs_error for timing in timed),
        }
        run.add(f"fit {operation}", metrics, **own)


def time_cell(config: MeasureConfig, regime: Regime, context: RankContext, run: Run) -> None:
    """All strategies of one regime on one group."""
    model, batch = config.model(regime), regime.per_rank(context.world_size)
    rows = variants(_names(config, context.world_size), [config.bucket_size_mb])
    bench = workbench(context, model, rows, batch=batch, dtype=config.dtype, seed=config.seed, some=True)
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
        progress=run.progress,
    )
    for row in rows:
        metrics = timings[row.name].metrics() | identical.get(row.name, {})
        metrics["noise_pct"] = noise_of(metrics)
        if metrics["step_p50_ms"] != "OOM":
            tokens = context.world_size * batch * model.context_length
            metrics["tokens_per_s"] = 1e3 * tokens / metrics["step_p50_ms"]
        run.add(row.name, metrics, **key(regime, context.world_size), **bench.facts, batch=batch)


def compare_ranks(context: RankContext, variant: Variant, attached: Any) -> dict[str, bool | None]:
    """Whether parameters and gradients are bit for bit the same on all ranks. Every rank calls it.

    Gradients are None for strategies that leave each rank only its shard of them.
    """
    parameters = attached.model.full_parameters().values()
    same = _same_bits(context, parameters)
    gradients = None
    if variant.strategy.name not in SHARDED_GRADIENTS:
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
