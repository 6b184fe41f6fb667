"""A world of any size in one process: torch's fake process group and fake tensors, as on GPUs.

They answer as NCCL on GPUs would.

Fake tensors have shapes, dtypes and storages of the right size, and no memory; collectives on the
fake group return at once. The strategies are the real ones. Some things they do need real values or
real peers, and are answered here for the time of the simulation:

- objects that ranks exchange (`gather_objects`, to compare models): every rank says what this one
  says;
- which backend serves the group: NCCL's answers (averages in the reduction, shards in place), where
  asked for;
- groups of other ranks, which are not made;
- whether a message has left, which the fake group never says: it has, and its memory is free.

On a CPU torch takes RMSNorm apart; on a GPU it is one kernel that keeps less. Here it is the one
kernel.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from distlab.comm import collectives, subgroups


@contextmanager
def fake_world(
    world_size: int, rank: int = 0, *, like_nccl: bool = True
) -> Iterator[dist.ProcessGroup]:
    """Be rank `rank` of `world_size`; tensors made inside are fake. Yields the process group.

    Args:
        like_nccl: answer as NCCL would; False as gloo (gradients divided beforehand, shards
            copied).

    Raises:
        ValueError: a world size below one or a rank outside it.
        RuntimeError: this process has joined a process group already.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: give 0 ≤ rank < world_size")
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group already; simulate in a process of its own, or destroy the group first"
        )
    # Importing the module registers the "fake" backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def own_group(ranks: Sequence[int], *options: Any) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks)) if rank in ranks else None

    # torch puts its own around it, once per group, and never takes it off
    excepthook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            patch.object(
                collectives, "gather_objects", lambda value, group: [value] * group.size()
            ),
            patch.object(collectives, "averages_in_reduction", lambda device, group: like_nccl),
            patch.object(subgroups, "_new_group", own_group),
            patch.object(collectives, "send", partial(_sent, collectives.send)),
            FakeTensorMode(),
            # Patched, and no torch function mode: that would be off inside backward, where blocks
            # are recomputed.
            patch.object(F, "rms_norm", _rms_norm),
        ):
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


class _Sent(dist.Work):
    def is_completed(self) -> bool:
        return True

    def wait(self, *timeout: Any) -> bool:
        return True


def _sent(
    send: Callable[[Tensor, dist.ProcessGroup], dist.Work], x: Tensor, group: dist.ProcessGroup
) -> dist.Work:
    send(x, group)
    return _Sent()


def _rms_norm(
    input: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    weight = input.new_empty(*shape) if weight is None else weight
    return _OneKernelRMSNorm.apply(input, weight)


class _OneKernelRMSNorm(torch.autograd.Function):
    """Move and keep the bytes that the fused kernel does.

    The values are fake anyway, so other operators may take its place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[: x.ndim - weight.ndim], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return x * weight  # reads x, writes the result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        # One kernel reads x and the gradient and writes that of x; another reads both for the
        # weight's.
        return gradient * x, gradient.sum(tuple(range(x.ndim - weight.ndim))).to(weight.dtype)
