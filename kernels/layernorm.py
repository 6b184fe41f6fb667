"""LayerNorm. Its kernels are those of `rmsnorm.py` with CENTRE; this file adds mean and bias.

Mathematics, per row of D elements:
    m = mean(x),  r = 1/√(mean((x − m)²) + eps),  x̂ = (x − m)·r
    y = x̂·w + b
Backward, from the gradient dy of y:
    dx = r·(w·dy − mean(w·dy) − x̂·mean(w·dy·x̂))
    dw = Σ over rows of dy·x̂,  db = Σ over rows of dy

Shapes: N rows, D columns. x, y (N, D); w, b (D). r and m are one (2, N) fp32 tensor, r first.
Statistics are fp32. The variance comes from the deviations and never from mean(x²) − m², which
cancels where the mean is large. Rows too long for a program's registers merge the moments of their
chunks instead, see `_long_rows.py`. y has x's dtype, or autocast's.
Saved for backward: x, w, r, m.
Bytes: forward reads x and writes y. Backward reads dy and x and writes dx. FLOPs per element: about
7 forward, 12 backward.

Source: Ba, Kiros & Hinton, Layer Normalization (2016).
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import Function, apply
from ._rows import as_rows, autocast_dtype, check, check_positive, check_width, sum_over_rows
from .cost import Cost
from .rmsnorm import launch_backward, launch_forward, plain_backward


def _check(x: object, w: object, b: object, eps: object, *_: object) -> None:
    """Raise TypeError or ValueError for arguments of `forward_op` that do not fit."""
    check("x", x, 1)
    check_width("weight", w, "x", x)
    if b is not None:
        check_width("bias", b, "x", x)
    check_positive("eps", eps)


@_dispatch.operator("layer_norm_forward", _check)
def forward_op(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y (…, D) in `dtype`, and r and m as one (2, N) fp32 tensor."""
    y = x.new_empty(x.shape, dtype=dtype)
    statistics = x.new_empty(2, x.shape[:-1].numel(), dtype=torch.float32)
    if _dispatch.idle(x):
        return y, statistics
    w = w.contiguous()
    if b is not None:
        b = b.contiguous()
    if not _dispatch.runs_triton(x):
        # correction=0: LayerNorm divides by D and not by D − 1.
        variance, mean = torch.var_mean(reference.wide(x), -1, correction=0)
        r = (variance + eps).rsqrt()
        y.copy_(reference.layer_norm(reference.wide(x), w, b, eps))
        statistics.copy_(torch.stack([r.flatten(), mean.flatten()]))
        return y, statistics
    # s is the result of a residual addition. Without one, any pointer will do.
    launch_forward(as_rows(x), None, w, y, y, statistics, eps, False, b)
    return y, statistics


@_dispatch.operator("layer_norm_backward")
def backward_op(
    dy: Tensor, x: Tensor, w: Tensor, statistics: Tensor, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dw, db). db has bias_dtype; without a bias it is an empty tensor."""
    dx = x.new_empty(x.shape)
    if _dispatch.idle(x):
        if bias_dtype is None:
            db = w.new_zeros(0)
        else:
            db = w.new_zeros(w.shape, dtype=bias_dtype)
        return dx, w.new_zeros(w.shape), db
    if not _dispatch.runs_triton(x):
        r, mean = statistics
        dx, dw = plain_backward(dy, None, x, w, mean, r)
        if bias_dtype is None:
            db = w.new_zeros(0)
        else:
            db = sum_over_rows(dy).to(bias_dtype)
        return dx, dw, db
    dw, db = launch_backward(
        as_rows(dy), None, as_rows(x), w.contiguous(), statistics, dx, False, bias_dtype
    )
    # torch operators cannot return None.
    return dx, dw, w.new_empty(0) if db is None else db


class LayerNorm(Function):
    """LayerNorm: `apply(x, weight, bias=None, eps=1e-5)` → y of x's shape.

    Saved for backward: x, weight, and 1/std and mean of each row.
    """

    @staticmethod
    def forward(ctx, x, weight, bias=None, eps=1e-5):
        y, statistics = forward_op(x, weight, bias, eps, autocast_dtype(x))
        ctx.save_for_backward(x, weight, statistics)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, statistics = ctx.saved_tensors
        dx, dw, db = backward_op(dy, x, weight, statistics, ctx.bias_dtype)
        if ctx.bias_dtype is None:
            db = None
        return dx, dw, db, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return (x − mean)/√(variance + eps)·weight + bias, normalised over the last dimension.

    The result is differentiable once in x, weight and bias.

    Args:
        x: tensor (…, D) in fp32, fp16 or bf16, with any strides.
        weight: tensor (D) in any of these dtypes.
        bias: tensor (D) in any of these dtypes, or None.
        eps: number above 0.

    Returns:
        A tensor of x's shape and dtype. Under autocast it has autocast's dtype.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    return apply(LayerNorm, x, weight, bias, eps)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass of LayerNorm with a bias.

    Args:
        shape: dimensions of x.
        dtype: dtype of all tensors.
        backward: whether to count the backward pass instead of the forward pass.
    """
    if backward:
        flops = 12
        tensors = 3  # dy, x, dx
        vectors = 4  # w, dw and db, and b counted as if it were read
    else:
        flops = 7
        tensors = 2  # x, y
        vectors = 2  # w, b
    rows = torch.Size(shape[:-1]).numel()
    vector_bytes = vectors * shape[-1] * dtype.itemsize + 8 * rows  # r and m are fp32
    return Cost.of_elements(shape, dtype, flops, tensors) + Cost(0, vector_bytes)
