"""RMSNorm, alone or fused with its neighbours in a Transformer block: residual addition and SiLU.

Mathematics, per row of D elements:
    s = x + residual (s = x without a residual)
    r = 1/√(mean(s²) + eps),  ŝ = s·r,  u = ŝ·w
    y = f(u), where f is the identity or SiLU
Backward, from the gradients dy of y and dtotal of s:
    g  = dy·f′(u)
    ds = r·(w·g − ŝ·mean(w·g·ŝ)) + dtotal;  dx and dresidual are both ds
    dw = Σ over rows of g·ŝ
`layernorm.py` uses the same kernels with CENTRE: s is then centred first, and g has a second mean.

Shapes: N rows, D columns. x, residual, s, y (N, D); w (D); r (N) fp32. LayerNorm stores r and the
rows' means in one (2, N) tensor. Statistics are fp32. y has x's dtype, or autocast's.
Saved for backward: s (x itself without a residual), w, r. y is not saved, because ŝ follows from s
and r with one multiplication.
Bytes: forward reads x and writes y (with a residual: reads two tensors, writes two). Backward reads
dy and s and writes ds. FLOPs per element: about 4 forward, 9 backward.

How the kernels map to the GPU:
- Forward: a program holds one tile of whole rows in registers from the load to the store. Rows
  longer than ONE_TILE do not fit and are read twice, see `_long_rows.py`.
- Backward: a fixed number of programs loop over the rows. Each program sums its part of dw (and of
  db for LayerNorm) in registers and writes it once. `sum_columns` adds the parts.
- Backward of few rows: the second launch would cost more than the work. One launch has two kinds
  of programs instead: some compute ds of a few rows, the others read all rows of a few columns once
  more for dw and db.

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

ONE_TILE = 16384  # longest row, in columns, that the forward keeps in registers
ONE_TILE_BACKWARD = 8192  # shorter: the backward holds x, dy, w and the sums for dw and db at once
# Limits on rows, columns and bytes of s for the backward in one launch. Below them, what the
# programs for dw read a second time is still in the L2, and costs less than a second launch.
FEW_ROWS = 2048
FEW_COLUMNS = 4096
FEW_BYTES = 11 << 20
# The programs for dw in that launch own STRIP columns: 32 bytes of half precision, a sector of the
# L2. Their tiles have STRIP_ROWS rows, because 16 columns of one row are too few for all threads.
STRIP = 16
STRIP_ROWS = tl.constexpr(256)


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
    """Normalise tiles of ROWS whole rows. y and s are contiguous, x and residual may have gaps.

    CENTRE: LayerNorm. The means go to the second half of r.
    SILU: apply SiLU to the result.
    WIDE: load w again for every tile, from the cache, instead of keeping it in registers. Long rows
    need these registers, or only one program fits on a multiprocessor.
    """
    columns = tl.arange(0, BLOCK)
    # All rows share w and b: load them once, before the loop.
    if not WIDE:
        w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    if b_ptr is not None:
        b = tl.load(b_ptr + columns, mask=columns < cols, other=0.0)
    # Each program has one tile, so this loop runs once, unless `forced` chooses fewer programs. It
    # stays because the compiler schedules loads differently without it. Measured on an H200, time
    # without the loop relative to with it: RMSNorm 1.3 at 16,384 columns (w is loaded earlier, its
    # registers leave room for only one row per multiprocessor), LayerNorm 0.75 at 6,144 columns
    # and 1.06 from 10,000 on.
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile * ROWS + tl.arange(0, ROWS)
        # Two cuts: rows beyond the last, and columns beyond cols, because BLOCK is a power of two.
        # Columns cut off are loaded as 0, which adds nothing to the sum of squares.
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)[:, None]  # the product with a stride may exceed 2³¹
        out = row64 * cols + columns[None, :]
        s = load_fp32(x_ptr + row64 * stride_x + columns[None, :], inside)
        if residual_ptr is not None:
            s += load_fp32(residual_ptr + row64 * stride_residual + columns[None, :], inside)
            rounded = s.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + out, rounded, mask=inside)
            s = rounded.to(tl.float32)  # backward reads the rounded sum, so normalise that
        if CENTRE:
            mean = tl.sum(s, 1) / cols
            # Columns cut off are 0 − mean now. Set them to 0 again, or they count in the variance.
            s = tl.where(inside, s - mean[:, None], 0.0)
            tl.store(r_ptr + rows + row, mean, mask=row < rows)
        # Divided by cols and not by BLOCK, whose further columns are 0. With CENTRE, s is centred
        # by now and this is 1/√(variance + eps).
        r = tl.rsqrt(tl.sum(s * s, 1) / cols + eps)
        if WIDE:
            w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
        y = s * r[:, None] * w.to(tl.float32)[None, :]
        if b_ptr is not None:
            y += b.to(tl.float32)[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))  # SiLU: y·sigmoid(y)
        # In fp32: backward recomputes ŝ = s·r from it, and an error of r would be one of the whole
        # row.
        tl.store(r_ptr + row, r, mask=row < rows)
        store_rounded(y_ptr + out, y, inside)


@triton.jit
def gradient_before(g, u, SILU: tl.constexpr):
    """Return the gradient of u = ŝ·w from the gradient g of f(u), f being SiLU or the identity."""
    if SILU:
        # SiLU′(u) = σ(u)·(1 + u·(1 − σ(u)))
        # This is the product rule for u·σ(u), with σ′ = σ·(1 − σ).
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
    """Loop over tiles of ROWS rows × these columns, the body of both backward kernels.

    first, step: the tiles are first, first + step, first + 2·step, …
    DS: write ds of these tiles.
    SUMS: write the sums of g·ŝ over these tiles to dw and, with BIAS, those of g to db.
    c_ptr: None if the columns are whole rows. Otherwise it points to the rows' means of w·g·ŝ,
    followed with CENTRE by their means of w·g, since a part of a row does not suffice for a mean.
    """
    w = tl.load(w_ptr + columns, mask=columns < cols, other=0.0)
    # One sum for each of the ROWS rows of a tile: the loop then needs no reduction across threads.
    dw = tl.zeros([ROWS, columns.shape[0]], tl.float32)
    db = tl.zeros([ROWS, columns.shape[0]], tl.float32)
    for tile in tl.range(first, tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)[:, None]
        out = row64 * cols + columns[None, :]
        # Not with `load_fp32`: the compiler would then allocate registers differently, on Ampere
        # more of them.
        s = tl.load(s_ptr + row64 * stride_s + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        g = tl.load(dy_ptr + row64 * stride_dy + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        # Rows beyond the last get r = 0, so their ŝ is 0 and adds nothing to dw.
        r = tl.load(r_ptr + row, mask=row < rows, other=0.0)
        # LayerNorm normalises s − mean. The second half of r has the means.
        if CENTRE:
            s -= tl.load(r_ptr + rows + row, mask=row < rows, other=0.0)[:, None]
        normed = s * r[:, None]
        w32 = w.to(tl.float32)[None, :]
        # From the gradient of y to that of u = ŝ·w.
        g = gradient_before(g, normed * w32, SILU)
        # u = ŝ·w + b: ∂u/∂w = ŝ and ∂u/∂b = 1, summed over all rows, as these share w and b.
        if SUMS:
            dw += g * normed
            if BIAS:
                db += g
        if DS:
            # w is 0 beyond the row, and so is g now. normed need not be: it is −mean·r there with
            # CENTRE. So the means below may sum over the whole tile.
            g = g * w32
            if c_ptr is None:
                mean = tl.sum(g * normed, 1) / cols
            else:
                mean = tl.load(c_ptr + row, mask=row < rows)
            # From ŝ_i = s_i·r and ∂r/∂s_j = −r³·s_j/D: ds_j = r·(g_j − ŝ_j·Σ_i g_i·ŝ_i/D), with g =
            # w·dy·f′.
            ds = g - normed * mean[:, None]
            # The mean that was subtracted depends on all elements of the row. So the gradient loses
            # its own mean.
            if CENTRE:
                if c_ptr is None:
                    mean = tl.sum(g, 1) / cols
                else:
                    mean = tl.load(c_ptr + rows + row, mask=row < rows)
                ds -= mean[:, None]
            # The factor r of both terms, multiplied once.
            ds = ds * r[:, None]
            # s itself is also a result, the residual stream that continues past the norm. Its
            # gradient adds up with that through the norm.
            if dtotal_ptr is not None:
                ds += load_fp32(dtotal_ptr + out, inside)
            store_rounded(ds_ptr + out, ds, inside)
    if SUMS:
        # The only reduction over the rows of a tile, once per program.
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
    """Compute ds, and partial sums of dw and db, for BLOCK columns of every P-th tile of rows.

    The grid is (strips of BLOCK columns, P). Program (i, j) owns strip i of the tiles j, j + P, …
    parts is (P, cols) for dw, followed with BIAS by (P, cols) for db. Row j of each belongs to the
    programs (·, j), so no two programs write to the same place.
    """
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
        True,  # ds
        True,  # dw and db
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
    """Compute ds, dw and db of few rows in one launch.

    The first cdiv(cols, STRIP) programs each compute dw and db of STRIP columns, from all rows. The
    others each compute ds of one tile of ROWS whole rows.
    """
    # The programs for dw have the first numbers. They read all rows and take longest, so they start
    # first.
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
            0,  # from the first tile of rows
            1,  # to the last
            rows,
            cols,
            stride_dy,
            stride_s,
            CENTRE,
            BIAS,
            SILU,
            False,  # no ds
            True,  # dw and db
            STRIP_ROWS,
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
            tl.num_programs(0),  # more than there are tiles: the loop runs once
            rows,
            cols,
            stride_dy,
            stride_s,
            CENTRE,
            BIAS,
            SILU,
            True,  # ds
            False,  # neither dw nor db
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
    """Fill y, r and, with a residual, s. Inputs have contiguous rows, outputs are contiguous.

    Args:
        x: (N, D), input.
        residual: (N, D), input, or None.
        w: (D), input, contiguous.
        y: (N, D), output.
        s: (N, D), output x + residual. Without a residual it is not written.
        r: (N) fp32, output. For LayerNorm (2, N): 1/std of each row, then the means.
        eps: number added to the mean of squares.
        silu: whether to apply SiLU to the result.
        bias: (D), input, or None.
    """
    rows, cols = x.shape
    centre = r.dim() == 2
    if cols > ONE_TILE:
        from ._long_rows import launch_long_forward

        launch_long_forward(x, residual, w, y, s, r, eps, silu, bias)
        return
    # Next to a row of more than half of ONE_TILE columns w does not stay in registers, so that a
    # multiprocessor has room for two such rows.
    wide = not centre and cols > ONE_TILE // 2
    if centre:
        launch = row_launch("rmsnorm", cols, per_thread=64, tile=8192 if cols > 1024 else 2048)
    elif wide:
        launch = row_launch("rmsnorm", cols, per_thread=16)
    else:
        launch = row_launch("rmsnorm", cols, per_thread=32)
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
    """Fill ds, and return the gradients of the weight and the bias.

    Args:
        dy: (N, D), gradient of y, with contiguous rows.
        dtotal: (N, D), gradient of s, contiguous, or None.
        s: (N, D), what was normalised, with contiguous rows.
        w: (D), contiguous.
        r: statistics that `launch_forward` filled, (N), or (2, N) for LayerNorm.
        ds: (N, D), output, contiguous.
        silu: whether SiLU follows the norm.
        bias_dtype: dtype of the bias, or None without a bias.

    Returns:
        dw (D) in w's dtype and db (D) in bias_dtype, or None without a bias.
    """
    rows, cols = s.shape
    # All three limits: the programs for dw read s and dy a second time, which is cheap only from
    # the L2.
    few = rows <= FEW_ROWS and cols <= FEW_COLUMNS and s.nbytes <= FEW_BYTES
    if few and cols <= ONE_TILE_BACKWARD:
        return _launch_few_rows(dy, dtotal, s, w, r, ds, silu, bias_dtype)
    if cols > ONE_TILE_BACKWARD:
        from ._long_rows import launch_products

        # A program cannot hold a whole row, so a first kernel computes the rows' means.
        means = launch_products(dy, s, w, r, silu)
        launch = chosen("long_strips", Launch(block=2048, per_sm=6))
    else:
        means = None
        loaded = [tensor for tensor in (dy, s, dtotal) if tensor is not None]
        itemsize = sum(tensor.element_size() for tensor in loaded)
        launch = pipelined_launch(cols, itemsize, s.device)
    strips = cdiv(cols, launch.block)
    # Divide all programs that run at the same time among the strips. More of them would not run
    # earlier, and would make `parts` larger.
    programs = launch.programs(1 << 30, s.device)
    shares = max(1, min(cdiv(rows, launch.rows), programs // strips))
    has_bias = bias_dtype is not None
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
        CENTRE=r.dim() == 2,
        BIAS=has_bias,
        SILU=silu,
        ROWS=launch.rows,
        STAGES=launch.stages,
    )
    return sum_columns(parts, w.dtype, bias_dtype)


def _launch_few_rows(
    dy: Tensor,
    dtotal: Tensor | None,
    s: Tensor,
    w: Tensor,
    r: Tensor,
    ds: Tensor,
    silu: bool,
    bias_dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """Launch the backward of few rows; arguments and results are those of `launch_backward`."""
    rows, cols = s.shape
    dw = w.new_empty(cols)
    db = None if bias_dtype is None else w.new_empty(cols, dtype=bias_dtype)
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
        CENTRE=r.dim() == 2,
        BIAS=bias_dtype is not None,
        SILU=silu,
        ROWS=launch.rows,
        STRIP=STRIP,
    )
    return [dw, db]


def _check(x: object, residual: object, w: object, eps: object, *_: object) -> None:
    """Raise TypeError or ValueError for arguments of `forward_op` that do not fit."""
    check("x", x, 1)
    if residual is not None:
        check_like("residual", residual, "x", x, dtype=False)
    check_width("weight", w, "x", x)
    check_positive("eps", eps)


@_dispatch.operator("rms_norm_forward", _check)
def forward_op(
    x: Tensor, residual: Tensor | None, w: Tensor, eps: float, silu: bool, dtype: torch.dtype
) -> list[Tensor]:
    """Allocate and compute [y, r], and with a residual [y, r, s].

    Args:
        x: (…, D), input.
        residual: tensor of x's shape, or None.
        w: (D), weight.
        eps: number added to the mean of squares.
        silu: whether to apply SiLU to the result.
        dtype: dtype of y.
    """
    y = x.new_empty(x.shape, dtype=dtype)
    r = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    if residual is None:
        s = y  # the kernel takes a pointer, and does not write to it
        results = [y, r]
    else:
        s = residual.new_empty(x.shape)
        results = [y, r, s]
    if _dispatch.idle(x):
        return results
    if not _dispatch.runs_triton(x):
        normalised = x if residual is None else s.copy_(x + residual)
        plain_y, plain_r = _plain_forward(normalised, w, eps, silu)
        torch._foreach_copy_([y, r], [plain_y, plain_r.flatten()])
        return results
    residual_rows = None if residual is None else as_rows(residual)
    launch_forward(as_rows(x), residual_rows, w.contiguous(), y, s, r, eps, silu)
    return results


@_dispatch.operator("rms_norm_backward")
def backward_op(
    dy: Tensor, dtotal: Tensor | None, s: Tensor, w: Tensor, r: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return (ds, dw) from the gradient of y and, where there was a residual, of s."""
    ds = s.new_empty(s.shape)
    if _dispatch.idle(s):
        return ds, w.new_zeros(w.shape)
    if not _dispatch.runs_triton(s):
        return plain_backward(dy, dtotal, s, w, None, r, silu)
    dtotal = None if dtotal is None else dtotal.contiguous()
    dw, _ = launch_backward(as_rows(dy), dtotal, as_rows(s), w.contiguous(), r, ds, silu, None)
    return ds, dw


def _plain_forward(s: Tensor, w: Tensor, eps: float, silu: bool) -> tuple[Tensor, Tensor]:
    """Return y (…, D) and r (…) in plain torch, in fp32, or in float64 for float64."""
    from . import reference

    s_wide = reference.wide(s)
    y = reference.rms_norm(s_wide, w, eps)
    if silu:
        y = reference.silu(y)
    r = torch.rsqrt(s_wide.square().mean(-1) + eps)
    return y, r


def plain_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    s: Tensor,
    w: Tensor,
    mean: Tensor | None,
    r: Tensor,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (ds, dw) in plain torch, of LayerNorm where the rows' means are given."""
    from . import reference

    g = reference.wide(dy)
    w_wide = reference.wide(w)
    r = r.view(*s.shape[:-1], 1)
    centred = reference.wide(s)
    if mean is not None:
        centred = centred - mean.view(r.shape)
    normed = centred * r
    # The same formulas as in `walk`, over all rows at once.
    if silu:
        u = normed * w_wide
        sigmoid = torch.sigmoid(u)
        g = g * sigmoid * (1 + u * (1 - sigmoid))
    dw = sum_over_rows(g * normed)
    g = g * w_wide
    ds = g - normed * (g * normed).mean(-1, keepdim=True)
    if mean is not None:
        ds = ds - g.mean(-1, keepdim=True)
    ds = ds * r
    if dtotal is not None:
        ds = ds + dtotal
    return ds.to(s.dtype), dw.to(w.dtype)


class RMSNorm(Function):
    """RMSNorm: `apply(x, weight, eps=1e-5)` → y of x's shape.

    Saved for backward: x, weight, and 1/rms of each row.
    """

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5):
        y, r = forward_op(x, None, weight, eps, False, autocast_dtype(x))
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        dx, dw = backward_op(dy, None, x, weight, r, False)
        return dx, dw, None


class RMSNormPyTorch(Function):
    """RMSNorm in plain torch, on any device: `apply(x, weight, eps=1e-5)` → y.

    It also takes float64, for `torch.autograd.gradcheck`.
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
        dx, dw = plain_backward(dy, None, x, weight, None, r)
        return dx, dw, None


class AddRMSNorm(Function):
    """Addition and RMSNorm: `apply(x, residual, weight, eps=1e-5, activation=None)` → (y, s).

    Saved: s, weight, and 1/rms of each row.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, eps=1e-5, activation=None):
        if activation not in (None, "silu"):
            raise ValueError(f"activation is {activation!r}; allowed: None, 'silu'")
        silu = activation == "silu"
        y, r, s = forward_op(x, residual, weight, eps, silu, autocast_dtype(x))
        ctx.save_for_backward(s, weight, r)
        ctx.silu = silu
        # Without this, autograd fills a missing gradient with zeros, and the kernel reads them.
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    def backward(ctx, dy, dtotal):
        s, weight, r = ctx.saved_tensors
        if dy is None:  # only s was used
            ds, dw = dtotal, None
        else:
            ds, dw = backward_op(dy, dtotal, s, weight, r, ctx.silu)
        return ds, ds, dw, None, None  # x and residual have the same gradient


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return x/√(mean(x²) + eps)·weight, the mean taken over the last dimension.

    The result is differentiable once in x and weight.

    Args:
        x: tensor (…, D) in fp32, fp16 or bf16, with any strides.
        weight: tensor (D) in any of these dtypes.
        eps: number above 0.

    Returns:
        A tensor of x's shape and dtype. Under autocast it has autocast's dtype, because a matmul
        usually follows, which would cast it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    return apply(RMSNorm, x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y, s) with s = x + residual and y = rms_norm(s), in one pass over memory.

    Args:
        x: as for `rms_norm`.
        residual: tensor of x's shape in fp32, fp16 or bf16. s has its dtype.
        weight: as for `rms_norm`.
        eps: as for `rms_norm`.
        activation: "silu" to apply SiLU to y, or None.

    Raises:
        TypeError, ValueError: as for `rms_norm`.
    """
    return apply(AddRMSNorm, x, residual, weight, eps, activation)


def cost(
    shape: tuple[int, ...], dtype: torch.dtype, *, residual: bool = False, backward: bool = False
) -> "Cost":  # noqa: F821
    """Return the least work of one pass.

    Args:
        shape: dimensions of x.
        dtype: dtype of all tensors.
        residual: whether a residual is added.
        backward: whether to count the backward pass instead of the forward pass.
    """
    from .cost import Cost

    if backward:
        flops = 9
        tensors = 4 if residual else 3  # dy, s, ds, and the gradient of s
        vectors = 2  # w and dw
    else:
        flops = 4
        tensors = 4 if residual else 2  # x, y, residual, s
        vectors = 1  # w
    rows = torch.Size(shape[:-1]).numel()
    vector_bytes = vectors * shape[-1] * dtype.itemsize + 4 * rows  # r is fp32
    return Cost.of_elements(shape, dtype, flops, tensors) + Cost(0, vector_bytes)
