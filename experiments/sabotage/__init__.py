"""What does a mistake look like, and which check catches it?

    distlab run sabotage            # two CPU ranks, about a minute
    distlab run sabotage --quick    # shorter curves

Classic mistakes, injected one at a time by a subclass or a patch into an otherwise healthy training
run. Each is put to the checks that this lab's commands make (equality with one process, closed form
of the bytes sent, attention against float64, pairs of query and key that the busiest rank sees).
The healthy run must pass them all. Or the strategy itself raises an error. The picture shows the
symptom: both loss curves.

The mistakes are listed in `mistakes`, and made in `faults`.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from distlab.bench.reference import parameter_difference
from distlab.bench.task import shared_batches
from distlab.bench.variant import Variant
from distlab.comm import collectives
from distlab.experiment import (
    Column,
    Experiment,
    Metrics,
    Options,
    RankContext,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure.collectives import CollectiveRecorder
from distlab.model.ops import Attention, naive_attention
from distlab.report import Panel, Series, lines, text_column
from distlab.testing import RanksFailed, run_ranks
from distlab.theory.volume import model_volume
from distlab.train.build import build_training
from distlab.train.data import SyntheticTokens
from distlab.train.step import TrainStep

from .faults import healthy_attention, replaced
from .mistakes import ATTENTION, EQUALITY, ERROR, MISTAKES, MODEL, PAIRS, VOLUME, Mistake

# The size gives several buckets of such a small model, so a last one exists.
BUCKET_MB = 0.02
# At two ranks the strategies equal one process bit for bit, and layouts do in fp64 but for
# clipping, by an fp32 norm. Attention differs from float64 by rounding, about 1e-6.
PARAMETER_TOLERANCE, ATTENTION_TOLERANCE = 1e-9, 1e-4
# Two ranks show every mistake, and sums of two numbers do not depend on their order.
RANKS = 2


@dataclass(frozen=True)
class SabotageConfig(Options):
    """Options of the experiment."""

    mistakes: tuple[str, ...] = option(tuple(MISTAKES), "mistakes to make", choices=tuple(MISTAKES))
    steps: int = option(150, "steps of each loss curve", minimum=2)
    check_steps: int = option(3, "steps of the comparison with one process", minimum=2)


def measure(config: SabotageConfig, context: RankContext, run: Run) -> None:
    """Add a row per mistake.

    Each starts ranks of its own, since a mistake may hang or crash those it runs on.
    """
    for number, name in enumerate(config.mistakes, 1):
        if run.done(name):
            continue
        run.progress(f"{number} of {len(config.mistakes)}: {name}")
        mistake = MISTAKES[name]
        steps = config.check_steps, config.steps
        # A mistake may hang its ranks, which are then ended after two minutes.
        try:
            # One start of the ranks for both, as long as the mistake neither hangs nor raises.
            healthy, broken = run_ranks(examine_both, RANKS, name, *steps, deadline_s=120.0)[0]
        except RanksFailed as failure:
            # The ranks of the failed call are gone, and the healthy run with them.
            healthy = run_ranks(examine, RANKS, name, False, *steps)[0]
            broken = {"error": failure.cause}
        # A run that failed has no curve, and its loss is None.
        caught, loss = caught_by(broken), broken.get("loss")
        metrics = broken | {
            "caught": mistake.check in caught,
            "caught_by": ", ".join(caught) or "nothing",
            "healthy_passes": not caught_by(healthy),
            "healthy_loss": healthy["loss"],
            "healthy_final_loss": _end(healthy["loss"]),
            # Two curves that start apart had other weights or another loss before any step.
            "first_loss_diff": loss and loss[0] - healthy["loss"][0],
            "final_loss": loss and _end(loss),
        }
        run.add(
            name,
            metrics,
            world_size=RANKS,
            model=asdict(MODEL),
            strategy=mistake.healthy,
            layout=str(mistake.layout),
            check=mistake.check,
            symptom=mistake.symptom,
        )


def attention_difference(attention: Attention) -> float:
    """Return the largest |Δ| of output and gradients against naive attention in float64.

    It is inf for NaN.

    The scores are large (up to a few hundred), as a softmax must survive them.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(2, 2, 32, 16, generator=generator) for _ in range(4))
    # Without large scores a softmax that does not subtract the maximum would be right.
    q = 30 * q
    results = []
    for fn, dtype in ((attention, torch.float32), (naive_attention, torch.float64)):
        # The same numbers for both: float64 holds fp32 exactly.
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = fn(*leaves)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, upstream.to(dtype))])
    # Gradients of k carry q's factor 30; relative to their size they are all of order one.
    worst = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(*results, strict=True)]
    # `max` would ignore a NaN that is not the first, since no comparison with it is true.
    return math.inf if any(map(math.isnan, worst)) else max(worst)


def volume_difference(context: RankContext, mistake: Mistake) -> tuple[int, int]:
    """Return the collectives and bytes of one step beyond the closed form of the strategy's."""
    task = mistake.trained
    # SGD of any rate sends the same, so the mistake's own optimizer is not needed.
    train = _train_step(context, mistake, torch.optim.SGD, 0.1)
    # The first step may send what later ones do not, so the second is counted.
    train(task.batches(context.rank, 0, context.device))
    with CollectiveRecorder() as recorder:
        train(task.batches(context.rank, 1, context.device))
    expected = model_volume(
        mistake.strategy,
        task.build(0, context.device).named_parameters(),
        bucket_size_mb=BUCKET_MB,
        world_size=context.world_size,
    )
    # Hooks of this wrapper must be gone before the next one is built.
    train.model.close()
    return recorder.count - expected.collectives, recorder.total_bytes - expected.bytes


def pairs_of_busiest(context: RankContext, mistake: Mistake) -> tuple[int, int]:
    """Return the pairs of query and key in a sequence on the busiest rank, and the closed form.

    The closed form is T(T + 1)/2 divided by the ranks.
    """
    length = MODEL.context_length
    # The positions that the layout gives to this rank.
    positions = mistake.layout.axes(context.group).share(torch.arange(length)[None])
    # a query sees keys up to itself
    seen = collectives.gather_objects(int((positions + 1).sum()), context.group)
    return max(seen), length * (length + 1) // (2 * mistake.layout.context)


def _train_step(
    context: RankContext, mistake: Mistake, optimizer_cls: type[torch.optim.Optimizer], rate: float
) -> TrainStep:
    """Return the step of the model that the mistake trains."""
    task = mistake.trained
    module = task.build(context.rank, context.device)
    built = build_training(
        module,
        mistake.strategy,
        context.group,
        optimizer_cls,
        {"lr": rate},
        bucket_size_mb=BUCKET_MB,
        layout=mistake.layout,
    )
    return TrainStep(built.model, built.optimizer, task.loss_fn)


def loss_curve(context: RankContext, mistake: Mistake, steps: int) -> list[float]:
    """Return the mean loss over ranks of every step."""
    # The mistake's own learner, under which its symptom shows. The check uses SGD
    # (`parameter_difference`).
    train = _train_step(context, mistake, *mistake.learner)
    train.max_grad_norm = mistake.max_grad_norm
    task, axes = mistake.trained, mistake.layout.axes(context.group)
    # Ranks that share a model also share a batch.
    batches = (shared_batches(task, axes, context, step) for step in range(steps))
    losses = torch.stack([train(batch) for batch in batches])
    means = collectives.sum_tensor(losses, context.group) / context.world_size
    train.model.close()
    return means.tolist()


def examine(context: RankContext, name: str, broken: bool, check_steps: int, steps: int) -> Metrics:
    """Return all checks and the curve of one run, with the mistake or without.

    Call it on every rank.
    """
    mistake = MISTAKES[name] if broken else MISTAKES[name].mended()
    variant = Variant(name, mistake.strategy, BUCKET_MB, layout=mistake.layout)
    # Also while the model is built, since some of the replaced functions run there.
    with replaced(*mistake.replaced) if mistake.replaced else nullcontext():
        difference = parameter_difference(
            context,
            variant,
            steps=check_steps,
            task=mistake.task,
            candidate=mistake.trained,
            max_grad_norm=mistake.max_grad_norm,
        )
        # For other layouts, `ddp_bench --layouts` compares the volume with its closed form.
        calls, size = None, None
        if mistake.layout.ranks == 1:
            calls, size = volume_difference(context, mistake)
        losses = loss_curve(context, mistake, steps)
        pairs, even_pairs = pairs_of_busiest(context, mistake)
    return {
        "max_abs_param_diff": difference,
        "collectives_beyond_prediction": calls,
        "comm_bytes_beyond_prediction": size,
        # A mistake outside of attention is checked with the healthy one, which must pass.
        "attention_error": attention_difference(mistake.attention or healthy_attention),
        "pairs_of_busiest": pairs,
        "predicted_pairs_of_busiest": even_pairs,
        "loss": losses,
    }


def examine_both(context: RankContext, name: str, check_steps: int, steps: int) -> list[Metrics]:
    """Call `examine` without the mistake, then with it."""
    return [examine(context, name, broken, check_steps, steps) for broken in (False, True)]


def caught_by(metrics: Metrics) -> list[str]:
    """Return the checks that fail."""
    if "error" in metrics:
        # A run that raised an error has no other results.
        return [ERROR]
    failed = {
        EQUALITY: metrics["max_abs_param_diff"] > PARAMETER_TOLERANCE,
        # None, and so no failure, for layouts that share a model: they have no volume here.
        VOLUME: metrics["collectives_beyond_prediction"] or metrics["comm_bytes_beyond_prediction"],
        ATTENTION: metrics["attention_error"] > ATTENTION_TOLERANCE,
        PAIRS: metrics["pairs_of_busiest"] != metrics["predicted_pairs_of_busiest"],
    }
    return [check for check, fails in failed.items() if fails]


def _end(losses: Sequence[float]) -> float:
    """Return the mean of the last tenth, which is less noisy than the last loss."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def wrong_rows(records: Records) -> list[str]:
    """Name mistakes that pass, and healthy runs that do not."""
    passed = [record for record in records if not record.metrics["caught"]]
    refused = [record for record in records if not record.metrics["healthy_passes"]]
    found = [f"{record.variant}: not caught by {record.config['check']}" for record in passed]
    found += [f"{record.variant}: its healthy counterpart is refused" for record in refused]
    return found


def result(records: Records) -> str:
    """Return how many mistakes were caught, for the list of runs."""
    return f"{caught_in(records)} of {len(records)} caught"


def caught_in(records: Records) -> int:
    """Return the number of mistakes that were caught."""
    return sum(record.metrics.get("caught") is True for record in records)


headline = headline_from(
    "{caught} of {mistakes} mistakes caught; {steps} steps on {world_size} gloo ranks of "
    "{device_name}, torch {torch}",
    caught=caught_in,
    mistakes=len,
)


def draw(records: Records, path: Path) -> None:
    """Draw a panel per mistake: its loss and the healthy one."""
    # Each token has `branching` equally likely successors, so no model can have a smaller loss than
    # their entropy. A loss below it has seen the answer.
    floor = math.log(SyntheticTokens(MODEL.vocab_size, 1, 1, seed=0, rank=0).branching)
    panels = []
    for record in records:
        healthy, wrong = record.metrics["healthy_loss"], record.metrics.get("loss", [])
        series = [
            Series("healthy", range(1, len(healthy) + 1), healthy, line="-", width=2.6),
            Series("with the mistake", range(1, len(wrong) + 1), wrong, line="-", width=1),
            Series("floor of the data", [1, len(healthy)], [floor, floor], line=":", width=0.8),
        ]
        heading = f"{record.variant}\n→ {record.metrics['caught_by']}"
        panels.append(
            Panel(
                heading,
                "step",
                "loss, nats per token",
                series,
                log_x=None,
                from_zero=False,
                # A loss that explodes would press the healthy curve against the axis.
                y_max=1.5 * max(healthy),
            )
        )
    lines(path, panels, title=f"Mistakes → checks that catch them. {headline(records)}")


VIEW = View(
    columns=[
        Column("variant", "mistake"),
        text_column("config.strategy", "in"),
        text_column("config.layout", "layout"),
        text_column("metrics.caught_by", "caught by"),
        Column("metrics.max_abs_param_diff", "parameter error", ".1e"),
        Column("metrics.collectives_beyond_prediction", "calls too many", "+d"),
        Column("metrics.attention_error", "attention error", ".1e"),
        Column("metrics.pairs_of_busiest", "pairs of busiest", ",d"),
        Column("metrics.predicted_pairs_of_busiest", "predicted", ",d"),
        Column("metrics.first_loss_diff", "Δ first loss", "+.0e"),
        Column("metrics.healthy_final_loss", "healthy loss", ".3f"),
        Column("metrics.final_loss", "loss", ".3f"),
        text_column("config.symptom", "symptom"),
    ],
    headline=headline,
    result=result,
    terminal=("variant", "caught_by", "symptom"),
    pictures={"loss.png": draw},
    reading="Every mistake is injected alone, into a run that is otherwise healthy and whose "
    "healthy counterpart must pass all checks. A loss curve that looks right proves nothing: with "
    "several mistakes training continues, but worse, or only fails at another scale.",
    noise="At two ranks the strategies equal one process bit for bit, so any difference of a "
    f"parameter is a mistake; layouts, in fp64, may differ by {PARAMETER_TOLERANCE:g}, attention "
    f"from float64 by {ATTENTION_TOLERANCE:g}.",
)
EXPERIMENT = Experiment(
    SabotageConfig,
    measure,
    VIEW,
    presets={
        "quick": {"steps": 30},
        "smoke": {"mistakes": ("no broadcast",), "steps": 2, "check_steps": 2},
    },
    ranks="none",
    wrong=wrong_rows,
)
