"""The table of strategies, through which benchmarks and the trainer find them by name.

A new strategy is a file in this folder, a function `wrap_…` and an entry in `_TABLE`. Every command
that takes `--strategies` then knows it. What other code asks of a strategy is a field of its entry,
so that no other code has a list of names. `build.py` explains the fields.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distlab.options import unknown
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.build import Strategy, Wrapping
from distlab.parallel.copy_engine import CopyEngineDDP
from distlab.parallel.flat import FlatDDP
from distlab.parallel.fsdp import FSDP
from distlab.parallel.local import Local
from distlab.parallel.local_optimizer import Params
from distlab.parallel.naive import NaiveDDP
from distlab.parallel.overlap import OverlapDDP
from distlab.parallel.sharded_optimizer import ShardedOptimizer
from distlab.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero, tuned_torch_ddp
from distlab.parallel.zero import ZeroOptimizer

# -- wrap(module, how) -----------------------------------------------------------------------------


def wrap_local(module: nn.Module, how: Wrapping) -> Local:
    """Wrap by `Local`, which sends nothing."""
    return Local(module)


def wrap_naive(module: nn.Module, how: Wrapping) -> NaiveDDP:
    """Wrap by `NaiveDDP`."""
    return NaiveDDP(module, process_group=how.process_group)


def wrap_flat(module: nn.Module, how: Wrapping) -> FlatDDP:
    """Wrap by `FlatDDP`."""
    return FlatDDP(module, process_group=how.process_group)


def wrap_overlap(module: nn.Module, how: Wrapping) -> OverlapDDP:
    """Wrap by `OverlapDDP`."""
    return OverlapDDP(module, process_group=how.process_group)


def wrap_bucketed(module: nn.Module, how: Wrapping) -> BucketedDDP:
    """Wrap by `BucketedDDP`, on a mesh if there is one."""
    return BucketedDDP(
        module,
        bucket_size_mb=how.bucket_size_mb,
        mesh=how.mesh,
        process_group=how.process_group,
    )


def wrap_copy_engine(module: nn.Module, how: Wrapping) -> CopyEngineDDP:
    """Wrap by `CopyEngineDDP`."""
    return CopyEngineDDP(module, bucket_size_mb=how.bucket_size_mb, process_group=how.process_group)


def wrap_fsdp(module: nn.Module, how: Wrapping) -> FSDP:
    """Wrap by `FSDP`, on a mesh if there is one. It makes the values of a module on meta."""
    return FSDP(
        module,
        compute_dtype=how.compute_dtype,
        mesh=how.mesh,
        process_group=how.process_group,
        init_fn=how.init_fn,
        device=how.device,
        keep_gathered=how.keep_gathered,
    )


def wrap_torch_ddp(module: nn.Module, how: Wrapping) -> TorchDDP:
    """Wrap by torch's DDP with torch's defaults, whatever the bucket size."""
    return TorchDDP(module, process_group=how.process_group)


def wrap_tuned_torch_ddp(module: nn.Module, how: Wrapping) -> TorchDDP:
    """Wrap by torch's DDP with tuned options."""
    return tuned_torch_ddp(
        module, bucket_size_mb=how.bucket_size_mb, process_group=how.process_group
    )


def wrap_fsdp2(module: nn.Module, how: Wrapping) -> TorchFSDP2:
    """Wrap by torch's `fully_shard`, on a mesh if there is one, or over torch's own layout."""
    return TorchFSDP2(
        module,
        compute_dtype=how.compute_dtype,
        mesh=how.mesh,
        process_group=how.process_group,
        data_mesh=how.data_mesh,
        moved=how.moved,
        contexts=how.contexts,
    )


# -- optimizer(model, optimizer_cls, params, options) ----------------------------------------------


def make_sharded_optimizer(
    model: BucketedDDP,
    optimizer_cls: type[Optimizer],
    params: Params | None,
    options: Mapping[str, Any],
) -> ShardedOptimizer:
    """Make a `ShardedOptimizer` over the ranks of the wrapper."""
    stepped_params = model.parameters() if params is None else params
    return ShardedOptimizer(stepped_params, optimizer_cls, model.process_group, **options)


def make_zero_optimizer(
    model: BucketedDDP,
    optimizer_cls: type[Optimizer],
    params: Params | None,
    options: Mapping[str, Any],
) -> ZeroOptimizer:
    """Make a `ZeroOptimizer` that gathers parameters under the next forward."""
    return ZeroOptimizer(model, optimizer_cls, params=params, overlap_gather=True, **options)


def make_zero2_optimizer(
    model: BucketedDDP,
    optimizer_cls: type[Optimizer],
    params: Params | None,
    options: Mapping[str, Any],
) -> ZeroOptimizer:
    """Make a `ZeroOptimizer` that also shards gradients, and gathers as that of `zero1` does."""
    return ZeroOptimizer(
        model, optimizer_cls, params=params, overlap_gather=True, shard_gradients=True, **options
    )


def make_torch_zero_optimizer(
    model: TorchDDP,
    optimizer_cls: type[Optimizer],
    params: Params | None,
    options: Mapping[str, Any],
) -> Optimizer:
    """Make torch's `ZeroRedundancyOptimizer` over the ranks of the wrapper."""
    return torch_zero(model, optimizer_cls, params=params, **options)


# -- the table -------------------------------------------------------------------------------------

_TABLE = [
    Strategy(
        name="local",
        wrap=wrap_local,
        sends="nothing",
        synchronizes=False,
        trains=False,
        does="no communication: the reference",
    ),
    Strategy(
        name="naive",
        wrap=wrap_naive,
        sends="gradients",
        after_backward=True,
        does="all-reduce each gradient at the end",
    ),
    Strategy(
        name="flat",
        wrap=wrap_flat,
        sends="all",
        after_backward=True,
        does="one all-reduce of all at the end",
    ),
    Strategy(
        name="overlap",
        wrap=wrap_overlap,
        sends="gradients",
        does="each gradient, during backward",
    ),
    Strategy(
        name="bucketed",
        wrap=wrap_bucketed,
        sends="buckets",
        has_buckets=True,
        does="gradient buckets, during backward",
    ),
    Strategy(
        name="bucketed-two-level",
        wrap=wrap_bucketed,
        sends="buckets",
        has_buckets=True,
        takes_mesh=True,
        takes_layout=False,
        does="buckets, within hosts, then between",
    ),
    Strategy(
        name="bucketed-dma",
        wrap=wrap_copy_engine,
        sends="buckets",
        has_buckets=True,
        pads_buckets=True,
        needs_gpu=True,
        does="buckets, moved by copy engines",
    ),
    Strategy(
        name="sharded-optimizer",
        wrap=wrap_bucketed,
        sends="buckets",
        optimizer=make_sharded_optimizer,
        has_buckets=True,
        updates="owned",
        does="each rank updates some parameters",
    ),
    Strategy(
        name="zero1",
        wrap=wrap_bucketed,
        sends="buckets",
        optimizer=make_zero_optimizer,
        has_buckets=True,
        updates="slices",
        does="ZeRO-1: each updates 1/N of all",
    ),
    Strategy(
        name="zero1-dma",
        wrap=wrap_copy_engine,
        sends="buckets",
        optimizer=make_zero_optimizer,
        has_buckets=True,
        needs_gpu=True,
        updates="slices",
        does="ZeRO-1, moved by copy engines",
    ),
    Strategy(
        name="zero2",
        wrap=wrap_bucketed,
        sends="buckets",
        optimizer=make_zero2_optimizer,
        has_buckets=True,
        updates="slices",
        frees_gradients=True,
        does="ZeRO-2: also 1/N of gradients",
    ),
    Strategy(
        name="fsdp",
        wrap=wrap_fsdp,
        sends="units",
        updates="slices",
        may_leave_unused=False,
        casts_parameters=True,
        materializes=True,
        may_keep_gathered=True,
        does="shards parameters, gradients, states",
    ),
    Strategy(
        name="hsdp",
        wrap=wrap_fsdp,
        sends="units",
        updates="slices",
        may_leave_unused=False,
        casts_parameters=True,
        takes_mesh=True,
        takes_layout=False,
        materializes=True,
        may_keep_gathered=True,
        does="sharded within hosts, else copies",
    ),
    Strategy(
        name="torch-ddp",
        wrap=wrap_torch_ddp,
        sends="buckets",
        may_leave_unused=False,
        takes_layout=False,
        is_peer=True,
        does="torch DDP, as it comes",
    ),
    Strategy(
        name="torch-ddp-tuned",
        wrap=wrap_tuned_torch_ddp,
        sends="buckets",
        has_buckets=True,
        may_leave_unused=False,
        takes_layout=False,
        is_peer=True,
        does="torch DDP, its options tuned",
    ),
    Strategy(
        name="torch-zero",
        wrap=wrap_tuned_torch_ddp,
        sends="buckets",
        optimizer=make_torch_zero_optimizer,
        has_buckets=True,
        updates="owned",
        may_leave_unused=False,
        # ZeroRedundancyOptimizer keeps its state where no checkpoint could find it.
        trains=False,
        takes_layout=False,
        is_peer=True,
        does="torch's ZeroRedundancyOptimizer",
    ),
    Strategy(
        name="fsdp2",
        wrap=wrap_fsdp2,
        sends="units",
        updates="slices",
        may_leave_unused=False,
        casts_parameters=True,
        is_peer=True,
        does="torch's fully_shard",
    ),
    Strategy(
        name="torch-hsdp",
        wrap=wrap_fsdp2,
        sends="units",
        updates="slices",
        may_leave_unused=False,
        casts_parameters=True,
        takes_mesh=True,
        takes_layout=False,
        is_peer=True,
        does="torch's fully_shard on a mesh",
    ),
]

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _TABLE}


def get_strategy(name: str) -> Strategy:
    """Look a strategy up by name.

    Raises:
        ValueError: there is none of that name; the message lists those that exist.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy {unknown(name, STRATEGIES)}")
    return STRATEGIES[name]


def strategies_on(device_type: str, *, meshes: bool = True) -> tuple[str, ...]:
    """Name all strategies that run on `cuda` or `cpu`.

    With `meshes=False`, leave out those with a mesh, which on one host do the same as the others.
    """
    return tuple(
        name
        for name, strategy in STRATEGIES.items()
        if (device_type == "cuda" or not strategy.needs_gpu) and (meshes or not strategy.takes_mesh)
    )


def check_shard_size(
    shard_size: int | None, strategies: Iterable[str], flag: str = "--shard-size"
) -> None:
    """Raise ValueError for a shard size, given by `flag`, that none of the strategies would use."""
    if shard_size is not None and not any(STRATEGIES[name].takes_mesh for name in strategies):
        taking = ", ".join(name for name, strategy in STRATEGIES.items() if strategy.takes_mesh)
        raise ValueError(
            f"{flag} {shard_size} is for strategies with a mesh: choose one of {taking}, or leave "
            "it out"
        )


def check_buckets(given: Mapping[str, Any], strategies: Iterable[str]) -> None:
    """Raise ValueError for a size of buckets that was asked for under strategies without buckets.

    Args:
        given: options of the command line; `bucket_size_mb` counts.
        strategies: names of the run's strategies. Unknown ones are refused elsewhere, with the
            names of all.
    """
    names = list(strategies)
    known = [STRATEGIES[name] for name in names if name in STRATEGIES]
    if "bucket_size_mb" in given and known and not any(each.has_buckets for each in known):
        taking = ", ".join(
            name for name, each in STRATEGIES.items() if each.has_buckets and each.trains
        )
        size = given["bucket_size_mb"]
        shown = "none" if size is None else f"{size:g}"
        raise ValueError(
            f"--bucket-size-mb {shown} is for strategies with buckets, and "
            f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} none: leave it out, or "
            f"choose one of {taking}"
        )


def check_reshard(reshard: str, strategy: str) -> None:
    """Raise ValueError if parameters are to stay gathered under a strategy that gathers none."""
    if reshard == "step" and not STRATEGIES[strategy].may_keep_gathered:
        taking = " or ".join(name for name, entry in STRATEGIES.items() if entry.may_keep_gathered)
        raise ValueError(
            "--reshard step is for strategies that can keep gathered parameters, and "
            f"{strategy} cannot: choose {taking}, or leave it out"
        )
