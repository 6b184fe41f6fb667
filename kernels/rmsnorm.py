"""RMSNorm, alone and fused with what stands around it in a Transformer block: a residual addition before, SiLU after.

Math, per row:  s = x + residual (or x),  r = 1/√(mean(s²) + eps),  y = f(s·r·w), f the identity or SiLU.
    g = dy·f′(s·r·w);  ds = r·(w·g − ŝ·mean(w·g·ŝ)) + what arrives for s itself, ŝ = s·r;  dw = Σ_rows g·ŝ.

Shapes: `N` rows, `D` columns: x, residual, s, y (N, D); w (D); r (N) fp32.
Bytes: forward x and y once (with a residual x, residual, s, y); backward dy, s and ds once.
FLOPs: about 4 per element forward, 9 backward.
Saved for backward: s (x itself where there is no residual), w, r. Statistics in fp32; y in x's dtype or autocast's.

The kernels are LayerNorm's, too: `_norm.py`.

Source: Zhang & Sennrich, Root Mean Square Layer Normalization (2019).
"""

import torch
from torch import Tensor
from torch.autograd import Function

from . import _dispatch, _triton, reference
from ._autograd import first_order
from ._norm import launch_backward, launch_forward
from ._rows import (
    DTYPES,
    as_rows,
    autocast_dtype,
    check,
    check_like,
    check_positive,
    check_width,
    sum_over_rows,
)
from .cost import Cost


def _check(x: object, residual: object, w: object, eps: object, *_: object) -> None:
    check("x", x, 1)
    if residual is not None:
        check_like("residual", residual, "x", x, dtype=False)
    check_width("weight", w, "x", x)
    check_positive("eps", eps)


@_dispatch.operator("rms_norm_forward", _check)
def forward_op(x: Tensor, residual: Tensor | None, w: Tensor, eps: float, silu: bool,
               dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (…, D) → y in `dtype`, s (empty without a residual), r (N) fp32."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    s = x.new_empty(0) if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    r = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
    if _dispatch.idle(x):
        return y, s, r
    if not _triton.runs_triton(x):
        total = x if residual is None else s.copy_(x + residual)
        normed = reference.rms_norm(reference.wide(total), w, eps)
        y.copy_(reference.silu(normed) if silu else normed)
        return y, s, r.copy_(torch.rsqrt(reference.wide(total).square().mean(-1) + eps).flatten())
    residual = None if residual is None else as_rows(residual)
    launch_forward(as_rows(x), residual, w.contiguous(), y, s, r, eps, silu)
    return y, s, r


@_dispatch.operator("rms_norm_backward")
def backward_op(dy: Tensor, dtotal: Tensor | None, s: Tensor, w: Tensor, r: Tensor,
                silu: bool) -> tuple[Tensor, Tensor]:
    """(ds, dw) from the gradient of y and, where there was a residual, of s."""
    ds = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    if _dispatch.idle(s):
        return ds, w.new_zeros(w.shape)
    if not _triton.runs_triton(s):
        return _plain_backward(dy, dtotal, s, w, r, silu)
    dtotal = None if dtotal is None else dtotal.contiguous()
    dw, _ = launch_backward(as_rows(dy), dtotal, as_rows(s), w.contiguous(), None, r, ds, silu, None)
    return ds, dw


def _plain_backward(dy, dtotal, s, w, r, silu):
    normed, g, w32 = reference.wide(s) * r.view(*s.shape[:-1], 1), reference.wide(dy), reference.wide(w)
    if silu:
        sigmoid = torch.sigmoid(normed * w32)
        g = g * sigmoid * (1 + normed * w32 * (1 - sigmoid))
    dw = sum_over_rows(g * normed)
    ds = (g * w32 - normed * (g * w32 * normed).mean(-1, keepdim=True)) * r.view(*s.shape[:-1], 1)
    return (ds if dtotal is None else ds + dtotal).to(s.dtype), dw.to(w.dtype)


class RMSNorm(Function):
    """`apply(x, weight, eps=1e-5)` → y of x's shape. Saved: x, weight, and 1/rms of each row."""

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5):
        y, _, r = forward_op(x, None, weight, eps, False, autocast_dtype(x))
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        return *backward_op(dy, None, x, weight, r, False), None


class RMSNormPyTorch(Function):
    """The same in plain torch, on any device; float64 too, for `gradcheck`. `apply(x, weight, eps=1e-5)`."""

    @staticmethod
    def forward(ctx, x, weight, eps=1e-5):
        check("x", x, 1, (*DTYPES, torch.float64))
        check_width("weight", weight, "x", x, (*DTYPES, torch.float64))
        check_positive("eps", eps)
        r = torch.rsqrt(reference.wide(x).square().mean(-1) + eps)
        ctx.save_for_backward(x, weight, r)
        return reference.rms_norm(x, weight, eps).to(autocast_dtype(x))

    @staticmethod
    @first_order
    def backward(ctx, dy):
        return *_plain_backward(dy, None, *ctx.saved_tensors, False), None


class AddRMSNorm(Function):
    """`apply(x, residual, weight, eps=1e-5, activation=None)` → (y, s). Saved: s, weight, and 1/rms of each row."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps=1e-5, activation=None):
        if activation not in (None, "silu"):
            raise ValueError(f"activation is {activation!r}; allowed: None, 'silu'")
        y, s, r = forward_op(x, residual, weight, eps, activation == "silu", autocast_dtype(x))
        ctx.save_for_backward(s, weight, r)
        ctx.silu = activation == "silu"
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    @first_order
    def backward(ctx, dy, dtotal):
        s, weight, r = ctx.saved_tensors
        if dy is None:
            ds, dw = dtotal, None
        else:
            ds, dw = backward_op(dy, dtotal, s, weight, r, ctx.silu)
        return ds, ds, dw, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x/√(mean(x²) + eps)·weight over the last dimension; differentiable in x and weight.

    Args:
        x: (…, D), fp32, fp16 or bf16, any strides.
        weight: (D), any of these dtypes.
        eps: above 0.

    Returns:
        x's shape and dtype; under autocast autocast's dtype, because matmuls follow.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    return RMSNorm.apply(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5,
                 activation: str | None = None) -> tuple[Tensor, Tensor]:
    """(y, s): s = x + residual in residual's dtype, y = rms_norm(s), followed by SiLU where activation is "silu".

    One pass over memory instead of three or four; arguments and errors as for `rms_norm`.
    """
    return AddRMSNorm.apply(x, residual, weight, eps, activation)


def cost(shape: tuple[int, ...], dtype: torch.dtype, *, residual: bool = False, backward: bool = False) -> Cost:
    """Least FLOPs and bytes; backward includes the gradient of s where there was a residual."""
    count, cols = torch.Size(shape).numel(), shape[-1]
    tensors = (3 if backward else 2) + (residual if backward else 2 * residual)
    vectors = cols * dtype.itemsize * (2 if backward else 1) + 4 * count // max(cols, 1)
    return Cost((9 if backward else 4) * count, tensors * count * dtype.itemsize + vectors)
