"""Everything one could call instead of this package's attention, and the exact result to judge them all by.

Causal attention of (1, 1, T, D) or (B, T, D) tensors, for benchmarks: nothing here is needed to compute attention.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .function import FlashAttention2, FlashAttention2CompiledBackward

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v of one shape → o of that shape
VARIANTS = ("naive", "compiled", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", "ours-compiled-backward",
            "ours-ieee", "ours")


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


def build(variant: str, length: int, device: str) -> Attention:
    """The function of a variant; compiled ones are compiled for this length, as their users do."""
    torch._dynamo.reset()
    if variant == "flex":
        return _flex(length, device)
    backends = {"sdpa": None, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
                "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION}
    if variant in backends:
        return _sdpa(backends[variant])
    return {
        "naive": naive,
        "compiled": torch.compile(naive, dynamic=False),
        "ours": lambda q, k, v: FlashAttention2.apply(q, k, v, True),
        "ours-ieee": lambda q, k, v: FlashAttention2.apply(q, k, v, True, None, None, "top-left", "ieee"),
        "ours-compiled-backward": lambda q, k, v: FlashAttention2CompiledBackward.apply(q, k, v, True),
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
