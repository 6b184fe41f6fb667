"""Fully sharded data parallelism (ZeRO stage 3): each rank keeps 1/N of parameters, gradients and optimizer state.

One step with units A, B, C; `ag` gathers a unit's parameters, `rs` reduce-scatters its gradients:

    compute        │    A    │    B    │    C    │    C'   │    B'   │    A'   │      │ optimizer │
    communication  │ag A│ag B│ag C│              │ag C│ag B│ag A│rs C│rs B│         │rs A│
    gathered       │   A B   │   B C   │    C    │   C B   │   B A   │    A    │

A unit is unsharded while the one before it computes, resharded after its forward, and unsharded
again for its backward; its gradients are reduce-scattered while the next one computes. `runtime.py`
says when, `unit.py` holds the memory.

Zhao et al. 2023 (PyTorch FSDP) describe the flat layout and these steps; Rajbhandari et al. 2020
(ZeRO) call it stage 3. `docs/learn/fsdp.md` states memory, precision and limits.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys

from distlab.comm import collectives
from distlab.comm.subgroups import resolve_mesh
from distlab.parallel import order
from distlab.parallel.agreement import agree_on_call, prepare
from distlab.parallel.fsdp.casts import hook_casts, plan_casts
from distlab.parallel.fsdp.entry import Entry, list_entries
from distlab.parallel.fsdp.replicated import Replicated
from distlab.parallel.fsdp.runtime import NO_BACKWARD, Runtime
from distlab.parallel.fsdp.unit import Unit
from distlab.parallel.fsdp.units import is_called, plan_units
from distlab.parallel.guards import shards as shard_guard
from distlab.parallel.guards.assignments import refuse_assigned
from distlab.parallel.guards.module import Guarded, check_ranks_agree, refuse_uninitialized
from distlab.parallel.guards.shards import ShardGuard
from distlab.parallel.guards.shared_memory import refuse_shared_memory
from distlab.parallel.meta import StandIn, initialize_in_turn, materialize_buffers
from distlab.parallel.shard import Shard, plain_name, whole
from distlab.parallel.state_dicts import Place


class FSDP(Guarded):
    """Shards a module's matrices over the ranks and replicates its vectors.

    `parameters()` yields what the optimizer steps, in fp32 (fp64 stays fp64), under the module's
    own names: this rank's rows of each matrix, `(rows, …)` with its number of dimensions and
    perhaps no rows, and the replicated vectors. `full_state_dict()` and `load_full_state_dict()`
    are for the whole model. `state_dict()` raises, because it would hold one rank's rows under the
    names of whole matrices.

    Build the optimizer after wrapping, of a kind that works element by element (SGD, Adam, AdamW),
    or `distlab.optim.Muon`.

    Args:
        module: any `nn.Module` on one device; construction takes rank 0's parameters and buffers.
        compute_dtype: dtype in which matrices are sent and used in forward and backward, together
            with their biases; modules that hold matrices also get their floating-point inputs in
            it. Norms stay in fp32 and return it; see `plan_casts`. Gradients are reduced in the
            masters' dtype. None: the dtypes of the module.
        mesh: two-dimensional, (replicas, ranks of a shard group), such as hosts and their GPUs: the
            module is sharded inside a group and replicated between the groups (hybrid sharding);
            default: all ranks are one group.
        process_group: all ranks; default: the default group.
        init_fn: for a module built on meta: `init_fn(module)` writes every parameter, in
            registration order, as `lambda model: model.reset_parameters(seed)` does; see
            `distlab.parallel.meta`. Ranks must draw alike.
        device: where to make the shards of a module built on meta.
        keep_gathered: whether matrices that a forward has gathered stay, in full, until the step's
            gradients are finished: a step of several micro-batches then gathers once, and has the
            memory of all.

    Raises:
        TypeError: a mesh that is no DeviceMesh.
        ValueError: a mesh of other dimensions or ranks (see `resolve_mesh`), no parameters, an
            uninitialized one, two that share memory, several devices, a compute dtype that is no
            float, a module wrapped already, a module on meta without `init_fn` and `device`, or
            ranks that disagree on the model (then on every rank).
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
        init_fn: Callable[[nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
        keep_gathered: bool = False,
    ):
        super().__init__()
        shard_guard.check_compute_dtype(compute_dtype)
        self.module = module
        self.compute_dtype = compute_dtype
        groups = resolve_mesh(mesh, process_group)
        self.process_group, self.replicas = groups.world, groups.replicas
        prepare(self.process_group)
        refuse_uninitialized(module)
        entries = list_entries(module, compute_dtype)
        self._names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self.device = shard_guard.find_device(entries, init_fn, device)
        plans = plan_units(module, entries)
        if not is_called(module):
            shard_guard.refuse_uncallable(module)
        shard_guard.refuse_parameters(entries)
        shard_guard.refuse_compiled(module, plans)
        check_ranks_agree(module, self.process_group)
        refuse_shared_memory(module)
        owners = dict.fromkeys(owner for entry in entries for owner, _ in entry.owners)
        casts = {} if compute_dtype is None else plan_casts(owners, compute_dtype)
        deferred = entries[0].parameter.is_meta
        if not deferred:
            collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)
        for entry in entries:
            # what holds it steps nothing that is in use: see guards/hooks.py
            entry.parameter.replaced = True
        self._units = [Unit(index, plan, self.device, groups) for index, plan in enumerate(plans)]
        self.flat_params = [param for unit in self._units for param in unit.params]
        self._sharded = [  # every sharded parameter, and where it lies
            (entry, param, index)
            for param in self.flat_params
            for index, entry in enumerate(param.entries)
        ]
        small = [entry for entry in entries if not entry.is_sharded]
        self._replicated = Replicated(small, self.device, self.process_group)
        if deferred:
            materialize_buffers(module, self.device)
            initialize_in_turn(module, self._stand_ins(), init_fn)
            vectors = [master for _, master in self._replicated.masters]
            collectives.broadcast_all([*vectors, *module.buffers()], self.process_group)
            for unit in self._units:
                unit.register()  # in place of what was initialized
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        sharded = [(name, p) for name, p in trainable if p.ndim >= 2]
        replicated = [(name, p) for name, p in trainable if p.ndim < 2]
        self.guard = ShardGuard(self, entries, sharded, replicated, self._replicated.cast)
        self._runtime = Runtime(self._units, self.guard, type(module).__name__, keep_gathered)
        self._held = list(self._find_shards())
        self._handles = [
            *hook_casts(casts),
            *shard_guard.refuse_state_dicts(module, self._sharded_owners()),
        ]

    # -- the public face -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result.

        Without gradients it needs no finish.
        """
        if torch.compiler.is_compiling():
            return self._outside_graph(*args, **kwargs)
        if torch._C._current_graph_task_id() != NO_BACKWARD:  # this very call is being recomputed
            return self.module(*args, **kwargs)
        if self._runtime.backward_task is not None:
            # It raised. All ranks must have failed at one place, else those that wait fail within
            # the group's timeout.
            self._runtime.recover()
            self.zero_grad()
        self.guard.check_module()
        if self._replicated.cast:
            self._replicated.refresh()
        if order.begun:
            order.send_begun(self.process_group)
        with self._runtime.forward_pass(self.module.training):
            return self.module(*args, **kwargs)

    @torch._disable_dynamo
    def _outside_graph(self, *args: Any, **kwargs: Any) -> Any:
        """`torch.compile(fsdp)`: parts that are compiled themselves still are."""
        return self(*args, **kwargs)

    def _set_synchronizes(self, synchronizes: bool) -> None:
        super()._set_synchronizes(synchronizes)
        self._runtime.synchronize = synchronizes

    def enter_stage(self, stage: int) -> None:
        """See `ParallelModel.enter_stage`; a stage has an order of units of its own."""
        self._runtime.stage = stage

    def finish_gradient_synchronization(self) -> None:
        """Wait until the `.grad` of every shard and every replicated parameter is the mean over ranks.

        Call it on every rank after backward, before clipping and the optimizer's step. Without a
        synchronised forward since the last call it does nothing. In a unit that ran, a parameter
        without a gradient has a gradient of zero; in a unit that ran on no rank it stays None.

        Raises:
            ValueError: a parameter was frozen, unfrozen, added or given a gradient hook after
                wrapping.
            RuntimeError: a gradient was changed after backward; or backward reached parameters of a
                unit, but not through what the unit returned; or none.
        """
        if not self.guard.begin_finish():
            return
        if order.begun:
            order.send_begun(self.process_group)
        self._runtime.finish()
        if self._replicated.trainable:
            self._replicated.average()
        self.guard.note(finished=True)

    def _note_scaled(self) -> None:
        self.guard.note()

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter in full on every rank: original names and shapes, masters' dtype (fp32), no padding.

        A tied parameter stands under each of its names, one tensor. Call it on every rank; needs
        the memory of the whole model in fp32.
        """
        agree_on_call(self.process_group, "FSDP.gather_full_params()")
        refuse_assigned(self.guard.placed)
        found = {}
        for param in self.flat_params:
            for entry, full in zip(param.entries, param.gather_masters(), strict=True):
                found.update(dict.fromkeys(entry.names, full))
        for entry, master in self._replicated.masters:
            found.update(dict.fromkeys(entry.names, master.detach().clone()))
        return {name: found[name] for name in self._names}

    full_parameters = gather_full_params

    @torch.no_grad()
    def load_full_params(self, parameters: Mapping[str, Tensor]) -> None:
        """Invert `gather_full_params()`: each rank takes its shards out of the full tensors.

        No communication. Of a tied parameter one name suffices.

        Raises:
            ValueError: a parameter is missing or has another shape.
        """
        for entry, load in self._loaders():
            name = next((name for name in entry.names if name in parameters), entry.name)
            given, needed = (
                tuple(getattr(parameters.get(name), "shape", ())),
                tuple(entry.parameter.shape),
            )
            if name not in parameters or given != needed:
                found = f"has shape {given}" if name in parameters else "is missing"
                raise ValueError(
                    f"load_full_params: '{name}' {found}; the model's has shape {needed}"
                )
            load(parameters[name])

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a whole state by `load_full_state_dict()`; the shards of a rank are refused.

        Raises:
            ValueError: names or shapes of another model, shards, `strict=False` or `assign=True`.
        """
        if not strict or assign:
            raise ValueError(
                f"FSDP.load_state_dict got strict={strict} and assign={assign}: only a whole state can be loaded, "
                "into the memory that is there. Load other states into the module before wrapping it"
            )
        self.load_full_state_dict(state_dict)
        return _IncompatibleKeys([], [])

    def _own_places(self) -> list[Place]:
        refuse_assigned(self.guard.placed)  # else values would go where nothing is gathered from
        return [
            Place([plain_name(name) for name in entry.names], entry.parameter.shape, load)
            for entry, load in self._loaders()
        ]

    def _sharded_owners(self) -> set[nn.Module]:
        return {owner for entry, _, _ in self._sharded for owner, _ in entry.owners}

    def shards(self) -> list[Shard]:
        """Return this rank's rows of every matrix, and the replicated parameters."""
        return self._held

    def _find_shards(self) -> Iterator[Shard]:
        for entry, param, index in self._sharded:
            # Rows of a matrix that is not in row-major order are no contiguous part of its
            # elements.
            in_order = list(entry.memory_order) == sorted(entry.memory_order)
            start = param.layout.shard_range(index, param.rank)[0] if in_order else None
            copies = (0 if param.replicate is None else param.replicate.rank(), self.replicas)
            yield Shard(
                plain_name(entry.name),
                entry.parameter.shape,
                start,
                param.shards[index],
                copies=copies,
            )
        for entry, master in self._replicated.masters:
            yield whole(entry.name, master)

    def _stand_ins(self) -> Iterator[StandIn]:
        for entry, param, index in self._sharded:
            full = torch.empty_like(entry.parameter, device=self.device)
            stand_in = nn.Parameter(full, entry.parameter.requires_grad)
            entry.register(stand_in)
            yield entry.name, stand_in, partial(param.load, index)

    def _loaders(self) -> Iterator[tuple[Entry, Callable[[Tensor], Any]]]:
        for entry, param, index in self._sharded:
            yield entry, partial(param.load, index)
        for entry, master in self._replicated.masters:
            yield entry, master.copy_

    def relearn_order(self) -> None:
        """Forget in which order units ran: the next pass of each kind is compared between ranks again."""
        self._runtime.forget_orders()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`, and drop what `no_sync()` accumulated, which no optimizer sees."""
        self._runtime.wait_for_gradients()  # else gradients in flight would be added later
        super().zero_grad(set_to_none)
        for param in self.flat_params:
            param.drop_gradients()
        self.guard.unfinished = False
        self.guard.note()

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook, and give the module full parameters again, in the masters' dtype (on every rank).

        Parameters that were frozen or unfrozen since then stay so, also when the module is wrapped
        again.
        """
        full = self.gather_full_params() if restore else {}
        self.guard.close()
        if restore:  # may wait for communication
            self._runtime.reshard()
        self._runtime.close()
        for handle in self._handles:
            handle.remove()
        for entry, _ in self._loaders() if restore else ():
            owner, attribute = entry.owners[0]
            whole = nn.Parameter(full[entry.name], owner._parameters[attribute].requires_grad)
            entry.register(whole, made_by_fsdp=False)
