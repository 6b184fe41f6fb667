"""SwiGLU's element-wise part, between the matmuls of a gated feed-forward layer.

Mathematics, per element, with σ(g) = 1/(1 + exp(−g)):
    silu(g) = g·σ(g)
    y = silu(g)·u
Backward, from the gradient dy of y:
    dg = dy·u·σ(g)·(1 + g·(1 − σ(g)))
    du = dy·silu(g)

Shapes: gate, up, y (…, F) in one dtype. gate and up may be the two halves of one fused projection:
the kernels address rows by their strides, and nothing is copied. Arithmetic is fp32, rounded once.
Saved for backward: gate, up. silu(g) is computed again, which is cheaper than storing it.
Bytes: forward reads gate and up and writes y. Backward reads dy, gate and up and writes dg and du.
FLOPs per element: about 6 forward, 12 backward.

Source: Shazeer, GLU Variants Improve Transformer (2020).
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import Function, apply, cdiv, tl, triton
from ._rows import Launch, as_rows, autocast, check, check_like, chosen, load_fp32, store_rounded
from .cost import Cost


@triton.jit
def _place(cols, BLOCK: tl.constexpr):
    """Return this program's row and its BLOCK columns.

    Every row is cut into blocks, and programs are numbered row by row. Both results are int64: a
    row times its stride may exceed 2³¹, and so may a column where all rows are viewed as one.
    """
    blocks = tl.cdiv(cols, BLOCK)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, columns


@triton.jit
def forward_kernel(gate_ptr, up_ptr, y_ptr, cols, stride_gate, stride_up, BLOCK: tl.constexpr):
    """Compute one block of one row of y per program. y is contiguous."""
    row, columns = _place(cols, BLOCK)
    # Cuts the last block of each row. Nothing is summed over a row, so the value that cut elements
    # are loaded with does not matter.
    inside = columns < cols
    gate = load_fp32(gate_ptr + row * stride_gate + columns, inside)
    up = load_fp32(up_ptr + row * stride_up + columns, inside)
    # gate/(1 + exp(−gate)) is gate·σ(gate). An exponential that overflows gives 0, which is right.
    y = gate / (1.0 + tl.exp(-gate)) * up
    store_rounded(y_ptr + row * cols + columns, y, inside)


@triton.jit
def backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    cols,
    stride_dy,
    stride_gate,
    stride_up,
    BLOCK: tl.constexpr,
):
    """Compute one block of one row of both gradients per program. dgate and dup are contiguous."""
    row, columns = _place(cols, BLOCK)
    inside = columns < cols
    dy = load_fp32(dy_ptr + row * stride_dy + columns, inside)
    gate = load_fp32(gate_ptr + row * stride_gate + columns, inside)
    up = load_fp32(up_ptr + row * stride_up + columns, inside)
    # Computed once for both gradients. Storing it in the forward would cost as much traffic as a
    # further tensor.
    sigmoid = tl.sigmoid(gate)
    out = row * cols + columns
    # silu′ = σ·(1 + g·(1 − σ)), by the product rule for g·σ(g) with σ′ = σ·(1 − σ).
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    store_rounded(dgate_ptr + out, dgate, inside)
    # y is linear in up, so du = dy·silu(g).
    store_rounded(dup_ptr + out, dy * gate * sigmoid, inside)


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as matrices with contiguous rows.

    Where all are contiguous, each is viewed as a single row. Otherwise the last block of every row
    may be partly empty.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return tuple(tensor.view(1, -1) for tensor in tensors)
    return tuple(as_rows(tensor) for tensor in tensors)


def launch(kernel, name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Launch one of the two kernels.

    Args:
        kernel: `forward_kernel` or `backward_kernel`.
        name: name of the launch for `_dispatch.forced`.
        inputs: tensors (…, F) of one shape, with at least one element.
        outputs: contiguous tensors of that shape.
    """
    matrices = _flat(*inputs)
    rows, cols = matrices[0].shape
    # 8 elements per thread: one 16-byte load of each 16-bit tensor.
    options = chosen(name, Launch(block=2048, warps=8))
    grid = (rows * cdiv(cols, options.block),)
    if rows == 1:
        # The stride of a single row is never used. Pass 0, because it would be the number of
        # elements, and Triton compiles a kernel again for an integer with other divisors.
        strides = [0] * len(matrices)
    else:
        strides = [matrix.stride(0) for matrix in matrices]
    options.start(kernel, grid, *matrices, *outputs, cols, *strides)


def _check(gate: object, up: object) -> None:
    """Raise TypeError or ValueError for arguments of `forward_op` that do not fit."""
    check("gate", gate, 1)
    check("up", up, 1)
    check_like("up", up, "gate", gate)


@_dispatch.operator("swiglu_forward", _check)
def forward_op(gate: Tensor, up: Tensor) -> Tensor:
    """Return y (…, F), contiguous, from gate and up of that shape."""
    y = gate.new_empty(gate.shape)
    if _dispatch.idle(gate):
        return y
    if not _dispatch.runs_triton(gate):
        return y.copy_(reference.swiglu(gate, up))
    launch(forward_kernel, "swiglu", (gate, up), (y,))
    return y


@_dispatch.operator("swiglu_backward")
def backward_op(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dgate, dup), both (…, F) and contiguous, from the gradient of y."""
    dgate = gate.new_empty(gate.shape)
    dup = gate.new_empty(gate.shape)
    if _dispatch.idle(gate):
        return dgate, dup
    if not _dispatch.runs_triton(gate):
        g = reference.wide(gate)
        u = reference.wide(up)
        dy_wide = reference.wide(dy)
        sigmoid = torch.sigmoid(g)
        dgate.copy_(dy_wide * u * sigmoid * (1 + g * (1 - sigmoid)))
        dup.copy_(dy_wide * g * sigmoid)
        return dgate, dup
    launch(backward_kernel, "swiglu_backward", (dy, gate, up), (dgate, dup))
    return dgate, dup


class SwiGLU(Function):
    """SwiGLU: `apply(gate, up)` → silu(gate)·up.

    Saved for backward: gate, up. Under autocast both are cast to its dtype first.
    """

    @staticmethod
    def forward(ctx, gate, up):
        gate, up = autocast(gate, up)
        ctx.save_for_backward(gate, up)
        return forward_op(gate, up)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        return backward_op(dy, gate, up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate)·up; differentiable once in both.

    Args:
        gate: tensor (…, F) in fp32, fp16 or bf16, with any strides.
        up: tensor of gate's shape and dtype, with any strides.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    return apply(SwiGLU, gate, up)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass.

    Args:
        shape: dimensions of gate.
        dtype: dtype of all tensors.
        backward: whether to count the backward pass instead of the forward pass.
    """
    if backward:
        return Cost.of_elements(shape, dtype, flops=12, tensors=5)  # dy, gate, up, dgate, dup
    return Cost.of_elements(shape, dtype, flops=6, tensors=3)  # gate, up, y
