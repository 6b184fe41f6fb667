"""Kernels in several forms, of which `gpu_lessons` measures which is faster.

Sizes are multiples of the blocks, and no tensor has 2³¹ elements: what those need is in `kernels/`.
"""

from kernels._dispatch import tl, triton

# -- sums over rows --------------------------------------------------------------------------------


@triton.jit
def column_sums_kernel(
    x_ptr, out_ptr, rows, cols, ATOMIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum BLOCK columns of x (rows, cols) over this program's rows.

    The sum is added to out (cols), or written to row p of out (P, cols).
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # ROWS sums per column stay apart until the end, so that the loop needs no exchange between
    # threads.
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        at = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None] * cols + columns[None, :]
        total += tl.load(x_ptr + at).to(tl.float32)
    if ATOMIC:
        # In any order, so the last bits may differ from run to run. In return one launch suffices.
        tl.atomic_add(out_ptr + columns, tl.sum(total, 0))
    else:
        tl.store(out_ptr + tl.program_id(0) * cols + columns, tl.sum(total, 0))


# -- the variance of rows that do not fit on chip --------------------------------------------------


@triton.jit
def variance_kernel(x_ptr, y_ptr, cols, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y (rows) = the variance of each row of x (rows, cols), with a program per row."""
    x_ptr += tl.program_id(0).to(tl.int64) * cols
    at = tl.arange(0, BLOCK)
    # For each lane: the mean of the elements that it has read, or their sum.
    mean = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        x = tl.load(x_ptr + start + at)
        if FORM == "Welford":
            # Each lane has its own mean and squares, of the elements that it has read. The update
            # by (x − old mean)·(x − new mean) does not cancel.
            apart = x - mean
            mean += apart / (start // BLOCK + 1)
            square += apart * (x - mean)
        else:
            mean += x
            square += x * x
    if FORM == "Welford":
        # All lanes have read equally many elements, so the mean of their means is that of the row.
        whole = tl.sum(mean, 0) / BLOCK
        # The squares around the lanes' own means, plus what these means differ from the common one,
        # once for each of the cols // BLOCK elements of a lane.
        variance = (
            tl.sum(square, 0) + cols // BLOCK * tl.sum((mean - whole) * (mean - whole), 0)
        ) / cols
    elif FORM == "squares":
        # mean(x²) − mean²: one pass, but two nearly equal numbers are subtracted if the mean is
        # large.
        whole = tl.sum(mean, 0) / cols
        variance = tl.sum(square, 0) / cols - whole * whole
    else:
        # Two passes: the mean, then the squares around it. The row is read twice.
        whole = tl.sum(mean, 0) / cols
        square = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, cols, BLOCK):
            x = tl.load(x_ptr + start + at) - whole
            square += x * x
        variance = tl.sum(square, 0) / cols
    tl.store(y_ptr + tl.program_id(0), variance)


# -- softmax of rows that fit ----------------------------------------------------------------------


@triton.jit
def softmax_kernel(x_ptr, y_ptr, rows, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Compute y = softmax of each row of x (rows, BLOCK).

    Of P programs, program p computes the rows p, p + P, p + 2·P and so on.
    """
    # With several stages the next rows are loaded while this one is computed. With a program per
    # row the loop runs once.
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        at = row * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at)
        powered = tl.exp(x - tl.max(x, 0))
        tl.store(y_ptr + at, powered / tl.sum(powered, 0))


# -- before a matmul -------------------------------------------------------------------------------


@triton.jit
def gelu_of(x):
    """Return x·Φ(x), with Φ by tanh's approximation."""
    # tanh's form is x·sigmoid(2u), with u = √(2/π)·(x + 0.044715·x³). 1.5957691 is 2·√(2/π).
    return x / (1 + tl.exp(-1.5957691 * (x + 0.044715 * x * x * x)))


@triton.jit
def prologue_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rows,
    cols,
    depth,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute y = f(x) w, with f in every program that multiplies with those rows.

    f is nothing, GeLU, or softmax of rows.
    """
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * depth + k[None, :]
    w_at = w_ptr + k[:, None] * cols + col[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # A softmax needs maximum and sum of whole rows before its first result, so x is read once more.
    # Every program that multiplies with these rows computes them again.
    if FORM == "softmax":
        for start in tl.range(0, depth, BLOCK_K):
            x = tl.load(x_at + start).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x, 1))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top[:, None]), 1)
            top = new_top
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        x = tl.load(x_at + start)
        if FORM == "gelu":
            # In fp32 and rounded to x's dtype again, as tensor cores take both factors in one
            # dtype.
            x = gelu_of(x.to(tl.float32)).to(x.dtype)
        elif FORM == "softmax":
            x = (tl.exp(x.to(tl.float32) - top[:, None]) / total[:, None]).to(x.dtype)
        # x advances by columns, and w by rows of cols elements.
        acc = tl.dot(x, tl.load(w_at + start * cols), acc)
    tl.store(y_ptr + row[:, None] * cols + col[None, :], acc.to(y_ptr.dtype.element_ty))


# -- what backward needs ---------------------------------------------------------------------------


@triton.jit
def gelu_forward_kernel(x_ptr, h_ptr, y_ptr, scale, STORED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute h = scale·x and y = GeLU(h). h is stored or not."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(x_ptr + at).to(tl.float32) * scale
    if STORED:
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty))
    tl.store(y_ptr + at, gelu_of(h).to(y_ptr.dtype.element_ty))


@triton.jit
def gelu_backward_kernel(
    dy_ptr, x_ptr, h_ptr, dx_ptr, scale, STORED: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute dx = scale·dy·GeLU′(h), with h read or computed again."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if STORED:
        h = tl.load(h_ptr + at).to(tl.float32)
    else:
        h = tl.load(x_ptr + at).to(tl.float32) * scale
    share = 1 / (1 + tl.exp(-1.5957691 * (h + 0.044715 * h * h * h)))
    # The product rule for h·sigmoid(2u): 0.134145 is 3·0.044715.
    slope = share + h * share * (1 - share) * 1.5957691 * (1 + 0.134145 * h * h)
    dy = tl.load(dy_ptr + at).to(tl.float32)
    tl.store(dx_ptr + at, (dy * slope * scale).to(dx_ptr.dtype.element_ty))


# -- operands of one kernel ------------------------------------------------------------------------


@triton.jit
def log_sum_kernel(x_ptr, y_ptr, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y (count) = log Σ_k exp x (K, count).

    All K values of an element are needed twice, and stay in registers.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A tile (K, BLOCK): K values of each element. K is a power of two that the registers must hold.
    x = tl.load(x_ptr + tl.arange(0, K).to(tl.int64)[:, None] * count + at[None, :]).to(tl.float32)
    top = tl.max(x, 0)
    tl.store(
        y_ptr + at, (top + tl.log(tl.sum(tl.exp(x - top[None, :]), 0))).to(y_ptr.dtype.element_ty)
    )
