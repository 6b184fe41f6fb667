"""torch's DDP, ZeroRedundancyOptimizer and FSDP2 behind the interface of our strategies: one loop drives all."""

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
from distlab.parallel.base import ParallelModel
from distlab.parallel.buckets import check_bucket_size
from distlab.parallel.fsdp.entry import list_entries
from distlab.parallel.fsdp.units import plan_units
from distlab.parallel.shard import Shard, local_part, plain_name, whole
from distlab.parallel.state_dicts import Place

UNBOUNDED_MB = 2.0**20  # torch has no "unbounded"; no model's gradients reach a tebibyte


class TorchDDP(ParallelModel):
    """The production peer of our DDPs.

    Args:
        module: the model to wrap.
        process_group: default: the default group.
        options: torch's own, e.g. `bucket_cap_mb=100.0, gradient_as_bucket_view=True,
            static_graph=True`. With none, torch's defaults: buckets of 25 MiB after a first one of
            1 MiB.
    """

    def __init__(
        self, module: nn.Module, *, process_group: ProcessGroup | None = None, **options: Any
    ):
        super().__init__()
        self.module = module
        self.device = next(module.parameters()).device
        self.process_group = collectives.resolve_group(process_group)
        self.ddp = DistributedDataParallel(module, process_group=self.process_group, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager:
        """Backward passes inside accumulate locally, as in torch, but the first of all does not under a static graph.

        From it torch learns the graph, and only where it synchronizes. What it averages early is
        averaged again with the rest, which changes nothing.
        """
        learned = getattr(self.ddp, "_static_graph_delay_allreduce_enqueued", True)
        return self.ddp.no_sync() if learned else nullcontext()

    def close(self, *, restore: bool = True) -> None:
        """Detach torch's hooks, so that the module can be wrapped again."""
        self.ddp._remove_autograd_hooks()
        del self.ddp
        gc.collect()  # a reference cycle would keep its buckets' memory


def tuned_torch_ddp(
    module: nn.Module,
    bucket_size_mb: float | None = 25.0,
    *,
    process_group: ProcessGroup | None = None,
) -> TorchDDP:
    """torch DDP as its documentation advises where the graph never changes.

    Gradients are views of the buckets (no copy back) and the graph is declared static (no search
    for unused parameters, and buckets rebuilt in observed order). Giving `bucket_cap_mb`, even
    torch's own 25, makes the first bucket as large as the others.

    Args:
        bucket_size_mb: torch's `bucket_cap_mb`, MiB; None for one unbounded bucket.

    Raises:
        ValueError: a bucket size that is not positive.
    """
    check_bucket_size(bucket_size_mb)
    cap = UNBOUNDED_MB if bucket_size_mb is None else bucket_size_mb
    options = {"bucket_cap_mb": cap, "gradient_as_bucket_view": True, "static_graph": True}
    return TorchDDP(module, process_group=process_group, **options)


def torch_zero(
    model: TorchDDP, optimizer_cls: type[Optimizer], params: Any = None, **options: Any
) -> Optimizer:
    """torch's ZeroRedundancyOptimizer; its `state` is that of the parameters that this rank steps."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of deprecations

    group = model.process_group
    optimizer = ZeroRedundancyOptimizer(
        params or model.parameters(), optimizer_cls, process_group=group, **options
    )
    optimizer.state = optimizer.optim.state
    return optimizer


class TorchFSDP2(ParallelModel):
    """The production peer of `FSDP`: `fully_shard` on the same units, gradients reduced in the masters' dtype.

    The one difference in what is sharded: FSDP2 also shards norms and biases, with their unit or
    with the root, where `FSDP` replicates them. `parameters()` are DTensors sharded by rows.

    Args:
        module: the model, on its device; it is changed in place, and `close()` cannot undo that.
        compute_dtype: as `FSDP`'s.
        mesh: as `FSDP`'s.
        process_group: default: the default group.
        data_mesh: of its ranks, where parameters are DTensors of another dimension of the same mesh
            already.
        moved: of parameters whose rows stand in another order, where each of them is;
            `full_parameters` undoes that.
        contexts: what stays entered until `close()`.

    Raises:
        TypeError, ValueError: a mesh that `FSDP` refuses. ValueError: the module has no parameters.
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
        # DTensor's import takes a second.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__()
        self.module = module
        self.compute_dtype = compute_dtype
        groups = resolve_mesh(mesh, process_group)
        self.process_group, self.replicas = groups.world, groups.replicas
        self._moved, self._contexts = moved or {}, contexts or ExitStack()
        collectives.broadcast_all(
            map(local_part, (*module.parameters(), *module.buffers())), self.process_group
        )
        units = [plan.module for plan in plan_units(module, list_entries(module, compute_dtype))]
        self.device = next(module.parameters()).device
        if data_mesh is not None:
            mesh = data_mesh
        elif mesh is None:
            mesh = DeviceMesh.from_group(self.process_group, self.device.type)
        # Stating the reduce dtype makes FSDP2 cast bf16 gradients to fp32 before it sends them, as
        # FSDP does.
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=None if compute_dtype is None else torch.float32
        )
        for unit in units:
            if unit is not module:
                fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)

    def _set_synchronizes(self, synchronizes: bool) -> None:
        super()._set_synchronizes(synchronizes)
        self.module.set_requires_gradient_sync(synchronizes)

    def shards(self) -> list[Shard]:
        """Return the DTensors that the optimizer steps.

        Raises:
            ValueError: one that is not cut along its first dimension.
        """
        from torch.distributed.fsdp import FSDPModule

        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without backward leaves the root gathered
        return [_shard_of(name, parameter) for name, parameter in self.module.named_parameters()]

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """See `FSDP.full_parameters`; a collective."""
        from torch.distributed.tensor import DTensor

        found = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.module.named_parameters(remove_duplicate=False)
        }
        return found | {
            name: found[name][rows.to(self.device)] for name, rows in self._moved.items()
        }

    def _own_places(self) -> list[Place]:
        return [
            place._replace(
                load=partial(self._load, self.module.get_parameter(place.names[0]), place.names)
            )
            for place in super()._own_places()
        ]

    def _load(self, parameter: nn.Parameter, names: Sequence[str], whole: Tensor) -> None:
        """Overwrite this rank's part of a parameter. No communication."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        rows = next((self._moved[name] for name in names if name in self._moved), None)
        if rows is not None:  # undo what `full_parameters` does
            moved = torch.empty_like(whole)
            moved[rows.to(whole.device)] = whole
            whole = moved
        if isinstance(parameter, DTensor):
            whole = whole.to(parameter.device, parameter.dtype)
            whole = distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(whole)

    def close(self, *, restore: bool = True) -> None:
        """Leave what torch's own axes need; the module stays sharded."""
        self._contexts.close()


def _shard_of(name: str, parameter: Tensor) -> Shard:
    """Of a parameter that is whole, or a DTensor cut along its first dimension."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return whole(name, parameter)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if any(offset[1:]) or not all(p.is_replicate() or p.is_shard(0) for p in parameter.placements):
        raise ValueError(
            f"placements {parameter.placements}: only cuts along the first dimension are stored"
        )
    start = offset[0] * torch.Size(parameter.shape[1:]).numel() if offset else 0
    replicated = all(p.is_replicate() for p in parameter.placements)
    mesh = parameter.device_mesh
    copies = (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim == 2 else (0, 1)
    return Shard(plain_name(name), parameter.shape, start, parameter, replicated, copies)
