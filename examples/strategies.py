"""Every strategy in one sitting: naive, flat, overlap, bucketed DDP, ZeRO-1 and FSDP on plain torch.distributed.

    torchrun --standalone --nproc_per_node=2 examples/strategies.py   # two ranks: NCCL on GPUs, gloo on the CPU
    python examples/strategies.py                                     # alone

Each rank trains on other data, and all must step with the mean of their gradients. The six differ in when and in what
messages gradients are sent, and in what a rank keeps. The command trains a small model under each of them, beside the
lab's class of the same name, and compares the parameters.

A parameter that only some ranks use is averaged with zeros for the others. Else the file takes for granted: contiguous
parameters of one dtype on one device, all trained, and for every backward a synchronization and a step. The lab adds:

    base.py, data_parallel.py      no_sync() for micro-batches, norms over all ranks, recovery after a failed backward
    buckets.py                     any strides and dtypes; flags inside buckets tell what no rank used: it is not stepped
    bucketed.py                    gradients that are computed right into their bucket, without a copy
    bucketed_copy_engine.py        buckets that the GPUs' copy engines move, instead of NCCL's kernels
    zero1.py, sharded_buckets.py   parameter groups, checkpoints; parameters are gathered under the next forward
    in_flight.py                   reading a parameter that has not arrived yet waits for it
    fsdp/, meta.py                 rows instead of slices, casts and fp32 masters, units in any order, recomputation
    step_guard.py, fsdp/checks.py  refusals: unfinished or edited gradients, modules that have changed
    ../comm/two_level.py           meshes: messages in two levels, inside hosts and between them
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from distlab import parallel  # the comparison at the end needs distlab, the strategies do not
from distlab.comm import RankContext, rank_context


def mean_of(tensor: Tensor, group: ProcessGroup) -> Any:
    """Return the reduction that makes the mean: NCCL averages; gloo only sums, so the tensor is divided before."""
    if dist.get_backend(group) == "nccl":
        return dist.ReduceOp.AVG
    tensor.mul_(1 / group.size())
    return dist.ReduceOp.SUM


def all_reduce_mean(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start to replace a tensor by its mean over the ranks, which is there after `wait()`."""
    return dist.all_reduce(tensor, mean_of(tensor, group), group=group, async_op=True)


def reduce_scatter_mean(shard: nn.Parameter, buffer: Tensor, group: ProcessGroup) -> Work:
    """Start to give `shard` `(n,)` as its gradient the mean of this rank's slice of `buffer` `(N·n,)`, for N ranks."""
    shard.grad = torch.empty_like(shard)
    return dist.reduce_scatter_tensor(shard.grad, buffer, mean_of(buffer, group), group=group, async_op=True)


# == Every rank keeps the whole model ==================================================================================


class DataParallel(nn.Module):
    """What all share: ranks start with rank 0's parameters, and after finish every `.grad` is the mean over the ranks.

    compute         │ zero_grad │ forward │ backward │ finish_gradient_synchronization │ optimizer │
    """

    def __init__(self, module: nn.Module, group: ProcessGroup):
        super().__init__()
        self.module, self.group, self.trained = module, group, list(module.parameters())
        for tensor in [*self.trained, *module.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=group)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def full_parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name. Call it on every rank."""
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
        return all_reduce_mean(parameter.grad, self.group)


class Bucket:
    """Parameters whose gradients are one message: side by side in `buffer`, padded so that it has N equal slices.

    buffer          │ p3 │ p2        │ p1 │ p0 │ padding │
    slices          │ rank 0              │ rank 1       │
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup):
        self.parameters, numels = parameters, [parameter.numel() for parameter in parameters]
        self.buffer = parameters[0].new_zeros(sum(numels) + -sum(numels) % group.size())
        self.slice = self.buffer.view(group.size(), -1)[group.rank()]  # this rank's
        parts = self.buffer[: sum(numels)].split(numels)
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def pack(self) -> Tensor:
        """Copy the gradients to their places, zeros where this rank has none; each `.grad` is a view from then on."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        return self.buffer

    @torch.no_grad()
    def hold_parameters(self) -> "Bucket":
        """Move the parameters themselves into the buffer, instead of their gradients."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view.copy_(parameter)
        return self


class FlatDDP(DataParallel):
    """One message for all after backward, at the link's full bandwidth; nothing computes meanwhile.

    compute         │ forward │ backward │ pack │            │ optimizer │
    communication   │         │          │      │ p0 p1 … pn │           │
    """

    def finish_gradient_synchronization(self) -> None:
        all_reduce_mean(Bucket(self.trained, self.group).pack(), self.group).wait()


class OverlapDDP(NaiveDDP):
    """One message for each parameter, sent while backward goes on.

    compute         │ forward │ backward ──────────── │    │ optimizer │
    communication   │         │    │ pn │ … │ p2 │ p1 │ p0 │           │

    Ranks must send alike, and their hooks may fire in different orders. So messages leave in the order of `plan`; one
    that is ready early waits for those before it.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, limit_bytes: float = 0):
        super().__init__(module, group)
        self.plan: list[list[nn.Parameter]] = []  # the parameters of each message, in about the order of backward
        for parameter in reversed(self.trained):
            if not self.plan or sum(p.nbytes for p in [*self.plan[-1], parameter]) > limit_bytes:
                self.plan.append([])
            self.plan[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        self.await_gradients()

    def await_gradients(self) -> None:
        self.ready: set[nn.Parameter] = set()
        self.unsent = deque(range(len(self.plan)))
        self.in_flight: list[Work] = []

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Send the messages that are complete; autograd calls it when it has finished a gradient."""
        self.ready.add(parameter)
        while self.unsent and self.ready.issuperset(self.plan[self.unsent[0]]):
            self.in_flight.append(self.send(self.unsent.popleft()))

    def send(self, number: int) -> Work:
        return self.send_gradient(self.plan[number][0])

    def finish_gradient_synchronization(self) -> None:
        self.in_flight += [self.send(number) for number in self.unsent]  # this rank did not use all parameters
        for work in self.in_flight:
            work.wait()
        self.await_gradients()


class BucketedDDP(OverlapDDP):
    """Few large messages while backward goes on: bandwidth instead of latency, and most of it hidden.

    compute         │ forward │ backward ───────────────── │      │ optimizer │
    communication   │         │     │ bucket 0 │ bucket 1 │ … bn │           │
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, bucket_size_mb: float = 25.0):
        super().__init__(module, group, limit_bytes=bucket_size_mb * 2**20)
        self.buckets = [Bucket(parameters, group) for parameters in self.plan]

    def send(self, number: int) -> Work:
        return all_reduce_mean(self.buckets[number].pack(), self.group)


# == Every rank keeps a part ===========================================================================================


class ZeroOptimizer:
    """ZeRO-1: a rank gets its slice of each bucket's mean, steps it with 1/N of the state, and gathers the others'.

    compute         │ forward │ backward ──────────── │    │ step 1/N │                     │
    communication   │         │   reduce-scatter b0 │ … │ bn │          │ all-gather b0 … bn  │

    Both are halves of the all-reduce that they replace, so no more is sent. Slices end anywhere inside a parameter: the
    optimizer must be element-wise, as Adam is.
    """

    def __init__(self, ddp: BucketedDDP, optimizer_cls: type[torch.optim.Optimizer], **options: Any):
        self.ddp = ddp
        self.whole = [Bucket(bucket.parameters, ddp.group).hold_parameters() for bucket in ddp.buckets]
        self.shards = [nn.Parameter(bucket.slice) for bucket in self.whole]
        self.local = optimizer_cls(self.shards, **options)
        ddp.send = self.send  # in the place of all-reduces

    def send(self, number: int) -> Work:
        return reduce_scatter_mean(self.shards[number], self.ddp.buckets[number].pack(), self.ddp.group)

    def step(self) -> None:
        self.local.step()
        for bucket in self.whole:  # the slice is copied, as gloo must not read from where it writes
            dist.all_gather_into_tensor(bucket.buffer, bucket.slice.clone(), group=self.ddp.group)


class Unit:
    """Parameters of which a rank keeps one slice; they are whole from `gather()` to `free()`."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup):
        self.parameters, self.group = parameters, group
        bucket = Bucket(parameters, group).hold_parameters()
        self.whole, self.shard = bucket.buffer, nn.Parameter(bucket.slice.clone())
        self.free()

    def free(self) -> None:
        """Release the memory. What autograd has saved of the parameters lies in it too, and returns with them."""
        self.whole.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Start to make the parameters whole, unless they are."""
        storage, shard = self.whole.untyped_storage(), self.shard.detach()
        if storage.nbytes() == 0:
            storage.resize_(self.whole.nbytes)
            self.work = dist.all_gather_into_tensor(self.whole, shard, group=self.group, async_op=True)

    def wait(self) -> None:
        self.gather()
        self.work.wait()

    def reduce(self) -> None:
        """Start to reduce-scatter the gradients; keep neither them nor the parameters."""
        self.reducing = reduce_scatter_mean(self.shard, Bucket(self.parameters, self.group).pack(), self.group)
        for parameter in self.parameters:
            parameter.grad = None
        self.free()


class FSDP(DataParallel):
    """Parameters, gradients and state in slices; a unit is whole only while it computes, and while the one before does.

    compute         │    A    │    B    │    B'   │    A'   │      │ optimizer │
    communication   │ag A│ag B│         │ag B│ag A│rs B     │ rs A │           │

    Each module in a `ModuleList` is a unit, called in the list's order on every rank, and returns one tensor. All other
    parameters are unit 0, which stays whole until backward ends. Backward has left a unit when it reaches the one
    before, whichever parameters this rank has used: so ranks send alike.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup):
        super().__init__(module, group)
        blocks = [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]
        inside = [list(block.parameters()) for block in blocks]
        others = set(self.trained).difference(*inside)
        self.units = [Unit(part, group) for part in ([p for p in self.trained if p in others], *inside)]
        module.register_forward_pre_hook(partial(self.before_forward, 0))
        for number, block in enumerate(blocks, start=1):
            block.register_forward_pre_hook(partial(self.before_forward, number))
            block.register_forward_hook(partial(self.after_forward, number))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this rank's slices, which an element-wise optimizer steps."""
        return (unit.shard for unit in self.units)

    def before_forward(self, number: int, *_: Any) -> None:
        self.units[number].wait()
        for following in self.units[number + 1 :][:1]:
            following.gather()

    def after_forward(self, number: int, block: nn.Module, args: Any, output: Tensor) -> None:
        self.units[number].free()
        if output.requires_grad:
            output.register_hook(partial(self.before_backward, number))

    def before_backward(self, number: int, _: Tensor) -> None:
        self.units[number].wait()
        self.units[number - 1].gather()  # unit 0 is whole still
        for left in self.units[number + 1 :][:1]:
            left.reduce()

    def finish_gradient_synchronization(self) -> None:
        for unit in reversed(self.units[:2]):  # which backward has left last
            unit.reduce()
        for unit in self.units:
            unit.reducing.wait()

    def full_parameters(self) -> dict[str, Tensor]:
        for unit in self.units:
            unit.wait()
        found = {name: tensor.detach().clone() for name, tensor in super().full_parameters().items()}
        for unit in self.units:
            unit.free()
        return found


# == Beside the lab's own ==============================================================================================


class Block(nn.Linear):
    """A residual layer; in each step one rank uses its bias."""

    def forward(self, x: Tensor, with_bias: bool) -> Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.weight, self.bias if with_bias else None))


class Net(nn.Module):
    """Blocks between two other layers."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width, width) for _ in range(4))

    def forward(self, x: Tensor, with_bias: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, with_bias)
        return self.last(x)


STRATEGIES = {"naive": NaiveDDP, "flat": FlatDDP, "overlap": OverlapDDP}
STRATEGIES |= {"bucketed": BucketedDDP, "zero1": BucketedDDP, "fsdp": FSDP}


def train(name: str, of_lab: bool, context: RankContext, width: int, steps: int) -> tuple[dict[str, Tensor], float, int]:
    """Train; return the parameters, the median step in ms and how many functions the last step entered."""
    torch.manual_seed(context.rank)
    net, adam, times, entered = Net(width).to(context.device), partial(torch.optim.AdamW, lr=1e-3), [], set()
    if of_lab:
        model, optimizer = parallel.get_strategy(name).build(net, context.group, adam.func, adam.keywords)
    else:
        model = STRATEGIES[name](net, context.group)
        optimizer = ZeroOptimizer(model, adam) if name == "zero1" else adam(model.parameters())
    ours_or_lab = str(Path(parallel.__file__).parents[1]) if of_lab else __file__

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours_or_lab):
            entered.add(frame.f_code)

    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + context.rank)).to(context.device)
        begin = time.perf_counter()
        last = step == steps - 1
        with torch.autograd.set_multithreading_enabled(not last):  # the profile is this thread's
            sys.setprofile(note if last else None)
            model.zero_grad()
            model(x, (step + context.rank) % context.world_size == 0).square().mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            sys.setprofile(None)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    entered -= {Net.forward.__code__, Block.forward.__code__}
    return model.full_parameters(), statistics.median(times), len(entered)


def compare(context: RankContext, width: int = 256, steps: int = 20) -> dict[str, tuple[float, float, int, int, float]]:
    """Return by strategy: ms here and of the lab, functions entered, and the largest difference of any parameter."""
    rows = {}
    for name in STRATEGIES:
        (mine, ms, functions), (theirs, lab_ms, lab_functions) = (
            train(name, of_lab, context, width, steps) for of_lab in (False, True)
        )
        difference = torch.stack([(mine[key] - theirs[key]).abs().max() for key in mine]).max()
        dist.all_reduce(difference, dist.ReduceOp.MAX, group=context.group)
        rows[name] = ms, lab_ms, functions, lab_functions, difference.item()
    return rows


def main() -> None:
    """Join the ranks that torchrun started, or be the only one, and print the table on rank 0."""
    with rank_context() as context:
        rows = compare(context)
        if context.is_main:
            print(f"{context.world_size} rank(s), {context.backend}; a step in ms, functions that it enters\n")
            print("strategy    ms here   ms lab   functions here   lab   parameters")
            for name, (ms, lab_ms, functions, lab_functions, difference) in rows.items():
                same = f"differ by {difference:.1e}" if difference else "the same bit for bit"
                print(f"{name:<11} {ms:7.2f} {lab_ms:8.2f} {functions:16} {lab_functions:5}   {same}")


if __name__ == "__main__":
    main()
