"""The mistakes: task and symptom of each, and the check that should catch it.

How each is made is in `faults`; those in the data or in the task need no code of their own.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.bench.reference import Task
from distlab.model import ModelConfig, TransformerLM
from distlab.model.ops import Attention, naive_attention
from distlab.parallel import (
    FSDP,
    STRATEGIES,
    BucketedDDP,
    Layout,
    ParallelModel,
    Strategy,
    Wrapping,
    context_parallel,
    tensor_parallel,
)
from distlab.parallel.build import MakeOptimizer, Wrap
from distlab.parallel.ddp import DataParallel
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.local_optimizer import Params
from distlab.parallel.pipeline import Pipeline
from distlab.parallel.zero import ReduceScatterAndFree
from distlab.train.data import SyntheticTokens

from . import faults

BATCH = 4
# The model is small enough that a step takes milliseconds on a CPU.
MODEL = ModelConfig(32, 64, 2, 2, vocab_size=32, context_length=32)
# The checks, by name; an error is what the strategy itself raises.
EQUALITY, VOLUME, ATTENTION, PAIRS, ERROR = (
    "one process",
    "closed form",
    "float64 attention",
    "pairs",
    "error",
)

# -- what is trained -------------------------------------------------------------------------------


def language_model(
    *, attention: Attention = naive_attention, tied: bool = False, logits: float = 1.0
) -> Task:
    """Return the small Transformer on synthetic tokens.

    Args:
        attention: implementation in every block.
        tied: True if the head uses the embedding's matrix.
        logits: factor of attention's scores, as queries and keys grow in long trainings.
    """

    def build(seed: int, device: torch.device) -> nn.Module:
        model = TransformerLM(
            dataclasses.replace(MODEL, tie_embeddings=tied), device=device, seed=seed
        )
        for block in model.blocks:
            block.attention.ops = dataclasses.replace(block.attention.ops, attention=attention)
            with torch.no_grad():
                # The first two thirds are the rows of queries and keys. A score is a product of
                # both, so each takes the root of the factor.
                block.attention.qkv.weight[: 2 * MODEL.d_model] *= math.sqrt(logits)
        return model

    return Task(build, tokens)


def tokens(rank: int, step: int, device: torch.device, micro_batches: int = 1) -> list[Any]:
    """Return a rank's micro-batches of a step. Each rank has a stream of its own."""
    data = SyntheticTokens(
        MODEL.vocab_size, BATCH, MODEL.context_length, seed=0, rank=rank, device=device
    )
    # A batch depends on its number alone, so steps do not share batches.
    return [data.batch(micro_batches * step + number) for number in range(micro_batches)]


def tokens_of_rank_0(rank: int, step: int, device: torch.device) -> list[Any]:
    """Return the same micro-batch of a step on every rank."""
    # Every rank draws from the stream of rank 0.
    return tokens(0, step, device)


_LM = language_model()
_FOUR = partial(tokens, micro_batches=4)


def build_in_fp64(seed: int, device: torch.device) -> nn.Module:
    """Build the model in fp64, so that any difference from one process is a mistake."""
    return _LM.build(seed, device).double()


def loss_in_head(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss, which the model's head computes."""
    tokens, targets = batch
    return model(tokens, targets)


def build_alike(seed: int, device: torch.device) -> nn.Module:
    """Build the model from one seed on all ranks.

    Ranks of a pipeline keep their stages' weights as each has drawn them.
    """
    return build_in_fp64(0, device)


_SHARED = Task(build_in_fp64, tokens, loss_in_head)
_PIPED = Task(build_alike, _FOUR, loss_in_head)


class TwoExperts(nn.Module):
    """Send a batch through one of two layers of equal shape, by its first token.

    The shapes are tokens (B, T) → logits.
    """

    def __init__(self) -> None:
        super().__init__()
        width = MODEL.d_model
        self.embedding = nn.Embedding(MODEL.vocab_size, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, MODEL.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        # The choice depends on the rank's batch, so ranks use different layers in one step.
        expert = self.experts[int(tokens[0, 0]) % 2]
        x = self.embedding(tokens)
        return self.head(x + torch.relu(expert(x)))


class ReadsTheHead(nn.Module):
    """Model that reads its head's parameters itself and never calls the head.

    The shapes are tokens (B, T) → logits.

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
        # No hook of `self.head` runs, because its forward is not called.
        return nn.functional.linear(x, self.head.weight, self.head.bias)


def _seeded(module: type[nn.Module], seed: int, device: torch.device) -> nn.Module:
    """Build a module without arguments from a seed."""
    torch.manual_seed(seed)
    return module().to(device)


# -- the list --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """One mistake, and the healthy run.

    Attributes:
        name: name in tables.
        check: name of the check that should catch it (it may not be the only one).
        symptom: symptom that a person without a check sees.
        healthy: name of the strategy that is right.
        wrap, optimizer: replacements of the strategy's own functions. None keeps it.
        task: task to train.
        candidate: task to train by mistake. None: `task`.
        learner: optimizer of the loss curve, and its learning rate.
        layout: sizes of the groups of ranks that share the model.
        replaced: (object, attribute, replacement) while ranks run that make the mistake.
        max_grad_norm: norm to which gradients are clipped.
    """

    name: str
    check: str
    symptom: str
    healthy: str
    wrap: Wrap | None = None
    optimizer: MakeOptimizer | None = None
    task: Task = _LM
    candidate: Task | None = None
    attention: Attention | None = None
    learner: tuple[type[torch.optim.Optimizer], float] = (torch.optim.SGD, 1.0)
    layout: Layout = DATA_PARALLEL
    replaced: tuple[Any, str, Any] | None = None
    max_grad_norm: float | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy with the mistake."""
        right = STRATEGIES[self.healthy]
        return dataclasses.replace(
            right, wrap=self.wrap or right.wrap, optimizer=self.optimizer or right.optimizer
        )

    @property
    def trained(self) -> Task:
        """Task that is trained with the mistake."""
        return self.candidate or self.task

    def mended(self) -> "Mistake":
        """Healthy run to compare with."""
        # Layout, learner and clipping stay, since they are not the mistake.
        return dataclasses.replace(
            self, wrap=None, optimizer=None, candidate=None, attention=None, replaced=None
        )


def _averaging_by(cls: Callable[..., DataParallel]) -> Wrap:
    """Return a function that wraps by this class, which has no options."""

    def wrap(module: nn.Module, how: Wrapping) -> DataParallel:
        return cls(module, process_group=how.process_group)

    return wrap


def _bucketing_by(cls: type[BucketedDDP]) -> Wrap:
    """Return a function that wraps by this class with buckets."""

    def wrap(module: nn.Module, how: Wrapping) -> BucketedDDP:
        return cls(module, bucket_size_mb=how.bucket_size_mb, process_group=how.process_group)

    return wrap


def _sharding_by(cls: type[FSDP]) -> Wrap:
    """Return a function that wraps by this class, which shards parameters."""

    def wrap(module: nn.Module, how: Wrapping) -> FSDP:
        return cls(module, compute_dtype=how.compute_dtype, process_group=how.process_group)

    return wrap


def _keeps_its_shard(
    model: ParallelModel,
    optimizer_cls: type[torch.optim.Optimizer],
    params: Params | None,
    options: Mapping[str, Any],
) -> faults.KeepsItsShard:
    """Make a sharded optimizer that sends no parameters."""
    stepped_params = model.parameters() if params is None else params
    return faults.KeepsItsShard(stepped_params, optimizer_cls, model.process_group, **options)


def _waits_in_owners_forward(
    model: BucketedDDP,
    optimizer_cls: type[torch.optim.Optimizer],
    params: Params | None,
    options: Mapping[str, Any],
) -> faults.WaitsInOwnersForward:
    """Make ZeRO-1's optimizer, whose all-gather only the owning module's forward waits for."""
    return faults.WaitsInOwnersForward(model, optimizer_cls, params=params, **options)


_ADAMW = (torch.optim.AdamW, 3e-3)


def _shared(
    name: str,
    layout: str,
    symptom: str,
    *,
    check: str = EQUALITY,
    task: Task = _SHARED,
    candidate: Task | None = None,
    wrap: Wrap | None = None,
    replaced: tuple[Any, str, Any] | None = None,
    max_grad_norm: float | None = None,
) -> Mistake:
    """Return a mistake where ranks share the model. The arguments are fields of `Mistake`."""
    return Mistake(
        name=name,
        check=check,
        symptom=symptom,
        # Layouts add to data parallelism, and `bucketed` is the strategy under them.
        healthy="bucketed",
        wrap=wrap,
        task=task,
        candidate=candidate,
        learner=_ADAMW,
        layout=Layout.parse(layout),
        replaced=replaced,
        max_grad_norm=max_grad_norm,
    )


_ALL = (
    Mistake(
        name="no broadcast",
        check=EQUALITY,
        symptom="none in the loss; two different models, and one is saved",
        healthy="flat",
        wrap=_averaging_by(faults.without_broadcast),
    ),
    Mistake(
        name="sum, not mean",
        check=EQUALITY,
        symptom="the rate is N times too high: spikes, a loss that stays high",
        healthy="flat",
        wrap=_averaging_by(faults.SumInsteadOfMean),
        # At a rate of 2 the healthy run still trains, and twice the rate does not.
        learner=(torch.optim.SGD, 2.0),
    ),
    Mistake(
        name="last bucket not sent",
        check=VOLUME,
        symptom="hardly any in the loss; first layers drift apart",
        healthy="bucketed",
        wrap=_bucketing_by(faults.LastBucketStays),
    ),
    Mistake(
        name="reduces the parameter",
        check=EQUALITY,
        symptom="a slower start: gradients are never averaged",
        healthy="naive",
        wrap=_averaging_by(faults.ReducesTheParameter),
    ),
    Mistake(
        name="missing wait",
        check=EQUALITY,
        symptom="a slower start, now and then; ranks drift apart",
        healthy="overlap",
        wrap=_averaging_by(faults.NeverWaits),
    ),
    Mistake(
        name="tied weight twice",
        check=VOLUME,
        symptom="the tied matrix learns N times too fast",
        healthy="naive",
        wrap=_averaging_by(faults.SumsTiedTwice),
        task=language_model(tied=True),
        learner=(torch.optim.SGD, 1.2),
    ),
    Mistake(
        name="same data everywhere",
        check=EQUALITY,
        symptom="a little noise: N ranks do the work of one",
        healthy="flat",
        candidate=dataclasses.replace(_LM, batches=tokens_of_rank_0),
    ),
    Mistake(
        name="hook order",
        check=EQUALITY,
        symptom="hardly any in the loss; layers get each other's gradients",
        healthy="overlap",
        wrap=_averaging_by(faults.HookOrder),
        task=Task(partial(_seeded, TwoExperts), tokens),
    ),
    Mistake(
        name="shard not exchanged",
        check=VOLUME,
        symptom="each rank trains half a model",
        healthy="sharded-optimizer",
        optimizer=_keeps_its_shard,
    ),
    Mistake(
        name="softmax without maximum",
        check=ATTENTION,
        symptom="NaN, once scores pass 88",
        healthy="flat",
        # Scores beyond 88 overflow exp in fp32. The factor makes them that large from the start.
        task=language_model(attention=faults.healthy_attention, logits=3e3),
        candidate=language_model(attention=faults.without_maximum, logits=3e3),
        attention=faults.without_maximum,
        learner=_ADAMW,
    ),
    Mistake(
        name="mask off by one",
        check=ATTENTION,
        symptom="too good: below the floor that the data allow",
        healthy="flat",
        task=language_model(attention=faults.healthy_attention),
        candidate=language_model(attention=faults.sees_one_ahead),
        attention=faults.sees_one_ahead,
        learner=_ADAMW,
    ),
    Mistake(
        name="stale accumulation",
        check=EQUALITY,
        symptom="slower: later micro-batches are lost",
        healthy="flat",
        wrap=_averaging_by(faults.StaleSums),
        task=dataclasses.replace(_LM, batches=_FOUR),
    ),
    Mistake(
        name="sent every micro-batch",
        check=VOLUME,
        symptom="none but time: every bucket is sent once a micro-batch",
        healthy="bucketed",
        wrap=_bucketing_by(faults.SendsEachMicroBatch),
        task=_PIPED,
        learner=_ADAMW,
    ),
    Mistake(
        name="means not zeroed",
        check=EQUALITY,
        symptom="NaN after a while: gradients of all steps add up",
        healthy="zero2",
        replaced=(ReduceScatterAndFree, "finish", faults.add_to_zeroed_means),
    ),
    Mistake(
        name="read elsewhere",
        check=EQUALITY,
        symptom="hardly any in the loss; some layers are a step behind",
        healthy="zero1",
        optimizer=_waits_in_owners_forward,
        task=Task(partial(_seeded, ReadsTheHead), tokens),
    ),
    Mistake(
        name="finish forgotten",
        check=ERROR,
        symptom="the step raises; else vectors would drift apart",
        healthy="fsdp",
        wrap=_sharding_by(faults.ForgetsToFinish),
    ),
    Mistake(
        name="torch's clipping",
        check=ERROR,
        symptom="the step raises; else each rank would clip by a norm of its own",
        healthy="zero1",
        wrap=_bucketing_by(faults.ClipsItsOwnPart),
    ),
    _shared(
        "norms not summed",
        "tp2",
        "hardly any in the loss; norms drift apart between ranks",
        replaced=(tensor_parallel, "_shared", faults.norms_not_summed),
    ),
    _shared(
        "summed behind the loss",
        "tp2",
        "none under AdamW; SGD and clipping see P times the gradient",
        replaced=(tensor_parallel, "vocabulary_cross_entropy", faults.summed_behind_the_loss),
    ),
    _shared(
        "norms counted twice",
        "tp2",
        "hardly any in the loss; clipping begins too early",
        wrap=_bucketing_by(faults.CountsNormsTwice),
        max_grad_norm=0.1,
    ),
    _shared(
        "shifted after the split",
        "cp2",
        "little in the loss; chunks end in wrong words",
        candidate=dataclasses.replace(_SHARED, loss_fn=faults.shifted_after_the_split),
    ),
    _shared(
        "another's positions",
        "cp2",
        "hardly any in the loss, at first; every rank counts from zero",
        replaced=(context_parallel.ZigZag, "positions", faults.positions_from_zero),
    ),
    _shared(
        "ring merged in bf16",
        "cp2-ring",
        "none in the loss; attention is as coarse as bf16",
        replaced=(context_parallel, "_merge", faults.merged_in_bf16),
    ),
    _shared(
        "no zig-zag",
        "cp2",
        "none but time: all wait for the rank with the last chunks",
        check=PAIRS,
        replaced=(context_parallel, "zigzag_chunks", faults.chunks_in_order),
    ),
    _shared(
        "not divided",
        "pp2",
        "none under AdamW; SGD and clipping see the sum, not the mean",
        task=_PIPED,
        replaced=(Pipeline, "run", faults.not_divided),
    ),
    _shared(
        "another's activations",
        "pp2-gpipe",
        "little in the loss; the first stage mixes two micro-batches",
        task=_PIPED,
        replaced=(Pipeline, "actions", faults.first_backwards_exchanged),
    ),
    _shared(
        "weights forgotten",
        "pp2-zero-bubble",
        "hardly any in the loss; the last micro-batch is lost to matrices",
        task=_PIPED,
        replaced=(Pipeline, "actions", faults.last_weights_forgotten),
    ),
)
MISTAKES: dict[str, Mistake] = {mistake.name: mistake for mistake in _ALL}
