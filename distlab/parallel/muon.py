"""Where Muon orthogonalises: that takes whole matrices, of which a rank may have a part.

    placement   a rank has        orthogonalises     what is sent in a step
    all         all matrices      all of them        nothing: 0 bytes
    owner       all matrices      those it owns      all bytes of all parameters, broadcast by `ShardedOptimizer`
    gather      a part of each    all of them        the parts, to everybody
    exchange    a part of each    those it owns      the parts to their owners, and orthogonalised parts back

Momentum is element by element, so that each rank has that of its parts alone. What is sent is the
momentum's update, in bf16, the dtype in which it is orthogonalised: 2 bytes an element, whatever
the parameters' dtype. Below, m is a matrix of |m| elements, of which rank r has |m_r|, and there
are N ranks.

`exchange` divides the work by the number of ranks and sends about 2/N of what `gather` sends, in
two messages instead of one: `gather` is for small matrices, or few ranks.
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
# of matrices in one call: 128 MiB in bf16, and some four times that beside it
BATCH_ELEMENTS = 2**26


def gather(
    updates: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize
) -> list[Tensor]:
    """Every rank gathers all matrices and orthogonalises them.

    Sends an all-gather of 2·N·max_r(Σ_m |m_r|) bytes in all: what ranks have is padded to what one
    of them has most.

    Args:
        updates: this rank's part of each matrix, bf16, laid out like its shard.
        spreads: where the matrices lie, alike on all ranks; of one group.
        orthogonalize: of whole matrices `(number, rows, columns)`.

    Returns:
        This rank's part of each result, bf16, laid out like the updates.
    """
    group = spreads[0].group
    parts = _flattened(updates)
    largest = max(elements(spreads, rank) for rank in range(group.size()))
    gathered = parts.new_empty(group.size() * largest)
    send_unfinished(group)
    work = collectives.all_gather(gathered, F.pad(parts, (0, largest - parts.numel())), group)
    collectives.wait(work, group, "gathering matrices")
    by_rank = gathered.chunk(group.size())
    _orthogonalize_in_place(by_rank, spreads, orthogonalize)
    return _unflattened(by_rank[group.rank()][: parts.numel()], updates)


def exchange(
    updates: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize
) -> list[Tensor]:
    """Every matrix has an owner, which is sent the parts of it, orthogonalises it and sends its parts back.

    Sends two all-to-alls; in each, rank r sends 2·Σ_m |m_r| bytes to the owners or gets them back,
    and as an owner gets or sends 2·Σ_m |m| of what it owns. Of all that, 2·(|m| − |m_owner|) bytes
    of each matrix leave a rank, both times.

    Args, Returns: as of `gather`.
    """
    group = spreads[0].group
    shares = divide(spreads, group.size())
    owned = shares[group.rank()]
    to_owners = [elements(share, group.rank()) for share in shares]
    from_ranks = [elements(owned, rank) for rank in range(group.size())]
    send_unfinished(group)
    received = _send(_flattened(updates), to_owners, from_ranks, group)
    _orthogonalize_in_place(received.split(from_ranks), owned, orthogonalize)
    return _unflattened(_send(received, from_ranks, to_owners, group), updates)


PLACEMENTS = {"gather": gather, "exchange": exchange}


def divide(spreads: Sequence[Spread], ranks: int) -> list[list[Spread]]:
    """Who owns which matrix: each rank some neighbours, with about an N-th of the work.

    An iteration multiplies with matrices of the shorter side, which takes that side times |m|
    multiplications, or so.
    """
    work = [spread.like.numel() * min(spread.like.shape) for spread in spreads]
    shares: list[list[Spread]] = [[] for _ in range(ranks)]
    for index, spread in enumerate(spreads):
        middle = sum(work[:index]) + work[index] / 2
        shares[int(middle * ranks / sum(work))].append(spread)
    return shares


def batches(shapes: Sequence[torch.Size]) -> Iterator[list[int]]:
    """Which matrices are orthogonalised in one call: some of one shape, as a GPU is slow at many small products."""
    alike: dict[torch.Size, list[int]] = {}
    for index, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(index)
    for shape, indices in alike.items():
        number = max(1, BATCH_ELEMENTS // shape.numel())
        yield from (indices[first : first + number] for first in range(0, len(indices), number))


def elements(spreads: Sequence[Spread], rank: int) -> int:
    """How many a rank has of these matrices."""
    return sum(spread.counts[rank] for spread in spreads)


def _send(parts: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    arriving = parts.new_empty(sum(received))
    work = collectives.all_to_all(arriving, parts, group, received, sent)
    collectives.wait(work, group, "exchanging matrices")
    return arriving


def _orthogonalize_in_place(
    by_rank: Sequence[Tensor], spreads: Sequence[Spread], orthogonalize: Orthogonalize
) -> None:
    """Of whole matrices; in a rank's tensor its parts of them lie one after another."""
    counts = [[spread.counts[rank] for spread in spreads] for rank in range(len(by_rank))]
    parts = list(
        zip(
            *(flat[: sum(n)].split(n) for flat, n in zip(by_rank, counts, strict=True)), strict=True
        )
    )
    for indices in batches([spread.like.shape for spread in spreads]):
        matrices = [view_like(torch.cat(parts[index]), spreads[index].like) for index in indices]
        directions = orthogonalize(torch.stack(matrices))
        torch._foreach_copy_(matrices, list(directions))  # which may be laid out otherwise
        for index, matrix in zip(indices, matrices, strict=True):
            torch._foreach_copy_(
                list(parts[index]), list(_flat(matrix).split(spreads[index].counts))
            )


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without holes, `(n,)`, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_flat(tensor) for tensor in tensors])


def _unflattened(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [view_like(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]
