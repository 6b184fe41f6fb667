"""FlashAttention-2 in plain torch: the tiled algorithm, to read next to the paper's pseudocode.

Shapes inside this file: q (B, Hk, G, Tq, D); k and v (B, Hk, 1, Tk, D), where G query heads share
one key head; lse (B, Hk, G, Tq). Statistics are float32, or float64 for float64 inputs, which makes
`gradcheck` possible.

It runs on any device, and the public function uses it on a CPU. It is a reference and not fast.

Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..reference import wide
from .options import Problem

BLOCK = 64  # rows and columns of a tile


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, H, T, D) tensors in the shapes above and in the dtype of the statistics."""
    key_heads = k.shape[1]
    groups = q.shape[1] // max(key_heads, 1)
    return wide(q).unflatten(1, (key_heads, groups)), wide(k).unsqueeze(2), wide(v).unsqueeze(2)


def without_autocast(function: Callable) -> Callable:
    """Return `function` with autocast off, for functions whose first argument is a tensor.

    Autocast would round the operands of matmuls, which are in the dtype of the statistics.
    """

    @functools.wraps(function)
    def run(q, *args):
        device_type = "cpu" if q.is_meta else q.device.type  # the meta device has no autocast
        with torch.autocast(device_type, enabled=False):
            return function(q, *args)

    return run


def _seen(rows: slice, cols: slice, problem: Problem, device: torch.device) -> Tensor:
    """Return the mask of one tile, (1 or B, 1, 1, rows, cols): True for visible keys."""
    positions = torch.arange(cols.start, cols.stop, device=device)
    distance = positions - torch.arange(rows.start, rows.stop, device=device)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    lo, hi = problem.band
    if lo is not None:
        seen &= distance >= -lo
    if hi is not None:
        seen &= distance <= hi
    seen = seen[None]
    if problem.bounds is not None:
        first, after = problem.bounds[:, :, rows, None]
        seen = seen & (positions >= first) & (positions < after)
    return seen[:, None, None]


def _tiles(count: int) -> Iterator[slice]:
    """Yield slices of up to BLOCK positions that cover `count` positions."""
    for start in range(0, count, BLOCK):
        yield slice(start, min(start + BLOCK, count))


def _skipped(rows: slice, cols: slice, problem: Problem) -> bool:
    """Return whether the band hides the whole tile, so that it need not be visited."""
    lo, hi = problem.band
    above = hi is not None and cols.start > rows.stop - 1 + hi
    below = lo is not None and cols.stop - 1 < rows.start - lo
    return above or below


def _scores(q: Tensor, k: Tensor, problem: Problem) -> tuple[Tensor, Tensor | float]:
    """Return the scores s, and the derivative of s by x = scale · q kᵀ.

    They are x and 1 without softcap, c · tanh(x/c) and 1 − tanh²(x/c) with softcap c.
    """
    s = problem.scale * (q @ k.mT)
    if problem.softcap is None:
        return s, 1.0
    tanh = torch.tanh(s / problem.softcap)
    return problem.softcap * tanh, 1 - tanh * tanh


@without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of attention, computed tile by tile.

    Args:
        q: queries (B, H, Tq, D).
        k: keys (B, Hk, Tk, D).
        v: values (B, Hk, Tk, D).
        problem: mask, scale and softcap.

    Returns:
        o: tensor of q's shape and dtype.
        lse: (B, H, Tq) in float32, or float64 for float64 inputs.
    """
    out_dtype = q.dtype
    q, k, v = _grouped(q, k, v)
    o = torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1], float("-inf"))
    for rows in _tiles(q.shape[-2]):
        acc = torch.zeros_like(q[..., rows, :])  # sum of exp(s − row_max) · v
        row_max = torch.full_like(acc[..., 0], float("-inf"))
        row_sum = torch.zeros_like(row_max)  # sum of exp(s − row_max)
        for cols in _tiles(k.shape[-2]):
            if _skipped(rows, cols, problem):
                continue
            s, _ = _scores(q[..., rows, :], k[..., cols, :], problem)
            s = s.masked_fill(~_seen(rows, cols, problem, q.device), float("-inf"))
            new_max = torch.maximum(row_max, s.amax(-1))
            # A row that has seen no key yet has new_max = −∞, and −∞ − (−∞) would be NaN.
            # Any finite shift gives p = 0.
            shift = new_max.masked_fill(new_max == float("-inf"), 0.0)
            p = torch.exp(s - shift[..., None])
            shrink = torch.exp(row_max - shift)  # rescales the sums to the new maximum
            row_sum = row_sum * shrink + p.sum(-1)
            acc = acc * shrink[..., None] + p @ v[..., cols, :]
            row_max = new_max
        empty = row_sum == 0  # rows that see no key: o = 0 and lse = −∞
        o[..., rows, :] = acc / row_sum.masked_fill(empty, 1.0)[..., None]
        lse[..., rows] = (row_max + torch.log(row_sum)).masked_fill(empty, float("-inf"))
    return o.flatten(1, 2).to(out_dtype), lse.flatten(1, 2)


@without_autocast
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    problem: Problem,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in q's dtype, with P recomputed tile by tile from the log-sum-exp.

    The derivative of the log-sum-exp by s is P. So its gradient enters as dS = P ∘ (dP − Δ + dlse).

    Args:
        q, k, v, o, lse: arguments and results of `forward`.
        do: gradient of o.
        dlse: gradient of lse, or None if it is zero.
        problem: mask, scale and softcap.
    """
    out_dtype = q.dtype
    q, k, v = _grouped(q, k, v)
    do = do.to(q.dtype).reshape(q.shape)
    delta = (do * o.to(q.dtype).reshape(q.shape)).sum(-1)
    # Rows that see no key: with lse = +∞, exp(s − lse) is 0.
    hidden = lse.reshape(delta.shape) == float("-inf")
    lse = lse.reshape(delta.shape).masked_fill(hidden, float("inf"))
    if dlse is not None:
        delta = delta - dlse.reshape(delta.shape).masked_fill(hidden, 0.0)
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for cols in _tiles(k.shape[-2]):
        for rows in _tiles(q.shape[-2]):
            if _skipped(rows, cols, problem):
                continue
            s, slope = _scores(q[..., rows, :], k[..., cols, :], problem)
            seen = _seen(rows, cols, problem, q.device)
            p = torch.exp(s - lse[..., rows, None]).masked_fill(~seen, 0.0)
            # Query heads that share a key head add up: the sum over dimension 2.
            dv[..., cols, :] += (p.mT @ do[..., rows, :]).sum(2, keepdim=True)
            dp = do[..., rows, :] @ v[..., cols, :].mT
            ds = p * (dp - delta[..., rows, None]) * slope
            dq[..., rows, :] += problem.scale * ds @ k[..., cols, :]
            dk[..., cols, :] += problem.scale * (ds.mT @ q[..., rows, :]).sum(2, keepdim=True)
    return dq.flatten(1, 2).to(out_dtype), dk.squeeze(2).to(out_dtype), dv.squeeze(2).to(out_dtype)
