"""Wrappers as users bring them, for `--wrap`: right ones, wrong ones, and one that raises."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer


def overlapped(module, group):
    """Broadcast, then all-reduce each gradient in its hook."""
    first = dist.get_global_rank(group, 0)
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, first, group=group)
    works = []

    def hook(parameter):
        parameter.grad /= group.size()
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def finish():
        for work in works:
            work.wait()
        works.clear()

    return module, finish


def summed(module, group):
    """Forget the division."""
    _, finish = overlapped(module, group)

    def finish_and_scale():
        finish()
        for parameter in module.parameters():
            parameter.grad *= group.size()

    return module, finish_and_scale


def torch_ddp(module, group):
    return torch.nn.parallel.DistributedDataParallel(module, process_group=group)


def compiled_blocks(module, group):
    """Compile each block in its place, as torchtitan does, and average by torch's DDP."""
    for number, block in enumerate(module.blocks):
        module.blocks[number] = torch.compile(block, backend="eager")
    return torch_ddp(module, group)


def torch_zero(module, group):
    """torch DDP, and torch's ZeRO-1 as the third value."""

    def make_optimizer(parameters, cls, **options):
        return ZeroRedundancyOptimizer(parameters, cls, process_group=group, **options)

    return torch_ddp(module, group), lambda: None, make_optimizer


def two_rates(module, group):
    """Give biases and norms a smaller rate, by a third value whose state checkpoints find."""
    _, finish = overlapped(module, group)

    def make_optimizer(parameters, cls, **options):
        vectors = [each for each in parameters if each.dim() < 2]
        others = [each for each in parameters if each.dim() >= 2]
        return cls([{"params": others}, {"params": vectors, "weight_decay": 0.0}], **options)

    return module, finish, make_optimizer


def fsdp2(module, group):
    mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
    return fully_shard(module, mesh=mesh)


def cut(module, group):
    """Leave a rank the rows of the first parameter that it owns, as ZeRO-3 by hand does."""
    first = next(module.parameters())
    first.data = first.data.chunk(group.size())[group.rank()].clone()
    return module


def silent(module, group):
    return module


def raising(module, group):
    raise RuntimeError("a bug of the user's")
