"""When FSDP unshards, reshards and reduces: hooks on every unit's forward, and on the operations that made its outputs.

Backward is announced by the operations of autograd that made a unit's *output tensors*: they are found in dicts and
dataclasses, too, and without grad-requiring inputs, where `full_backward_pre_hook` does not fire. A unit's backward
ends when backward reaches another unit, or ends; not when its last gradient is ready, because ranks may use different
parameters inside a unit and would then issue their collectives in different orders.

Autograd runs operations in the reverse of the order in which forward made them. So backward passes through the calls of
units in the reverse order: a call inside another one begins later and ends earlier. Only calls that share an output (a
unit that returns another unit's output) begin at the same operation; then the last one to return is announced first.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from inspect import isroutine
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from distlab.comm import collectives
from distlab.comm.subgroups import MeshGroups
from distlab.parallel.fsdp.flat_param import (
    Entry,
    FlatParam,
    NotGathered,
    UnitPlan,
    parameter_dtype,
    plan_buffers,
)
from distlab.parallel.guards import order
from distlab.parallel.guards.gradients import find_edited, note_gradients


def in_backward() -> bool:
    """Whether autograd is running: a forward then is a recomputation of checkpointed activations."""
    return torch._C._current_graph_task_id() != -1


class State(Enum):
    """Where a unit's full parameters are."""

    SHARDED = "sharded"  # nowhere
    UNSHARDING = "unsharding"  # being gathered
    UNSHARDED = "unsharded"  # in the buffers, and what the module's attributes find


class Unit:
    """Parameters that are gathered and freed together, because one module's forward needs them.

    Args:
        plan: which module and parameters.
        device, groups: see `FlatParam`.

    Attributes:
        state: of the full parameters.
        uses: forwards whose backward has not run yet.
        touched: backward has reached it since its gradients were last accumulated.
    """

    def __init__(self, index: int, plan: UnitPlan, device: torch.device, groups: MeshGroups):
        self.index, self.name, self.module = index, plan.name, plan.module
        kinds: dict[tuple, list[Entry]] = {}
        for entry in plan.entries:
            key = (entry.compute_dtype, entry.master_dtype, entry.parameter.requires_grad)
            kinds.setdefault(key, []).append(entry)
        self.params = [
            FlatParam([entries[index] for index in indices], device, groups)
            for entries in kinds.values()
            for indices in plan_buffers([entry.sizes for entry in entries], groups.shard.size())
        ]
        self.trainable = [param for param in self.params if param.trainable]
        self.storages = {param.buffer.untyped_storage()._cdata for param in self.params}
        self._trained = [full for param in self.trainable for full in param.full]
        self._places = [  # of the parameters, what is found there when they are gathered, and when they are not
            (owner, attribute, full, not_gathered)
            for param in self.params
            for entry, full in zip(param.entries, param.full, strict=True)
            for not_gathered in [
                NotGathered(entry.parameter, entry.compute_dtype, device, self._read_outside(entry))
            ]
            for owner, attribute in entry.owners
        ]
        self._watching = False  # forward is running: attributes must not find shards
        self.state = State.SHARDED
        self.uses = 0
        self.touched = False
        for param in self.params:  # lets go of full parameters before the next unit takes memory
            for number, entry in enumerate(param.entries):
                if not entry.parameter.is_meta:
                    param.load(number, entry.parameter.detach())
                entry.forget_values()
        self.register()

    def register(self) -> None:
        """Let `parameters()` yield the shards."""
        for param in self.params:
            for entry, shard in zip(param.entries, param.shards, strict=True):
                entry.register(shard)

    def unshard(self) -> None:
        """Start to gather the full parameters."""
        self.state = State.UNSHARDING
        for param in self.params:
            param.unshard()

    def wait_for_unshard(self) -> None:
        """Make the full parameters usable, and what the module's attributes find."""
        if self.state is State.UNSHARDED:
            return
        try:
            for param in self.params:
                param.wait_for_unshard()
        except RuntimeError as error:
            raise RuntimeError(f"FSDP: gathering unit '{self.name}' failed: {error}") from error
        for owner, attribute, full, _ in self._places:
            owner.__dict__[attribute] = full
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Give the full parameters' memory back, after which the module's attributes do not find them."""
        self.state = State.SHARDED
        self._uninstall()  # first: reading a freed buffer would end the process, not raise
        for param in self.params:
            param.reshard()

    def watch(self, watching: bool) -> None:
        """From now on let the module's attributes find, while nothing is gathered, an error (or shards again)."""
        self._watching = watching
        if self.state is State.SHARDED:
            self._uninstall()

    def _uninstall(self) -> None:
        for owner, attribute, _, not_gathered in self._places:
            if self._watching:
                owner.__dict__[attribute] = not_gathered
            else:
                owner.__dict__.pop(attribute, None)

    def refuse_lost_gradients(self) -> None:
        """Raise RuntimeError if a parameter has a gradient that backward did not bring through the unit's outputs."""
        for full in self._trained:
            if full.grad is not None:
                raise RuntimeError(
                    f"FSDP: backward reached parameters of unit '{self.name}' past its outputs, so their gradients "
                    "would be lost: return every tensor that the loss needs from the unit's forward"
                )

    def refuse_written(self) -> None:
        """Raise RuntimeError if forward wrote to a gathered parameter: else it has the version of its construction."""
        for param in self.params:
            for entry, full in zip(param.entries, param.full, strict=True):
                if full._version:
                    raise RuntimeError(
                        f"FSDP: forward writes to '{entry.name}' in place (an embedding's max_norm does), and what it "
                        "writes is freed with its unit: write to fsdp.parameters(), after optimizer.step()"
                    )

    def _read_outside(self, entry: Entry) -> str:
        return (
            f"FSDP: forward reads '{entry.name}' while its unit '{self.name}' is not gathered: read it in the forward "
            "of the module that owns it, or let the module that reads it own it too (reader.weight = owner.weight, "
            "before wrapping), and it is gathered for the whole pass"
        )


class Runtime:
    """Watches the units of one FSDP and moves their parameters and gradients in time.

    Args:
        shards, replicated: what an optimizer steps, with names.

    Attributes:
        synchronize: whether gradients are sent (False inside `no_sync()`, where they are kept in full).
        pending: whether a synchronised forward or backward waits for `finish()`.
        arrived: whether backward has brought a parameter of a unit a gradient since the last `finish()`.
        unfinished: whether a backward, synchronised or not, has reached a unit since the last `finish()`.
        backward_task: autograd's number of the backward that has begun and not ended; it stays if that raises.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: ProcessGroup,
        shards: Sequence[tuple[str, nn.Parameter]],
        replicated: Sequence[tuple[str, nn.Parameter]],
    ):
        self.units = units
        self._shards, self._replicated = shards, replicated
        self.synchronize = True
        self.pending = False
        self.unfinished = False
        self.arrived = False
        self._reached: list[torch.autograd.graph.Node] = []  # operations of units, while nothing has arrived
        self._group = group
        self.backward_task: int | None = None
        self._order = UnitOrder([unit.name for unit in units], group)
        self._backward_order = UnitOrder([unit.name for unit in units], group)
        self._in_forward = False
        self._gathered: list[Unit] = []  # units that have memory, those that are being gathered too
        self._running: list[Unit] = []  # units whose forward has begun and not ended, the innermost last
        self._ran: list[int] = []  # units run with gradients since the last backward began
        self._in_flight: Unit | None = None  # whose gradients are being reduce-scattered
        self._on_replicas = [param for unit in units for param in unit.trainable if param.replicate is not None]
        self._handles = []
        for unit in units:
            self._handles += [
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit)),
                unit.module.register_forward_hook(partial(self._after_forward, unit)),
            ]

    def cast(self, casts: "Mapping[nn.Module, Casts]") -> None:
        """Give these modules their floating-point tensors, and take their outputs, in the dtypes stated."""
        for module, (inputs, outputs) in casts.items():
            hook = partial(_cast_inputs, inputs)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            if outputs is not None:
                self._handles.append(module.register_forward_hook(partial(_cast_outputs, outputs)))

    def close(self) -> None:
        """Detach every hook."""
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> NoReturn:
        """Its hooks, which a copy of the module would call, are of these units and ranks alone."""
        raise TypeError(
            "FSDP: the wrapped module holds this rank's shards and cannot be copied, pickled or saved: take "
            "gather_full_params() (or state_dict(), of shards), or close() the wrapper first"
        )

    def forget_orders(self) -> None:
        """Compare again between ranks in which order units run, forward and backward."""
        self._order.forget()
        self._backward_order.forget()

    # -- forward -------------------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """The forward of the whole module runs inside: reading a parameter that is not gathered raises."""
        for unit in self.units:
            unit.watch(True)
        try:
            self._order.begin((training, torch.is_grad_enabled()))
            self.pending |= torch.is_grad_enabled() and self.synchronize
            self._in_forward, self._running = True, []
            try:
                yield
                self._order.end()
            finally:
                self._in_forward, self._running = False, []
                self.reshard()
        finally:
            for unit in self.units:
                unit.watch(False)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if in_backward():
            self._enter_backward(torch._C._current_graph_task_id())
            self._unshard(unit, None)
            return
        if not self._in_forward:
            raise RuntimeError(
                f"unit '{unit.name}' runs outside the forward of its FSDP wrapper: call the wrapper, not the module"
            )
        self._running.append(unit)
        self._unshard(unit, self._order.advance(unit.index))

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        outputs = [output] if isinstance(output, Tensor) else list(_tensors(output, unit.name))
        if any(t.layout is torch.strided and t.untyped_storage()._cdata in unit.storages for t in outputs):
            output = _copied(unit, output)  # it lies in memory that is about to be freed
            outputs = [output]
        if in_backward():  # recomputation, whose early stop may skip this hook: nothing must depend on it
            self._refuse_reentrant_checkpoint(unit, outputs)
            return output
        unit.refuse_written()
        while self._running.pop() is not unit:  # a nested unit whose exception the module has caught
            pass
        if unit not in self._running:  # else it runs inside itself
            self._reshard(unit)
        if torch.is_grad_enabled() and self._announce(_Call(unit, self._running), outputs):
            unit.uses += 1
            self._ran.append(unit.index)
        return output

    def _announce(self, call: "_Call", outputs: Sequence[Tensor]) -> bool:
        """Let backward tell of `call` before it runs what made these outputs; False if it will run nothing."""
        nodes = {node for tensor in outputs if tensor.requires_grad for node in _made_by(tensor)}
        for node in nodes:
            calls = node.metadata.get(self)
            if calls is None:
                calls = node.metadata[self] = []
                node.register_prehook(partial(self._before_operation, calls))
            calls.append(call)
        return bool(nodes)

    def _unshard(self, unit: Unit, following: int | None) -> None:
        """Wait for `unit`'s parameters, and start to fetch those of the unit that follows."""
        self._begin_unshard(unit)
        unit.wait_for_unshard()
        if following is not None:
            self._begin_unshard(self.units[following])

    def _begin_unshard(self, unit: Unit) -> None:
        if unit.state is State.SHARDED:
            self._gathered.append(unit)
            unit.unshard()

    def _reshard(self, unit: Unit) -> None:
        if unit.state is not State.SHARDED:
            self._gathered.remove(unit)
            unit.reshard()

    def reshard(self) -> None:
        """Let go of all gathered parameters, except of units that run, as in a backward inside of forward."""
        for unit in tuple(self._gathered):
            if unit not in self._running:
                self._reshard(unit)

    # -- backward ------------------------------------------------------------------------------------------

    def _before_operation(self, calls: Sequence["_Call"], gradients: Any) -> None:
        """Backward comes to an operation that made outputs of these calls, in the order in which they returned."""
        for call in reversed(calls):
            self._before_backward(call)

    def _before_backward(self, call: "_Call") -> None:
        """A gradient reaches an output of a unit: fetch the unit, and send the gradients of those that are done."""
        task, unit = torch._C._current_graph_task_id(), call.unit
        # Each operation that made an output announces the call; the first one that backward reaches counts.
        if call.task == task:
            return
        # Autograd's graph of this backward would keep views of buffers that are freed when it has ended.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"FSDP: a backward with create_graph=True reaches unit '{unit.name}', whose parameters would be freed "
                "before the graph it makes is differentiated: train with a gradient penalty under BucketedDDP"
            )
        call.task = task
        # The first unit of a backward begins the pass, and asks autograd to tell when it ends.
        self._enter_backward(task)
        unit.uses -= 1
        unit.touched = True
        if not self.arrived:
            self._reached.append(torch._C._current_autograd_node())
        # All ranks must come to the same unit now; the order of the last such pass says which one comes next.
        following = self._backward_order.advance(unit.index)
        # What must stay: this unit, the one fetched ahead, units around this call, whose own backward goes on when
        # this one's has ended, and units whose forward is running, if this backward runs inside of it.
        stay = {unit.index, following, *call.around, *(running.index for running in self._running)}
        # Every other unit that has memory is done: backward passes through the calls in the reverse order of forward.
        done = [other for other in self._gathered if other.index not in stay]
        # Freed first, so that at most two units are gathered at any time. On CUDA the gather waits, by the stream, for
        # the kernels that still read this memory.
        for other in done:
            self._reshard(other)
        # The gather before the reduce-scatter: what comes next waits for the parameters, nobody for the gradients.
        self._unshard(unit, following)
        for other in done:
            # One that runs again in this graph (shared weights) is sent when its last use has been through.
            if other.touched and other.uses <= 0:
                self._post_backward(other)

    def _refuse_reentrant_checkpoint(self, unit: Unit, outputs: Sequence[Tensor]) -> None:
        """Let a backward of its own through what was recomputed in backward raise: its gradients would not be sent.

        Reentrant checkpoints run one; the others recompute only to fill in what the first graph saved.
        """
        task = torch._C._current_graph_task_id()

        def refuse(gradients: Any) -> None:
            # Operations of the first graph, too, if the unit returns its input.
            if self.backward_task == task != torch._C._current_graph_task_id():
                raise RuntimeError(
                    f"unit '{unit.name}' is recomputed in backward but ran without gradients in forward: checkpoint "
                    "activations with use_reentrant=False"
                )

        for tensor in outputs:
            for node in _made_by(tensor):
                node.register_prehook(refuse)

    def _enter_backward(self, task: int) -> None:
        if self.backward_task != task:
            if self.backward_task is None:  # vectors may have been reached already, and theirs are this rank's own
                self._check_unedited(self._shards)
            self.backward_task = task
            order.send_begun(self._group)
            self.unfinished = True
            self._backward_order.begin(tuple(self._ran))
            self._ran = []
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd at the end of a backward that raised nothing."""
        order.send_begun(self._group)
        self._backward_order.end()
        self.reshard()
        for unit in self.units:
            if unit.touched:
                self._post_backward(unit)
        self.wait_for_gradients()  # nothing is left to hide them behind, and zero_grad() must find them
        note_gradients(parameter for _, parameter in [*self._shards, *self._replicated])
        self.backward_task = None

    def _post_backward(self, unit: Unit) -> None:
        """The unit's gradients are complete: put them together, and send them unless inside no_sync()."""
        unit.touched = False
        self.wait_for_reduce_scatter()  # frees the flat gradient of the unit before: there is one at a time
        for param in unit.trainable:
            self.arrived |= param.accumulate_gradients()
        if self.arrived:
            self._reached.clear()
        if self.synchronize:
            self.pending = True
            self._reduce_scatter(unit)
        else:
            for param in unit.trainable:
                param.hold_gradients()

    def _reduce_scatter(self, unit: Unit) -> None:
        self.wait_for_reduce_scatter()
        for param in unit.trainable:
            param.reduce_scatter()
        self._in_flight = unit

    def wait_for_gradients(self) -> None:
        """Wait until all that was sent is in `.grad`."""
        self.wait_for_reduce_scatter()
        for param in self._on_replicas:
            param.wait_for_all_reduce()

    def wait_for_reduce_scatter(self) -> None:
        """Wait for the gradients in flight and put them into `.grad`, or send them on to replicas."""
        if self._in_flight is not None:
            for param in self._in_flight.trainable:
                param.wait_for_reduce_scatter()
            self._in_flight = None

    def finish(self) -> None:
        """Send what only passes without synchronisation used, and wait for all gradients.

        Raises:
            RuntimeError: a gradient was edited; or a parameter has one, but backward has not come to its unit through
                what that returned; or none has.
        """
        for unit in self.units:
            unit.refuse_lost_gradients()
        self._check_unedited([*self._shards, *self._replicated])
        trained = (full for unit in self.units for param in unit.trainable for full in param.full)
        if not self.arrived and _lead_to(self._reached, trained):
            raise RuntimeError(
                "FSDP: no backward has brought a matrix its gradient since the last finish_gradient_synchronization(): "
                "call loss.backward() without inputs=…, which shards, being no part of the graph, cannot be among"
            )
        self.pending = self.unfinished = self.arrived = False
        self._reached.clear()
        for unit in self.units:
            for param in unit.trainable:
                param.drop_zeroed()
            self._reduce_scatter(unit)
            unit.uses = 0
        self.wait_for_gradients()

    def _check_unedited(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        name = find_edited(named) if self.unfinished else None
        if name is not None:
            raise RuntimeError(
                f"FSDP: the gradient of '{name}' was changed between backward and finish_gradient_synchronization(), "
                "when it is not the mean yet: clip and edit gradients after finish; zero_grad(set_to_none=True) drops "
                "them"
            )

    def recover(self) -> None:
        """Forget a backward that raised."""
        self.backward_task = None
        self.unfinished = False
        self._reached.clear()
        self.reshard()
        self.wait_for_gradients()
        for unit in self.units:
            unit.uses, unit.touched = 0, False


class _Call:
    """One forward of a unit; in a backward it is announced once, whichever of its outputs comes first.

    Args:
        around: units whose forward it runs inside: their backward goes on when its own has ended.
    """

    def __init__(self, unit: Unit, around: Sequence[Unit]):
        self.unit = unit
        self.around = [other.index for other in around]
        self.task: int | None = None  # the last backward that has reached it


def _made_by(tensor: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """The operations of autograd through which alone a gradient of `tensor` reaches what it was computed from.

    That of a view and that of its base: writing to the view in place later (`relu_`) leaves the view's out.
    """
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
    if tensor._is_view() and tensor._base.grad_fn is not None:
        yield tensor._base.grad_fn


def _lead_to(operations: Iterable[torch.autograd.graph.Node], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a gradient of what these operations made reaches one of the parameters."""
    ends = {torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters}
    found, following = set(), list(operations)
    while following:
        node = following.pop()
        if node in ends:
            return True
        if node not in found:
            found.add(node)
            following += [before for before, _ in node.next_functions if before is not None]
    return False


def _copied(unit: Unit, output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.clone()
    raise RuntimeError(
        f"FSDP: unit '{unit.name}' returns one of its parameters, or a view of one, among its outputs, and its memory "
        "is freed when its forward ends: return parameter.clone()"
    )


def _tensors(value: Any, unit: str) -> Iterator[Tensor]:
    """The tensors in nested containers, dataclasses and other objects.

    Raises TypeError for a function or an iterator, which may compute with the parameters later.
    """
    seen: dict[int, Any] = {}  # objects may refer to each other

    def walk(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        if isinstance(value, Tensor | nn.Module | type) or id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, Iterator | partial) or isroutine(value):
            raise TypeError(
                f"FSDP: unit '{unit}' returns a {type(value).__name__}, which may use its parameters when they are "
                "freed: return tensors, alone or in lists, tuples, dicts or objects"
            )
        if isinstance(value, Mapping):
            inside = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            inside = value
        elif is_dataclass(value):
            inside = [getattr(value, each.name, None) for each in fields(value)]
        else:
            inside = getattr(value, "__dict__", {}).values()
        for item in inside:
            yield from walk(item)

    return walk(value)


# -- dtypes ----------------------------------------------------------------------------------------------------


Casts = tuple[torch.dtype, torch.dtype | None]


def plan_casts(owners: Iterable[nn.Module], compute_dtype: torch.dtype) -> dict[nn.Module, Casts]:
    """Dtypes of the floating-point tensors that each module with parameters is given, and returns (None: as they are).

    A module that holds vectors only computes in their dtype, because most of torch's operations refuse operands of two
    dtypes, and returns the compute dtype. One whose class says `takes_mixed_dtypes = True` gets its inputs in the
    compute dtype beside its fp32 parameters, which spares both casts; it must return its input's dtype.
    """
    casts = {}
    for owner in owners:
        dtypes = [
            parameter_dtype(owner, parameter, compute_dtype)
            for parameter in owner._parameters.values()
            if parameter is not None and parameter.is_floating_point()
        ]
        if not dtypes:
            continue
        if isinstance(owner, _BatchNorm):
            casts[owner] = (dtypes[0], None)
        elif compute_dtype in dtypes or getattr(owner, "takes_mixed_dtypes", False):
            casts[owner] = (compute_dtype, None)
        else:
            casts[owner] = (dtypes[0], compute_dtype)
    return casts


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if kwargs:
        kwargs = {name: _cast(dtype, value) for name, value in kwargs.items()}
    return tuple([_cast(dtype, value) for value in args]), kwargs


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    if type(output) is tuple:
        return tuple(_cast(dtype, value) for value in output)
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype is dtype or not value.is_floating_point():
        return value
    return value.to(dtype)


# -- order -----------------------------------------------------------------------------------------------------


class UnitOrder:
    """The order of units in each kind of pass: learned once, compared between the ranks, and then held.

    A collective that is matched with another unit's collective on a peer does not fail by itself: with equal sizes it
    mixes two units' weights silently. So the first pass of each kind exchanges the name of every unit before gathering
    it (blocking, that one time) and remembers the order. Later passes send nothing: a rank compares what it is about to
    gather with its own memory, and raises at the first difference, before it sends. The remembered order also says
    which unit to fetch ahead.

    Args:
        names: of the units, for messages.
        group: the ranks to agree with.
    """

    def __init__(self, names: Sequence[str], group: ProcessGroup):
        self._names = names
        self._group = group
        # The fake group of simulations has no peers that could answer.
        self._alone = group.size() == 1 or dist.get_backend(group) == "fake"
        self._known: dict[Hashable, list[int]] = {}
        self.forget()

    def forget(self) -> None:
        """Learn every kind of pass again."""
        self._known.clear()
        self.begin(None)

    def begin(self, kind: Hashable) -> None:
        """A pass starts; passes of one `kind` run the same units."""
        self._kind = kind
        self._expected = self._known.get(kind)
        self._seen: list[int] = []

    def advance(self, unit: int) -> int | None:
        """The pass reaches `unit`; returns the one that follows it, if that is known.

        Raises:
            RuntimeError: another rank runs another unit now, or another unit ran here last time.
        """
        position = len(self._seen)
        self._seen.append(unit)
        if self._expected is None:
            self._compare(self._names[unit])
            return None
        expected = self._expected[position] if position < len(self._expected) else None
        if unit != expected:
            raise RuntimeError(self._changed(f"unit '{self._names[unit]}' runs", expected))
        return self._expected[position + 1] if position + 1 < len(self._expected) else None

    def end(self) -> None:
        """The pass is complete.

        Raises:
            RuntimeError: another rank goes on, or units that ran last time did not.
        """
        if self._expected is None:
            self._compare(None)
            self._known[self._kind] = self._seen
        elif len(self._seen) < len(self._expected):
            raise RuntimeError(self._changed("the pass ends", self._expected[len(self._seen)]))

    def _compare(self, name: str | None) -> None:
        if self._alone:
            return
        names = collectives.gather_objects(name, self._group)
        for rank, other in enumerate(names):
            if other != names[0]:
                raise RuntimeError(
                    f"FSDP: ranks run different units: rank 0 {_runs(names[0])} and rank {rank} {_runs(other)}; "
                    "every rank must run the same units in the same order"
                )

    def _changed(self, what: str, expected: int | None) -> str:
        before = "the pass ended" if expected is None else f"unit '{self._names[expected]}' ran"
        if ".parametrizations." in before:
            before += " (parametrize.cached(), which computes a parametrized weight once, is not for sharded modules)"
        return (
            f"FSDP: {what} where {before} the last time: every rank must run the same units in the same order "
            "in every step. If all ranks change it together, call relearn_order() on each first"
        )


def _runs(name: str | None) -> str:
    return "ends its pass" if name is None else f"runs unit '{name}'"
