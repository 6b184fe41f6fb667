"""Tiles and launch parameters of the three attention kernels, by GPU, dtype, head dim and size.

TABLE is fixed: tune.py found its rows, and they are stored in tiles.csv, so that no call waits for
a search. On a GPU that is not in it, the first call of each kind searches among the few CANDIDATES.

A line of tiles.csv has the fields of a `Key`, those of three `Tile`s, and an origin. The origin is
the shape (batch × heads × length × head dim) and the milliseconds that the three kernels took on
it. "by analogy" means that the tiles of a neighbouring line were copied, after a check that they
compile without heavy spilling. A class with the tiles of the next longer one has no line, except
where a line says that "bf16x6" is the faster arithmetic.
"""

import csv
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _dispatch
from .._dispatch import generation, interpreted, power_of_two
from .options import Problem

# Classes of batch·heads·length, named by their largest member. The last one also has all longer
# calls. Short calls need several classes, because the best tile changes while a GPU is not full:
# 132 multiprocessors take 8,448 rows in tiles of 64.
ROW_CLASSES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Limits of TMA: the alignment of the base address and of every stride, and int32 coordinates.
ALIGNMENT_BYTES = 16
MAX_COORDINATE = 2**31


@dataclass(frozen=True)
class Tile:
    """Tile shape and launch parameters of one kernel.

    Attributes:
        block_m: queries per tile, a power of two from 16 to 128.
        block_n: keys per tile, a power of two from 16.
        warps: warps per program.
        stages: depth of the software pipeline.
        head_group: number of heads that advance together, so that their K and V stay in the L2.
        tma: whether to load the tiles of the inner loop through tensor descriptors, if the layout
            of the tensors allows it.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2
    head_group: int = 1
    tma: bool = False

    @staticmethod
    def of(text: str) -> "Tile":
        """Return the tile whose fields the text has as numbers, such as "64 32 4 2 1 0"."""
        block_m, block_n, warps, stages, head_group, tma = map(int, text.split())
        return Tile(block_m, block_n, warps, stages, head_group, tma=bool(tma))


@dataclass(frozen=True)
class Key:
    """Properties of a call that its tiles depend on.

    Attributes:
        gpu: generation as `_dispatch.generation` names it.
        bits: bits of an element. fp16 and bf16 share their tiles.
        precision: arithmetic of fp32 matmuls. It is "ieee" for the 16-bit dtypes, where it has no
            effect.
        head_dim: head dim as `block_d` rounds it up.
        rows: one of ROW_CLASSES.
    """

    gpu: str
    bits: int
    precision: str
    head_dim: int
    rows: int


class Choice(NamedTuple):
    """Tiles of the three kernels, a row of the table."""

    forward: Tile
    dkdv: Tile
    dq: Tile


def _read(path: Path) -> dict[Key, Choice]:
    """Return the table that a file such as tiles.csv holds."""
    table = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            key = Key(
                gpu=line["gpu"],
                bits=int(line["bits"]),
                precision=line["precision"],
                head_dim=int(line["head_dim"]),
                rows=int(line["rows"]),
            )
            table[key] = Choice(
                forward=Tile.of(line["forward"]),
                dkdv=Tile.of(line["dkdv"]),
                dq=Tile.of(line["dq"]),
            )
    return table


TILES = Path(__file__).with_name("tiles.csv")
TABLE = _read(TILES)
# Tiles to try on other GPUs, by the bits of an element. The last one of each fits everywhere.
CANDIDATES = {
    16: (
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 3),
        Tile(128, 64, 8, 2),
        Tile(64, 32, 4, 2),
        Tile(32, 32, 4, 2),
    ),
    32: (Tile(32, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
}
# Replacements for tiles with `tma` if the layout or the length rules descriptors out. Loads by
# pointers hold addresses in registers, and the original tile would spill. By kernel and padded head
# dim. Tiles that are not listed stay as they are.
POINTER_TILES = {
    ("forward", 128): Tile(128, 64, 8, 3),
    ("dkdv", 128): Tile(32, 64, 4, 3),
    ("dq", 128): Tile(128, 64, 8, 3),
    ("dkdv", 256): Tile(32, 32, 4, 2),
    ("dq", 256): Tile(64, 32, 8, 2),
}
# In Triton's interpreter: small, so that tests of short sequences have several tiles.
INTERPRETED = Choice(forward=Tile(32, 16), dkdv=Tile(16, 32), dq=Tile(32, 16))

_searched: dict[tuple[str, Key], Tile] = {}  # (kernel, key) → result of a search


def block_d(head_dim: int) -> int:
    """Return the columns of a tile: matmuls take powers of two from 16 on."""
    return max(16, power_of_two(head_dim))


def tma_strides(x: Tensor) -> list[int] | None:
    """Return the strides by which a tensor descriptor (TMA) finds the rows of x (B, H, T, D).

    Return None if no descriptor can: every row, head and batch must begin at an aligned address,
    and no dimension may be expanded.
    """
    strides = []
    for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
        # The stride of a dimension of size 1 is never used, and torch reports any value for it.
        strides.append(x.shape[3] if size == 1 else stride)
    for stride in strides:
        if stride <= 0 or stride * x.element_size() % ALIGNMENT_BYTES != 0:
            return None
    if x.data_ptr() % ALIGNMENT_BYTES != 0:
        return None
    return [*strides, 1]


def key_of(q: Tensor, problem: Problem, gpu: str | None = None) -> Key:
    """Return the key of a call.

    Args:
        q: queries (B, H, Tq, D).
        problem: the call, for its precision.
        gpu: generation, or None for that of q's device.
    """
    batch, heads, count, head_dim = q.shape
    bits = 8 * q.element_size()
    longer_classes = [size for size in ROW_CLASSES if batch * heads * count <= size]
    return Key(
        gpu=gpu or generation(q.device.index),
        bits=bits,
        precision=problem.precision if bits == 32 else "ieee",
        head_dim=block_d(head_dim),
        rows=longer_classes[0] if longer_classes else ROW_CLASSES[-1],
    )


@functools.cache
def lookup(key: Key) -> Choice | None:
    """Return the row of TABLE for a key, or None.

    Without a row for its own class, the key has the row of the next longer class, or of the longest
    class there is. Without any rows of their own, "tf32" and "bf16x6" have those of "tf32x3".
    """
    longer = [size for size in ROW_CLASSES if size >= key.rows]
    shorter = [size for size in ROW_CLASSES if size < key.rows]
    # The nearest longer class first. Only if there is none, the longest of the shorter ones.
    classes = longer + shorter[::-1]
    precisions = [key.precision, "ieee" if key.precision == "ieee" else "tf32x3"]
    for precision in precisions:
        for rows in classes:
            near = replace(key, precision=precision, rows=rows)
            if near in TABLE:
                return TABLE[near]
    return None


def settled(q: Tensor, problem: Problem) -> Problem:
    """Return the problem with "emulated" precision replaced by the arithmetic that kernels take.

    That is "bf16x6" if TABLE has a row for it, because it is faster there, and otherwise "tf32x3".
    Dtypes of 16 bits have one arithmetic, "ieee".
    """
    if q.element_size() == 2:
        return replace(problem, precision="ieee")
    if problem.precision != "emulated":
        return problem
    if not interpreted() and not _dispatch.FORCED:
        six = replace(problem, precision="bf16x6")
        if key_of(q, six) in TABLE:
            return six
    return replace(problem, precision="tf32x3")


def choose(kernel: str, q: Tensor, problem: Problem, run: Callable[[Tile], None]) -> Tile:
    """Return the tile for a launch.

    Args:
        kernel: field of `Choice`.
        q: queries (B, H, Tq, D).
        problem: the call, with a settled precision.
        run: function that launches the kernel with a tile. It is called to measure if TABLE has no
            row for the call.
    """
    if kernel in _dispatch.FORCED:
        return _dispatch.FORCED[kernel]
    key = key_of(q, problem)
    row = INTERPRETED if key.gpu == "interpreter" else lookup(key)
    if row is not None:
        return getattr(row, kernel)
    if (kernel, key) not in _searched:
        _dispatch.discard()  # the launches of a search are not those of later calls
        if torch.cuda.is_current_stream_capturing():
            # Nothing can be measured now. Take the candidate that fits everywhere.
            return CANDIDATES[key.bits][-1]
        _searched[kernel, key] = _fastest(CANDIDATES[key.bits], run)
    return _searched[kernel, key]


def _fastest(tiles: tuple[Tile, ...], run: Callable[[Tile], None]) -> Tile:
    """Return the fastest of the tiles that compile and fit.

    Raises:
        RuntimeError: there is none.
    """
    from triton.testing import do_bench

    times: dict[Tile, float] = {}
    failure = None
    for tile in tiles:
        try:
            # Once untimed: it compiles the kernel.
            run(tile)
            times[tile] = do_bench(partial(run, tile), warmup=1, rep=5, return_mode="median")
        except Exception as error:
            # Out of shared memory or registers, or the compiler refuses the tile for this GPU.
            failure = error
    if not times:
        raise RuntimeError("no attention configuration runs on this GPU") from failure
    return min(times, key=times.get)
