"""How gradients are put into messages: sizes, padding, and the greedy rule of buckets, in numbers.

Shared by the closed forms of `communication`; arguments are as there, and like them these rules are stated anew, apart
from the code that executes them.
"""

from collections.abc import Hashable, Sequence

MIB = 2**20


def labels_of(
    numels: Sequence[int], itemsizes: Sequence[int], dtypes: Sequence[Hashable] | None
) -> Sequence[Hashable]:
    """The dtype labels; sizes tell dtypes apart where no labels were given.

    Raises:
        ValueError: lists of different lengths, or a negative size.
    """
    dtypes = itemsizes if dtypes is None else dtypes
    if not len(numels) == len(itemsizes) == len(dtypes):
        raise ValueError(
            f"{len(numels)} numels, {len(itemsizes)} itemsizes, {len(dtypes)} dtypes: "
            "give one of each per parameter"
        )
    if any(numel < 0 for numel in numels) or any(size < 1 for size in itemsizes):
        raise ValueError("numels must not be negative and itemsizes must be at least 1 byte")
    return dtypes


def check_ranks(world_size: int) -> None:
    """Raises ValueError for fewer than one rank."""
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be at least 1")


def payload(numels: Sequence[int], itemsizes: Sequence[int]) -> int:
    """Bytes of all gradients."""
    return sum(numel * size for numel, size in zip(numels, itemsizes, strict=True))


def padded_bytes(buffers: Sequence[tuple[int, int]], world_size: int) -> int:
    """Bytes of buffers of (elements, bytes per element), each padded to a multiple of the world size.

    Raises ValueError as `check_ranks`.
    """
    check_ranks(world_size)
    return sum(-(-numel // world_size) * world_size * size for numel, size in buffers)


def bucket_payloads(
    numels: Sequence[int],
    itemsizes: Sequence[int],
    bucket_size_mb: float | None,
    dtypes: Sequence[Hashable] | None,
    flags: int = 0,
) -> list[tuple[int, int]]:
    """(elements, bytes per element) of each bucket of the greedy rule of `bucketed`: of gradients, and of `flags`
    more per gradient, which do not count towards the limit.

    Raises ValueError as `labels_of` and `positive_mib`.
    """
    dtypes = labels_of(numels, itemsizes, dtypes)
    limit = float("inf") if bucket_size_mb is None else positive_mib("bucket_size_mb", bucket_size_mb)
    closed, filled = [], {}
    for numel, size, dtype in reversed(list(zip(numels, itemsizes, dtypes, strict=True))):
        before, count, _ = filled.get(dtype, (0, 0, size))
        if dtype in filled and (before + numel) * size > limit:
            closed.append(filled.pop(dtype))
            before = count = 0
        filled[dtype] = (before + numel, count + 1, size)
    return [(numel + flags * count, size) for numel, count, size in [*closed, *filled.values()]]


def positive_mib(name: str, mib: float) -> float:
    """MiB → bytes. Raises ValueError, naming the argument, for what is not positive."""
    if not mib > 0:
        raise ValueError(f"{name}={mib}: give a positive number of MiB")
    return mib * MIB
