"""Optimizers that couple what lies on several ranks, or that belong to other ranks than their parameters' wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.exchange import CopyEngine
from distlab.parallel.guards import hooks

# torch's optimizers that update every element by its own gradients and state alone.
_OF_TORCH = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD"
ELEMENTWISE = {getattr(torch.optim, name) for name in _OF_TORCH.split()}


def is_elementwise(optimizer_cls: type[Optimizer]) -> bool:
    """Whether it is one of `ELEMENTWISE`, or its own class body (no base's) says `elementwise = True`."""
    return optimizer_cls in ELEMENTWISE or vars(optimizer_cls).get("elementwise") is True


def takes_shards(optimizer_cls: type[Optimizer]) -> bool:
    """Whether its own class body says `takes_shards = True`: it brings together what it needs of other ranks itself."""
    return vars(optimizer_cls).get("takes_shards") is True


def check_zero(ddp: BucketedDDP, optimizer_cls: type[Optimizer], elementwise: bool) -> None:
    """Check that ZeRO stage 1 can take over a wrapper, with this optimizer over parts of parameters.

    Raises:
        TypeError: no `BucketedDDP`.
        ValueError: an optimizer that is not known to be element-wise, a wrapper on a mesh or that
            copy engines serve, or a layer that rewrites its rows in forward.
    """
    if not isinstance(ddp, BucketedDDP):
        raise TypeError(
            f"ZeroOptimizer takes over a BucketedDDP's buckets; got {type(ddp).__name__}"
        )
    if not (elementwise or is_elementwise(optimizer_cls) or takes_shards(optimizer_cls)):
        raise ValueError(
            f"{optimizer_cls.__name__} is not known to be element-wise, and here it sees parts of parameters: give "
            "elementwise=True if every element's update depends on that element alone, else use ShardedOptimizer, "
            "which keeps parameters whole (for L-BFGS, all of them: a data-parallel wrapper alone)"
        )
    if isinstance(ddp.exchange, CopyEngine):
        raise ValueError("CopyEngineDDP only all-reduces: give ZeroOptimizer a BucketedDDP")
    if ddp.mesh is not None:
        raise ValueError(
            "ZeroOptimizer shards over all ranks, and this BucketedDDP has a mesh: leave its mesh out, or take "
            "FSDP(module, mesh=…), which shards inside a group"
        )
    for name, module in ddp.module.named_modules():
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"ZeroOptimizer: '{name}' renormalises its rows in forward (max_norm), each rank those of its own "
                "batch, which the next step loses: leave max_norm out, and renormalise after optimizer.step()"
            )


def refuse_cut_matrices(optimizer_cls: type[Optimizer]) -> None:
    """Raise ValueError for an optimizer that is not known to be element-wise, where each rank's model has a part of
    every matrix.
    """
    if not is_elementwise(optimizer_cls):
        raise ValueError(
            f"{optimizer_cls.__name__} is not known to be element-wise, and ranks that share matrices (layout tp) "
            "would each step a part as if it were the whole: take AdamW, or a layout without tp"
        )


def refuse_lbfgs(optimizer_cls: type[Optimizer]) -> None:
    """Raise ValueError for L-BFGS, which steps all parameters together, where a rank steps some of them."""
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise ValueError(
            "ShardedOptimizer: L-BFGS steps all parameters together, and here a rank steps a share of them: use it "
            "without ShardedOptimizer, over the parameters of a data-parallel wrapper"
        )


def group_of(parameters: Sequence[nn.Parameter], given: ProcessGroup | None) -> ProcessGroup:
    """Return the group of the wrapper whose parameters these are, which must be the one given, if any.

    Raises:
        ValueError: another group.
    """
    wrapping = [guard.process_group for guard in hooks.guards_of(parameters)]
    group = collectives.resolve_group(given or next(iter(wrapping), None))
    ours = dist.get_process_group_ranks(group)
    for theirs in map(dist.get_process_group_ranks, wrapping):
        if theirs != ours:
            raise ValueError(
                f"ShardedOptimizer: the parameters belong to a wrapper on ranks {theirs}, and this would share their "
                f"updates among ranks {ours}: leave process_group out, or build an optimizer for each wrapper"
            )
    return group


def refuse_other_groups(saved: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]) -> None:
    """Raise ValueError for a saved state whose groups hold other parameters than these."""
    if [list(group["params"]) for group in saved] != [list(group) for group in names]:
        raise ValueError(
            "the saved groups hold other parameters, or in another order, than this optimizer's"
        )
