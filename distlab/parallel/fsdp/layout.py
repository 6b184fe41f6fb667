"""What lies where in a flat buffer: parameters one after another, in N equal slices that end between rows.

    | weight a            | weight b                 | weight c   |padding|
    | slice of rank 0    | slice of rank 1     | slice of rank 2    |

A rank's shard of a parameter is the part of it inside the rank's slice; it may be empty. It keeps
its parameter's dimensions, `(rows, …)`: each parameter begins at a multiple of its row's length,
and a slice is a multiple of all these lengths. The least common multiple of different lengths can
be large, and up to N times that is padding: `plan_buffers` then gives each length a separate
buffer.
"""

import math
from collections.abc import Sequence

from distlab.parallel.shard import FlatLayout

# elements; 16 bytes in a 2-byte dtype, the alignment that matmul kernels need of an operand's
# address
ALIGNMENT = 8
# Saving fewer elements is not worth another buffer: sending 1 MiB of fp32 costs less than a
# collective's latency.
WORTH_A_BUFFER = 2**18

Sizes = tuple[int, ...]  # of a parameter's dimensions, from the outermost stride to the innermost


class RowLayout(FlatLayout):
    """Parameters in a flat buffer that is cut between their rows only.

    Args:
        sizes: of each parameter.
        world_size: number of slices.
    """

    def __init__(self, sizes: Sequence[Sizes], world_size: int):
        self.sizes = tuple(sizes)
        self.row_numels = [row_numel(each, world_size) for each in sizes]
        super().__init__(
            [math.prod(each) for each in sizes],
            world_size,
            align=[math.lcm(row, ALIGNMENT) for row in self.row_numels],
            cut=math.lcm(*self.row_numels),
        )

    def shard_sizes(self, index: int, rank: int) -> Sizes:
        """Sizes of `rank`'s shard of parameter `index`, which has as many dimensions as the parameter.

        `(rows, …)`; `(1, rows, …)` of a parameter that is cut along its second dimension, and so
        on.
        """
        first, last = self.shard_range(index, rank)
        cut = cut_dimension(self.sizes[index], self.world_size)
        return (
            (1,) * cut + ((last - first) // self.row_numels[index],) + self.sizes[index][cut + 1 :]
        )


def cut_dimension(sizes: Sizes, world_size: int) -> int:
    """Return the dimension that a parameter is sharded along: the outermost that has a row for every rank.

    The first one of a matrix with N rows or more. A matrix with fewer would leave ranks empty while
    all slices are as long as a row: it is sharded along the second dimension, and a shard is
    contiguous within a row, or over several, as `(1, elements)`. Of experts `(E, rows, columns)` on
    more than E ranks shards are `(1, rows, columns)`.
    """
    enough = (d for d in range(len(sizes)) if math.prod(sizes[: d + 1]) >= world_size)
    return next(enough, len(sizes) - 1)


def row_numel(sizes: Sizes, world_size: int) -> int:
    """Elements between two neighbouring places where a shard may end."""
    return max(1, math.prod(sizes[cut_dimension(sizes, world_size) + 1 :]))


def plan_buffers(sizes: Sequence[Sizes], world_size: int) -> list[list[int]]:
    """Which parameters share a buffer, as indices in order.

    All share one, unless a buffer for each length of rows saves more than 1/64 of their elements,
    and more than `WORTH_A_BUFFER` (each buffer is one more collective). Then a buffer is padded by
    less than N of its rows, besides the parameters' alignment where a row is no multiple of 8
    elements.
    """
    by_row: dict[int, list[int]] = {}
    for index, each in enumerate(sizes):
        by_row.setdefault(row_numel(each, world_size), []).append(index)
    together = RowLayout(sizes, world_size)
    apart = [RowLayout([sizes[i] for i in indices], world_size) for indices in by_row.values()]
    saved = together.numel - sum(layout.numel for layout in apart)
    if saved > max(WORTH_A_BUFFER, sum(together.numels) / 64):
        return list(by_row.values())
    return [list(range(len(sizes)))]
