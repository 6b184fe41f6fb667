"""The meaning of one attention call: the mask as a band, the scale, the arithmetic.

The checks of what users pass are also here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._rows import DTYPES, check, check_device

MAX_HEAD_DIM = 256
PRECISIONS = ("emulated", "ieee", "tf32x3", "bf16x6", "tf32")
ALIGNMENTS = ("top-left", "bottom-right")
# float32 can hold both, and LARGEST_SCALE times log2(e).
LEAST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**127


@dataclass(frozen=True)
class Problem:
    """A call in the form that the kernels take.

    Key k is visible to query q if q − lo ≤ k ≤ q + hi and both are in one document.

    Attributes:
        band: (lo, hi) in positions. None leaves that side open.
        scale: positive factor of Q Kᵀ.
        precision: arithmetic of fp32 matmuls, one of PRECISIONS, without effect on fp16 and bf16.
            Kernels take any but "emulated", which `configs.settled` replaces by another.
        softcap: scores become softcap · tanh(scores / softcap), unless it is None.
        bounds: documents as `document_bounds` returns them, or None.
    """

    band: tuple[int | None, int | None]
    scale: float
    precision: str = "ieee"
    softcap: float | None = None
    bounds: Tensor | None = None

    @property
    def lo(self) -> int:
        """Distance in positions from a query back to its first visible key, k = q − lo.

        Launchers of the Triton kernels pass it on. Kernels take no None, so 0 stands for an open
        side, and `Variant.has_lo` says that they do not read it. To ask whether a side is open,
        look at `band`. The distance is negative if the first visible key has a larger position
        than the query: a window at alignment "bottom-right", with many more keys than queries.
        """
        return self.band[0] or 0

    @property
    def hi(self) -> int:
        """Distance in positions from a query forward to its last visible key, k = q + hi.

        Launchers of the Triton and the Hopper kernels pass it on. The rest is as for `lo`: 0 stands
        for an open side, and the distance is negative if that key has a smaller position than the
        query.
        """
        return self.band[1] or 0


def band(
    query_count: int, key_count: int, causal: bool, window: int | None, alignment: str
) -> tuple[int | None, int | None]:
    """Return (lo, hi) of the band.

    Args:
        query_count: Tq.
        key_count: Tk.
        causal: whether keys after the query are hidden.
        window: number of keys visible on each side, or None.
        alignment: one of ALIGNMENTS.
    """
    # Such a window hides nothing. It must not reach the kernels, which add it to positions in 32
    # bits.
    if window is not None and window >= max(query_count, key_count):
        window = None
    # The position of query 0 among the keys.
    shift = key_count - query_count if alignment == "bottom-right" else 0
    # k ≥ q + shift − window and k ≤ q + shift + window, in terms of lo and hi. With shift > window,
    # lo is negative.
    lo = None if window is None else window - shift
    hi = shift if causal else (None if window is None else window + shift)
    return lo, hi


def is_deterministic(deterministic: bool | None) -> bool:
    """Return whether gradients must be bit-identical in every run.

    Args:
        deterministic: True, False, or None to follow `torch.use_deterministic_algorithms`.

    Raises:
        TypeError: another value.
    """
    if deterministic not in (None, True, False):
        raise TypeError(f"deterministic must be True, False or None, got {deterministic!r}")
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return deterministic


def visible_pairs(query_count: int, key_count: int, lo: int | None, hi: int | None) -> int:
    """Return the number of (query, key) pairs in the band, without a loop over queries.

    It is Σ_q |[max(0, q − lo), min(Tk − 1, q + hi)]|: the keys up to the last visible one, minus
    the keys before the first.

    Args:
        query_count: Tq.
        key_count: Tk.
        lo: number of keys visible before the query, or None for all.
        hi: number of keys visible after the query, or None for all.
    """
    after_last = key_count if hi is None else hi + 1
    first = -query_count if lo is None else -lo
    return _keys_below(query_count, key_count, after_last) - _keys_below(
        query_count, key_count, first
    )


def _keys_below(query_count: int, key_count: int, offset: int) -> int:
    """Return Σ_q min(max(q + offset, 0), Tk): the keys before position q + offset of each query."""
    first_some = min(max(-offset, 0), query_count)  # the first query with such a key
    first_all = min(max(key_count - offset, first_some), query_count)  # the first with all keys
    # In between, the numbers rise by 1 from query to query.
    # The sum of lowest, lowest + 1, …, highest. No query in between gives (lowest + highest)·0 = 0.
    lowest = first_some + offset
    highest = first_all - 1 + offset
    rising = (lowest + highest) * (first_all - first_some) // 2
    return rising + (query_count - first_all) * key_count


def document_bounds(
    document_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the bounds of each position's document, to compute once per batch for all layers.

    Args:
        document_ids: integers (B, T). A document is a run of equal ids.
        cu_seqlens: integers (n + 1,), instead of document_ids for B = 1: 0 and the ends of n
            documents, the last of which is T. Its values are read. If they are on a GPU, the CPU
            waits for them.

    Returns:
        An int32 tensor (2, B, T) for `flash_attention(..., document_ids=...)`: the first and one
        past the last position of the document.

    Raises:
        TypeError: not a tensor of integers.
        ValueError: neither or both are given, or a wrong shape, or offsets that do not ascend from
            0.
    """
    if (document_ids is None) == (cu_seqlens is None):
        raise ValueError("document_bounds needs either document_ids or cu_seqlens")
    if cu_seqlens is not None:
        _check_integers("cu_seqlens", cu_seqlens)
        offsets = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
        if offsets[:1] != [0] or offsets != sorted(offsets):
            raise ValueError(
                f"cu_seqlens is {str(offsets)[:80]}, of shape {tuple(cu_seqlens.shape)}; "
                "allowed: one dimension, ascending from 0"
            )
        # The number of each document, as often as it has positions. output_size saves a second wait
        # for the GPU.
        document_ids = torch.repeat_interleave(cu_seqlens.diff(), output_size=offsets[-1])[None]
    _check_integers("document_ids", document_ids)
    if document_ids.dim() != 2:
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)}; allowed: (batch, seq)"
        )
    count = document_ids.shape[1]
    position = torch.arange(count, device=document_ids.device).expand(document_ids.shape)
    # Ids need not ascend or be unique: a document is a run of equal ids.
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    edge = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    # The first position of a document has its own number, all others 0. The largest number so far
    # is then the first position of the current document.
    starts = torch.where(torch.cat([edge, changes], 1), position, 0)
    first = starts.cummax(1).values
    # In the same way from the end: the last position has the number after it, all others T.
    ends = torch.where(torch.cat([changes, edge], 1), position + 1, count)
    after = ends.flip(1).cummin(1).values.flip(1)
    return torch.stack((first, after)).to(torch.int32)


def _check_integers(name: str, values: Tensor) -> None:
    """Raise TypeError unless values is a tensor of integers or bools."""
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
    bounds: Tensor | None = None,
    *,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """Raise for tensors that do not fit together and for options that are not allowed.

    Args:
        q, k, v: (B, T, D) or (B, H, T, D).
        causal, scale, window, alignment, precision, softcap: as for `flash_attention`.
        bounds: argument of the operators that is not checked here. `check_documents` has checked
            the documents that it was computed from.
        dtypes: dtypes that are allowed.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
    """
    _check_inputs(q, k, v, dtypes)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if isinstance(window, bool) or not isinstance(window, int | torch.SymInt | None):
        raise TypeError(f"window must be an int or None, got {window!r}")
    if window is not None and window < 0:
        raise ValueError(f"window is {window}; allowed: 0 or more, or None for no window")
    _check_choice("alignment", alignment, ALIGNMENTS)
    _check_choice("precision", precision, PRECISIONS)
    _check_factor("scale", scale, "1/sqrt(head dim)")
    _check_factor("softcap", softcap, "scores as they are")
    # `scales` in ranges.py passes scale/softcap to the kernels as one float32 number.
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None and factor / softcap > LARGEST_SCALE:
        raise ValueError(
            f"softcap is {softcap!r}, {factor / softcap:.1e} times smaller than scale; "
            f"allowed: up to {LARGEST_SCALE:.1e} times"
        )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of those that are allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def _check_factor(name: str, value: object, default: str) -> None:
    """Raise ValueError unless value is None or a number that the kernels can take as a factor."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_SCALE <= value <= LARGEST_SCALE:
        raise ValueError(
            f"{name} is {value!r}; allowed: a number from {LEAST_SCALE:.1e} to "
            f"{LARGEST_SCALE:.1e}, or None for {default}"
        )


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError or ValueError unless q, k and v fit together."""
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
        _check_equal(name, "dtype", x.dtype, q.dtype)
        _check_equal(name, "head dim", x.shape[-1], q.shape[-1])
        _check_equal(name, "batch", x.shape[0], q.shape[0])
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they must be equal")
    if q.dim() == 4 and q.shape[1] != k.shape[1]:
        heads = q.shape[1]
        key_heads = k.shape[1]
        if key_heads == 0 or heads % key_heads != 0:
            raise ValueError(
                f"k has {key_heads} heads and q {heads}; q's must be a multiple of k's"
            )


def _check_equal(name: str, what: str, value: object, q_value: object) -> None:
    """Raise ValueError unless a property of the tensor `name` equals that of q."""
    if value != q_value:
        raise ValueError(f"{name} has {what} {value}, q {q_value}; they must be equal")


def check_documents(q: Tensor, k: Tensor, document_ids: Tensor) -> None:
    """Raise unless document_ids are documents of q's and k's positions, or their bounds.

    Args:
        q: queries that have passed `check_call`.
        k: keys that have passed `check_call`.
        document_ids: integers (B, T), or a result of `document_bounds`.

    Raises:
        TypeError: not a tensor of integers.
        ValueError: a shape or device does not fit, or there are not as many queries as keys.
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
            f"document_ids has shape {tuple(document_ids.shape)}; allowed: "
            f"(batch, seq) = {shape}, or what document_bounds makes of such"
        )
