"""How gradients are put into messages: sizes, padding, and the greedy rule of buckets, in numbers.

Shared by the closed forms of `communication`; arguments are as there, and like them these rules are stated anew, apart
from the code that executes them.
"""

import math
from collections.abc import Hashable, Sequence

MIB = 2**20
FSDP_ALIGNMENT = 8  # elements
FSDP_WORTH_A_BUFFER = 2**18  # elements


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


def sharded_buffers(shapes: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """Elements, padding included, of the flat buffers of one of FSDP's units.

    A parameter may be cut between rows: those of its first dimension if it has as many as there are ranks, else those
    of the first two dimensions together, and so on; past the last, between elements. It begins at a multiple of its
    row and of 8 elements. The buffer has a multiple of every row for each rank. Parameters with rows of different
    length share one buffer, unless one for each length saves more than 1/64 of the elements and more than 2¹⁸.

    Args:
        shapes: of the unit's matrices in registration order, each from the outermost stride to the innermost.

    Raises ValueError as `check_ranks`.
    """
    check_ranks(world_size)
    matrices = [(_row(shape, world_size), math.prod(shape)) for shape in shapes]
    by_row: dict[int, list[tuple[int, int]]] = {}
    for matrix in matrices:
        by_row.setdefault(matrix[0], []).append(matrix)
    together = _sharded_buffer(matrices, world_size)
    apart = [_sharded_buffer(alike, world_size) for alike in by_row.values()]
    worth = max(FSDP_WORTH_A_BUFFER, sum(numel for _, numel in matrices) / 64)
    return apart if together - sum(apart) > worth else [together]


def _row(shape: Sequence[int], world_size: int) -> int:
    rows = 1
    for dim, size in enumerate(shape):
        rows *= size
        if rows >= world_size:
            return max(1, math.prod(shape[dim + 1 :]))
    return 1


def _sharded_buffer(matrices: Sequence[tuple[int, int]], world_size: int) -> int:
    """Elements of one buffer for matrices of (elements in a row, elements)."""
    end = 0
    for row, numel in matrices:
        begin = math.lcm(row, FSDP_ALIGNMENT)
        end = -(-end // begin) * begin + numel
    share = math.lcm(*(row for row, _ in matrices))
    return -(-end // (world_size * share)) * world_size * share


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
