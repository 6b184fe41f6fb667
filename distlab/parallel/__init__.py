"""The strategies, and the registry through which benchmarks and trainers find them by name.

A new strategy is a file in this folder and an entry in `STRATEGIES`; everything that takes `--strategies`
then knows it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.parallel.base import DataParallel
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.copy_engine import CopyEngineDDP
from distlab.parallel.flat import FlatDDP
from distlab.parallel.fsdp import FSDP
from distlab.parallel.local import Local
from distlab.parallel.naive import NaiveDDP
from distlab.parallel.overlap import OverlapDDP
from distlab.parallel.sharded_optimizer import ShardedOptimizer
from distlab.parallel.torch_ddp import TorchDDP, tuned_torch_ddp
from distlab.parallel.zero1 import ZeroOptimizer

__all__ = [
    "FSDP",
    "STRATEGIES",
    "BucketedDDP",
    "CopyEngineDDP",
    "DataParallel",
    "FlatDDP",
    "Local",
    "NaiveDDP",
    "OverlapDDP",
    "ShardedOptimizer",
    "Strategy",
    "TorchDDP",
    "ZeroOptimizer",
    "get_strategy",
    "strategies_on",
]


MakeOptimizer = Callable[..., Optimizer]


def _plain_optimizer(wrapper: nn.Module, optimizer_cls: type[Optimizer], **options: Any) -> Optimizer:
    return optimizer_cls(wrapper.parameters(), **options)


@dataclass(frozen=True)
class Strategy:
    """How to wrap a model, and which optimizer then steps it.

    Args:
        name: as on the command line and in records.
        build: `build(module, process_group=…)`, with `bucket_size_mb=…` too if it has buckets; returns a
            wrapper with `forward`, `no_sync`, `finish_gradient_synchronization`, `sync_buffers`, `close`.
        optimizer: `optimizer(wrapper, optimizer_cls, **options)`; by default `optimizer_cls` over the wrapper's
            parameters.
        has_buckets: whether a bucket size means anything to it.
        casts_parameters: whether `build` takes `compute_dtype=…`, in which parameters are then sent and used; such
            a model needs no autocast, which would keep a cast copy of every weight through the step.
        synchronizes: False for `local`, whose ranks drift apart.
        is_peer: True for the implementations of torch that ours are measured against.
        needs_gpu: whether it runs on GPUs only.
    """

    name: str
    build: Callable[..., nn.Module]
    optimizer: MakeOptimizer = _plain_optimizer
    has_buckets: bool = False
    casts_parameters: bool = False
    synchronizes: bool = True
    is_peer: bool = False
    needs_gpu: bool = False

    def wrap(
        self,
        module: nn.Module,
        process_group: ProcessGroup,
        bucket_size_mb: float | None = 25.0,
        compute_dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Wrap `module`. Strategies without buckets ignore the bucket size (MiB), those that do not cast
        parameters the compute type: run them under autocast instead (`autocast_dtype`)."""
        options: dict[str, Any] = {"bucket_size_mb": bucket_size_mb} if self.has_buckets else {}
        if self.casts_parameters:
            options["compute_dtype"] = compute_dtype
        return self.build(module, process_group=process_group, **options)

    def autocast_dtype(self, compute_dtype: torch.dtype | None) -> torch.dtype | None:
        """The type to autocast to, so that the model computes in `compute_dtype`: None if the wrapper casts."""
        return None if self.casts_parameters else compute_dtype


def _local(module: nn.Module, *, process_group: ProcessGroup) -> Local:
    return Local(module)


def _sharded(wrapper: BucketedDDP, optimizer_cls: type[Optimizer], **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(wrapper.parameters(), optimizer_cls, wrapper.process_group, **options)


def _torch_fsdp2(module: nn.Module, **options: Any) -> nn.Module:
    from distlab.parallel.torch_fsdp2 import TorchFSDP2  # its import of DTensor takes a second

    return TorchFSDP2(module, **options)


def _torch_zero(wrapper: TorchDDP, optimizer_cls: type[Optimizer], **options: Any) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of deprecations

    group = wrapper.ddp.process_group
    return ZeroRedundancyOptimizer(wrapper.parameters(), optimizer_cls, process_group=group, **options)


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("local", _local, synchronizes=False),
        Strategy("naive", NaiveDDP),
        Strategy("flat", FlatDDP),
        Strategy("overlap", OverlapDDP),
        Strategy("bucketed", BucketedDDP, has_buckets=True),
        Strategy("bucketed-dma", CopyEngineDDP, has_buckets=True, needs_gpu=True),
        Strategy("sharded-optimizer", BucketedDDP, _sharded, has_buckets=True),
        Strategy("zero1", BucketedDDP, ZeroOptimizer, has_buckets=True),
        Strategy("fsdp", FSDP, casts_parameters=True),
        Strategy("torch-ddp", TorchDDP, is_peer=True),
        Strategy("torch-ddp-tuned", tuned_torch_ddp, has_buckets=True, is_peer=True),
        Strategy("torch-zero", tuned_torch_ddp, _torch_zero, has_buckets=True, is_peer=True),
        Strategy("fsdp2", _torch_fsdp2, casts_parameters=True, is_peer=True),
    )
}


def strategies_on(device_type: str) -> tuple[str, ...]:
    """The names of all strategies that run on `cuda` or `cpu`."""
    return tuple(
        name for name, strategy in STRATEGIES.items() if device_type == "cuda" or not strategy.needs_gpu
    )


def get_strategy(name: str) -> Strategy:
    """Look a strategy up by name.

    Raises:
        ValueError: there is none of that name; the message lists those that exist.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r} is unknown; allowed: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
