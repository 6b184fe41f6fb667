"""What the experiments on attention share: inputs, every function that is timed, and the exact result to judge them by.

Causal attention of (1, 1, T, D) or (B, T, D) tensors. Peers are torch's: SDPA with each of its backends, FlexAttention
and the textbook form, eager and compiled.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from distlab.experiment import Options, Record, option
from distlab.report import metric_over_length
from kernels._autograd import first_order
from kernels.flash_attention import FlashAttention2, cost

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v of one shape → o of that shape
BACKENDS = {
    "sdpa": None, "sdpa-math": SDPBackend.MATH, "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
VARIANTS = ("naive", "compiled", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", "ours-compiled-backward",
            "ours-ieee", "ours")  # fmt: skip


@dataclass(frozen=True)
class ShapeOptions(Options):
    """Of a sweep: every head dim × dtype."""

    head_dims: tuple[int, ...] = option((16, 32, 64, 128), "head dims", least=1)
    dtypes: tuple[str, ...] = option(
        ("bfloat16", "float32"), "dtypes", choices=("bfloat16", "float16", "float32")
    )


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: the whole score matrix in memory."""
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _sdpa(backend: SDPBackend | None) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if x.dim() == 4 else x.unsqueeze(1) for x in (q, k, v))
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return lambda q, k, v: run(q, k, v).view(q.shape)


def _flex(length: int, device: str) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


@functools.cache
def _compiled_whole_matrix_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """torch.compile of the backward written with (T, T) matrices."""

    def backward(q, k, v, o, lse, do, scale, causal):
        s = (q @ k.mT).float() * scale
        if causal:
            s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), float("-inf"))
        p = torch.exp(s - lse[..., None])
        delta = (do.float() * o.float()).sum(-1, keepdim=True)
        dv = p.to(q.dtype).mT @ do
        ds = (p * ((do @ v.mT).float() - delta) * scale).to(q.dtype)
        return ds @ k, ds.mT @ q, dv

    return torch.compile(backward)


class CompiledBackward(FlashAttention2):
    """A lesson and a row of the sweep: the Triton forward with a `torch.compile`d backward.

    `apply(q, k, v, is_causal=False)`, as many key as query heads, Tq = Tk. What is *saved* is as small as in
    `FlashAttention2`, but the backward builds (T, T) matrices: the memory of its peak grows with T².
    """

    @staticmethod
    @first_order
    def backward(ctx, do):
        saved = ctx.saved_tensors
        shape = saved[0].shape
        *tensors, do = (x.unsqueeze(1) if len(shape) == 3 else x for x in (*saved, do.to(saved[3].dtype)))
        causal, scale, *_ = ctx.options
        grads = _compiled_whole_matrix_backward()(*tensors, do, scale or shape[-1] ** -0.5, causal)
        return *(g.view(shape).to(t) for g, t in zip(grads, ctx.input_dtypes, strict=True)), *[None] * 7


def build(variant: str, length: int, device: str) -> Attention:
    """The function of a variant; compiled ones are compiled for this length, as their users do."""
    torch._dynamo.reset()
    if variant == "flex":
        return _flex(length, device)
    if variant in BACKENDS:
        return _sdpa(BACKENDS[variant])
    return {
        "naive": naive,
        "compiled": torch.compile(naive, dynamic=False),
        "ours": lambda q, k, v: FlashAttention2.apply(q, k, v, True),
        "ours-ieee": lambda q, k, v: FlashAttention2.apply(q, k, v, True, None, None, "top-left", "ieee"),
        "ours-compiled-backward": lambda q, k, v: CompiledBackward.apply(q, k, v, True),
    }[variant]


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: int = 2048) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv) in float64, `rows` queries at a time, so that long sequences fit."""
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for start in range(0, q.shape[-2], rows):
        stop = min(start + rows, q.shape[-2])
        here, keys = slice(start, stop), slice(0, stop)
        scores = q[..., here, :] @ k[..., keys, :].mT * scale
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(1 + start)
        p = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)
        o[..., here, :] = p @ v[..., keys, :]
        dv[..., keys, :] += p.mT @ do[..., here, :]
        dp = do[..., here, :] @ v[..., keys, :].mT
        ds = p.mul_(dp - (do[..., here, :] * o[..., here, :]).sum(-1, keepdim=True))
        dq[..., here, :] = ds @ k[..., keys, :] * scale
        dk[..., keys, :] += ds.mT @ q[..., here, :] * scale
    return o, dq, dk, dv


def errors(results: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """Largest absolute error of the output and of the worst gradient, of (o, *gradients)."""
    found = [(x.double() - y).abs().max() for x, y in zip(results, expected, strict=True)]
    o, *grads = torch.stack(found).tolist()  # one wait for the device
    return {"max_abs_error": o, "max_abs_grad_error": max(grads)}


def inputs(shape: tuple[int, ...], dtype: str, device: str) -> list[Tensor]:
    """[q, k, v, dO], random; the first three ask for gradients."""
    torch.manual_seed(shape[-2] + shape[-1])
    found = [torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(4)]
    return [x.requires_grad_() for x in found[:3]] + found[3:]


def tflop_per_s(q: Tensor, fwd_ms: float, fwd_bwd_ms: float) -> dict[str, float]:
    """Rates of forward, backward and both, by convention: causal pairs only, backward 2.5 × forward."""
    flops = cost(q.shape, q.shape, q.dtype, causal=True).flops
    passes = {"fwd": (1.0, fwd_ms), "bwd": (2.5, fwd_bwd_ms - fwd_ms), "fwd_bwd": (3.5, fwd_bwd_ms)}
    return {f"{name}_tflop_per_s": times * flops / ms / 1e9 for name, (times, ms) in passes.items()}


def lines_over_length(metric: str, label: str) -> Callable[[Sequence[Record], Path], None]:
    """A view's picture: a metric over the length, a panel per dtype and head dim; none where nobody measured it."""

    def draw(records: Sequence[Record], path: Path) -> None:
        if any(r.metrics.get(metric) is not None for r in records):
            metric_over_length(records, path, metric, label)

    return draw
