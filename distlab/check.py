"""Compare a training step on several ranks with the same step in one process.

The tensors that differ are named, with the mistake that explains them.

    verdict = check(context, task, strategy)        # on every rank
    verdict.right, print(verdict)

Ranks draw different weights and different batches, and train two steps by plain SGD. The module's
gradients are read after each step's synchronisation, its parameters there and after the last step.
Each rank then repeats its micro-batches in a copy of the model that no wrapper has touched, from
the parameters that the ranks had in that step. Rank 0 adds the gradients of all ranks in fp64, and
asks of each tensor that differs which known mistake would give these values. A name is given only
where the values that the mistake would give were computed, and agree.

How far two right gradients may be apart is measured for each tensor, see `_Expected.combination`:
the rounding of sums in the dtype of the parameter, and the noise of forward and backward. The noise
is what changes where the copy repeats the micro-batches with every parameter moved by its last bit.
It is all that remains of a gradient that is exactly zero, as of a bias in front of BatchNorm, so
such a tensor is right while it differs by noise, and wrong when it differs by more.
"""

import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from distlab.bench.task import Task, blamed, examined, own_task
from distlab.bench.wrappers import UserWrapper, whole_tensor, wrapped_by
from distlab.comm import RankContext, collectives
from distlab.comm.rank_process import is_lost_peer, on_main
from distlab.parallel import ParallelModel, Strategy, get_strategy, stepped
from distlab.parallel.shard import plain_name
from distlab.train.step import TrainStep

__all__ = ["Finding", "UserWrapper", "Verdict", "check", "on_rank", "whole_tensor", "wrapped_by"]

Tensors = dict[str, Tensor]
STEPS = 2
SLACK = 32  # of fp32, for sums inside a matmul that a wrapper cuts and so makes in another order
ROWS = 20  # of a verdict's table
MOST_MODULES = 32  # of which one at a time is tried with old weights
# Signatures. P stands for the ranks, M for the micro-batches of a rank and step.
NOT_BROADCAST = "ranks start from different values: not broadcast"
SUMMED = "× P: summed over ranks, not averaged"
DIVIDED = "× 1/P: divided twice, or a sum is missing"
OWN = "each rank's own: never reduced"
OWN_DIVIDED = "each rank's own / P: divided, never summed"
ONE_RANK = "one rank's own gradient on every rank"
MISSING = "the gradient of one rank is missing in the mean"
MICRO_SUMMED = "× M: not divided by the micro-batches"
MICRO_DIVIDED = "× 1/M: divided by the micro-batches twice"
FIRST, LAST = "only the first micro-batch", "only the last micro-batch"
SCALED = "scaled by a factor that is not the ranks, the micro-batches or their inverse"
PREVIOUS = "the previous step's gradient"
ADDED = "the previous step's gradient was added: not set to zero between steps"
MIXED = "a weighted mean with the previous step's gradient"
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
STEPPED_TWICE = "gradients are right, and the update was made twice"
NOT_STEPPED = "gradients are right, and no update was made"
DECAYED = "gradients are right, and the value also shrinks: a decay that was not asked for"
STEPPED_WRONG = "gradients are right, the value after the step is not"
FROZEN = "a parameter that does not train was changed"
BUFFER = "differs from the buffer in one process"
UNNAMED = (ROUNDED, APART, UNKNOWN)  # may be a consequence of another mistake

# Whose buffers, such as running statistics, forward may read. Each is right, and a wrapper follows
# one of them.
OWN_BUFFERS = "each rank's own"
EACH_STEP = "rank 0's, from the begin of each step on"
EACH_FORWARD = "rank 0's, before each forward"


@dataclass(frozen=True)
class Finding:
    """A tensor that differs.

    Attributes:
        tensor: name in the module.
        what: kind of value that differs: `initial value`, `gradient`, `value` (after a step) or
            `buffer`.
        step: number from 1 on, or 0 before the first step.
        error: largest |Δ| over ranks and elements, relative to the largest element in one process.
        signature: mistake that gives these values.
    """

    tensor: str
    what: str
    step: int
    error: float
    signature: str


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a check.

    Attributes:
        ranks: number of ranks.
        micro_batches: number of micro-batches per rank and step.
        tensors: number of trainable parameters that were compared.
        findings: tensors that differ. Empty for a wrapper that is right with one micro-batch per
            step and does not claim to accumulate gradients, see `accumulation`.
        loss: mean over ranks of the loss of the last step.
        expected_loss: the same loss in one process.
        finish: name of the function that was called after the last backward of each step.
        accumulation: tensors that differ with several micro-batches per step, if the wrapper has no
            `no_sync()` and is right with one. `micro_batches` is then 1.
        right_with_one: True if a wrong wrapper is right with one micro-batch per step. None if that
            was not tried.
    """

    ranks: int
    micro_batches: int
    tensors: int
    findings: tuple[Finding, ...]
    loss: float
    expected_loss: float
    finish: str = ""
    accumulation: tuple[Finding, ...] = ()
    right_with_one: bool | None = None

    @property
    def right(self) -> bool:
        """Return whether nothing differs."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `right`, for JSON."""
        return asdict(self) | {"right": self.right}

    def __repr__(self) -> str:
        return str(self)  # pytest shows the repr of what an assertion holds

    def __str__(self) -> str:
        parts = [
            f"{self._headline()} ({self.ranks} ranks × {self._micro_batches()}, {STEPS} steps)"
        ]
        shown = self.findings or self.accumulation
        if self.accumulation:
            parts.append("With several micro-batches per step these differ:")
        if shown:
            rows = [
                (each.tensor, each.what, each.step, f"{each.error:.1e}", each.signature)
                for each in shown[:ROWS]
            ]
            titles = ("tensor", "differs in", "step", "max |Δ|", "signature")
            more = f"\nand {len(shown) - ROWS} more" if len(shown) > ROWS else ""
            parts.append(tabulate(rows, titles, disable_numparse=True) + more)
        if self.findings and self.right_with_one:
            parts.append(
                "With one micro-batch per step it is right: look at no_sync() and at what accumulates."
            )
        parts.append(
            f"loss of step {STEPS}: {self.loss:.6g}, in one process {self.expected_loss:.6g}"
            + (f"\nfinish that was called: {self.finish}" if self.finish else "")
        )
        return "\n\n".join(parts)

    def _headline(self) -> str:
        if self.accumulation:
            return (
                "right with one backward per step; does not support accumulation: "
                f"{self.tensors} of {self.tensors} tensors as in one process"
            )
        if self.right:
            return f"right: {self.tensors} of {self.tensors} tensors as in one process"
        trainable = {each.tensor for each in self.findings if not _is_other(each)}
        others = {each.tensor for each in self.findings} - trainable
        counted = []
        if trainable:
            counted.append(f"{len(trainable)} of {self.tensors} tensors")
        if others:
            counted.append(f"{len(others)} buffers or frozen parameters")
        several = len(trainable) + len(others) > 1 or self.tensors > 1
        return (
            f"WRONG: {' and '.join(counted)} {'differ' if several else 'differs'} from one process"
        )

    def _micro_batches(self) -> str:
        return f"{self.micro_batches} micro-batch{'' if self.micro_batches == 1 else 'es'}"


def _is_other(finding: Finding) -> bool:
    """Return whether the tensor is a buffer or frozen, which `Verdict.tensors` does not count."""
    return finding.what == "buffer" or finding.signature == FROZEN


def check(
    context: RankContext,
    task: Task,
    strategy: Strategy,
    *,
    candidate: Task | None = None,
    same_batch: bool = False,
    micro_batches: int | None = None,
    seed: int = 0,
) -> Verdict:
    """Train two steps on all ranks and in one process and compare them; call it on every rank.

    Args:
        candidate: task that the ranks train, if it is compared with another `task`.
        same_batch: ranks get the same batches, as ranks do that share a model's layers or a
            sequence.
        micro_batches: number per rank and step. Default: ranks + 1, so that a factor of one cannot
            be taken for a factor of the other. What is wrong then is tried again with one.

    Returns:
        The verdict, the same on every rank.

    Raises:
        ValueError: fewer than two ranks; a model that is random or not a number in one process, or
            whose gradients are all zero; an error in forward, backward, step or wrapper, with its
            place.
        TimeoutError: a rank waited in a collective that not every rank calls.
    """
    if context.world_size < 2:
        raise ValueError("one rank has no other to disagree with: give --nproc 2 or more")
    # Messages of the check's own, which cannot meet those of a wrapper that some ranks do not send.
    # A rank that failed waits here for the others, which may first wait for it until their own
    # timeout.
    patience = timedelta(seconds=4 * context.timeout_s + 60)
    own = replace(context, group=dist.new_group(timeout=patience))
    try:
        lr = on_main(
            own, lambda: _step_size(task, task.batches(0, 0, own.device)[0], seed, own.device)
        )
        task, candidate = replace(task, lr=lr), replace(candidate or task, lr=lr)
        jobs = _Jobs(task, candidate, strategy, same_batch, seed)
        if micro_batches is not None:
            return _compare(own, context.group, jobs, micro_batches).verdict
        return _compare_twice(own, context.group, jobs)
    finally:
        dist.destroy_process_group(own.group)


def on_rank(
    context: RankContext,
    model: str,
    wrap: str,
    *,
    batch: int = 4,
    same_batch: bool = False,
    micro_batches: int | None = None,
    seed: int = 0,
) -> Verdict:
    """Check a user's model, named `package.module:function`, under a wrapper or a strategy.

    The wrapper is named in the same form, the strategy by its name in the registry.

    Raises:
        ValueError, TimeoutError: as in `check`. Also if a factory fails or returns something else.
    """
    task = own_task(model, batch, seed)
    examined(model, task, context, seed)
    strategy = wrapped_by(wrap) if ":" in wrap else get_strategy(wrap)
    return check(
        context, task, strategy, same_batch=same_batch, micro_batches=micro_batches, seed=seed
    )


@dataclass(frozen=True)
class _Jobs:
    """Settings of a comparison, except the ranks and the number of micro-batches."""

    task: Task
    candidate: Task
    strategy: Strategy
    same_batch: bool
    seed: int

    def batches(
        self, source: Task, rank: int, step: int, micro_batches: int, device: torch.device
    ) -> list[Any]:
        """Return the micro-batches of one rank in one step, from 0 on."""
        rank = 0 if self.same_batch else rank
        first = step * micro_batches
        found = []
        for number in range(first, first + micro_batches):
            found.extend(source.batches(rank, number, device))
        # A task may have several micro-batches in a step of its own.
        return found[:1] if micro_batches == 1 else found


@dataclass(frozen=True)
class _Compared:
    verdict: Verdict
    can_accumulate: bool


def _compare_twice(own: RankContext, group: ProcessGroup, jobs: _Jobs) -> Verdict:
    """Compare with ranks + 1 micro-batches per step, and where that is wrong also with one.

    A wrapper that averages in every backward is right in the usual loop of one backward per step.
    It is accused of accumulation only if it says, by having `no_sync()`, that it can accumulate.
    """
    failure = None
    try:
        several = _compare(own, group, jobs, own.world_size + 1)
    except ValueError as error:
        if isinstance(error, NothingToCompare):
            raise
        failure = error
    else:
        if several.verdict.right:
            return several.verdict
    try:
        one = _compare(own, group, jobs, 1)
    except (ValueError, TimeoutError):
        if failure is not None:
            raise failure from None
        return several.verdict
    if failure is not None:
        if one.can_accumulate or not one.verdict.right:
            raise failure
        raised = Finding("(the training step)", "error", 0, 0.0, str(failure))
        return replace(one.verdict, accumulation=(raised,))
    if one.verdict.right and not one.can_accumulate:
        return replace(one.verdict, accumulation=several.verdict.findings)
    return replace(several.verdict, right_with_one=one.verdict.right)


class NothingToCompare(ValueError):
    """The model in one process has no gradient to which another could be compared."""


def _compare(own: RankContext, group: ProcessGroup, jobs: _Jobs, micro_batches: int) -> _Compared:
    """Train on ranks, repeat that on each rank without a wrapper, and judge on rank 0."""
    trained = _on_all(own, lambda: _train(own, group, jobs, micro_batches))
    everyone = _gather_on_main(trained, own)
    # Each step is repeated from the parameters that rank 0 had in it (they are judged as well), so
    # that a difference of a last bit after the first step does not grow in the second.
    parameters = _from_main((trained.initial, trained.values), own)
    copy = _on_all(own, lambda: _Copy(jobs.task, parameters[0], jobs.seed, own.device))
    steps = [
        jobs.batches(jobs.task, own.rank, step, micro_batches, own.device) for step in range(STEPS)
    ]

    def judged(
        policy: str, main_states: Sequence[Sequence[Tensors]]
    ) -> tuple[list[Finding], list["_Run"]]:
        run = _on_all(
            own,
            lambda: copy.run(parameters, steps, parameters[0], policy, main_states, own.is_main),
        )
        runs = _gather_on_main(run, own)
        return on_main(own, lambda: _Judge(everyone, runs, copy, jobs).findings()), runs

    findings, runs = judged(OWN_BUFFERS, ())
    if findings and copy.has_state and not jobs.same_batch:
        main_states = _from_main(runs[0].states if own.is_main else None, own)
        for policy in (EACH_STEP, EACH_FORWARD):
            found, others = judged(policy, main_states)
            if len(found) < len(findings):
                findings, runs = found, others
            if not findings:
                break
    if any(
        each.step == STEPS and each.what == "gradient" and each.signature in UNNAMED
        for each in findings
    ):
        findings = _named_stale(own, copy, findings, everyone, trained, parameters, steps, jobs)
    ranks = own.world_size

    def verdict() -> Verdict:
        loss = sum(rank.loss for rank in everyone) / ranks
        expected = sum(run.loss for run in runs) / ranks
        number = len(steps[0])
        return Verdict(
            ranks, number, len(copy.trainable), tuple(findings), loss, expected, trained.finish
        )

    return _Compared(on_main(own, verdict), trained.can_accumulate)


class _Agreed(BaseException):
    """An error of some rank that all ranks know.

    Not an Exception, which `blamed` would say is this rank's.
    """

    def __init__(self, error: Exception):
        self.error = error


def _on_all(own: RankContext, work: Callable[[], Any]) -> Any:
    """Return `work()` of this rank.

    An error of any rank is raised on all of them, so that none waits for another.
    """
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as raised:
        error = raised
    except _Agreed as agreed:
        raise agreed.error from None
    try:
        _exchange(own, None, error)
    except _Agreed as agreed:
        raise agreed.error from None
    return result


def _exchange(own: RankContext, value: Any, error: Exception | None = None) -> list[Any]:
    """Return every rank's value, in rank order.

    Raises:
        _Agreed: a rank has an error in its place.
    """
    messages = collectives.gather_objects(_packed((value, error)), own.group)
    everyone = [_unpacked(message) for message in messages]
    errors = [each for _, each in everyone if each is not None]
    if errors:
        # A rank that waited in vain did so because of another rank's error, if there is one.
        causes = [each for each in errors if not isinstance(each, TimeoutError)]
        raise _Agreed((causes or errors)[0])
    return [each for each, _ in everyone]


def _gather_on_main(value: Any, own: RankContext) -> list[Any]:
    """Return every rank's value in rank order on rank 0, and an empty list on the others."""
    gathered: list[Any] | None = [None] * own.world_size if own.is_main else None
    dist.gather_object(_packed(value), gathered, dst=0, group=own.group)
    return [_unpacked(message) for message in gathered or []]


def _from_main(value: Any, own: RankContext) -> Any:
    """Return rank 0's value."""
    box = [_packed(value) if own.is_main else None]
    dist.broadcast_object_list(box, src=0, group=own.group)
    return value if own.is_main else _unpacked(box[0])


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes.

    By default each tensor becomes an archive of its own, which takes ten times as long to write and
    to read. A model has hundreds of them.
    """

    def reducer_override(self, value: Any) -> Any:
        plain = (
            type(value) is Tensor
            and value.device.type == "cpu"
            and value.layout == torch.strided
            and not value.requires_grad
        )
        if not plain:
            return NotImplemented  # as by default
        elements = value.reshape(-1).clone(memory_format=torch.contiguous_format)
        values = elements.view(torch.uint8).numpy().tobytes()  # numpy knows no bf16
        return _tensor_of, (values, value.dtype, tuple(value.shape))


def _tensor_of(values: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unpacked(message: bytes) -> Any:
    return pickle.loads(message)


# -- on ranks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trained:
    """Tensors of one rank by name. Sharded ones are gathered from all ranks."""

    initial: Tensors  # parameters and buffers
    gradients: list[Tensors]  # of each step
    values: Tensors  # parameters in the second step, after its backward
    final: Tensors  # parameters and buffers
    loss: float
    finish: str
    can_accumulate: bool
    # name → (first element, number) that only this rank's optimizer steps
    owned: dict[str, list[tuple[int, int]]]


def _train(own: RankContext, group: ProcessGroup, jobs: _Jobs, micro_batches: int) -> _Trained:
    """Train two steps under the strategy.

    Raises:
        ValueError, TimeoutError: as in `check`.
    """
    task, strategy = jobs.candidate, jobs.strategy
    with _explained(strategy.name, own.timeout_s):
        module = task.build(jobs.seed + own.rank, own.device)
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        size_mb = num_bytes / 2**20 / 4  # at least four buckets
        model, optimizer = strategy.build(
            module, group, torch.optim.SGD, {"lr": jobs.task.lr}, bucket_size_mb=size_mb
        )
        initial = _copies(model.full_parameters(), module)
        gradients, values = [], {}

        def keep(phase: str) -> None:
            if phase != "forward_backward":
                return
            gradients.append(_whole_gradients(model, own))
            if len(gradients) == STEPS:
                # Not right after the first step: reading them there would wait for messages that
                # the next forward may have forgotten to wait for.
                values.update(_copies(model.full_parameters()))

        train = TrainStep(model, optimizer, task.loss_fn, mark=keep)
        losses = []
        for step in range(STEPS):
            losses.append(train(jobs.batches(task, own.rank, step, micro_batches, own.device)))
        final = _copies(model.full_parameters(), module)
        owned = _owned(model, optimizer)
        model.close(restore=False)
    finish = getattr(model, "finish", "")
    can_accumulate = getattr(model, "can_accumulate", True)
    return _Trained(
        initial, gradients, values, final, losses[-1].item(), finish, can_accumulate, owned
    )


@torch.no_grad()
def _whole_gradients(model: ParallelModel, own: RankContext) -> Tensors:
    """Return the gradient of every trainable parameter on this rank; sharded ones are gathered."""
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
    everyone = _exchange(own, (trained, parts))
    if not any(trained for trained, _ in everyone):
        raise ValueError(
            "no parameter of the module got a gradient: a wrapper must train the module it is given"
        )
    for _, of_rank in everyone:
        for name, (start, values) in of_rank.items():
            whole[name].view(-1)[start : start + len(values)] = values
    return whole


def _owned(
    model: ParallelModel, optimizer: torch.optim.Optimizer
) -> dict[str, list[tuple[int, int]]]:
    """Return the parts of parameters that this rank's optimizer steps and others do not."""
    found: dict[str, list[tuple[int, int]]] = {}
    for shard in stepped(model, optimizer):
        if not shard.replicated and not hasattr(shard.tensor, "full_tensor"):
            found.setdefault(_plain(shard.name), []).append((shard.start, shard.tensor.numel()))
    return found


def _plain(name: str) -> str:
    """Return the name in the bare module, without parts from compilation and checkpointing."""
    return plain_name(name).replace("_checkpoint_wrapped_module.", "")


def _copies(parameters: Tensors, module: nn.Module | None = None) -> Tensors:
    """Return copies on the CPU of parameters, and of the buffers of a module."""
    together = parameters if module is None else parameters | dict(module.named_buffers())
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


# -- without a wrapper ---------------------------------------------------------------------------------------


def _step_size(task: Task, batch: Any, seed: int, device: torch.device) -> float:
    """Return the learning rate of the check.

    It is the task's. For half precision it is large enough that the update can be seen.

    A bf16 parameter keeps 8 bits, so an update of less than 1/256 of it is lost, and a wrong one
    looks like a right one. The norm of the update becomes at least 8 eps of the norm of the
    parameters.

    Raises:
        ValueError: the same weights and batch give two losses.
    """
    with torch.no_grad():
        first, second = (task.loss_fn(task.build(seed, device), batch).item() for _ in range(2))
    if abs(first - second) > 1e-6 * abs(first):
        raise ValueError(
            f"the model is random in forward: one batch and the same weights gave the losses {first:.6g} and "
            f"{second:.6g}; draw from torch's generator, which is seeded before each batch, or call random.seed(0) or "
            "numpy.random.seed(0) in loss(model, batch)"
        )
    module = task.build(seed, device)
    halves = [p for p in module.parameters() if p.requires_grad and p.element_size() == 2]
    if not halves:
        return task.lr
    task.loss_fn(module, batch).backward()
    size = math.sqrt(sum(p.detach().double().square().sum().item() for p in halves))
    gradients = [p.grad.double() for p in halves if p.grad is not None]
    slope = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    if not 0 < slope < math.inf:
        return task.lr
    eps = max(torch.finfo(p.dtype).eps for p in halves)
    return max(task.lr, 8 * eps * size / slope)


@dataclass(frozen=True)
class _Sums:
    """Sums of one parameter's gradients over a rank's micro-batches in one step, in fp64.

    Each gradient is that of the micro-batch's loss divided by the micro-batches, as in the training
    step.

    Attributes:
        own: sum of the gradients.
        first, last: gradients of the first and the last micro-batch.
        magnitude: sum of the absolute values of the gradients.
        partial: sum of the squares of the partial sums, which says how much the additions round.
        noise: sum of the squares of the changes when parameters move by their last bit.
        shift: sum of the changes.
        largest: largest absolute value.
    """

    own: Tensor
    first: Tensor
    last: Tensor
    magnitude: Tensor
    partial: Tensor
    noise: Tensor
    shift: Tensor
    largest: float

    @staticmethod
    def of(gradients: Sequence[Tensor], moved: Sequence[Tensor]) -> "_Sums":
        """Add up the gradients of micro-batches, and those with moved parameters."""
        each = torch.stack([_wide(gradient) for gradient in gradients])
        change = torch.stack([_wide(gradient) for gradient in moved]) - each
        change = change.nan_to_num(0.0, 0.0, 0.0)
        return _Sums(
            own=each.sum(0),
            first=each[0],
            last=each[-1],
            magnitude=each.abs().sum(0),
            partial=each.cumsum(0).square().sum(0),
            noise=change.square().sum(0),
            shift=change.sum(0),
            largest=each.abs().max().item(),
        )


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp64 on the CPU; a complex one with its two parts as a last dimension."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


@dataclass(frozen=True)
class _Run:
    """One rank's training without a wrapper.

    Attributes:
        sums: for each step, sums by parameter.
        states: for each step, the buffers before each micro-batch and after the last.
        loss: loss of the last step.
        micro_batches: number per step.
    """

    sums: list[dict[str, _Sums]]
    states: list[list[Tensors]]
    loss: float
    micro_batches: int


class _Copy:
    """A copy of the model that no wrapper has touched, on each rank.

    Attributes:
        trainable: name → parameter, of those that train and have elements.
        frozen: names of the other parameters.
        tied: names of parameters that the module has under several names.
        has_state: True if there are floating-point buffers, which forward may read and write.
    """

    def __init__(self, task: Task, initial: Tensors, seed: int, device: torch.device):
        self.task = task
        self.module = task.build(seed, device)
        for name, parameter in self.module.named_parameters():
            if name not in initial or initial[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} is not there, or has another shape, under the wrapper: only whole parameters and DTensors "
                    "can be compared"
                )
        named = dict(self.module.named_parameters())
        self.trainable = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
        self.frozen = [name for name in named if name not in self.trainable]
        names = Counter(id(p) for _, p in self.module.named_parameters(remove_duplicate=False))
        self.tied = {name for name, parameter in self.trainable.items() if names[id(parameter)] > 1}
        self.has_state = any(buffer.is_floating_point() for buffer in self.module.buffers())

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take over parameters and buffers, those that are given."""
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name in values:
                tensor.data.copy_(values[name])

    @torch.no_grad()
    def move(self) -> None:
        """Move each parameter by its last bit, up or down at random."""
        generator = torch.Generator().manual_seed(0)
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                up = (
                    torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device)
                    * 2
                    - 1
                )
                parameter.data += parameter.data * up * torch.finfo(parameter.dtype).eps

    def _load_parameters(self, values: Tensors, buffers: set[str], moved: bool) -> None:
        """Take over parameters, moved by their last bit or as they are."""
        self.load({name: value for name, value in values.items() if name not in buffers})
        if moved:
            self.move()

    def run(
        self,
        parameters: Sequence[Tensors],
        steps: Sequence[Sequence[Any]],
        initial: Tensors,
        policy: str,
        main_states: Sequence[Sequence[Tensors]],
        is_main: bool,
        late: Tensors | None = None,
        arrival: int | None = None,
    ) -> _Run:
        """Repeat the steps of this rank.

        Args:
            parameters: for each step, parameters by name.
            steps: for each step, its micro-batches.
            initial: tensors by name, with the buffers before the first step.
            policy: name of the buffers that forward reads, such as `OWN_BUFFERS`.
            main_states: `_Run.states` of rank 0, for a policy that reads its buffers.
            late: parameters that arrive during the last step, if they differ from the others.
            arrival: phase before which `late` arrives: 1 the backward of the first micro-batch, 2
                the second forward, 0 not in this step. None: there is no `late`.
        """
        if is_main:
            policy = OWN_BUFFERS
        all_sums, all_states, loss = [], [], 0.0
        before = initial
        for number, micro_batches in enumerate(steps):
            read = {}  # micro-batch → buffers that it finds in place of its own
            if policy == EACH_STEP:
                read = {0: main_states[number][0]}
            elif policy == EACH_FORWARD:
                read = dict(enumerate(main_states[number][:-1]))
            then = late if number == len(steps) - 1 else None
            step = (parameters[number], then, arrival, micro_batches, before, read)
            gradients, states, loss = self._step(*step, moved=False)
            # With weights that did not arrive in time, only the values are wanted, and not their
            # noise.
            others = gradients if arrival is not None else self._step(*step, moved=True)[0]
            sums = {}
            for name in self.trainable:
                sums[name] = _Sums.of(
                    [each[name] for each in gradients], [each[name] for each in others]
                )
            all_sums.append(sums)
            all_states.append(states)
            before = states[-1]
        return _Run(all_sums, all_states, loss, len(steps[0]))

    def _step(
        self,
        parameters: Tensors,
        late: Tensors | None,
        arrival: int | None,
        micro_batches: Sequence[Any],
        before: Tensors,
        read: Mapping[int, Tensors],
        moved: bool,
    ) -> tuple[list[Tensors], list[Tensors], float]:
        """Repeat one step. Return the gradients of each micro-batch, the buffers and the mean loss.

        The buffers are those before each micro-batch and after the last.
        """
        buffers = {name for name, _ in self.module.named_buffers()}
        self._load_parameters(parameters, buffers, moved)
        self.load({name: value for name, value in before.items() if name in buffers})
        gradients, states, losses = [], [], []
        for number, batch in enumerate(micro_batches):
            if 2 * number == arrival and late is not None:
                self._load_parameters(late, buffers, moved)
            if number in read:
                self.load(read[number])
            states.append(_copies({}, self.module))
            for parameter in self.trainable.values():
                parameter.grad = torch.zeros_like(parameter)
            loss = self.task.loss_fn(self.module, batch) / len(micro_batches)
            if 2 * number + 1 == arrival and late is not None:
                self._load_parameters(late, buffers, moved)
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.cpu().clone() for name, p in self.trainable.items()})
        states.append(_copies({}, self.module))
        return gradients, states, sum(losses)


# -- what differs, and why -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Right:
    """A value, and the largest distance of a right one from it.

    Attributes:
        value: expected tensor, in fp64.
        element: largest difference of one element.
        rms: largest root mean square of the differences.
    """

    value: Tensor
    element: Tensor
    rms: float

    def distance(self, seen: Tensor) -> float:
        """Return how far a tensor is away, in units of what is allowed; it agrees up to 1."""
        error = (seen - self.value).abs()
        if not error.isfinite().all():
            return math.inf
        elements = torch.where(error == 0, error, error / self.element).max().item()
        rms = error.square().mean().sqrt().item()
        return max(elements, rms and rms / max(self.rms, 1e-300))

    def agrees(self, seen: Tensor) -> bool:
        """Return whether a tensor is as near as a right one."""
        return self.distance(seen) <= 1

    def plus(self, other: "_Right", factor: float = 1.0, own: float = 1.0) -> "_Right":
        """Return own · this + factor · the other."""
        return _Right(
            own * self.value + factor * other.value,
            abs(own) * self.element + abs(factor) * other.element,
            abs(own) * self.rms + abs(factor) * other.rms,
        )


class _Expected:
    """The gradients of one step, added up from those of every rank and micro-batch.

    Args:
        of_ranks: for each rank, sums by parameter.
        dtypes: parameter name → dtype.
        micro_batches: number per rank and step.
    """

    def __init__(
        self,
        of_ranks: Sequence[Mapping[str, _Sums]],
        dtypes: Mapping[str, torch.dtype],
        micro_batches: int,
    ):
        self.of_ranks, self.dtypes, self.micro_batches = of_ranks, dtypes, micro_batches
        self.ranks = len(of_ranks)

    def mean(self, name: str) -> _Right:
        """Return the right gradient."""
        return self.combination(name, [1 / self.ranks] * self.ranks)

    def combination(self, name: str, weights: Sequence[float], part: str = "own") -> _Right:
        """Return Σ over ranks of weight × gradient, and the error that rounding may cause.

        Let u = eps / 2 of the parameter's dtype. Each addition and division rounds by at most u
        times its result.

        - An element passes M additions on its rank, P of the reduction, and up to four divisions
          and casts. Partial sums are at most the sum of absolute values, whatever the order, so all
          roundings together are at most (M + P + 4) · u · Σ |w| |g|. That holds always, and for
          bf16 it is too much: a missing rank of eight may hide.
        - Roundings have no common sign, so their squares add up: a rounding is uniform in ± u of
          its partial sum and has the variance u² / 3 of its square. The root mean square over the
          elements of a tensor is held against four times that. Another order of additions has other
          partial sums of the same size.
        - Forward and backward round as well, and another right implementation of them (a matmul
          that is cut, fused kernels) rounds otherwise. `_Copy.move` measures how much that is for
          each tensor. A tensor whose exact gradient is zero consists of it.
        - Sums inside a matmul in another order: SLACK · (P + M) · eps of fp32 of the largest
          summand.
        - Numbers below the smallest normal one of fp16 lose bits at every division.

        Args:
            part: field of `_Sums` to add up: "own", "first" or "last".
        """
        sums = [rank[name] for rank in self.of_ranks]
        info = torch.finfo(self.dtypes[name])
        unit = info.eps / 2
        roundings = self.micro_batches + self.ranks + 4
        weighted = [
            weight * getattr(each, part) for weight, each in zip(weights, sums, strict=True)
        ]
        value = torch.stack(weighted).sum(0)
        total_weight = sum(map(abs, weights))
        largest = max(each.largest for each in sums)

        hard = torch.zeros_like(value)
        variance = 2 * value.square()
        noise, shift = torch.zeros_like(value), torch.zeros_like(value)
        running = torch.zeros_like(value)
        for weight, each, sent in zip(weights, sums, weighted, strict=True):
            hard += roundings * unit * abs(weight) * each.magnitude
            running = running + sent
            variance += weight**2 * each.partial + sent.square() + running.square()
            noise += weight**2 * each.noise
            shift += weight * each.shift
        # Changes of micro-batches that have a common sign do not average out.
        noise = torch.maximum(noise, shift.square())

        floor = (
            SLACK
            * (self.ranks + self.micro_batches)
            * min(info.eps, torch.finfo(torch.float32).eps)
        )
        floor = floor * largest * total_weight
        floor += (
            roundings
            * self.micro_batches
            * info.smallest_normal
            * info.eps
            * max(1.0, total_weight)
        )
        elements = value.numel()
        few = 1 + 2 / math.sqrt(elements)  # the mean of few squares spreads
        rounding = unit * math.sqrt(variance.mean().item() / 3)
        wobble = math.sqrt(noise.mean().item())
        return _Right(
            value,
            hard + floor + 6 * math.sqrt(noise.max().item()),
            floor + 4 * few * (rounding + wobble),
        )


# signature, what each rank has, what it would have
Candidate = tuple[str, Tensor, Sequence[_Right]]


class _Judge:
    """Findings about tensors that differ, with the mistake that explains each. Used on rank 0.

    Args:
        ranks: tensors of each rank.
        runs: training of each rank without a wrapper.
    """

    def __init__(self, ranks: Sequence[_Trained], runs: Sequence[_Run], copy: _Copy, jobs: _Jobs):
        self.ranks, self.runs, self.copy, self.jobs = ranks, runs, copy, jobs
        dtypes = {name: parameter.dtype for name, parameter in copy.trainable.items()}
        count = runs[0].micro_batches
        self.expected = [
            _Expected([run.sums[step] for run in runs], dtypes, count) for step in range(STEPS)
        ]

    def findings(self) -> list[Finding]:
        """Name what differs, by its earliest evidence: later steps follow from a wrong one.

        Raises:
            NothingToCompare: as in `check`.
        """
        return (
            self._initial()
            or self._gradients(1)
            or self._values(1)
            or self._gradients(2)
            or self._values(2)
            or self._buffers()
        )

    def _refuse_nothing(self, step: int) -> None:
        """Raise NothingToCompare where one process has no gradients in a step."""
        some = False
        for name in self.copy.trainable:
            mean = self.expected[step - 1].mean(name).value
            if not mean.isfinite().all():
                raise NothingToCompare(
                    f"the gradient of {name} is not a number in one process either (step {step}): there is nothing to "
                    "compare"
                )
            some = some or bool(mean.any())
        if step == 1 and not some:
            raise NothingToCompare(
                f"every gradient is exactly zero in one process (loss {self.runs[0].loss:.6g}): there is nothing to "
                "compare; give batches and weights for which the loss has a gradient"
            )

    def _initial(self) -> list[Finding]:
        found = []
        for name in self.ranks[0].initial:
            each = torch.stack([_wide(rank.initial[name]) for rank in self.ranks])
            if not torch.equal(each.nan_to_num(), each[:1].expand_as(each).nan_to_num()):
                found.append(
                    Finding(name, "initial value", 0, _error(each, each[0]), NOT_BROADCAST)
                )
        return found

    # -- gradients -------------------------------------------------------------------------------------------

    def wrong_gradients(self) -> list[str]:
        """Return the names of parameters whose gradient of the second step is not the right one."""
        wrong = []
        for name in self.copy.trainable:
            mean = self.expected[-1].mean(name)
            if not all(map(mean.agrees, self._seen(STEPS, name))):
                wrong.append(name)
        return wrong

    def _seen(self, step: int, name: str) -> Tensor:
        """Return every rank's gradient of a step, from 1 on."""
        return torch.stack([_wide(rank.gradients[step - 1][name]) for rank in self.ranks])

    def _gradients(self, step: int) -> list[Finding]:
        """Find the gradients of a step that differ.

        Which tensors do may tell more than their values.
        """
        self._refuse_nothing(step)
        expected = self.expected[step - 1]
        named = {name: self._signature(step, name) for name in self.copy.trainable}
        wrong = {name for name, signature in named.items() if signature is not None}
        vectors = {name for name, parameter in self.copy.trainable.items() if parameter.ndim < 2}
        found = []
        for name in named:
            signature = named[name]
            if signature is None:
                continue
            if signature == SUMMED and wrong <= self.copy.tied < named.keys():
                signature = TIED
            # Only ranks that were given the same batch can have parts of a sequence.
            elif signature == PART and self.jobs.same_batch and wrong <= vectors < named.keys():
                signature += SEQUENCE
            error = _error(self._seen(step, name), expected.mean(name).value)
            found.append(Finding(name, "gradient", step, error, signature))
        return found

    def _signature(self, step: int, name: str) -> str | None:
        """Return which mistake gives the gradients of a tensor; None if they are right."""
        seen = self._seen(step, name)
        mean = self.expected[step - 1].mean(name)
        if all(map(mean.agrees, seen)):
            return None
        if not seen.isfinite().all():
            return NOT_A_NUMBER
        best, chosen = math.inf, None
        # Zeros are near a small value, which does not make them that value.
        factors = self._factors(step, name) if seen.any() else ()
        for signature, rights in factors:
            distance = max(right.distance(each) for each, right in zip(seen, rights, strict=True))
            # In half precision several may be near enough: 1/P and 1/M, say. The nearest is it.
            if distance <= 1 and distance < 0.5 * best:
                best, chosen = distance, signature
        if chosen is not None:
            return chosen
        for signature, values, rights in self._others(step, name, seen):
            if all(right.agrees(each) for each, right in zip(values, rights, strict=True)):
                return signature
        if self._mixed_with_another(step, name, seen):
            return OTHER_TENSOR
        if not all(each.any() for each in seen):
            return ABSENT
        if not all(replace(mean, value=seen[0]).agrees(each) for each in seen):
            return APART
        if self._rounded(step, name, seen):
            return ROUNDED
        return self._of_two_steps(step, name, seen) or UNKNOWN

    def _factors(self, step: int, name: str) -> Iterator[tuple[str, list[_Right]]]:
        """Yield each rank's gradients under mistakes in sums and divisions, the simplest first."""
        expected = self.expected[step - 1]
        ranks, micro_batches = expected.ranks, expected.micro_batches

        def everywhere(weight: float, part: str = "own") -> list[_Right]:
            return [expected.combination(name, [weight] * ranks, part)] * ranks

        yield SUMMED, everywhere(1.0)
        yield DIVIDED, everywhere(1 / ranks**2)
        yield OWN, [self._of_rank(step, name, rank, 1.0) for rank in range(ranks)]
        yield OWN_DIVIDED, [self._of_rank(step, name, rank, 1 / ranks) for rank in range(ranks)]
        if micro_batches > 1:
            yield MICRO_SUMMED, everywhere(micro_batches / ranks)
            yield MICRO_DIVIDED, everywhere(1 / micro_batches / ranks)
            yield FIRST, everywhere(1 / ranks, "first")
            yield LAST, everywhere(1 / ranks, "last")
        for rank in range(ranks):
            yield ONE_RANK, [self._of_rank(step, name, rank, 1.0)] * ranks
        for rank in range(ranks):
            for weight in (1 / ranks, 1 / (ranks - 1)):
                weights = [0.0 if each == rank else weight for each in range(ranks)]
                yield MISSING, [expected.combination(name, weights)] * ranks

    def _of_rank(self, step: int, name: str, rank: int, weight: float) -> _Right:
        """Return weight × the gradient of one rank."""
        expected = self.expected[step - 1]
        weights = [weight if each == rank else 0.0 for each in range(expected.ranks)]
        return expected.combination(name, weights)

    def _others(self, step: int, name: str, seen: Tensor) -> Iterator[Candidate]:
        """Give the values that other mistakes would give."""
        ranks = len(seen)
        mean = self.expected[step - 1].mean(name)
        yield from self._other_steps(step, name, seen)
        if seen.any() and not all(replace(mean, value=seen[0]).agrees(each) for each in seen):
            yield PART, seen.sum(0)[None], [mean]
            yield SHARE, seen.mean(0)[None], [mean]
        factor = _slope(seen[0], mean.value)
        is_noise = mean.agrees(torch.zeros_like(mean.value))
        if abs(factor) > 1e-3 and seen[0].numel() > 1 and not is_noise:
            yield SCALED, seen, [mean.plus(mean, 0.0, factor)] * ranks

    def _other_steps(self, step: int, name: str, seen: Tensor) -> Iterator[Candidate]:
        """Yield the gradients of this step and the next if the previous step's are used."""
        ranks = len(seen)
        before = self.expected[0].mean(name)
        if step == 1:
            # A gradient that comes a step late: in the second step it is that of the first.
            late = self._seen(2, name)
            second = self.expected[1].mean(name)
            if before.value.any() and not all(map(second.agrees, late)):
                yield PREVIOUS, late, [before] * ranks
            return
        yield PREVIOUS, seen, [before] * ranks
        yield ADDED, seen, [self.expected[1].mean(name).plus(before)] * ranks

    def _of_two_steps(self, step: int, name: str, seen: Tensor) -> str | None:
        """Return MIXED if a gradient is a weighted mean of this step's and the previous step's."""
        if step == 1 or seen[0].numel() < 4:
            return None
        now, before = self.expected[1].mean(name), self.expected[0].mean(name)
        columns = torch.stack([now.value.flatten(), before.value.flatten()], 1)
        weights = (
            torch.linalg.lstsq(columns, seen[0].flatten()[:, None]).solution.flatten().tolist()
        )
        mixed = now.plus(before, weights[1], weights[0])
        is_mean = all(0.01 < weight < 1 for weight in weights)
        return MIXED if is_mean and all(map(mixed.agrees, seen)) else None

    def _mixed_with_another(self, step: int, name: str, seen: Tensor) -> bool:
        """Return whether on each rank some ranks' share of the mean is that of one other tensor."""
        expected = self.expected[step - 1]
        ranks = expected.ranks
        if ranks > 8:
            return False  # 2^P ways
        alike = [each for each in self.copy.trainable if each != name]
        alike = [
            each
            for each in alike
            if self.copy.trainable[each].shape == self.copy.trainable[name].shape
        ]
        # A tensor whose gradient is noise explains nothing: its share cannot be seen.
        alike = [
            each for each in alike if not expected.mean(each).agrees(torch.zeros_like(seen[0]))
        ]

        def explains(other: str, theirs: Sequence[bool], value: Tensor) -> bool:
            mine = expected.combination(name, [0.0 if each else 1 / ranks for each in theirs])
            mixed = mine.plus(
                expected.combination(other, [1 / ranks if each else 0.0 for each in theirs])
            )
            return mixed.agrees(value)

        changed = False
        for value in seen:
            if expected.mean(name).agrees(value):
                continue
            ways = product(alike, product((False, True), repeat=ranks))
            if not any(explains(other, theirs, value) for other, theirs in ways if any(theirs)):
                return False
            changed = True
        return changed

    def _rounded(self, step: int, name: str, seen: Tensor) -> bool:
        """Return whether a gradient of higher precision has been through bf16 or fp16."""
        expected = self.expected[step - 1]
        if torch.finfo(expected.dtypes[name]).bits < 32:
            return False
        mean = expected.mean(name)
        for dtype in (torch.bfloat16, torch.float16):
            eps = torch.finfo(dtype).eps
            own = torch.stack([rank[name].own for rank in expected.of_ranks])
            rounding = expected.ranks * eps * own.abs().mean(0)  # P on the way in, P in the sum
            if not bool(((seen - mean.value).abs() <= rounding + mean.element).all()):
                continue
            # Where the reduction was in that dtype, its result or its sum is a number of that
            # dtype.
            for factor in (1, expected.ranks):
                scaled = seen * factor
                if (scaled.to(dtype).double() - scaled).abs().le(1e-6 * scaled.abs()).all():
                    return True
            # Where only what was sent was rounded, the mean of the rounded ones has come.
            for factor in (1, 1 / expected.ranks):
                sent = (own * factor).to(dtype).double().mean(0) / factor
                near = (seen - sent).abs() <= mean.element
                # a value between two numbers may have been rounded to the other
                if near.double().mean() > 0.9:
                    return True
        return False

    # -- values after a step -----------------------------------------------------------------------------------

    def _values(self, step: int) -> list[Finding]:
        """Find what differs after a step whose gradients were right."""
        found = []
        for name in self.copy.trainable:
            signature, error = self._update(step, name)
            if signature is not None:
                found.append(Finding(name, "value", step, error, signature))
        for name in self.copy.frozen:
            right = _wide(self.ranks[0].initial[name])
            after = self._after(step, name)
            if not torch.equal(after.nan_to_num(), right.expand_as(after).nan_to_num()):
                found.append(Finding(name, "value", step, _error(after, right), FROZEN))
        not_sent = [finding for finding in found if finding.signature == NOT_SENT]
        return not_sent or found

    def _after(self, step: int, name: str) -> Tensor:
        """Return every rank's value after a step."""
        return torch.stack(
            [_wide((rank.final if step == STEPS else rank.values)[name]) for rank in self.ranks]
        )

    def _update(self, step: int, name: str) -> tuple[str | None, float]:
        """Return which mistake gives the value after a step, None if it is right, and its error."""
        before = _wide((self.ranks[0].initial if step == 1 else self.ranks[0].values)[name])
        after = self._after(step, name)
        gradient = self.expected[step - 1].mean(name)
        lr = self.jobs.task.lr
        eps = torch.finfo(self.copy.trainable[name].dtype).eps

        def updated(times: float) -> _Right:
            value = before - times * lr * gradient.value
            # The product and the difference are each rounded by half an eps; a master copy in
            # higher precision is not.
            rounding = eps / 2 * (value.abs() + 2 * abs(times) * lr * gradient.value.abs()) * 1.01
            rms = rounding.square().mean().sqrt().item() + abs(times) * lr * gradient.rms
            return _Right(
                value, 2 * rounding + abs(times) * lr * gradient.element + 1e-30, rms + 1e-30
            )

        right = updated(1)
        error = _error(after, right.value)
        if all(map(right.agrees, after)):
            return None, error
        if not all(replace(right, value=after[0]).agrees(each) for each in after):
            return NOT_SENT, error
        if all(map(updated(2).agrees, after)):
            return STEPPED_TWICE, error
        if all(map(updated(0).agrees, after)):
            return NOT_STEPPED, error
        if self._decayed(before, after, gradient.value, updated, self.copy.trainable[name].dtype):
            return DECAYED, error
        return STEPPED_WRONG, error

    def _decayed(
        self,
        before: Tensor,
        after: Tensor,
        gradient: Tensor,
        updated: Callable[[float], _Right],
        dtype: torch.dtype,
    ) -> bool:
        """Return whether a value is (1 − d) · before − times · lr · gradient, for some d > 0.

        The fitted `times` must be near 1.
        """
        if before.numel() < 3:
            return False
        right = updated(1)
        tries = [(_slope(after[0] - right.value, before), 1.0)]
        # Where the value has shrunk after the update, too, the update has with it.
        columns = torch.stack([before.flatten(), -self.jobs.task.lr * gradient.flatten()], 1)
        change = (after[0] - before).flatten()[:, None]
        tries.append(tuple(torch.linalg.lstsq(columns, change).solution.flatten().tolist()))
        for shrink, times in tries:
            plain = updated(times)
            rounding = torch.finfo(dtype).eps * before.abs()  # of two more products
            usual = rounding.square().mean().sqrt().item()
            # The fitted numbers are off by what the rounding of all elements does to them.
            element = plain.element + 2 * rounding + 4 * usual
            fitted = _Right(plain.value + shrink * before, element, plain.rms + usual)
            if shrink < 0 and abs(times - 1) < 0.1 and all(map(fitted.agrees, after)):
                return True
        return False

    def _buffers(self) -> list[Finding]:
        """Compare the buffers of every rank with those of the runs without a wrapper.

        They are right if they follow the rank's own batches, the policy of the run, or rank 0 on
        all ranks.
        """
        found = []
        of_main = self.runs[0].states[-1][-1]
        for name in of_main:
            seen = [_wide(rank.final[name]) for rank in self.ranks]
            own = [_wide(run.states[-1][-1][name]) for run in self.runs]
            dtype = of_main[name].dtype
            eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
            ways = (own, [own[0]] * len(own))
            if not any(all(map(_close, seen, way, [eps] * len(way))) for way in ways):
                error = max(
                    _error(each[None], right) for each, right in zip(seen, own, strict=True)
                )
                found.append(Finding(name, "buffer", STEPS, error, BUFFER))
        return found


def _named_stale(
    own: RankContext,
    copy: _Copy,
    findings: list[Finding],
    everyone: Sequence[_Trained],
    trained: _Trained,
    parameters: Sequence[Tensors],
    steps: Sequence[Sequence[Any]],
    jobs: _Jobs,
) -> list[Finding]:
    """Rename findings if the second step read weights from before the first update.

    That is tried by repeating the step with such weights.

    All weights are tried, and those of one module at a time. Of each rank all of them are old, or
    all but the part that its own optimizer has updated. They are old in the whole step, or new ones
    arrive before the first backward or the second forward.
    """
    old, new = parameters
    modules = {name.rpartition(".")[0] for name in copy.trainable}
    sets = [set(copy.trainable)]
    if len(modules) <= MOST_MODULES:
        sets += [
            {name for name in copy.trainable if name.rpartition(".")[0] == each}
            for each in sorted(modules)
        ]
    for stale, keeps_own, arrival in product(sets, (False, True), (0, 1, 2)):
        mixed = dict(new)
        for name in stale:
            mixed[name] = old[name].clone()
            for start, number in trained.owned.get(name, ()) if keeps_own else ():
                mixed[name].view(-1)[start : start + number] = new[name].reshape(-1)[
                    start : start + number
                ]
        run = _on_all(
            own,
            lambda mixed=mixed, arrival=arrival: copy.run(
                (old, mixed),
                steps,
                old,
                OWN_BUFFERS,
                (),
                own.is_main,
                new if arrival > 0 else None,
                arrival,
            ),
        )
        others = _gather_on_main(run, own)
        left = on_main(
            own, lambda others=others: _Judge(everyone, others, copy, jobs).wrong_gradients()
        )
        if not left:
            return [replace(each, signature=STALE) for each in findings]
    return findings


def _close(seen: Tensor, right: Tensor, eps: float) -> bool:
    """Return whether a buffer is right, up to rounding."""
    bound = 1e-6 + max(1e-5, SLACK * eps) * right.abs() if eps else torch.zeros_like(right)
    same = (seen - right).abs() <= bound
    return bool((same | (seen == right) | (seen.isnan() & right.isnan())).all())


def _slope(seen: Tensor, right: Tensor) -> float:
    """Return the factor that brings `right` nearest to `seen`."""
    square = right.square().sum().item()
    return (seen * right).sum().item() / square if square else 0.0


def _error(found: Tensor, right: Tensor) -> float:
    """Return the largest |Δ| over ranks and elements, relative to the largest element."""
    return ((found - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()
