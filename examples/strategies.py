"""Naive, flat, overlap and bucketed DDP, ZeRO-1 and FSDP, in one file on plain torch.distributed.

    torchrun --standalone --nproc_per_node=2 examples/strategies.py   # two ranks
    python examples/strategies.py                                     # alone

Ranks communicate through NCCL on GPUs, and through gloo on the CPU.

Ranks read different data and step with the mean of their gradients. The six differ in when
gradients are sent, in what messages, and in what a rank keeps. The command trains under each of
them and under the lab's strategy of the same name, and compares the parameters
(compare_strategies.py).

A parameter that only some ranks use is averaged with zeros of the others. Apart from that,
parameters are contiguous, of one dtype, on one device and all trained, and a synchronization and a
step follow every backward. The lab adds:

    model.py, ddp.py    no_sync() for micro-batches, norms over all ranks, recovery after a failed
                        backward
    bucketed.py         any strides and dtypes; flags inside the buckets, so that a parameter that
                        no rank used is not stepped
    copy_engine.py      GPUs' copy engines instead of NCCL's kernels (for meshes:
                        ../comm/two_level.py)
    zero.py             parameter groups, checkpoints, parameters gathered under the next forward
    fsdp/, meta.py      casts, fp32 masters, units in any order, weights tied across units,
                        recomputation
    checks.py           errors for unfinished or edited gradients and for modules that have changed
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

# renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def mean_of(tensor: Tensor, group: ProcessGroup) -> dict[str, Any]:
    """Return options of a reduction to the mean: NCCL averages.

    Gloo only sums, so `tensor` is divided before.
    """
    averages = dist.get_backend(group) == "nccl"
    if not averages:
        tensor.mul_(1 / group.size())
    return {
        "op": dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM,
        "group": group,
        "async_op": True,
    }


# -- Every rank keeps the whole model --------------------------------------------------------------
class DataParallel(nn.Module):
    """Base of these strategies. Ranks start with rank 0's parameters.

    After finish the gradients are means over the ranks.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup):
        super().__init__()
        self.module, self.group, self.trained = module, group, list(module.parameters())
        for tensor in [*self.trained, *module.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=group)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def full_parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())


class NaiveDDP(DataParallel):
    """One message for each parameter after backward; each pays the full latency.

    compute         │ forward │ backward │                  │ optimizer │
    communication   │         │          │ p0 │ p1 │ … │ pn │           │
    """

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.trained:  # in the same order on every rank
            self.send_gradient(parameter).wait()

    def send_gradient(self, parameter: nn.Parameter) -> Work:
        if parameter.grad is None:  # not used on this rank, but perhaps on another
            parameter.grad = torch.zeros_like(parameter)
        return dist.all_reduce(parameter.grad, **mean_of(parameter.grad, self.group))


class Bucket:
    """Parameters whose gradients are one message.

    They are side by side in `buffer`, padded to a slice of equal size per rank.

    buffer          │ p3 │ p2               │ p1 │ p0 │ pad │
    slices          │ rank 0            │ rank 1            │
    """

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup):
        self.parameters, self.group = parameters, group
        numels = [parameter.numel() for parameter in parameters]
        padding = -sum(numels) % group.size()
        self.buffer = parameters[0].new_zeros(sum(numels) + padding)
        self.slice = self.buffer.view(group.size(), -1)[group.rank()]  # this rank's
        *parts, _ = self.buffer.split([*numels, padding])
        self.views = [
            part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)
        ]

    @torch.no_grad()
    def hold_parameters(self) -> "Bucket":
        """Move the parameters themselves into the buffer, instead of their gradients."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view.copy_(parameter)
        return self

    def pack(self) -> Tensor:
        """Copy the gradients to their places, zeros where this rank has none.

        Each `.grad` is a view from then on.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        return self.buffer

    def all_reduce(self) -> Work:
        """Start to average the gradients: every rank gets all of the mean."""
        return dist.all_reduce(self.buffer, **mean_of(self.pack(), self.group))

    def reduce_scatter(self, shard: nn.Parameter) -> Work:
        """Start to average the gradients. The mean's slice of this rank becomes `shard.grad`."""
        shard.grad = torch.empty_like(shard)
        return reduce_scatter(shard.grad, self.buffer, **mean_of(self.pack(), self.group))


class FlatDDP(DataParallel):
    """One message for all after backward, at the link's full bandwidth; nothing computes meanwhile.

    compute         │ forward │ backward │ pack │            │ optimizer │
    communication   │         │          │      │ p0 p1 … pn │           │
    """

    def finish_gradient_synchronization(self) -> None:
        Bucket(self.trained, self.group).all_reduce().wait()


class OverlapDDP(NaiveDDP):
    """One message for each parameter while backward goes on.

    The order is the same on all ranks, in whatever order the hooks fire.

    compute         │ forward │ backward ──────────── │    │ optimizer │
    communication   │         │    │ pn │ … │ p2 │ p1 │ p0 │           │
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, limit_bytes: float = 0):
        super().__init__(module, group)
        # the parameters of each message, about as backward comes to them
        self.plan: list[list[nn.Parameter]] = []
        for parameter in reversed(self.trained):
            if not self.plan or sum(p.nbytes for p in [*self.plan[-1], parameter]) > limit_bytes:
                self.plan.append([])
            self.plan[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        self.await_gradients()

    def await_gradients(self) -> None:
        self.unsent, self.ready, self.in_flight = [*range(len(self.plan))], set(), []

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Send each message that is complete, as are those before it; called by autograd."""
        self.ready.add(parameter)
        while self.unsent and self.ready.issuperset(self.plan[self.unsent[0]]):
            self.in_flight.append(self.send(self.unsent.pop(0)))

    def send(self, number: int) -> Work:
        return self.send_gradient(self.plan[number][0])

    def finish_gradient_synchronization(self) -> None:
        self.in_flight += map(self.send, self.unsent)  # where this rank did not use all parameters
        for work in self.in_flight:
            work.wait()
        self.await_gradients()


class BucketedDDP(OverlapDDP):
    """Few large messages while backward goes on, most of which it hides.

    They cost bandwidth instead of latency.

    compute         │ forward │ backward ───────────────── │      │ optimizer │
    communication   │         │     │ bucket 0 │ bucket 1 │ … bn │           │
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, bucket_size_mb: float = 25.0):
        super().__init__(module, group, limit_bytes=bucket_size_mb * 2**20)
        self.buckets = [Bucket(parameters, group) for parameters in self.plan]

    def send(self, number: int) -> Work:
        return self.buckets[number].all_reduce()


# -- Every rank keeps a part -----------------------------------------------------------------------
class ZeroOptimizer:
    """ZeRO-1: each rank steps a slice of every bucket with 1/N of the optimizer's state.

    A rank gets its slice of each bucket's mean, steps it, and gathers the others' slices.

    compute         │ forward │ backward ──────────── │    │ step 1/N │                     │
    communication   │         │   reduce-scatter b0 │ … │ bn │          │ all-gather b0 … bn  │

    The two send as much as one all-reduce. Slices end inside parameters: the optimizer must be
    element-wise, as Adam.
    """

    def __init__(
        self, ddp: BucketedDDP, optimizer_cls: type[torch.optim.Optimizer], **options: Any
    ):
        self.whole = [
            Bucket(bucket.parameters, ddp.group).hold_parameters() for bucket in ddp.buckets
        ]
        self.shards = [nn.Parameter(bucket.slice) for bucket in self.whole]
        self.local = optimizer_cls(self.shards, **options)
        # in the place of all-reduces
        ddp.send = lambda n: ddp.buckets[n].reduce_scatter(self.shards[n])

    def step(self) -> None:
        self.local.step()
        for bucket in self.whole:  # the slice is copied, as gloo must not read from where it writes
            all_gather(bucket.buffer, bucket.slice.clone(), group=bucket.group)


class Unit:
    """Parameters of which a rank keeps one slice; they are whole from `gather()` to `free()`."""

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup):
        self.whole = Bucket(parameters, group).hold_parameters()
        self.shard = nn.Parameter(self.whole.slice.clone())
        self.free()

    def free(self) -> None:
        # what autograd has saved of it is whole again after gather()
        self.whole.buffer.untyped_storage().resize_(0)

    def gather(self) -> Work:
        """Start to make the parameters whole, unless they are; return what to wait for."""
        buffer = self.whole.buffer
        if buffer.untyped_storage().nbytes() == 0:
            buffer.untyped_storage().resize_(buffer.nbytes)
            self.gathering = all_gather(
                buffer, self.shard.detach(), group=self.whole.group, async_op=True
            )
        return self.gathering

    def reduce(self) -> None:
        """Start to reduce-scatter the gradients; keep neither them nor the parameters."""
        self.reducing = Bucket(self.whole.parameters, self.whole.group).reduce_scatter(self.shard)
        for parameter in self.whole.parameters:
            parameter.grad = None
        self.free()


class FSDP(DataParallel):
    """Parameters, gradients and state in slices.

    A unit is whole while it computes, and while the one before does.

    compute         │    │    A    │    B    │    │    B'   │    A'   │      │ optimizer │
    communication   │ag A│ag B│              │ag B│ag A│    │rs B     │ rs A │           │

    Modules in a `ModuleList` are units, called in its order; other parameters are unit 0, whole
    until backward ends. Backward has left a unit when it reaches the one before, even if a rank
    used only a part of it. So all ranks call the same collectives.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup):
        super().__init__(module, group)
        blocks = [
            block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part
        ]
        inside = [list(block.parameters()) for block in blocks]
        others = set(self.trained).difference(*inside)
        self.units = [
            Unit(part, group) for part in ([p for p in self.trained if p in others], *inside)
        ]
        module.register_forward_pre_hook(partial(self.before_forward, 0))
        for number, block in enumerate(blocks, start=1):
            block.register_forward_pre_hook(partial(self.before_forward, number))
            block.register_forward_hook(lambda *_, unit=self.units[number]: unit.free())
            block.register_full_backward_pre_hook(partial(self.before_backward, number))

    def parameters(self, recurse: bool = True) -> Any:
        return (unit.shard for unit in self.units)  # for an element-wise optimizer

    def before_forward(self, number: int, *_: Any) -> None:
        self.units[number].gather().wait()
        for following in self.units[number + 1 :][:1]:
            following.gather()

    def before_backward(self, number: int, *_: Any) -> None:
        self.units[number].gather().wait()
        self.units[number - 1].gather()  # unit 0 is whole still
        for left in self.units[number + 1 :][:1]:
            left.reduce()

    def finish_gradient_synchronization(self) -> None:
        for unit in reversed(self.units[:2]):  # which backward has left last
            unit.reduce()
        for unit in self.units:
            unit.reducing.wait()

    def full_parameters(self) -> dict[str, Tensor]:
        for unit in self.units:  # the next forward and backward free them
            unit.gather().wait()
        return super().full_parameters()


# -- Compare with the lab's own --------------------------------------------------------------------
STRATEGIES = dict(
    naive=NaiveDDP,
    flat=FlatDDP,
    overlap=OverlapDDP,
    bucketed=BucketedDDP,
    zero1=BucketedDDP,
    fsdp=FSDP,
)


if __name__ == "__main__":
    from compare_strategies import main  # the file next to this one; it needs distlab

    main()
