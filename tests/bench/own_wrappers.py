"""Wrappers as users bring them, for `--wrap`: right ones, wrong ones, and one that raises."""

import torch
import torch.distributed as dist


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


def silent(module, group):
    return module


def raising(module, group):
    raise RuntimeError("a bug of the user's")
