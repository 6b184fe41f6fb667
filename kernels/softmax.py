"""Softmax over the last dimension, for rows of any length.

Math, per row:  y = exp(x − max x) / Σ exp(x − max x);  dx = y·(dy − Σ dy·y).

Three forms, by the length of a row:
- up to ONE_TILE columns: a row is read once and stays in registers. One program per tile, or, with `per_sm`, a fixed
  number of programs that walk over the rows and load the next tiles while they work on the present one.
- longer: the row is split over programs. The first kernel leaves each piece's maximum m_i and sum l_i of exp(x − m_i);
  the second combines those of the row, M = max m_i, L = Σ l_i·exp(m_i − M), and writes. It goes through the tensor
  backwards, since what was read last is still in the L2.
Backward holds two tensors: up to ONE_TILE_BACKWARD columns both rows stay in registers, up to HALF_TILE_BACKWARD one of
them, and longer rows are read twice.

Shapes: x, y (N, D). Bytes: x and y once (longer rows: x twice); backward y, dy and dx once. FLOPs: about 5 per element.
Saved for backward: y. Arithmetic in fp32, results in x's dtype. A row of −inf only gives NaN, as in torch.

Source: Milakov & Gimelshein, Online normalizer calculation for softmax (2018).
"""

import torch
from torch import Tensor
from torch.autograd import Function

from . import _dispatch, _triton, reference
from ._autograd import first_order
from ._language import KEPT, STREAMED, tl, triton
from ._rows import Launch, as_rows, check, chosen, power_of_two, row_launch
from .cost import Cost

ONE_TILE = 32768
ONE_TILE_BACKWARD = 16384
HALF_TILE_BACKWARD = 32768


@triton.jit
def forward_kernel(x_ptr, y_ptr, rows, cols, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Tiles of ROWS whole rows."""
    columns = tl.arange(0, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)[:, None]
        x = tl.load(x_ptr + row64 * stride_x + columns[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - tl.max(x, 1)[:, None])
        y = y * (1.0 / tl.sum(y, 1))[:, None]
        tl.store(y_ptr + row64 * cols + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(dy_ptr, y_ptr, dx_ptr, rows, cols, stride_dy, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                    STAGES: tl.constexpr):
    """Tiles of ROWS whole rows; y and dx are contiguous."""
    columns = tl.arange(0, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < cols)[None, :]
        row64 = row.to(tl.int64)[:, None]
        y = tl.load(y_ptr + row64 * cols + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row64 * stride_dy + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(dy * y, 1)[:, None])
        tl.store(dx_ptr + row64 * cols + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def piece_statistics_kernel(x_ptr, m_ptr, l_ptr, cols, stride_x, piece, pieces, BLOCK: tl.constexpr):
    """Maximum and sum of exponentials of `piece` columns of one row; program i·pieces + j has piece j of row i."""
    program = tl.program_id(0).to(tl.int64)
    first = (program % pieces) * piece
    x_ptr += (program // pieces) * stride_x
    last = tl.minimum(first + piece, cols)
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, last, BLOCK):  # each thread keeps its own maximum: one reduction at the end
        x = tl.load(x_ptr + start + offsets, mask=start + offsets < last, other=float("-inf"),
                    eviction_policy=KEPT).to(tl.float32)
        larger = tl.maximum(largest, x)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = larger
    m = tl.max(largest, 0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    tl.store(m_ptr + program, m)
    tl.store(l_ptr + program, tl.sum(total * tl.exp(largest - shift), 0))


@triton.jit
def normalise_kernel(x_ptr, m_ptr, l_ptr, y_ptr, cols, stride_x, pieces, blocks, PIECES: tl.constexpr,
                     BLOCK: tl.constexpr):
    """BLOCK columns of one row of y, from the statistics of its pieces; the last blocks of the last rows first."""
    program = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row = program // blocks
    index = tl.arange(0, PIECES)
    m = tl.load(m_ptr + row * pieces + index, mask=index < pieces, other=float("-inf"))
    l = tl.load(l_ptr + row * pieces + index, mask=index < pieces, other=0.0)  # noqa: E741
    largest = tl.max(m, 0)
    total = tl.sum(l * tl.exp(m - largest), 0)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + columns, mask=columns < cols, other=0.0,
                eviction_policy=STREAMED).to(tl.float32)
    y = tl.exp(x - largest) * (1.0 / total)
    tl.store(y_ptr + row * cols + columns, y.to(y_ptr.dtype.element_ty), mask=columns < cols)


@triton.jit
def wide_backward_kernel(dy_ptr, y_ptr, dx_ptr, cols, stride_dy, BLOCK: tl.constexpr):
    """One row of which y fits into registers and dy not beside it: dy is read again, from the L2."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < cols
    dy_ptr += row * stride_dy + columns
    y = tl.load(y_ptr + row * cols + columns, mask=inside, other=0.0, eviction_policy=STREAMED)
    dy = tl.load(dy_ptr, mask=inside, other=0.0, eviction_policy=KEPT).to(tl.float32)
    product = tl.sum(y.to(tl.float32) * dy, 0)
    tl.debug_barrier()  # keeps the compiler from loading once and spilling
    dy = tl.load(dy_ptr, mask=inside, other=0.0, eviction_policy=STREAMED).to(tl.float32)
    dx = y.to(tl.float32) * (dy - product)
    tl.store(dx_ptr + row * cols + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_backward_kernel(dy_ptr, y_ptr, dx_ptr, cols, stride_dy, BLOCK: tl.constexpr):
    """One long row: the sum of dy·y, then dx, walking back over what was read last."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        inside = start + offsets < cols
        y = tl.load(y_ptr + row * cols + start + offsets, mask=inside, other=0.0, eviction_policy=KEPT)
        dy = tl.load(dy_ptr + row * stride_dy + start + offsets, mask=inside, other=0.0, eviction_policy=KEPT)
        acc += y.to(tl.float32) * dy.to(tl.float32)
    product = tl.sum(acc, 0)
    blocks = tl.cdiv(cols, BLOCK)
    for block in tl.range(0, blocks):
        columns = (blocks - 1 - block) * BLOCK + offsets
        y = tl.load(y_ptr + row * cols + columns, mask=columns < cols, other=0.0, eviction_policy=STREAMED)
        dy = tl.load(dy_ptr + row * stride_dy + columns, mask=columns < cols, other=0.0, eviction_policy=STREAMED)
        dx = y.to(tl.float32) * (dy.to(tl.float32) - product)
        tl.store(dx_ptr + row * cols + columns, dx.to(dx_ptr.dtype.element_ty), mask=columns < cols)


def launch_forward(x: Tensor, y: Tensor) -> None:
    """Fill y, for rows up to ONE_TILE columns."""
    rows, cols = x.shape
    launch = row_launch("softmax", cols, tile=1024)
    grid = (launch.programs(triton.cdiv(rows, launch.rows), x.device),)
    _dispatch.launch(forward_kernel, grid, x, y, rows, cols, x.stride(0), ROWS=launch.rows, BLOCK=launch.block,
                     STAGES=launch.stages, num_warps=launch.warps)


def launch_long_forward(x: Tensor, y: Tensor) -> None:
    """Fill y, for rows of any length."""
    rows, cols = x.shape
    launch = chosen("softmax_long", Launch(block=8192 // x.element_size(), warps=16, per_sm=2))
    # As many pieces as fill the GPU, each at least a block long.
    pieces = max(1, min(triton.cdiv(cols, launch.block), triton.cdiv(launch.programs(1 << 30, x.device), rows)))
    piece = triton.cdiv(triton.cdiv(cols, pieces), launch.block) * launch.block
    pieces = triton.cdiv(cols, piece)
    m, l = torch.empty(2, rows * pieces, dtype=torch.float32, device=x.device).unbind(0)  # noqa: E741
    _dispatch.launch(piece_statistics_kernel, (rows * pieces,), x, m, l, cols, x.stride(0), piece, pieces,
                     BLOCK=launch.block, num_warps=launch.warps)
    blocks = triton.cdiv(cols, launch.block)
    _dispatch.launch(normalise_kernel, (rows * blocks,), x, m, l, y, cols, x.stride(0), pieces, blocks,
                     PIECES=max(2, triton.next_power_of_2(pieces)), BLOCK=launch.block, num_warps=launch.warps)


def launch_backward(dy: Tensor, y: Tensor, dx: Tensor) -> None:
    """Fill dx, for rows of any length."""
    rows, cols = y.shape
    if cols > ONE_TILE_BACKWARD:
        if cols <= HALF_TILE_BACKWARD:
            kernel, launch = wide_backward_kernel, Launch(block=power_of_two(cols), warps=32)
        else:
            kernel, launch = long_backward_kernel, chosen("softmax_long_backward", Launch(block=16384, warps=32))
        _dispatch.launch(kernel, (rows,), dy, y, dx, cols, dy.stride(0), BLOCK=launch.block, num_warps=launch.warps)
        return
    launch = row_launch("softmax_backward", cols)
    grid = (launch.programs(triton.cdiv(rows, launch.rows), y.device),)
    _dispatch.launch(backward_kernel, grid, dy, y, dx, rows, cols, dy.stride(0), ROWS=launch.rows, BLOCK=launch.block,
                     STAGES=launch.stages, num_warps=launch.warps)


@_dispatch.operator("softmax_forward", lambda x: check("x", x, 1))
def forward_op(x: Tensor) -> Tensor:
    """x (…, D) → y, contiguous."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if _dispatch.idle(x):
        return y
    if not _triton.runs_triton(x):
        return y.copy_(reference.softmax(x))
    launch = launch_forward if x.shape[-1] <= ONE_TILE else launch_long_forward
    launch(as_rows(x), y.view(-1, x.shape[-1]))
    return y


@_dispatch.operator("softmax_backward")
def backward_op(dy: Tensor, y: Tensor) -> Tensor:
    """dx from the gradient of y."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if _dispatch.idle(y):
        return dx
    if not _triton.runs_triton(y):
        y32, dy32 = reference.wide(y), reference.wide(dy)
        return dx.copy_(y32 * (dy32 - (dy32 * y32).sum(-1, keepdim=True)))
    launch_backward(as_rows(dy), as_rows(y), dx)
    return dx


class Softmax(Function):
    """`apply(x)` → softmax over the last dimension. Saved: the result."""

    @staticmethod
    def forward(ctx, x):
        y = forward_op(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return backward_op(dy, *ctx.saved_tensors)


def softmax(x: Tensor) -> Tensor:
    """exp(x − max)/Σ exp(x − max) over the last dimension; differentiable.

    Args:
        x: (…, D) of any length, fp32, fp16 or bf16, any strides; −inf entries become 0.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return Softmax.apply(x)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes: x and y; backward y, dy and dx."""
    count = torch.Size(shape).numel()
    return Cost((4 if backward else 5) * count, (3 if backward else 2) * count * dtype.itemsize)
