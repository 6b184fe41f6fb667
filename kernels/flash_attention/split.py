"""Several programs per tile of queries, for calls so short that one per tile leaves most of a GPU idle.

One query of a long sequence, as in decoding, is one tile per head, and each tile a chain of dependent steps, which is
what such a call waits for. Split, a program takes only a chunk of the keys, and the results of the programs of one tile
are combined here: with (o_p, lse_p) the softmax over the keys of part p alone,

    LSE = log Σ_p exp(lse_p)        O = Σ_p exp(lse_p − LSE) o_p

Each element has one owner that adds in a fixed order: results stay the same bit for bit from run to run.

Shapes: parts of x (parts, *x.shape), contiguous and fp32. Bytes: each part that holds something once, the result once.
"""

import torch
import triton
import triton.language as tl

from .._dispatch import launch
from .._triton import cdiv, next_power_of_2
from .configs import Tile
from .ranges import COUNTS

MOST_PARTS = 64  # however many keys a few queries have
# Rows of one program, and parts that it loads together; of all that were tried, records/flash_attention_sums.csv.
COMBINE = {"ROWS": 4, "STEP": 8, "num_warps": 1}


@triton.jit
def cut(first, last, stops):
    """`tile_range`'s result for a program that takes only what lies in [first, last), multiples of the tile."""
    begin = tl.minimum(tl.maximum(stops[0], first), last)
    full_begin = tl.minimum(tl.maximum(stops[1], first), last)
    full_end = tl.minimum(tl.maximum(stops[2], first), last)
    return begin, full_begin, full_end, tl.minimum(tl.maximum(stops[3], first), last)


@triton.jit(do_not_specialize=COUNTS)
def combine_kernel(o_part_ptr, lse_part_ptr, o_ptr, lse_ptr, stride_ob, stride_oh, stride_ot, heads, query_count,
                   batch_heads, parts, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
                   STEP: tl.constexpr):
    """ROWS rows of one head's output and log-sum-exp from their parts, STEP parts at a time, the largest so far in top.

    A part that saw no key of a row has log-sum-exp −inf there and has written no output: what lies in its memory is
    loaded, since waiting for the log-sum-exp would take longer, and dropped. NaN in a part is NaN in output and
    log-sum-exp.
    """
    tiles = tl.cdiv(query_count, ROWS)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(0) // tiles
    offs_d = tl.arange(0, BLOCK_D)
    inside = rows < query_count
    own = bh.to(tl.int64) * query_count + rows  # rows of all heads, counted through
    stride = batch_heads.to(tl.int64) * query_count

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(0, parts, STEP):
        part = start + tl.arange(0, STEP)
        there = (part < parts)[:, None] & inside[None, :]
        lse = tl.load(lse_part_ptr + part[:, None] * stride + own[None, :], mask=there, other=float("-inf"))
        found = tl.load(o_part_ptr + (part[:, None, None] * stride + own[None, :, None]) * HEAD_DIM
                        + offs_d[None, None, :], mask=there[:, :, None] & (offs_d < HEAD_DIM)[None, None, :], other=0.0)
        found = tl.where((lse != float("-inf"))[:, :, None], found, 0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(lse - shift[None, :])
        shrink = tl.exp(top - shift)
        o = o * shrink[:, None] + tl.sum(found * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    seen = total != 0.0
    safe_total = tl.where(seen, total, 1.0)
    o = o / safe_total[:, None]
    tl.store(lse_ptr + own, tl.where(seen, top + tl.log(safe_total), float("-inf")), mask=inside)
    o_ptr += (bh // heads).to(tl.int64) * stride_ob + (bh % heads).to(tl.int64) * stride_oh
    tl.store(o_ptr + rows.to(tl.int64)[:, None] * stride_ot + offs_d[None, :], o.to(o_ptr.dtype.element_ty),
             mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :])


def parts_like(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Room for `parts` fp32 versions of x: (parts, *x.shape), contiguous."""
    return torch.empty((parts, *x.shape), dtype=torch.float32, device=x.device)


def chunk_of(tile: Tile, count: int) -> int:
    """Keys that one program takes of `count`: the tile's chunk, or as many tiles more as keep to MOST_PARTS parts."""
    least = cdiv(count, MOST_PARTS * tile.block_n) * tile.block_n
    return max(tile.chunk, least) if tile.chunk else max(count, 1)


def launch_combine(o_parts: torch.Tensor, lse_parts: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill o (B, H, Tq, D) and lse (B, H, Tq) from their parts, (parts, *shape) in contiguous fp32.

    Where a part saw no key of a row, its lse is −inf and its o may be anything.
    """
    batch, heads, query_count, head_dim = o.shape
    parts = len(o_parts)
    launch(combine_kernel, (cdiv(query_count, COMBINE["ROWS"]) * batch * heads,), o_parts, lse_parts, o, lse,
           *o.stride()[:3], heads, query_count, batch * heads, parts, HEAD_DIM=head_dim,
           BLOCK_D=next_power_of_2(head_dim), **COMBINE)
