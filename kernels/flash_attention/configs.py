"""Tile shapes and launch parameters of the three attention kernels, by GPU, dtype, head dim and size.

TABLE is frozen: found with tune.py and kept in tiles.csv, so that nobody waits for a search at
start. A GPU that is not in it gets a small search among CANDIDATES at the first call of each kind.

A line of tiles.csv has the fields of a `Key` and of three `Tile`s, and an origin: the shape (batch
× heads × length × head dim) and the milliseconds that the three kernels took on it, or "by analogy"
where a neighbour's tiles were taken over after a check that they compile without heavy spilling. A
class whose tiles are those of the next longer one has no line, except where a line says that
"bf16x6" is the faster arithmetic.
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

# Classes of batch·heads·length, by their largest member; the last stands for all that is longer.
# What wins changes while a GPU is not full: 132 multiprocessors take 8,448 rows in tiles of 64.
ROW_CLASSES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
# What TMA asks for: alignment of the base address and of every stride; coordinates are int32.
ALIGNMENT_BYTES, MAX_COORDINATE = 16, 2**31


@dataclass(frozen=True)
class Tile:
    """How one kernel is launched.

    Args:
        block_m: queries per tile; block_n: keys per tile. Powers of two, at least 16, block_m at
            most 128.
        warps, stages: warps per program, depth of the software pipeline.
        head_group: heads that advance together, so that their K and V stay in the L2.
        tma: load the tiles of the inner loop through tensor descriptors where the layout allows it.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2
    head_group: int = 1
    tma: bool = False

    @staticmethod
    def of(text: str) -> "Tile":
        """Read a tile from its fields as numbers."""
        *numbers, tma = map(int, text.split())
        return Tile(*numbers, tma=bool(tma))


@dataclass(frozen=True)
class Key:
    """What a configuration depends on.

    Args:
        gpu: as `_dispatch.generation` names it.
        bits: of the element dtype; fp16 and bf16 share their configurations.
        precision: of fp32 matmuls; "ieee" for the 16-bit dtypes, where it has no effect.
        head_dim: as `block_d` rounds it up.
        rows: one of ROW_CLASSES.
    """

    gpu: str
    bits: int
    precision: str
    head_dim: int
    rows: int


class Choice(NamedTuple):
    """A row of the table: the tiles of the three kernels."""

    forward: Tile
    dkdv: Tile
    dq: Tile


def _read(path: Path) -> dict[Key, Choice]:
    with path.open(encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    return {
        Key(gpu, int(bits), precision, int(head_dim), int(rows)): Choice(*map(Tile.of, tiles))
        for gpu, bits, precision, head_dim, rows, *tiles, _ in lines
    }


TILES = Path(__file__).with_name("tiles.csv")
TABLE = _read(TILES)
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
# Instead of a tile made for descriptors where the layout or the length rules them out: addresses in
# registers would make it spill. By (kernel, padded head dim); other tiles stay as they are.
POINTER_TILES = {
    ("forward", 128): Tile(128, 64, 8, 3),
    ("dkdv", 128): Tile(32, 64, 4, 3),
    ("dq", 128): Tile(128, 64, 8, 3),
    ("dkdv", 256): Tile(32, 32, 4, 2),
    ("dq", 256): Tile(64, 32, 8, 2),
}
INTERPRETED = Choice(forward=Tile(32, 16), dkdv=Tile(16, 32), dq=Tile(32, 16))

_searched: dict[tuple[str, Key], Tile] = {}


def block_d(head_dim: int) -> int:
    """Columns of a tile: matmuls take powers of two from 16 on."""
    return max(16, power_of_two(head_dim))


def tma_strides(x: Tensor) -> list[int] | None:
    """Return the strides by which a tensor descriptor (Hopper's TMA) finds rows of x (B, H, T, D); None if it cannot.

    Rows, heads and batches have to begin at aligned addresses and must not be expanded.
    """
    strides = [
        x.shape[3] if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
    ]
    aligned = all(s > 0 and s * x.element_size() % ALIGNMENT_BYTES == 0 for s in strides)
    return [*strides, 1] if aligned and x.data_ptr() % ALIGNMENT_BYTES == 0 else None


def key_of(q: Tensor, problem: Problem, gpu: str | None = None) -> Key:
    """Return the key of a call with this q; `gpu` is that of q's device unless given."""
    batch, heads, count, head_dim = q.shape
    bits = 8 * q.element_size()
    return Key(
        gpu=gpu or generation(q.device.index),
        bits=bits,
        precision=problem.precision if bits == 32 else "ieee",
        head_dim=block_d(head_dim),
        rows=next((c for c in ROW_CLASSES if batch * heads * count <= c), ROW_CLASSES[-1]),
    )


@functools.cache
def lookup(key: Key) -> Choice | None:
    """Return the row of TABLE for a key, or that of its next longer class, or of the longest there is.

    Without one of their own, tf32 and bf16x6 share the rows of tf32x3.
    """
    classes = sorted(ROW_CLASSES, key=lambda c: (c < key.rows, abs(c - key.rows)))
    precisions = key.precision, "ieee" if key.precision == "ieee" else "tf32x3"
    near = (
        replace(key, precision=precision, rows=rows) for precision in precisions for rows in classes
    )
    return next((TABLE[found] for found in near if found in TABLE), None)


def settled(q: Tensor, problem: Problem) -> Problem:
    """Replace "emulated" precision in a problem by the arithmetic that is the faster one for a call with this q.

    That is "bf16x6" where TABLE has a row for it, and "tf32x3" elsewhere. Dtypes of 16 bits have
    one arithmetic, "ieee".
    """
    if q.element_size() == 2:
        return replace(problem, precision="ieee")
    if problem.precision != "emulated":
        return problem
    six = replace(problem, precision="bf16x6")
    known = not (interpreted() or _dispatch.FORCED) and key_of(q, six) in TABLE
    return six if known else replace(problem, precision="tf32x3")


def choose(kernel: str, q: Tensor, problem: Problem, run: Callable[[Tile], None]) -> Tile:
    """Choose the tile for `kernel`, a field of `Choice`; `run` launches it with a tile and may be called to measure."""
    if kernel in _dispatch.FORCED:
        return _dispatch.FORCED[kernel]
    key = key_of(q, problem)
    row = INTERPRETED if key.gpu == "interpreter" else lookup(key)
    if row is not None:
        return getattr(row, kernel)
    if (kernel, key) not in _searched:
        _dispatch.discard()
        if torch.cuda.is_current_stream_capturing():
            # nothing can be measured now: the one that fits everywhere
            return CANDIDATES[key.bits][-1]
        _searched[kernel, key] = _fastest(CANDIDATES[key.bits], run)
    return _searched[kernel, key]


def _fastest(tiles: tuple[Tile, ...], run: Callable[[Tile], None]) -> Tile:
    """Time each tile that compiles and fits."""
    from triton.testing import do_bench

    times, failure = {}, None
    for tile in tiles:
        try:
            run(tile)
            times[tile] = do_bench(partial(run, tile), warmup=1, rep=5, return_mode="median")
        except Exception as error:
            # out of shared memory or registers, or a tile this GPU's compiler refuses
            failure = error
    if not times:
        raise RuntimeError("no attention configuration runs on this GPU") from failure
    return min(times, key=times.get)
