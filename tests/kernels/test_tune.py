"""The script that tunes attention for a GPU: it keeps the fastest tile that is right, and prints
rows as they stand.
"""

import pytest
import torch

pytest.importorskip("triton")

from kernels.flash_attention import configs, tune
from kernels.flash_attention.configs import Tile
from kernels.flash_attention.options import Problem

FAST = Tile(16, 16, 2)
SLOW = Tile(32, 16, 2)
WRONG = Tile(16, 32, 2)


def test_a_printed_line_is_one_of_the_table():
    written = configs.TILES.read_text(encoding="utf-8").splitlines()
    shape, _, times = written[1].rpartition(",")[2].removesuffix(" ms").partition(": ")
    key, tiles = next(iter(configs.TABLE.items()))
    assert tune.line(key, shape, tiles, [*map(float, times.split())]) == written[1]


def test_the_fastest_tile_that_is_right_is_taken(monkeypatch, capsys):
    """The clock is a table here, the kernels are the real ones."""
    q = torch.randn(1, 1, 48, 16)
    times = {FAST: 1.0, SLOW: 2.0, WRONG: 0.5}
    monkeypatch.setattr(tune, "device_ms", lambda call: times[call.args[0]])
    for run, outs in tune.launches(q, Problem((None, 0), 0.25)).values():

        def with_a_mistake(tile, run=run, outs=outs):
            if tile == Tile(64, 64):
                raise RuntimeError("out of resource")
            run(tile)
            outs[0].mul_(2 if tile == WRONG else 1)

        assert tune.fastest(with_a_mistake, outs, [SLOW, Tile(64, 64), WRONG, FAST]) == (FAST, 1.0)
        assert "out of resource" in capsys.readouterr().out


def miscompiled(bits, tile):
    """Triton 3.6 makes illegal accesses of such tiles on Hopper, seen at 64 × 16 forward and 16 ×
    64 backward.
    """
    return bits == 32 and tile.warps == 8 and min(tile.block_m, tile.block_n) == 16


def test_no_tile_that_is_miscompiled_is_shipped_or_tried():
    shipped = []  # (bits, tile)
    for key, choice in configs.TABLE.items():
        shipped += [(key.bits, tile) for tile in choice]
    for bits, tiles in configs.CANDIDATES.items():
        shipped += [(bits, tile) for tile in tiles]
    tried = []
    for kernel in configs.Choice._fields:
        tried += [(32, tile) for tile in tune.candidates(kernel, 4, "tf32x3")]
    assert len(tried) == 3 * 22
    assert [each for each in shipped + tried if miscompiled(*each)] == []
