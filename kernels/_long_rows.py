"""RMSNorm and LayerNorm of rows that do not fit in one program's registers.

Mathematics, shapes and names are those of `rmsnorm.py`. A row is cut into chunks of BLOCK columns
and read twice.

Forward: one program per row. Its first loop reads the chunks for the statistics, its second loop
reads them again to normalise. The second loop runs from the last chunk to the first, because the
chunks that were read last are still in the cache. LayerNorm merges the moments of the chunks (Chan
et al. 1979, the parallel form of Welford's recurrence). Unlike Σx² − (Σx)²/n this does not cancel.

Backward: a first kernel computes the means of w·g·ŝ and w·g of each row. Then
`rmsnorm.backward_kernel` reads them. Its programs own some columns of many rows, so that none of
them needs a whole row.
"""

import torch
from torch import Tensor

from ._dispatch import tl, triton
from ._rows import Launch, chosen, load_fp32, store_rounded
from .rmsnorm import gradient_before


@triton.jit
def merge_moments(count, mean, m2, piece_count, piece_mean, piece_m2):
    """Return count, mean and sum of squared deviations of two sets of numbers together.

    The first set may be empty, with all three 0. The second may not.
    """
    total = count + piece_count
    delta = piece_mean - mean
    return (
        total,
        # The weighted mean (n₁·m₁ + n₂·m₂)/(n₁ + n₂), written as a step from m₁, which does not
        # cancel.
        mean + delta * (piece_count / total),
        # Each set's deviations count from its own mean. The last term moves them to the common one.
        m2 + piece_m2 + delta * delta * (count * piece_count / total),
    )


@triton.jit
def long_forward_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    r_ptr,
    cols,
    stride_x,
    stride_residual,
    eps,
    CENTRE: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one row per program. CENTRE makes it LayerNorm, SILU applies SiLU to the result."""
    row = tl.program_id(0).to(tl.int64)
    # From here on all pointers are those of this program's row. y and s have no gaps between rows.
    x_ptr += row * stride_x
    y_ptr += row * cols
    s_ptr += row * cols
    offsets = tl.arange(0, BLOCK)
    # Moments of the chunks so far. RMSNorm leaves the mean at 0 and m2 is the sum of squares.
    count = 0.0
    mean = 0.0
    m2 = 0.0
    # First loop: statistics, and s in memory if there is a residual.
    for start in tl.range(0, cols, BLOCK):
        inside = start + offsets < cols
        s = load_fp32(x_ptr + start + offsets, inside)
        if residual_ptr is not None:
            s += load_fp32(residual_ptr + row * stride_residual + start + offsets, inside)
            rounded = s.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + start + offsets, rounded, mask=inside)
            s = rounded.to(tl.float32)  # backward reads the rounded sum, so normalise that
        if CENTRE:
            here = tl.minimum(cols - start, BLOCK).to(tl.float32)  # the last chunk may be shorter
            piece_mean = tl.sum(s, 0) / here
            # Columns beyond the row are 0 − mean here, and must not count.
            deviation = tl.where(inside, s - piece_mean, 0.0)
            count, mean, m2 = merge_moments(
                count, mean, m2, here, piece_mean, tl.sum(deviation * deviation, 0)
            )
        else:
            m2 += tl.sum(s * s, 0)
    # m2/cols is the variance with CENTRE, and otherwise the mean of squares.
    r = tl.rsqrt(m2 / cols + eps)
    tl.store(r_ptr + row, r)
    if CENTRE:
        # r is (2, N), and there is one program per row: the means begin N elements further.
        tl.store(r_ptr + tl.num_programs(0) + row, mean)
    if residual_ptr is not None:
        # s is read back from memory, where other threads of this program wrote it.
        tl.debug_barrier()
    pieces = tl.cdiv(cols, BLOCK)
    # Second loop, backwards. Without a residual x is s.
    for piece in tl.range(0, pieces):
        columns = (pieces - 1 - piece) * BLOCK + offsets
        inside = columns < cols
        s = load_fp32((x_ptr if residual_ptr is None else s_ptr) + columns, inside)
        # Without CENTRE mean is still 0, so this is s·r·w.
        y = (s - mean) * r * load_fp32(w_ptr + columns, inside)
        if b_ptr is not None:
            y += load_fp32(b_ptr + columns, inside)
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        store_rounded(y_ptr + columns, y, inside)


@triton.jit
def row_products_kernel(
    dy_ptr,
    s_ptr,
    w_ptr,
    r_ptr,
    c_ptr,
    cols,
    stride_dy,
    stride_s,
    CENTRE: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row's mean(w·g·ŝ) per program and, with CENTRE, its mean(w·g).

    c is (N) fp32, or (2, N) with CENTRE: first the means of w·g·ŝ of all rows, then those of w·g.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    r = tl.load(r_ptr + row)
    mean = 0.0
    if CENTRE:
        mean = tl.load(r_ptr + tl.num_programs(0) + row)
    # One sum per column of a chunk: threads exchange their sums only once, after the loop.
    c1 = tl.zeros([BLOCK], tl.float32)
    c2 = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        columns = start + offsets
        inside = columns < cols
        # ŝ, with a mean of 0 for RMSNorm. Columns beyond the row have w = 0 and so g = 0 below.
        normed = (load_fp32(s_ptr + row * stride_s + columns, inside) - mean) * r
        g = load_fp32(dy_ptr + row * stride_dy + columns, inside)
        w = load_fp32(w_ptr + columns, inside)
        g = gradient_before(g, normed * w, SILU) * w
        c1 += g * normed
        # Only LayerNorm stores this sum, below.
        c2 += g
    tl.store(c_ptr + row, tl.sum(c1, 0) / cols)
    if CENTRE:
        tl.store(c_ptr + tl.num_programs(0) + row, tl.sum(c2, 0) / cols)


def launch_long_forward(
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
    """Fill y, r and, with a residual, s; all arguments are those of `rmsnorm.launch_forward`."""
    rows, cols = x.shape
    # 16 elements per thread: a chunk stays in registers between its load and its use.
    launch = chosen("long_forward", Launch(block=8192, warps=16))
    launch.start(
        long_forward_kernel,
        (rows,),
        x,
        residual,
        w,
        bias,
        y,
        s,
        r,
        cols,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        CENTRE=r.dim() == 2,
        SILU=silu,
    )


def launch_products(dy: Tensor, s: Tensor, w: Tensor, r: Tensor, silu: bool) -> Tensor:
    """Return each row's mean(w·g·ŝ) as (1, N), or for LayerNorm with its mean(w·g) as (2, N), fp32.

    The arguments are those of `rmsnorm.launch_backward`.
    """
    rows, cols = s.shape
    centre = r.dim() == 2
    c = s.new_empty(1 + centre, rows, dtype=torch.float32)
    launch = chosen("long_products", Launch(block=4096, warps=8))
    launch.start(
        row_products_kernel,
        (rows,),
        dy,
        s,
        w,
        r,
        c,
        cols,
        dy.stride(0),
        s.stride(0),
        CENTRE=centre,
        SILU=silu,
    )
    return c
