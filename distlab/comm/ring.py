"""Collectives made of sends and receives, as a library makes them, small enough to read.

All block as `Work.wait()` does.

Ranks form a ring. In every round each sends to the next and receives from the one before, so all
links are busy in one direction. The tensor is cut into N chunks:

    reduce-scatter   N−1 rounds   pass a partial sum of a chunk on, add the own contribution to what arrives
    all-gather       N−1 rounds   pass finished chunks on
    all-reduce       2(N−1)       the one after the other: (N−1)/N of the tensor per link and half
    whole tensors    N−1 rounds   forward everybody's whole tensor, add each: N/2 times the volume, half of the rounds

Costs are in `distlab.theory.collective_time`. The library's collectives (`collectives`) split rings
into several channels, pipeline chunks inside each round, and use trees where latency counts.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup


@torch.no_grad()
def all_gather(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Concatenate every rank's `input` `(n,)` in rank order into `output` `(N·n,)`."""
    rank, ranks = group.rank(), group.size()
    chunks = _equal_chunks(output, input, ranks)
    chunks[rank].copy_(input)
    for done in range(ranks - 1):
        _pass_on(chunks[(rank - done) % ranks], chunks[(rank - done - 1) % ranks], group)


@torch.no_grad()
def reduce_scatter(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Give rank r the r-th of N equal chunks of the *sum* of `input`: `(N·n,)` → `(n,)`."""
    rank, ranks = group.rank(), group.size()
    chunks = _equal_chunks(input, output, ranks)
    partial, arriving = chunks[(rank - 1) % ranks].clone(), torch.empty_like(output)
    # after the last round the partial sum is that of the own chunk, and complete
    for done in range(ranks - 1):
        _pass_on(partial, arriving, group)
        arriving += chunks[(rank - done - 2) % ranks]
        partial, arriving = arriving, partial
    output.copy_(partial)


@torch.no_grad()
def all_reduce(tensor: Tensor, group: ProcessGroup) -> None:
    """Replace `tensor` (contiguous, any number of elements) by its *sum* over the ranks."""
    rank, ranks = group.rank(), group.size()
    chunks = tensor.view(-1).tensor_split(ranks)
    arriving = torch.empty_like(chunks[0])  # the longest
    for done in range(ranks - 1):
        mine, theirs = chunks[(rank - done) % ranks], chunks[(rank - done - 1) % ranks]
        _pass_on(mine, arriving[: theirs.numel()], group)
        theirs += arriving[: theirs.numel()]
    for done in range(ranks - 1):  # rank r has completed chunk r+1
        _pass_on(chunks[(rank + 1 - done) % ranks], chunks[(rank - done) % ranks], group)


@torch.no_grad()
def all_reduce_whole(tensor: Tensor, group: ProcessGroup) -> None:
    """All-reduce by forwarding whole tensors.

    That takes fewer rounds, which helps small tensors, and far too many bytes for large ones.
    """
    passing, arriving = tensor.clone(), torch.empty_like(tensor)
    for _ in range(group.size() - 1):
        _pass_on(passing, arriving, group)
        tensor += arriving
        passing, arriving = arriving, passing


def _pass_on(outgoing: Tensor, incoming: Tensor, group: ProcessGroup) -> None:
    """Send to the next rank and receive from the one before, at the same time.

    One after the other would deadlock.
    """
    rank, ranks = group.rank(), group.size()
    transfers = [
        P2POp(kind, tensor, group=group, group_peer=peer % ranks)
        for kind, tensor, peer in (
            (dist.isend, outgoing, rank + 1),
            (dist.irecv, incoming, rank - 1),
        )
        if tensor.numel()  # sender and receiver of a chunk agree on its size
    ]
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()


def _equal_chunks(whole: Tensor, chunk: Tensor, ranks: int) -> tuple[Tensor, ...]:
    if whole.numel() != ranks * chunk.numel() or not whole.is_contiguous():
        raise ValueError(
            f"{ranks} chunks of {chunk.numel()} elements do not make a contiguous tensor of {whole.numel()}: pad it"
        )
    return whole.view(-1).split(chunk.numel()) if chunk.numel() else (chunk,) * ranks
