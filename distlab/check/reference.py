"""The same steps in a copy of the model that no wrapper has touched."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.bench.task import Task
from distlab.check.messages import exchange
from distlab.check.tensors import (
    Tensors,
    buffers_of,
    copies,
    load,
    parameters_of,
    per_element,
    wide,
)
from distlab.check.weights import Weights, seen_in, weights_of
from distlab.check.where import Calls, Trace
from distlab.comm import RankContext
from distlab.train.step import mean_loss

# Whose buffers, such as running statistics, forward may read. Each is right, and a wrapper follows
# one of them.
OWN_BUFFERS = "each rank's own"
EACH_STEP = "rank 0's, from the begin of each step on"
EACH_FORWARD = "rank 0's, before each forward"

# Largest relative difference of two losses, and of two gradients, of the same weights and batch.
SAME_LOSS = 1e-6
SAME_GRADIENTS = 1e-3


def step_size(task: Task, batch: Any, seed: int, device: torch.device) -> float:
    """Return the learning rate of the check.

    It is the task's. For half precision it is large enough that the update can be seen.

    A bf16 parameter keeps 8 bits, so an update of less than 1/256 of it is lost, and a wrong one
    looks like a right one. The norm of the update becomes at least 8 eps of the norm of the
    parameters.

    Raises:
        ValueError: the same weights and batch give two losses, or two gradients.
    """
    _refuse_unrepeatable(task, batch, seed, device)
    module = task.build(seed, device)
    halves = [p for p in module.parameters() if p.requires_grad and p.element_size() == 2]
    if not halves:
        return task.lr
    mean_loss(task.loss_fn(module, batch)).backward()
    size = math.sqrt(sum(p.detach().double().square().sum().item() for p in halves))
    # In fp64, as squares of half-precision numbers overflow or vanish.
    gradients = [p.grad.double() for p in halves if p.grad is not None]
    slope = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    # Without a gradient no learning rate would make the update visible.
    if not 0 < slope < math.inf:
        return task.lr
    eps = max(torch.finfo(p.dtype).eps for p in halves)
    # The update has the norm lr · slope, so this lr makes it 8 eps · size. A parameter's last bit
    # is eps of it.
    return max(task.lr, 8 * eps * size / slope)


def _refuse_unrepeatable(task: Task, batch: Any, seed: int, device: torch.device) -> None:
    """Raise ValueError if the same weights and batch give two losses, or two gradients.

    The copy of the model repeats each batch to measure its noise. A change that is no rounding
    would count as noise, and the check would accept any gradient.
    """
    fresh = mean_loss(task.loss_fn(task.build(seed, device), batch)).item()
    module = task.build(seed, device)
    together = parameters_of(module) | buffers_of(module)
    before = {name: tensor.detach().clone() for name, tensor in together.items()}
    first, gradients = _loss_and_gradients(task, module, batch)
    # Both calls were the first of their module, so a count that the module keeps was the same.
    if abs(fresh - first) > SAME_LOSS * abs(fresh):
        raise ValueError(
            f"one batch and the same weights gave the losses {fresh:.6g} and {first:.6g}: forward "
            "or loss is random, or depends on how often it was called; draw from torch's "
            "generator, which is seeded before each batch, or call random.seed(0) or "
            "numpy.random.seed(0) in loss(model, batch), and keep a count in a buffer of the model "
            "(register_buffer)"
        )
    # Buffers may change in forward, as running statistics do: the check puts them back as well.
    load(module, before)
    second, again = _loss_and_gradients(task, module, batch)
    difference = norm = 0.0
    for one, other in zip(gradients, again, strict=True):
        difference += (wide(one) - wide(other)).square().sum().item()
        # Of both, because one of them may be zero.
        norm += (wide(one).square().sum().item() + wide(other).square().sum().item()) / 2
    # Over all gradients together, because one that is zero in theory is all noise. On a GPU, sums
    # in another order change a gradient by its last bits.
    eps = max([torch.finfo(gradient.dtype).eps for gradient in gradients], default=0.0)
    limit = max(SAME_GRADIENTS, 4 * eps)
    if abs(first - second) > SAME_LOSS * abs(first):
        what = f"gave the loss {first:.6g}, and then {second:.6g}"
    elif difference > limit**2 * norm:
        what = f"gave gradients that are {math.sqrt(difference / norm):.1%} of their norm apart"
    else:
        return
    raise ValueError(
        "the forward depends on how often it was called: one batch and the same parameters and "
        f"buffers {what}; keep that number, or what else the model remembers, in a buffer "
        "(register_buffer)"
    )


def _loss_and_gradients(task: Task, module: nn.Module, batch: Any) -> tuple[float, list[Tensor]]:
    """Return the mean loss of a batch, and the gradient of each parameter that trains."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trainable:
        # Zeros and not None, as in `Copy`: each parameter has a gradient, and none is sparse.
        parameter.grad = torch.zeros_like(parameter)
    loss = mean_loss(task.loss_fn(module, batch))
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in trainable]


@dataclass(frozen=True)
class Sums:
    """Sums of one parameter's gradients over a rank's micro-batches in one step, in fp64.

    Each gradient is that of the micro-batch's loss divided by the micro-batches, or by the share of
    a rank in all counts, as in the training step.

    Attributes:
        own: sum of the gradients.
        others: the same under other weighings of the micro-batches, by their names, see `Weights`.
        first, last: gradients of the first and the last micro-batch.
        magnitude: sum of the absolute values of the gradients.
        partial: sum of the squares of the partial sums, which says how much the additions round.
        noise: sum of the squares of the changes when parameters move by their last bit.
        shift: sum of the changes.
        largest: largest absolute value.
    """

    own: Tensor
    others: dict[str, Tensor]
    first: Tensor
    last: Tensor
    magnitude: Tensor
    partial: Tensor
    noise: Tensor
    shift: Tensor
    largest: float

    @staticmethod
    def of(gradients: Sequence[Tensor], moved: Sequence[Tensor], weights: Weights) -> "Sums":
        """Add up the gradients of micro-batches, and those with moved parameters."""
        plain = torch.stack([wide(gradient) for gradient in gradients])
        # What the same step gives with parameters moved by their last bit, minus what it gives as
        # they are: the noise of any right implementation.
        change = torch.stack([wide(gradient) for gradient in moved]) - plain
        # The change of an infinite gradient is NaN, which says nothing about rounding.
        change = _weighted(change.nan_to_num(0.0, 0.0, 0.0), weights.right)
        each = _weighted(plain, weights.right)
        others = {}
        for name, factors in weights.others.items():
            others[name] = _weighted(plain, factors).sum(0)
        return Sums(
            own=each.sum(0),
            others=others,
            first=each[0],
            last=each[-1],
            magnitude=each.abs().sum(0),
            # The running sum after each micro-batch: each addition rounds by a share of it.
            partial=each.cumsum(0).square().sum(0),
            noise=change.square().sum(0),
            shift=change.sum(0),
            largest=each.abs().max().item(),
        )

    def part(self, name: str) -> Tensor:
        """Return the sum with this name: "own", "first", "last" or a weighing of `others`."""
        return self.others[name] if name in self.others else getattr(self, name)

    def of_elements(self, elements: Tensor, shape: torch.Size) -> "Sums":
        """Return the sums of some elements of a parameter of this shape.

        `largest` stays that of the whole: its share of the rounding is that of any element.
        """

        def cut(tensor: Tensor) -> Tensor:
            return per_element(tensor, shape)[elements]

        return Sums(
            own=cut(self.own),
            others={name: cut(tensor) for name, tensor in self.others.items()},
            first=cut(self.first),
            last=cut(self.last),
            magnitude=cut(self.magnitude),
            partial=cut(self.partial),
            noise=cut(self.noise),
            shift=cut(self.shift),
            largest=self.largest,
        )


def _weighted(gradients: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the gradients of micro-batches times their weights, stacked in dimension 0."""
    factors = torch.tensor(weights, dtype=torch.float64)
    # The weights are spread over all other dimensions.
    return gradients * factors.view(-1, *[1] * (gradients.ndim - 1))


@dataclass(frozen=True)
class Run:
    """One rank's training without a wrapper.

    Attributes:
        sums: for each step, sums by parameter.
        at_end: for each step, see `Weights`.
        shares: for each step, this rank's share of all tokens, see `Weights`.
        states: for each step, the buffers before each micro-batch and after the last.
        loss: loss of the last step.
        micro_batches: number per step.
        calls: what each module returned, and the same with parameters moved by their last bit.
            Empty if nothing was recorded.
    """

    sums: list[dict[str, Sums]]
    at_end: list[float]
    shares: list[float | None]
    states: list[list[Tensors]]
    loss: float
    micro_batches: int
    calls: tuple[Calls, Calls]


class Copy:
    """A copy of the model that no wrapper has touched, on each rank.

    Attributes:
        trainable: name → parameter, of those that train and have elements.
        frozen: names of the other parameters.
        tied: names of parameters that the module has under several names.
        where: True to record what each module returns.
        has_state: True if there are floating-point buffers, which forward may read and write.
    """

    def __init__(
        self,
        task: Task,
        initial: Tensors,
        seed: int,
        device: torch.device,
        where: bool = False,
    ):
        self.task, self.where = task, where
        self.module = task.build(seed, device)
        named = parameters_of(self.module)
        for name, parameter in named.items():
            if name not in initial:
                raise ValueError(
                    f"the module has no parameter {name} under the wrapper: parameters are "
                    "compared by their names"
                )
            if initial[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} has shape {tuple(initial[name].shape)} under the wrapper, not "
                    f"{tuple(parameter.shape)}: give what the wrapper returns a method "
                    "gather(name, local) that returns the whole of this rank's part"
                )
        # A parameter without elements has no gradient to compare.
        self.trainable = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
        self.frozen = [name for name in named if name not in self.trainable]
        # named_parameters() leaves a tied weight's second name out. By identity, both are counted.
        names = Counter(id(p) for _, p in self.module.named_parameters(remove_duplicate=False))
        self.tied = {name for name, parameter in self.trainable.items() if names[id(parameter)] > 1}
        self.has_state = any(buffer.is_floating_point() for buffer in self.module.buffers())

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take over parameters and buffers, those that are given."""
        load(self.module, values)

    @torch.no_grad()
    def move(self) -> None:
        """Move each parameter by its last bit, up or down at random."""
        # The generator is seeded, so two checks of one wrapper give the same verdict.
        generator = torch.Generator().manual_seed(0)
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                up = (
                    torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device)
                    * 2
                    - 1
                )
                # Half of the elements go up and half down, so that the changes do not add up to a
                # shift.
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
        own: RankContext,
        late: Tensors | None = None,
        arrival: int | None = None,
    ) -> Run:
        """Repeat the steps of this rank; call it on every rank.

        Args:
            parameters: for each step, parameters by name.
            steps: for each step, its micro-batches.
            initial: tensors by name, with the buffers before the first step.
            policy: name of the buffers that forward reads, such as `OWN_BUFFERS`.
            main_states: `Run.states` of rank 0, for a policy that reads its buffers.
            own: this rank, with the group of the check's messages.
            late: parameters that arrive during the last step, if they differ from the others.
            arrival: phase before which `late` arrives: 1 the backward of the first micro-batch, 2
                the second forward, 0 not in this step. None: there is no `late`.
        """
        # On rank 0 all policies are the same: the buffers are its own.
        if own.is_main:
            policy = OWN_BUFFERS
        all_sums, all_states, at_end, shares, loss = [], [], [], [], 0.0
        traces = (Trace(self.module), Trace(self.module))
        before = initial
        for number, micro_batches in enumerate(steps):
            read = {}  # micro-batch → buffers that it finds in place of its own
            # In this policy rank 0's buffers are read once, before the first micro-batch of a step.
            if policy == EACH_STEP:
                read = {0: main_states[number][0]}
            elif policy == EACH_FORWARD:
                read = dict(enumerate(main_states[number][:-1]))
            then = late if number == len(steps) - 1 else None
            step = (number, parameters[number], then, arrival, micro_batches, before, read)
            gradients, states, losses, counts = self._step(*step, traces[0], moved=False)
            # The share of each micro-batch depends on the counts of all ranks, so this is a message
            # to all.
            weights = weights_of(exchange(own, seen_in(micro_batches, counts)), own.rank)
            loss = 0.0
            for weight, of_batch in zip(weights.right, losses, strict=True):
                loss += weight * of_batch
            # With weights that did not arrive in time, only the values are wanted, and not their
            # noise.
            others = (
                gradients if arrival is not None else self._step(*step, traces[1], moved=True)[0]
            )
            sums = {}
            for name in self.trainable:
                sums[name] = Sums.of(
                    [each[name] for each in gradients], [each[name] for each in others], weights
                )
            all_sums.append(sums)
            at_end.append(weights.at_end)
            shares.append(weights.share)
            all_states.append(states)
            # The next step starts from the buffers that this one has left.
            before = states[-1]
        calls = (traces[0].calls, traces[1].calls)
        return Run(all_sums, at_end, shares, all_states, loss, len(steps[0]), calls)

    def _step(
        self,
        step: int,
        parameters: Tensors,
        late: Tensors | None,
        arrival: int | None,
        micro_batches: Sequence[Any],
        before: Tensors,
        read: Mapping[int, Tensors],
        trace: Trace,
        moved: bool,
    ) -> tuple[list[Tensors], list[Tensors], list[float], list[float | None]]:
        """Repeat one step. Return the gradients, the buffers, the losses and the counts.

        The buffers are those before each micro-batch and after the last. Of each micro-batch, the
        loss is its mean divided by the micro-batches, and the count None. Or they are (sum, count),
        as its loss function returns them.
        """
        buffers = set(buffers_of(self.module))
        self._load_parameters(parameters, buffers, moved)
        self.load({name: value for name, value in before.items() if name in buffers})
        gradients, states, losses, counts = [], [], [], []
        for number, batch in enumerate(micro_batches):
            # Phases alternate: forward of micro-batch 0, its backward, forward of micro-batch 1,
            # and so on.
            if 2 * number == arrival and late is not None:
                self._load_parameters(late, buffers, moved)
            if number in read:
                self.load(read[number])
            states.append(copies({}, self.module))
            for parameter in self.trainable.values():
                # Zeros and not None: a parameter that the batch does not use then has a gradient of
                # zero, as in the mean over ranks.
                parameter.grad = torch.zeros_like(parameter)
            trace.begin(step + 1, number + 1)
            with trace.hooked() if self.where else nullcontext():
                loss, count = self.task.loss_fn(self.module, batch), None
            if isinstance(loss, tuple):
                loss, count = loss[0], float(loss[1])
            else:
                # Without a count the loss is a mean, so it is divided as the training step does.
                loss = loss / len(micro_batches)
            if 2 * number + 1 == arrival and late is not None:
                self._load_parameters(late, buffers, moved)
            # One backward for each micro-batch with its own gradient, so that their sums can be
            # formed in every way that a mistake may.
            loss.backward()
            losses.append(loss.item())
            counts.append(count)
            gradients.append({name: p.grad.cpu().clone() for name, p in self.trainable.items()})
        states.append(copies({}, self.module))
        return gradients, states, losses, counts
