"""What one attention call means: the mask as a band, the scale, the arithmetic; and the checks on what users pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._rows import DTYPES, check, check_device

MAX_HEAD_DIM = 256
PRECISIONS = ("emulated", "ieee", "tf32x3", "bf16x6", "tf32")
ALIGNMENTS = ("top-left", "bottom-right")
# float32 holds them, and the larger one times log2(e)
LEAST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127


@dataclass(frozen=True)
class Problem:
    """A call in the form the kernels take: key k is visible to query q iff q − lo ≤ k ≤ q + hi, same document.

    Args:
        band: (lo, hi); None leaves that side open.
        scale: multiplies Q Kᵀ; positive.
        precision: arithmetic of fp32 matmuls, one of PRECISIONS; without effect on fp16 and bf16.
            Kernels take any but "emulated", which stands for one of them (`configs.settled`).
        softcap: scores become softcap · tanh(scores / softcap), unless None.
        bounds: documents as `document_bounds` makes them, or None.
    """

    band: tuple[int | None, int | None]
    scale: float
    precision: str = "ieee"
    softcap: float | None = None
    bounds: Tensor | None = None

    @property
    def lo(self) -> int:
        """Keys visible before the query; 0 where there is no limit."""
        return self.band[0] or 0

    @property
    def hi(self) -> int:
        """Keys visible after the query; 0 where there is no limit."""
        return self.band[1] or 0


def band(
    query_count: int, key_count: int, causal: bool, window: int | None, alignment: str
) -> tuple[int | None, int | None]:
    """(lo, hi) of the band; `shift` is where query 0 stands among the keys.

    A window that reaches past both ends from everywhere is none: kernels add it to positions in 32
    bits.
    """
    if window is not None and window >= max(query_count, key_count):
        window = None
    shift = key_count - query_count if alignment == "bottom-right" else 0
    lo = None if window is None else window - shift
    hi = shift if causal else (None if window is None else window + shift)
    return lo, hi


def is_deterministic(deterministic: bool | None) -> bool:
    """Whether gradients must be bit-identical in every run; None follows torch.use_deterministic_algorithms."""
    if deterministic not in (None, True, False):
        raise TypeError(f"deterministic must be True, False or None, got {deterministic!r}")
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def visible_pairs(query_count: int, key_count: int, lo: int | None, hi: int | None) -> int:
    """Number of (query, key) pairs in the band, in closed form: Σ_q |[max(0, q − lo), min(T_k − 1, q + hi)]|."""

    def below(offset: int) -> int:
        """Σ_q min(max(q + offset, 0), T_k): keys before position q + offset, summed over queries."""
        start = min(max(-offset, 0), query_count)  # first query that sees one
        stop = min(max(key_count - offset, start), query_count)  # first query that sees all
        rising = (start + offset + stop - 1 + offset) * (stop - start) // 2
        return rising + (query_count - stop) * key_count

    return below(key_count if hi is None else hi + 1) - below(-query_count if lo is None else -lo)


def document_bounds(
    document_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Where the document of each position begins and ends: computed once per batch, for the attention of every layer.

    Args:
        document_ids: (B, T) integers; a document is a run of equal ids.
        cu_seqlens: instead, for B = 1, (n + 1,) integers: 0 and the ends of n documents, the last
            of which is T. Its values are read, for which the CPU waits if they are on a GPU.

    Returns:
        (2, B, T) int32, the first and one past the last position, for `flash_attention(...,
            document_ids=...)`.

    Raises:
        TypeError, ValueError: neither or both, no integer tensor, another shape, offsets that do
            not ascend from 0.
    """
    if (document_ids is None) == (cu_seqlens is None):
        raise ValueError("document_bounds needs either document_ids or cu_seqlens")
    if cu_seqlens is not None:
        _check_integers("cu_seqlens", cu_seqlens)
        offsets = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
        if offsets[:1] != [0] or offsets != sorted(offsets):
            raise ValueError(
                f"cu_seqlens is {str(offsets)[:80]}, of shape {tuple(cu_seqlens.shape)}; allowed: one "
                "dimension, ascending from 0"
            )
        document_ids = torch.repeat_interleave(cu_seqlens.diff(), output_size=offsets[-1])[None]
    _check_integers("document_ids", document_ids)
    if document_ids.dim() != 2:
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)}; allowed: (batch, seq)"
        )
    count = document_ids.shape[1]
    position = torch.arange(count, device=document_ids.device).expand(document_ids.shape)
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    edge = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    first = torch.where(torch.cat([edge, changes], 1), position, 0).cummax(1).values
    after = torch.where(torch.cat([changes, edge], 1), position + 1, count)
    return torch.stack((first, after.flip(1).cummin(1).values.flip(1))).to(torch.int32)


def _check_integers(name: str, values: Tensor) -> None:
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        raise TypeError(f"{name} must be an integer tensor or None")


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    alignment: str,
    precision: str,
    softcap: float | None = None,
    *_: object,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """Raise for tensors that do not belong together and for options that are not allowed, naming the argument."""
    _check_inputs(q, k, v, dtypes)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if isinstance(window, bool) or not isinstance(window, int | torch.SymInt | None):
        raise TypeError(f"window must be an int or None, got {window!r}")
    if window is not None and window < 0:
        raise ValueError(f"window is {window}; allowed: 0 or more, or None for no window")
    for name, value, allowed in (
        ("alignment", alignment, ALIGNMENTS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    for name, value, default in (
        ("scale", scale, "1/sqrt(head dim)"),
        ("softcap", softcap, "scores as they are"),
    ):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and LEAST_SCALE <= value <= LARGEST_SCALE):
            raise ValueError(
                f"{name} is {value!r}; allowed: a number from {LEAST_SCALE:.1e} to {LARGEST_SCALE:.1e}, "
                f"or None for {default}"
            )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None and factor / softcap > LARGEST_SCALE:
        raise ValueError(
            f"softcap is {softcap!r}, {factor / softcap:.1e} times smaller than scale; allowed: up to "
            f"{LARGEST_SCALE:.1e} times"
        )


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check(name, x, dtypes=dtypes)
        check_device(name, x, "q", q)
    if q.dim() not in (3, 4):
        raise ValueError(
            f"q has shape {tuple(q.shape)}; allowed: (batch, seq, d) or (batch, heads, seq, d)"
        )
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"q has head dim {q.shape[-1]}; allowed: 1 to {MAX_HEAD_DIM}")
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim():
            raise ValueError(
                f"{name} has {x.dim()} dimensions, q {q.dim()}; all inputs must have as many"
            )
        for what, theirs, ours in (
            ("dtype", x.dtype, q.dtype),
            ("head dim", x.shape[-1], q.shape[-1]),
            ("batch", x.shape[0], q.shape[0]),
        ):
            if theirs != ours:
                raise ValueError(f"{name} has {what} {theirs}, q {ours}; they must be equal")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they must be equal")
    if (
        q.dim() == 4
        and q.shape[1] != k.shape[1]
        and (k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0)
    ):
        raise ValueError(
            f"k has {k.shape[1]} heads and q {q.shape[1]}; q's must be a multiple of k's"
        )


def check_documents(q: Tensor, k: Tensor, document_ids: Tensor) -> None:
    """Raise unless these are the documents of q's and k's positions, or their bounds.

    q and k have passed `check_call`.
    """
    _check_integers("document_ids", document_ids)
    check_device("document_ids", document_ids, "q", q)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"document_ids needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}"
        )
    shape = q.shape[0], q.shape[-2]
    bounds = tuple(document_ids.shape) == (2, *shape) and document_ids.dtype == torch.int32
    if not bounds and tuple(document_ids.shape) != shape:
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)}; allowed: (batch, seq) = {shape}, or "
            "what document_bounds makes of such"
        )
