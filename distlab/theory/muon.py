"""Volume and FLOPs of orthogonalizing sharded matrices, in closed form: see `distlab.optim`.

An iteration of Newton–Schulz on a matrix of sides s ≤ l multiplies it with its transpose, squares
that, and multiplies the matrix by the polynomial. Two of these matmuls take 2·s²·l FLOPs and one
2·s³, in sum 4·s²·l + 2·s³. Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in
neural networks".
"""

from collections.abc import Sequence

from distlab.theory.volume import CommunicationVolume

BF16 = 2  # bytes of an element of what is sent


def muon_volume(
    placement: str, counts: Sequence[Sequence[int]], owners: Sequence[int], rank: int
) -> CommunicationVolume:
    """Return the bytes that a rank sends so that matrices are orthogonalized whole.

    An all-gather counts its output: for every rank, the number of elements that the fullest rank
    holds. An all-to-all counts the rank's contribution: first its slices of all matrices, which go
    to their owners, then the updates of the matrices that it owns.

    Args:
        placement: `gather` or `exchange`, as in `distlab.parallel.muon`.
        counts: for each matrix, the number of elements of each rank.
        owners: rank that orthogonalizes each matrix under `exchange`.
        rank: rank that sends, an index into `counts[…]`.
    """
    held = [sum(of_rank) for of_rank in zip(*counts, strict=True)]  # elements of each rank
    if placement == "gather":
        ranks = len(held)
        # The parts of an all-gather have one length, so that of the fullest rank.
        return CommunicationVolume(1, BF16 * ranks * max(held))
    owned = 0  # elements
    for of_ranks, owner in zip(counts, owners, strict=True):
        if owner == rank:
            owned += sum(of_ranks)
    return CommunicationVolume(2, BF16 * (held[rank] + owned))


def orthogonalize_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Return the FLOPs of orthogonalizing one matrix.

    Args:
        rows, columns: sides of the matrix.
        steps: number of iterations.
    """
    short = min(rows, columns)
    long = max(rows, columns)
    # X·Xᵀ and the product with X are 2·s²·l each, the square of X·Xᵀ is 2·s³.
    return steps * (4 * short**2 * long + 2 * short**3)
