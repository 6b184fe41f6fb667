"""Pipeline parallelism: P ranks have some blocks each, activations travel forward and their gradients back.

    for action in this rank's schedule:                       (`schedules.py`)
        F   x from the stage before → forward → y to the stage behind
        B   dy from the stage behind → backward → dx to the stage before
        W   the gradients of matrices that B has put off

With m micro-batches, p ranks and v stages a rank 2·m·(p·v − 1) messages of B·T·d elements go
between neighbours. The loss exists on the last rank alone until the end of the step, which gives it
to the others.

A data strategy wraps what is left on a rank: the stages' blocks, in one module with the names of
the whole. To it a step is one of accumulated gradients, of which the last backward of each stage
synchronizes.

Each direction between two ranks has a group of its own: on a GPU the messages of a group are
carried out in the order in which they were asked for, and a send waits there until it is received.
Nothing is received ahead of its action: a GPU that loads a kernel waits for all that runs on it,
and what an earlier receive waits for may need that kernel.

Source: GPipe (Huang et al. 2019), PipeDream (Narayanan et al. 2019), zero bubble (Qi et al. 2023).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.comm.subgroups import groups_of
from distlab.comm.wait_diagnostics import wait_for_message
from distlab.parallel.schedules import CHUNKS, SCHEDULES, Action, check

if TYPE_CHECKING:
    from distlab.parallel.model import ParallelModel

PutOff = Callable[[Tensor, Callable[[], Tensor]], None]  # a weight, and what makes its gradient


class Staged(Protocol):
    """What a model must export, as `distlab.model.TransformerLM` does.

    `forward(tokens, targets=None, x=…, blocks=…)` runs some blocks on what those before have made,
    `x`. It returns what the last of them makes, `(B, T, width)`; behind the last block of all, the
    loss, or logits without targets.
    """

    num_blocks: int
    width: int

    def keep_blocks(self, kept: Sequence[range]) -> None:
        """Let go of all other blocks, of the embedding without the first, and of norm and head without the last."""

    def put_off_weights(self, put_off: PutOff) -> None:
        """Let backward hand over what makes the gradients of matrices, instead of making them."""


def stage_blocks(model: Any, ranks: int, schedule: str, sizes: Sequence[int] = ()) -> list[range]:
    """Return the blocks of each stage, `sizes` of them, or equally many.

    Raises:
        TypeError: a model that does not export stages.
        ValueError: numbers that do not fit the model.
    """
    if not hasattr(model, "keep_blocks"):
        raise TypeError(
            f"pipeline: {type(model).__name__} does not say how it is cut into stages: it has no keep_blocks(), as "
            "distlab.model.TransformerLM does"
        )
    sizes = stage_sizes(model.num_blocks, ranks, schedule, sizes)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def stage_sizes(blocks: int, ranks: int, schedule: str, sizes: Sequence[int] = ()) -> Sequence[int]:
    """Return the number of blocks of each stage: `sizes`, or equally many.

    Args:
        blocks: number of blocks of the model.
        ranks: number of ranks of the pipeline.
        schedule: one of `SCHEDULES`.
        sizes: number of blocks of each stage; empty for equally many.

    Raises:
        ValueError: numbers that do not fit the model.
    """
    stages = ranks * CHUNKS.get(schedule, 1)
    if blocks < stages:
        counted = f"{blocks} block{'' if blocks == 1 else 's'}"
        raise ValueError(
            f"pipeline: {counted} cannot fill {stages} stages: give --layers {stages}, or another multiple of "
            f"{stages}"
        )
    if not sizes and blocks % stages:
        raise ValueError(
            f"pipeline: {stages} stages cannot have equal parts of {blocks} blocks: give the {stages} sizes "
            f"(--stages), of {blocks} blocks in all, or a multiple of {stages} blocks (--layers)"
        )
    sizes = sizes or [blocks // stages] * stages
    if len(sizes) != stages or sum(sizes) != blocks or min(sizes) < 1:
        raise ValueError(
            f"pipeline: stages of {', '.join(map(str, sizes))} blocks: give {stages} numbers, of {blocks} blocks in all"
        )
    return sizes


class Pipeline:
    """Runs a schedule on this rank's stages.

    Args:
        group: the ranks that have the stages, in order.
        model: a part of which this rank keeps; see `Staged`.
        schedule: one of `SCHEDULES`.
        sizes: blocks of each stage; default: equally many.
        sequence_ranks: ranks that share a sequence inside of a stage (tensor parallelism).

    Attributes:
        stages: the blocks of every stage.
        mine: the stages of this rank.
        observe: a context manager for each action's computation, without its waiting.

    Raises:
        TypeError, ValueError: see `stage_blocks`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        model: Staged,
        schedule: str,
        sizes: Sequence[int] = (),
        sequence_ranks: int = 1,
    ):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.stages = stage_blocks(model, self.ranks, schedule, sizes)
        self.schedule, self.width, self.sequence_ranks = schedule, model.width, sequence_ranks
        self.mine = range(self.rank, len(self.stages), self.ranks)
        self.last = len(self.stages) - 1
        self.observe: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
        model.keep_blocks([self.stages[stage] for stage in self.mine])
        if schedule == "zero-bubble":
            model.put_off_weights(self._put_off)
        self._later: list[tuple[Tensor, Callable[[], Tensor]]] = []  # of the backward that runs
        self._messages: Messages | None = None
        self._actions: dict[int, list[Action]] = {}  # by the number of micro-batches

    def connect(self, pipelines: Sequence[Sequence[int]], group: ProcessGroup) -> None:
        """Make the groups of neighbours; call it on every rank alike.

        Args:
            pipelines: the global ranks of every pipeline of the job.
            group: all ranks of the job.
        """
        self._messages = Messages(pipelines, group)

    def actions(self, batches: int) -> list[Action]:
        """What this rank does in a step.

        Raises:
            ValueError: a number of micro-batches that the schedule does not take.
        """
        if batches not in self._actions:
            schedule = SCHEDULES[self.schedule](self.ranks, batches)
            check(schedule)
            self._actions[batches] = schedule[self.rank]
        return self._actions[batches]

    def run(
        self,
        model: "ParallelModel",
        loss_fn: Callable[[Any, Any], Tensor],
        micro_batches: Sequence[Any],
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Forward and backward of all micro-batches, such that gradients are those of their mean loss, times `scale`.

        Args:
            model: under its strategy.
            loss_fn: `loss_fn(model, batch)`, which calls `model(*batch)` and returns what it
                returns.
            micro_batches: `(tokens, targets)` each, the same on every rank of the pipeline, but for
                a share of each.

        Returns:
            The mean loss, on every rank, 0-dim fp64.
        """
        count = len(micro_batches)
        total = torch.zeros((), device=model.device)
        kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        later: dict[tuple[int, int], list[tuple[Tensor, Callable[[], Tensor]]]] = {}
        for action in self.actions(count):
            kind, stage, batch = action
            taken = self._receive(action, micro_batches[batch][0], model)
            model.enter_stage(stage)
            synchronizes = batch == count - 1
            with nullcontext() if synchronizes else model.no_sync(), self.observe(action):
                if kind == "F":
                    result = self._forward(model, loss_fn, micro_batches[batch], stage, taken)
                    if stage == self.last:
                        result = result / count
                        total = total + result.detach()
                        result = result * scale
                    else:
                        self._messages.send(result.detach(), to=1)
                    # Not the result itself, whose memory nobody needs here any more.
                    kept[stage, batch] = taken, get_gradient_edge(result)
                elif kind == "B":
                    x, edge = kept.pop((stage, batch))
                    self._later = []
                    torch.autograd.backward(edge, taken)
                    later[stage, batch], self._later = self._later, []
                    if stage > 0:
                        self._messages.send(x.grad, to=-1)
                else:
                    make_gradients(later.pop((stage, batch)))
        self._messages.finish()
        # which the other ranks' zeros are, too
        return collectives.sum_tensor(total.double(), self.group)

    @torch.no_grad()
    def forward(self, model: "ParallelModel", batch: Any) -> Tensor | None:
        """Logits, or with targets the loss, of a batch; None on ranks without the last stage."""
        result = None
        for stage in self.mine:
            taken = self._receive(Action("F", stage, 0), batch[0], model)
            model.enter_stage(stage)
            result = self._forward(model, lambda call, batch: call(*batch), batch, stage, taken)
            if stage < self.last:
                self._messages.send(result, to=1)
        self._messages.finish()
        return result if self.last in self.mine else None

    def _forward(
        self, model: "ParallelModel", loss_fn: Callable, batch: Any, stage: int, x: Tensor | None
    ) -> Tensor:
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        with model.autocast():
            return loss_fn(partial(model, x=x, blocks=self.stages[stage]), batch)

    def _receive(self, action: Action, tokens: Tensor, model: "ParallelModel") -> Tensor | None:
        """What an action takes of another rank, or None."""
        come = {"F": -1, "B": 1, "W": 0}[action.kind]
        if not come or not 0 <= action.stage + come <= self.last:
            return None
        B, T = tokens.shape
        computes = model.compute_dtype if model.casts_parameters else None
        dtype = computes or next(model.module.parameters()).dtype  # of what an embedding returns
        x = torch.empty(B, T // self.sequence_ranks, self.width, dtype=dtype, device=model.device)
        return self._messages.receive(x, come)

    def _put_off(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        self._later.append((weight, gradient))


def make_gradients(put_off: list[tuple[Tensor, Callable[[], Tensor]]]) -> None:
    """Make what a backward has put off, and let go of what each was made of."""
    while put_off:
        weight, gradient = put_off.pop(0)
        torch.autograd.backward(weight, gradient())


class Messages:
    """Activations and their gradients between neighbours of a pipeline, whose last rank is a neighbour of the first."""

    def __init__(self, pipelines: Sequence[Sequence[int]], group: ProcessGroup):
        rank = torch.distributed.get_rank()
        pairs = {  # direction, sender, receiver: each a group of its own
            (step, sender, ranks[(place + step) % len(ranks)]): None
            for ranks in pipelines
            for place, sender in enumerate(ranks)
            for step in (1, -1)
        }
        groups = groups_of(group, [key[1:] for key in pairs])
        self._out = {
            step: each
            for (step, sender, _), each in zip(pairs, groups, strict=True)
            if sender == rank
        }
        self._in = {
            step: each
            for (step, _, taker), each in zip(pairs, groups, strict=True)
            if taker == rank
        }
        self._sent: list[tuple[Work, Tensor, ProcessGroup]] = []

    def receive(self, x: Tensor, come: int) -> Tensor:
        """Overwrite `x` by what the rank before (−1) or behind (1) sends next."""
        group = self._in[-come]
        arriving = torch.empty_like(x, device="cpu") if self._through_host(x, group) else x
        wait_for_message(collectives.receive(arriving, group), group, "receiving activations")
        return x if arriving is x else x.copy_(arriving)

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to the rank behind (1) or before (−1)."""
        group = self._out[to]
        x = x.cpu() if self._through_host(x, group) else x.contiguous()
        self._sent = [each for each in self._sent if not each[0].is_completed()]
        self._sent.append((collectives.send(x, group), x, group))

    def finish(self) -> None:
        """Wait until everything has been received."""
        for work, _, group in self._sent:
            wait_for_message(work, group, "sending activations")
        self._sent.clear()

    @staticmethod
    def _through_host(x: Tensor, group: ProcessGroup) -> bool:
        return x.is_cuda and group.name() == "gloo"
