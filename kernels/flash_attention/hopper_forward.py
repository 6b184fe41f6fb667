"""FlashAttention-3 forward for Hopper in Gluon: loads, matmuls and softmax run at the same time.

Mathematics, shapes and results are those of forward.py:
    s = scale · Q Kᵀ, where key k is visible to query q if k ≤ q + hi and k < Tk
    O = softmax(s) V
    LSE = log Σ exp s
Inputs are fp16 or bf16. D, the columns of a tile, is 64, 128 or 256. Sums are fp32. Bytes, FLOPs
and what is saved are those of forward.py. No reduction crosses programs, so results are
bit-identical from run to run.

Roles. A program owns QUERIES · CONSUMERS queries of one head, and walks over key tiles of KEYS from
the last to the first, so that only the first tiles are cut by the mask. One warp, the producer,
issues TMA copies. Each consumer is a warpgroup of four warps and multiplies for 64 queries by
wgmma. K of a tile and V of the tile before it are multiplied together, so they are loaded together,
into one of STAGES buffers with a pair of barriers. TMA counts the bytes that have arrived on
`full`. Every consumer arrives at `empty` once it has read both.

    producer    K₀ Q Q │ K₁ V₀ │ K₂ V₁ │ ⋯       (waits for `empty`)       │ K₀ of the next turn, V
    consumer 0  S₀ softmax₀ ├ S₁ → P₀V₀ ┬ softmax₁, rescale ├ S₂ → P₁V₁ ┬ ⋯ ┤ PV, divide, store
    consumer 1  ⋯ softmax₀, rescale     ├ S₁ → P₀V₀ ┬ softmax₁, rescale ├ ⋯

Ping-pong. The consumers issue their matmuls in a fixed order, one after another, by named barriers.
Tensor cores alternate between all matmuls that have been issued. Without an order, every consumer
would get its S late and at the same time, and all would compute the softmax while nothing
multiplies. wgmma is asynchronous: `warpgroup_mma_wait(n)` waits until at most the n latest are in
flight. P stays in registers as the left operand.

Turns. A program with a single tile would be idle while it starts, waits for its first loads and
stores its last result. So a grid of one program per multiprocessor takes tile after tile, and the
producer loads Q, K and V of the next turn in the meantime. O therefore has its own buffer, and Q
has two. Turns go back and forth over the programs, which pairs long tiles with short ones. The
longest tiles of `group` heads come first, then the shorter ones. With all heads in one group the
end is even. With one head per group, programs share what the L2 holds. hopper.py chooses, also
whether each tile has its own program.

Number of consumers. D = 64 has half as many multiplications as D = 128 for the same number of
exponentials, so two consumers leave the tensor cores idle more than half of the time. Four with
tiles of 64 keys fit the registers, and twice as many queries share what is loaded. But a program
then owns 256 queries, so calls with few rows have two. A consumer passes over tiles after the last
key that its own queries see.

Registers per thread of a consumer (128 threads): O takes 64·D/128 = D/2, S takes KEYS/2 and P takes
KEYS/4, two elements to a register. Of 240 that is 160 at D = 128, 176 at D = 256 and 128 at D = 64.
With four consumers it is 80 of 112. `setmaxnreg` leaves 24 to the producer.
Shared memory, in bytes: O 2·64·D·CONSUMERS, Q twice that, K and V 2·KEYS·D·STAGES each. That is 224
KiB at D = 128 and 112 KiB at D = 64, or 144 KiB with four consumers. At D = 256 tiles have 64 keys,
and O takes the place of the only Q: 192 KiB.

CUT says which tiles the mask can cut: 0 none, 1 only the first of a consumer, 2 any. The others
have no code for it.

TMA sees q, k, v and o as (B, H, T, D) of any strides. Rows of a tile past a head's last row are
read as zeros and not written.

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
# The maximum of no scores. It is finite, so that a masked score gives exp2(−∞ − LEAST) = 0. It is a
# power of 2, so that its product with the scale is exact.
LEAST = gl.constexpr(-(2.0**64))
QUERIES = gl.constexpr(64)  # queries of one consumer, the rows of one wgmma


@aggregate
class Ring:
    """Buffers for tiles in shared memory, with two barriers each. Tile j uses buffer j mod stages.

    Barriers count phases. A wait for phase parity p returns once a phase of parity p is complete.
    The j-th tile is use j // stages of its buffer, so the low bit of that number is the parity.

    Attributes:
        tiles: buffers (stages, rows, columns).
        full: barriers that complete when the bytes of a tile have arrived.
        empty: barriers that complete when all readers have released a tile.
        stages: number of buffers.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)  # the caller's constexpr arrives as a plain number

    @gluon.jit
    def tile(self, j):
        """Return the buffer of tile j."""
        return self.tiles.index(j % self.stages)

    @gluon.jit
    def wait_full(self, j, pred=True):
        """Wait until tile j has arrived."""
        mbarrier.wait(self.full.index(j % self.stages), (j // self.stages) & 1, pred=pred)

    @gluon.jit
    def release(self, j, pred=True):
        """Say that this consumer has read tile j."""
        mbarrier.arrive(self.empty.index(j % self.stages), count=1, pred=pred)

    @gluon.jit
    def acquire(self, j, BYTES: gl.constexpr):
        """Wait until the buffer for tile j is free, and let `full` expect BYTES bytes."""
        # The opposite parity: a new barrier counts as having completed a phase of parity 1, so the
        # first use of each buffer does not wait.
        mbarrier.wait(self.empty.index(j % self.stages), ((j // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(j % self.stages), BYTES)

    @gluon.jit
    def copy(self, j, desc, batch, head, row):
        """Start to copy a head's rows from `row` on to tile j."""
        stage = j % self.stages
        # For wgmma the buffers are matrices, for the descriptor they have four dimensions. The
        # bytes are the same.
        to = self.tiles.index(stage)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
        tma.async_copy_global_to_shared(desc, [batch, head, row, 0], self.full.index(stage), to)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers that complete after ARRIVALS arrivals.

    The caller must call `fence_async_shared` before TMA uses them.
    """
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Return a `Ring` for tiles of a (B, H, T, D) descriptor, each read by READERS consumers."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    D: gl.constexpr = desc.block_type.shape[3]
    tiles = gl.allocate_shared_memory(
        desc.dtype, [STAGES, ROWS, D], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    return Ring(tiles, barriers(STAGES, 1), barriers(STAGES, READERS), STAGES)


@gluon.jit
def placed(pid, tiles, heads, group):
    """Return (head, tile) of program or place `pid`.

    tiles: tiles per head. heads: number of heads.
    group: heads whose data the L2 holds together. The tiles 0 of all heads of a group come first,
    then their tiles 1, and so on.
    """
    first = pid // (tiles * group) * group
    members = gl.minimum(group, heads - first)  # the last group may be smaller
    pid -= first * tiles
    return first + pid % members, pid // members


@gluon.jit
def copy_out(desc, batch, head, row, tile, value):
    """Start to write `value` to a head's rows from `row` on, by way of the buffer `tile`.

    The caller must call `tma.store_wait` before it uses the buffer again or ends.
    """
    tile.store(value.to(desc.dtype))
    fence_async_shared()  # TMA must see what the threads have stored
    tma.async_copy_shared_to_global(
        desc,
        [batch, head, row, 0],
        tile._reinterpret(desc.dtype, desc.block_type.shape, desc.layout),
    )


@gluon.jit
def _turns(tiles):
    """Return how many of all query tiles this program owns."""
    full = tiles // gl.num_programs(0)
    return full + (_place(full) < tiles).to(gl.int32)


@gluon.jit
def _place(turn):
    """Return the place in the order of tiles that this program takes in a turn.

    Turns go back and forth over the programs: a program that got a long tile gets a short one next.
    """
    pid = gl.program_id(0)
    grid = gl.num_programs(0)
    return turn * grid + gl.where(turn % 2 == 0, pid, grid - 1 - pid)


@gluon.jit
def _owned(turn, sizes, CONSUMERS: gl.constexpr, KEYS: gl.constexpr):
    """Return (batch, head, first query, number of key tiles) of this program's turn.

    The last queries of a head see the most keys, and come first.
    """
    heads, batch_heads, query_count, key_count, hi, group = sizes
    query_tiles = (query_count + CONSUMERS * QUERIES - 1) // (CONSUMERS * QUERIES)
    place, tile = placed(_place(turn), query_tiles, batch_heads, group)
    first_query = (query_tiles - 1 - tile) * (CONSUMERS * QUERIES)
    last_query = gl.minimum(first_query + CONSUMERS * QUERIES, query_count) - 1
    # At least one tile: its mask gives rows without keys their O = 0 and LSE = −∞.
    tiles = gl.maximum((gl.minimum(last_query + hi + 1, key_count) + KEYS - 1) // KEYS, 1)
    return place // heads, place % heads, first_query, tiles


@gluon.jit
def _producer(given, CONSUMERS: gl.constexpr):
    """Load the tiles of all turns: Q once, and K of a tile together with V of the tile before.

    `loaded` counts K tiles of all turns. V of a turn's last tile comes with the first K of the next
    turn, so batch, head and row of V are those of the K before.
    """
    q_desc, k_desc, v_desc, q, k, v, kv_group, sizes, turns = given
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    BYTES: gl.constexpr = k_desc.block_type.nbytes
    loaded = 0
    # A V that is never read comes with the very first K.
    last_batch = 0
    last_head = 0
    last_row = 0
    for turn in range(turns):
        batch, head, first_query, tiles = _owned(turn, sizes, CONSUMERS, KEYS)
        for j in range(tiles):
            k.acquire(loaded, 2 * BYTES)
            k.copy(loaded, k_desc, batch, head // kv_group, (tiles - 1 - j) * KEYS)
            v.copy(loaded, v_desc, last_batch, last_head, last_row)
            last_batch = batch
            last_head = head // kv_group
            last_row = (tiles - 1 - j) * KEYS
            loaded += 1
            # Q after the first K, not before: at D = 256, Q's buffer is free once O of the turn
            # before has left it, and O needs the V that comes with this K.
            if j == 0:
                for i in gl.static_range(CONSUMERS):
                    q.acquire(turn * CONSUMERS + i, q_desc.block_type.nbytes)
                    q.copy(turn * CONSUMERS + i, q_desc, batch, head, first_query + i * QUERIES)
    k.acquire(loaded, BYTES)  # V of the very last tile comes alone
    v.copy(loaded, v_desc, last_batch, last_head, last_row)


@gluon.constexpr_function
def _named_barrier(instruction, consumer):
    """Return the PTX of an instruction at the consumer's named barrier."""
    # Numbers from 8 on, because Triton itself uses the first ones. Two consumers of 128 threads
    # meet at each barrier: one syncs and the one before it arrives.
    return f"bar.{instruction} {8 + consumer}, 256; mov.b32 $0, $1;"


@gluon.jit
def order(INSTRUCTION: gl.constexpr, CONSUMER: gl.constexpr):
    """Take or give a place in the order of the consumers.

    INSTRUCTION "sync": this consumer, CONSUMER, waits until it is its turn. "arrive": it is
    CONSUMER's turn now.
    """
    # Inline assembly works on elements. One element per thread runs the instruction once in each.
    each = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        _named_barrier(INSTRUCTION, CONSUMER), "=r,r", [each], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _softmax(s, row_max, row_sum, scale_log2, row0, first_key, key_count, hi, MASKED: gl.constexpr):
    """Do one step of the online softmax.

    Return P, the new row maxima and row sums, and the factor of all earlier sums. Maxima are those
    of s, without the scale.
    """
    if MASKED:
        # Most tiles of a consumer with a mask are full: decide that for all rows at once.
        if first_key + s.shape[1] > gl.minimum(row0 + hi + 1, key_count):
            end = gl.minimum(
                row0 + hi + 1 + gl.arange(0, QUERIES, gl.SliceLayout(1, s.type.layout)), key_count
            )
            cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
            # cols < end − first_key, with the part of cols that depends on the thread (its bits 1
            # and 2) moved to the right side. The left side is then constant for each element.
            seen = (cols & ~6)[None, :] < (end - first_key)[:, None] - (cols & 6)[None, :]
            s = gl.where(seen, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1))
    # Multiply-adds with a shift per row. The scale is positive, so the order of maxima stays.
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
    """Compute S of tile j, P·V of the tile before, and the softmax of S.

    FIRST: tile j is the first of a turn, and there is no P·V yet.
    MASKED: the mask can cut this tile.
    Return acc, the row maxima, the row sums, and P of tile j.
    """
    _o_desc, _lse_ptr, _q, k, v, _o_tiles, scale_log2, sizes, _turns = given
    _heads, _batch_heads, _query_count, key_count, hi, _group = sizes
    KEYS: gl.constexpr = k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, S_LAYOUT)
    k.wait_full(j)  # waits also for V of the tile before, which arrives at the same barrier
    order("sync", W)
    s = warpgroup_mma(q_tile, k.tile(j).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not FIRST:
        acc = warpgroup_mma(p, v.tile(j), acc, is_async=True)
    order("arrive", (W + 1) % CONSUMERS)
    s = warpgroup_mma_wait(0 if FIRST else 1, deps=[s])  # P·V may still be in flight
    new_p, row_max, row_sum, shrink = _softmax(
        s, row_max, row_sum, scale_log2, row0, first_key, key_count, hi, MASKED
    )
    if not FIRST:
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    k.release(j)  # both matmuls are done, so K and V are read
    return acc, row_max, row_sum, gl.convert_layout(new_p.to(p.dtype), p.type.layout)


@gluon.jit
def _consumer(given, W: gl.constexpr, CONSUMERS: gl.constexpr, CUT: gl.constexpr):
    """Compute O and LSE for 64 queries of each turn, the W-th of the program.

    `given` is the same for all consumers.
    """
    o_desc, lse_ptr, q, k, v, o_tiles, scale_log2, sizes, turns = given
    heads, _batch_heads, query_count, key_count, hi, _group = sizes
    D: gl.constexpr = o_desc.block_type.shape[3]
    KEYS: gl.constexpr = k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    read = 0  # K tiles of all turns
    if W == 0:
        order("arrive", 0)  # consumer 0 begins
    for turn in range(turns):
        batch, head, first_query, tiles = _owned(turn, sizes, CONSUMERS, KEYS)
        row0 = first_query + W * QUERIES
        acc = gl.zeros([QUERIES, D], gl.float32, O_LAYOUT)
        row_max = gl.full([QUERIES], LEAST, gl.float32, ROW)
        row_sum = gl.full([QUERIES], 0.0, gl.float32, ROW)
        # There is no P yet. This one has the type that the loop carries.
        p = gl.zeros([QUERIES, KEYS], o_desc.dtype, P_LAYOUT)
        q.wait_full(turn * CONSUMERS + W)
        q_tile = q.tile(turn * CONSUMERS + W)
        if CONSUMERS * QUERIES > KEYS:
            # The first tiles may be past the last key that this consumer's queries see. Release
            # them, and keep the order of the consumers.
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
            CUT > 0,  # MASKED
            True,  # FIRST
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
                CUT == 2,  # MASKED
                False,  # FIRST
            )
        if D < 256:  # otherwise O takes the place of Q
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
        # A row without keys has the sum 0. Its acc need not be 0, because V may hold a NaN.
        o = gl.where(factor == float("inf"), 0.0, acc * factor)
        tma.store_wait(0)  # O of the turn before has left its buffer
        copy_out(o_desc, batch, head, row0, o_tiles.index(W), o)
        if D == 256:
            tma.store_wait(0)  # O has left Q's buffer
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
    """Compute O and LSE of CONSUMERS · 64 queries of one head in each turn of a program.

    hi: last visible key, relative to the query. group: see `placed`. scale_log2: scale · log2(e).
    """
    D: gl.constexpr = o_desc.block_type.shape[3]
    q = ring(q_desc, CONSUMERS if D == 256 else 2 * CONSUMERS, 1)
    k = ring(k_desc, STAGES, CONSUMERS)
    # V has buffers of its own, and the barriers of K: both are loaded and released together.
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
    # The first function runs in the program's own 4 warps. The lists give the warps and the
    # registers per thread of the others.
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
