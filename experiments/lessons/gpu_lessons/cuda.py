"""The same kernels in Triton, in CUDA C++ (`_cuda_kernels.cu`, compiled by NVRTC when they run) and by torch.

Triton's are the lab's plain ones: `add_kernel` of `kernels/elementwise.py`, `forward_kernel` of `kernels/softmax.py`,
`grouped_kernel` of `kernels/matmul.py`, and the tuned step of `_lesson_attention.py`. Those in CUDA C++ follow the same
plans, without what only a Hopper GPU has, and only for sizes without ragged ends.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lessons import _lesson_attention as lesson
from experiments.lessons.attention_steps import TUNED
from kernels import elementwise, matmul, softmax

from .bench import Bench
from .forms import normal, size

SOURCE = Path(__file__).parents[1].joinpath("_cuda_kernels.cu").read_text(encoding="utf-8")
SHARED = ("matmul", "attention")  # which have the section about tensor cores in common
STEP = lesson.Step("tuned tiles", **TUNED[64], skip=True, split=True)


def add(bench: Bench) -> None:
    """x + y in fp32."""
    x, y = normal(bench, 2, size(8192, 8), 4096, dtype=torch.float32)
    triton = filling(partial(elementwise.launch_flat, elementwise.add_kernel, "add"))
    compare(bench, "add", elementwise.add_kernel, triton, torch.add, (x, y), (x.numel() // 1024, 1), 256)


def row_softmax(bench: Bench) -> None:
    """Of 4,096 columns in fp32."""
    x = normal(bench, size(8192, 8), 4096, dtype=torch.float32)
    triton, by_torch = filling(softmax.launch_forward), partial(torch.softmax, dim=1)
    compare(bench, "softmax", softmax.forward_kernel, triton, by_torch, (x,), (len(x), 1), 256)


def product(bench: Bench) -> None:
    """Of square matrices, in tiles of 128 × 128."""
    n = size(4096, 128)
    a, b = normal(bench, 2, n, n)
    triton = filling(lambda a, b, y: matmul.launch_pointers(a, b, None, y, None, "tf32x3"))
    compare(bench, "matmul", matmul.grouped_kernel, triton, torch.matmul, (a, b), (n // 128, n // 128), 256, n, n)


def attention(bench: Bench) -> None:
    """Causal, forward, of (heads, length, 64)."""
    heads, length = size(64, 1), size(2048, 128)
    qkv, by_torch = normal(bench, 3, heads, length, 64), partial(F.scaled_dot_product_attention, is_causal=True)
    compare(bench, "attention", lesson.forward_kernel, lambda q, k, v: lesson.forward(STEP, q, k, v)[0], by_torch, qkv,
            (length // 64, heads), 128, length)  # fmt: skip


def filling(launch: Callable[..., None]) -> Callable[..., Tensor]:
    """`launch(*inputs, y)` as a function that returns y, which is like the first input."""

    def call(*inputs: Tensor) -> Tensor:
        launch(*inputs, y := torch.empty_like(inputs[0]))
        return y

    return call


def compare(bench: Bench, name: str, kernel: Any, triton: Callable[..., Tensor], by_torch: Callable[..., Tensor],
            inputs: Any, grid: tuple[int, int], block: int, *sizes: int) -> None:  # fmt: skip
    """Add the rows of a kernel: in Triton, in CUDA C++, launched with this grid and block, and by torch."""
    part, exact = f"cuda-{name}", by_torch(*(x.double() for x in inputs))
    bench.form(part, f"Triton, {triton_lines(kernel)} lines", lambda: triton(*inputs), exact)
    variant = f"CUDA C++, {cuda_lines(name)} lines"
    if bench.device.type == "cuda":
        compiled = in_cuda(name)
        run = filling(lambda *tensors: compiled((*grid, 1), (block, 1, 1), [*tensors, *sizes]))
        bench.form(part, variant, lambda: run(*inputs), exact)
    else:
        bench.run.add(variant, {"status": "needs a GPU"}, part=part)
    bench.form(part, "torch", lambda: by_torch(*inputs), exact)


def in_cuda(name: str) -> Callable[..., None]:
    """The kernel of SOURCE, compiled for this GPU."""
    from torch.utils import cpp_extension

    with patch.object(cpp_extension, "CUDA_HOME", "none"):  # torch asks for one, for headers that SOURCE does not need
        return torch.cuda._compile_kernel(SOURCE, name)


def code_lines(text: str) -> int:
    """Count the lines of CUDA C++ or of Python that are not empty and hold more than a comment."""
    return len(re.findall(r"(?m)^ *[^ /#\n]", text))


def cuda_lines(name: str) -> int:
    """Count those of a kernel in SOURCE, with what matmul and attention share."""
    names = [name] + ["tensor cores"] * (name in SHARED)
    return sum(code_lines(SOURCE.partition(f"// ==== {each} ====")[2].partition("// ====")[0]) for each in names)


def triton_lines(kernel: Any) -> int:
    """Count those of a kernel in Triton and of all functions in Triton that it calls, without docstrings."""
    found = [kernel]
    for each in found:  # grows meanwhile
        called = map(each.fn.__globals__.get, each.fn.__code__.co_names)
        found += [one for one in called if isinstance(one, type(kernel)) and one not in found]
    return sum(code_lines(re.sub(r'(?s)""".*?"""', "", inspect.getsource(each.fn))) for each in found)


IN_CUDA = {"cuda-add": add, "cuda-softmax": row_softmax, "cuda-matmul": product, "cuda-attention": attention}
