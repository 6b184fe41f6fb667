"""What the kernels that treat a tensor as rows share: checks, the two-dimensional view, tiles and launch parameters.

A row kernel works on tiles of ROWS × BLOCK elements, BLOCK a power of two that covers a whole row,
so that a row is read once, kept in registers, and written once. How a tile is launched depends on
the row's length only, unless it is `forced`.

Gradients of a weight that all rows share are summed in two stages: each of P programs adds up its
own rows in fp32 and writes one row of a (P, columns) matrix, whose columns `sum_columns` adds.
Unlike atomic additions the order is fixed, and so are the bits of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _dispatch
from ._dispatch import cdiv, power_of_two, tl, triton

# Bytes of all stages of pipelined loads, of which one less than their number lies in shared memory:
# a program has 163 KiB of that or more on these generations, and 99 on others (CUDA programming
# guide, compute capabilities).
TILES_IN_FLIGHT, TILES_IN_LESS = 200 * 1024, 140 * 1024
MOST_IN_TILE = 8192  # elements of a pipelined tile, as long as a row fits
MUCH_SHARED_MEMORY = frozenset({"sm_80", "sm_87", "sm_90", "sm_100", "sm_103", "interpreter"})
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched.

    Args:
        block: columns per tile, a power of two.
        rows: rows per tile, a power of two.
        warps: of 32 threads.
        stages: tiles in flight in the loop over tiles; 1 loads a tile when it is needed.
        per_sm: programs per multiprocessor, each of which walks over many tiles; 0 starts one
            program per tile.
    """

    block: int
    rows: int = 1
    warps: int = 4
    stages: int = 1
    per_sm: int = 0

    def programs(self, rows: int, device: torch.device) -> int:
        """Size of the grid for that many rows."""
        tiles = cdiv(rows, self.rows)
        return (
            tiles
            if self.per_sm == 0
            else min(tiles, self.per_sm * _dispatch.multiprocessors(device))
        )

    def start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel with tiles of BLOCK columns; options are its other constants."""
        _dispatch.launch(kernel, grid, *args, BLOCK=self.block, num_warps=self.warps, **options)


def chosen(kernel: str, default: Launch) -> Launch:
    """Return the launch parameters forced upon `kernel`, or the default."""
    return _dispatch.FORCED.get(kernel, default)


def row_launch(
    kernel: str, cols: int, per_thread: int = 16, tile: int = 2048, **options: int
) -> Launch:
    """Launch parameters for tiles of whole rows.

    Args:
        kernel: its name, for `forced`.
        cols: elements of a row.
        per_thread: elements that a thread holds, as long as there are at most 32 warps.
        tile: elements of a tile at the least; short rows share one.
        options: stages and per_sm of `Launch`.
    """
    block = power_of_two(cols)
    rows = max(1, tile // block)
    warps = min(32, max(1, rows * block // (32 * per_thread)))
    return chosen(kernel, Launch(block, rows, warps, **options))


def pipelined_launch(cols: int, itemsize: int, device: torch.device) -> Launch:
    """Launch parameters of a norm's backward: a program per multiprocessor walks over tiles of rows, loads under way.

    Few programs keep what each of them adds up over its rows small in all; several tiles in flight
    make up for it.

    Args:
        cols: elements of a row.
        itemsize: bytes per element of all tensors that are loaded together.
        device: where it runs.
    """
    block = power_of_two(cols)
    if block < 1024:  # many short rows: smaller tiles, more programs
        return row_launch("rmsnorm_backward", cols, stages=2, per_sm=4)
    most = (
        TILES_IN_FLIGHT
        if _dispatch.generation(device.index) in MUCH_SHARED_MEMORY
        else TILES_IN_LESS
    )
    rows = power_of_two(max(1, min(MOST_IN_TILE, most // (3 * itemsize)) // block) + 1) // 2
    fit = most // (rows * block * itemsize)
    return chosen(
        "rmsnorm_backward",
        Launch(block, rows, min(16, rows * block // 512), max(1, min(3, fit)), per_sm=1),
    )


def as_rows(x: Tensor) -> Tensor:
    """x as a matrix (rows, last dimension) whose rows are contiguous; copied where its strides do not allow a view."""
    matrix = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def check(name: str, x: object, dims: int = 0, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise unless x is a tensor of an allowed dtype with at least `dims` dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} has dtype {x.dtype}; allowed: {allowed}")
    if x.dim() < dims:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; at least {dims} dimension{'s' * (dims > 1)} needed"
        )


def check_like(name: str, x: object, other_name: str, other: Tensor, *, dtype: bool = True) -> None:
    """Raise unless x is a tensor of the other's shape, device and (if asked for) dtype."""
    check(name, x)
    if x.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, {other_name} {tuple(other.shape)}; they must be equal"
        )
    if dtype and x.dtype != other.dtype:
        raise ValueError(
            f"{name} has dtype {x.dtype}, {other_name} {other.dtype}; they must be equal"
        )
    check_device(name, x, other_name, other)


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless both are on one device."""
    if x.device != other.device:
        raise ValueError(
            f"{name} is on {x.device}, {other_name} on {other.device}; they must be on one device"
        )


def check_width(
    name: str, weight: object, x_name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    """Raise unless weight is a vector as long as x's last dimension, on x's device."""
    check(name, weight, dtypes=dtypes)
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; allowed: ({x.shape[-1]},), as wide as {x_name}"
        )
    check_device(name, weight, x_name, x)


def check_positive(name: str, value: object) -> None:
    """Raise unless value is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}; allowed: a finite number above 0")


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the results' dtype: autocast's where it is on, else x's.

    Meta knows no autocast; fp64 stays.
    """
    if not isinstance(x, Tensor):
        return torch.float32  # the operator's check says what is wrong
    if not torch._C._is_any_autocast_enabled():
        return x.dtype
    device = x.device.type
    if device == "meta" or x.dtype not in DTYPES or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def common_dtype(y_name: str, y: Tensor, x_name: str, x: Tensor) -> torch.dtype:
    """Return the dtype of y and x, autocast's where it is on.

    Raise unless it is one then, on one device.
    """
    check_device(y_name, y, x_name, x)
    if y.dtype != x.dtype and autocast_dtype(y) != autocast_dtype(x):
        raise ValueError(f"{y_name} has dtype {y.dtype}, {x_name} {x.dtype}; they must be equal")
    return autocast_dtype(x)


def autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Cast tensors as autocast does, where it is on; what is no tensor is left to the operator's check.

    Autograd casts the gradients back.
    """
    first = autocast_dtype(tensors[0])
    for x in tensors:
        if getattr(x, "dtype", None) is not first:
            dtypes = [autocast_dtype(x) for x in tensors]
            return [
                x if getattr(x, "dtype", y) is y else x.to(y)
                for x, y in zip(tensors, dtypes, strict=True)
            ]
    return tensors  # nothing to cast: the usual case, in few microseconds


def sum_over_rows(x: Tensor) -> Tensor:
    """Σ over all dimensions but the last, (…, D) → (D), in fp32 (float64 for float64)."""
    return x.unsqueeze(0).flatten(0, -2).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


@triton.jit
def load_fp32(pointers, inside, other=0.0, policy: tl.constexpr = None):
    """Load what the pointers address, as fp32, and `other` where `inside` is false.

    The policy is a hint for the L2 cache.
    """
    return tl.load(pointers, mask=inside, other=other, eviction_policy=policy).to(tl.float32)


@triton.jit
def store_rounded(pointers, x, inside):
    """Store x where `inside` is true, rounded to the dtype that the pointers point to."""
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def column_sum_kernel(
    parts_ptr, out_ptr, second_ptr, count, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of out (cols) = Σ over the rows of parts (count, cols) fp32; program_id(1) = 1: of the second."""
    parts_ptr += tl.program_id(1).to(tl.int64) * count * cols
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, count, ROWS):
        inside = (start + rows < count)[:, None] & (columns < cols)[None, :]
        offsets = (start + rows).to(tl.int64)[:, None] * cols + columns[None, :]
        acc += tl.load(parts_ptr + offsets, mask=inside, other=0.0)
    if tl.program_id(1) == 0:
        store_rounded(out_ptr + columns, tl.sum(acc, 0), columns < cols)
    elif second_ptr is not None:
        store_rounded(second_ptr + columns, tl.sum(acc, 0), columns < cols)


def sum_columns(
    parts: Tensor, first: torch.dtype, second: torch.dtype | None = None
) -> list[Tensor | None]:
    """parts (K, P, columns) fp32, K 1 or 2 → two vectors (columns) in these dtypes, in one launch; or one and None."""
    kinds, count, cols = parts.shape
    out = [
        None if dtype is None else parts.new_empty(cols, dtype=dtype) for dtype in (first, second)
    ]
    # Few columns per program: the matrix is small, and what counts is that all SMs take part.
    block = 16
    _dispatch.launch(
        column_sum_kernel,
        (cdiv(cols, block), kinds),
        parts,
        *out,
        count,
        cols,
        ROWS=64,
        BLOCK=block,
        num_warps=4,
    )
    return out
