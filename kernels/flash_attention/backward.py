"""FlashAttention-2 backward in Triton: two deterministic passes over recomputed probabilities.

With P = exp(s − LSE), s = scale · Q Kᵀ, and Δ_i = Σ_d dO_id O_id,

    dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − Δ)      dQ = scale · dS K      dK = scale · dSᵀ Q

`delta_kernel` computes Δ and prepares LSE in units of log2. `dkdv_kernel` owns BLOCK_N keys and walks over query tiles
with *transposed* scores, so that Pᵀ and dSᵀ are already the left operands of the next matmuls and never leave the
registers. `dq_kernel` owns BLOCK_M queries and walks over key tiles. Seven matmuls instead of the five of a single
pass, but no two programs add to the same address: results are bit-identical from run to run. `joint_kernel` is both
passes in one launch, for calls too short to fill a GPU: the program id says which tile of which pass it owns. Shorter
calls still are split: a program takes its keys and one chunk of the queries, computes its partial sums of all three
gradients with five matmuls, and `sum_kernel` of split.py adds them in a fixed order.

Shapes as in forward.py; do like o; dq, dk, dv like q, k, v. Query heads that share a key head are summed inside one
program of the dK/dV pass. FLOPs: 14·B·H·D per visible pair are computed (10 by convention). Bytes: q, k, v, o, do, lse
once, dq, dk, dv once. Accumulators are fp32; Pᵀ, dS are rounded to the input dtype before their matmuls.
A query row without a visible key contributes nothing and receives zero.

Source: Dao, FlashAttention-2 (2023), algorithm 2.
"""

import triton
import triton.language as tl

from .products import product
from .ranges import cut_range, head_origin, load_rows, load_tile, phase_range, schedule, tile_range, visible

LOG2_E = tl.constexpr(1.4426950408889634)
# integers not worth a compilation per value
DKDV_COUNTS = ["kv_heads", "query_count", "key_count", "padded_count", "lo", "hi", "batch_heads", "chunk"]
DQ_COUNTS = ["heads", *DKDV_COUNTS[1:-1]]
ROW_PADDING = 128  # Δ and LSE are padded to a multiple of this, so that tiles load them without a mask
# Rows of one program of `delta_kernel`: small programs fill more of a GPU in calls of up to FEW_ROWS, padded, in all,
# and are faster where they clear dq_sum too, by 4 to 8 % at d = 64 and 128 on an H200.
LONG_DELTA_ROWS, SHORT_DELTA_ROWS, FEW_ROWS = 64, 16, 8192


@triton.jit
def load_lse2(base, rows, query_count):
    """LSE·log2(e) of some rows of one head; past the end and for rows without keys +inf: P = exp2(−inf) = 0 there."""
    lse = tl.load(base + rows, mask=rows < query_count, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit(do_not_specialize=["heads", "query_count", "padded_count"])
def delta_kernel(o_ptr, do_ptr, lse_ptr, delta_ptr, lse2_ptr, dq_sum_ptr,
                 stride_ob, stride_oh, stride_ot, stride_gb, stride_gh, stride_gt, heads, query_count, padded_count,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Δ = rowsum(dO ∘ O) and LSE·log2(e) of all rows; what `load_lse2` says of padding holds in memory too.

    Also clears the (B, H, Tq, D) tensor at dq_sum_ptr, unless that is None.
    """
    tiles = padded_count // BLOCK_M  # one grid dimension: only the first may exceed 65,535
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    bh = tl.program_id(0) // tiles
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    wide = rows.to(tl.int64)
    o = load_rows(o_ptr + batch * stride_ob + head * stride_oh, wide, stride_ot, offs_d, query_count,
                  HEAD_DIM, BLOCK_D, True)
    do = load_rows(do_ptr + batch * stride_gb + head * stride_gh, wide, stride_gt, offs_d, query_count,
                   HEAD_DIM, BLOCK_D, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse2 = load_lse2(lse_ptr + bh.to(tl.int64) * query_count, rows, query_count)
    tl.store(delta_ptr + bh.to(tl.int64) * padded_count + rows, delta)
    tl.store(lse2_ptr + bh.to(tl.int64) * padded_count + rows, lse2)
    if dq_sum_ptr is not None:
        to = dq_sum_ptr + (bh.to(tl.int64) * query_count + wide)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(to, tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
                 mask=(rows < query_count)[:, None] & (offs_d < HEAD_DIM)[None, :])


@triton.jit
def load_stats(base, desc, start, offs, stats0, TMA: tl.constexpr):
    """LSE or Δ of the queries from `start` on."""
    if TMA:
        return desc.load([stats0 + start])
    return tl.load(base + start + offs)


@triton.jit
def _walk_queries(dk, dv, k, v, q_base, do_base, delta_base, lse2_base, q_desc, do_desc, delta_desc,
                  lse2_desc, q_row0, q_col0, do_row0, do_col0, stats0, stride_qt, stride_gt, dq_base, cols,
                  first, last,
                  query_count, key_count, lo, hi, doc_lo, doc_hi, scale_log2,
                  MASKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr,
                  HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
                  TMA: tl.constexpr, FUSED: tl.constexpr, SPLIT: tl.constexpr):
    """Fold the query tiles [first, last) into dk (still without the scale) and dv.

    FUSED adds the tiles' share of dq / scale to memory, SPLIT writes it.
    """
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q_base += first.to(tl.int64) * stride_qt
    do_base += first.to(tl.int64) * stride_gt
    if FUSED or SPLIT:
        dq_base += first.to(tl.int64) * HEAD_DIM
    for start in tl.range(first, last, BLOCK_M):
        q = load_tile(q_base, q_desc, start, offs_m, stride_qt, offs_d, query_count, q_row0, q_col0, HEAD_DIM,
                      BLOCK_D, MASKED, TMA)
        lse2 = load_stats(lse2_base, lse2_desc, start, offs_m, stats0, TMA)
        do = load_tile(do_base, do_desc, start, offs_m, stride_gt, offs_d, query_count, do_row0, do_col0, HEAD_DIM,
                       BLOCK_D, MASKED, TMA)
        delta = load_stats(delta_base, delta_desc, start, offs_m, stats0, TMA)
        # every wait for a load stands before the first matmul: a wait between wgmma instructions makes ptxas
        # serialise them
        st = product(k, tl.trans(q), None, PRECISION)
        dpt = product(v, tl.trans(do), None, PRECISION)
        pt = tl.exp2(st * scale_log2 - lse2[None, :])
        if MASKED:
            seen = visible(cols[:, None], (start + offs_m)[None, :], query_count, hi, lo, doc_lo, doc_hi,
                           HAS_HI, HAS_LO, HAS_DOC)
            pt = tl.where(seen, pt, 0.0)
        dv = product(pt.to(do.dtype), do, dv, PRECISION)
        dst = pt * (dpt - delta[None, :])
        dk = product(dst.to(q.dtype), q, dk, PRECISION)
        if FUSED or SPLIT:
            dst = tl.where((cols < key_count)[:, None], dst, 0.0)  # past the last key P is anything, even infinite
            dq = product(tl.trans(dst.to(q.dtype)), k, None, PRECISION)
            dq_ptrs = dq_base + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
            inside = (start + offs_m < query_count)[:, None] & (offs_d < HEAD_DIM)[None, :]
            if FUSED:
                tl.atomic_add(dq_ptrs, dq, mask=inside, sem="relaxed")
            else:
                tl.store(dq_ptrs, dq, mask=inside)
            dq_base += BLOCK_M * HEAD_DIM
        q_base += BLOCK_M * stride_qt
        do_base += BLOCK_M * stride_gt
    return dk, dv


@triton.jit
def dkdv_tile(pid, q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, q_desc, do_desc, delta_desc, lse2_desc,
              dk_ptr, dv_ptr, dq_ptr, doc_first, doc_last,
              stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
              stride_gb, stride_gh, stride_gt, stride_dkb, stride_dkh, stride_dkt,
              stride_dvb, stride_dvh, stride_dvt, kv_heads, kv_group, query_count, key_count, padded_count, lo, hi,
              scale, scale_log2, batch_heads, chunk, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
              HAS_DOC: tl.constexpr,
              RAGGED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, HEAD_GROUP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
              FUSED: tl.constexpr, SPLIT: tl.constexpr):
    """One program: BLOCK_N rows of dK and dV of one key head, over all query heads that read it.

    FUSED: also add this program's share of dQ / scale to the fp32 (B, H, Tq, D) tensor at dq_ptr.
    SPLIT: only over the `chunk` queries of program_id(1), whose shares of dK and dV lie apart in fp32 tensors
    (chunks, B, Hk, Tk, D), and those of dQ / scale in one of (key tiles, B, H, Tq, D).
    """
    tile, bh = schedule(pid, tl.cdiv(key_count, BLOCK_N), batch_heads, HEAD_GROUP, False)
    batch = (bh // kv_heads).to(tl.int64)
    kv_head = (bh % kv_heads).to(tl.int64)
    col0 = tile * BLOCK_N
    wide0 = col0.to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    cols = col0 + offs_n
    doc_lo = cols[:, None]
    doc_hi = cols[:, None]
    if HAS_DOC:
        doc_first += batch * key_count
        doc_last += batch * key_count
        doc_lo = tl.load(doc_first + cols, mask=cols < key_count, other=0)[:, None]
        doc_hi = tl.load(doc_last + cols, mask=cols < key_count, other=0)[:, None]
    begin, full_begin, full_end, end = tile_range(col0, key_count, query_count, hi, lo, doc_first, doc_last,
                                                  BLOCK_N, BLOCK_M, HAS_HI, HAS_LO, HAS_DOC)
    own_rows = key_count - col0
    dq_heads = batch * kv_heads * kv_group
    if SPLIT:
        part = tl.program_id(1)
        begin, full_begin, full_end, end = cut_range(part * chunk, part * chunk + chunk, begin, full_begin, full_end,
                                                     end)
        own_rows = tl.where(begin < end, own_rows, 0)  # nothing to do, nothing to load or to write
        shift = part.to(tl.int64) * batch_heads * key_count * HEAD_DIM
        dk_ptr += shift
        dv_ptr += shift
        dq_heads += tile.to(tl.int64) * batch_heads * kv_group
    k = load_rows(k_ptr + batch * stride_kb + kv_head * stride_kh + wide0 * stride_kt, offs_n, stride_kt, offs_d,
                  own_rows, HEAD_DIM, BLOCK_D, True)
    v = load_rows(v_ptr + batch * stride_vb + kv_head * stride_vh + wide0 * stride_vt, offs_n, stride_vt, offs_d,
                  own_rows, HEAD_DIM, BLOCK_D, True)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, kv_group):
        head = kv_head * kv_group + member
        q_start = batch * stride_qb + head * stride_qh
        do_start = batch * stride_gb + head * stride_gh
        q_row0, q_col0 = head_origin(q_start, stride_qt, TMA)
        do_row0, do_col0 = head_origin(do_start, stride_gt, TMA)
        stats = (batch * kv_heads * kv_group + head) * padded_count
        dq_base = dq_ptr + (dq_heads + head) * query_count * HEAD_DIM
        for phase in tl.static_range(3):  # tiles cut by the mask, full tiles, tiles cut by the mask
            first, last = phase_range(phase, begin, full_begin, full_end, end)
            if phase == 1 or (phase == 0 and (HAS_HI or HAS_DOC)) or (phase == 2 and (HAS_LO or HAS_DOC or RAGGED)):
                dk, dv = _walk_queries(
                    dk, dv, k, v, q_ptr + q_start, do_ptr + do_start, delta_ptr + stats, lse2_ptr + stats,
                    q_desc, do_desc, delta_desc, lse2_desc, q_row0, q_col0, do_row0, do_col0, stats.to(tl.int32),
                    stride_qt, stride_gt, dq_base, cols, first, last, query_count, key_count, lo, hi,
                    doc_lo, doc_hi, scale_log2, phase != 1, HAS_LO, HAS_HI, HAS_DOC, HEAD_DIM, BLOCK_D, BLOCK_M,
                    PRECISION, TMA, FUSED, SPLIT)

    keep = (offs_n < own_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    dk_base = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + wide0 * stride_dkt
    tl.store(dk_base + offs_n[:, None] * stride_dkt + offs_d[None, :], (dk * scale).to(dk_ptr.dtype.element_ty), keep)
    dv_base = dv_ptr + batch * stride_dvb + kv_head * stride_dvh + wide0 * stride_dvt
    tl.store(dv_base + offs_n[:, None] * stride_dvt + offs_d[None, :], dv.to(dv_ptr.dtype.element_ty), keep)


@triton.jit(do_not_specialize=DKDV_COUNTS)
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, q_desc, do_desc, delta_desc, lse2_desc,
                dk_ptr, dv_ptr, dq_ptr, doc_first, doc_last,
                stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                stride_gb, stride_gh, stride_gt, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh,
                stride_dvt, kv_heads, kv_group, query_count, key_count, padded_count, lo, hi, scale, scale_log2,
                batch_heads, chunk, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr,
                RAGGED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, HEAD_GROUP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
                FUSED: tl.constexpr, SPLIT: tl.constexpr):
    """The dK/dV pass, one `dkdv_tile` per program; Δ and LSE·log2(e) are `delta_kernel`'s."""
    dkdv_tile(tl.program_id(0), q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, q_desc, do_desc, delta_desc,
              lse2_desc, dk_ptr, dv_ptr, dq_ptr, doc_first, doc_last,
              stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
              stride_gb, stride_gh, stride_gt, stride_dkb, stride_dkh, stride_dkt,
              stride_dvb, stride_dvh, stride_dvt, kv_heads, kv_group, query_count, key_count, padded_count, lo, hi,
              scale, scale_log2, batch_heads, chunk, HAS_LO, HAS_HI, HAS_DOC, RAGGED, HEAD_DIM, BLOCK_D, BLOCK_M,
              BLOCK_N, HEAD_GROUP, PRECISION, TMA, FUSED, SPLIT)


@triton.jit
def _walk_keys(dq, q, do, lse2, delta, k_base, v_base, k_desc, v_desc, k_row0, k_col0, v_row0, v_col0,
               stride_kt, stride_vt, rows, first, last, key_count, lo, hi, doc_lo, doc_hi, scale_log2,
               MASKED: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
               TMA: tl.constexpr):
    """Fold the key tiles [first, last) into dq (still without the scale)."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_base += first.to(tl.int64) * stride_kt
    v_base += first.to(tl.int64) * stride_vt
    for start in tl.range(first, last, BLOCK_N):
        k = load_tile(k_base, k_desc, start, offs_n, stride_kt, offs_d, key_count, k_row0, k_col0, HEAD_DIM, BLOCK_D,
                      MASKED, TMA)
        s = product(q, tl.trans(k), None, PRECISION)
        v = load_tile(v_base, v_desc, start, offs_n, stride_vt, offs_d, key_count, v_row0, v_col0, HEAD_DIM, BLOCK_D,
                      MASKED, TMA)
        dp = product(do, tl.trans(v), None, PRECISION)
        p = tl.exp2(s * scale_log2 - lse2[:, None])
        if MASKED:
            seen = visible(rows[:, None], (start + offs_n)[None, :], key_count, lo, hi, doc_lo, doc_hi,
                           HAS_LO, HAS_HI, HAS_DOC)
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = product(ds.to(k.dtype), k, dq, PRECISION)
        k_base += BLOCK_N * stride_kt
        v_base += BLOCK_N * stride_vt
    return dq


@triton.jit
def dq_tile(pid, q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, k_desc, v_desc, dq_ptr, doc_first, doc_last,
            stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
            stride_gb, stride_gh, stride_gt, stride_dqb, stride_dqh, stride_dqt,
            heads, kv_group, query_count, key_count, padded_count, lo, hi, scale, scale_log2, batch_heads,
            HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr,
            RAGGED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, HEAD_GROUP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """One program: BLOCK_M rows of one head's dQ."""
    tile, bh = schedule(pid, tl.cdiv(query_count, BLOCK_M), batch_heads, HEAD_GROUP, HAS_HI)
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    row0 = tile * BLOCK_M
    wide0 = row0.to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    rows = row0 + offs_m
    q = load_rows(q_ptr + batch * stride_qb + head * stride_qh + wide0 * stride_qt, offs_m, stride_qt, offs_d,
                  query_count - row0, HEAD_DIM, BLOCK_D, True)
    do = load_rows(do_ptr + batch * stride_gb + head * stride_gh + wide0 * stride_gt, offs_m, stride_gt, offs_d,
                   query_count - row0, HEAD_DIM, BLOCK_D, True)
    stats = bh.to(tl.int64) * padded_count
    lse2 = tl.load(lse2_ptr + stats + rows)
    delta = tl.load(delta_ptr + stats + rows)
    k_start = batch * stride_kb + (head // kv_group) * stride_kh
    v_start = batch * stride_vb + (head // kv_group) * stride_vh
    k_row0, k_col0 = head_origin(k_start, stride_kt, TMA)
    v_row0, v_col0 = head_origin(v_start, stride_vt, TMA)
    doc_lo = rows[:, None]
    doc_hi = rows[:, None]
    if HAS_DOC:
        doc_first += batch * query_count
        doc_last += batch * query_count
        doc_lo = tl.load(doc_first + rows, mask=rows < query_count, other=0)[:, None]
        doc_hi = tl.load(doc_last + rows, mask=rows < query_count, other=0)[:, None]
    begin, full_begin, full_end, end = tile_range(row0, query_count, key_count, lo, hi, doc_first, doc_last,
                                                  BLOCK_M, BLOCK_N, HAS_LO, HAS_HI, HAS_DOC)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(3):
        first, last = phase_range(phase, begin, full_begin, full_end, end)
        if phase == 1 or (phase == 0 and (HAS_LO or HAS_DOC)) or (phase == 2 and (HAS_HI or HAS_DOC or RAGGED)):
            dq = _walk_keys(
                dq, q, do, lse2, delta, k_ptr + k_start, v_ptr + v_start, k_desc, v_desc, k_row0, k_col0, v_row0,
                v_col0, stride_kt, stride_vt, rows, first, last, key_count, lo, hi, doc_lo, doc_hi, scale_log2,
                phase != 1, HAS_LO, HAS_HI, HAS_DOC, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, TMA)

    dq_base = dq_ptr + batch * stride_dqb + head * stride_dqh + wide0 * stride_dqt
    tl.store(dq_base + offs_m[:, None] * stride_dqt + offs_d[None, :], (dq * scale).to(dq_ptr.dtype.element_ty),
             (rows < query_count)[:, None] & (offs_d < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=DQ_COUNTS)
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, k_desc, v_desc, dq_ptr, doc_first, doc_last,
              stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
              stride_gb, stride_gh, stride_gt, stride_dqb, stride_dqh, stride_dqt,
              heads, kv_group, query_count, key_count, padded_count, lo, hi, scale, scale_log2, batch_heads,
              HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr,
              RAGGED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, HEAD_GROUP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """The dQ pass, one `dq_tile` per program; Δ and LSE·log2(e) are `delta_kernel`'s."""
    dq_tile(tl.program_id(0), q_ptr, k_ptr, v_ptr, do_ptr, delta_ptr, lse2_ptr, k_desc, v_desc, dq_ptr,
            doc_first, doc_last, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh,
            stride_vt, stride_gb, stride_gh, stride_gt, stride_dqb, stride_dqh,
            stride_dqt, heads, kv_group, query_count, key_count, padded_count, lo, hi, scale, scale_log2, batch_heads,
            HAS_LO, HAS_HI, HAS_DOC, RAGGED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, HEAD_GROUP, PRECISION, TMA)
