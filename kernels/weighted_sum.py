"""Weighted sum of each row, the smallest kernel with a reduction and a weight that all rows share.

Math:  y_n = Σ_d x_nd·w_d;   dx_nd = dy_n·w_d,   dw_d = Σ_n dy_n·x_nd.

Shapes: x (N, D), w (D), y (N). Bytes: forward x once; backward x and dx once. FLOPs: 2 per element
forward, 3 backward. Saved for backward: x, w. Sums in fp32, y in x's dtype.

A program owns ROWS rows and walks over their columns. dw needs all rows: in the first stage each
program writes its partial sum, in the second `sum_columns` adds these. The loop bound is the row's
length, not a multiple of the tile: a column beyond the first tile that is never visited is the
classic mistake here.
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import STREAMED, Function, apply, cdiv, power_of_two, tl, triton
from ._rows import (
    Launch,
    as_rows,
    check,
    check_width,
    load_fp32,
    store_rounded,
    sum_columns,
    sum_over_rows,
)
from .cost import Cost


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, y_ptr, rows, cols, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS elements of y."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        columns = start + offsets
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        x = load_fp32(x_ptr + row[:, None] * stride_x + columns[None, :], inside, policy=STREAMED)
        w = load_fp32(w_ptr + columns, columns < cols)
        acc += x * w[None, :]
    store_rounded(y_ptr + row, tl.sum(acc, 1), row < rows)


@triton.jit
def backward_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    parts_ptr,
    rows,
    cols,
    stride_x,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of dx for every num_programs(1)-th tile of rows, and their share of dw."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = load_fp32(w_ptr + columns, columns < cols)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        dy = load_fp32(dy_ptr + row, row < rows)
        x = load_fp32(x_ptr + row[:, None] * stride_x + columns[None, :], inside)
        dw += dy[:, None] * x
        dx = dy[:, None] * w[None, :]
        store_rounded(dx_ptr + row[:, None] * cols + columns[None, :], dx, inside)
    share = tl.program_id(1).to(tl.int64) * cols + columns
    tl.store(parts_ptr + share, tl.sum(dw, 0), mask=columns < cols)


def launch_forward(x: Tensor, w: Tensor, y: Tensor) -> None:
    """Fill y."""
    rows, cols = x.shape
    block = min(2048, power_of_two(cols))
    launch = Launch(block, max(1, 8192 // block), 8)
    launch.start(
        forward_kernel,
        (cdiv(rows, launch.rows),),
        x,
        w,
        y,
        rows,
        cols,
        x.stride(0),
        ROWS=launch.rows,
    )


def launch_backward(dy: Tensor, x: Tensor, w: Tensor, dx: Tensor) -> Tensor:
    """Fill dx; returns dw in w's dtype."""
    rows, cols = x.shape
    block = min(1024, power_of_two(cols))
    launch = Launch(block, max(1, 4096 // block), 4, per_sm=4)
    strips, tiles = cdiv(cols, launch.block), cdiv(rows, launch.rows)
    shares = max(1, min(tiles, launch.programs(1 << 30, x.device) // strips))
    parts = x.new_empty(1, shares, cols, dtype=torch.float32)
    launch.start(
        backward_kernel,
        (strips, shares),
        dy,
        x,
        w,
        dx,
        parts,
        rows,
        cols,
        x.stride(0),
        ROWS=launch.rows,
    )
    return sum_columns(parts, w.dtype)[0]


def _check(x: object, w: object) -> None:
    check("x", x, 1)
    check_width("weight", w, "x", x)


@_dispatch.operator("weighted_sum_forward", _check)
def forward_op(x: Tensor, w: Tensor) -> Tensor:
    """x (…, D), w (D) → y (…)."""
    y = x.new_empty(x.shape[:-1])
    if _dispatch.idle(x):
        return y.zero_()
    if not _dispatch.runs_triton(x):
        return y.copy_(reference.weighted_sum(x, w))
    launch_forward(as_rows(x), w.contiguous(), y)
    return y


@_dispatch.operator("weighted_sum_backward")
def backward_op(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw)."""
    dx = x.new_empty(x.shape)
    if _dispatch.idle(x):
        return dx, w.new_zeros(w.shape)
    if not _dispatch.runs_triton(x):
        dy32 = reference.wide(dy)[..., None]
        return dx.copy_(dy32 * reference.wide(w)), sum_over_rows(dy32 * reference.wide(x)).to(
            w.dtype
        )
    return dx, launch_backward(dy.reshape(-1).contiguous(), as_rows(x), w.contiguous(), dx)


class WeightedSum(Function):
    """`apply(x, weight)` → (x·weight).sum(-1). Saved: both."""

    @staticmethod
    def forward(ctx, x, weight):
        y = forward_op(x, weight)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        return backward_op(dy, *ctx.saved_tensors)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_d x[…, d]·weight[d]: (…, D) and (D) → (…), in x's dtype; differentiable in both.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(WeightedSum, x, weight)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes."""
    count, cols = torch.Size(shape).numel(), shape[-1]
    rows = count // max(cols, 1)
    return Cost((2 + backward) * count, ((1 + backward) * (count + cols) + rows) * dtype.itemsize)
