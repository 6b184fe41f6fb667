"""RMSNorm and LayerNorm of rows that stay in registers from their one load to their one store: one pair of kernels.

CENTRE makes it LayerNorm. Beside a row of more than half of ONE_TILE columns w does not stay, so that a multiprocessor
has room for two. Backward: a fixed number of programs walk over the rows, so that each sums its contribution to dw and
db in registers and writes it once; `_reduce.py` sums these. Longer rows: `_long_rows.py`.
"""

import torch
from torch import Tensor

from . import _dispatch
from ._language import tl, triton
from ._long_rows import launch_long_backward, launch_long_forward
from ._reduce import sum_columns
from ._rows import pipelined_launch, row_launch

ONE_TILE = 16384  # columns up to which the forward keeps a row in registers
ONE_TILE_BACKWARD = 8192  # there x, dy, w and the sums of dw and db stand side by side


@triton.jit
def forward_kernel(x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, r_ptr, rows, cols, stride_x,
                   stride_residual, eps, CENTRE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
                   SILU: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                   STAGES: tl.constexpr):
    """Tiles of ROWS rows; y and s are contiguous. WIDE: w comes from the cache, row by row, which frees registers."""
    columns = tl.arange(0, BLOCK)
    if not WIDE:
        w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    if BIAS:
        b = tl.load(b_ptr + columns, mask=columns < cols, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)
        out = row64[:, None] * cols + columns[None, :]
        s = tl.load(x_ptr + row64[:, None] * stride_x + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            s += tl.load(residual_ptr + row64[:, None] * stride_residual + columns[None, :], mask=inside,
                         other=0.0).to(tl.float32)
            rounded = s.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + out, rounded, mask=inside)
            s = rounded.to(tl.float32)  # backward sees the rounded sum: normalise the same
        if CENTRE:
            mean = tl.sum(s, 1) / cols
            s = tl.where(inside, s - mean[:, None], 0.0)  # columns beyond the row must not count in the variance
            tl.store(mean_ptr + row, mean, mask=row < rows)
        r = tl.rsqrt(tl.sum(s * s, 1) / cols + eps)
        if WIDE:
            w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
        y = s * r[:, None] * w.to(tl.float32)[None, :]
        if BIAS:
            y += b.to(tl.float32)[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(r_ptr + row, r, mask=row < rows)
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(dy_ptr, dtotal_ptr, s_ptr, w_ptr, mean_ptr, r_ptr, ds_ptr, dw_ptr, db_ptr, rows, cols, stride_dy,
                    stride_s, CENTRE: tl.constexpr, BIAS: tl.constexpr, TOTAL: tl.constexpr, SILU: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Tiles of ROWS rows, and this program's share of dw and db as one row of each; TOTAL: s itself has a gradient."""
    columns = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)
        out = row64[:, None] * cols + columns[None, :]
        s = tl.load(s_ptr + row64[:, None] * stride_s + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row64[:, None] * stride_dy + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < rows, other=0.0)
        if CENTRE:
            s -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = s * r[:, None]
        w32 = w.to(tl.float32)[None, :]
        if SILU:
            u = normed * w32
            sigmoid = 1.0 / (1.0 + tl.exp(-u))
            g = g * sigmoid * (1.0 + u * (1.0 - sigmoid))
        dw += g * normed
        if BIAS:
            db += g
        g = g * w32  # 0 beyond the row, where normed need not be
        ds = g - normed * (tl.sum(g * normed, 1) / cols)[:, None]
        if CENTRE:
            ds -= (tl.sum(g, 1) / cols)[:, None]
        ds = ds * r[:, None]
        if TOTAL:
            ds += tl.load(dtotal_ptr + out, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds_ptr + out, ds.to(ds_ptr.dtype.element_ty), mask=inside)
    share = tl.program_id(0).to(tl.int64) * cols + columns
    tl.store(dw_ptr + share, tl.sum(dw, 0), mask=columns < cols)
    if BIAS:
        tl.store(db_ptr + share, tl.sum(db, 0), mask=columns < cols)


def launch_forward(x: Tensor, residual: Tensor | None, w: Tensor, y: Tensor, s: Tensor, r: Tensor, eps: float,
                   silu: bool, mean: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Fill y, r, with a residual s, and for LayerNorm mean. Inputs have contiguous rows, outputs are contiguous."""
    rows, cols = x.shape
    if cols > ONE_TILE:
        launch_long_forward(x, residual, w, y, s, r, eps, silu, mean, bias)
        return
    wide = mean is None and cols > ONE_TILE // 2
    sizes = {"per_thread": 16 if wide else 32} if mean is None else {"per_thread": 64, "tile": 8192}
    launch = row_launch("rmsnorm" if mean is None else "layernorm", cols, **sizes)
    grid = (launch.programs(triton.cdiv(rows, launch.rows), x.device),)
    _dispatch.launch(forward_kernel, grid, x, residual, w, bias, y, s, mean, r, rows, cols, x.stride(0),
                     0 if residual is None else residual.stride(0), eps, CENTRE=mean is not None,
                     BIAS=bias is not None, RESIDUAL=residual is not None, SILU=silu, WIDE=wide, ROWS=launch.rows,
                     BLOCK=launch.block, STAGES=launch.stages, num_warps=launch.warps)


def launch_backward(dy: Tensor, dtotal: Tensor | None, s: Tensor, w: Tensor, mean: Tensor | None, r: Tensor,
                    ds: Tensor, silu: bool, bias_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Fill ds; returns dw in w's dtype and db in bias_dtype, if there is one."""
    rows, cols = s.shape
    if cols > ONE_TILE_BACKWARD:
        return launch_long_backward(dy, dtotal, s, w, mean, r, ds, silu, bias_dtype)
    has_bias = bias_dtype is not None
    itemsize = sum(t.element_size() for t in (dy, s, dtotal) if t is not None)
    name = "rmsnorm_backward" if mean is None else "layernorm_backward"
    launch = pipelined_launch(name, cols, itemsize, s.device)
    programs = launch.programs(triton.cdiv(rows, launch.rows), s.device)
    parts = torch.empty(1 + has_bias, programs, cols, dtype=torch.float32, device=s.device)
    _dispatch.launch(backward_kernel, (programs,), dy, dtotal, s, w, mean, r, ds, parts[0], parts[-1], rows, cols,
                     dy.stride(0), s.stride(0), CENTRE=mean is not None, BIAS=has_bias, TOTAL=dtotal is not None,
                     SILU=silu, ROWS=launch.rows, BLOCK=launch.block, STAGES=launch.stages, num_warps=launch.warps)
    dw, *db = sum_columns(parts, w.dtype, *[bias_dtype] * has_bias)
    return dw, db[0] if has_bias else None
