"""Collectives made of sends and receives, as a library makes them, small enough to read.

Every function blocks as `Work.wait()` does.

The N ranks form a ring. In every round each rank sends to the next rank and receives from the
previous one, so all links are busy in one direction. The tensor is cut into N chunks:

    reduce-scatter   N−1 rounds    pass on the partial sum of a chunk; add this rank's chunk to the
                                   partial sum that arrives
    all-gather       N−1 rounds    pass on complete chunks
    all-reduce       2(N−1)        first the reduce-scatter, then the all-gather: each sends (N−1)/N
                                   of the tensor over each link
    whole tensors    N−1 rounds    pass on whole tensors, add each: N/2 times the bytes of the
                                   all-reduce in half of its rounds

`distlab.theory.collective_time` has the costs. The library's collectives (`collectives`) also split
a ring into several channels, pipeline chunks inside each round, and use trees where latency counts.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup


@torch.no_grad()
def all_gather(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Concatenate every rank's `input` `(n,)` in rank order into `output` `(N·n,)`."""
    rank = group.rank()
    ranks = group.size()
    chunks = _equal_chunks(output, input, ranks)
    chunks[rank].copy_(input)
    # The chunk that arrives in one round is passed on in the next.
    for done in range(ranks - 1):
        outgoing = chunks[(rank - done) % ranks]
        incoming = chunks[(rank - done - 1) % ranks]
        _pass_on(outgoing, incoming, group)


@torch.no_grad()
def reduce_scatter(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Give rank r the r-th of N equal chunks of the *sum* of `input`: `(N·n,)` → `(n,)`."""
    rank = group.rank()
    ranks = group.size()
    chunks = _equal_chunks(input, output, ranks)
    # The partial sum of chunk r starts at rank r+1 and travels round the ring. It reaches rank r in
    # the last round, when all ranks have added their part.
    partial = chunks[(rank - 1) % ranks].clone()
    arriving = torch.empty_like(output)
    for done in range(ranks - 1):
        _pass_on(partial, arriving, group)
        arriving += chunks[(rank - done - 2) % ranks]
        partial, arriving = arriving, partial  # the memory that was sent receives the next
    output.copy_(partial)


@torch.no_grad()
def all_reduce(tensor: Tensor, group: ProcessGroup) -> None:
    """Replace `tensor` (contiguous, any number of elements) by its *sum* over the ranks."""
    rank = group.rank()
    ranks = group.size()
    chunks = tensor.view(-1).tensor_split(ranks)
    arriving = torch.empty_like(chunks[0])  # the first chunk is the longest
    # The reduce-scatter: pass on the sum of one chunk, and add the sum of another that arrives.
    for done in range(ranks - 1):
        outgoing = chunks[(rank - done) % ranks]
        summed = chunks[(rank - done - 1) % ranks]
        incoming = arriving[: summed.numel()]
        _pass_on(outgoing, incoming, group)
        summed += incoming
    # The all-gather: pass on complete chunks.
    for done in range(ranks - 1):  # rank r has completed chunk r+1
        outgoing = chunks[(rank + 1 - done) % ranks]
        incoming = chunks[(rank - done) % ranks]
        _pass_on(outgoing, incoming, group)


@torch.no_grad()
def all_reduce_whole(tensor: Tensor, group: ProcessGroup) -> None:
    """Replace `tensor` by its *sum* over the ranks, by passing on whole tensors.

    It takes half of the rounds of `all_reduce`, which helps small tensors, and N/2 times its bytes,
    which is too many for large ones.
    """
    passing = tensor.clone()
    arriving = torch.empty_like(tensor)
    for _ in range(group.size() - 1):
        _pass_on(passing, arriving, group)
        tensor += arriving
        passing, arriving = arriving, passing


def _pass_on(outgoing: Tensor, incoming: Tensor, group: ProcessGroup) -> None:
    """Send to the next rank and receive from the previous one.

    Both run at the same time, because sending first would deadlock.
    """
    rank = group.rank()
    ranks = group.size()
    transfers = []
    # The sender and the receiver of a chunk agree on its size, so both leave out an empty one.
    if outgoing.numel() > 0:
        next_rank = (rank + 1) % ranks
        transfers.append(P2POp(dist.isend, outgoing, group=group, group_peer=next_rank))
    if incoming.numel() > 0:
        previous_rank = (rank - 1) % ranks
        transfers.append(P2POp(dist.irecv, incoming, group=group, group_peer=previous_rank))
    if not transfers:
        return
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def _equal_chunks(whole: Tensor, chunk: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """Return the equal chunks of a tensor, one per rank.

    Raises:
        ValueError: chunks of the size of `chunk` do not make the tensor, or it is not contiguous.
    """
    numel = chunk.numel()
    if whole.numel() != ranks * numel or not whole.is_contiguous():
        raise ValueError(
            f"{ranks} chunks of {numel} elements do not make a contiguous tensor of "
            f"{whole.numel()}: pad it"
        )
    if numel == 0:
        return (chunk,) * ranks  # `split` returns a single chunk of a tensor without elements
    return whole.view(-1).split(numel)
