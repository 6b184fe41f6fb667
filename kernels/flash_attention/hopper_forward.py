"""FlashAttention-3 forward for Hopper in Gluon: loads, matmuls and softmax overlap, each in warps of its own.

The math, shapes and results are those of forward.py: O = softmax(s) V and LSE = log Σ exp s with s = scale · Q Kᵀ,
key k visible to query q iff k ≤ q + hi and k < Tk. Inputs are fp16 or bf16, D is 64, 128 or 256, sums are fp32.

A program owns QUERIES · CONSUMERS queries of one head and walks over key tiles of KEYS from the last to the first, so
that the mask cuts the first tiles only. One warp, the producer, issues TMA copies; each consumer, a warpgroup of four
warps, multiplies for 64 queries by wgmma. K and V have STAGES buffers each, with a pair of barriers: `full`, on which
TMA counts arrived bytes, and `empty`, at which every consumer arrives once it has read the tile.

    producer     Q Q K V │ K V │ K V │ ⋯                       (waits for `empty`)        │ Q Q K V of the next turn
    consumer 0   S₀ softmax₀ ├ S₁ → P₀V₀ ┬ softmax₁ ┬ rescale ├ S₂ → P₁V₁ ┬ softmax₂ ┬ ⋯ ┤ PV, divide, store
    tensor core               ═══════════╧══════════╝          ═══════════╧══════════╝
    consumer 1   the same, at its own pace: its matmuls fill the time of the other's softmax

S of the next tile is issued before P·V of this one, and the softmax runs while P·V does: wgmma is asynchronous, and
`warpgroup_mma_wait(n)` waits until at most the n latest are in flight. P stays in registers as the left operand.

Which queries: a program of one tile would have nothing to do while it starts, waits for its first loads and stores its
last result. So a grid of one program per multiprocessor takes tile after tile, and the producer loads the next turn's
Q, K and V meanwhile; O therefore has a buffer of its own, and Q two. Turns go there and back over the programs, which
pairs long tiles with short ones. The longest tiles of `group` heads come first, then the shorter ones: of all heads,
for an even end, or of one, so that programs share what the L2 holds (hopper.py says when, and when each tile has its
own program).

How many consumers: D = 64 multiplies half as much as D = 128 for as many exponentials, so two consumers leave the
tensor cores idle more than half of the time. Four with tiles of 64 keys fit the registers, and share what is loaded
among twice the queries; a consumer passes over tiles behind the last key that its own queries see.

Registers per thread of a consumer (128 threads): O 64·D/128 = D/2, S and P KEYS/2 and KEYS/4 (two elements to a
register), so 160 of 240 at D = 128, 176 at D = 256 and 80 of 112 at D = 64; `setmaxnreg` leaves the producer 24.
Shared memory, in bytes: O 2·64·D·CONSUMERS, Q twice that, K and V 2·KEYS·D·STAGES each: 224 KiB at D = 128, 144 KiB at
D = 64. At D = 256 tiles have 64 keys, and O takes the place of the only Q: 192 KiB. Where a mask may CUT no tile, there
is no code for it.

TMA sees q, k, v, o as (B, H, T, D) of any strides: what a tile has past a head's last row is read as zero and not
written. Bytes, FLOPs and what is saved are forward.py's. No reduction crosses programs: results are bit-identical.

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
from triton.language.core import _aggregate as aggregate

LN_2 = gl.constexpr(0.6931471805599453)
# The maximum of no scores: finite, so that exp2 of -inf minus it is 0; a power of 2, so that its product is exact.
LEAST = gl.constexpr(-(2.0**64))
QUERIES = gl.constexpr(64)  # of one consumer: the rows of one wgmma


@aggregate
class Ring:
    """A buffer for each stage, with its barriers `full` and `empty`; tile j lies in buffer j mod stages."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)  # taken out of its constexpr on the way here

    @gluon.jit
    def tile(self, j):
        """The buffer of tile j."""
        return self.tiles.index(j % self.stages)

    @gluon.jit
    def wait_full(self, j, pred=True):
        """Until tile j has arrived."""
        mbarrier.wait(self.full.index(j % self.stages), (j // self.stages) & 1, pred=pred)

    @gluon.jit
    def release(self, j):
        """This consumer has read tile j."""
        mbarrier.arrive(self.empty.index(j % self.stages), count=1)

    @gluon.jit
    def acquire(self, j, BYTES: gl.constexpr):
        """Until tile j's buffer has been read; `full` then waits for BYTES."""
        mbarrier.wait(self.empty.index(j % self.stages), ((j // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(j % self.stages), BYTES)

    @gluon.jit
    def copy(self, j, desc, batch, head, row):
        """Start the copy of a head's rows from `row` on to tile j."""
        stage = j % self.stages
        # the buffers are matrices to wgmma and four-dimensional to the descriptor; the bytes are the same
        to = self.tiles.index(stage)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
        tma.async_copy_global_to_shared(desc, [batch, head, row, 0], self.full.index(stage), to)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that open after ARRIVALS arrivals; a `fence_async_shared` has to follow."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A `Ring` for tiles of a (B, H, T, D) descriptor, each read by READERS consumers."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    D: gl.constexpr = desc.block_type.shape[3]
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, ROWS, D], gl.NVMMASharedLayout(128, 16, rank=2))
    return Ring(tiles, barriers(STAGES, 1), barriers(STAGES, READERS), STAGES)


@gluon.jit
def placed(pid, tiles, heads, group):
    """(head, tile) of a program: in a group of heads, whose data the L2 holds, the tiles 0 of all heads come first."""
    first = pid // (tiles * group) * group
    members = gl.minimum(group, heads - first)
    pid -= first * tiles
    return first + pid % members, pid // members


@gluon.jit
def copy_out(desc, batch, head, row, tile, value):
    """Write `value` to a head's rows from `row` on, by way of the buffer `tile`."""
    tile.store(value.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [batch, head, row, 0],
                                    tile._reinterpret(desc.dtype, desc.block_type.shape, desc.layout))


@gluon.jit
def _turns(tiles):
    """How many of all query tiles this program owns."""
    full = tiles // gl.num_programs(0)
    return full + (_place(full) < tiles).to(gl.int32)


@gluon.jit
def _place(turn):
    """Which tile this program takes in a turn: there and back over the programs, which pairs long and short tiles."""
    pid, grid = gl.program_id(0), gl.num_programs(0)
    return turn * grid + gl.where(turn % 2 == 0, pid, grid - 1 - pid)


@gluon.jit
def _owned(turn, sizes, CONSUMERS: gl.constexpr, KEYS: gl.constexpr):
    """(batch, head, first query, key tiles) of this program's turn; the last queries, the longest, come first."""
    heads, batch_heads, query_count, key_count, hi, group = sizes
    query_tiles = (query_count + CONSUMERS * QUERIES - 1) // (CONSUMERS * QUERIES)
    place, tile = placed(_place(turn), query_tiles, batch_heads, group)
    first_query = (query_tiles - 1 - tile) * (CONSUMERS * QUERIES)
    last_query = gl.minimum(first_query + CONSUMERS * QUERIES, query_count) - 1
    # one tile at the least: what its mask leaves of a row without keys is O = 0, LSE = -inf
    tiles = gl.maximum((gl.minimum(last_query + hi + 1, key_count) + KEYS - 1) // KEYS, 1)
    return place // heads, place % heads, first_query, tiles


@gluon.jit
def _producer(given, sizes, turns, CONSUMERS: gl.constexpr):
    """Loads: of each turn Q once, then K and V tiles as their buffers come free."""
    q_desc, k_desc, v_desc, q, k, v, kv_group = given
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    loaded = 0  # K and V tiles, of all turns
    for turn in range(turns):
        batch, head, first_query, tiles = _owned(turn, sizes, CONSUMERS, KEYS)
        for i in gl.static_range(CONSUMERS):
            q.acquire(turn * CONSUMERS + i, q_desc.block_type.nbytes)
            q.copy(turn * CONSUMERS + i, q_desc, batch, head, first_query + i * QUERIES)
        for j in range(tiles):
            row = (tiles - 1 - j) * KEYS
            k.acquire(loaded + j, k_desc.block_type.nbytes)
            k.copy(loaded + j, k_desc, batch, head // kv_group, row)
            v.acquire(loaded + j, v_desc.block_type.nbytes)
            v.copy(loaded + j, v_desc, batch, head // kv_group, row)
        loaded += tiles


@gluon.jit
def _softmax(s, row_max, row_sum, scale_log2, rows, first_key, key_count, hi, MASKED: gl.constexpr):
    """One step of the online softmax: (P, row maxima, row sums, factor of what was summed so far)."""
    if MASKED:
        cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        end = gl.minimum(rows + hi + 1, key_count)
        if s.shape[1] == 128:  # what depends on the thread stands on one side: the other is constants of its elements
            seen = (cols & ~6)[None, :] < (end - first_key)[:, None] - (cols & 6)[None, :]
        else:
            seen = (first_key + cols)[None, :] < end[:, None]
        s = gl.where(seen, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = new_max * scale_log2
    p = gl.exp2(s * scale_log2 - shift[:, None])
    shrink = gl.exp2(row_max * scale_log2 - shift)
    return p, new_max, row_sum * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _step(j, q_tile, k, v, acc, row_max, row_sum, p, scale_log2, rows, first_key, key_count, hi, MASKED: gl.constexpr):
    """S of tile j, P·V of the tile before, and the softmax of S meanwhile."""
    KEYS: gl.constexpr = k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, S_LAYOUT)
    k.wait_full(j)
    s = warpgroup_mma(q_tile, k.tile(j).permute((1, 0)), zeros, use_acc=False, is_async=True)
    v.wait_full(j - 1)
    acc = warpgroup_mma(p, v.tile(j - 1), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    k.release(j)
    new_p, row_max, row_sum, shrink = _softmax(s, row_max, row_sum, scale_log2, rows, first_key, key_count, hi, MASKED)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    v.release(j - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, row_max, row_sum, new_p


@gluon.jit
def _consumer(given, sizes, turns, W: gl.constexpr, CONSUMERS: gl.constexpr, CUT: gl.constexpr):
    """The softmax and the two matmuls for 64 queries of each turn, the W-th; `given` is the same for each W."""
    o_desc, lse_ptr, q, k, v, o_tiles, scale_log2 = given
    heads, _batch_heads, query_count, key_count, hi, _group = sizes
    D: gl.constexpr = o_desc.block_type.shape[3]
    KEYS: gl.constexpr = k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    read = 0  # K and V tiles, of all turns
    for turn in range(turns):
        batch, head, first_query, tiles = _owned(turn, sizes, CONSUMERS, KEYS)
        row0 = first_query + W * QUERIES
        rows = row0 + gl.arange(0, QUERIES, ROW)
        acc = gl.zeros([QUERIES, D], gl.float32, O_LAYOUT)
        row_max = gl.full([QUERIES], LEAST, gl.float32, ROW)
        row_sum = gl.full([QUERIES], 0.0, gl.float32, ROW)
        q.wait_full(turn * CONSUMERS + W)
        if CONSUMERS * QUERIES > KEYS:  # the tiles that only other consumers see
            seen = (gl.minimum(row0 + QUERIES + hi, key_count) + KEYS - 1) // KEYS
            seen = gl.minimum(gl.maximum(seen, 1), tiles)
            for j in range(tiles - seen):
                k.wait_full(read + j)
                k.release(read + j)
                v.wait_full(read + j)
                v.release(read + j)
            read += tiles - seen
            tiles = seen
        k.wait_full(read)
        q_tile = q.tile(turn * CONSUMERS + W)
        zeros = gl.zeros([QUERIES, KEYS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_tile, k.tile(read).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        k.release(read)
        p, row_max, row_sum, _shrink = _softmax(s, row_max, row_sum, scale_log2, rows, (tiles - 1) * KEYS, key_count,
                                                hi, CUT)
        masked = gl.to_tensor(1)
        if CUT:  # tiles that some row does not see whole
            masked = gl.minimum(tiles - gl.maximum(gl.minimum(row0 + hi + 1, key_count), 0) // KEYS, tiles)
            masked = gl.maximum(masked, 1)
            for j in range(1, masked):
                left = gl.convert_layout(p.to(o_desc.dtype), P_LAYOUT)
                acc, row_max, row_sum, p = _step(read + j, q_tile, k, v, acc, row_max, row_sum, left, scale_log2, rows,
                                                 (tiles - 1 - j) * KEYS, key_count, hi, True)
        # carried from loop to loop, P in 16 bits would be taken apart and put together again in each step
        left = gl.convert_layout(p.to(o_desc.dtype), P_LAYOUT)
        for j in range(masked, tiles):
            acc, row_max, row_sum, p = _step(read + j, q_tile, k, v, acc, row_max, row_sum, left, scale_log2, rows,
                                             (tiles - 1 - j) * KEYS, key_count, hi, False)
            left = gl.convert_layout(p.to(o_desc.dtype), P_LAYOUT)
        if D < 256:
            q.release(turn * CONSUMERS + W)
        read += tiles
        v.wait_full(read - 1)
        acc = warpgroup_mma(left, v.tile(read - 1), acc, is_async=True)
        safe_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = gl.where(row_sum == 0.0, float("-inf"), (row_max * scale_log2 + gl.log2(safe_sum)) * LN_2)
        gl.store(lse_ptr + (batch * heads + head).to(gl.int64) * query_count + rows, lse, mask=rows < query_count)
        factor = gl.convert_layout(1.0 / safe_sum, gl.SliceLayout(1, O_LAYOUT))
        unseen = gl.convert_layout(row_sum == 0.0, gl.SliceLayout(1, O_LAYOUT))
        acc, left = warpgroup_mma_wait(0, deps=[acc, left])
        v.release(read - 1)
        o = gl.where(unseen[:, None], 0.0, acc * factor[:, None])  # V may hold a NaN
        tma.store_wait(0)  # the tile of the turn before has been read
        copy_out(o_desc, batch, head, row0, o_tiles.index(W), o)
        if D == 256:
            tma.store_wait(0)
            q.release(turn * CONSUMERS + W)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "batch_heads", "kv_group", "query_count", "key_count", "hi", "group"])
def hopper_forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, heads, batch_heads, kv_group, query_count, key_count,
                          hi, group, scale_log2, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CUT: gl.constexpr):
    """One program: O and LSE of CONSUMERS · 64 queries of one head in each of its turns."""
    D: gl.constexpr = o_desc.block_type.shape[3]
    q = ring(q_desc, CONSUMERS if D == 256 else 2 * CONSUMERS, 1)
    k = ring(k_desc, STAGES, CONSUMERS)
    v = ring(v_desc, STAGES, CONSUMERS)
    o_tiles = q.tiles
    if D < 256:
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, QUERIES, D], q.tiles.layout)
    fence_async_shared()
    turns = _turns((query_count + CONSUMERS * QUERIES - 1) // (CONSUMERS * QUERIES) * batch_heads)
    sizes = (heads, batch_heads, query_count, key_count, hi, group)
    given = (o_desc, lse_ptr, q, k, v, o_tiles, scale_log2)
    to_load = (q_desc, k_desc, v_desc, q, k, v, kv_group)
    if CONSUMERS == 2:
        gl.warp_specialize([(_consumer, (given, sizes, turns, 0, 2, CUT)),
                            (_consumer, (given, sizes, turns, 1, 2, CUT)),
                            (_producer, (to_load, sizes, turns, 2))], [4, 1], [240, 24])
    else:
        gl.warp_specialize([(_consumer, (given, sizes, turns, 0, 4, CUT)),
                            (_consumer, (given, sizes, turns, 1, 4, CUT)),
                            (_consumer, (given, sizes, turns, 2, 4, CUT)),
                            (_consumer, (given, sizes, turns, 3, 4, CUT)),
                            (_producer, (to_load, sizes, turns, 4))], [4, 4, 4, 1], [112, 112, 112, 24])
