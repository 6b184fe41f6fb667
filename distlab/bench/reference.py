"""Compare results with a reference: a strategy with one process, a model with the simplest one.

A strategy must leave the same parameters as training in one process: in fp32, with plain SGD (AdamW
would turn a rounding error into a step of ±lr). The ranks' micro-batches run one after the other,
and their gradients are summed in rank order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.bench.task import Task, shared_batches, synthetic_task
from distlab.bench.variant import Variant
from distlab.comm import RankContext, collectives
from distlab.model import preset
from distlab.parallel.shard import plain_name
from distlab.train.build import build_training
from distlab.train.step import TrainStep, split


def small(**changes: Any) -> Task:
    """Return the tiny preset, so changed, on two sequences of 32 synthetic tokens."""
    return synthetic_task(replace(preset("tiny"), context_length=32, **changes), 2)


def parameter_difference(
    context: RankContext,
    variant: Variant,
    *,
    steps: int,
    task: Task | None = None,
    candidate: Task | None = None,
    max_grad_norm: float | None = None,
) -> float:
    """Return the largest |Δparameter| over ranks and parameters after k steps, against one process.

    Both use SGD in place of AdamW, otherwise the variant's optimizer, at the task's learning rate.
    Ranks start from different weights, so that a missing broadcast shows. Stages of a pipeline are
    an exception, because they are not broadcast.

    Args:
        task: task that one process trains. Default: `small()`.
        candidate: task that the ranks train, if it is compared with another `task` (another
            attention, other data).
        max_grad_norm: norm to which both clip gradients.

    Returns:
        The difference, the same on every rank; inf where a parameter is not a number.
    """
    task = task or small()
    candidate = candidate or task
    ranks_of_stage = context.world_size // variant.layout.pipeline
    # Another seed on each rank of a stage. Corresponding ranks of the stages share a seed, because
    # a stage gets no broadcast from another one.
    model = candidate.build(context.rank % ranks_of_stage, context.device)
    reference = task.build(0, context.device)
    optimizer_cls, options = torch.optim.SGD, {"lr": task.lr}
    if variant.optimizer_cls is not torch.optim.AdamW:
        optimizer_cls, options = variant.optimizer_cls, options | variant.optimizer_options
    _, strategy_model, optimizer = build_training(
        model,
        variant.strategy,
        context.group,
        optimizer_cls,
        options,
        bucket_size_mb=variant.bucket_size_mb,
        shard_size=variant.shard_size,
        layout=variant.layout,
    )
    train = TrainStep(strategy_model, optimizer, candidate.loss_fn, max_grad_norm=max_grad_norm)
    axes = variant.layout.axes(context.group)
    groups = (
        optimizer_cls.split(reference)
        if hasattr(optimizer_cls, "split")
        else reference.parameters()
    )
    reference_optimizer = optimizer_cls(groups, **options)
    for number in range(steps):
        batches = shared_batches(candidate, axes, context, number)
        # A pipeline of n stages gets n micro-batches.
        train([part for batch in batches for part in split(batch, axes.layout.pipeline)])
        # The reference computes the gradients of all ranks, one after the other.
        _mean_gradients(task, reference, number, context)
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
        reference_optimizer.step()
    # A model may have compiled blocks of its own.
    expected = {plain_name(name): parameter for name, parameter in reference.named_parameters()}
    mine = strategy_model.full_state_dict()
    # torch's maximum keeps a NaN, which Python's would lose in a comparison.
    difference = (
        torch.stack([(mine[name] - expected[name]).abs().max() for name in expected]).max().item()
    )
    # Before the next row wraps a model of its own: hooks belong to the process.
    strategy_model.close(restore=False)
    # Every rank compares its own copy. The largest one counts, so a rank that left the others
    # shows.
    differences = collectives.gather_objects(difference, context.group)
    return max(math.inf if math.isnan(value) else value for value in differences)


def parameter_differences(
    context: RankContext,
    rows: Sequence[Variant],
    steps: int,
    progress: Callable[[str], None],
    task: Task | None = None,
) -> dict[str, float | None]:
    """Return `parameter_difference` of each row.

    It is None for a row that does not fit in memory. For zero steps no row is compared.
    """
    found = {}
    for row in rows if steps else ():
        progress(f"checking {row.name} against one process")
        compare = partial(parameter_difference, context, row, steps=steps, task=task)
        found[row.name] = collectives.if_it_fits(compare, context.device, context.group)
    return found


def rows_that_ran_eager(records: Sequence[Any]) -> list[str]:
    """Return a line for each record that is called compiled although its steps ran eager code."""
    lines = []
    for record in records:
        if record.metrics.get("ran_eager"):
            calls, parts = record.metrics["compiled_calls"], record.metrics["compiled_parts"]
            lines.append(
                f"{record.variant}: measured eager code, although --compile "
                f"{record.config.get('compile')} was given: {calls} of {parts} compiled parts ran "
                "in a step"
            )
    return lines


def other_parameters(records: Sequence[Any], limit: float = 1e-5) -> list[str]:
    """Name the records whose `max_abs_param_diff` is not below a limit, a line each.

    Rounding of SGD in fp32 causes about 1e-8.
    """
    return [
        f"{record.variant}: parameters differ from one process by {apart:.1e}"
        for record in records
        if (apart := record.metrics.get("max_abs_param_diff")) is not None and not apart < limit
    ]


def _mean_gradients(task: Task, model: nn.Module, step: int, context: RankContext) -> None:
    """Set `.grad` to the mean over ranks.

    Each rank's micro-batches are added first, then the ranks, in their order.
    """
    totals = {}  # parameter → its gradient, summed over ranks
    for rank in range(context.world_size):
        # Each rank's sum is rounded by itself, as on real ranks, and then added to the total.
        model.zero_grad()
        batches = task.batches(rank, step, context.device)
        for batch in batches:
            (task.loss_fn(model, batch) / len(batches)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                totals[parameter] = totals.get(parameter, 0) + parameter.grad
    for parameter, total in totals.items():
        parameter.grad = total / context.world_size


def relative_errors(
    loss: float,
    expected_loss: float,
    gradients: Sequence[Tensor],
    expected: Sequence[Tensor],
    scale: float = 1.0,
) -> dict[str, float]:
    """Return `loss_rel_error` and `grad_rel_error`, ‖g / scale − g_ref‖ / ‖g_ref‖."""
    difference = norm = 0.0
    for mine, theirs in zip(gradients, expected, strict=True):
        # Over all gradients together: a small tensor with large relative noise counts little. In
        # fp64, so that the sum does not round.
        difference += float(torch.linalg.vector_norm(mine.double() / scale - theirs.double())) ** 2
        norm += float(torch.linalg.vector_norm(theirs.double())) ** 2
    return {
        "loss_rel_error": abs(loss / expected_loss - 1),
        "grad_rel_error": (difference / norm) ** 0.5 if norm else math.nan,
    }
