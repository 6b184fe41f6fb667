"""Tile shapes and launch parameters of the three attention kernels, by GPU, type, head dim, mask and length."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .._triton import generation

KERNELS = ("forward", "dkdv", "dq")


@dataclass(frozen=True)
class Tile:
    """How one kernel is launched.

    Args:
        block_m: queries per tile; block_n: keys per tile. Powers of two, at least 16, block_m at most 128.
        warps, stages: warps per program, depth of the software pipeline.
        head_group: heads that advance together, so that their K and V stay in the L2.
        maxnreg: register limit per thread, or None.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2
    head_group: int = 1
    maxnreg: int | None = None

    def launch_options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options


INTERPRETED_TILES = {"forward": Tile(32, 16), "dkdv": Tile(16, 32), "dq": Tile(32, 16)}

_forced: dict[str, Tile] = {}


@contextlib.contextmanager
def forced(**tiles: Tile) -> Iterator[None]:
    """Use these tiles (keywords `forward`, `dkdv`, `dq`) whatever the table says: for tests and for tuning."""
    before = dict(_forced)
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def choose(kernel: str, q: torch.Tensor, k: torch.Tensor, causal: bool) -> Tile:
    """The tile for `kernel`, one of KERNELS."""
    if kernel in _forced:
        return _forced[kernel]
    if generation(q.device.index) == "interpreter":
        return INTERPRETED_TILES[kernel]
    wide = q.shape[-1] > 64
    if q.dtype is torch.float32 or q.shape[-1] > 128:
        return Tile(64, 32, warps=4 if not wide else 8, stages=2)
    return Tile(64, 64, warps=4, stages=2)
