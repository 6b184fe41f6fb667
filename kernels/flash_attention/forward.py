"""FlashAttention-2 forward in Triton.

Math, per batch and head, with s = scale · Q Kᵀ restricted to visible keys (`ranges.py` says which
those are):

    O = softmax(s) V            LSE_i = log Σ_j exp(s_ij)

One program owns BLOCK_M query rows and walks over key tiles with the online softmax: the running
row maximum m and row sum l rescale what was accumulated so far, so that no (T_q, T_k) matrix ever
reaches memory. exp is computed as exp2 with scale·log2(e) folded into one multiply-add, and only
tiles that the mask cuts compare indices.

Shapes: B batch, H query heads, Hk key/value heads (H a multiple of Hk), Tq / Tk query / key length,
D head dim.
    q (B, H, Tq, D), k and v (B, Hk, Tk, D), o like q, lse (B, H, Tq) fp32, natural logarithm.
FLOPs: 4·B·H·D per visible (query, key) pair. Bytes: q, k, v, o and lse once. Saved for backward: q,
k, v, o, lse. Statistics and accumulators are fp32; P is rounded to the input dtype for P·V. A row
without a visible key gives o = 0 and lse = −inf.

With softcap c (Gemma 2), s becomes c · tanh(s / c) before the mask.

Source: Dao, FlashAttention-2 (2023), algorithm 1.
"""

import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import cdiv, launch
from .configs import Tile
from .options import Problem
from .products import product
from .ranges import (
    COUNTS,
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

LN_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-3e38)  # the maximum of no scores: finite, so that exp2 of -inf minus it is 0


@triton.jit
def _walk_keys(
    acc,
    row_sum,
    row_max,
    q,
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
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_base, v_rows, start, mask.count, V.block_n, MASKED, V)
        acc = product(p.to(v.dtype), v, acc, V.precision)
        row_max = new_max
        k_base += V.block_n * k_rows.stride
        v_base += V.block_n * v_rows.stride
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
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
    stride_ob,
    stride_oh,
    stride_ot,
    heads,
    kv_group,
    query_count,
    key_count,
    lo,
    hi,
    scale_log2,
    cap,
    batch_heads,
    V: tl.constexpr,
):
    """One program: block_m rows of one head's output and log-sum-exp."""
    tile, bh, batch, head = schedule(
        tl.cdiv(query_count, V.block_m), heads, batch_heads, V.head_group, V.has_hi
    )
    kv_head = head // kv_group
    k_rows = Rows(
        k_ptr + batch * stride_kb + kv_head * stride_kh, stride_kt, k_desc, batch, kv_head
    )
    v_rows = Rows(
        v_ptr + batch * stride_vb + kv_head * stride_vh, stride_vt, v_desc, batch, kv_head
    )
    row0 = tile * V.block_m
    rows = row0 + tl.arange(0, V.block_m)
    stops, mask = tile_range(
        row0, query_count, key_count, batch, lo, hi, doc_first, doc_last, V.block_m, V.block_n, V
    )
    wide0 = row0.to(tl.int64)
    q = load_rows(
        q_ptr + batch * stride_qb + head * stride_qh + wide0 * stride_qt,
        stride_qt,
        query_count - row0,
        V.block_m,
        True,
        V,
    )

    acc = tl.zeros(q.shape, tl.float32)
    row_sum = tl.zeros(rows.shape, tl.float32)
    row_max = tl.full(rows.shape, LEAST, tl.float32)
    for phase in tl.static_range(3):  # tiles cut by the mask, full tiles, tiles cut by the mask
        if V.visited[phase]:
            acc, row_sum, row_max = _walk_keys(
                acc,
                row_sum,
                row_max,
                q,
                k_rows,
                v_rows,
                mask,
                stops[phase],
                stops[phase + 1],
                scale_log2,
                cap,
                phase != 1,
                V,
            )

    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + tl.log(safe_sum))
    tl.store(lse_ptr + bh.to(tl.int64) * query_count + rows, lse, mask=rows < query_count)
    store_rows(
        o_ptr + batch * stride_ob + head * stride_oh + wide0 * stride_ot,
        stride_ot,
        acc,
        rows < query_count,
        V,
    )


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, problem: Problem, tile: Tile
) -> None:
    """Fill o and lse.

    Tensors as in the module docstring, last dimension contiguous, nothing empty.
    """
    batch, heads, query_count, head_dim = q.shape
    tile, (k_desc, v_desc) = described("forward", tile, k, v)
    launch(
        forward_kernel,
        (cdiv(query_count, tile.block_m) * batch * heads,),
        q,
        k,
        v,
        k_desc,
        v_desc,
        o,
        lse,
        *documents(problem),
        *strides(q, k, v, o),
        heads,
        heads // k.shape[1],
        query_count,
        k.shape[2],
        problem.lo,
        problem.hi,
        *scales(problem)[1:],
        batch * heads,
        V=variant(problem, tile, head_dim, k.shape[2], keys=False),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
