"""The first ranks of a job as a smaller job: one launch then measures several numbers of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from distlab.comm.context import RankContext


def doubling_sizes(world_size: int) -> tuple[int, ...]:
    """1, 2, 4, … and the world size itself."""
    sizes = [2**k for k in range(world_size.bit_length()) if 2**k < world_size]
    return (*sizes, world_size)


@contextmanager
def first_ranks(context: RankContext, ranks: int) -> Iterator[RankContext | None]:
    """This rank's context within the group of the first `ranks` ranks; None for the other ranks.

    Every rank of `context` calls it, with the same number, and those left out wait at the end of the block (or
    beyond, at their next collective), for at most the context's timeout if they have nothing to do: see `rest`.

    Raises:
        ValueError: fewer than one rank, or more than there are.
    """
    if not 1 <= ranks <= context.world_size:
        raise ValueError(f"ranks={ranks}: between 1 and the {context.world_size} of this job")
    if ranks == context.world_size:
        yield context
        return
    options = None
    timeout = timedelta(seconds=context.timeout_s)
    if context.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as the job's own group
        options._timeout = timeout
    group = dist.new_group(list(range(ranks)), timeout=timeout, backend=context.backend, pg_options=options)
    is_member = context.rank < ranks
    try:
        yield replace(context, world_size=ranks, group=group) if is_member else None
    finally:
        if is_member:
            dist.destroy_process_group(group)


def rest(context: RankContext, name: str, busy_ranks: int, *, limit_s: float = 1800.0) -> None:
    """Wait until the first `busy_ranks` ranks have come here too, without a kernel that spins on a GPU meanwhile.

    Args:
        name: of this rendezvous, not used before in this job.

    Raises:
        RuntimeError: they did not come within `limit_s`.
    """
    store = dist.distributed_c10d._get_default_store()
    if context.rank < busy_ranks and store.add(f"rest/{name}", 1) == busy_ranks:
        store.set(f"rest/{name}/done", "yes")
    store.wait([f"rest/{name}/done"], timedelta(seconds=limit_s))
