"""When FSDP unshards, reshards and reduces.

Backward is announced by the operations of autograd that made a unit's *output tensors*. A unit's
backward ends when backward reaches another unit, or ends. It does not end when the last gradient is
ready, because ranks may use different parameters inside a unit, and would then issue their
collectives in different orders.

Autograd runs operations in the reverse of the order in which forward made them. So backward passes
through the calls of units in the reverse order: a call inside another one begins later and ends
earlier. Only calls that share an output (a unit that returns another unit's output) begin at the
same operation. Then the last one to return is announced first.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from inspect import isroutine
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.comm.agreement import agree, agree_on_call
from distlab.parallel import checks
from distlab.parallel.ddp import NO_BACKWARD, Phase, send_unfinished
from distlab.parallel.fsdp.layout import Casts
from distlab.parallel.fsdp.unit import State, Unit


@dataclass
class Step:
    """State of a wrapper's step.

    Attributes:
        phase: phase of the step.
        accumulated: True if a backward inside no_sync() has reached a unit since the last finish.
        task: autograd's number of the backward that has begun and not ended. It stays if that
            raises.
        arrived: True if backward has brought a parameter of a unit a gradient since the last
            finish.
        reached: operations of units that backward has reached, while nothing has arrived.
    """

    phase: Phase
    accumulated: bool
    task: int | None
    arrived: bool
    reached: list[Node]

    def __repr__(self) -> str:
        running = "" if self.task is None else f", in backward {self.task}"
        kept = ", gradients accumulated inside no_sync()" if self.accumulated else ""
        return f"Step({self.phase.value}{running}{kept})"

    @property
    def has_unfinished(self) -> bool:
        """Return True if a backward has reached a unit since the last finish."""
        return self.accumulated or self.phase in (Phase.BACKWARD, Phase.ENDED)


class Runtime:
    """Watches the units of one FSDP and moves their parameters and gradients in time.

    Hooks, in the order in which they fire in a step. All are registered in `_register_hooks`,
    except those of backward, which depend on what forward has run:

        forward     of a unit     `_before_forward`   gather it, and start to gather the next
                    of a module   `_cast_inputs`      to the dtype that it computes in
                    of a unit     `_after_forward`    free it, and let its outputs announce backward
                    of a module   `_cast_outputs`     to the compute dtype
        backward    of the operations that made a unit's outputs
                                  `_before_backward`  gather it, and send the gradients of others
                    at the end    `_backward_ended`   free and send the rest

    Args:
        units: the units in registration order.
        casts: dtypes of modules' inputs and outputs under `compute_dtype`.
        sharded: the shards that the optimizer steps, with names.
        named: all parameters that the optimizer steps, with names.
        group: all ranks.
        name: name of the wrapped module's class, for messages.
        keep: True if parameters that a forward with gradients has gathered stay until `finish()`.
        on_mesh: True if `no_sync()` reduce-scatters inside the shard group, and leaves out only the
            replicas.

    Attributes:
        step: state of the step.
        accumulates: True inside `no_sync()`.
        stage: stage of a pipeline whose units run.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        casts: Mapping[nn.Module, Casts],
        sharded: checks.Named,
        named: checks.Named,
        group: ProcessGroup,
        name: str,
        keep: bool,
        on_mesh: bool,
    ):
        self.units = units
        self.step = Step(Phase.IDLE, accumulated=False, task=None, arrived=False, reached=[])
        self.accumulates, self.stage = False, 0
        self._sharded, self._named = sharded, named
        self._keep, self._keeping = keep, False
        self._on_mesh = on_mesh
        self._group = group
        self._name = f"FSDP({name})"
        self._order = UnitOrder(units, group)
        self._backward_order = UnitOrder(units, group)
        # Units whose forward has begun and not ended, the innermost last.
        self._running: list[Unit] = []
        self._ran: list[int] = []  # units run with gradients since the last backward began
        self._in_flight: Unit | None = None  # unit whose gradients are being reduce-scattered
        self._on_replicas = [
            param for unit in units for param in unit.trainable if param.replicate is not None
        ]
        self._handles = list(self._register_hooks(casts))

    def _register_hooks(self, casts: Mapping[nn.Module, Casts]) -> Iterator[RemovableHandle]:
        for unit in self.units:
            # Before hooks of the user's, which may read parameters, as those of pruning do.
            yield unit.module.register_forward_pre_hook(
                partial(self._before_forward, unit), prepend=True
            )
            yield unit.module.register_forward_hook(partial(self._after_forward, unit))
        for module, (inputs, outputs) in casts.items():
            yield module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)
            if outputs is not None:
                yield module.register_forward_hook(partial(_cast_outputs, outputs))

    def close(self) -> None:
        """Detach every hook."""
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> NoReturn:
        """Raise TypeError: a copy of the module would call hooks of these units and ranks."""
        raise TypeError(
            "FSDP: the wrapped module holds this rank's shards and cannot be copied, pickled or "
            "saved: take gather_full_params() or full_state_dict(), on every rank, or close() the "
            "wrapper first"
        )

    def forget_orders(self) -> None:
        """Compare again between ranks in which order units run, forward and backward."""
        self._order.forget()
        self._backward_order.forget()

    # -- forward -----------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """Run the forward of the whole module. Reading a parameter that is not gathered raises."""
        with_gradients = torch.is_grad_enabled()
        agree(
            self._group,
            f"at the start of a forward of {self._name} in "
            f"{'training' if training else 'evaluation'} mode, "
            f"with{'' if with_gradients else 'out'} gradients",
        )
        for unit in self.units:
            unit.watch(True)
        try:
            self._order.begin((self.stage, training, with_gradients))
            begins_step = with_gradients and not self.accumulates
            if begins_step and self.step.phase is Phase.IDLE:
                self.step.phase = Phase.FORWARD
            self._running = []
            self._keeping = self._keeping or (self._keep and with_gradients)
            try:
                yield
            finally:
                self._running = []
                self.reshard()
            self._order.end()
        finally:
            for unit in self.units:
                unit.watch(False)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        task = torch._C._current_graph_task_id()
        if task != NO_BACKWARD:  # activations are being recomputed
            self._enter_backward(task)
            unit.unshard()
            unit.wait_for_unshard()
            return
        if not unit.watching:
            raise RuntimeError(
                f"unit '{unit.name}' runs outside the forward of its FSDP wrapper: call the "
                "wrapper, not the module"
            )
        self._running.append(unit)
        following = self._order.advance(unit.index)
        unit.unshard()
        unit.wait_for_unshard()
        if following is not None:
            self.units[following].unshard()  # while this one computes

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output, unit.name))
        dense = [tensor for tensor in outputs if tensor.layout is torch.strided]
        if any(tensor.untyped_storage()._cdata in unit.storages for tensor in dense):
            output = copied(unit.name, output)  # its memory is about to be freed
            outputs = [output]
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            # Recomputation, whose early stop may skip this hook: nothing must depend on it.
            self._refuse_reentrant_checkpoint(unit, outputs)
            return output
        for entry, full in unit.full:
            if full._version:  # 0 since its construction, unless forward has written to it
                raise RuntimeError(
                    f"FSDP: forward writes to '{entry.name}' in place (an embedding's max_norm "
                    "does), and what it writes is freed with its unit: write to "
                    "fsdp.parameters(), after optimizer.step()"
                )
        while self._running.pop() is not unit:
            pass  # a nested unit whose exception the module has caught
        if unit not in self._running:  # else it runs inside itself
            self._reshard(unit)
        if torch.is_grad_enabled():
            call = _Call(unit, around=[other.index for other in self._running])
            if self._announce(call, outputs):
                unit.uses += 1
                self._ran.append(unit.index)
        return output

    def _announce(self, call: "_Call", outputs: Sequence[Tensor]) -> bool:
        """Let backward call `_before_backward` before it runs the operations that made `outputs`.

        Returns:
            False if backward will run none.
        """
        nodes: set[Node] = set()
        for tensor in outputs:
            if tensor.requires_grad:
                nodes.update(made_by(tensor))
        for node in nodes:
            calls = node.metadata.get(self)
            if calls is None:
                calls = node.metadata[self] = []
                node.register_prehook(partial(self._before_operation, calls))
            calls.append(call)
        return bool(nodes)

    def _refuse_reentrant_checkpoint(self, unit: Unit, outputs: Sequence[Tensor]) -> None:
        """Let a backward of its own through recomputed outputs raise, as nothing would be sent.

        Reentrant checkpoints run one. Others recompute only to fill in what the first graph saved.
        """
        task = torch._C._current_graph_task_id()

        def refuse(gradients: Any) -> None:
            # Not for operations of the first graph, which a unit that returns its input has.
            if self.step.task == task != torch._C._current_graph_task_id():
                raise RuntimeError(
                    f"unit '{unit.name}' is recomputed in backward but ran without gradients in "
                    "forward: checkpoint activations with use_reentrant=False"
                )

        for tensor in outputs:
            for node in made_by(tensor):
                node.register_prehook(refuse)

    def reshard(self) -> None:
        """Free all gathered parameters, except those of units whose forward is running."""
        for unit in self.units:
            if unit.state is not State.SHARDED and unit not in self._running:
                self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if not self._keeping:
            unit.reshard()

    # -- backward ----------------------------------------------------------------------------------

    def _before_operation(self, calls: Sequence["_Call"], gradients: Any) -> None:
        """Announce these calls in reverse order of their return, unless that was done already.

        Each operation that made an output of a call does this, and the first one counts.
        """
        task = torch._C._current_graph_task_id()
        for call in reversed(calls):
            if call.task != task:
                call.task = task
                self._before_backward(call)

    def _before_backward(self, call: "_Call") -> None:
        """Fetch a unit whose output gets a gradient, and send the gradients of done units."""
        unit = call.unit
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"FSDP: a backward with create_graph=True reaches unit '{unit.name}', whose "
                "parameters would be freed before the graph it makes is differentiated: train "
                "with a gradient penalty under BucketedDDP"
            )
        self._enter_backward(call.task)
        unit.uses -= 1
        unit.touched = True
        if not self.step.arrived:
            self.step.reached.append(torch._C._current_autograd_node())
        # All ranks must come to the same unit now. The order of the last such pass says which one
        # comes next.
        following = self._backward_order.advance(unit.index)
        # What must stay: this unit, the one fetched ahead, units around this call, whose own
        # backward goes on when this one's has ended, and units whose forward is running, if this
        # backward runs inside of it.
        stay = {unit.index, following, *call.around, *(running.index for running in self._running)}
        # Every other unit that has memory is done, because backward passes through the calls in the
        # reverse order of forward.
        done = []
        for other in self.units:
            if other.state is not State.SHARDED and other.index not in stay:
                done.append(other)
        # Freed first, so that at most two units are gathered at any time. On CUDA the gather waits,
        # by the stream, for the kernels that still read this memory.
        for other in done:
            self._reshard(other)
        # The gather before the reduce-scatter: the next computation waits for the parameters, and
        # nothing waits for the gradients.
        unit.unshard()
        unit.wait_for_unshard()
        if following is not None:
            self.units[following].unshard()
        for other in done:
            # A unit that runs again in this graph (shared weights) is sent after its last use.
            if other.touched and other.uses <= 0:
                self._post_backward(other)

    def _enter_backward(self, task: int) -> None:
        """Begin a pass of backward at its first unit, and ask autograd to tell when it ends."""
        step = self.step
        if step.task == task:
            return
        if step.has_unfinished and step.task is None:
            # Only shards: this backward may have reached a vector, whose gradient is not edited.
            checks.check_kept_unedited(self._sharded)
        step.task = task
        if self.accumulates:
            step.accumulated = True
        else:
            step.phase = Phase.BACKWARD
        send_unfinished(self._group)
        inside = " inside no_sync()" if self.accumulates else ""
        agree(self._group, f"at the start of a backward of {self._name}{inside}")
        self._backward_order.begin((self.stage, *self._ran))
        self._ran = []
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Autograd calls this at the end of a backward that raised nothing."""
        send_unfinished(self._group)
        self.reshard()
        self._backward_order.end()
        for unit in self.units:
            if unit.touched:
                self._post_backward(unit)
        # Nothing is left to hide them behind, and zero_grad() must find them.
        self.wait_for_gradients()
        checks.mark_finished(self._named)
        self.step.task = None
        if self.step.phase is Phase.BACKWARD:
            self.step.phase = Phase.ENDED

    def _post_backward(self, unit: Unit) -> None:
        """Collect the unit's complete gradients, and send them.

        Inside no_sync() they are kept in full, or on a mesh sent inside the shard group only.
        """
        unit.touched = False
        # Frees the flat gradient of the unit before, so that there is one at a time.
        self.wait_for_reduce_scatter()
        sends = self._on_mesh or not self.accumulates
        for param in unit.trainable:
            if param.accumulate_gradients():
                self.step.arrived = True
            if self.accumulates:
                param.hold_gradients()
            if sends:
                param.reduce_scatter(stays_in_group=self.accumulates)
        if self.step.arrived:
            self.step.reached.clear()
        if sends:
            self._in_flight = unit

    def wait_for_gradients(self) -> None:
        """Wait until everything that was sent is in `.grad`."""
        self.wait_for_reduce_scatter()
        for param in self._on_replicas:
            param.wait_for_all_reduce()

    def wait_for_reduce_scatter(self) -> None:
        """Wait for the gradients in flight; see `FlatParam.wait_for_reduce_scatter`."""
        if self._in_flight is not None:
            for param in self._in_flight.trainable:
                param.wait_for_reduce_scatter()
            self._in_flight = None

    # -- finish ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send the gradients of units that only passes inside no_sync() used, and wait for all.

        Raises:
            RuntimeError: a parameter has a gradient, but backward has not come to its unit through
                what that returned; or none has.
        """
        step = self.step
        agree_on_call(self._group, f"finish_gradient_synchronization() of {self._name}")
        for unit in self.units:
            if any(full.grad is not None for full in unit.trained):
                raise RuntimeError(
                    f"FSDP: backward reached parameters of unit '{unit.name}' past its outputs, so "
                    "their gradients would be lost: return every tensor that the loss needs from "
                    "the unit's forward"
                )
        trained = [full for unit in self.units for full in unit.trained]
        if not step.arrived and lead_to(step.reached, trained):
            raise RuntimeError(
                "FSDP: no backward has brought a matrix its gradient since the last "
                "finish_gradient_synchronization(): call loss.backward() without inputs=…, which "
                "shards, being no part of the graph, cannot be among"
            )
        step.arrived = self._keeping = False
        step.reached.clear()
        self.reshard()
        for unit in self.units:
            unit.uses = 0
            for param in unit.trainable:
                if param.has_gradient:
                    self.wait_for_gradients()
                    param.drop_zeroed()
                    param.reduce_scatter()
                    self._in_flight = unit
                elif param.group_sum is not None:
                    param.drop_zeroed()
                    param.average_replicas()
        self.wait_for_gradients()

    def recover(self) -> None:
        """Forget a backward that raised."""
        self.forget_backward()
        self.step.task = None
        self.step.reached.clear()
        self._keeping = False
        self.reshard()
        self.wait_for_gradients()
        for unit in self.units:
            unit.uses, unit.touched = 0, False

    def forget_backward(self) -> None:
        """Note that the gradients of backward were dropped. All ranks still finish the step."""
        self.step.accumulated = False
        if self.step.phase is not Phase.IDLE:
            self.step.phase = Phase.FORWARD


@dataclass(eq=False)
class _Call:
    """One forward of a unit. A backward announces it once, through the first output it comes to.

    Attributes:
        around: indices of the units whose forward it runs inside. Their backward goes on when its
            own has ended.
        task: number of the last backward that has reached it.
    """

    unit: Unit
    around: list[int]
    task: int | None = None


# -- the order of units ----------------------------------------------------------------------------


class UnitOrder:
    """The order of units in each kind of pass: learned once, compared between ranks, then held.

    A collective that is matched with another unit's collective on a peer does not fail by itself:
    with equal sizes it silently mixes two units' weights. So the first pass of each kind exchanges
    the name of every unit before gathering it (blocking, that one time) and remembers the order.
    Later passes send nothing: a rank compares the unit that it is about to gather with its own
    memory, and raises at the first difference, before it sends. The remembered order also says
    which unit to fetch ahead.

    Args:
        units: units whose names messages say.
        group: ranks to agree with.
    """

    def __init__(self, units: Sequence[Unit], group: ProcessGroup):
        self._names = [unit.name for unit in units]
        self._group = group
        # The group of a simulation has no peers that could answer.
        is_simulated = dist.get_backend(group) == collectives.SIMULATED
        self._alone = group.size() == 1 or is_simulated
        self._known: dict[Hashable, list[int]] = {}
        self.forget()

    def forget(self) -> None:
        """Learn every kind of pass again."""
        self._known.clear()
        self.begin(None)

    def begin(self, kind: Hashable) -> None:
        """Begin a pass. Passes of one `kind` run the same units."""
        self._kind = kind
        self._expected = self._known.get(kind)
        self._seen: list[int] = []

    def advance(self, unit: int) -> int | None:
        """Note that the pass reaches `unit`.

        Returns:
            The unit that follows it, if that is known.

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
        """End the pass.

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
                    f"FSDP: ranks run different units: rank 0 {_runs(names[0])} and rank {rank} "
                    f"{_runs(other)}; every rank must run the same units in the same order"
                )

    def _changed(self, what: str, expected: int | None) -> str:
        before = "the pass ended" if expected is None else f"unit '{self._names[expected]}' ran"
        if ".parametrizations." in before:
            before += (
                " (parametrize.cached(), which computes a parametrized weight once, is not for "
                "sharded modules)"
            )
        return (
            f"FSDP: {what} where {before} the last time: every rank must run the same units in the "
            "same order in every step. If all ranks change it together, call relearn_order() on "
            "each first"
        )


def _runs(name: str | None) -> str:
    return "ends its pass" if name is None else f"runs unit '{name}'"


# -- outputs of units ------------------------------------------------------------------------------


def tensors_in(value: Any, unit: str) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, dataclasses and other objects.

    Args:
        unit: name of the unit that returns `value`.

    Raises:
        TypeError: a function or an iterator, which may compute with the parameters later.
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
                f"FSDP: unit '{unit}' returns a {type(value).__name__}, which may use its "
                "parameters when they are freed: return tensors, alone or in lists, tuples, dicts "
                "or objects"
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


def copied(unit: str, output: Any) -> Tensor:
    """Copy an output that is stored in its unit's buffers.

    Raises:
        RuntimeError: it is one of several outputs.
    """
    if isinstance(output, Tensor):
        return output.clone()
    raise RuntimeError(
        f"FSDP: unit '{unit}' returns one of its parameters, or a view of one, among its outputs, "
        "and its memory is freed when its forward ends: return parameter.clone()"
    )


def made_by(tensor: Tensor) -> Iterator[Node]:
    """Yield the operations through which alone a gradient of `tensor` reaches its inputs.

    Those are the one of a view and the one of its base: writing to the view in place later
    (`relu_`) leaves the view's out.
    """
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
    if tensor._is_view() and tensor._base.grad_fn is not None:
        yield tensor._base.grad_fn


def lead_to(operations: Iterable[Node], parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether a gradient of what these operations made reaches one of the parameters."""
    waiting = list(operations)
    if not waiting:
        return False
    ends = {get_gradient_edge(parameter).node for parameter in parameters}
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in ends:
            return True
        if node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            if before is not None:
                waiting.append(before)
    return False


# -- dtypes of inputs and outputs ------------------------------------------------------------------


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    if kwargs:
        kwargs = {name: _cast(dtype, value) for name, value in kwargs.items()}
    return tuple([_cast(dtype, value) for value in args]), kwargs


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """Return a floating-point tensor in a dtype, also one inside of lists, tuples and dicts."""
    if isinstance(value, Tensor):
        is_cast = value.is_floating_point() and value.dtype is not dtype
        return value.to(dtype) if is_cast else value
    if type(value) is dict:
        items = [_cast(dtype, item) for item in value.values()]
        before = list(value.values())
    elif type(value) is list or isinstance(value, tuple):
        items = [_cast(dtype, item) for item in value]
        before = value
    else:
        return value
    # A container without such tensors stays the caller's own, which a module may fill.
    if all(item is other for item, other in zip(items, before, strict=True)):
        return value
    if type(value) is dict:
        return dict(zip(value, items, strict=True))
    # A named tuple takes its items one by one.
    return value._make(items) if hasattr(value, "_make") else type(value)(items)
