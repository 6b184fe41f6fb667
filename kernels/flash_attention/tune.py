"""Finds the fastest tile of each attention kernel on this GPU and prints the lines that tiles.csv needs.

    python -m kernels.flash_attention.tune bfloat16 64 1024 4096 16384
    python -m kernels.flash_attention.tune float32 128 65536 --precision bf16x6

Tuned is one causal head of each length, which are the row classes of `configs.ROW_CLASSES`. A tile
that does not compile, does not fit or is wrong on poisoned outputs is left out; the fastest are
timed again, in turn, because a GPU's clock drifts.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from statistics import median

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from . import backward, forward
from .configs import Key, Tile, key_of
from .options import Problem

# By bytes of an element or precision: own rows, others, warps, stages, descriptors. Larger ones
# lost at every length.
GRIDS = {
    2: ((16, 32, 64), (32, 64, 128), (2, 4, 8), (3,), (False, True)),
    4: ((16, 32, 64), (16, 32, 64), (2, 4, 8), (2,), (False,)),
    "bf16x6": ((64, 128), (32, 64), (4, 8), (1, 2, 3), (False,)),
}
FINALISTS, ROUNDS = 4, 5
# By bytes of an element: a tile that fits every head dim, and how far others may differ from what
# it gives, of its RMS.
FIRST_GUESS = {2: (Tile(64, 32, 4, 2), 3e-2), 4: (Tile(32, 16, 4, 1), 1e-4)}
device_ms = partial(do_bench_cudagraph, rep=10, return_mode="median")


def candidates(kernel: str, itemsize: int, precision: str) -> list[Tile]:
    """Returns the tiles to try: with "bf16x6" whole warpgroups of 64 rows each.

    Left out are tiles of fp32 with 16 rows and eight warps, of which Triton 3.6 makes illegal
    accesses on Hopper.
    """
    return [
        Tile(*((other, own) if kernel == "dkdv" else (own, other)), warps, stages, tma=tma)
        for own, other, warps, stages, tma in itertools.product(
            *GRIDS.get(precision) or GRIDS[itemsize]
        )
        if (precision != "bf16x6" or warps == own // 16)
        and not (itemsize == 4 and warps == 8 and min(own, other) == 16)
    ]


def launches(q: Tensor, problem: Problem) -> dict[str, tuple[Callable, list[Tensor]]]:
    """Returns for each kernel what launches it with a tile, and the tensors that it fills."""
    k, v, o, do, dq, dk, dv = (torch.randn_like(q) for _ in range(7))
    lse = torch.empty(q.shape[:-1], device=q.device)
    forward.launch_forward(q, k, v, o, lse, problem, FIRST_GUESS[q.element_size()][0])
    saved = backward.launch_delta(q, k, v, o, lse, do)
    return {
        "forward": (lambda tile: forward.launch_forward(q, k, v, o, lse, problem, tile), [o]),
        "dkdv": (lambda tile: backward.launch_dkdv(saved, dk, dv, problem, tile), [dk, dv]),
        "dq": (lambda tile: backward.launch_dq(saved, dq, problem, tile), [dq]),
    }


def filled(run: Callable, outs: list[Tensor], tile: Tile) -> list[Tensor]:
    """Returns copies of what a launch fills, poisoned before."""
    torch._foreach_mul_(outs, float("nan"))
    run(tile)
    return [out.double() for out in outs]


def fastest(run: Callable, outs: list[Tensor], tiles: list[Tile]) -> tuple[Tile, float]:
    """Returns the fastest of the tiles that give what the first guess gives, and its milliseconds."""
    (guess, tolerance), times = FIRST_GUESS[outs[0].element_size()], {}
    expected = filled(run, outs, guess)
    for tile in tiles:
        try:
            pairs = zip(filled(run, outs, tile), expected, strict=True)
            if all((x - y).norm() <= tolerance * y.norm() for x, y in pairs):
                times[tile] = device_ms(partial(run, tile))
        except Exception as error:
            if "CUDA" in str(error):  # the context is lost, and with it every later tile
                raise
            print(f"# {tile}: {str(error).strip()[:80]}")
    leaders = sorted(times, key=times.__getitem__)[:FINALISTS]
    rounds = [[device_ms(partial(run, tile)) for tile in leaders] for _ in range(ROUNDS)]
    return min(
        zip(leaders, map(median, zip(*rounds, strict=True)), strict=True), key=lambda pair: pair[1]
    )


def line(key: Key, shape: str, tiles: Sequence[Tile], times: Sequence[float]) -> str:
    """Returns the line of tiles.csv for one key."""
    origin = f"{shape}: {' '.join(f'{ms:.4f}' for ms in times)} ms"
    shown = (" ".join(str(int(field)) for field in astuple(tile)) for tile in tiles)
    return ",".join(map(str, (*astuple(key), *shown, origin)))


def main() -> None:
    """Prints a line of the table per length."""
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
    problem = Problem(
        (None, 0), args.head_dim**-0.5, args.precision if args.dtype == "float32" else "ieee"
    )
    for length in args.lengths:
        q = torch.randn(
            1, 1, length, args.head_dim, device="cuda", dtype=getattr(torch, args.dtype)
        )
        found = (
            fastest(*launch, candidates(kernel, q.element_size(), problem.precision))
            for kernel, launch in launches(q, problem).items()
        )
        print(line(key_of(q, problem), f"1x1x{length}x{args.head_dim}", *zip(*found, strict=True)))


if __name__ == "__main__":
    main()
