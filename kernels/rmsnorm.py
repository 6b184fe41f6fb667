"""RMSNorm, alone and fused with what stands around it in a Transformer block: a residual addition before, SiLU after.

Math, per row:  s = x + residual (or x),  r = 1/√(mean(s²) + eps),  y = f(s·r·w), f the identity or SiLU.
    g = dy·f′(s·r·w);  ds = r·(w·g − ŝ·mean(w·g·ŝ)) + what arrives for s itself, ŝ = s·r;  dw = Σ_rows g·ŝ.

Shapes: `N` rows, `D` columns: x, residual, s, y (N, D); w (D); r (N) fp32. Bytes: forward x and y
once (with a residual x, residual, s, y); backward dy, s and ds once. FLOPs: about 4 per element
forward, 9 backward. Saved for backward: s (x itself where there is no residual), w, r. Statistics
in fp32; y in x's dtype or autocast's.

Rows stay in registers from their one load to their one store; longer ones are read twice, in
`_long_rows.py`. CENTRE makes the kernels LayerNorm's, whose means follow the rows' r in one tensor.
Beside a row of more than half of ONE_TILE columns w does not stay, so that a multiprocessor has
room for two. Backward: a fixed number of programs walk over the rows, so that each sums its
contribution to dw and db in registers and writes it once, for `sum_columns`. A few rows take one
launch: some programs compute ds, the others read all rows of some columns once more for dw and db.

Source: Zhang & Sennrich, Root Mean Square Layer Normalization (2019).
"""

import torch
from torch import Tensor

from . import _dispatch
from ._dispatch import Function, apply, cdiv, tl, triton
from ._rows import (
    DTYPES,
    Launch,
    as_rows,
    autocast_dtype,
    check,
    check_like,
    check_positive,
    check_width,
    chosen,
    load_fp32,
    pipelined_launch,
    row_launch,
    store_rounded,
    sum_columns,
    sum_over_rows,
)

ONE_TILE = 16384  # columns up to which the forward keeps a row in registers
ONE_TILE_BACKWARD = 8192  # there x, dy, w and the sums of dw and db stand side by side
# Up to which, of s, reading twice takes less than a second launch: where the L2 has what is read
# again.
FEW_ROWS, FEW_COLUMNS, FEW_BYTES = 2048, 4096, 11 << 20
STRIP = 16  # columns, 32 bytes of half precision


@triton.jit
def forward_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    r_ptr,
    rows,
    cols,
    stride_x,
    stride_residual,
    eps,
    CENTRE: tl.constexpr,
    SILU: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of ROWS rows; y and s are contiguous.

    WIDE: w comes from the cache, row by row, which frees registers.
    """
    columns = tl.arange(0, BLOCK)
    if not WIDE:
        w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    if b_ptr is not None:
        b = tl.load(b_ptr + columns, mask=columns < cols, other=0.0)
    # One tile, unless `forced`. Without the loop w is loaded earlier, which leaves room for one row
    # of 16,384 on a multiprocessor: 1.3 times the time on an H200. LayerNorm without it: 0.75 at
    # 6,144 columns, 1.06 from 10,000 on.
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)[:, None]
        out = row64 * cols + columns[None, :]
        s = load_fp32(x_ptr + row64 * stride_x + columns[None, :], inside)
        if residual_ptr is not None:
            s += load_fp32(residual_ptr + row64 * stride_residual + columns[None, :], inside)
            rounded = s.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + out, rounded, mask=inside)
            s = rounded.to(tl.float32)  # backward sees the rounded sum: normalise the same
        if CENTRE:
            mean = tl.sum(s, 1) / cols
            # columns beyond the row must not count in the variance
            s = tl.where(inside, s - mean[:, None], 0.0)
            tl.store(r_ptr + rows + row, mean, mask=row < rows)
        r = tl.rsqrt(tl.sum(s * s, 1) / cols + eps)
        if WIDE:
            w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
        y = s * r[:, None] * w.to(tl.float32)[None, :]
        if b_ptr is not None:
            y += b.to(tl.float32)[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(r_ptr + row, r, mask=row < rows)
        store_rounded(y_ptr + out, y, inside)


@triton.jit
def gradient_before(g, u, SILU: tl.constexpr):
    """g times the derivative of what follows the norm; u is the norm's result."""
    if SILU:
        sigmoid = tl.sigmoid(u)
        g = g * sigmoid * (1.0 + u * (1.0 - sigmoid))
    return g


@triton.jit
def walk(
    dy_ptr,
    dtotal_ptr,
    s_ptr,
    w_ptr,
    r_ptr,
    c_ptr,
    ds_ptr,
    dw_ptr,
    db_ptr,
    columns,
    first,
    step,
    rows,
    cols,
    stride_dy,
    stride_s,
    CENTRE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    DS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """These columns of every step-th tile of ROWS rows: with DS their ds, with SUMS their share of dw and db.

    The columns are whole rows, unless rows' means of w·g·ŝ and w·g are at c.
    """
    w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    dw = tl.zeros([ROWS, columns.shape[0]], tl.float32)
    db = tl.zeros([ROWS, columns.shape[0]], tl.float32)
    for tile in tl.range(first, tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)[:, None]
        out = row64 * cols + columns[None, :]
        # by `load_fp32` these two would take the compiler to other registers, on Ampere to more of
        # them
        s = tl.load(s_ptr + row64 * stride_s + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        g = tl.load(dy_ptr + row64 * stride_dy + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        r = tl.load(r_ptr + row, mask=row < rows, other=0.0)
        if CENTRE:
            s -= tl.load(r_ptr + rows + row, mask=row < rows, other=0.0)[:, None]
        normed = s * r[:, None]
        w32 = w.to(tl.float32)[None, :]
        g = gradient_before(g, normed * w32, SILU)
        if SUMS:
            dw += g * normed
            if BIAS:
                db += g
        if DS:
            g = g * w32  # 0 beyond the row, where normed need not be
            mean = (
                tl.sum(g * normed, 1) / cols
                if c_ptr is None
                else tl.load(c_ptr + row, mask=row < rows)
            )
            ds = g - normed * mean[:, None]
            if CENTRE:
                mean = (
                    tl.sum(g, 1) / cols
                    if c_ptr is None
                    else tl.load(c_ptr + rows + row, mask=row < rows)
                )
                ds -= mean[:, None]
            ds = ds * r[:, None]
            if dtotal_ptr is not None:
                ds += load_fp32(dtotal_ptr + out, inside)
            store_rounded(ds_ptr + out, ds, inside)
    if SUMS:
        store_rounded(dw_ptr + columns, tl.sum(dw, 0), columns < cols)
        if BIAS:
            store_rounded(db_ptr + columns, tl.sum(db, 0), columns < cols)


@triton.jit
def backward_kernel(
    dy_ptr,
    dtotal_ptr,
    s_ptr,
    w_ptr,
    r_ptr,
    c_ptr,
    ds_ptr,
    parts_ptr,
    rows,
    cols,
    stride_dy,
    stride_s,
    CENTRE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK columns of tiles of ROWS rows, and this program's share of dw and db as one row of each."""
    share = parts_ptr + tl.program_id(1).to(tl.int64) * cols
    walk(
        dy_ptr,
        dtotal_ptr,
        s_ptr,
        w_ptr,
        r_ptr,
        c_ptr,
        ds_ptr,
        share,
        share + tl.num_programs(1).to(tl.int64) * cols,
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.program_id(1),
        tl.num_programs(1),
        rows,
        cols,
        stride_dy,
        stride_s,
        CENTRE,
        BIAS,
        SILU,
        True,
        True,
        ROWS,
        STAGES,
    )


@triton.jit
def few_rows_kernel(
    dy_ptr,
    dtotal_ptr,
    s_ptr,
    w_ptr,
    r_ptr,
    ds_ptr,
    dw_ptr,
    db_ptr,
    rows,
    cols,
    stride_dy,
    stride_s,
    CENTRE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):
    """STRIP columns of dw and db; programs after these: ds of ROWS rows."""
    tile = tl.program_id(0) - tl.cdiv(cols, STRIP)
    if tile < 0:
        walk(
            dy_ptr,
            dtotal_ptr,
            s_ptr,
            w_ptr,
            r_ptr,
            None,
            ds_ptr,
            dw_ptr,
            db_ptr,
            tl.program_id(0) * STRIP + tl.arange(0, STRIP),
            0,
            1,
            rows,
            cols,
            stride_dy,
            stride_s,
            CENTRE,
            BIAS,
            SILU,
            False,
            True,
            256,
            1,
        )
    else:
        walk(
            dy_ptr,
            dtotal_ptr,
            s_ptr,
            w_ptr,
            r_ptr,
            None,
            ds_ptr,
            dw_ptr,
            db_ptr,
            tl.arange(0, BLOCK),
            tile,
            tl.num_programs(0),
            rows,
            cols,
            stride_dy,
            stride_s,
            CENTRE,
            BIAS,
            SILU,
            True,
            False,
            ROWS,
            1,
        )


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor,
    y: Tensor,
    s: Tensor,
    r: Tensor,
    eps: float,
    silu: bool,
    bias: Tensor | None = None,
) -> None:
    """Fill y, r and with a residual s. Inputs have contiguous rows, outputs are contiguous.

    r is (N), for LayerNorm (2, N): the means are its second row.
    """
    rows, cols = x.shape
    centre = r.dim() == 2
    if cols > ONE_TILE:
        from ._long_rows import launch_long_forward

        launch_long_forward(x, residual, w, y, s, r, eps, silu, bias)
        return
    wide = not centre and cols > ONE_TILE // 2
    sizes = (
        {"per_thread": 64, "tile": 8192 if cols > 1024 else 2048}
        if centre
        else {"per_thread": 16 if wide else 32}
    )
    launch = row_launch("rmsnorm", cols, **sizes)
    launch.start(
        forward_kernel,
        (launch.programs(rows, x.device),),
        x,
        residual,
        w,
        bias,
        y,
        s,
        r,
        rows,
        cols,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        CENTRE=centre,
        SILU=silu,
        WIDE=wide,
        ROWS=launch.rows,
        STAGES=launch.stages,
    )


def launch_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    s: Tensor,
    w: Tensor,
    r: Tensor,
    ds: Tensor,
    silu: bool,
    bias_dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """Fill ds; r as `launch_forward` left it.

    Returns dw in w's dtype and db in bias_dtype, if there is one.
    """
    rows, cols = s.shape
    has_bias, means = bias_dtype is not None, None
    options = {"CENTRE": r.dim() == 2, "BIAS": has_bias, "SILU": silu}
    if cols > ONE_TILE_BACKWARD:
        from ._long_rows import launch_products

        means = launch_products(dy, s, w, r, silu)
        launch = chosen("long_strips", Launch(block=2048, per_sm=6))
    elif rows <= FEW_ROWS and cols <= FEW_COLUMNS and s.nbytes <= FEW_BYTES:
        dw, db = w.new_empty(cols), w.new_empty(cols, dtype=bias_dtype) if has_bias else None
        launch = row_launch("few_rows", cols, tile=4096)
        grid = cdiv(cols, STRIP) + launch.programs(rows, s.device)
        launch.start(
            few_rows_kernel,
            (grid,),
            dy,
            dtotal,
            s,
            w,
            r,
            ds,
            dw,
            db,
            rows,
            cols,
            dy.stride(0),
            s.stride(0),
            ROWS=launch.rows,
            STRIP=STRIP,
            **options,
        )
        return [dw, db]
    else:
        itemsize = sum(t.element_size() for t in (dy, s, dtotal) if t is not None)
        launch = pipelined_launch(cols, itemsize, s.device)
    strips = cdiv(cols, launch.block)
    shares = max(1, min(cdiv(rows, launch.rows), launch.programs(1 << 30, s.device) // strips))
    parts = s.new_empty(1 + has_bias, shares, cols, dtype=torch.float32)
    launch.start(
        backward_kernel,
        (strips, shares),
        dy,
        dtotal,
        s,
        w,
        r,
        means,
        ds,
        parts,
        rows,
        cols,
        dy.stride(0),
        s.stride(0),
        ROWS=launch.rows,
        STAGES=launch.stages,
        **options,
    )
    return sum_columns(parts, w.dtype, bias_dtype)


def _check(x: object, residual: object, w: object, eps: object, *_: object) -> None:
    check("x", x, 1)
    if residual is not None:
        check_like("residual", residual, "x", x, dtype=False)
    check_width("weight", w, "x", x)
    check_positive("eps", eps)


@_dispatch.operator("rms_norm_forward", _check)
def forward_op(
    x: Tensor, residual: Tensor | None, w: Tensor, eps: float, silu: bool, dtype: torch.dtype
) -> list[Tensor]:
    """x (…, D) → y in `dtype`, r (N) fp32 and, with a residual, s."""
    y, r = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    s = y if residual is None else residual.new_empty(x.shape)
    made = [y, r] if residual is None else [y, r, s]
    if _dispatch.idle(x):
        return made
    if not _dispatch.runs_triton(x):
        normed, plain_r = _plain_forward(
            x if residual is None else s.copy_(x + residual), w, eps, silu
        )
        torch._foreach_copy_([y, r], [normed, plain_r.flatten()])
        return made
    residual = None if residual is None else as_rows(residual)
    launch_forward(as_rows(x), residual, w.contiguous(), y, s, r, eps, silu)
    return made


@_dispatch.operator("rms_norm_backward")
def backward_op(
    dy: Tensor, dtotal: Tensor | None, s: Tensor, w: Tensor, r: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """(ds, dw) from the gradient of y and, where there was a residual, of s."""
    ds = s.new_empty(s.shape)
    if _dispatch.idle(s):
        return ds, w.new_zeros(w.shape)
    if not _dispatch.runs_triton(s):
        return plain_backward(dy, dtotal, s, w, None, r, silu)
    dtotal = None if dtotal is None else dtotal.contiguous()
    dw, _ = launch_backward(as_rows(dy), dtotal, as_rows(s), w.contiguous(), r, ds, silu, None)
    return ds, dw


def _plain_forward(s, w, eps, silu):
    """y and r, of s's leading dimensions, in fp32 or for float64 in that."""
    from . import reference

    normed = reference.rms_norm(reference.wide(s), w, eps)
    return reference.silu(normed) if silu else normed, torch.rsqrt(
        reference.wide(s).square().mean(-1) + eps
    )


def plain_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    s: Tensor,
    w: Tensor,
    mean: Tensor | None,
    r: Tensor,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """(ds, dw) in plain torch; with a mean LayerNorm's."""
    from . import reference

    g, w32, r = reference.wide(dy), reference.wide(w), r.view(*s.shape[:-1], 1)
    normed = (reference.wide(s) - (0 if mean is None else mean.view(r.shape))) * r
    if silu:
        sigmoid = torch.sigmoid(normed * w32)
        g = g * sigmoid * (1 + normed * w32 * (1 - sigmoid))
    dw = sum_over_rows(g * normed)
    g = g * w32
    ds = g - normed * (g * normed).mean(-1, keepdim=True)
    if mean is not None:
        ds = ds - g.mean(-1, keepdim=True)
    return (ds * r if dtotal is None else ds * r + dtotal).to(s.dtype), dw.to(w.dtype)


class RMSNorm(Function):
    """`apply(x, weight, eps=1e-5)` → y of x's shape. Saved: x, weight, and 1/rms of each row."""

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5):
        y, r = forward_op(x, None, weight, eps, False, autocast_dtype(x))
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        return *backward_op(dy, None, x, weight, r, False), None


class RMSNormPyTorch(Function):
    """The same in plain torch, on any device; float64 too, for `gradcheck`.

    `apply(x, weight, eps=1e-5)`.
    """

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5):
        check("x", x, 1, (*DTYPES, torch.float64))
        check_width("weight", weight, "x", x, (*DTYPES, torch.float64))
        check_positive("eps", eps)
        y, r = _plain_forward(x, weight, eps, False)
        ctx.save_for_backward(x, weight, r)
        # A copy: torch 2.11's compiler loses the gradient where `to` returns y itself.
        return y.to(autocast_dtype(x), copy=True)

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        return *plain_backward(dy, None, x, weight, None, r), None


class AddRMSNorm(Function):
    """`apply(x, residual, weight, eps=1e-5, activation=None)` → (y, s).

    Saved: s, weight, and 1/rms of each row.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, eps=1e-5, activation=None):
        if activation not in (None, "silu"):
            raise ValueError(f"activation is {activation!r}; allowed: None, 'silu'")
        y, r, s = forward_op(x, residual, weight, eps, activation == "silu", autocast_dtype(x))
        ctx.save_for_backward(s, weight, r)
        ctx.silu = activation == "silu"
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    def backward(ctx, dy, dtotal):
        s, weight, r = ctx.saved_tensors
        if dy is None:
            ds, dw = dtotal, None
        else:
            ds, dw = backward_op(dy, dtotal, s, weight, r, ctx.silu)
        return ds, ds, dw, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x/√(mean(x²) + eps)·weight over the last dimension; differentiable in x and weight.

    Args:
        x: (…, D), fp32, fp16 or bf16, any strides.
        weight: (D), any of these dtypes.
        eps: above 0.

    Returns:
        x's shape and dtype; under autocast autocast's dtype, because matmuls follow.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(RMSNorm, x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s): s = x + residual in residual's dtype, y = rms_norm(s), followed by SiLU where activation is "silu".

    One pass over memory instead of three or four; arguments and errors as for `rms_norm`.
    """
    return apply(AddRMSNorm, x, residual, weight, eps, activation)


def cost(
    shape: tuple[int, ...], dtype: torch.dtype, *, residual: bool = False, backward: bool = False
) -> "Cost":  # noqa: F821
    """Least FLOPs and bytes; backward includes the gradient of s where there was a residual."""
    from .cost import Cost

    tensors = 2 + backward + residual * (2 - backward)
    vectors = shape[-1] * dtype.itemsize * (1 + backward) + 4 * torch.Size(shape[:-1]).numel()
    return Cost.of_elements(shape, dtype, 9 if backward else 4, tensors) + Cost(0, vectors)
