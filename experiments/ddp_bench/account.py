"""What a row tells beside its times: what was sent, when communication ran, and where its exposed time goes."""

from pathlib import Path

import torch

from distlab.bench.subject import Variant, Workbench
from distlab.measure.trace.account import (
    StepAccount,
    account,
    analyse,
    closes,
    explain,
    exposed_all_gathers,
    idle_gaps,
)
from distlab.measure.trace.capture import load_trace
from distlab.model.transformer import TransformerLM
from distlab.report.record import Record
from distlab.theory.volume import step_volume


def sent(bench: Workbench, variant: Variant) -> dict[str, int | bool | None]:
    """Collectives and bytes of one step, counted, beside the closed form."""
    recorder = bench.record_collectives(variant)
    named = list(TransformerLM(bench.config, device="meta").named_parameters())
    sizes = [(parameter.numel(), parameter.element_size()) for _, parameter in named]
    expected = step_volume(
        variant.strategy.name,
        [numel for numel, _ in sizes],
        [itemsize for _, itemsize in sizes],
        bucket_size_mb=variant.bucket_size_mb,
        world_size=bench.context.world_size,
        units=[_unit(name) if parameter.ndim > 1 else None for name, parameter in named],
        shapes=[parameter.shape for _, parameter in named],
        compute_itemsize=(bench.compute_dtype or torch.float32).itemsize,
    )
    metrics: dict[str, int | bool | None] = {
        "collectives_per_step": recorder.count,
        "comm_bytes_per_step": recorder.total_bytes,
        "predicted_collectives_per_step": expected.collectives if expected else None,
        "predicted_comm_bytes_per_step": expected.bytes if expected else None,
    }
    metrics["volume_as_predicted"] = (
        (recorder.count, recorder.total_bytes) == (expected.collectives, expected.bytes) if expected else None
    )
    return metrics


def _unit(parameter_name: str) -> str:
    """What a matrix of the Transformer is gathered with: its block, or itself outside of blocks."""
    parts = parameter_name.split(".")
    return ".".join(parts[:2] if parts[0] == "blocks" else parts)


def overlap(
    bench: Workbench,
    variant: Variant,
    folder: Path,
    steps: int,
    accounts: dict[str, StepAccount],
) -> dict[str, float | None]:
    """Communication time and the share of it that compute covers, from this rank's trace; its account is kept."""
    if steps == 0:
        return {"comm_ms": None, "comm_share_pct": None, "overlap_pct": None}
    path = trace_path(folder, variant.name, bench.context.rank)
    bench.profile(variant, path, steps)
    events = load_trace(path)
    seen, gathers, gaps = analyse(events), exposed_all_gathers(events), idle_gaps(events)
    accounts[variant.name] = account(events)
    return {
        "exposed_all_gather_forward_ms": gathers[0],
        "exposed_all_gather_backward_ms": gathers[1],
        "comm_ms": seen.comm_ms,
        "comm_share_pct": 100 * seen.comm_ms / seen.step_ms,
        "overlap_pct": seen.overlap_pct,
        "uncovered_comm_ms": seen.uncovered_comm_ms,
        "profiled_step_ms": seen.step_ms,
        "idle_ms": seen.idle_ms,
        "longest_idle_ms": gaps[0][1] - gaps[0][0] if gaps else 0.0,
    }


def explanation(record: Record, accounts: dict[str, StepAccount]) -> dict[str, float | bool | None]:
    """What the step takes longer than `local`'s, by cause, and what of the measured difference that leaves open."""
    mine, local = accounts.get(record.variant), accounts.get("local")
    exposed = record.metrics.get("exposed_comm_ms")
    if mine is None or local is None or exposed is None:
        return {}
    found = explain(mine, local)
    unexplained = exposed - found.explained_ms
    return {
        "exposed_uncovered_ms": found.uncovered_comm_ms,
        "exposed_slowdown_ms": found.slowdown_ms,
        "exposed_copies_ms": found.copies_ms,
        "exposed_optimizer_ms": found.optimizer_ms,
        "exposed_idle_ms": found.idle_ms,
        "exposed_unexplained_ms": unexplained,
        "exposed_closes": closes(unexplained, record.metrics["step_p50_ms"]),
    }


def trace_path(folder: Path, variant: str, rank: int) -> Path:
    """Where a rank writes the trace of a variant."""
    return folder / f"trace_{variant}_rank{rank}.json.gz"
