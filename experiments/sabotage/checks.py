"""The checks that every run is put to, with a mistake or without: one process, the closed form, float64 attention."""

import math
from typing import Any

import torch

from distlab.bench.reference import Task, parameter_difference
from distlab.bench.subject import Variant
from distlab.comm import RankContext, collectives
from distlab.measure.collectives import CollectiveRecorder
from distlab.model.ops import naive_attention
from distlab.parallel import Strategy
from distlab.theory.volume import step_volume
from distlab.train.step import TrainStep

from .injected import healthy_attention
from .mistakes import ATTENTION, EQUALITY, ERROR, MISTAKES, VOLUME, Attention, Mistake

BUCKET_MB = 0.02
# At two ranks the strategies equal one process bit for bit; attention differs from float64 by rounding, about 1e-6.
PARAMETER_TOLERANCE, ATTENTION_TOLERANCE = 0.0, 1e-4


def attention_difference(attention: Attention) -> float:
    """Largest |Δ| of output and gradients against naive attention in float64; inf for NaN.

    The scores are large (up to a few hundred), as a softmax must survive them.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(2, 2, 32, 16, generator=generator) for _ in range(4))
    q = 30 * q
    results = []
    for fn, dtype in ((attention, torch.float32), (naive_attention, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = fn(*leaves)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, upstream.to(dtype))])
    # Gradients of k carry q's factor 30; relative to their size they are all of order one.
    worst = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(*results, strict=True)]
    return math.inf if any(map(math.isnan, worst)) else max(worst)


def volume_difference(context: RankContext, mistake: Mistake, broken: bool) -> tuple[int, int]:
    """Collectives and bytes of one step beyond the closed form of what the strategy must send."""
    strategy, task = mistake.strategy(broken), mistake.trained(broken)
    train = _train_step(context, strategy, task, (torch.optim.SGD, 0.1))
    train(task.batches(context.rank, 0, context.device))
    with CollectiveRecorder() as recorder:
        train(task.batches(context.rank, 1, context.device))
    names, parameters = zip(*task.build(0, context.device).named_parameters(), strict=True)
    expected = step_volume(
        mistake.healthy, [p.numel() for p in parameters], [p.element_size() for p in parameters],
        bucket_size_mb=BUCKET_MB, world_size=context.world_size, shapes=[p.shape for p in parameters],
        units=[_unit(name) if p.ndim > 1 else None for name, p in zip(names, parameters, strict=True)],
    )  # fmt: skip
    train.model.close()
    return recorder.count - expected.collectives, recorder.total_bytes - expected.bytes


def _unit(name: str) -> str:
    """What FSDP gathers a matrix with: its block, or itself outside of blocks."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "blocks" else parts)


def _train_step(context: RankContext, strategy: Strategy, task: Task, learner: tuple) -> TrainStep:
    cls, rate = learner
    module = task.build(context.rank, context.device)
    return TrainStep(
        *strategy.build(module, context.group, cls, {"lr": rate}, bucket_size_mb=BUCKET_MB), task.loss_fn
    )


def loss_curve(context: RankContext, mistake: Mistake, broken: bool, steps: int) -> tuple[list[float], float]:
    """The mean loss over ranks of every step, and how far the ranks' parameters lie apart at the end."""
    task = mistake.trained(broken)
    train = _train_step(context, mistake.strategy(broken), task, mistake.learner)
    losses = torch.stack([train(task.batches(context.rank, step, context.device)) for step in range(steps)])
    means = collectives.sum_tensor(losses, context.group) / context.world_size
    parameters = train.model.full_parameters().values()
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    mean = collectives.sum_tensor(flat, context.group) / context.world_size
    train.model.close()
    return means.tolist(), (flat - mean).abs().max().item()


def examine(context: RankContext, name: str, broken: bool, check_steps: int, steps: int) -> dict[str, Any]:
    """All checks and the curve of one run, with the mistake or without; call it on every rank."""
    mistake = MISTAKES[name]
    variant = Variant(name, mistake.strategy(broken), BUCKET_MB)
    difference = parameter_difference(
        context, variant, steps=check_steps, task=mistake.task, candidate=mistake.trained(broken)
    )
    calls, size = volume_difference(context, mistake, broken)
    attention = mistake.attention if broken and mistake.attention else healthy_attention
    losses, apart = loss_curve(context, mistake, broken, steps)
    return {
        "max_abs_param_diff": difference,
        "collectives_beyond_prediction": calls,
        "comm_bytes_beyond_prediction": size,
        "attention_error": attention_difference(attention),
        "ranks_apart": apart,
        "loss": losses,
    }


def examine_both(context: RankContext, name: str, check_steps: int, steps: int) -> list[dict[str, Any]]:
    """`examine` without the mistake, then with it."""
    return [examine(context, name, broken, check_steps, steps) for broken in (False, True)]


def caught_by(metrics: dict[str, Any]) -> list[str]:
    """The checks that say no."""
    if "error" in metrics:
        return [ERROR]
    failed = {
        EQUALITY: metrics["max_abs_param_diff"] > PARAMETER_TOLERANCE,
        VOLUME: metrics["collectives_beyond_prediction"] or metrics["comm_bytes_beyond_prediction"],
        ATTENTION: metrics["attention_error"] > ATTENTION_TOLERANCE,
    }
    return [check for check, fails in failed.items() if fails]
