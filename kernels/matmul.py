"""Matmul that applies its epilogue to the fp32 accumulator: bias, activation, norm of short rows.

Mathematics, with h = a b + bias:
    y = f(h)
Backward, from the gradient dy of y, with g = dy·f′(h):
    da = g bᵀ,  db = aᵀ g,  dbias = Σ over rows of g

Shapes: a (M, K), b (K, N), bias (N), y (M, N), in fp32, fp16 or bf16. Products are summed in fp32
and y is rounded once. fp32 inputs are multiplied as three TF32 matmuls unless the caller chooses.
Saved for backward: a, b, bias. Where f′ needs h, it is computed again. For fp16 that is done in
fp32, since h may exceed the range of fp16 where f(h) does not.
FLOPs: 2·M·N·K. Bytes: a, b and y once. Each tile of y reads a strip of a and a strip of b, so most
of these reads must hit the L2.

Two kernels, in the order in which one would write them:
- `grouped_kernel`: one program per tile of y, for any sizes and strides. In row order of the tiles,
  each row of tiles would read all of b, from memory if b is larger than the L2. So tiles are
  ordered in groups of GROUP rows of tiles, column by column within a group: programs that run at
  the same time share strips of a and of b. GROUP = 1 is row order. The last group may have fewer
  rows. With a fixed group size there, some tiles would be computed twice and others never.
- `persistent_kernel`: for 16-bit matrices with aligned rows. One program per multiprocessor loops
  over tiles, loads through tensor descriptors (Hopper's TMA), and writes one tile while the loads
  of the next one are under way.
"""

import dataclasses
import functools

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _dispatch, reference
from ._dispatch import Function, apply, cdiv, power_of_two, tl, triton
from ._rows import Launch, autocast, check, check_width, chosen, common_dtype, load_fp32
from .cost import Cost
from .elementwise import gelu_of

EPILOGUES = tuple(reference.EPILOGUES)
PRECISIONS = ("tf32x3", "tf32", "ieee")
MAX_NORM_COLUMNS = 256  # a norm needs the whole row in one tile
GROUP = 8  # rows of tiles that advance together


@triton.jit
def epilogue_of(y, EPILOGUE: tl.constexpr, cols):
    """Apply f to a tile of fp32 values.

    For "rms_norm" the tile must hold whole rows of cols columns, and 0 in the columns beyond.
    """
    if EPILOGUE == "relu":
        y = tl.where(y <= 0, 0.0, y)  # NaN stays NaN
    elif EPILOGUE == "leaky_relu":
        y = tl.where(y > 0, y, y * 0.01)  # torch's default slope
    elif EPILOGUE == "gelu":
        y = gelu_of(y)
    elif EPILOGUE == "silu":
        y = y / (1.0 + tl.exp(-y))
    elif EPILOGUE == "rms_norm":
        # The columns beyond cols are 0 and add nothing, so the mean divides by cols and not by the
        # width of the tile.
        y = y * tl.rsqrt(tl.sum(y * y, 1) / cols + 1e-5)[:, None]
    return y


@triton.jit
def grouped_tile(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Return row and column of a tile, numbered group by group and column by column within one."""
    # Only the last group can be smaller, so each group before it has exactly this many tiles.
    per_group = GROUP * col_tiles
    first = (tile // per_group) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)  # the last group may be smaller
    # Down a column of `size` tiles first, then to the next column: tiles with neighbouring numbers
    # multiply different strips of a by the same strip of b.
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def _finish(
    acc, bias_ptr, y_ptr, row, col, rows, cols, stride_y, BIAS: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Add the bias to one tile, apply the epilogue, round and store."""
    # acc is still fp32: bias and epilogue come before the only rounding.
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    y = epilogue_of(acc, EPILOGUE, cols).to(y_ptr.dtype.element_ty)
    # Tiles at the lower and right edges extend past y.
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * stride_y + col[None, :], y, mask=inside)


@triton.jit
def _tile_product(
    a_ptr,
    b_ptr,
    row,
    col,
    rows,
    cols,
    depth,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the fp32 product for one tile of y, summed over BLOCK_K of the depth at a time."""
    # The pointers address a tile (BLOCK_M, BLOCK_K) of a and a tile (BLOCK_K, BLOCK_N) of b, and
    # advance along the depth. int64: a row times its stride may exceed 2³¹.
    k = tl.arange(0, BLOCK_K)
    a_ptr += row.to(tl.int64)[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b_ptr += k.to(tl.int64)[:, None] * stride_bk + col.to(tl.int64)[None, :] * stride_bn
    # The tile's sums stay in registers for the whole depth.
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        left = depth - start  # the pointers advance, so the mask shrinks
        # Zeros past the depth add nothing to the sum. Zeros in columns past the edge are what
        # "rms_norm" relies on. Rows past the edge are only kept from reading outside the matrix.
        a = tl.load(a_ptr, mask=(row < rows)[:, None] & (k < left)[None, :], other=0.0)
        b = tl.load(b_ptr, mask=(k < left)[:, None] & (col < cols)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        # int64 again: with rows of 2²⁵ elements, BLOCK_K rows of b would overflow 32 bits.
        a_ptr += BLOCK_K * tl.cast(stride_ak, tl.int64)
        b_ptr += BLOCK_K * tl.cast(stride_bk, tl.int64)
    return acc


@triton.jit
def grouped_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    y_ptr,
    rows,
    cols,
    depth,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_y,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of y per program. `grouped_tile` says which."""
    row_tile, col_tile = grouped_tile(
        tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N), GROUP
    )
    # Rows and columns of this tile in y, and with them the strips of a and b that it needs.
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _tile_product(
        a_ptr,
        b_ptr,
        row,
        col,
        rows,
        cols,
        depth,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )
    _finish(acc, bias_ptr, y_ptr, row, col, rows, cols, stride_y, BIAS, EPILOGUE)


@triton.jit
def persistent_kernel(
    a_desc,
    b_desc,
    y_desc,
    bias_ptr,
    rows,
    cols,
    depth,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute the tiles i, i + P, i + 2·P, … of y in program i of P.

    TMA needs no masks: it loads zeros for elements outside the matrix and does not store them.
    A_TRANSPOSED, B_TRANSPOSED: the descriptor is that of the transposed matrix, whose rows are
    contiguous.
    """
    row_tiles = tl.cdiv(rows, BLOCK_M)
    col_tiles = tl.cdiv(cols, BLOCK_N)
    # `flatten` makes one loop of this one and the loop over the depth. Its pipeline then loads the
    # first operands of the next tile while this tile's epilogue runs.
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=True):
        row_tile, col_tile = grouped_tile(tile, row_tiles, col_tiles, GROUP)
        row = row_tile * BLOCK_M
        col = col_tile * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, tl.cdiv(depth, BLOCK_K)):
            k = step * BLOCK_K
            if A_TRANSPOSED:
                # `.T` moves no element: wgmma reads 16-bit operands from shared memory along either
                # dimension.
                a = a_desc.load([k, row]).T
            else:
                a = a_desc.load([row, k])
            if B_TRANSPOSED:
                b = b_desc.load([col, k]).T
            else:
                b = b_desc.load([k, col])
            acc = tl.dot(a, b, acc)
        # Once per tile, after the sum over the depth. The columns are cut here, because bias has no
        # descriptor that would do it.
        if BIAS:
            columns = col + tl.arange(0, BLOCK_N)
            acc += load_fp32(bias_ptr + columns, columns < cols)[None, :]
        # Store the tile in two halves, columns [0, BLOCK_N/2) and the rest. A store passes through
        # shared memory, and half the width leaves room for one more stage of loads.
        halves = tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1])
        left, right = tl.split(halves)
        y_desc.store([row, col], epilogue_of(left, EPILOGUE, cols).to(y_desc.dtype))
        y_desc.store([row, col + BLOCK_N // 2], epilogue_of(right, EPILOGUE, cols).to(y_desc.dtype))


@functools.cache
def tile_for(
    generation: str, itemsize: int, small: bool, norm_block: int = 0
) -> tuple[Launch, int]:
    """Return launch parameters and BLOCK_K of `grouped_kernel` that do not spill registers.

    From Hopper on, matrix instructions read their operands from shared memory, where every stage of
    a and b is stored, in at most 227 KiB. Before Hopper they read registers, of which eight warps
    have enough, and one stage less is in shared memory. Those tiles use up to 96 KiB, because the
    smaller chips have 99 KiB per program.

    Args:
        generation: name that `_dispatch.generation` returns.
        itemsize: bytes per element of a and b.
        small: whether rows or columns are at most 1024. Small tiles then make enough programs.
        norm_block: columns of a tile that must hold whole rows, or 0.
    """
    if generation == "interpreter":
        return Launch(block=norm_block or 32, rows=32), 32
    hopper = generation in ("sm_90", "sm_100", "sm_103")
    half_precision = itemsize == 2
    # 128 bytes of each row of a, a whole cache line, for either size of elements.
    block_k = 64 if half_precision else 32
    if norm_block:
        if norm_block > 128 and not half_precision:
            rows = 32
            warps = 8
        else:
            rows = 64
            warps = 4 if hopper else 8
        stages = 4 if hopper and half_precision else 3
        return Launch(norm_block, rows, warps, stages), block_k
    if not half_precision:
        return Launch(block=128, rows=64, warps=4 if hopper else 8, stages=3), block_k
    if small:
        return Launch(block=128, rows=64, warps=4 if hopper else 8, stages=4), block_k
    if hopper:
        return Launch(block=256, rows=128, warps=8, stages=3), block_k
    return Launch(block=128, rows=128, warps=8, stages=4), block_k


# Tiles of `persistent_kernel`, each with the share of the largest tile's FLOP/s that a
# multiprocessor reaches with it. Smaller tiles read more bytes per FLOP.
PERSISTENT_TILES = (
    (Launch(block=256, rows=128, warps=8, stages=4), 1.0),
    (Launch(block=128, rows=128, warps=8, stages=5), 0.8),
    (Launch(block=128, rows=64, warps=4, stages=4), 0.6),
)
PERSISTENT_DEPTH = 64  # elements of a row of a per stage, 128 bytes: a whole cache line


@functools.lru_cache
def persistent_tile(rows: int, cols: int, multiprocessors: int, store_bytes: int) -> Launch:
    """Return launch parameters of `persistent_kernel` for a result of this size, on Hopper.

    Each multiprocessor computes one tile at a time. The busiest one takes as long as its number of
    tiles times the size of a tile, divided by the rate. Large tiles win by their rate where there
    are many of them. Small ones win where large ones would leave multiprocessors idle.

    Args:
        rows: rows of y.
        cols: columns of y.
        multiprocessors: number of them on the GPU.
        store_bytes: bytes per element of y, which is stored through shared memory.
    """

    def duration(candidate: tuple[Launch, float]) -> float:
        """Return the time with this tile, in a unit that is the same for all tiles."""
        launch, rate = candidate
        tiles = cdiv(rows, launch.rows) * cdiv(cols, launch.block)
        return cdiv(tiles, multiprocessors) * launch.rows * launch.block / rate

    launch, _ = min(PERSISTENT_TILES, key=duration)
    # A stage of the largest tile takes (128·64 + 64·256)·2 bytes = 48 KiB. Four of them and half a
    # tile of 16-bit results, 32 KiB, are 224 of 227 KiB. Half a tile in fp32 leaves room for three.
    if launch.block == 256 and store_bytes == 4:
        return dataclasses.replace(launch, stages=3)
    return launch


def launch_pointers(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    y: Tensor,
    epilogue: str | None,
    precision: str,
    group: int = GROUP,
) -> None:
    """Fill y with `grouped_kernel`.

    Args:
        a: (M, K), with any strides.
        b: (K, N), with any strides.
        bias: (N), contiguous, or None.
        y: (M, N), output, contiguous.
        epilogue: one of EPILOGUES.
        precision: one of PRECISIONS, for fp32.
        group: rows of tiles that advance together.
    """
    rows, depth = a.shape
    cols = b.shape[1]
    # tl.dot takes powers of two from 16 on.
    norm_block = max(16, power_of_two(cols)) if epilogue == "rms_norm" else 0
    generation = _dispatch.generation(a.device.index)
    small = min(rows, cols) <= 1024
    launch, block_k = tile_for(generation, a.element_size(), small, norm_block)
    launch = chosen("matmul", launch)
    block_n = norm_block or launch.block
    grid = (cdiv(rows, launch.rows) * cdiv(cols, block_n),)
    _dispatch.launch(
        grouped_kernel,
        grid,
        a,
        b,
        bias,
        y,
        rows,
        cols,
        depth,
        *a.stride(),
        *b.stride(),
        y.stride(0),
        BIAS=bias is not None,
        EPILOGUE=epilogue,
        BLOCK_M=launch.rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=group,
        PRECISION=precision,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def _descriptor_form(x: Tensor) -> tuple[Tensor, bool] | None:
    """Return a form of the matrix x that a tensor descriptor can describe.

    TMA needs contiguous rows that begin at multiples of 16 bytes and do not overlap.

    Returns:
        x and False, or xᵀ and True, or None where neither fits.
    """
    if x.data_ptr() % 16 or max(x.shape) >= 2**31:
        return None
    # The columns of x are the rows of xᵀ: of a matrix with contiguous columns, the kernel loads
    # tiles of xᵀ and transposes them.
    for matrix, transposed in ((x, False), (x.T, True)):
        row_stride = matrix.stride(0)
        rows_aligned = row_stride * x.element_size() % 16 == 0
        if matrix.stride(1) == 1 and rows_aligned and row_stride >= matrix.shape[1]:
            return matrix, transposed
    return None


def launch_persistent(
    a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, epilogue: str | None
) -> bool:
    """Fill y with `persistent_kernel`, if the layout of all three matrices allows descriptors.

    Args:
        a: (M, K), of 16-bit elements.
        b: (K, N), of a's dtype.
        bias: (N), contiguous, or None.
        y: (M, N), output, contiguous.
        epilogue: one of EPILOGUES.

    Returns:
        True, or False if nothing was done.
    """
    a_form = _descriptor_form(a)
    b_form = _descriptor_form(b)
    y_form = _descriptor_form(y)
    if a_form is None or b_form is None or y_form is None or epilogue == "rms_norm":
        return False
    from triton.tools.tensor_descriptor import TensorDescriptor

    def descriptor(form: tuple[Tensor, bool], tile: tuple[int, int]) -> TensorDescriptor:
        """Return a descriptor that loads or stores a tile of this many rows and columns."""
        matrix, transposed = form
        rows, columns = tile
        shape = [columns, rows] if transposed else [rows, columns]
        return TensorDescriptor.from_tensor(matrix, shape)

    rows, depth = a.shape
    cols = b.shape[1]
    multiprocessors = _dispatch.multiprocessors(a.device)
    if _dispatch.interpreted():
        launch, block_k = Launch(block=32, rows=32), 32
    else:
        launch = persistent_tile(rows, cols, multiprocessors, y.element_size())
        block_k = PERSISTENT_DEPTH
    tiles = cdiv(rows, launch.rows) * cdiv(cols, launch.block)
    # One program per multiprocessor: the stages of large tiles fill its shared memory.
    grid = (min(tiles, multiprocessors),)
    _dispatch.launch(
        persistent_kernel,
        grid,
        descriptor(a_form, (launch.rows, block_k)),
        descriptor(b_form, (block_k, launch.block)),
        descriptor(y_form, (launch.rows, launch.block // 2)),  # stored in two halves
        bias,
        rows,
        cols,
        depth,
        BIAS=bias is not None,
        EPILOGUE=epilogue,
        A_TRANSPOSED=a_form[1],
        B_TRANSPOSED=b_form[1],
        BLOCK_M=launch.rows,
        BLOCK_N=launch.block,
        BLOCK_K=block_k,
        GROUP=GROUP,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return True


def _check(
    a: object, b: object, bias: object, epilogue: object, precision: object, *_: object
) -> None:
    """Raise TypeError or ValueError for arguments of `matmul_op` that do not fit."""
    check("a", a, 2)
    check("b", b, 2)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}; allowed: (M, K) and (K, N)"
        )
    common_dtype("b", b, "a", a)
    if bias is not None:
        check_width("bias", bias, "b", b)
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue is {epilogue!r}; allowed: {', '.join(map(repr, EPILOGUES))}")
    if epilogue == "rms_norm" and b.shape[1] > MAX_NORM_COLUMNS:
        raise ValueError(
            f"b has {b.shape[1]} columns; epilogue 'rms_norm' allows at most {MAX_NORM_COLUMNS}"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}")


@_dispatch.operator("matmul", _check, opaque=True)
def matmul_op(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    epilogue: str | None,
    precision: str,
    fp32: bool = False,
) -> Tensor:
    """Return epilogue(a b + bias), (M, N), contiguous, in a's dtype or with `fp32` in fp32."""
    y = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32 if fp32 else a.dtype)
    if _dispatch.idle(y):
        return y
    if not _dispatch.runs_triton(a):
        # Autocast would round the product before the epilogue.
        with torch.autocast(a.device.type, enabled=False):
            return y.copy_(reference.matmul(reference.wide(a), reference.wide(b), bias, epilogue))
    if bias is not None:
        bias = bias.contiguous()
    half_precision = a.element_size() == 2
    # A descriptor cannot describe a matrix without elements, so K must not be 0.
    can_tma = half_precision and a.shape[1] > 0 and _dispatch.generation(a.device.index) == "sm_90"
    if can_tma and launch_persistent(a, b, bias, y, epilogue):
        return y
    launch_pointers(a, b, bias, y, epilogue, precision)
    return y


@_dispatch.operator("matmul_slope", opaque=True)
def slope_op(dy: Tensor, h: Tensor, epilogue: str) -> Tensor:
    """Return dy·f′(h), (M, N), contiguous, in dy's dtype.

    It is plain torch, since the matmuls before and after it take most of the time.
    """
    return reference.epilogue_backward(dy.contiguous(), h, epilogue).to(dy.dtype)


@register_flop_formula(torch.ops.distlab_kernels.matmul)
def flops(a, b, *_, out_shape=None, **__) -> int:
    """Return the FLOPs of the matmul, which is all that torch's FlopCounterMode counts.

    torch passes the shapes of tensors instead of the tensors.
    """
    rows, depth = a
    cols = b[1]
    return 2 * rows * depth * cols


class MatMul(Function):
    """Matmul: `apply(a, b, bias=None, epilogue=None, precision="tf32x3")` → epilogue(a b + bias).

    Saved for backward: a, b, bias. Autograd casts the gradients back where autocast has cast a and
    b.
    """

    @staticmethod
    def forward(ctx, a, b, bias=None, epilogue=None, precision="tf32x3"):
        a, b = autocast(a, b)
        y = matmul_op(a, b, bias, epilogue, precision)
        ctx.save_for_backward(a, b, bias)
        ctx.epilogue = epilogue
        ctx.precision = precision
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b, bias = ctx.saved_tensors
        precision = ctx.precision
        g = dy
        if ctx.epilogue is not None:
            h_in_fp32 = a.dtype == torch.float16  # h may exceed the range of fp16
            # One more matmul, instead of h (M, N) kept from forward to backward. From y, h does not
            # follow: GeLU and SiLU are not monotonic, and a norm loses the row's length.
            h = matmul_op(a, b, bias, None, precision, h_in_fp32)
            g = slope_op(dy, h, ctx.epilogue)
        # From y = a b: da = g bᵀ and db = aᵀ g. `.T` copies nothing, because the kernels take any
        # strides.
        da = None
        if ctx.needs_input_grad[0]:
            da = matmul_op(g, b.T, None, None, precision)
        db = None
        if ctx.needs_input_grad[1]:
            db = matmul_op(a.T, g, None, None, precision)
        dbias = None
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = g.sum(0, dtype=torch.float32).to(bias.dtype)
        return da, db, dbias, None, None


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: str | None = None,
    precision: str = "tf32x3",
) -> Tensor:
    """Return epilogue(a b + bias); differentiable once in a, b and bias.

    Args:
        a: tensor (M, K) in fp32, fp16 or bf16, with any strides; cast under autocast.
        b: tensor (K, N) of a's dtype, with any strides; cast under autocast.
        bias: tensor (N), or None.
        epilogue: None, "relu", "leaky_relu" (slope 0.01), "gelu" (tanh form), "silu", or "rms_norm"
            without a weight (eps 1e-5), for N up to MAX_NORM_COLUMNS.
        precision: arithmetic of fp32 matmuls on the GPU: "tf32x3" (three TF32 matmuls), "tf32" or
            "ieee".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or option does not fit. The error says what is allowed.
    """
    return apply(MatMul, a, b, bias, epilogue, precision)


def cost(shape: tuple[int, int, int], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass.

    Args:
        shape: (M, K, N).
        dtype: dtype of all matrices.
        backward: whether to count the two matmuls of the backward pass instead of the forward's.
    """
    rows, depth, cols = shape
    inputs = rows * depth + depth * cols
    outputs = rows * cols
    if backward:
        matmuls = 2
        elements = 2 * inputs + outputs  # a, b, da, db, and dy
    else:
        matmuls = 1
        elements = inputs + outputs
    return Cost(2 * matmuls * rows * depth * cols, elements * dtype.itemsize)
