"""What is tried: the cases, the tiles of each kernel, and the backwards worth timing as a whole."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels._triton import generation
from kernels.flash_attention import configs
from kernels.flash_attention.configs import Choice, Key, Tile, key_of
from kernels.flash_attention.options import Problem

PAIRS = 3  # of tiles in one launch
CHUNKS = (64, 128, 256, 512, 1024)
TIMED = (*configs.KERNELS, "split")
Row = dict[str, Any]  # of one candidate: kernel, length, how, ms (inf if it cannot be used), and why, or what it uses


@dataclass(frozen=True)
class Case:
    """One problem: causal attention of one head, q, k, v of (1, 1, length, head_dim)."""

    length: int
    head_dim: int
    dtype: str
    precision: str = "ieee"

    def problem(self) -> Problem:
        """What the kernels are asked to compute."""
        return Problem((None, 0), self.head_dim**-0.5, self.precision)

    def tensor(self, device: str) -> torch.Tensor:
        """A random tensor of the case's shape and dtype on `device`."""
        return torch.randn(1, 1, self.length, self.head_dim, device=device, dtype=getattr(torch, self.dtype))

    def key(self, gpu: str) -> Key:
        """Where the table of configurations looks this case up."""
        return key_of(self.tensor("meta"), self.problem(), gpu)

    def first_guess(self) -> Tile:
        """A tile that fits every head dim and dtype."""
        return Tile(32, 16, 4, 1) if self.dtype == "float32" else Tile(64, 32, 4, 2)


def candidates(kernel: str, dtype: str, head_dim: int, precision: str = "ieee") -> Iterator[Tile]:
    """Tiles of 16 to 64 rows of one's own, by the warps that can share them; larger ones lost at every length.

    None that is miscompiled. Those of a split pass, and the same of the forward once more, carry the
    smallest chunk. With "bf16x6" whole warpgroups multiply, 64 rows of one's own each, and nothing is split:
    it is for long calls.
    """
    bits = 32 if dtype == "float32" else 16
    if precision == "bf16x6":
        depths = (1, 2) if head_dim > 64 else (1, 2, 3)
        for own, other, stages in itertools.product((64, 128), (32, 64), depths if kernel != "split" else ()):
            m, n = (other, own) if kernel == "dkdv" else (own, other)
            yield Tile(m, n, own // 16, stages)
        return
    if kernel == "split":
        wide = dtype != "float32"
        for m, n, count in itertools.product((16, 32, 64), (32, 64, 128) if wide else (16, 32, 64), (4, 8)):
            tile = Tile(m, n, count, 2, chunk=CHUNKS[0])
            if not configs.miscompiled(bits, tile):
                yield tile
        return
    if dtype == "float32":
        warps = {16: (2, 4), 32: (4, 8), 64: (4, 8)}
        others, stages, ways = (16, 32, 64), 2, (False,)
    else:
        warps = {16: (2, 4), 32: (2, 4), 64: (4,)} if head_dim <= 32 else {16: (4, 8), 32: (4, 8), 64: (4,)}
        others, stages, ways = (32, 64, 128), 3, (False, True)
    for own, other, tma in itertools.product(warps, others, ways):
        for count in warps[own]:
            m, n = (other, own) if kernel == "dkdv" else (own, other)
            tile = Tile(m, n, count, stages, tma=tma)
            if configs.miscompiled(bits, tile):
                continue
            yield tile
            if kernel == "forward" and other > others[0]:
                yield dataclasses.replace(tile, chunk=CHUNKS[0])


def from_table(kernel: str, case: Case, lengths: tuple[int, ...]) -> list[Tile]:
    """The table's own tiles for these lengths, and all split ones: enough to see whether splitting pays."""
    rows = [configs.lookup(dataclasses.replace(case, length=length).key(generation())) for length in lengths]
    known = [] if kernel == "split" else [dataclasses.replace(getattr(row, kernel), chunk=0) for row in rows]
    split = (t for t in candidates(kernel, case.dtype, case.head_dim, case.precision) if t.chunk)
    return list(dict.fromkeys([*known, *split]))


def chunked(tiles: list[Tile], length: int) -> list[Tile]:
    """Each tile that carries a chunk with every chunk that splits this length."""
    chunks = [c for c in CHUNKS if c < length <= configs.LONGEST_SPLIT and length // c <= 32]
    return [dataclasses.replace(t, chunk=c) for t in tiles for c in (chunks if t.chunk else (0,))
            if c == 0 or c >= max(t.block_m, t.block_n)]


def shape_of(how: Tile | Choice) -> Tile | Choice:
    """What is compiled: the same for all chunks."""
    return dataclasses.replace(how, chunk=min(how.chunk, CHUNKS[0])) if isinstance(how, Tile) else how


def pairs(found: dict[str, list[Row]]) -> list[Choice]:
    """Backwards worth timing as a whole: the best tiles one after the other, good ones at once on two
    streams and in one launch.
    """
    for kernel in configs.KERNELS:
        if not any(row["ms"] < float("inf") for row in found[kernel]):
            raise ValueError(f"no tile of {kernel} can be used: {[row.get('why') for row in found[kernel]]}")
    forward, dkdv, dq = (found[kernel][0]["how"] for kernel in configs.KERNELS)
    usable = {kernel: [row for row in found[kernel] if row["ms"] < float("inf")] for kernel in ("dkdv", "dq")}
    joint = []
    for a, b in itertools.product(usable["dkdv"], usable["dq"]):
        if a["how"].launch_options() == b["how"].launch_options():
            joint.append((max(a["ms"], b["ms"]) + 0.3 * min(a["ms"], b["ms"]), a["how"], b["how"]))
    joint.sort(key=lambda pair: pair[0])
    split = [row["how"] for row in found["split"][:2] if row["ms"] < float("inf")]
    return [
        Choice(forward, dkdv, dq),
        *(Choice(forward, tile, dq, "split") for tile in split),
        *(Choice(forward, a, b, "joint") for _, a, b in joint[:PAIRS]),
    ]
