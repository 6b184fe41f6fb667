"""Which tiles a program visits, which scores it masks and how it loads rows, shared by the three attention kernels.

Every mask this package knows is an interval of keys per query. With q and k counted from the first
row,

    key k is visible to query q  <=>  q - lo <= k <= q + hi      (each side optional: has_lo, has_hi)
                                      and k lies in q's document (optional: has_doc)

causal attention is hi = 0 (or T_k - T_q when the last rows are aligned), a sliding window of w adds
lo = w. Seen from a key the visible queries are an interval too, with lo and hi exchanged, so one
function serves all passes: the launcher of the pass that owns keys exchanges them.
"""

from collections import namedtuple
from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import POINTER_TILES, Tile, block_d, tma_strides
from .options import Problem

LOG2_E = tl.constexpr(1.4426950408889634)
# arguments of the kernels that are not worth a compilation per value
COUNTS = [
    "heads",
    "kv_heads",
    "query_count",
    "key_count",
    "padded_count",
    "lo",
    "hi",
    "batch_heads",
]


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for, the one constexpr argument of each.

    Args:
        has_lo, has_hi: whether the band ends on these sides, as the tile that a program owns sees
            it.
        has_doc, softcap: whether there are documents, and whether scores are capped.
        ragged: whether the other sequence ends within a tile.
        head_dim: D; block_d: D rounded up to a power of two.
        block_m, block_n, head_group: as in `Tile`.
        precision: as in `Problem`.
        tma: whether the tiles of the inner loop come through tensor descriptors.
    """

    has_lo: bool
    has_hi: bool
    has_doc: bool
    softcap: bool
    ragged: bool
    head_dim: int
    block_d: int
    block_m: int
    block_n: int
    head_group: int
    precision: tl.constexpr  # Triton 3.6 passes no plain str on to a function
    tma: bool

    @property
    def visited(self) -> tuple[bool, bool, bool]:
        """Which of the three sweeps over tiles there are: those cut by the mask, full ones, those cut by the mask."""
        return self.has_lo or self.has_doc, True, self.has_hi or self.ragged or self.has_doc


# Where `load_tile` finds the rows of one head: by pointer, or in a descriptor of the whole tensor.
Rows = namedtuple("Rows", "base stride desc batch head")
# What `visible` compares positions of the other sequence with, for a program's own positions.
Mask = namedtuple("Mask", "own count lo hi doc_first doc_last")


def variant(
    problem: Problem, tile: Tile, head_dim: int, other_count: int, *, keys: bool
) -> Variant:
    """Of a kernel whose programs own queries, or keys, and walk over `other_count` rows of the other sequence."""
    lo, hi = (limit is not None for limit in problem.band[:: -1 if keys else 1])
    return Variant(
        lo,
        hi,
        problem.bounds is not None,
        problem.softcap is not None,
        other_count % (tile.block_m if keys else tile.block_n) != 0,
        head_dim,
        block_d(head_dim),
        tile.block_m,
        tile.block_n,
        tile.head_group,
        tl.constexpr(problem.precision),
        tile.tma,
    )


def described(
    kernel: str, tile: Tile, *tensors: Tensor
) -> tuple[Tile, list[TensorDescriptor | None]]:
    """Return the tile to launch with, and a descriptor of each (B, H, T, D) tensor that the loop reads, or None of all.

    Descriptors give zeros past a head's last row and past its last column. Tensors that TMA cannot
    describe take another tile, by pointers.
    """
    strides, columns = [tma_strides(x) for x in tensors], block_d(tensors[0].shape[3])
    if tile.tma and all(strides):
        block = [1, 1, tile.block_m if kernel == "dkdv" else tile.block_n, columns]
        return tile, [
            TensorDescriptor(x, list(x.shape), s, block)
            for x, s in zip(tensors, strides, strict=True)
        ]
    if tile.tma:
        tile = POINTER_TILES.get((kernel, columns), replace(tile, tma=False))
    return tile, [None] * len(tensors)


def scales(problem: Problem) -> tuple[float, float, float]:
    """(scale, scale_log2, cap): P = exp2(scale_log2 · s − LSE2), with softcap of tanh(cap · s) in place of s."""
    if problem.softcap is None:
        return problem.scale, problem.scale * LOG2_E.value, 0.0
    return problem.scale, problem.softcap * LOG2_E.value, problem.scale / problem.softcap


def strides(*tensors: Tensor) -> list[int]:
    """Of batches, heads and rows of (B, H, T, D) tensors, one tensor after the other."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def documents(problem: Problem) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """First and one past the last position of the document of each, (B, T), or nothing."""
    return (problem.bounds[0], problem.bounds[1]) if problem.bounds is not None else (None, None)


@triton.jit
def schedule(tiles, heads, batch_heads, GROUP: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(tile, batch·head, batch, head) of this program: GROUP heads advance together and share their K and V in the L2.

    Within a group all heads do the same tile index before the next; LAST_FIRST starts from the last
    tile, which under a causal mask is the longest, so that short programs fill the gaps at the end.
    """
    per_group = GROUP * tiles
    first = tl.program_id(0) // per_group * GROUP
    size = tl.minimum(batch_heads - first, GROUP)
    rem = tl.program_id(0) % per_group
    tile = rem // size
    if LAST_FIRST:
        tile = tiles - 1 - tile
    bh = first + rem % size
    return tile, bh, (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)


@triton.jit
def tile_range(
    start,
    own_count,
    other_count,
    batch,
    lo,
    hi,
    doc_first,
    doc_last,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    V: tl.constexpr,
):
    """Rows of the *other* sequence that the tile [start, start + OWN) needs, and its Mask.

    The former are (begin, full_begin, full_end, end): [begin, full_begin) and [full_end, end) need
    the mask, [full_begin, full_end) is visible to every row of the tile. Every non-empty range
    starts at a multiple of OTHER. `doc_first`, `doc_last` point to the first and one past the last
    position of each position's document.
    """
    own = start + tl.arange(0, OWN)
    own_first = own
    own_last = own
    last = tl.minimum(start + OWN, own_count) - 1
    begin = 0
    full_begin = 0
    full_end = other_count // OTHER * OTHER
    end = other_count
    if V.has_hi:
        end = tl.maximum(tl.minimum(end, last + hi + 1), 0)
        full_end = tl.minimum(full_end, tl.maximum(start + hi + 1, 0) // OTHER * OTHER)
    if V.has_lo:
        begin = tl.maximum(start - lo, 0) // OTHER * OTHER
        full_begin = tl.cdiv(tl.maximum(last - lo, 0), OTHER) * OTHER
    if V.has_doc:
        doc_first += batch * own_count
        doc_last += batch * own_count
        own_first = tl.load(doc_first + own, mask=own < own_count, other=0)
        own_last = tl.load(doc_last + own, mask=own < own_count, other=0)
        begin = tl.maximum(begin, tl.load(doc_first + start) // OTHER * OTHER)
        end = tl.minimum(end, tl.load(doc_last + last))
        full_begin = tl.maximum(full_begin, tl.cdiv(tl.load(doc_first + last), OTHER) * OTHER)
        full_end = tl.minimum(full_end, tl.load(doc_last + start) // OTHER * OTHER)
    if V.has_lo or V.has_doc:
        if full_end <= full_begin:  # no full tile: the first masked sweep takes all
            full_begin = tl.maximum(begin, end)
            full_end = full_begin
    mask = Mask(own[:, None], other_count, lo, hi, own_first[:, None], own_last[:, None])
    return (begin, full_begin, full_end, end), mask


@triton.jit
def visible(mask, other, V: tl.constexpr):
    """Which of the positions `other`, shaped (1, tile), each of the program's own sees."""
    seen = other < mask.count
    if V.has_hi:
        seen = seen & (other <= mask.own + mask.hi)
    if V.has_lo:
        seen = seen & (other >= mask.own - mask.lo)
    if V.has_doc:
        seen = seen & (other >= mask.doc_first) & (other < mask.doc_last)
    return seen


@triton.jit
def load_rows(
    base, stride, row_limit, ROWS: tl.constexpr, CHECK_ROWS: tl.constexpr, V: tl.constexpr
):
    """Load a (ROWS, block_d) tile; rows from `row_limit` on and columns from head_dim on are zeros."""
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, V.block_d)
    ptrs = base + offs[:, None] * stride + offs_d[None, :]
    if CHECK_ROWS:
        if V.head_dim == V.block_d:
            return tl.load(ptrs, mask=(offs < row_limit)[:, None], other=0.0)
        return tl.load(
            ptrs, mask=(offs < row_limit)[:, None] & (offs_d < V.head_dim)[None, :], other=0.0
        )
    if V.head_dim == V.block_d:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(offs_d < V.head_dim)[None, :], other=0.0)


@triton.jit
def load_tile(
    base, rows, start, row_limit, ROWS: tl.constexpr, CHECK_ROWS: tl.constexpr, V: tl.constexpr
):
    """Rows [start, start + ROWS) of one head, to whose row `start` `base` points already; zeros past its end."""
    if V.tma:
        tile = rows.desc.load([rows.batch.to(tl.int32), rows.head.to(tl.int32), start, 0])
        return tile.reshape([ROWS, V.block_d])
    return load_rows(base, rows.stride, row_limit - start, ROWS, CHECK_ROWS, V)


@triton.jit
def store_rows(base, stride, x, keep, V: tl.constexpr):
    """Store those rows of a (rows, block_d) tile that `keep` says, in the dtype of what `base` points to."""
    offs_d = tl.arange(0, V.block_d)
    ptrs = base + tl.arange(0, x.shape[0])[:, None] * stride + offs_d[None, :]
    tl.store(ptrs, x.to(base.dtype.element_ty), mask=keep[:, None] & (offs_d < V.head_dim)[None, :])


@triton.jit
def capped(s, cap):
    """tanh(cap · s); near zero by its series, where 1 − 2 / (exp(2x) + 1) would cancel."""
    x = s * cap
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    return tl.where(square < 1.0 / 64, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))
