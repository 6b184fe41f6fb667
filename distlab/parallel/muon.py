"""Where Muon orthogonalises: that takes whole matrices, of which a rank may have a part.

    placement   a rank has        orthogonalises     what is sent in a step
    all         all matrices      all of them        nothing
    owner       all matrices      those it owns      their new values; `ShardedOptimizer` does it
    gather      a part of each    all of them        the parts, to everybody
    exchange    a part of each    those it owns      the parts to their owners, and orthogonalised parts back

Momentum is element by element, so that each rank has that of its parts alone. What is sent is the momentum's update, in
bf16, the dtype in which it is orthogonalised: 2 bytes an element, whatever the parameters' dtype. Below, m is a matrix
of |m| elements, of which rank r has |m_r|, and there are N ranks.

`exchange` divides the work by the number of ranks and sends about 2/N of what `gather` sends, in two messages instead
of one: `gather` is for small matrices, or few ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distlab.comm import collectives
from distlab.parallel.buckets import view_like
from distlab.parallel.guards import order
from distlab.parallel.shard import Spread

Orthogonalize = Callable[[Tensor], Tensor]


def gather(updates: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize) -> list[Tensor]:
    """Every rank gathers all matrices and orthogonalises them.

    Sends an all-gather of 2·N·max_r(Σ_m |m_r|) bytes in all: what ranks have is padded to what one of them has most.

    Args:
        updates: this rank's part of each matrix, bf16, laid out like its shard.
        spreads: where the matrices lie, alike on all ranks; of one group.
        orthogonalize: of a whole matrix `(rows, columns)`.

    Returns:
        This rank's part of each result, bf16, laid out like the updates.
    """
    group = spreads[0].group
    counts = [spread.counts for spread in spreads]
    largest = max(map(sum, zip(*counts, strict=True)))
    own = updates[0].new_zeros(largest)
    held = torch.cat([_flat(update) for update in updates])
    own[: held.numel()] = held
    gathered = own.new_empty(largest * group.size())
    order.send_begun(group)
    collectives.wait(collectives.all_gather(gathered, own, group), group, "gathering updates of matrices")
    results = []
    for matrix, count, update in zip(_joined(gathered.chunk(group.size()), spreads), counts, updates, strict=True):
        matrix.copy_(orthogonalize(matrix))
        results.append(view_like(_flat(matrix).split(count)[group.rank()], update))
    return results


def exchange(updates: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize) -> list[Tensor]:
    """Every matrix has an owner, which is sent the parts of it, orthogonalises it and sends its parts back.

    Sends two all-to-alls; in each, rank r sends 2·Σ_m |m_r| bytes to the owners or gets them back, and as an owner gets
    or sends 2·Σ_m |m| of what it owns. Of all that, 2·(|m| − |m_owner|) bytes of each matrix leave a rank, both times.

    Args, Returns: as of `gather`.
    """
    group = spreads[0].group
    rank, ranks = group.rank(), range(group.size())
    owner = owners(spreads, group.size())
    by_owner = sorted(range(len(updates)), key=owner.__getitem__)  # what goes to rank 0 lies first
    owned = [spread for spread, of in zip(spreads, owner, strict=True) if of == rank]
    to_owner = [sum(u.numel() for u, of in zip(updates, owner, strict=True) if of == other) for other in ranks]
    from_rank = [sum(spread.counts[other] for spread in owned) for other in ranks]

    parts = torch.cat([_flat(updates[index]) for index in by_owner])
    order.send_begun(group)
    received = _send(parts, to_owner, from_rank, spreads[0])
    results = []
    for matrix, spread in zip(_joined(received.split(from_rank), owned), owned, strict=True):
        matrix.copy_(orthogonalize(matrix))
        results.append(_flat(matrix).split(spread.counts))
    answers = [result[other] for other in ranks for result in results]
    returned = _send(torch.cat([parts[:0], *answers]), from_rank, to_owner, spreads[0])
    sizes = [updates[index].numel() for index in by_owner]
    part_of = dict(zip(by_owner, returned.split(sizes), strict=True))
    return [view_like(part_of[index], update) for index, update in enumerate(updates)]


PLACEMENTS = {"gather": gather, "exchange": exchange}


def owners(spreads: Sequence[Spread], ranks: int) -> list[int]:
    """Which rank orthogonalises each matrix: those with most work first, each by the rank that has least to do.

    An iteration multiplies matrices of the shorter side with the matrix, in a time like that side times |m|.
    """
    work = [spread.like.numel() * min(spread.like.shape) for spread in spreads]
    load, owner = [0] * ranks, [0] * len(spreads)
    for index in sorted(range(len(spreads)), key=lambda index: -work[index]):
        owner[index] = load.index(min(load))
        load[owner[index]] += work[index]
    return owner


def _send(parts: Tensor, sent: list[int], received: list[int], spread: Spread) -> Tensor:
    arriving = parts.new_empty(sum(received))
    work = collectives.all_to_all(arriving, parts, spread.group, received, sent)
    collectives.wait(work, spread.group, "exchanging updates of matrices")
    return arriving


def _joined(by_rank: Sequence[Tensor], spreads: Sequence[Spread]) -> list[Tensor]:
    """Whole matrices out of what each rank has of them: its parts one after another, perhaps with padding behind."""
    parts = []
    for rank, flat in enumerate(by_rank):
        sizes = [spread.counts[rank] for spread in spreads]
        parts.append(flat[: sum(sizes)].split(sizes))
    return [
        view_like(torch.cat([of_rank[index] for of_rank in parts]), spread.like)
        for index, spread in enumerate(spreads)
    ]


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without holes, `(n,)`, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
