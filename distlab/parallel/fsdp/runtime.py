"""When FSDP unshards, reshards and reduces: hooks on every unit's forward, and on the operations that made its outputs.

Backward is announced by the operations of autograd that made a unit's *output tensors*
(`outputs.py`). A unit's backward ends when backward reaches another unit, or ends; not when its
last gradient is ready, because ranks may use different parameters inside a unit and would then
issue their collectives in different orders.

Autograd runs operations in the reverse of the order in which forward made them. So backward passes
through the calls of units in the reverse order: a call inside another one begins later and ends
earlier. Only calls that share an output (a unit that returns another unit's output) begin at the
same operation; then the last one to return is announced first.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from distlab.comm.agreement import agree, agree_on_call
from distlab.parallel.ddp import send_unfinished
from distlab.parallel.fsdp.checks import (
    ShardGuard,
    refuse_copy_of_shards,
    refuse_graph_of_backward,
    refuse_lost_gradients,
    refuse_no_gradient,
    refuse_outside_forward,
    refuse_reentrant_checkpoint,
    refuse_written,
)
from distlab.parallel.fsdp.order import UnitOrder
from distlab.parallel.fsdp.outputs import copied, tensors_in
from distlab.parallel.fsdp.unit import State, Unit

NO_BACKWARD = -1  # torch's number of the running backward, if there is none


class Runtime:
    """Watches the units of one FSDP and moves their parameters and gradients in time.

    Args:
        name: of the wrapped module's class, for messages.

    Attributes:
        keep: whether what a forward with gradients has gathered stays until `finish()`, and not
            until it was used.
        synchronize: whether gradients are sent (False inside `no_sync()`, where they are kept in
            full).
        stage: of a pipeline, the one whose units run.
        arrived: whether backward has brought a parameter of a unit a gradient since the last
            `finish()`.
        backward_task: autograd's number of the backward that has begun and not ended; it stays if
            that raises.
    """

    def __init__(self, units: Sequence[Unit], guard: ShardGuard, name: str, keep: bool = False):
        self.units, self.guard = units, guard
        self.keep, self._keeping = keep, False
        self.synchronize, self.stage = True, 0
        self.arrived = False
        self._reached: list[Node] = []  # operations of units, while nothing has arrived
        self._group = guard.process_group
        self._name = f"FSDP({name})"
        self.backward_task: int | None = None
        self._order = UnitOrder(units, self._group)
        self._backward_order = UnitOrder(units, self._group)
        # units whose forward has begun and not ended, the innermost last
        self._running: list[Unit] = []
        self._ran: list[int] = []  # units run with gradients since the last backward began
        self._in_flight: Unit | None = None  # whose gradients are being reduce-scattered
        self._on_replicas = [
            param for unit in units for param in unit.trainable if param.replicate is not None
        ]
        self._handles = []
        for unit in units:
            self._handles += [
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit)),
                unit.module.register_forward_hook(partial(self._after_forward, unit)),
            ]

    def close(self) -> None:
        """Detach every hook."""
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> NoReturn:
        """Its hooks, which a copy of the module would call, are of these units and ranks alone."""
        refuse_copy_of_shards()

    def forget_orders(self) -> None:
        """Compare again between ranks in which order units run, forward and backward."""
        self._order.forget()
        self._backward_order.forget()

    # -- forward -------------------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """Run the forward of the whole module inside: reading a parameter that is not gathered raises."""
        mode = "training" if training else "evaluation"
        agree(
            self._group,
            f"at the start of a forward of {self._name} in {mode} mode, "
            f"with{'' if torch.is_grad_enabled() else 'out'} gradients",
        )
        for unit in self.units:
            unit.watch(True)
        try:
            self._order.begin((self.stage, training, torch.is_grad_enabled()))
            self.guard.pending |= torch.is_grad_enabled() and self.synchronize
            self._running = []
            self._keeping |= self.keep and torch.is_grad_enabled()
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
            refuse_outside_forward(unit)
        self._running.append(unit)
        following = self._order.advance(unit.index)
        unit.unshard()
        unit.wait_for_unshard()
        if following is not None:
            self.units[following].unshard()  # while this one computes

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output, unit.name))
        if any(
            t.layout is torch.strided and t.untyped_storage()._cdata in unit.storages
            for t in outputs
        ):
            output = copied(unit.name, output)  # it lies in memory that is about to be freed
            outputs = [output]
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            # Recomputation, whose early stop may skip this hook: nothing must depend on it.
            refuse_reentrant_checkpoint(unit, map(made_by, outputs), lambda: self.backward_task)
            return output
        for entry, full in unit.full:
            if full._version:  # else that of its construction
                refuse_written(entry)
        # a nested unit whose exception the module has caught
        while self._running.pop() is not unit:
            pass
        if unit not in self._running:  # else it runs inside itself
            self._reshard(unit)
        if torch.is_grad_enabled() and self._announce(
            _Call(unit, [other.index for other in self._running]), outputs
        ):
            unit.uses += 1
            self._ran.append(unit.index)
        return output

    def _announce(self, call: "_Call", outputs: Sequence[Tensor]) -> bool:
        """Let backward tell of `call` before it runs what made these outputs; False if it will run nothing."""
        nodes = {node for tensor in outputs if tensor.requires_grad for node in made_by(tensor)}
        for node in nodes:
            calls = node.metadata.get(self)
            if calls is None:
                calls = node.metadata[self] = []
                node.register_prehook(partial(self._before_operation, calls))
            calls.append(call)
        return bool(nodes)

    def reshard(self) -> None:
        """Let go of all gathered parameters, except of units that run, as in a backward inside of forward."""
        for unit in self.units:
            if unit.state is not State.SHARDED and unit not in self._running:
                self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if not self._keeping:
            unit.reshard()

    # -- backward ------------------------------------------------------------------------------------------

    def _before_operation(self, calls: Sequence["_Call"], gradients: Any) -> None:
        """Backward comes to an operation that made outputs of these calls, in the order in which they returned."""
        task = torch._C._current_graph_task_id()
        for call in reversed(calls):
            # each operation that made an output announces the call, and the first one counts
            if call.task != task:
                call.task = task
                self._before_backward(call)

    def _before_backward(self, call: "_Call") -> None:
        """A gradient reaches an output of a unit: fetch the unit, and send the gradients of those that are done."""
        unit = call.unit
        if torch.is_grad_enabled():
            refuse_graph_of_backward(unit)
        # The first unit of a backward begins the pass, and asks autograd to tell when it ends.
        self._enter_backward(call.task)
        unit.uses -= 1
        unit.touched = True
        if not self.arrived:
            self._reached.append(torch._C._current_autograd_node())
        # All ranks must come to the same unit now; the order of the last such pass says which one
        # comes next.
        following = self._backward_order.advance(unit.index)
        # What must stay: this unit, the one fetched ahead, units around this call, whose own
        # backward goes on when this one's has ended, and units whose forward is running, if this
        # backward runs inside of it.
        stay = {unit.index, following, *call.around, *(running.index for running in self._running)}
        # Every other unit that has memory is done: backward passes through the calls in the reverse
        # order of forward.
        done = [
            other
            for other in self.units
            if other.state is not State.SHARDED and other.index not in stay
        ]
        # Freed first, so that at most two units are gathered at any time. On CUDA the gather waits,
        # by the stream, for the kernels that still read this memory.
        for other in done:
            self._reshard(other)
        # The gather before the reduce-scatter: what comes next waits for the parameters, nobody for
        # the gradients.
        unit.unshard()
        unit.wait_for_unshard()
        if following is not None:
            self.units[following].unshard()
        for other in done:
            # One that runs again in this graph (shared weights) is sent when its last use has been
            # through.
            if other.touched and other.uses <= 0:
                self._post_backward(other)

    def _enter_backward(self, task: int) -> None:
        if self.backward_task != task:
            if self.guard.unfinished and self.backward_task is None:
                self.guard.refuse_edited_shards()
            self.backward_task, self.guard.unfinished = task, True
            send_unfinished(self._group)
            agree(
                self._group,
                f"at the start of a backward of {self._name}{'' if self.synchronize else ' inside no_sync()'}",
            )
            self._backward_order.begin((self.stage, *self._ran))
            self._ran = []
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd at the end of a backward that raised nothing."""
        send_unfinished(self._group)
        self.reshard()
        self._backward_order.end()
        for unit in self.units:
            if unit.touched:
                self._post_backward(unit)
        # nothing is left to hide them behind, and zero_grad() must find them
        self.wait_for_gradients()
        self.guard.note()
        self.backward_task = None

    def _post_backward(self, unit: Unit) -> None:
        """The unit's gradients are complete: put them together, and send them unless inside no_sync()."""
        unit.touched = False
        # frees the flat gradient of the unit before: there is one at a time
        self.wait_for_reduce_scatter()
        for param in unit.trainable:
            self.arrived |= param.accumulate_gradients()
            if self.synchronize:
                param.reduce_scatter()
            else:
                param.hold_gradients()
        if self.arrived:
            self._reached.clear()
        if self.synchronize:
            self.guard.pending, self._in_flight = True, unit

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
            RuntimeError: a parameter has a gradient, but backward has not come to its unit through
                what that returned; or none has.
        """
        agree_on_call(self._group, f"finish_gradient_synchronization() of {self._name}")
        for unit in self.units:
            if any(full.grad is not None for full in unit.trained):
                refuse_lost_gradients(unit)
        if not self.arrived and lead_to(
            self._reached, (p for unit in self.units for p in unit.trained)
        ):
            refuse_no_gradient()
        self.arrived = self._keeping = False
        self.reshard()
        self._reached.clear()
        for unit in self.units:
            unit.uses = 0
            for param in unit.trainable:
                if param.has_gradient:
                    self.wait_for_gradients()
                    param.drop_zeroed()
                    param.reduce_scatter()
                    self._in_flight = unit
        self.wait_for_gradients()

    def recover(self) -> None:
        """Forget a backward that raised."""
        self.backward_task = None
        self.guard.unfinished = self._keeping = False
        self._reached.clear()
        self.reshard()
        self.wait_for_gradients()
        for unit in self.units:
            unit.uses, unit.touched = 0, False


@dataclass(eq=False)
class _Call:
    """One forward of a unit; in a backward it is announced once, whichever of its outputs comes first.

    Attributes:
        around: units whose forward it runs inside, by index: their backward goes on when its own
            has ended.
        task: the last backward that has reached it.
    """

    unit: Unit
    around: list[int]
    task: int | None = None


def made_by(tensor: Tensor) -> Iterator[Node]:
    """Yield the operations of autograd through which alone a gradient of `tensor` reaches what it was computed from.

    That of a view and that of its base: writing to the view in place later (`relu_`) leaves the
    view's out.
    """
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
    if tensor._is_view() and tensor._base.grad_fn is not None:
        yield tensor._base.grad_fn


def lead_to(operations: Iterable[Node], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a gradient of what these operations made reaches one of the parameters."""
    ends = {get_gradient_edge(parameter).node for parameter in parameters}
    found, following = set(), list(operations)
    while following:
        node = following.pop()
        if node in ends:
            return True
        if node not in found:
            found.add(node)
            following += [before for before, _ in node.next_functions if before is not None]
    return False
