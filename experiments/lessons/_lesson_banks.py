"""A tile in shared memory, written by rows and read by columns, with or without swizzle, in Gluon.

Triton chooses such layouts itself, and swizzles; Gluon, which comes with it, leaves them to the
author.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SIDE = gl.constexpr(32)


@gluon.jit
def transpose_kernel(y_ptr, rounds, PHASES: gl.constexpr):
    """Compute y (32, 32) of this program = Σ over `rounds` r of (row · 32 + column + r).

    Each summand passes through shared memory.

    Column c of row r is stored at column c xor (r mod PHASES), so a column of the tile is spread
    over PHASES of the 32 banks.
    """
    # Warps own rows for the store: a warp writes 32 neighbouring words, one in each bank. For the
    # load they own columns, whose words are 32 apart, in one bank if nothing is swizzled.
    by_row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    by_column: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, PHASES, [1, 0])
    shared = gl.allocate_shared_memory(gl.float32, [SIDE, SIDE], swizzled)
    row = gl.arange(0, SIDE, gl.SliceLayout(1, by_row))
    column = gl.arange(0, SIDE, gl.SliceLayout(0, by_row))
    x = (row[:, None] * SIDE + column[None, :]).to(gl.float32)
    total = gl.zeros([SIDE, SIDE], gl.float32, by_column)
    for _ in range(rounds):
        # Gluon puts a barrier between a store and a load that needs it, and before the next store.
        shared.store(x)
        total += shared.load(by_column)
        x += 1.0
    row = gl.arange(0, SIDE, gl.SliceLayout(1, by_column))
    column = gl.arange(0, SIDE, gl.SliceLayout(0, by_column))
    gl.store(y_ptr + gl.program_id(0) * SIDE * SIDE + row[:, None] * SIDE + column[None, :], total)
