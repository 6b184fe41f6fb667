"""Fully sharded data parallelism (ZeRO stage 3): each rank keeps 1/N of parameters, gradients and optimizer state.

One step with units A, B, C; `ag` gathers a unit's parameters, `rs` reduce-scatters its gradients:

    compute        │    A    │    B    │    C    │    C'   │    B'   │    A'   │      │ optimizer │
    communication  │ag A│ag B│ag C│              │ag C│ag B│ag A│rs C│rs B│         │rs A│
    gathered       │   A B   │   B C   │    C    │   C B   │   B A   │    A    │

A unit is fetched while the one before it computes, freed after its forward, fetched again for its backward,
and its gradients leave while the next one computes. `schedule.py` says when, `shards.py` holds the memory.

Zhao et al. 2023 (PyTorch FSDP) describe the flat layout and these steps; Rajbhandari et al. 2020 (ZeRO) call
it stage 3. `docs/fsdp.md` states memory, precision and limits.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel import step_guard
from distlab.parallel.base import (
    DataParallel,
    check_ranks_agree,
    refuse_assigned_parameters,
    refuse_shared_storage,
    refuse_uninitialized,
)
from distlab.parallel.elementwise import check_elementwise
from distlab.parallel.fsdp import checks
from distlab.parallel.fsdp.deferred import initialize_in_turn, materialize_buffers
from distlab.parallel.fsdp.edits import (
    OverflowOfAllRanks,
    find_edited,
    forget_gradients,
    note_gradients,
    stepped_by_scaler,
)
from distlab.parallel.fsdp.precision import plan_casts
from distlab.parallel.fsdp.replicated import Replicated
from distlab.parallel.fsdp.schedule import Schedule, in_backward
from distlab.parallel.fsdp.shards import Unit, square_sum, watched
from distlab.parallel.fsdp.units import Entry, UnitPlan, is_sharded, list_entries, plan_units
from distlab.parallel.ownership import Owned


class FSDP(nn.Module):
    """Shards a module's matrices over the ranks and replicates its vectors.

    `parameters()` yields what the optimizer steps, in fp32 (fp64 stays fp64), under the module's own names: this
    rank's rows of each matrix, `(rows, …)` with its number of dimensions and perhaps no rows, and the replicated
    vectors. `state_dict()` holds exactly these and the buffers: a sharded state, to be loaded on the same rank at
    the same world size; `gather_full_params()` and `load_full_params()` are for any other. Build the optimizer after
    wrapping, of a kind that works element by element (SGD, Adam, AdamW).

    Args:
        module: any `nn.Module` on one device; construction takes rank 0's parameters and buffers.
        compute_dtype: dtype in which matrices are sent and used in forward and backward, together with their biases;
            modules that hold matrices also get their floating-point inputs in it. Norms stay in fp32 and return it;
            see `precision.py`. Gradients are reduced in the masters' dtype. None: the dtypes of the module.
        process_group: default: the default group.
        init_fn: for a module built on meta: `init_fn(module)` writes every parameter, in registration order, as
            `lambda model: model.reset_parameters(seed)` does; see `deferred.py`. Ranks must draw alike.
        device: where to make the pieces of a module built on meta.

    Raises:
        ValueError: no parameters, an uninitialized one, two that share memory, several devices, a compute type that
            is no float, a module wrapped already, an optimizer that holds its parameters, a module on meta without
            `init_fn` and `device`, or ranks that disagree on the model (then on every rank).
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        process_group: ProcessGroup | None = None,
        init_fn: Callable[[nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        checks.check_compute_dtype(compute_dtype)
        self.module = module
        self.process_group = collectives.resolve_group(process_group)
        refuse_uninitialized(module)
        entries = list_entries(module, compute_dtype)
        self._names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self.device = checks.find_device(entries, init_fn, device)
        plans = plan_units(module, entries)
        checks.refuse_uncallable(module)
        checks.refuse_parameters(entries)
        checks.refuse_compiled(module, plans)
        check_ranks_agree(module, self.process_group)
        refuse_shared_storage(module)
        owners = dict.fromkeys(owner for entry in entries for owner, _ in entry.owners)
        casts = {} if compute_dtype is None else plan_casts(owners, compute_dtype)
        deferred = entries[0].parameter.is_meta
        if not deferred:
            collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)
        self._shard(entries, plans)
        if deferred:
            materialize_buffers(module, self.device)
            initialize_in_turn(module, self._shards, init_fn)
            collectives.broadcast_all([*self._replicated.masters, *module.buffers()], self.process_group)
        for unit in self._units:
            unit.register()
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.trainable_names, self.trainable = [n for n, _ in trainable], [p for _, p in trainable]
        self._load_check = module.register_load_state_dict_post_hook(refuse_assigned_parameters(self))
        self._schedule = Schedule(self._units, self.process_group)
        self._schedule.cast(casts)
        replicated = {id(master) for master in self._replicated.masters}
        self._named_shards = [(name, p) for name, p in trainable if id(p) not in replicated]
        self._named_replicated = [(name, p) for name, p in trainable if id(p) in replicated]
        self._stepped_by: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._editing = False  # inside elementwise_gradient_edits()
        self._overflow: OverflowOfAllRanks | None = None  # in these edits, since the last finish
        step_guard.guard(self.trainable, self)

    def _shard(self, entries: list[Entry], plans: list[UnitPlan]) -> None:
        """Cut the matrices into pieces unit by unit, and let go of the full parameters."""
        self._units: list[Unit] = []
        for index, plan in enumerate(plans):
            unit = Unit(index, plan, self.device, self.process_group)
            self._units.append(unit)
            unit.load_and_register()  # lets go of full parameters before the next unit takes memory
        self._shards = [shard for unit in self._units for shard in unit.shards]
        small = [entry for entry in entries if not is_sharded(entry)]
        self._replicated = Replicated(small, self.device, self.process_group)

    # -- the public face -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result. Without gradients it needs no finish."""
        if in_backward():  # this very call is being recomputed
            return self.module(*args, **kwargs)
        if self._schedule.backward_failed:
            self._recover()
        self._replicated.refresh()
        with watched(self._units), self._schedule.forward_pass(self.module.training):
            return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep full gradients here (as large as the masters); the next one outside
        sends the sum."""
        before, self._schedule.synchronize = self._schedule.synchronize, False
        try:
            yield
        finally:
            self._schedule.synchronize = before

    def finish_gradient_synchronization(self) -> None:
        """Wait until the `.grad` of every piece and every replicated parameter is the mean over ranks.

        Call it on every rank after backward, before clipping and the optimizer's step. Without a synchronised
        forward since the last call it does nothing. In a unit that ran, a parameter without a gradient has a
        gradient of zero; in a unit that ran on no rank it stays None.

        Raises:
            ValueError: a parameter was frozen or unfrozen after wrapping.
            RuntimeError: backward reached parameters of a unit, but not through what the unit returned.
        """
        if not self._schedule.pending:
            return
        checks.check_still_frozen(self._shards)
        self._overflow = None
        arrived = self._schedule.unfinished
        self._schedule.finish()
        self._replicated.average()
        note_gradients(self._replicated.trainable)
        if arrived:  # else the shards' gradients are those of before, and an edit of them is one still
            note_gradients(parameter for _, parameter in self._named_shards)

    @contextmanager
    def elementwise_gradient_edits(self) -> Iterator[None]:
        """Gradients may be changed inside, after `finish_gradient_synchronization()`, on every rank alike and each
        element by itself: `torch.nn.utils.clip_grad_value_`, a factor, `GradScaler.unscale_`.

        Outside of it the optimizer's next step raises, because most edits compute something of all elements (a norm,
        for one), and a rank sees its own only. A `GradScaler` finds here what overflowed on any rank. Blocks then.

        Raises:
            RuntimeError: gradients that are not synchronized, or have been edited already.
        """
        self._refuse_unsynchronized()
        forget_gradients(self.trainable)  # left by an exception, they are half edited
        self._overflow = OverflowOfAllRanks(self.process_group)
        self._editing = True
        try:
            with self._overflow:
                yield
        finally:
            self._editing = False
        note_gradients(self.trainable)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint 2-norm, over all ranks' pieces, is at most `max_norm`.

        The same arithmetic as `torch.nn.utils.clip_grad_norm_` on the unsharded model: call it after
        `finish_gradient_synchronization()`, on every rank. Nothing waits on the host for the result.

        Returns:
            The norm before clipping, 0-dim fp32, the same on every rank; inf or nan if a gradient is.

        Raises:
            RuntimeError: gradients that are not synchronized, or have been edited.
        """
        self._refuse_unsynchronized()
        pieces = [piece.grad for shard in self._shards for piece in shard.pieces if piece.grad is not None]
        small = [master.grad for master in self._replicated.trainable if master.grad is not None]
        square = square_sum(pieces, self.device)
        total = collectives.sum_tensor(square, self.process_group) + square_sum(small, self.device)
        norm = total.sqrt().float()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if pieces or small:
            torch._foreach_mul_([*pieces, *small], scale)
        note_gradients(self.trainable)
        return norm

    def check_step(self, optimizer: Optimizer) -> None:
        """Runs before every step of an optimizer that holds parameters of this wrapper.

        Raises:
            ValueError: an optimizer that is not element-wise.
            RuntimeError: gradients that are not synchronized, or were edited in a way that need not be the same on
                every rank.
        """
        check_elementwise(optimizer)
        self._refuse_unsynchronized()
        if stepped_by_scaler(optimizer) and not (self._overflow is not None and self._overflow.asked):
            raise RuntimeError(
                "FSDP: this GradScaler looked for overflow in what this rank alone sees, so ranks could skip different "
                "steps: call scaler.unscale_(optimizer) inside `with fsdp.elementwise_gradient_edits():` on every rank"
            )
        if optimizer not in self._stepped_by:
            self._stepped_by.add(optimizer)
            optimizer.register_step_post_hook(_AfterStep(self))

    def _refuse_unsynchronized(self) -> None:
        """Raise if `.grad` is not what the last synchronization left."""
        replicated = find_edited(self._named_replicated)
        edited = replicated is not None and not self._editing
        if self._schedule.unfinished or (edited and self._schedule.pending):
            raise RuntimeError(
                "FSDP: call finish_gradient_synchronization() after backward, before optimizer.step(); backward passes "
                "under no_sync() are sent by the next one outside it"
            )
        name = None if self._editing else find_edited(self._named_shards) or replicated
        if name is not None:
            raise RuntimeError(
                f"FSDP: the gradient of '{name}' was edited or replaced after finish_gradient_synchronization(), by "
                "what this rank alone sees: clip by fsdp.clip_grad_norm_(max_norm); edits that treat each element by "
                "itself (clip_grad_value_, GradScaler.unscale_) go inside `with fsdp.elementwise_gradient_edits():`"
            )

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter in full on every rank: original names and shapes, masters' type (fp32), no padding.

        A tied parameter stands under each of its names, one tensor. Call it on every rank; needs the memory of
        the whole model in fp32.
        """
        found = {}
        for shard in self._shards:
            for entry, full in zip(shard.entries, shard.gather_masters(), strict=True):
                found.update(dict.fromkeys(entry.names, full))
        for entry, master in zip(self._replicated.entries, self._replicated.masters, strict=True):
            found.update(dict.fromkeys(entry.names, master.detach().clone()))
        return {name: found[name] for name in self._names}

    @torch.no_grad()
    def load_full_params(self, parameters: Mapping[str, Tensor]) -> None:
        """The inverse of `gather_full_params()`: each rank takes its pieces out of the full tensors.

        No communication. Of a tied parameter one name suffices.

        Raises:
            ValueError: a parameter is missing or has another shape.
        """
        for entry, load in self._loaders():
            name = next((name for name in entry.names if name in parameters), entry.name)
            given, needed = tuple(getattr(parameters.get(name), "shape", ())), tuple(entry.parameter.shape)
            if name not in parameters or given != needed:
                found = f"has shape {given}" if name in parameters else "is missing"
                raise ValueError(f"load_full_params: '{name}' {found}; the model's has shape {needed}")
            load(parameters[name])

    def owned(self) -> list[Owned]:
        """Every shard and every replicated parameter that this rank holds.

        Raises:
            ValueError: a parameter that is not in row-major order, of which a shard is no run of elements.
        """
        held = []
        for entry in (entry for shard in self._shards for entry in shard.entries):
            if list(entry.memory_order) != sorted(entry.memory_order):
                raise ValueError(f"FSDP: '{entry.name}' is not contiguous: its pieces are no runs of its elements")
        for shard in self._shards:
            for index, (entry, piece) in enumerate(zip(shard.entries, shard.pieces, strict=True)):
                start, _ = shard.plan.piece(index, shard.rank)
                held.append(Owned(entry.name, entry.parameter.shape, piece, start))
        for entry, master in zip(self._replicated.entries, self._replicated.masters, strict=True):
            held.append(Owned(entry.name, master.shape, master, replicated=True))
        return held

    def _loaders(self) -> Iterator[tuple[Entry, Callable[[Tensor], Any]]]:
        for shard in self._shards:
            for index, entry in enumerate(shard.entries):
                yield entry, partial(shard.load, index)
        for entry, master in zip(self._replicated.entries, self._replicated.masters, strict=True):
            yield entry, master.copy_

    def sync_buffers(self) -> None:
        """Overwrite all buffers (BatchNorm statistics, say) by those of rank 0. Blocks."""
        collectives.broadcast_all(self.module.buffers(), self.process_group)

    def relearn_order(self) -> None:
        """Forget in which order units ran: the next pass of each kind is compared between ranks again."""
        self._schedule.forget_orders()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`, and drop what `no_sync()` accumulated, which no optimizer sees."""
        self._schedule.receive()  # else gradients in flight would be added later
        self._schedule.unfinished = False
        super().zero_grad(set_to_none)
        for shard in self._shards:
            shard.drop_gradients()
        note_gradients(self.trainable)

    def close(self) -> None:
        """Detach every hook and give the module full parameters again, on every rank, in the masters' type.

        What was frozen or unfrozen since stays so, for whoever wraps the module again.
        """
        full = self.gather_full_params()
        step_guard.release(self.trainable)
        self._schedule.close()
        self._load_check.remove()
        for entry, _ in self._loaders():
            entry.uninstall()
            owner, attribute = entry.owners[0]
            whole = nn.Parameter(full[entry.name], owner._parameters[attribute].requires_grad)
            entry.register(whole, made_by_fsdp=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDP":
        probe = torch.empty(0, dtype=torch.float32, device=self.device)
        after = fn(probe)
        if after.dtype != probe.dtype or after.device != probe.device:
            raise TypeError(
                "FSDP cannot move to another device or type: move the module before wrapping it, and choose the "
                "type of computation by compute_dtype"
            )
        return self

    __getstate__ = DataParallel.__getstate__

    def _recover(self) -> None:
        """After a backward that raised: forget it and its gradients. All ranks must have failed at one place;
        otherwise those that wait fail within the group's timeout."""
        self._schedule.recover()
        self.zero_grad()


class _AfterStep:
    """An optimizer's hook: what its step has done to gradients is no edit (SGD with Nesterov momentum adds to them)."""

    def __init__(self, fsdp: FSDP):
        self._fsdp = weakref.ref(fsdp)

    @torch._disable_dynamo
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        fsdp = self._fsdp()
        if fsdp is not None:
            if fsdp._schedule.unfinished:  # a closure's backward
                fsdp._refuse_unsynchronized()
            note_gradients(fsdp.trainable)
