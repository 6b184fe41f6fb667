"""Path from an operation to its kernels: at once if eager, as a graph node under torch.compile.

Where kernels run. Triton reads the environment variable TRITON_INTERPRET when a kernel is
*decorated*, and decides then whether it will be compiled or interpreted. Its own library is
decorated when Triton is imported, which happens here. So the variable must be set before this
module is imported.

- On a CUDA tensor the kernels are compiled.
- With TRITON_INTERPRET=1 they run, slowly, in Triton's interpreter. So the tests run on a CPU. Its
  bfloat16 arithmetic is wrong (it works on bit patterns), so bfloat16 is refused there.
- Otherwise (a CPU, or no Triton) `runs_triton` is false, and public functions use their plain-torch
  reference. Without Triton, `@triton.jit` leaves a function as it is, and nothing is ever launched.

How operations are called. An `operator` is a function of tensors and options that allocates its
results and launches kernels. It is registered with torch, so that torch.compile, fake tensors and
dispatch modes (FLOP counters, selective checkpointing) see it. There are four ways of a call:

1. torch.compile, dispatch modes, and transforms such as vmap: through torch's dispatcher.
2. An eager call that is like an earlier one: its recorded program runs. It skips the dispatcher
   and most of the function. `_recorder.py` explains this and how to switch it off.
3. An eager call of a new kind: the function runs as it is written, and is recorded.
4. Without the recorder, eager calls also go through torch's dispatcher.

Because of the second way, the function must depend on nothing but the descriptions of its tensors
(shapes, strides, dtypes, alignments) and the values of its options. A context that changes what it
does must call `forget`.

`_compile.py` compiles kernels without a GPU, for the compiler's report.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed. It exists for Linux only."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether kernels are interpreted, from TRITON_INTERPRET as Triton reads it."""
    value = os.environ.get("TRITON_INTERPRET", "").lower()
    return installed() and value in ("1", "true", "on", "yes", "y")


if installed():
    import triton
    import triton.language as tl
else:

    def _unchanged(function: Any = None, **options: Any) -> Any:
        """Return the argument: as a decorator, with or without options, change nothing."""
        return _unchanged if function is None else function

    class _Absent:
        """Substitute for the modules of Triton. Every attribute is `_unchanged`."""

        def __getattr__(self, name: str) -> Callable:
            return _unchanged

    triton = tl = _Absent()

if installed() and not interpreted():
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:

    def gdc_wait() -> None:
        """Wait until the kernel before has ended, if this one has `launch_pdl=True`."""

    def gdc_launch_dependents() -> None:
        """Let the next such kernel start, once all programs of this one have called this."""


# Hints for the L2.
# STREAMED: the line is not read again and may leave first. It pays where a kernel only reads, since
# lines that other kernels wrote are then not pushed out to memory while it runs. Kernels that write
# as much as they read were 1 to 3 % slower with it.
# KEPT: this program will read the line once more.
STREAMED = tl.constexpr("evict_first")
KEPT = tl.constexpr("evict_last")


def runs_triton(tensor: Tensor) -> bool:
    """Return whether a kernel can run on this tensor: compiled on CUDA, or interpreted on a CPU.

    Raises:
        ValueError: kernels are interpreted, and the tensor is bfloat16.
    """
    if interpreted():
        if tensor.dtype is torch.bfloat16:
            raise ValueError(
                f"Triton's interpreter computes bfloat16 wrongly (input on {tensor.device}): "
                "use float32 or float16, or unset TRITON_INTERPRET"
            )
        return True
    return tensor.is_cuda and installed()


def check_runs(device: torch.device) -> None:
    """Raise unless kernels run on this device, for operations without a plain-torch reference.

    Raises:
        ValueError: kernels do not run on the device. The error says what to do.
    """
    if not (interpreted() or (device.type == "cuda" and installed())):
        raise ValueError(
            f"these are Triton kernels, and none run on {device.type} as it is: run on a GPU, "
            "or begin the command with TRITON_INTERPRET=1 for Triton's interpreter, "
            "where times say nothing"
        )


PRETENDED_SMS = 132  # multiprocessors of an H100
# Compute capability that `_compile.compile_for` compiles for, for example 90.
_pretended: int | None = None
_properties = functools.cache(torch.cuda.get_device_properties)


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device, for grids of a fixed size."""
    if _pretended is not None:
        return PRETENDED_SMS
    if interpreted():
        return 3  # few, because the interpreter runs one program after the other
    return _properties(device.index).multi_processor_count


def generation(index: int | None = None) -> str:
    """Return the generation of a CUDA device as `sm_90`, or "interpreter" in the interpreter.

    Args:
        index: device number, or None for the current device.
    """
    if _pretended is not None:
        return f"sm_{_pretended}"
    if interpreted():
        return "interpreter"
    properties = _properties(index)
    return f"sm_{properties.major}{properties.minor}"


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up.

    Triton's own function is for kernels, and costs microseconds when a launcher calls it.
    """
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


compiled: list[Any] | None = None  # kernels that were compiled within `compile_only`


@contextlib.contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Let `launch` compile kernels without running them, within this context.

    Yields:
        A list of Triton's compiled kernels, to which every launch appends one.
    """
    global compiled
    compiled = []
    forget()
    try:
        yield compiled
    finally:
        compiled = None


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        looks: whether only the shapes and dtypes of results are asked for.
        traced: whether launches become nodes of a graph.
        recorder: `_recorder._Recorder` of the call that is being recorded, or None.
    """

    looks = False
    traced = False
    recorder: Any = None


_thread = _Thread()
_libraries: dict[str, torch.library.Library] = {}  # operator → its registration with torch
_kept: dict[str, dict] = {}  # operator → description of a call → its program, see `_recorder.run`


@contextlib.contextmanager
def within(**states: Any) -> Iterator[None]:
    """Set attributes of this thread's `_Thread` within this context."""
    before = {name: getattr(_thread, name) for name in states}
    vars(_thread).update(states)
    try:
        yield
    finally:
        vars(_thread).update(before)


@functools.cache
def recorder() -> ModuleType | None:
    """Return the module `_recorder`, or None without it or the parts of torch that it needs.

    The first call of an operator imports it.
    """
    try:
        from . import _recorder
    except ImportError:
        return None
    return _recorder


def forget() -> None:
    """Drop all recorded programs."""
    for programs in _kept.values():
        programs.clear()


FORCED: dict[str, Any] = {}  # kernel → launch parameters to use instead of those of the rule


@contextlib.contextmanager
def forced(**choices: Any) -> Iterator[None]:
    """Use these launch parameters within this context, for tests and measurements.

    Recorded programs are dropped before and after.

    Args:
        choices: launch parameters by the name of a kernel.
    """
    before = dict(FORCED)
    FORCED.update(choices)
    forget()
    try:
        yield
    finally:
        FORCED.clear()
        FORCED.update(before)
        forget()


def programs() -> list[str]:
    """Return the source of every recorded program, after a line with its operator."""
    sources = []
    for name, kept in _kept.items():
        for found in set(kept.values()):
            if found is not None:
                sources.append(f"# {name}\n{found.__doc__}")
    return sources


def discard() -> None:
    """Do not keep the recording of the current call, whose launches are not those of the next call.

    Searches for launch parameters call this, because they launch in order to measure.
    """
    if _thread.recorder is not None:
        _thread.recorder.discarded = True


def idle(x: Tensor) -> bool:
    """Return whether an operator has nothing to compute after it has allocated its results.

    That is so if x is empty, or if only the shapes and dtypes of results are asked for.
    """
    return _thread.looks or x.numel() == 0


class Capped(Exception):
    """Signal that a launch has the option `maxnreg`, which Inductor does not know."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel. Every launch in this package goes through here.

    Args:
        kernel: Triton kernel.
        grid: number of programs along up to three dimensions.
        args: positional arguments of the kernel: tensors, descriptors and numbers.
        options: constexpr arguments of the kernel, and Triton's own options such as num_warps.
    """
    if compiled is not None:  # within `compile_only`
        compiled.append(kernel.warmup(*args, grid=grid, **options))
        return
    if _thread.traced:  # torch.compile
        if "maxnreg" in options:
            raise Capped
        torch.library.wrap_triton(kernel)[grid](*args, **options)
        return
    if _thread.recorder is None:
        run = kernel[grid]
    else:
        run = functools.partial(_thread.recorder.launch, kernel, grid)
    # Triton launches on torch's current device, not on that of the tensors.
    with torch.cuda.device(_device_of(args)):
        run(*args, **options)


def _device_of(args: tuple) -> int:
    """Return the CUDA device number of the first tensor in a kernel's arguments; −1 for a CPU."""
    for x in args:
        tensor = getattr(x, "base", x)  # a descriptor's tensor is its base
        if isinstance(tensor, Tensor):
            return tensor.get_device()
    return -1


def operator(
    name: str,
    check: Callable[..., None] | None = None,
    mutates_args: tuple[str, ...] = (),
    *,
    opaque: bool = False,
) -> Callable:
    """Return a decorator that makes a function the operator `distlab_kernels::name` of torch.

    The head of this module says how operators are called. The function must have annotations as
    `torch.library.infer_schema` needs them, and is called with positional arguments. It is also
    called for tensors without data, of simulations and torch.compile. It must then return once it
    has allocated its results, which it finds out by `idle`.

    Args:
        name: name of the operator.
        check: function that is called with the arguments before the first call of each kind, and
            raises if they do not fit, or None.
        mutates_args: names of the arguments that are written to.
        opaque: whether torch.compile calls the operator, instead of launching its kernels from its
            own code. It must be true if the function reads addresses, encodes descriptors of
            tensors, or measures. Three kinds of calls are always opaque: with lengths that
            torch.compile keeps variable, with launches that cap registers, and on a CPU.
    """

    def decorate(function: Callable) -> Callable:
        kept = _kept[name] = {}

        parameters = list(inspect.signature(function).parameters)
        mutated = [parameters.index(argument) for argument in mutates_args]

        def perform(otherwise: Callable, args: tuple) -> Any:
            """Run the program that ran last, if the call is one for it, or let the recorder choose.

            otherwise: function to call instead, if the call cannot have a program.
            """
            program = kept.get(len(args))
            result = program(False, *args) if program else NotImplemented
            if result is NotImplemented:
                module = recorder()
                if module is None:
                    result = otherwise(*args)
                else:
                    result = module.run(function, check, kept, args, otherwise)
            for position in mutated:
                # Autograd must notice that a tensor was written to.
                torch.autograd.graph.increment_version(args[position])
            return result

        def looks(*args: Any) -> Any:
            """Return results without data, for fake tensors."""
            with within(looks=True):
                return function(*args)

        def to_torch(*args: Any) -> Any:
            """Call the operator through torch's dispatcher."""
            if check is not None:
                check(*args)
            return registered(*args)

        # Not by `torch.library.custom_op`, whose four layers of Python cost 6 µs more per call.
        if name in _libraries:  # the operator's module is being loaded again
            _libraries[name]._destroy()
        library = _libraries[name] = torch.library.Library("distlab_kernels", "FRAGMENT")
        library.define(
            name + torch.library.infer_schema(function, mutates_args=mutates_args),
            tags=torch.Tag.pt2_compliant_tag,
        )
        library.impl(name, lambda *args: perform(function, args), "CompositeExplicitAutograd")
        registered = getattr(torch.ops.distlab_kernels, name).default
        torch.library.register_fake(registered, looks, lib=library)
        if not opaque:
            torch.library.register_torch_dispatch(
                registered,
                FunctionalTensorMode,
                functools.partial(_as_launches, function),
                lib=library,
            )

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return to_torch(*args)
            if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
                # The recorder is also a mode. If it is active, another operator calls this one, and
                # what this one does belongs to that operator's program.
                if _thread.recorder:
                    return function(*args)
                return to_torch(*args)
            return perform(to_torch, args)

        return call

    return decorate


def _as_launches(
    function: Callable, mode: FunctionalTensorMode, op: Any, types: Any, args: tuple, kwargs: dict
) -> Any:
    """Trace an operator for torch.compile.

    Where that is possible, the graph gets its allocations and launches, which Inductor then plans
    and writes into its own code. Otherwise it gets a call of the operator.
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    sizes = [size for x in tensors for size in (*x.shape, *x.stride())]
    is_fixed = all(isinstance(size, int) for size in sizes)  # no lengths that stay variable
    if is_fixed and all(x.is_cuda and x.numel() for x in tensors):
        with contextlib.suppress(Capped), mode, within(traced=True):
            return function(*args, **kwargs)
    return mode.__torch_dispatch__(op, types, args, kwargs)


class Function(torch.autograd.Function):
    """Autograd Function that can be differentiated once: backward refuses `create_graph=True`.

    torch's `once_differentiable` returns such gradients with a graph that ends in an error. But it
    does so only if the upstream gradient requires a gradient, which that of a loss does not. And
    `torch.autograd.grad` visits only paths that lead to its inputs, so it never meets that error.
    This class refuses at once.

    Raises:
        RuntimeError: from `backward`, when it is called to make a graph.
    """

    def __init_subclass__(cls) -> None:
        backward = cls.backward

        @functools.wraps(backward)
        def first_order(ctx: Any, *upstream: Tensor | None) -> Any:
            # Compiled code refuses by itself.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{cls.__name__} was called with create_graph=True, but the gradient of its "
                    "gradient is not defined: "
                    "write it in torch's own operations where that is needed"
                )
            return backward(ctx, *upstream)

        cls.backward = staticmethod(first_order)


def apply(function: type, *args: Any) -> Any:
    """Return `function.apply(*args)`, without the Python code that torch runs before.

    torch needs that code for Functions with `setup_context`, and for functorch transforms.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)
