"""The operations of this package in plain torch, one kernel launch per line: what fusing saves, and what is right.

Tests compare with these in float64, benchmarks time them as the naive form, and the public
functions use them where Triton cannot run. Statistics and sums are taken in fp32 (float64 for
float64 inputs); results have the input's dtype.

Shapes: x (…, D), any shape where an operation is element-wise; weight and bias (D); logits (N, V),
targets (N).
"""

import math

import torch
from torch import Tensor

GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def wide(x: Tensor) -> Tensor:
    """x in the dtype that statistics are computed in: float64 stays, everything else becomes float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y."""
    return x + y


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_d x[…, d]·weight[d]: (…, D) and (D) → (…)."""
    return (wide(x) * wide(weight)).sum(-1).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks & Gimpel 2016)."""
    x32 = wide(x)
    inner = GELU_SCALE * (x32 + GELU_CUBIC * x32 * x32 * x32)
    return (0.5 * x32 * (1 + torch.tanh(inner))).to(x.dtype)


def gelu_slope(x: Tensor) -> Tensor:
    """dGeLU/dx in the dtype of `wide`; |x| > 30 is flat, and kept from overflowing."""
    x32 = wide(x).clamp(-30, 30)
    tanh = torch.tanh(GELU_SCALE * (x32 + GELU_CUBIC * x32 * x32 * x32))
    return 0.5 * (1 + tanh) + 0.5 * x32 * (1 - tanh * tanh) * GELU_SCALE * (
        1 + 3 * GELU_CUBIC * x32 * x32
    )


def softmax(x: Tensor) -> Tensor:
    """exp(x − max) / Σ exp(x − max) over the last dimension; a row of −inf only becomes NaN, as in torch.

    Whatever is subtracted cancels, so the maximum needs no gradient, which would be half of the
    backward's time.
    """
    x32 = wide(x)
    powered = torch.exp(x32 - x32.detach().amax(-1, keepdim=True))
    return (powered / powered.sum(-1, keepdim=True)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean)/√(var + eps)·weight + bias over the last dimension (Ba et al.

    2016), the biased variance.
    """
    x32 = wide(x)
    centred = x32 - x32.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * wide(weight)
    return (normed if bias is None else normed + wide(bias)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x/√(mean(x²) + eps)·weight over the last dimension (Zhang & Sennrich 2019)."""
    x32 = wide(x)
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), the norm followed by SiLU where `activation` is "silu"."""
    total = (x + residual).to(residual.dtype)
    y = rms_norm(total, weight, eps)
    return (silu(y) if activation == "silu" else y), total


def silu(x: Tensor) -> Tensor:
    """x·sigmoid(x)."""
    x32 = wide(x)
    return (x32 * torch.sigmoid(x32)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up (Shazeer 2020), rounded once."""
    return (wide(gate) * torch.sigmoid(wide(gate)) * wide(up)).to(gate.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x_i, x_{i+D/2}) turned by its position's angle (Su et al. 2021).

    x (…, T, D); cos and sin (T, D): the two halves of cos are equal, those of sin have opposite
    signs, − first.
    """
    return (wide(x) * cos + wide(x).roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def dropout(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x/(1 − p) where `keep` is true, else 0."""
    return torch.where(keep, wide(x) / (1 - p), 0.0).to(x.dtype)


EPILOGUES = {
    None: lambda y: y,
    "relu": torch.relu,
    "leaky_relu": lambda y: torch.where(y > 0, y, 0.01 * y),
    "gelu": gelu,
    "silu": silu,
    "rms_norm": lambda y: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5),
}


def epilogue_backward(dy: Tensor, h: Tensor, epilogue: str) -> Tensor:
    """Return the gradient of h from that of EPILOGUES[epilogue](h), in the dtype of `wide`."""
    g, h32 = wide(dy), wide(h)
    if epilogue == "rms_norm":
        r = torch.rsqrt(h32.square().mean(-1, keepdim=True) + 1e-5)
        return r * (g - h32 * r * (g * h32 * r).mean(-1, keepdim=True))
    if epilogue == "gelu":
        return g * gelu_slope(h32)
    if epilogue == "silu":
        sigmoid = torch.sigmoid(h32)
        return g * sigmoid * (1 + h32 * (1 - sigmoid))
    return torch.where(h32 > 0, g, g * (0.01 if epilogue == "leaky_relu" else 0.0))


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, epilogue: str | None = None) -> Tensor:
    """epilogue(a b + bias): (M, K), (K, N), (N) → (M, N); the epilogue acts on the unrounded result of the matmul."""
    product = wide(a) @ wide(b)
    return EPILOGUES[epilogue](product if bias is None else product + wide(bias)).to(a.dtype)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """−Σ_v q_v·log softmax(logits)_v with q = (1 − ε)·onehot(target) + ε/V, in fp32.

    Rows whose target is `ignore_index` count nothing; the mean of none is 0. Other targets outside
    [0, V) give NaN.
    """
    # log Σ exp is lost beside large logits
    shifted = wide(logits) - wide(logits).detach().amax(-1, keepdim=True)
    log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
    kept = targets != ignore_index
    within = (targets >= 0) & (targets < logits.shape[-1])
    picked = -log_p.gather(-1, torch.where(within, targets, 0)[:, None].long())[:, 0]
    loss = picked = torch.where(within, picked, float("nan"))
    if label_smoothing:
        loss = (1 - label_smoothing) * picked - label_smoothing * log_p.mean(-1)
    loss = torch.where(kept, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum().clamp(min=1)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    """Cross-entropy of the logits x weightᵀ: (N, D), (V, D), (N) → scalar.

    The logits stand whole in memory.
    """
    return cross_entropy(x @ weight.T, targets, **options)


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place (Loshchilov & Hutter 2019): decay, moments, bias correction, update.

    In float64, rounded once at the end: in fp32 a β₂ of 0.99999 would be off by 0.14 % of 1 − β₂.
    """
    p, g, m, v = (t.double() for t in (parameter, gradient, first, second))
    p = p * (1 - lr * weight_decay)
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    scale = v.sqrt() / math.sqrt(1 - betas[1] ** step) + eps
    parameter.copy_(p - lr / (1 - betas[0] ** step) * m / scale)
    first.copy_(m)
    second.copy_(v)
