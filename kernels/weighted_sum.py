"""Weighted sum of each row, the smallest kernel with a reduction and a weight that all rows share.

Mathematics:
    y_n = Σ_d x_nd·w_d
    dx_nd = dy_n·w_d,  dw_d = Σ_n dy_n·x_nd

Shapes: N rows, D columns. x (N, D), w (D), y (N). Sums are fp32, y has x's dtype.
Saved for backward: x, w.
Bytes: forward reads x. Backward reads x and writes dx. FLOPs per element: 2 forward, 3 backward.

A program owns ROWS rows and loops over their columns. The bound of that loop is the length of a
row. A loop over a fixed number of tiles, which leaves columns out, is the usual mistake here.
dw needs all rows. In the first stage each program writes the sum over its own rows, in the second
`sum_columns` adds these.
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
    """Compute ROWS elements of y per program."""
    # int64: a row times its stride may exceed 2³¹.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = tl.arange(0, BLOCK)
    # One sum per column of a tile: threads exchange their sums only once, after the loop.
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        columns = start + offsets
        # Cuts rows in the last program and columns in the last tile of a row. 0 adds nothing to the
        # sum.
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        # STREAMED: each element of x is used once. w is read by all programs and should stay in the
        # cache.
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
    """Compute dx, and a partial sum of dw, for BLOCK columns of every P-th tile of rows.

    The grid is (strips of BLOCK columns, P). Program (i, j) owns strip i of the tiles j, j + P, …
    of rows. parts is (P, cols), and row j of it belongs to the programs (·, j).
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The program keeps its columns, so it loads w once, before its loop over rows.
    w = load_fp32(w_ptr + columns, columns < cols)
    # One sum for each of the ROWS rows of a tile: the loop needs no reduction across threads.
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        # Rows past the last one get dy = 0, so they add nothing to dw.
        dy = load_fp32(dy_ptr + row, row < rows)
        x = load_fp32(x_ptr + row[:, None] * stride_x + columns[None, :], inside)
        dw += dy[:, None] * x
        dx = dy[:, None] * w[None, :]
        store_rounded(dx_ptr + row[:, None] * cols + columns[None, :], dx, inside)
    # Row program_id(1) of parts. No two programs write to the same place, so no atomics are needed.
    share = tl.program_id(1).to(tl.int64) * cols + columns
    tl.store(parts_ptr + share, tl.sum(dw, 0), mask=columns < cols)


def launch_forward(x: Tensor, w: Tensor, y: Tensor) -> None:
    """Fill y (N) from x (N, D), with contiguous rows, and w (D)."""
    rows, cols = x.shape
    # A tile has 8,192 elements, 32 per thread: 4 rows of 2,048 columns, or more of shorter rows.
    # Longer rows take several tiles.
    block = min(2048, power_of_two(cols))
    launch = Launch(block, rows=max(1, 8192 // block), warps=8)
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
    """Fill dx (N, D), contiguous, and return dw (D) in w's dtype.

    Args:
        dy: (N), contiguous.
        x: (N, D), with contiguous rows.
        w: (D), contiguous.
        dx: (N, D), output, contiguous.
    """
    rows, cols = x.shape
    block = min(1024, power_of_two(cols))
    launch = Launch(block, rows=max(1, 4096 // block), warps=4, per_sm=4)
    strips = cdiv(cols, launch.block)
    tiles = cdiv(rows, launch.rows)
    # Divide the programs that run at the same time among the strips. More of them would not run
    # earlier, and would make `parts` larger.
    programs = launch.programs(1 << 30, x.device)
    shares = max(1, min(tiles, programs // strips))
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
    dw, _ = sum_columns(parts, w.dtype)
    return dw


def _check(x: object, w: object) -> None:
    """Raise TypeError or ValueError for arguments of `forward_op` that do not fit."""
    check("x", x, 1)
    check_width("weight", w, "x", x)


@_dispatch.operator("weighted_sum_forward", _check)
def forward_op(x: Tensor, w: Tensor) -> Tensor:
    """Return y (…) from x (…, D) and w (D)."""
    y = x.new_empty(x.shape[:-1])
    if _dispatch.idle(x):
        return y.zero_()  # rows of no columns have the sum 0
    if not _dispatch.runs_triton(x):
        return y.copy_(reference.weighted_sum(x, w))
    launch_forward(as_rows(x), w.contiguous(), y)
    return y


@_dispatch.operator("weighted_sum_backward")
def backward_op(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dw) from the gradient of y."""
    dx = x.new_empty(x.shape)
    if _dispatch.idle(x):
        return dx, w.new_zeros(w.shape)
    if not _dispatch.runs_triton(x):
        dy_wide = reference.wide(dy)[..., None]
        dx.copy_(dy_wide * reference.wide(w))
        dw = sum_over_rows(dy_wide * reference.wide(x))
        return dx, dw.to(w.dtype)
    dw = launch_backward(dy.reshape(-1).contiguous(), as_rows(x), w.contiguous(), dx)
    return dx, dw


class WeightedSum(Function):
    """Weighted sum: `apply(x, weight)` → (x·weight).sum(-1). Saved for backward: x, weight."""

    @staticmethod
    def forward(ctx, x, weight):
        y = forward_op(x, weight)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return backward_op(dy, x, weight)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Return Σ_d x[…, d]·weight[d], (…), in x's dtype; differentiable once in both.

    Args:
        x: tensor (…, D) in fp32, fp16 or bf16, with any strides.
        weight: tensor (D) in any of these dtypes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    return apply(WeightedSum, x, weight)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass.

    Args:
        shape: dimensions of x.
        dtype: dtype of all tensors.
        backward: whether to count the backward pass instead of the forward pass.
    """
    count = torch.Size(shape).numel()
    cols = shape[-1]
    rows = count // max(cols, 1)
    if backward:
        flops = 3 * count
        elements = 2 * count + 2 * cols + rows  # x, dx, w, dw, dy
    else:
        flops = 2 * count
        elements = count + cols + rows  # x, w, y
    return Cost(flops, elements * dtype.itemsize)
