"""Operations of this package in plain torch, with one kernel launch per line.

They show what fusion saves, and they define what is right. Tests compare kernels with them in
float64, benchmarks time them as the naive form, and the public functions use them where Triton
cannot run. Statistics and sums are fp32, or float64 for float64 inputs. Results have the input's
dtype.

Shapes: x (…, D), any shape where an operation is element-wise. weight and bias (D). logits (N, V).
targets (N).
"""

import math

import torch
from torch import Tensor

GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype that statistics are computed in: float64 for float64, else float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y."""
    return x + y


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Return Σ_d x[…, d]·weight[d], (…), for x (…, D) and weight (D)."""
    return (wide(x) * wide(weight)).sum(-1).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks & Gimpel 2016)."""
    x32 = wide(x)
    inner = GELU_SCALE * (x32 + GELU_CUBIC * x32 * x32 * x32)
    return (0.5 * x32 * (1 + torch.tanh(inner))).to(x.dtype)


def gelu_slope(x: Tensor) -> Tensor:
    """Return dGeLU/dx in the dtype of `wide`."""
    # For |x| > 30 the slope is 0 or 1 in fp32, and x² could overflow.
    x32 = wide(x).clamp(-30, 30)
    tanh = torch.tanh(GELU_SCALE * (x32 + GELU_CUBIC * x32 * x32 * x32))
    # The derivative of x + 0.044715·x³, the inner factor of the chain rule.
    cubic_slope = 1 + 3 * GELU_CUBIC * x32 * x32
    return 0.5 * (1 + tanh) + 0.5 * x32 * (1 - tanh * tanh) * GELU_SCALE * cubic_slope


def softmax(x: Tensor) -> Tensor:
    """Return exp(x − max)/Σ exp(x − max), taken over the last dimension.

    A row that is −inf everywhere gives NaN, as in torch.
    """
    x32 = wide(x)
    # Any number that is subtracted cancels, so the maximum needs no gradient. Computing one would
    # take half of the backward's time.
    powered = torch.exp(x32 - x32.detach().amax(-1, keepdim=True))
    return (powered / powered.sum(-1, keepdim=True)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return (x − mean)/√(variance + eps)·weight + bias over the last dimension.

    The variance is the biased one (Ba et al. 2016).
    """
    x32 = wide(x)
    centred = x32 - x32.mean(-1, keepdim=True)
    # The variance from deviations: mean(x²) − mean² cancels for a large mean.
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * wide(weight)
    if bias is not None:
        y = y + wide(bias)
    return y.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return x/√(mean(x²) + eps)·weight over the last dimension (Zhang & Sennrich 2019)."""
    x32 = wide(x)
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y, s) with s = x + residual and y = rms_norm(s).

    With the activation "silu", y = silu(rms_norm(s)).
    """
    total = (x + residual).to(residual.dtype)
    y = rms_norm(total, weight, eps)
    if activation == "silu":
        y = silu(y)
    return y, total


def silu(x: Tensor) -> Tensor:
    """Return x·sigmoid(x)."""
    x32 = wide(x)
    return (x32 * torch.sigmoid(x32)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate)·up (Shazeer 2020), rounded once."""
    gate32 = wide(gate)
    return (gate32 * torch.sigmoid(gate32) * wide(up)).to(gate.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each pair (x_i, x_{i+D/2}) rotated by its position's angle (Su et al. 2021).

    Args:
        x: tensor (…, T, D).
        cos: tensor (T, D) of two equal halves.
        sin: tensor (T, D) of two halves with opposite signs, the negative one first.
    """
    x32 = wide(x)
    # x_{i+D/2} for the first half and x_{i−D/2} for the second. The signs are in the sine's table.
    partners = x32.roll(x.shape[-1] // 2, -1)
    return (x32 * cos + partners * sin).to(x.dtype)


def dropout(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Return x/(1 − p) where `keep` is true, and 0 elsewhere."""
    return torch.where(keep, wide(x) / (1 - p), 0.0).to(x.dtype)


def _identity(y: Tensor) -> Tensor:
    """Return y."""
    return y


def _leaky_relu(y: Tensor) -> Tensor:
    """Return y, multiplied by 0.01 where it is not positive."""
    return torch.where(y > 0, y, 0.01 * y)


def _unweighted_rms_norm(y: Tensor) -> Tensor:
    """Return y/√(mean(y²) + 1e-5) over the last dimension."""
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)


# Name of an epilogue of `matmul` → the function f that it applies.
EPILOGUES = {
    None: _identity,
    "relu": torch.relu,
    "leaky_relu": _leaky_relu,
    "gelu": gelu,
    "silu": silu,
    "rms_norm": _unweighted_rms_norm,
}


def epilogue_backward(dy: Tensor, h: Tensor, epilogue: str) -> Tensor:
    """Return the gradient of h from the gradient dy of EPILOGUES[epilogue](h).

    The result has the dtype of `wide`.
    """
    g = wide(dy)
    h32 = wide(h)
    if epilogue == "rms_norm":
        r = torch.rsqrt(h32.square().mean(-1, keepdim=True) + 1e-5)
        normed = h32 * r
        # r also depends on h: ∂r/∂h_j = −r³·h_j/D gives the second term, as in rmsnorm.py.
        return r * (g - normed * (g * h32 * r).mean(-1, keepdim=True))
    if epilogue == "gelu":
        return g * gelu_slope(h32)
    if epilogue == "silu":
        sigmoid = torch.sigmoid(h32)
        return g * sigmoid * (1 + h32 * (1 - sigmoid))
    # torch's relu has slope 0 at h = 0, hence > and not ≥.
    negative_slope = 0.01 if epilogue == "leaky_relu" else 0.0
    return torch.where(h32 > 0, g, g * negative_slope)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, epilogue: str | None = None) -> Tensor:
    """Return epilogue(a b + bias), (M, N), for a (M, K), b (K, N) and bias (N).

    The epilogue is applied before the result is rounded.
    """
    h = wide(a) @ wide(b)
    if bias is not None:
        h = h + wide(bias)
    return EPILOGUES[epilogue](h).to(a.dtype)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return −Σ_v q_v·log softmax(logits)_v in fp32, with q = (1 − ε)·onehot(target) + ε/V.

    Rows whose target is `ignore_index` do not count, and the mean of no rows is 0. Other targets
    outside [0, V) give NaN.
    """
    # Subtract the maximum first: next to large logits log Σ exp would lose its digits.
    logits32 = wide(logits)
    shifted = logits32 - logits32.detach().amax(-1, keepdim=True)
    log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
    kept = targets != ignore_index
    within = (targets >= 0) & (targets < logits.shape[-1])
    # gather must not read outside the row. The result for such rows is overwritten below.
    index = torch.where(within, targets, 0)[:, None].long()
    loss = -log_p.gather(-1, index)[:, 0]
    loss = torch.where(within, loss, float("nan"))
    if label_smoothing:
        # Σ_v q_v·(−log p_v) is (1 − ε) times the target's term plus ε times the mean over all
        # classes.
        loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1)
    loss = torch.where(kept, loss, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / kept.sum().clamp(min=1)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross-entropy of the logits x weightᵀ, for x (N, D), weight (V, D), targets (N).

    All logits are in memory at once.
    """
    return cross_entropy(
        x @ weight.T,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


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
    """Make one AdamW step in place: decay, moments, bias correction, update.

    Args:
        parameter: tensor to update.
        gradient: tensor of the parameter's shape.
        first: first moment in the parameter's shape, updated in place.
        second: second moment in the parameter's shape, updated in place.
        step: number of this step, from 1.
        lr: learning rate.
        betas: β₁ and β₂.
        eps: number added to the root of the second moment.
        weight_decay: λ.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019), Algorithm 2.
    """
    # float64, rounded once at the end: in fp32, 1 − β₂ would be off by 0.14 % for β₂ = 0.99999.
    p = parameter.double()
    g = gradient.double()
    m = first.double()
    v = second.double()
    beta1, beta2 = betas
    p = p * (1 - lr * weight_decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = v.sqrt() / math.sqrt(1 - beta2**step) + eps
    parameter.copy_(p - lr / (1 - beta1**step) * m / denominator)
    first.copy_(m)
    second.copy_(v)
