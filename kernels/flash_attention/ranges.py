"""Which tiles a program visits, shared by the three attention kernels.

Every mask this package knows is an interval of keys per query. With q and k counted from the first row,

    key k is visible to query q  <=>  q - lo <= k <= q + hi      (each side optional: HAS_LO, HAS_HI)
                                      and k lies in q's document (optional: HAS_DOC)

causal attention is hi = 0 (or T_k - T_q when the last rows are aligned), a sliding window of w adds lo = w. Seen from
a key the visible queries are an interval too, with lo and hi exchanged, so one function serves all passes.
"""

import triton
import triton.language as tl


@triton.jit
def schedule(pid, tiles, heads, GROUP: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Map a program id to (tile, batch·head): GROUP heads advance together, so that their K and V share the L2.

    Within a group all heads do the same tile index before the next; LAST_FIRST starts from the last tile, which under
    a causal mask is the longest, so that short programs fill the gaps at the end.
    """
    per_group = GROUP * tiles
    first = pid // per_group * GROUP
    size = tl.minimum(heads - first, GROUP)
    rem = pid % per_group
    tile = rem // size
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, first + rem % size


@triton.jit
def tile_range(start, own_count, other_count, lo, hi, doc_first, doc_last, OWN: tl.constexpr, OTHER: tl.constexpr,
               HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr):
    """Rows of the *other* sequence that the tile [start, start + OWN) needs.

    Returns (begin, full_begin, full_end, end): [begin, full_begin) and [full_end, end) need the mask,
    [full_begin, full_end) is visible to every row of the tile. Every non-empty range starts at a multiple of OTHER.
    `doc_first`, `doc_last` point to the first and one past the last position of each position's document.
    """
    last = tl.minimum(start + OWN, own_count) - 1
    begin = 0
    full_begin = 0
    full_end = other_count // OTHER * OTHER
    end = other_count
    if HAS_HI:
        end = tl.maximum(tl.minimum(end, last + hi + 1), 0)
        full_end = tl.minimum(full_end, tl.maximum(start + hi + 1, 0) // OTHER * OTHER)
    if HAS_LO:
        begin = tl.maximum(start - lo, 0) // OTHER * OTHER
        full_begin = tl.cdiv(tl.maximum(last - lo, 0), OTHER) * OTHER
    if HAS_DOC:
        begin = tl.maximum(begin, tl.load(doc_first + start) // OTHER * OTHER)
        end = tl.minimum(end, tl.load(doc_last + last))
        full_begin = tl.maximum(full_begin, tl.cdiv(tl.load(doc_first + last), OTHER) * OTHER)
        full_end = tl.minimum(full_end, tl.load(doc_last + start) // OTHER * OTHER)
    if HAS_LO or HAS_DOC:
        if full_end <= full_begin:  # no full tile: the first masked sweep takes all
            full_begin = tl.maximum(begin, end)
            full_end = full_begin
    return begin, full_begin, full_end, end


@triton.jit
def phase_range(phase: tl.constexpr, begin, full_begin, full_end, end):
    """The part of `tile_range`'s result that belongs to phase 0 (masked), 1 (full) or 2 (masked)."""
    if phase == 0:
        return begin, full_begin
    if phase == 1:
        return full_begin, full_end
    return full_end, end


@triton.jit
def cut_range(first, last, begin, full_begin, full_end, end):
    """`tile_range`'s result for a program that takes only what lies in [first, last), multiples of the tile."""
    begin = tl.minimum(tl.maximum(begin, first), last)
    full_begin = tl.minimum(tl.maximum(full_begin, first), last)
    full_end = tl.minimum(tl.maximum(full_end, first), last)
    end = tl.minimum(tl.maximum(end, first), last)
    return begin, full_begin, full_end, end


@triton.jit
def visible(own, other, other_count, lo, hi, own_doc_first, own_doc_last,
            HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_DOC: tl.constexpr):
    """The mask of a tile; `own` and `other` are positions shaped to broadcast against each other."""
    seen = other < other_count
    if HAS_HI:
        seen = seen & (other <= own + hi)
    if HAS_LO:
        seen = seen & (other >= own - lo)
    if HAS_DOC:
        seen = seen & (other >= own_doc_first) & (other < own_doc_last)
    return seen


@triton.jit
def load_rows(base, offs, stride, offs_d, row_limit, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              CHECK_ROWS: tl.constexpr):
    """Load a (rows, BLOCK_D) tile; rows from `row_limit` on and columns from HEAD_DIM on are zeros."""
    ptrs = base + offs[:, None] * stride + offs_d[None, :]
    if CHECK_ROWS:
        if HEAD_DIM == BLOCK_D:
            return tl.load(ptrs, mask=(offs < row_limit)[:, None], other=0.0)
        return tl.load(ptrs, mask=(offs < row_limit)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def head_origin(start, stride, TMA: tl.constexpr):
    """Row and column, in a matrix with rows of `stride` elements, of the element `start`: see descriptors.py."""
    if TMA:
        return (start // stride).to(tl.int32), (start % stride).to(tl.int32)
    return 0, 0


@triton.jit
def load_tile(base, desc, start, offs, stride, offs_d, row_limit, row0, col0, HEAD_DIM: tl.constexpr,
              BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr):
    """Rows [start, start + len(offs)) of one head: through its tensor descriptor, or by pointers from `base`.

    `base` already points to row `start`; (row0, col0) is where the head begins in the descriptor's matrix.
    """
    if TMA:
        return desc.load([row0 + start, col0])
    return load_rows(base, offs, stride, offs_d, row_limit - start, HEAD_DIM, BLOCK_D, CHECK_ROWS)
