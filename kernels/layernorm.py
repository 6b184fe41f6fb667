"""LayerNorm.

Math, per row:  m = mean(x),  r = 1/√(mean((x − m)²) + eps),  x̂ = (x − m)·r,  y = x̂·w + b.
    dx = r·(w·dy − mean(w·dy) − x̂·mean(w·dy·x̂)),  dw = Σ_rows dy·x̂,  db = Σ_rows dy.

Shapes: `N` rows, `D` columns: x, y (N, D); w, b (D); m, r (N) fp32.
Bytes: forward x and y once; backward dy, x and dx once. FLOPs: about 7 per element forward, 12 backward.
Saved for backward: x, w, m, r. Statistics in fp32, the variance from deviations, never as mean(x²) − m²; y in x's
dtype.

A row stays in registers from its load to its store. Backward sums dw and db in two stages like `rmsnorm.py`; longer
rows are processed in chunks (`_long_rows.py`, with Welford's update by chunks).

Source: Ba, Kiros & Hinton, Layer Normalization (2016).
"""

import torch
from torch import Tensor
from torch.autograd import Function

from . import _dispatch, _triton, reference
from ._autograd import first_order
from ._language import tl, triton
from ._long_rows import launch_long_backward, launch_long_forward
from ._reduce import sum_columns
from ._rows import (
    as_rows,
    autocast_dtype,
    check,
    check_positive,
    check_width,
    pipelined_launch,
    row_launch,
    sum_over_rows,
)
from .cost import Cost

ONE_TILE = 16384  # columns up to which the forward keeps a row in registers
ONE_TILE_BACKWARD = 8192  # there x, dy, w and the sums of dw and db stand side by side


@triton.jit
def forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, m_ptr, r_ptr, rows, cols, stride_x, eps, BIAS: tl.constexpr,
                   ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Tiles of ROWS rows; y is contiguous."""
    columns = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    if BIAS:
        b = tl.load(b_ptr + columns, mask=columns < cols, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)
        x = tl.load(x_ptr + row64[:, None] * stride_x + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        m = tl.sum(x, 1) / cols
        x = tl.where(inside, x - m[:, None], 0.0)  # columns beyond the row must not count in the variance
        r = tl.rsqrt(tl.sum(x * x, 1) / cols + eps)
        y = x * r[:, None] * w.to(tl.float32)[None, :]
        if BIAS:
            y += b.to(tl.float32)[None, :]
        tl.store(m_ptr + row, m, mask=row < rows)
        tl.store(r_ptr + row, r, mask=row < rows)
        tl.store(y_ptr + row64[:, None] * cols + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(dy_ptr, x_ptr, w_ptr, m_ptr, r_ptr, dx_ptr, dw_ptr, db_ptr, rows, cols, stride_dy, stride_x,
                    BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Tiles of ROWS rows, and this program's share of dw and db as one row of each."""
    columns = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)
        x = tl.load(x_ptr + row64[:, None] * stride_x + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row64[:, None] * stride_dy + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        m = tl.load(m_ptr + row, mask=row < rows, other=0.0)
        r = tl.load(r_ptr + row, mask=row < rows, other=0.0)
        normed = (x - m[:, None]) * r[:, None]
        dw += dy * normed
        if BIAS:
            db += dy
        g = dy * w.to(tl.float32)[None, :]  # 0 beyond the row, where normed is not
        c1 = tl.sum(g * normed, 1) / cols
        c2 = tl.sum(g, 1) / cols
        dx = (g - normed * c1[:, None] - c2[:, None]) * r[:, None]
        tl.store(dx_ptr + row64[:, None] * cols + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    share = tl.program_id(0).to(tl.int64) * cols + columns
    tl.store(dw_ptr + share, tl.sum(dw, 0), mask=columns < cols)
    if BIAS:
        tl.store(db_ptr + share, tl.sum(db, 0), mask=columns < cols)


def launch_forward(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, m: Tensor, r: Tensor, eps: float) -> None:
    """Fill y, m and r. x has contiguous rows, y is contiguous."""
    rows, cols = x.shape
    launch = row_launch("layernorm", cols, per_thread=64, tile=8192)
    grid = (launch.programs(triton.cdiv(rows, launch.rows), x.device),)
    _dispatch.launch(forward_kernel, grid, x, w, b, y, m, r, rows, cols, x.stride(0), eps, BIAS=b is not None,
                     ROWS=launch.rows, BLOCK=launch.block, STAGES=launch.stages, num_warps=launch.warps)


def launch_backward(dy: Tensor, x: Tensor, w: Tensor, m: Tensor, r: Tensor, dx: Tensor,
                    bias_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Fill dx; returns dw in w's dtype and db in bias_dtype, if there is one."""
    rows, cols = x.shape
    has_bias = bias_dtype is not None
    launch = pipelined_launch("layernorm_backward", cols, dy.element_size() + x.element_size(), x.device)
    programs = launch.programs(triton.cdiv(rows, launch.rows), x.device)
    parts = torch.empty(1 + has_bias, programs, cols, dtype=torch.float32, device=x.device)
    _dispatch.launch(backward_kernel, (programs,), dy, x, w, m, r, dx, parts[0], parts[-1], rows, cols, dy.stride(0),
                     x.stride(0), BIAS=has_bias, ROWS=launch.rows, BLOCK=launch.block, STAGES=launch.stages,
                     num_warps=launch.warps)
    dw, *db = sum_columns(parts, w.dtype, *[bias_dtype] * has_bias)
    return dw, db[0] if has_bias else None


def _check(x: object, w: object, b: object, eps: object, *_: object) -> None:
    check("x", x, 1)
    check_width("weight", w, "x", x)
    if b is not None:
        check_width("bias", b, "x", x)
    check_positive("eps", eps)


@_dispatch.operator("layer_norm_forward", _check)
def forward_op(x: Tensor, w: Tensor, b: Tensor | None, eps: float,
               dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (…, D) → y in `dtype`, m and r (N) fp32."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    m, r = (torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device) for _ in range(2))
    if _dispatch.idle(x):
        return y, m, r
    w, b = w.contiguous(), None if b is None else b.contiguous()
    if not _triton.runs_triton(x):
        x32 = reference.wide(x)
        r.copy_(torch.rsqrt(x32.var(-1, correction=0) + eps).flatten())
        return y.copy_(reference.layer_norm(x32, w, b, eps)), m.copy_(x32.mean(-1).flatten()), r
    if x.shape[-1] <= ONE_TILE:
        launch_forward(as_rows(x), w, b, y, m, r, eps)
    else:
        launch_long_forward(as_rows(x), None, w, y, y, r, eps, False, m, b)
    return y, m, r


@_dispatch.operator("layer_norm_backward")
def backward_op(dy: Tensor, x: Tensor, w: Tensor, m: Tensor, r: Tensor,
                bias_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db): db in bias_dtype, empty without a bias."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if _dispatch.idle(x):
        return dx, w.new_zeros(w.shape), w.new_zeros(0 if bias_dtype is None else w.shape, dtype=bias_dtype)
    if not _triton.runs_triton(x):
        normed = (reference.wide(x) - m.view(*x.shape[:-1], 1)) * r.view(*x.shape[:-1], 1)
        g = reference.wide(dy) * reference.wide(w)
        inner = g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)
        dw = sum_over_rows(reference.wide(dy) * normed).to(w.dtype)
        db = w.new_zeros(0) if bias_dtype is None else sum_over_rows(dy).to(bias_dtype)
        return dx.copy_(inner * r.view(*x.shape[:-1], 1)), dw, db
    launch = launch_backward if x.shape[-1] <= ONE_TILE_BACKWARD else _launch_long
    dw, db = launch(as_rows(dy), as_rows(x), w.contiguous(), m, r, dx, bias_dtype)
    return dx, dw, w.new_empty(0) if db is None else db


def _launch_long(dy, x, w, m, r, dx, bias_dtype):
    return launch_long_backward(dy, None, x, w, m, r, dx, False, bias_dtype)


class LayerNorm(Function):
    """`apply(x, weight, bias=None, eps=1e-5)` → y of x's shape. Saved: x, weight, mean and 1/std of each row."""

    @staticmethod
    def forward(ctx, x, weight, bias=None, eps=1e-5):
        y, m, r = forward_op(x, weight, bias, eps, autocast_dtype(x))
        ctx.save_for_backward(x, weight, m, r)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        dx, dw, db = backward_op(dy, *ctx.saved_tensors, ctx.bias_dtype)
        return dx, dw, None if ctx.bias_dtype is None else db, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean)/√(var + eps)·weight + bias over the last dimension; differentiable in x, weight and bias.

    Args:
        x: (…, D), fp32, fp16 or bf16, any strides.
        weight, bias: (D), any of these dtypes.
        eps: above 0.

    Returns:
        x's shape and dtype; under autocast autocast's dtype.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return LayerNorm.apply(x, weight, bias, eps)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes, with a bias."""
    count, cols = torch.Size(shape).numel(), shape[-1]
    vectors = 2 * cols * dtype.itemsize * (2 if backward else 1) + 8 * count // max(cols, 1)
    return Cost((12 if backward else 7) * count, (3 if backward else 2) * count * dtype.itemsize + vectors)
