"""Element-wise operations: vector addition, the first kernel to read, and GeLU, forward and backward.

Math:  add z = x + y.   GeLU y = x·sigmoid(2u), u = √(2/π)·(x + 0.044715·x³), which is x/2·(1 + tanh u).
       dGeLU/dx = s + x·s·(1 − s)·2u′, s = sigmoid(2u), u′ = √(2/π)·(1 + 3·0.044715·x²).

How a kernel is laid out: n elements are cut into blocks of BLOCK. Program i of a one-dimensional
grid owns elements [i·BLOCK, (i + 1)·BLOCK); the mask keeps the last program within the tensor. Each
thread of a program loads 16 bytes at a time, neighbours next to each other, so that a warp's
request is a few whole lines of memory.

Shapes: any; x and y alike. Bytes: each input and the output once. FLOPs: 1 (add), about 10 (GeLU)
per element. Saved for backward: nothing (add), x (GeLU). Arithmetic in fp32, results in the input's
dtype.
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import Function, apply, cdiv, tl, triton
from ._rows import Launch, check, check_like, chosen, load_fp32, store_rounded
from .cost import Cost

# In Triton's interpreter a constexpr times a tensor is a constexpr: the tensor stands on the left
# in what follows.
GELU_DOUBLED = tl.constexpr(2 * reference.GELU_SCALE)
GELU_CUBIC = tl.constexpr(reference.GELU_CUBIC)
# Beyond this GeLU is x or 0 and its derivative 1 or 0 in fp32, while x² in the derivative could
# still overflow.
GELU_FLAT = tl.constexpr(30.0)
FLAT = Launch(block=4096, warps=16)  # 8 elements per thread: one load of 16 bytes in bf16


@triton.jit
def add_kernel(x_ptr, y_ptr, z_ptr, count, BLOCK: tl.constexpr):
    """z = x + y on one block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(
        z_ptr + offsets,
        (x.to(tl.float32) + y.to(tl.float32)).to(z_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def gelu_of(x):
    """GeLU of fp32 values. The exponential may overflow: x/∞ is the 0 that is wanted."""
    doubled = (x + x * x * x * GELU_CUBIC) * GELU_DOUBLED
    return x / (1.0 + tl.exp(-doubled))


@triton.jit
def gelu_slope(x):
    """dGeLU/dx of fp32 values."""
    # comparisons let NaN through
    x = tl.where(x > GELU_FLAT, GELU_FLAT, tl.where(x < -GELU_FLAT, -GELU_FLAT, x))
    s = tl.sigmoid((x + x * x * x * GELU_CUBIC) * GELU_DOUBLED)
    return s + x * s * (1.0 - s) * GELU_DOUBLED * (1.0 + x * x * GELU_CUBIC * 3.0)


@triton.jit
def gelu_forward_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """y = GeLU(x) on one block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = load_fp32(x_ptr + offsets, inside)
    store_rounded(y_ptr + offsets, gelu_of(x), inside)


@triton.jit
def gelu_backward_kernel(dy_ptr, x_ptr, dx_ptr, count, BLOCK: tl.constexpr):
    """dx = dy·GeLU′(x) on one block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = load_fp32(x_ptr + offsets, inside)
    dy = load_fp32(dy_ptr + offsets, inside)
    store_rounded(dx_ptr + offsets, dy * gelu_slope(x), inside)


def launch_flat(kernel, name: str, *tensors: Tensor, default: Launch = FLAT) -> None:
    """Launch an element-wise kernel over contiguous tensors of equal size, nothing empty."""
    count = tensors[0].numel()
    launch = chosen(name, default)
    launch.start(kernel, (cdiv(count, launch.block),), *tensors, count)


@_dispatch.operator("add")
def add_op(x: Tensor, y: Tensor) -> Tensor:
    """x, y (…, D) → x + y, contiguous."""
    x, y = x.contiguous(), y.contiguous()
    z = torch.empty_like(x)
    if _dispatch.idle(x):
        return z
    if not _dispatch.runs_triton(x):
        return z.copy_(reference.add(x, y))
    launch_flat(add_kernel, "add", x, y, z, default=Launch(block=2048, warps=8))
    return z


@_dispatch.operator("gelu_forward")
def gelu_forward_op(x: Tensor) -> Tensor:
    """x (…, D) → GeLU(x), contiguous."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if _dispatch.idle(x):
        return y
    if not _dispatch.runs_triton(x):
        return y.copy_(reference.gelu(x))
    launch_flat(gelu_forward_kernel, "gelu", x, y)
    return y


@_dispatch.operator("gelu_backward")
def gelu_backward_op(dy: Tensor, x: Tensor) -> Tensor:
    """dy, x (…, D) → dx, contiguous."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if _dispatch.idle(x):
        return dx
    if not _dispatch.runs_triton(x):
        return dx.copy_(reference.wide(dy) * reference.gelu_slope(x))
    launch_flat(gelu_backward_kernel, "gelu_backward", dy, x, dx)
    return dx


class Add(torch.autograd.Function):  # the gradients of its gradients are defined
    """`apply(x, y)` → x + y."""

    @staticmethod
    def forward(ctx, x, y):
        check("x", x)
        check_like("y", y, "x", x)
        return add_op(x, y)

    @staticmethod
    def backward(ctx, dz):
        return dz, dz


class GeLU(Function):
    """`apply(x)` → GeLU(x), the tanh form. Saved: x."""

    @staticmethod
    def forward(ctx, x):
        check("x", x)
        ctx.save_for_backward(x)
        return gelu_forward_op(x)

    @staticmethod
    def backward(ctx, dy):
        return gelu_backward_op(dy, *ctx.saved_tensors)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y for tensors of one shape and dtype; no broadcasting.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(Add, x, y)


def gelu(x: Tensor) -> Tensor:
    """GeLU in its tanh form (Hendrycks & Gimpel 2016), of any shape; finite for every finite x.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(GeLU, x)


def add_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Two inputs, one output."""
    return Cost.of_elements(shape, dtype, 1, 3)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Of GeLU: x and y forward; dy, x and dx backward."""
    return Cost.of_elements(shape, dtype, 20 if backward else 10, 2 + backward)
