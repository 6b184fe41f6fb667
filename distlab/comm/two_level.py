"""All-reduces to the mean in two levels, for ranks that reach some of the others over slower links.

    inside a shard group (a host)   reduce-scatter: each of its S ranks has the mean of 1/S of the message
    between the groups              all-reduce of that 1/S: only so much crosses a rank's slow link
    inside                          all-gather

A message takes these steps one after the other; messages that are started one after the other are
in different steps at the same time, so both kinds of links are busy. Starting one moves all earlier
ones a step on:

    inside    │ reduce-scatter 0 │ reduce-scatter 1 │ reduce-scatter 2, all-gather 0 │ all-gather 1 │ all-gather 2
    between   │                  │ all-reduce 0     │ all-reduce 1                   │ all-reduce 2 │

On NCCL a side stream waits for the step before, and neither the host nor the computation does. On
gloo the host does, for a step that began when the message before was started: there a rank waits in
backward for ranks that start a message in `finish_gradient_synchronization()` only, because they
did not use a parameter.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.comm.subgroups import MeshGroups


class TwoLevelAllReduce:
    """Messages in flight, the oldest first. All ranks start and await them in the same order."""

    def __init__(self, groups: MeshGroups):
        self._groups = groups
        self._on_their_way: list[Message] = []

    def start(self, tensor: Tensor) -> "Message":
        """Start to replace `tensor` (contiguous, floating point) by its mean over all ranks.

        It is padded, and copied for it, where the ranks of a shard group do not divide its
        elements.
        """
        message = Message(tensor, self._groups, self.advance)
        self.advance()
        self._on_their_way.append(message)
        return message

    def advance(self) -> None:
        """Move every message one step on."""
        self._on_their_way = [message for message in self._on_their_way if message.advance()]


class Message:
    """One tensor that is being averaged; `wait()` has the meaning of `Work.wait()`."""

    def __init__(self, tensor: Tensor, groups: MeshGroups, advance_all: Callable[[], None]):
        # `.data`: the later steps write it under a version counter of their own, as the first
        # collective alone would.
        self._flat, self._advance_all = tensor.data.view(-1), advance_all
        self._steps_left = 3
        self._steps = self._plan(groups)
        self._work, self._group = next(self._steps)

    @torch.no_grad()
    def _plan(self, groups: MeshGroups) -> Iterator[tuple[Work, ProcessGroup]]:
        """The three collectives, each issued when the one before has been waited for."""
        assert groups.replicate is not None
        flat, shard = self._flat, groups.shard
        ranks, numel = shard.size(), flat.numel()
        self._padded = flat if numel % ranks == 0 else flat.new_zeros(-(-numel // ranks) * ranks)
        if self._padded is not flat:
            self._padded[:numel] = flat
        mine = self._padded.chunk(ranks)[shard.rank()] if numel else flat
        if not collectives.shards_in_place(flat.device, shard):
            mine = torch.empty_like(mine)
        yield collectives.reduce_scatter_mean(mine, self._padded, shard), shard
        yield collectives.all_reduce_mean(mine, groups.replicate), groups.replicate
        yield collectives.all_gather(self._padded, mine, shard), shard

    def advance(self) -> bool:
        """Wait for a step and start the next; False once the last has been started."""
        with collectives.side_stream(self._flat.device):
            self._wait_for_step()
            self._work, self._group = next(self._steps)
        self._steps_left -= 1
        return self._steps_left > 1

    @torch.no_grad()
    def wait(self) -> None:
        """Make what follows see the mean."""
        while self._steps_left > 1:
            self._advance_all()
        self._wait_for_step()
        if self._padded is not self._flat:
            self._flat.copy_(self._padded[: self._flat.numel()])

    def _wait_for_step(self) -> None:
        collectives.wait(self._work, self._group, "averaging gradients")
