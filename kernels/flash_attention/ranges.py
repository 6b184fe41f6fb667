"""Parts that the three attention kernels share: tiles to visit, scores to mask, rows to load.

Every mask of this package is an interval of keys per query. With queries and keys counted from the
first row,

    key k is visible to query q  ⇔  q − lo ≤ k ≤ q + hi      (each side optional: has_lo, has_hi)
                                    and k is in q's document (optional: has_doc)

Causal attention is hi = 0, or hi = Tk − Tq if the last rows are aligned. A sliding window of w also
has lo = w, and so hi = w if it is not causal.

Seen from a key, the visible queries are also an interval, k − hi ≤ q ≤ k + lo. So one function
serves the kernels that own queries and the kernel that owns keys: the launcher of the latter passes
hi as lo and lo as hi. In this file a program's *own* sequence is the one whose rows it owns. The
*other* sequence is the one that it walks over, tile by tile.
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
# Arguments of the kernels that Triton must not specialize on: it would compile them again for a
# value of 1 and for multiples of 16.
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
    """Choices that a kernel is compiled for, the single constexpr argument of each kernel.

    Attributes:
        has_lo: whether there is a first visible row, as the program's own rows see the others.
        has_hi: whether there is a last visible row, seen in the same way.
        has_doc: whether there are documents.
        softcap: whether scores are capped.
        ragged: whether the other sequence ends within a tile.
        head_dim: D.
        block_d: D rounded up to a power of two, the columns of a tile.
        block_m: queries per tile.
        block_n: keys per tile.
        head_group: as in `Tile`.
        precision: as in `Problem`.
        tma: whether the tiles of the inner loop are loaded through tensor descriptors.
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
    precision: tl.constexpr  # Triton 3.6 cannot pass a plain str on to a function
    tma: bool

    @property
    def visited(self) -> tuple[bool, bool, bool]:
        """Whether the sweeps over cut tiles, full tiles and again cut tiles can have any."""
        return self.has_lo or self.has_doc, True, self.has_hi or self.ragged or self.has_doc


# Place of one head's rows for `load_tile`: a pointer and the stride of rows, or a descriptor of the
# whole tensor with the indices of batch and head in it.
Rows = namedtuple("Rows", "base stride desc batch head")
# Limits for `visible`: a program's own positions, the length of the other sequence, the band, and
# the bounds of each own position's document.
Mask = namedtuple("Mask", "own count lo hi doc_first doc_last")


def variant(
    problem: Problem, tile: Tile, head_dim: int, other_count: int, *, keys: bool
) -> Variant:
    """Return the variant of a kernel to launch.

    Args:
        problem: masks, scale and precision of the call.
        tile: tile shapes of the launch.
        head_dim: D.
        other_count: number of rows of the other sequence.
        keys: whether the kernel's programs own keys. They own queries otherwise.
    """
    lo, hi = problem.band
    has_lo = lo is not None
    has_hi = hi is not None
    other_block = tile.block_n
    if keys:
        has_lo, has_hi = has_hi, has_lo  # keys see the band mirrored
        other_block = tile.block_m
    return Variant(
        has_lo=has_lo,
        has_hi=has_hi,
        has_doc=problem.bounds is not None,
        softcap=problem.softcap is not None,
        ragged=other_count % other_block != 0,
        head_dim=head_dim,
        block_d=block_d(head_dim),
        block_m=tile.block_m,
        block_n=tile.block_n,
        head_group=tile.head_group,
        precision=tl.constexpr(problem.precision),
        tma=tile.tma,
    )


def described(
    kernel: str, tile: Tile, *tensors: Tensor
) -> tuple[Tile, list[TensorDescriptor | None]]:
    """Return the tile to launch with, and a descriptor for each tensor that the loop reads.

    Loads through a descriptor give zeros past a head's last row and past its last column. For
    tensors that TMA cannot describe, and for tiles without `tma`, the descriptors are None, and the
    kernel loads by pointers, if necessary with another tile.

    Args:
        kernel: "forward", "dkdv" or "dq".
        tile: tile that was chosen for the call.
        tensors: (B, H, T, D) tensors of one D.
    """
    if not tile.tma:
        return tile, [None] * len(tensors)
    columns = block_d(tensors[0].shape[3])
    all_strides = [tma_strides(x) for x in tensors]
    if not all(all_strides):
        by_pointers = POINTER_TILES.get((kernel, columns), replace(tile, tma=False))
        return by_pointers, [None] * len(tensors)
    rows = tile.block_m if kernel == "dkdv" else tile.block_n
    descriptors = [
        TensorDescriptor(x, list(x.shape), x_strides, [1, 1, rows, columns])
        for x, x_strides in zip(tensors, all_strides, strict=True)
    ]
    return tile, descriptors


def scales(problem: Problem) -> tuple[float, float, float]:
    """Return (scale, scale_log2, cap), the factors that the kernels take.

    Without softcap, P = exp2(scale_log2 · s − LSE·log2(e)) with s = q kᵀ. With softcap, s is
    tanh(cap · q kᵀ).
    """
    if problem.softcap is None:
        return problem.scale, problem.scale * LOG2_E.value, 0.0
    return problem.scale, problem.softcap * LOG2_E.value, problem.scale / problem.softcap


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batches, heads and rows of (B, H, T, D) tensors, tensor by tensor."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def documents(problem: Problem) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return first and one past the last position of each position's document, both (B, T).

    Without documents, return (None, None).
    """
    if problem.bounds is None:
        return None, None
    return problem.bounds[0], problem.bounds[1]


@triton.jit
def schedule(tiles, heads, batch_heads, GROUP: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Return this program's (tile, batch·head, batch, head).

    GROUP: number of heads that advance together, so that their K and V stay in the L2. All heads of
    a group do one tile index before any of them does the next.
    LAST_FIRST: start with the last tile. Under a causal mask it has the most work, so the short
    programs come last and fill the gaps.
    batch and head are int64: their products with strides may exceed 2³¹.
    """
    per_group = GROUP * tiles
    first = tl.program_id(0) // per_group * GROUP
    size = tl.minimum(batch_heads - first, GROUP)  # the last group may be smaller
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
    """Return which rows of the other sequence the own tile [start, start + OWN) sees, and its Mask.

    The rows are (begin, full_begin, full_end, end). All rows of the own tile see all of
    [full_begin, full_end). [begin, full_begin) and [full_end, end) need the mask. Every range that
    is not empty starts at a multiple of OTHER, the rows of a tile of the other sequence.
    doc_first, doc_last: pointers to the first and one past the last position of each position's
    document.
    """
    # For example, causal with tiles of 64 by 64 and start = 128: the own queries 128 to 191 see all
    # keys below 128, so the ranges are (0, 0, 128, 192). Keys 128 to 191 need the mask.
    own = start + tl.arange(0, OWN)
    own_first = own
    own_last = own
    last = tl.minimum(start + OWN, own_count) - 1  # the last own row
    # Without a mask: all whole tiles are full, and a rest at the end is cut.
    begin = 0
    full_begin = 0
    full_end = other_count // OTHER * OTHER
    end = other_count
    # The last own row sees the most rows at the end, and the first own row the fewest.
    if V.has_hi:
        end = tl.maximum(tl.minimum(end, last + hi + 1), 0)
        # Rounded down to whole tiles: what the first own row sees completely is full for all rows.
        full_end = tl.minimum(full_end, tl.maximum(start + hi + 1, 0) // OTHER * OTHER)
    # At the beginning it is the other way around.
    if V.has_lo:
        # begin is rounded down to the tile that holds the first visible row. full_begin is rounded
        # up, so that the last own row sees the whole tile.
        begin = tl.maximum(start - lo, 0) // OTHER * OTHER
        full_begin = tl.cdiv(tl.maximum(last - lo, 0), OTHER) * OTHER
    # Bounds of documents ascend with the position. So those of the first and of the last own row
    # bound all others.
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
        # No full tile: the first masked sweep takes all, or a tile could be visited twice.
        if full_end <= full_begin:
            full_begin = tl.maximum(begin, end)
            full_end = full_begin
    mask = Mask(own[:, None], other_count, lo, hi, own_first[:, None], own_last[:, None])
    return (begin, full_begin, full_end, end), mask


@triton.jit
def visible(mask, other, V: tl.constexpr):
    """Return which of the positions `other`, shaped (1, tile), each own position sees."""
    # Rows past the end were loaded as zeros. Their scores are 0, not −∞, so they need the mask.
    seen = other < mask.count
    # A condition that V does not have is not compiled, so a causal call compares two numbers per
    # score.
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
    """Load a (ROWS, block_d) tile by pointers.

    Rows from `row_limit` on and columns from head_dim on are zeros. A check that cannot fail is
    left out: CHECK_ROWS says whether rows may end within the tile.
    """
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, V.block_d)
    # int32 offsets within the tile suffice: `ops.FURTHEST_ROWS` limits the stride. `base` is a
    # 64-bit pointer.
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
    """Load the rows [start, start + ROWS) of one head, with zeros past its end.

    base: pointer to row `start`, which the caller's loop advances. Without descriptors only.
    """
    if V.tma:
        # The descriptor knows all strides, so it takes indices (batch, head, row, column). They are
        # int32.
        tile = rows.desc.load([rows.batch.to(tl.int32), rows.head.to(tl.int32), start, 0])
        return tile.reshape([ROWS, V.block_d])
    return load_rows(base, rows.stride, row_limit - start, ROWS, CHECK_ROWS, V)


@triton.jit
def store_rows(base, stride, x, keep, V: tl.constexpr):
    """Store the rows of a (rows, block_d) tile where `keep` is true, rounded to base's dtype."""
    offs_d = tl.arange(0, V.block_d)
    ptrs = base + tl.arange(0, x.shape[0])[:, None] * stride + offs_d[None, :]
    # Always checked in both directions. It runs once per program, where two comparisons cost
    # nothing.
    tl.store(ptrs, x.to(base.dtype.element_ty), mask=keep[:, None] & (offs_d < V.head_dim)[None, :])


@triton.jit
def capped(s, cap):
    """Return tanh(x) for x = cap · s, as 1 − 2/(exp(2x) + 1).

    Near zero that difference would cancel, so the Taylor series x − x³/3 + 2x⁵/15 − 17x⁷/315
    replaces it for |x| < 1/8.
    """
    x = s * cap
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    return tl.where(square < 1.0 / 64, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))
