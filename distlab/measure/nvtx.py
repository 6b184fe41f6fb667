"""Named ranges around the parts of a model and the messages of a strategy, attached from outside.

Neither models nor strategies contain an instrument. `named_ranges` hangs hooks on the modules,
wraps the operations that a module keeps in its ``ops`` and the functions of
`distlab.comm.collectives`, and takes all of it away again: when it is off, a step runs the very
code that it would run if this file did not exist.

What becomes a range while the block runs:

``blocks.3.feed_forward``
    every call of a submodule, by its name in the model;
``blocks.3.attention/rope``, ``blocks.3.attention/attention``
    every operation of a module's ``ops`` (a dataclass of functions), by its field;
``blocks.3.attention/attention/scores``, ``…/softmax``, ``…/values``
    the three parts of an attention that is written with matmuls and a softmax (a fused one has no
    parts);
``blocks.3.attention/attention/softmax backward``
    every node of autograd, named after the forward range in which it was made, which its sequence
    number tells;
``message 3: all_reduce_mean 26.2 MB``
    every collective that a strategy of this lab issues, counted from the step's forward: the
    buckets, by number and size (NCCL adds ranges of its own under Nsight);
``finish_gradient_synchronization`` and ``optimizer``
    what their names say.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from distlab.comm import collectives
from distlab.measure.collectives import tensors_in

# Functions of the seam, and which argument is the payload (the side on which all ranks' data lies).
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
_MATMULS = ("matmul", "__matmul__", "bmm")


class Emitter(NamedTuple):
    """Functions that draw ranges: `push` opens one on this thread, `pop` closes the innermost."""

    push: Callable[[str], Any]
    pop: Callable[[], Any]


def emitter(name: str) -> Emitter:
    """Return the emitter ``"nvtx"``, for Nsight Systems, or ``"profiler"``, for torch.profiler.

    Raises:
        ValueError: another name, or NVTX without a CUDA device.
    """
    if name == "nvtx":
        if not torch.cuda.is_available():
            raise ValueError(
                "NVTX ranges need a CUDA device and there is none: use the profiler's ranges instead"
            )
        return Emitter(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    if name != "profiler":
        raise ValueError(f"ranges for {name!r} are unknown: choose nvtx or profiler")
    stacks = threading.local()  # autograd has its own threads, and a range belongs to one

    def push(text: str) -> None:
        stacks.__dict__.setdefault("open", []).append(record_function(text).__enter__())

    def pop() -> None:
        stacks.open.pop().__exit__(None, None, None)

    return Emitter(push, pop)


@contextmanager
def _range(emit: Emitter | _Ranges, name: str) -> Iterator[None]:
    emit.push(name)
    try:
        yield
    finally:
        emit.pop()


def _silent(function: Callable) -> Callable[..., None]:
    """Return `function` without its result.

    NVTX returns a depth, and torch takes a hook's result for a new gradient.
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
        emit: functions that draw ranges, see `emitter`.
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
                    f"module {name or 'model'!r} was compiled in place: use torch.compile(module), or no compilation"
                )
            for handle in ranges.around(module, name or "model", is_root=module is model):
                undo.callback(handle.remove)
            _put_ranges_around_ops(module, name, ranges, undo)
        _put_ranges_around_messages(model, ranges, undo)
        if optimizer is not None:
            undo.callback(
                optimizer.register_step_pre_hook(lambda *_: emit.push("optimizer")).remove
            )
            undo.callback(optimizer.register_step_post_hook(lambda *_: emit.pop()).remove)
        yield


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model and every called module below it, with their names.

    Modules inside a compiled one are left out.
    """
    for path, module in model.named_modules():
        words = path.split(".")
        # `_orig_mod` from torch.compile(module); asking for its class would import all of dynamo.
        if "_orig_mod" not in words and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            # `module` in a wrapper around the model
            yield ".".join(word for word in words if word != "module"), module


class _Ranges:
    """Ranges of the forward, and the sequence numbers between which each was the innermost.

    Every autograd node carries the sequence number that its thread counted when the forward made
    it. A mark ``(number, name)`` says: nodes from here on belong to ``name``.
    """

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.messages = 0
        self._open: list[str] = []
        self._marks: list[tuple[int, str]] = []

    def push(self, name: str) -> None:
        self._open.append(name)
        self._mark()
        self.emit.push(name)

    def pop(self) -> None:
        self._open.pop()
        self._mark()
        self.emit.pop()

    def _mark(self) -> None:
        self._marks.append(
            (torch.autograd._get_sequence_nr(), self._open[-1] if self._open else "")
        )

    def around(self, module: nn.Module, name: str, is_root: bool) -> list[Any]:
        """Return hooks that make each call of `module` a range.

        The hooks of the root also start a step and name its backward.
        """

        def before(*_: Any) -> None:
            if is_root:
                self.messages = 0
                self._open, self._marks = [], []
            self.push(name)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            self.pop()
            if is_root and torch.is_grad_enabled():
                self._name_backward(tensors_in(output))

        # The first to begin and the last to end, so that the module's other hooks lie inside.
        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def _name_backward(self, outputs: Iterable[Tensor]) -> None:
        """Make every node behind `outputs` a range, named after the forward's."""
        starts = [number for number, _ in self._marks]
        todo, seen = [tensor.grad_fn for tensor in outputs], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            place = bisect.bisect_right(starts, node._sequence_nr()) - 1
            name = self._marks[place][1] if place >= 0 else ""
            # AccumulateGrad nodes, with the highest of all numbers, lie behind the last mark
            if name:
                node.register_prehook(lambda *_, name=name: self.emit.push(f"{name} backward"))
                node.register_hook(lambda *_: self.emit.pop())


def _put_ranges_around_ops(module: nn.Module, name: str, ranges: _Ranges, undo: ExitStack) -> None:
    """Put ranges around the functions in a module's `ops`, if it has that dataclass."""
    ops = getattr(module, "ops", None)
    if not dataclasses.is_dataclass(ops):
        return

    def wrapped(field: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = f"{name}/{field}"
            with (
                _range(ranges, path),
                _AttentionParts(path, ranges) if field == "attention" else nullcontext(),
            ):
                return function(*args, **kwargs)

        return call

    # what does next to nothing, or nothing
    usual = {field.name: field.default for field in dataclasses.fields(ops)}
    own = {field: function for field, function in vars(ops).items() if function is not usual[field]}
    named = {
        field: wrapped(field, function) for field, function in own.items() if callable(function)
    }
    undo.enter_context(mock.patch.object(module, "ops", dataclasses.replace(ops, **named)))


class _AttentionParts(TorchFunctionMode):
    """Mode with three ranges: ``scores`` from the first matmul, ``softmax``, then ``values``.

    ``values`` begins with the next matmul.
    """

    def __init__(self, path: str, ranges: _Ranges) -> None:
        super().__init__()
        self._path, self._ranges = path, ranges
        self._part = ""

    def _enter_part(self, part: str) -> None:
        if self._part:
            self._ranges.pop()
        self._part = part
        if part:
            self._ranges.push(f"{self._path}/{part}")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _MATMULS and self._part in ("", "softmax"):
            self._enter_part("values" if self._part else "scores")
        elif name == "softmax" and self._part == "scores":
            self._enter_part("softmax")
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        self._enter_part("")
        super().__exit__(*exception)


def _put_ranges_around_messages(model: nn.Module, ranges: _Ranges, undo: ExitStack) -> None:
    """Make ranges of every collective of the lab, and of the wrapper's wait for them."""

    def wrapped(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            payload = args[MESSAGES[name]]
            size = payload.numel() * payload.element_size()
            number, ranges.messages = ranges.messages, ranges.messages + 1
            with _range(ranges.emit, f"message {number}: {name} {size / 1e6:.1f} MB"):
                return function(*args, **kwargs)

        return call

    for name in MESSAGES:
        undo.enter_context(
            mock.patch.object(collectives, name, wrapped(name, getattr(collectives, name)))
        )
    finish = "finish_gradient_synchronization"
    if hasattr(model, finish):
        # as a decorator: a range at each call
        named = _range(ranges.emit, finish)(getattr(model, finish))
        undo.enter_context(mock.patch.object(model, finish, named))
