"""Shared parts of the kernels that treat a tensor as rows: checks, views, launches, small kernels.

A row kernel views its tensor as a matrix and works on tiles of ROWS × BLOCK elements. BLOCK is a
power of two that covers a whole row, so that a row is read once, kept in registers and written
once. The launch parameters depend only on the length of a row, unless a test or a measurement sets
them with `_dispatch.forced`.

The gradient of a weight that all rows share is summed in two stages. First, each of P programs adds
up its own rows in fp32 and writes one row of a (P, columns) matrix. Then `sum_columns` adds the P
rows. Atomic additions would need one stage, but their order changes from run to run, and with it
the rounding. Here the order is fixed, so the result is the same bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _dispatch
from ._dispatch import cdiv, power_of_two, tl, triton

# Bytes of all stages of a pipelined load. One stage less than their number is in shared memory.
# These generations have at least 163 KiB of shared memory per program, the others have 99 KiB (CUDA
# programming guide, "Compute Capabilities").
MUCH_SHARED_MEMORY = frozenset({"sm_80", "sm_87", "sm_90", "sm_100", "sm_103", "interpreter"})
STAGE_BYTES = 200 * 1024
STAGE_BYTES_LITTLE_SHARED_MEMORY = 140 * 1024
MAX_PIPELINED_ELEMENTS = 8192  # per tile, unless a single row is longer
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one kernel.

    Args:
        block: columns per tile, a power of two.
        rows: rows per tile, a power of two.
        warps: warps per program, 32 threads each.
        stages: tiles in flight in the loop over tiles. With 1, a tile is loaded when it is needed.
        per_sm: programs per multiprocessor, each of which loops over many tiles. 0 starts one
            program per tile.
    """

    block: int
    rows: int = 1
    warps: int = 4
    stages: int = 1
    per_sm: int = 0

    def programs(self, rows: int, device: torch.device) -> int:
        """Return the number of programs for a matrix with this number of rows."""
        tiles = cdiv(rows, self.rows)
        if self.per_sm == 0:
            return tiles
        return min(tiles, self.per_sm * _dispatch.multiprocessors(device))

    def start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a Triton kernel with tiles of BLOCK columns.

        Args:
            kernel: function decorated with `triton.jit`.
            grid: number of programs along each axis.
            args: arguments of the kernel, in order.
            options: the kernel's other constants and Triton's launch options.
        """
        _dispatch.launch(kernel, grid, *args, BLOCK=self.block, num_warps=self.warps, **options)


def chosen(kernel: str, default: Launch) -> Launch:
    """Return the launch parameters that `forced` sets for this kernel, or else the default."""
    return _dispatch.FORCED.get(kernel, default)


def row_launch(
    kernel: str,
    cols: int,
    per_thread: int = 16,
    tile: int = 2048,
    stages: int = 1,
    per_sm: int = 0,
) -> Launch:
    """Return launch parameters for tiles of whole rows.

    Args:
        kernel: name of the kernel for `_dispatch.forced`.
        cols: elements per row.
        per_thread: elements per thread. Rows that would then need more than 32 warps get 32.
        tile: smallest number of elements per tile. Several short rows share one tile.
        stages: as for `Launch`.
        per_sm: as for `Launch`.
    """
    block = power_of_two(cols)
    rows = max(1, tile // block)
    warps_needed = rows * block // (32 * per_thread)
    warps = min(32, max(1, warps_needed))
    return chosen(kernel, Launch(block, rows, warps, stages, per_sm))


def pipelined_launch(cols: int, itemsize: int, device: torch.device) -> Launch:
    """Return launch parameters for the backward of a norm.

    One program per multiprocessor loops over tiles of rows. Few programs keep the matrix of their
    partial weight gradients small. Each of them has several tiles in flight, because a single
    program per multiprocessor would otherwise wait for memory.

    Args:
        cols: elements per row.
        itemsize: bytes per element, summed over all tensors that are loaded together.
        device: GPU of the tensors. The size of the tiles depends on its generation.
    """
    block = power_of_two(cols)
    if block < 1024:
        # A tile of short rows needs few registers: several programs share a multiprocessor.
        return row_launch("rmsnorm_backward", cols, stages=2, per_sm=4)
    if _dispatch.generation(device.index) in MUCH_SHARED_MEMORY:
        stage_bytes = STAGE_BYTES
    else:
        stage_bytes = STAGE_BYTES_LITTLE_SHARED_MEMORY
    # Choose the largest tile of which three fit, then the number of tiles that really fit: a single
    # row can be longer than a third of the budget.
    elements = min(MAX_PIPELINED_ELEMENTS, stage_bytes // (3 * itemsize))
    rows_that_fit = max(1, elements // block)
    rows = power_of_two(rows_that_fit + 1) // 2  # largest power of two that is not above it
    tiles_that_fit = stage_bytes // (rows * block * itemsize)
    launch = Launch(
        block,
        rows,
        warps=min(16, rows * block // 512),
        stages=max(1, min(3, tiles_that_fit)),
        per_sm=1,
    )
    return chosen("rmsnorm_backward", launch)


def as_rows(x: Tensor) -> Tensor:
    """Return x as a matrix (rows, last dimension) whose rows are contiguous.

    The result is a view where the strides of x allow one, and a copy otherwise.
    """
    if x.numel():
        matrix = x.reshape(-1, x.shape[-1])
    else:
        matrix = x.new_empty(0, x.shape[-1])  # -1 is ambiguous in a tensor without elements
    if matrix.stride(-1) == 1 or matrix.shape[-1] == 1:
        return matrix
    return matrix.contiguous()


def check(name: str, x: object, dims: int = 0, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise unless x is a tensor of an allowed dtype with at least `dims` dimensions.

    Args:
        name: name of the argument, for the error.
        x: value that the caller was given.
        dims: smallest number of dimensions.
        dtypes: allowed dtypes.

    Raises:
        TypeError: x is not a tensor.
        ValueError: the dtype or the number of dimensions does not fit.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} has dtype {x.dtype}; allowed: {allowed}")
    if x.dim() < dims:
        unit = "dimension" if dims == 1 else "dimensions"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; at least {dims} {unit} needed")


def check_like(name: str, x: object, other_name: str, other: Tensor, *, dtype: bool = True) -> None:
    """Raise unless x is a tensor of the other's shape and device and, with `dtype`, of its dtype.

    Raises:
        TypeError: x is not a tensor.
        ValueError: shape, dtype or device differ.
    """
    check(name, x)
    if x.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, {other_name} {tuple(other.shape)}; "
            "they must be equal"
        )
    if dtype and x.dtype != other.dtype:
        raise ValueError(
            f"{name} has dtype {x.dtype}, {other_name} {other.dtype}; they must be equal"
        )
    check_device(name, x, other_name, other)


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if x.device != other.device:
        raise ValueError(
            f"{name} is on {x.device}, {other_name} on {other.device}; they must be on one device"
        )


def check_width(
    name: str, weight: object, x_name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    """Raise unless weight is a vector as long as x's last dimension, on x's device.

    Raises:
        TypeError: weight is not a tensor.
        ValueError: its dtype, shape or device does not fit.
    """
    check(name, weight, dtypes=dtypes)
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; allowed: ({x.shape[-1]},), "
            f"as wide as {x_name}"
        )
    check_device(name, weight, x_name, x)


def check_positive(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}; allowed: a finite number above 0")


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of an operation's result: autocast's where autocast is on, else x's.

    Autocast does not cover the meta device, and float64 is never cast.
    """
    if not isinstance(x, Tensor):
        return torch.float32  # any dtype will do: the operator's check raises next
    if not torch._C._is_any_autocast_enabled():
        return x.dtype
    device = x.device.type
    if device == "meta" or x.dtype not in DTYPES or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def common_dtype(y_name: str, y: Tensor, x_name: str, x: Tensor) -> torch.dtype:
    """Return the dtype that y and x have, after autocast where it is on.

    Raises:
        ValueError: their dtypes differ, or their devices.
    """
    check_device(y_name, y, x_name, x)
    if y.dtype != x.dtype and autocast_dtype(y) != autocast_dtype(x):
        raise ValueError(f"{y_name} has dtype {y.dtype}, {x_name} {x.dtype}; they must be equal")
    return autocast_dtype(x)


def autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Cast tensors as autocast does, where it is on.

    Autograd casts the gradients back. Arguments that are not tensors are returned as they are,
    because the operator's check has the better error.
    """
    dtype = autocast_dtype(tensors[0])
    for x in tensors:
        if getattr(x, "dtype", None) is not dtype:
            return [_autocast_one(x) for x in tensors]
    return tensors  # the usual case: it must not cost more than a few microseconds


def _autocast_one(x: object) -> object:
    """Cast one tensor as autocast does, and return any other object as it is."""
    if not isinstance(x, Tensor):
        return x
    dtype = autocast_dtype(x)
    return x if x.dtype is dtype else x.to(dtype)


def sum_over_rows(x: Tensor) -> Tensor:
    """Sum over all dimensions but the last, (…, D) → (D), in fp32, or in float64 for float64."""
    rows = x.unsqueeze(0).flatten(0, -2)  # the extra dimension lets a vector be a single row
    return rows.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


@triton.jit
def load_fp32(pointers, inside, other=0.0, policy: tl.constexpr = None):
    """Load the elements at the pointers as fp32.

    Args:
        pointers: block of pointers.
        inside: boolean block. Elements where it is false are not read.
        other: value of the elements that are not read.
        policy: hint for the L2 cache, see `_dispatch.STREAMED`.
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
    """Sum BLOCK columns of one (count, cols) fp32 matrix over its rows.

    parts is one such matrix or two, one after the other. The second axis of the grid says which:
    programs with program_id(1) = 0 write to out, those with 1 to the second output.
    """
    # int64: count · cols may exceed 2³¹ elements.
    parts_ptr += tl.program_id(1).to(tl.int64) * count * cols
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    # ROWS sums per column stay apart until the end: each thread adds only its own elements, and
    # threads exchange sums once.
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
    """Sum one or two matrices of partial sums over their rows, in one launch.

    Args:
        parts: (K, P, columns) fp32 with K = 1 or 2: K matrices of P partial sums.
        first: dtype of the first matrix's sum.
        second: dtype of the second matrix's sum, or None if K is 1.

    Returns:
        Two vectors (columns), of which the second is None if K is 1.
    """
    kinds, count, cols = parts.shape
    first_sum = parts.new_empty(cols, dtype=first)
    second_sum = None if second is None else parts.new_empty(cols, dtype=second)
    # The matrix is small. Few columns per program make enough programs for all multiprocessors.
    block = 16
    _dispatch.launch(
        column_sum_kernel,
        (cdiv(cols, block), kinds),
        parts,
        first_sum,
        second_sum,
        count,
        cols,
        ROWS=64,
        BLOCK=block,
        num_warps=4,
    )
    return [first_sum, second_sum]
