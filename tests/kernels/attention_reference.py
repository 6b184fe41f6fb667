"""Attention written down directly, in float64 and with the whole score matrix: what every test
compares with.
"""

import torch

from .fused import DEVICE


def inputs(batch, heads, kv_heads, query_count, key_count, head_dim, dtype=torch.float32, seed=0):
    """Normal q, k, v and the gradient of o, equal for equal seeds."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [
        (heads, query_count),
        (kv_heads, key_count),
        (kv_heads, key_count),
        (heads, query_count),
    ]
    return tuple(
        torch.randn(batch, *shape, head_dim, generator=generator, device=DEVICE).to(dtype)
        for shape in shapes
    )


def mask(
    query_count,
    key_count,
    *,
    causal=False,
    window=None,
    alignment="top-left",
    document_ids=None,
    device="cpu",
):
    """True where a key is visible; (1 or B, 1, Tq, Tk)."""
    shift = key_count - query_count if alignment == "bottom-right" else 0
    query = torch.arange(query_count, device=device)[:, None] + shift
    key = torch.arange(key_count, device=device)[None, :]
    seen = torch.ones(query_count, key_count, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= (key - query).abs() <= window
    seen = seen[None, None]
    if document_ids is not None:
        changes = torch.nn.functional.pad(
            (document_ids[:, 1:] != document_ids[:, :-1]).long(), (1, 0)
        ).cumsum(1)
        seen = seen & (changes[:, None, :, None] == changes[:, None, None, :])
    return seen


def scores_of(q, k, *, scale=None, softcap=None, **options):
    """scale · q kᵀ, capped; −inf where a key is hidden."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(
        ~mask(q.shape[-2], k.shape[-2], device=q.device, **options), float("-inf")
    )


def attention(q, k, v, **options):
    """softmax(scale · q kᵀ) v for (B, H, T, D) or (B, T, D) inputs, in their type.

    Rows without keys are 0.
    """
    if q.dim() == 3:
        return attention(q[:, None], k[:, None], v[:, None], **options)[:, 0]
    scores = scores_of(q, k, **options)
    largest = (
        scores.detach().amax(-1, keepdim=True) if k.shape[-2] else torch.zeros_like(scores[..., :1])
    )
    weights = torch.exp(scores - largest.masked_fill(largest == float("-inf"), 0.0))
    total = weights.sum(-1, keepdim=True)
    return (
        weights
        / total.masked_fill(total == 0, 1.0)
        @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    )


def log_sum_exp(q, k, **options):
    """log Σ exp over visible keys, (B, H, Tq), −inf where none is visible."""
    return scores_of(q, k, **options).logsumexp(-1)


def with_gradients(fn, q, k, v, *upstream):
    """(o, dq, dk, dv) of `fn(q, k, v)` for the gradient of o.

    (o, lse, dq, dk, dv) for that of both its results.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    found = fn(q, k, v) if len(upstream) > 1 else [fn(q, k, v)]
    return *(x.detach() for x in found), *torch.autograd.grad(found, (q, k, v), upstream)


def in_float64(*tensors, **options):
    """What `with_gradients` of the reference gives for these tensors in float64."""

    def exact(q, k, v):
        o = attention(q, k, v, **options)
        return (o, log_sum_exp(q, k, **options)) if len(tensors) > 4 else o

    return with_gradients(exact, *(x.double() for x in tensors))


def rms(x):
    return x.double().pow(2).mean().sqrt().item()
