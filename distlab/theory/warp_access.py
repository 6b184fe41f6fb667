"""Cost of one warp's instruction: bank conflicts and divergent branches.

Shared memory has 32 banks of 4 bytes; requests to different words of one bank wait for each other
(CUDA C++ Programming Guide, "Shared Memory").
"""

from collections.abc import Sequence
from dataclasses import dataclass

WARP = 32
BANKS = 32


def bank_conflicts(words: Sequence[int]) -> int:
    """Rounds that a warp needs for 4-byte words of shared memory; 1 is free of conflicts.

    Lanes that read the same word share one round (a broadcast).

    Raises:
        ValueError: no words.
    """
    if not words:
        raise ValueError("words is empty: give the word index of each lane")
    per_bank = {}  # bank → words that are asked of it
    for word in words:
        per_bank.setdefault(word % BANKS, set()).add(word)
    return max(len(distinct) for distinct in per_bank.values())


def swizzle(row: int, column: int) -> int:
    """Return where column `column` of `row` is stored if columns are exchanged by row xor column.

    The number of columns is that of the banks.

    A column of a tile, which would otherwise be in one bank, is spread over all banks. Rows stay
    spread.
    """
    return column ^ (row % BANKS)


@dataclass(frozen=True)
class Divergence:
    """A branch that a warp's lanes take differently.

    Args:
        cycles: the warp executes every branch that any lane takes, one after the other.
        efficiency: lane-cycles of use over lane-cycles spent.
    """

    cycles: float
    efficiency: float


def warp_divergence(branches: Sequence[int], cycles: Sequence[float]) -> Divergence:
    """Cost of a warp whose lane i takes branch `branches[i]`, branch b costing `cycles[b]`.

    Raises:
        ValueError: no lanes, or a branch without a cost.
    """
    if not branches or not all(0 <= branch < len(cycles) for branch in branches):
        raise ValueError(f"branches must be indices into the {len(cycles)} costs, one per lane")
    total = sum(cycles[branch] for branch in set(branches))
    useful = sum(cycles[branch] for branch in branches)
    return Divergence(total, useful / (len(branches) * total) if total else 1.0)
