"""Rotary position embedding.

Mathematics, per position and pair (x_i, x_{i+D/2}), with c and s the cosine and sine of its angle:
    y_i       = x_i·c − x_{i+D/2}·s
    y_{i+D/2} = x_{i+D/2}·c + x_i·s
In tables of width D: y = x·cos + roll(x, D/2)·sin with cos = (c | c) and sin = (−s | s).
Backward rotates dy by the opposite angle: the same kernel with −s.

Shapes: x, y (…, T, D); cos, sin (T, D) fp32. The leading dimensions of x may have any strides, so
the transposed view of a fused projection is read in place. y is contiguous. Arithmetic is fp32,
rounded once.
Saved for backward: cos, sin.
Bytes: x is read and y is written. The tables stay in the cache. FLOPs: 3 per element.

Source: Su et al., RoFormer (2021). Pairs are halves of a head, as in GPT-NeoX and Llama. (RoFormer
itself pairs neighbours.)
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
    """Rotate ROWS rows per program. A row is one position of one head.

    The leading dimensions of x are (outer, middle, inner), each with its stride. Rows are numbered
    in that order, with the position as the fastest index. y is contiguous.
    half: D/2. HALF is the next power of two.
    sign: 1 rotates by the angle, −1 by the opposite angle.
    """
    # int64: the offsets that follow from it may exceed 2³¹.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # The position, which chooses the angles. All heads read the same rows of the tables, which stay
    # in the cache.
    t = row % length
    head = row // length
    # Split the number of the head into its three indices, and find the row's first element.
    start = (
        (head // (inner * middle)) * stride_outer
        + (head // inner % middle) * stride_middle
        + (head % inner) * stride_inner
        + t * stride_t
    )
    i = tl.arange(0, HALF)
    # Rows past the last one, and pairs past D/2, because HALF is a power of two.
    inside = (row < rows)[:, None] & (i < half)[None, :]
    # Both members of a pair, from the two halves of the row.
    x = x_ptr + start[:, None] + i[None, :]
    first = load_fp32(x, inside)
    second = load_fp32(x + half, inside)
    # One half of each table suffices. The second half of sin holds +s, the first −s.
    cos = tl.load(cos_ptr + t[:, None] * stride_cos + i[None, :], mask=inside, other=0.0)
    sin = tl.load(sin_ptr + t[:, None] * stride_sin + half + i[None, :], mask=inside, other=0.0)
    sin = sin * sign
    # y has no gaps: its rows are 2·half = D elements, in the order of `row`.
    y = y_ptr + row[:, None] * (2 * half) + i[None, :]
    # The rotation of (first, second) by the angle. Both results need both inputs, so one program
    # has both halves of a row.
    store_rounded(y, first * cos - second * sin, inside)
    store_rounded(y + half, second * cos + first * sin, inside)


def _three_outer(x: Tensor) -> Tensor:
    """Return x as (outer, middle, inner, T, D), without a copy for up to 3 leading dimensions."""
    if x.dim() > 5:
        # Joins the first dimensions. It copies only if their strides allow no view.
        return x.flatten(0, x.dim() - 5)
    missing = 5 - x.dim()
    return x[(None,) * missing]


def launch_rope(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, sign: float) -> None:
    """Fill y.

    Args:
        x: (…, T, D), input, contiguous in its last dimension.
        cos: (T, D) fp32, contiguous in its last dimension.
        sin: (T, D) fp32, contiguous in its last dimension.
        y: (…, T, D), output, contiguous.
        sign: 1 rotates by the angles, −1 by the opposite angles.
    """
    x = _three_outer(x)
    length, width = x.shape[-2:]
    block = max(2, power_of_two(width // 2))
    rows = x.numel() // width
    # 1,024 pairs per program, 8 per thread.
    tile = max(1, 1024 // block)  # rows per program: short heads share one
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
    """Raise TypeError or ValueError for arguments of `rope_op` that do not fit."""
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
    """Return x (…, T, D) rotated by `sign` times its angles, contiguous."""
    y = x.new_empty(x.shape)
    if _dispatch.idle(x):
        return y
    if not _dispatch.runs_triton(x):
        return y.copy_(reference.rope(x, cos, sign * sin))
    launch_rope(_dense_rows(x), _dense_rows(cos), _dense_rows(sin), y, sign)
    return y


def _dense_rows(x: Tensor) -> Tensor:
    """Return x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


class RoPE(Function):
    """RoPE: `apply(x, cos, sin)` → x rotated.

    Saved for backward: the tables. They have no gradient.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        if any(ctx.needs_input_grad[1:]):
            raise ValueError(
                "cos or sin requires a gradient; allowed: tables that require none, "
                "rope gives them none"
            )
        ctx.save_for_backward(cos, sin)
        return rope_op(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        # The gradient is multiplied by the transposed rotation, which is the rotation back.
        return rope_op(dy, cos, sin, -1.0), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each pair (x_i, x_{i+D/2}) rotated by its position's angle.

    The result is differentiable once in x.

    Args:
        x: tensor (…, T, D) in fp32, fp16 or bf16, with D even.
        cos: fp32 tensor (T, D), (c | c), as `distlab.model.ops.rope_tables` makes it.
        sin: fp32 tensor (T, D), (−s | s), as `distlab.model.ops.rope_tables` makes it.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype or device does not fit, or a table requires a gradient. The error
            says what is allowed.
    """
    return apply(RoPE, x, cos, sin)


def cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Return the least work of either pass: x, y and the two fp32 tables.

    Args:
        shape: (…, T, D).
        dtype: dtype of x.
    """
    length, width = shape[-2:]
    table_bytes = 2 * 4 * length * width
    return Cost.of_elements(shape, dtype, flops=3, tensors=2) + Cost(0, table_bytes)
