"""Pipeline parallelism: each of P ranks has some blocks, and neighbours exchange activations.

    for action in this rank's schedule:                       (`schedules.py`)
        F   receive x from the stage before → forward → send y to the stage after
        B   receive dy from the stage after → backward → send dx to the stage before
        W   compute the matrix gradients that B deferred

With m micro-batches, p ranks and v stages per rank, neighbours exchange 2·m·(p·v − 1) messages of
B·T·d elements in a step. Only the last rank has the loss, until the end of the step, when all ranks
get it.

A data strategy wraps the blocks that are left on a rank, as one module with the names of the whole
model. For the strategy, a step accumulates gradients over micro-batches. Only the last backward of
each stage synchronizes them.

Each direction between two ranks has its own process group. On a GPU the messages of one group run
in the order in which they were started, and a send waits until it is received. Nothing is received
before its action. A GPU that loads a kernel first waits for all running work, and an early receive
among it may wait for a message that needs that kernel.

Sources: GPipe (Huang et al. 2019), PipeDream (Narayanan et al. 2019), zero bubble (Qi et al. 2023).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.comm.subgroups import groups_of
from distlab.comm.wait_diagnostics import wait_for_message
from distlab.parallel.layout import Axes
from distlab.parallel.model import ParallelModel
from distlab.parallel.schedules import CHUNKS, SCHEDULES, Action, check

# A function that takes a weight, and a function that computes the weight's gradient later.
PutOff = Callable[[Tensor, Callable[[], Tensor]], None]


class Staged(Protocol):
    """The interface that a model must export, as `distlab.model.TransformerLM` does.

    `forward(tokens, targets=None, x=…, blocks=…)` runs some blocks on `x`, the output of the blocks
    before them. It returns the output of its last block, `(B, T, width)`. With the last block of
    the model it returns the loss, or the logits if there are no targets.

    Attributes:
        num_blocks: number of blocks.
        width: size of the last dimension of activations.
    """

    num_blocks: int
    width: int

    def keep_blocks(self, kept: Sequence[range]) -> None:
        """Delete all other blocks.

        The embedding stays with the first block, and norm and head stay with the last.
        """

    def put_off_weights(self, put_off: PutOff) -> None:
        """Make backward call `put_off` for each matrix instead of computing its gradient."""


# -- the stages -----------------------------------------------------------------------------------


class StageRunner:
    """The stages of a pipeline, of which this rank keeps its own. A subclass runs them.

    Args:
        axes: process groups of this rank, and the layout with the schedule and sizes of stages.
        model: the whole model, see `Staged`. Only this rank's blocks are kept.

    Attributes:
        group: ranks that have the stages, in order.
        schedule: name of the schedule, one of `SCHEDULES`.
        stages: blocks of each stage, over all ranks.
        mine: numbers of this rank's stages.
        last: number of the last stage.

    Raises:
        TypeError: a model that does not export stages.
        ValueError: numbers that do not fit the model.
    """

    def __init__(self, axes: Axes, model: Staged):
        if not hasattr(model, "keep_blocks"):
            raise TypeError(
                f"pipeline: {type(model).__name__} does not say how it is cut into stages: it has "
                "no keep_blocks(), as distlab.model.TransformerLM does"
            )
        self.group = axes.pipeline
        self.rank = self.group.rank()
        self.ranks = self.group.size()
        self.schedule = axes.layout.schedule
        self.stages: list[range] = []
        first = 0
        for size in stage_sizes(model.num_blocks, self.ranks, self.schedule, axes.layout.stages):
            self.stages.append(range(first, first + size))
            first += size
        self.mine = range(self.rank, len(self.stages), self.ranks)
        self.last = len(self.stages) - 1
        model.keep_blocks([self.stages[stage] for stage in self.mine])


def stage_sizes(blocks: int, ranks: int, schedule: str, sizes: Sequence[int] = ()) -> Sequence[int]:
    """Return the number of blocks of each stage.

    Args:
        blocks: number of blocks of the model.
        ranks: number of ranks of the pipeline.
        schedule: name of the schedule, one of `SCHEDULES`.
        sizes: number of blocks of each stage. Empty: stages of equal size.

    Raises:
        ValueError: numbers that do not fit the model.
    """
    stages = ranks * CHUNKS.get(schedule, 1)
    if blocks < stages:
        counted = "1 block" if blocks == 1 else f"{blocks} blocks"
        raise ValueError(
            f"pipeline: {counted} cannot fill {stages} stages: give --layers {stages}, or another "
            f"multiple of {stages}"
        )
    if not sizes:
        if blocks % stages:
            raise ValueError(
                f"pipeline: {stages} stages cannot have equal parts of {blocks} blocks: give the "
                f"{stages} sizes (--stages), of {blocks} blocks in all, or a multiple of {stages} "
                "blocks (--layers)"
            )
        return [blocks // stages] * stages
    if len(sizes) != stages or sum(sizes) != blocks or min(sizes) < 1:
        raise ValueError(
            f"pipeline: stages of {', '.join(map(str, sizes))} blocks: give {stages} numbers, of "
            f"{blocks} blocks in all"
        )
    return sizes


# -- a step ---------------------------------------------------------------------------------------


class Deferred(NamedTuple):
    """The gradient of a matrix that a backward has deferred.

    Attributes:
        weight: parameter whose gradient is deferred.
        gradient: function that computes the gradient, in the shape of `weight`.
    """

    weight: Tensor
    gradient: Callable[[], Tensor]


class Pipeline(StageRunner):
    """Runner of a schedule on this rank's stages. Every rank of the job makes one.

    Args:
        axes, model: see `StageRunner`.

    Attributes:
        observe: function that returns a context manager for the computation of an action, without
            its waiting.

    Raises:
        TypeError, ValueError: see `StageRunner`.
    """

    def __init__(self, axes: Axes, model: Staged):
        super().__init__(axes, model)
        self.sequence_ranks = axes.layout.tensor  # these share a sequence inside a stage
        self.width = model.width
        self.observe: Callable[[Action], AbstractContextManager[Any]] = nullcontext
        if self.schedule == "zero-bubble":
            model.put_off_weights(self._put_off)
        self._deferred: list[Deferred] = []  # gradients deferred by the backward that runs now
        self._messages = Messages(axes.pipelines, axes.world)
        # Number of micro-batches of a step → this rank's actions.
        self._actions: dict[int, list[Action]] = {}

    def actions(self, batches: int) -> list[Action]:
        """Return this rank's actions in a step of this number of micro-batches.

        Raises:
            ValueError: a number of micro-batches that the schedule does not allow.
        """
        if batches not in self._actions:
            schedule = SCHEDULES[self.schedule](self.ranks, batches)
            check(schedule)
            self._actions[batches] = schedule[self.rank]
        return self._actions[batches]

    def run(
        self,
        model: ParallelModel,
        loss_fn: Callable[[Any, Any], Tensor],
        micro_batches: Sequence[Any],
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Run forward and backward of all micro-batches.

        The gradients are those of the mean loss times `scale`.

        Args:
            model: this rank's blocks under a data strategy.
            loss_fn: `loss_fn(model, batch)`, which calls `model(*batch)` and returns its result.
            micro_batches: `(tokens, targets)` each. All ranks of a pipeline give the same ones,
                except for their parts of the sequences.
            scale: factor of the loss, for gradients only.

        Returns:
            The mean loss, on every rank, 0-dim fp64.

        Raises:
            ValueError: a number of micro-batches that the schedule does not allow.
            TypeError: `loss_fn` returned no tensor, such as (sum, count).
        """
        count = len(micro_batches)
        total = torch.zeros((), device=model.device)
        # By (stage, micro-batch): from F to B, and from B to W.
        forwards: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        deferred: dict[tuple[int, int], list[Deferred]] = {}
        for action in self.actions(count):
            kind, stage, batch = action
            received = self._receive(action, micro_batches[batch][0], model)
            model.enter_stage(stage)
            is_last_batch = batch == count - 1
            sync = nullcontext() if is_last_batch else model.no_sync()
            with sync, self.observe(action):
                if kind == "F":
                    x = received
                    result = self._forward(model, loss_fn, micro_batches[batch], stage, x)
                    if stage == self.last:
                        result = result / count
                        total = total + result.detach()
                        result = result * scale
                    else:
                        self._messages.send(result.detach(), to=1)
                    # Keep the edge and not the result, whose memory is not needed any more.
                    forwards[stage, batch] = x, get_gradient_edge(result)
                elif kind == "B":
                    x, edge = forwards.pop((stage, batch))
                    self._deferred = []  # `_put_off` appends to it
                    torch.autograd.backward(edge, received)
                    deferred[stage, batch] = self._deferred
                    self._deferred = []
                    if stage > 0:
                        self._messages.send(x.grad, to=-1)
                else:
                    make_gradients(deferred.pop((stage, batch)))
        self._messages.finish()
        # Ranks without the last stage add zero.
        return collectives.sum_tensor(total.double(), self.group)

    @torch.no_grad()
    def forward(self, model: ParallelModel, batch: Any) -> Tensor | None:
        """Return the logits of a batch, or the loss if the batch has targets.

        None on ranks without the last stage.
        """
        result = None
        for stage in self.mine:
            x = self._receive(Action("F", stage, 0), batch[0], model)
            model.enter_stage(stage)
            result = self._forward(model, _call, batch, stage, x)
            if stage < self.last:
                self._messages.send(result, to=1)
        self._messages.finish()
        return result if self.last in self.mine else None

    def _forward(
        self,
        model: ParallelModel,
        loss_fn: Callable[[Any, Any], Tensor],
        batch: Any,
        stage: int,
        x: Tensor | None,
    ) -> Tensor:
        """Run the blocks of a stage on `x`, or on the tokens in the first stage."""
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        with model.autocast():
            result = loss_fn(partial(model, x=x, blocks=self.stages[stage]), batch)
        if not isinstance(result, Tensor):
            raise TypeError(
                "in a pipeline loss_fn returns what the model returns, a tensor, and not "
                f"{type(result).__name__}: the loss is the mean over a micro-batch"
            )
        return result

    def _receive(self, action: Action, tokens: Tensor, model: ParallelModel) -> Tensor | None:
        """Return the message that an action needs from another stage, or None."""
        if action.kind == "F" and action.stage > 0:
            source = -1
        elif action.kind == "B" and action.stage < self.last:
            source = 1
        else:
            return None
        B, T = tokens.shape
        dtype = model.compute_dtype if model.casts_parameters else None
        if dtype is None:
            dtype = next(model.module.parameters()).dtype  # an embedding returns its weight's dtype
        shape = (B, T // self.sequence_ranks, self.width)
        return self._messages.receive(torch.empty(shape, dtype=dtype, device=model.device), source)

    def _put_off(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        self._deferred.append(Deferred(weight, gradient))


def make_gradients(deferred: list[Deferred]) -> None:
    """Compute the gradients that a backward has deferred.

    The list is emptied one by one, so that each gradient's inputs are freed at once.
    """
    while deferred:
        weight, gradient = deferred.pop(0)
        torch.autograd.backward(weight, gradient())


def _call(model: Any, batch: Any) -> Tensor:
    """Call the model, in place of a loss function."""
    return model(*batch)


# -- messages -------------------------------------------------------------------------------------


class Messages:
    """Activations and their gradients between neighbours of a pipeline.

    The last rank and the first rank are also neighbours, for schedules with several stages per
    rank.

    Args:
        pipelines: global ranks of each pipeline of the job.
        group: all ranks of the job.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], group: ProcessGroup):
        links = _links(pipelines)
        groups = groups_of(group, [(link.sender, link.receiver) for link in links])
        rank = torch.distributed.get_rank()
        # By the direction of the message: 1 to the rank after the sender, −1 to the one before it.
        self._out: dict[int, ProcessGroup] = {}
        self._in: dict[int, ProcessGroup] = {}
        for link, link_group in zip(links, groups, strict=True):
            if link.sender == rank:
                self._out[link.direction] = link_group
            if link.receiver == rank:
                self._in[link.direction] = link_group
        self._sent: list[tuple[Work, Tensor, ProcessGroup]] = []

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` by the next message from the rank before (−1) or after (1)."""
        group = self._in[-source]  # a message from the rank before has the direction 1
        through_host = self._through_host(x, group)
        arriving = torch.empty_like(x, device="cpu") if through_host else x
        work = collectives.receive(arriving, group)
        wait_for_message(work, group, "receiving activations")
        if through_host:
            x.copy_(arriving)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to the rank after (1) or before (−1)."""
        group = self._out[to]
        x = x.cpu() if self._through_host(x, group) else x.contiguous()
        # Let go of messages that have arrived: a tensor must live until it has been sent.
        self._sent = [each for each in self._sent if not each[0].is_completed()]
        self._sent.append((collectives.send(x, group), x, group))

    def finish(self) -> None:
        """Wait until all sent messages have been received."""
        for work, _, group in self._sent:
            wait_for_message(work, group, "sending activations")
        self._sent.clear()

    @staticmethod
    def _through_host(x: Tensor, group: ProcessGroup) -> bool:
        """Return True for a tensor on a GPU under gloo, which sends from host memory."""
        return x.is_cuda and group.name() == "gloo"


class _Link(NamedTuple):
    """One direction between two neighbours.

    Attributes:
        direction: 1 from a rank to the rank after it, −1 to the rank before it.
        sender, receiver: global ranks.
    """

    direction: int
    sender: int
    receiver: int


def _links(pipelines: Sequence[Sequence[int]]) -> list[_Link]:
    """Return the links of all pipelines.

    Two ranks have four links: each is the rank before and the rank after the other.
    """
    links = []
    for ranks in pipelines:
        for place, sender in enumerate(ranks):
            for direction in (1, -1):
                receiver = ranks[(place + direction) % len(ranks)]
                links.append(_Link(direction, sender, receiver))
    return links
