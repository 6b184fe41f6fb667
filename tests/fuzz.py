"""Random models and regimes, every strategy held against one process.

    python -m tests.fuzz --seeds 2000 --ranks 2 3 --strategies all   # exit code 1 at a difference
    python -m tests.fuzz --first 17 --seeds 1 --strategies zero1 --ranks 2      # one of them again
    python -m tests.fuzz --case "Case(body=(Part(),))" --strategies zero1 --ranks 2

A seed makes a `Case`: a model (a tree of `Part`s: layers, containers, ties, frozen parts,
parameters read elsewhere than in their owner's forward, …) and a regime (steps, micro-batches,
optimizer, clipping, a backward that fails, …). It prints as the Python expression that makes it
again. Every rank trains it under the strategy, on data of its own and from weights of its own, and
beside that trains one replica per rank in its own process, whose gradients it sums in rank order
(`OneProcess`).

What must agree: the loss of every forward, which parameters have a gradient, the gradients (where
ranks hold them whole), at the end the full parameters and the buffers; across ranks bit for bit.
Models compute in fp64, where a sum in another order is off by so little that no layer or optimizer
enlarges it to what a mistake makes (`tolerance`). In every other case what a collective brings
becomes visible only when it is waited for (`late_arrivals`), so that a wait that is missing shows
without luck. A case is unstable, and says nothing, if all values that differ are such as a nudge of
the parameters (`NUDGE`) moves in one process as well.

What a strategy documents that it refuses counts as right only where the case has the refused
feature (`REFUSALS`). What FSDP's contract leaves out (units or orders that differ between ranks, a
weight read outside its unit) is replaced by the nearest thing that it allows (`as_allowed`).

A case that fails is printed as the option `--case` takes it, so that parts of it can be left out by
hand.
"""

import argparse
import copy
import faulthandler
import gc
import hashlib
import os
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import hybrid_mesh
from distlab.parallel import FSDP, Wrapping, ZeroOptimizer, get_strategy
from distlab.testing import RanksFailed, run_ranks

STRATEGIES = (
    "naive",
    "flat",
    "overlap",
    "bucketed",
    "bucketed-two-level",
    "sharded-optimizer",
    "zero1",
    "zero2",
    "fsdp",
    "hsdp",
)
FULLY_SHARDED = ("fsdp", "hsdp")
ON_A_MESH = ("bucketed-two-level", "hsdp")
BUCKETS_MB = (1e-5, 1e-4, 1e-3, 25.0)  # 10 bytes, 104 bytes, 1 kB, torch's default
BATCH = 2  # sequences of a micro-batch
LENGTH = 3  # tokens of a sequence
VOCABULARY = 7
MOST_FAILURES = 5  # after which the command ends
# what gloo says of a peer that does not come
LOST = re.compile("[Tt]imeout|Timed out|Connection closed")


# -- what a case is --------------------------------------------------------------------------------


def _short_repr(self: Any) -> str:
    """The expression that makes it again, defaults left out."""
    plain = vars(type(self)())
    changed = ", ".join(
        f"{name}={value!r}" for name, value in vars(self).items() if value != plain[name]
    )
    return f"{type(self).__name__}({changed})"


@dataclass(frozen=True, repr=False)
class Part:
    """A module of the tree; it maps `(batch, length, width)` to the same shape.

    Attributes:
        kind: one of `LEAVES` or `CONTAINERS`.
        inside: what a container contains.
        form: which variety of its kind, see there.
        size: entries, heads or hidden features, where the kind has them.
        frozen: none of its own parameters requires a gradient.
    """

    kind: str = "linear"
    inside: tuple["Part", ...] = ()
    form: str = ""
    size: int = 0
    frozen: bool = False

    __repr__ = _short_repr


@dataclass(frozen=True, repr=False)
class Regime:
    """How a case is trained; a step number of −1 means never.

    Attributes:
        micro: micro-batches per synchronisation, all but the last under `no_sync()`.
        forwards: forward passes whose losses one backward takes together.
        backwards: backward passes outside of `no_sync()` before one finish.
        finishes: backward and finish, this often before one optimizer step.
        zero: when gradients are zeroed: "before" the forward, "between" forward and backward,
            "after" the step; "never" after the first step.
        zero_by: "optimizer" or "wrapper". to_none: or fill with zeros.
        optimizer: of `OPTIMIZERS`. groups: of `grouped`. schedule: halve the rate after every step.
        clip: largest norm, by the strategy's own clipping; 0 for none.
        fails: step before which a backward raises, at `fails_at`, after `fails_after` good
            micro-batches under `no_sync()`, inside `no_sync()` itself or not.
        freezes: step before which one more parameter is frozen, while it has a gradient.
        saves, loads: steps after which the state of module and optimizer is taken, and put back.
        evaluates, syncs: steps after which a forward in eval mode runs, and buffers are
            synchronised.
        rewraps: step after which the wrapper is closed, and the module wrapped again with a new
            optimizer.
        skips: step that is skipped after its backward: gradients are zeroed, nobody calls finish.
        late: see `late_arrivals`.
        bucket_mb: of strategies with buckets.
    """

    steps: int = 1
    micro: int = 1
    forwards: int = 1
    backwards: int = 1
    finishes: int = 1
    zero: str = "before"
    zero_by: str = "optimizer"
    to_none: bool = True
    optimizer: str = "sgd"
    groups: str = "one"
    schedule: bool = False
    clip: float = 0.0
    fails: int = -1
    fails_at: str = "late"
    fails_after: int = 0
    fails_in_no_sync: bool = False
    freezes: int = -1
    saves: int = -1
    loads: int = -1
    evaluates: int = -1
    syncs: int = -1
    rewraps: int = -1
    late: bool = False
    bucket_mb: float = 25.0
    skips: int = -1

    __repr__ = _short_repr


@dataclass(frozen=True, repr=False)
class Case:
    """A model and its regime.

    Attributes:
        body: the parts between input and head, one after the other.
        seed: of weights and data.
        width: of the hidden features.
        tokens: the input is tokens and goes through an embedding; else numbers.
        own: the root's own parameters: "" none, "matrix", "frozen-matrix" or "vector".
        head: "" (the body's output is the root's), "linear", "tied" to the embedding, or "read":
            the embedding's matrix is read by the root itself.
        ties: pairs (i, j): the j-th `linear` part uses the i-th's weight.
        output: what the root returns: "tensor", or see `packed`.
    """

    body: tuple[Part, ...] = ()
    seed: int = 0
    width: int = 4
    tokens: bool = False
    own: str = ""
    head: str = ""
    ties: tuple[tuple[int, int], ...] = ()
    output: str = "tensor"
    regime: Regime = Regime()

    __repr__ = _short_repr


def parts_of(parts: Sequence[Part]) -> Iterator[Part]:
    """All parts, outer before inner."""
    for part in parts:
        yield part
        yield from parts_of(part.inside)


# -- the model that a case describes ---------------------------------------------------------------


class Moment:
    """Facts that modules know in addition to their input.

    They are the number that branches depend on, and the place where backward raises.
    """

    number = 0
    raises_at = ""


class BackwardFailed(RuntimeError):
    """Raised by the model's own hook, where the regime asks for it."""


@dataclass
class Found:
    """A dataclass as some models return it."""

    hidden: Tensor
    other: Any


class Matrix(nn.Module):
    """A parameter of its own, read by itself: a scalar, three dimensions, transposed, or with holes
    between rows.
    """

    def __init__(self, form: str, width: int):
        super().__init__()
        self.form = form
        if form == "scalar":
            self.weight = nn.Parameter(torch.randn(()))
        elif form == "cube":
            self.weight = nn.Parameter(torch.randn(2, width, width) * 0.3)
        elif form == "transposed":
            self.down = nn.Parameter((torch.randn(width + 1, width) * 0.5).t())
            self.weight = nn.Parameter((torch.randn(width, width + 1) * 0.5).t())
        else:
            self.weight = nn.Parameter((torch.randn(width, 2 * width) * 0.5)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "scalar":
            return x * (1 + self.weight)
        if self.form == "cube":
            return torch.einsum("btd,kde->bte", x, self.weight)
        return x @ self.down @ self.weight if self.form == "transposed" else x @ self.weight


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Norm(nn.Module):
    def __init__(self, form: str, width: int):
        super().__init__()
        kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm1d}
        self.norm = kinds[form](width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view(x.shape)


class Positions(nn.Module):
    def __init__(self, entries: int, width: int):
        super().__init__()
        self.table = nn.Embedding(entries, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]) % self.table.num_embeddings).to(x.dtype)


class Listed(nn.Module):
    """Parameters in an `nn.ParameterList`, beside a matrix of the module's own or not."""

    def __init__(self, form: str, width: int):
        super().__init__()
        self.listed = nn.ParameterList(
            [torch.randn(width, width) * 0.4, torch.randn(width), torch.randn(width, width) * 0.4]
        )
        self.own = nn.Parameter(torch.randn(width, width) * 0.4) if form == "own" else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.listed[0] + self.listed[1]) @ self.listed[2]
        return x if self.own is None else x @ self.own


class Reads(nn.Module):
    """Reads the parameters of a child that is never called."""

    def __init__(self, form: str, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.own = nn.Parameter(torch.randn(width, width) * 0.4) if form == "own" else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.inner.weight, self.inner.bias)
        return x if self.own is None else x @ self.own


class Branch(nn.Module):
    """One of two matrices, by the moment's number: ranks differ in what they use."""

    def __init__(self, form: str, width: int, moment: Moment):
        super().__init__()
        self.form, self.moment = form, moment
        if form == "modules":
            self.sides = nn.ModuleDict({"0": nn.Linear(width, width), "1": nn.Linear(width, width)})
        else:
            self.left = nn.Parameter(torch.randn(width, width) * 0.5)
            self.right = nn.Parameter(torch.randn(width, width) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        side = self.moment.number % 2
        if self.form == "modules":
            return self.sides[str(side)](x)
        return x @ (self.right if side else self.left)


class Idle(nn.Module):
    """Owns a matrix and uses it for nothing; returns its input, or something new."""

    def __init__(self, form: str, width: int):
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x if self.form == "input" else x * 1.0


class Listing(nn.Module):
    """Children in an `nn.ModuleList` or `nn.ModuleDict`, called one after the other."""

    def __init__(self, form: str, children: Sequence[nn.Module]):
        super().__init__()
        if form == "dict":
            self.items = nn.ModuleDict(
                {f"part{number}": child for number, child in enumerate(children)}
            )
        elif form == "nested":
            self.items = nn.ModuleList([nn.ModuleList(children)])
        else:
            self.items = nn.ModuleList(children)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        children = self.items.values() if self.form == "dict" else self.items
        for child in children:
            for each in child if self.form == "nested" else [child]:
                x = each(x)
        return x


class Around(nn.Module):
    """Calls its child in another way than once, plainly."""

    def __init__(self, form: str, child: nn.Module):
        super().__init__()
        self.form, self.child = form, child

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "residual":
            return x + self.child(x)
        if self.form == "twice":
            return self.child(torch.tanh(self.child(x)))
        if self.form == "detached":
            return x + self.child(x).detach()
        if self.form == "no-grad":
            with torch.no_grad():
                y = self.child(x)
            return x + y
        if self.form in ("checkpoint", "reentrant"):
            return checkpoint(self.child, x, use_reentrant=self.form == "reentrant")
        return self.child(x.to(torch.float32)).to(x.dtype)


class Plain:
    """An object of which nobody knows that it holds a tensor."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


def packed(form: str, x: Tensor) -> Any:
    """Return a structure that a module may return instead of a tensor."""
    if form == "dict":
        return {"hidden": x, "other": [{"deep": (torch.tanh(x), 3)}], "name": "hidden"}
    if form == "dataclass":
        return Found(x, "other")
    if form == "object":
        return Plain(x)
    if form == "same":
        return x, x
    return (x, x.square()) if form in ("tuple", "unused") else x


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that `packed` has packed."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Found | Plain):
        yield value.hidden
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


class Answer(nn.Module):
    """A child that returns more than a tensor, and stands in a list of one."""

    def __init__(self, form: str, child: nn.Module):
        super().__init__()
        self.answers = nn.ModuleList([Answering(form, child)])
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        first, *others = tensors_in(self.answers[0](x))
        return first if self.form == "unused" else sum(others, first)


class Answering(nn.Module):
    def __init__(self, form: str, child: nn.Module):
        super().__init__()
        self.form, self.child = form, child

    def forward(self, x: Tensor) -> Any:
        return packed(self.form, self.child(x))


class Root(nn.Module):
    """The whole model: `forward(tokens (B, T) or numbers (B, T, width))`."""

    def __init__(self, case: Case, seed: int):
        super().__init__()
        # torch.manual_seed also formats its caller's stack
        torch.default_generator.manual_seed(seed)
        self.case, self.moment = case, Moment()
        width = case.width
        self.embedding = nn.Embedding(VOCABULARY, width) if case.tokens else None
        if case.own == "vector":
            self.own = nn.Parameter(torch.randn(width))
        elif case.own:
            self.own = nn.Parameter(torch.randn(LENGTH, width), requires_grad=case.own == "matrix")
        self._linears: list[nn.Linear] = []
        self.body = nn.Sequential(*[self._make(part) for part in case.body])
        self.head = (
            nn.Linear(width, VOCABULARY, bias=False) if case.head in ("linear", "tied") else None
        )
        if case.head == "tied":
            self.head.weight = self.embedding.weight
        for first, second in case.ties:
            self._linears[second].weight = self._linears[first].weight
        del self._linears
        self.double()
        for module in self.modules():
            if isinstance(module, Around) and module.form == "float32":
                module.child.float()
        for name, buffer in self.named_buffers():  # a buffer that nobody broadcasts must show
            if name.endswith("running_mean"):
                buffer.normal_()

    def _make(self, part: Part) -> nn.Module:
        children = [self._make(each) for each in part.inside]
        module = self._module(part, children)
        if part.frozen:
            module.requires_grad_(False)
        return module

    def _module(self, part: Part, children: list[nn.Module]) -> nn.Module:
        kind = part.kind
        form = part.form
        width = self.case.width
        if kind == "linear":
            self._linears.append(nn.Linear(width, width, bias=form != "no-bias"))
            return self._linears[-1]
        if kind == "mlp":
            return nn.Sequential(
                nn.Linear(width, part.size),
                nn.Tanh(),
                nn.Linear(part.size, width, bias=form != "no-bias"),
            )
        if kind == "attention":
            return Attention(width, part.size if width % part.size == 0 else 1)
        if kind == "positions":
            return Positions(part.size, width)
        if kind == "branch":
            return Branch(form, width, self.moment)
        if kind == "sequential":
            return nn.Sequential(*children)
        if kind == "list":
            return Listing(form, children)
        if kind == "around":
            return Around(form, *children)
        if kind == "answer":
            return Answer(form, *children)
        classes = {"matrix": Matrix, "norm": Norm, "listed": Listed, "reads": Reads, "idle": Idle}
        return classes[kind](form, width)

    def forward(self, x: Tensor) -> Any:
        case = self.case
        if case.tokens:
            x = self.embedding(x)
        if case.own:
            x = x + self.own
        early = self.moment.raises_at == "early" and x.requires_grad
        if early:
            x.register_hook(_fail)
        x = self.body(x)
        if self.moment.raises_at and not early and x.requires_grad:
            x.register_hook(_fail)
        if case.head == "read":
            x = F.linear(x, self.embedding.weight)
        elif case.head:
            x = self.head(x)
        return packed(case.output, x)


def _fail(gradient: Tensor) -> None:
    raise BackwardFailed("as the regime asks")


LEAVES: dict[str, tuple[str, ...]] = {
    "linear": ("", "", "no-bias"),
    "mlp": ("", "no-bias"),
    "norm": ("layer", "rms", "batch"),
    "matrix": ("scalar", "cube", "transposed", "holes"),
    "positions": ("",),
    "attention": ("",),
    "listed": ("", "own"),
    "reads": ("", "own"),
    "branch": ("", "modules"),
    "idle": ("input", "new"),
}
CONTAINERS: dict[str, tuple[str, ...]] = {
    "sequential": ("",),
    "list": ("", "", "dict", "nested"),
    "around": (
        *("residual", "twice", "detached", "no-grad", "float32", "float32"),
        *("checkpoint", "checkpoint", "reentrant"),
    ),
    "answer": ("dict", "tuple", "dataclass", "unused", "same", "object"),
}


def loss_of(
    model: nn.Module, moment: Moment, case: Case, rank: int, step: int, number: int
) -> Tensor:
    """The loss of one forward on a rank's own data; smooth, and never large."""
    generator = torch.Generator().manual_seed(10_000 * case.seed + 100 * rank + 10 * step + number)
    if case.tokens:
        data = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    else:
        data = torch.randn(BATCH, LENGTH, case.width, generator=generator, dtype=torch.float64)
    # one for all forwards that a backward takes
    moment.number = rank + step + number // case.regime.forwards
    losses = [
        F.smooth_l1_loss(tensor, torch.full_like(tensor, 0.3 + 0.1 * place))
        for place, tensor in enumerate(tensors_in(model(data)))
    ]
    return torch.stack(losses).sum()


# -- training it -----------------------------------------------------------------------------------

# eps is large so that AdamW's update is a smooth function of the gradient: no rounding becomes a
# step of ±lr.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.2}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2}),
}


def grouped(regime: Regime, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Trainable parameters as an optimizer takes them: "one" group, "dim" (weight decay for
    matrices alone, by `p.dim()`, as everybody writes it) or "halves", of which the second learns at
    half the rate."""
    if regime.groups == "dim":
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
    elif regime.groups == "halves":
        rate = OPTIMIZERS[regime.optimizer][1]["lr"]
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": rate / 2}]
    else:
        groups = [{"params": parameters}]
    return [group for group in groups if group["params"]]


@dataclass
class Trace:
    """Observations of a training.

    Attributes:
        losses: of every forward of this rank, in order.
        present: before each step, the names of the parameters that have a gradient.
        gradients: before each step, by name; empty where ranks hold only a share of them.
        parameters, buffers: at the end, in full.
    """

    losses: list[Tensor] = field(default_factory=list)
    present: list[set[str]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Invalid(Exception):
    """A case that means nothing, because one process cannot train it either."""


class OneProcess:
    """The reference: one replica per rank, gradients summed in rank order.

    Args:
        rank: whose losses and buffers are kept.
        zeros: for each step, names of parameters that get a gradient of zero where no rank has one.
    """

    def __init__(self, case: Case, world_size: int, rank: int, zeros: Sequence[Set[str]] = ()):
        self.case = case
        self.rank = rank
        self.zeros = zeros
        self.trace = Trace()
        self.modules = {each: Root(case, case.seed) for each in range(world_size)}
        # through which a rank's forward goes
        self.models: dict[int, nn.Module] = dict(self.modules)
        self.prepare()

    @property
    def first(self) -> Root:
        return next(iter(self.modules.values()))

    def prepare(self) -> None:
        """Make the optimizer."""
        trainable = [p for p in self.first.parameters() if p.requires_grad]
        if not trainable:
            raise Invalid("nothing to train")
        cls, options = OPTIMIZERS[self.case.regime.optimizer]
        self.optimizer = self.make_optimizer(cls, grouped(self.case.regime, trainable), options)
        schedule = self.case.regime.schedule
        self.scheduler = (
            torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5) if schedule else None
        )

    def make_optimizer(
        self, cls: type[Optimizer], params: list[dict[str, Any]], options: dict[str, Any]
    ) -> Optimizer:
        return cls(params, **options)

    def train(self) -> None:
        """The script that both sides follow."""
        regime = self.case.regime
        for step in range(regime.steps):
            if regime.zero == "before" or (regime.zero == "never" and step == 0):
                self.zero()
            number = 0
            if step == regime.fails:
                self.zero()
                for _ in range(regime.fails_after):
                    self.backward(step, number, synchronize=False)
                self.failing_backward(step, number)
                self.zero()
            for _ in range(regime.finishes):
                for pass_number in range(regime.micro + regime.backwards - 1):
                    between = regime.zero == "between" and number == 0
                    self.backward(
                        step,
                        number,
                        synchronize=pass_number >= regime.micro - 1,
                        zero_between=between,
                    )
                    number += regime.forwards
                if step == regime.skips:
                    break
                self.finish()
            if step == regime.skips:
                self.zero()
                continue
            self.note()
            if regime.clip:
                self.clip()
            if step == regime.freezes:
                self.freeze()
            self.step()
            if regime.zero == "after":
                self.zero()
            if step == regime.saves:
                self.save()
            if step == regime.loads:
                self.load()
            if step == regime.evaluates:
                self.evaluate(step)
            if step == regime.syncs:
                self.sync_buffers()
            if step == regime.rewraps:
                self.close()
                for module in self.modules.values():
                    module.zero_grad()
                self.prepare()
        self.end()

    def losses(self, rank: int, step: int, number: int) -> list[Tensor]:
        """Return the losses of the forwards that one backward takes together."""
        numbers = range(number, number + self.case.regime.forwards)
        moment = self.modules[rank].moment
        return [loss_of(self.models[rank], moment, self.case, rank, step, each) for each in numbers]

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(
        self, step: int, number: int, *, synchronize: bool, zero_between: bool = False
    ) -> None:
        with nullcontext() if synchronize else self.no_sync():
            losses = {rank: self.losses(rank, step, number) for rank in self.models}
            if zero_between:
                self.zero()
            for of_rank in losses.values():
                torch.stack(of_rank).sum().backward()
        self.trace.losses += [loss.detach() for loss in losses[self.rank]]

    def failing_backward(self, step: int, number: int) -> None:
        regime = self.case.regime
        for rank, module in self.modules.items():
            module.moment.raises_at = regime.fails_at
            try:
                with self.no_sync() if regime.fails_in_no_sync else nullcontext():
                    torch.stack(self.losses(rank, step, number)).sum().backward()
            except BackwardFailed:
                module.moment.raises_at = ""
            else:
                raise Invalid("the backward that should fail has nothing to fail in")
        # gradients of no use, which may be zeroed while they are being sent
        for late in Late.under_way:
            late.sent = None

    def _same(self) -> Iterator[tuple[nn.Parameter, ...]]:
        """Every parameter, as all replicas have it."""
        yield from zip(*(module.parameters() for module in self.modules.values()), strict=True)

    def finish(self) -> None:
        for same in self._same():
            present = [p.grad for p in same if p.grad is not None]
            if present:
                mean = torch.stack(present).sum(0) / len(same)
                for parameter in same:
                    parameter.grad = mean.clone()

    def note(self) -> None:
        """Keep the gradients before a step."""
        for name in self.zeros[len(self.trace.present)] if self.zeros else ():
            parameter = self.first.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        found = {
            name: p.grad.detach().clone()
            for name, p in self.first.named_parameters()
            if p.grad is not None
        }
        self.trace.present.append(set(found))
        self.trace.gradients.append(found)

    def clip(self) -> None:
        # A parameter that was frozen while it had a gradient counts, as it does in a user's loop.
        for module in self.modules.values():
            torch.nn.utils.clip_grad_norm_(module.parameters(), self.case.regime.clip)

    def freeze(self) -> None:
        """The second parameter that is trainable, so that something is left to train."""
        for module in self.modules.values():
            trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
            if len(trainable) < 2:
                raise Invalid("nothing left to train")
            trainable[1].requires_grad_(False)

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for first, *others in self._same():
            for other in others:
                other.copy_(first)

    def zero(self) -> None:
        for module in self.modules.values():
            module.zero_grad(set_to_none=self.case.regime.to_none)

    def save(self) -> None:
        states = [self.state_of(model) for model in self.models.values()]
        self.saved = states, copy.deepcopy(self.optimizer.state_dict())

    def state_of(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def load(self) -> None:
        states, optimizer = self.saved
        for model, state in zip(self.models.values(), states, strict=True):
            model.load_state_dict(state)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        model = self.models[self.rank]
        model.eval()
        self.trace.losses.append(
            loss_of(model, self.modules[self.rank].moment, self.case, self.rank, step, number=9)
        )
        model.train()

    @torch.no_grad()
    def sync_buffers(self) -> None:
        for module in self.modules.values():
            for mine, first in zip(module.buffers(), self.first.buffers(), strict=True):
                mine.copy_(first)

    def close(self) -> None:
        self.sync_buffers()  # as wrapping again does

    def full_parameters(self) -> dict[str, Tensor]:
        return dict(self.first.named_parameters())

    def end(self) -> None:
        self.trace.parameters = {name: p.detach() for name, p in self.full_parameters().items()}
        self.trace.buffers = dict(self.modules[self.rank].named_buffers())


class OnRanks(OneProcess):
    """One rank's part of a training under a strategy."""

    def __init__(self, case: Case, strategy: str, context: RankContext):
        self.case = case
        self.rank = context.rank
        self.zeros = ()
        self.trace = Trace()
        self.strategy = get_strategy(strategy)
        self.context = context
        self.modules = {context.rank: Root(case, case.seed + context.rank)}
        self.prepare()

    def prepare(self) -> None:
        group = self.context.group
        ranks = self.context.world_size
        mesh = None
        if self.strategy.takes_mesh:  # of two shard groups, where the ranks are even in number
            mesh = hybrid_mesh(group, 1 if ranks % 2 else ranks // 2)
        how = Wrapping(process_group=group, mesh=mesh, bucket_size_mb=self.case.regime.bucket_mb)
        self.wrapper = self.strategy.wrap(self.first, how)
        self.models = {self.rank: self.wrapper}
        super().prepare()
        # The memory itself: reading a parameter of ZeRO-1's would wait for it, whoever forgot to.
        self.memory = {name: parameter.data for name, parameter in self.first.named_parameters()}

    def state_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return whole parameters, and this rank's buffers, as in one process."""
        if not isinstance(model, FSDP):
            return super().state_of(model)
        state = model.full_state_dict()
        own = {name: value.clone() for name, value in self.first.named_buffers() if name in state}
        return state | own

    def make_optimizer(
        self, cls: type[Optimizer], params: list[dict[str, Any]], options: dict[str, Any]
    ) -> Optimizer:
        return self.strategy.optimizer(self.wrapper, cls, params, options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With another inside, which has ended when the backward comes."""
        with self.wrapper.no_sync():
            with self.wrapper.no_sync():
                pass
            yield

    def finish(self) -> None:
        self.wrapper.finish_gradient_synchronization()

    def note(self) -> None:
        if not self.wrapper.accumulates_shards:
            super().note()
            return
        # ZeRO-2 has freed the gradients. What stands in `.grad` has no values.
        present = {name for name, p in self.first.named_parameters() if p.grad is not None}
        self.trace.present.append(present)
        self.trace.gradients.append({})

    def clip(self) -> None:
        self.wrapper.clip_grad_norm_(self.case.regime.clip)

    def zero(self) -> None:
        by = self.optimizer if self.case.regime.zero_by == "optimizer" else self.wrapper
        by.zero_grad(set_to_none=self.case.regime.to_none)

    def sync_buffers(self) -> None:
        self.wrapper.sync_buffers()

    def close(self) -> None:
        if isinstance(self.optimizer, ZeroOptimizer):
            self.optimizer.close()
        self.wrapper.close()

    def full_parameters(self) -> dict[str, Tensor]:
        """Take them from the strategy, and compare the module that it gives back."""
        full = self.wrapper.gather_full_params() if isinstance(self.wrapper, FSDP) else {}
        self.close()
        full = full or {name: value.clone() for name, value in self.memory.items()}
        for name, parameter in self.first.named_parameters():
            assert torch.equal(full[name], parameter), f"close() changes '{name}'"
        if self.strategy.updates == "slices":  # of a gradient ranks hold the mean of a share
            self.trace.gradients.clear()
        return full


# -- collectives that arrive late ------------------------------------------------------------------


class Late:
    """A collective on copies: its result reaches the tensor that it is for when it is waited for.

    Args:
        copies: of the tensors that it was called with, in which it runs.
        target: where its result, the first of the copies, belongs. sent: what must not change
            before.
    """

    under_way: ClassVar[set["Late"]] = set()

    def __init__(self, work: Any, copies: Sequence[Tensor], target: Tensor, sent: Tensor):
        self._work = work
        self._copies = copies
        self.target = target
        self.sent = (sent, sent.detach().clone())
        self.under_way.add(self)

    def wait(self) -> None:
        if self not in self.under_way:
            return
        self.under_way.remove(self)
        self._work.wait()
        if self.sent is not None:
            now, before = map(_bits, self.sent)
            assert torch.equal(now, before), "a tensor was changed while it was being sent"
        self.target.data.copy_(self._copies[0])  # a collective does not bump the version either


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, in which a NaN equals itself."""
    return tensor.detach().view(-1).view(torch.uint8)


@contextmanager
def late_arrivals(*names: str) -> Iterator[None]:
    """Inside, nobody sees what collectives of these names bring before having waited for it, and
    what is being sent must not change.

    Usually a small message has arrived long before anybody looks, and a wait that is missing goes
    unnoticed.
    """

    def late(collective: Callable[..., Any]) -> Callable[..., Late]:
        def call(*arguments: Any, **options: Any) -> Late:
            # one that is sent and received, or that which receives and that which is sent
            *tensors, group = arguments
            copies = [tensor.detach().clone() for tensor in tensors]
            return Late(collective(*copies, group, **options), copies, tensors[0], tensors[-1])

        return call

    Late.under_way.clear()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(collectives, name, late(getattr(collectives, name))))
        yield


# -- what is compared ------------------------------------------------------------------------------


def has(case: Case, kind: str, *forms: str) -> bool:
    """Return True if there is a part of this kind, in one of these forms if any are given."""
    return any(p.kind == kind and (not forms or p.form in forms) for p in parts_of(case.body))


def tolerance(case: Case) -> float:
    """How far a value may lie from one process's, absolutely or, above 1, relatively.

    A sum in fp64 is off by 1e-16 in another order, which a norm of something small enlarges a few
    thousand times. Where fp32 follows, and in the factor of a clipped gradient, that may flip a
    rounding of 1e-7.
    """
    return 1e-5 if case.regime.clip or has(case, "around", "float32") else 1e-9


def values_of(trace: Trace) -> dict[str, Tensor]:
    """All that is compared, each with what it is called in a message."""
    found = {f"loss of forward {number}": loss for number, loss in enumerate(trace.losses)}
    for step, gradients in enumerate(trace.gradients):
        found |= {
            f"step {step}: gradient of '{name}'": gradient for name, gradient in gradients.items()
        }
    found |= {f"parameter '{name}'": value for name, value in trace.parameters.items()}
    return found | {f"buffer '{name}'": value for name, value in trace.buffers.items()}


def differences(mine: Trace, expected: Trace, allowed: float) -> Iterator[str]:
    """Yield a line for each difference from one process, of gradients that both have."""
    for step, (a, b) in enumerate(zip(mine.present, expected.present, strict=True)):
        if a != b:
            only = f"{sorted(a - b)} have, {sorted(b - a)} lack"
            yield f"step {step}: {only} a gradient, other than in one process"
    found = values_of(mine)
    for what, b in values_of(expected).items():
        if what not in found and ": gradient of " in what:
            continue
        a = found[what]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{what} is {a.dtype} {tuple(a.shape)}, should be {b.dtype} {tuple(b.shape)}"
            continue
        apart = ((a - b).abs() / b.abs().clamp(min=1)).max().item()
        if not apart <= allowed:  # also where it is NaN
            yield f"{what} differs by {apart:.2e}; allowed {allowed:.0e}"


# -- what a strategy refuses or leaves out ---------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A documented refusal: which strategies, of which cases, in which words (a regular
    expression).
    """

    strategies: tuple[str, ...]
    words: str
    of: Callable[[Case], bool]


def _used_in_several_checkpoints(case: Case) -> bool:
    shared = has(case, "around", "twice") or case.ties or case.regime.forwards > 1
    return has(case, "around", "reentrant") and bool(shared)


REFUSALS = (
    Refusal(FULLY_SHARDED, "use_reentrant=False", lambda case: has(case, "around", "reentrant")),
    Refusal(
        FULLY_SHARDED,
        "forward reads .* while its unit .* is not gathered",
        lambda case: _reads_outside_units(case),
    ),
    Refusal(
        FULLY_SHARDED,
        "requires_grad of .* changed after wrapping",
        lambda case: case.regime.freezes >= 0,
    ),
    Refusal(
        STRATEGIES[:-2], "became ready twice.*use_reentrant=False", _used_in_several_checkpoints
    ),
    Refusal(STRATEGIES[:-2], "became ready twice", lambda case: case.regime.backwards > 1),
    Refusal(
        ("zero1",),
        "was not zeroed since the last finish_gradient_synchronization",
        lambda case: case.regime.zero == "never" or case.regime.finishes > 1,
    ),
    Refusal(
        STRATEGIES,
        "was changed between backward and finish|became ready twice",
        lambda case: case.regime.skips >= 0 and not case.regime.to_none,
    ),
    # Its backward waits for buckets, and another rank has raised "became ready twice" instead.
    Refusal(
        ("zero2",),
        LOST.pattern,
        lambda case: case.regime.backwards > 1 or _used_in_several_checkpoints(case),
    ),
    Refusal(
        FULLY_SHARDED,
        "no backward has brought a matrix its gradient",
        lambda case: has(case, "idle") or has(case, "around", "detached"),
    ),
)


def is_refusal(case: Case, strategy: str, text: str) -> bool:
    """Return True if the strategy documents this error for a case like this."""
    return any(
        strategy in refusal.strategies and refusal.of(case) and re.search(refusal.words, text)
        for refusal in REFUSALS
    )


def as_allowed(case: Case, strategy: str) -> Case:
    """The case, or the nearest that lies within the strategy's contract."""
    if strategy not in FULLY_SHARDED:
        return case
    read_elsewhere = case.seed % 4 == 0  # and then refused
    body = tuple(_inside_units(part, read_elsewhere, below_list=False) for part in case.body)
    head = "tied" if case.head == "read" and not read_elsewhere else case.head
    regime = case.regime
    if regime.fails >= 0 and regime.fails_after:  # what no_sync() left, the wrapper alone can drop
        regime = replace(regime, zero_by="wrapper")
    return replace(case, body=body, head=head, regime=regime)


def _reads_outside_units(case: Case) -> bool:
    """Return True if `as_allowed` has left something that FSDP refuses."""
    return case.head == "read" or case.body != tuple(
        _inside_units(p, False, below_list=False) for p in case.body
    )


def _inside_units(part: Part, read_elsewhere: bool, *, below_list: bool) -> Part:
    """FSDP gathers a child of an `nn.ModuleList`, or a module that owns a matrix: a weight must be
    read there, and ranks must run the same of them."""
    below = below_list or (part.kind == "list" and part.form != "dict") or part.kind == "answer"
    inside = tuple(_inside_units(each, read_elsewhere, below_list=below) for each in part.inside)
    form = part.form
    if not below_list and not read_elsewhere and part.kind == "reads":
        form = "own"
    if not below_list and part.kind == "branch":
        form = ""
    return replace(part, inside=inside, form=form)


# -- cases from seeds ------------------------------------------------------------------------------


def generate(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    tokens = chance.random() < 0.4
    budget = [chance.choice((1, 2, 2, 3, 3, 4, 5, 7))]
    body = []
    while budget[0] > 0:
        body.append(_part(chance, budget, depth=0))
    linears = sum(part.kind == "linear" for part in parts_of(body))
    tied = linears >= 2 and chance.random() < 0.4
    ties = (tuple(sorted(chance.sample(range(linears), 2))),) if tied else ()
    heads = ("", "", "linear", "tied", "read") if tokens else ("", "", "linear")
    return Case(
        tuple(body),
        seed=seed,
        width=chance.choice((2, 3, 4, 4, 5, 6)),
        tokens=tokens,
        own=chance.choice(("", "", "", "matrix", "frozen-matrix", "vector")),
        head=chance.choice(heads),
        ties=ties,
        output=chance.choice(
            ("tensor", "tensor", "tensor", "tuple", "dict", "dataclass", "dict", "same")
        ),
        regime=_regime(chance),
    )


def _part(chance: random.Random, budget: list[int], depth: int) -> Part:
    """A part that takes one or more from the budget."""
    budget[0] -= 1
    if depth < 3 and chance.random() < 0.4:
        kind = chance.choice(("sequential", "list", "list", "around", "around", "answer"))
        form = chance.choice(CONTAINERS[kind])
        count = 1 if kind in ("around", "answer") else chance.choice((1, 2, 2, 3))
        inside = tuple(_part(chance, budget, depth + 1) for _ in range(count))
        return Part(kind, inside, form, frozen=chance.random() < 0.08)
    kind = chance.choice(("linear", "linear", "linear", *LEAVES))
    form = chance.choice(LEAVES[kind])
    size = chance.randint(1, 7) if kind in ("mlp", "positions", "attention") else 0
    return Part(kind, (), form, size, frozen=chance.random() < 0.12)


def _regime(chance: random.Random) -> Regime:
    def seldom(share: float, value: Any, otherwise: Any) -> Any:
        return value if chance.random() < share else otherwise

    steps = chance.choice((1, 2, 2, 3))
    some_step = chance.randrange(steps)
    saves = seldom(0.15, chance.randrange(steps), -1)
    return Regime(
        steps=steps,
        micro=chance.choice((1, 1, 2, 3)),
        forwards=seldom(0.1, 2, 1),
        backwards=seldom(0.05, 2, 1),
        finishes=seldom(0.08, 2, 1),
        zero=chance.choice(("before",) * 6 + ("between", "after", "never")),
        zero_by=chance.choice(("optimizer", "wrapper")),
        to_none=chance.random() < 0.7,
        optimizer=chance.choice(tuple(OPTIMIZERS)),
        groups=chance.choice(("one", "one", "dim", "halves")),
        schedule=chance.random() < 0.2,
        clip=seldom(0.2, chance.choice((0.05, 1.0, 100.0)), 0.0),
        fails=seldom(0.15, some_step, -1),
        fails_at=chance.choice(("early", "late")),
        fails_after=chance.choice((0, 0, 1)),
        fails_in_no_sync=chance.random() < 0.3,
        freezes=seldom(0.08, some_step, -1),
        saves=saves,
        loads=-1 if saves < 0 else chance.randrange(saves, steps),
        evaluates=seldom(0.2, chance.randrange(steps), -1),
        syncs=seldom(0.15, chance.randrange(steps), -1),
        rewraps=seldom(0.08, chance.randrange(steps), -1),
        late=chance.random() < 0.5,
        bucket_mb=chance.choice(BUCKETS_MB),
        # a step before the last: the next one forgets it
        skips=seldom(0.12, chance.randrange(steps) - 1, -1),
    )


# -- examining on ranks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How a case ended: "same", "refused", "invalid", "unstable", "differs" or "raises",
    and why.
    """

    outcome: str
    text: str = ""

    @property
    def failed(self) -> bool:
        """True if this is not as it should be."""
        return self.outcome in ("differs", "raises", "hangs or dies")


@dataclass(frozen=True)
class Job:
    """One case under one strategy; the case is what `as_allowed` made of it."""

    case: Case
    strategy: str


COLLECTIVES = ("all_reduce_mean", "broadcast", "reduce_scatter_mean", "all_gather")


def examine(
    context: RankContext, jobs: Sequence[Job], journal: str, until_failure: bool = False
) -> list[Verdict]:
    """Every job's verdict, the same on all ranks; fewer than jobs if ranks fell out of step, or one
    failed where nothing more is wanted. Rank 0 notes in the file `journal` which job it is at."""
    # verdicts must not meet what a failed case left in the other one
    own_group = torch.distributed.new_group()
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    # its first use imports torch.compile's half of torch …
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    gc.freeze()  # … through which no collection between cases need look
    journal_file = os.open(journal, os.O_WRONLY)
    verdicts: list[Verdict] = []
    for number, job in enumerate(jobs):
        # A collective that waits in vain fails after the group's timeout; what hangs otherwise ends
        # the process.
        faulthandler.dump_traceback_later(3 * context.timeout_s, exit=True)
        if context.rank == 0:
            os.pwrite(journal_file, f"{number:9d}".encode(), 0)
        mine, digest = _examine_one(context, job)
        gathered = collectives.gather_objects((mine, digest), own_group)
        verdicts.append(_together(gathered))
        outcomes = {verdict.outcome for verdict, _ in gathered}
        if outcomes == {"refused"}:  # ranks may have issued other collectives than their peers
            timeout = timedelta(seconds=context.timeout_s)
            context = replace(context, group=torch.distributed.new_group(timeout=timeout))
        elif not outcomes <= {"same", "differs", "invalid", "unstable"} or (
            until_failure and verdicts[-1].failed
        ):
            break
    faulthandler.cancel_dump_traceback_later()
    os.close(journal_file)
    return verdicts


def _together(gathered: list[tuple[Verdict, str]]) -> Verdict:
    """One verdict of all ranks: the worst."""
    order = ("raises", "differs", "refused", "invalid", "unstable", "same")
    worst = min(
        (verdict for verdict, _ in gathered), key=lambda verdict: order.index(verdict.outcome)
    )
    if worst.failed:
        # Ranks that only lost their peer come last: they do not know why.
        failed = [(r, v) for r, (v, _) in enumerate(gathered) if v.outcome == worst.outcome]
        rank, worst = min(failed, key=lambda entry: bool(LOST.search(entry[1].text)))
        return replace(worst, text=f"rank {rank}: {worst.text}")
    if (
        len(
            {verdict.outcome for verdict, _ in gathered}
            - ({"same"} if worst.outcome == "unstable" else set())
        )
        > 1
    ):
        return Verdict(
            "raises", f"ranks end differently: {[verdict.outcome for verdict, _ in gathered]}"
        )
    if len({digest for _, digest in gathered}) > 1:
        return Verdict("differs", "ranks end with different parameters")
    return worst


def _examine_one(context: RankContext, job: Job) -> tuple[Verdict, str]:
    """This rank's verdict, and a digest of the parameters at the end."""
    case, strategy = job.case, job.strategy
    expected = _trained_alone(case, context.world_size, context.rank)
    if isinstance(expected, Invalid):
        return Verdict("invalid", str(expected)), ""
    try:
        with late_arrivals(*COLLECTIVES) if case.regime.late else nullcontext():
            subject = OnRanks(case, strategy, context)
            subject.train()
    except Exception as error:
        if is_refusal(case, strategy, str(error)):
            return Verdict("refused", str(error)), ""
        return Verdict("raises", traceback.format_exc(limit=-6)), ""
    mine = subject.trace
    zeros: tuple[frozenset[str], ...] = ()
    if strategy in FULLY_SHARDED and mine.present != expected.present:
        zeros = _zeros(mine, expected)
        expected = _trained_alone(case, context.world_size, context.rank, zeros)
    found = list(differences(mine, expected, tolerance(case)))
    digest = hashlib.blake2b(digest_size=16)
    for value in mine.parameters.values():
        digest.update(_bits(value.contiguous()).numpy())
    if found and {*map(_where, found)} <= moved_by_a_nudge(case, context, zeros, expected):
        return Verdict("unstable", found[0]), digest.hexdigest()
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        return Verdict("differs", "; ".join(found[:4]) + more), digest.hexdigest()
    return Verdict("same"), digest.hexdigest()


NUDGE = 1e-14  # of each parameter; as much as sums in another order are off by


def moved_by_a_nudge(
    case: Case, context: RankContext, zeros: tuple[frozenset[str], ...], expected: Trace
) -> set[str]:
    """Return differences that are too large already when one process begins elsewhere by NUDGE.

    Only values can differ so.
    """
    nudged = OneProcess(case, context.world_size, context.rank, zeros)
    with torch.no_grad():
        for module in nudged.modules.values():
            for parameter in module.parameters():
                parameter.mul_(1 + NUDGE)
    nudged.train()
    return set(map(_where, differences(nudged.trace, expected, tolerance(case))))


def _where(difference: str) -> str:
    return difference.partition(" differs by ")[0]


@lru_cache(maxsize=16)  # the strategies of a case come one after the other
def _trained_alone(
    case: Case, world_size: int, rank: int, zeros: tuple[frozenset[str], ...] = ()
) -> Trace | Invalid:
    """Return the observations of `OneProcess`, or why one process cannot train this."""
    try:
        reference = OneProcess(case, world_size, rank, zeros)
        reference.train()
        shown = reference.trace
        if not all(
            tensor.isfinite().all() for tensor in (*shown.parameters.values(), *shown.losses)
        ):
            raise Invalid("not finite")
        return shown
    except Invalid as error:
        return error
    except Exception as error:
        return Invalid(f"one process raises {type(error).__name__}: {error}")


def _zeros(mine: Trace, expected: Trace) -> tuple[frozenset[str], ...]:
    """FSDP gives a matrix that no rank used a gradient of zero, if its unit ran: their names, step
    by step.
    """
    matrices = {name for name, value in mine.parameters.items() if value.dim() >= 2}
    return tuple(
        frozenset(a - b) & matrices for a, b in zip(mine.present, expected.present, strict=True)
    )


def run_jobs(
    jobs: Sequence[Job], ranks: int, *, seconds: float = 20.0, until_failure: bool = False
) -> Iterator[tuple[Job, Verdict]]:
    """Examine all jobs in rank processes, which are started again where a job broke them.

    Args:
        seconds: after which a collective that some rank does not join fails.
        until_failure: stop after the first failure.
    """
    left = list(jobs)
    while left:
        with tempfile.NamedTemporaryFile(prefix="fuzz-") as journal:
            try:
                deadline = 60.0 + 2 * seconds + 0.5 * len(left)
                verdicts = run_ranks(
                    examine,
                    ranks,
                    left,
                    journal.name,
                    until_failure,
                    deadline_s=deadline,
                    group_timeout_s=seconds,
                )[0]
            except RanksFailed as failure:
                at = int(Path(journal.name).read_text() or 0)
                yield left[at], Verdict("hangs or dies", str(failure))
                if until_failure:
                    return
                left = left[:at] + left[at + 1 :]
                continue
        yield from zip(left, verdicts, strict=False)
        if until_failure and verdicts and verdicts[-1].failed:
            return
        left = left[len(verdicts) :]


# -- the command -----------------------------------------------------------------------------------


def jobs_of(cases: Iterable[Case], strategies: Sequence[str]) -> list[Job]:
    """Return every case under every strategy, changed to what the strategy allows."""
    jobs = []
    for case in cases:
        for strategy in strategies:
            jobs.append(Job(as_allowed(case, strategy), strategy))
    return jobs


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.splitlines()[0])
    p.add_argument("--seeds", type=int, default=200, help="how many [200]")
    p.add_argument("--first", type=int, default=0, help="the first of them [0]")
    p.add_argument("--case", help="this case, as it was printed, instead of seeds")
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="numbers of ranks [2 3]")
    p.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="which [all]"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; 1 if one fails."""
    args = parser().parse_args(argv)
    cases = map(generate, range(args.first, args.first + args.seeds))
    if args.case:
        cases = [eval(args.case, {"Case": Case, "Part": Part, "Regime": Regime})]
    jobs = jobs_of(cases, args.strategies)
    counts: Counter[tuple[str, str]] = Counter()
    failures, begin = 0, time.monotonic()
    for ranks in args.ranks:
        for start in range(0, len(jobs), 500):
            for job, verdict in run_jobs(jobs[start : start + 500], ranks):
                counts[job.strategy, verdict.outcome] += 1
                if verdict.failed:
                    failures += 1
                    report(job, verdict, ranks)
                if failures >= MOST_FAILURES:
                    return _summary(counts, failures, begin)
            done = f"{ranks} ranks: {min(start + 500, len(jobs))} of {len(jobs)} cases"
            print(f"{done}, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return _summary(counts, failures, begin)


def report(job: Job, verdict: Verdict, ranks: int) -> None:
    """Print a failing case, and how to see it again."""
    print(
        f"\nseed {job.case.seed}, {job.strategy}, {ranks} ranks: {verdict.outcome}: {verdict.text}"
    )
    again = f"python -m tests.fuzz --strategies {job.strategy} --ranks {ranks}"
    print(f"  again: {again} --first {job.case.seed} --seeds 1")
    print(f'  to shorten by hand: {again} --case "{job.case}"', flush=True)


def _summary(counts: Counter[tuple[str, str]], failures: int, begin: float) -> int:
    for (strategy, outcome), count in sorted(counts.items()):
        print(f"{strategy:18} {count} {outcome}")
    print(f"{counts.total()} cases in {time.monotonic() - begin:.0f} s: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
