"""How an operation reaches its kernels: at once in eager mode, as a node of the graph under torch.compile.

Where they run. Triton decides when a kernel is *decorated* whether it will be compiled or
interpreted, by reading the environment variable TRITON_INTERPRET, and its own library is decorated
when Triton is imported, here. So the variable has to be set before this module is imported.

- On a CUDA tensor the kernels are compiled.
- With TRITON_INTERPRET=1 they run, slowly, in Triton's interpreter: the way the tests run on a CPU.
  Its bfloat16 arithmetic is wrong (it works on bit patterns), so bfloat16 is refused there.
- Otherwise (a CPU, or no Triton at all) `runs_triton` is false and public functions use their
  plain-torch reference. Without Triton `@triton.jit` leaves a function as it is, and nothing is
  ever launched.

How they are called. An `operator` is a function of tensors and options that allocates its results
and launches kernels. It is registered with torch, which is how torch.compile, fake tensors and
dispatch modes (FLOP counters, selective checkpointing) meet it. Eager calls do without the
dispatcher, and without most of the function: `_recorder.py` writes down what it does with one set
of shapes, strides, dtypes, alignments and options, and repeats that. So the function must depend on
nothing but its arguments' descriptions and the values of its options; a context that changes what
it does calls `forget`. Where the recorder is missing, every call goes through torch's dispatcher.

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
    """Whether there is a Triton; it exists for Linux only."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels are interpreted: TRITON_INTERPRET, read as Triton reads it."""
    return installed() and os.environ.get("TRITON_INTERPRET", "").lower() in (
        "1",
        "true",
        "on",
        "yes",
        "y",
    )


if installed():
    import triton
    import triton.language as tl
else:

    class _Absent:
        """Stands for a module or a type; any attribute is again one."""

        def __getattr__(self, name: str):
            return lambda function=None, **options: (
                function if function is not None else (lambda f: f)
            )

    triton = tl = _Absent()

if installed() and not interpreted():
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:

    def gdc_wait() -> None:
        """Wait until the kernel before has ended, where this one was launched with `launch_pdl=True`."""

    def gdc_launch_dependents() -> None:
        """Let such a kernel start, as soon as all programs of this one have called this."""


# Hints for the L2. STREAMED: nobody reads this again, so the line may leave first. It pays where a
# kernel only reads, since lines that other kernels wrote are then not pushed out to memory while it
# runs; kernels that write as much as they read were 1 to 3 % slower with it. KEPT: this program
# will read the line once more.
STREAMED = tl.constexpr("evict_first")
KEPT = tl.constexpr("evict_last")


def runs_triton(tensor: Tensor) -> bool:
    """Whether a kernel launched on this tensor would run: compiled on CUDA, or interpreted on a CPU."""
    if interpreted():
        if tensor.dtype is torch.bfloat16:
            raise ValueError(
                f"Triton's interpreter computes bfloat16 wrongly (input on {tensor.device}): "
                "use float32 or float16, or unset TRITON_INTERPRET"
            )
        return True
    return tensor.is_cuda and installed()


def check_runs(device: torch.device) -> None:
    """For what has kernels and no reference to fall back on.

    Raises:
        ValueError: kernels do not run on this device; says what to do.
    """
    if not (interpreted() or (device.type == "cuda" and installed())):
        raise ValueError(
            f"these are Triton kernels, and none run on {device.type} as it is: run on a GPU, or begin the command "
            "with TRITON_INTERPRET=1 for Triton's interpreter, where times say nothing"
        )


PRETENDED_SMS = 132  # of an H100
_pretended: int | None = None  # compute capability that `_compile.compile_for` compiles for, say 90
_properties = functools.cache(torch.cuda.get_device_properties)


def multiprocessors(device: torch.device) -> int:
    """SMs of a CUDA device, for grids of a fixed size; a few when interpreting, where each program costs the same."""
    if _pretended is not None:
        return PRETENDED_SMS
    return 3 if interpreted() else _properties(device.index).multi_processor_count


def generation(index: int | None = None) -> str:
    """GPU generation of a CUDA device as `sm_90`; "interpreter" when kernels are interpreted."""
    if _pretended is not None:
        return f"sm_{_pretended}"
    return (
        "interpreter"
        if interpreted()
        else f"sm_{_properties(index).major}{_properties(index).minor}"
    )


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own are for kernels, and cost microseconds when a launcher calls them."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


compiled: list[Any] | None = None  # kernels compiled within `compile_only`


@contextlib.contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Within, `launch` compiles without running; yields the growing list of Triton's compiled kernels."""
    global compiled
    compiled = []
    forget()
    try:
        yield compiled
    finally:
        compiled = None


class _Thread(threading.local):
    """What a thread is doing."""

    looks = False  # whether only what results look like is asked for
    traced = False  # whether launches become nodes of a graph
    recorder: Any = None  # of the call that is being recorded


_thread = _Thread()
_libraries: dict[str, torch.library.Library] = {}  # operator → what torch knows of it
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


FORCED: dict[str, Any] = {}  # kernel → launch parameters to use whatever the rule says


@contextlib.contextmanager
def forced(**choices: Any) -> Iterator[None]:
    """Use these launch parameters, by kernel name, within: for tests and measurements.

    Calls are recorded anew.
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
    """Return the source of every program there is."""
    return [
        f"# {name}\n{found.__doc__}"
        for name, kept in _kept.items()
        for found in {*kept.values()}
        if found
    ]


def discard() -> None:
    """What this thread records is not what the next call does: for searches, which launch in order to measure."""
    if _thread.recorder is not None:
        _thread.recorder.discarded = True


def idle(x: Tensor) -> bool:
    """Whether an operator has nothing to compute: x is empty, or only what the results look like is asked for."""
    return _thread.looks or x.numel() == 0


class Capped(Exception):
    """A launch with `maxnreg`, which Inductor does not know."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`; every launch in this package goes through here."""
    if compiled is not None:
        compiled.append(kernel.warmup(*args, grid=grid, **options))
        return
    if _thread.traced:
        if "maxnreg" in options:
            raise Capped
        torch.library.wrap_triton(kernel)[grid](*args, **options)
        return
    run = (
        kernel[grid]
        if _thread.recorder is None
        else functools.partial(_thread.recorder.launch, kernel, grid)
    )
    tensors = (getattr(x, "base", x) for x in args)  # a descriptor's tensor is its base
    index = next((x.get_device() for x in tensors if isinstance(x, Tensor)), -1)  # -1 is a CPU's
    # Triton launches on torch's current device, wherever the tensors are
    with torch.cuda.device(index):
        run(*args, **options)


def operator(
    name: str,
    check: Callable[..., None] | None = None,
    mutates_args: tuple[str, ...] = (),
    *,
    opaque: bool = False,
) -> Callable:
    """Decorator: makes a function the operator `distlab_kernels::name` of torch, called as this module says.

    Args:
        name: of the operator.
        check: called with the arguments before anything is done with such for the first time;
            raises for what is wrong.
        mutates_args: names of the arguments that are written to.
        opaque: whether torch.compile calls the operator instead of launching its kernels from its
            own code: where the function reads addresses, encodes descriptors of tensors, or
            measures. Calls of lengths that torch.compile keeps variable are opaque too, those whose
            launch caps registers, and all calls on a CPU.

    The function is annotated as `torch.library.infer_schema` wants it and called with positional
    arguments. For tensors without data, of simulations and torch.compile, it is called too: it then
    returns once the results are allocated, where it asks `idle`.
    """

    def decorate(function: Callable) -> Callable:
        kept = _kept[name] = {}

        def perform(otherwise: Callable, args: tuple) -> Any:
            program = kept.get(len(args))
            result = program(False, *args) if program else NotImplemented
            if result is NotImplemented:
                module = recorder()
                result = (
                    module.run(function, check, kept, args, otherwise)
                    if module
                    else otherwise(*args)
                )
            for position in mutated:
                torch.autograd.graph.increment_version(args[position])
            return result

        def looks(*args: Any) -> Any:
            with within(looks=True):
                return function(*args)

        def to_torch(*args: Any) -> Any:
            if check is not None:
                check(*args)
            return registered(*args)

        # Not by `torch.library.custom_op`, whose four layers of Python take 6 µs of a CPU more in
        # every call.
        if name in _libraries:  # the operator's module is loaded again
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
        mutated = [list(inspect.signature(function).parameters).index(x) for x in mutates_args]

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return to_torch(*args)
            if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
                # The recorder is a mode, too: then another operator calls this one.
                return (function if _thread.recorder else to_torch)(*args)
            return perform(to_torch, args)

        return call

    return decorate


def _as_launches(
    function: Callable, mode: FunctionalTensorMode, op: Any, types: Any, args: tuple, kwargs: dict
) -> Any:
    """What torch.compile traces of an operator: its allocations and launches, which Inductor then plans and writes."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    fixed = all(isinstance(size, int) for x in tensors for size in (*x.shape, *x.stride()))
    if fixed and all(x.is_cuda and x.numel() for x in tensors):
        with contextlib.suppress(Capped), mode, within(traced=True):
            return function(*args, **kwargs)
    return mode.__torch_dispatch__(op, types, args, kwargs)


class Function(torch.autograd.Function):
    """An autograd Function whose gradients cannot be differentiated: `backward` refuses create_graph=True.

    torch's `once_differentiable` returns such gradients with a graph that ends in an error, but
    only if the upstream gradient requires one, which a loss's does not; and `torch.autograd.grad`,
    which walks only where a path leads to its inputs, never meets that error. So this refuses at
    once.

    Raises:
        RuntimeError: from `backward`, when it is called to make a graph.
    """

    def __init_subclass__(cls) -> None:
        backward = cls.backward

        @functools.wraps(backward)
        def first_order(ctx: Any, *upstream: Tensor | None) -> Any:
            # compiled code refuses by itself
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{cls.__name__} was called with create_graph=True, but the gradient of its "
                    "gradient is not defined: write it in torch's own operations where that is needed"
                )
            return backward(ctx, *upstream)

        cls.backward = staticmethod(first_order)


def apply(function: type, *args: Any) -> Any:
    """`function.apply(*args)`, without what torch does before in Python for Functions with `setup_context`."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)
