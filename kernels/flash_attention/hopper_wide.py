"""FlashAttention-3 backward for Hopper at head dims 129 to 256, in Gluon: two deterministic passes.

Mathematics, shapes and results are those of backward.py. At D = 256, dK and dV of 64 keys take all
accumulators that two warpgroups have, so none are left for the dQ of hopper_backward.py's single
pass. As in backward.py one kernel sums dK and dV and another dQ, with seven matmuls per pair of
tiles. No two programs add to the same address, so results are bit-identical from run to run.

`hopper_dkdv_kernel`: a program owns 64 keys and walks over query tiles of 64. The two consumers do
different work:

    consumer 0   Sᵀ = K Qᵀ     Pᵀ = exp2(scale·log2(e)·Sᵀ − LSE₂) → shared, in fp16      dV += Pᵀ dO
    consumer 1   dPᵀ = V dOᵀ   dSᵀ = Pᵀ ∘ (dPᵀ − Δ)                                      dK += dSᵀ Q

`hopper_dq_kernel`: a program owns 128 queries, 64 for each consumer, and walks over key tiles of
64:

    S = Q Kᵀ    dP = dO Vᵀ    dS = P ∘ (dP − Δ)    dQ += dS K

Tiles of V and K arrive in turn in a ring of three buffers. V is read before K, so K of the next
tile may take the buffer of V. In both kernels the first matmul of the next tile follows the last
one of this tile, and the exponentials of one consumer run under the matmuls of the other.

Registers per thread of a consumer: sums take D/2, Sᵀ or S and dP take 32 each, the left operand
takes 16. That is 208 of 240 for dQ.
Shared memory in KiB: for dK and dV, K, V and 2 · (Q, dO) of 32 each, and P 16; for dQ, Q and dO 64
each, and K and V 96.

Source: Shah et al., FlashAttention-3 (2024).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_backward import load_queries
from .hopper_forward import Ring, barriers, copy_out, placed, ring

ROWS = gl.constexpr(64)  # rows of a tile, and of one wgmma
# Accumulators of wgmma (version 3) over the 4 warps of a warpgroup, 64 × 64 for scores and 64 × 256
# for sums. LEFT is a left operand in registers, two 16-bit elements each.
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUM_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUM_LAYOUT.value, 2))


@gluon.jit
def _sum_over_queries(
    given, own, scored, summed, stats, p_tiles, p_full, p_free, out_desc, W: gl.constexpr
):
    """Compute dV (W = 0) or dK (W = 1) of 64 keys.

    own: K, whose scores W = 0 computes, or V, whose dPᵀ W = 1 computes.
    scored: tiles of Q (dO), which are multiplied with own.
    summed: tiles of dO (Q), which Pᵀ (dSᵀ) multiplies to sum dV (dK).
    stats: LSE₂ (Δ) of the queries.
    p_tiles, p_full, p_free: two buffers in which consumer 0 gives Pᵀ to consumer 1.
    """
    batch, part, first_key, hi, first_query, tiles, each, scale, scale_log2 = given
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    total = tiles * each
    # For each key the first query that sees it: q ≥ k − hi.
    first_seen = first_key - hi + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, 256], gl.float32, SUM_LAYOUT)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
    own.wait_full(0, pred=total >= W)  # V is loaded with the first tile
    # A `pred` that is false skips the wait. Without a query tile neither Q nor dO is loaded, and
    # the wait would never end.
    scored.wait_full(0, pred=total > 0)
    # The first scores, before the loop: in it, those of the next tile are issued.
    s = warpgroup_mma(
        own.tile(0), scored.tile(0).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=[s])
    for j in range(total):
        # LSE₂ for consumer 0, whose `scored` is Q, and Δ for consumer 1, whose `scored` is dO. It
        # has arrived with that tile, at the same barrier.
        statistic = stats.index(j & 1).load(COLUMN)[None, :]
        p_tile = p_tiles.index(j & 1)
        times = j // 2 & 1  # the parity of the buffer's use, see `Ring`
        if W == 0:
            # Pᵀ, masked only in tiles on the diagonal. Keys past the last one are zeros in own, and
            # their rows of dV are not written.
            left = gl.exp2(s * scale_log2 - statistic)
            row = first_query + j % tiles * ROWS
            if row < first_key + ROWS - 1 - hi:
                queries = row + gl.arange(0, ROWS, COLUMN)
                left = gl.where(queries[None, :] >= first_seen[:, None], left, 0.0)
            # Consumer 1 has read the P of two tiles ago, which this one overwrites.
            mbarrier.wait(p_free.index(j & 1), times ^ 1)
            # fp16 also for bf16 inputs: P ≤ 1 needs no range, and fp16 has three more bits.
            p_tile.store(left.to(gl.float16))
            mbarrier.arrive(p_full.index(j & 1), count=1)
        else:
            # dSᵀ, from the Pᵀ of consumer 0. Without this wait it would be that of two tiles ago.
            mbarrier.wait(p_full.index(j & 1), times)
            # In registers of the same layout in which consumer 0 had P, so dP, Δ and P match
            # element by element.
            left = p_tile.load(S_LAYOUT).to(gl.float32) * (s - statistic)
            mbarrier.arrive(p_free.index(j & 1), count=1)
        # Rounded as the tensor cores need it, and moved to the layout of a left operand. The
        # accumulator's layout differs from it only within a thread.
        left = gl.convert_layout(left.to(out_desc.dtype), LEFT)
        summed.wait_full(j)
        # dV += Pᵀ dO, or dK += dSᵀ Q. It is in flight together with the next scores.
        acc = warpgroup_mma(left, summed.tile(j), acc, is_async=True)
        # After the last tile this multiplies old data, and the result is never read.
        scored.wait_full(j + 1, pred=j + 1 < total)
        s = warpgroup_mma(
            own.tile(0), scored.tile(j + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        # The sum is complete, the scores that were issued after it may still be in flight.
        acc, left = warpgroup_mma_wait(1, deps=[acc, left])
        summed.release(j)  # Q and dO of tile j share this barrier
        # A wgmma in flight across the back edge of the loop would make ptxas serialize all of them.
        s = warpgroup_mma_wait(0, deps=[s])
    # K (or V) is no longer needed, and its buffer has the shape of the result. Only dK has the
    # factor `scale`.
    copy_out(out_desc, batch, part, first_key, own.tile(0), acc if W == 0 else acc * scale)
    # Shared memory must not be given back while TMA reads it.
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "heads",
        "kv_group",
        "each",
        "query_count",
        "key_count",
        "padded_count",
        "hi",
        "group",
    ]
)
def hopper_dkdv_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse2_desc,
    delta_desc,
    dk_desc,
    dv_desc,
    heads,
    kv_group,
    each,
    query_count,
    key_count,
    padded_count,
    hi,
    group,
    scale,
    scale_log2,
):
    """Compute the share of `each` query heads in dK and dV of 64 keys per program.

    The programs with the first keys, which the most queries see, come first. Arguments are those of
    `hopper_backward_kernel`.
    """
    # One tile each: the program keeps its keys. K has one reader, consumer 0, and V has consumer 1.
    k = ring(k_desc, 1, 1)
    v = ring(v_desc, 1, 1)
    q = ring(q_desc, 2, 2)
    # dO is released with Q and shares its `empty` barriers.
    do = Ring(
        gl.allocate_shared_memory(do_desc.dtype, q.tiles.shape, q.tiles.layout),
        barriers(2, 1),
        q.empty,
        2,
    )
    lse2 = gl.allocate_shared_memory(gl.float32, [2, ROWS], lse2_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [2, ROWS], delta_desc.layout)
    p_tiles = gl.allocate_shared_memory(
        gl.float16, [2, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    # One arrival per phase: each barrier has one consumer that arrives and one that waits.
    p_full = barriers(2, 1)
    p_free = barriers(2, 1)
    # TMA and the other warps must see the initialised barriers.
    fence_async_shared()
    key_tiles = (key_count + ROWS - 1) // ROWS
    parts = heads // each
    # A place is one part of one batch: a set of `each` query heads that share a key head.
    place, tile = placed(gl.program_id(0), key_tiles, gl.num_programs(0) // key_tiles, group)
    batch = place // parts
    part = place % parts
    first_key = tile * ROWS
    # The tile of the first query that sees the first key. Earlier tiles see none of these keys.
    first_query = gl.maximum(first_key - hi, 0) // ROWS * ROWS
    tiles = gl.maximum((query_count - first_query + ROWS - 1) // ROWS, 0)
    given = (batch, part, first_key, hi, first_query, tiles, each, scale, scale_log2)
    to_load = (
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        lse2_desc,
        delta_desc,
        k,
        v,
        q,
        do,
        lse2,
        delta,
        batch,
        part * each // kv_group,
        heads,
        part * each,
        each,
        first_key,
        first_query,
        tiles,
        padded_count,
    )
    # Two consumers with 4 warps and 240 registers per thread, and a producer of one warp that needs
    # only 24.
    gl.warp_specialize(
        [
            (_sum_over_queries, (given, k, q, do, lse2, p_tiles, p_full, p_free, dv_desc, 0)),
            (_sum_over_queries, (given, v, do, q, delta, p_tiles, p_full, p_free, dk_desc, 1)),
            (load_queries, (to_load,)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load_keys(given):
    """Load Q and dO once, then V and K of all key tiles in turn.

    V of key tile j is tile 2j of the ring kv, and K of it is tile 2j + 1.
    """
    q_desc, do_desc, k_desc, v_desc, q, do, kv, batch, head, kv_head, first_query, tiles = given
    # dO before Q, and below V before K, in the order in which the first matmuls need them.
    for i in gl.static_range(2):
        do.acquire(i, do_desc.block_type.nbytes)
        do.copy(i, do_desc, batch, head, first_query + i * ROWS)
        q.acquire(i, q_desc.block_type.nbytes)
        q.copy(i, q_desc, batch, head, first_query + i * ROWS)
    for j in range(tiles):
        # The producer waits here until both consumers have released the tile that was in this
        # buffer three tiles ago.
        kv.acquire(2 * j, v_desc.block_type.nbytes)
        kv.copy(2 * j, v_desc, batch, kv_head, j * ROWS)
        kv.acquire(2 * j + 1, k_desc.block_type.nbytes)
        kv.copy(2 * j + 1, k_desc, batch, kv_head, j * ROWS)


@gluon.jit
def _sum_over_keys(given, W: gl.constexpr):
    """Compute dQ of 64 queries, the W-th of the program."""
    (
        dq_desc,
        lse2_ptr,
        delta_ptr,
        q,
        do,
        kv,
        batch,
        head,
        stats,
        first_query,
        key_count,
        hi,
        scale,
        scale_log2,
    ) = given
    row0 = first_query + W * ROWS
    rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    # For each query one past its last visible key.
    end = gl.minimum(rows + hi + 1, key_count)
    # Once per program, so plain loads suffice. Δ and LSE₂ are padded and need no mask.
    lse2 = gl.load(lse2_ptr + stats + rows)[:, None]
    delta = gl.load(delta_ptr + stats + rows)[:, None]
    # Key tiles that these queries see. The other consumer may see one more.
    tiles = (gl.maximum(gl.minimum(row0 + ROWS + hi, key_count), 0) + ROWS - 1) // ROWS
    acc = gl.zeros([ROWS, 256], gl.float32, SUM_LAYOUT)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
    # dP and S of the first tile. In the loop, those of the next tile are issued.
    do.wait_full(W)
    q.wait_full(W)
    kv.wait_full(0, pred=tiles > 0)
    dp = warpgroup_mma(do.tile(W), kv.tile(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    kv.wait_full(1, pred=tiles > 0)
    s = warpgroup_mma(q.tile(W), kv.tile(1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    # dP is complete, S may be in flight. V of the tile is read, so K of the next may take its
    # buffer.
    dp = warpgroup_mma_wait(1, deps=[dp])
    kv.release(0)
    s = warpgroup_mma_wait(0, deps=[s])
    for j in range(tiles):
        # P without a running maximum, as LSE is known.
        p = gl.exp2(s * scale_log2 - lse2)
        # Only tiles that end past the last key of the first query need the mask.
        if (j + 1) * ROWS > gl.minimum(row0 + hi + 1, key_count):
            keys = j * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, S_LAYOUT))
            p = gl.where(keys[None, :] < end[:, None], p, 0.0)
        # dS, rounded, as the left operand of the next matmul. It never leaves the registers.
        left = gl.convert_layout((p * (dp - delta)).to(dq_desc.dtype), LEFT)
        # dQ += dS K. K serves as scores' right operand and here: its buffer is released after both.
        acc = warpgroup_mma(left, kv.tile(2 * j + 1), acc, is_async=True)
        kv.wait_full(2 * j + 2, pred=j + 1 < tiles)
        dp = warpgroup_mma(
            do.tile(W), kv.tile(2 * j + 2).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        # dQ is complete, dP of the next tile may be in flight. K is read, and its buffer is for V
        # of the tile after the next.
        acc, left = warpgroup_mma_wait(1, deps=[acc, left])
        kv.release(2 * j + 1)
        # K of the next tile. It is in the buffer of this tile's V, which was released a step ago.
        kv.wait_full(2 * j + 3, pred=j + 1 < tiles)
        s = warpgroup_mma(
            q.tile(W), kv.tile(2 * j + 3).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        # dP is complete, S may be in flight: V of the next tile is read.
        dp = warpgroup_mma_wait(1, deps=[dp])
        kv.release(2 * j + 2, pred=j + 1 < tiles)
        s = warpgroup_mma_wait(0, deps=[s])
    # This consumer's Q is no longer needed, and its buffer has the shape of dQ.
    copy_out(dq_desc, batch, head, row0, q.tile(W), acc * scale)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "heads",
        "kv_group",
        "query_count",
        "key_count",
        "padded_count",
        "hi",
        "group",
    ]
)
def hopper_dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,
    lse2_ptr,
    delta_ptr,
    heads,
    kv_group,
    query_count,
    key_count,
    padded_count,
    hi,
    group,
    scale,
    scale_log2,
):
    """Compute dQ of 128 queries per program.

    The last queries, which see the most keys, come first. Arguments are those of
    `hopper_backward_kernel`.
    """
    q = ring(q_desc, 2, 1)
    do = ring(do_desc, 2, 1)
    # Three buffers and not four: shared memory has no room for a fourth 32 KiB next to Q and dO.
    kv = ring(k_desc, 3, 2)
    fence_async_shared()
    query_tiles = (query_count + 2 * ROWS - 1) // (2 * ROWS)
    place, tile = placed(gl.program_id(0), query_tiles, gl.num_programs(0) // query_tiles, group)
    batch = place // heads
    head = place % heads
    # The last query tile comes first. place · padded_count is the head's first row in Δ and LSE₂.
    first_query = (query_tiles - 1 - tile) * (2 * ROWS)
    tiles = (gl.maximum(gl.minimum(first_query + 2 * ROWS + hi, key_count), 0) + ROWS - 1) // ROWS
    given = (
        dq_desc,
        lse2_ptr,
        delta_ptr,
        q,
        do,
        kv,
        batch,
        head,
        place * padded_count,
        first_query,
        key_count,
        hi,
        scale,
        scale_log2,
    )
    to_load = (
        q_desc,
        do_desc,
        k_desc,
        v_desc,
        q,
        do,
        kv,
        batch,
        head,
        head // kv_group,
        first_query,
        tiles,
    )
    gl.warp_specialize(
        [(_sum_over_keys, (given, 0)), (_sum_over_keys, (given, 1)), (_load_keys, (to_load,))],
        [4, 1],
        [240, 24],
    )
