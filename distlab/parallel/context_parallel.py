"""Context parallelism: each of P ranks has a part of every sequence, and keys and values travel.

    chunk     0  1  2  3  4  5  6  7        2P chunks of t/2 tokens; rank r has the r-th and the r-th from the end, so
    rank      0  1  2  3  3  2  1  0        that all ranks see as many pairs of query and key (zig-zag)

With B batch, H heads, K heads of keys, D head dim, t = T/P tokens of a rank:

    gathered   every rank gathers K and V (2·K·(P − 1)·t·D elements come), and each chunk sees the keys up to its end
    ulysses    all-to-all to whole sequences of H/P heads and back ((2H + 2K)·(P − 1)/P·t·D elements each way)
    ring       K and V go round, one rank further a step, beside the attention over those that are here; partial
               results are merged in fp32 by their log-sum-exp, and gradients of K and V travel
               along on the way back

The mean of a rank's gradients over data × context is that of the whole sequences' mean loss, so a
data strategy needs to know nothing of this: the backward of a gathering sums over ranks.

Source: DeepSpeed Ulysses (Jacobs et al. 2023), Ring Attention (Liu et al. 2023); zig-zag as in
striped and Llama 3's context parallelism.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.parallel.regions import Enter, SwapHeads

HOW = ("gathered", "ulysses", "ring")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Parts(NamedTuple):
    """Attention over some of the keys, `(B, H, Tq, D)` and `(B, K, Tk, D)`; the last query sees all of them.

    Args:
        forward: `(q, k, v, causal) -> (o, lse)`, without autograd.
        backward: `(q, k, v, o, lse, do, causal) -> (dq, dk, dv)`, where o and lse are those over
            all keys.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]
    ]


def zigzag_chunks(ranks: int) -> list[tuple[int, int]]:
    """Which two of 2P chunks each of P ranks has."""
    return [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]


class ZigZag:
    """Which chunks of a sequence lie on which rank of a group.

    Attributes:
        chunks: this rank's two.
    """

    def __init__(self, group: ProcessGroup):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        pairs = zigzag_chunks(self.ranks)
        self.chunks = pairs[self.rank]
        self._held = [chunk for pair in pairs for chunk in pair]  # in the order of ranks

    def local(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's two chunks of whole sequences along `dim`.

        Raises:
            ValueError: a length that 2P does not divide.
        """
        if x.shape[dim] % (2 * self.ranks):
            raise ValueError(
                f"sequences of {x.shape[dim]} tokens: {self.ranks} ranks share each in {2 * self.ranks} chunks, so "
                f"give a multiple of {2 * self.ranks}"
            )
        return self._picked(x, dim, self.chunks)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Sequences in order, from all ranks' chunks in the order of ranks."""
        return self._picked(x, dim, [self._held.index(chunk) for chunk in range(2 * self.ranks)])

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Invert `in_order`."""
        return self._picked(x, dim, self._held)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Where this rank's tokens stand in their sequence, `(t,)` in fp32."""
        return self.local(torch.arange(tokens * self.ranks, device=device, dtype=torch.float32), 0)

    def _picked(self, x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
        chunks = x.chunk(2 * self.ranks, dim)
        return torch.cat([chunks[number] for number in order], dim)


class SequenceParallel(Protocol):
    """What a model must export: `replace_ops(attention=…, positions=…)`, as `distlab.model.TransformerLM` does."""

    def replace_ops(self, **operations: Callable) -> None: ...


def share_sequences(
    model: nn.Module, group: ProcessGroup, parts: Parts, how: str = "gathered"
) -> None:
    """Let a model's attention and positions be those of a rank that has a part of every sequence.

    Args:
        parts: attention over some of the keys.
        how: one of `HOW`.

    Raises:
        TypeError: a model that cannot replace them.
        ValueError: another `how`.
    """
    if not hasattr(model, "replace_ops"):
        raise TypeError(
            f"context parallelism: {type(model).__name__} has no replace_ops(attention=…, positions=…)"
        )
    if how not in HOW:
        raise ValueError(f"context attention {how!r}: choose one of {', '.join(HOW)}")
    zigzag = ZigZag(group)
    attention = {
        "gathered": gathered_attention,
        "ulysses": ulysses_attention,
        "ring": ring_attention,
    }[how]
    model.replace_ops(attention=attention(zigzag, parts), positions=zigzag.positions)


def gathered_attention(zigzag: ZigZag, parts: Parts) -> Attention:
    """Every rank gathers K and V in one message; each of its two chunks of queries sees the keys up to its end."""

    @torch._disable_dynamo
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = Enter.apply(torch.cat((k, v.to(k.dtype)), 1), zigzag.group, 2)
        k, v = zigzag.in_order(kv, 2).chunk(2, 1)
        size = q.shape[2] // 2
        ends = [(chunk + 1) * size for chunk in zigzag.chunks]
        outs = [
            CausalPart.apply(q_part, k[:, :, :end], v[:, :, :end], parts)
            for q_part, end in zip(q.chunk(2, 2), ends, strict=True)
        ]
        return torch.cat(outs, 2)

    return attention


def ulysses_attention(zigzag: ZigZag, parts: Parts) -> Attention:
    """Attention over whole sequences for a share of the heads; fewer heads of keys than ranks are refused."""

    @torch._disable_dynamo
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for heads in (q.shape[1], k.shape[1]):
            if heads % zigzag.ranks:
                raise ValueError(
                    f"Ulysses: {zigzag.ranks} ranks cannot share {heads} heads evenly: take gathered or ring, or "
                    "fewer ranks"
                )
        swap = partial(_swapped, zigzag=zigzag)
        out = CausalPart.apply(swap(q), swap(k), swap(v), parts)
        return SwapHeads.apply(zigzag.by_rank(out, 2), zigzag.group, False)

    return attention


def _swapped(x: Tensor, zigzag: ZigZag) -> Tensor:
    return zigzag.in_order(SwapHeads.apply(x, zigzag.group, True), 2)


class CausalPart(Function):
    """Causal attention whose last query sees all keys, differentiable in q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> Tensor:
        o, lse = parts.forward(q, k, v, True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.parts = parts
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        return *ctx.parts.backward(*ctx.saved_tensors, do, True), None


def ring_attention(zigzag: ZigZag, parts: Parts) -> Attention:
    """K and V go round the ranks; see `Ring`."""

    @torch._disable_dynamo
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Ring.apply(q, k, v, zigzag, parts)

    return attention


class Ring(Function):
    """Attention over keys that go round: in step s this rank has those of rank r − s.

        keys of    queries that see them      pairs, in chunks²
        itself     both chunks, causal        2
        before     both see the first chunk   2
        behind     the second sees both       2

    The next keys are on their way while the present ones are used. What is kept for backward is
    this rank's own.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, zigzag: ZigZag, parts: Parts) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        for source, kv in _travelling(torch.stack((k, v)), zigzag):
            rows, keys, causal = _seen(source, zigzag.rank, q.shape[2])
            o, part_lse = parts.forward(q[:, :, rows], *kv[:, :, :, keys], causal)
            _merge(out[:, :, rows], lse[:, :, rows], o, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.zigzag, ctx.parts = zigzag, parts
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        zigzag = ctx.zigzag
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        # of the keys that are here
        dkv = torch.zeros((2, *k.shape), dtype=lse.dtype, device=q.device)
        moving = None
        for source, kv in _travelling(torch.stack((k, v)), zigzag):
            rows, keys, causal = _seen(source, zigzag.rank, q.shape[2])
            given = (
                q[:, :, rows],
                *kv[:, :, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                do[:, :, rows],
            )
            dq_part, *dkv_part = ctx.parts.backward(*given, causal)
            dq[:, :, rows] += dq_part
            if moving is not None:
                dkv = _arrived(moving, zigzag)
            dkv[:, :, :, keys] += torch.stack(dkv_part)
            moving = _sent(dkv, zigzag)
        dk, dv = _arrived(moving, zigzag).to(k.dtype)  # the last step brings them home
        return dq.to(q.dtype), dk, dv, None, None


def _travelling(kv: Tensor, zigzag: ZigZag) -> Any:
    """(whose they are, K and V) of every rank, this one's first; the next are sent for before these are handed out."""
    for step in range(zigzag.ranks):
        moving = _sent(kv, zigzag) if step < zigzag.ranks - 1 else None
        yield (zigzag.rank - step) % zigzag.ranks, kv
        if moving is not None:
            kv = _arrived(moving, zigzag)


def _sent(x: Tensor, zigzag: ZigZag) -> tuple[Tensor, Tensor, Any]:
    """`x` on its way to the next rank: where the one before's arrives, what is sent, and the work."""
    x = x.contiguous()
    got = torch.empty_like(x)
    return got, x, collectives.rotate(got.view(-1), x.view(-1), zigzag.group)


def _arrived(moving: tuple[Tensor, Tensor, Any], zigzag: ZigZag) -> Tensor:
    got, _, work = moving
    collectives.wait(work, zigzag.group, "passing keys on")
    return got


def _seen(source: int, rank: int, tokens: int) -> tuple[slice, slice, bool]:
    """Which of this rank's queries see which of a rank's keys, and whether causally."""
    both, first, second = slice(0, tokens), slice(0, tokens // 2), slice(tokens // 2, tokens)
    if source == rank:
        return both, both, True
    return (both, first, False) if source < rank else (second, both, False)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention over more keys to that over others, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp()[..., None]).add_(part * (part_lse - total).exp()[..., None])
    lse.copy_(total)
