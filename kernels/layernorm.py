"""LayerNorm.

Math, per row:  m = mean(x),  r = 1/√(mean((x − m)²) + eps),  x̂ = (x − m)·r,  y = x̂·w + b.
    dx = r·(w·dy − mean(w·dy) − x̂·mean(w·dy·x̂)),  dw = Σ_rows dy·x̂,  db = Σ_rows dy.

Shapes: `N` rows, `D` columns: x, y (N, D); w, b (D); r and m in one tensor (2, N) fp32. Bytes:
forward x and y once; backward dy, x and dx once. FLOPs: about 7 per element forward, 12 backward.
Saved for backward: x, w, r, m. Statistics in fp32, the variance from deviations, never as mean(x²)
− m²; y in x's dtype.

The kernels are RMSNorm's, too: `rmsnorm.py`; of longer rows `_long_rows.py`, with Welford's update
by chunks.

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
    check("x", x, 1)
    check_width("weight", w, "x", x)
    if b is not None:
        check_width("bias", b, "x", x)
    check_positive("eps", eps)


@_dispatch.operator("layer_norm_forward", _check)
def forward_op(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (…, D) → y in `dtype`, r and m as one (2, N) fp32."""
    y = x.new_empty(x.shape, dtype=dtype)
    rm = x.new_empty(2, x.shape[:-1].numel(), dtype=torch.float32)
    if _dispatch.idle(x):
        return y, rm
    w, b = w.contiguous(), None if b is None else b.contiguous()
    if not _dispatch.runs_triton(x):
        x32 = reference.wide(x)
        variance, mean = (stat.flatten() for stat in torch.var_mean(x32, -1, correction=0))
        return y.copy_(reference.layer_norm(x32, w, b, eps)), rm.copy_(
            torch.stack([(variance + eps).rsqrt(), mean])
        )
    launch_forward(as_rows(x), None, w, y, y, rm, eps, False, b)
    return y, rm


@_dispatch.operator("layer_norm_backward")
def backward_op(
    dy: Tensor, x: Tensor, w: Tensor, rm: Tensor, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db): db in bias_dtype, empty without a bias."""
    dx = x.new_empty(x.shape)
    if _dispatch.idle(x):
        return (
            dx,
            w.new_zeros(w.shape),
            w.new_zeros(0 if bias_dtype is None else w.shape, dtype=bias_dtype),
        )
    if not _dispatch.runs_triton(x):
        db = w.new_zeros(0) if bias_dtype is None else sum_over_rows(dy).to(bias_dtype)
        return *plain_backward(dy, None, x, w, rm[1], rm[0]), db
    dw, db = launch_backward(
        as_rows(dy), None, as_rows(x), w.contiguous(), rm, dx, False, bias_dtype
    )
    return dx, dw, w.new_empty(0) if db is None else db


class LayerNorm(Function):
    """`apply(x, weight, bias=None, eps=1e-5)` → y of x's shape.

    Saved: x, weight, 1/std and mean of each row.
    """

    @staticmethod
    def forward(ctx, x, weight, bias=None, eps=1e-5):
        y, rm = forward_op(x, weight, bias, eps, autocast_dtype(x))
        ctx.save_for_backward(x, weight, rm)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        dtype = ctx.bias_dtype
        dx, dw, db = backward_op(dy, *ctx.saved_tensors, dtype)
        return dx, dw, None if dtype is None else db, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean)/√(var + eps)·weight + bias over the last dimension; differentiable in x, weight and bias.

    Args:
        x: (…, D), fp32, fp16 or bf16, any strides.
        weight, bias: (D), any of these dtypes.
        eps: above 0.

    Returns:
        x's shape and dtype; under autocast autocast's dtype.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return apply(LayerNorm, x, weight, bias, eps)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes, with a bias."""
    vectors = 2 * shape[-1] * dtype.itemsize * (1 + backward) + 8 * torch.Size(shape[:-1]).numel()
    return Cost.of_elements(shape, dtype, 12 if backward else 7, 2 + backward) + Cost(0, vectors)
