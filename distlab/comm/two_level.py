"""All-reduces to the mean in two levels, for hosts whose links are slower than those inside a host.

    inside a host (shard group)   reduce-scatter: each of its S ranks has the mean of 1/S
    between hosts                 all-reduce of that 1/S, the only part that crosses a slow link
    inside a host                 all-gather

A message takes these steps in order. Starting a message moves every earlier message one step on. So
several messages are in different steps at the same time, and both kinds of links are busy:

    started   │ message 0        │ message 1        │ message 2        │              │
    inside    │ reduce-scatter 0 │ reduce-scatter 1 │ reduce-scatter 2 │ all-gather 1 │ all-gather 2
              │                  │                  │ all-gather 0     │              │
    between   │                  │ all-reduce 0     │ all-reduce 1     │ all-reduce 2 │

On NCCL a side stream waits for the previous step, and the host and the computation go on. On gloo
the host waits for it. That step began when the previous message was started. So on gloo a rank may
wait in backward for a rank that starts its message only in `finish_gradient_synchronization()`,
because it did not use a parameter.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.comm.subgroups import MeshGroups


class TwoLevelAllReduce:
    """Messages in flight. All ranks start them, and wait for them, in the same order.

    Args:
        groups: groups of this rank, of at least two replicas.
    """

    def __init__(self, groups: MeshGroups):
        self._groups = groups
        self._in_flight: list[Message] = []  # the oldest first

    def start(self, tensor: Tensor) -> "Message":
        """Start to replace `tensor` (contiguous, floating point) by its mean over all ranks.

        A tensor whose elements the ranks of a shard group do not divide is copied and padded.
        """
        message = Message(tensor, self._groups, self.advance)
        # Before the new message is in the list: its first step has only just begun.
        self.advance()
        self._in_flight.append(message)
        return message

    def advance(self) -> None:
        """Move every message one step on. Forget those that have started their last step."""
        self._in_flight = [message for message in self._in_flight if message.advance()]


class Message:
    """One tensor that is being averaged. Its `wait()` has the meaning of `Work.wait()`.

    Args:
        tensor: contiguous tensor that receives the mean.
        groups: groups of this rank.
        advance_all: function that moves every message one step on, this one included.
    """

    def __init__(self, tensor: Tensor, groups: MeshGroups, advance_all: Callable[[], None]):
        # `.data` has a version counter of its own. Otherwise the writes of the later steps would
        # count as edits of the caller's tensor.
        self._flat = tensor.data.view(-1)
        self._advance_all = advance_all
        self._steps_left = 3  # collectives that are not complete
        self._steps = self._plan(groups)
        self._work, self._group = next(self._steps)

    @torch.no_grad()
    def _plan(self, groups: MeshGroups) -> Iterator[tuple[Work, ProcessGroup]]:
        """Issue the three collectives, each one when the caller has waited for the previous one.

        Yields:
            The collective and its group.
        """
        assert groups.replicate is not None
        flat = self._flat
        shard = groups.shard
        ranks = shard.size()
        numel = flat.numel()
        self._padded = flat
        if numel % ranks != 0:
            rounded_up = -(-numel // ranks) * ranks  # a multiple of the number of ranks
            self._padded = flat.new_zeros(rounded_up)
            self._padded[:numel] = flat
        # This rank's slice. `chunk` returns a single chunk of a tensor without elements.
        mine = self._padded.chunk(ranks)[shard.rank()] if numel > 0 else flat
        if not collectives.shards_in_place(flat.device, shard):
            # gloo must not write into the tensor it reads, see `shards_in_place`.
            mine = torch.empty_like(mine)
        yield collectives.reduce_scatter_mean(mine, self._padded, shard), shard
        yield collectives.all_reduce_mean(mine, groups.replicate), groups.replicate
        yield collectives.all_gather(self._padded, mine, shard), shard

    def advance(self) -> bool:
        """Wait for the current step and start the next one.

        Returns:
            False if it started the last step.
        """
        # The computing stream must not wait between the steps, only at the end in `wait`.
        with collectives.side_stream(self._flat.device):
            self._wait_for_step()
            self._work, self._group = next(self._steps)
        self._steps_left -= 1
        return self._steps_left > 1

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the mean: on gloo the host waits, on NCCL the current stream."""
        # Move all messages, and not only this one, so that ranks issue the same collectives in the
        # same order.
        while self._steps_left > 1:
            self._advance_all()
        self._wait_for_step()
        if self._padded is not self._flat:
            self._flat.copy_(self._padded[: self._flat.numel()])

    def _wait_for_step(self) -> None:
        collectives.wait(self._work, self._group, "averaging gradients")
