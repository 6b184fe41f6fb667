"""What one warp's access costs: memory transactions, bank conflicts, divergent branches.

Device memory is moved in sectors of 32 bytes, four to a line of 128. A warp's 32 requests are merged into the sectors
they touch: neighbouring lanes on neighbouring addresses are free, scattered ones pay for bytes nobody asked for.
Shared memory has 32 banks of 4 bytes; requests to different words of one bank wait for each other. Both in CUDA C++
Programming Guide, "Device Memory Accesses" and "Shared Memory".
"""

from collections.abc import Sequence
from dataclasses import dataclass

WARP = 32
SECTOR = 32
LINE = 128
BANKS = 32


@dataclass(frozen=True)
class Access:
    """One request of a warp.

    Args:
        sectors, lines: touched.
        efficiency: bytes asked for, each once, over bytes moved.
    """

    sectors: int
    lines: int
    efficiency: float


def warp_access(addresses: Sequence[int], itemsize: int) -> Access:
    """The transactions of lanes that each read `itemsize` bytes at their byte address.

    Raises:
        ValueError: no lanes or more than 32, a negative address, or a size below one.
    """
    if not 1 <= len(addresses) <= WARP or min(addresses, default=0) < 0 or itemsize < 1:
        raise ValueError(f"{len(addresses)} addresses of {itemsize} bytes: give 1 to {WARP} addresses from 0 up")
    touched = {byte for address in addresses for byte in range(address, address + itemsize)}
    sectors = {byte // SECTOR for byte in touched}
    lines = {byte // LINE for byte in touched}
    return Access(len(sectors), len(lines), len(touched) / (len(sectors) * SECTOR))


def strided_access(stride: int, itemsize: int, offset: int = 0) -> Access:
    """A full warp whose lane i reads element i·stride; `offset` in bytes from an aligned start."""
    return warp_access([offset + lane * stride * itemsize for lane in range(WARP)], itemsize)


def bank_conflicts(words: Sequence[int]) -> int:
    """Rounds that a warp needs for 4-byte words of shared memory; 1 is free of conflicts.

    Lanes that read the same word share one round (a broadcast).

    Raises:
        ValueError: no words.
    """
    if not words:
        raise ValueError("words is empty: give the word index of each lane")
    per_bank: dict[int, set[int]] = {}
    for word in words:
        per_bank.setdefault(word % BANKS, set()).add(word)
    return max(len(distinct) for distinct in per_bank.values())


def swizzle(row: int, column: int, columns: int = BANKS) -> int:
    """Where column `column` of `row` is kept when columns are exchanged by row xor column: within its row.

    A column of a tile, which without it lies in one bank, is spread over all; rows stay spread.

    Raises:
        ValueError: a width that is not a power of two.
    """
    if columns < 1 or columns & (columns - 1):
        raise ValueError(f"columns={columns}: xor permutes a row only if its length is a power of two")
    return column ^ (row % columns)


def column_conflicts(columns: int = BANKS, *, swizzled: bool = False, padding: int = 0) -> int:
    """Rounds for a warp that reads one column of a 32-row tile of `columns` words, plain, padded or swizzled."""
    width = columns + padding
    place = (lambda row: swizzle(row, 0, columns)) if swizzled else (lambda row: 0)
    return bank_conflicts([row * width + place(row) for row in range(WARP)])


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
