"""Cost of a collective under the α–β model: every message of S bytes takes α + S/W seconds.

`S` is the payload that the recorder counts: the whole tensor of an all-reduce, an all-gather's
output, a reduce-scatter's input. `W` is the bytes per second that one rank sends in one direction,
`α` a message's latency, `N` the number of ranks. Every rank sends and receives at once. The
reduction itself costs nothing here.

Seconds are rounds times the seconds of one round's message. Of N chunks a round sends one:

    algorithm                          rounds         seconds
    ring reduce-scatter, all-gather    N−1            (N−1)·α + (N−1)/N · S/W
    ring all-reduce                    2(N−1)         2(N−1)·α + 2(N−1)/N · S/W
    ring that forwards whole tensors   N−1            (N−1)·(α + S/W)
    binomial tree all-reduce           2⌈log₂N⌉       2⌈log₂N⌉·(α + S/W)

Rings: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations". Trees: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
operations in MPICH".

The second half of the file finds α and W from measured times: seconds(S) = α + S/W, in one range of
sizes or several (`Piece`).

Libraries change their algorithm with the size (low-latency protocols, trees, more channels), so one
line does not fit 4 KB and 1 GB. A least-squares fit of the seconds would only look at the largest
sizes. So the *relative* error is minimised, Σ (fit/measured − 1)², which is linear in α and 1/W.
Sizes are divided into the fewest ranges that reach the tolerance, at the borders that make that sum
smallest. α and 1/W are not negative.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MAX_PIECES = 5
TOLERANCE = 0.08  # largest relative error of a fit that needs no further piece
# Least number of points of a piece. A line meets two points exactly, which says nothing.
LEAST_POINTS = 3


@dataclass(frozen=True)
class Link:
    """α–β of a link.

    Args:
        bytes_per_s: W, bytes per second in one direction of one rank.
        latency_s: α, seconds per message.

    Raises:
        ValueError: a bandwidth that is not positive or a negative latency.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.latency_s < 0:
            raise ValueError(
                f"bytes_per_s={self.bytes_per_s}, latency_s={self.latency_s}: "
                "bandwidth must be positive and latency not negative"
            )

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


def further_hops(ranks: int, *, all_reduce: bool) -> int:
    """Return the number of hops whose latency is added to that of a collective of two ranks.

    They are N − 2 for a ring of N ranks, also for a ring's all-reduce, whose second pass is not
    counted separately. For an all-reduce they are at most 2·log₂N, rounded up, because libraries
    go up and down a tree if there are many ranks (NCCL since 2.4: Sanders, Speck & Träff 2009,
    "Two-tree algorithms for full bandwidth broadcast, reduction and scan"). This is a rule of the
    model, and not the number of rounds in the table above.

    Args:
        ranks: number of ranks, N.
        all_reduce: True for an all-reduce, False for any other collective.
    """
    ring = ranks - 2
    if not all_reduce:
        return ring
    # log₂N levels up and log₂N down. NCCL chooses the faster of both, which the minimum stands for.
    tree = math.ceil(2 * math.log2(ranks))
    return min(ring, tree)


def link_share(operation: str, ranks: int) -> float:
    """Return the share of a payload that the busiest link of a ring carries.

    It is all of a pipelined broadcast, two passes of (N−1)/N of an all-reduce, and one pass of
    every other collective (the rings of the table above).

    Args:
        operation: name of the collective.
        ranks: number of ranks, N.
    """
    if operation == "broadcast":
        return 1.0
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def ring_all_gather(ranks: int) -> tuple[int, int]:
    """Return (rounds, chunks) of a ring's all-gather. A reduce-scatter has the same."""
    return ranks - 1, ranks


def ring_all_reduce(ranks: int) -> tuple[int, int]:
    """Return (rounds, chunks) of a ring's all-reduce.

    In N−1 rounds every rank passes a chunk to its neighbour, which adds its own. In N−1 more the
    finished chunks go round. Each link carries less than 2·S for any number of ranks, so the ring
    is bandwidth-optimal. Its latency grows with the ranks.
    """
    return 2 * (ranks - 1), ranks


def whole_tensor_ring(ranks: int) -> tuple[int, int]:
    """Return (rounds, chunks) of a ring whose ranks forward whole tensors and add them.

    It wins where latency outweighs volume.
    """
    return ranks - 1, 1


def binomial_tree(ranks: int) -> tuple[int, int]:
    """Return (rounds, chunks) of an all-reduce that reduces up a tree and broadcasts down."""
    return 2 * math.ceil(math.log2(ranks)), 1


# Name → function from the number of ranks to the number of rounds, and to the number of chunks into
# which the tensor is cut. A rank sends one chunk in each round.
ALGORITHMS: dict[str, Callable[[int], tuple[int, int]]] = {
    "ring all-gather": ring_all_gather,
    "ring all-reduce": ring_all_reduce,
    "whole-tensor ring": whole_tensor_ring,
    "binomial tree": binomial_tree,
}


def collective_seconds(algorithm: str, num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of one of `ALGORITHMS`, as in the table above. 0 for a single rank.

    Args:
        algorithm: name of the algorithm.
        num_bytes: bytes of the whole tensor, S.
        ranks: number of ranks, N.
        link: α and W.

    Raises:
        ValueError: fewer than one rank, or negative bytes.
    """
    if ranks < 1 or num_bytes < 0:
        raise ValueError(
            f"num_bytes={num_bytes}, ranks={ranks}: at least one rank, and no negative size"
        )
    rounds, chunks = ALGORITHMS[algorithm](ranks)
    # rounds · (α + (S/chunks)/W), which is the table's formula for each algorithm.
    return rounds * link.seconds(num_bytes / chunks)


# -- α and W from measured times -------------------------------------------------------------------


@dataclass(frozen=True)
class Piece(Link):
    """α–β of a range of payloads. W is in payload bytes per second, inf for a constant time.

    Args:
        from_bytes: bytes of the smallest payload of the range.
    """

    from_bytes: float = 0.0


@dataclass(frozen=True)
class CollectiveFit:
    """Time of a collective over its payload, in pieces.

    Args:
        pieces: pieces by ascending `from_bytes`. The first also serves smaller payloads.

    Raises:
        ValueError: no pieces.
    """

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ValueError("a fit needs at least one piece")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a payload of `num_bytes`."""
        # Pieces ascend, so the last one that begins at or below the payload is the right one.
        valid = self.pieces[0]
        for piece in self.pieces:
            if piece.from_bytes <= num_bytes:
                valid = piece
        return valid.seconds(num_bytes)

    def metrics(self, sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
        """Return a record's metrics: the pieces, the latency, and the largest error.

        Args:
            sizes: bytes of each measured payload.
            seconds: measured seconds of each payload.
        """
        return {
            "pieces": [asdict(piece) for piece in self.pieces],
            "latency_us": 1e6 * self.pieces[0].latency_s,
            "fit_error_max_pct": 100 * _largest_error(self, sizes, seconds),
        }


def fit_collective(sizes: Sequence[float], seconds: Sequence[float]) -> CollectiveFit:
    """Fit the fewest pieces whose largest relative error is within the tolerance.

    If none are, use `MAX_PIECES`.

    The cuts minimise the sum of squared errors, not the largest error. Otherwise one unexplained
    measurement (short calls while other jobs run) would leave no reason to fit the rest.

    Args:
        sizes: bytes of each payload, all different.
        seconds: seconds of each, positive.

    Raises:
        ValueError: fewer than two points, unequal lengths, or a number that is not positive.
    """
    points = sorted(zip(sizes, seconds, strict=True))
    different_sizes = {size for size, _ in points}
    if (
        len(points) < 2
        or min(min(point) for point in points) <= 0
        or len(different_sizes) < len(points)
    ):
        raise ValueError(
            f"a fit needs two or more different sizes with positive times, got {points}"
        )
    # Two points are too few for a piece, but a line through them is better than no fit.
    most_pieces = max(1, min(MAX_PIECES, len(points) // LEAST_POINTS))
    for pieces in _best_pieces(points, most_pieces):
        fit = CollectiveFit(pieces)
        # Few pieces first: more of them always fit better, and explain less.
        if _largest_error(fit, sizes, seconds) <= TOLERANCE:
            break
    return fit


def relative_errors(
    fit: CollectiveFit, sizes: Sequence[float], seconds: Sequence[float]
) -> list[float]:
    """Return fit/measured − 1 of each point.

    Args:
        fit: pieces to compare with.
        sizes: bytes of each payload.
        seconds: measured seconds of each payload.
    """
    return [fit.seconds(size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]


def _largest_error(fit: CollectiveFit, sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the largest relative error of all points, without its sign."""
    return max(abs(error) for error in relative_errors(fit, sizes, seconds))


def _best_pieces(points: list[tuple[float, float]], most: int) -> Iterator[tuple[Piece, ...]]:
    """Yield the best single piece, the best 2 pieces, and so on, up to `most` pieces.

    The best ones have the smallest sum of squared relative errors. Dynamic programming finds them:
    the best pieces of the points before a border do not depend on those after it.

    Args:
        points: (bytes, seconds) by ascending bytes.
        most: number of pieces, at most.
    """

    @functools.cache
    def piece(start: int, stop: int) -> tuple[float, Piece]:
        """Return (sum of squared errors, piece) of the points from `start` to before `stop`."""
        found = _piece(points, start, stop)
        error = sum((found.seconds(size) / time - 1) ** 2 for size, time in points[start:stop])
        return error, found

    @functools.cache
    def best(count: int, stop: int) -> tuple[float, tuple[Piece, ...]]:
        """Return (sum of squared errors, the best `count` pieces) of the points before `stop`."""
        if count == 1:
            error, only = piece(0, stop)
            return error, (only,)
        options = []
        first_cut = (count - 1) * LEAST_POINTS  # the pieces before it have that many points
        last_cut = stop - LEAST_POINTS
        for cut in range(first_cut, last_cut + 1):
            error_before, pieces_before = best(count - 1, cut)
            error_of_last, last = piece(cut, stop)
            options.append((error_before + error_of_last, (*pieces_before, last)))
        return min(options, key=lambda option: option[0])

    for count in range(1, most + 1):
        _, pieces = best(count, len(points))
        yield pieces


def _piece(points: list[tuple[float, float]], start: int, stop: int) -> Piece:
    """Return the piece with the least squares of the relative error.

    Relative to a time t, the fit α/t + (S/t)·(1/W) should be 1. Where α or 1/W comes out negative,
    the fit is made without it.
    """
    from_bytes = 0.0
    if start > 0:
        # The border is the geometric mean of the sizes at either side of it.
        from_bytes = (points[start - 1][0] * points[start][0]) ** 0.5
    sizes, times = np.array(points[start:stop]).T
    largest = sizes[-1]
    of_latency = 1 / times
    of_slope = sizes / largest / times  # both columns have one magnitude, for the solver's sake
    columns = np.stack([of_latency, of_slope], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones(len(times)))[0]
    if slope < 0:  # nothing grows with the size: a constant
        # Least squares of a single column x against ones: Σx / Σx².
        latency = of_latency.sum() / (of_latency @ of_latency)
        slope = 0.0
    elif latency < 0:
        latency = 0.0
        slope = of_slope.sum() / (of_slope @ of_slope)
    # The slope is per `largest` bytes, see the scaled column above.
    bytes_per_s = float(largest / slope) if slope > 0 else math.inf
    return Piece(bytes_per_s, float(latency), from_bytes)
