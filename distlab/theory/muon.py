"""Volume and FLOPs of orthogonalizing sharded matrices, in closed form: see `distlab.optim`.

An iteration of Newton–Schulz on a matrix of sides s ≤ l multiplies it with its transpose, squares
that, and multiplies the matrix by the polynomial: 4·s²·l + 2·s³ FLOPs.
"""

from collections.abc import Sequence

from distlab.theory.volume import CommunicationVolume

BF16 = 2  # bytes of an element of what is sent


def muon_volume(
    placement: str, counts: Sequence[Sequence[int]], owners: Sequence[int], rank: int
) -> CommunicationVolume:
    """Return the bytes that a rank sends so that matrices are orthogonalized whole.

    An all-gather counts its output, an all-to-all the rank's contribution.

    Args:
        placement: `gather` or `exchange`, as in `distlab.parallel.muon`.
        counts: for each matrix, the number of elements of each rank.
        owners: rank that orthogonalizes each matrix under `exchange`.
    """
    held = [sum(column) for column in zip(*counts, strict=True)]
    if placement == "gather":
        return CommunicationVolume(1, BF16 * len(held) * max(held))
    owned = sum(
        sum(of_ranks) for of_ranks, owner in zip(counts, owners, strict=True) if owner == rank
    )
    return CommunicationVolume(2, BF16 * (held[rank] + owned))


def orthogonalize_flops(rows: int, columns: int, steps: int = 5) -> int:
    """FLOPs of one matrix."""
    short, long = sorted((rows, columns))
    return steps * (4 * short**2 * long + 2 * short**3)
