"""Script that finds the fastest tile of each attention kernel on this GPU.

It prints the lines that tiles.csv needs.

    python -m kernels.flash_attention.tune bfloat16 64 1024 4096 16384
    python -m kernels.flash_attention.tune float32 128 65536 --precision bf16x6

It tunes one causal head of each length, and the lengths are row classes of `configs.ROW_CLASSES`.
Tiles that do not compile, do not fit or leave wrong values in poisoned outputs are dropped. The
fastest are timed again, in turn, because the clock of a GPU drifts.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from . import backward, forward
from .configs import Key, Tile, key_of
from .options import Problem


@dataclass(frozen=True)
class Grid:
    """Values to combine to tiles. Larger tiles than these were slower at every length.

    Attributes:
        own: rows of the sequence that a program owns.
        other: rows of a tile of the other sequence.
        warps: warps per program.
        stages: depths of the software pipeline.
        tma: whether to load through descriptors.
    """

    own: tuple[int, ...]
    other: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    tma: tuple[bool, ...]


HALF_GRID = Grid(
    own=(16, 32, 64), other=(32, 64, 128), warps=(2, 4, 8), stages=(3,), tma=(False, True)
)
FP32_GRID = Grid(own=(16, 32, 64), other=(16, 32, 64), warps=(2, 4, 8), stages=(2,), tma=(False,))
BF16X6_GRID = Grid(own=(64, 128), other=(32, 64), warps=(4, 8), stages=(1, 2, 3), tma=(False,))
FINALISTS = 4  # tiles that are timed again
ROUNDS = 5  # times that each finalist is timed again
# By bytes of an element: a tile that fits every head dim, and by how much the results of other
# tiles may differ from its results, relative to their RMS.
FIRST_GUESS = {2: (Tile(64, 32, 4, 2), 3e-2), 4: (Tile(32, 16, 4, 1), 1e-4)}
device_ms = partial(do_bench_cudagraph, rep=10, return_mode="median")


def candidates(kernel: str, itemsize: int, precision: str) -> list[Tile]:
    """Return the tiles to try.

    With "bf16x6" only tiles of whole warpgroups are kept: 4 warps for every 64 rows that a program
    owns. In fp32, 8 warps are left out where either side of the tile is 16, because Triton 3.6
    then makes illegal accesses on Hopper.

    Args:
        kernel: field of `configs.Choice`.
        itemsize: bytes of an element.
        precision: arithmetic of fp32 matmuls.
    """
    if precision == "bf16x6":
        grid = BF16X6_GRID
    else:
        grid = HALF_GRID if itemsize == 2 else FP32_GRID
    tiles = []
    for own, other, warps, stages, tma in itertools.product(
        grid.own, grid.other, grid.warps, grid.stages, grid.tma
    ):
        if precision == "bf16x6" and warps != own // 16:
            continue
        if itemsize == 4 and warps == 8 and min(own, other) == 16:
            continue
        if kernel == "dkdv":  # its programs own keys
            tiles.append(Tile(other, own, warps, stages, tma=tma))
        else:
            tiles.append(Tile(own, other, warps, stages, tma=tma))
    return tiles


def launches(q: Tensor, problem: Problem) -> dict[str, tuple[Callable, list[Tensor]]]:
    """Return for each kernel a function that launches it with a tile, and the tensors it fills.

    Args:
        q: queries (B, H, T, D). The other tensors are random ones of its shape.
        problem: masks, scale and precision of the call.
    """
    k, v, o, do, dq, dk, dv = [torch.randn_like(q) for _ in range(7)]
    lse = torch.empty(q.shape[:-1], device=q.device)
    first_tile, _ = FIRST_GUESS[q.element_size()]
    forward.launch_forward(q, k, v, o, lse, problem, first_tile)
    saved = backward.launch_delta(q, k, v, o, lse, do)
    return {
        "forward": (partial(forward.launch_forward, q, k, v, o, lse, problem), [o]),
        "dkdv": (partial(backward.launch_dkdv, saved, dk, dv, problem), [dk, dv]),
        "dq": (partial(backward.launch_dq, saved, dq, problem), [dq]),
    }


def filled(run: Callable, outs: list[Tensor], tile: Tile) -> list[Tensor]:
    """Return copies in double precision of the tensors that a launch fills.

    They are poisoned with NaN before, so that an element that is not written shows.
    """
    # NaN times anything is NaN, and the memory stays that which the launch writes to.
    torch._foreach_mul_(outs, float("nan"))
    run(tile)
    return [out.double() for out in outs]


def fastest(run: Callable, outs: list[Tensor], tiles: list[Tile]) -> tuple[Tile, float]:
    """Return the fastest of the tiles whose results are right, and its milliseconds.

    Args:
        run: function that launches a kernel with a tile.
        outs: tensors that it fills. The results of the first guess are taken as right.
        tiles: tiles to try.
    """
    first_tile, tolerance = FIRST_GUESS[outs[0].element_size()]
    expected = filled(run, outs, first_tile)
    times: dict[Tile, float] = {}
    for tile in tiles:
        try:
            # A NaN that was not overwritten makes the norm NaN, and the comparison false.
            pairs = zip(filled(run, outs, tile), expected, strict=True)
            if all((x - y).norm() <= tolerance * y.norm() for x, y in pairs):
                times[tile] = device_ms(partial(run, tile))
        except Exception as error:
            if "CUDA" in str(error):  # the context is lost, and with it every later tile
                raise
            print(f"# {tile}: {str(error).strip()[:80]}")
    # One timing per tile picks the finalists, whose differences may be smaller than the drift of
    # the clock.
    leaders = sorted(times, key=times.__getitem__)[:FINALISTS]
    again: dict[Tile, list[float]] = {tile: [] for tile in leaders}
    for _ in range(ROUNDS):
        # In turn, so that a drift during the rounds affects all finalists equally.
        for tile in leaders:
            again[tile].append(device_ms(partial(run, tile)))
    medians = {tile: median(samples) for tile, samples in again.items()}
    best = min(leaders, key=medians.__getitem__)
    return best, medians[best]


def line(key: Key, shape: str, tiles: Sequence[Tile], times: Sequence[float]) -> str:
    """Return the line of tiles.csv for one key.

    Args:
        key: facts of a call by which tiles are looked up.
        shape: shape that was timed, such as "1x1x4096x64".
        tiles: fastest tile of each of the three kernels.
        times: their milliseconds.
    """
    fields = [str(value) for value in astuple(key)]
    for tile in tiles:
        fields.append(" ".join(str(int(value)) for value in astuple(tile)))
    fields.append(f"{shape}: {' '.join(f'{ms:.4f}' for ms in times)} ms")
    return ",".join(fields)


def main() -> None:
    """Print a line of the table per length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("head_dim", type=int)
    parser.add_argument("lengths", type=int, nargs="+")
    parser.add_argument(
        "--precision", default="tf32x3", choices=("ieee", "tf32x3", "bf16x6"), help="of float32"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tiles are timed on a GPU, and torch sees none here")
    precision = args.precision if args.dtype == "float32" else "ieee"
    # Causal: lo is open and hi is 0. Masked and full tiles both occur, as in training.
    problem = Problem((None, 0), args.head_dim**-0.5, precision)
    dtype = getattr(torch, args.dtype)
    for length in args.lengths:
        q = torch.randn(1, 1, length, args.head_dim, device="cuda", dtype=dtype)
        tiles = []
        times = []
        for kernel, (run, outs) in launches(q, problem).items():
            tile, ms = fastest(run, outs, candidates(kernel, q.element_size(), precision))
            tiles.append(tile)
            times.append(ms)
        print(line(key_of(q, problem), f"1x1x{length}x{args.head_dim}", tiles, times))


if __name__ == "__main__":
    main()
