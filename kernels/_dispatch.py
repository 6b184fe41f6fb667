"""How an operation reaches its kernels: at once in eager mode, as a node of the graph under torch.compile.

An `operator` is a function of tensors and options that allocates its results and launches kernels. It is registered
with torch, which is how torch.compile, fake tensors and dispatch modes (FLOP counters, selective checkpointing) meet
it. Eager calls do without the dispatcher, and without most of the function: `_recorder.py` writes down what it does
with one set of shapes, strides, dtypes, alignments and options, and repeats that. So the function must depend on
nothing but its arguments' descriptions and the values of its options; a context that changes what it does calls
`forget`. Where the recorder is missing, every call goes through torch's dispatcher.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from . import _triton


class _Thread(threading.local):
    """What a thread is doing."""

    looks = False  # whether only what results look like is asked for
    traced = False  # whether launches become nodes of a graph
    recorder: Any = None  # of the call that is being recorded


_thread = _Thread()
_kept: dict[str, dict] = {}  # operator → description of a call → its program, see `_recorder.run`


@contextlib.contextmanager
def within(**states: Any) -> Iterator[None]:
    """Have this thread do something else for a while: attributes of `_Thread`."""
    before = {name: getattr(_thread, name) for name in states}
    vars(_thread).update(states)
    try:
        yield
    finally:
        vars(_thread).update(before)


@functools.cache
def recorder() -> ModuleType | None:
    """Return `_recorder`, or None without it or the parts of torch that it needs; imported by the first call."""
    try:
        from . import _recorder
    except ImportError:
        return None
    return _recorder


def forget() -> None:
    """Drop all programs."""
    for programs in _kept.values():
        programs.clear()


@contextlib.contextmanager
def forcing(forced: dict[str, Any], **choices: Any) -> Iterator[None]:
    """Within, `forced` holds these launch parameters too: calls are recorded anew, and again after it."""
    before = dict(forced)
    forced.update(choices)
    forget()
    try:
        yield
    finally:
        forced.clear()
        forced.update(before)
        forget()


def programs() -> list[str]:
    """Return the source of every program there is."""
    return [f"# {name}\n{found.__doc__}" for name, kept in _kept.items() for found in kept.values() if found]


def discard() -> None:
    """What this thread records is not what the next call does: for searches, which launch in order to measure."""
    if _thread.recorder is not None:
        _thread.recorder.discarded = True


def idle(x: Tensor) -> bool:
    """Whether an operator has nothing to compute: x is empty, or only what the results look like is asked for."""
    return _thread.looks or x.numel() == 0


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`; every launch in this package goes through here."""
    if _triton.compiled is not None:
        _triton.compiled.append(kernel.warmup(*args, grid=grid, **options))
        return
    if _thread.traced:
        torch.library.wrap_triton(kernel)[grid](*args, **options)
        return
    run = kernel[grid] if _thread.recorder is None else functools.partial(_thread.recorder.launch, kernel, grid)
    tensors = (getattr(x, "base", x) for x in args)  # a descriptor's tensor is its base
    device = next((x.device for x in tensors if isinstance(x, Tensor)), None)
    if device is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on torch's current device, wherever the tensors are
            run(*args, **options)
    else:
        run(*args, **options)


def operator(name: str, check: Callable[..., None] | None = None, mutates_args: tuple[str, ...] = (), *,
             opaque: bool = False) -> Callable:
    """Decorator: makes a function the operator `distlab_kernels::name` of torch, called as this module says.

    Args:
        name: of the operator.
        check: called with the arguments before anything is done with such for the first time; raises for what is wrong.
        mutates_args: names of the arguments that are written to.
        opaque: whether torch.compile calls the operator instead of launching its kernels from its own code: where the
            function reads addresses, encodes descriptors of tensors, or measures. Calls of lengths that torch.compile
            keeps variable are opaque too, and all calls on a CPU.

    The function is annotated as `torch.library.custom_op` wants it and called with positional arguments. For tensors
    without data, of simulations and torch.compile, it is called too: it then returns once the results are allocated,
    where it asks `idle`. `register_fake` of the result replaces that.
    """

    def decorate(function: Callable) -> Callable:
        kept = _kept[name] = {}

        @functools.wraps(function)
        def from_torch(*args: Any) -> Any:
            repeated = recorder()
            return repeated.run(function, check, kept, args, function) if repeated else function(*args)

        def looks(*args: Any) -> Any:
            with within(looks=True):
                return function(*args)

        def to_torch(*args: Any) -> Any:
            if check is not None:
                check(*args)
            return registered(*args)

        registered = torch.library.custom_op(f"distlab_kernels::{name}", from_torch, mutates_args=mutates_args)
        registered.register_fake(looks)
        if not opaque:
            registered.register_torch_dispatch(FunctionalTensorMode, functools.partial(_as_launches, function))
        mutated = [list(inspect.signature(function).parameters).index(x) for x in mutates_args]

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return to_torch(*args)
            if torch._C._len_torch_dispatch_stack():
                inside = _thread.recorder is not None  # an operator that calls another
                return (function if inside else to_torch)(*args)
            if torch._C._functorch.peek_interpreter_stack() is not None:
                return to_torch(*args)
            repeated = recorder()
            if not repeated:
                return to_torch(*args)
            result = repeated.run(function, check, kept, args, to_torch)
            for position in mutated:
                torch.autograd.graph.increment_version(args[position])
            return result

        call.register_fake = registered.register_fake
        return call

    return decorate


def _as_launches(function: Callable, mode: FunctionalTensorMode, op: Any, types: Any, args: tuple,
                 kwargs: dict) -> Any:
    """What torch.compile traces of an operator: its allocations and launches, which Inductor then plans and writes."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    fixed = all(isinstance(size, int) for x in tensors for size in (*x.shape, *x.stride()))
    if not fixed or not all(x.is_cuda and x.numel() for x in tensors):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode, within(traced=True):
        return function(*args, **kwargs)
