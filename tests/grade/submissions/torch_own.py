"""torch's own wrappers behind the hooks: DDP, FSDP2 and ZeroRedundancyOptimizer."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def get_ddp(module):
    return DistributedDataParallel(module, find_unused_parameters=True)


def ddp_on_after_backward(model, optimizer):
    pass


def get_ddp_bucketed(module, bucket_size_mb):
    return DistributedDataParallel(
        module, bucket_cap_mb=bucket_size_mb, find_unused_parameters=True
    )


def ddp_bucketed_on_train_batch_start(model, optimizer):
    pass


def ddp_bucketed_on_after_backward(model, optimizer):
    pass


def get_sharded_optimizer(params, optimizer_cls, **options):
    return ZeroRedundancyOptimizer(params, optimizer_cls, **options)


def get_fsdp(module, compute_dtype=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, 0)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in module.layers:  # other weights, which may be tied, belong to the root's group
        fully_shard(layer, mp_policy=policy)
    return fully_shard(module, mp_policy=policy)


def fsdp_on_after_backward(model, optimizer):
    pass


def fsdp_gather_full_params(model):
    return {name: each.full_tensor() for name, each in model.named_parameters()}
