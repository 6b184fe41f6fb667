"""FlashAttention-2 in plain torch: the tiled algorithm, to be read beside the paper's pseudocode.

Shapes inside this file: q (B, Hk, G, Tq, D), k and v (B, Hk, 1, Tk, D), where G query heads share
one key head; lse (B, Hk, G, Tq). Statistics are float32, or float64 for float64 inputs (which makes
`gradcheck` possible). It runs on any device and is what the public function uses on a CPU. It is a
reference, not fast.

Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..reference import wide
from .options import Problem

BLOCK = 64


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, T, D) tensors → the grouped shapes above, in the dtype of the statistics."""
    groups = q.shape[1] // max(k.shape[1], 1)
    return wide(q).unflatten(1, (k.shape[1], groups)), wide(k).unsqueeze(2), wide(v).unsqueeze(2)


def without_autocast(function: Callable) -> Callable:
    """`function(q, …)` with autocast off, which would round what is multiplied in the statistics' dtype."""

    @functools.wraps(function)
    def run(q, *args):
        # there is none on meta
        with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
            return function(q, *args)

    return run


def _seen(rows: slice, cols: slice, problem: Problem, device: torch.device) -> Tensor:
    """The mask of one tile, (1 or B, 1, 1, rows, cols)."""
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
        seen = (
            seen
            & (positions >= problem.bounds[0][:, rows, None])
            & (positions < problem.bounds[1][:, rows, None])
        )
    return seen[:, None, None]


def _tiles(count: int) -> Iterator[slice]:
    for start in range(0, count, BLOCK):
        yield slice(start, min(start + BLOCK, count))


def _skipped(rows: slice, cols: slice, problem: Problem) -> bool:
    """Whether the band hides the whole tile, so that it is never visited."""
    lo, hi = problem.band
    above = hi is not None and cols.start > rows.stop - 1 + hi
    below = lo is not None and cols.stop - 1 < rows.start - lo
    return above or below


def _scores(q: Tensor, k: Tensor, problem: Problem) -> tuple[Tensor, Tensor | float]:
    """s and its derivative by scale · q kᵀ: c · tanh(x / c) and 1 − tanh² with softcap c, else x and 1."""
    s = problem.scale * (q @ k.mT)
    if problem.softcap is None:
        return s, 1.0
    tanh = torch.tanh(s / problem.softcap)
    return problem.softcap * tanh, 1 - tanh * tanh


@without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """q (B, H, Tq, D), k and v (B, Hk, Tk, D) → o like q, lse (B, H, Tq) in float32 (float64 for float64)."""
    out_dtype = q.dtype
    q, k, v = _grouped(q, k, v)
    o = torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1], float("-inf"))
    for rows in _tiles(q.shape[-2]):
        acc = torch.zeros_like(q[..., rows, :])
        row_max = torch.full_like(acc[..., 0], float("-inf"))
        row_sum = torch.zeros_like(row_max)
        for cols in _tiles(k.shape[-2]):
            if _skipped(rows, cols, problem):
                continue
            s, _ = _scores(q[..., rows, :], k[..., cols, :], problem)
            s = s.masked_fill(~_seen(rows, cols, problem, q.device), float("-inf"))
            new_max = torch.maximum(row_max, s.amax(-1))
            # no key seen yet: any finite shift will do
            shift = new_max.masked_fill(new_max == float("-inf"), 0.0)
            p = torch.exp(s - shift[..., None])
            shrink = torch.exp(row_max - shift)
            row_sum = row_sum * shrink + p.sum(-1)
            acc = acc * shrink[..., None] + p @ v[..., cols, :]
            row_max = new_max
        empty = row_sum == 0
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
    """Recompute P from the log-sum-exp, tile by tile, and return dq, dk, dv in the dtypes of q, k, v.

    do and dlse are the gradients of o and of the log-sum-exp, whose own gradient is P: dS = P ∘ (dP
    − Δ + dlse).
    """
    out_dtype = q.dtype
    q, k, v = _grouped(q, k, v)
    do = do.to(q.dtype).reshape(q.shape)
    delta = (do * o.to(q.dtype).reshape(q.shape)).sum(-1)
    hidden = lse.reshape(delta.shape) == float("-inf")
    lse = lse.reshape(delta.shape).masked_fill(hidden, float("inf"))
    if dlse is not None:
        delta = delta - dlse.reshape(delta.shape).masked_fill(hidden, 0.0)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for cols in _tiles(k.shape[-2]):
        for rows in _tiles(q.shape[-2]):
            if _skipped(rows, cols, problem):
                continue
            s, slope = _scores(q[..., rows, :], k[..., cols, :], problem)
            p = torch.exp(s - lse[..., rows, None]).masked_fill(
                ~_seen(rows, cols, problem, q.device), 0.0
            )
            dv[..., cols, :] += (p.mT @ do[..., rows, :]).sum(2, keepdim=True)
            dp = do[..., rows, :] @ v[..., cols, :].mT
            ds = p * (dp - delta[..., rows, None]) * slope
            dq[..., rows, :] += problem.scale * ds @ k[..., cols, :]
            dk[..., cols, :] += problem.scale * (ds.mT @ q[..., rows, :]).sum(2, keepdim=True)
    return dq.flatten(1, 2).to(out_dtype), dk.squeeze(2).to(out_dtype), dv.squeeze(2).to(out_dtype)
