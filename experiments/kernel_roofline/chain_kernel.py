"""One kernel for chains around a row operation.

    [x + residual] → [exp] → [+ 1] → norm, softmax or normalize → [· SCALE] → [+ bias] → [silu]

    s = exp(x + residual) + 1, in fp32, never stored
    z = RMSNorm(s)·w, LayerNorm(s)·w + b, softmax(s) or, for normalize, s over its row's sum
    y = silu(SCALE·z + bias)

Shapes: x, residual, y (N, D), contiguous, any of fp32, fp16 and bf16; w, b, bias (D). A program per
tile of rows, each of which stays in registers from its load to its store. Forward only: it shows
what a fusion brings. Bytes: x, residual and y once; `kernels.rmsnorm.add_rms_norm` stores s too,
which the next block needs.
"""

import torch
from torch import Tensor

from kernels import _dispatch
from kernels._dispatch import tl, triton
from kernels._rows import row_launch


@triton.jit
def chain_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    bias_ptr,
    y_ptr,
    rows,
    cols,
    eps,
    RESIDUAL: tl.constexpr,
    EXP: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # This program's tile: ROWS whole rows of BLOCK columns, a power of two that may exceed `cols`.
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = (columns < cols)[None, :]
    inside = (row < rows)[:, None] & real
    # In 64 bits: rows · cols can exceed 2^31 elements, and a 32-bit offset would wrap around.
    at = row.to(tl.int64)[:, None] * cols + columns[None, :]
    # In fp32 from here to the store. One by one, each operation would round to the dtype of x.
    s = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        s += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if EXP:
        s = tl.exp(s)
    if PLUS_ONE:
        s += 1.0
    # Columns beyond the row's end are 1 or 2 now, and must not count in its sums.
    if EXP or PLUS_ONE:
        s = tl.where(real, s, 0.0)
    if KIND == "softmax":
        # Subtracting the row's maximum keeps exp from overflowing. Padding is −inf for the maximum,
        # which it must not raise, and 0 in the sum.
        powered = tl.where(
            real, tl.exp(s - tl.max(tl.where(real, s, float("-inf")), 1)[:, None]), 0.0
        )
        y = powered / tl.sum(powered, 1)[:, None]
    elif KIND == "normalize":
        y = s / tl.sum(s, 1)[:, None]
    else:
        if KIND == "layer_norm":
            # Padding becomes −mean here, and is set to 0 again for the sum of squares below.
            s = tl.where(real, s - (tl.sum(s, 1) / cols)[:, None], 0.0)
        # LayerNorm divides by √(mean of (s − mean)² + eps), and RMSNorm by the same with s not
        # centred.
        y = s * tl.rsqrt(tl.sum(s * s, 1) / cols + eps)[:, None]
        y *= tl.load(w_ptr + columns, mask=columns < cols, other=0.0).to(tl.float32)[None, :]
        if KIND == "layer_norm":
            y += tl.load(b_ptr + columns, mask=columns < cols, other=0.0).to(tl.float32)[None, :]
    y *= SCALE
    if BIAS:
        y += tl.load(bias_ptr + columns, mask=columns < cols, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def launch(
    x: Tensor,
    residual: Tensor | None,
    exp: bool,
    plus_one: bool,
    kind: str,
    w: Tensor | None,
    b: Tensor | None,
    scale: float,
    bias: Tensor | None,
    silu: bool,
    eps: float = 1e-5,
) -> Tensor:
    """Return y. `kind` is rms_norm, layer_norm, softmax or normalize."""
    y, (rows, cols) = torch.empty_like(x), x.shape
    how = row_launch("chain", cols)
    _dispatch.launch(
        chain_kernel,
        (triton.cdiv(rows, how.rows),),
        x,
        residual,
        w,
        b,
        bias,
        y,
        rows,
        cols,
        eps,
        RESIDUAL=residual is not None,
        EXP=exp,
        PLUS_ONE=plus_one,
        KIND=kind,
        SCALE=scale,
        BIAS=bias is not None,
        SILU=silu,
        ROWS=how.rows,
        BLOCK=how.block,
        num_warps=how.warps,
    )
    return y
