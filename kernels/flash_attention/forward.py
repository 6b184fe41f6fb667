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

A call too short to fill a GPU can be split (`Tile.chunk`): a program then takes one chunk of the keys, writes its own
softmax over them in fp32, and `combine_kernel` of split.py combines the chunks.

Source: Dao, FlashAttention-2 (2023), algorithm 1.
"""

import torch
import triton
import triton.language as tl

from .._dispatch import launch
from .._triton import cdiv, next_power_of_2
from .configs import POINTER_TILES, Tile
from .descriptors import row_descriptors
from .options import Problem
from .products import product
from .ranges import cut_range, head_origin, load_rows, load_tile, phase_range, schedule, tile_range, visible
from .split import chunk_of, launch_combine, parts_like

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
COUNTS = ["heads", "query_count", "key_count", "lo", "hi", "batch_heads", "chunk"]  # not worth a compilation per value


@triton.jit
def _walk_keys(acc, row_sum, row_max, q, k_base, v_base, k_desc, v_desc, k_row0, k_col0, v_row0, v_col0,
               stride_kt, stride_vt, rows, first, last, key_count, lo, hi, doc_lo, doc_hi, scale_log2,
               MASKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
               TMA: tl.constexpr):
    """Fold the key tiles [first, last) into (acc, row_sum, row_max); row_max is in units of log2."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_base += first.to(tl.int64) * stride_kt
    v_base += first.to(tl.int64) * stride_vt
    for start in tl.range(first, last, BLOCK_N):
        k = load_tile(k_base, k_desc, start, offs_n, stride_kt, offs_d, key_count, k_row0, k_col0, HEAD_DIM, BLOCK_D,
                      MASKED, TMA)
        s = product(q, tl.trans(k), None, PRECISION)
        if MASKED:
            seen = visible(rows[:, None], (start + offs_n)[None, :], key_count, lo, hi, doc_lo, doc_hi,
                           HAS_LO, HAS_HI, HAS_DOC)
            s = tl.where(seen, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        if MASKED:  # a row that has seen no key yet: any finite shift keeps exp2(-inf - shift) = 0
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        p = tl.exp2(s * scale_log2 - shift[:, None])
        shrink = tl.exp2(row_max - shift)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_base, v_desc, start, offs_n, stride_vt, offs_d, key_count, v_row0, v_col0, HEAD_DIM, BLOCK_D,
                      MASKED, TMA)
        acc = product(p.to(v.dtype), v, acc, PRECISION)
        row_max = new_max
        k_base += BLOCK_N * stride_kt
        v_base += BLOCK_N * stride_vt
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(q_ptr, k_ptr, v_ptr, k_desc, v_desc, o_ptr, lse_ptr, doc_first, doc_last,
                   stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                   stride_ob, stride_oh, stride_ot, heads, kv_group, query_count, key_count, lo, hi, scale_log2,
                   batch_heads, chunk,
                   HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr,
                   RAGGED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, HEAD_GROUP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                   SPLIT: tl.constexpr):
    """One program: BLOCK_M rows of one head's output and log-sum-exp; SPLIT: over `chunk` keys only."""
    tile, bh = schedule(tl.program_id(0), tl.cdiv(query_count, BLOCK_M), batch_heads, HEAD_GROUP, HAS_HI)
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    k_start = batch * stride_kb + (head // kv_group) * stride_kh
    v_start = batch * stride_vb + (head // kv_group) * stride_vh
    k_row0, k_col0 = head_origin(k_start, stride_kt, TMA)
    v_row0, v_col0 = head_origin(v_start, stride_vt, TMA)
    o_base = o_ptr + batch * stride_ob + head * stride_oh

    row0 = tile * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    rows = row0 + offs_m
    offs_d = tl.arange(0, BLOCK_D)
    doc_lo = rows[:, None]
    doc_hi = rows[:, None]
    if HAS_DOC:
        doc_first += batch * query_count
        doc_last += batch * query_count
        doc_lo = tl.load(doc_first + rows, mask=rows < query_count, other=0)[:, None]
        doc_hi = tl.load(doc_last + rows, mask=rows < query_count, other=0)[:, None]
    begin, full_begin, full_end, end = tile_range(row0, query_count, key_count, lo, hi, doc_first, doc_last,
                                                  BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, HAS_DOC)
    own_rows = query_count - row0
    if SPLIT:
        part = tl.program_id(1)
        begin, full_begin, full_end, end = cut_range(part * chunk, part * chunk + chunk, begin, full_begin, full_end,
                                                     end)
        own_rows = tl.where(begin < end, own_rows, 0)  # nothing to do, nothing to load
        o_base += part.to(tl.int64) * batch_heads * query_count * HEAD_DIM
        lse_ptr += part.to(tl.int64) * batch_heads * query_count
    q_base += row0.to(tl.int64) * stride_qt
    q = load_rows(q_base, offs_m, stride_qt, offs_d, own_rows, HEAD_DIM, BLOCK_D, True)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for phase in tl.static_range(3):  # tiles cut by the mask, full tiles, tiles cut by the mask
        first, last = phase_range(phase, begin, full_begin, full_end, end)
        if phase == 1 or (phase == 0 and (HAS_LO or HAS_DOC)) or (phase == 2 and (HAS_HI or HAS_DOC or RAGGED)):
            acc, row_sum, row_max = _walk_keys(
                acc, row_sum, row_max, q, k_ptr + k_start, v_ptr + v_start, k_desc, v_desc, k_row0, k_col0, v_row0,
                v_col0, stride_kt, stride_vt, rows, first, last, key_count, lo, hi, doc_lo, doc_hi, scale_log2,
                phase != 1, HAS_LO, HAS_HI, HAS_DOC, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, TMA)

    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + tl.log(safe_sum))
    tl.store(lse_ptr + bh.to(tl.int64) * query_count + rows, lse, mask=rows < query_count)
    o_base += row0.to(tl.int64) * stride_ot
    written = rows < query_count
    if SPLIT:
        written = written & (row_sum != 0.0)  # what saw no key is left out when the parts are put together
    tl.store(o_base + offs_m[:, None] * stride_ot + offs_d[None, :], acc.to(o_ptr.dtype.element_ty),
             mask=written[:, None] & (offs_d < HEAD_DIM)[None, :])


def launch_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
                   problem: Problem, tile: Tile) -> None:
    """Fill o and lse. Tensors as in the module docstring, last dimension contiguous, nothing empty."""
    batch, heads, query_count, head_dim = q.shape
    block_d = max(16, next_power_of_2(head_dim))
    k_desc, v_desc = row_descriptors((k, v), tile.block_n) if tile.tma else (None, None)
    if tile.tma and k_desc is None:
        tile = POINTER_TILES.get(("forward", block_d), tile)
    chunk = chunk_of(tile, k.shape[2])
    parts = cdiv(k.shape[2], chunk)
    split = parts > 1
    out, out_lse = (parts_like(o, parts), parts_like(lse, parts)) if split else (o, lse)
    launch(
        forward_kernel, (cdiv(query_count, tile.block_m) * batch * heads, parts),
        q, k, v, k_desc, v_desc, out, out_lse, problem.doc_first, problem.doc_last,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[-4:-1],
        heads, heads // k.shape[1], query_count, k.shape[2], problem.lo, problem.hi, problem.scale * LOG2_E.value,
        batch * heads, chunk, HAS_LO=problem.has_lo, HAS_HI=problem.has_hi, HAS_DOC=problem.has_doc,
        HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, HEAD_GROUP=tile.head_group, PRECISION=problem.precision,
        TMA=k_desc is not None, RAGGED=k.shape[2] % tile.block_n != 0, SPLIT=split,
        **tile.launch_options(),
    )
    if split:
        launch_combine(out, out_lse, o, lse)
