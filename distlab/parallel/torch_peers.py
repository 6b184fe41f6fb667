"""Baselines from torch: DDP, ZeroRedundancyOptimizer and FSDP2 as strategies.

They have the interface of our strategies, so the same loop trains and measures both. torch's tensor
and pipeline parallelism are in `torch_axes.py`.
"""

import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.comm.subgroups import resolve_mesh
from distlab.parallel.buckets import check_bucket_size
from distlab.parallel.fsdp.layout import list_entries, plan_units
from distlab.parallel.model import ParallelModel
from distlab.parallel.shard import Loader, Shard, local_part, plain_name, whole

UNBOUNDED_MB = 2.0**20  # 1 TiB, larger than any model's gradients: torch has no "unbounded"


class TorchDDP(ParallelModel):
    """Strategy with torch's DistributedDataParallel, the baseline of our DDPs.

    Args:
        module: the model to wrap.
        process_group: the ranks. None: the default group.
        bucket_cap_mb: MiB of gradients per bucket. None: 25 MiB after a first bucket of 1 MiB.
        gradient_as_bucket_view: True if gradients are views of the buckets.
        static_graph: True if every step uses the same graph.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ):
        super().__init__()
        self.module = module
        self.device = next(module.parameters()).device
        self.process_group = collectives.resolve_group(process_group)
        self.ddp = DistributedDataParallel(
            module,
            process_group=self.process_group,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager:
        """Return a context whose backward passes accumulate gradients locally.

        Under a static graph the first backward of all synchronizes, because torch learns the graph
        from a backward that does. Its gradients are averaged again with the later ones, which does
        not change them.
        """
        is_learned = getattr(self.ddp, "_static_graph_delay_allreduce_enqueued", True)
        return self.ddp.no_sync() if is_learned else nullcontext()

    def close(self, *, restore: bool = True) -> None:
        """Detach torch's hooks, so that the module can be wrapped again."""
        self.ddp._remove_autograd_hooks()
        del self.ddp
        gc.collect()  # a reference cycle would keep the memory of DDP's buckets


def tuned_torch_ddp(
    module: nn.Module,
    bucket_size_mb: float | None = 25.0,
    *,
    process_group: ProcessGroup | None = None,
) -> TorchDDP:
    """Return torch DDP with the options that its documentation advises for a graph that is static.

    Gradients are views of the buckets, so they are not copied back. The graph is declared static,
    so torch does not search for unused parameters, and rebuilds buckets in the order of the first
    backward. With `bucket_cap_mb`, even torch's own 25, the first bucket is as large as the others.

    Args:
        module: the model to wrap.
        bucket_size_mb: size of a bucket in MiB, torch's `bucket_cap_mb`. None: one bucket.
        process_group: the ranks. None: the default group.

    Raises:
        ValueError: a bucket size that is not positive.
    """
    check_bucket_size(bucket_size_mb)
    return TorchDDP(
        module,
        process_group=process_group,
        bucket_cap_mb=UNBOUNDED_MB if bucket_size_mb is None else bucket_size_mb,
        gradient_as_bucket_view=True,
        static_graph=True,
    )


def torch_zero(
    model: TorchDDP, optimizer_cls: type[Optimizer], params: Any = None, **options: Any
) -> Optimizer:
    """Return torch's ZeroRedundancyOptimizer, the baseline of `ZeroOptimizer`.

    Its `state` holds the state of the parameters that this rank steps.

    Args:
        model: the model under DDP.
        optimizer_cls: class of the local optimizer.
        params: parameters or groups. None: all parameters of the model.
        options: arguments of `optimizer_cls`.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of deprecations

    optimizer = ZeroRedundancyOptimizer(
        params or model.parameters(), optimizer_cls, process_group=model.process_group, **options
    )
    optimizer.state = optimizer.optim.state
    return optimizer


class TorchFSDP2(ParallelModel):
    """Strategy with torch's FSDP2, the baseline of `FSDP`.

    It calls `fully_shard` on the units of `FSDP` and reduces gradients in the dtype of the master
    weights. One thing differs: FSDP2 also shards norms and biases, with their unit or with the
    root, and `FSDP` replicates them. `parameters()` are DTensors sharded by rows.

    Args:
        module: the model, on its device. It is changed in place, and `close()` cannot undo that.
        compute_dtype: dtype of forward and backward, as for `FSDP`.
        mesh: mesh of shards and replicas, as for `FSDP`.
        process_group: the ranks. None: the default group.
        data_mesh: mesh of the data-parallel ranks, if parameters already are DTensors of another
            dimension of the same mesh (`parallelize_by_torch`).
        moved: new position of each row, by name, for parameters whose rows are in another order.
            `full_parameters` restores the order.
        contexts: contexts that stay entered until `close()`.

    Raises:
        TypeError, ValueError: a mesh that `FSDP` refuses.
        ValueError: a module without parameters.
    """

    casts_parameters = True
    shards_gradients = True

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
        data_mesh: DeviceMesh | None = None,
        moved: Mapping[str, Tensor] | None = None,
        contexts: ExitStack | None = None,
    ):
        # Imported here, because the import of DTensor takes a second.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__()
        self.module = module
        self.compute_dtype = compute_dtype
        groups = resolve_mesh(mesh, process_group)
        self.process_group = groups.world
        self.replicas = groups.replicas
        self._moved = moved or {}
        self._contexts = contexts or ExitStack()
        self._on_mesh = mesh is not None
        collectives.broadcast_all(
            [local_part(tensor) for tensor in (*module.parameters(), *module.buffers())],
            self.process_group,
        )
        # Keep the modules and not the plans, which refer to the whole parameters: `fully_shard`
        # frees these only if nothing else does.
        units = [plan.module for plan in plan_units(module, list_entries(module, compute_dtype))]
        self.device = next(module.parameters()).device
        if data_mesh is not None:
            mesh = data_mesh
        elif mesh is None:
            mesh = DeviceMesh.from_group(self.process_group, self.device.type)
        # With a reduce dtype, FSDP2 casts bf16 gradients to fp32 before it sends them, as `FSDP`
        # does.
        reduce_dtype = None if compute_dtype is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
        for unit in units:
            if unit is not module:
                fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)  # the root last, as torch requires

    def _set_accumulates(self, accumulates: bool) -> None:
        super()._set_accumulates(accumulates)
        if self._on_mesh:
            # As `FSDP` does: gradients are reduce-scattered, and not averaged between replicas.
            self.module.set_requires_all_reduce(not accumulates)
        else:
            self.module.set_requires_gradient_sync(not accumulates)

    def shards(self) -> list[Shard]:
        """Return the DTensors that the optimizer steps.

        Raises:
            ValueError: a parameter that is not sharded along its first dimension.
        """
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without backward leaves the root gathered
        return [_shard_of(name, parameter) for name, parameter in self.module.named_parameters()]

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """Return copies of the whole parameters, see `FSDP.full_parameters`. A collective."""
        found = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            found[name] = _full_copy(parameter)
        for name, rows in self._moved.items():
            found[name] = found[name][rows.to(self.device)]
        return found

    def loaders(self) -> list[Loader]:
        """Return where whole parameters are loaded to; see `ParallelModel.loaders`."""
        loaders = []
        for names, shape, _ in super().loaders():
            parameter = self.module.get_parameter(names[0])
            loaders.append(Loader(names, shape, partial(self._load, parameter, names)))
        return loaders

    def _load(self, parameter: nn.Parameter, names: Sequence[str], whole: Tensor) -> None:
        """Overwrite this rank's part of a parameter. No communication."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        for name in names:
            if name in self._moved:  # change the order of rows, as `full_parameters` restores it
                moved = torch.empty_like(whole)
                moved[self._moved[name].to(whole.device)] = whole
                whole = moved
                break
        if isinstance(parameter, DTensor):
            whole = whole.to(parameter.device, parameter.dtype)
            whole = distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(whole)

    def close(self, *, restore: bool = True) -> None:
        """Exit the contexts of torch's tensor parallelism. The module stays sharded."""
        self._contexts.close()


def _full_copy(parameter: Tensor) -> Tensor:
    """Return a copy of the whole parameter. A collective for a DTensor."""
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().clone()


def _shard_of(name: str, parameter: Tensor) -> Shard:
    """Return the shard of a whole parameter, or of a DTensor sharded along its first dimension.

    Raises:
        ValueError: a DTensor of other placements.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return whole(name, parameter)
    mesh = parameter.device_mesh
    placements = parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    is_by_rows = all(each.is_replicate() or each.is_shard(0) for each in placements)
    if not is_by_rows or any(offset[1:]):
        raise ValueError(f"placements {placements}: only cuts along the first dimension are stored")
    row_numel = torch.Size(parameter.shape[1:]).numel()
    is_hybrid = mesh.ndim == 2  # replicas × shards: the first dimension has copies of a shard
    return Shard(
        name=plain_name(name),
        shape=parameter.shape,
        start=offset[0] * row_numel if offset else 0,  # a 0-dim tensor has no offset
        tensor=parameter,
        replicated=all(each.is_replicate() for each in placements),
        copies=(mesh.get_local_rank(0), mesh.size(0)) if is_hybrid else (0, 1),
    )
