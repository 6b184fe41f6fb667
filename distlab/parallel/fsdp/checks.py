"""What FSDP refuses: of a module before it is wrapped, and of its shards in every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distlab.parallel.checks import (
    Attached,
    Named,
    check_nothing_joined,
    find_edited,
    is_elementwise,
    place_of,
    refuse_assigned,
    release,
    takes_shards,
    the_device,
    watch,
)
from distlab.parallel.state_dicts import take_parts, watch_states

if TYPE_CHECKING:
    from distlab.parallel.fsdp.entry import Entry
    from distlab.parallel.fsdp.fsdp import FSDP
    from distlab.parallel.fsdp.unit import Unit
    from distlab.parallel.fsdp.units import UnitPlan

# -- before wrapping -------------------------------------------------------------------------------------------


def check_compute_dtype(dtype: Any) -> None:
    """Raises ValueError for what is neither None nor a floating-point `torch.dtype`."""
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ValueError(
            f"compute_dtype={dtype!r}: give a floating-point torch.dtype such as torch.bfloat16, or None"
        )


def find_device(
    entries: list[Entry],
    init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device | str | None,
) -> torch.device:
    """Return the one device of all parameters, or `device` for a module on meta.

    Raises:
        ValueError: several devices, a module on meta without `init_fn` and `device`, or these for
            another.
    """
    found = the_device([entry.parameter for entry in entries], "FSDP")
    if found.type == "meta":
        if init_fn is None or device is None:
            raise ValueError(
                "FSDP: the module lies on meta and has no values: give init_fn=… to make them, and device=…"
            )
        return torch.device(device)
    if init_fn is not None or device is not None:
        raise ValueError(
            "FSDP: init_fn and device are for a module built on meta; this one has its values"
        )
    return found


def refuse_uncallable(module: nn.Module) -> NoReturn:
    """Raises ValueError for a module without a forward, such as an `nn.ParameterList`: nothing would be gathered."""
    raise ValueError(
        f"FSDP: {type(module).__name__} has no forward, in which its parameters could be gathered: wrap the "
        "module whose forward reads them"
    )


def refuse_parameters(entries: list[Entry]) -> None:
    """What would be lost without a word when parameters are replaced by shards.

    Raises:
        ValueError: parameters that are shards already, that carry hooks, that a recurrent module
            keeps in a list of its own.
    """
    for entry in entries:
        parameter = entry.parameter
        if getattr(parameter, "made_by_fsdp", False):
            raise ValueError(
                f"FSDP: '{entry.name}' is wrapped already: call close() on that wrapper first"
            )
        if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
            raise ValueError(
                f"FSDP: '{entry.name}' carries a gradient hook (of a data-parallel wrapper, perhaps), which would "
                "never fire again: remove it, or close() that wrapper, first"
            )
        if any(isinstance(owner, nn.RNNBase) for owner, _ in entry.owners):
            raise ValueError(
                f"FSDP: '{entry.name}' belongs to a torch.nn recurrent module, which computes with a list of "
                "parameters of its own; FSDP serves modules that use their attributes"
            )


def refuse_compiled(module: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Refuse a unit inside a compiled graph, which would have its hooks traced once instead of run each time.

    Raises:
        ValueError: names the unit. A unit that is itself the result of `torch.compile` is fine.
    """
    for plan in plans:
        for path, outer in module.named_modules():
            around = outer is not plan.module and any(
                inner is plan.module for inner in outer.modules()
            )
            compiled = "_orig_mod" in outer._modules and around  # what torch.compile returns
            in_place = outer._compiled_call_impl is not None and (around or outer is plan.module)
            if compiled or in_place:
                raise ValueError(
                    f"FSDP: unit '{plan.name}' lies inside the compiled module '{path}': compile the children of "
                    "the nn.ModuleList instead, model.blocks[i] = torch.compile(model.blocks[i]), and wrap then"
                )


# -- in every step ---------------------------------------------------------------------------------------------


class ShardGuard:
    """What an FSDP asks once per event.

    Args:
        fsdp: which holds its guard and is not held by it.
        entries: every parameter, as the module held it.
        sharded, replicated: what an optimizer steps, with names.
        cast: replicated parameters that forward reads a copy of.

    Attributes:
        pending: whether a synchronised forward or backward waits for finish.
        unfinished: whether a backward, synchronised or not, has reached a unit since the last
            finish.
        placed: shards and where they lie.
    """

    def __init__(
        self, fsdp: FSDP, entries: Sequence[Entry], sharded: Named, replicated: Named, cast: Named
    ):
        self._fsdp = weakref.ref(fsdp)
        self.process_group = fsdp.process_group
        self.named = [*sharded, *replicated]
        self._watched = {id(parameter) for _, parameter in self.named}
        self._editing = False  # inside elementwise_edits()
        watch(fsdp, self.named)
        self._sharded, self._replicated = sharded, replicated
        self._without_hooks = [*sharded, *cast]
        self._owned = [
            (e.name, module, name, module._parameters[name])
            for e in entries
            for module, name in e.owners
        ]
        self.placed = [
            (entry.name, shard, place_of(shard))
            for param in fsdp.flat_params
            for entry, shard in zip(param.entries, param.shards, strict=True)
        ]
        self._trained = [shard.requires_grad for _, shard, _ in self.placed]
        self.pending = self.unfinished = False
        self._of_steps: weakref.WeakKeyDictionary[Optimizer, Sequence[RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )

    def close(self) -> None:
        """Watch nothing any more."""
        for handle in chain(*self._of_steps.values()):
            handle.remove()
        fsdp = self._fsdp()
        if fsdp is not None:
            release(fsdp)

    @contextmanager
    def elementwise_edits(self) -> Iterator[None]:
        """Changes inside are right element by element.

        Raises:
            RuntimeError: gradients that are not synchronized, or were edited before.
        """
        self.check_step()
        for _, parameter in self.named:
            if parameter.grad is not None:
                parameter.grad.finished_version = None  # if the block raises, it is half edited
        self._editing = True
        try:
            yield
        finally:
            self._editing = False
        self.note()

    def _check_nothing_joined(self) -> None:
        check_nothing_joined(self._fsdp().module, self._watched, ())

    def check_module(self) -> None:
        """Called before forward.

        Raises:
            ValueError: the module trains a parameter now that was frozen, or not there, at
                construction.
            RuntimeError: an attribute is another parameter now, or a shard has other memory.
        """
        self._check_nothing_joined()
        for name, module, attribute, parameter in self._owned:
            if module._parameters.get(attribute) is not parameter:
                raise RuntimeError(
                    f"FSDP: '{name}' is another parameter than when the module was wrapped (functional_call, a layer "
                    "tied or replaced), and forward would not compute with it: close() this wrapper, change the module "
                    "and wrap it again; load_full_state_dict() takes other values"
                )
        refuse_assigned(self.placed)  # in backward, values are those of forward

    def refuse_edited_shards(self) -> None:
        """Called when another backward begins before finish; raises RuntimeError for an edited gradient.

        Not of a vector: this backward may have reached it already, and it is this rank's own.
        """
        _refuse_edited(self._sharded)

    def note(self, finished: bool = False) -> None:
        """Note that the gradients are as they should be now; if `finished`, also that the wrapper has finished."""
        # Without a backward the shards' gradients are those of before, and an edit of them is one
        # still.
        named = self._replicated if finished and not self.unfinished else self.named
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad.finished_version = parameter.grad._version
        if finished:
            self.pending = self.unfinished = False

    def begin_finish(self) -> bool:
        """Return whether there is anything to finish.

        Raises:
            ValueError: a parameter was frozen, unfrozen, added or given a gradient hook after
                wrapping.
            RuntimeError: a gradient was changed after backward.
        """
        self._check_nothing_joined()
        # vectors alone
        if not (self.pending or (not self.unfinished and find_edited(self._replicated))):
            return False
        for (name, shard, _), trained in zip(self.placed, self._trained, strict=True):
            if shard.requires_grad != trained:
                raise ValueError(
                    f"requires_grad of '{name}' changed after wrapping, which would not reach its unit: close() this "
                    "wrapper, change it, and wrap the module again"
                )
        for name, parameter in self._without_hooks:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"FSDP: a gradient hook on '{name}' never fires, as forward reads what is gathered of it: remove "
                    "it, and see its `.grad` after finish_gradient_synchronization()"
                )
        if self.unfinished:
            _refuse_edited(self.named)
        return True

    def check_step(self, optimizer: Optimizer | None = None) -> None:
        """Check the gradients, before every step of an optimizer that holds parameters of the wrapper that optimizer,
        too.

        Raises:
            ValueError: an optimizer that is neither element-wise nor takes shards, or has state of
                other shapes.
            RuntimeError: gradients that are not synchronized, or were edited in a way that need not
                be the same on every rank.
        """
        replicated = None if self._editing else find_edited(self._replicated)
        if self.unfinished or (replicated and self.pending):
            raise RuntimeError(
                "FSDP: call finish_gradient_synchronization() after backward, before optimizer.step(); backward passes "
                "under no_sync() are sent by the next one outside it"
            )
        name = None if self._editing else find_edited(self._sharded) or replicated
        if name is not None:
            raise RuntimeError(
                f"FSDP: the gradient of '{name}' was edited or replaced after finish_gradient_synchronization(), by "
                "what this rank alone sees: clip by fsdp.clip_grad_norm_(max_norm); edits that treat each element by "
                "itself (clip_grad_value_) go inside `with fsdp.elementwise_gradient_edits():`"
            )
        if optimizer is None:
            return
        if not (is_elementwise(type(optimizer)) or takes_shards(type(optimizer))):
            refuse_matrices(optimizer)
        if optimizer not in self._of_steps:  # it may have loaded a state before any hook saw it
            take_parts(optimizer)
            watch_states(optimizer)
        for handle in self._of_steps.get(optimizer, ()):
            handle.remove()
        # Behind the optimizer's own hooks, which may edit gradients.
        self._of_steps[optimizer] = (
            optimizer.register_step_pre_hook(partial(_at_step, weakref.ref(self), False)),
            optimizer.register_step_post_hook(partial(_at_step, weakref.ref(self), True)),
        )


def _refuse_edited(named: Named) -> None:
    name = find_edited(named)
    if name is not None:
        raise RuntimeError(
            f"FSDP: the gradient of '{name}' was changed between backward and finish_gradient_synchronization(), "
            "when it is not the mean yet: clip and edit gradients after finish; zero_grad(set_to_none=True) drops "
            "them"
        )


@torch._disable_dynamo
def _at_step(
    reference: weakref.ref[ShardGuard], ended: bool, optimizer: Optimizer, args: Any, kwargs: Any
) -> None:
    """An optimizer's hook: what its step has done to gradients is no edit (SGD with Nesterov momentum adds to them)."""
    guard = reference()
    if guard is not None:
        if guard.unfinished or not ended:  # after the step: a closure's backward
            guard.check_step()
        if ended:
            guard.note()


def refuse_matrices(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer of matrices, here this rank's rows, that is not known to be element-wise."""
    if any(
        parameter.ndim >= 2 for group in optimizer.param_groups for parameter in group["params"]
    ):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} is not known to be element-wise, and here it sees this rank's rows of matrices: write "
            f"`elementwise = True` into its class if every element's update depends on that element alone, else keep "
            "parameters whole: a data-parallel wrapper with ShardedOptimizer"
        )


# -- in forward and backward -----------------------------------------------------------------------------------


def refuse_lost_gradients(unit: Unit) -> NoReturn:
    """Raises RuntimeError: parameters have gradients that backward did not bring through their unit's outputs."""
    raise RuntimeError(
        f"FSDP: backward reached parameters of unit '{unit.name}' past its outputs, so their gradients "
        "would be lost: return every tensor that the loss needs from the unit's forward"
    )


def refuse_written(entry: Entry) -> NoReturn:
    """Raises RuntimeError: forward wrote to a gathered parameter."""
    raise RuntimeError(
        f"FSDP: forward writes to '{entry.name}' in place (an embedding's max_norm does), and what it "
        "writes is freed with its unit: write to fsdp.parameters(), after optimizer.step()"
    )


def refuse_copy_of_shards() -> NoReturn:
    """Raises TypeError: the module is being copied, pickled or saved."""
    raise TypeError(
        "FSDP: the wrapped module holds this rank's shards and cannot be copied, pickled or saved: take "
        "gather_full_params() or full_state_dict(), on every rank, or close() the wrapper first"
    )


def refuse_state_dicts(module: nn.Module, owners: set[nn.Module]) -> list[RemovableHandle]:
    """Let state dicts of every module that contains shards raise, at reading and at loading.

    They would hold one rank's rows under the names of whole matrices, which `torch.save` on rank 0
    and `torch.distributed.checkpoint` take for the whole.
    """
    handles = []
    for part in module.modules():
        if not owners.isdisjoint(part.modules()):
            handles.append(part.register_state_dict_pre_hook(Attached(_refuse_reading)))
            handles.append(part.register_load_state_dict_pre_hook(Attached(_refuse_loading)))
    return handles


def _refuse_reading(*args: Any) -> NoReturn:
    raise RuntimeError(
        "FSDP: state_dict() would hold this rank's shards under the names of the whole parameters: call "
        "full_state_dict() of the wrapper on every rank and save it on one, or use distlab's Checkpointer"
    )


def _refuse_loading(*args: Any) -> NoReturn:
    raise RuntimeError(
        "FSDP: load_state_dict() of the wrapped module would overwrite this rank's shards: call "
        "load_full_state_dict() of the wrapper with a whole state dict, or use distlab's Checkpointer"
    )


def refuse_outside_forward(unit: Unit) -> NoReturn:
    """Raises RuntimeError: a unit's module was called, and not the wrapper."""
    raise RuntimeError(
        f"unit '{unit.name}' runs outside the forward of its FSDP wrapper: call the wrapper, not the module"
    )


def refuse_graph_of_backward(unit: Unit) -> NoReturn:
    """Raises RuntimeError: the graph of this backward would keep views of buffers that are freed when it has ended."""
    raise RuntimeError(
        f"FSDP: a backward with create_graph=True reaches unit '{unit.name}', whose parameters would be freed "
        "before the graph it makes is differentiated: train with a gradient penalty under BucketedDDP"
    )


def refuse_no_gradient() -> NoReturn:
    """Raises RuntimeError: backward has come to units, and brought their parameters nothing."""
    raise RuntimeError(
        "FSDP: no backward has brought a matrix its gradient since the last finish_gradient_synchronization(): "
        "call loss.backward() without inputs=…, which shards, being no part of the graph, cannot be among"
    )


def refuse_reentrant_checkpoint(
    unit: Unit,
    nodes: Iterable[Iterable[torch.autograd.graph.Node]],
    backward_task: Callable[[], int | None],
) -> None:
    """Let a backward of its own through what was recomputed in backward raise: its gradients would not be sent.

    Reentrant checkpoints run one; the others recompute only to fill in what the first graph saved.

    Args:
        nodes: operations that made each tensor that the unit returns.
        backward_task: autograd's number of the backward that has begun and not ended.
    """
    task = torch._C._current_graph_task_id()

    def refuse(gradients: Any) -> None:
        # Operations of the first graph, too, if the unit returns its input.
        if backward_task() == task != torch._C._current_graph_task_id():
            raise RuntimeError(
                f"unit '{unit.name}' is recomputed in backward but ran without gradients in forward: checkpoint "
                "activations with use_reentrant=False"
            )

    for node in chain(*nodes):
        node.register_prehook(refuse)
