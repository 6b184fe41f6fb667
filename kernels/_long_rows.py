"""RMSNorm and LayerNorm of rows that do not fit in one program's registers: in chunks, read twice.

Forward: one program per row walks over it once for the statistics and once more, backwards, to
normalise: the chunks that were read last are still in the cache. The variance of LayerNorm merges
the moments of the chunks (Chan et al. 1979, the parallel form of Welford's recurrence), which does
not cancel as Σx² − (Σx)²/n does.

Backward: a first kernel computes each row's two means, which `rmsnorm.backward_kernel`, whose
programs own some columns of many rows then, reads.
"""

import torch
from torch import Tensor

from ._dispatch import tl, triton
from ._rows import Launch, chosen, load_fp32, store_rounded
from .rmsnorm import gradient_before


@triton.jit
def merge_moments(count, mean, m2, piece_count, piece_mean, piece_m2):
    """Mean and sum of squared deviations of two sets together; counts are above 0 for the second."""
    total = count + piece_count
    delta = piece_mean - mean
    return (
        total,
        mean + delta * (piece_count / total),
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
    """One row per program; CENTRE makes it LayerNorm."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * cols
    s_ptr += row * cols
    offsets = tl.arange(0, BLOCK)
    count = 0.0
    mean = 0.0
    m2 = 0.0
    for start in tl.range(0, cols, BLOCK):
        inside = start + offsets < cols
        s = load_fp32(x_ptr + start + offsets, inside)
        if residual_ptr is not None:
            s += load_fp32(residual_ptr + row * stride_residual + start + offsets, inside)
            rounded = s.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + start + offsets, rounded, mask=inside)
            s = rounded.to(tl.float32)
        if CENTRE:
            here = tl.minimum(cols - start, BLOCK).to(tl.float32)  # the last chunk may be shorter
            piece_mean = tl.sum(s, 0) / here
            deviation = tl.where(inside, s - piece_mean, 0.0)
            count, mean, m2 = merge_moments(
                count, mean, m2, here, piece_mean, tl.sum(deviation * deviation, 0)
            )
        else:
            m2 += tl.sum(s * s, 0)
    r = tl.rsqrt(m2 / cols + eps)
    tl.store(r_ptr + row, r)
    if CENTRE:
        tl.store(r_ptr + tl.num_programs(0) + row, mean)
    if residual_ptr is not None:
        tl.debug_barrier()  # other threads of this program wrote what is read now
    pieces = tl.cdiv(cols, BLOCK)
    for piece in tl.range(0, pieces):
        columns = (pieces - 1 - piece) * BLOCK + offsets
        inside = columns < cols
        s = load_fp32((x_ptr if residual_ptr is None else s_ptr) + columns, inside)
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
    """c: of each row mean(w·g·ŝ), and for LayerNorm then of each row mean(w·g)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    r = tl.load(r_ptr + row)
    mean = 0.0
    if CENTRE:
        mean = tl.load(r_ptr + tl.num_programs(0) + row)
    c1 = tl.zeros([BLOCK], tl.float32)
    c2 = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        columns = start + offsets
        inside = columns < cols
        normed = (load_fp32(s_ptr + row * stride_s + columns, inside) - mean) * r
        g = load_fp32(dy_ptr + row * stride_dy + columns, inside)
        w = load_fp32(w_ptr + columns, inside)
        g = gradient_before(g, normed * w, SILU) * w
        c1 += g * normed
        c2 += g
    tl.store(c_ptr + row, tl.sum(c1, 0) / cols)
    if CENTRE:
        tl.store(c_ptr + tl.num_programs(0) + row, tl.sum(c2, 0) / cols)


def launch_long_forward(x, residual, w, y, s, r, eps, silu, bias=None) -> None:
    """Fill y, r and with a residual s; all as for `rmsnorm.launch_forward`."""
    rows, cols = x.shape
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


def launch_products(dy, s, w, r, silu) -> Tensor:
    """Per row mean(w·g·ŝ), (1, N), for LayerNorm with mean(w·g) as (2, N); all as for `rmsnorm.launch_backward`."""
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
