"""Dropout without a stored mask, alone or after bias and GeLU.

Mathematics, per element i, with a = x or a = GeLU(x + b) and p rounded to a multiple q of 2⁻¹⁶:
    k_i = [u_i ≥ q], u_i uniform in [0, 1)
    y_i = a_i·k_i/(1 − q)
    dx_i = dy_i·k_i/(1 − q)·a_i′
u_i is a 16-bit number from the counter-based generator Philox4x32. Its key is the seed, and its
counter follows from i. So forward and backward draw the same numbers, and no mask is stored. One
counter gives the numbers of eight elements, because one call of the generator per element would
take longer than the memory traffic.

Shapes: x, y any; with a bias x (…, F) and b (F). Arithmetic is fp32, rounded once.
Saved for backward: the seed, and with GeLU also x and b.
Bytes: forward reads x and writes y. Backward reads dy, with GeLU also x, and writes dx. FLOPs per
element: about 3, and 13 with GeLU, without the integer operations of the generator.

Sources: Srivastava et al., Dropout (2014). Salmon et al., Parallel Random Numbers: As Easy as 1, 2,
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

LEVELS = 1 << 16  # random numbers are integers below this
ROUNDS = tl.constexpr(7)  # Philox4x32 passes BigCrush from 7 rounds on (Salmon et al., table 2)


@triton.jit
def random_levels(seed, first, BLOCK: tl.constexpr):
    """Return random integers in [0, 2¹⁶) for BLOCK elements from `first`, a multiple of 8."""
    # Element i belongs to counter i // 8. Philox takes the 64-bit counter as two words of 32 bits
    # (the other two are 0), and returns four random words.
    counters = first // 8 + tl.arange(0, BLOCK // 8)
    low = (counters & 0xFFFFFFFF).to(tl.uint32)
    high = (counters >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0, ROUNDS)
    # Split each word into two halves, which makes eight numbers per counter, and put the eight of a
    # counter next to each other.
    # `join` puts its two arguments side by side along a new last axis. Three of them make an axis
    # of 2·2·2 numbers per counter, which `reshape` lays out one after the other. Their order does
    # not matter, as long as both passes have the same.
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
    """Compute one block of y per program.

    threshold: integer below which a random number drops its element.
    scale: factor of the elements that are kept, 1/(1 − q).
    """
    # int64: offsets, and the generator's counters, may exceed 2³¹.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < count
    x = load_fp32(x_ptr + offsets, inside)
    # x is contiguous with rows of cols elements, so the rest of a division is the element's column.
    if BIAS:
        x += load_fp32(bias_ptr + offsets % cols, inside)
    if GELU:
        x = gelu_of(x)
    kept = random_levels(tl.load(seed_ptr), first, BLOCK) >= threshold
    # A choice and not a product with 0, by which an infinite element would become NaN.
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
    """Compute one block of dx per program. The mask is drawn again from the seed."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < count
    # dy/(1 − q). The choice of `kept` comes last, as in the forward.
    dx = load_fp32(dy_ptr + offsets, inside) * scale
    if GELU:
        # dGeLU/dx at x + b, computed again instead of stored.
        x = load_fp32(x_ptr + offsets, inside)
        if BIAS:
            x += load_fp32(bias_ptr + offsets % cols, inside)
        dx = dx * gelu_slope(x)
    # The same seed and the same `first` as in the forward give the same numbers, whatever BLOCK is:
    # a counter depends on the element only.
    kept = random_levels(tl.load(seed_ptr), first, BLOCK) >= threshold
    store_rounded(dx_ptr + offsets, tl.where(kept, dx, 0.0), inside)


def levels(p: float) -> tuple[int, float]:
    """Return threshold and scale of the dropout probability p.

    Elements whose random number is below the threshold are dropped, the others are multiplied by
    the scale. The scale follows from the rounded probability, so that the mean of y is exact.
    """
    # For example, p = 0.1 drops the 6,554 of 65,536 numbers below 6,554, a share of 0.100006.
    threshold = round(p * LEVELS)
    if threshold == LEVELS:
        return threshold, 0.0  # all are dropped
    return threshold, LEVELS / (LEVELS - threshold)


def launch_dropout(
    x: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    y: Tensor,
    p: float,
    gelu: bool,
    dy: Tensor | None = None,
) -> None:
    """Fill y with the result of dropout, or with a dy fill it with the gradient of x.

    Args:
        x: input, contiguous.
        bias: vector as long as x's last dimension, or None.
        seed: one int64 element.
        y: output of x's shape, contiguous.
        p: probability of dropping an element.
        gelu: whether GeLU precedes dropout.
        dy: gradient of the result, contiguous, or None for the forward pass.
    """
    launch = chosen("dropout", FLAT)
    count = y.numel()
    cols = 1
    # Without a bias the kernel does not use cols, and any number will do.
    if bias is not None:
        bias = bias.contiguous()
        cols = bias.numel()
    threshold, scale = levels(p)
    if dy is None:
        kernel = dropout_kernel
        inputs = [x]
    else:
        kernel = backward_kernel
        inputs = [dy, x]
    launch.start(
        kernel,
        (cdiv(count, launch.block),),
        *inputs,
        bias,
        seed,
        y,
        count,
        cols,
        threshold,
        scale,
        GELU=gelu,
        BIAS=bias is not None,
    )


def _plain_mask(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Return a mask of the elements to keep, from torch's generator.

    It is another mask than that of the kernel, and also the same for equal seeds.
    """
    threshold, _ = levels(p)
    generator = torch.Generator(x.device).manual_seed(int(seed.item()))
    drawn = torch.randint(LEVELS, x.shape, generator=generator, device=x.device)
    return drawn >= threshold


def _plain_sum(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias in the dtype of `reference.wide`."""
    x_wide = reference.wide(x)
    return x_wide if bias is None else x_wide + reference.wide(bias)


@_dispatch.operator("dropout_forward", opaque=True)
def forward_op(x: Tensor, bias: Tensor | None, seed: Tensor, p: float, gelu: bool) -> Tensor:
    """Return dropout of x, or with gelu of GeLU(x + bias), contiguous, in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if _dispatch.idle(x):
        return y
    if not _dispatch.runs_triton(x):
        a = _plain_sum(x, bias)
        if gelu:
            a = reference.gelu(a)
        _, scale = levels(p)
        return y.copy_(torch.where(_plain_mask(x, seed, p), a * scale, 0.0))
    launch_dropout(x, bias, seed, y, p, gelu)
    return y


@_dispatch.operator("dropout_backward", opaque=True)
def backward_op(
    dy: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor, p: float, gelu: bool
) -> Tensor:
    """Return dx, contiguous, in dy's dtype. x and bias are read only with gelu."""
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    if _dispatch.idle(dy):
        return dx
    if not _dispatch.runs_triton(dy):
        _, scale = levels(p)
        g = torch.where(_plain_mask(dy, seed, p), reference.wide(dy) * scale, 0.0)
        if gelu:
            g = g * reference.gelu_slope(_plain_sum(x, bias))
        return dx.copy_(g)
    launch_dropout(x.contiguous(), bias, seed, dx, p, gelu, dy)
    return dx


def _check_p(p: object) -> None:
    """Raise ValueError unless p is a probability."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}; allowed: a probability from 0 to 1")


def _seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Return the seed as one int64 element on the device.

    A seed of None is drawn from torch's global generator of that device.

    Raises:
        ValueError: the seed is not such an element or an integer from 0 to 2⁶³ − 1.
    """
    if seed is None:
        # On the device, so that the host neither copies a number nor waits for one.
        return torch.randint(2**62, (1,), device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise ValueError(
                f"seed is {seed.dtype} of shape {tuple(seed.shape)} on {seed.device}; "
                f"allowed: an int, or one int64 element on {device}"
            )
        return seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}; allowed: an integer from 0 to 2**63 - 1")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


class Dropout(Function):
    """Dropout: `apply(x, seed, p)` → y, with seed one int64 element on x's device.

    Saved for backward: the seed.
    """

    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        return forward_op(x, None, seed, p, False)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        # Without GeLU x is not read. dy stands in for it.
        return backward_op(dy, dy, None, seed, ctx.p, False), None, None


class GeLUDropout(Function):
    """Bias, GeLU and dropout: `apply(x, bias, seed, p)` → dropout(GeLU(x + bias)).

    bias may be None. Saved for backward: x, bias, seed.
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
        # bias is added to every row, so its gradient sums over the rows.
        db = None
        if bias is not None and ctx.needs_input_grad[1]:
            db = sum_over_rows(dx).to(bias.dtype)  # x and bias are added, so they share a gradient
        return dx, db, None, None


def dropout(
    x: Tensor, p: float = 0.5, *, training: bool = True, seed: int | Tensor | None = None
) -> Tensor:
    """Return x with each element set to 0 with probability p, and the others divided by 1 − p.

    The result is differentiable once.

    Args:
        x: tensor of any shape in fp32, fp16 or bf16.
        p: probability, 0 to 1, rounded to a multiple of 2⁻¹⁶. The others are divided by 1 minus the
            rounded number, so that the mean is exact.
        training: whether to drop elements. False returns x.
        seed: integer, or one int64 element on x's device. Equal seeds drop equal elements. None
            draws a seed from torch's generator.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    check("x", x)
    _check_p(p)
    threshold, _ = levels(p)
    if not training or threshold == 0:
        return x
    return apply(Dropout, x, _seed_tensor(seed, x.device), float(p))


def linear_gelu_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    p: float = 0.1,
    *,
    training: bool = True,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Return dropout(GeLU(x weightᵀ + bias)), the first half of a feed-forward layer.

    The matmul is cuBLAS's. Bias, GeLU and dropout then read its result once and write once, where
    torch launches three kernels. Kept for backward are the matmul's result and a seed, but no mask.
    The result is differentiable once in x, weight and bias.

    Args:
        x: tensor (…, D) in fp32, fp16 or bf16; cast under autocast.
        weight: tensor (F, D) of x's dtype; cast under autocast.
        bias: tensor (F) in any of these dtypes, or None. It is added in fp32, and its gradient is
            summed in fp32.
        p: as for `dropout`.
        training: as for `dropout`.
        seed: as for `dropout`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
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
    if not training:
        p = 0.0
    return apply(GeLUDropout, F.linear(x, weight), bias, _seed_tensor(seed, x.device), float(p))


def cost(
    shape: tuple[int, ...], dtype: torch.dtype, *, gelu: bool = False, backward: bool = False
) -> Cost:
    """Return the least work of one pass over the elements, without the matmul.

    Args:
        shape: dimensions of x.
        dtype: dtype of all tensors.
        gelu: whether GeLU precedes dropout.
        backward: whether to count the backward pass instead of the forward pass.
    """
    flops = 13 if gelu else 3
    tensors = 3 if gelu and backward else 2  # with GeLU, backward also reads x
    return Cost.of_elements(shape, dtype, flops, tensors)
