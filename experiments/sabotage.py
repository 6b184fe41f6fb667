"""What does a mistake look like, and which check would have caught it?

    python experiments/sabotage.py            # two CPU ranks, about a minute
    python experiments/sabotage.py --quick    # shorter curves

Twelve classic mistakes, injected one at a time by a subclass or a patch into an otherwise healthy training run. Each
is put to the checks that this lab's commands make (equality with one process, closed form of what is sent, attention
against float64), beside the healthy run, which must pass them all. The picture shows the symptom: both loss curves.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from distlab.comm import RankContext, collectives
from distlab.measure.recorder import CollectiveRecorder
from distlab.model.config import ModelConfig
from distlab.model.ops import naive_attention
from distlab.model.transformer import TransformerLM
from distlab.parallel import (
    STRATEGIES,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlapDDP,
    ShardedOptimizer,
    Strategy,
)
from distlab.report import (
    OutputFolder,
    Record,
    View,
    add_from_option,
    commit,
    environment,
    redraw,
    say,
    write,
)
from distlab.report.table import Column
from distlab.report.twins import twin_curves
from distlab.testing import RanksFailed, run_ranks
from distlab.theory.communication import step_volume
from distlab.train.data import SyntheticTokens
from distlab.train.step import TrainStep
from distlab.train.workbench import Task, Variant, parameter_difference
from kernels.flash_attention import FlashAttention2PyTorch, function, tiled

NAME = "sabotage"
RANKS, BATCH, BUCKET_MB = 2, 4, 0.02
MODEL = ModelConfig(32, 64, 2, 2, vocab_size=32, context_length=32)
# At two ranks the strategies equal one process bit for bit; attention differs from float64 by rounding, about 1e-6.
PARAMETER_TOLERANCE, ATTENTION_TOLERANCE = 0.0, 1e-4
EQUALITY, VOLUME, ATTENTION, ERROR = "one process", "closed form", "float64 attention", "error"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# -- the mistakes ----------------------------------------------------------------------------------------------


def without_broadcast(module: nn.Module, **options: Any) -> FlatDDP:
    """Ranks keep the weights that each has drawn for itself."""
    with patch.object(collectives, "broadcast_all", lambda tensors, group: None):
        return FlatDDP(module, **options)


class SumInsteadOfMean(FlatDDP):
    """`ReduceOp.SUM`, and no division afterwards."""

    def _synchronize(self) -> None:
        super()._synchronize()
        for parameter in self.trainable:
            parameter.grad.mul_(self.process_group.size())


class LastBucketStays(BucketedDDP):
    """Full buckets are sent, the one that is left over at the end of backward is not."""

    def _issue_next(self) -> None:
        if len(self._in_flight) < len(self._buckets) - 1:
            super()._issue_next()
        else:
            self._buckets[-1].seal()
            self._in_flight.append(_NothingToWaitFor())


class _NothingToWaitFor:
    def wait(self) -> None:
        pass


class ReducesTheParameter(NaiveDDP):
    """The hook averages `parameter` where it should average `parameter.grad`."""

    def _synchronize(self) -> None:
        for parameter in self.trainable:
            collectives.all_reduce_mean(parameter.data, self.process_group).wait()


class NeverWaits(OverlapDDP):
    """Asynchronous all-reduces whose `wait()` was forgotten.

    In reality a race, lost now and then. Here it is always lost: the means land in the gradients only when the next
    step begins, long after the optimizer has read them.
    """

    _late: tuple[tuple[Tensor, Any], ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for _, work in self._late:
            work.wait()
        self._late = ()
        return super().forward(*args, **kwargs)

    def _gradient_ready(self, index: int) -> None:
        sent = self.trainable[index].grad.clone()
        self._late = (*self._late, (sent, collectives.all_reduce_mean(sent, self.process_group)))

    def _synchronize(self) -> None:
        pass


class SumsTiedTwice(NaiveDDP):
    """Sums over names, under which a tied weight stands twice; divides over parameters, where it stands once."""

    def _synchronize(self) -> None:
        ranks = self.process_group.size()
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.grad.copy_(collectives.sum_tensor(parameter.grad, self.process_group))
        for parameter in self.trainable:
            parameter.grad.div_(ranks)


class HookOrder(OverlapDDP):
    """Gradients leave in the order in which hooks fire, which differs between ranks that use different layers."""

    def _gradient_ready(self, index: int) -> None:
        self._order.remove(index)
        self._order.insert(len(self._in_flight), index)
        self._issue_next()

    def _synchronize(self) -> None:
        super()._synchronize()
        self._order.sort(reverse=True)


class KeepsItsShard(ShardedOptimizer):
    """Each rank updates what it owns, and nobody sends."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        with patch.object(
            collectives, "broadcast_coalesced", lambda owned, group, source: _NothingToWaitFor()
        ):
            return super().step(closure, **kwargs)


class StaleSums(FlatDDP):
    """The buffer is filled by the first micro-batch's hooks; later micro-batches add to `.grad`, which it replaces."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self._packed: dict[int, Tensor] = {}

    def _on_gradient(self, index: int) -> None:
        self._packed.setdefault(index, self.trainable[index].grad.clone())
        super()._on_gradient(index)

    def _synchronize(self) -> None:
        for index, stale in self._packed.items():
            self.trainable[index].grad.copy_(stale)
        self._packed = {}
        super()._synchronize()


def healthy_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The package's tiled attention with tiles small enough for several of them: (B, H, T, D) each."""
    with patch.object(tiled, "BLOCK", 16):
        return FlashAttention2PyTorch.apply(q, k, v, True)


class _TorchWithoutMaximum:
    """torch, where a maximum is always 0: exp(score) is summed as it is."""

    def __getattr__(self, name: str) -> Any:
        return (lambda old, new: torch.zeros_like(new)) if name == "maximum" else getattr(torch, name)


def without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax as the formula has it, without subtracting the running maximum."""
    with patch.object(tiled, "torch", _TorchWithoutMaximum()):
        return healthy_attention(q, k, v)


def sees_one_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask `k <= q + 1`: every token sees the one that it is to predict."""

    def shifted(*args: Any) -> tuple[int | None, int | None]:
        lo, hi = original(*args)
        return lo, hi + 1

    original = function.band
    with patch.object(function, "band", shifted):
        return healthy_attention(q, k, v)


# -- what is trained -------------------------------------------------------------------------------------------


def language_model(
    *, attention: Attention = naive_attention, tied: bool = False, logits: float = 1.0, micro_batches: int = 1
) -> Task:
    """The small Transformer on synthetic tokens.

    Args:
        attention: for every block.
        tied: whether the head uses the embedding's matrix.
        logits: by how much attention's scores are multiplied, as queries and keys grow in long trainings.
        micro_batches: per rank and step.
    """

    def build(seed: int, device: torch.device) -> nn.Module:
        model = TransformerLM(dataclasses.replace(MODEL, tie_embeddings=tied), device=device, seed=seed)
        for block in model.blocks:
            block.attention.ops = dataclasses.replace(block.attention.ops, attention=attention)
            with torch.no_grad():
                block.attention.qkv.weight[: 2 * MODEL.d_model] *= math.sqrt(logits)
        return model

    return Task(build, lambda rank, step, device: tokens(rank, step, device, micro_batches))


def tokens(rank: int, step: int, device: torch.device, micro_batches: int = 1) -> list[Any]:
    """A rank's micro-batches of a step; the stream of each rank is its own."""
    data = SyntheticTokens(MODEL.vocab_size, BATCH, MODEL.context_length, seed=0, rank=rank, device=device)
    return [data.batch(micro_batches * step + number) for number in range(micro_batches)]


class TwoExperts(nn.Module):
    """A batch is sent through one of two layers of equal shape, by its first token: tokens (B, T) → logits."""

    def __init__(self) -> None:
        super().__init__()
        width = MODEL.d_model
        self.embedding = nn.Embedding(MODEL.vocab_size, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, MODEL.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        expert = self.experts[int(tokens[0, 0]) % 2]
        x = self.embedding(tokens)
        return self.head(x + torch.relu(expert(x)))


def _two_experts(seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return TwoExperts().to(device)


# -- the list --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """One mistake beside its healthy twin.

    Attributes:
        name: as in tables.
        check: which check is expected to catch it (it may not be the only one).
        symptom: what a person sees who has no check.
        healthy: name of the strategy that is right.
        build, optimizer: what takes the place of the strategy's own; None leaves it.
        task: what is trained.
        suspect: what is trained by mistake; None: `task`.
        learner: optimizer of the loss curve, and its rate.
    """

    name: str
    check: str
    symptom: str
    healthy: str
    build: Callable[..., nn.Module] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    task: Task = dataclasses.field(default_factory=language_model)
    suspect: Task | None = None
    attention: Attention | None = None
    learner: tuple[type[torch.optim.Optimizer], float] = (torch.optim.SGD, 1.0)

    def strategy(self, broken: bool) -> Strategy:
        """The strategy, with the mistake or without."""
        right = STRATEGIES[self.healthy]
        if not broken:
            return right
        return dataclasses.replace(
            right, build=self.build or right.build, optimizer=self.optimizer or right.optimizer
        )

    def trained(self, broken: bool) -> Task:
        """The task, with the mistake or without."""
        return self.suspect if broken and self.suspect is not None else self.task


def _keeps_its_shard(wrapper: nn.Module, cls: type[torch.optim.Optimizer], **options: Any) -> KeepsItsShard:
    return KeepsItsShard(wrapper.parameters(), cls, wrapper.process_group, **options)


_LM = language_model()
_ADAMW = (torch.optim.AdamW, 3e-3)
MISTAKES: dict[str, Mistake] = {
    mistake.name: mistake
    for mistake in (
        Mistake("no broadcast", EQUALITY, "none in the loss; two different models, and one is saved", "flat",
                without_broadcast),
        Mistake("sum, not mean", EQUALITY, "the rate is N times too high: spikes, a loss that stays high", "flat",
                SumInsteadOfMean, learner=(torch.optim.SGD, 2.0)),
        Mistake("last bucket not sent", VOLUME, "hardly any in the loss; first layers drift apart", "bucketed",
                LastBucketStays),
        Mistake("reduces the parameter", EQUALITY, "a slower start: gradients are never averaged", "naive",
                ReducesTheParameter),
        Mistake("missing wait", EQUALITY, "a slower start, now and then; ranks drift apart", "overlap", NeverWaits),
        Mistake("tied weight twice", VOLUME, "the tied matrix learns N times too fast", "naive", SumsTiedTwice,
                task=language_model(tied=True), learner=(torch.optim.SGD, 1.2)),
        Mistake("same data everywhere", EQUALITY, "a little noise: N ranks do the work of one", "flat",
                suspect=dataclasses.replace(_LM, batches=lambda rank, step, device: tokens(0, step, device))),
        Mistake("hook order", EQUALITY, "hardly any in the loss; layers get each other's gradients", "overlap",
                HookOrder, task=Task(_two_experts, tokens)),
        Mistake("shard not exchanged", VOLUME, "each rank trains half a model", "sharded-optimizer",
                optimizer=_keeps_its_shard),
        Mistake("softmax without maximum", ATTENTION, "NaN, once scores pass 88", "flat",
                task=language_model(attention=healthy_attention, logits=3e3),
                suspect=language_model(attention=without_maximum, logits=3e3), attention=without_maximum,
                learner=_ADAMW),
        Mistake("mask off by one", ATTENTION, "too good: below the floor that the data allow", "flat",
                task=language_model(attention=healthy_attention),
                suspect=language_model(attention=sees_one_ahead), attention=sees_one_ahead, learner=_ADAMW),
        Mistake("stale accumulation", EQUALITY, "slower: later micro-batches are lost", "flat",
                StaleSums, task=language_model(micro_batches=4)),
    )
}  # fmt: skip

# -- checks and curves -----------------------------------------------------------------------------------------


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
    model = task.build(0, context.device)
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in model.parameters()]
    expected = step_volume(mistake.healthy, *zip(*sizes, strict=True), bucket_size_mb=BUCKET_MB,
                           world_size=context.world_size)  # fmt: skip
    train.model.close()
    return recorder.count - expected.collectives, recorder.total_bytes - expected.bytes


def _train_step(context: RankContext, strategy: Strategy, task: Task, learner: tuple) -> TrainStep:
    wrapper = strategy.wrap(task.build(context.rank, context.device), context.group, BUCKET_MB)
    cls, rate = learner
    return TrainStep(wrapper, strategy.optimizer(wrapper, cls, lr=rate), task.loss_fn)


def loss_curve(context: RankContext, mistake: Mistake, broken: bool, steps: int) -> tuple[list[float], float]:
    """The mean loss over ranks of every step, and how far the ranks' parameters lie apart at the end."""
    task = mistake.trained(broken)
    train = _train_step(context, mistake.strategy(broken), task, mistake.learner)
    losses = torch.stack([train(task.batches(context.rank, step, context.device)) for step in range(steps)])
    means = collectives.sum_tensor(losses, context.group) / context.world_size
    flat = torch.cat([parameter.detach().flatten() for parameter in train.model.module.parameters()])
    mean = collectives.sum_tensor(flat, context.group) / context.world_size
    train.model.close()
    return means.tolist(), (flat - mean).abs().max().item()


def examine(context: RankContext, name: str, broken: bool, check_steps: int, steps: int) -> dict[str, Any]:
    """All checks and the curve of one run, with the mistake or without; call it on every rank."""
    mistake = MISTAKES[name]
    variant = Variant(name, mistake.strategy(broken), BUCKET_MB)
    difference = parameter_difference(
        context, variant, steps=check_steps, task=mistake.task, suspect=mistake.trained(broken)
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


def caught_by(metrics: dict[str, Any]) -> list[str]:
    """The checks that say no."""
    if "error" in metrics:
        return [ERROR]
    found = []
    if metrics["max_abs_param_diff"] > PARAMETER_TOLERANCE:
        found.append(EQUALITY)
    if metrics["collectives_beyond_prediction"] or metrics["comm_bytes_beyond_prediction"]:
        found.append(VOLUME)
    if metrics["attention_error"] > ATTENTION_TOLERANCE:
        found.append(ATTENTION)
    return found


# -- the experiment --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SabotageConfig:
    """What to run.

    Args:
        mistakes: names from `MISTAKES`.
        steps: of each loss curve.
        check_steps: of the comparison with one process.

    Raises:
        ValueError: an unknown mistake, or too few steps.
    """

    mistakes: tuple[str, ...] = tuple(MISTAKES)
    steps: int = 150
    check_steps: int = 3

    def __post_init__(self) -> None:
        unknown = [name for name in self.mistakes if name not in MISTAKES]
        if unknown or not self.mistakes:
            raise ValueError(f"mistakes {unknown or 'none'}: choose among {', '.join(map(repr, MISTAKES))}")
        if self.steps < 2 or self.check_steps < 2:
            raise ValueError(f"steps={self.steps}, check_steps={self.check_steps}: at least 2 of each")


def run(config: SabotageConfig, progress: Callable[[str], None] = lambda text: None,
        default_commit: str | None = None) -> list[Record]:  # fmt: skip
    """One record per mistake. Starts its own two ranks: a mistake may hang or crash those it runs on."""
    facts = {"environment": environment("cpu"), "commit": commit(default_commit)}
    shared = dataclasses.asdict(config) | {"world_size": RANKS, "model": dataclasses.asdict(MODEL)}
    del shared["mistakes"]
    records = []
    for name in config.mistakes:
        progress(name)
        mistake = MISTAKES[name]
        healthy = run_ranks(examine, RANKS, name, False, config.check_steps, config.steps)[0]
        try:
            broken = run_ranks(examine, RANKS, name, True, config.check_steps, config.steps)[0]
        except RanksFailed as failure:
            broken = {"error": str(failure).strip().splitlines()[-1]}
        metrics = broken | {
            "caught": mistake.check in caught_by(broken),
            "caught_by": ", ".join(caught_by(broken)) or "nothing",
            "healthy_passes": not caught_by(healthy),
            "healthy_loss": healthy["loss"],
            "healthy_final_loss": _end(healthy["loss"]),
            "final_loss": _end(broken["loss"]) if "loss" in broken else None,
        }
        own = {"strategy": mistake.healthy, "check": mistake.check, "symptom": mistake.symptom}
        records.append(Record(NAME, name, shared | own, metrics, **facts))
    return records


def _end(losses: Sequence[float]) -> float:
    """The mean of the last tenth, which is less noise than the last loss."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def problems(records: Sequence[Record]) -> list[str]:
    """What is not as it should be: a mistake that passes, or a healthy run that does not."""
    found = [f"{r.variant}: not caught by {r.config['check']}" for r in records if not r.metrics["caught"]]
    return found + [
        f"{r.variant}: its healthy twin is refused" for r in records if not r.metrics["healthy_passes"]
    ]


COLUMNS = [
    Column("variant", "mistake"),
    Column("config.strategy", "in", align="left"),
    Column("metrics.caught_by", "caught by", align="left"),
    Column("metrics.max_abs_param_diff", "max |Δparam|", ".1e"),
    Column("metrics.collectives_beyond_prediction", "calls too many", "+d"),
    Column("metrics.attention_error", "attention error", ".1e"),
    Column("metrics.healthy_final_loss", "healthy loss", ".3f"),
    Column("metrics.final_loss", "loss", ".3f"),
    Column("metrics.ranks_apart", "ranks apart", ".1e"),
    Column("config.symptom", "symptom", align="left"),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    caught = sum(record.metrics["caught"] for record in records)
    config, env = records[0].config, records[0].environment
    return (
        f"{caught} of {len(records)} mistakes caught; {config['steps']} steps on {config['world_size']} gloo ranks of "
        f"{env['device_name']}, torch {env['torch']}"
    )


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel per mistake: its loss beside the healthy one."""
    cells = {
        f"{record.variant}\n→ {record.metrics['caught_by']}": {
            "healthy": record.metrics["healthy_loss"],
            "with the mistake": record.metrics.get("loss", []),
        }
        for record in records
    }
    floor = math.log(SyntheticTokens(MODEL.vocab_size, 1, 1, seed=0, rank=0).branching)
    title = f"Mistakes → checks that catch them. {headline(records)}"
    twin_curves(path, cells, title=title, x_label="step", y_label="loss, nats per token",
           levels={"floor of the data": floor})  # fmt: skip


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={"loss.png": draw},
    findings=lambda records: [f"WRONG: {problem}" for problem in problems(records)],
    reading="Every mistake is injected alone, into a run that is otherwise healthy and whose twin must pass all "
    "checks. A loss curve that looks right proves nothing: several of these train on, only worse, or only at another "
    "scale.",
    noise="At two ranks the strategies equal one process bit for bit, so any difference of a parameter is a mistake; "
    f"attention may differ from float64 by {ATTENTION_TOLERANCE:g}.",
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--mistakes", default="all", help=f"comma-separated: {', '.join(MISTAKES)} [all]")
    p.add_argument("--steps", type=int, help="of each loss curve [150]")
    p.add_argument("--quick", action="store_true", help="30 steps")
    p.add_argument("--out", default="outputs", help="folder for results [%(default)s]")
    p.add_argument("--commit", help="recorded where git is missing")
    add_from_option(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write records and picture; 1 if a mistake passed."""
    args = parser().parse_args(argv)
    if args.source:
        return redraw(VIEW, args.source, args.out)
    names = tuple(MISTAKES) if args.mistakes == "all" else tuple(args.mistakes.split(","))
    try:
        config = SabotageConfig(names, args.steps or (30 if args.quick else 150))
        folder = OutputFolder(args.out, NAME)
    except (ValueError, OSError) as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return 2
    records = run(config, lambda text: print(text, file=sys.stderr, flush=True), args.commit)
    say(VIEW, records, write(VIEW, records, folder))
    return 1 if problems(records) else 0


if __name__ == "__main__":
    from experiments import sabotage  # the ranks must find `examine` under an importable name

    sys.exit(sabotage.main())
