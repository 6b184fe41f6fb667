"""Fully sharded data parallelism (ZeRO stage 3).

Each of N ranks keeps 1/N of parameters, gradients and optimizer state.

One step with units A, B, C. `ag` gathers a unit's parameters, `rs` reduce-scatters its gradients,
`ar` all-reduces the gradients of vectors (norms, biases), which every rank keeps whole:

    compute              │    A    │    B    │    C    │    │    C'   │    B'   │    A'   │       │
    communication   ag A │ag B     │ag C     │         │ag C│ag B     │ag A rs C│rs B     │rs A ar│
    gathered             │   A B   │   B C   │    C    │    │   C B   │   B A   │    A    │

A unit is unsharded while the one before it computes, resharded after its forward, and unsharded
again for its backward. Its gradients are reduce-scattered while the next one computes. Exposed are
the first gather of forward and of backward, the last reduce-scatter and the all-reduce. In the
first pass of each kind nothing is gathered ahead, because the order of units is being learned.

    fsdp.py      the class: this file
    runtime.py   when units are gathered, freed and reduced, and all hooks
    unit.py      the memory of a unit
    layout.py    which parameters form a unit, and where each one is in a flat buffer

Zhao et al. 2023 (PyTorch FSDP) describe the flat layout and these steps. Rajbhandari et al. 2020
(ZeRO) call it stage 3. `docs/learn/fsdp.md` states memory, precision and limits.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.comm.agreement import agree_on_call, prepare
from distlab.comm.subgroups import resolve_mesh
from distlab.parallel import checks
from distlab.parallel.ddp import NO_BACKWARD, Phase, send_unfinished
from distlab.parallel.fsdp.layout import (
    Entry,
    is_called,
    is_matrix,
    list_entries,
    plan_casts,
    plan_units,
)
from distlab.parallel.fsdp.runtime import Runtime, Step
from distlab.parallel.fsdp.unit import FlatParam, Replicated, Unit
from distlab.parallel.meta import StandIn, initialize_in_turn, materialize_buffers
from distlab.parallel.model import ParallelModel
from distlab.parallel.shard import Loader, Shard, plain_name, whole
from distlab.parallel.state_dicts import take_parts, watch_states


class FSDP(checks.StaysAsWrapped, ParallelModel):
    """Shards a module's matrices over the ranks and replicates its vectors.

    `parameters()` yields what the optimizer steps, in fp32 (fp64 stays fp64), under the module's
    own names: this rank's rows of each matrix, `(rows, …)` with its number of dimensions and
    perhaps no rows, and the replicated vectors. `full_state_dict()` and `load_full_state_dict()`
    are for the whole model. `state_dict()` raises, because it would hold one rank's rows under the
    names of whole matrices.

    Gradients that the module has before are dropped, and are not added to.

    Build the optimizer after wrapping, of a kind that works element by element (SGD, Adam, AdamW),
    or `distlab.optim.Muon`.

    Args:
        module: any `nn.Module` on one device. Construction takes rank 0's parameters and buffers.
        compute_dtype: dtype in which matrices are sent and used in forward and backward, together
            with their biases; modules that hold matrices also get their floating-point inputs in
            it. Norms stay in fp32 and return it; see `plan_casts`. Gradients are reduced in the
            masters' dtype. None: the dtypes of the module.
        mesh: two-dimensional mesh, (replicas, ranks of a shard group), such as hosts and their
            GPUs: the module is sharded inside a group and replicated between the groups (hybrid
            sharding). `no_sync()` then reduce-scatters inside the group, and leaves out only the
            all-reduce between the groups. Default: all ranks are one group.
        process_group: all ranks. Default: the default group.
        init_fn: function for a module built on meta: `init_fn(module)` writes every parameter, in
            registration order, as `lambda model: model.reset_parameters(seed)` does; see
            `distlab.parallel.meta`. All ranks must draw the same values.
        device: device for the shards of a module built on meta.
        keep_gathered: True if matrices that a forward has gathered stay, in full, until the step's
            gradients are finished. A step of several micro-batches then gathers once, and needs the
            memory of all.

    Attributes:
        step: state of the step.
        flat_params: every flat buffer of every unit.

    Raises:
        TypeError: a mesh that is not a DeviceMesh.
        ValueError: a mesh of other dimensions or ranks (see `resolve_mesh`), no parameters, an
            uninitialized one, two that share memory, several devices, a compute dtype that is not
            a float, a module wrapped already, a module on meta without `init_fn` and `device`,
            these for a module that has values, units in a compiled module, a recurrent module of
            torch's, a gradient hook on a parameter, a module without forward, or ranks that
            disagree on the model (then on every rank).
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
        checks.check_compute_dtype(compute_dtype)
        self.module = module
        self.compute_dtype = compute_dtype
        groups = resolve_mesh(mesh, process_group)
        self.process_group, self.replicas = groups.world, groups.replicas
        prepare(self.process_group)

        # Plan.
        checks.refuse_uninitialized(module)
        entries = list_entries(module, compute_dtype)
        self._names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        on_device = checks.the_device([entry.parameter for entry in entries], "FSDP")
        on_meta = on_device.type == "meta"
        checks.check_meta(on_meta, init_fn, device)
        self.device = torch.device(device) if on_meta else on_device
        plans = plan_units(module, entries)
        checks.check_callable(module, is_called(module))
        for entry in entries:
            checks.check_replaceable(
                entry.name, entry.parameter, [owner for owner, _ in entry.owners]
            )
        checks.refuse_compiled(module, [(plan.name, plan.module) for plan in plans])
        checks.check_ranks_agree(module, self.process_group)
        checks.refuse_shared_memory(module)
        casts = {}
        if compute_dtype is not None:
            owners = dict.fromkeys(owner for entry in entries for owner, _ in entry.owners)
            casts = plan_casts(owners, compute_dtype)

        # Replace every parameter by a shard, or by a replicated master.
        if not on_meta:
            collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)
        for entry in entries:
            # An optimizer that holds it would step a tensor that nothing reads (checks.py).
            entry.parameter.replaced = True
        self._units = [Unit(index, plan, self.device, groups) for index, plan in enumerate(plans)]
        self.flat_params = [param for unit in self._units for param in unit.params]
        small = [entry for entry in entries if not entry.is_sharded]
        self._replicated = Replicated(small, self.device, self.process_group)
        if on_meta:
            materialize_buffers(module, self.device)
            initialize_in_turn(module, self._stand_ins(), init_fn)
            vectors = [master for _, master in self._replicated.masters]
            collectives.broadcast_all([*vectors, *module.buffers()], self.process_group)
            for unit in self._units:
                unit.register()  # in place of what was initialized

        # Parameters that the optimizer steps, and what must stay as it is.
        self._sharded: list[tuple[str, nn.Parameter]] = []
        self._vectors: list[tuple[str, nn.Parameter]] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                kind = self._sharded if is_matrix(parameter) else self._vectors
                kind.append((name, parameter))
        self.named = [*self._sharded, *self._vectors]
        self._owned = []
        for entry in entries:
            for owner, attribute in entry.owners:
                self._owned.append((entry.name, owner, attribute, owner._parameters[attribute]))
        self._placed = []
        self._still_trained = []
        for entry, param, index in self._every_shard():
            shard = param.shards[index]
            self._placed.append((entry.name, shard, checks.place_of(shard)))
            self._still_trained.append((entry.name, shard, shard.requires_grad))
        self._held = list(self._find_shards())

        self._runtime = Runtime(
            self._units,
            casts,
            self._sharded,
            self.named,
            self.process_group,
            type(module).__name__,
            keep_gathered,
            on_mesh=mesh is not None,
        )
        self.step: Step = self._runtime.step  # print it to see where the step is
        # Hooks of every optimizer that steps the shards.
        self._of_optimizers: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]]
        self._of_optimizers = weakref.WeakKeyDictionary()
        owners_of_shards = {
            owner for entry, _, _ in self._every_shard() for owner, _ in entry.owners
        }
        self._handles = checks.refuse_state_dicts(module, owners_of_shards)
        self._trained_ids = checks.watch(self)

    def _every_shard(self) -> Iterator[tuple[Entry, FlatParam, int]]:
        """Yield every sharded parameter, its flat buffer, and its position there."""
        for param in self.flat_params:
            for index, entry in enumerate(param.entries):
                yield entry, param, index

    # -- a step ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result.

        Without gradients it needs no finish.
        """
        if torch.compiler.is_compiling():
            return self._outside_graph(*args, **kwargs)
        if torch._C._current_graph_task_id() != NO_BACKWARD:  # this very call is being recomputed
            return self.module(*args, **kwargs)
        if self.step.task is not None:
            # A backward raised. All ranks must have failed at one place, else those that wait fail
            # within the group's timeout.
            self._runtime.recover()
            self.zero_grad()
        checks.check_nothing_joined(self.module, self._trained_ids, frozen=())
        checks.check_owned(self._owned)
        checks.refuse_assigned(self._placed)  # backward uses the values of forward
        if self._replicated.cast:
            self._replicated.refresh()
        send_unfinished(self.process_group)
        with self._runtime.forward_pass(self.module.training):
            return self.module(*args, **kwargs)

    @torch._disable_dynamo
    def _outside_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward inside `torch.compile(fsdp)`. Parts that are compiled alone still are."""
        return self(*args, **kwargs)

    def _set_accumulates(self, accumulates: bool) -> None:
        super()._set_accumulates(accumulates)
        self._runtime.accumulates = accumulates

    def enter_stage(self, stage: int) -> None:
        """See `ParallelModel.enter_stage`; a stage has an order of units of its own."""
        self._runtime.stage = stage

    def finish_gradient_synchronization(self) -> None:
        """Wait until the `.grad` of every shard and replicated parameter is the mean over ranks.

        Call it on every rank after backward, before clipping and the optimizer's step. Without a
        synchronised forward since the last call it does nothing. In a unit that ran, a parameter
        without a gradient has a gradient of zero; in a unit that ran on no rank it stays None.

        Raises:
            ValueError: a parameter was frozen, unfrozen, added or given a gradient hook after
                wrapping.
            RuntimeError: a gradient was changed after backward; or backward reached parameters of a
                unit, but not through what the unit returned; or none.
        """
        step = self.step
        if step.phase is Phase.IDLE and (
            step.accumulated or checks.find_edited(self._vectors) is None
        ):
            # No synchronised pass, and no vector's gradient was set by hand. Gradients of passes
            # inside no_sync() wait for one outside it.
            return
        checks.check_still_trained(self._still_trained)
        checks.check_no_hooks([*self._sharded, *self._replicated.cast])
        backward_has_run = step.has_unfinished
        if backward_has_run:
            checks.check_kept_unedited(self.named)
        send_unfinished(self.process_group)
        self._runtime.finish()
        if self._replicated.trainable:
            self._replicated.average()
        if backward_has_run:
            checks.mark_finished(self.named)
        else:
            # The shards' gradients are those of before, and an edit of them still is one.
            checks.mark_finished(self._vectors)
        step.phase, step.accumulated = Phase.IDLE, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as `nn.Module.zero_grad`, and drop the gradients accumulated inside `no_sync()`."""
        self._runtime.wait_for_gradients()  # else gradients in flight would be added later
        super().zero_grad(set_to_none)
        for param in self.flat_params:
            param.drop_gradients()
        self._runtime.forget_backward()
        checks.mark_finished(self.named)

    def check_step(self, optimizer: Optimizer | None = None) -> None:
        """Check the gradients before they are used.

        Args:
            optimizer: optimizer that is about to step.

        Raises:
            ValueError: an optimizer that is neither element-wise nor takes shards, or has state of
                other shapes.
            RuntimeError: gradients that are not synchronized, or were edited in a way that need not
                be the same on every rank.
        """
        step = self.step
        # A vector may have a gradient although backward has reached no unit.
        only_vectors = step.phase is not Phase.IDLE and not self._editing
        reached_vectors = only_vectors and checks.find_edited(self._vectors) is not None
        checks.check_shards_finished(step.has_unfinished or reached_vectors)
        if not self._editing:
            checks.check_shards_unedited(self.named)
        if optimizer is not None:
            checks.check_optimizer_of_rows(optimizer)
            self._follow(optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        """Check this optimizer's gradients again behind its own hooks, and after its step."""
        if optimizer not in self._of_optimizers:
            # It may have loaded a state before any hook of ours saw it.
            take_parts(optimizer)
            watch_states(optimizer)
        # Registered anew before each step, so that they come after the user's own hooks, which may
        # edit gradients.
        for handle in self._of_optimizers.get(optimizer, ()):
            handle.remove()
        reference = weakref.ref(self)
        self._of_optimizers[optimizer] = [
            optimizer.register_step_pre_hook(partial(_before_step, reference)),
            optimizer.register_step_post_hook(partial(_after_step, reference)),
        ]

    def _note_scaled(self) -> None:
        checks.mark_finished(self.named)

    # -- parameters --------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Return every parameter in full on every rank: original names and shapes, masters' dtype.

        Without padding, in fp32 (fp64 stays fp64). A tied parameter has each of its names, with one
        tensor. Call it on every rank; it needs the memory of the whole model in fp32.
        """
        agree_on_call(self.process_group, "FSDP.gather_full_params()")
        send_unfinished(self.process_group)
        checks.refuse_assigned(self._placed)
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
            needed = tuple(entry.parameter.shape)
            if name not in parameters:
                raise ValueError(
                    f"load_full_params: '{name}' is missing; that of the model has shape {needed}"
                )
            given = tuple(getattr(parameters[name], "shape", ()))
            if given != needed:
                raise ValueError(
                    f"load_full_params: '{name}' has shape {given}; that of the model has shape "
                    f"{needed}"
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
                f"FSDP.load_state_dict got strict={strict} and assign={assign}: only a whole state "
                "can be loaded, into the memory that is there. Load other states into the module "
                "before wrapping it"
            )
        self.load_full_state_dict(state_dict)
        return _IncompatibleKeys([], [])

    def loaders(self) -> list[Loader]:
        """Return where whole parameters are loaded to; see `ParallelModel.loaders`."""
        checks.refuse_assigned(self._placed)  # else values would go where nothing is gathered from
        loaders = []
        for entry, load in self._loaders():
            names = [plain_name(name) for name in entry.names]
            loaders.append(Loader(names, entry.parameter.shape, load))
        return loaders

    def _loaders(self) -> Iterator[tuple[Entry, Callable[[Tensor], Any]]]:
        for entry, param, index in self._every_shard():
            yield entry, partial(param.load, index)
        for entry, master in self._replicated.masters:
            yield entry, master.copy_

    def shards(self) -> list[Shard]:
        """Return this rank's rows of every matrix, and the replicated parameters."""
        return self._held

    def _find_shards(self) -> Iterator[Shard]:
        for entry, param, index in self._every_shard():
            # Rows of a matrix that is not in row-major order are not a contiguous part of its
            # elements.
            in_order = list(entry.memory_order) == sorted(entry.memory_order)
            start = param.layout.shard_range(index, param.rank)[0] if in_order else None
            which = 0 if param.replicate is None else param.replicate.rank()
            yield Shard(
                plain_name(entry.name),
                entry.parameter.shape,
                start,
                param.shards[index],
                copies=(which, self.replicas),
            )
        for entry, master in self._replicated.masters:
            yield whole(entry.name, master)

    def _stand_ins(self) -> Iterator[StandIn]:
        for entry, param, index in self._every_shard():
            full = torch.empty_like(entry.parameter, device=self.device)
            stand_in = nn.Parameter(full, entry.parameter.requires_grad)
            entry.register(stand_in)
            yield entry.name, stand_in, partial(param.load, index)

    def relearn_order(self) -> None:
        """Forget in which order units ran.

        The next pass of each kind is compared between ranks again.
        """
        self._runtime.forget_orders()

    def __getstate__(self) -> NoReturn:
        """Raise TypeError, because the wrapper is being copied or pickled."""
        raise TypeError(
            "FSDP cannot be copied or pickled, nor can its `.module`, which holds this rank's "
            "shards: take full_state_dict() on every rank, or close() the wrapper and copy its "
            "`.module`"
        )

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook, and give the module full parameters again, in the masters' dtype.

        Call it on every rank. Parameters that were frozen or unfrozen since then stay so, also when
        the module is wrapped again.
        """
        full = self.gather_full_params() if restore else {}
        checks.release(self)
        for optimizer, handles in self._of_optimizers.items():
            for handle in handles:
                handle.remove()
            optimizer.register_step_pre_hook(checks.refuse_closed)
        # An optimizer that has not stepped yet has no hook, and is refused under the next wrapper.
        checks.mark_closed(shard for _, shard in (*self._sharded, *self._vectors))
        if restore:
            self._runtime.reshard()  # may wait for communication
        self._runtime.close()
        for handle in self._handles:
            handle.remove()
        if not restore:
            return
        for entry, _ in self._loaders():
            owner, attribute = entry.owners[0]
            trained = owner._parameters[attribute].requires_grad
            entry.register(nn.Parameter(full[entry.name], trained), made_by_fsdp=False)


@torch._disable_dynamo
def _before_step(
    reference: "weakref.ref[FSDP]", optimizer: Optimizer, args: Any, kwargs: Any
) -> None:
    """Check the gradients behind the optimizer's own hooks."""
    fsdp = reference()
    if fsdp is not None:
        fsdp.check_step()


@torch._disable_dynamo
def _after_step(
    reference: "weakref.ref[FSDP]", optimizer: Optimizer, args: Any, kwargs: Any
) -> None:
    """Take the gradients as the step has left them: SGD with Nesterov momentum adds to them."""
    fsdp = reference()
    if fsdp is None:
        return
    checks.check_shards_finished(fsdp.step.has_unfinished)  # after a closure's backward
    checks.mark_finished(fsdp.named)
