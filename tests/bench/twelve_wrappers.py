"""Twelve wrappers as users write them: five right ones, three wrong ones and four hostile ones."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from distlab.parallel import BucketedDDP

BUCKET_BYTES = 16_384


def broadcast(module, group):
    """Start all ranks from the values of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, group_src=0, group=group)


def average(module, group):
    """Average the gradients, one all-reduce after the other."""
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


# == Right


def after_backward(module, group):
    broadcast(module, group)
    return module, lambda: average(module, group)


def hooks(module, group):
    """Start the all-reduce of each gradient as soon as it is ready."""
    broadcast(module, group)
    works = []

    def reduce(parameter):
        parameter.grad /= group.size()
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)

    def finish():
        for work in works:
            work.wait()
        works.clear()

    return module, finish


def flat_buckets(module, group):
    """Average gradients in flat buffers of at least `BUCKET_BYTES`, after backward."""
    broadcast(module, group)
    buckets, size = [[]], 0
    for parameter in reversed(list(module.parameters())):
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()

    def finish():
        for bucket in buckets:
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            dist.all_reduce(flat, group=group)
            flat /= group.size()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))

    return module, finish


def torch_ddp(module, group):
    return nn.parallel.DistributedDataParallel(module, process_group=group)


def fsdp2(module, group):
    broadcast(module, group)
    mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


# == Wrong


def summed(module, group):
    """Forget to divide the sum."""
    broadcast(module, group)

    def finish():
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=group)

    return module, finish


def no_broadcast(module, group):
    return module, lambda: average(module, group)


def late(module, group):
    """Step with the gradients of the step before."""
    broadcast(module, group)
    before = {}

    def finish():
        average(module, group)
        for parameter in module.parameters():
            mine = parameter.grad.clone()
            parameter.grad.copy_(before.get(parameter, torch.zeros_like(mine)))
            before[parameter] = mine

    return module, finish


# == Hostile


def raises(module, group):
    broadcast(module, group)

    def finish():
        if group.rank() == 1:
            raise ValueError("no gradients today")
        average(module, group)

    return module, finish


def hangs(module, group):
    broadcast(module, group)

    def finish():
        while group.rank() == 1:
            time.sleep(1)
        average(module, group)

    return module, finish


def exits(module, group):
    broadcast(module, group)

    def finish():
        if group.rank() == 1:
            os._exit(3)
        average(module, group)

    return module, finish


def eats_memory(module, group):
    broadcast(module, group)
    eaten = []

    def finish():
        while group.rank() == 1:
            eaten.append(torch.ones(2**20))  # 4 MiB at a time
            time.sleep(0.001)
        average(module, group)

    return module, finish


# == For other tests


def labs_bucketed(module, group):
    """Return the lab's own class, with the buckets of the row that the test compares it with."""
    return BucketedDDP(module, process_group=group, bucket_size_mb=0.05)


def leaves(module, group):
    """Call `sys.exit` on every rank."""
    raise SystemExit(4)
