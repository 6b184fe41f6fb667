"""FlashAttention-3 forward for Hopper in Gluon: loads, matmuls and softmax overlap, each in warps of its own.

The math, shapes and results are those of forward.py: O = softmax(s) V and LSE = log Σ exp s with s
= scale · Q Kᵀ, key k visible to query q iff k ≤ q + hi and k < Tk. Inputs are fp16 or bf16, D is
64, 128 or 256, sums are fp32.

A program owns QUERIES · CONSUMERS queries of one head and walks over key tiles of KEYS from the
last to the first, so that the mask cuts the first tiles only. One warp, the producer, issues TMA
copies; each consumer, a warpgroup of four warps, multiplies for 64 queries by wgmma. K of a tile
and V of the tile before are multiplied together, so they are loaded together, into one of STAGES
buffers with a pair of barriers: `full`, on which TMA counts arrived bytes, and `empty`, at which
every consumer arrives once it has read both.

    producer     K₀ Q Q │ K₁ V₀ │ K₂ V₁ │ ⋯           (waits for `empty`)          │ K₀ of the next turn, V │ Q Q ⋯
    consumer 0   S₀ softmax₀ ├ S₁ → P₀V₀ ┬ softmax₁, rescale ├ S₂ → P₁V₁ ┬ softmax₂, rescale ├ ⋯ ┤ PV, divide, store
    consumer 1   ⋯ softmax₀, rescale     ├ S₁ → P₀V₀ ┬ softmax₁, rescale ├ ⋯

Ping-pong: the consumers issue their matmuls in a fixed order, one after another, by named barriers.
Tensor cores alternate between all that is issued; without an order every consumer would get its S
late and at the same time, and all would compute the softmax while nothing multiplies. wgmma is
asynchronous: `warpgroup_mma_wait(n)` waits until at most the n latest are in flight. P stays in
registers as the left operand.

Which queries: a program of one tile would have nothing to do while it starts, waits for its first
loads and stores its last result. So a grid of one program per multiprocessor takes tile after tile,
and the producer loads the next turn's Q, K and V meanwhile; O therefore has a buffer of its own,
and Q two. Turns go there and back over the programs, which pairs long tiles with short ones. The
longest tiles of `group` heads come first, then the shorter ones: of all heads, for an even end, or
of one, so that programs share what the L2 holds (hopper.py says when, and when each tile has its
own program).

How many consumers: D = 64 multiplies half as much as D = 128 for as many exponentials, so two
consumers leave the tensor cores idle more than half of the time. Four with tiles of 64 keys fit the
registers, and share what is loaded among twice the queries; a consumer passes over tiles behind the
last key that its own queries see.

Registers per thread of a consumer (128 threads): O 64·D/128 = D/2, S and P KEYS/2 and KEYS/4 (two
elements to a register), so 160 of 240 at D = 128, 176 at D = 256 and 80 of 112 at D = 64;
`setmaxnreg` leaves the producer 24. Shared memory, in bytes: O 2·64·D·CONSUMERS, Q twice that, K
and V 2·KEYS·D·STAGES each: 224 KiB at D = 128, 144 KiB at D = 64. At D = 256 tiles have 64 keys,
and O takes the place of the only Q: 192 KiB.

Where a mask may CUT no tile (0), or only the first of a consumer (1), there is no code for it in
the others.

TMA sees q, k, v, o as (B, H, T, D) of any strides: what a tile has past a head's last row is read
as zero and not written. Bytes, FLOPs and what is saved are forward.py's. No reduction crosses
programs: results are bit-identical.

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
# The maximum of no scores: finite, so that exp2 of -inf minus it is 0; a power of 2, so that its
# product is exact.
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
    def release(self, j, pred=True):
        """This consumer has read tile j."""
        mbarrier.arrive(self.empty.index(j % self.stages), count=1, pred=pred)

    @gluon.jit
    def acquire(self, j, BYTES: gl.constexpr):
        """Until tile j's buffer has been read; `full` then waits for BYTES."""
        mbarrier.wait(self.empty.index(j % self.stages), ((j // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(j % self.stages), BYTES)

    @gluon.jit
    def copy(self, j, desc, batch, head, row):
        """Start the copy of a head's rows from `row` on to tile j."""
        stage = j % self.stages
        # the buffers are matrices to wgmma and four-dimensional to the descriptor; the bytes are
        # the same
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
    tiles = gl.allocate_shared_memory(
        desc.dtype, [STAGES, ROWS, D], gl.NVMMASharedLayout(128, 16, rank=2)
    )
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
    tma.async_copy_shared_to_global(
        desc,
        [batch, head, row, 0],
        tile._reinterpret(desc.dtype, desc.block_type.shape, desc.layout),
    )


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
def _producer(given, CONSUMERS: gl.constexpr):
    """Loads: of each turn Q once, and K of a tile with V of the one before as their buffers come free."""
    q_desc, k_desc, v_desc, q, k, v, kv_group, sizes, turns = given
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    BYTES: gl.constexpr = k_desc.block_type.nbytes
    loaded = 0  # K tiles, of all turns
    # with the very first K comes some V, which nobody reads
    last_batch, last_head, last_row = 0, 0, 0
    for turn in range(turns):
        batch, head, first_query, tiles = _owned(turn, sizes, CONSUMERS, KEYS)
        for j in range(tiles):
            k.acquire(loaded, 2 * BYTES)
            k.copy(loaded, k_desc, batch, head // kv_group, (tiles - 1 - j) * KEYS)
            v.copy(loaded, v_desc, last_batch, last_head, last_row)
            last_batch, last_head, last_row = batch, head // kv_group, (tiles - 1 - j) * KEYS
            loaded += 1
            if j == 0:
                for i in gl.static_range(CONSUMERS):
                    q.acquire(turn * CONSUMERS + i, q_desc.block_type.nbytes)
                    q.copy(turn * CONSUMERS + i, q_desc, batch, head, first_query + i * QUERIES)
    k.acquire(loaded, BYTES)
    v.copy(loaded, v_desc, last_batch, last_head, last_row)


@gluon.constexpr_function
def _named_barrier(instruction, consumer):
    # Triton's own have the first numbers; two consumers meet at each, of 128 threads
    return f"bar.{instruction} {8 + consumer}, 256; mov.b32 $0, $1;"


@gluon.jit
def order(INSTRUCTION: gl.constexpr, CONSUMER: gl.constexpr):
    """`sync`: this consumer, CONSUMER, waits for its place in the order.

    `arrive`: now it is CONSUMER's.
    """
    each = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))  # an element for each thread
    gl.inline_asm_elementwise(
        _named_barrier(INSTRUCTION, CONSUMER), "=r,r", [each], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _softmax(s, row_max, row_sum, scale_log2, row0, first_key, key_count, hi, MASKED: gl.constexpr):
    """One step of the online softmax: (P, row maxima, row sums, factor of what was summed so far)."""
    if MASKED:
        if first_key + s.shape[1] > gl.minimum(row0 + hi + 1, key_count):
            end = gl.minimum(
                row0 + hi + 1 + gl.arange(0, QUERIES, gl.SliceLayout(1, s.type.layout)), key_count
            )
            cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
            # what depends on the thread stands on one side: the other is constants of its elements
            seen = (cols & ~6)[None, :] < (end - first_key)[:, None] - (cols & 6)[None, :]
            s = gl.where(seen, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = new_max * scale_log2
    p = gl.exp2(s * scale_log2 - shift[:, None])
    shrink = gl.exp2(row_max * scale_log2 - shift)
    return p, new_max, row_sum * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _step(
    j,
    given,
    q_tile,
    acc,
    row_max,
    row_sum,
    p,
    row0,
    first_key,
    W: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MASKED: gl.constexpr,
    FIRST: gl.constexpr,
):
    """S of tile j, P·V of the tile before, which the FIRST of a turn has not, and the softmax of S."""
    _o_desc, _lse_ptr, _q, k, v, _o_tiles, scale_log2, sizes, _turns = given
    _heads, _batch_heads, _query_count, key_count, hi, _group = sizes
    KEYS: gl.constexpr = k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, S_LAYOUT)
    k.wait_full(j)
    order("sync", W)
    s = warpgroup_mma(q_tile, k.tile(j).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not FIRST:
        acc = warpgroup_mma(p, v.tile(j), acc, is_async=True)
    order("arrive", (W + 1) % CONSUMERS)
    s = warpgroup_mma_wait(0 if FIRST else 1, deps=[s])
    new_p, row_max, row_sum, shrink = _softmax(
        s, row_max, row_sum, scale_log2, row0, first_key, key_count, hi, MASKED
    )
    if not FIRST:
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    k.release(j)
    return acc, row_max, row_sum, gl.convert_layout(new_p.to(p.dtype), p.type.layout)


@gluon.jit
def _consumer(given, W: gl.constexpr, CONSUMERS: gl.constexpr, CUT: gl.constexpr):
    """The softmax and the two matmuls for 64 queries of each turn, the W-th; `given` is the same for each W."""
    o_desc, lse_ptr, q, k, v, o_tiles, scale_log2, sizes, turns = given
    heads, _batch_heads, query_count, key_count, hi, _group = sizes
    D: gl.constexpr = o_desc.block_type.shape[3]
    KEYS: gl.constexpr = k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    read = 0  # K tiles, of all turns
    if W == 0:
        order("arrive", 0)
    for turn in range(turns):
        batch, head, first_query, tiles = _owned(turn, sizes, CONSUMERS, KEYS)
        row0 = first_query + W * QUERIES
        acc = gl.zeros([QUERIES, D], gl.float32, O_LAYOUT)
        row_max = gl.full([QUERIES], LEAST, gl.float32, ROW)
        row_sum = gl.full([QUERIES], 0.0, gl.float32, ROW)
        # of no tile, and of the type that the loop carries
        p = gl.zeros([QUERIES, KEYS], o_desc.dtype, P_LAYOUT)
        q.wait_full(turn * CONSUMERS + W)
        q_tile = q.tile(turn * CONSUMERS + W)
        if CONSUMERS * QUERIES > KEYS:  # the tiles that only other consumers see
            seen = (gl.minimum(row0 + QUERIES + hi, key_count) + KEYS - 1) // KEYS
            seen = gl.minimum(gl.maximum(seen, 1), tiles)
            for j in range(tiles - seen):
                k.wait_full(read + j)
                order("sync", W)
                order("arrive", (W + 1) % CONSUMERS)
                k.release(read + j)
            read += tiles - seen
            tiles = seen
        acc, row_max, row_sum, p = _step(
            read,
            given,
            q_tile,
            acc,
            row_max,
            row_sum,
            p,
            row0,
            (tiles - 1) * KEYS,
            W,
            CONSUMERS,
            CUT > 0,
            True,
        )
        for j in range(1, tiles):
            acc, row_max, row_sum, p = _step(
                read + j,
                given,
                q_tile,
                acc,
                row_max,
                row_sum,
                p,
                row0,
                (tiles - 1 - j) * KEYS,
                W,
                CONSUMERS,
                CUT == 2,
                False,
            )
        if D < 256:
            q.release(turn * CONSUMERS + W)
        read += tiles
        k.wait_full(read)  # V of the last tile comes with K of the next turn
        acc = warpgroup_mma(p, v.tile(read), acc, is_async=True)
        lse = (row_max * scale_log2 + gl.log2(row_sum)) * LN_2  # -inf for a row without keys
        rows = row0 + gl.arange(0, QUERIES, ROW)
        gl.store(
            lse_ptr + (batch * heads + head).to(gl.int64) * query_count + rows,
            lse,
            mask=rows < query_count,
        )
        factor = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        # a row without keys; V may hold a NaN
        o = gl.where(factor == float("inf"), 0.0, acc * factor)
        tma.store_wait(0)  # the tile of the turn before has been read
        copy_out(o_desc, batch, head, row0, o_tiles.index(W), o)
        if D == 256:
            tma.store_wait(0)
            q.release(turn * CONSUMERS + W)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "heads",
        "batch_heads",
        "kv_group",
        "query_count",
        "key_count",
        "hi",
        "group",
    ]
)
def hopper_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    heads,
    batch_heads,
    kv_group,
    query_count,
    key_count,
    hi,
    group,
    scale_log2,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
):
    """One program: O and LSE of CONSUMERS · 64 queries of one head in each of its turns."""
    D: gl.constexpr = o_desc.block_type.shape[3]
    q = ring(q_desc, CONSUMERS if D == 256 else 2 * CONSUMERS, 1)
    k = ring(k_desc, STAGES, CONSUMERS)
    v = Ring(
        gl.allocate_shared_memory(v_desc.dtype, k.tiles.shape, k.tiles.layout),
        k.full,
        k.empty,
        STAGES,
    )
    o_tiles = q.tiles
    if D < 256:
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, QUERIES, D], q.tiles.layout)
    fence_async_shared()
    turns = _turns((query_count + CONSUMERS * QUERIES - 1) // (CONSUMERS * QUERIES) * batch_heads)
    sizes = (heads, batch_heads, query_count, key_count, hi, group)
    given = (o_desc, lse_ptr, q, k, v, o_tiles, scale_log2, sizes, turns)
    to_load = (q_desc, k_desc, v_desc, q, k, v, kv_group, sizes, turns)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, 2, CUT)),
                (_consumer, (given, 1, 2, CUT)),
                (_producer, (to_load, 2)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, 4, CUT)),
                (_consumer, (given, 1, 4, CUT)),
                (_consumer, (given, 2, 4, CUT)),
                (_consumer, (given, 3, 4, CUT)),
                (_producer, (to_load, 4)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
