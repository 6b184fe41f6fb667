"""Named ranges around the parts of a model and the messages of a strategy, attached from outside.

Neither models nor strategies contain an instrument. `named_ranges` registers hooks on the modules,
and wraps the operations that a module keeps in its ``ops`` and the functions of
`distlab.comm.collectives`. Afterwards it removes all of this. When it is off, a step runs exactly
the code that it would run if this file did not exist.

These become ranges while the block runs:

``blocks.3.feed_forward``
    every call of a submodule, by its name in the model;
``blocks.3.attention/rope``, ``blocks.3.attention/attention``
    every operation of a module's ``ops`` (a dataclass of functions), by its field;
``blocks.3.attention/attention/scores``, ``…/softmax``, ``…/values``
    the three parts of an attention that is written with matmuls and a softmax (a fused one has no
    parts);
``blocks.3.attention/attention/softmax backward``
    every node of autograd. Its sequence number tells in which range of the forward it was made;
``message 3: all_reduce_mean 26.2 MB``
    every collective of `distlab.comm.collectives` that a strategy issues, with its size: not a
    pipeline's sends, nor what copy engines move. The first one in a step has number 0 (NCCL adds
    ranges of its own under Nsight);
``finish_gradient_synchronization`` and ``optimizer``
    the wrapper's wait for its messages, and the optimizer's step.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from distlab.comm import collectives
from distlab.measure.collectives import tensors_in

# Functions of `distlab.comm.collectives` → index of the argument that is the payload. It is the one
# that holds all ranks' data, as in `measure.collectives`.
MESSAGES = {
    "all_reduce_mean": 0,
    "reduce_scatter_mean": 1,
    "all_gather": 0,
    "broadcast": 0,
    "all_reduce": 0,
    "reduce_scatter_sum": 1,
    "all_to_all": 1,
    "rotate": 1,
}
_MATMULS = ("matmul", "__matmul__", "bmm")  # names of torch's functions for `@` and the like


class Emitter(NamedTuple):
    """Functions that write ranges into a profile.

    Attributes:
        push: opens a range of a name on this thread.
        pop: closes the innermost range of this thread.
    """

    push: Callable[[str], Any]
    pop: Callable[[], Any]


def emitter(name: str) -> Emitter:
    """Return an emitter of ranges.

    Args:
        name: ``"nvtx"`` for Nsight Systems, or ``"profiler"`` for torch.profiler.

    Raises:
        ValueError: another name, or NVTX without a CUDA device.
    """
    if name == "nvtx":
        if not torch.cuda.is_available():
            raise ValueError(
                "NVTX ranges need a CUDA device and there is none: use the profiler's ranges "
                "instead"
            )
        return Emitter(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    if name != "profiler":
        raise ValueError(f"ranges for {name!r} are unknown: choose nvtx or profiler")
    stacks = threading.local()  # autograd has its own threads, and each has its own open ranges

    def push(text: str) -> None:
        if not hasattr(stacks, "open"):
            stacks.open = []
        opened = record_function(text).__enter__()
        stacks.open.append(opened)

    def pop() -> None:
        innermost = stacks.open.pop()
        innermost.__exit__(None, None, None)

    return Emitter(push, pop)


@contextmanager
def _range(emit: Emitter | _Ranges, name: str) -> Iterator[None]:
    """Make the block a range, which ends even if the block raises."""
    emit.push(name)
    try:
        yield
    finally:
        emit.pop()


def _silent(function: Callable) -> Callable[..., None]:
    """Return `function` without its result.

    NVTX returns a depth, and torch would take the result of a hook for a new gradient.
    """

    def call(*args: Any) -> None:
        function(*args)

    return call


@contextmanager
def named_ranges(
    model: nn.Module, emit: Emitter, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Make ranges of parts, backward nodes, messages and the optimizer while the block runs.

    Afterwards everything is as before.

    Args:
        model: a model, or a strategy's wrapper around one. A module compiled by
            `torch.compile(module)` is one range, with nothing inside it.
        emit: functions that write ranges, see `emitter`.
        optimizer: optimizer whose `step` becomes a range.

    Raises:
        ValueError: a module compiled in place (`module.compile()`): its hooks would become part of
            the graph.
    """
    emit = Emitter(_silent(emit.push), _silent(emit.pop))
    ranges = _Ranges(emit)
    with ExitStack() as undo:
        for name, module in _parts(model):
            if module._compiled_call_impl is not None:
                raise ValueError(
                    f"module {name or 'model'!r} was compiled in place: use torch.compile(module), "
                    "or no compilation"
                )
            for handle in ranges.around(module, name or "model", is_root=module is model):
                undo.callback(handle.remove)
            _put_ranges_around_ops(module, name, ranges, undo)
        _put_ranges_around_messages(model, ranges, undo)
        if optimizer is not None:
            _put_range_around_optimizer(optimizer, emit, undo)
        yield


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and every called module below it, with their names.

    Modules inside a compiled one are left out.
    """
    for path, module in model.named_modules():
        words = path.split(".")
        # torch.compile(module) keeps the module as `_orig_mod`. To ask for the class of the outer
        # one would import all of dynamo.
        if "_orig_mod" in words:
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue  # never called
        # A wrapper around the model keeps it as `module`, which is not part of the model's names.
        name = ".".join(word for word in words if word != "module")
        yield name, module


class _Ranges:
    """Ranges of the forward, and the range to which each node of autograd belongs.

    A thread counts the autograd nodes that it makes, and each node keeps its number (its *sequence
    number*). Whenever a range begins or ends, a mark ``(number, name)`` is noted: nodes from this
    number on, up to the next mark, were made in the range ``name``.

    Attributes:
        emit: functions that write ranges.
        messages: number of messages in this step so far.
    """

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.messages = 0
        self._open: list[str] = []  # names of the open ranges, the innermost last
        self._marks: list[tuple[int, str]] = []

    def push(self, name: str) -> None:
        """Open a range in the forward."""
        self._open.append(name)
        self._mark()
        self.emit.push(name)

    def pop(self) -> None:
        """Close the innermost range."""
        self._open.pop()
        self._mark()
        self.emit.pop()

    def _mark(self) -> None:
        """Note that nodes from now on belong to the range that is the innermost now, if any."""
        # Nodes made after a closed range belong to the range around it.
        innermost = self._open[-1] if self._open else ""
        self._marks.append((torch.autograd._get_sequence_nr(), innermost))

    def around(self, module: nn.Module, name: str, is_root: bool) -> list[Any]:
        """Return hooks that make each call of `module` a range.

        The hooks of the root also start a step and name its backward.
        """

        def before(*_: Any) -> None:
            if is_root:
                # A new step.
                self.messages = 0
                self._open = []
                self._marks = []
            self.push(name)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self.pop()
            if is_root and torch.is_grad_enabled():
                self._name_backward(tensors_in(output))

        # This hook runs first before the call and last after it, so that the module's other hooks
        # run inside the range.
        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def _name_backward(self, outputs: Iterable[Tensor]) -> None:
        """Make every node of the graph of `outputs` a range, named after the forward's."""
        mark_numbers = [number for number, _ in self._marks]
        todo = [tensor.grad_fn for tensor in outputs]
        seen = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            # The last mark that is not later than the node.
            place = bisect.bisect_right(mark_numbers, node._sequence_nr()) - 1
            if place < 0:
                continue
            _, name = self._marks[place]
            # "" is outside of all ranges. AccumulateGrad nodes have the highest possible number, so
            # they belong to the last mark, which is "".
            if name:
                self._put_range_around_node(node, f"{name} backward")

    def _put_range_around_node(self, node: torch.autograd.graph.Node, name: str) -> None:
        """Make the execution of a node of autograd a range."""

        def before(*_: Any) -> None:
            self.emit.push(name)

        def after(*_: Any) -> None:
            self.emit.pop()

        node.register_prehook(before)
        node.register_hook(after)


def _put_ranges_around_ops(module: nn.Module, name: str, ranges: _Ranges, undo: ExitStack) -> None:
    """Put ranges around the functions in the dataclass `module.ops`, if the module has it."""
    ops = getattr(module, "ops", None)
    if not dataclasses.is_dataclass(ops):
        return

    def wrapped(field: str, function: Callable) -> Callable:
        path = f"{name}/{field}"

        def call(*args: Any, **kwargs: Any) -> Any:
            parts = _AttentionParts(path, ranges) if field == "attention" else nullcontext()
            with _range(ranges, path), parts:
                return function(*args, **kwargs)

        return call

    named = {}
    for field in dataclasses.fields(ops):
        function = getattr(ops, field.name)
        # A default does nothing, or next to nothing, and is not worth a range.
        if function is not field.default and callable(function):
            named[field.name] = wrapped(field.name, function)
    undo.callback(setattr, module, "ops", ops)
    # A copy for this module only. The record may be shared by all modules.
    module.ops = dataclasses.replace(ops, **named)


class _AttentionParts(TorchFunctionMode):
    """Mode with three ranges in an attention: ``scores``, ``softmax`` and ``values``.

    ``scores`` begins with the first matmul, ``softmax`` with the softmax, and ``values`` with the
    next matmul. Without a matmul there are none.
    """

    def __init__(self, path: str, ranges: _Ranges) -> None:
        super().__init__()
        self._path = path
        self._ranges = ranges
        self._part = ""  # the part that runs now, "" before the first

    def _enter_part(self, part: str) -> None:
        """End the part that runs now, and begin another. "" begins none."""
        if self._part:
            self._ranges.pop()
        self._part = part
        if part:
            self._ranges.push(f"{self._path}/{part}")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _MATMULS and self._part == "":
            self._enter_part("scores")
        elif name == "softmax" and self._part == "scores":
            self._enter_part("softmax")
        elif name in _MATMULS and self._part == "softmax":
            self._enter_part("values")
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        self._enter_part("")
        super().__exit__(*exception)


def _put_ranges_around_messages(model: nn.Module, ranges: _Ranges, undo: ExitStack) -> None:
    """Put ranges around the lab's collectives, and around the wrapper's wait for them."""

    def wrapped(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            payload = args[MESSAGES[name]]
            size_mb = payload.numel() * payload.element_size() / 1e6
            number = ranges.messages
            ranges.messages += 1
            with _range(ranges.emit, f"message {number}: {name} {size_mb:.1f} MB"):
                return function(*args, **kwargs)

        return call

    for name in MESSAGES:
        function = getattr(collectives, name)
        undo.callback(setattr, collectives, name, function)
        # Strategies call `collectives.name`, which looks the function up at each call.
        setattr(collectives, name, wrapped(name, function))
    finish = "finish_gradient_synchronization"
    if hasattr(model, finish):
        # A context manager used as a decorator makes a range of each call.
        named = _range(ranges.emit, finish)(getattr(model, finish))
        # The attribute of the instance hides the method of its class until it is deleted.
        undo.callback(delattr, model, finish)
        setattr(model, finish, named)


def _put_range_around_optimizer(
    optimizer: torch.optim.Optimizer, emit: Emitter, undo: ExitStack
) -> None:
    """Put a range around each step of the optimizer."""

    def before(*_: Any) -> None:
        emit.push("optimizer")

    def after(*_: Any) -> None:
        emit.pop()

    undo.callback(optimizer.register_step_pre_hook(before).remove)
    undo.callback(optimizer.register_step_post_hook(after).remove)
