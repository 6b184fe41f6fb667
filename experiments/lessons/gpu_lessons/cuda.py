"""The same kernels in Triton, in CUDA C++ (`_cuda_kernels.cu`, compiled by NVRTC) and by torch.

Triton's are the lab's plain ones: `add_kernel` of `kernels/elementwise.py`, `forward_kernel` of
`kernels/softmax.py`, `grouped_kernel` of `kernels/matmul.py`, and the tuned step of
`_lesson_attention.py`. Those in CUDA C++ follow the same plans, without what only a Hopper GPU has,
and only for sizes without ragged ends.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lessons import _lesson_attention as lesson
from experiments.lessons.attention_steps import TUNED
from kernels import elementwise, matmul, softmax

from .kernel_forms import normal, size
from .lesson_bench import Bench

SOURCE = Path(__file__).parents[1].joinpath("_cuda_kernels.cu").read_text(encoding="utf-8")
# Lines of code with one statement each, in Triton and in CUDA C++: of a kernel and of the functions
# that it calls. A test counts them.
LINES = {"add": (8, 5), "softmax": (16, 33), "matmul": (51, 78), "attention": (38, 114)}
STEP = TUNED[64]


def add(bench: Bench) -> None:
    """Compare x + y in fp32."""
    # Two tensors of 128 MiB each are more than any L2 holds, so the sum is bound by memory.
    x, y = normal(bench, 2, size(8192, 8), 4096, dtype=torch.float32)
    triton = filling(partial(elementwise.launch_flat, elementwise.add_kernel, "add"))
    compare(bench, "add", triton, torch.add, (x, y), (x.numel() // 1024, 1), 256)


def row_softmax(bench: Bench) -> None:
    """Compare softmax of rows with 4,096 columns in fp32."""
    # Rows of 4,096 fit into the registers of a block, so each is read once.
    x = normal(bench, size(8192, 8), 4096, dtype=torch.float32)
    triton, by_torch = filling(softmax.launch_forward), partial(torch.softmax, dim=1)
    compare(bench, "softmax", triton, by_torch, (x,), (len(x), 1), 256)


def product(bench: Bench) -> None:
    """Compare products of square matrices, in tiles of 128 × 128."""
    n = size(4096, 128)
    a, b = normal(bench, 2, n, n)

    def launch(a: Tensor, b: Tensor, y: Tensor) -> None:
        # "tf32x3" matters only for fp32 inputs, and these are 16-bit.
        matmul.launch_pointers(a, b, None, y, None, "tf32x3")

    grid = (n // 128, n // 128)
    compare(bench, "matmul", filling(launch), torch.matmul, (a, b), grid, 256, n, n)


def attention(bench: Bench) -> None:
    """Compare causal attention, forward, of (heads, length, 64)."""
    heads, length = size(64, 1), size(2048, 128)

    def triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, _ = lesson.forward(STEP, q, k, v)
        return o

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # torch fuses it only for four dimensions
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    compare(
        bench,
        "attention",
        triton,
        by_torch,
        normal(bench, 3, heads, length, 64),
        (length // 64, heads),
        128,
        length,
    )


def filling(launch: Callable[..., None]) -> Callable[..., Tensor]:
    """Return `launch(*inputs, y)` as a function that returns y, which is like the first input."""

    def call(*inputs: Tensor) -> Tensor:
        # Each call makes its result, as torch's functions do, so all forms allocate alike.
        y = torch.empty_like(inputs[0])
        launch(*inputs, y)
        return y

    return call


def compare(
    bench: Bench,
    name: str,
    triton: Callable[..., Tensor],
    by_torch: Callable[..., Tensor],
    inputs: Any,
    grid: tuple[int, int],
    block: int,
    *sizes: int,
) -> None:
    """Add the rows of a kernel: in Triton, in CUDA C++ and by torch.

    Args:
        bench: bench of the experiment.
        name: name of the kernel in SOURCE, and in LINES.
        triton: function of the inputs that launches Triton's kernel.
        by_torch: function of the inputs that computes the same by torch.
        inputs: tensors that all three take.
        grid: blocks of the kernel in CUDA C++, in two dimensions.
        block: threads of each.
        sizes: numbers that the kernel in CUDA C++ takes after its tensors.
    """
    part = f"cuda-{name}"
    # The reference is torch's own function in float64.
    exact = by_torch(*(x.double() for x in inputs))
    in_triton, in_cpp = LINES[name]
    bench.form(part, f"Triton, {in_triton} lines", partial(triton, *inputs), exact)
    variant = f"CUDA C++, {in_cpp} lines"
    if bench.device.type == "cuda":
        compiled = in_cuda(name)

        def launch(*tensors: Tensor) -> None:
            compiled((*grid, 1), (block, 1, 1), [*tensors, *sizes])

        bench.form(part, variant, partial(filling(launch), *inputs), exact)
    else:
        # A row that says why it is empty keeps the table complete without a GPU.
        bench.run.add(variant, {"status": "needs a GPU"}, part=part)
    bench.form(part, "torch", partial(by_torch, *inputs), exact)


def in_cuda(name: str) -> Callable[..., None]:
    """Return the kernel of SOURCE with this name, compiled for this GPU."""
    from torch.utils import cpp_extension

    # torch refuses to compile without CUDA's headers, which SOURCE does not need.
    cuda_home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = "none"
    try:
        return torch.cuda._compile_kernel(SOURCE, name)
    finally:
        cpp_extension.CUDA_HOME = cuda_home


IN_CUDA = {
    "cuda-add": add,
    "cuda-softmax": row_softmax,
    "cuda-matmul": product,
    "cuda-attention": attention,
}
