"""Element-wise operations: vector addition, the first kernel to read, and GeLU.

Mathematics, per element:
    add:   z = x + y;  dx = dy = dz
    GeLU:  y = x·s with s = sigmoid(2u), u = √(2/π)·(x + 0.044715·x³)
           dGeLU/dx = s + x·s·(1 − s)·2u′, u′ = √(2/π)·(1 + 3·0.044715·x²)
This is the tanh form x/2·(1 + tanh u), because (1 + tanh u)/2 = sigmoid(2u).

How an element-wise kernel is laid out: `count` elements are cut into blocks of BLOCK. Program i of
a one-dimensional grid owns elements i·BLOCK to (i + 1)·BLOCK − 1. The mask keeps the last program
inside the tensor. Each thread loads 16 bytes at a time, and neighbouring threads load neighbouring
bytes, so that the request of a warp consists of a few whole cache lines.

Shapes: any, the same for all tensors. Arithmetic is fp32, results have the input's dtype.
Saved for backward: nothing (add), x (GeLU).
Bytes: every input is read and the output is written once. FLOPs per element: 1 (add), about 10
(GeLU), about 20 (its backward).

Source: Hendrycks & Gimpel, Gaussian Error Linear Units (2016).
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import Function, apply, cdiv, tl, triton
from ._rows import Launch, check, check_like, chosen, load_fp32, store_rounded
from .cost import Cost

# In Triton's interpreter, constexpr times tensor is a constexpr and not a tensor. So the kernels
# below write the tensor on the left of these constants.
GELU_DOUBLED = tl.constexpr(2 * reference.GELU_SCALE)
GELU_CUBIC = tl.constexpr(reference.GELU_CUBIC)
# For |x| above this, GeLU is x or 0 in fp32 and its derivative is 1 or 0. The derivative clamps x
# here, because x² could overflow.
GELU_FLAT = tl.constexpr(30.0)
FLAT = Launch(block=4096, warps=16)  # 8 elements per thread: one load of 16 bytes in bf16


@triton.jit
def add_kernel(x_ptr, y_ptr, z_ptr, count, BLOCK: tl.constexpr):
    """Compute one block of z = x + y per program."""
    # int64: offsets may exceed 2³¹ elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    z = x.to(tl.float32) + y.to(tl.float32)
    tl.store(z_ptr + offsets, z.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_of(x):
    """Return GeLU of fp32 values."""
    doubled = (x + x * x * x * GELU_CUBIC) * GELU_DOUBLED
    # x·sigmoid(2u). An exponential that overflows gives x/∞ = 0, which is right.
    return x / (1.0 + tl.exp(-doubled))


@triton.jit
def gelu_slope(x):
    """Return dGeLU/dx of fp32 values."""
    # Clamp by comparisons: for NaN both are false and NaN stays, whereas min and max would drop it.
    x = tl.where(x > GELU_FLAT, GELU_FLAT, tl.where(x < -GELU_FLAT, -GELU_FLAT, x))
    s = tl.sigmoid((x + x * x * x * GELU_CUBIC) * GELU_DOUBLED)
    # The product rule for x·s(2u): s + x·s′, with s′ = s·(1 − s)·2u′.
    return s + x * s * (1.0 - s) * GELU_DOUBLED * (1.0 + x * x * GELU_CUBIC * 3.0)


@triton.jit
def gelu_forward_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """Compute one block of y = GeLU(x) per program."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = load_fp32(x_ptr + offsets, inside)
    store_rounded(y_ptr + offsets, gelu_of(x), inside)


@triton.jit
def gelu_backward_kernel(dy_ptr, x_ptr, dx_ptr, count, BLOCK: tl.constexpr):
    """Compute one block of dx = dy·GeLU′(x) per program."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = load_fp32(x_ptr + offsets, inside)
    dy = load_fp32(dy_ptr + offsets, inside)
    store_rounded(dx_ptr + offsets, dy * gelu_slope(x), inside)


def launch_flat(kernel, name: str, *tensors: Tensor, default: Launch = FLAT) -> None:
    """Launch an element-wise kernel.

    Args:
        kernel: Triton kernel that takes the tensors' pointers, the number of elements, and BLOCK.
        name: name of the launch for `_dispatch.forced`.
        tensors: contiguous tensors with the same number of elements, at least one.
        default: launch parameters.
    """
    count = tensors[0].numel()
    launch = chosen(name, default)
    launch.start(kernel, (cdiv(count, launch.block),), *tensors, count)


@_dispatch.operator("add")
def add_op(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, contiguous, from two tensors of one shape."""
    x = x.contiguous()
    y = y.contiguous()
    z = torch.empty_like(x)
    if _dispatch.idle(x):
        return z
    if not _dispatch.runs_triton(x):
        return z.copy_(reference.add(x, y))
    launch_flat(add_kernel, "add", x, y, z, default=Launch(block=2048, warps=8))
    return z


@_dispatch.operator("gelu_forward")
def gelu_forward_op(x: Tensor) -> Tensor:
    """Return GeLU(x), contiguous, for a tensor of any shape."""
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
    """Return dx, contiguous, from the gradient of GeLU(x) and x."""
    dy = dy.contiguous()
    x = x.contiguous()
    dx = torch.empty_like(x)
    if _dispatch.idle(x):
        return dx
    if not _dispatch.runs_triton(x):
        return dx.copy_(reference.wide(dy) * reference.gelu_slope(x))
    launch_flat(gelu_backward_kernel, "gelu_backward", dy, x, dx)
    return dx


# Not `_dispatch.Function`, which refuses gradients of gradients: those of a sum are defined.
class Add(torch.autograd.Function):
    """Addition: `apply(x, y)` → x + y. Nothing is saved for backward."""

    @staticmethod
    def forward(ctx, x, y):
        check("x", x)
        check_like("y", y, "x", x)
        return add_op(x, y)

    @staticmethod
    def backward(ctx, dz):
        return dz, dz


class GeLU(Function):
    """GeLU in its tanh form: `apply(x)` → GeLU(x). Saved for backward: x."""

    @staticmethod
    def forward(ctx, x):
        check("x", x)
        ctx.save_for_backward(x)
        return gelu_forward_op(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return gelu_backward_op(dy, x)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, without broadcasting; differentiable any number of times in both.

    Args:
        x: tensor of any shape in fp32, fp16 or bf16.
        y: tensor of x's shape and dtype.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    return apply(Add, x, y)


def gelu(x: Tensor) -> Tensor:
    """Return GeLU(x) in its tanh form; differentiable once.

    The result is finite for every finite x.

    Args:
        x: tensor of any shape in fp32, fp16 or bf16.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    return apply(GeLU, x)


def add_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Return the least work of `add` for tensors of this shape and dtype."""
    return Cost.of_elements(shape, dtype, flops=1, tensors=3)  # x, y, z


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass of `gelu`.

    Args:
        shape: dimensions of x.
        dtype: dtype of all tensors.
        backward: whether to count the backward pass instead of the forward pass.
    """
    if backward:
        return Cost.of_elements(shape, dtype, flops=20, tensors=3)  # dy, x, dx
    return Cost.of_elements(shape, dtype, flops=10, tensors=2)  # x, y
