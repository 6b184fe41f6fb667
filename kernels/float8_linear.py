"""Linear layer that computes its three products in fp8.

Mathematics:
    y = x wᵀ
    dx = dy w,  dw = dyᵀ x
A factor a is cast to q = round(s·a) with s = MOST/max|a|, where MOST is the largest number of the
fp8 format. The product of two factors is divided by both s. x and w are e4m3 (3 bits of mantissa,
up to 448). dy is e5m2 (2 bits of mantissa, up to 57,344), because its values spread wider.

Shapes: x (M, K), w (N, K), y and dy (M, N), all dimensions multiples of 16.
Saved for backward: x and w in fp8 and their scales. For x that is half of what a bf16 layer saves.
FLOPs: 2·M·N·K per product, at twice the rate of bf16.
Bytes for a factor of E elements in 16 bits: 5·E to cast it, which reads it twice, because its scale
needs all of it. Backward adds 2·E to transpose it: the fp8 tensor cores take both factors with the
summed dimension contiguous, so products over M and over N need x, w and dy transposed. In eager
torch amax, scaling, cast and transposition would be separate passes with fp32 intermediates.

The products are cuBLAS's (`torch._scaled_mm`). Forward sums in the accumulator of the tensor cores,
which has about 14 bits of mantissa. Backward moves its sums into fp32 registers on the way.

Not done: one kernel that writes q both as it is and transposed would read it once less. The ptxas
that comes with Triton 3.6 to 3.8 compiles it wrongly (triton-lang/triton#11111): for fp32 inputs a
quarter of the transposed bytes were wrong.

Source: Micikevicius et al., FP8 Formats for Deep Learning (2022).
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _dispatch
from ._dispatch import Function, apply, cdiv, power_of_two, tl, triton
from ._rows import autocast, check
from .cost import Cost

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
PARTS = 1024  # largest number of programs that look for the largest element
PART = 4096  # elements that a program reads at a time
ROWS = 64  # rows of a tile that is transposed
COLUMNS = 128  # columns of a tile that is transposed
MULTIPLE = 16  # all dimensions must be multiples of this


@triton.jit
def amax_kernel(a_ptr, parts_ptr, count, BLOCK: tl.constexpr):
    """Find the largest |a| in the blocks i, i + P, i + 2·P, … in program i of P.

    a has count elements. parts (P) fp32 receives one number per program.
    """
    # One maximum per column of a block: threads exchange their maxima only once, after the loop.
    largest = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK).to(tl.int64)
        a = tl.load(a_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(a))
    tl.store(parts_ptr + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def cast_kernel(
    a_ptr,
    parts_ptr,
    q_ptr,
    inverse_ptr,
    count,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast one block of q per program. The first program also writes 1/s.

    parts: (PARTS) fp32, what `amax_kernel` has written.
    MOST: largest number of q's format.
    NaN becomes NaN. An infinite element makes s 0 and itself NaN.
    """
    # Every program reduces the maxima again. They are at most 1024 numbers in the L2, and a launch
    # for them would take longer.
    amax = tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), 0)
    amax = tl.where(amax > 0, amax, 1.0)  # zeros only: any scale will do
    # The product is divided by s, so what it needs is 1/s = max|a|/MOST.
    if tl.program_id(0) == 0:
        tl.store(inverse_ptr, amax / MOST)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    q_pointers = q_ptr + offsets
    # |a|·MOST/amax is at most MOST, up to rounding, so nothing overflows.
    q = (a * (MOST / amax)).to(q_ptr.dtype.element_ty)
    tl.store(q_pointers, q, mask=offsets < count)


@triton.jit
def transpose_kernel(q_ptr, out_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Transpose one tile of bytes per program: q (rows, cols) → out (cols, rows)."""
    # int64: rows · cols may exceed 2³¹.
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    q = tl.load(q_ptr + row[:, None] * cols + col[None, :], mask=inside, other=0)
    # The transposition is in the addresses. Triton exchanges the elements between threads, so that
    # both loads and stores are of neighbouring bytes.
    tl.store(out_ptr + col[None, :] * rows + row[:, None], q, mask=inside)


def launch_cast(a: Tensor, parts: Tensor, q: Tensor, inverse: Tensor) -> None:
    """Fill q and inverse.

    Args:
        a: factor, contiguous.
        parts: fp32 vector for intermediate results, its length a power of two.
        q: output of a's shape in an fp8 format, contiguous.
        inverse: output, one fp32 element: 1/s.
    """
    count = a.numel()
    programs = parts.numel()
    _dispatch.launch(amax_kernel, (programs,), a, parts, count, BLOCK=PART, num_warps=8)
    _dispatch.launch(
        cast_kernel,
        (cdiv(count, PART),),
        a,
        parts,
        q,
        inverse,
        count,
        MOST=torch.finfo(q.dtype).max,
        PARTS=programs,
        BLOCK=PART,
        num_warps=8,
    )


def launch_transpose(q: Tensor, out: Tensor) -> None:
    """Fill out (C, R) with the transpose of q (R, C), both contiguous, of one byte per element."""
    rows, cols = q.shape
    _dispatch.launch(
        transpose_kernel,
        (cdiv(rows, ROWS), cdiv(cols, COLUMNS)),
        q.view(torch.uint8),
        out.view(torch.uint8),
        rows,
        cols,
        ROWS=ROWS,
        BLOCK=COLUMNS,
        num_warps=4,
    )


def cast(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return q, contiguous, and 1/s, one fp32 element.

    Args:
        a: factor.
        dtype: fp8 format of q.
    """
    if not _dispatch.runs_triton(a):
        amax = a.abs().amax().float()
        most = torch.finfo(dtype).max
        inverse = torch.where(amax > 0, amax, 1.0) / most
        q = (a.float() / inverse).clamp(-most, most).to(dtype)
        return q.contiguous(), inverse
    q = torch.empty(a.shape, dtype=dtype, device=a.device)
    # A power of two, because `cast_kernel` loads all maxima as one block.
    programs = min(PARTS, power_of_two(cdiv(a.numel(), PART)))
    parts = torch.empty(programs, dtype=torch.float32, device=a.device)
    inverse = torch.empty((), dtype=torch.float32, device=a.device)
    launch_cast(a.contiguous(), parts, q, inverse)
    return q, inverse


def transposed(q: Tensor) -> Tensor:
    """Return the transpose of q, contiguous."""
    if not _dispatch.runs_triton(q):
        return q.t().contiguous()
    out = torch.empty(q.shape[::-1], dtype=q.dtype, device=q.device)
    launch_transpose(q, out)
    return out


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a bᵀ times both scales, (M, N).

    Args:
        a: fp8 tensor (M, K), contiguous.
        b: fp8 tensor (N, K), contiguous.
        scale_a: one fp32 element.
        scale_b: one fp32 element.
        dtype: dtype of the result.
        fast: whether to sum in the accumulator of the tensor cores, which is less precise.
    """
    if a.is_cuda:
        # _scaled_mm takes its second factor with contiguous columns, which b.t() has.
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(dtype)


@_dispatch.operator("float8_linear", opaque=True)
def forward_op(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y (M, N), x and w in fp8, and the factors 1/s of x and of w."""
    if _dispatch.idle(x):
        return (
            x.new_zeros(x.shape[0], w.shape[0]),
            torch.empty(x.shape, dtype=E4M3, device=x.device),
            torch.empty(w.shape, dtype=E4M3, device=w.device),
            torch.ones((), device=x.device),
            torch.ones((), device=x.device),
        )
    x_fp8, x_scale = cast(x, E4M3)
    w_fp8, w_scale = cast(w, E4M3)
    y = product(x_fp8, w_fp8, x_scale, w_scale, x.dtype, True)
    return y, x_fp8, w_fp8, x_scale, w_scale


@_dispatch.operator("float8_linear_backward", opaque=True)
def backward_op(
    dy: Tensor,
    x_fp8: Tensor,
    w_fp8: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return dx (M, K) in dy's dtype and dw (N, K), from dy (M, N) and what the forward kept."""
    if _dispatch.idle(dy):
        return dy.new_empty(x_fp8.shape), dy.new_zeros(w_fp8.shape, dtype=dw_dtype)
    dy_fp8, dy_scale = cast(dy, E5M2)
    # dx = dy w sums over N and dw = dyᵀ x over M. The tensor cores need the summed dimension last
    # in both factors, hence the transposes.
    dx = product(dy_fp8, transposed(w_fp8), dy_scale, w_scale, dy.dtype, False)
    dw = product(transposed(dy_fp8), transposed(x_fp8), dy_scale, x_scale, dw_dtype, False)
    return dx, dw


class Float8Linear(Function):
    """Linear layer in fp8: `apply(x, w)` → x wᵀ.

    Under autocast, x is cast to autocast's dtype first. w is cast to fp8 directly. Saved for
    backward: x and w in fp8, and their scales.
    """

    @staticmethod
    def forward(ctx, x, w):
        (x,) = autocast(x)
        rows = x.reshape(-1, x.shape[-1])
        y, x_fp8, w_fp8, x_scale, w_scale = forward_op(rows, w)
        ctx.save_for_backward(x_fp8, w_fp8, x_scale, w_scale)
        ctx.dw_dtype = w.dtype
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x_fp8, w_fp8, x_scale, w_scale = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx, dw = backward_op(rows, x_fp8, w_fp8, x_scale, w_scale, ctx.dw_dtype)
        return dx.view(*dy.shape[:-1], dx.shape[-1]), dw


def float8_linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x wᵀ, computed in fp8, as are both gradients; differentiable once in both.

    On a CPU the factors are rounded to fp8 in the same way and multiplied in fp32.

    Args:
        x: tensor (…, K) in fp32, fp16 or bf16. The product of its other dimensions is a multiple of
            16.
        w: tensor (N, K) in any of these dtypes. N and K are multiples of 16.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a shape or dtype does not fit. The error says what is allowed.
    """
    check("x", x, 2)
    check("w", w, 2)
    if w.dim() != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; (N, {x.shape[-1]}) fits x of shape {tuple(x.shape)}"
        )
    sizes = (("rows of x", x.shape[:-1].numel()), ("K", x.shape[-1]), ("N", w.shape[0]))
    for name, size in sizes:
        if size % MULTIPLE:
            raise ValueError(f"{name} = {size}: fp8's tensor cores take multiples of {MULTIPLE}")
    return apply(Float8Linear, x, w)


@register_flop_formula(torch.ops.distlab_kernels.float8_linear)
def flops(x, w, *_, out_shape=None, **__) -> int:
    """Return the FLOPs of the forward product. torch passes shapes instead of tensors."""
    rows, depth = x
    cols = w[0]
    return 2 * rows * depth * cols


@register_flop_formula(torch.ops.distlab_kernels.float8_linear_backward)
def backward_flops(dy, x, *_, out_shape=None, **__) -> int:
    """Return the FLOPs of both products of the backward."""
    rows, cols = dy
    depth = x[1]
    return 4 * rows * cols * depth


def cost(shape: tuple[int, int, int], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass.

    Args:
        shape: (M, K, N).
        dtype: dtype of x, w and y, before the cast to fp8.
        backward: whether to count the backward pass instead of the forward pass.
    """
    m, k, n = shape
    factors = m * k + n * k
    outer = m * n  # elements of y or dy
    cast_bytes = 2 * dtype.itemsize + 1  # read for the scale, read for the cast, and written
    if backward:
        # dy is cast, transposed (read and written), and read by both products. x and w are
        # transposed and read by one product each. dx and dw are written.
        outer_bytes = (cast_bytes + 4) * outer
        factor_bytes = (3 + dtype.itemsize) * factors
        return Cost(4 * m * n * k, outer_bytes + factor_bytes)
    # x and w are cast and read by the product. y is written.
    return Cost(2 * m * n * k, (cast_bytes + 1) * factors + dtype.itemsize * outer)
