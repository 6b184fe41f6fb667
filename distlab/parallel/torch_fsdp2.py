"""torch's FSDP2 (`fully_shard`) behind the interface of our strategies, cut into the same units as our `FSDP`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distlab.comm import collectives
from distlab.parallel.fsdp.units import list_entries, plan_units


class TorchFSDP2(nn.Module):
    """The production peer of `FSDP`: the same units, the same types, gradients reduced in the masters' type.

    The one difference in what is sharded: FSDP2 also shards norms and biases, with their unit or with the root,
    where `FSDP` replicates them. `parameters()` are DTensors sharded by rows.

    Args:
        module: the model, on its device; it is changed in place, and `close()` cannot undo that.
        compute_dtype: as `FSDP`'s.
        process_group: default: the default group.

    Raises:
        ValueError: the module has no parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.module = module
        self.process_group = collectives.resolve_group(process_group)
        collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)
        units = [plan.module for plan in plan_units(module, list_entries(module, compute_dtype))]
        device_type = next(module.parameters()).device.type
        mesh = DeviceMesh.from_group(self.process_group, device_type)
        # Stating the reduce type makes FSDP2 cast bf16 gradients to fp32 before it sends them, as FSDP does.
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=None if compute_dtype is None else torch.float32
        )
        for unit in units:
            if unit is not module:
                fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        self._synchronizes = True  # False inside no_sync()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep full gradients; the next one outside sends the sum."""
        before, self._synchronizes = self._synchronizes, False
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._synchronizes = before
            self.module.set_requires_gradient_sync(before)

    def finish_gradient_synchronization(self) -> None:
        """torch waits for its reduce-scatters at the end of backward; nothing is left to do."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip by the joint 2-norm over all ranks' pieces; returns the norm before, 0-dim."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """As `FSDP.gather_full_params`; a collective."""
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.module.named_parameters(remove_duplicate=False)
        }

    def sync_buffers(self) -> None:
        """Overwrite all buffers by those of rank 0."""
        collectives.broadcast_all(self.module.buffers(), self.process_group)

    def close(self) -> None:
        """Nothing: `fully_shard` cannot be undone."""
