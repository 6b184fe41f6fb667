"""A linear layer whose three products are computed in fp8.

Math:  y = x wᵀ;  dx = dy w,  dw = dyᵀ x.  A factor a is cast as q = round(s·a), s = MOST ÷ max|a|, MOST the largest
number of its format; a product of two is divided by both s. x and w are e4m3 (3 bits of mantissa,
up to 448), dy, whose values spread wider, e5m2 (2 bits, up to 57,344).

Shapes: x (M, K), w (N, K), y and dy (M, N), all multiples of 16. FLOPs: 2·M·N·K a product, at twice
bf16's rate. Bytes of a factor of E elements in 16 bits: 5·E to cast it, which reads it twice, since
its scale needs all of it; 2·E more in backward: fp8's tensor cores take both factors with the
summed dimension contiguous, so that products over M and N need x, w and dy transposed. In eager
torch amax, scaling, cast and transposition are passes with intermediates in fp32. Saved for
backward: x and w in fp8 and their scales, of x half the bytes that a bf16 layer saves.

The products are cuBLAS's (`torch._scaled_mm`). Forward sums in the tensor cores' own accumulator
(some 14 bits of mantissa), backward moves its sums into fp32 registers on the way.

A kernel that writes q both as it is and transposed would read it once less, and is compiled wrongly
by the ptxas that Triton 3.6 to 3.8 bring along (triton-lang/triton#11111): of fp32 inputs a quarter
of the transposed bytes were others.

Source: Micikevicius et al., FP8 Formats for Deep Learning (2022).
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _dispatch
from ._dispatch import Function, apply, cdiv, power_of_two, tl, triton
from ._rows import autocast, check
from .cost import Cost

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# programs that look for the largest element, at most; elements that one reads at a time
PARTS, PART = 1024, 4096
ROWS, COLUMNS = 64, 128  # of a tile that is transposed
MULTIPLE = 16


@triton.jit
def amax_kernel(a_ptr, parts_ptr, count, BLOCK: tl.constexpr):
    """parts[p] = the largest |a| among the blocks p, p + programs, … of a (count)."""
    most = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        most = tl.maximum(
            most, tl.abs(tl.load(a_ptr + at, mask=at < count, other=0.0).to(tl.float32))
        )
    tl.store(parts_ptr + tl.program_id(0), tl.max(most, 0))


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
    """A block of q (count); the first program writes 1/s.

    NaN and, with all others, infinity become NaN.
    """
    amax = tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), 0)
    amax = tl.where(amax > 0, amax, 1.0)
    if tl.program_id(0) == 0:
        tl.store(inverse_ptr, amax / MOST)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(q_ptr + at, (a * (MOST / amax)).to(q_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def transpose_kernel(q_ptr, out_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of out (cols, rows), bytes."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    q = tl.load(q_ptr + row[:, None] * cols + col[None, :], mask=inside, other=0)
    tl.store(out_ptr + col[None, :] * rows + row[:, None], q, mask=inside)


def launch_cast(a: Tensor, parts: Tensor, q: Tensor, inverse: Tensor) -> None:
    """Launch both kernels over a, contiguous; parts (a power of two) is what the first leaves for the second."""
    count, programs = a.numel(), parts.numel()
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
    """Launch over q (R, C) and out (C, R), one byte an element, contiguous."""
    grid = cdiv(q.shape[0], ROWS), cdiv(q.shape[1], COLUMNS)
    _dispatch.launch(
        transpose_kernel,
        grid,
        q.view(torch.uint8),
        out.view(torch.uint8),
        *q.shape,
        ROWS=ROWS,
        BLOCK=COLUMNS,
        num_warps=4,
    )


def cast(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a → q, contiguous, and 1/s, one fp32 number."""
    if not _dispatch.runs_triton(a):
        amax, most = a.abs().amax().float(), torch.finfo(dtype).max
        inverse = torch.where(amax > 0, amax, 1.0) / most
        return (a.float() / inverse).clamp(-most, most).to(dtype).contiguous(), inverse
    q = torch.empty(a.shape, dtype=dtype, device=a.device)
    parts = torch.empty(
        min(PARTS, power_of_two(cdiv(a.numel(), PART))), dtype=torch.float32, device=a.device
    )
    inverse = torch.empty((), dtype=torch.float32, device=a.device)
    launch_cast(a.contiguous(), parts, q, inverse)
    return q, inverse


def transposed(q: Tensor) -> Tensor:
    """q (R, C) → (C, R), contiguous."""
    if not (q.is_cuda or _dispatch.interpreted()):
        return q.t().contiguous()
    out = torch.empty(q.shape[::-1], dtype=q.dtype, device=q.device)
    launch_transpose(q, out)
    return out


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """a (M, K) times the transpose of b (N, K), both fp8 and contiguous → (M, N), the sums times both scales."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(dtype)


@_dispatch.operator("float8_linear", opaque=True)
def forward_op(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x (M, K), w (N, K) → y, and x and w in fp8 with the scales of their products."""
    if _dispatch.idle(x):
        kept = (torch.empty(a.shape, dtype=E4M3, device=a.device) for a in (x, w))
        scales = (torch.ones((), device=x.device) for _ in range(2))
        return x.new_zeros(x.shape[0], w.shape[0]), *kept, *scales
    q, x_scale = cast(x, E4M3)
    v, w_scale = cast(w, E4M3)
    return product(q, v, x_scale, w_scale, x.dtype, True), q, v, x_scale, w_scale


@_dispatch.operator("float8_linear_backward", opaque=True)
def backward_op(
    dy: Tensor, q: Tensor, v: Tensor, x_scale: Tensor, w_scale: Tensor, dw_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dy (M, N) and what forward kept → dx (M, K) in dy's dtype, dw (N, K)."""
    if _dispatch.idle(dy):
        return dy.new_empty(q.shape), dy.new_zeros(v.shape, dtype=dw_dtype)
    d, scale = cast(dy, E5M2)
    dx = product(d, transposed(v), scale, w_scale, dy.dtype, False)
    return dx, product(transposed(d), transposed(q), scale, x_scale, dw_dtype, False)


class Float8Linear(Function):
    """`apply(x, w)` → x wᵀ.

    Under autocast x is cast to its dtype first, w from its own to fp8 at once.
    """

    @staticmethod
    def forward(ctx, x, w):
        (x,) = autocast(x)
        rows = x.reshape(-1, x.shape[-1])
        y, *kept = forward_op(rows, w)
        ctx.save_for_backward(*kept)
        ctx.dw_dtype = w.dtype
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, dy):
        dx, dw = backward_op(dy.reshape(-1, dy.shape[-1]), *ctx.saved_tensors, ctx.dw_dtype)
        return dx.view(*dy.shape[:-1], dx.shape[-1]), dw


def float8_linear(x: Tensor, w: Tensor) -> Tensor:
    """x wᵀ with all three products in fp8; differentiable in both.

    On a CPU, rounded alike and multiplied in fp32.

    Args:
        x: (…, K) fp32, fp16 or bf16; all its other dimensions together a multiple of 16.
        w: (N, K), of these dtypes; N and K multiples of 16.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    check("x", x, 2)
    check("w", w, 2)
    if w.dim() != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; (N, {x.shape[-1]}) fits x of shape {tuple(x.shape)}"
        )
    for name, size in {
        "rows of x": x.shape[:-1].numel(),
        "K": x.shape[-1],
        "N": w.shape[0],
    }.items():
        if size % MULTIPLE:
            raise ValueError(f"{name} = {size}: fp8's tensor cores take multiples of {MULTIPLE}")
    return apply(Float8Linear, x, w)


@register_flop_formula(torch.ops.distlab_kernels.float8_linear)
def flops(x, w, *_, out_shape=None, **__) -> int:
    """Count the product only, as FlopCounterMode does."""
    return 2 * x[0] * x[1] * w[0]


@register_flop_formula(torch.ops.distlab_kernels.float8_linear_backward)
def backward_flops(dy, x, *_, out_shape=None, **__) -> int:
    """Count both products."""
    return 4 * dy[0] * dy[1] * x[1]


def cost(shape: tuple[int, int, int], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes for (M, K, N); a factor is read twice and cast, transposed, and read by each product."""
    m, k, n = shape
    factors, outer, cast_bytes = m * k + n * k, m * n, 2 * dtype.itemsize + 1
    if backward:
        return Cost(4 * m * n * k, (cast_bytes + 4) * outer + (3 + dtype.itemsize) * factors)
    return Cost(2 * m * n * k, (cast_bytes + 1) * factors + dtype.itemsize * outer)
