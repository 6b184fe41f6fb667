"""Cost of one warp's instruction: bank conflicts and divergent branches.

Shared memory has 32 banks of 4 bytes; requests to different words of one bank wait for each other
(CUDA C++ Programming Guide, "Shared Memory").
"""

from collections.abc import Sequence
from dataclasses import dataclass

WARP = 32
BANKS = 32


def bank_conflicts(words: Sequence[int]) -> int:
    """Return the rounds that a warp needs for words of shared memory. 1 is free of conflicts.

    Lanes that read the same word share one round (a broadcast). So the rounds are the most
    different words of one bank.

    Args:
        words: index of the 4-byte word that each lane reads.

    Raises:
        ValueError: no words.
    """
    if not words:
        raise ValueError("words is empty: give the word index of each lane")
    per_bank = {}  # bank → different words that lanes read from it
    for word in words:
        per_bank.setdefault(word % BANKS, set()).add(word)
    return max(len(distinct) for distinct in per_bank.values())


def swizzle(row: int, column: int) -> int:
    """Return the place in its row of a tile's element if columns are exchanged by row xor column.

    The tile has as many columns as there are banks. A column of it, which would otherwise be in one
    bank, is spread over all banks. Rows stay spread.

    Args:
        row: row of the element in the tile, from 0.
        column: column of the element in the tile, from 0.
    """
    return column ^ (row % BANKS)


@dataclass(frozen=True)
class Divergence:
    """Cost of a branch that a warp's lanes take differently.

    Args:
        cycles: cycles of the warp, which executes every branch that any lane takes, one after the
            other.
        efficiency: ratio of lane-cycles of use to lane-cycles spent.
    """

    cycles: float
    efficiency: float


def warp_divergence(branches: Sequence[int], cycles: Sequence[float]) -> Divergence:
    """Return the cost of a warp whose lanes take different branches.

    Args:
        branches: index of the branch that each lane takes.
        cycles: cycles of each branch.

    Raises:
        ValueError: no lanes, or a branch without a cost.
    """
    if not branches or not all(0 <= branch < len(cycles) for branch in branches):
        raise ValueError(f"branches must be indices into the {len(cycles)} costs, one per lane")
    # One branch after the other, each once however few lanes take it. The other lanes are masked.
    total = sum(cycles[branch] for branch in set(branches))
    useful = sum(cycles[branch] for branch in branches)
    if not total:
        return Divergence(total, efficiency=1.0)
    # Lane-cycles. Every lane is occupied while the warp executes any branch.
    spent = len(branches) * total
    return Divergence(total, efficiency=useful / spent)
