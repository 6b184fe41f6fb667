"""Eager calls without most of the host's time: what an operator does is written down once, and run from then on.

What an operator of `_dispatch` does with one set of shapes, strides, dtypes, alignments and options
is recorded and written down as a program: its allocations, its calls of torch, its launches of
compiled kernels, straight on. Later calls run that; `_dispatch.programs()` shows them:

    def program(known, t0, o1, t1, o3):
        if not (known or same(t0, t1) and o1 is c6 and (o3 is c7 or type(o3) is type(c7) and o3 ==
        c7)):
            return NotImplemented
        a0 = t0.data_ptr()
        a1 = t1.data_ptr()
        if not (known or (a0 | a1) & 15 == 0):
            return NotImplemented
        t2 = empty((2048, 2560), (2560, 1), c1)
        t3 = empty((2048,), (1,), c2)
        c3(2048, 1, 1, stream(0), *c4, a0, None, a1, t2.data_ptr(), None, t3.data_ptr(), …)
        return (t2, t3)

Without `known` a program sees for itself whether a call is one for it. Only that which ran last is
asked so, since most calls are like the one before; others are looked up by a description. Reading a
tensor's value, and whatever else cannot be repeated blindly, is noticed while recording; such calls
have no program and run as written every time.

Nothing needs this module: without it calls go through torch's dispatcher. It uses parts of torch
and of Triton that are not public.
"""

import importlib
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import _dispatch

ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
OPTIONS = frozenset({type(None), bool, int, float, str, torch.dtype})
MOST_PROGRAMS = 4096  # of one operator: lengths that change with every call would fill the memory


def run(
    function: Callable, check: Callable | None, kept: dict, args: tuple, otherwise: Callable
) -> Any:
    """Call an operator: by the program that `kept` has for such a call, or as written, and recorded.

    Args:
        function: the operator as written.
        check: called with the arguments before anything is done with such for the first time,
            unless None.
        kept: description of a call → its program, or None where it has none; number of arguments →
            the program that ran last with so many, if it calls nothing of torch's; filled here.
        args: of the call.
        otherwise: called with them instead where a program could not read some tensor.
    """
    # a program's launches are not `launch`'s, and would not be collected
    if _dispatch.compiled is not None:
        return function(*args)
    key = []
    for x in args:
        kind = type(x)
        # Programs read addresses. Without one a tensor is empty, meta or torch's zeros that take no
        # memory; and one whose values are the negatives of what lies there (`z.conj().imag`) the
        # dispatcher resolves. The last two are for `same`, which compares them too.
        if (kind is Tensor or kind is Parameter) and (address := x.data_ptr()) and not x.is_neg():
            key += (
                x.shape,
                x.stride(),
                x.dtype,
                x.device,
                address & 15,
                x.requires_grad,
                x.is_inference(),
            )
        elif kind in OPTIONS:
            key += kind, x
        else:  # or a subclass of Tensor, or nothing that is allowed
            return otherwise(*args)
    program = kept.get(tuple(key))
    if program is None:
        return _written(function, check, kept, args, tuple(key))
    with torch.cuda.device(program.index):
        if not program.calls_torch:
            kept[len(args)] = program
        elif torch.is_autocast_enabled(program.kind):  # what was recorded has been cast
            with torch.autocast(program.kind, enabled=False):
                return program(True, *args)
        return program(True, *args)


def _written(
    function: Callable, check: Callable | None, kept: dict, args: tuple, key: tuple
) -> Any:
    """Call the function as it is written; recorded, if calls of this description are new and can have a program."""
    if check is not None:
        check(*args)
    recorder = _Recorder(args)
    if key in kept or not (recorder.kind == "cuda" or _dispatch.interpreted()):
        return function(*args)
    with torch.cuda.device(recorder.index), recorder, _dispatch.within(recorder=recorder):
        result = function(*recorder.args)
    if not recorder.discarded:
        if len(kept) >= MOST_PROGRAMS:
            kept.clear()
        kept[key] = recorder.program(result, args)
    return result


class _Root(NamedTuple):
    """A tensor that is no view of another."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    address: int


class _Recorder(TorchDispatchMode):
    """Writes down as lines of Python what happens while it is active; the inputs are t0, t1, …, results follow them."""

    def __init__(self, args: tuple) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.roots: list[_Root] = []  # of which the others are views
        # id of a tensor → (the tensor, weakly: nothing lives longer for being recorded; its root's
        # number; offset)
        self.places: dict[int, tuple[weakref.ref, int, int]] = {}
        self.last_use: dict[int, int] = {}  # number of a root → line
        self.repeatable, self.discarded, self.calls_torch = True, False, False
        # A tensor given twice is two inputs: the next call with this key may give two tensors.
        self.args = [x.detach() if isinstance(x, Tensor) else x for x in args]
        self.names = [
            self._new(x) if isinstance(x, Tensor) else f"o{i}" for i, x in enumerate(self.args)
        ]
        first = next(x for x in args if isinstance(x, Tensor))
        self.kind, self.index, self.given = first.device.type, first.get_device(), len(self.roots)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code that runs meanwhile compiled: Dynamo would run it eager, and remember that."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        made = list(result) if isinstance(result, list | tuple) else [result]
        if not made or not all(isinstance(x, Tensor) for x in made):
            self.repeatable = False  # a value was read
        elif func.is_view and torch._C._is_alias_of(made[0], args[0]):
            # below autograd `contiguous` may copy
            root, _ = self._place(args[0])
            for view in made:
                self.places[id(view)] = (
                    weakref.ref(view),
                    root,
                    view.data_ptr() - self.roots[root].address,
                )
        elif func.overloadpacket.__name__ in ALLOCATIONS:
            self.repeatable &= result.get_device() == self.index
            dtype = self._constant(result.dtype)
            self.lines.append(
                f"{self._new(result)} = empty({tuple(result.shape)}, {result.stride()}, {dtype})"
            )
        else:
            given = [self.expression(x) for x in args]
            given += [f"{name}={self.expression(x)}" for name, x in (kwargs or {}).items()]
            line = f"{self._constant(func)}({', '.join(given)})"
            self.calls_torch = True
            if not any(self._known(x) for x in made):  # else in place, or with `out`
                names = ", ".join(self._new(x) for x in made)
                line = (
                    f"[{names}] = {line}"
                    if isinstance(result, list | tuple)
                    else f"{names} = {line}"
                )
            self.lines.append(line)
        return result

    def _new(self, tensor: Tensor) -> str:
        self.places[id(tensor)] = weakref.ref(tensor), len(self.roots), 0
        self.roots.append(_Root(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr()))
        return f"t{len(self.roots) - 1}"

    def _constant(self, value: Any) -> str:
        name = next((n for n, x in self.constants.items() if x is value), f"c{len(self.constants)}")
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
            plain = type(value) in (type(None), bool, int, str) or (
                type(value) is float and math.isfinite(value)
            )
            return repr(value) if plain else self._constant(value)
        number, offset = self._place(value)
        root, name = self.roots[number], f"t{number}"
        if (value.shape, value.stride(), value.dtype, value.data_ptr()) == root:
            return name
        first, rest = divmod(offset, root.dtype.itemsize)
        self.repeatable &= value.dtype == root.dtype and rest == 0
        return f"{name}.as_strided({tuple(value.shape)}, {value.stride()}, {name}.storage_offset() + {first})"

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch, and write that down; on a GPU that of the compiled kernel, with addresses instead of tensors."""
        with _disable_current_modes():  # the interpreter computes with tensors of its own
            compiled = kernel[grid](*args, **options)
        if compiled is None:  # Triton's interpreter, which takes tensors
            named = [f"{name}={self.expression(x)}" for name, x in options.items()]
            given = ", ".join([*(self.expression(x) for x in args), *named])
            self.lines.append(f"{self._constant(kernel[grid])}({given})")
            return
        # Triton's launcher in C, without the Python around it, which encodes every descriptor again
        # in every call.
        run = compiled.run
        inside = (
            inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
        )
        scratch = run.global_scratch_size or run.profile_scratch_size
        self.repeatable &= torch.cuda.current_device() == self.index and not scratch
        encodings = iter(inside.get("tensordesc_meta", ()))
        given = []
        for value in (*args, *(options[name] for name in kernel.arg_names[len(args) :])):
            if isinstance(value, Tensor):
                given.append(self._address(value))
            elif isinstance(getattr(value, "base", None), Tensor):
                given.append(
                    f"*{self._constant(_Encoded(value, next(encodings)))}[{self._address(value.base)}]"
                )
            else:
                given.append(self.expression(value))
        sizes = (*grid, 1, 1)[:3]
        self.constants["stream"] = torch._C._cuda_getCurrentRawStream
        fixed: tuple[Any, ...] = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        arguments = ", ".join(given)
        if hasattr(run, "kernel_signature"):  # Triton 3.7
            fixed += (
                compiled.packed_metadata,
                None,
                None,
                None,
                None,
                None,
                run.arg_annotations,
                run.kernel_signature,
            )
            arguments = f"({arguments},)"
        else:
            fixed += None, None, compiled.packed_metadata, None, None, None
        launcher = self._constant(inside.get("launcher", run.launch))
        first = ", ".join(map(str, sizes))
        self.lines.append(
            f"{launcher}({first}, stream({self.index}), *{self._constant(fixed)}, {arguments})"
        )

    def _address(self, tensor: Tensor) -> str:
        number, offset = self._place(tensor)
        address = f"a{number}" if number < self.given else f"t{number}.data_ptr()"
        return address + (f" + {offset}" if offset else "")

    def _alike(self, args: tuple) -> str:
        """The condition that other arguments are such as these, but for their addresses."""
        given = [x for x in args if isinstance(x, Tensor)]
        self.constants["same"] = guards.TensorGuards(
            *given,
            dynamic_dims_sizes=[[*x.shape] for x in given],
            dynamic_dims_strides=[[*x.stride()] for x in given],
        ).check
        conditions = [f"same({', '.join(f't{number}' for number in range(self.given))})"]
        if self.kind == "cuda":
            conditions.append(f"{self._constant(torch._C._cuda_getDevice)}() == {self.index}")
        for name, x in zip(self.names, args, strict=True):
            # torch's dispatcher makes an equal one of a number or a string
            if not isinstance(x, Tensor):
                known = self._constant(x)
                conditions.append(
                    f"({name} is {known} or type({name}) is type({known}) and {name} == {known})"
                )
        return " and ".join(conditions)

    def program(self, result: Any, args: tuple) -> Callable | None:
        """Return a function of `args`, its source in its docstring, that makes `result` in this call; or None."""
        several = isinstance(result, list | tuple)
        returned = ", ".join(self.expression(x) for x in (result if several else [result]))
        if not self.repeatable:
            return None
        addresses = [f"a{number}" for number in range(self.given)]
        lines = [f"if not (known or {self._alike(args)}):", "    return NotImplemented"]
        lines += [f"a{number} = t{number}.data_ptr()" for number in range(self.given)]
        lines += [
            f"if not (known or ({' | '.join(addresses)}) & 15 == 0):",
            "    return NotImplemented",
        ]
        for number, line in enumerate(self.lines):
            done = [
                f"t{root}"
                for root, last in self.last_use.items()
                if last == number and root >= self.given
            ]
            # freed as early as by the function
            lines += [line, *([f"del {', '.join(done)}"] if done else [])]
        lines.append(f"return ({returned},)" if several else f"return {returned}")
        source = "\n    ".join([f"def program({', '.join(['known', *self.names])}):", *lines])
        self.constants["empty"] = getattr(guards, f"_empty_strided_{self.kind}")
        exec(source, self.constants)
        made = self.constants["program"]
        made.__doc__ = source
        made.kind, made.index, made.calls_torch = self.kind, self.index, self.calls_torch
        return made


class _Encoded(dict):
    """What Triton's launcher in C is given for a TensorDescriptor: address → the encoded descriptor, shape, strides.

    Encoded once per address: those of activations come back in every step, as the allocator gives
    them again.
    """

    def __init__(self, like: Any, encoding: Any) -> None:
        super().__init__()
        # without its tensor, which must not live on here
        self.like, self.encoding = _Descriptor(like, 0), encoding
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
