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

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.bench.task import Task, blamed, examined, own_task, whole_tensor, wrapped_by
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
SCALED = "× {:.4g}: scaled alike everywhere"
ROUNDED = "within the rounding of bf16: reduced in half precision"
OTHER_TENSOR = "mixed with another tensor's: sent in another order"
ABSENT = "no gradient on some rank"
NOT_A_NUMBER = "not a number, and a number in one process"
APART = "ranks differ from one another"
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
        tensors: how many parameters and buffers were compared.
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
        lines = [
            f"{'WRONG' if wrong else 'right'}: {self.tensors - wrong} of {self.tensors} tensors as in one process "
            f"({self.ranks} ranks × {self.micro_batches} micro-batches, {STEPS} steps)"
        ]
        rows = [
            (each.tensor, each.what, each.step, f"{each.error:.1e}", each.signature) for each in self.findings[:ROWS]
        ]
        if rows:
            titles = ("tensor", "differs in", "step", "max |Δ|", "signature")
            lines += ["", tabulate(rows, titles, disable_numparse=True)]
        if len(self.findings) > ROWS:
            lines.append(f"and {len(self.findings) - ROWS} more")
        difference = abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1e-30)
        lines += ["", f"loss of step {STEPS}: {self.loss:.6g}, in one process {self.expected_loss:.6g} "
                      f"({100 * difference:.2g} % apart)"]  # fmt: skip
        bound = SLACK * (self.ranks + self.micro_batches)
        lines.append(f"right is within {bound} eps of the largest summand: sums in another order round otherwise")
        return "\n".join(lines)


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
        reference = _Reference(task, everyone[0].initial, seed, context)
        expected = [reference.step([batches(r, s, task) for r in range(context.world_size)]) for s in range(STEPS)]
        findings = _findings(everyone, expected, reference)
        losses = sum(rank.loss for rank in everyone) / len(everyone)
        count = len(reference.trainable) + len(reference.buffers[0])
        return Verdict(len(everyone), len(batches(0, 0, task)), count, tuple(findings), losses, expected[-1].loss)

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


@dataclass(frozen=True)
class _Trained:
    """What one rank had: whole tensors by name, put together from all ranks where they are sharded."""

    initial: Tensors  # parameters and buffers
    gradients: list[dict[str, Tensor | None]]  # of each step
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
    gradients: list[dict[str, Tensor | None]] = []

    def keep(phase: str) -> None:
        if phase == "forward_backward":
            gradients.append(_whole_gradients(model, own.group))

    train = TrainStep(model, optimizer, task.loss_fn, mark=keep)
    losses = [train(batches(own.rank, step, task)) for step in range(STEPS)]
    final = _copies(model.full_parameters(), module)
    model.close(restore=False)
    return _Trained(initial, gradients, final, losses[-1].item())


@torch.no_grad()
def _whole_gradients(model: ParallelModel, group: ProcessGroup) -> dict[str, Tensor | None]:
    """Every trainable parameter's gradient on this rank, and of sharded ones the whole, from all ranks."""
    model.gradients()  # under ZeRO-1, lets shards have their gradients
    found: dict[str, Tensor | None] = {}
    sharded: dict[str, tuple[int, Tensor]] = {}  # a rank may have no element of a parameter
    shapes = {}
    for shard in model.shards():
        gradient, name = shard.tensor.grad, _plain(shard.name)
        if not shard.tensor.requires_grad:
            continue
        found[name] = None
        if not shard.replicated and not hasattr(shard.tensor, "full_tensor"):
            shapes[name] = shard.shape
            if gradient is not None:
                sharded[name] = (shard.start, shard.like(name, gradient).values.cpu().clone())
        elif gradient is not None:
            found[name] = whole_tensor(gradient).cpu().clone()
    for part in collectives.gather_objects(sharded, group):
        for name, (start, values) in part.items():
            if found[name] is None:
                found[name] = values.new_zeros(shapes[name])
            found[name].view(-1)[start : start + len(values)] = values
    if all(gradient is None for gradient in found.values()):
        raise ValueError("no parameter of the module got a gradient: a wrapper must train the module it is given")
    return found


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


@dataclass(frozen=True)
class _Expected:
    """One step in one process: `parts[rank][micro-batch]`, each gradient divided by the micro-batches."""

    parts: list[list[Tensors]]
    loss: float

    def own(self, rank: int, name: str) -> Tensor:
        return sum(part[name] for part in self.parts[rank])

    def mean(self, name: str) -> Tensor:
        return sum(self.own(rank, name) for rank in range(len(self.parts))) / len(self.parts)

    def tolerance(self, name: str) -> float:
        """How far two right gradients may lie apart, see the module."""
        summands = [part[name] for parts in self.parts for part in parts]
        eps = torch.finfo(summands[0].dtype).eps
        largest = max(each.abs().max().item() for each in summands if each.numel())
        return SLACK * (len(self.parts) + len(self.parts[0])) * eps * largest


class _Reference:
    """The model in one process, from the values that ranks began with, with the buffers of each rank."""

    def __init__(self, task: Task, initial: Tensors, seed: int, context: RankContext):
        self.task, self.module = task, task.build(seed, context.device)
        self.trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        for name, parameter in self.module.named_parameters():
            if name not in initial or initial[name].shape != parameter.shape:
                found = f"has shape {tuple(initial[name].shape)}" if name in initial else "is not there"
                raise ValueError(
                    f"{name} {found} under the wrapper: only whole parameters and DTensors can be compared"
                )
            parameter.data.copy_(initial[name])
        buffers = {name: initial[name] for name, _ in self.module.named_buffers()}
        self.buffers = [buffers] * context.world_size
        names = Counter(id(parameter) for _, parameter in self.module.named_parameters(remove_duplicate=False))
        self.tied = {name for name, parameter in self.trainable.items() if names[id(parameter)] > 1}
        self.optimizer = torch.optim.SGD(self.trainable.values(), lr=task.lr)

    def step(self, batches: Sequence[Sequence[Any]]) -> _Expected:
        parts, losses = [], []
        for rank, own in enumerate(batches):
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self.buffers[rank][name])
            parts.append([])
            for batch in own:
                self.module.zero_grad(set_to_none=True)
                loss = self.task.loss_fn(self.module, batch) / len(own)
                loss.backward()
                losses.append(loss.item())
                gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad
                             for name, p in self.trainable.items()}  # fmt: skip
                parts[-1].append({name: gradient.cpu() for name, gradient in gradients.items()})
            self.buffers[rank] = _copies({}, self.module)
        expected = _Expected(parts, sum(losses) / len(batches))
        for name, parameter in self.trainable.items():
            parameter.grad = expected.mean(name).to(parameter.device)
        self.optimizer.step()
        return expected


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


def _findings(ranks: Sequence[_Trained], expected: Sequence[_Expected], reference: _Reference) -> list[Finding]:
    """Name what differs, by its earliest evidence: later steps follow from a wrong one."""
    starts = {name: [rank.initial[name] for rank in ranks] for name in ranks[0].initial}
    started = [
        Finding(name, "initial value", 0, _error(each, each[0]), NOT_BROADCAST)
        for name, each in starts.items()
        if not all(torch.equal(value, each[0]) for value in each)
    ]
    if started:
        return started
    found = _gradients(1, ranks, expected, reference) or _second_step(ranks, expected, reference)
    return _told_apart(found, reference) or _buffers(ranks[0], reference)


def _gradients(
    step: int, ranks: Sequence[_Trained], expected: Sequence[_Expected], reference: _Reference
) -> list[Finding]:
    """The gradients of a step that differ."""
    found = []
    for name in reference.trainable:
        first, own = ([rank.gradients[number][name] for rank in ranks] for number in (-1, step - 1))
        signature = _signature(name, own, expected[step - 1], reference, rounding=step == 1)
        if signature is None:
            continue
        if step == 1 and _signature(name, first, expected[0], reference) is None:
            signature = PREVIOUS
        found.append(Finding(name, "gradient", step, _error(own, expected[step - 1].mean(name)), signature))
    return found


def _second_step(
    ranks: Sequence[_Trained], expected: Sequence[_Expected], reference: _Reference
) -> list[Finding]:
    """What differs after a first step whose gradients were right: in the second one, or in the update."""
    found = _gradients(2, ranks, expected, reference)
    if any(finding.signature not in (APART, UNKNOWN) for finding in found):
        return found
    values = []
    for name, parameter in reference.trainable.items():
        after, right = [rank.final[name] for rank in ranks], parameter.detach().cpu()
        bound = SLACK * torch.finfo(right.dtype).eps * right.abs().max().item()
        bound += STEPS * reference.task.lr * expected[1].tolerance(name)
        if not all(_near(value, right, bound) for value in after):
            alike = all(_near(value, after[0], bound) for value in after)
            signature = STEPPED_WRONG if alike else NOT_SENT
            values.append(Finding(name, "value", STEPS, _error(after, right), signature))
    not_sent = [finding for finding in values if finding.signature == NOT_SENT]
    return not_sent or [replace(finding, signature=STALE) for finding in found] or values


def _buffers(rank: _Trained, reference: _Reference) -> list[Finding]:
    """Compare rank 0's: its own batches update them under every wrapper that does not average them."""
    return [
        Finding(name, "buffer", STEPS, _error([rank.final[name]], right), BUFFER)
        for name, right in reference.buffers[0].items()
        if not _near(rank.final[name], right, 1e-5 * right.abs().max().item() if right.numel() else 0)
    ]


def _signature(
    name: str, found: Sequence[Tensor | None], expected: _Expected, reference: _Reference, *, rounding: bool = True
) -> str | None:
    """Which mistake gives these gradients, one of each rank; None if they are right.

    Raises:
        ValueError: they are not numbers in one process either.
    """
    mean, tolerance = expected.mean(name), expected.tolerance(name)
    ranks, micro_batches = len(expected.parts), len(expected.parts[0])
    if not mean.isfinite().all():
        raise ValueError(f"the gradient of {name} is not a number in one process either: there is nothing to compare")
    if any(each is None for each in found):
        return None if _near(mean, torch.zeros_like(mean), tolerance) else ABSENT
    found = [each.to(mean.dtype) for each in found]
    if not all(each.isfinite().all() for each in found):
        return NOT_A_NUMBER

    def gives(values: Sequence[Tensor], factor: float = 1.0) -> bool:
        bound = tolerance * max(1.0, factor)
        return all(_near(f, factor * v, bound) for f, v in zip(found, values, strict=True))

    alike, own = [mean] * ranks, [expected.own(rank, name) for rank in range(ranks)]
    if gives(alike):
        return None
    nth = [sum(parts[number][name] for parts in expected.parts) / ranks for number in (0, -1)]
    candidates = [
        (SUMMED, alike, ranks), (DIVIDED, alike, 1 / ranks), (OWN, own, 1), (OWN_DIVIDED, own, 1 / ranks),
        *((ONE_RANK, [each] * ranks, 1) for each in own),
        (MICRO_SUMMED, alike, micro_batches), (MICRO_DIVIDED, alike, 1 / micro_batches),
        (FIRST, [nth[0]] * ranks, 1), (LAST, [nth[1]] * ranks, 1),
    ]  # fmt: skip
    if name in reference.tied:
        candidates.append((TIED, alike, 2))
    for signature, values, factor in candidates:
        if gives(values, factor):
            return signature
    apart = not all(_near(each, found[0], tolerance) for each in found)
    if apart and _near(sum(found), mean, ranks * tolerance):
        return PART
    if apart and _near(sum(found) / ranks, mean, tolerance):
        return SHARE
    factor = ((found[0] * mean).sum() / (mean * mean).sum()).item()
    if factor and gives(alike, factor):
        return SCALED.format(factor)
    if rounding and not apart:  # P roundings on the way in, as many in the sum
        size = sum(each.abs() for each in own) / ranks
        if ((found[0] - mean).abs() <= ranks * torch.finfo(torch.bfloat16).eps * size + tolerance).all():
            return ROUNDED
    if _is_mixed(name, found, expected, reference):
        return OTHER_TENSOR
    return APART if apart else UNKNOWN


def _is_mixed(name: str, found: Sequence[Tensor], expected: _Expected, reference: _Reference) -> bool:
    """Whether each rank's gradient is a mean in which some ranks sent one other tensor of this shape instead."""
    ranks, shape = len(found), found[0].shape
    others = [each for each, parameter in reference.trainable.items() if parameter.shape == shape and each != name]
    for other in others:
        choices = list(product((name, other), repeat=ranks))
        means = [sum(expected.own(rank, sent) for rank, sent in enumerate(choice)) / ranks for choice in choices]
        bound = max(expected.tolerance(name), expected.tolerance(other))
        if all(any(_near(each, mean, bound) for mean in means) for each in found):
            return True
    return False


def _told_apart(found: list[Finding], reference: _Reference) -> list[Finding]:
    """Refine signatures by which tensors have them: tied weights alone, or vectors alone."""
    summed = {finding.tensor for finding in found if finding.signature == SUMMED}
    if summed and summed <= reference.tied < reference.trainable.keys():
        found = [replace(each, signature=TIED) if each.tensor in summed else each for each in found]
    parts = {finding.tensor for finding in found if finding.signature in (PART, SHARE)}
    vectors = {name for name, parameter in reference.trainable.items() if parameter.ndim < 2}
    if parts and parts <= vectors < reference.trainable.keys():
        found = [replace(each, signature=each.signature + SEQUENCE) if each.tensor in parts else each for each in found]
    return found


def _near(found: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool(((found - right).abs() <= tolerance).all()) if found.is_floating_point() else torch.equal(found, right)


def _error(found: Sequence[Tensor | None], right: Tensor) -> float:
    """Largest |Δ| relative to the largest element; an absent gradient counts as zeros."""
    right = right.double()
    differences = [(right if each is None else each.double() - right).abs() for each in found]
    largest = max((each.max().item() for each in differences if each.numel()), default=0.0)
    return largest / max(right.abs().max().item() if right.numel() else 0.0, 1e-30)
