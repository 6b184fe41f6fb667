"""FlashAttention-2 backward in Triton: two deterministic passes over recomputed probabilities.

Mathematics, with s = scale · Q Kᵀ, the gradient dO of O, and the gradient dLSE of the log-sum-exp
if it was asked for:
    P = exp(s − LSE)
    Δ_i = Σ_d dO_id O_id − dLSE_i
    dV = Pᵀ dO
    dP = dO Vᵀ
    dS = P ∘ (dP − Δ)
    dQ = scale · dS K
    dK = scale · dSᵀ Q
With softcap c, s is c·t with t = tanh(scale/c · Q Kᵀ), and dS has the factor 1 − t².

Shapes as in forward.py; do like o; dq, dk, dv like q, k, v. Accumulators are fp32. Pᵀ and dS are
rounded to the input dtype before their matmuls. A query row without a visible key contributes
nothing and receives zero.
FLOPs: 14·B·H·D per visible pair, of which 10 count by convention. Bytes: q, k, v, o, do, lse, dq,
dk and dv once.

How it works, in three launches:
- `delta_kernel` computes Δ, and LSE in units of log2.
- `dkdv_kernel` owns block_n keys and walks over query tiles. It computes *transposed* scores, so
  that Pᵀ and dSᵀ are already the left operands of the next matmuls and never leave the registers.
  Query heads that share a key head are summed inside one program.
- `dq_kernel` owns block_m queries and walks over key tiles.
Two passes compute seven matmuls per pair of tiles instead of the five of a single pass. In return
no two programs add to the same address, and results are bit-identical from run to run.

Source: Dao, FlashAttention-2 (2023), algorithm 2.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .._dispatch import cdiv, gdc_launch_dependents, launch
from .configs import MAX_COORDINATE, Tile, block_d
from .options import Problem
from .products import product
from .ranges import (
    COUNTS,
    LOG2_E,
    Rows,
    capped,
    described,
    documents,
    load_rows,
    load_tile,
    scales,
    schedule,
    store_rows,
    strides,
    tile_range,
    variant,
    visible,
)

# Δ and LSE are padded to a multiple of this many rows, so that tiles load them without a mask.
ROW_PADDING = 128
# Rows per program of `delta_kernel`. Small programs fill more of a GPU in calls of up to FEW_ROWS
# rows of all heads together. They are also faster where the kernel clears dq_sum: by 4 to 8 % at
# D = 64 and 128 on an H200.
LONG_DELTA_ROWS = 64
SHORT_DELTA_ROWS = 16
FEW_ROWS = 8192


@triton.jit(do_not_specialize=COUNTS)
def delta_kernel(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    lse2_ptr,
    dq_sum_ptr,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_gb,
    stride_gh,
    stride_gt,
    heads,
    query_count,
    padded_count,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute Δ and LSE·log2(e) of BLOCK_M rows per program, both padded to padded_count rows.

    Past the last row, and for rows without keys, LSE is stored as +∞, so that P = exp2(s − LSE) is
    0 there.
    dlse_ptr: gradient of LSE, or None if it is zero.
    dq_sum_ptr: None, or B·H·padded_count rows of BLOCK_D elements, which the kernel also clears.
    """
    if dq_sum_ptr is not None:
        # The Hopper backward may start now. It waits before it reads what this kernel writes.
        gdc_launch_dependents()
    # Programs are numbered along one dimension of the grid: only the first may exceed 65,535.
    tiles = padded_count // BLOCK_M
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    bh = tl.program_id(0) // tiles
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    wide = rows.to(tl.int64)  # the product with a stride may exceed 2³¹
    # Rows and columns cut off are loaded as 0, and add nothing to Δ.
    there = (rows < query_count)[:, None] & (offs_d < HEAD_DIM)[None, :]
    o_ptr += batch * stride_ob + head * stride_oh
    do_ptr += batch * stride_gb + head * stride_gh
    o = tl.load(o_ptr + wide[:, None] * stride_ot + offs_d[None, :], mask=there, other=0.0)
    do = tl.load(do_ptr + wide[:, None] * stride_gt + offs_d[None, :], mask=there, other=0.0)
    # Σ_j P_ij·dP_ij = Σ_d dO_id·O_id, because dP = dO Vᵀ and O = P V. So Δ needs a row of O instead
    # of a row of P and dP.
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = bh.to(tl.int64) * query_count + rows
    # LSE = −∞ marks a row without keys. Rows past the end are loaded as such.
    lse = tl.load(lse_ptr + at, mask=rows < query_count, other=float("-inf"))
    hidden = lse == float("-inf")
    # ∂LSE_i/∂s_ij = P_ij. So a gradient of LSE adds dLSE_i·P_ij to dS, which is the same as a
    # smaller Δ_i.
    if dlse_ptr is not None:
        delta -= tl.where(hidden, 0.0, tl.load(dlse_ptr + at, mask=rows < query_count, other=0.0))
    # No mask: the memory has padded_count rows. Those past the end need a finite Δ and an infinite
    # LSE.
    tl.store(delta_ptr + bh.to(tl.int64) * padded_count + rows, delta)
    tl.store(
        lse2_ptr + bh.to(tl.int64) * padded_count + rows,
        tl.where(hidden, float("inf"), lse * LOG2_E),
    )
    if dq_sum_ptr is not None:
        place = (bh.to(tl.int64) * padded_count + wide)[:, None] * BLOCK_D + offs_d[None, :]
        # The order of the sum is that of hopper_backward.py: within each piece of 64 rows, every
        # 512 consecutive elements are 8 columns of all its rows. Columns past the head dim are
        # never read and need not be cleared.
        column = place % (64 * BLOCK_D) // 512 * 8
        tl.store(
            dq_sum_ptr + place, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), mask=column < HEAD_DIM
        )


@triton.jit
def load_stats(rows, start, offs, V: tl.constexpr):
    """Load LSE or Δ of block_m queries from `start` on. They are padded and need no mask."""
    if V.tma:
        return rows.desc.load([rows.head.to(tl.int32) + start])
    return tl.load(rows.base + start + offs)


@triton.jit
def _walk_queries(
    dk,
    dv,
    k,
    v,
    q_rows,
    do_rows,
    delta_rows,
    lse2_rows,
    mask,
    first,
    last,
    scale_log2,
    cap,
    MASKED: tl.constexpr,
    V: tl.constexpr,
):
    """Fold the queries [first, last) into dk and dv, tile by tile. dk still lacks the scale.

    All scores are transposed, (block_n, block_m): keys are rows. MASKED is as in forward.py.
    """
    # The tile of this step has the queries start + offs_m.
    offs_m = tl.arange(0, V.block_m)
    # int64: a row times its stride may exceed 2³¹ elements.
    q_base = q_rows.base + first.to(tl.int64) * q_rows.stride
    do_base = do_rows.base + first.to(tl.int64) * do_rows.stride
    for start in tl.range(first, last, V.block_m):
        q = load_tile(q_base, q_rows, start, mask.count, V.block_m, MASKED, V)
        lse2 = load_stats(lse2_rows, start, offs_m, V)
        do = load_tile(do_base, do_rows, start, mask.count, V.block_m, MASKED, V)
        delta = load_stats(delta_rows, start, offs_m, V)
        # All four loads are before the first matmul. A wait for a load between wgmma instructions
        # would make ptxas serialize them.
        st = product(k, tl.trans(q), None, V.precision)
        # dPᵀ = V dOᵀ, (block_n, block_m).
        dpt = product(v, tl.trans(do), None, V.precision)
        if V.softcap:
            st = capped(st, cap)
        pt = tl.exp2(st * scale_log2 - lse2[None, :])  # Pᵀ, from the saved log-sum-exp
        if MASKED:
            # Here P is set to 0. In the forward it was s that was set to −∞.
            pt = tl.where(visible(mask, (start + offs_m)[None, :], V), pt, 0.0)
        # dV = Pᵀ dO. Pᵀ is the left operand as it was computed, which is why scores are transposed
        # here.
        dv = product(pt.to(do.dtype), do, dv, V.precision)
        # The derivative of a softmax: dS_ij = P_ij·(dP_ij − Σ_k P_ik·dP_ik), and the sum is Δ_i.
        # Where P was masked to 0, dS is 0 too.
        dst = pt * (dpt - delta[None, :])
        if V.softcap:
            dst *= 1.0 - st * st  # the derivative of tanh
        # dK = dSᵀ Q, still without the scale.
        dk = product(dst.to(q.dtype), q, dk, V.precision)
        # The pointers advance, so a tile needs no product of its row number with the stride.
        q_base += V.block_m * q_rows.stride
        do_base += V.block_m * do_rows.stride
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    delta_ptr,
    lse2_ptr,
    q_desc,
    do_desc,
    delta_desc,
    lse2_desc,
    dk_ptr,
    dv_ptr,
    doc_first,
    doc_last,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_dkb,
    stride_dkh,
    stride_dkt,
    stride_dvb,
    stride_dvh,
    stride_dvt,
    kv_heads,
    kv_group,
    query_count,
    key_count,
    padded_count,
    lo,
    hi,
    scale,
    scale_log2,
    cap,
    batch_heads,
    V: tl.constexpr,
):
    """Compute block_n rows of one key head's dK and dV per program.

    The program walks over all query heads that read this key head.
    lo, hi and their flags in V: the band as keys see it, with its sides exchanged.
    delta, lse2: what `delta_kernel` has written, (B, H, padded_count).
    """
    # The keys of the first tiles are seen by the most queries: start with them.
    tile, _, batch, kv_head = schedule(
        tl.cdiv(key_count, V.block_n), kv_heads, batch_heads, V.head_group, False
    )
    col0 = tile * V.block_n
    wide0 = col0.to(tl.int64)
    stops, mask = tile_range(
        col0, key_count, query_count, batch, lo, hi, doc_first, doc_last, V.block_n, V.block_m, V
    )
    # K and V of this tile stay for all query heads and all their tiles. Keys past the end are
    # zeros, and their gradients are not stored.
    k = load_rows(
        k_ptr + batch * stride_kb + kv_head * stride_kh + wide0 * stride_kt,
        stride_kt,
        key_count - col0,
        V.block_n,
        True,
        V,
    )
    v = load_rows(
        v_ptr + batch * stride_vb + kv_head * stride_vh + wide0 * stride_vt,
        stride_vt,
        key_count - col0,
        V.block_n,
        True,
        V,
    )

    # One sum for all query heads of the group: dK and dV of a shared key head need no second pass.
    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros(v.shape, tl.float32)
    for member in tl.range(0, kv_group):
        head = kv_head * kv_group + member
        q_rows = Rows(q_ptr + batch * stride_qb + head * stride_qh, stride_qt, q_desc, batch, head)
        do_rows = Rows(
            do_ptr + batch * stride_gb + head * stride_gh, stride_gt, do_desc, batch, head
        )
        # kv_heads · kv_group is the number of query heads. batch is int64, and so is stats.
        stats = (batch * kv_heads * kv_group + head) * padded_count
        delta_rows = Rows(delta_ptr + stats, 1, delta_desc, 0, stats)
        lse2_rows = Rows(lse2_ptr + stats, 1, lse2_desc, 0, stats)
        # Tiles cut by the mask, full tiles, tiles cut by the mask: see forward.py.
        for phase in tl.static_range(3):
            if V.visited[phase]:
                dk, dv = _walk_queries(
                    dk,
                    dv,
                    k,
                    v,
                    q_rows,
                    do_rows,
                    delta_rows,
                    lse2_rows,
                    mask,
                    stops[phase],
                    stops[phase + 1],
                    scale_log2,
                    cap,
                    phase != 1,  # MASKED
                    V,
                )

    # The last tile may extend past the last key. dK has the factor `scale`, from s = scale·Q Kᵀ:
    # once per element here, instead of once per tile. dV has none.
    keep = tl.arange(0, V.block_n) < key_count - col0
    store_rows(
        dk_ptr + batch * stride_dkb + kv_head * stride_dkh + wide0 * stride_dkt,
        stride_dkt,
        dk * scale,
        keep,
        V,
    )
    store_rows(
        dv_ptr + batch * stride_dvb + kv_head * stride_dvh + wide0 * stride_dvt,
        stride_dvt,
        dv,
        keep,
        V,
    )


@triton.jit
def _walk_keys(
    dq,
    q,
    do,
    lse2,
    delta,
    k_rows,
    v_rows,
    mask,
    first,
    last,
    scale_log2,
    cap,
    MASKED: tl.constexpr,
    V: tl.constexpr,
):
    """Fold the keys [first, last) into dq, tile by tile. dq still lacks the scale."""
    offs_n = tl.arange(0, V.block_n)
    k_base = k_rows.base + first.to(tl.int64) * k_rows.stride
    v_base = v_rows.base + first.to(tl.int64) * v_rows.stride
    for start in tl.range(first, last, V.block_n):
        # One tile of K serves two matmuls: scores now, and dQ at the end of the step.
        k = load_tile(k_base, k_rows, start, mask.count, V.block_n, MASKED, V)
        s = product(q, tl.trans(k), None, V.precision)
        v = load_tile(v_base, v_rows, start, mask.count, V.block_n, MASKED, V)
        dp = product(do, tl.trans(v), None, V.precision)
        if V.softcap:
            s = capped(s, cap)
        # LSE is known, so no running maximum is necessary: p is the final probability.
        p = tl.exp2(s * scale_log2 - lse2[:, None])
        if MASKED:
            p = tl.where(visible(mask, (start + offs_n)[None, :], V), p, 0.0)
        # As in `_walk_queries`, but not transposed: dQ = dS K needs dS on the left.
        ds = p * (dp - delta[:, None])
        if V.softcap:
            ds *= 1.0 - s * s
        dq = product(ds.to(k.dtype), k, dq, V.precision)
        k_base += V.block_n * k_rows.stride
        v_base += V.block_n * v_rows.stride
    return dq


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    delta_ptr,
    lse2_ptr,
    k_desc,
    v_desc,
    dq_ptr,
    doc_first,
    doc_last,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_dqb,
    stride_dqh,
    stride_dqt,
    heads,
    kv_group,
    query_count,
    key_count,
    padded_count,
    lo,
    hi,
    scale,
    scale_log2,
    cap,
    batch_heads,
    V: tl.constexpr,
):
    """Compute block_m rows of one head's dQ per program.

    delta, lse2: what `delta_kernel` has written, (B, H, padded_count).
    """
    # Under a causal mask the last rows see the most keys: start with them.
    tile, bh, batch, head = schedule(
        tl.cdiv(query_count, V.block_m), heads, batch_heads, V.head_group, V.has_hi
    )
    row0 = tile * V.block_m
    wide0 = row0.to(tl.int64)
    rows = row0 + tl.arange(0, V.block_m)
    q = load_rows(
        q_ptr + batch * stride_qb + head * stride_qh + wide0 * stride_qt,
        stride_qt,
        query_count - row0,
        V.block_m,
        True,
        V,
    )
    do = load_rows(
        do_ptr + batch * stride_gb + head * stride_gh + wide0 * stride_gt,
        stride_gt,
        query_count - row0,
        V.block_m,
        True,
        V,
    )
    stats = bh.to(tl.int64) * padded_count
    # Padded, so no mask. Queries past the end have LSE = +∞ and so p = 0.
    lse2 = tl.load(lse2_ptr + stats + rows)
    delta = tl.load(delta_ptr + stats + rows)
    kv_head = head // kv_group
    k_rows = Rows(
        k_ptr + batch * stride_kb + kv_head * stride_kh, stride_kt, k_desc, batch, kv_head
    )
    v_rows = Rows(
        v_ptr + batch * stride_vb + kv_head * stride_vh, stride_vt, v_desc, batch, kv_head
    )
    stops, mask = tile_range(
        row0, query_count, key_count, batch, lo, hi, doc_first, doc_last, V.block_m, V.block_n, V
    )

    dq = tl.zeros(q.shape, tl.float32)
    # Tiles cut by the mask, full tiles, tiles cut by the mask: see forward.py.
    for phase in tl.static_range(3):
        if V.visited[phase]:
            dq = _walk_keys(
                dq,
                q,
                do,
                lse2,
                delta,
                k_rows,
                v_rows,
                mask,
                stops[phase],
                stops[phase + 1],
                scale_log2,
                cap,
                phase != 1,  # MASKED
                V,
            )

    store_rows(
        dq_ptr + batch * stride_dqb + head * stride_dqh + wide0 * stride_dqt,
        stride_dqt,
        dq * scale,
        rows < query_count,
        V,
    )


class Saved(NamedTuple):
    """Inputs of the backward kernels.

    Attributes:
        q: queries (B, H, Tq, D).
        k: keys (B, Hk, Tk, D).
        v: values (B, Hk, Tk, D).
        do: gradient of o, (B, H, Tq, D).
        delta: Δ, (B, H, padded Tq) in fp32.
        lse2: LSE·log2(e), of the same shape.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    delta: Tensor
    lse2: Tensor


def launch_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dq_sum: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Saved:
    """Run `delta_kernel`, and return what the other backward kernels read.

    Args:
        q, k, v, o, lse: tensors that the forward saved, as in forward.py.
        do: gradient of o, with a contiguous last dimension.
        dq_sum: contiguous fp32 sum of dQ to clear, as in hopper_backward.py, or None.
        dlse: contiguous gradient of lse, or None if it is zero.
    """
    batch, heads, query_count, head_dim = q.shape
    # Every tile of queries, of up to ROW_PADDING rows, then ends inside the memory of Δ and LSE.
    padded_count = cdiv(query_count, ROW_PADDING) * ROW_PADDING
    delta = q.new_empty(batch, heads, padded_count, dtype=torch.float32)
    lse2 = torch.empty_like(delta)
    rows = LONG_DELTA_ROWS
    if delta.numel() <= FEW_ROWS or dq_sum is not None:
        rows = SHORT_DELTA_ROWS
    launch(
        delta_kernel,
        (padded_count // rows * batch * heads,),
        o,
        do,
        lse,
        dlse,
        delta,
        lse2,
        dq_sum,
        *strides(o, do),
        heads,
        query_count,
        padded_count,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d(head_dim),
        BLOCK_M=rows,
    )
    return Saved(q, k, v, do, delta, lse2)


def launch_dkdv(saved: Saved, dk: Tensor, dv: Tensor, problem: Problem, tile: Tile) -> None:
    """Fill dk and dv.

    Args:
        saved: result of `launch_delta`.
        dk: tensor of k's shape with a contiguous last dimension.
        dv: likewise.
        problem: mask, scale and precision.
        tile: tile shapes and launch parameters.
    """
    q, k, v, do, delta, lse2 = saved
    batch, kv_heads, key_count, head_dim = k.shape
    # Descriptors see Δ and LSE as one dimension, whose coordinates are int32.
    few = delta.numel() < MAX_COORDINATE
    tile, (q_desc, do_desc) = described("dkdv", replace(tile, tma=tile.tma and few), q, do)
    # One-dimensional tiles of block_m numbers, loaded like Q and dO by TMA, so that the loop
    # computes no addresses.
    delta_desc = None
    lse2_desc = None
    if tile.tma:
        delta_desc = TensorDescriptor(delta, [delta.numel()], [1], [tile.block_m])
        lse2_desc = TensorDescriptor(lse2, [lse2.numel()], [1], [tile.block_m])
    scale, scale_log2, cap = scales(problem)
    launch(
        dkdv_kernel,
        (cdiv(key_count, tile.block_n) * batch * kv_heads,),
        q,
        k,
        v,
        do,
        delta,
        lse2,
        q_desc,
        do_desc,
        delta_desc,
        lse2_desc,
        dk,
        dv,
        *documents(problem),
        *strides(q, k, v, do, dk, dv),
        kv_heads,
        q.shape[1] // kv_heads,  # kv_group
        q.shape[2],  # query_count
        key_count,
        lse2.shape[2],  # padded_count
        # As lo and hi: keys see the band mirrored.
        problem.hi,
        problem.lo,
        scale,
        scale_log2,
        cap,
        batch * kv_heads,
        V=variant(problem, tile, head_dim, q.shape[2], keys=True),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def launch_dq(saved: Saved, dq: Tensor, problem: Problem, tile: Tile) -> None:
    """Fill dq.

    Args:
        saved: result of `launch_delta`.
        dq: tensor of q's shape with a contiguous last dimension.
        problem: mask, scale and precision.
        tile: tile shapes and launch parameters.
    """
    q, k, v, do, delta, lse2 = saved
    batch, heads, query_count, head_dim = q.shape
    tile, (k_desc, v_desc) = described("dq", tile, k, v)
    scale, scale_log2, cap = scales(problem)
    launch(
        dq_kernel,
        (cdiv(query_count, tile.block_m) * batch * heads,),
        q,
        k,
        v,
        do,
        delta,
        lse2,
        k_desc,
        v_desc,
        dq,
        *documents(problem),
        *strides(q, k, v, do, dq),
        heads,
        heads // k.shape[1],  # kv_group
        query_count,
        k.shape[2],  # key_count
        lse2.shape[2],  # padded_count
        problem.lo,
        problem.hi,
        scale,
        scale_log2,
        cap,
        batch * heads,
        V=variant(problem, tile, head_dim, k.shape[2], keys=False),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
