"""How far the curves lie apart, how far rounding alone puts them, and what is not as it should be."""

import dataclasses
import statistics
from collections.abc import Sequence

from distlab.report import Record

from .config import COST, KILLED, REFERENCE, ROUNDING

MOST_COST_PCT = 5  # of a step's time that checkpoints may take


def cost_is_noise(record: Record) -> bool:
    """Whether the blocks without checkpoints differ among themselves by more than checkpoints cost."""
    cost, noise = record.metrics.get("checkpoint_cost_pct"), record.metrics.get("noise_floor_pct")
    return cost is not None and noise is not None and abs(cost) <= noise


def verdicts(records: Sequence[Record]) -> list[str]:
    """What is not as it should be; empty if all is well."""
    records = with_distances(records)
    by_name = {record.variant: record.metrics for record in records}
    problems = []
    limit = tolerance(records)
    for name, metrics in by_name.items():
        apart = metrics.get("mean_abs_loss_diff")
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


def distance(record: Record, reference: Record) -> float | None:
    """Mean |Δloss| over the steps that both ran: a few steps' mean would say more of their luck."""
    mine, theirs = record.metrics.get("loss"), reference.metrics.get("loss")
    if not mine or not theirs or record is reference:
        return None
    late = theirs[record.metrics["first_step"] :]
    return statistics.fmean(abs(a - b) for a, b in zip(mine, late, strict=True))


def with_distances(records: Sequence[Record]) -> list[Record]:
    """The records with `mean_abs_loss_diff`, the distance to the reference's curve."""
    reference = next((record for record in records if record.variant == REFERENCE), None)
    return [
        dataclasses.replace(
            record, metrics=record.metrics | {"mean_abs_loss_diff": distance(record, reference)}
        )
        if reference and "loss" in record.metrics
        else record
        for record in records
    ]


def tolerance(records: Sequence[Record]) -> float | None:
    """How far curves may lie apart: twice what rounding alone does (the same mathematics in two micro-batches), and
    at least 0.01 nats."""
    by_name = {record.variant: record for record in records}
    if REFERENCE not in by_name or ROUNDING not in by_name:
        return None
    return max(0.01, 2 * distance(by_name[ROUNDING], by_name[REFERENCE]))
