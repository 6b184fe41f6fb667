"""Several programs per tile, for calls so short that one program per tile leaves most of a GPU idle.

One head of 1,024 tokens is 16 tiles of 64 rows on an H100's 132 multiprocessors, and each tile a chain of up to 16
dependent steps, which is what such a call waits for. Split, a program takes only a chunk of the other sequence; the
results of the programs of one tile are then combined here.

Forward: with (o_p, lse_p) the softmax over the keys of part p alone,

    LSE = log Σ_p exp(lse_p)        O = Σ_p exp(lse_p − LSE) o_p

Backward: the gradients are sums, so their parts are added up: over chunks of queries for dK and dV, over tiles of keys
for dQ. Each element has one owner that adds in a fixed order: results stay the same bit for bit from run to run.

Shapes: parts of x (parts, *x.shape), contiguous and fp32. Bytes: each part that holds something once, the result once.
"""

import torch
import triton
import triton.language as tl

from .._dispatch import launch
from .._triton import cdiv, next_power_of_2
from .configs import Tile
from .options import Problem

MOST_PARTS = 64  # of the forward, however many keys a few queries have
# Rows of one program, and parts that it loads together; of all that were tried, records/flash_attention_sums.csv.
COMBINE = {"ROWS": 4, "STEP": 8, "num_warps": 1}
SUM = {"ROWS": 2, "STEP": 32, "num_warps": 1}
COMBINE_COUNTS = ["heads", "query_count", "batch_heads", "parts"]
SUM_COUNTS = ["heads", "kv_heads", "query_count", "key_count", "hi", "batch", "chunk"]


@triton.jit(do_not_specialize=COMBINE_COUNTS)
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


@triton.jit
def _sum_rows(part_ptr, out_ptr, row0, bh, count, batch_heads, heads, stride_b, stride_h, stride_t, first, last, factor,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """ROWS rows of one head: factor times the sum of the parts [first, last)."""
    rows = row0 + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    inside = (rows < count)[:, None] & (offs_d < HEAD_DIM)[None, :]
    own = bh.to(tl.int64) * count + rows
    stride = batch_heads.to(tl.int64) * count
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(first, last, STEP):
        part = start + tl.arange(0, STEP)
        ptrs = part_ptr + (part[:, None, None] * stride + own[None, :, None]) * HEAD_DIM + offs_d[None, None, :]
        total += tl.sum(tl.load(ptrs, mask=(part < last)[:, None, None] & inside[None, :, :], other=0.0), 0)
    out_ptr += (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * stride_t + offs_d[None, :],
             (total * factor).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SUM_COUNTS)
def sum_kernel(dq_part_ptr, dk_part_ptr, dv_part_ptr, dq_ptr, dk_ptr, dv_ptr, stride_dqb, stride_dqh, stride_dqt,
               stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt, heads, kv_heads, query_count,
               key_count, hi, batch, chunk, scale, HAS_HI: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """ROWS rows of dQ, dK or dV (program_id(1) = 0, 1, 2) from the parts that `dkdv_tile` has written."""
    pid = tl.program_id(0)
    if tl.program_id(1) == 0:
        tiles = tl.cdiv(query_count, ROWS)
        row0 = pid % tiles * ROWS
        last = tl.cdiv(key_count, BLOCK_N)
        if HAS_HI:  # tiles of keys that begin after the last visible key have written nothing here
            seen = tl.minimum(row0 + ROWS, query_count) + hi
            last = tl.minimum(last, tl.cdiv(tl.maximum(seen, 0), BLOCK_N))
        if pid < tiles * batch * heads:
            _sum_rows(dq_part_ptr, dq_ptr, row0, pid // tiles, query_count, batch * heads, heads,
                      stride_dqb, stride_dqh, stride_dqt, 0, last, scale, HEAD_DIM, BLOCK_D, ROWS, STEP)
    else:
        tiles = tl.cdiv(key_count, ROWS)
        row0 = pid % tiles * ROWS
        first = 0
        last = tl.cdiv(query_count, chunk)
        if HAS_HI:  # chunks of queries before the first that sees a key of this tile
            begin = tl.maximum(row0 // BLOCK_N * BLOCK_N - hi, 0) // BLOCK_M * BLOCK_M
            first = tl.where(begin < query_count, begin // chunk, last)
        if pid < tiles * batch * kv_heads:
            if tl.program_id(1) == 1:
                _sum_rows(dk_part_ptr, dk_ptr, row0, pid // tiles, key_count, batch * kv_heads, kv_heads,
                          stride_dkb, stride_dkh, stride_dkt, first, last, 1.0, HEAD_DIM, BLOCK_D, ROWS, STEP)
            else:
                _sum_rows(dv_part_ptr, dv_ptr, row0, pid // tiles, key_count, batch * kv_heads, kv_heads,
                          stride_dvb, stride_dvh, stride_dvt, first, last, 1.0, HEAD_DIM, BLOCK_D, ROWS, STEP)


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


def launch_sum(parts: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...], problem: Problem, tile: Tile) -> None:
    """Fill (dq, dk, dv), shaped like q, k and v, from their parts as the dK/dV pass with this tile has written them.

    Contiguous fp32 of (key tiles, *dq.shape) and twice (chunks of queries, *dk.shape). Parts that no program had
    anything to write to may hold anything: they are not read.
    """
    dq, dk, dv = grads
    batch, heads, query_count, head_dim = dq.shape
    kv_heads, key_count = dk.shape[1:3]
    rows = max(cdiv(query_count, SUM["ROWS"]) * heads, cdiv(key_count, SUM["ROWS"]) * kv_heads)
    launch(sum_kernel, (rows * batch, 3), *parts, *grads, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
           heads, kv_heads, query_count, key_count, problem.hi, batch, tile.chunk, problem.scale,
           HAS_HI=problem.has_hi, HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim),
           BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **SUM)
