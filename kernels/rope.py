"""Rotary position embedding.

Math, per position and pair (x_i, x_{i+D/2}):  y = x·cos + roll(x, D/2)·sin, with cos = (c | c) and sin = (−s | s):
    y_i = x_i·c − x_{i+D/2}·s,   y_{i+D/2} = x_{i+D/2}·c + x_i·s.
Backward rotates by the opposite angle: the same kernel with −s.

Shapes: x, y (…, T, D), any strides over the leading dimensions (the transposed view that a fused
projection gives is read where it lies); cos, sin (T, D) fp32. y is contiguous. Bytes: x and y once
(the tables stay in the cache). FLOPs: 3 per element. Saved for backward: cos, sin. Arithmetic in
fp32, rounded once.

Source: Su et al., RoFormer (2021); pairs are halves of a head, the form of GPT-NeoX and Llama.
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import Function, apply, cdiv, power_of_two, tl, triton
from ._rows import check, check_device, load_fp32, store_rounded
from .cost import Cost


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rows,
    length,
    inner,
    middle,
    half,
    stride_outer,
    stride_middle,
    stride_inner,
    stride_t,
    stride_cos,
    stride_sin,
    sign,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """ROWS positions; the leading dimensions of x are (outer, middle, inner) with their strides."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t = row % length
    head = row // length
    start = (
        (head // (inner * middle)) * stride_outer
        + (head // inner % middle) * stride_middle
        + (head % inner) * stride_inner
        + t * stride_t
    )
    i = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (i < half)[None, :]
    x = x_ptr + start[:, None] + i[None, :]
    first = load_fp32(x, inside)
    second = load_fp32(x + half, inside)
    cos = tl.load(cos_ptr + t[:, None] * stride_cos + i[None, :], mask=inside, other=0.0)
    sin = (
        tl.load(sin_ptr + t[:, None] * stride_sin + half + i[None, :], mask=inside, other=0.0)
        * sign
    )
    y = y_ptr + row[:, None] * (2 * half) + i[None, :]
    store_rounded(y, first * cos - second * sin, inside)
    store_rounded(y + half, second * cos + first * sin, inside)


def _three_outer(x: Tensor) -> Tensor:
    """x as (outer, middle, inner, T, D), without a copy for up to three leading dimensions."""
    return x.flatten(0, x.dim() - 5) if x.dim() > 5 else x[(None,) * (5 - x.dim())]


def launch_rope(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, sign: float) -> None:
    """Fill y, contiguous; sign −1 rotates back."""
    x = _three_outer(x)
    length, width = x.shape[-2:]
    block = max(2, power_of_two(width // 2))
    rows, tile = x.numel() // width, max(1, 1024 // block)
    _dispatch.launch(
        rope_kernel,
        (cdiv(rows, tile),),
        x,
        cos,
        sin,
        y,
        rows,
        length,
        x.shape[2],
        x.shape[1],
        width // 2,
        *x.stride()[:4],
        cos.stride(0),
        sin.stride(0),
        sign,
        ROWS=tile,
        HALF=block,
        num_warps=4,
    )


def _check(x: object, cos: object, sin: object, *_: object) -> None:
    check("x", x, 2)
    if x.shape[-1] % 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; the last dimension must be even, pairs are turned"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check(name, table, dtypes=(torch.float32,))
        if table.shape != x.shape[-2:]:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; allowed: (T, D) = {tuple(x.shape[-2:])}"
            )
        check_device(name, table, "x", x)


@_dispatch.operator("rope", _check)
def rope_op(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """x (…, T, D) turned by `sign` times its angles, contiguous."""
    y = x.new_empty(x.shape)
    if _dispatch.idle(x):
        return y
    if not _dispatch.runs_triton(x):
        return y.copy_(reference.rope(x, cos, sign * sin))
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    launch_rope(x, cos, sin, y, sign)
    return y


class RoPE(Function):
    """`apply(x, cos, sin)` → x turned. Saved: the tables, which have no gradient."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        if any(ctx.needs_input_grad[1:]):
            raise ValueError(
                "cos or sin requires a gradient; allowed: tables that require none, rope gives them none"
            )
        ctx.save_for_backward(cos, sin)
        return rope_op(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, dy):
        return rope_op(dy, *ctx.saved_tensors, -1.0), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with each pair (x_i, x_{i+D/2}) turned by its position's angle; differentiable in x.

    Args:
        x: (…, T, D), D even, fp32, fp16 or bf16.
        cos, sin: (T, D) fp32; cos = (c | c), sin = (−s | s), as `distlab.model.ops.rope_tables`
            makes them.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(RoPE, x, cos, sin)


def cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Least FLOPs and bytes of either pass: x, y and the two tables."""
    return Cost.of_elements(shape, dtype, 3, 2) + Cost(0, 8 * shape[-1] * shape[-2])
