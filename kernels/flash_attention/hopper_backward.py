"""FlashAttention-3 backward for Hopper in Gluon: one pass of five matmuls, TMA sums dQ in memory.

Mathematics, shapes and results are those of backward.py, with Δ and LSE₂ = LSE·log2(e) from its
`delta_kernel`. A program owns 128 keys of a key head. It walks over the query tiles that see them,
of one query head after the other, of `each` query heads that read this key head. Where the two
passes of backward.py compute seven matmuls per pair of tiles, it computes every product once:

    Sᵀ = K Qᵀ
    dPᵀ = V dOᵀ
    Pᵀ = exp2(scale·log2(e)·Sᵀ − LSE₂)
    dSᵀ = Pᵀ ∘ (dPᵀ − Δ)
    dV += Pᵀ dO
    dK += dSᵀ Q
    dQ += dS K

Roles. Each of two consumer warpgroups owns 64 of the keys and has their dK and dV in registers. Pᵀ
and dSᵀ are left operands of the next matmul, also from registers. dS goes to the other consumer
through shared memory, because each consumer computes half of the tile's dQ over all 128 keys: half
of its columns at D = 128 (tiles of 64 queries), half of its rows at D = 64 (tiles of 128). That
half leaves as fp32 by a TMA reduction. Other programs add to the same elements, in any order, so
the last bits of dQ differ from run to run. dK and dV are bit-identical.

    producer    K V Q₀ dO₀ │ Q₁ dO₁ │ ⋯         (waits until the buffers of two tiles ago are read)
    consumer 0  │ dPᵀ │ exp2: P │ dV │ dS → shared, dK │ dQ of the tile before │ Sᵀ of the next │ …
    consumer 1        │ the same for the other 64 keys, half a step later       ⋮

    … in each consumer, at the end of a step: dQ → shared → TMA

Order within a step. dQ of a tile waits for the next step, because it needs dS of both consumers.
So they do not meet in the middle of every step, and the exp2 of one runs under the matmuls of the
other. Sᵀ of the next tile is issued before dQ is stored, so the store overlaps it. dS has two
buffers: `ds_full` says that both consumers have written one, `ds_free` that both have read it.

The sum of dQ in memory has the order in which the threads hold it, in pieces of 64 rows and 64
columns: the elements of each thread four by four. So shared memory is written without bank
conflicts, and TMA adds 16 KiB in one piece. At D = 128 stores and operands already take all that
shared memory delivers. `cast_kernel` brings the sum into dQ's order.

CUT says which tiles the mask can cut: 0 none, 1 only the first of a program (D = 64, one query
head), 2 any. The others have no code for it, which leaves them registers. With 0 and 1 the
consumers take turns with exp2 in every step, with 2 only in the first.

A kernel starts while the one before it ends, and waits for it before it reads what that one wrote
(`gdc_wait`).

Registers per thread of a consumer: dK and dV take D/2 each, Sᵀ and dPᵀ Q/2 each, where Q is the
queries of a tile, dQ takes 32 and the operands Q/4 each. That is 256 at D = 128, not all of them at
the same time, in the 240 that `setmaxnreg` leaves.
Shared memory in KiB, at D = 128 | 64: K, V 32 | 16 each; Q, dO 2 · 16 each; dS 32 | 64; dQ 32; LSE
and Δ 1 | 2.

Saved for backward, dtypes and the meaning of a row without keys are as in backward.py. In addition
to its results the pass needs 4·B·H·Tq·D bytes for dQ in fp32 (Tq and D rounded up to full tiles),
which `delta_kernel` clears and `cast_kernel` rounds. For key heads that more than `each` query
heads read, it also needs 4·B·H/each·Tk·D bytes for the parts of dK and dV.

Source: Shah et al., FlashAttention-3 (2024).
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._dispatch import gdc_launch_dependents, gdc_wait
from .hopper_forward import Ring, barriers, copy_out, order, placed, ring

KEYS = gl.constexpr(64)  # keys of one consumer, the rows of one wgmma
STAGES = gl.constexpr(2)  # buffers for Q and dO
NEVER = gl.constexpr(2**31 - 1)  # the first query that sees a key which no query sees


@builtin
def reduce_add(desc, coordinates, source, _semantic=None):
    """Add a tile in shared memory to global memory by TMA.

    Triton's `hopper.tma` has no function for it, but its builder has the instruction.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, source.handle
    )


@gluon.jit
def load_queries(given):
    """Load K and V once, then Q, LSE, dO and Δ of all query tiles.

    Tile j is query tile j mod tiles of the program's query head number j // tiles.
    hopper_wide.py also uses this, with one tile of 64 keys instead of two.
    """
    (
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
        kv_head,
        heads,
        first_head,
        each,
        first_key,
        first_query,
        tiles,
        padded_count,
    ) = given
    QUERIES: gl.constexpr = q_desc.block_type.shape[2]
    for i in gl.static_range(k.stages):
        # K and V are never released, so `acquire` does not wait here and below. It only sets the
        # bytes that `full` expects.
        k.acquire(i, k_desc.block_type.nbytes)
        k.copy(i, k_desc, batch, kv_head, first_key + i * KEYS)
    for j in range(tiles * each):
        head = first_head + j // tiles
        row = first_query + j % tiles * QUERIES
        # The tile's first row in Δ and LSE₂, which all heads share as one dimension.
        stats = (batch * heads + head) * padded_count + row
        # One barrier counts the bytes of Q and of LSE₂: the consumers read both after one wait.
        q.acquire(j, q_desc.block_type.nbytes + lse2_desc.block_type.nbytes)
        q.copy(j, q_desc, batch, head, row)
        if j == 0:
            gdc_wait()  # `delta_kernel` writes LSE and Δ, and clears the sum of dQ
        tma.async_copy_global_to_shared(
            lse2_desc, [stats], q.full.index(j % STAGES), lse2.index(j % STAGES)
        )
        if j == 0:  # V only now: the first matmul needs K and Q
            for i in gl.static_range(v.stages):
                v.acquire(i, v_desc.block_type.nbytes)
                v.copy(i, v_desc, batch, kv_head, first_key + i * KEYS)
        # Q and dO of a tile are released together, so `q.acquire` has waited for both buffers.
        mbarrier.expect(
            do.full.index(j % STAGES), do_desc.block_type.nbytes + delta_desc.block_type.nbytes
        )
        do.copy(j, do_desc, batch, head, row)
        tma.async_copy_global_to_shared(
            delta_desc, [stats], do.full.index(j % STAGES), delta.index(j % STAGES)
        )


@gluon.jit
def _issue_dq(b, k, ds, W: gl.constexpr):
    """Issue this consumer's half of dQ = dS K, and return its accumulator.

    b: which buffer of dS. It holds the dSᵀ of both consumers.
    W: which half: of the columns at D = 128, of the queries at D = 64.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    # dQ of a tile sums over all 128 keys, those of both consumers. So each reads the dS of both.
    dq = gl.zeros([64, 64], gl.float32, LAYOUT)
    for i in gl.static_range(2):  # the 64 keys of each consumer
        if k.tiles.shape[2] == 128:
            # At D = 128 all 64 queries and half of the columns of K.
            left = ds.index(2 * b + i)
            right = k.tile(i).slice(64 * W, 64, dim=1)
        else:
            # At D = 64 half of the 128 queries and all columns of K.
            left = ds.index(2 * b + i).slice(64 * W, 64, dim=1)
            right = k.tile(i)
        # dS is stored transposed, keys by queries. `permute` lets wgmma read it as queries by keys.
        dq = warpgroup_mma(left.permute((1, 0)), right, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(dq, dq_desc, dq_tiles, head, row, padded_count, W: gl.constexpr, QUERIES: gl.constexpr):
    """Start to add this consumer's half of a tile's dQ to the sum in memory.

    The caller has waited until the reduction before has read the buffer.
    """
    # A thread of the wgmma layout holds pairs of columns. The dimensions are (warp, half of its
    # rows, row, eight columns, thread of a row, pair). Reorder them so that the 2 · 2 elements that
    # a thread has of eight columns are consecutive in memory.
    tile = dq_tiles.index(W)
    tile.store(dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, 256]))
    # TMA must see what the threads have stored.
    fence_async_shared()
    place = (head * padded_count + row) // 64
    # Pieces of 64 rows and 64 columns: at D = 128 W is the half of the columns, at D = 64 the half
    # of the rows.
    place = 2 * place + W if QUERIES == 64 else place + W
    # The 64 · 64 numbers of a piece are 16 rows of 256 in the sum, 16 KiB next to each other.
    reduce_add(dq_desc, [place * 16, 0], tile)


@gluon.jit
def _step(
    j,
    st,
    dk,
    dv,
    dq_desc,
    operands,
    padded_count,
    row,
    last_head,
    last_row,
    more,
    first_seen,
    masked,
    scale_log2,
    W: gl.constexpr,
    CUT: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Do the step of tile j: all of its products except dQ, and dQ of tile j − 1.

    So the consumers can run half a step apart.
    st: Sᵀ of tile j, from the step before. more: whether there is a tile j + 1.
    last_head, last_row: head and first query of tile j − 1. row: first query of tile j.
    first_seen: for each key the first query that sees it. masked: whether the mask cuts tile j.
    FIRST: j is 0. Return Sᵀ of tile j + 1, and dk and dv.
    """
    k, v, q, do, lse2, delta, ds, ds_full, dq_tiles, ds_free = operands
    S_LAYOUT: gl.constexpr = st.type.layout
    QUERIES: gl.constexpr = st.shape[1]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = q.tiles.dtype
    zeros = gl.zeros([KEYS, QUERIES], gl.float32, S_LAYOUT)
    do.wait_full(j)
    if CUT < 2 or FIRST:
        order("sync", W)  # stay half a step behind the other consumer
    dpt = warpgroup_mma(v.tile(W), do.tile(j).permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Pᵀ while dPᵀ is computed.
    pt = gl.exp2(st * scale_log2 - lse2.index(j % STAGES).load(COLUMN)[None, :])
    if CUT == 2 or (CUT == 1 and FIRST):
        if masked:
            queries = row + gl.arange(0, QUERIES, COLUMN)
            pt = gl.where(queries[None, :] >= first_seen[:, None], pt, 0.0)
    # Rounded to the operands' dtype, as the left operand of dV. It stays in registers.
    p_left = gl.convert_layout(pt.to(DTYPE), LEFT)
    # Now the other consumer's exponentials, while this one waits for dPᵀ and multiplies.
    if CUT < 2 or FIRST:
        order("arrive", 1 - W)
    dpt = warpgroup_mma_wait(0, deps=[dpt])
    dv = warpgroup_mma(p_left, do.tile(j), dv, is_async=True)
    # dS = P ∘ (dP − Δ), rounded once, for both of its matmuls.
    dst = (pt * (dpt - delta.index(j % STAGES).load(COLUMN)[None, :])).to(DTYPE)
    b = j & 1
    if not FIRST:
        mbarrier.wait(ds_free.index(b), ((j // 2) & 1) ^ 1)  # both have read dS of tile j − 2
    # For dQ, which needs the dS of both consumers.
    ds.index(2 * b + W).store(dst)
    fence_async_shared()
    # The other consumer waits for it in its next step.
    mbarrier.arrive(ds_full.index(b), count=1)
    ds_left = gl.convert_layout(dst, LEFT)
    dk = warpgroup_mma(ds_left, q.tile(j), dk, is_async=True)
    if FIRST:
        dv, p_left, dk, ds_left = warpgroup_mma_wait(0, deps=[dv, p_left, dk, ds_left])
    else:
        # dS of the tile before, from both consumers. They may be half a step apart, and wait here
        # for each other at most that long.
        mbarrier.wait(ds_full.index(1 - b), ((j - 1) // 2) & 1)
        dq = _issue_dq(1 - b, k, ds, W)
        # The two matmuls of dQ stay in flight.
        dv, p_left, dk, ds_left = warpgroup_mma_wait(2, deps=[dv, p_left, dk, ds_left])
        # Wait until the last reduction has read its buffer. All warps meet here after their
        # matmuls, so one thread may release Q and dO.
        tma.store_wait(0)
    # Also for dO, which shares this barrier: Sᵀ, dPᵀ, dV and dK of tile j, which read both, are
    # computed.
    q.release(j)
    q.wait_full(j + 1, pred=more)
    # After the last tile this multiplies old data, and the result is never read.
    st = warpgroup_mma(
        k.tile(W), q.tile(j + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    if not FIRST:
        dq = warpgroup_mma_wait(1, deps=[dq])
        mbarrier.arrive(ds_free.index(1 - b), count=1)
        _add_dq(dq, dq_desc, dq_tiles, last_head, last_row, padded_count, W, QUERIES)
    # A wgmma in flight across the back edge of the loop would make ptxas serialize all of them.
    st = warpgroup_mma_wait(0, deps=[st])
    return st, dk, dv


@gluon.jit
def _consumer(given, operands, W: gl.constexpr, CUT: gl.constexpr):
    """Compute dK and dV of 64 keys, the W-th of the program, and their share of dQ."""
    (
        dq_desc,
        dk_desc,
        dv_desc,
        batch,
        part,
        heads,
        each,
        first_key,
        key_count,
        hi,
        first_query,
        tiles,
        padded_count,
        scale,
        scale_log2,
    ) = given
    k, v, q, _do, _lse2, _delta, ds, ds_full, dq_tiles, _ds_free = operands
    QUERIES: gl.constexpr = q.tiles.shape[1]
    D: gl.constexpr = q.tiles.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    key0 = first_key + W * KEYS
    keys = key0 + gl.arange(0, KEYS, gl.SliceLayout(1, S_LAYOUT))
    # Past the last key, K is zeros and P = exp2(−LSE₂) can be infinite. It would make dQ NaN, so
    # such keys are masked.
    first_seen = gl.where(keys < key_count, keys - hi, NEVER)
    end = first_query + tiles * QUERIES
    # Tiles that start before this query need the mask: the first query that sees all keys, or the
    # end if there are keys past the last one.
    masked = key0 + KEYS - 1 - hi
    if key0 + KEYS > key_count:
        masked = end
    dk = gl.zeros([KEYS, D], gl.float32, SUM_LAYOUT)
    dv = gl.zeros([KEYS, D], gl.float32, SUM_LAYOUT)
    total = tiles * each
    # Both tiles of K: dQ multiplies by the keys of both consumers.
    k.wait_full(0)
    k.wait_full(1)
    q.wait_full(0, pred=total > 0)
    zeros = gl.zeros([KEYS, QUERIES], gl.float32, S_LAYOUT)
    st = warpgroup_mma(k.tile(W), q.tile(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    st = warpgroup_mma_wait(0, deps=[st])
    v.wait_full(W, pred=total > 0)
    # (head, row) is tile j of the loop, (last_head, last_row) the tile before. Both pairs are set
    # before the loop. Triton's frontend would take a name as constant in the loop if its value
    # before the loop were the one that the first pass assigns.
    last_head = batch * heads + part * each
    last_row = first_query
    head = last_head
    row = first_query + QUERIES
    if row >= end:  # the next query head of this key head
        row = first_query
        head = last_head + 1
    # Consumer 0 begins: without this, both would wait for their turn.
    if W == 0:
        order("arrive", 0)
    if total > 0:
        st, dk, dv = _step(
            0,
            st,
            dk,
            dv,
            dq_desc,
            operands,
            padded_count,
            last_row,
            last_head,
            last_row,
            total > 1,
            first_seen,
            last_row < masked,
            scale_log2,
            W,
            CUT,
            True,  # FIRST
        )
    for j in range(1, total):
        st, dk, dv = _step(
            j,
            st,
            dk,
            dv,
            dq_desc,
            operands,
            padded_count,
            row,
            last_head,
            last_row,
            j + 1 < total,
            first_seen,
            row < masked,
            scale_log2,
            W,
            CUT,
            False,  # FIRST
        )
        last_head = head
        last_row = row
        row += QUERIES
        if row >= end:
            row = first_query
            head = head + 1
    # The last dQ. At D = 64, dV leaves before it and dK after it. At D = 128 that order would cost
    # the loop registers, so both leave at the end.
    EARLY: gl.constexpr = D == 64
    if total > 0:
        b = (total - 1) & 1
        if EARLY:
            copy_out(dv_desc, batch, part, key0, v.tile(W), dv)
        mbarrier.wait(ds_full.index(b), ((total - 1) // 2) & 1)
        dq = _issue_dq(b, k, ds, W)
        tma.store_wait(EARLY)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _add_dq(dq, dq_desc, dq_tiles, last_head, last_row, padded_count, W, QUERIES)
        tma.store_wait(EARLY)
        if EARLY:
            copy_out(dk_desc, batch, part, key0, v.tile(W), dk * scale)
    if total == 0 or not EARLY:
        copy_out(dv_desc, batch, part, key0, v.tile(W), dv)
        tma.store_wait(0)
        copy_out(dk_desc, batch, part, key0, v.tile(W), dk * scale)
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
def hopper_backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse2_desc,
    delta_desc,
    dq_desc,
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
    CUT: gl.constexpr,
):
    """Compute the share of `each` query heads in dK and dV of 128 keys per program.

    Also add the share of these keys in dQ / scale to its sum. The programs with the first keys,
    which the most queries see, come first.
    padded_count: rows of a head in Δ, LSE₂ and the sum of dQ. group: see `placed`.
    """
    QUERIES: gl.constexpr = q_desc.block_type.shape[2]
    # K is read by both consumers, V only by the one that owns its keys. Neither is released.
    k = ring(k_desc, 2, 2)
    v = ring(v_desc, 2, 1)
    q = ring(q_desc, STAGES, 2)
    # dO is released with Q and shares its `empty` barriers. Nothing would wait for barriers of its
    # own, so Triton would reuse their memory for dS. But a shared GPU writes barriers back when it
    # returns from another process.
    do = Ring(
        gl.allocate_shared_memory(do_desc.dtype, q.tiles.shape, q.tiles.layout),
        barriers(STAGES, 1),
        q.empty,
        STAGES,
    )
    lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], lse2_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], delta_desc.layout)
    ds = gl.allocate_shared_memory(
        q_desc.dtype, [4, KEYS, QUERIES], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    # Two buffers of dS, and two arrivals per phase, one of each consumer.
    ds_full = barriers(2, 2)
    ds_free = barriers(2, 2)
    fence_async_shared()
    gdc_launch_dependents()  # `cast_kernel` may start, and waits for this kernel
    key_tiles = (key_count + 2 * KEYS - 1) // (2 * KEYS)
    parts = heads // each
    place, tile = placed(gl.program_id(0), key_tiles, gl.num_programs(0) // key_tiles, group)
    batch = place // parts
    part = place % parts
    first_head = part * each
    first_key = tile * (2 * KEYS)
    # The tile of the first query that sees the first key. Earlier tiles see none of these keys.
    first_query = gl.maximum(first_key - hi, 0) // QUERIES * QUERIES
    tiles = gl.maximum((query_count - first_query + QUERIES - 1) // QUERIES, 0)
    given = (
        dq_desc,
        dk_desc,
        dv_desc,
        batch,
        part,
        heads,
        each,
        first_key,
        key_count,
        hi,
        first_query,
        tiles,
        padded_count,
        scale,
        scale_log2,
    )
    operands = (k, v, q, do, lse2, delta, ds, ds_full, dq_tiles, ds_free)
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
        first_head // kv_group,
        heads,
        first_head,
        each,
        first_key,
        first_query,
        tiles,
        padded_count,
    )
    gl.warp_specialize(
        [
            (_consumer, (given, operands, 0, CUT)),
            (_consumer, (given, operands, 1, CUT)),
            (load_queries, (to_load,)),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit(do_not_specialize=["heads", "query_count", "tiles"])
def cast_kernel(
    sum_ptr,
    dq_ptr,
    stride_b,
    stride_h,
    stride_t,
    heads,
    query_count,
    tiles,
    scale,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute dQ = scale · its fp32 sum, a piece of 64 rows and 64 columns per program.

    `_add_dq` has put the elements of a piece in the order in which its threads hold them.
    tiles: pieces of 64 rows of a head. PARTS: pieces of 64 columns of a row.
    """
    gdc_wait()  # for the kernel that sums
    place = tl.cast(tl.program_id(0), tl.int64)  # in the interpreter it is a plain int
    # Every 512 elements of a piece are 8 columns. Those past the head dim were never written.
    offsets = tl.arange(0, 4096)
    inside = place % PARTS * 64 + offsets // 512 * 8 < HEAD_DIM
    total = tl.load(sum_ptr + place * 4096 + offsets, mask=inside, other=0.0)
    # The reverse of the order in `_add_dq`.
    total = tl.reshape(total, (8, 4, 8, 4, 2, 2)).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)
    rows = place // PARTS % tiles * 64 + tl.arange(0, 64)
    columns = place % PARTS * 64 + tl.arange(0, 64)
    head = place // PARTS // tiles
    to = (
        dq_ptr
        + head // heads * stride_b
        + head % heads * stride_h
        + rows[:, None] * stride_t
        + columns[None, :]
    )
    inside = (rows < query_count)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(to, (total * scale).to(dq_ptr.dtype.element_ty), mask=inside)
