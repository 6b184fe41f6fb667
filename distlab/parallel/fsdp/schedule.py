"""When FSDP gathers, frees and sends: hooks on every unit's forward, and on the operations that made its outputs.

Backward is announced by the operations of autograd that made a unit's *output tensors*: they are found in dicts and
dataclasses, too, and without grad-requiring inputs, where `full_backward_pre_hook` does not fire. A unit is done when
backward reaches another one, or ends; not when its last gradient has come, because ranks may use different parameters
inside a unit and would then issue their collectives in different orders.

Autograd runs operations in the reverse of the order in which forward made them. So backward passes through the calls of
units like forward, in reverse: a call inside another one's begins later and ends earlier. Only where calls share an
output (a unit that returns what another returned) they begin at one and the same operation, and the last one to return
is announced first.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import isroutine
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.parallel.fsdp.order import UnitOrder
from distlab.parallel.fsdp.precision import Casts
from distlab.parallel.fsdp.shards import Unit


def in_backward() -> bool:
    """Whether autograd is running: a forward then is a recomputation of checkpointed activations."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """Watches the units of one FSDP and moves their parameters and gradients in time.

    Attributes:
        synchronize: whether gradients are sent (False inside `no_sync()`, where they are kept in full).
        pending: whether a synchronised forward or backward waits for `finish()`.
        unfinished: whether a backward, synchronised or not, has reached a unit since the last `finish()`.
    """

    def __init__(self, units: Sequence[Unit], group: ProcessGroup):
        self.units = units
        self.synchronize = True
        self.pending = False
        self.unfinished = False
        self._order = UnitOrder([unit.name for unit in units], group)
        self._backward_order = UnitOrder([unit.name for unit in units], group)
        self._in_forward = False
        self._running: list[Unit] = []  # units whose forward has begun and not ended, the innermost last
        self._backward_task: int | None = None  # autograd's number of the backward that is running
        self._ran: list[int] = []  # units run with gradients since the last backward began
        self._in_flight: Unit | None = None  # whose gradients are being reduce-scattered
        self._buffers = [{shard.buffer.untyped_storage()._cdata for shard in unit.shards} for unit in units]
        self._handles = []
        for unit in units:
            self._handles += [
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit)),
                unit.module.register_forward_hook(partial(self._after_forward, unit)),
            ]

    def cast(self, casts: Mapping[nn.Module, Casts]) -> None:
        """Give these modules their floating-point tensors, and take their outputs, in the dtypes stated."""
        for module, dtypes in casts.items():
            if dtypes.inputs is not None:
                hook = partial(_cast_inputs, dtypes.inputs)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            if dtypes.outputs is not None:
                self._handles.append(module.register_forward_hook(partial(_cast_outputs, dtypes.outputs)))

    def close(self) -> None:
        """Let go of gathered parameters and detach every hook."""
        self._free_all()
        for handle in self._handles:
            handle.remove()

    def forget_orders(self) -> None:
        """Compare between ranks anew in which order units run, forward and backward."""
        self._order.forget()
        self._backward_order.forget()

    # -- forward -------------------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """The forward of the whole module runs inside."""
        self._order.begin((training, torch.is_grad_enabled()))
        self.pending |= torch.is_grad_enabled() and self.synchronize
        self._in_forward, self._running = True, []
        try:
            yield
            self._order.end()
        finally:
            self._in_forward, self._running = False, []
            self._free_all()

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if in_backward():
            self._enter_backward(torch._C._current_graph_task_id())
            self._gather(unit, None)
            return
        if not self._in_forward:
            raise RuntimeError(
                f"unit '{unit.name}' runs outside the forward of its FSDP wrapper: call the wrapper, not the module"
            )
        self._running.append(unit)
        self._gather(unit, self._order.advance(unit.index))

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        outputs = [output] if isinstance(output, Tensor) else list(_tensors(output, unit.name))
        buffers = self._buffers[unit.index]
        if any(t.layout is torch.strided and t.untyped_storage()._cdata in buffers for t in outputs):
            output = _copied(unit, output)  # it lies in memory that is about to be freed
            outputs = [output]
        if in_backward():  # recomputation, whose early stop may skip this hook: nothing must depend on it
            self._refuse_reentrant_checkpoint(unit, outputs)
            return output
        while self._running.pop() is not unit:  # a nested unit whose exception the module has caught
            pass
        if unit not in self._running:  # else it runs inside itself
            unit.free()
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

    def _gather(self, unit: Unit, following: int | None) -> None:
        """Wait for `unit`'s parameters, and start to fetch those of the unit that follows."""
        unit.issue_gather()
        unit.wait_gather()
        if following is not None:
            self.units[following].issue_gather()

    def _free_all(self) -> None:
        for unit in self.units:
            if unit not in self._running:  # as in a backward inside of forward
                unit.free()

    # -- backward ------------------------------------------------------------------------------------------

    def _before_operation(self, calls: Sequence["_Call"], gradients: Any) -> None:
        """Backward comes to an operation that made outputs of these calls, in the order in which they returned."""
        for call in reversed(calls):
            self._before_backward(call)

    def _before_backward(self, call: "_Call") -> None:
        """A gradient reaches an output of a unit: fetch the unit, and close those that are done."""
        task, unit = torch._C._current_graph_task_id(), call.unit
        if call.task == task:  # another output of the same call
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"FSDP: a backward with create_graph=True reaches unit '{unit.name}', whose parameters would be freed "
                "before the graph it makes is differentiated: train with a gradient penalty under BucketedDDP"
            )
        call.task = task
        self._enter_backward(task)
        unit.uses -= 1
        unit.touched = True
        following = self._backward_order.advance(unit.index)
        stay = {unit.index, following, *call.around, *(running.index for running in self._running)}
        done = [u for u in self.units if u.allocated and u.index not in stay]
        for other in done:
            other.free()
        self._gather(unit, following)
        for other in done:
            if other.touched and other.uses <= 0:
                self._reduce(other)

    def _refuse_reentrant_checkpoint(self, unit: Unit, outputs: Sequence[Tensor]) -> None:
        """Let a backward of its own through what was recomputed in backward raise: its gradients would not be sent.

        Reentrant checkpoints run one; the others recompute only to fill in what the first graph saved.
        """
        task = torch._C._current_graph_task_id()

        def refuse(gradients: Any) -> None:
            # Operations of the first graph, too, if the unit returns its input.
            if self._backward_task == task != torch._C._current_graph_task_id():
                raise RuntimeError(
                    f"unit '{unit.name}' is recomputed in backward but ran without gradients in forward: checkpoint "
                    "activations with use_reentrant=False"
                )

        for tensor in outputs:
            for node in _made_by(tensor):
                node.register_prehook(refuse)

    def _enter_backward(self, task: int) -> None:
        if self._backward_task != task:
            self._backward_task = task
            self.unfinished = True
            self._backward_order.begin(tuple(self._ran))
            self._ran = []
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd at the end of a backward that raised nothing."""
        self._backward_order.end()
        self._free_all()
        for unit in self.units:
            if unit.touched:
                self._reduce(unit)
        self._backward_task = None

    def _reduce(self, unit: Unit) -> None:
        """The unit's gradients are complete: collect them, and send them unless inside no_sync()."""
        unit.touched = False
        self.receive()  # frees the flat gradient of the unit before, so that there is one at a time
        for shard in unit.trainable:
            shard.pack()
        if self.synchronize:
            self.pending = True
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        self.receive()
        for shard in unit.trainable:
            shard.issue_reduce()
        self._in_flight = unit

    def receive(self) -> None:
        """Wait for the gradients in flight and put them into `.grad`."""
        if self._in_flight is not None:
            for shard in self._in_flight.trainable:
                shard.finish_reduce()
            self._in_flight = None

    def finish(self) -> None:
        """Send what only passes without synchronisation used, and wait for all gradients.

        Raises:
            RuntimeError: a parameter has a gradient, but backward has not come to its unit through what that returned.
        """
        for unit in self.units:
            if any(full.grad is not None for shard in unit.trainable for full in shard.full):
                raise RuntimeError(
                    f"FSDP: backward reached parameters of unit '{unit.name}' past its outputs, so their gradients "
                    "would be lost: return every tensor that the loss needs from the unit's forward"
                )
        self.pending = self.unfinished = False
        for unit in self.units:
            self._send(unit)
            unit.uses = 0
        self.receive()

    @property
    def backward_failed(self) -> bool:
        """Whether the last backward began and did not end."""
        return self._backward_task is not None

    def recover(self) -> None:
        """Forget a backward that raised."""
        self._backward_task = None
        self.unfinished = False
        self._free_all()
        self.receive()
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


def _copied(unit: Unit, output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.clone()
    raise RuntimeError(
        f"FSDP: unit '{unit.name}' returns one of its parameters, or a view of one, among its outputs, and its memory "
        "is freed when its forward ends: return parameter.clone()"
    )


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    kwargs = {name: _cast(dtype, value) for name, value in kwargs.items()}
    return tuple(_cast(dtype, value) for value in args), kwargs


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    if type(output) is tuple:
        return tuple(_cast(dtype, value) for value in output)
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensors(value: Any, unit: str) -> Iterator[Tensor]:
    """The tensors in nested containers, dataclasses and other objects.

    Raises TypeError for a function or an iterator, which may compute with the parameters later.
    """
    seen: set[int] = set()  # objects may refer to each other

    def walk(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, list | tuple | set | frozenset):
            for item in value:
                yield from walk(item)
        elif isinstance(value, nn.Module | type) or id(value) in seen:
            return
        elif is_dataclass(value):
            seen.add(id(value))
            for each in fields(value):
                yield from walk(getattr(value, each.name, None))
        elif isinstance(value, Iterator) or isroutine(value) or isinstance(value, partial):
            raise TypeError(
                f"FSDP: unit '{unit}' returns a {type(value).__name__}, which may use its parameters when they are "
                "freed: return tensors, alone or in lists, tuples, dicts or objects"
            )
        elif hasattr(value, "__dict__"):
            seen.add(id(value))
            for item in vars(value).values():
                yield from walk(item)

    return walk(value)
