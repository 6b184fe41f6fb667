"""Shared code of the attention experiments: shapes, inputs, every timed function, the exact result.

Peers are torch's: SDPA with each of its backends, FlexAttention and the textbook form, eager and
compiled; and FlashAttention-4 (`pip install --pre flash-attn-4`), where it is installed.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.flash_attention import cost, document_bounds, flash_attention

# q (B, H, Tq, D), k and v (B, Hk, Tk, D) → o like q
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "sdpa": None,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
VARIANTS = (
    "naive",
    "compiled",
    "sdpa",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
    "fa4",
    "ours-ieee",
    "ours-deterministic",
    "ours",
)
WRITTEN = re.compile(
    r"(\d+)x(\d+)(?::(\d+))?x(\d+)(?::(\d+))?x(\d+)(?:/(full|window=\d+|documents=\d+))?"
)


@dataclass(frozen=True)
class Shape:
    """Shape of a call, causal unless full.

    Query i is at the position of key i. A window is of keys before it.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    documents: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse `BATCHxHEADS[:KEY HEADS]xQUERIES[:KEYS]xHEAD DIM[/full|/window=W|/documents=N]`.

        Raises:
            ValueError: another text, or numbers that do not fit together.
        """
        found = WRITTEN.fullmatch(text)
        sizes = (
            [int(size or found[place]) for place, size in enumerate(found.groups()[:6])]
            if found
            else [0]
        )
        mask, _, size = ((found and found[7]) or "").partition("=")
        if 0 in sizes or sizes[1] % sizes[2] or (mask == "documents" and sizes[3] != sizes[4]):
            raise ValueError(
                f"shape {text!r}: give BATCHxHEADS[:KEY HEADS]xQUERIES[:KEYS]xHEAD DIM, heads a multiple of key heads, "
                "and /full, /window=W or /documents=N (equal numbers of queries and keys) where it is not plainly "
                "causal, such as 4x32:8x4096x128/window=1024"
            )
        return cls(*sizes, causal=mask != "full", **({mask: int(size)} if size else {}))

    @property
    def is_plain(self) -> bool:
        """Return whether every attention has this mask: causal or none."""
        return self.window is None and self.documents is None

    def document_ids(self, device: str = "cpu") -> Tensor | None:
        """Return (T,) ids of N documents with random borders, equal in every sequence, or None."""
        if self.documents is None:
            return None
        borders = torch.randint(
            self.queries, (self.documents - 1,), generator=torch.Generator().manual_seed(0)
        )
        return (torch.arange(self.queries)[:, None] >= borders).sum(1).to(device)

    def visible(self, query: Tensor, key: Tensor, ids: Tensor | None) -> Tensor:
        """Return whether the query at a position sees the key at another. Positions broadcast."""
        seen = key <= query if self.causal else (key >= 0) & (query >= 0)
        if self.window is not None:
            seen = seen & (query - key <= self.window)
        return seen if ids is None else seen & (ids[query] == ids[key])

    def mask(self, device: torch.device | str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the mask of queries from `start` to `stop` and all keys, True if visible."""
        query, key = (
            torch.arange(self.queries, device=device)[start:stop, None],
            torch.arange(self.keys, device=device),
        )
        return self.visible(query, key, self.document_ids(device))

    def flops(self) -> float:
        """FLOPs of the forward, by convention: visible pairs only."""
        ids = self.document_ids()
        parts = (
            [(self.queries, self.keys)]
            if ids is None
            else [(n, n) for n in ids.bincount().tolist()]
        )
        return sum(
            cost(
                (self.batch, self.heads, m, self.head_dim),
                (self.batch, self.kv_heads, n, self.head_dim),
                torch.bfloat16,
                causal=self.causal,
                window=self.window,
            ).flops
            for m, n in parts
        )


def naive(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """The textbook: the whole score matrix in memory; `seen` (Tq, Tk) where it is not causal."""
    if seen is None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _sdpa(variant: str, shape: Shape) -> Attention:
    call = functools.partial(
        F.scaled_dot_product_attention,
        is_causal=shape.causal,
        enable_gqa=shape.heads != shape.kv_heads,
    )
    backend = BACKENDS[variant]
    return call if backend is None else sdpa_kernel(backend)(call)


def _flex(shape: Shape, ids: Tensor | None, device: str) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if shape.causal:
        mask = create_block_mask(
            lambda b, h, i, j: shape.visible(i, j, ids),
            None,
            None,
            shape.queries,
            shape.keys,
            device=device,
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads)


def _flash_attention_4(shape: Shape) -> Attention:
    from flash_attn.cute import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.causal)[
            0
        ].transpose(1, 2)

    return call


def suits(variant: str, shape: Shape, dtype: str) -> bool:
    """Return whether a variant has a row: it knows the mask, and differs from others there."""
    if variant == "ours-ieee":
        return dtype == "float32"
    return shape.is_plain or variant not in ("fa4", *BACKENDS)


def build(variant: str, shape: Shape, device: str) -> Attention:
    """The function of a variant; compiled ones are compiled for this shape, as their users do."""
    torch._dynamo.reset()
    if variant in BACKENDS:
        return _sdpa(variant, shape)
    if variant == "fa4":
        return _flash_attention_4(shape)
    ids = shape.document_ids(device)
    if variant == "flex":
        return _flex(shape, ids, device)
    if variant in ("naive", "compiled"):
        seen = None if shape.causal and shape.is_plain else shape.mask(device)
        return functools.partial(
            naive if variant == "naive" else torch.compile(naive, dynamic=False), seen=seen
        )
    # once, as a model does
    packed = None if ids is None else document_bounds(ids.expand(shape.batch, -1))
    options = {"causal": shape.causal, "window": shape.window, "document_ids": packed}
    options |= {
        "ours-ieee": {"precision": "ieee"},
        "ours-deterministic": {"deterministic": True},
    }.get(variant, {})
    return functools.partial(flash_attention, **options)


def last_head(x: Tensor, shape: Shape) -> Tensor:
    """The last sequence's last key head of k or v, or the query heads that read it."""
    return x.detach()[-1, -(x.shape[1] // shape.kv_heads) :]


def exact(shape: Shape, *case: Tensor, rows: int = 2048) -> tuple[Tensor, ...]:
    """Return (o, dq, dk, dv) of `last_head` in float64, from q, k, v and dO.

    `rows` queries are computed at a time, so that it fits.
    """
    q, k, v, do = (last_head(x, shape).double() for x in case)
    scale = shape.head_dim**-0.5
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for start in range(0, shape.queries, rows):
        here = slice(start, start + rows)
        seen = shape.mask(q.device, start, start + rows)
        p = torch.softmax((q[:, here] @ k.mT * scale).masked_fill_(~seen, float("-inf")), -1)
        o[:, here] = p @ v
        dv += (p.mT @ do[:, here]).sum(0)
        ds = p.mul_(do[:, here] @ v.mT - (do[:, here] * o[:, here]).sum(-1, keepdim=True))
        dq[:, here] = ds @ k * scale
        dk += (ds.mT @ q[:, here]).sum(0) * scale
    return o, dq, dk, dv


def errors(results: Sequence[Tensor], expected: Sequence[Tensor], shape: Shape) -> dict[str, float]:
    """Return the largest absolute error of the output and of the worst gradient at `last_head`.

    `results` are (o, *gradients).
    """
    found = [(last_head(x, shape) - y).abs().max() for x, y in zip(results, expected, strict=True)]
    o, *grads = torch.stack(found).tolist()  # one wait for the device
    return {"max_abs_error": o, "max_abs_grad_error": max(grads)}


def inputs(shape: Shape, dtype: str, device: str) -> list[Tensor]:
    """[q, k, v, dO], random; the first three ask for gradients."""
    torch.manual_seed(shape.queries + shape.head_dim)
    q, k = (shape.batch, shape.heads, shape.queries), (shape.batch, shape.kv_heads, shape.keys)
    found = [
        torch.randn(*x, shape.head_dim, device=device).to(getattr(torch, dtype))
        for x in (q, k, k, q)
    ]
    return [x.requires_grad_() for x in found[:3]] + found[3:]
