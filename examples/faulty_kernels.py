"""18 kernels that pass their author's test and are wrong, with one mistake each.

    distlab kernel examples.faulty_kernels:row_stride_ignored --as softmax

examines one and prints the smallest input that shows the mistake. All are right on the input that
their author tried: contiguous fp32 tensors of normal values, whose sizes are powers of two. Eight
mistakes are common in tutorials and course notes. The others were reported in public threads,
which the docstrings name. All code is written for this lesson. A comment `MISTAKE` marks the wrong
line and says what is right. To copy a right kernel, go to `kernels/`. The lesson, with a
table of the 18, is docs/learn/tutorial_kernels.md.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # elements of a tile's side, so that small inputs have several tiles
EPS = 1e-5
IGNORED = -100  # target that counts nowhere


# Tiles, masks and pointers


@triton.jit
def grouped_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, BLOCK: tl.constexpr
):
    """Compute c (M, N) = a b. A program computes one tile, in groups of 2 rows of tiles."""
    GROUP: tl.constexpr = 2
    program = tl.program_id(0)
    programs_in_group = GROUP * tl.cdiv(N, BLOCK)
    first_row = program // programs_in_group * GROUP
    # MISTAKE: the last group may have one row of tiles. Its size is min(rows that are left, GROUP).
    tile_row = first_row + program % GROUP
    tile_col = program % programs_in_group // GROUP
    rows = tile_row * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tile_col * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a_inside = (rows < M) & (k[None, :] < K)
        b_inside = (k[:, None] < K) & (cols < N)
        a = tl.load(a_ptr + rows * a_row + k[None, :] * a_col, mask=a_inside, other=0.0)
        b = tl.load(b_ptr + k[:, None] * b_row + cols * b_col, mask=b_inside, other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + rows * N + cols, total, mask=(rows < M) & (cols < N))


def small_last_group(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b. A group of tiles is taken to have 2 rows of tiles.

    With an odd number of such rows, some programs compute tiles outside of the result, and other
    tiles are never written.
    """
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(a.shape[0], BLOCK) * triton.cdiv(b.shape[1], BLOCK)
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    grouped_matmul_kernel[(tiles,)](a, b, c, *sizes, *a.stride(), *b.stride(), BLOCK=BLOCK)
    return c


@triton.jit
def wrapping_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, BLOCK: tl.constexpr
):
    """Compute c (M, N) = a b. A program computes one tile."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        # MISTAKE: modulo K is harmless for rows and columns, whose results are not stored. Here it
        # adds the first products again.
        k = (start + tl.arange(0, BLOCK)) % K
        a = tl.load(a_ptr + rows * a_row + k[None, :] * a_col, mask=rows < M, other=0.0)
        b = tl.load(b_ptr + k[:, None] * b_row + cols * b_col, mask=cols < N, other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + rows * N + cols, total, mask=(rows < M) & (cols < N))


def wrapped_offsets(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b. Offsets beyond K wrap around instead of being masked.

    If K is not a multiple of 32, the first products are added again.
    """
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(a.shape[0], BLOCK), triton.cdiv(b.shape[1], BLOCK))
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    wrapping_matmul_kernel[grid](a, b, c, *sizes, *a.stride(), *b.stride(), BLOCK=BLOCK)
    return c


@triton.jit
def zero_masked_softmax_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    """Compute y = softmax(x), a row per program."""
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    # MISTAKE: a masked lane must be −inf. exp(0 − top) is not 0 and is added to the sum.
    x = tl.load(x_ptr + tl.program_id(0) * D + columns, mask=inside, other=0.0).to(tl.float32)
    power = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + tl.program_id(0) * D + columns, power / tl.sum(power, 0), mask=inside)


def masked_lanes_are_zero(x: Tensor) -> Tensor:
    """Return softmax(x). Lanes beyond the end of a row are loaded as 0.

    A row whose size is not a power of two has such lanes.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows = x.numel() // width
    zero_masked_softmax_kernel[(rows,)](
        x.contiguous(), y, width, BLOCK=triton.next_power_of_2(width)
    )
    return y


@triton.jit
def online_sum_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    """Compute y = log Σ exp(x), a row per program, which reads the row once, in blocks."""
    top = float("-inf")
    total = 0.0
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        place = x_ptr + tl.program_id(0) * D + columns
        x = tl.load(place, mask=columns < D, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
        # MISTAKE: the total so far is relative to an earlier maximum. It must be multiplied by
        # exp(earlier maximum − new maximum).
        total += tl.sum(tl.exp(x - top), 0)
    tl.store(y_ptr + tl.program_id(0), top + tl.log(total))


@torch.no_grad()  # the forward alone
def sum_not_rescaled(x: Tensor) -> Tensor:
    """Return softmax(x) by blocks of 64. The sum is not rescaled when the maximum grows.

    A row of one block is right, and so is a row whose first block holds the maximum.
    """
    log_sum = torch.empty(*x.shape[:-1], 1, device=x.device)
    online_sum_kernel[(log_sum.numel(),)](x.contiguous(), log_sum, x.shape[-1], BLOCK=64)
    return torch.exp(x.float() - log_sum).to(x.dtype)


@triton.jit
def block_means_kernel(x_ptr, mean_ptr, D, BLOCK: tl.constexpr):
    """Compute the mean of a row per program, which reads the row in blocks."""
    mean = 0.0
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        place = x_ptr + tl.program_id(0) * D + columns
        x = tl.load(place, mask=columns < D, other=0.0).to(tl.float32)
        # MISTAKE: a block counts by its number of elements, and the last one may have fewer.
        mean += tl.sum(x, 0) / tl.minimum(D - start, BLOCK) / tl.cdiv(D, BLOCK)
    tl.store(mean_ptr + tl.program_id(0), mean)


@torch.no_grad()  # the forward alone
def equal_weights_of_blocks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return layer_norm(x). The mean is the mean of the means of blocks of 64.

    If the size is not a multiple of 64, the elements of the last block count too much.
    """
    mean = torch.empty(*x.shape[:-1], 1, device=x.device)
    block_means_kernel[(mean.numel(),)](x.contiguous(), mean, x.shape[-1], BLOCK=64)
    deviation = x.float() - mean
    variance = (deviation * deviation).mean(-1, keepdim=True)
    y = deviation * torch.rsqrt(variance + EPS) * weight.float() + bias.float()
    return y.to(x.dtype)


@triton.jit
def padded_layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, y_ptr, D, eps, BLOCK: tl.constexpr):
    """Compute y = LayerNorm(x), a row per program."""
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    row = tl.program_id(0) * D
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / D
    # MISTAKE: a padded lane is 0 − mean here, and its square is added to the variance.
    deviation = x - mean
    variance = tl.sum(deviation * deviation, 0) / D
    y = deviation / tl.sqrt(variance + eps) * weight + bias
    tl.store(y_ptr + row + columns, y, mask=inside)


def padding_in_variance(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return layer_norm(x). Lanes beyond the end of a row count in the variance.

    A row whose size is not a power of two has such lanes.
    https://github.com/triton-lang/triton/issues/9838
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows = x.numel() // width
    padded_layer_norm_kernel[(rows,)](
        x.contiguous(), weight, bias, y, width, EPS, BLOCK=triton.next_power_of_2(width)
    )
    return y


@triton.jit
def softmax_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    """Compute y = softmax(x), a row per program, for contiguous rows of a contiguous tensor."""
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    row = tl.program_id(0) * D
    x = tl.load(x_ptr + row + columns, mask=inside, other=float("-inf")).to(tl.float32)
    power = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row + columns, power / tl.sum(power, 0), mask=inside)


def row_stride_ignored(x: Tensor) -> Tensor:
    """Return softmax(x). Rows are taken to begin D elements apart.

    Rows that are slices of wider rows begin further apart.
    https://github.com/Dao-AILab/quack/issues/88
    """
    # MISTAKE: this test is about elements within a row. The stride between rows may still differ
    # from D. Pass x.stride(0) to the kernel.
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows = x.numel() // width
    softmax_kernel[(rows,)](x, y, width, BLOCK=triton.next_power_of_2(width))
    return y


@triton.jit
def add_kernel(x_ptr, y_ptr, total_ptr, count, BLOCK: tl.constexpr):
    """Compute total = x + y, a block of elements per program."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(total_ptr + offsets, x + y, mask=inside)


def transposed_as_contiguous(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y. Elements are taken to be stored in the order of their indices.

    A transposed tensor has them in another order.
    https://github.com/flagos-ai/FlagGems/issues/5392
    """
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # MISTAKE: the kernel needs the strides of x and y, or x.contiguous() and y.contiguous().
    add_kernel[(triton.cdiv(x.numel(), 256),)](x, y, total, x.numel(), BLOCK=256)
    return total


@triton.jit
def gelu_backward_kernel(dy_ptr, x_ptr, dx_ptr, count, BLOCK: tl.constexpr):
    """Compute dx = dy · GeLU'(x), a block of elements per program."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    # GeLU is x · sigmoid(u) with u = 1.5957691 · (x + 0.044715 x³).
    u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    slope = 1.5957691216057308 * (1 + 0.134145 * x * x)
    gate = tl.sigmoid(u)
    dx = dy * (gate + x * gate * tl.sigmoid(-u) * slope)
    tl.store(dx_ptr + offsets, dx, mask=inside)


class StridedUpstream(torch.autograd.Function):
    """GeLU. The backward reads the upstream gradient as if it were contiguous.

    The gradient of `result.T` or of `result.sum()` is not.
    https://github.com/unslothai/unsloth/pull/10617
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Return GeLU(x)."""
        x = x.contiguous()
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        """Return dx."""
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        # MISTAKE: x is contiguous, but dy need not be. Pass dy.contiguous().
        gelu_backward_kernel[(triton.cdiv(x.numel(), 256),)](dy, x, dx, x.numel(), BLOCK=256)
        return dx


# Numbers


def sums_in_fp16(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b. The sum has the dtype of the inputs.

    For fp16 each of the K additions is rounded to 11 bits, which shows if K is large.
    """
    # MISTAKE: a sum of fp16 or bf16 elements belongs in fp32, and is rounded once at the end.
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[None, k, :]
    return total


def square_minus_square(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return layer_norm(x). The variance is E[x²] − E[x]².

    With a large mean that is the difference of two large numbers, and rounding is all of it.
    """
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    # MISTAKE: the variance is the mean of (x − mean)².
    variance = ((wide * wide).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
    normal = (wide - mean) * torch.rsqrt(variance + EPS)
    return (normal * weight.float() + bias.float()).to(x.dtype)


def exp_overflow(x: Tensor) -> Tensor:
    """Return GeLU(x), whose tanh is written with exp(u) / (exp(u) + 1).

    From x = 10 on exp(u) is infinite, and the result is NaN.
    """
    wide = x.float()
    power = torch.exp(1.5957691216057308 * (wide + 0.044715 * wide**3))
    # MISTAKE: ∞ / ∞. 1 / (1 + exp(−u)) is the same, and right for every u.
    return (wide * (power / (power + 1))).to(x.dtype)


def mean_over_all_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return cross_entropy(logits, targets). The sum is divided by the number of all tokens.

    If a target is −100, it must not be counted.
    """
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    # MISTAKE: the mean is over the targets that are not −100. Divide by their number.
    return total / targets.numel()


def maximum_from_zero(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Return attention(q, k, v) by blocks of 32 keys. The running maximum begins at 0.

    If all logits of a query are far below 0, their exponentials underflow, and the sum is 0.
    https://github.com/Dao-AILab/flash-attention/issues/2082
    """
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    length, width = q.shape[-2:]
    positions = torch.arange(length, device=q.device)
    # MISTAKE: the maximum of no logits is −inf. Only then do the first logits decide it.
    top = torch.zeros(*q.shape[:-1], 1, device=q.device)
    total = torch.zeros_like(top)
    result = torch.zeros_like(q)
    for start in range(0, length, BLOCK):
        block = slice(start, start + BLOCK)
        logits = q @ k[..., block, :].mT / math.sqrt(width)
        if is_causal:
            is_later = positions[None, block] > positions[:, None]
            logits = logits.masked_fill(is_later, float("-inf"))
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        power = torch.exp(logits - new_top)
        scale = torch.exp(top - new_top)
        total = total * scale + power.sum(-1, keepdim=True)
        result = result * scale + power @ v[..., block, :]
        top = new_top
    return (result / total).to(dtype)


def finite_sentinel(x: Tensor) -> Tensor:
    """Return softmax(x). A row whose logits are all below −1e4 is taken to be masked completely.

    Such a row is a row like any other, and its result is not 0.
    https://github.com/flashinfer-ai/flashinfer/issues/4267
    """
    top = x.float().amax(-1, keepdim=True)
    power = torch.exp(x.float() - top)
    result = power / power.sum(-1, keepdim=True)
    # MISTAKE: only a row of −inf is masked completely.
    return result.masked_fill(top < -1e4, 0.0).to(x.dtype)


class SmallGradientsDropped(torch.autograd.Function):
    """Cross-entropy of x @ weight.T. The backward leaves out gradients of logits below 2⁻¹².

    With many tokens or classes, most gradients are that small, and their sum is not.
    https://github.com/apple/ml-cross-entropy/issues/14
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of the losses of the targets that are not −100."""
        ctx.save_for_backward(x, weight, targets)
        return F.cross_entropy(x.float() @ weight.float().T, targets, ignore_index=IGNORED).to(
            x.dtype
        )

    @staticmethod
    def backward(ctx, dloss: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of weight."""
        x, weight, targets = ctx.saved_tensors
        is_counted = targets != IGNORED
        dlogits = torch.softmax(x.float() @ weight.float().T, -1)
        dlogits -= F.one_hot(targets.clamp(min=0), weight.shape[0])
        dlogits = dlogits * is_counted[:, None] / is_counted.sum().clamp(min=1)
        # MISTAKE: each of these gradients is small, and their sum is not. Leave out none.
        dlogits = torch.where(dlogits.abs() < 2**-12, 0.0, dlogits) * dloss.float()
        return (dlogits @ weight.float()).to(x.dtype), (dlogits.T @ x.float()).to(x.dtype), None


class AllIgnored(torch.autograd.Function):
    """Cross-entropy. The gradient is divided by the number of targets that are not −100.

    If all targets are −100, that number is 0, and the gradient is NaN instead of 0.
    https://github.com/ROCm/aiter/pull/5165
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of the losses of the targets that are not −100."""
        ctx.save_for_backward(logits, targets)
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED).to(logits.dtype)

    @staticmethod
    def backward(ctx, dloss: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        logits, targets = ctx.saved_tensors
        is_counted = targets != IGNORED
        dlogits = torch.softmax(logits.float(), -1)
        dlogits -= F.one_hot(targets.clamp(min=0), logits.shape[1])
        # MISTAKE: 0 / 0 if no target counts. Divide by at least 1.
        dlogits = dlogits * is_counted[:, None] / is_counted.sum()
        return (dlogits * dloss.float()).to(logits.dtype), None


_results: dict[tuple, Tensor] = {}


def cached_by_shape(x: Tensor, weight: Tensor) -> Tensor:
    """Return rms_norm(x). The result of an earlier call on the same shape is returned again.

    A benchmark that calls a kernel on one input does not notice.
    https://github.com/gpu-mode/reference-kernels/issues/148
    """
    # MISTAKE: a result belongs to values, not to a shape. Compute it in each call.
    key = (x.shape, x.dtype, x.device)
    if key not in _results:
        _results[key] = F.rms_norm(x, weight.shape, weight, EPS).detach()
    return _results[key].clone()
