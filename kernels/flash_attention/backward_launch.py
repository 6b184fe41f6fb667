"""Launchers of the backward kernels; their math and shapes are in backward.py."""

from dataclasses import dataclass, replace

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .._dispatch import launch
from .._triton import cdiv
from .backward import (
    FEW_ROWS,
    LONG_DELTA_ROWS,
    ROW_PADDING,
    SHORT_DELTA_ROWS,
    delta_kernel,
    dkdv_kernel,
    dq_kernel,
)
from .configs import Tile
from .options import Problem
from .ranges import MAX_COORDINATE, block_d, described, documents, scales, variant


@dataclass(frozen=True)
class Saved:
    """What the backward kernels read: (B, H, T, D) tensors, and (B, H, padded Tq) Δ and LSE·log2(e)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    delta: torch.Tensor
    lse2: torch.Tensor

    def counts(self) -> tuple[int, int, int]:
        """Queries, keys, and rows of the padded log-sum-exp."""
        return self.q.shape[2], self.k.shape[2], self.lse2.shape[2]


def launch_delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
                 do: torch.Tensor, dq_sum: torch.Tensor | None = None, dlse: torch.Tensor | None = None) -> Saved:
    """Run `delta_kernel` on what the forward saved: q, k, v, o, lse as in forward.py, do like o; clear dq_sum.

    `dlse`, contiguous like lse, is the gradient of lse. Last dimensions are contiguous, and nothing is empty.
    """
    batch, heads, query_count, head_dim = q.shape
    padded_count = cdiv(query_count, ROW_PADDING) * ROW_PADDING
    delta = torch.empty((batch, heads, padded_count), dtype=torch.float32, device=q.device)
    lse2 = torch.empty_like(delta)
    rows = SHORT_DELTA_ROWS if delta.numel() <= FEW_ROWS or dq_sum is not None else LONG_DELTA_ROWS
    launch(delta_kernel, (padded_count // rows * batch * heads,), o, do, lse, dlse, delta, lse2, dq_sum,
           *o.stride()[:3], *do.stride()[:3], heads, query_count, padded_count,
           HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), BLOCK_M=rows)
    return Saved(q, k, v, do, delta, lse2)


def launch_dkdv(saved: Saved, dk: torch.Tensor, dv: torch.Tensor, problem: Problem, tile: Tile) -> None:
    """Fill dk and dv."""
    q, k, v, do, delta, lse2 = saved.q, saved.k, saved.v, saved.do, saved.delta, saved.lse2
    batch, kv_heads, key_count, head_dim = k.shape
    tile, (q_desc, do_desc) = described("dkdv", replace(tile, tma=tile.tma and delta.numel() < MAX_COORDINATE), q, do)
    delta_desc, lse2_desc = (
        TensorDescriptor(x, [x.numel()], [1], [tile.block_m]) if q_desc is not None else None for x in (delta, lse2))
    launch(dkdv_kernel, (cdiv(key_count, tile.block_n) * batch * kv_heads,),
           q, k, v, do, delta, lse2, q_desc, do_desc, delta_desc, lse2_desc, dk, dv, *documents(problem),
           *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
           kv_heads, q.shape[1] // kv_heads, *saved.counts(), problem.hi, problem.lo, *scales(problem),
           batch * kv_heads, V=variant(problem, tile, head_dim, q.shape[2], keys=True, tma=q_desc is not None),
           num_warps=tile.warps, num_stages=tile.stages)


def launch_dq(saved: Saved, dq: torch.Tensor, problem: Problem, tile: Tile) -> None:
    """Fill dq."""
    q, k, v, do, delta, lse2 = saved.q, saved.k, saved.v, saved.do, saved.delta, saved.lse2
    batch, heads, query_count, head_dim = q.shape
    tile, (k_desc, v_desc) = described("dq", tile, k, v)
    launch(dq_kernel, (cdiv(query_count, tile.block_m) * batch * heads,),
           q, k, v, do, delta, lse2, k_desc, v_desc, dq, *documents(problem),
           *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
           heads, heads // k.shape[1], *saved.counts(), problem.lo, problem.hi, *scales(problem), batch * heads,
           V=variant(problem, tile, head_dim, k.shape[2], keys=False, tma=k_desc is not None),
           num_warps=tile.warps, num_stages=tile.stages)
