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
# The groups are batch, heads, key heads, queries, keys, head dim and mask.
WRITTEN = re.compile(
    r"(\d+)x(\d+)(?::(\d+))?x(\d+)(?::(\d+))?x(\d+)(?:/(full|window=\d+|documents=\d+))?"
)


@dataclass(frozen=True)
class Shape:
    """Shape of a call, causal unless full.

    Query i is at the position of key i, and sees at most `window` keys before that position.
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
        shape = cls._read(text)
        if shape is None:
            raise ValueError(
                f"shape {text!r}: give BATCHxHEADS[:KEY HEADS]xQUERIES[:KEYS]xHEAD DIM, heads a "
                "multiple of key heads, and /full, /window=W or /documents=N (equal numbers of "
                "queries and keys) where it is not plainly causal, such as "
                "4x32:8x4096x128/window=1024"
            )
        return shape

    @classmethod
    def _read(cls, text: str) -> "Shape | None":
        """Return the shape that `text` describes, or None if it describes none."""
        found = WRITTEN.fullmatch(text)
        if found is None:
            return None
        batch, heads, kv_heads, queries, keys, head_dim, mask = found.groups()
        kind, _, number = (mask or "").partition("=")
        shape = cls(
            batch=int(batch),
            heads=int(heads),
            kv_heads=int(kv_heads or heads),
            queries=int(queries),
            keys=int(keys or queries),
            head_dim=int(head_dim),
            causal=kind != "full",
            window=int(number) if kind == "window" else None,
            documents=int(number) if kind == "documents" else None,
        )
        # A size of 0 or heads in unequal groups would fail later, within a kernel and without a
        # clear message.
        head_sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        if 0 in (shape.batch, shape.queries, shape.keys, *head_sizes):
            return None
        if shape.heads % shape.kv_heads:
            return None
        # Documents are ranges of positions, which queries and keys must share.
        if shape.documents is not None and shape.queries != shape.keys:
            return None
        return shape

    @property
    def is_plain(self) -> bool:
        """Return whether every attention has this mask: causal or none."""
        return self.window is None and self.documents is None

    def document_ids(self, device: str = "cpu") -> Tensor | None:
        """Return (T,) ids of N documents with random borders, equal in every sequence, or None."""
        if self.documents is None:
            return None
        # A fixed seed: every variant and every run has the same documents.
        borders = torch.randint(
            self.queries, (self.documents - 1,), generator=torch.Generator().manual_seed(0)
        )
        # The id of a position is the number of borders at or before it.
        return (torch.arange(self.queries)[:, None] >= borders).sum(1).to(device)

    def visible(self, query: Tensor, key: Tensor, ids: Tensor | None) -> Tensor:
        """Return whether the query at a position sees the key at another. Positions broadcast."""
        if self.causal:
            seen = key <= query
        else:
            seen = (key >= 0) & (query >= 0)  # all pairs, in the shape of the positions
        if self.window is not None:
            seen = seen & (query - key <= self.window)
        return seen if ids is None else seen & (ids[query] == ids[key])

    def mask(self, device: torch.device | str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the mask of queries from `start` to `stop` and all keys, True if visible."""
        query = torch.arange(self.queries, device=device)[start:stop, None]
        key = torch.arange(self.keys, device=device)
        return self.visible(query, key, self.document_ids(device))

    def flops(self) -> float:
        """Return the FLOPs of the forward, by convention: visible pairs only."""
        # Borders between documents are random, so the lengths must be counted.
        ids = self.document_ids()
        if ids is None:
            return self._part_flops(self.queries, self.keys)
        # Pairs of different documents are not visible, so a document counts as a sequence of its
        # own.
        return sum(self._part_flops(length, length) for length in ids.bincount().tolist())

    def _part_flops(self, queries: int, keys: int) -> float:
        """Return the FLOPs of the forward of one document, or of a sequence without documents."""
        # The heads of k decide the bytes, and the heads of q the FLOPs. Both are part of the cost.
        q_shape = (self.batch, self.heads, queries, self.head_dim)
        k_shape = (self.batch, self.kv_heads, keys, self.head_dim)
        return cost(q_shape, k_shape, torch.bfloat16, causal=self.causal, window=self.window).flops


def rates(shape: Shape, fwd_ms: float, bwd_ms: float, fwd_bwd_ms: float) -> dict[str, float]:
    """Return TFLOP/s of forward, backward and both by convention: of visible pairs only."""
    forward_tflop_ms = shape.flops() / 1e9  # TFLOP of the forward, times 1,000: divide by ms
    return {
        "fwd_tflop_per_s": 1.0 * forward_tflop_ms / fwd_ms,
        # The forward has two matmuls, Q·Kᵀ and P·V. The backward has five: it computes Q·Kᵀ again,
        # and dV, dP, dQ and dK.
        "bwd_tflop_per_s": 2.5 * forward_tflop_ms / bwd_ms,
        "fwd_bwd_tflop_per_s": 3.5 * forward_tflop_ms / fwd_bwd_ms,
    }


def naive(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Compute attention as in textbooks: the whole score matrix is in memory.

    Args:
        seen: (Tq, Tk), True for visible pairs. None for causal attention.
    """
    if seen is None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if q.shape[1] != k.shape[1]:
        # Grouped queries: consecutive heads of q share a head of k and v.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _sdpa(variant: str, shape: Shape) -> Attention:
    """Return torch's SDPA, limited to the backend of a variant."""
    call = functools.partial(
        F.scaled_dot_product_attention,
        # SDPA aligns its mask at the top left, so query i sees keys 0 to i.
        is_causal=shape.causal,
        enable_gqa=shape.heads != shape.kv_heads,
    )
    backend = BACKENDS[variant]
    # Without `sdpa_kernel` torch chooses the backend itself, as it does for its users.
    return call if backend is None else sdpa_kernel(backend)(call)


def _flex(shape: Shape, ids: Tensor | None, device: str) -> Attention:
    """Return compiled FlexAttention with a block mask of the visible pairs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return shape.visible(query, key, ids)

    # Without causality every pair is visible, and a mask would only add work.
    mask = None
    if shape.causal:
        # None, None: one mask for every sequence and head
        mask = create_block_mask(visible, None, None, shape.queries, shape.keys, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads)


def _flash_attention_4(shape: Shape) -> Attention:
    """Return FlashAttention-4, which takes (B, T, H, D)."""
    from flash_attn.cute import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_BTHD, k_BTHD, v_BTHD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # The function also returns the log-sum-exp, which no other variant returns.
        o_BTHD, *_ = flash_attn_func(q_BTHD, k_BTHD, v_BTHD, causal=shape.causal)
        return o_BTHD.transpose(1, 2)

    return call


def suits(variant: str, shape: Shape, dtype: str) -> bool:
    """Return whether a variant has a row: it knows the mask, and differs from others there."""
    # In bf16 the option `precision` changes nothing, so the row would repeat that of `ours`.
    if variant == "ours-ieee":
        return dtype == "float32"
    # The wrappers of SDPA and FlashAttention-4 here pass on only `causal`.
    return shape.is_plain or variant not in ("fa4", *BACKENDS)


def build(variant: str, shape: Shape, device: str) -> Attention:
    """Return the function of a variant. Compiled ones are compiled for this shape, as in use."""
    # Dynamo stops compiling after a limit of recompilations, which a sweep over shapes would reach.
    torch.compiler.reset()
    if variant in BACKENDS:
        return _sdpa(variant, shape)
    if variant == "fa4":
        return _flash_attention_4(shape)
    ids = shape.document_ids(device)
    if variant == "flex":
        return _flex(shape, ids, device)
    if variant in ("naive", "compiled"):
        # A plain causal call makes its mask in the call, so that its memory is counted as in
        # textbooks.
        seen = None if shape.causal and shape.is_plain else shape.mask(device)
        function = naive if variant == "naive" else torch.compile(naive, dynamic=False)
        return functools.partial(function, seen=seen)
    # Computed once and not in each call, as a model does.
    packed = None if ids is None else document_bounds(ids.expand(shape.batch, -1))
    ours = functools.partial(
        flash_attention, causal=shape.causal, window=shape.window, document_ids=packed
    )
    if variant == "ours-ieee":
        return functools.partial(ours, precision="ieee")
    if variant == "ours-deterministic":
        return functools.partial(ours, deterministic=True)
    return ours


def last_head(x: Tensor, shape: Shape) -> Tensor:
    """Return the last sequence's last key head of k or v, or the query heads that read it."""
    return x.detach()[-1, -(x.shape[1] // shape.kv_heads) :]


def exact(shape: Shape, *case: Tensor, rows: int = 2048) -> tuple[Tensor, ...]:
    """Return (o, dq, dk, dv) of `last_head` in float64, from q, k, v and dO.

    `rows` queries are computed at a time, so that it fits.
    """
    q, k, v, do = (last_head(x, shape).double() for x in case)
    # One key head with its query heads: all heads of the largest shapes would not fit in float64.
    scale = shape.head_dim**-0.5
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for start in range(0, shape.queries, rows):
        here = slice(start, start + rows)
        seen = shape.mask(q.device, start, start + rows)
        # S = Q·Kᵀ/√D, P = softmax(S), O = P·V. A query's softmax needs no other query, so rows can
        # be computed in pieces.
        p = torch.softmax((q[:, here] @ k.mT * scale).masked_fill_(~seen, float("-inf")), -1)
        o[:, here] = p @ v
        # dV = Pᵀ·dO. All query heads of the key head add to it, and so do all pieces.
        dv += (p.mT @ do[:, here]).sum(0)
        # dP = dO·Vᵀ, dS = P ∘ (dP − rowsum(dO ∘ O)). In place of P, which is not needed after this.
        ds = p.mul_(do[:, here] @ v.mT - (do[:, here] * o[:, here]).sum(-1, keepdim=True))
        # dQ = dS·K/√D and dK = dSᵀ·Q/√D
        dq[:, here] = ds @ k * scale
        dk += (ds.mT @ q[:, here]).sum(0) * scale
    return o, dq, dk, dv


def errors(results: Sequence[Tensor], expected: Sequence[Tensor], shape: Shape) -> dict[str, float]:
    """Return the largest absolute error of the output and of the worst gradient at `last_head`.

    `results` are (o, *gradients).
    """
    # Only one head was computed exactly, so the same head is taken of every result.
    found = [(last_head(x, shape) - y).abs().max() for x, y in zip(results, expected, strict=True)]
    o, *grads = torch.stack(found).tolist()  # one wait for the device
    return {"max_abs_error": o, "max_abs_grad_error": max(grads)}


def inputs(shape: Shape, dtype: str, device: str) -> list[Tensor]:
    """Return [q, k, v, dO], random. The first three require gradients."""
    # The seed depends on the shape alone, so that a resumed sweep has the inputs that its other
    # rows had.
    torch.manual_seed(shape.queries + shape.head_dim)
    q_shape = (shape.batch, shape.heads, shape.queries, shape.head_dim)
    k_shape = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    tensors = [
        # Drawing in fp32 and rounding gives all dtypes the same values but for rounding.
        torch.randn(size, device=device).to(getattr(torch, dtype))
        for size in (q_shape, k_shape, k_shape, q_shape)
    ]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    return tensors
