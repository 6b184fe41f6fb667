"""The mistakes: how each is made, what is trained with it, its symptom, and which check is to catch it.

A mistake is a subclass of a strategy, or a patch around one, that does one thing wrong; one of a strategy's user is a
subclass that stands for a training loop that makes it. Those in the data or in the task need no code of their own.
Those where ranks share a model replace a function of the layout or of the pipeline while the ranks run.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.bench.reference import Task
from distlab.comm import collectives
from distlab.model import ModelConfig, TransformerLM
from distlab.model.ops import naive_attention
from distlab.parallel import (
    FSDP,
    STRATEGIES,
    BucketedDDP,
    FlatDDP,
    Layout,
    NaiveDDP,
    OverlapDDP,
    ParallelModel,
    ShardedOptimizer,
    Strategy,
    ZeroOptimizer,
    context_parallel,
    tensor_parallel,
)
from distlab.parallel.buckets import GradientBucket
from distlab.parallel.exchange import AllReduce
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.pipeline import Pipeline
from distlab.parallel.regions import Share
from distlab.parallel.schedules import Action, gpipe, zero_bubble
from distlab.train.data import SyntheticTokens
from kernels.flash_attention import FlashAttention2PyTorch, ops, tiled

BATCH = 4
MODEL = ModelConfig(32, 64, 2, 2, vocab_size=32, context_length=32)
# The checks, by name; an error is what the strategy itself raises.
EQUALITY, VOLUME, ATTENTION, PAIRS, ERROR = "one process", "closed form", "float64 attention", "pairs", "error"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# -- data parallelism ------------------------------------------------------------------------------------------


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


class AllButTheLast(AllReduce):
    """Sends full buckets and not the one that is left over at the end of backward, that of the first layers."""

    def start(self, bucket: GradientBucket) -> None:
        if bucket.plan.indices[-1] == 0:
            bucket.seal()
            self._works[bucket] = _NothingToWaitFor()
        else:
            super().start(bucket)


class LastBucketStays(BucketedDDP):
    """`BucketedDDP` with that exchange."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.lay_out(AllButTheLast(self.process_group, self.all_reduce))


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

    def send_rest(self) -> None:
        pass

    def _synchronize(self) -> None:
        pass


class SumsTiedTwice(NaiveDDP):
    """Sums over names, under which a tied weight stands twice; divides over parameters, where it stands once."""

    def _synchronize(self) -> None:
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.grad.copy_(collectives.sum_tensor(parameter.grad, self.process_group))
        for parameter in self.trainable:
            parameter.grad.div_(self.process_group.size())


class HookOrder(OverlapDDP):
    """Gradients leave in the order in which hooks fire, which differs between ranks that use different layers."""

    def _gradient_ready(self, index: int) -> None:
        self.unsent.remove(index)
        self.unsent.appendleft(index)
        self._send_next()


class KeepsItsShard(ShardedOptimizer):
    """Each rank updates its parameters, and none is sent."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(
            collectives, "broadcast_coalesced", lambda owned, group, source: _NothingToWaitFor()
        ):
            return super().step(*args, **kwargs)


class StaleSums(FlatDDP):
    """The buffer is filled by the first micro-batch; later micro-batches add to `.grad`, which it replaces."""

    _packed: Sequence[Tensor] = ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self._packed = self._packed or [parameter.grad.clone() for parameter in self.trainable]

    def _synchronize(self) -> None:
        for parameter, stale in zip(self.trainable, self._packed, strict=True):
            parameter.grad.copy_(stale)
        self._packed = ()
        super()._synchronize()


class SendsEachMicroBatch(BucketedDDP):
    """`no_sync()` averages as well: the gradient is right, since a mean that is averaged once more stays the same."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self.finish_gradient_synchronization()


# -- sharding --------------------------------------------------------------------------------------------------


class WaitsInOwnersForward(ZeroOptimizer):
    """Only the forward of the module that owns parameters waits for their all-gather.

    Messages as small as these usually arrive before the parameters are read. So the results of an all-gather are held
    back until the wait, as on a slow network.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        gather = collectives.all_gather
        with patch.object(collectives, "all_gather", lambda *sent: _SlowGather(gather, *sent)):
            super().step(*args, **kwargs)
        for parameter in self._ddp.trainable:
            parameter.__class__ = nn.Parameter  # reading one, from whatever place, waits no more


class _SlowGather:
    def __init__(self, gather: Callable[..., Any], output: Tensor, own: Tensor, group: ProcessGroup):
        self._output, self._arrived = output, torch.empty_like(output)
        self._work = gather(self._arrived, own, group)

    def wait(self) -> None:
        self._work.wait()
        self._output.copy_(self._arrived)


class ForgetsToFinish(FSDP):
    """A training loop without `finish_gradient_synchronization()`."""

    def finish_gradient_synchronization(self) -> None:
        pass


class ClipsItsOwnPart(BucketedDDP):
    """A training loop that clips by torch's function, whose norm differs between ranks under ZeRO."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        nn.utils.clip_grad_norm_(self.trainable, 0.1)


# -- tensor and context parallelism ----------------------------------------------------------------------------

vocabulary_cross_entropy, merge = tensor_parallel.vocabulary_cross_entropy, context_parallel._merge


def summed_behind_the_loss(*args: Any, group: ProcessGroup, **options: Any) -> Tensor:
    """Every rank knows the gradient of the loss already; a sum over ranks makes each gradient P times as large."""
    return Share.apply(vocabulary_cross_entropy(*args, group=group, **options), group)


class CountsNormsTwice(BucketedDDP):
    """The squares of all gradients are summed over the ranks that share matrices, those of whole vectors too."""

    def _norm_of(self, gradients: Any) -> Tensor:
        return super()._norm_of(gradients._replace(replicated=[], cut=[*gradients.replicated, *gradients.cut]))


def shifted_after_the_split(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The word behind a chunk lies on another rank: its last token gets that of the next chunk here, or none."""
    tokens, targets = batch
    return model(tokens, torch.cat((tokens[:, 1:], torch.full_like(targets[:, :1], -100)), 1))


def merged_in_bf16(out: Tensor, lse: Tensor, *part: Tensor) -> None:
    """Partial results and their log-sum-exp are kept in bf16 between the steps of the ring."""
    merge(out, lse, *part)
    for kept in (out, lse):
        kept.copy_(kept.bfloat16())


def chunks_in_order(ranks: int) -> list[tuple[int, int]]:
    """The first rank has the first two chunks, which see the fewest keys, and the last rank the last two."""
    return [(2 * rank, 2 * rank + 1) for rank in range(ranks)]


# -- pipelines -------------------------------------------------------------------------------------------------

run_schedule = Pipeline.run


def not_divided(pipeline: Pipeline, model: ParallelModel, loss_fn: Any, batches: Any, scale: float) -> Tensor:
    """Gradients are those of the sum of the micro-batches' losses; the printed loss is their mean."""
    return run_schedule(pipeline, model, loss_fn, batches, scale * len(batches))


def first_backwards_exchanged(pipeline: Pipeline, batches: int) -> list[Action]:
    """The first rank takes up the activations of micro-batch 1 for the gradient of micro-batch 0, and the reverse."""
    actions = gpipe(pipeline.ranks, batches)[pipeline.rank]
    if pipeline.rank == 0:  # behind all forwards, of which there are `batches`
        actions[batches], actions[batches + 1] = actions[batches + 1], actions[batches]
    return actions


def last_weights_forgotten(pipeline: Pipeline, batches: int) -> list[Action]:
    """The loop ends with the last B, although each of two ranks has a W left."""
    actions = zero_bubble(pipeline.ranks, batches)[pipeline.rank]
    return [action for action in actions if (action.kind, action.batch) != ("W", batches - 1)]


# -- attention -------------------------------------------------------------------------------------------------


def healthy_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The package's tiled attention with tiles small enough for several of them: (B, H, T, D) each."""
    with patch.object(tiled, "BLOCK", 16):
        return FlashAttention2PyTorch.apply(q, k, v, True)


def without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax as the formula has it, without subtracting the running maximum."""
    wrong = vars(torch) | {"maximum": lambda old, new: torch.zeros_like(new)}  # exp(score) is summed as it is
    with patch.object(tiled, "torch", SimpleNamespace(**wrong)):
        return healthy_attention(q, k, v)


def sees_one_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask `k <= q + 1`: every token sees the one that it is to predict."""

    def shifted(*args: Any) -> tuple[int | None, int | None]:
        lo, hi = original(*args)
        return lo, hi + 1

    original = ops.band
    with patch.object(ops, "band", shifted):
        return healthy_attention(q, k, v)


# -- what is trained -------------------------------------------------------------------------------------------


def language_model(
    *, attention: Attention = naive_attention, tied: bool = False, logits: float = 1.0
) -> Task:
    """The small Transformer on synthetic tokens.

    Args:
        attention: for every block.
        tied: whether the head uses the embedding's matrix.
        logits: by how much attention's scores are multiplied, as queries and keys grow in long trainings.
    """

    def build(seed: int, device: torch.device) -> nn.Module:
        model = TransformerLM(dataclasses.replace(MODEL, tie_embeddings=tied), device=device, seed=seed)
        for block in model.blocks:
            block.attention.ops = dataclasses.replace(block.attention.ops, attention=attention)
            with torch.no_grad():
                block.attention.qkv.weight[: 2 * MODEL.d_model] *= math.sqrt(logits)
        return model

    return Task(build, tokens)


def tokens(rank: int, step: int, device: torch.device, micro_batches: int = 1) -> list[Any]:
    """A rank's micro-batches of a step; the stream of each rank is its own."""
    data = SyntheticTokens(MODEL.vocab_size, BATCH, MODEL.context_length, seed=0, rank=rank, device=device)
    return [data.batch(micro_batches * step + number) for number in range(micro_batches)]


_LM = language_model()
_FOUR = partial(tokens, micro_batches=4)
# In fp64, so that any difference from one process is a mistake; the loss is computed in the head.
_SHARED = Task(lambda seed, device: _LM.build(seed, device).double(), tokens, lambda model, batch: model(*batch))
# Ranks of a pipeline keep their stages' weights as each has drawn them, so all draw from one seed.
_PIPED = Task(lambda seed, device: _SHARED.build(0, device), _FOUR, _SHARED.loss_fn)


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
        layout: how ranks share the model.
        replaced: (object, attribute, what takes its place) while ranks run that make the mistake.
        max_grad_norm: to which gradients are clipped.
    """

    name: str
    check: str
    symptom: str
    healthy: str
    wrap: Callable[..., ParallelModel] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
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
        return dataclasses.replace(right, wrap=self.wrap or right.wrap, optimizer=self.optimizer or right.optimizer)

    @property
    def trained(self) -> Task:
        """What is trained with the mistake."""
        return self.candidate or self.task

    def mended(self) -> "Mistake":
        """The healthy run beside it."""
        return dataclasses.replace(self, wrap=None, optimizer=None, candidate=None, attention=None, replaced=None)


_ADAMW = (torch.optim.AdamW, 3e-3)


def _shared(name: str, layout: str, symptom: str, check: str = EQUALITY, **options: Any) -> Mistake:
    """A mistake where ranks share the model."""
    shared = {"task": _SHARED, "learner": _ADAMW, "layout": Layout.parse(layout)}
    return Mistake(name, check, symptom, "bucketed", **(shared | options))


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
                optimizer=lambda ddp, cls, **rest: KeepsItsShard(ddp.parameters(), cls, ddp.process_group, **rest)),
        Mistake("softmax without maximum", ATTENTION, "NaN, once scores pass 88", "flat",
                task=language_model(attention=healthy_attention, logits=3e3),
                candidate=language_model(attention=without_maximum, logits=3e3), attention=without_maximum,
                learner=_ADAMW),
        Mistake("mask off by one", ATTENTION, "too good: below the floor that the data allow", "flat",
                task=language_model(attention=healthy_attention),
                candidate=language_model(attention=sees_one_ahead), attention=sees_one_ahead, learner=_ADAMW),
        Mistake("stale accumulation", EQUALITY, "slower: later micro-batches are lost", "flat",
                StaleSums, task=dataclasses.replace(_LM, batches=_FOUR)),
        Mistake("sent every micro-batch", VOLUME, "none but time: every bucket is sent once a micro-batch", "bucketed",
                SendsEachMicroBatch, task=_PIPED, learner=_ADAMW),
        Mistake("read elsewhere", EQUALITY, "hardly any in the loss; some layers are a step behind", "zero1",
                optimizer=WaitsInOwnersForward, task=Task(partial(_seeded, ReadsTheHead), tokens)),
        Mistake("finish forgotten", ERROR, "the step raises; else vectors would drift apart", "fsdp", ForgetsToFinish),
        Mistake("torch's clipping", ERROR, "the step raises; else each rank would clip by a norm of its own", "zero1",
                ClipsItsOwnPart),
        _shared("norms not summed", "tp2", "hardly any in the loss; norms drift apart between ranks",
                replaced=(tensor_parallel, "_shared", lambda weight, group: weight)),
        _shared("summed behind the loss", "tp2", "none under AdamW; SGD and clipping see P times the gradient",
                replaced=(tensor_parallel, "vocabulary_cross_entropy", summed_behind_the_loss)),
        _shared("norms counted twice", "tp2", "hardly any in the loss; clipping begins too early",
                wrap=CountsNormsTwice, max_grad_norm=0.1),
        _shared("shifted after the split", "cp2", "little in the loss; chunks end in wrong words",
                candidate=dataclasses.replace(_SHARED, loss_fn=shifted_after_the_split)),
        _shared("another's positions", "cp2", "hardly any in the loss, at first; every rank counts from zero",
                replaced=(context_parallel.ZigZag, "positions",
                          lambda zigzag, tokens, device: torch.arange(tokens, device=device, dtype=torch.float32))),
        _shared("ring merged in bf16", "cp2-ring", "none in the loss; attention is as coarse as bf16",
                replaced=(context_parallel, "_merge", merged_in_bf16)),
        _shared("no zig-zag", "cp2", "none but time: all wait for the rank with the last chunks", PAIRS,
                replaced=(context_parallel, "zigzag_chunks", chunks_in_order)),
        _shared("not divided", "pp2", "none under AdamW; SGD and clipping see the sum, not the mean",
                task=_PIPED, replaced=(Pipeline, "run", not_divided)),
        _shared("another's activations", "pp2-gpipe", "little in the loss; the first stage mixes two micro-batches",
                task=_PIPED, replaced=(Pipeline, "actions", first_backwards_exchanged)),
        _shared("weights forgotten", "pp2-zero-bubble",
                "hardly any in the loss; the last micro-batch is lost to matrices",
                task=_PIPED, replaced=(Pipeline, "actions", last_weights_forgotten)),
    )
}  # fmt: skip
