"""Compare a training step on several ranks with the same micro-batches in one process, and name what differs.

    verdict = check(context, task, strategy)        # on every rank
    verdict.right, print(verdict)

Ranks draw different weights and different batches, and train two steps by plain SGD. The module's gradients are read
after each step's synchronisation, its parameters and buffers at the end. Rank 0 trains a copy in one process, keeps the
gradient of every micro-batch of every rank, and asks of each tensor that differs which known mistake would give exactly
these values: its signature.

A tensor is right if it differs by at most `SLACK · (ranks + micro-batches) · eps · largest summand`. Each of the
additions and divisions of a mean rounds by at most eps / 2 of a partial sum, in whatever order they are made; `SLACK`
leaves room for matmuls that a wrapper cuts, whose sums are made in another order, too.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.bench.task import Task, blamed, examined, factory_of, own_task
from distlab.comm import RankContext, collectives
from distlab.comm.rank_process import is_lost_peer, on_main
from distlab.parallel import ParallelModel, Strategy, get_strategy
from distlab.parallel.shard import plain_name
from distlab.train.step import TrainStep

Tensors = dict[str, Tensor]
STEPS = 2
SLACK = 32
ROWS = 20  # of a verdict's table
# Signatures. P stands for the ranks, M for the micro-batches of a rank and step.
NOT_BROADCAST = "ranks start from different values: not broadcast"
SUMMED = "× P: summed over ranks, not averaged"
DIVIDED = "× 1/P: divided twice, or a sum is missing"
OWN = "each rank's own: never reduced"
OWN_DIVIDED = "each rank's own / P: divided, never summed"
ONE_RANK = "one rank's own gradient on every rank"
MICRO_SUMMED = "× M: not divided by the micro-batches"
MICRO_DIVIDED = "× 1/M: divided by the micro-batches twice"
FIRST, LAST = "only the first micro-batch", "only the last micro-batch"
PREVIOUS = "the previous step's gradient"
TIED = "a tied weight counted twice"
PART = "ranks differ and add up to the right one: a sum is missing"
SHARE = "ranks differ and their mean is right: not averaged"
SEQUENCE = ", in vectors only, as where a rank has a part of the sequence"
ROUNDED = "within the rounding of bf16: reduced in half precision"
OTHER_TENSOR = "mixed with another tensor's: sent in another order"
ABSENT = "zero, or none, on some rank"
APART = "ranks differ from one another"
NOT_A_NUMBER = "not a number, and a number in one process"
UNKNOWN = "the same on all ranks, and no known mistake"
STALE = "right in step 1, not in step 2: weights of before the step"
NOT_SENT = "gradients are right, and ranks differ after the step: update not sent"
STEPPED_WRONG = "gradients are right, the value after the step is not"
BUFFER = "differs from the buffer in one process"


@dataclass(frozen=True)
class Finding:
    """A tensor that differs.

    Attributes:
        tensor: its name in the module.
        what: `initial value`, `gradient`, `value` (after the last step) or `buffer`.
        step: from 1 on; 0 before the first.
        error: largest |Δ| over ranks and elements, relative to the largest element in one process.
        signature: which mistake gives these values.
    """

    tensor: str
    what: str
    step: int
    error: float
    signature: str


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        ranks, micro_batches: of each step.
        tensors: how many parameters were compared.
        findings: those that differ.
        loss, expected_loss: of the last step, mean over ranks; on ranks and in one process.
    """

    ranks: int
    micro_batches: int
    tensors: int
    findings: tuple[Finding, ...]
    loss: float
    expected_loss: float

    @property
    def right(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Fields and `right`, for JSON."""
        return asdict(self) | {"right": self.right}

    def __str__(self) -> str:
        wrong = len({finding.tensor for finding in self.findings})
        rows = [(*astuple(finding)[:3], f"{finding.error:.1e}", finding.signature) for finding in self.findings[:ROWS]]
        table = tabulate(rows, ("tensor", "differs in", "step", "max |Δ|", "signature"), disable_numparse=True)
        return (
            f"{'WRONG' if wrong else 'right'}: {self.tensors - wrong} of {self.tensors} tensors as in one process "
            f"({self.ranks} ranks × {self.micro_batches} micro-batches, {STEPS} steps)\n"
            + (f"\n{table}\n" if rows else "")
            + (f"and {len(self.findings) - ROWS} more\n" if len(self.findings) > ROWS else "")
            + f"\nloss of step {STEPS}: {self.loss:.6g}, in one process {self.expected_loss:.6g}; right is within "
            f"{SLACK * (self.ranks + self.micro_batches)} eps of the largest summand"
        )


def check(
    context: RankContext,
    task: Task,
    strategy: Strategy,
    *,
    candidate: Task | None = None,
    same_batch: bool = False,
    seed: int = 0,
) -> Verdict:
    """Train two steps on all ranks and in one process and compare them; call it on every rank.

    Args:
        candidate: what the ranks train, where it is to be held against `task`.
        same_batch: ranks get the same batches, as ranks do that share a model's layers or a sequence.

    Returns:
        The verdict, the same on every rank.

    Raises:
        ValueError: fewer than two ranks; a model that is random or not a number in one process; an error in forward,
            backward, step or wrapper, with its place.
        TimeoutError: a rank waited in a collective that not every rank calls.
    """
    if context.world_size < 2:
        raise ValueError("one rank has nobody to disagree with: give --nproc 2 or more")
    micro_batches = context.world_size + 1  # so that factors of both can be told apart
    # Messages of the check's own, which cannot meet those of a wrapper that some ranks do not send.
    own = replace(context, group=dist.new_group(timeout=timedelta(seconds=context.timeout_s)))

    def batches(rank: int, step: int, source: Task) -> list[Any]:
        first = step * micro_batches
        rank = 0 if same_batch else rank
        parts = [source.batches(rank, number, context.device) for number in range(first, first + micro_batches)]
        return [batch for part in parts for batch in part]

    on_main(own, lambda: _refuse_random(task, batches(0, 0, task), seed, context.device))
    with _explained(strategy.name, context.timeout_s):
        trained = _train(own, context.group, candidate or task, strategy, batches, seed)
    everyone = collectives.gather_objects(trained, own.group)

    def judged() -> Verdict:
        of_ranks = [[batches(rank, step, task) for rank in range(context.world_size)] for step in range(STEPS)]
        reference = _Reference(task, everyone[0].initial, of_ranks, seed, context.device)
        loss = sum(rank.loss for rank in everyone) / len(everyone)
        findings = _findings(everyone, reference)
        return Verdict(
            len(everyone), len(of_ranks[0][0]), len(reference.trainable), tuple(findings), loss, reference.loss
        )

    verdict = on_main(own, judged)
    dist.destroy_process_group(own.group)
    return verdict


def on_rank(
    context: RankContext, model: str, wrap: str, *, batch: int = 4, same_batch: bool = False, seed: int = 0
) -> Verdict:
    """Check a user's model, named `package.module:function`, under a wrapper so named or a strategy of ours.

    Raises:
        ValueError, TimeoutError: see `check`; also for a factory that fails or returns something else.
    """
    task = own_task(model, batch, seed)
    examined(model, task, context, seed)
    strategy = wrapped_by(wrap) if ":" in wrap else get_strategy(wrap)
    return check(context, task, strategy, same_batch=same_batch, seed=seed)


# -- on ranks ----------------------------------------------------------------------------------------------


class UserWrapper(ParallelModel):
    """A module under a wrapper of the user's own.

    Args:
        module: what is trained.
        wrap: `wrap(module, group)` → a callable, or (callable, finish). It changes the module in place or keeps it.
    """

    def __init__(self, module: nn.Module, wrap: Callable[..., Any], group: ProcessGroup):
        super().__init__()
        self.module, self.process_group = module, group
        self.device = next(module.parameters()).device
        made = wrap(module, group)
        self._call, self._finish = made if isinstance(made, tuple) else (made, lambda: None)
        if not callable(self._call) or not callable(self._finish):
            raise ValueError("the wrapper must return a callable module, or (callable module, finish)")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the wrapper's own `no_sync()`; without one, every micro-batch synchronises."""
        return getattr(self._call, "no_sync", nullcontext)()

    def finish_gradient_synchronization(self) -> None:
        self._finish()

    def full_parameters(self) -> dict[str, Tensor]:
        """See `ParallelModel.full_parameters`."""
        return {name: whole_tensor(p).detach() for name, p in self.module.named_parameters()}


def wrapped_by(name: str) -> Strategy:
    """Return a user's wrapper, named `package.module:function`, as a strategy.

    Raises:
        ValueError: there is no such function.
    """
    wrap = factory_of(name, "--wrap")
    return Strategy(name, lambda module, process_group: UserWrapper(module, wrap, process_group))


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's whole, by a collective; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True)
class _Trained:
    """What one rank had: whole tensors by name, put together from all ranks where they are sharded."""

    initial: Tensors  # parameters and buffers
    gradients: list[Tensors]  # of each step
    final: Tensors
    loss: float


def _train(
    own: RankContext,
    group: ProcessGroup,
    task: Task,
    strategy: Strategy,
    batches: Callable[[int, int, Task], list[Any]],
    seed: int,
) -> _Trained:
    module = task.build(seed + own.rank, own.device)
    size_mb = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20 / 4  # at least four buckets
    model, optimizer = strategy.build(module, group, torch.optim.SGD, {"lr": task.lr}, bucket_size_mb=size_mb)
    initial = _copies(model.full_parameters(), module)
    gradients = []

    def keep(phase: str) -> None:
        if phase == "forward_backward":
            gradients.append(_whole_gradients(model, own.group))

    train = TrainStep(model, optimizer, task.loss_fn, mark=keep)
    losses = [train(batches(own.rank, step, task)) for step in range(STEPS)]
    final = _copies(model.full_parameters(), module)
    model.close(restore=False)
    return _Trained(initial, gradients, final, losses[-1].item())


@torch.no_grad()
def _whole_gradients(model: ParallelModel, group: ProcessGroup) -> Tensors:
    """Every trainable parameter's gradient on this rank, and of sharded ones the whole, from all ranks."""
    model.gradients()  # under ZeRO-1, lets shards have their gradients
    whole, trained = {}, False
    parts = {}  # name → (first element, values); a rank may have no element of a parameter
    for shard in model.shards():
        tensor, name = shard.tensor, _plain(shard.name)
        if not tensor.requires_grad:
            continue
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if shard.replicated or hasattr(tensor, "full_tensor"):
            whole[name] = whole_tensor(gradient).cpu().clone()
        else:
            whole[name] = torch.zeros(shard.shape, dtype=gradient.dtype)
            parts[name] = (shard.start, shard.like(name, gradient).values.cpu().clone())
        trained = trained or tensor.grad is not None
    everyone = collectives.gather_objects((trained, parts), group)
    if not any(trained for trained, _ in everyone):
        raise ValueError("no parameter of the module got a gradient: a wrapper must train the module it is given")
    for _, of_rank in everyone:
        for name, (start, values) in of_rank.items():
            whole[name].view(-1)[start : start + len(values)] = values
    return whole


def _plain(name: str) -> str:
    """The name in the bare module, without what compilation and checkpointing put into it."""
    return plain_name(name).replace("_checkpoint_wrapped_module.", "")


def _copies(parameters: Tensors, module: nn.Module) -> Tensors:
    """Copies of parameters and of the module's buffers."""
    together = parameters | dict(module.named_buffers())
    return {_plain(name): tensor.detach().cpu().clone() for name, tensor in together.items()}


@contextmanager
def _explained(name: str, timeout_s: float) -> Iterator[None]:
    """Turn an error on this rank into one sentence."""
    try:
        with blamed(name, "the training step", "under"):
            yield
    except ValueError as error:
        if error.__cause__ is None or not is_lost_peer(error.__cause__):
            raise
        raise TimeoutError(
            f"under {name}, a rank waited {timeout_s:g} s (--timeout) in a collective that the others did not join: "
            "every rank must make the same calls in the same order"
        ) from error


# -- in one process ----------------------------------------------------------------------------------------


class _Reference:
    """Training in one process, from the values that ranks began with, with the buffers of each rank.

    Attributes:
        trainable: its parameters, after the last step.
        tied: names of those that the module has under several.
        parts: of each step, every micro-batch's gradients `(ranks, micro-batches, *shape)`, divided by the
            micro-batches.
        buffers: of each rank, after the last step.
        loss: of the last step.
        lr: of its steps.
    """

    def __init__(
        self, task: Task, initial: Tensors, steps: Sequence[Sequence[Sequence[Any]]], seed: int, device: torch.device
    ):
        module, self.lr, self.parts = task.build(seed, device), task.lr, []
        for name, parameter in module.named_parameters():
            if name not in initial or initial[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} is not there, or has another shape, under the wrapper: only whole parameters and DTensors "
                    "can be compared"
                )
            parameter.data.copy_(initial[name])
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}
        names = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        self.tied = {name for name, parameter in self.trainable.items() if names[id(parameter)] > 1}
        self.buffers = [initial] * len(steps[0])
        for number, step in enumerate(steps, start=1):
            losses, shape = [], (len(step), len(step[0]))
            parts = {name: torch.zeros(*shape, *p.shape, dtype=p.dtype) for name, p in self.trainable.items()}
            self.parts.append(parts)
            for rank, micro in product(*map(range, shape)):
                for name, buffer in module.named_buffers() if micro == 0 else ():
                    buffer.copy_(self.buffers[rank][name])
                for parameter in self.trainable.values():
                    parameter.grad = torch.zeros_like(parameter)
                loss = task.loss_fn(module, step[rank][micro]) / shape[1]
                loss.backward()
                losses.append(loss.item())
                for name, parameter in self.trainable.items():
                    parts[name][rank, micro] = parameter.grad
                self.buffers[rank] = _copies({}, module)
            self.loss = sum(losses) / len(step)
            for name, parameter in self.trainable.items():
                parameter.data -= task.lr * self.mean(number, name).to(device)

    def mean(self, step: int, name: str) -> Tensor:
        """The right gradient of a step, from 1 on."""
        return self.parts[step - 1][name].sum(1).mean(0)

    def tolerance(self, step: int, name: str) -> float:
        """How far two right gradients may lie apart, see the module."""
        parts = self.parts[step - 1][name]
        return SLACK * sum(parts.shape[:2]) * torch.finfo(parts.dtype).eps * parts.abs().max().item()


def _refuse_random(task: Task, batches: Sequence[Any], seed: int, device: torch.device) -> None:
    """Raise ValueError if the same weights and batch give two losses."""
    with torch.no_grad():
        first, second = (task.loss_fn(task.build(seed, device), batches[0]).item() for _ in range(2))
    if abs(first - second) > 1e-6 * abs(first):
        raise ValueError(
            f"the model is random in forward: one batch and the same weights gave the losses {first:.6g} and "
            f"{second:.6g}; draw from torch's generator, which is seeded before each batch, or call random.seed(0) or "
            "numpy.random.seed(0) in loss(model, batch)"
        )


# -- what differs, and why -----------------------------------------------------------------------------------


def _findings(ranks: Sequence[_Trained], reference: _Reference) -> list[Finding]:
    """Name what differs, by its earliest evidence: later steps follow from a wrong one."""
    starts = {name: torch.stack([rank.initial[name] for rank in ranks]) for name in ranks[0].initial}
    started = [
        Finding(name, "initial value", 0, _error(each, each[0]), NOT_BROADCAST)
        for name, each in starts.items()
        if not torch.equal(each, each[:1].expand_as(each))
    ]
    gradients = started or _gradients(1, ranks, reference)
    return gradients or _second_step(ranks, reference) or _buffers(ranks[0], reference)


def _gradients(step: int, ranks: Sequence[_Trained], reference: _Reference) -> list[Finding]:
    """The gradients of a step that differ; which tensors do may tell more than their values."""
    found = {
        name: torch.stack([rank.gradients[step - 1][name] for rank in ranks]) for name in reference.trainable
    }
    named = {name: _signature(step, name, found, reference) for name in found}
    wrong = {name for name, signature in named.items() if signature is not None}
    vectors = {name for name, parameter in reference.trainable.items() if parameter.ndim < 2}
    findings = []
    for name, signature in named.items():
        if signature is None:
            continue
        if signature == SUMMED and wrong <= reference.tied < found.keys():
            signature = TIED
        elif signature in (PART, SHARE) and wrong <= vectors < found.keys():
            signature += SEQUENCE
        elif step == 1:
            late = torch.stack([rank.gradients[1][name] for rank in ranks])
            if _near(late, reference.mean(1, name), reference.tolerance(1, name)):
                signature = PREVIOUS
        findings.append(Finding(name, "gradient", step, _error(found[name], reference.mean(step, name)), signature))
    return findings


def _second_step(ranks: Sequence[_Trained], reference: _Reference) -> list[Finding]:
    """What differs after a first step whose gradients were right: in the second one, or in the update."""
    gradients = _gradients(2, ranks, reference)
    if any(finding.signature not in (ROUNDED, APART, UNKNOWN) for finding in gradients):
        return gradients
    values = []
    for name, parameter in reference.trainable.items():
        after, right = torch.stack([rank.final[name] for rank in ranks]), parameter.detach().cpu()
        bound = SLACK * torch.finfo(right.dtype).eps * right.abs().max().item()
        bound += STEPS * reference.lr * reference.tolerance(2, name)
        if not _near(after, right, bound):
            signature = STEPPED_WRONG if _near(after, after[0], bound) else NOT_SENT
            values.append(Finding(name, "value", STEPS, _error(after, right), signature))
    not_sent = [finding for finding in values if finding.signature == NOT_SENT]
    return not_sent or [replace(finding, signature=STALE) for finding in gradients] or values


def _buffers(rank: _Trained, reference: _Reference) -> list[Finding]:
    """Compare rank 0's: its own batches update them under every wrapper that does not average them."""
    pairs = {name: (rank.final[name].double(), right.double()) for name, right in reference.buffers[0].items()}
    return [
        Finding(name, "buffer", STEPS, _error(*pair), BUFFER)
        for name, pair in pairs.items()
        if not torch.allclose(*pair, rtol=1e-5, atol=1e-6)
    ]


def _signature(step: int, name: str, found: Tensors, reference: _Reference) -> str | None:
    """Which mistake gives a gradient, `found[name]` with one of each rank; None if they are right.

    Raises:
        ValueError: it is not a number in one process either.
    """
    seen, parts = found[name], reference.parts[step - 1][name]
    mean, tolerance = reference.mean(step, name), reference.tolerance(step, name)
    ranks, micro_batches = parts.shape[:2]
    if not mean.isfinite().all():
        raise ValueError(f"the gradient of {name} is not a number in one process either: there is nothing to compare")
    if _near(seen, mean, tolerance):
        return None
    if not seen.isfinite().all():
        return NOT_A_NUMBER
    own = parts.sum(1)
    alike = [other for other in found if found[other].shape == seen.shape]
    mistakes = {  # in the order in which they are asked for
        SUMMED: (seen, ranks * mean),
        DIVIDED: (seen, mean / ranks),
        OWN: (seen, own),
        OWN_DIVIDED: (seen, own / ranks),
        MICRO_SUMMED: (seen, micro_batches * mean),
        MICRO_DIVIDED: (seen, mean / micro_batches),
        FIRST: (seen, parts[:, 0].mean(0)),
        LAST: (seen, parts[:, -1].mean(0)),
        PART: (seen.sum(0), mean),
        SHARE: (seen.mean(0), mean),
        # Whatever a rank took for which, the means of all of them have come.
        OTHER_TENSOR: (sum(found[other] for other in alike), sum(reference.mean(step, other) for other in alike)),
    }
    tolerance *= micro_batches  # the largest factor
    for signature, (value, right) in mistakes.items():
        if _near(value, right, tolerance):
            return signature
    if not all(each.any() for each in seen):
        return ABSENT
    if any(_near(seen, each, tolerance) for each in own):
        return ONE_RANK
    if not _near(seen, seen[0], tolerance):
        return APART
    rounding = ranks * torch.finfo(torch.bfloat16).eps * own.abs().mean(0)  # P on the way in, as many in the sum
    return ROUNDED if _near(seen, mean, rounding + tolerance) else UNKNOWN


def _near(found: Tensor, right: Tensor, tolerance: float | Tensor) -> bool:
    return bool(((found - right).abs() <= tolerance).all())


def _error(found: Tensor, right: Tensor) -> float:
    """Largest |Δ| over ranks and elements, relative to the largest element."""
    return ((found - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()
