"""Softmax over the last dimension, for rows of any length.

Mathematics, per row:
    m = max(x),  l = Σ exp(x − m),  y = exp(x − m)/l
    dx = y·(dy − Σ dy·y)

Shapes: x, y (N, D). Arithmetic is fp32, results have x's dtype. A row that is −inf everywhere gives
NaN, as in torch.
Saved for backward: y.
Bytes: forward reads x and writes y, and long rows read x once more from the L2. Backward reads y
and dy and writes dx. FLOPs: about 5 per element.

The length of a row decides which forward kernel runs:
- Up to ONE_TILE columns, `forward_kernel`: a program reads whole rows once and keeps them in
  registers as fp32.
- WIDE columns of 16-bit elements, `wide_forward_kernel`: the same, but the registers hold 16-bit
  elements. A multiprocessor then has room for two rows of 32,768, and reads or writes one while it
  computes the other.
- Longer, `long_forward_kernel`: pieces of rows are programs. Piece i has a maximum m_i and a sum
  l_i of exp(x − m_i), and the row has M = max m_i and L = Σ l_i·exp(m_i − M). Each program computes
  these of one piece and writes the result of an earlier piece, whose row is complete by then. So
  one launch reads and writes memory at the same time.
And which backward kernel, which holds two tensors:
- Up to ONE_TILE_BACKWARD columns, `backward_kernel`: both rows stay in registers.
- Up to HALF_TILE_BACKWARD, `wide_backward_kernel`: y stays, dy is read twice.
- Longer, `long_backward_kernel`: both are read twice.

Measured for 1024×32768 elements of 16 bits on an H200 in µs: `wide_forward_kernel` takes 37, a copy
36. Variants that were not faster: one row in fp32 at a time with loads of the next under way (43);
16 warps (42 to 56, registers spill); one maximum per thread (37 to 38); parts of a row one after
the other (39 to 44); two synchronizations of the warps instead of one (37.5); reads from the L1
instead of registers (37 to 38, but 2 % faster for 4,096 rows); hints for the L2 (39). As fast, but
wrong for large m: y = exp(x − m − log l).

Source: Milakov & Gimelshein, Online normalizer calculation for softmax (2018).
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import KEPT, STREAMED, Function, apply, cdiv, power_of_two, tl, triton
from ._rows import Launch, as_rows, check, chosen, load_fp32, row_launch, store_rounded
from .cost import Cost

ONE_TILE = 32768  # columns
WIDE = range(8193, 65537)  # columns: shorter rows are as fast in fp32, longer rows do not fit
ONE_TILE_BACKWARD = 16384  # columns
HALF_TILE_BACKWARD = 32768  # columns
LOG2_E = tl.constexpr(1.4426950408889634)
# A finite stand-in for the maximum of a part that is −inf everywhere: exp(−inf − LOWEST) is 0,
# whereas exp(−inf − (−inf)) would be NaN.
LOWEST = tl.constexpr(-3.4e38)
INTERPRETED = tl.constexpr(_dispatch.interpreted())


@triton.jit
def forward_kernel(x_ptr, y_ptr, rows, cols, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y for ROWS whole rows per program; y is contiguous."""
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Columns cut off are loaded as −inf: never the maximum, and 0 in the sum.
    inside = (row < rows)[:, None] & (columns < cols)[None, :]
    row64 = row.to(tl.int64)[:, None]  # the product with a stride may exceed 2³¹
    x = load_fp32(x_ptr + row64 * stride_x + columns[None, :], inside, float("-inf"))
    y = tl.exp(x - tl.max(x, 1)[:, None])
    y = y * (1.0 / tl.sum(y, 1))[:, None]  # one division per row instead of one per element
    store_rounded(y_ptr + row64 * cols + columns[None, :], y, inside)


@triton.jit
def backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, cols, stride_dy, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute dx for ROWS whole rows per program; y and dx are contiguous."""
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Columns cut off are loaded as 0, and add nothing to Σ dy·y.
    inside = (row < rows)[:, None] & (columns < cols)[None, :]
    row64 = row.to(tl.int64)[:, None]
    y = load_fp32(y_ptr + row64 * cols + columns[None, :], inside)
    dy = load_fp32(dy_ptr + row64 * stride_dy + columns[None, :], inside)
    dx = y * (dy - tl.sum(dy * y, 1)[:, None])
    store_rounded(dx_ptr + row64 * cols + columns[None, :], dx, inside)


@triton.jit
def hide(x):
    """Return x as a value that the compiler cannot recognise as x.

    It would otherwise keep what it has computed from x in registers to use it again. Computing it
    twice needs fewer registers.
    """
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


@triton.jit
def exp_difference(x, m):
    """Return exp(x − m) for x ≤ m, as 2^(x·log₂e − m·log₂e).

    m·log₂e is the same for all x, so each element costs one multiply-add and one exponential.
    """
    # For a larger |m|, x·log₂e would overflow. There fp32 numbers are so far apart that any x ≠ m
    # gives 0, with the factor or without.
    factor = tl.where(tl.abs(m) < 2e38, LOG2_E, 1.0)
    return tl.exp2(x.to(tl.float32) * factor - m * factor)


@triton.jit
def merge_sums(m1, l1, m2, l2):
    """Return (m, l) of two parts of a row together from (m, l) of each part."""
    m = tl.maximum(m1, m2)
    return m, l1 * tl.exp(m1 - m) + l2 * tl.exp(m2 - m)


@triton.jit
def wide_forward_kernel(x_ptr, y_ptr, cols, stride_x, BLOCK: tl.constexpr):
    """Compute y for one row of 16-bit elements per program.

    The elements stay in registers as they are. In fp32 they would need twice as many registers, so
    exp(x − m) is computed twice: once for the sum and once for the result. Each warp has its own
    maximum and sum, so that the warps wait for each other only once, to merge them.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < cols
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=float("-inf"))
    # There is one warp per 4096 columns. The middle axis is the warp: each of its threads holds 16
    # vectors of 8 elements, the first axis and a part of the last one.
    parts = tl.reshape(x, (16, BLOCK // 4096, 256))
    m = tl.maximum(tl.max(tl.max(parts, 0), 1).to(tl.float32), LOWEST)
    total = tl.sum(tl.sum(exp_difference(hide(parts), m[:, None]), 0), 1)
    m, total = tl.reduce((m, total), 0, merge_sums)
    y_pointers = y_ptr + row * cols + columns
    y = exp_difference(hide(x), m) * (1.0 / total)
    store_rounded(y_pointers, y, inside)


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
    """Compute m and l of piece i and y of piece i − lag in program i.

    Pieces are numbered row by row, `pieces` per row. m and l are fp32 with one element per piece.
    done is int32 with one element per row, 0 at first. It counts the pieces of the row whose m and
    l are in memory.

    Waiting cannot deadlock. Programs start in the order of their numbers, and because lag ≥ pieces,
    all pieces of the row that program i waits for have numbers below i.
    """
    program = tl.program_id(0)
    # First the loads of both pieces, then the wait: the loads are under way meanwhile. The last
    # `lag` programs have a row beyond the last for their first piece, and only write.
    row = program // pieces
    columns = (program % pieces) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        x_ptr + row.to(tl.int64) * stride_x + columns,
        mask=(row < rows) & (columns < cols),
        other=float("-inf"),
        eviction_policy=KEPT,  # the program `lag` numbers later reads it from the L2
    )
    # The first `lag` programs have no earlier piece, and write nothing.
    late = tl.maximum(program - lag, 0)
    late_row = late // pieces
    late_columns = (late % pieces) * BLOCK + tl.arange(0, BLOCK)
    written = (program >= lag) & (late_columns < cols)
    y = tl.load(
        x_ptr + late_row.to(tl.int64) * stride_x + late_columns,
        mask=written,
        other=0.0,
        eviction_policy=STREAMED,
    )
    # Adding 0 reads the counter. "acquire" orders it before the loads of m and l below, and pairs
    # with "release" at the addition of 1.
    done = tl.atomic_add(done_ptr + late_row, 0, sem="acquire")
    while (done < pieces) & (program >= lag):
        done = tl.atomic_add(done_ptr + late_row, 0, sem="acquire")
    index = tl.arange(0, PIECES)
    m = tl.load(
        m_ptr + late_row * pieces + index,
        mask=index < pieces,
        other=float("-inf"),
        cache_modifier=".cg",  # from the L2: the L1 does not see what other multiprocessors wrote
    )
    late_pieces = l_ptr + late_row * pieces + index
    late_totals = tl.load(late_pieces, mask=index < pieces, other=0.0, cache_modifier=".cg")

    # m and l of this program's own piece. Programs that wait for its row wait for this addition.
    largest = tl.maximum(tl.max(x.to(tl.float32), 0), LOWEST)
    total = tl.sum(tl.exp(x.to(tl.float32) - largest), 0)
    tl.store(m_ptr + program, largest, mask=row < rows)
    tl.store(l_ptr + program, total, mask=row < rows)
    tl.atomic_add(done_ptr + row, 1, mask=row < rows, sem="release")

    # M and L of the earlier piece's row, and with them the result of that piece.
    largest = tl.max(m, 0)
    y = tl.exp(y.to(tl.float32) - largest) * (1.0 / tl.sum(late_totals * tl.exp(m - largest), 0))
    store_rounded(y_ptr + late_row.to(tl.int64) * cols + late_columns, y, written)


@triton.jit
def wide_backward_kernel(dy_ptr, y_ptr, dx_ptr, cols, stride_dy, BLOCK: tl.constexpr):
    """Compute dx for one row per program, with only y in registers.

    dy does not fit next to it, and is read a second time, from the L2.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < cols
    dy_ptr += row * stride_dy + columns
    y = tl.load(y_ptr + row * cols + columns, mask=inside, other=0.0, eviction_policy=STREAMED)
    dy = load_fp32(dy_ptr, inside, policy=KEPT)
    product = tl.sum(y.to(tl.float32) * dy, 0)
    tl.debug_barrier()  # keeps the compiler from loading dy once and spilling it
    dy = load_fp32(dy_ptr, inside, policy=STREAMED)
    dx = y.to(tl.float32) * (dy - product)
    store_rounded(dx_ptr + row * cols + columns, dx, inside)


@triton.jit
def long_backward_kernel(dy_ptr, y_ptr, dx_ptr, cols, stride_dy, BLOCK: tl.constexpr):
    """Compute dx for one row of any length per program: first Σ dy·y, then dx."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        inside = start + offsets < cols
        y = load_fp32(y_ptr + row * cols + start + offsets, inside, policy=KEPT)
        acc += y * load_fp32(dy_ptr + row * stride_dy + start + offsets, inside, policy=KEPT)
    product = tl.sum(acc, 0)
    # From the last block to the first: the blocks that were read last are still in the L2.
    blocks = tl.cdiv(cols, BLOCK)
    for block in tl.range(0, blocks):
        columns = (blocks - 1 - block) * BLOCK + offsets
        y = load_fp32(y_ptr + row * cols + columns, columns < cols, policy=STREAMED)
        dy = load_fp32(dy_ptr + row * stride_dy + columns, columns < cols, policy=STREAMED)
        dx = y * (dy - product)
        store_rounded(dx_ptr + row * cols + columns, dx, columns < cols)


def launch_forward(x: Tensor, y: Tensor) -> None:
    """Fill y (N, D), contiguous, from x (N, D), with contiguous rows of any length."""
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
            num_warps=block // 4096,  # the kernel's reshape relies on it
            maxnreg=128,  # room for 16 warps: two rows of 32,768
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
        # One row for the order, and as many pieces as run at the same time: then a program's
        # earlier row is usually complete, and it does not wait.
        lag = pieces + launch.programs(1 << 30, x.device)
        launch.start(
            long_forward_kernel,
            (rows * pieces + lag,),  # the last `lag` programs write the last pieces
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
    """Fill dx (N, D), contiguous, from dy and y, both (N, D) with contiguous rows of any length."""
    rows, cols = y.shape
    if cols > HALF_TILE_BACKWARD:
        launch = chosen("softmax_long_backward", Launch(block=16384, warps=32))
        launch.start(long_backward_kernel, (rows,), dy, y, dx, cols, dy.stride(0))
        return
    if cols > ONE_TILE_BACKWARD:
        launch = Launch(block=power_of_two(cols), warps=32)
        launch.start(wide_backward_kernel, (rows,), dy, y, dx, cols, dy.stride(0))
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


def _check(x: object) -> None:
    """Raise TypeError or ValueError if x is not a tensor that `forward_op` takes."""
    check("x", x, 1)


@_dispatch.operator("softmax_forward", _check)
def forward_op(x: Tensor) -> Tensor:
    """Return softmax of x (…, D) over the last dimension, contiguous."""
    y = x.new_empty(x.shape)
    if _dispatch.idle(x):
        return y
    if not _dispatch.runs_triton(x):
        return y.copy_(reference.softmax(x))
    launch_forward(as_rows(x), y.view(-1, x.shape[-1]))
    return y


@_dispatch.operator("softmax_backward")
def backward_op(dy: Tensor, y: Tensor) -> Tensor:
    """Return dx (…, D), contiguous, from the gradient of y and y itself."""
    dx = y.new_empty(y.shape)
    if _dispatch.idle(y):
        return dx
    if not _dispatch.runs_triton(y):
        y_wide = reference.wide(y)
        dy_wide = reference.wide(dy)
        product = (dy_wide * y_wide).sum(-1, keepdim=True)
        return dx.copy_(y_wide * (dy_wide - product))
    launch_backward(as_rows(dy), as_rows(y), dx)
    return dx


class Softmax(Function):
    """Softmax: `apply(x)` → y of x's shape. Saved for backward: y."""

    @staticmethod
    def forward(ctx, x):
        y = forward_op(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return backward_op(dy, y)


def softmax(x: Tensor) -> Tensor:
    """Return exp(x − max)/Σ exp(x − max), taken over the last dimension; differentiable once.

    Args:
        x: tensor (…, D) in fp32, fp16 or bf16, of any length and with any strides. Elements that
            are −inf give 0.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: x is not a tensor.
        ValueError: its dtype or number of dimensions does not fit. The error says what is allowed.
    """
    return apply(Softmax, x)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass.

    Args:
        shape: dimensions of x.
        dtype: dtype of all tensors.
        backward: whether to count the backward pass instead of the forward pass.
    """
    if backward:
        return Cost.of_elements(shape, dtype, flops=4, tensors=3)  # y, dy, dx
    return Cost.of_elements(shape, dtype, flops=5, tensors=2)  # x, y
