"""Dropout whose mask is never stored, alone and after GeLU.

Math:  y = a·k/(1 − q),  k_i = [u_i ≥ q], a = x or GeLU(x + b);   dx = dy·k/(1 − q)·a′.
q is p rounded to a multiple of 2⁻¹⁶, u_i a 16-bit random number from the counter-based generator
Philox4x32 keyed by the seed, with the element's index as the counter: forward and backward draw the
same u_i without keeping them. One counter gives eight elements their numbers: a generator call per
element would cost more than the memory traffic.

Shapes: x, y any; with a bias x (…, F), b (F). Bytes: x and y once; backward dy, (x) and dx once.
FLOPs: about 3 per element, 13 with GeLU, and the generator's integer operations. Saved for
backward: the seed, and x, b with GeLU.

Source: Srivastava et al., Dropout (2014); Salmon et al., Parallel Random Numbers: As Easy as 1, 2,
3 (2011).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import Function, apply, cdiv, tl, triton
from ._rows import check, check_width, chosen, common_dtype, load_fp32, store_rounded, sum_over_rows
from .cost import Cost
from .elementwise import FLAT, gelu_of, gelu_slope

LEVELS = 1 << 16
ROUNDS = tl.constexpr(7)  # Philox4x32 passes BigCrush from 7 rounds on (Salmon et al., table 2)


@triton.jit
def random_levels(seed, first, BLOCK: tl.constexpr):
    """BLOCK random integers in [0, 2¹⁶) for the elements first, first + 1, …; first is a multiple of 8."""
    counters = first // 8 + tl.arange(0, BLOCK // 8)
    low = (counters & 0xFFFFFFFF).to(tl.uint32)
    high = (counters >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0, ROUNDS)
    ab = tl.join(a, b)
    cd = tl.join(c, d)
    words = tl.join(ab, cd)
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, [BLOCK]).to(tl.int32)


@triton.jit
def dropout_kernel(
    x_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    count,
    cols,
    threshold,
    scale,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of y."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < count
    x = load_fp32(x_ptr + offsets, inside)
    if BIAS:
        x += load_fp32(bias_ptr + offsets % cols, inside)
    if GELU:
        x = gelu_of(x)
    kept = random_levels(tl.load(seed_ptr), first, BLOCK) >= threshold
    y = tl.where(kept, x * scale, 0.0)
    store_rounded(y_ptr + offsets, y, inside)


@triton.jit
def backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    seed_ptr,
    dx_ptr,
    count,
    cols,
    threshold,
    scale,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of dx, with the mask drawn again."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < count
    dx = load_fp32(dy_ptr + offsets, inside) * scale
    if GELU:
        x = load_fp32(x_ptr + offsets, inside)
        if BIAS:
            x += load_fp32(bias_ptr + offsets % cols, inside)
        dx = dx * gelu_slope(x)
    kept = random_levels(tl.load(seed_ptr), first, BLOCK) >= threshold
    store_rounded(dx_ptr + offsets, tl.where(kept, dx, 0.0), inside)


def levels(p: float) -> tuple[int, float]:
    """(threshold, scale): numbers below the threshold are dropped, the others' elements multiplied by the scale."""
    threshold = round(p * LEVELS)
    return threshold, 0.0 if threshold == LEVELS else LEVELS / (LEVELS - threshold)


def launch_dropout(
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    y: Tensor,
    p: float,
    gelu: bool,
    dy: Tensor | None = None,
) -> None:
    """Fill y from contiguous x or, with a dy, the gradient of x from that."""
    options = chosen("dropout", FLAT)
    bias = None if bias is None else bias.contiguous()
    count, cols = y.numel(), 1 if bias is None else bias.numel()
    kernel, read = (dropout_kernel, (x,)) if dy is None else (backward_kernel, (dy, x))
    options.start(
        kernel,
        (cdiv(count, options.block),),
        *read,
        bias,
        seed,
        y,
        count,
        cols,
        *levels(p),
        GELU=gelu,
        BIAS=bias is not None,
    )


def _plain_mask(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Where elements are kept, from torch's generator: without Triton the masks are others, and as reproducible."""
    generator = torch.Generator(x.device).manual_seed(int(seed.item()))
    drawn = torch.randint(LEVELS, x.shape, generator=generator, device=x.device)
    return drawn >= levels(p)[0]


def _plain_sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return reference.wide(x) if bias is None else reference.wide(x) + reference.wide(bias)


@_dispatch.operator("dropout_forward", opaque=True)
def forward_op(x: Tensor, bias: Tensor | None, seed: Tensor, p: float, gelu: bool) -> Tensor:
    """y, contiguous, in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if _dispatch.idle(x):
        return y
    if not _dispatch.runs_triton(x):
        a = _plain_sum(x, bias)
        return y.copy_(
            torch.where(
                _plain_mask(x, seed, p), (reference.gelu(a) if gelu else a) * levels(p)[1], 0.0
            )
        )
    launch_dropout(x, bias, seed, y, p, gelu)
    return y


@_dispatch.operator("dropout_backward", opaque=True)
def backward_op(
    dy: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor, p: float, gelu: bool
) -> Tensor:
    """dx, contiguous; x is read only with gelu."""
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    if _dispatch.idle(dy):
        return dx
    if not _dispatch.runs_triton(dy):
        g = torch.where(_plain_mask(dy, seed, p), reference.wide(dy) * levels(p)[1], 0.0)
        if gelu:
            a = _plain_sum(x, bias)
            g = g * reference.gelu_slope(a)
        return dx.copy_(g)
    launch_dropout(x.contiguous(), bias, seed, dx, p, gelu, dy)
    return dx


def _check_p(p: object) -> None:
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}; allowed: a probability from 0 to 1")


def _seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """One int64 element; drawn from torch's global generator of that device where no seed is given."""
    if seed is None:
        return torch.randint(2**62, (1,), device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise ValueError(
                f"seed is {seed.dtype} of shape {tuple(seed.shape)} on {seed.device}; allowed: an int, or "
                f"one int64 element on {device}"
            )
        return seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}; allowed: an integer from 0 to 2**63 - 1")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


class Dropout(Function):
    """`apply(x, seed, p)` → y; seed is one int64 element on x's device. Saved: the seed."""

    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        return forward_op(x, None, seed, p, False)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        return backward_op(dy, dy, None, seed, ctx.p, False), None, None


class GeLUDropout(Function):
    """`apply(x, bias, seed, p)` → dropout(GeLU(x + bias)), bias may be None.

    Saved: x, bias, seed.
    """

    @staticmethod
    def forward(ctx, x, bias, seed, p):
        ctx.save_for_backward(x, bias, seed)
        ctx.p = p
        return forward_op(x, bias, seed, p, True)

    @staticmethod
    def backward(ctx, dy):
        x, bias, seed = ctx.saved_tensors
        dx = backward_op(dy, x, bias, seed, ctx.p, True)
        db = None
        if bias is not None and ctx.needs_input_grad[1]:
            db = sum_over_rows(dx).to(bias.dtype)
        return dx, db, None, None


def dropout(
    x: Tensor, p: float = 0.5, *, training: bool = True, seed: int | Tensor | None = None
) -> Tensor:
    """x with each element dropped with probability p and the others divided by 1 − p; differentiable.

    Args:
        x: any shape, fp32, fp16 or bf16.
        p: rounded to a multiple of 2⁻¹⁶, by which the scale goes too, so that the mean is exact.
        training: False returns x.
        seed: equal seeds drop equal elements; None draws one from torch's generator.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    check("x", x)
    _check_p(p)
    return (
        apply(Dropout, x, _seed_tensor(seed, x.device), float(p))
        if training and levels(p)[0]
        else x
    )


def linear_gelu_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    p: float = 0.1,
    *,
    training: bool = True,
    seed: int | Tensor | None = None,
) -> Tensor:
    """dropout(GeLU(x weightᵀ + bias)), a feed-forward layer's first half: cuBLAS's matmul, then one pass.

    Bias, GeLU and dropout read the matmul's result once and write once, where torch launches three
    kernels. Kept for backward are that result and a seed, no mask.

    Args:
        x: (…, D); weight: (F, D) of the same dtype, fp32, fp16 or bf16; both cast under autocast.
        bias: (F) in any of these dtypes, or None; it is added in fp32 and its gradient summed in
            fp32.
        p, training, seed: as for `dropout`.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    check("x", x, 1)
    check("weight", weight, 2)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; allowed: (F, {x.shape[-1]}), as wide as x"
        )
    common_dtype("weight", weight, "x", x)
    if bias is not None:
        check_width("bias", bias, "weight.T", weight.T)
    _check_p(p)
    return apply(
        GeLUDropout,
        F.linear(x, weight),
        bias,
        _seed_tensor(seed, x.device),
        float(p) if training else 0.0,
    )


def cost(
    shape: tuple[int, ...], dtype: torch.dtype, *, gelu: bool = False, backward: bool = False
) -> Cost:
    """Least FLOPs and bytes of the element-wise part."""
    return Cost.of_elements(shape, dtype, 13 if gelu else 3, 3 if gelu and backward else 2)
