"""How an operation reaches its kernels: at once in eager mode, as a node of the graph under torch.compile.

An `operator` is a function of tensors and options that allocates its results and launches kernels. It is registered
with torch, which is how torch.compile, fake tensors and dispatch modes (FLOP counters, selective checkpointing) meet
it. Eager calls do without the dispatcher, and without most of the function: what it does with one set of shapes,
strides, dtypes, alignments and options is recorded once and written down as a program: its allocations, its calls of
torch, its launches of compiled kernels, straight on. Later calls run that; `programs()` shows them:

    def program(t0, t1):
        t2 = empty((2048, 2560), (2560, 1), dtype=c1, device=c2)
        t3 = empty((2048,), (1,), dtype=c3, device=c2)
        c4(2048, 1, 1, stream(0), *c5, t0.data_ptr(), None, t1.data_ptr(), t2.data_ptr(), None, t3.data_ptr(), …)
        return (t2, t3)

So the function must depend on nothing but its arguments' descriptions and the values of its options; a context that
changes what it does calls `forget`. Reading a tensor's value, and whatever else cannot be repeated blindly, is noticed
while recording; such calls have no program and run as written every time.
"""

import contextlib
import functools
import importlib
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import _triton

ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
OPTIONS = frozenset({type(None), bool, int, float, str, torch.dtype})
MOST_PROGRAMS = 4096  # of one operator: lengths that change with every call would fill the memory
_thread = threading.local()  # `recorder`: of the call that this thread records, or None
_kept: dict[str, dict] = {}  # operator → description of a call → its program, or None where it has none


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
    if getattr(_thread, "recorder", None) is not None:
        _thread.recorder.discarded = True


def idle(x: Tensor) -> bool:
    """Whether an operator has nothing to compute: x is empty, or only what the results look like is asked for."""
    return getattr(_thread, "looks", False) or x.numel() == 0


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`; every launch in this package goes through here."""
    if _triton.compiled is not None:
        _triton.compiled.append(kernel.warmup(*args, grid=grid, **options))
        return
    if getattr(_thread, "traced", False):
        torch.library.wrap_triton(kernel)[grid](*args, **options)
        return
    recorder = getattr(_thread, "recorder", None)
    tensors = (getattr(x, "base", x) for x in args)  # a descriptor's tensor is its base
    device = next((x.device for x in tensors if isinstance(x, Tensor)), None)
    if device is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on torch's current device, wherever the tensors are
            kernel[grid](*args, **options)
        if recorder is not None:
            recorder.repeatable = False
        return
    if recorder is None:
        kernel[grid](*args, **options)
        return
    with _disable_current_modes():  # the interpreter computes with tensors of its own
        compiled = kernel[grid](*args, **options)
    recorder.launched(kernel, compiled, grid, args, options)


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
            return run(args, function)

        def looks(*args: Any) -> Any:
            before, _thread.looks = getattr(_thread, "looks", False), True
            try:
                return function(*args)
            finally:
                _thread.looks = before

        def to_torch(*args: Any) -> Any:
            if check is not None:
                check(*args)
            return registered(*args)

        def run(args: tuple, otherwise: Callable) -> Any:
            if _triton.compiled is not None:  # a program's launches are not `launch`'s, and would not be collected
                return function(*args)
            tensors, key = [], []
            for x in args:
                kind = type(x)
                # Programs read addresses. Without one a tensor is empty, meta or torch's zeros that take no memory;
                # and one whose values are the negatives of what lies there (`z.conj().imag`) the dispatcher resolves.
                if (kind is Tensor or kind is Parameter) and (address := x.data_ptr()) and not x.is_neg():
                    tensors.append(x)
                    key += x.shape, x.stride(), x.dtype, x.device, address & 15
                elif kind in OPTIONS:
                    key += kind, x
                else:  # or a subclass of Tensor, or nothing that is allowed
                    return otherwise(*args)
            program = kept.get(tuple(key))
            if program is None:
                return _written(function, check, kept, args, tensors, tuple(key))
            first = tensors[0]
            if first.is_cuda and first.get_device() != torch.cuda.current_device():
                with torch.cuda.device(first.device):
                    return program(*tensors)
            if program.calls_torch and torch.is_autocast_enabled(first.device.type):  # what was recorded has been cast
                with torch.autocast(first.device.type, enabled=False):
                    return program(*tensors)
            return program(*tensors)

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
                inside = getattr(_thread, "recorder", None) is not None  # an operator that calls another
                return (function if inside else to_torch)(*args)
            if torch._C._functorch.peek_interpreter_stack() is not None:
                return to_torch(*args)
            result = run(args, to_torch)
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
    before, _thread.traced = getattr(_thread, "traced", False), True
    try:
        with mode:
            return function(*args, **kwargs)
    finally:
        _thread.traced = before


def _written(function: Callable, check: Callable | None, kept: dict, args: tuple, tensors: list[Tensor],
             key: tuple) -> Any:
    """By the function as it is written; recorded, if calls of this description are new and can have a program."""
    if check is not None:
        check(*args)
    device = tensors[0].device
    if key in kept or not (device.type == "cuda" or _triton.interpreted()):
        return function(*args)
    # A tensor given twice is two inputs: the next call with this key may give two tensors.
    args = [x.detach() if isinstance(x, Tensor) else x for x in args]
    _thread.recorder = recorder = _Recorder([x for x in args if isinstance(x, Tensor)])
    try:
        with torch.cuda.device(device.index if device.type == "cuda" else -1), recorder:
            result = function(*args)
    finally:
        _thread.recorder = None
    if not recorder.discarded:
        if len(kept) >= MOST_PROGRAMS:
            kept.clear()
        kept[key] = recorder.program(result)
    return result


class _Root(NamedTuple):
    """A tensor that is no view of another."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    address: int


class _Recorder(TorchDispatchMode):
    """Writes down as lines of Python what happens while it is active; the inputs are t0, t1, …, results follow them."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {"empty": torch.empty_strided}
        self.roots: list[_Root] = []  # of which the others are views
        # id of a tensor → (the tensor, weakly: nothing lives longer for being recorded; its root's number; offset)
        self.places: dict[int, tuple[weakref.ref, int, int]] = {}
        self.last_use: dict[int, int] = {}  # number of a root → line
        self.repeatable, self.discarded, self.calls_torch = True, False, False
        self.inputs = [self._new(tensor) for tensor in inputs]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **kwargs or {})
        made = list(result) if isinstance(result, list | tuple) else [result]
        if not made or not all(isinstance(x, Tensor) for x in made):
            self.repeatable = False  # a value was read
        elif func.is_view and torch._C._is_alias_of(made[0], args[0]):  # below autograd `contiguous` may copy
            root, _ = self._place(args[0])
            for view in made:
                self.places[id(view)] = weakref.ref(view), root, view.data_ptr() - self.roots[root].address
        elif func.overloadpacket.__name__ in ALLOCATIONS:
            options = f"dtype={self._constant(result.dtype)}, device={self._constant(result.device)}"
            self.lines.append(f"{self._new(result)} = empty({tuple(result.shape)}, {result.stride()}, {options})")
        else:
            given = [self.expression(x) for x in args]
            given += [f"{name}={self.expression(x)}" for name, x in (kwargs or {}).items()]
            line = f"{self._constant(func)}({', '.join(given)})"
            self.calls_torch = True
            if not any(self._known(x) for x in made):  # else in place, or with `out`
                names = ", ".join(self._new(x) for x in made)
                line = f"[{names}] = {line}" if isinstance(result, list | tuple) else f"{names} = {line}"
            self.lines.append(line)
        return result

    def _new(self, tensor: Tensor) -> str:
        self.places[id(tensor)] = weakref.ref(tensor), len(self.roots), 0
        self.roots.append(_Root(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr()))
        return f"t{len(self.roots) - 1}"

    def _constant(self, value: Any) -> str:
        alike = torch.device, torch.dtype
        name = next((n for n, x in self.constants.items() if x is value or (type(x) in alike and x == value)),
                    f"c{len(self.constants)}")
        self.constants[name] = value
        return name

    def _known(self, tensor: Tensor) -> bool:
        place = self.places.get(id(tensor))
        return place is not None and place[0]() is tensor

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """(root, offset) of a tensor that the next line uses; one that comes from elsewhere cannot be repeated."""
        if not self._known(tensor):
            self.repeatable = False
            return 0, 0
        _, root, offset = self.places[id(tensor)]
        self.last_use[root] = len(self.lines)
        return root, offset

    def expression(self, value: Any) -> str:
        """What `value` is in another call."""
        if isinstance(value, list | tuple):
            return f"[{', '.join(self.expression(x) for x in value)}]"
        if not isinstance(value, Tensor):
            self.repeatable &= not isinstance(value, torch.Generator)
            plain = type(value) in (type(None), bool, int, str) or (type(value) is float and math.isfinite(value))
            return repr(value) if plain else self._constant(value)
        number, offset = self._place(value)
        root, name = self.roots[number], f"t{number}"
        if (value.shape, value.stride(), value.dtype, value.data_ptr()) == root:
            return name
        first, rest = divmod(offset, root.dtype.itemsize)
        self.repeatable &= value.dtype == root.dtype and rest == 0
        return f"{name}.as_strided({tuple(value.shape)}, {value.stride()}, {name}.storage_offset() + {first})"

    def launched(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        """Write down a launch; on a GPU that of the compiled kernel, with addresses instead of tensors."""
        if compiled is None:  # Triton's interpreter, which takes tensors
            named = [f"{name}={self.expression(x)}" for name, x in options.items()]
            given = ", ".join([*(self.expression(x) for x in args), *named])
            self.lines.append(f"{self._constant(kernel[grid])}({given})")
            return
        # Triton's launcher in C, without the Python around it, which encodes every descriptor again in every call.
        run = compiled.run
        inside = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
        self.repeatable &= not (run.global_scratch_size or run.profile_scratch_size)
        encodings = iter(inside.get("tensordesc_meta", ()))
        given = []
        for value in (*args, *(options[name] for name in kernel.arg_names[len(args) :])):
            if isinstance(value, Tensor):
                given.append(self._address(value))
            elif isinstance(getattr(value, "base", None), Tensor):
                given.append(f"*{self._constant(_Encoded(value, next(encodings)))}[{self._address(value.base)}]")
            else:
                given.append(self.expression(value))
        sizes, index = (*grid, 1, 1)[:3], torch.cuda.current_device()
        self.constants["stream"] = torch._C._cuda_getCurrentRawStream
        fixed: tuple[Any, ...] = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        arguments = ", ".join(given)
        if hasattr(run, "kernel_signature"):  # Triton 3.7
            fixed += compiled.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature
            arguments = f"({arguments},)"
        else:
            fixed += None, None, compiled.packed_metadata, None, None, None
        launcher = self._constant(inside.get("launcher", run.launch))
        first = ", ".join(map(str, sizes))
        self.lines.append(f"{launcher}({first}, stream({index}), *{self._constant(fixed)}, {arguments})")

    def _address(self, tensor: Tensor) -> str:
        number, offset = self._place(tensor)
        return f"t{number}.data_ptr()" + (f" + {offset}" if offset else "")

    def program(self, result: Any) -> Callable | None:
        """Return a function of the inputs, its source in its docstring, that makes `result` in this call; or None."""
        several = isinstance(result, list | tuple)
        returned = ", ".join(self.expression(x) for x in (result if several else [result]))
        if not self.repeatable:
            return None
        lines = []
        for number, line in enumerate(self.lines):
            done = [f"t{root}" for root, last in self.last_use.items() if last == number and root >= len(self.inputs)]
            lines += [line, *([f"del {', '.join(done)}"] if done else [])]  # freed as early as by the function
        lines.append(f"return ({returned},)" if several else f"return {returned}")
        source = "\n    ".join([f"def program({', '.join(self.inputs)}):", *lines])
        exec(source, self.constants)
        made = self.constants["program"]
        made.__doc__, made.calls_torch = source, self.calls_torch
        return made


class _Encoded(dict):
    """What Triton's launcher in C is given for a TensorDescriptor: address → the encoded descriptor, shape, strides.

    Encoded once per address: those of activations come back in every step, as the allocator gives them again.
    """

    def __init__(self, like: Any, encoding: Any) -> None:
        super().__init__()
        self.like, self.encoding = _Descriptor(like, 0), encoding  # without its tensor, which must not live on here
        self.make = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg

    def __missing__(self, address: int) -> tuple:
        if len(self) >= MOST_PROGRAMS:
            self.clear()
        self[address] = made = tuple(self.make(_Descriptor(self.like, address), self.encoding))
        return made


class _Descriptor:
    """A TensorDescriptor of Triton's at whatever address: what its launcher reads of one."""

    def __init__(self, like: Any, address: int) -> None:
        self.shape, self.strides, self.padding = like.shape, like.strides, like.padding
        self.round_f32_to_tf32 = getattr(like, "round_f32_to_tf32", False)
        self.address, self.base = address, self

    def data_ptr(self) -> int:
        """Return the address, for which the launcher asks `base`."""
        return self.address
