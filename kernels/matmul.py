"""Matmul with its epilogue computed on the fp32 accumulator: bias, activation, a norm of short rows.

Math:  y = f(a b + bias);  with h = a b + bias and g = dy·f′(h):  da = g bᵀ,  db = aᵀ g,  dbias = Σ_rows g.

Shapes: a (M, K), b (K, N), bias (N), y (M, N). FLOPs: 2·M·N·K. Bytes: a, b and y once; each tile of
y needs a strip of a and of b, which the L2 has to serve. Saved for backward: a, b, bias; h is
computed again where f needs it, for fp16 in fp32, since h may exceed the range of fp16 where f(h)
does not. Dtypes: fp32, fp16, bf16, matmuls summed in fp32, y rounded once; fp32 inputs are
multiplied as three TF32 matmuls.

Two kernels, in the order in which one would write them:
- `grouped_kernel`: a program per tile of y. With a GROUP of 1, tiles come in row order, which reads
  b from memory again for every row of tiles once b is larger than the L2. So tiles are ordered in
  groups of GROUP rows that advance together: programs that run at the same time share strips of a
  and b. Any sizes and strides. The last group may be smaller than the others: a fixed group size
  there would visit some tiles twice and others never.
- `persistent_kernel`: for 16-bit matrices whose rows are aligned: one program per SM walks over
  tiles, loads through tensor descriptors (Hopper's TMA), and writes a tile while the loads of the
  next one are under way.
"""

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
GROUP = 8


@triton.jit
def epilogue_of(y, EPILOGUE: tl.constexpr, cols):
    """f on a tile of fp32 values; 0.01 is leaky ReLU's slope, columns beyond the matrix are 0 for the norm."""
    if EPILOGUE == "relu":
        y = tl.where(y <= 0, 0.0, y)  # NaN stays NaN
    elif EPILOGUE == "leaky_relu":
        y = tl.where(y > 0, y, y * 0.01)
    elif EPILOGUE == "gelu":
        y = gelu_of(y)
    elif EPILOGUE == "silu":
        y = y / (1.0 + tl.exp(-y))
    elif EPILOGUE == "rms_norm":
        y = y * tl.rsqrt(tl.sum(y * y, 1) / cols + 1e-5)[:, None]
    return y


@triton.jit
def grouped_tile(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """(row, column) of the tile-th tile when groups of GROUP rows are walked column by column."""
    per_group = GROUP * col_tiles
    first = (tile // per_group) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)  # the last group may be smaller
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def _finish(
    acc, bias_ptr, y_ptr, row, col, rows, cols, stride_y, BIAS: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Bias, epilogue, rounding and the store of one tile."""
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    y = epilogue_of(acc, EPILOGUE, cols).to(y_ptr.dtype.element_ty)
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
    """The fp32 accumulator of one tile: BLOCK_K of the depth at a time."""
    k = tl.arange(0, BLOCK_K)
    a_ptr += row.to(tl.int64)[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b_ptr += k.to(tl.int64)[:, None] * stride_bk + col.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        left = depth - start  # the mask moves on with the pointers
        a = tl.load(a_ptr, mask=(row < rows)[:, None] & (k < left)[None, :], other=0.0)
        b = tl.load(b_ptr, mask=(k < left)[:, None] & (col < cols)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        # rows of 2²⁵ elements would overflow 32 bits
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
    """One tile of y per program, in groups of GROUP rows of tiles; those of 1 are all tiles in row order."""
    row_tile, col_tile = grouped_tile(
        tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N), GROUP
    )
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
    """Tiles program_id, program_id + num_programs, …; TMA fills what lies outside with zeros and drops it on stores."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    col_tiles = tl.cdiv(cols, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=True):
        row_tile, col_tile = grouped_tile(tile, row_tiles, col_tiles, GROUP)
        row = row_tile * BLOCK_M
        col = col_tile * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, tl.cdiv(depth, BLOCK_K)):
            k = step * BLOCK_K
            if A_TRANSPOSED:
                a = a_desc.load([k, row]).T
            else:
                a = a_desc.load([row, k])
            if B_TRANSPOSED:
                b = b_desc.load([col, k]).T
            else:
                b = b_desc.load([k, col])
            acc = tl.dot(a, b, acc)
        if BIAS:
            columns = col + tl.arange(0, BLOCK_N)
            acc += load_fp32(bias_ptr + columns, columns < cols)[None, :]
        # Two stores of half the width need half the shared memory, which makes room for one more
        # stage of loads.
        halves = tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1])
        left, right = tl.split(halves)
        y_desc.store([row, col], epilogue_of(left, EPILOGUE, cols).to(y_desc.dtype))
        y_desc.store([row, col + BLOCK_N // 2], epilogue_of(right, EPILOGUE, cols).to(y_desc.dtype))


@functools.cache
def tile_for(
    generation: str, itemsize: int, small: bool, norm_block: int = 0, store_bytes: int = 0
) -> tuple[Launch, int]:
    """Launch parameters and BLOCK_K for a generation of GPUs: within its shared memory, without spilling registers.

    From Hopper on the matrix instructions read shared memory, where each stage of a and b lies, in
    227 KiB. Before, they read registers, of which eight warps have enough, and one stage less lies
    in shared memory: up to 96 KiB, where the smaller chips have 99 for a program.

    Args:
        generation: as `_dispatch.generation` names it.
        itemsize: bytes per element of a and b.
        small: rows or columns up to 1024: small tiles, so that more programs share the work.
        norm_block: columns of a tile that must hold whole rows, or 0.
        store_bytes: per element of y in `persistent_kernel`, which stores from shared memory; 0 for
            the other kernels.
    """
    if generation == "interpreter":
        return Launch(block=norm_block or 32, rows=32), 32
    hopper, half = generation in ("sm_90", "sm_100", "sm_103"), itemsize == 2
    if norm_block:
        wide_fp32 = norm_block > 128 and not half
        warps = 4 if hopper and not wide_fp32 else 8
        tile = Launch(norm_block, 32 if wide_fp32 else 64, warps, 4 if hopper and half else 3)
    elif not half:
        tile = Launch(128, 64, 4 if hopper else 8, 3)
    elif small:
        tile = Launch(128, 64, 4 if hopper else 8, 4)
    elif hopper:
        tile = Launch(256, 128, 8, 4 if store_bytes == 2 else 3)
    else:
        tile = Launch(128, 128, 8, 4)
    return tile, 64 if half else 32


def launch_pointers(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    y: Tensor,
    epilogue: str | None,
    precision: str,
    group: int = GROUP,
) -> None:
    """Fill y with `grouped_kernel`; any strides of a and b, y contiguous."""
    (rows, depth), cols = a.shape, b.shape[1]
    norm_block = max(16, power_of_two(cols)) if epilogue == "rms_norm" else 0
    generation, small = _dispatch.generation(a.device.index), min(rows, cols) <= 1024
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
    """x, or xᵀ and True, with contiguous aligned rows as TMA needs them; None where neither is."""
    for matrix, transposed in ((x, False), (x.T, True)):
        aligned = matrix.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
        if (
            matrix.stride(1) == 1
            and aligned
            and matrix.stride(0) >= matrix.shape[1]
            and max(x.shape) < 2**31
        ):
            return matrix, transposed
    return None


def launch_persistent(
    a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, epilogue: str | None
) -> bool:
    """Fill y with `persistent_kernel`; False, and nothing done, where the layout does not allow descriptors."""
    forms = _descriptor_form(a), _descriptor_form(b), _descriptor_form(y)
    if None in forms or epilogue == "rms_norm":
        return False
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, depth), cols = a.shape, b.shape[1]
    launch, block_k = tile_for(
        _dispatch.generation(a.device.index),
        a.element_size(),
        min(rows, cols) <= 1024,
        0,
        y.element_size(),
    )
    shapes = (launch.rows, block_k), (block_k, launch.block), (launch.rows, launch.block // 2)
    descriptors = [
        TensorDescriptor.from_tensor(matrix, list(shape[::-1] if transposed else shape))
        for (matrix, transposed), shape in zip(forms, shapes, strict=True)
    ]
    tiles = cdiv(rows, launch.rows) * cdiv(cols, launch.block)
    grid = (min(tiles, _dispatch.multiprocessors(a.device)),)
    _dispatch.launch(
        persistent_kernel,
        grid,
        *descriptors,
        bias,
        rows,
        cols,
        depth,
        BIAS=bias is not None,
        EPILOGUE=epilogue,
        A_TRANSPOSED=forms[0][1],
        B_TRANSPOSED=forms[1][1],
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
    """(M, K), (K, N), (N) → (M, N) in a's dtype or in fp32, contiguous."""
    y = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32 if fp32 else a.dtype)
    if _dispatch.idle(y):
        return y
    if not _dispatch.runs_triton(a):
        # which would round the result before the epilogue
        with torch.autocast(a.device.type, enabled=False):
            return y.copy_(reference.matmul(reference.wide(a), reference.wide(b), bias, epilogue))
    bias = None if bias is None else bias.contiguous()
    can_tma = (
        a.element_size() == 2 and a.shape[1] > 0 and _dispatch.generation(a.device.index) == "sm_90"
    )
    if not (can_tma and launch_persistent(a, b, bias, y, epilogue)):
        launch_pointers(a, b, bias, y, epilogue, precision)
    return y


@_dispatch.operator("matmul_slope", opaque=True)
def slope_op(dy: Tensor, h: Tensor, epilogue: str) -> Tensor:
    """dy·f′(h) (M, N) in dy's dtype, contiguous, in plain torch: a small part of what the matmuls around it cost."""
    return reference.epilogue_backward(dy.contiguous(), h, epilogue).to(dy.dtype)


@register_flop_formula(torch.ops.distlab_kernels.matmul)
def flops(a, b, *_, out_shape=None, **__) -> int:
    """Count the matmul only, as FlopCounterMode does."""
    return 2 * a[0] * a[1] * b[1]


class MatMul(Function):
    """`apply(a, b, bias=None, epilogue=None, precision="tf32x3")` → epilogue(a b + bias).

    Saved: a, b, bias.

    Autograd casts the gradients back where autocast has cast a and b.
    """

    @staticmethod
    def forward(ctx, a, b, bias=None, epilogue=None, precision="tf32x3"):
        cast = autocast(a, b)
        y = matmul_op(*cast, bias, epilogue, precision)
        ctx.save_for_backward(*cast, bias)
        ctx.options = epilogue, precision
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b, bias = ctx.saved_tensors
        epilogue, precision = ctx.options
        g = dy
        if epilogue is not None:
            g = slope_op(
                dy, matmul_op(a, b, bias, None, precision, a.dtype == torch.float16), epilogue
            )
        da = matmul_op(g, b.T, None, None, precision) if ctx.needs_input_grad[0] else None
        db = matmul_op(a.T, g, None, None, precision) if ctx.needs_input_grad[1] else None
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
    """epilogue(a b + bias); differentiable in a, b and bias.

    Args:
        a: (M, K), fp32, fp16 or bf16; b: (K, N) of the same dtype; any sizes and strides. Cast
            under autocast.
        bias: (N) or None.
        epilogue: None, "relu", "leaky_relu" (slope 0.01), "gelu" (tanh form), "silu", or "rms_norm"
            without a weight (eps 1e-5), for N up to MAX_NORM_COLUMNS.
        precision: of fp32 matmuls on the GPU: "tf32x3" (three TF32 matmuls), "tf32", "ieee".

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(MatMul, a, b, bias, epilogue, precision)


def cost(shape: tuple[int, int, int], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes for (M, K, N); backward is two matmuls."""
    rows, depth, cols = shape
    passes, inputs = 1 + backward, rows * depth + depth * cols
    return Cost(2 * passes * rows * depth * cols, (passes * inputs + rows * cols) * dtype.itemsize)
