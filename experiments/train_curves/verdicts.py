"""How far the curves lie apart, how far rounding alone puts them, and what is not as it should be."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distlab.report import Record

from .config import COST, KILLED, REFERENCE, ROUNDING

MOST_COST_PCT = 5  # of a step's time that checkpoints may take


def cost_is_noise(record: Record) -> bool:
    """Whether the blocks without checkpoints differ among themselves by more than checkpoints cost."""
    cost, noise = record.metrics.get("checkpoint_cost_pct"), record.metrics.get("noise_floor_pct")
    return cost is not None and noise is not None and abs(cost) <= noise


def verdicts(records: Sequence[Record]) -> list[str]:
    """What is not as it should be; empty if all is well."""
    by_name = {record.variant: record.metrics for record in records}
    problems = []
    limit, reference = tolerance(records), by_name.get(REFERENCE, {})
    for name, metrics in by_name.items():
        apart = None if name == REFERENCE else distance(metrics, reference)
        if limit and apart is not None and not apart <= limit:
            problems.append(f"{name}: {apart:.4f} nats from {REFERENCE}'s curve, noise is {limit:.4f}")
        if "loss" in metrics and not metrics["loss"][-1] < metrics["loss"][0] and metrics["first_step"] == 0:
            problems.append(
                f"{name}: the loss did not fall ({metrics['loss'][0]:.3f} → {metrics['loss'][-1]:.3f})"
            )
    killed = by_name.get(KILLED)
    if killed and killed["first_step"] == 0:
        problems.append(f"{KILLED}: was not resumed from a checkpoint")
    cost = by_name.get(COST)
    if cost and cost["checkpoint_cost_pct"] > max(MOST_COST_PCT, cost.get("noise_floor_pct", 0.0)):
        problems.append(
            f"checkpoints cost {cost['checkpoint_cost_pct']:.1f} % of step time, more than {MOST_COST_PCT:g} %"
        )
    return problems


def distance(mine: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """Mean |Δloss| over the steps that both ran: a few steps' mean would say more of their luck."""
    if not mine.get("loss") or not reference.get("loss"):
        return None
    late = reference["loss"][mine["first_step"] :]
    return statistics.fmean(abs(a - b) for a, b in zip(mine["loss"], late, strict=True))


def tolerance(records: Sequence[Record]) -> float | None:
    """How far curves may lie apart: twice what rounding alone does (the same mathematics in two micro-batches), and
    at least 0.01 nats.
    """
    by_name = {record.variant: record.metrics for record in records}
    if REFERENCE not in by_name or ROUNDING not in by_name:
        return None
    return max(0.01, 2 * distance(by_name[ROUNDING], by_name[REFERENCE]))
