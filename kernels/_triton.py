"""The one place that knows where Triton kernels can run: on a GPU, in Triton's interpreter, or nowhere.

Triton decides when a kernel is *decorated* whether it will be compiled or interpreted, by reading the environment
variable TRITON_INTERPRET, and its own library is decorated when Triton is imported. So the variable has to be set
before that. This module does not import Triton, and the public functions import their kernels when they first need
them: importing a package of kernels decides nothing.

- On a CUDA tensor the kernels are compiled.
- With TRITON_INTERPRET=1 they run, slowly, in Triton's interpreter: the way the tests run on a CPU. Its bfloat16
  arithmetic is wrong (it works on bit patterns), so bfloat16 is refused there.
- Otherwise (a CPU, or no Triton at all) `runs_triton` is false and public functions use their plain-torch reference.

`kernels._compile` compiles them without a GPU, for the compiler's report.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch


@functools.cache
def installed() -> bool:
    """Whether there is a Triton; it exists for Linux only."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels are interpreted: TRITON_INTERPRET, read as Triton reads it."""
    return installed() and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def runs_triton(tensor: torch.Tensor) -> bool:
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


@functools.cache
def _capability(index: int | None) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


PRETENDED_SMS = 132  # of an H100
_pretended: int | None = None  # compute capability that `_compile.compile_for` compiles for, say 90


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """SMs of a CUDA device, for grids of a fixed size; a few when interpreting, where each program costs the same."""
    if _pretended is not None:
        return PRETENDED_SMS
    return 3 if interpreted() else _multiprocessors(device.index)


def generation(index: int | None = None) -> str:
    """GPU generation of a CUDA device as `sm_90`; "interpreter" when kernels are interpreted."""
    if _pretended is not None:
        return f"sm_{_pretended}"
    return "interpreter" if interpreted() else _capability(index)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own are for kernels, and cost microseconds when a launcher calls them."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below n ≥ 1."""
    return 1 << (n - 1).bit_length()


compiled: list[Any] | None = None  # kernels compiled within `compile_only`


@contextlib.contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Within, `launch` compiles without running; yields the growing list of Triton's compiled kernels."""
    global compiled
    compiled = []
    try:
        yield compiled
    finally:
        compiled = None

