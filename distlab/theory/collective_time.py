"""Cost of a collective under the α–β model: every message of S bytes takes α + S/W seconds.

`S` is the payload that the recorder counts: the whole tensor of an all-reduce, an all-gather's
output, a reduce-scatter's input. `W` is what one rank sends in one direction, `α` a message's
latency, `N` the ranks; every rank sends and receives at once. The reduction itself costs nothing
here.

    algorithm                          rounds         seconds
    ring reduce-scatter, all-gather    N−1            (N−1)·α + (N−1)/N · S/W
    ring all-reduce                    2(N−1)         2(N−1)·α + 2(N−1)/N · S/W
    ring that forwards whole tensors   N−1            (N−1)·(α + S/W)
    binomial tree all-reduce           2⌈log₂N⌉       2⌈log₂N⌉·(α + S/W)

Rings: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations". Trees: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
operations in MPICH".

α–β from measured times: seconds(S) = α + S/W, in one range of sizes or several (`Piece`).

Libraries change their algorithm with the size (low-latency protocols, trees, more channels), so one
line does not fit 4 KB and 1 GB; and a least-squares fit of the seconds would only look at the
largest. So the *relative* error is minimised, Σ (fit/measured − 1)², which is linear in α and 1/W,
and sizes are divided into as few ranges as reach the tolerance, at the borders that make that sum
smallest. α and 1/W are not negative.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Link:
    """α–β: `bytes_per_s` W in one direction of one rank, `latency_s` α per message.

    Raises:
        ValueError: a bandwidth that is not positive or a negative latency.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.latency_s < 0:
            raise ValueError(
                f"bytes_per_s={self.bytes_per_s}, latency_s={self.latency_s}: bandwidth must be positive and "
                "latency not negative"
            )

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


def further_hops(ranks: int, *, all_reduce: bool) -> int:
    """Return the number of links that a message passes one after the other, beyond the first.

    They are those of the ring, or up and down a tree, 2·log₂N, which libraries use for an
    all-reduce of many ranks.
    """
    return min(ranks - 2, math.ceil(2 * math.log2(ranks))) if all_reduce else ranks - 2


def link_share(operation: str, ranks: int) -> float:
    """Return the share of a payload that the busiest link of a ring carries.

    It is all of a pipelined broadcast, two passes of (N−1)/N of an all-reduce, and one pass of
    every other collective.
    """
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(
        operation, (ranks - 1) / ranks
    )


# Name → rounds on N ranks, and into how many chunks the tensor is cut, one of which a rank sends in
# each.
ALGORITHMS: dict[str, Callable[[int], tuple[int, int]]] = {
    "ring all-gather": lambda ranks: (ranks - 1, ranks),  # a reduce-scatter likewise
    # N−1 rounds in which every rank passes a chunk to its neighbour, who adds its own; in N−1 more
    # the finished chunks go round. Each link carries less than 2·S however many ranks there are:
    # bandwidth-optimal, unlike its latency.
    "ring all-reduce": lambda ranks: (2 * (ranks - 1), ranks),
    # Every rank forwards whole tensors and adds what it receives. Wins where latency outweighs
    # volume.
    "whole-tensor ring": lambda ranks: (ranks - 1, 1),
    # reduce up, broadcast down
    "binomial tree": lambda ranks: (2 * math.ceil(math.log2(ranks)), 1),
}


def collective_seconds(algorithm: str, num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds of one of `ALGORITHMS`, as in the table above; 0 for a single rank.

    Raises:
        ValueError: fewer than one rank, or negative bytes.
    """
    if ranks < 1 or num_bytes < 0:
        raise ValueError(
            f"num_bytes={num_bytes}, ranks={ranks}: at least one rank, and no negative size"
        )
    rounds, chunks = ALGORITHMS[algorithm](ranks)
    return rounds * link.seconds(num_bytes / chunks)


MAX_PIECES, TOLERANCE = 5, 0.08
LEAST_POINTS = 3  # two would be met exactly, and say nothing


@dataclass(frozen=True)
class Piece(Link):
    """α–β for payloads from `from_bytes` on; W is in payload bytes (inf for a constant time)."""

    from_bytes: float = 0.0


@dataclass(frozen=True)
class CollectiveFit:
    """Pieces by ascending `from_bytes`.

    The first also serves smaller payloads, the last larger ones.

    Raises:
        ValueError: no pieces.
    """

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ValueError("a fit needs at least one piece")

    def seconds(self, num_bytes: float) -> float:
        """Time of a payload of `num_bytes`."""
        valid = [piece for piece in self.pieces if piece.from_bytes <= num_bytes]
        return (valid[-1] if valid else self.pieces[0]).seconds(num_bytes)

    def metrics(self, sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
        """Return a record's metrics: pieces, and the errors at measured points."""
        errors = relative_errors(self, sizes, seconds)
        return {
            "pieces": [asdict(piece) for piece in self.pieces],
            "latency_us": 1e6 * self.pieces[0].latency_s,
            "fit_error_max_pct": 100 * max(map(abs, errors)),
        }


def fit_collective(sizes: Sequence[float], seconds: Sequence[float]) -> CollectiveFit:
    """Fit the fewest pieces whose largest relative error is within the tolerance.

    If none are, use `MAX_PIECES`.

    The cuts minimise the sum of squared errors, not the largest: otherwise one unexplained
    measurement (short calls while other jobs run) would leave no reason to fit the rest.

    Args:
        sizes: payload in bytes, all different.
        seconds: seconds of each, positive.

    Raises:
        ValueError: fewer than two points, unequal lengths, or a number that is not positive.
    """
    points = sorted(zip(sizes, seconds, strict=True))
    if (
        len(points) < 2
        or min(min(point) for point in points) <= 0
        or len(dict(points)) < len(points)
    ):
        raise ValueError(
            f"a fit needs two or more different sizes with positive times, got {points}"
        )

    @functools.cache
    def piece(start: int, stop: int) -> tuple[float, Piece]:
        """The best piece for some of the points, and its sum of squared errors."""
        found = _piece(points, start, stop)
        return sum(
            (found.seconds(size) / time - 1) ** 2 for size, time in points[start:stop]
        ), found

    @functools.cache
    def best(count: int, stop: int) -> tuple[float, tuple[Piece, ...]]:
        """The best `count` pieces for the points before `stop`."""
        if count == 1:
            error, found = piece(0, stop)
            return error, (found,)
        options = []
        for cut in range((count - 1) * LEAST_POINTS, stop - LEAST_POINTS + 1):
            (before, pieces), (error, last) = best(count - 1, cut), piece(cut, stop)
            options.append((before + error, (*pieces, last)))
        return min(options, key=lambda option: option[0])

    for count in range(1, max(1, min(MAX_PIECES, len(points) // LEAST_POINTS)) + 1):
        fit = CollectiveFit(best(count, len(points))[1])
        if max(map(abs, relative_errors(fit, *zip(*points, strict=True)))) <= TOLERANCE:
            break
    return fit


def relative_errors(
    fit: CollectiveFit, sizes: Sequence[float], seconds: Sequence[float]
) -> list[float]:
    """Return fit/measured − 1 of each point."""
    return [fit.seconds(size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]


def _piece(points: list[tuple[float, float]], start: int, stop: int) -> Piece:
    """Least squares of the relative error; where α or 1/W came out negative, without it."""
    begin = 0.0 if start == 0 else (points[start - 1][0] * points[start][0]) ** 0.5
    sizes, times = np.array(points[start:stop]).T
    a, b = 1 / times, sizes / sizes[-1] / times  # columns of one size, for the solver's sake
    latency, slope = np.linalg.lstsq(np.stack([a, b], axis=1), np.ones(len(times)))[0]
    if slope < 0:  # nothing grows with the size: a constant
        latency, slope = a.sum() / (a @ a), 0.0
    elif latency < 0:
        latency, slope = 0.0, b.sum() / (b @ b)
    return Piece(float(sizes[-1] / slope) if slope > 0 else math.inf, float(latency), begin)
