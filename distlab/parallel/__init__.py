"""The strategies, and the registry through which benchmarks and trainers find them by name.

A new strategy is a file in this folder and an entry in `STRATEGIES`; everything that takes
`--strategies` then knows it. What others ask of a strategy is a field of its entry, so that none of
them has a list of names.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm.subgroups import hybrid_mesh
from distlab.options import unknown
from distlab.parallel.base import LocalOptimizer, ParallelModel, stepped
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.bucketed_copy_engine import CopyEngineDDP
from distlab.parallel.context_parallel import Parts, share_sequences
from distlab.parallel.data_parallel import DataParallel
from distlab.parallel.flat import FlatDDP
from distlab.parallel.fsdp import FSDP
from distlab.parallel.guards.optimizers import refuse_cut_matrices, takes_shards
from distlab.parallel.layout import DATA_PARALLEL, Layout
from distlab.parallel.local import Local
from distlab.parallel.meta import materialize, reset_parameters
from distlab.parallel.naive import NaiveDDP
from distlab.parallel.overlap import OverlapDDP
from distlab.parallel.pipeline import Pipeline
from distlab.parallel.sharded_optimizer import ShardedOptimizer
from distlab.parallel.state_dicts import watch_states
from distlab.parallel.tensor_parallel import initialize_cut, parallelize
from distlab.parallel.torch_axes import TorchPipeline, parallelize_by_torch
from distlab.parallel.torch_peers import TorchDDP, TorchFSDP2, torch_zero, tuned_torch_ddp
from distlab.parallel.zero1 import ZeroOptimizer

__all__ = [
    "FSDP",
    "STRATEGIES",
    "BucketedDDP",
    "CopyEngineDDP",
    "DataParallel",
    "FlatDDP",
    "Layout",
    "Local",
    "LocalOptimizer",
    "NaiveDDP",
    "OverlapDDP",
    "ParallelModel",
    "ShardedOptimizer",
    "Strategy",
    "TorchDDP",
    "TorchFSDP2",
    "ZeroOptimizer",
    "check_buckets",
    "check_reshard",
    "check_shard_size",
    "get_strategy",
    "stepped",
    "strategies_on",
]


def _over_parameters(
    model: ParallelModel, optimizer_cls: type[Optimizer], params: Any = None, **options: Any
) -> Optimizer:
    return optimizer_cls(params or model.parameters(), **options)


@dataclass(frozen=True)
class Strategy:
    """A way to wrap a model, and the optimizer that steps it.

    Args:
        name: name on the command line and in records.
        wrap: function `wrap(module, process_group=…)`. It also takes `bucket_size_mb=…` if it has
            buckets.
        sends: content of one message: `nothing`, one of the `gradients`, `all` of them, `buckets`
            of them, or `units` of parameters and of their gradients. None if no closed form counts
            the bytes that it sends.
        optimizer: function `optimizer(model, optimizer_cls, **options)`. The default makes
            `optimizer_cls` over the model's parameters, or over the groups of its `split(model)`,
            which are given as `params`.
        has_buckets: True if it uses a bucket size.
        pads_buckets: True if buckets are padded to equal chunks for all ranks before the
            all-reduce.
        after_backward: True if gradients are sent only after backward has ended.
        updates: parameters that one rank's optimizer steps: `all`, `owned` ones, which it then
            broadcasts, or `slices` of all.
        may_leave_unused: True if a rank may use parameters that others do not use
            (`distlab.parallel.data_parallel`).
        trains: True if the trainer takes it: ranks stay equal, and a checkpoint finds all of its
            state.
        casts_parameters: True if `wrap` takes `compute_dtype=…`, in which parameters are then sent
            and used. Such a model needs no autocast, which would keep a cast copy of every weight
            during the step.
        takes_mesh: True if `wrap` takes `mesh=…`, made of shard groups of `shard_size=…` ranks.
        takes_layout: True if ranks may share a model under it, see `Layout`. Strategies of torch
            then use torch's own parallelism.
        materializes: True if `wrap` takes a module on meta with `init_fn=…` and `device=…`, and
            allocates it in shards.
        may_keep_gathered: True if `wrap` takes `keep_gathered=…`, see `FSDP`.
        synchronizes: False for `local`, whose ranks diverge.
        is_peer: True for torch's implementations, with which ours are compared.
        needs_gpu: True if it runs only on GPUs.
        does: description in at most 36 characters, for tables.
    """

    name: str
    wrap: Callable[..., ParallelModel]
    sends: str | None = None
    optimizer: Callable[..., Optimizer] = _over_parameters
    has_buckets: bool = False
    pads_buckets: bool = False
    after_backward: bool = False
    updates: str = "all"
    may_leave_unused: bool = True
    trains: bool = True
    casts_parameters: bool = False
    takes_mesh: bool = False
    takes_layout: bool = True
    materializes: bool = False
    may_keep_gathered: bool = False
    synchronizes: bool = True
    is_peer: bool = False
    needs_gpu: bool = False
    does: str = ""

    def refusal(self, layout: Layout) -> str | None:
        """Return why it cannot be used where ranks share a model in this way, or None if it can."""
        if layout.ranks > 1 and not self.takes_layout:
            return (
                f"{self.name} needs ranks that have a whole model each, and with layout {layout} they share it: take "
                f"{_taking(layout)}"
            )
        # Peers are refused every pipeline below: to recommend another schedule would not help them.
        if _splits_backward(layout) and self.casts_parameters and not self.is_peer:
            return (
                f"{self.name} gives a block's parameters back when its backward ends, which zero-bubble splits: take "
                f"another schedule, such as 1f1b, or with this one {_taking(layout)}"
            )
        if self.is_peer and (layout.context > 1 or (layout.pipeline > 1 and self.synchronizes)):
            return (
                f"{self.name} does not take layout {layout}: torch's own parallelism is measured with tpN alone. Take "
                f"{_taking(layout)}"
            )
        return None

    def build(
        self,
        module: nn.Module,
        group: ProcessGroup,
        optimizer_cls: type[Optimizer],
        optimizer_options: Mapping[str, Any] | None = None,
        *,
        init: Callable[[nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
        compute_dtype: torch.dtype | None = None,
        layout: Layout = DATA_PARALLEL,
        parts: Parts | None = None,
        **options: Any,
    ) -> tuple[ParallelModel, Optimizer]:
        """Wrap a module and make its optimizer. No other place puts the two together.

        Args:
            module: module on its device, or on meta. One on meta gets its values on `device`, unit
                by unit under FSDP.
            group: process group of all ranks.
            optimizer_options: keyword arguments of `optimizer_cls`.
            init: function that writes every parameter and buffer of a module on meta, in
                registration order. All ranks must draw the same values. Default: `reset_parameters`
                of the outermost modules that have it.
            device: device for the values of a module on meta.
            compute_dtype: dtype of forward, under `model.autocast()`. None: that of the parameters.
            layout: sizes of the groups of ranks that share the model. The strategy averages over
                the others (`Layout.axes`).
            parts: attention over a part of the keys, for ranks that share sequences.
            options: `bucket_size_mb` in MiB, by default the strategy's own; `shard_size`, ranks in
                a shard group, by default those of a host; `keep_gathered`, see `FSDP`. A strategy
                ignores those that it does not take.

        Raises:
            ValueError: a `shard_size` that does not divide the ranks, a module on meta without a
                device, `init` or `device` for a module that has values, or a layout that does not
                fit the ranks, the model, the strategy or the optimizer.
        """
        if layout.tensor > 1:
            refuse_cut_matrices(optimizer_cls)
        axes = layout.axes(group)
        if refusal := self.refusal(layout):
            raise ValueError(refusal)
        by_torch = self.is_peer and layout.ranks > 1
        pipeline = None
        if axes.pipeline is not None:
            if by_torch:
                pipeline = TorchPipeline(axes.pipeline, module, layout.schedule, layout.stages)
            else:
                pipeline = Pipeline(
                    axes.pipeline, module, layout.schedule, layout.stages, layout.tensor
                )
                pipeline.connect(axes.pipelines, group)
        if axes.context is not None and not by_torch:
            share_sequences(module, axes.context, parts, layout.attention)
        cuts = {} if axes.tensor is None or by_torch else parallelize(module, axes.tensor)
        if not self.has_buckets:
            options.pop("bucket_size_mb", None)
        if not self.may_keep_gathered:
            options.pop("keep_gathered", None)
        shard_size = options.pop("shard_size", None)
        if self.takes_mesh:
            options["mesh"] = hybrid_mesh(axes.data, shard_size)
        if self.casts_parameters:
            options["compute_dtype"] = compute_dtype
        if any(parameter.is_meta for parameter in module.parameters()):
            if device is None:
                raise ValueError(
                    "the module is on meta and has no values: give device=… to make them there"
                )
            init = init or reset_parameters
            if cuts:
                init = partial(initialize_cut, cuts=cuts, init=init)
            if self.materializes:
                options |= {"init_fn": init, "device": device}
            else:
                materialize(module, torch.device(device), init)
        elif init is not None or device is not None:
            raise ValueError(
                "init and device are for a module built on meta; this one has its values"
            )
        if by_torch and pipeline is None:
            options |= parallelize_by_torch(module, axes)
        model = self.wrap(module, process_group=axes.data, **options)
        model.compute_dtype, model.cuts = compute_dtype, cuts
        model.tensor_group = None if by_torch else axes.tensor
        model.pipeline = pipeline
        optimizer_options = dict(optimizer_options or {})
        if hasattr(optimizer_cls, "split"):  # it does not treat all parameters alike
            optimizer_options["params"] = optimizer_cls.split(model)
        optimizer = self.optimizer(model, optimizer_cls, **optimizer_options)
        steps_shards = self.updates == "slices" and not isinstance(optimizer, LocalOptimizer)
        if steps_shards and not takes_shards(optimizer_cls):  # those that do watch their own
            watch_states(optimizer)
        return model, optimizer


def _splits_backward(layout: Layout) -> bool:
    """Return whether ranks compute gradients of inputs and of matrices at different times."""
    return layout.pipeline > 1 and layout.schedule == "zero-bubble"


def _taking(layout: Layout) -> str:
    """Name strategies of ours that take a layout, for refusals of others."""
    return "bucketed or zero1" if _splits_backward(layout) else "bucketed, zero1 or fsdp"


def _local(module: nn.Module, *, process_group: ProcessGroup) -> Local:
    return Local(module)


def _sharded(
    model: BucketedDDP, optimizer_cls: type[Optimizer], params: Any = None, **options: Any
) -> ShardedOptimizer:
    return ShardedOptimizer(
        params or model.parameters(), optimizer_cls, model.process_group, **options
    )


_UNITS = {"updates": "slices", "may_leave_unused": False, "casts_parameters": True}
_GATHERED = {"materializes": True, "may_keep_gathered": True}
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "local",
            _local,
            "nothing",
            synchronizes=False,
            trains=False,
            does="no communication: the reference",
        ),
        Strategy(
            "naive",
            NaiveDDP,
            "gradients",
            after_backward=True,
            does="all-reduce each gradient at the end",
        ),
        Strategy(
            "flat", FlatDDP, "all", after_backward=True, does="one all-reduce of all at the end"
        ),
        Strategy("overlap", OverlapDDP, "gradients", does="each gradient, during backward"),
        Strategy(
            "bucketed",
            BucketedDDP,
            "buckets",
            has_buckets=True,
            does="gradient buckets, during backward",
        ),
        Strategy(
            "bucketed-two-level",
            BucketedDDP,
            "buckets",
            has_buckets=True,
            takes_mesh=True,
            takes_layout=False,
            does="buckets, within hosts, then between",
        ),
        Strategy(
            "bucketed-dma",
            CopyEngineDDP,
            "buckets",
            has_buckets=True,
            pads_buckets=True,
            needs_gpu=True,
            does="buckets, moved by copy engines",
        ),
        Strategy(
            "sharded-optimizer",
            BucketedDDP,
            "buckets",
            _sharded,
            has_buckets=True,
            updates="owned",
            does="each rank updates some parameters",
        ),
        Strategy(
            "zero1",
            BucketedDDP,
            "buckets",
            ZeroOptimizer,
            has_buckets=True,
            updates="slices",
            does="ZeRO-1: each updates 1/N of all",
        ),
        Strategy(
            "fsdp",
            FSDP,
            "units",
            **_UNITS,
            **_GATHERED,
            does="shards parameters, gradients, states",
        ),
        Strategy(
            "hsdp",
            FSDP,
            "units",
            **_UNITS,
            **_GATHERED,
            takes_mesh=True,
            takes_layout=False,
            does="sharded within hosts, else copies",
        ),
        Strategy(
            "torch-ddp",
            TorchDDP,
            "buckets",
            may_leave_unused=False,
            is_peer=True,
            takes_layout=False,
            does="torch DDP, as it comes",
        ),
        Strategy(
            "torch-ddp-tuned",
            tuned_torch_ddp,
            "buckets",
            has_buckets=True,
            may_leave_unused=False,
            is_peer=True,
            takes_layout=False,
            does="torch DDP, its options tuned",
        ),
        # ZeroRedundancyOptimizer keeps its state where no checkpoint could find it.
        Strategy(
            "torch-zero",
            tuned_torch_ddp,
            "buckets",
            torch_zero,
            has_buckets=True,
            updates="owned",
            may_leave_unused=False,
            trains=False,
            is_peer=True,
            takes_layout=False,
            does="torch's ZeroRedundancyOptimizer",
        ),
        Strategy("fsdp2", TorchFSDP2, "units", **_UNITS, is_peer=True, does="torch's fully_shard"),
        Strategy(
            "torch-hsdp",
            TorchFSDP2,
            "units",
            **_UNITS,
            is_peer=True,
            takes_mesh=True,
            takes_layout=False,
            does="torch's fully_shard on a mesh",
        ),
    )
}


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
            f"{flag} {shard_size} is for strategies with a mesh: choose one of {taking}, or leave it out"
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
        raise ValueError(
            f"--bucket-size-mb {given['bucket_size_mb']:g} is for strategies with buckets, and {', '.join(names)} "
            f"has none: leave it out, or choose one of {taking}"
        )


def check_reshard(reshard: str, strategy: str) -> None:
    """Raise ValueError if parameters are to stay gathered under a strategy that gathers none."""
    if reshard == "step" and not STRATEGIES[strategy].may_keep_gathered:
        taking = " or ".join(name for name, entry in STRATEGIES.items() if entry.may_keep_gathered)
        raise ValueError(
            f"--reshard step is for strategies that can keep gathered parameters, and {strategy} cannot: choose "
            f"{taking}, or leave it out"
        )


def get_strategy(name: str) -> Strategy:
    """Look a strategy up by name.

    Raises:
        ValueError: there is none of that name; the message lists those that exist.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy {unknown(name, STRATEGIES)}")
    return STRATEGIES[name]
