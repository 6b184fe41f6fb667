"""Launchers of the backward kernels; their math and shapes are in backward.py."""

from dataclasses import dataclass

import torch

from .._dispatch import launch
from .._triton import cdiv, next_power_of_2
from .backward import (
    FEW_ROWS,
    LOG2_E,
    LONG_DELTA_ROWS,
    ROW_PADDING,
    SHORT_DELTA_ROWS,
    delta_kernel,
    dkdv_kernel,
    dq_kernel,
)
from .backward_joint import joint_kernel
from .configs import POINTER_TILES, Tile
from .descriptors import MAX_COORDINATE, flat_descriptor, row_descriptors
from .options import Problem
from .split import launch_sum, parts_like


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


def _block_d(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def _constants(saved: Saved, problem: Problem) -> dict[str, int | bool | str]:
    head_dim = saved.q.shape[3]
    return {
        "HAS_LO": problem.has_lo, "HAS_HI": problem.has_hi,
        "HAS_DOC": problem.has_doc, "HEAD_DIM": head_dim, "BLOCK_D": _block_d(head_dim),
        "PRECISION": problem.precision,
    }


def launch_delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
                 do: torch.Tensor, dq_sum: torch.Tensor | None = None) -> Saved:
    """Run `delta_kernel` on what the forward saved: q, k, v, o, lse as in forward.py, do like o; clear dq_sum.

    Last dimensions are contiguous, and nothing is empty.
    """
    batch, heads, query_count, head_dim = q.shape
    padded_count = cdiv(query_count, ROW_PADDING) * ROW_PADDING
    delta = torch.empty((batch, heads, padded_count), dtype=torch.float32, device=q.device)
    lse2 = torch.empty_like(delta)
    rows = SHORT_DELTA_ROWS if delta.numel() <= FEW_ROWS or dq_sum is not None else LONG_DELTA_ROWS
    launch(delta_kernel, (padded_count // rows * batch * heads,), o, do, lse, delta, lse2, dq_sum,
           *o.stride()[:3], *do.stride()[:3], heads, query_count, padded_count,
           HEAD_DIM=head_dim, BLOCK_D=_block_d(head_dim), BLOCK_M=rows)
    return Saved(q, k, v, do, delta, lse2)


def launch_dkdv(saved: Saved, dk: torch.Tensor, dv: torch.Tensor, problem: Problem, tile: Tile,
                dq_sum: torch.Tensor | None = None, parts: int = 0) -> None:
    """Fill dk and dv.

    With `dq_sum`, zeros of (B, H, Tq, D) in fp32, add dQ / scale to it in the same pass; with `parts` too, these are
    the tensors of shares that `launch_split` describes.
    """
    q, k, v, do, delta, lse2 = saved.q, saved.k, saved.v, saved.do, saved.delta, saved.lse2
    batch, kv_heads, key_count = k.shape[:3]
    tma = tile.tma and delta.numel() < MAX_COORDINATE
    q_desc, do_desc = row_descriptors((q, do), tile.block_m) if tma else (None, None)
    use_tma = q_desc is not None
    if tile.tma and not use_tma and not parts:  # the shares are laid out by this tile
        tile = POINTER_TILES.get(("dkdv", _block_d(q.shape[3])), tile)
    delta_desc, lse2_desc = (flat_descriptor(x, tile.block_m) if use_tma else None for x in (delta, lse2))
    launch(dkdv_kernel, (cdiv(key_count, tile.block_n) * batch * kv_heads, max(parts, 1)),
           q, k, v, do, delta, lse2, q_desc, do_desc, delta_desc, lse2_desc, dk, dv, dv if dq_sum is None else dq_sum,
           problem.doc_first, problem.doc_last, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3],
           *dk.stride()[-4:-1], *dv.stride()[-4:-1], kv_heads, q.shape[1] // kv_heads, *saved.counts(),
           problem.lo, problem.hi, problem.scale, problem.scale * LOG2_E.value, batch * kv_heads, tile.chunk,
           RAGGED=q.shape[2] % tile.block_m != 0, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
           HEAD_GROUP=tile.head_group, TMA=use_tma, FUSED=dq_sum is not None and not parts, SPLIT=parts > 0,
           **_constants(saved, problem), **tile.launch_options())


def launch_split(saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, problem: Problem,
                 tile: Tile) -> None:
    """Fill dq, dk and dv in one pass of programs that take `tile.chunk` queries each, and a second that sums.

    Without a lower bound of the band and without documents. The shares take 4 bytes · B · D · (Hk · Tk for each chunk
    of queries, twice, and H · Tq for each tile of keys).
    """
    parts = cdiv(saved.q.shape[2], tile.chunk)
    dq_parts = parts_like(dq, cdiv(saved.k.shape[2], tile.block_n))
    dk_parts, dv_parts = parts_like(dk, parts), parts_like(dv, parts)
    launch_dkdv(saved, dk_parts, dv_parts, problem, tile, dq_parts, parts)
    launch_sum((dq_parts, dk_parts, dv_parts), (dq, dk, dv), problem, tile)


def launch_dq(saved: Saved, dq: torch.Tensor, problem: Problem, tile: Tile) -> None:
    """Fill dq."""
    q, k, v, do, delta, lse2 = saved.q, saved.k, saved.v, saved.do, saved.delta, saved.lse2
    batch, heads, query_count = q.shape[:3]
    k_desc, v_desc = row_descriptors((k, v), tile.block_n) if tile.tma else (None, None)
    if tile.tma and k_desc is None:
        tile = POINTER_TILES.get(("dq", _block_d(q.shape[3])), tile)
    launch(dq_kernel, (cdiv(query_count, tile.block_m) * batch * heads,),
           q, k, v, do, delta, lse2, k_desc, v_desc, dq, problem.doc_first, problem.doc_last,
           *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
           heads, heads // k.shape[1], *saved.counts(), problem.lo, problem.hi,
           problem.scale, problem.scale * LOG2_E.value, batch * heads,
           RAGGED=k.shape[2] % tile.block_n != 0, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
           HEAD_GROUP=tile.head_group, TMA=k_desc is not None, **_constants(saved, problem), **tile.launch_options())


def launch_joint(saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, problem: Problem, dkdv_tile: Tile,
                 dq_tile: Tile) -> None:
    """Fill dq, dk and dv in one launch; the tiles agree in their launch options."""
    q, k, v, do, delta, lse2 = saved.q, saved.k, saved.v, saved.do, saved.delta, saved.lse2
    batch, heads, query_count = q.shape[:3]
    kv_heads, key_count = k.shape[1:3]
    q_desc, do_desc = row_descriptors((q, do), dkdv_tile.block_m) if dkdv_tile.tma else (None, None)
    k_desc, v_desc = row_descriptors((k, v), dq_tile.block_n) if dq_tile.tma else (None, None)
    stats = (None, None)
    if q_desc is not None:
        stats = (flat_descriptor(delta, dkdv_tile.block_m), flat_descriptor(lse2, dkdv_tile.block_m))
    programs = cdiv(key_count, dkdv_tile.block_n) * kv_heads + cdiv(query_count, dq_tile.block_m) * heads
    launch(joint_kernel, (programs * batch,), q, k, v, do, delta, lse2, q_desc, do_desc,
           *stats, k_desc, v_desc, dq, dk, dv, problem.doc_first, problem.doc_last,
           *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
           *dk.stride()[:3], *dv.stride()[:3], heads, kv_heads, *saved.counts(), problem.lo, problem.hi,
           problem.scale, problem.scale * LOG2_E.value, batch,
           KEY_BLOCK_M=dkdv_tile.block_m, KEY_BLOCK_N=dkdv_tile.block_n, KEY_GROUP=dkdv_tile.head_group,
           KEY_RAGGED=query_count % dkdv_tile.block_m != 0, KEY_TMA=q_desc is not None,
           QUERY_BLOCK_M=dq_tile.block_m, QUERY_BLOCK_N=dq_tile.block_n, QUERY_GROUP=dq_tile.head_group,
           QUERY_RAGGED=key_count % dq_tile.block_n != 0, QUERY_TMA=k_desc is not None,
           **_constants(saved, problem), **dkdv_tile.launch_options())


def launch_backward(saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, problem: Problem, passes: str,
                    dkdv_tile: Tile, dq_tile: Tile) -> None:
    """Fill dq, dk and dv in one of `configs.PASSES`."""
    if passes == "split":
        launch_split(saved, dq, dk, dv, problem, dkdv_tile)
    elif passes == "joint":
        launch_joint(saved, dq, dk, dv, problem, dkdv_tile, dq_tile)
    else:
        launch_dkdv(saved, dk, dv, problem, dkdv_tile)
        launch_dq(saved, dq, problem, dq_tile)
