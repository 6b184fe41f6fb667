"""FlashAttention-3 backward for Hopper in Gluon: one pass of five matmuls, dQ summed in memory by the TMA unit.

The math, shapes and results are those of backward.py, with Δ and LSE·log2(e) from its
`delta_kernel`. Where its two passes compute seven matmuls per tile, a program here owns 128 keys of
a key head, walks over the query tiles that see them, of one query head after the other of `each`
that read this key head, and computes every product once:

    Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    Pᵀ = exp2(scale·log2(e)·Sᵀ − LSE₂)    dSᵀ = Pᵀ ∘ (dPᵀ − Δ)
    dV += Pᵀ dO    dK += dSᵀ Q    dQ += dS K

Each of two consumer warpgroups owns 64 of the keys, with their dK and dV in registers. Pᵀ and dSᵀ
are left operands of the next matmul from registers too; dS crosses to the other consumer in shared
memory, because each computes half of the tile's dQ over all 128 keys: half of its columns at D =
128 (tiles of 64 queries), half of its rows at D = 64 (128). That half leaves as fp32 by a TMA
reduction: other programs add to the same elements, in whatever order they come, so the last bits of
dQ differ from run to run. dK and dV are bit-identical.

    producer     K V Q₀ dO₀ │ Q₁ dO₁ │ ⋯                       (waits until the buffers of two tiles ago are read)
    consumer 0   │ dPᵀ │ exp2: P │ dV │ dS → shared, dK │ dQ of the tile before │ Sᵀ of the next │ dQ → shared → TMA │
    consumer 1         │ the same for the other 64 keys, half a step later      ⋮                                     │

The sum of dQ lies in memory as the threads hold it, in pieces of 64 rows and 64 columns: each
thread's elements four by four. So shared memory is written without bank conflicts, and TMA adds 16
KiB in one piece. Stores and operands take what shared memory delivers at D = 128.

dQ of a tile waits for a step, because it needs dS of both consumers: so they do not meet in the
middle of every step, and one's exp2 runs under the other's matmuls. Sᵀ of the next tile is issued
before dQ is stored: the store overlaps it. dS has two buffers: `ds_full` says that both consumers
have written one, `ds_free` that both have read it.

A mask may CUT no tile, the first of a program (D = 64, one query head), or any: there is no code
for it in the others, which leaves them registers, and in these two cases the consumers take turns
with exp2 in every step, not in the first alone. A kernel starts while the one before it ends, and
waits for it where it reads what that wrote (`gdc_wait`).

Registers per thread of a consumer: dK and dV D/2 each, Sᵀ and dPᵀ Q/2 each, where Q is the queries
of a tile, dQ 32 and the operands Q/4 each: 256 at D = 128, of which not all live at once, in the
240 that `setmaxnreg` leaves. Shared memory, KiB, at D = 128 | 64: K, V 32 | 16 each, Q, dO 2 · 16
each, dS 32 | 64, dQ 32, LSE and Δ 1 | 2.

Saved for backward, dtypes and the meaning of a row without keys: as in backward.py. Besides its
results the pass needs 4 bytes · B · H · Tq · D for dQ in fp32 (Tq and D up to full tiles), which
`delta_kernel` clears and `cast_kernel` rounds, and, of key heads that more than `each` query heads
read, 4 · B · H / each · Tk · D for the parts of dK and dV.

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

KEYS = gl.constexpr(64)  # of one consumer: the rows of one wgmma
STAGES = gl.constexpr(2)
NEVER = gl.constexpr(2**31 - 1)


@builtin
def reduce_add(desc, coordinates, source, _semantic=None):
    """memory += source, by the TMA unit; `hopper.tma` has no call for it, its builder has."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, source.handle
    )


@gluon.jit
def load_queries(given):
    """Loads: K and V once, then Q, LSE, dO and Δ of the query tiles as their buffers come free."""
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
        k.acquire(i, k_desc.block_type.nbytes)
        k.copy(i, k_desc, batch, kv_head, first_key + i * KEYS)
    for j in range(tiles * each):
        head = first_head + j // tiles
        row = first_query + j % tiles * QUERIES
        stats = (batch * heads + head) * padded_count + row
        q.acquire(j, q_desc.block_type.nbytes + lse2_desc.block_type.nbytes)
        q.copy(j, q_desc, batch, head, row)
        if j == 0:
            gdc_wait()  # for Δ, LSE and the cleared sum of dQ
        tma.async_copy_global_to_shared(
            lse2_desc, [stats], q.full.index(j % STAGES), lse2.index(j % STAGES)
        )
        if j == 0:
            for i in gl.static_range(v.stages):
                v.acquire(i, v_desc.block_type.nbytes)
                v.copy(i, v_desc, batch, kv_head, first_key + i * KEYS)
        # Q and dO of a tile are released together: `q.acquire` has waited for both
        mbarrier.expect(
            do.full.index(j % STAGES), do_desc.block_type.nbytes + delta_desc.block_type.nbytes
        )
        do.copy(j, do_desc, batch, head, row)
        tma.async_copy_global_to_shared(
            delta_desc, [stats], do.full.index(j % STAGES), delta.index(j % STAGES)
        )


@gluon.jit
def _issue_dq(b, k, ds, W: gl.constexpr):
    """This consumer's half of dQ = dS K, over the keys of both: of the columns, or of the queries."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq = gl.zeros([64, 64], gl.float32, LAYOUT)
    for i in gl.static_range(2):
        if k.tiles.shape[2] == 128:
            left, right = ds.index(2 * b + i), k.tile(i).slice(64 * W, 64, dim=1)
        else:
            left, right = ds.index(2 * b + i).slice(64 * W, 64, dim=1), k.tile(i)
        dq = warpgroup_mma(left.permute((1, 0)), right, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(dq, dq_desc, dq_tiles, head, row, padded_count, W: gl.constexpr, QUERIES: gl.constexpr):
    """memory += this consumer's half of a tile's dQ; the reduction before has read its buffer."""
    # (warp, half, row, eight columns, two columns) → by fours, side by side in memory
    tile = dq_tiles.index(W)
    tile.store(dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, 256]))
    fence_async_shared()
    place = (head * padded_count + row) // 64
    place = 2 * place + W if QUERIES == 64 else place + W
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
    """Tile j but for its dQ, and dQ of tile j - 1, so that the consumers may run half a step apart."""
    k, v, q, do, lse2, delta, ds, ds_full, dq_tiles, ds_free = operands
    S_LAYOUT: gl.constexpr = st.type.layout
    QUERIES: gl.constexpr = st.shape[1]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = q.tiles.dtype
    zeros = gl.zeros([KEYS, QUERIES], gl.float32, S_LAYOUT)
    do.wait_full(j)
    if CUT < 2 or FIRST:
        order("sync", W)  # half a step behind the other consumer
    dpt = warpgroup_mma(v.tile(W), do.tile(j).permute((1, 0)), zeros, use_acc=False, is_async=True)
    pt = gl.exp2(st * scale_log2 - lse2.index(j % STAGES).load(COLUMN)[None, :])
    if CUT == 2 or (CUT == 1 and FIRST):
        if masked:
            queries = row + gl.arange(0, QUERIES, COLUMN)
            pt = gl.where(queries[None, :] >= first_seen[:, None], pt, 0.0)
    p_left = gl.convert_layout(pt.to(DTYPE), LEFT)
    if CUT < 2 or FIRST:
        order("arrive", 1 - W)
    dpt = warpgroup_mma_wait(0, deps=[dpt])
    dv = warpgroup_mma(p_left, do.tile(j), dv, is_async=True)
    dst = (pt * (dpt - delta.index(j % STAGES).load(COLUMN)[None, :])).to(DTYPE)
    b = j & 1
    if not FIRST:
        mbarrier.wait(ds_free.index(b), ((j // 2) & 1) ^ 1)  # both have read dS of tile j - 2
    ds.index(2 * b + W).store(dst)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(b), count=1)
    ds_left = gl.convert_layout(dst, LEFT)
    dk = warpgroup_mma(ds_left, q.tile(j), dk, is_async=True)
    if FIRST:
        dv, p_left, dk, ds_left = warpgroup_mma_wait(0, deps=[dv, p_left, dk, ds_left])
    else:
        mbarrier.wait(ds_full.index(1 - b), ((j - 1) // 2) & 1)
        dq = _issue_dq(1 - b, k, ds, W)
        # in flight: two of dQ
        dv, p_left, dk, ds_left = warpgroup_mma_wait(2, deps=[dv, p_left, dk, ds_left])
        # The last reduction has read its buffer. All warps meet here after their matmuls: one
        # thread releases Q, dO.
        tma.store_wait(0)
    q.release(j)
    q.wait_full(j + 1, pred=more)
    # after the last tile this multiplies what lies there, and nobody reads the result
    st = warpgroup_mma(
        k.tile(W), q.tile(j + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    if not FIRST:
        dq = warpgroup_mma_wait(1, deps=[dq])
        mbarrier.arrive(ds_free.index(1 - b), count=1)
        _add_dq(dq, dq_desc, dq_tiles, last_head, last_row, padded_count, W, QUERIES)
    # a wgmma in flight across the loop's back edge would make ptxas serialise all of them
    st = warpgroup_mma_wait(0, deps=[st])
    return st, dk, dv


@gluon.jit
def _consumer(given, operands, W: gl.constexpr, CUT: gl.constexpr):
    """All products for 64 keys, the W-th of the program."""
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
    # past the last key P is anything, even infinite, and would reach dQ as a NaN
    first_seen = gl.where(keys < key_count, keys - hi, NEVER)
    end = first_query + tiles * QUERIES
    masked = key0 + KEYS - 1 - hi  # the first query that sees all keys
    if key0 + KEYS > key_count:
        masked = end
    dk = gl.zeros([KEYS, D], gl.float32, SUM_LAYOUT)
    dv = gl.zeros([KEYS, D], gl.float32, SUM_LAYOUT)
    total = tiles * each
    k.wait_full(0)
    k.wait_full(1)
    q.wait_full(0, pred=total > 0)
    zeros = gl.zeros([KEYS, QUERIES], gl.float32, S_LAYOUT)
    st = warpgroup_mma(k.tile(W), q.tile(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    st = warpgroup_mma_wait(0, deps=[st])
    v.wait_full(W, pred=total > 0)
    last_head, last_row = batch * heads + part * each, first_query
    # Two pairs, not `last_row = row` in the loop alone: Triton's frontend takes a name for constant
    # in a loop if its value before the loop is the one that the loop's first pass gives it.
    head, row = last_head, first_query + QUERIES
    if row >= end:
        row, head = first_query, last_head + 1
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
            True,
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
            False,
        )
        last_head, last_row = head, row
        row += QUERIES
        if row >= end:
            row, head = first_query, head + 1
    # dV leaves before the last dQ, dK with it; at D = 128 that costs the loop registers
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
    """One program: what `each` query heads give to dK and dV of 128 keys, and to dQ / scale; long tiles come first."""
    QUERIES: gl.constexpr = q_desc.block_type.shape[2]
    k = ring(k_desc, 2, 2)
    v = ring(v_desc, 2, 1)
    q = ring(q_desc, STAGES, 2)
    # Released with Q: nobody would wait for barriers of its own, and Triton would put dS where they
    # were made. A GPU that is shared writes barriers back when it returns from another process.
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
    ds_full, ds_free = barriers(2, 2), barriers(2, 2)
    fence_async_shared()
    gdc_launch_dependents()
    key_tiles = (key_count + 2 * KEYS - 1) // (2 * KEYS)
    parts = heads // each
    place, tile = placed(gl.program_id(0), key_tiles, gl.num_programs(0) // key_tiles, group)
    batch = place // parts
    part = place % parts
    first_head = part * each
    first_key = tile * (2 * KEYS)
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
    """dQ = scale · its sum in fp32: 64 rows and 64 columns, one of PARTS, as `_add_dq` has put them into memory."""
    gdc_wait()
    place = tl.cast(tl.program_id(0), tl.int64)  # the interpreter counts with Python integers
    offsets = tl.arange(0, 4096)
    inside = place % PARTS * 64 + offsets // 512 * 8 < HEAD_DIM
    total = tl.load(sum_ptr + place * 4096 + offsets, mask=inside, other=0.0)
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
