"""FlashAttention-2 forward in Triton.

Mathematics, per batch and head, with s = scale · Q Kᵀ restricted to visible keys (`ranges.py` says
which keys are visible):
    O = softmax(s) V
    LSE_i = log Σ_j exp(s_ij)
With softcap c (Gemma 2), s becomes c · tanh(s/c) before the mask.

Shapes: B batches, H query heads, Hk key heads (H is a multiple of Hk), Tq queries, Tk keys, head
dim D.
    q (B, H, Tq, D); k and v (B, Hk, Tk, D); o like q; lse (B, H, Tq) fp32, natural logarithm
Statistics and accumulators are fp32. P is rounded to the input dtype for P·V. A row without a
visible key gives o = 0 and lse = −∞.
Saved for backward: q, k, v, o, lse.
FLOPs: 4·B·H·D per visible (query, key) pair. Bytes: q, k, v, o and lse once.

How it works. One program owns block_m query rows and walks over tiles of block_n keys with the
online softmax. It keeps per row the largest score m so far, the sum l of exp(s − m), and the output
O·l. A tile that raises the maximum to m' first multiplies l and O·l by exp(m − m'). So no (Tq, Tk)
matrix ever reaches memory. exp is computed as exp2, with scale·log2(e) folded into one
multiply-add. Only tiles that the mask cuts compare indices.

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
# The maximum of no scores. It is finite, so that a masked score gives exp2(−∞ − LEAST) = 0, where
# −∞ − (−∞) would be NaN.
LEAST = tl.constexpr(-3e38)


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
    """Fold the keys [first, last) into (acc, row_sum, row_max), tile by tile.

    acc: (block_m, block_d) sums of P·V. row_sum: l. row_max: m·log2(e), ready for exp2.
    MASKED: the mask cuts these tiles, or the last one ends past the last key.
    """
    offs_n = tl.arange(0, V.block_n)
    # int64: a row times its stride may exceed 2³¹ elements.
    k_base = k_rows.base + first.to(tl.int64) * k_rows.stride
    v_base = v_rows.base + first.to(tl.int64) * v_rows.stride
    for start in tl.range(first, last, V.block_n):
        # MASKED also says whether to check for the end of the keys: a full tile is inside the
        # sequence, and loads without a comparison.
        k = load_tile(k_base, k_rows, start, mask.count, V.block_n, MASKED, V)
        # (block_m, block_d)·(block_d, block_n): one score per query of this program and key of the
        # tile.
        s = product(q, tl.trans(k), None, V.precision)
        if V.softcap:
            s = capped(s, cap)
        if MASKED:
            # −∞ never is the maximum, and gives p = 0.
            s = tl.where(visible(mask, (start + offs_n)[None, :], V), s, float("-inf"))
        # scale_log2 > 0, so the maximum can be taken first: one product per row, not per element.
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)  # exp(m − m′), the factor of all earlier sums
        # l adds p in fp32, before it is rounded for the matmul below: the division by l at the end
        # then uses the more exact sum.
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_base, v_rows, start, mask.count, V.block_n, MASKED, V)
        # p ≤ 1, so fp16 can hold it. Tensor cores take both operands in one dtype.
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
    """Compute block_m rows of one head's o and lse per program.

    kv_group: query heads per key head. lo, hi: the band. scale_log2, cap: see `scales`.
    k_desc, v_desc, doc_first, doc_last: None if V says that they are not used.
    """
    # Under a causal mask the last rows see the most keys: start with them.
    tile, bh, batch, head = schedule(
        tl.cdiv(query_count, V.block_m), heads, batch_heads, V.head_group, V.has_hi
    )
    # kv_group consecutive query heads read one key head. Nothing is copied for them.
    kv_head = head // kv_group
    # K and V stay where they are: the walk loads tiles of them. Q is loaded once and kept.
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
    # Always checked for the end: the last tile may extend past the last query. Such rows are zeros,
    # computed like the others and not stored.
    q = load_rows(
        q_ptr + batch * stride_qb + head * stride_qh + wide0 * stride_qt,
        stride_qt,
        query_count - row0,
        V.block_m,
        True,
        V,
    )

    # The state of the online softmax before any key: O·l = 0, l = 0 and m = LEAST.
    acc = tl.zeros(q.shape, tl.float32)
    row_sum = tl.zeros(rows.shape, tl.float32)
    row_max = tl.full(rows.shape, LEAST, tl.float32)
    # Three sweeps: tiles cut by the mask, full tiles, tiles cut by the mask. Each compiles to its
    # own loop, and the middle one compares no indices.
    for phase in tl.static_range(3):
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
                phase != 1,  # MASKED
                V,
            )

    # O = acc/l and LSE = m + log l. row_max is in units of log2. A row that saw no key has l = 0.
    # 0/0 would be NaN, where a row without keys should be 0.
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + tl.log(safe_sum))
    # lse is contiguous, so `bh`, the number of the head over all batches, finds its rows without
    # strides.
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

    Args:
        q, k, v, o: tensors as in the module docstring with a contiguous last dimension, not empty.
        lse: contiguous tensor (B, H, Tq) in fp32.
        problem: mask, scale and precision.
        tile: tile shapes and launch parameters.
    """
    batch, heads, query_count, head_dim = q.shape
    tile, (k_desc, v_desc) = described("forward", tile, k, v)
    _, scale_log2, cap = scales(problem)
    # One grid dimension: only the first may exceed 65,535 programs.
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
        heads // k.shape[1],  # kv_group
        query_count,
        k.shape[2],  # key_count
        problem.lo,
        problem.hi,
        scale_log2,
        cap,
        batch * heads,
        V=variant(problem, tile, head_dim, k.shape[2], keys=False),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
