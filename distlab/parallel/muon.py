"""Orthogonalization for Muon. It needs whole matrices, of which a rank may have parts.

    placement   a rank has        it orthogonalizes   a step sends
    all         all matrices      all matrices        nothing
    owner       all matrices      those it owns       all parameters (`ShardedOptimizer` broadcasts)
    gather      parts of each     all matrices        the parts, to every rank
    exchange    parts of each     those it owns       the parts to the owners, and the results back

This file implements `gather` and `exchange`. Momentum is computed element by element, so each rank
has only the momentum of its parts. The update that comes from it is sent in bf16, in which it is
orthogonalized: 2 bytes per element, for parameters of any dtype.

`exchange` divides the work by the number of ranks N, and sends about 2/N of the bytes of `gather`,
in two messages instead of one. `gather` is for small matrices or few ranks.

Below, m is a matrix of |m| elements, and rank r has |m_r| of them.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.parallel.ddp import send_unfinished
from distlab.parallel.shard import Spread, view_like

Orthogonalize = Callable[[Tensor], Tensor]
# Largest number of elements in one call: 128 MiB in bf16. The call itself needs about four times as
# much memory in addition.
BATCH_ELEMENTS = 2**26


def gather(
    updates: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize
) -> list[Tensor]:
    """Orthogonalize all matrices on every rank.

    Sends one all-gather of 2·N·max_r(Σ_m |m_r|) bytes in all, because each rank's parts are padded
    to the size of the largest.

    Args:
        updates: this rank's part of each matrix, bf16, with the layout of its shard.
        spreads: how the ranks share each matrix. The same on all ranks, and all of one group.
        orthogonalize: function of whole matrices `(number, rows, columns)`.

    Returns:
        This rank's part of each result, bf16, with the layout of the updates.
    """
    group = spreads[0].group
    counts = [elements(spreads, rank) for rank in range(group.size())]
    own_count = counts[group.rank()]
    largest = max(counts)
    padded = F.pad(_flattened(updates), (0, largest - own_count))
    gathered = padded.new_empty(group.size() * largest)
    # Gradients that are not sent yet go first: all ranks must send in the same order.
    send_unfinished(group)
    work = collectives.all_gather(gathered, padded, group)
    collectives.wait(work, group, "gathering matrices")
    by_rank = gathered.chunk(group.size())
    _orthogonalize_in_place(by_rank, spreads, orthogonalize)
    return _unflattened(by_rank[group.rank()][:own_count], updates)


def exchange(
    updates: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize
) -> list[Tensor]:
    """Send the parts of each matrix to its owner, orthogonalize there, and send the parts back.

    Sends two all-to-alls. In the first, rank r sends 2·Σ_m |m_r| bytes to the owners, and receives
    as an owner 2·Σ_m |m| bytes of its own matrices. The second returns the same numbers. In each of
    them 2·(|m| − |m_owner|) bytes of a matrix leave a rank.

    Args, Returns: as for `gather`.
    """
    group = spreads[0].group
    rank = group.rank()
    owned_by_rank = divide(spreads, group.size())
    owned = owned_by_rank[rank]
    to_owners = [elements(spreads_of_owner, rank) for spreads_of_owner in owned_by_rank]
    from_ranks = [elements(owned, source) for source in range(group.size())]
    # Gradients that are not sent yet go first: all ranks must send in the same order.
    send_unfinished(group)
    received = _send(_flattened(updates), to_owners, from_ranks, group)
    _orthogonalize_in_place(received.split(from_ranks), owned, orthogonalize)
    returned = _send(received, from_ranks, to_owners, group)
    return _unflattened(returned, updates)


PLACEMENTS = {"gather": gather, "exchange": exchange}


def divide(spreads: Sequence[Spread], ranks: int) -> list[list[Spread]]:
    """Return the matrices that each rank owns: neighbours, with about 1/N of the work.

    The work of a matrix is its number of elements times its shorter side, because an iteration
    multiplies with matrices of the shorter side.
    """
    work = [spread.like.numel() * min(spread.like.shape) for spread in spreads]
    total = sum(work)
    owned: list[list[Spread]] = [[] for _ in range(ranks)]
    before = 0  # work of the matrices before this one
    for spread, own_work in zip(spreads, work, strict=True):
        middle = before + own_work / 2
        owner = int(middle * ranks / total)
        owned[owner].append(spread)
        before += own_work
    return owned


def batches(shapes: Sequence[torch.Size]) -> Iterator[list[int]]:
    """Yield the indices of the matrices of each call. All of one call have the same shape.

    A GPU is slow at many small products, so a call has as many matrices as `BATCH_ELEMENTS` allows.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(index)
    for shape, indices in by_shape.items():
        number = max(1, BATCH_ELEMENTS // shape.numel())
        for first in range(0, len(indices), number):
            yield indices[first : first + number]


def elements(spreads: Sequence[Spread], rank: int) -> int:
    """Return the number of elements that a rank has of these matrices."""
    return sum(spread.counts[rank] for spread in spreads)


def _send(parts: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Exchange parts with all ranks.

    Args:
        parts: elements for rank 0, then those for rank 1, and so on.
        sent: number of elements for each rank.
        received: number of elements from each rank.
        group: process group of the ranks that exchange.

    Returns:
        The elements from rank 0, then those from rank 1, and so on.
    """
    arriving = parts.new_empty(sum(received))
    work = collectives.all_to_all(arriving, parts, group, received, sent)
    collectives.wait(work, group, "exchanging matrices")
    return arriving


def _orthogonalize_in_place(
    by_rank: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize
) -> None:
    """Orthogonalize matrices whose parts are in separate tensors.

    Args:
        by_rank: for each rank a flat tensor of its parts, one matrix after another.
        spreads: how the ranks share each matrix.
        orthogonalize: function of whole matrices `(number, rows, columns)`.
    """
    # parts_of[i] are the parts of matrix i in rank order: views of `by_rank`.
    parts_of: list[list[Tensor]] = [[] for _ in spreads]
    for rank, flat in enumerate(by_rank):
        counts = [spread.counts[rank] for spread in spreads]
        unpadded = flat[: sum(counts)]
        for parts, part in zip(parts_of, unpadded.split(counts), strict=True):
            parts.append(part)
    for indices in batches([spread.like.shape for spread in spreads]):
        matrices = [view_like(torch.cat(parts_of[i]), spreads[i].like) for i in indices]
        directions = orthogonalize(torch.stack(matrices))
        # Copy into the matrices first, whose memory has the order of the parts. The results may
        # have another layout.
        torch._foreach_copy_(matrices, list(directions))
        for index, matrix in zip(indices, matrices, strict=True):
            results = _flat(matrix).split(spreads[index].counts)
            torch._foreach_copy_(parts_of[index], list(results))


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without holes, `(n,)`, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of these tensors, one tensor after another."""
    return torch.cat([_flat(tensor) for tensor in tensors])


def _unflattened(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of `flat` as views with the layouts of these tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [view_like(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]
