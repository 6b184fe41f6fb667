"""One collective sent by the library, by fewer CTAs or by copy engines, for measurements.

Each function is a context that yields `Messages`, which send the same collective again and again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import collectives
from distlab.comm.context import RankContext
from distlab.comm.copy_engine import CopyEngineTensors


@dataclass
class Messages:
    """Two messages that are sent in turn.

    Args:
        sent: tensors of this rank.
        received: results of this rank.
        send: function that starts message `number % 2` and returns an object to `wait()` for.
    """

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    send: Callable[[int], Any]


@contextmanager
def all_reduces(context: RankContext, count: int, ctas: int | None = None) -> Iterator[Messages]:
    """Yield all-reduces that the library sends.

    Args:
        context: context of this rank.
        count: number of elements of a message.
        ctas: number of CTAs of a new NCCL communicator. None: the communicator of the job.
    """
    group = context.group
    if ctas is not None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = ctas
        options.config.max_ctas = ctas
        ranks = dist.get_process_group_ranks(group)
        group = dist.new_group(
            ranks, backend="nccl", pg_options=options, use_local_synchronization=True
        )
    # Two, so that the next message can start while the last one's tensor is still in use.
    tensors = [torch.zeros(count, device=context.device) for _ in range(2)]

    def send(number: int) -> dist.Work:
        # prescaled: the measured time is that of the message, without a division.
        return collectives.all_reduce_mean(tensors[number % 2], group, prescaled=True)

    yield Messages(tensors, tensors, send)
    if ctas is not None:
        dist.destroy_process_group(group)


@contextmanager
def copied_all_reduces(context: RankContext, count: int) -> Iterator[Messages]:
    """Yield all-reduces of `count` elements by copy engines, as `bucketed-dma` makes them."""
    numels = [count, count]
    dtypes = [torch.float32, torch.float32]
    sender = CopyEngineTensors(numels, dtypes, context.device, context.group)

    def send(number: int) -> CopyEngineTensors:
        return sender.all_reduce_mean(number % 2)

    yield Messages(sender.tensors, sender.tensors, send)


@contextmanager
def all_gathers(context: RankContext, count: int) -> Iterator[Messages]:
    """Yield all-gathers that the library sends, with results of `count` elements."""
    count_per_rank = count // context.world_size
    parts = [torch.zeros(count_per_rank, device=context.device) for _ in range(2)]
    whole = [torch.zeros(count, device=context.device) for _ in range(2)]

    def send(number: int) -> dist.Work:
        return collectives.all_gather(whole[number % 2], parts[number % 2], context.group)

    yield Messages(parts, whole, send)


@dataclass
class Arriving:
    """A message of torch's functional collectives.

    Args:
        result: tensor that the message fills.
        received: tensor that shares the result's memory after `wait()`.
    """

    result: Tensor
    received: Tensor

    def wait(self) -> None:
        """Wait for the result and make `received` refer to it."""
        self.received.set_(torch.ops._c10d_functional.wait_tensor(self.result))


@contextmanager
def copied_all_gathers(context: RankContext, count: int) -> Iterator[Messages]:
    """Yield all-gathers by copy engines, as in torch's asynchronous tensor parallelism."""
    from torch.distributed import _symmetric_memory as symmetric  # takes a while to import

    name = context.group.group_name
    symmetric.enable_symm_mem_for_group(name)
    count_per_rank = count // context.world_size
    parts = [torch.zeros(count_per_rank, device=context.device) for _ in range(2)]
    received = [torch.empty(0, device=context.device) for _ in range(2)]

    def send(number: int) -> Arriving:
        result = torch.ops.symm_mem._low_contention_all_gather(parts[number % 2], name)
        return Arriving(result, received[number % 2])

    yield Messages(parts, received, send)
