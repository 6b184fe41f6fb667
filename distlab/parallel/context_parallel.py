"""Context parallelism: each of P ranks has a part of every sequence, and gets the others' keys.

A sequence has 2P chunks of t/2 tokens. Rank r has the r-th chunk from either end (zig-zag). So all
ranks compute the same number of (query, key) pairs:

    chunk     0  1  2  3  4  5  6  7
    rank      0  1  2  3  3  2  1  0

With batch B, H heads, K key heads, head dim D and t = T/P tokens per rank:

    gathered   Every rank gathers K and V, 2·K·(P − 1)·t·D elements received. Each chunk of queries
               sees the keys up to its end.
    ulysses    An all-to-all gives each rank whole sequences of H/P heads, another returns them,
               (2H + 2K)·(P − 1)/P·t·D elements in each direction.
    ring       K and V move to the next rank in each step, while the attention over the present ones
               is computed. Partial results are merged in fp32 by their log-sum-exp. In backward the
               gradients of K and V move with them.

The mean of the ranks' gradients over data × context is the gradient of the whole sequences' mean
loss, because the backward of a gather sums over ranks. A data strategy therefore needs no change.

Sources: DeepSpeed Ulysses (Jacobs et al. 2023), Ring Attention (Liu et al. 2023). Zig-zag is as in
Striped Attention and Llama 3.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup, Work

from distlab.comm import collectives
from distlab.parallel.regions import Enter, SwapHeads

HOW = ("gathered", "ulysses", "ring")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Parts(NamedTuple):
    """Attention of queries `(B, H, Tq, D)` over some of the keys `(B, K, Tk, D)`.

    The last query sees all of these keys.

    Args:
        forward: `(q, k, v, causal) -> (o, lse)`, without autograd.
        backward: `(q, k, v, o, lse, do, causal) -> (dq, dk, dv)`. Here o and lse are the results
            over all keys.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]
    ]


def share_sequences(
    model: nn.Module, group: ProcessGroup, parts: Parts, how: str = "gathered"
) -> None:
    """Replace a model's attention and positions, for ranks that have a part of every sequence.

    Args:
        model: exports `replace_ops(attention=…, positions=…)`, as `distlab.model.TransformerLM`
            does.
        group: ranks that share sequences.
        parts: attention over some of the keys.
        how: transport of keys and values, one of `HOW`.

    Raises:
        TypeError: a model that cannot replace them.
        ValueError: an unknown `how`.
    """
    if not hasattr(model, "replace_ops"):
        raise TypeError(
            f"context parallelism: {type(model).__name__} has no "
            "replace_ops(attention=…, positions=…)"
        )
    if how not in HOW:
        raise ValueError(f"context attention {how!r}: choose one of {', '.join(HOW)}")
    zigzag = ZigZag(group)
    if how == "gathered":
        attention = gathered_attention(zigzag, parts)
    elif how == "ulysses":
        attention = ulysses_attention(zigzag, parts)
    else:
        attention = ring_attention(zigzag, parts)
    model.replace_ops(attention=attention, positions=zigzag.positions)


# -- the chunks of a rank -------------------------------------------------------------------------


def zigzag_chunks(ranks: int) -> list[tuple[int, int]]:
    """Return the numbers of the two chunks, of 2P, that each of P ranks has."""
    return [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]


class ZigZag:
    """Assignment of the chunks of a sequence to the ranks of a group.

    Attributes:
        chunks: numbers of this rank's two chunks.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.ranks = group.size()
        self.rank = group.rank()
        chunks_of_ranks = zigzag_chunks(self.ranks)
        self.chunks = chunks_of_ranks[self.rank]
        # The chunks in the order in which a gather concatenates them, and the inverse permutation.
        self._gathered = [chunk for chunks in chunks_of_ranks for chunk in chunks]
        self._inverse = [self._gathered.index(chunk) for chunk in range(2 * self.ranks)]

    def local(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's two chunks of whole sequences along `dim`.

        Raises:
            ValueError: a length that 2P does not divide.
        """
        chunks = 2 * self.ranks
        if x.shape[dim] % chunks:
            raise ValueError(
                f"sequences of {x.shape[dim]} tokens: {self.ranks} ranks share each in {chunks} "
                f"chunks, so give a multiple of {chunks}"
            )
        return self._picked(x, dim, self.chunks)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Return whole sequences in order, from the chunks of all ranks in rank order."""
        return self._picked(x, dim, self._inverse)

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Return the chunks of all ranks in rank order, from whole sequences. Invert `in_order`."""
        return self._picked(x, dim, self._gathered)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in their sequence, `(t,)` in fp32."""
        whole = torch.arange(tokens * self.ranks, device=device, dtype=torch.float32)
        return self.local(whole, 0)

    def _picked(self, x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
        """Return these chunks of `x`, of 2P, concatenated in this order."""
        chunks = x.chunk(2 * self.ranks, dim)
        return torch.cat([chunks[number] for number in order], dim)


# -- gathered, ulysses ----------------------------------------------------------------------------


def gathered_attention(zigzag: ZigZag, parts: Parts) -> Attention:
    """Return attention that gathers K and V in one message.

    Each of the rank's two chunks of queries sees the keys up to its end.
    """

    @torch._disable_dynamo
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv_by_rank = Enter.apply(torch.cat((k, v.to(k.dtype)), 1), zigzag.group, 2)
        k, v = zigzag.in_order(kv_by_rank, 2).chunk(2, 1)
        chunk_size = q.shape[2] // 2
        outs = []
        for chunk, q_chunk in zip(zigzag.chunks, q.chunk(2, 2), strict=True):
            end = (chunk + 1) * chunk_size
            outs.append(CausalPart.apply(q_chunk, k[:, :, :end], v[:, :, :end], parts))
        return torch.cat(outs, 2)

    return attention


def ulysses_attention(zigzag: ZigZag, parts: Parts) -> Attention:
    """Return attention over whole sequences for a part of the heads.

    The number of ranks must divide the numbers of query heads and of key heads.
    """

    def whole_sequences(x: Tensor) -> Tensor:
        """Exchange `(B, H, t, D)` for `(B, H/P, T, D)`."""
        return zigzag.in_order(SwapHeads.apply(x, zigzag.group, True), 2)

    @torch._disable_dynamo
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for heads in (q.shape[1], k.shape[1]):
            if heads % zigzag.ranks:
                raise ValueError(
                    f"Ulysses: {zigzag.ranks} ranks cannot share {heads} heads evenly: take "
                    "gathered or ring, or fewer ranks"
                )
        out = CausalPart.apply(whole_sequences(q), whole_sequences(k), whole_sequences(v), parts)
        return SwapHeads.apply(zigzag.by_rank(out, 2), zigzag.group, False)

    return attention


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
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = ctx.parts.backward(q, k, v, o, lse, do, True)
        return dq, dk, dv, None


# -- ring -----------------------------------------------------------------------------------------


def ring_attention(zigzag: ZigZag, parts: Parts) -> Attention:
    """Return attention for which K and V move from rank to rank, see `Ring`."""

    @torch._disable_dynamo
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Ring.apply(q, k, v, zigzag, parts)

    return attention


class Ring(Function):
    """Attention over keys that move from rank to rank. In step s this rank has those of rank r − s.

        keys of         queries that see them           pairs, in chunks²
        this rank       both chunks, causal             2
        a lower rank    both chunks see the first one   2
        a higher rank   the second chunk sees both      2

    The next keys are sent while the present ones are used. Backward keeps only this rank's own keys
    and receives the others again.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, zigzag: ZigZag, parts: Parts) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        for source, kv in _travelling(torch.stack((k, v)), zigzag):
            rows, keys, causal = _seen(source, zigzag.rank, q.shape[2])
            k_part, v_part = kv[:, :, :, keys]
            o, part_lse = parts.forward(q[:, :, rows], k_part, v_part, causal)
            _merge(out[:, :, rows], lse[:, :, rows], o, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.zigzag = zigzag
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        zigzag = ctx.zigzag
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        # Gradients of the keys and values that this rank has in the present step.
        dkv = torch.zeros((2, *k.shape), dtype=lse.dtype, device=q.device)
        moving = None  # the message with the gradients of the previous step's keys and values
        for source, kv in _travelling(torch.stack((k, v)), zigzag):
            rows, keys, causal = _seen(source, zigzag.rank, q.shape[2])
            k_part, v_part = kv[:, :, :, keys]
            dq_part, dk_part, dv_part = ctx.parts.backward(
                q[:, :, rows],
                k_part,
                v_part,
                out[:, :, rows],
                lse[:, :, rows],
                do[:, :, rows],
                causal,
            )
            dq[:, :, rows] += dq_part
            # The rank before had these keys in the previous step, and sent their gradient here.
            if moving is not None:
                dkv = _arrived(moving, zigzag)
            dkv[:, :, :, keys] += torch.stack((dk_part, dv_part))
            moving = _sent(dkv, zigzag)
        # The message of the last step brings the gradients back to the rank that has the keys.
        dk, dv = _arrived(moving, zigzag).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


class _Moving(NamedTuple):
    """A tensor on its way to the next rank.

    Attributes:
        received: the tensor that arrives from the rank before.
        sent: the tensor that is sent. It must live until the work is done.
        work: handle of the collective, to wait for.
    """

    received: Tensor
    sent: Tensor
    work: Work


def _travelling(kv: Tensor, zigzag: ZigZag) -> Iterator[tuple[int, Tensor]]:
    """Yield the rank, and the K and V, of every rank. This rank comes first.

    The next K and V are requested before the present ones are yielded, so that the message runs
    during the caller's computation.
    """
    for step in range(zigzag.ranks):
        is_last = step == zigzag.ranks - 1
        moving = None if is_last else _sent(kv, zigzag)
        source = (zigzag.rank - step) % zigzag.ranks
        yield source, kv
        if moving is not None:
            kv = _arrived(moving, zigzag)


def _sent(x: Tensor, zigzag: ZigZag) -> _Moving:
    """Start to send `x` to the next rank, and to receive from the rank before."""
    x = x.contiguous()
    received = torch.empty_like(x)
    work = collectives.rotate(received.view(-1), x.view(-1), zigzag.group)
    return _Moving(received, x, work)


def _arrived(moving: _Moving, zigzag: ZigZag) -> Tensor:
    """Wait for the message, and return the tensor from the rank before."""
    collectives.wait(moving.work, zigzag.group, "passing keys on")
    return moving.received


def _seen(source: int, rank: int, tokens: int) -> tuple[slice, slice, bool]:
    """Return which queries of this rank see which keys of a rank.

    Args:
        source: rank that the keys belong to.
        rank: rank of this process in the group of context parallelism.
        tokens: number of tokens that each rank has of a sequence.

    Returns:
        The queries, the keys, and True if the attention between them is causal.
    """
    both = slice(0, tokens)
    first = slice(0, tokens // 2)
    second = slice(tokens // 2, tokens)
    if source == rank:
        return both, both, True
    if source < rank:
        return both, first, False
    return second, both, False


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention over more keys, `part`, to attention over other keys, `out`, in place.

    Each is a mean weighted by exp(score). The sums of the weights are exp(lse) and exp(part_lse).
    """
    total = torch.logaddexp(lse, part_lse)
    out_share = (lse - total).exp()[..., None]
    part_share = (part_lse - total).exp()[..., None]
    out.mul_(out_share).add_(part * part_share)
    lse.copy_(total)
