"""FlashAttention as a staircase: three kernels of Triton whose flags are the steps to a fast one.

    forward   O = softmax(scale · Q Kᵀ) V       a program per BLOCK_M queries, walking over keys
    dK, dV    dV = Pᵀ dO,  dK = scale · dSᵀ Q   a program per BLOCK_N keys, walking over queries
    dQ        dQ = scale · dS K                 a program per BLOCK_M queries, walking over keys

with P = exp(S − LSE) and dS = P ∘ (dO Vᵀ − Δ), Δ = rowsum(dO ∘ O).

Attention is causal. q, k and v have the shape (H, T, D), T is a multiple of the tiles, and D is a
power of two. The shipped kernels (`kernels/flash_attention`) also handle windows, documents, shared
keys and any length. That is left out here, so that the steps can be seen. The flags, in the order
of the steps:

    SKIP      tiles that the mask hides are not visited: half of the work
    SPLIT     only tiles that the mask cuts compare indices; the others are a loop of their own
    TMA       tiles are loaded through tensor descriptors: one thread asks, and no registers hold
              addresses
    FUSED     one backward pass: a program that computes dS for dK adds dS K to dQ, which takes
              five matmuls instead of seven

Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._dispatch import interpreted, launch, tl, triton

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x · log2 e), and the GPU computes exp2


@triton.jit
def load(ptr, desc, row, offsets, TMA: tl.constexpr, D: tl.constexpr):
    """Return the tile of rows `row + offsets` of a (H·T, D) matrix."""
    if TMA:
        # The descriptor knows shape and strides. It needs the coordinates of the tile's first
        # element only.
        return desc.load([row, 0])
    # int64: H·T·D may exceed 2**31 elements. No mask: T is a multiple of the tiles.
    return tl.load(ptr + (row + offsets).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :])


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
    """Compute BLOCK_M rows of o, and their log-sum-exp in units of log2."""
    # The last rows see most keys. They start first, so that no long program is left at the end.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row0 = tl.program_id(1) * length  # first row of this head in the (H·T, D) matrix
    offsets = tl.arange(0, BLOCK_M)
    rows = begin + offsets
    q = load(q_ptr, None, row0 + begin, offsets, False, D)  # stays in registers for the whole walk
    # Sums over keys of p·v and of p, both relative to the running maximum.
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    seen = begin // BLOCK_N * BLOCK_N  # every row of the tile sees all keys before this one
    last = length
    if SKIP:
        # Keys after the last row of the tile are hidden from all of its rows.
        last = tl.minimum(tl.cdiv(begin + BLOCK_M, BLOCK_N) * BLOCK_N, length)
    cols = tl.arange(0, BLOCK_N)
    first = 0
    # SPLIT: first the tiles that need no comparison of indices, then those on the diagonal. The
    # outer loop is unrolled, so these are two loops.
    for MASKED in tl.static_range(0 if SPLIT else 1, 2):
        stop = last if MASKED else seen
        # Fold keys [first, stop) into the running softmax of these rows.
        for start in tl.range(first, stop, BLOCK_N):
            s = tl.dot(q, load(k_ptr, k_desc, row0 + start, cols, TMA, D).T) * scale_log2
            if MASKED:  # a query sees keys up to its own position
                s = tl.where(rows[:, None] >= (start + cols)[None, :], s, float("-inf"))
            # The largest score so far is subtracted, so that exp2 cannot overflow.
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # At most 1, so 16 bits can hold it for the product with v.
            p = tl.exp2(s - new_max[:, None])
            # What was summed with the old maximum is brought to the new one. In the first tile
            # row_max is -inf, and the factor is 0.
            shrink = tl.exp2(row_max - new_max)
            row_sum = row_sum * shrink + tl.sum(p, 1)
            # v is loaded after the scores are used, so that its load overlaps with the softmax.
            v = load(v_ptr, v_desc, row0 + start, cols, TMA, D)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
            row_max = new_max
        first = stop
    # log2 Σ exp2(s) of each row: with it, backward has P without a maximum or a sum.
    at = (row0 + rows).to(tl.int64)
    tl.store(lse2_ptr + at, row_max + tl.log2(row_sum))
    tl.store(
        o_ptr + at[:, None] * D + tl.arange(0, D)[None, :],
        (acc / row_sum[:, None]).to(o_ptr.dtype.element_ty),
    )


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute Δ = rowsum(dO ∘ O), the part of softmax's backward that is one number per row.

    It equals rowsum(dP ∘ P), and costs a read of O in place of another walk over the keys.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    # dP = dO Vᵀ and O = P V, so Σ_j dP_ij·P_ij = Σ_d dO_id·O_id.
    product = tl.load(o_ptr + at).to(tl.float32) * tl.load(do_ptr + at).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(product, 1))


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
    begin = tl.program_id(0) * BLOCK_N  # the first keys are seen by most queries, and start first
    row0 = tl.program_id(1) * length
    offsets = tl.arange(0, BLOCK_N)
    cols = begin + offsets
    # K and V of this program stay for the whole walk. Only tiles of queries are loaded in it, by
    # TMA if the flag is set.
    k = load(k_ptr, None, row0 + begin, offsets, False, D)
    v = load(v_ptr, None, row0 + begin, offsets, False, D)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    first = 0
    last = length
    if SKIP:
        # Queries before the first key of the tile see none of its keys.
        first = begin // BLOCK_M * BLOCK_M
    if SPLIT:
        # All later queries see all keys of the tile, and need no mask.
        last = tl.minimum(tl.cdiv(begin + BLOCK_N, BLOCK_M) * BLOCK_M, length)
    rows = tl.arange(0, BLOCK_M)
    # SPLIT: first the queries from `last` on, without a mask, then the others.
    for MASKED in tl.static_range(0 if SPLIT else 1, 2):
        start_row = first if MASKED else last
        stop_row = last if MASKED else length
        # Fold these queries into dK / scale and dV.
        for start in tl.range(start_row, stop_row, BLOCK_M):
            q = load(q_ptr, q_desc, row0 + start, rows, TMA, D)
            do = load(do_ptr, do_desc, row0 + start, rows, TMA, D)
            lse2 = tl.load(lse2_ptr + row0 + start + rows)
            delta = tl.load(delta_ptr + row0 + start + rows)
            # Scores as (keys, queries): then p and ds are the left factors of dV and dK as they
            # are, and no tile is transposed through shared memory.
            s = tl.dot(k, q.T)
            dp = tl.dot(v, do.T)
            # P is recomputed, not read: it is never in memory.
            p = tl.exp2(s * scale_log2 - lse2[None, :])
            if MASKED:
                p = tl.where((start + rows)[None, :] >= cols[:, None], p, 0.0)
            # dV = Pᵀ dO: p is transposed already.
            dv = tl.dot(p.to(do.dtype), do, dv)
            # The backward of softmax. Its factor `scale` is applied once, to the finished dK.
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            # dK = dSᵀ Q, and ds is transposed already.
            dk = tl.dot(ds, q, dk)
            if FUSED:
                # dQ = dS K needs ds the other way around: the one transposition that FUSED costs.
                dq = tl.dot(ds.T, k)
                # Other programs add to the same rows of dQ. TMA adds in the L2 cache: the program
                # waits only until its tile has been read.
                if ATOMIC:
                    dq_desc.atomic_add([row0 + start, 0], dq)
                else:
                    at = (row0 + start + rows).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
                    tl.atomic_add(dq_ptr + at, dq, sem="relaxed")
    at = (row0 + cols).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty))


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
    """Compute BLOCK_M rows of dQ."""
    # As in the forward: the last rows see most keys and start first.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row0 = tl.program_id(1) * length
    offsets = tl.arange(0, BLOCK_M)
    rows = begin + offsets
    q = load(q_ptr, None, row0 + begin, offsets, False, D)
    do = load(do_ptr, None, row0 + begin, offsets, False, D)
    # One number per row, loaded once: all keys of a row share them.
    lse2 = tl.load(lse2_ptr + row0 + rows)
    delta = tl.load(delta_ptr + row0 + rows)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    # The two walks over keys are those of the forward.
    seen = begin // BLOCK_N * BLOCK_N
    last = length
    if SKIP:
        last = tl.minimum(tl.cdiv(begin + BLOCK_M, BLOCK_N) * BLOCK_N, length)
    cols = tl.arange(0, BLOCK_N)
    first = 0
    for MASKED in tl.static_range(0 if SPLIT else 1, 2):
        stop = last if MASKED else seen
        # Fold keys [first, stop) into dQ / scale.
        for start in tl.range(first, stop, BLOCK_N):
            # k is used twice: for the scores, and for dQ.
            k = load(k_ptr, k_desc, row0 + start, cols, TMA, D)
            v = load(v_ptr, v_desc, row0 + start, cols, TMA, D)
            s = tl.dot(q, k.T)
            dp = tl.dot(do, v.T)
            p = tl.exp2(s * scale_log2 - lse2[:, None])
            if MASKED:  # 0 here, where the forward had -inf
                p = tl.where(rows[:, None] >= (start + cols)[None, :], p, 0.0)
            # s, dp and p are those of `dkdv_kernel`, computed again: 7 matmuls in place of 5.
            dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq)
        first = stop
    at = (row0 + rows).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty))


@dataclass(frozen=True)
class Tile:
    """Tile of a kernel.

    Attributes:
        m: queries.
        n: keys.
        warps: warps of a program.
        stages: loads in flight.
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Step:
    """One step of the staircase: its flags, and the tiles of its kernels, see the module."""

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
        if not self.skip:
            return length**2
        pairs = 0
        if kernel == "dkdv":
            # A program has keys, and visits queries from the first tile that sees them.
            tile = self.dkdv
            for begin in range(0, length, tile.n):
                first_query = begin // tile.m * tile.m
                pairs += (length - first_query) * tile.n
            return pairs
        tile = getattr(self, kernel)
        for begin in range(0, length, tile.m):
            last_key = math.ceil((begin + tile.m) / tile.n) * tile.n
            pairs += min(last_key, length) * tile.m
        return pairs

    def matmul_flops(self, length: int) -> dict[str, int]:
        """Return FLOPs of `fwd` and `bwd` over 2 · head dim, for all visited tiles of one head.

        Masked pairs in visited tiles count.
        """
        if self.fused:
            backward_pairs = 5 * self.visited("dkdv", length)
        else:
            backward_pairs = 4 * self.visited("dkdv", length) + 3 * self.visited("dq", length)
        return {"fwd": 2 * self.visited("forward", length), "bwd": backward_pairs}


def descriptors(tensors: Sequence[Tensor], rows: int, wanted: bool) -> list[object]:
    """Return a tensor descriptor per (H, T, D) tensor, of tiles (rows, D). None if not wanted."""
    if not wanted:
        return [None] * len(tensors)
    from triton.tools.tensor_descriptor import TensorDescriptor

    # A view (H·T, D): a tile is then two coordinates, whatever the head.
    return [
        TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, x.shape[-1]]) for x in tensors
    ]


def forward(step: Step, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return o (H, T, D) for (H, T, D), and the log-sum-exp in units of log2, (H, T) in fp32."""
    heads, length, head_dim = q.shape
    tile = step.forward
    o = torch.empty_like(q)
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


def whole_matrix_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv) by the formula with T × T matrices, for `torch.compile`.

    The forward saved no T × T matrix. This backward builds S, P, dP and dS in memory: the compiler
    fuses what stands between the matmuls, but no matmul into the next one.
    """
    length, head_dim = q.shape[1:]
    scale = head_dim**-0.5
    s = (q @ k.mT).float() * (scale * LOG2_E)
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    # P from the saved log-sum-exp, as in the kernels: without a maximum or a sum.
    p = torch.exp2(s - lse2[..., None]).masked_fill(hidden, 0.0)
    dv = p.to(do.dtype).mT @ do
    dp = (do @ v.mT).float()
    delta = (do.float() * o.float()).sum(-1, keepdim=True)
    ds = (p * (dp - delta)).to(q.dtype)
    return scale * (ds @ k), scale * (ds.mT @ q), dv


def backward(
    step: Step, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv), all (H, T, D)."""
    heads, length, head_dim = q.shape
    scale = head_dim**-0.5
    flags = {"SKIP": step.skip, "SPLIT": step.split, "TMA": step.tma, "D": head_dim}
    delta = torch.empty_like(lse2)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    # Programs add to a fused dQ, so it begins with zeros, in fp32.
    dq = torch.zeros_like(q, dtype=torch.float32) if step.fused else torch.empty_like(q)
    # 16 rows per program. All heads are one matrix here, as each row stands for itself.
    launch(delta_kernel, (heads * length // 16,), o, do, delta, D=head_dim, BLOCK_M=16)
    tile = step.dkdv
    # Triton's interpreter has no reductions through descriptors.
    # With a descriptor the additions are asynchronous. Otherwise each element is an atomic of its
    # own.
    atomic = step.fused and not interpreted()
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
