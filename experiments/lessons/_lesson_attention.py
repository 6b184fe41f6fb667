"""FlashAttention as a staircase: three kernels of Triton whose flags are the steps to a fast one.

    forward   O = softmax(scale · Q Kᵀ) V       a program per BLOCK_M queries, walking over keys
    dK, dV    dV = Pᵀ dO,  dK = scale · dSᵀ Q   a program per BLOCK_N keys, walking over queries
    dQ        dQ = scale · dS K                 a program per BLOCK_M queries, walking over keys

with P = exp(S − LSE) and dS = P ∘ (dO Vᵀ − Δ), Δ = rowsum(dO ∘ O). Causal, q, k, v of (H, T, D), T
a multiple of the tiles, D a power of two: what the shipped kernels (`kernels/flash_attention`) do
for windows, documents, shared keys and any length is left out, so that the steps can be seen. The
flags, in the order of the steps:

    SKIP      tiles that the mask hides are not visited: half of the work
    SPLIT     only tiles that the mask cuts compare indices; the others are a loop of their own
    TMA       tiles are loaded through tensor descriptors: one thread asks, and no registers hold
              addresses
    FUSED     one backward pass: a program that computes dS for dK adds dS K to dQ, which takes
              five matmuls instead of seven

Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._dispatch import interpreted, launch, tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def load(ptr, desc, row, offsets, TMA: tl.constexpr, D: tl.constexpr):
    """The tile of rows `row + offsets` of a (H·T, D) matrix."""
    if TMA:
        return desc.load([row, 0])
    return tl.load(ptr + (row + offsets).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def forward_walk(
    acc,
    row_sum,
    row_max,
    q,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    row0,
    rows,
    first,
    last,
    scale_log2,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold keys [first, last) into the running softmax of these rows."""
    cols = tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        s = tl.dot(q, load(k_ptr, k_desc, row0 + start, cols, TMA, D).T) * scale_log2
        if MASKED:
            s = tl.where(rows[:, None] >= (start + cols)[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        v = load(v_ptr, v_desc, row0 + start, cols, TMA, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    o_ptr,
    lse2_ptr,
    length,
    scale_log2,
    SKIP: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M rows of o, and their log-sum-exp in units of log2."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    row0 = tl.program_id(1) * length
    offsets = tl.arange(0, BLOCK_M)
    rows = begin + offsets
    q = load(q_ptr, None, row0 + begin, offsets, False, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    seen = begin // BLOCK_N * BLOCK_N  # every row of the tile sees all keys before
    first = 0
    last = length
    if SKIP:
        last = tl.minimum(tl.cdiv(begin + BLOCK_M, BLOCK_N) * BLOCK_N, length)
    if SPLIT:
        acc, row_sum, row_max = forward_walk(
            acc,
            row_sum,
            row_max,
            q,
            k_ptr,
            v_ptr,
            k_desc,
            v_desc,
            row0,
            rows,
            0,
            seen,
            scale_log2,
            False,
            TMA,
            D,
            BLOCK_N,
        )
        first = seen
    acc, row_sum, row_max = forward_walk(
        acc,
        row_sum,
        row_max,
        q,
        k_ptr,
        v_ptr,
        k_desc,
        v_desc,
        row0,
        rows,
        first,
        last,
        scale_log2,
        True,
        TMA,
        D,
        BLOCK_N,
    )
    at = (row0 + rows).to(tl.int64)
    tl.store(lse2_ptr + at, row_max + tl.log2(row_sum))
    tl.store(
        o_ptr + at[:, None] * D + tl.arange(0, D)[None, :],
        (acc / row_sum[:, None]).to(o_ptr.dtype.element_ty),
    )


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Δ = rowsum(dO ∘ O)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    product = tl.load(o_ptr + at).to(tl.float32) * tl.load(do_ptr + at).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(product, 1))


@triton.jit
def dkdv_walk(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    q_desc,
    do_desc,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    dq_desc,
    row0,
    cols,
    first,
    last,
    scale_log2,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    FUSED: tl.constexpr,
    ATOMIC: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Fold queries [first, last) into dK / scale and dV; scores are transposed, (keys, queries)."""
    rows = tl.arange(0, BLOCK_M)
    for start in tl.range(first, last, BLOCK_M):
        q = load(q_ptr, q_desc, row0 + start, rows, TMA, D)
        do = load(do_ptr, do_desc, row0 + start, rows, TMA, D)
        lse2 = tl.load(lse2_ptr + row0 + start + rows)
        delta = tl.load(delta_ptr + row0 + start + rows)
        s = tl.dot(k, q.T)
        dp = tl.dot(v, do.T)
        p = tl.exp2(s * scale_log2 - lse2[None, :])
        if MASKED:
            p = tl.where((start + rows)[None, :] >= cols[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        if FUSED:
            dq = tl.dot(ds.T, k)
            # by TMA, which adds in the L2: the program waits only until its tile has been read
            if ATOMIC:
                dq_desc.atomic_add([row0 + start, 0], dq)
            else:
                at = (row0 + start + rows).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
                tl.atomic_add(dq_ptr + at, dq, sem="relaxed")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    q_desc,
    do_desc,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    dq_desc,
    dk_ptr,
    dv_ptr,
    length,
    scale,
    scale_log2,
    SKIP: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    FUSED: tl.constexpr,
    ATOMIC: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_N rows of dK and dV.

    FUSED: also add their share of dQ / scale to the fp32 matrix at dq_ptr.
    """
    begin = tl.program_id(0) * BLOCK_N  # the first keys are seen by most queries
    row0 = tl.program_id(1) * length
    offsets = tl.arange(0, BLOCK_N)
    cols = begin + offsets
    k = load(k_ptr, None, row0 + begin, offsets, False, D)
    v = load(v_ptr, None, row0 + begin, offsets, False, D)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    first = 0
    last = length
    if SKIP:
        first = begin // BLOCK_M * BLOCK_M
    if SPLIT:
        # all later queries see all keys
        last = tl.minimum(tl.cdiv(begin + BLOCK_N, BLOCK_M) * BLOCK_M, length)
        dk, dv = dkdv_walk(
            dk,
            dv,
            k,
            v,
            q_ptr,
            do_ptr,
            q_desc,
            do_desc,
            lse2_ptr,
            delta_ptr,
            dq_ptr,
            dq_desc,
            row0,
            cols,
            last,
            length,
            scale_log2,
            False,
            TMA,
            FUSED,
            ATOMIC,
            D,
            BLOCK_M,
        )
    dk, dv = dkdv_walk(
        dk,
        dv,
        k,
        v,
        q_ptr,
        do_ptr,
        q_desc,
        do_desc,
        lse2_ptr,
        delta_ptr,
        dq_ptr,
        dq_desc,
        row0,
        cols,
        first,
        last,
        scale_log2,
        True,
        TMA,
        FUSED,
        ATOMIC,
        D,
        BLOCK_M,
    )
    at = (row0 + cols).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty))


@triton.jit
def dq_walk(
    dq,
    q,
    do,
    lse2,
    delta,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    row0,
    rows,
    first,
    last,
    scale_log2,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold keys [first, last) into dQ / scale."""
    cols = tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        k = load(k_ptr, k_desc, row0 + start, cols, TMA, D)
        v = load(v_ptr, v_desc, row0 + start, cols, TMA, D)
        s = tl.dot(q, k.T)
        dp = tl.dot(do, v.T)
        p = tl.exp2(s * scale_log2 - lse2[:, None])
        if MASKED:
            p = tl.where(rows[:, None] >= (start + cols)[None, :], p, 0.0)
        dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq)
    return dq


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    k_desc,
    v_desc,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    length,
    scale,
    scale_log2,
    SKIP: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M rows of dQ."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row0 = tl.program_id(1) * length
    offsets = tl.arange(0, BLOCK_M)
    rows = begin + offsets
    q = load(q_ptr, None, row0 + begin, offsets, False, D)
    do = load(do_ptr, None, row0 + begin, offsets, False, D)
    lse2 = tl.load(lse2_ptr + row0 + rows)
    delta = tl.load(delta_ptr + row0 + rows)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    seen = begin // BLOCK_N * BLOCK_N
    first = 0
    last = length
    if SKIP:
        last = tl.minimum(tl.cdiv(begin + BLOCK_M, BLOCK_N) * BLOCK_N, length)
    if SPLIT:
        dq = dq_walk(
            dq,
            q,
            do,
            lse2,
            delta,
            k_ptr,
            v_ptr,
            k_desc,
            v_desc,
            row0,
            rows,
            0,
            seen,
            scale_log2,
            False,
            TMA,
            D,
            BLOCK_N,
        )
        first = seen
    dq = dq_walk(
        dq,
        q,
        do,
        lse2,
        delta,
        k_ptr,
        v_ptr,
        k_desc,
        v_desc,
        row0,
        rows,
        first,
        last,
        scale_log2,
        True,
        TMA,
        D,
        BLOCK_N,
    )
    at = (row0 + rows).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty))


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, warps of a program, loads in flight."""

    m: int
    n: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Step:
    """One step of the staircase: its flags, and the tiles of its kernels."""

    name: str
    forward: Tile
    dkdv: Tile
    dq: Tile
    skip: bool = False
    split: bool = False
    tma: bool = False
    fused: bool = False

    def visited(self, kernel: str, length: int) -> int:
        """Return the (query, key) pairs of the tiles that a kernel multiplies, of one head."""
        tile, own = getattr(self, kernel), "n" if kernel == "dkdv" else "m"
        if not self.skip:
            return length**2
        block = getattr(tile, own)
        other = tile.m if own == "n" else tile.n
        edges = range(0, length, block)
        if own == "n":
            return sum((length - begin // other * other) * block for begin in edges)
        return sum(min(-(-(begin + block) // other) * other, length) * block for begin in edges)

    def matmul_flops(self, length: int) -> dict[str, int]:
        """Return FLOPs of `fwd` and `bwd` over 2 · head dim, for all visited tiles of one head.

        Masked pairs in visited tiles count.
        """
        two_passes = 4 * self.visited("dkdv", length) + 3 * self.visited("dq", length)
        return {
            "fwd": 2 * self.visited("forward", length),
            "bwd": 5 * self.visited("dkdv", length) if self.fused else two_passes,
        }


def descriptors(tensors: Sequence[Tensor], rows: int, wanted: bool) -> list[object]:
    """Return a tensor descriptor per (H, T, D) tensor, of tiles (rows, D). None if not wanted."""
    if not wanted:
        return [None] * len(tensors)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [
        TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, x.shape[-1]]) for x in tensors
    ]


def forward(step: Step, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return o (H, T, D) for (H, T, D), and the log-sum-exp in units of log2, (H, T) in fp32."""
    heads, length, head_dim = q.shape
    tile, o = step.forward, torch.empty_like(q)
    lse2 = torch.empty(heads, length, device=q.device)
    launch(
        forward_kernel,
        (length // tile.m, heads),
        q,
        k,
        v,
        *descriptors((k, v), tile.n, step.tma),
        o,
        lse2,
        length,
        head_dim**-0.5 * LOG2_E,
        SKIP=step.skip,
        SPLIT=step.split,
        TMA=step.tma,
        D=head_dim,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return o, lse2


def backward(
    step: Step, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv), all (H, T, D)."""
    heads, length, head_dim = q.shape
    scale, flags = (
        head_dim**-0.5,
        {"SKIP": step.skip, "SPLIT": step.split, "TMA": step.tma, "D": head_dim},
    )
    delta, dk, dv = torch.empty_like(lse2), torch.empty_like(k), torch.empty_like(v)
    dq = torch.zeros_like(q, dtype=torch.float32) if step.fused else torch.empty_like(q)
    launch(delta_kernel, (heads * length // 16,), o, do, delta, D=head_dim, BLOCK_M=16)
    tile = step.dkdv
    atomic = step.fused and not interpreted()  # which has no reductions through descriptors
    launch(
        dkdv_kernel,
        (length // tile.n, heads),
        q,
        k,
        v,
        do,
        *descriptors((q, do), tile.m, step.tma),
        lse2,
        delta,
        dq,
        *descriptors((dq,), tile.m, atomic),
        dk,
        dv,
        length,
        scale,
        scale * LOG2_E,
        **flags,
        FUSED=step.fused,
        ATOMIC=atomic,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if step.fused:
        return dq.mul_(scale).to(q.dtype), dk, dv
    tile = step.dq
    launch(
        dq_kernel,
        (length // tile.m, heads),
        q,
        k,
        v,
        do,
        *descriptors((k, v), tile.n, step.tma),
        lse2,
        delta,
        dq,
        length,
        scale,
        scale * LOG2_E,
        **flags,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return dq, dk, dv
