"""The second stage of a reduction over rows: sum the partial sums that the programs of the first stage left.

Gradients of a weight that all rows share are summed in two stages: each of P programs adds up its own rows in fp32 and
writes one row of a (P, columns) matrix; this kernel then sums the columns. Unlike atomic additions the order is fixed,
and so are the bits of the result.
"""

import torch
from torch import Tensor

from . import _dispatch
from ._language import tl, triton
from ._rows import Launch, chosen


@triton.jit
def column_sum_kernel(parts_ptr, out_ptr, second_ptr, count, cols, TWO: tl.constexpr, ROWS: tl.constexpr,
                      BLOCK: tl.constexpr):
    """BLOCK columns of out (cols) = Σ over the rows of parts (count, cols) fp32; program_id(1) = 1: of the second."""
    parts_ptr += tl.program_id(1).to(tl.int64) * count * cols
    if TWO:
        if tl.program_id(1) == 1:
            out_ptr = second_ptr
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, count, ROWS):
        inside = (start + rows < count)[:, None] & (columns < cols)[None, :]
        offsets = (start + rows).to(tl.int64)[:, None] * cols + columns[None, :]
        acc += tl.load(parts_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=columns < cols)


def sum_columns(parts: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    """parts (K, P, columns) fp32, K 1 or 2 → K vectors (columns) in K dtypes, in one launch if these are equal."""
    kinds, count, cols = parts.shape
    written = dtypes[0] if dtypes[0] == dtypes[-1] else torch.float32
    out = [torch.empty(cols, dtype=written, device=parts.device) for _ in range(kinds)]
    # Few columns per program: the matrix is small, and what counts is that all SMs take part.
    launch = chosen("column_sum", Launch(block=16, rows=64, warps=4))
    second = out[1] if kinds == 2 else None
    _dispatch.launch(column_sum_kernel, (triton.cdiv(cols, launch.block), kinds), parts, out[0], second, count, cols,
                     TWO=kinds == 2, ROWS=launch.rows, BLOCK=launch.block, num_warps=launch.warps)
    return [x.to(dtype) for x, dtype in zip(out, dtypes, strict=True)]
