"""Softmax over the last dimension, for rows of any length.

Math, per row:  y = exp(x − max x) / Σ exp(x − max x);  dx = y·(dy − Σ dy·y).

Forms, by the length of a row:
- up to ONE_TILE columns: a program reads whole rows once and keeps them in registers.
- WIDE columns of 16 bits: the same, in 16 bits. A multiprocessor has room for two rows of 32,768,
  of which one is read or written while the other is computed. On an H200 1024×32768 takes 37 µs, a
  copy 36, one row in fp32 at a time, loads of the next under way, 43. Slower were: 16 warps (42 to
  56, spilling), a maximum of each thread (37 to 38), parts of a row one after the other (39 to 44),
  two meetings of the warps (37.5), reads from the L1 instead of registers (37 to 38; in 4,096 rows
  2 % faster), hints for the L2 (39). Not slower, and wrong for large m: y = exp(x − m − log l).
- longer: two reads, the second from the L2. Pieces of rows are programs; each finds its own maximum
  m_i and sum l_i of exp(x − m_i), and writes a piece that lies some hundred programs behind, whose
  row is complete by then: M = max m_i, L = Σ l_i·exp(m_i − M). One launch, and memory is read and
  written at the same time.
Backward holds two tensors: up to ONE_TILE_BACKWARD columns both rows stay in registers, up to
HALF_TILE_BACKWARD one of them, and longer rows are read twice.

Shapes: x, y (N, D). Bytes: x and y once (longer rows: x once more from the L2); backward y, dy and
dx once. FLOPs: about 5 per element. Saved for backward: y. Arithmetic in fp32, results in x's
dtype. A row of −inf only gives NaN, as in torch.

Source: Milakov & Gimelshein, Online normalizer calculation for softmax (2018).
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import KEPT, STREAMED, Function, apply, cdiv, power_of_two, tl, triton
from ._rows import Launch, as_rows, check, chosen, load_fp32, row_launch, store_rounded
from .cost import Cost

ONE_TILE = 32768
WIDE = range(8193, 65537)  # shorter rows are as fast in fp32, longer ones do not fit
ONE_TILE_BACKWARD = 16384
HALF_TILE_BACKWARD = 32768
LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(_dispatch.interpreted())


@triton.jit
def forward_kernel(x_ptr, y_ptr, rows, cols, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows."""
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (columns < cols)[None, :]
    row64 = row.to(tl.int64)[:, None]
    x = load_fp32(x_ptr + row64 * stride_x + columns[None, :], inside, float("-inf"))
    y = tl.exp(x - tl.max(x, 1)[:, None])
    y = y * (1.0 / tl.sum(y, 1))[:, None]
    store_rounded(y_ptr + row64 * cols + columns[None, :], y, inside)


@triton.jit
def backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, cols, stride_dy, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS whole rows; y and dx are contiguous."""
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (columns < cols)[None, :]
    row64 = row.to(tl.int64)[:, None]
    y = load_fp32(y_ptr + row64 * cols + columns[None, :], inside)
    dy = load_fp32(dy_ptr + row64 * stride_dy + columns[None, :], inside)
    dx = y * (dy - tl.sum(dy * y, 1)[:, None])
    store_rounded(dx_ptr + row64 * cols + columns[None, :], dx, inside)


@triton.jit
def anew(x):
    """x, of which the compiler does not know that it is x: what follows is computed again, not kept in registers."""
    return (
        x
        if INTERPRETED
        else tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    )


@triton.jit
def powers(x, m):
    """exp(x − m) ≤ 1 with one operation before the exponential."""
    # beyond, x·log2 e overflows, and all that differs from m gives 0
    factor = tl.where(tl.abs(m) < 2e38, LOG2_E, 1.0)
    return tl.exp2(x.to(tl.float32) * factor - m * factor)


@triton.jit
def merged(m1, l1, m2, l2):
    """Maximum, and sum of exp(x − maximum), of two parts of a row from those of each."""
    m = tl.maximum(m1, m2)
    return m, l1 * tl.exp(m1 - m) + l2 * tl.exp(m2 - m)


@triton.jit
def wide_forward_kernel(x_ptr, y_ptr, cols, stride_x, BLOCK: tl.constexpr):
    """One row of 16-bit elements, which stay as they are in registers; in fp32 they would need twice as many.

    So exp is computed twice. Each warp has a maximum m and a sum l of its own, and waits for the
    others once.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < cols
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=float("-inf"))
    parts = tl.reshape(x, (16, BLOCK // 4096, 256))  # of a warp: 16 × 8 elements of each thread
    # finite: of −inf alone the sum is 0
    m = tl.maximum(tl.max(tl.max(parts, 0), 1).to(tl.float32), -3.4e38)
    total = tl.sum(tl.sum(powers(anew(parts), m[:, None]), 0), 1)
    m, total = tl.reduce((m, total), 0, merged)
    store_rounded(y_ptr + row * cols + columns, powers(anew(x), m) * (1.0 / total), inside)


@triton.jit
def long_forward_kernel(
    x_ptr,
    y_ptr,
    m_ptr,
    l_ptr,
    done_ptr,
    rows,
    cols,
    stride_x,
    pieces,
    lag,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: maximum m and sum l of piece i of all rows' pieces, and y of piece i − lag, whose row is known now.

    done (rows), zeros at first, counts the pieces of each row whose m and l are there. Programs
    start in the order of their numbers, and who waits for a row waits for smaller numbers: lag ≥
    pieces.
    """
    program = tl.program_id(0)
    row, columns = program // pieces, (program % pieces) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        x_ptr + row.to(tl.int64) * stride_x + columns,
        mask=(row < rows) & (columns < cols),
        other=float("-inf"),
        eviction_policy=KEPT,
    )
    late = tl.maximum(program - lag, 0)
    late_row, late_columns = late // pieces, (late % pieces) * BLOCK + tl.arange(0, BLOCK)
    written = (program >= lag) & (late_columns < cols)
    y = tl.load(
        x_ptr + late_row.to(tl.int64) * stride_x + late_columns,
        mask=written,
        other=0.0,
        eviction_policy=STREAMED,
    )
    done = tl.atomic_add(done_ptr + late_row, 0, sem="acquire")
    while (done < pieces) & (program >= lag):
        done = tl.atomic_add(done_ptr + late_row, 0, sem="acquire")
    index = tl.arange(0, PIECES)
    m = tl.load(
        m_ptr + late_row * pieces + index,
        mask=index < pieces,
        other=float("-inf"),
        cache_modifier=".cg",
    )
    late_pieces = l_ptr + late_row * pieces + index
    late_totals = tl.load(late_pieces, mask=index < pieces, other=0.0, cache_modifier=".cg")

    largest = tl.maximum(tl.max(x.to(tl.float32), 0), -3.4e38)  # finite: of −inf alone the sum is 0
    total = tl.sum(tl.exp(x.to(tl.float32) - largest), 0)
    tl.store(m_ptr + program, largest, mask=row < rows)
    tl.store(l_ptr + program, total, mask=row < rows)
    tl.atomic_add(done_ptr + row, 1, mask=row < rows, sem="release")

    largest = tl.max(m, 0)
    y = tl.exp(y.to(tl.float32) - largest) * (1.0 / tl.sum(late_totals * tl.exp(m - largest), 0))
    store_rounded(y_ptr + late_row.to(tl.int64) * cols + late_columns, y, written)


@triton.jit
def wide_backward_kernel(dy_ptr, y_ptr, dx_ptr, cols, stride_dy, BLOCK: tl.constexpr):
    """One row of which y fits into registers and dy not beside it: dy is read again, from the L2."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < cols
    dy_ptr += row * stride_dy + columns
    y = tl.load(y_ptr + row * cols + columns, mask=inside, other=0.0, eviction_policy=STREAMED)
    dy = load_fp32(dy_ptr, inside, policy=KEPT)
    product = tl.sum(y.to(tl.float32) * dy, 0)
    tl.debug_barrier()  # keeps the compiler from loading once and spilling
    dy = load_fp32(dy_ptr, inside, policy=STREAMED)
    dx = y.to(tl.float32) * (dy - product)
    store_rounded(dx_ptr + row * cols + columns, dx, inside)


@triton.jit
def long_backward_kernel(dy_ptr, y_ptr, dx_ptr, cols, stride_dy, BLOCK: tl.constexpr):
    """One long row: the sum of dy·y, then dx, walking back over what was read last."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        inside = start + offsets < cols
        y = load_fp32(y_ptr + row * cols + start + offsets, inside, policy=KEPT)
        acc += y * load_fp32(dy_ptr + row * stride_dy + start + offsets, inside, policy=KEPT)
    product = tl.sum(acc, 0)
    blocks = tl.cdiv(cols, BLOCK)
    for block in tl.range(0, blocks):
        columns = (blocks - 1 - block) * BLOCK + offsets
        y = load_fp32(y_ptr + row * cols + columns, columns < cols, policy=STREAMED)
        dy = load_fp32(dy_ptr + row * stride_dy + columns, columns < cols, policy=STREAMED)
        dx = y * (dy - product)
        store_rounded(dx_ptr + row * cols + columns, dx, columns < cols)


def launch_forward(x: Tensor, y: Tensor) -> None:
    """Fill y, for rows of any length."""
    rows, cols = x.shape
    if x.element_size() == 2 and cols in WIDE:
        block = power_of_two(cols)
        _dispatch.launch(
            wide_forward_kernel,
            (rows,),
            x,
            y,
            cols,
            x.stride(0),
            BLOCK=block,
            num_warps=block // 4096,
            maxnreg=128,
        )
    elif cols <= ONE_TILE:
        launch = row_launch("softmax", cols, tile=1024)
        launch.start(
            forward_kernel,
            (cdiv(rows, launch.rows),),
            x,
            y,
            rows,
            cols,
            x.stride(0),
            ROWS=launch.rows,
        )
    else:
        launch = chosen("softmax_long", Launch(block=8192 // x.element_size(), warps=4, per_sm=10))
        pieces = cdiv(cols, launch.block)
        m, total = x.new_empty(2, rows * pieces, dtype=torch.float32)
        done = x.new_zeros(rows, dtype=torch.int32)
        # who runs at the same time has not to wait for each other
        lag = pieces + launch.programs(1 << 30, x.device)
        launch.start(
            long_forward_kernel,
            (rows * pieces + lag,),
            x,
            y,
            m,
            total,
            done,
            rows,
            cols,
            x.stride(0),
            pieces,
            lag,
            PIECES=max(2, power_of_two(pieces)),
        )


def launch_backward(dy: Tensor, y: Tensor, dx: Tensor) -> None:
    """Fill dx, for rows of any length."""
    rows, cols = y.shape
    if cols > ONE_TILE_BACKWARD:
        if cols <= HALF_TILE_BACKWARD:
            kernel, launch = wide_backward_kernel, Launch(block=power_of_two(cols), warps=32)
        else:
            kernel, launch = (
                long_backward_kernel,
                chosen("softmax_long_backward", Launch(block=16384, warps=32)),
            )
        launch.start(kernel, (rows,), dy, y, dx, cols, dy.stride(0))
        return
    launch = row_launch("softmax_backward", cols)
    launch.start(
        backward_kernel,
        (cdiv(rows, launch.rows),),
        dy,
        y,
        dx,
        rows,
        cols,
        dy.stride(0),
        ROWS=launch.rows,
    )


@_dispatch.operator("softmax_forward", lambda x: check("x", x, 1))
def forward_op(x: Tensor) -> Tensor:
    """x (…, D) → y, contiguous."""
    y = x.new_empty(x.shape)
    if _dispatch.idle(x):
        return y
    if not _dispatch.runs_triton(x):
        return y.copy_(reference.softmax(x))
    launch_forward(as_rows(x), y.view(-1, x.shape[-1]))
    return y


@_dispatch.operator("softmax_backward")
def backward_op(dy: Tensor, y: Tensor) -> Tensor:
    """dx from the gradient of y."""
    dx = y.new_empty(y.shape)
    if _dispatch.idle(y):
        return dx
    if not _dispatch.runs_triton(y):
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
    def backward(ctx, dy):
        return backward_op(dy, *ctx.saved_tensors)


def softmax(x: Tensor) -> Tensor:
    """exp(x − max)/Σ exp(x − max) over the last dimension; differentiable.

    Args:
        x: (…, D) of any length, fp32, fp16 or bf16, any strides; −inf entries become 0.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(Softmax, x)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes: x and y; backward y, dy and dx."""
    return Cost.of_elements(shape, dtype, 5 - backward, 2 + backward)
