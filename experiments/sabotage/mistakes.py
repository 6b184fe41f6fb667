"""The fifteen mistakes: where each sits, what is trained with it, its symptom, and which check is to catch it."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.bench.reference import Task
from distlab.model import ModelConfig, TransformerLM
from distlab.model.ops import naive_attention
from distlab.parallel import STRATEGIES, ParallelModel, Strategy
from distlab.train.data import SyntheticTokens

from .injected import (
    ClipsItsOwnPart,
    ForgetsToFinish,
    HookOrder,
    KeepsItsShard,
    LastBucketStays,
    NeverWaits,
    ReducesTheParameter,
    StaleSums,
    SumInsteadOfMean,
    SumsTiedTwice,
    WaitsInOwnersForward,
    healthy_attention,
    sees_one_ahead,
    without_broadcast,
    without_maximum,
)

BATCH = 4
MODEL = ModelConfig(32, 64, 2, 2, vocab_size=32, context_length=32)
# The checks, by name; an error is what the strategy itself raises.
EQUALITY, VOLUME, ATTENTION, ERROR = "one process", "closed form", "float64 attention", "error"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

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


class ReadsTheHead(nn.Module):
    """The model reads its head's parameters itself and never calls the head: tokens (B, T) → logits.

    The layer before the head is so large that the head has a bucket of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        width = MODEL.d_model
        self.embedding = nn.Embedding(MODEL.vocab_size, width)
        self.middle = nn.Sequential(
            nn.Linear(width, 5 * width), nn.ReLU(), nn.Linear(5 * width, width, bias=False)
        )
        self.head = nn.Linear(width, MODEL.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.middle(x)
        return nn.functional.linear(x, self.head.weight, self.head.bias)


def _seeded(module: type[nn.Module], seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return module().to(device)


# -- the list --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """One mistake beside the healthy run.

    Attributes:
        name: as in tables.
        check: which check is expected to catch it (it may not be the only one).
        symptom: what a person sees who has no check.
        healthy: name of the strategy that is right.
        wrap, optimizer: what takes the place of the strategy's own; None leaves it.
        task: what is trained.
        candidate: what is trained by mistake; None: `task`.
        learner: optimizer of the loss curve, and its rate.
    """

    name: str
    check: str
    symptom: str
    healthy: str
    wrap: Callable[..., ParallelModel] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    task: Task = dataclasses.field(default_factory=language_model)
    candidate: Task | None = None
    attention: Attention | None = None
    learner: tuple[type[torch.optim.Optimizer], float] = (torch.optim.SGD, 1.0)

    def strategy(self, broken: bool) -> Strategy:
        """The strategy, with the mistake or without."""
        right = STRATEGIES[self.healthy]
        if not broken:
            return right
        return dataclasses.replace(
            right, wrap=self.wrap or right.wrap, optimizer=self.optimizer or right.optimizer
        )

    def trained(self, broken: bool) -> Task:
        """The task, with the mistake or without."""
        return self.candidate if broken and self.candidate is not None else self.task


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
                candidate=dataclasses.replace(_LM, batches=lambda rank, step, device: tokens(0, step, device))),
        Mistake("hook order", EQUALITY, "hardly any in the loss; layers get each other's gradients", "overlap",
                HookOrder, task=Task(partial(_seeded, TwoExperts), tokens)),
        Mistake("shard not exchanged", VOLUME, "each rank trains half a model", "sharded-optimizer",
                optimizer=_keeps_its_shard),
        Mistake("softmax without maximum", ATTENTION, "NaN, once scores pass 88", "flat",
                task=language_model(attention=healthy_attention, logits=3e3),
                candidate=language_model(attention=without_maximum, logits=3e3), attention=without_maximum,
                learner=_ADAMW),
        Mistake("mask off by one", ATTENTION, "too good: below the floor that the data allow", "flat",
                task=language_model(attention=healthy_attention),
                candidate=language_model(attention=sees_one_ahead), attention=sees_one_ahead, learner=_ADAMW),
        Mistake("stale accumulation", EQUALITY, "slower: later micro-batches are lost", "flat",
                StaleSums, task=language_model(micro_batches=4)),
        Mistake("read elsewhere", EQUALITY, "hardly any in the loss; some layers are a step behind", "zero1",
                optimizer=WaitsInOwnersForward, task=Task(partial(_seeded, ReadsTheHead), tokens)),
        Mistake("finish forgotten", ERROR, "the step raises; else vectors would drift apart", "fsdp", ForgetsToFinish),
        Mistake("torch's clipping", ERROR, "the step raises; else each rank would clip by a norm of its own", "zero1",
                ClipsItsOwnPart),
    )
}  # fmt: skip
