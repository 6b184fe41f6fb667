"""FlashAttention-2 forward in Triton.

Math, per batch and head, with s = scale · Q Kᵀ restricted to visible keys (`ranges.py` says which those are):

    O = softmax(s) V            LSE_i = log Σ_j exp(s_ij)

One program owns BLOCK_M query rows and walks over key tiles with the online softmax: the running row maximum m and
row sum l rescale what was accumulated so far, so that no (T_q, T_k) matrix ever reaches memory. exp is computed as
exp2 with scale·log2(e) folded into one multiply-add, and only tiles that the mask cuts compare indices.

Shapes: B batch, H query heads, Hk key/value heads (H a multiple of Hk), Tq / Tk query / key length, D head dim.
    q (B, H, Tq, D), k and v (B, Hk, Tk, D), o like q, lse (B, H, Tq) fp32, natural logarithm.
FLOPs: 4·B·H·D per visible (query, key) pair. Bytes: q, k, v, o and lse once.
Saved for backward: q, k, v, o, lse. Statistics and accumulators are fp32; P is rounded to the input dtype for P·V.
A row without a visible key gives o = 0 and lse = −inf.

A call too short to fill a GPU can be split (`Tile.chunk`): one query of a long sequence, as in decoding, is one tile
per head, and each tile a chain of dependent steps, which is what such a call waits for. A program then takes one chunk
of the keys and writes its own softmax over them in fp32, and `combine_kernel` combines the parts (o_p, lse_p) of a row:

    LSE = log Σ_p exp(lse_p)        O = Σ_p exp(lse_p − LSE) o_p

Each element has one owner that adds in a fixed order: results stay the same bit for bit from run to run. Parts of x are
(parts, *x.shape), contiguous and fp32.

With softcap c (Gemma 2), s becomes c · tanh(s / c) before the mask.

Source: Dao, FlashAttention-2 (2023), algorithm 1.
"""

import torch
import triton
import triton.language as tl

from .._dispatch import launch
from .._triton import cdiv
from .configs import Tile
from .options import Problem
from .products import product
from .ranges import (
    COUNTS,
    Rows,
    block_d,
    capped,
    described,
    documents,
    load_rows,
    load_tile,
    scales,
    schedule,
    store_rows,
    tile_range,
    variant,
    visible,
)

LN_2 = tl.constexpr(0.6931471805599453)
MOST_PARTS = 64  # of a split call, however many keys its few queries have
# Rows of one program that combines parts, and parts that it loads together; of all that were tried,
# records/flash_attention_sums.csv.
COMBINE = {"ROWS": 4, "STEP": 8, "num_warps": 1}


@triton.jit
def _walk_keys(acc, row_sum, row_max, q, k_rows, v_rows, mask, first, last, scale_log2, cap, MASKED: tl.constexpr,
               V: tl.constexpr):
    """Fold the key tiles [first, last) into (acc, row_sum, row_max); row_max is in units of log2."""
    offs_n = tl.arange(0, V.block_n)
    k_base = k_rows.base + first.to(tl.int64) * k_rows.stride
    v_base = v_rows.base + first.to(tl.int64) * v_rows.stride
    for start in tl.range(first, last, V.block_n):
        k = load_tile(k_base, k_rows, start, mask.count, V.block_n, MASKED, V)
        s = product(q, tl.trans(k), None, V.precision)
        if V.softcap:
            s = capped(s, cap)
        if MASKED:
            s = tl.where(visible(mask, (start + offs_n)[None, :], V), s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        if MASKED:  # a row that has seen no key yet: any finite shift keeps exp2(-inf - shift) = 0
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        p = tl.exp2(s * scale_log2 - shift[:, None])
        shrink = tl.exp2(row_max - shift)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_base, v_rows, start, mask.count, V.block_n, MASKED, V)
        acc = product(p.to(v.dtype), v, acc, V.precision)
        row_max = new_max
        k_base += V.block_n * k_rows.stride
        v_base += V.block_n * v_rows.stride
    return acc, row_sum, row_max


@triton.jit
def cut(first, last, stops):
    """`tile_range`'s result for a program that takes only what lies in [first, last), multiples of the tile."""
    begin = tl.minimum(tl.maximum(stops[0], first), last)
    full_begin = tl.minimum(tl.maximum(stops[1], first), last)
    full_end = tl.minimum(tl.maximum(stops[2], first), last)
    return begin, full_begin, full_end, tl.minimum(tl.maximum(stops[3], first), last)


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(q_ptr, k_ptr, v_ptr, k_desc, v_desc, o_ptr, lse_ptr, doc_first, doc_last,
                   stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                   stride_ob, stride_oh, stride_ot, heads, kv_group, query_count, key_count, lo, hi, scale_log2, cap,
                   batch_heads, chunk, V: tl.constexpr):
    """One program: block_m rows of one head's output and log-sum-exp; with `split` over `chunk` keys only."""
    tile, bh, batch, head = schedule(tl.cdiv(query_count, V.block_m), heads, batch_heads, V.head_group, V.has_hi)
    kv_head = head // kv_group
    k_rows = Rows(k_ptr + batch * stride_kb + kv_head * stride_kh, stride_kt, k_desc, batch, kv_head)
    v_rows = Rows(v_ptr + batch * stride_vb + kv_head * stride_vh, stride_vt, v_desc, batch, kv_head)
    row0 = tile * V.block_m
    rows = row0 + tl.arange(0, V.block_m)
    stops, mask = tile_range(row0, query_count, key_count, batch, lo, hi, doc_first, doc_last, V.block_m, V.block_n, V)
    own_rows = query_count - row0
    o_base = o_ptr + batch * stride_ob + head * stride_oh
    if V.split:
        part = tl.program_id(1)
        stops = cut(part * chunk, part * chunk + chunk, stops)
        own_rows = tl.where(stops[0] < stops[3], own_rows, 0)  # nothing to do, nothing to load
        o_base += part.to(tl.int64) * batch_heads * query_count * V.head_dim
        lse_ptr += part.to(tl.int64) * batch_heads * query_count
    q_base = q_ptr + batch * stride_qb + head * stride_qh + row0.to(tl.int64) * stride_qt
    q = load_rows(q_base, stride_qt, own_rows, V.block_m, True, V)

    acc = tl.zeros(q.shape, tl.float32)
    row_sum = tl.zeros(rows.shape, tl.float32)
    row_max = tl.full(rows.shape, float("-inf"), tl.float32)
    for phase in tl.static_range(3):  # tiles cut by the mask, full tiles, tiles cut by the mask
        if phase == 1 or V.has_doc or (phase == 0 and V.has_lo) or (phase == 2 and (V.has_hi or V.ragged)):
            acc, row_sum, row_max = _walk_keys(acc, row_sum, row_max, q, k_rows, v_rows, mask, stops[phase],
                                               stops[phase + 1], scale_log2, cap, phase != 1, V)

    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + tl.log(safe_sum))
    tl.store(lse_ptr + bh.to(tl.int64) * query_count + rows, lse, mask=rows < query_count)
    written = rows < query_count
    if V.split:
        written = written & (row_sum != 0.0)  # what saw no key is left out when the parts are put together
    store_rows(o_base + row0.to(tl.int64) * stride_ot, stride_ot, acc, written, V)


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


def launch_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
                   problem: Problem, tile: Tile) -> None:
    """Fill o and lse. Tensors as in the module docstring, last dimension contiguous, nothing empty."""
    batch, heads, query_count, head_dim = q.shape
    tile, (k_desc, v_desc) = described("forward", tile, k, v)
    chunk = chunk_of(tile, k.shape[2])
    parts = cdiv(k.shape[2], chunk)
    out, out_lse = o, lse
    if parts > 1:
        out, out_lse = (torch.empty((parts, *x.shape), dtype=torch.float32, device=x.device) for x in (o, lse))
    launch(
        forward_kernel, (cdiv(query_count, tile.block_m) * batch * heads, parts),
        q, k, v, k_desc, v_desc, out, out_lse, *documents(problem),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[-4:-1],
        heads, heads // k.shape[1], query_count, k.shape[2], problem.lo, problem.hi, *scales(problem)[1:],
        batch * heads, chunk,
        V=variant(problem, tile, head_dim, k.shape[2], keys=False, tma=k_desc is not None, split=parts > 1),
        num_warps=tile.warps, num_stages=tile.stages)
    if parts > 1:
        launch_combine(out, out_lse, o, lse)


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
           BLOCK_D=block_d(head_dim), **COMBINE)
