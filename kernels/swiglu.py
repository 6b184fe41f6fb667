"""SwiGLU's element-wise part.

Math:  y = silu(g)·u, silu(g) = g·σ(g);   dg = dy·u·σ(g)·(1 + g·(1 − σ(g))),  du = dy·silu(g).

Shapes: gate, up, y (…, F), one dtype. gate and up may be the two halves of one fused projection:
rows are addressed by their strides, nothing is copied. Bytes: gate, up and y once; backward dy,
gate, up, dg and du. FLOPs: about 6 per element forward, 12 backward. Saved for backward: gate, up
(silu is computed again). Arithmetic in fp32, rounded once.

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
    """(row, columns) of this program: every row is cut into blocks."""
    blocks = tl.cdiv(cols, BLOCK)
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK + tl.arange(
        0, BLOCK
    )


@triton.jit
def forward_kernel(gate_ptr, up_ptr, y_ptr, cols, stride_gate, stride_up, BLOCK: tl.constexpr):
    """One block of one row of y, which is contiguous."""
    row, columns = _place(cols, BLOCK)
    inside = columns < cols
    gate = load_fp32(gate_ptr + row * stride_gate + columns, inside)
    up = load_fp32(up_ptr + row * stride_up + columns, inside)
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
    """One block of one row of both gradients, which are contiguous."""
    row, columns = _place(cols, BLOCK)
    inside = columns < cols
    dy = load_fp32(dy_ptr + row * stride_dy + columns, inside)
    gate = load_fp32(gate_ptr + row * stride_gate + columns, inside)
    up = load_fp32(up_ptr + row * stride_up + columns, inside)
    sigmoid = tl.sigmoid(gate)
    out = row * cols + columns
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    store_rounded(dgate_ptr + out, dgate, inside)
    store_rounded(dup_ptr + out, dy * gate * sigmoid, inside)


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All as matrices with contiguous rows; as a single row where all are contiguous, to waste no half-filled block."""
    if all(t.is_contiguous() for t in tensors):
        return tuple(t.view(1, -1) for t in tensors)
    return tuple(as_rows(t) for t in tensors)


def launch(kernel, name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Launch over matrices of one shape; outputs contiguous, nothing empty."""
    inputs = _flat(*inputs)
    rows, cols = inputs[0].shape
    options = chosen(name, Launch(block=2048, warps=8))
    grid = (rows * cdiv(cols, options.block),)
    strides = (0,) * len(inputs) if rows == 1 else (t.stride(0) for t in inputs)
    options.start(kernel, grid, *inputs, *outputs, cols, *strides)


def _check(gate: object, up: object) -> None:
    check("gate", gate, 1)
    check("up", up, 1)
    check_like("up", up, "gate", gate)


@_dispatch.operator("swiglu_forward", _check)
def forward_op(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up (…, F) → y, contiguous."""
    y = gate.new_empty(gate.shape)
    if _dispatch.idle(gate):
        return y
    if not _dispatch.runs_triton(gate):
        return y.copy_(reference.swiglu(gate, up))
    launch(forward_kernel, "swiglu", (gate, up), (y,))
    return y


@_dispatch.operator("swiglu_backward")
def backward_op(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup), contiguous."""
    dgate, dup = (gate.new_empty(gate.shape) for _ in range(2))
    if _dispatch.idle(gate):
        return dgate, dup
    if not _dispatch.runs_triton(gate):
        g, u, d = reference.wide(gate), reference.wide(up), reference.wide(dy)
        sigmoid = torch.sigmoid(g)
        return dgate.copy_(d * u * sigmoid * (1 + g * (1 - sigmoid))), dup.copy_(d * g * sigmoid)
    launch(backward_kernel, "swiglu_backward", (dy, gate, up), (dgate, dup))
    return dgate, dup


class SwiGLU(Function):
    """`apply(gate, up)` → silu(gate)·up.

    Saved: gate, up. Under autocast both are cast to its dtype first.
    """

    @staticmethod
    def forward(ctx, gate, up):
        gate, up = autocast(gate, up)
        ctx.save_for_backward(gate, up)
        return forward_op(gate, up)

    @staticmethod
    def backward(ctx, dy):
        return backward_op(dy, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up; differentiable in both.

    Args:
        gate, up: one shape and dtype: fp32, fp16 or bf16; any strides.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(SwiGLU, gate, up)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes."""
    return Cost.of_elements(shape, dtype, 12 if backward else 6, 5 if backward else 3)
