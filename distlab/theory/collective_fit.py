"""α–β from measured times: seconds(S) = α + S/W, in one piece or several.

Libraries change their algorithm with the size (low-latency protocols, trees, more channels), so one line does not
fit 4 KB and 1 GB; and a least-squares fit of the seconds would only look at the largest. So the *relative* error is
minimised, Σ (fit/measured − 1)², which is linear in α and 1/W, and sizes are cut into as few pieces as reach the
tolerance, where the cuts make that sum smallest. α and 1/W are not negative.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_PIECES, TOLERANCE = 5, 0.08
LEAST_POINTS = 3  # two would be met exactly, and say nothing


@dataclass(frozen=True)
class Piece:
    """Valid from `from_bytes` on: `latency_s` α, and `bytes_per_s` W in payload bytes (inf for a constant time)."""

    from_bytes: float
    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of a payload."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class CollectiveFit:
    """Pieces by ascending `from_bytes`; the first also serves what is smaller, the last what is larger.

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

    def to_list(self) -> list[dict[str, float]]:
        """For a record."""
        return [asdict(piece) for piece in self.pieces]

    @classmethod
    def from_list(cls, pieces: Sequence[Mapping[str, Any]]) -> "CollectiveFit":
        """The inverse of `to_list`."""
        return cls(tuple(Piece(**piece) for piece in pieces))


def fit_collective(
    sizes: Sequence[float], seconds: Sequence[float], *, tolerance: float = TOLERANCE
) -> CollectiveFit:
    """The fewest pieces whose largest relative error is within the tolerance; `MAX_PIECES` where none are.

    The cuts minimise the sum of squared errors, not the largest: one measurement that nothing explains (short calls
    beside other jobs) would otherwise leave no reason to fit the rest.

    Args:
        sizes: payload bytes, all different.
        seconds: of each; positive.

    Raises:
        ValueError: fewer than two points, unequal lengths, or something not positive.
    """
    points = sorted(zip(sizes, seconds, strict=True))
    if len(points) < 2 or min(min(point) for point in points) <= 0 or len(dict(points)) < len(points):
        raise ValueError(f"a fit needs two or more different sizes with positive times, got {points}")

    @functools.cache
    def piece(start: int, stop: int) -> tuple[float, Piece]:
        """The best piece for some of the points, and its sum of squared errors."""
        found = _piece(points, start, stop)
        return sum((found.seconds(size) / time - 1) ** 2 for size, time in points[start:stop]), found

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
        if max(map(abs, relative_errors(fit, *zip(*points, strict=True)))) <= tolerance:
            break
    return fit


def relative_errors(fit: CollectiveFit, sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """fit/measured − 1 of each point."""
    return [fit.seconds(size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]


def _piece(points: list[tuple[float, float]], start: int, stop: int) -> Piece:
    mine = points[start:stop]
    begin = 0.0 if start == 0 else (points[start - 1][0] * points[start][0]) ** 0.5
    a = [1 / time for _, time in mine]
    b = [size / time for size, time in mine]
    aa, ab, bb = (sum(x * y for x, y in zip(u, v, strict=True)) for u, v in ((a, a), (a, b), (b, b)))
    determinant = aa * bb - ab * ab
    latency = slope = -1.0
    if determinant > 1e-12 * aa * bb:
        latency = (sum(a) * bb - sum(b) * ab) / determinant
        slope = (sum(b) * aa - sum(a) * ab) / determinant
    if slope < 0:  # nothing grows with the size: a constant
        latency, slope = sum(a) / aa, 0.0
    elif latency < 0:
        latency, slope = 0.0, sum(b) / bb
    return Piece(begin, latency, 1 / slope if slope > 0 else float("inf"))
