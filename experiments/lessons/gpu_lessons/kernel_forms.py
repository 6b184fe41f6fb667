"""One computation in several forms: which is faster, and why?"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.theory.gpu import l2_hit_share, tile_order
from experiments.lessons import _lesson_attention as attention
from experiments.lessons import _lesson_forms as kernels
from kernels import matmul, rmsnorm
from kernels._dispatch import forced, interpreted, launch, triton
from kernels._rows import Launch, sum_columns

from .lesson_bench import Bench


@dataclass(frozen=True)
class Tile:
    """Tile of a matmul's result, and the warps of its program."""

    rows: int
    cols: int
    warps: int


# The tiles grow from 16 × 16, the smallest that tensor cores multiply.
TILES = (Tile(16, 16, 1), Tile(32, 32, 2), Tile(64, 64, 4), Tile(128, 128, 8), Tile(128, 256, 8))


def size(gpu: int, small: int) -> int:
    """Return the length for a GPU, or a small one where kernels are interpreted."""
    return small if interpreted() else gpu


def normal(bench: Bench, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return random values, in the bench's dtype unless another is given."""
    return torch.randn(shape, device=bench.device).to(dtype or bench.dtype)


def sums(bench: Bench) -> None:
    """Compare sums over the rows of x, and over all of it, in fp32."""
    # Few parts leave little work for the second launch, and many keep all multiprocessors busy.
    rows, cols, parts = size(16384, 64), size(4096, 256), size(64, 2)
    x, out = normal(bench, rows, cols), torch.empty(parts, cols, device=bench.device)
    exact = x.double().sum(0)

    def added(out: Tensor, atomic: bool) -> Tensor:
        launch(
            kernels.column_sums_kernel,
            (parts, cols // 128),
            x,
            out,
            rows,
            cols,
            ATOMIC=atomic,
            ROWS=32,
            BLOCK=128,
        )
        return out

    def rows_by_two_launches() -> Tensor:
        # The second launch adds the partial sums of all parts.
        return sum_columns(added(out, False)[None], torch.float32)[0]

    def rows_by_atomics() -> Tensor:
        # The first row of out receives all sums, and must begin with zeros. Clearing it is part of
        # the time.
        return added(out[0].zero_(), True)

    def everything_by_two_launches() -> Tensor:
        return added(out, False).sum()

    torch_rows = partial(torch.sum, x, 0, dtype=torch.float32)
    torch_everything = partial(torch.sum, x, dtype=torch.float32)
    bench.form("sums", "rows, two launches", rows_by_two_launches, exact)
    bench.form("sums", "rows, atomic", rows_by_atomics, exact)
    bench.form("sums", "rows, torch", torch_rows, exact)
    bench.form("sums", "everything, two launches", everything_by_two_launches, exact.sum())
    bench.form("sums", "everything, torch", torch_everything, exact.sum())


def variance(bench: Bench) -> None:
    """Compare variances of fp32 rows around 30, longer than registers and L2 keep."""
    rows, cols, block = size(512, 3), size(2**17, 512), size(4096, 128)
    # A mean far above the deviations, where mean(x²) − mean² loses digits.
    x = 30 + normal(bench, rows, cols, dtype=torch.float32)
    exact, y = x.double().var(1, correction=0), torch.empty(rows, device=bench.device)

    def computed(form: str) -> Tensor:
        launch(kernels.variance_kernel, (rows,), x, y, cols, FORM=form, BLOCK=block, num_warps=8)
        return y

    # The factors are of the bytes read: two passes read x twice, and the others once.
    for form, factor in (("two passes", 1.0), ("Welford", 0.5), ("squares", 0.5)):
        bench.form("variance", form, partial(computed, form), exact, factor)
    bench.form("variance", "torch", partial(torch.var, x, 1, correction=0), exact)


def programs(bench: Bench) -> None:
    """Compare softmax of short rows by a program per row, and by programs that take turns."""
    rows, cols = size(65536, 8), size(1024, 64)
    x = normal(bench, rows, cols, dtype=torch.float32)
    y, exact = torch.empty_like(x), x.double().softmax(1)

    def computed(count: int, stages: int) -> Tensor:
        launch(kernels.softmax_kernel, (count,), x, y, rows, BLOCK=cols, STAGES=stages)
        return y

    bench.form("programs", "one per row", partial(computed, rows, 1), exact)
    # Fewer programs, each with more rows: the stages keep loads in flight that other programs would
    # provide.
    for per_sm, stages in ((16, 1), (8, 1), (8, 3), (4, 4), (2, 4)):
        bench.form(
            "programs",
            f"per multiprocessor {per_sm}, stages {stages}",
            partial(computed, per_sm * bench.sms, stages),
            exact,
        )


def prologue(bench: Bench, name: str, f: Callable[[Tensor], Tensor]) -> None:
    """Compare f(x) w in tiles of 128 × 128.

    f(x) is computed once and stored, or once for every 128 columns of w.
    """
    rows, depth, cols, side = size(8192, 64), size(2048, 64), size(8192, 64), size(128, 32)
    x, w = normal(bench, rows, depth), normal(bench, depth, cols)
    y = torch.empty(rows, cols, device=bench.device, dtype=bench.dtype)
    exact = f(x.double()) @ w.double()

    def multiplied(x: Tensor, form: str) -> Tensor:
        launch(
            kernels.prologue_kernel,
            (cols // side, rows // side),
            x,
            w,
            y,
            rows,
            cols,
            depth,
            FORM=form,
            BLOCK_M=side,
            BLOCK_N=side,
            BLOCK_K=32,
            num_warps=8,
        )
        return y

    def stored() -> Tensor:
        # f is part of the time: it writes its result, and the matmul reads it.
        return multiplied(f(x), "none")

    bench.form(f"{name}-prologue", "stored", stored, exact)
    bench.form(f"{name}-prologue", "computed again", partial(multiplied, x, name), exact)


def saved(bench: Bench) -> None:
    """Compare forward and backward of GeLU(x / 2): x is kept in any case, x / 2 need not be."""
    count = size(2**26, 4096)
    x = normal(bench, count)
    dy = normal(bench, count)
    h, y, dx = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    # The exact gradient is that of the same approximation of GeLU, in float64.
    wide = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(0.5 * wide, approximate="tanh"), wide, dy.double())

    grid = (count // 1024,)

    def computed(stored: bool) -> Tensor:
        launch(kernels.gelu_forward_kernel, grid, x, h, y, 0.5, STORED=stored, BLOCK=1024)
        launch(
            kernels.gelu_backward_kernel,
            grid,
            dy,
            x,
            h,
            dx,
            0.5,
            STORED=stored,
            BLOCK=1024,
        )
        return dx

    # Stored, 6 tensors move: x, h and y in the forward, dy, h and dx in the backward. Without h
    # they are 5.
    bench.form("saved", "stored", partial(computed, True), exact, 1.0)
    bench.form("saved", "computed again", partial(computed, False), exact, 5 / 6)


def warps(bench: Bench) -> None:
    """Compare numbers of warps that keep a long row in registers, and spill it if too few."""
    x, w = normal(bench, size(4096, 4), size(16384, 64)), normal(bench, size(16384, 64))
    exact = F.rms_norm(x.double(), w.shape, w.double(), 1e-5)

    def computed(count: int) -> Tensor:
        # Instead of the launch parameters by the kernel's own rule.
        with forced(rmsnorm=Launch(block=len(w), warps=count)):
            return rmsnorm.rms_norm(x, w)

    for count in (32, 16, 8, 4, 2, 1):
        bench.form("warps", f"warps {count}", partial(computed, count), exact)


def operands(bench: Bench) -> None:
    """Compare log Σ exp over K tensors.

    One kernel moves each of them once, and keeps a value of each.
    """
    x = normal(bench, 32, size(2**22, 2048))
    y = torch.empty_like(x[0])

    def computed(count: int) -> Tensor:
        launch(kernels.log_sum_kernel, (len(y) // 1024,), x, y, len(y), K=count, BLOCK=1024)
        return y

    for count in (2, 4, 8, 16, 32):
        exact = x[:count].double().logsumexp(0)
        # A row with K tensors moves K + 1, and the first row moves 3.
        bench.form("operands", f"{count} tensors", partial(computed, count), exact, (count + 1) / 3)


def tiled(a: Tensor, b: Tensor, y: Tensor, tile: Tile, group: int) -> Tensor:
    """Fill y with a b by a program per tile, in groups of rows of tiles."""
    side = len(a)
    launch(
        matmul.grouped_kernel,
        (side // tile.rows * (side // tile.cols),),
        a,
        b,
        None,
        y,
        side,
        side,
        side,
        *a.stride(),
        *b.stride(),
        y.stride(0),
        BIAS=False,
        EPILOGUE=None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.cols,
        BLOCK_K=size(64, 32),
        GROUP=group,
        PRECISION="ieee",
        num_warps=tile.warps,
        num_stages=3,
    )
    return y


def loads(bench: Bench, a: Tensor, tile: Tile, group: int) -> dict[str, float]:
    """Return what theory counts of a square matmul's loads.

    A program reads a strip of a and a strip of b: rows + cols values for rows · cols products.
    """
    side = len(a)
    read_bytes = side**3 * (1 / tile.rows + 1 / tile.cols) * a.element_size()
    order = tile_order(side // tile.rows, side // tile.cols, group)
    return {"read_gb": read_bytes / 1e9, "hit_pct": 100 * l2_hit_share(order, bench.sms)}


def tiles(bench: Bench) -> None:
    """Compare a square matmul in small and large tiles, in groups of 8 rows of tiles.

    Predicted is the ratio of the bytes that all tiles read, from memory or the L2.
    """
    a, b = normal(bench, 2, size(8192, 64), size(8192, 64))
    y, exact = torch.empty_like(a), a.double() @ b.double()
    first = loads(bench, a, TILES[0], 8)["read_gb"]
    # Without a GPU two tiles show that the kernel is right.
    for tile in TILES[: size(len(TILES), 2)]:
        counted = loads(bench, a, tile, 8)
        bench.form(
            "tiles",
            f"tiles of {tile.rows} × {tile.cols}",
            partial(tiled, a, b, y, tile, 8),
            exact,
            counted["read_gb"] / first,
            counted,
        )
    bench.form("tiles", "torch", partial(torch.mm, a, b), exact)


def tile_orders(bench: Bench) -> None:
    """Compare orders of a square matmul's tiles: row by row, and in groups of rows."""
    a, b = normal(bench, 2, size(8192, 64), size(8192, 64))
    y, exact = torch.empty_like(a), a.double() @ b.double()
    tile = TILES[size(-1, 0)]
    for group in (1, 2, 4, 8, 16, 32):
        bench.form(
            "tile-order",
            "row order" if group == 1 else f"groups of {group} rows",
            partial(tiled, a, b, y, tile, group),
            exact,
            counted=loads(bench, a, tile, group),
        )


def keys(bench: Bench) -> None:
    """Compare a square matmul under `triton.autotune` with all of its keys, and with one.

    Both tuners first see a narrow matmul. With the rows as its only key, a tuner takes the tile of
    the narrow one for the square one, because both have the same number of rows.
    """
    side, narrow = size(4096, 64), size(128, 32)
    x, w, narrow_w = (normal(bench, side, cols) for cols in (side, side, narrow))
    y, narrow_y = torch.empty_like(w), torch.empty_like(narrow_w)
    exact = x.double() @ w.double()
    tiles = ((128, 128, 64, 8), (128, 64, 64, 4), (64, 64, 64, 4), (64, 32, 64, 4))
    configs = []
    # Every candidate divides all of the sizes, so the kernel needs no masks for ragged tiles.
    for m, n, k, warps in ((32, 32, 32, 4),) if interpreted() else tiles:
        blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
        configs.append(triton.Config(blocks, num_warps=warps))

    def multiplied(tuner: Any, w: Tensor, y: Tensor) -> Tensor:
        cols = y.shape[1]

        def grid(chosen: dict[str, int]) -> tuple[int, int]:
            return cols // chosen["BLOCK_N"], side // chosen["BLOCK_M"]

        tuner[grid](x, w, y, side, cols, side, FORM="none")
        return y

    for names in (("rows", "cols", "depth"), ("rows",)):
        # A new tuner for each set of keys, since a tuner keeps what it has chosen.
        tuner = triton.autotune(configs, key=list(names))(kernels.prologue_kernel)
        # A tuner chooses at its first call with a new key, and the narrow matmul comes first.
        multiplied(tuner, narrow_w, narrow_y)
        bench.form("keys", ", ".join(names), partial(multiplied, tuner, w, y), exact)
    bench.form("keys", "torch", partial(torch.mm, x, w), exact)


def backward_keys(bench: Bench) -> None:
    """Compare dK of wide heads under `triton.autotune` with all of its keys, and with one.

    Both tuners first see narrow heads of the same length. With the length as its only key, a tuner
    takes their tile for the wide heads, whose dK and dV need more registers.
    """
    heads, length = size(8, 1), size(4096, 64)
    narrow, wide = size(32, 16), size(128, 32)
    queries_keys = ((16, 32),) if interpreted() else ((64, 128), (128, 64), (64, 64), (32, 64))
    configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=4, num_stages=2)
        for m, n in queries_keys
    ]
    square = attention.Tile(size(64, 16), size(64, 16))
    step = attention.Step("", square, square, square, skip=True, split=True)

    def made(head_dim: int) -> list[Tensor]:
        """Return q, k, v, dO, the log-sum-exp, Δ, and outputs for dK and dV."""
        q, k, v, do = normal(bench, 4, heads, length, head_dim)
        o, lse2 = attention.forward(step, q, k, v)
        # Δ is the sum of o · dO of each row, which the backward subtracts.
        delta = (o.float() * do.float()).sum(-1)
        return [q, k, v, do, lse2, delta, torch.empty_like(k), torch.empty_like(v)]

    def computed(tuner: Any, tensors: list[Tensor]) -> Tensor:
        q, k, v, do, lse2, delta, dk, dv = tensors
        head_dim = q.shape[-1]
        scale = head_dim**-0.5

        def grid(chosen: dict[str, int]) -> tuple[int, int]:
            return length // chosen["BLOCK_N"], heads

        tuner[grid](
            q,
            k,
            v,
            do,
            # The Nones stand for tensors that only other forms of this kernel take.
            None,
            None,
            lse2,
            delta,
            None,
            None,
            dk,
            dv,
            length,
            scale,
            scale * attention.LOG2_E,
            SKIP=True,
            SPLIT=True,
            TMA=False,
            FUSED=False,
            ATOMIC=False,
            D=head_dim,
        )
        return dk

    narrow_heads, wide_heads = made(narrow), made(wide)
    q, k, v, do = (x.double().requires_grad_() for x in wide_heads[:4])
    # torch fuses it only for four dimensions, and never in float64
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    (exact,) = torch.autograd.grad(o, k, do.detach())
    for names in (("length", "D"), ("length",)):
        tuner = triton.autotune(configs, key=list(names))(attention.dkdv_kernel)
        computed(tuner, narrow_heads)
        computed(tuner, wide_heads)
        tile = tuner.best_config.kwargs
        variant = f"{', '.join(names)}: {tile['BLOCK_M']} queries × {tile['BLOCK_N']} keys"
        bench.form("backward-keys", variant, partial(computed, tuner, wide_heads), exact)


FORMS: dict[str, Callable[[Bench], None]] = {
    "sums": sums,
    "variance": variance,
    "programs": programs,
    "gelu-prologue": partial(prologue, name="gelu", f=partial(F.gelu, approximate="tanh")),
    "softmax-prologue": partial(prologue, name="softmax", f=partial(torch.softmax, dim=1)),
    "saved": saved,
    "warps": warps,
    "operands": operands,
    "tiles": tiles,
    "tile-order": tile_orders,
    "keys": keys,
    "backward-keys": backward_keys,
}
