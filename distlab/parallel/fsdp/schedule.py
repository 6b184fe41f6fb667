"""When FSDP gathers, frees and sends: hooks on every unit's forward, and on the gradients of its outputs.

Backward is announced by hooks on a unit's *output tensors*: they fire for outputs in dicts and dataclasses,
and without grad-requiring inputs, where `full_backward_pre_hook` does not. A unit is done when backward
reaches another one, or ends; not when its last gradient has come, because ranks may use different parameters
inside a unit and would then issue their collectives in different orders.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.parallel.fsdp.order import UnitOrder
from distlab.parallel.fsdp.shards import Unit


def in_backward() -> bool:
    """Whether autograd is running: a forward then is a recomputation of checkpointed activations."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """Watches the units of one FSDP and moves their parameters and gradients in time.

    Attributes:
        synchronize: whether gradients are sent (False inside `no_sync()`, where they are kept in full).
        pending: whether a synchronised forward or backward waits for `finish()`.
    """

    def __init__(self, units: Sequence[Unit], group: ProcessGroup):
        self.units = units
        self.synchronize = True
        self.pending = False
        self._order = UnitOrder([unit.name for unit in units], group)
        self._backward_order = UnitOrder([unit.name for unit in units], group)
        self._in_forward = False
        self._backward_task: int | None = None  # autograd's number of the backward that is running
        self._ran: list[int] = []  # units run with gradients since the last backward began
        self._in_flight: Unit | None = None  # whose gradients are being reduce-scattered
        self._handles = []
        for unit in units:
            self._handles += [
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit)),
                unit.module.register_forward_hook(partial(self._after_forward, unit)),
            ]

    def cast_inputs(self, dtypes: Mapping[nn.Module, torch.dtype]) -> None:
        """Give these modules their floating-point tensors in the type of their parameters."""
        for module, dtype in dtypes.items():
            if dtype.is_floating_point:
                hook = partial(_cast_inputs, dtype)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

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
        self._in_forward = True
        try:
            yield
            self._order.end()
        finally:
            self._in_forward = False
            self._free_all()

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if in_backward():
            self._before_recomputation(unit)
            return
        if not self._in_forward:
            raise RuntimeError(
                f"unit '{unit.name}' runs outside the forward of its FSDP wrapper: call the wrapper, not the module"
            )
        self._gather(unit, self._order.advance(unit.index))

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():  # recomputation, whose early stop may skip this hook anyway
            return
        unit.free()
        if torch.is_grad_enabled():
            call, needed = _Call(), False
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit, call))
                    needed = True
            if needed:
                unit.uses += 1
                self._ran.append(unit.index)

    def _gather(self, unit: Unit, following: int | None) -> None:
        """Wait for `unit`'s parameters, and start to fetch those of the unit that follows."""
        unit.issue_gather()
        unit.wait_gather()
        if following is not None:
            self.units[following].issue_gather()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.free()

    # -- backward ------------------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit, call: "_Call", gradient: Tensor) -> None:
        """A gradient reaches an output of `unit`: fetch the unit, and close those that are done."""
        task = torch._C._current_graph_task_id()
        if call.task == task:  # another output of the same call
            return
        call.task = task
        self._enter_backward(task)
        unit.uses -= 1
        unit.touched = True
        following = self._backward_order.advance(unit.index)
        done = [u for u in self.units if u.allocated and u.index != following and not _contains(u, unit)]
        for other in done:
            other.free()
        self._gather(unit, following)
        for other in done:
            if other.touched and other.uses <= 0:
                self._reduce(other)

    def _before_recomputation(self, unit: Unit) -> None:
        """Checkpointed activations are recomputed in backward: the unit may not have been fetched yet."""
        if unit.uses <= 0 and not unit.touched:
            raise RuntimeError(
                f"unit '{unit.name}' is recomputed in backward but ran without gradients in forward: checkpoint "
                "activations with use_reentrant=False"
            )
        self._enter_backward(torch._C._current_graph_task_id())
        self._gather(unit, None)

    def _enter_backward(self, task: int) -> None:
        if self._backward_task != task:
            self._backward_task = task
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
        """Send what only passes without synchronisation used, and wait for all gradients."""
        self.pending = False
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
        self._free_all()
        self.receive()
        for unit in self.units:
            unit.uses, unit.touched = 0, False


class _Call:
    """One forward of a unit, so that several outputs announce its backward once."""

    task: int | None = None


def _contains(outer: Unit, unit: Unit) -> bool:
    """Whether `outer`'s backward goes on while `unit`'s runs: its module is, or contains, that of `unit`."""
    return id(unit.module) in outer.within


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))
