"""One collective sent by the library, by fewer CTAs or by copy engines, for measurements."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import collectives
from distlab.comm.context import RankContext
from distlab.comm.copy_engine import CopyEngineAllReduce


@dataclass
class Messages:
    """Two messages, sent in turn: this rank's tensors, its results, and the function that sends."""

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    send: Callable[[int], Any]


@contextmanager
def all_reduces(context: RankContext, count: int, ctas: int | None = None) -> Iterator[Messages]:
    """Yield messages that the library sends, on NCCL through a communicator with this many CTAs."""
    group = context.group
    if ctas is not None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = ctas
        ranks = dist.get_process_group_ranks(group)
        group = dist.new_group(
            ranks, backend="nccl", pg_options=options, use_local_synchronization=True
        )
    tensors = [torch.zeros(count, device=context.device) for _ in range(2)]
    yield Messages(
        tensors,
        tensors,
        lambda k: collectives.all_reduce_mean(tensors[k % 2], group, prescaled=True),
    )
    if ctas is not None:
        dist.destroy_process_group(group)


@contextmanager
def copied_all_reduces(context: RankContext, count: int) -> Iterator[Messages]:
    """Send them by copy engines, as `bucketed-dma` sends them."""
    sender = CopyEngineAllReduce([count] * 2, [torch.float32] * 2, context.device, context.group)
    yield Messages(sender.tensors, sender.tensors, lambda k: sender.start(k % 2))


@contextmanager
def all_gathers(context: RankContext, count: int) -> Iterator[Messages]:
    """Yield messages that the library sends, with results of this many elements."""
    parts = [torch.zeros(count // context.world_size, device=context.device) for _ in range(2)]
    whole = [torch.zeros(count, device=context.device) for _ in range(2)]

    def send(number: int) -> dist.Work:
        return collectives.all_gather(whole[number % 2], parts[number % 2], context.group)

    yield Messages(parts, whole, send)


@dataclass
class Arriving:
    """A message of torch's functional collectives."""

    result: Tensor
    received: Tensor

    def wait(self) -> None:
        """Wait until it is there."""
        self.received.set_(torch.ops._c10d_functional.wait_tensor(self.result))


@contextmanager
def copied_all_gathers(context: RankContext, count: int) -> Iterator[Messages]:
    """Yield messages that copy engines send, as torch's asynchronous tensor parallelism does."""
    from torch.distributed import _symmetric_memory as symmetric  # takes a while to import

    name = context.group.group_name
    symmetric.enable_symm_mem_for_group(name)
    parts = [torch.zeros(count // context.world_size, device=context.device) for _ in range(2)]
    received = [torch.empty(0, device=context.device) for _ in range(2)]

    def send(k: int) -> Arriving:
        return Arriving(
            torch.ops.symm_mem._low_contention_all_gather(parts[k % 2], name), received[k % 2]
        )

    yield Messages(parts, received, send)
