"""Put a model, a strategy and an optimizer together.

`Strategy` is one entry of the table in `registry.py`: a function that wraps, one that makes the
optimizer, and the facts that other code asks for. `Strategy.build` is the only place where the
forms of parallelism meet. It applies them in the order in which its body is written.

This file knows no strategy. `registry.py` lists them. Read `Strategy.build` first.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distlab.comm.subgroups import hybrid_mesh
from distlab.parallel.checks import refuse_cut_matrices, takes_shards
from distlab.parallel.context_parallel import Parts, share_sequences
from distlab.parallel.layout import DATA_PARALLEL, Layout
from distlab.parallel.local_optimizer import LocalOptimizer, Params
from distlab.parallel.meta import materialize, reset_parameters
from distlab.parallel.model import ParallelModel
from distlab.parallel.pipeline import Pipeline
from distlab.parallel.shard import Cut
from distlab.parallel.state_dicts import watch_states
from distlab.parallel.tensor_parallel import initialize_cut, parallelize
from distlab.parallel.torch_axes import TorchPipeline, parallelize_by_torch

# The default of every strategy with buckets, and of torch's DDP.
BUCKET_SIZE_MB = 25.0

Init = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Wrapping:
    """Arguments for a strategy's `wrap(module, how)`. It reads those that its class takes.

    Attributes:
        process_group: ranks over which the strategy averages. None: the default group.
        mesh: mesh of these ranks, for strategies that work inside and between shard groups.
        bucket_size_mb: MiB of gradients per bucket. None: one unbounded bucket per dtype.
        compute_dtype: dtype in which parameters are sent and used. None: that of the parameters.
        init_fn: function that writes the values of a module on meta. None: the module has values.
        device: device for these values. None: the module has values.
        keep_gathered: True to keep gathered parameters until the step, see `FSDP`.
        data_mesh: this dimension of torch's mesh, where torch has cut matrices into DTensors.
        moved: order of a parameter's rows, by name, where torch's tensor parallelism changed it.
        contexts: contexts of torch's tensor parallelism, to leave when the model is closed.
    """

    process_group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    bucket_size_mb: float | None = BUCKET_SIZE_MB
    compute_dtype: torch.dtype | None = None
    init_fn: Init | None = None
    device: torch.device | str | None = None
    keep_gathered: bool = False
    data_mesh: DeviceMesh | None = None
    moved: Mapping[str, Tensor] | None = None
    contexts: ExitStack | None = None


Wrap = Callable[[nn.Module, Wrapping], ParallelModel]
MakeOptimizer = Callable[
    [ParallelModel, type[Optimizer], Params | None, Mapping[str, Any]], Optimizer
]


def make_plain_optimizer(
    model: ParallelModel,
    optimizer_cls: type[Optimizer],
    params: Params | None,
    options: Mapping[str, Any],
) -> Optimizer:
    """Make `optimizer_cls` over the model's parameters, or over the groups in `params`."""
    return optimizer_cls(model.parameters() if params is None else params, **options)


@dataclass(frozen=True)
class Strategy:
    """A way to wrap a model, the optimizer that steps it, and what other code must know of both.

    Args:
        name: name on the command line and in records.
        wrap: function `wrap(module, how)` that returns the wrapped module, see `Wrapping`.
        sends: content of one message: `nothing`, one of the `gradients`, `all` of them, `buckets`
            of them, or `units` of parameters and of their gradients. None if no closed form counts
            the bytes that it sends.
        optimizer: function `optimizer(model, optimizer_cls, params, options)`. `params` are groups
            of parameters, or None for all parameters in one group. `options` are keyword arguments
            of `optimizer_cls`.
        has_buckets: True if it uses a bucket size.
        pads_buckets: True if buckets are padded to equal chunks for all ranks before the
            all-reduce.
        after_backward: True if gradients are sent only after backward has ended.
        updates: parameters that one rank's optimizer steps: `all`, `owned` ones, which it then
            broadcasts, or `slices` of all.
        frees_gradients: True if a rank keeps its slice of each mean gradient and frees the rest.
            Micro-batches then send their gradients one by one.
        may_leave_unused: True if a rank may use parameters that others do not use
            (`distlab.parallel.ddp`).
        trains: True if the trainer takes it: ranks stay equal, and a checkpoint finds all of its
            state.
        casts_parameters: True if parameters are sent and used in `compute_dtype`. Such a model
            needs no autocast, which would keep a cast copy of every weight during the step.
        takes_mesh: True if it works on a mesh of shard groups of `shard_size` ranks.
        takes_layout: True if ranks may share a model under it, see `Layout`. Strategies of torch
            then use torch's own parallelism.
        materializes: True if `wrap` takes a module on meta with `init_fn` and `device`, and
            allocates it in shards.
        may_keep_gathered: True if it uses `keep_gathered`, see `FSDP`.
        synchronizes: False for `local`, whose ranks diverge.
        is_peer: True for torch's implementations, with which ours are compared.
        needs_gpu: True if it runs only on GPUs.
        does: description in at most 36 characters, for tables.
    """

    name: str
    wrap: Wrap
    sends: str | None = None
    optimizer: MakeOptimizer = make_plain_optimizer
    has_buckets: bool = False
    pads_buckets: bool = False
    after_backward: bool = False
    updates: str = "all"
    frees_gradients: bool = False
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
        """Return the reason why it cannot be used under this layout, or None if it can."""
        if layout.ranks > 1 and not self.takes_layout:
            return (
                f"{self.name} needs ranks that have a whole model each, and with layout {layout} "
                f"they share it: take {_taking(layout)}"
            )
        # Peers are refused every pipeline below: to recommend another schedule would not help them.
        if _splits_backward(layout) and self.casts_parameters and not self.is_peer:
            return (
                f"{self.name} gives a block's parameters back when its backward ends, which "
                "zero-bubble splits: take another schedule, such as 1f1b, or with this one "
                f"{_taking(layout)}"
            )
        if self.is_peer and (layout.context > 1 or (layout.pipeline > 1 and self.synchronizes)):
            return (
                f"{self.name} does not take layout {layout}: torch's own parallelism is measured "
                f"with tpN alone. Take {_taking(layout)}"
            )
        return None

    def build(
        self,
        module: nn.Module,
        group: ProcessGroup,
        optimizer_cls: type[Optimizer],
        optimizer_options: Mapping[str, Any] | None = None,
        *,
        init: Init | None = None,
        device: torch.device | str | None = None,
        compute_dtype: torch.dtype | None = None,
        layout: Layout = DATA_PARALLEL,
        parts: Parts | None = None,
        bucket_size_mb: float | None = BUCKET_SIZE_MB,
        shard_size: int | None = None,
        keep_gathered: bool = False,
    ) -> tuple[ParallelModel, Optimizer]:
        """Wrap a module and make its optimizer. No other place puts the two together.

        Args:
            module: module on its device, or on meta. One on meta gets its values on `device`, unit
                by unit under FSDP.
            group: process group of all ranks.
            optimizer_cls: class of the optimizer that steps each rank's parameters.
            optimizer_options: keyword arguments of `optimizer_cls`.
            init: function that writes every parameter and buffer of a module on meta, in
                registration order. All ranks must draw the same values. Default: `reset_parameters`
                of the outermost modules that have it.
            device: device for the values of a module on meta.
            compute_dtype: dtype of forward, under `model.autocast()`. None: that of the parameters.
            layout: sizes of the groups of ranks that share the model. The strategy averages over
                the others (`Layout.axes`).
            parts: attention over a part of the keys. Ranks that share sequences need it.
            bucket_size_mb: MiB of gradients per bucket. None: one unbounded bucket per dtype.
                Ignored by strategies without buckets.
            shard_size: ranks in a shard group. None: those of a host. Ignored by strategies without
                a mesh.
            keep_gathered: True to keep gathered parameters until the step, see `FSDP`. Ignored by
                strategies that cannot.

        Raises:
            ValueError: a `shard_size` that does not divide the ranks, a module on meta without a
                device, `init` or `device` for a module that has values, a layout that does not fit
                the ranks, the model, the strategy or the optimizer, or one in which ranks share
                sequences, without `parts`.
            TypeError: a model whose class has no method to be shared in this way.
        """
        # Check the layout before the module is changed, and make the groups of this rank.
        if layout.context > 1 and parts is None:
            raise ValueError(f"{layout}: ranks share sequences, so give parts=…, their attention")
        if layout.tensor > 1:
            refuse_cut_matrices(optimizer_cls)
        axes = layout.axes(group)
        refusal = self.refusal(layout)
        if refusal is not None:
            raise ValueError(refusal)
        mesh = hybrid_mesh(axes.data, shard_size) if self.takes_mesh else None
        by_torch = self.is_peer and layout.ranks > 1  # a peer is measured with torch's own axes

        # Pipeline first: it keeps the blocks of this rank's stages, and the other steps work on
        # those alone.
        pipeline = None
        if axes.pipeline is not None:
            runner = TorchPipeline if by_torch else Pipeline
            pipeline = runner(axes, module)

        # Context: attention exchanges keys and values with the ranks that share the sequences. No
        # peer reaches this line (`refusal`).
        if axes.context is not None:
            share_sequences(module, axes.context, parts, layout.attention)

        # Tensor: keep this rank's rows or columns of every matrix. Ours cuts a module on meta also,
        # so that no rank ever holds a whole model.
        cuts: dict[str, Cut] = {}
        if axes.tensor is not None and not by_torch:
            cuts = parallelize(module, axes.tensor)

        # Values of a module on meta, now that only this rank's part of it is left.
        init_fn = _initialization(module, init, device, cuts)
        if init_fn is not None and not self.materializes:
            materialize(module, torch.device(device), init_fn)
            init_fn, device = None, None  # the module has its values, and `wrap` makes none

        # Torch's tensor parallelism moves rows of matrices, so it needs their values.
        data_mesh, moved, contexts = None, None, None
        if by_torch and pipeline is None:
            facts = parallelize_by_torch(module, axes)
            data_mesh, moved, contexts = facts["data_mesh"], facts["moved"], facts["contexts"]

        # Wrapper: data parallelism over the ranks that have the same part of the model.
        how = Wrapping(
            process_group=axes.data,
            mesh=mesh,
            bucket_size_mb=bucket_size_mb,
            compute_dtype=compute_dtype,
            init_fn=init_fn,
            device=device,
            keep_gathered=keep_gathered,
            data_mesh=data_mesh,
            moved=moved,
            contexts=contexts,
        )
        model = self.wrap(module, how)
        model.compute_dtype = compute_dtype
        model.cuts = cuts
        model.tensor_group = None if by_torch else axes.tensor
        model.pipeline = pipeline

        # Optimizer last: FSDP has replaced the parameters that it is to step.
        params = None
        if hasattr(optimizer_cls, "split"):  # this optimizer treats parameters differently
            params = optimizer_cls.split(model)
        optimizer = self.optimizer(model, optimizer_cls, params, optimizer_options or {})
        # A state dict of torch's own optimizer over slices holds one rank's part, and must say so.
        # Our optimizers and those that take shards say so themselves.
        holds_slices = self.updates == "slices" and not isinstance(optimizer, LocalOptimizer)
        if holds_slices and not takes_shards(optimizer_cls):
            watch_states(optimizer)
        return model, optimizer


def _initialization(
    module: nn.Module,
    init: Init | None,
    device: torch.device | str | None,
    cuts: Mapping[str, Cut],
) -> Init | None:
    """Return the function that writes the values of a module on meta, None if it has values.

    Raises:
        ValueError: a module on meta without a device, or `init` or `device` for one with values.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):
        if init is not None or device is not None:
            raise ValueError(
                "init and device are for a module built on meta; this one has its values"
            )
        return None
    if device is None:
        raise ValueError(
            "the module is on meta and has no values: give device=… to make them there"
        )
    init = init or reset_parameters
    if not cuts:
        return init
    # `init` draws whole matrices, of which a rank keeps its part, so that values do not depend on
    # the layout.
    return partial(initialize_cut, cuts=cuts, init=init)


def _splits_backward(layout: Layout) -> bool:
    """Return whether ranks compute gradients of inputs and of matrices at different times."""
    return layout.pipeline > 1 and layout.schedule == "zero-bubble"


def _taking(layout: Layout) -> str:
    """Name strategies of ours that take a layout, for refusals of others."""
    return "bucketed or zero1" if _splits_backward(layout) else "bucketed, zero1 or fsdp"
