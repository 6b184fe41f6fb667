"""What a collective costs under the α–β model: every message of S bytes takes α + S/W seconds.

`S` is the payload that the recorder counts: the whole tensor of an all-reduce, an all-gather's output, a
reduce-scatter's input. `W` is what one rank sends in one direction, `α` a message's latency, `N` the ranks; every
rank sends and receives at once. The reduction itself costs nothing here.

    algorithm                          rounds         seconds
    ring reduce-scatter, all-gather    N−1            (N−1)·α + (N−1)/N · S/W
    ring all-reduce                    2(N−1)         2(N−1)·α + 2(N−1)/N · S/W
    ring that forwards whole tensors   N−1            (N−1)·(α + S/W)
    binomial tree all-reduce           2⌈log₂N⌉       2⌈log₂N⌉·(α + S/W)

Rings: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". Trees: Thakur,
Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".

Over hosts of several devices (`Fabric`) links differ. A message occupies its link for S/W and arrives α later, so a
ring's time is that of its longest chain of messages, each of which waits for the one before it on its link or for the
one it forwards. With N = H·G ranks, i inside and o between hosts, b the seconds of a chunk on a link:

    flat ring      max over chains of j hops and 2(N−1)−j waits at the slowest link
    binomial tree  2⌈log₂G⌉·(αᵢ + S/Wᵢ) + 2⌈log₂H⌉·(αₒ + S/card)
    two-level      2(G−1)·(αᵢ + S/(G·Wᵢ)) + 2(H−1)·(αₒ + S/(G·H·Wₒ))

A flat ring leaves each host through all its cards (one ring per card, as libraries build them), so it moves large
payloads best; two levels need 2(G−1) + 2(H−1) hops instead of 2(N−1), and win below `Fabric.crossover()`. The two-level
form: Cho et al. 2019, "BlueConnect".

α–β from measured times: seconds(S) = α + S/W, in one range of sizes or several (`Piece`).

Libraries change their algorithm with the size (low-latency protocols, trees, more channels), so one line does not
fit 4 KB and 1 GB; and a least-squares fit of the seconds would only look at the largest. So the *relative* error is
minimised, Σ (fit/measured − 1)², which is linear in α and 1/W, and sizes are divided into as few ranges as reach the
tolerance, at the borders that make that sum smallest. α and 1/W are not negative.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distlab.theory.checks import at_least_one


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
    """Links that a message passes one after the other, beyond the first: those of the ring, or up and down a tree,
    2·log₂N, which libraries take for an all-reduce of many ranks.
    """
    return min(ranks - 2, math.ceil(2 * math.log2(ranks))) if all_reduce else ranks - 2


def link_share(operation: str, ranks: int) -> float:
    """Share of a payload that the busiest link of a ring carries: all of a pipelined broadcast, two passes of
    (N−1)/N of an all-reduce, one of every other collective.
    """
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(operation, (ranks - 1) / ranks)


# Name → rounds on N ranks, and into how many chunks the tensor is cut, one of which a rank sends in each.
ALGORITHMS: dict[str, Callable[[int], tuple[int, int]]] = {
    "ring all-gather": lambda ranks: (ranks - 1, ranks),  # a reduce-scatter likewise
    # N−1 rounds in which every rank passes a chunk to its neighbour, who adds its own; in N−1 more the finished chunks
    # go round. Each link carries less than 2·S however many ranks there are: bandwidth-optimal, unlike its latency.
    "ring all-reduce": lambda ranks: (2 * (ranks - 1), ranks),
    # Every rank forwards whole tensors and adds what it receives. Wins where latency outweighs volume.
    "whole-tensor ring": lambda ranks: (ranks - 1, 1),
    "binomial tree": lambda ranks: (2 * math.ceil(math.log2(ranks)), 1),  # reduce up, broadcast down
}


def collective_seconds(algorithm: str, num_bytes: float, ranks: int, link: Link) -> float:
    """Seconds of one of `ALGORITHMS`, as in the table above; 0 for a single rank.

    Raises:
        ValueError: fewer than one rank, or negative bytes.
    """
    _check(num_bytes, ranks)
    rounds, chunks = ALGORITHMS[algorithm](ranks)
    return rounds * link.seconds(num_bytes / chunks)


@dataclass(frozen=True)
class Fabric:
    """Hosts of several devices as links.

    Args:
        hosts, per_host: H and G.
        inside: of a device to others of its host.
        between: of a device to other hosts, while all of its host's send.
        cards: network cards of a host.

    Raises:
        ValueError: a number below one.
    """

    hosts: int
    per_host: int
    inside: Link
    between: Link
    cards: int = 1

    def __post_init__(self) -> None:
        at_least_one(hosts=self.hosts, per_host=self.per_host, cards=self.cards)

    @staticmethod
    def of(cluster: Any, share: float = 1.0) -> "Fabric":
        """The links of a `hardware.ClusterSpec`, at a share of its bandwidths."""
        inside = Link(share * cluster.inside, cluster.inside_hop_s)
        between = Link(share * cluster.between, cluster.between_hop_s)
        return Fabric(cluster.hosts, cluster.gpus_per_host, inside, between, cluster.cards_per_host)

    @property
    def ranks(self) -> int:
        """N."""
        return self.hosts * self.per_host

    @property
    def card(self) -> Link:
        """One network card, which serves one message at a time."""
        return Link(self.between.bytes_per_s * self.per_host / self.cards, self.between.latency_s)

    def ring_links(self, num_bytes: float, rings: int | None = None) -> tuple[float, float]:
        """Seconds for which a ring's chunk occupies a link inside a host, and one between hosts."""
        rings = self.cards if rings is None else rings
        chunk = num_bytes / self.ranks
        return chunk / self.inside.bytes_per_s, chunk / rings / self.card.bytes_per_s

    def flat_ring(self, num_bytes: float, rings: int | None = None) -> float:
        """Seconds of an all-reduce over rings through all ranks, host after host; `rings` default one per card.

        Raises:
            ValueError: negative bytes, or more rings than cards.
        """
        _check(num_bytes, self.ranks)
        if rings is not None and not 1 <= rings <= self.cards:
            raise ValueError(f"rings={rings}: each leaves a host through a card of its own, and it has {self.cards}")
        steps, (inside, between) = 2 * (self.ranks - 1), self.ring_links(num_bytes, rings)
        if steps == 0:
            return 0.0
        if self.hosts == 1:
            return steps * (self.inside.latency_s + inside)
        chains = []
        for hops in {1, min(self.per_host, steps), (steps - 1) // self.per_host * self.per_host + 1, steps}:
            for crossed in (1 + (hops - 1) // self.per_host, hops // self.per_host):  # most and fewest borders
                moving = crossed * (self.between.latency_s + between)
                moving += (hops - crossed) * (self.inside.latency_s + inside)
                slowest = max(between if crossed else 0.0, inside if hops > crossed else 0.0)
                chains.append(moving + (steps - hops) * slowest)
        return max(chains)

    def tree(self, num_bytes: float) -> float:
        """Seconds of an all-reduce up and down a binomial tree, inside hosts first; exact where H and G are powers
        of two, else the most it can take.
        """
        _check(num_bytes, self.ranks)
        up = math.ceil(math.log2(self.per_host)) * self.inside.seconds(num_bytes)
        return 2 * (up + math.ceil(math.log2(self.hosts)) * self.card.seconds(num_bytes))

    def two_level(self, num_bytes: float) -> float:
        """Seconds of reduce-scatter inside, all-reduce of the shards between, all-gather inside."""
        _check(num_bytes, self.ranks)
        shard = num_bytes / self.per_host
        inside = collective_seconds("ring all-gather", num_bytes, self.per_host, self.inside)
        return 2 * inside + collective_seconds("ring all-reduce", shard, self.hosts, self.between)

    def crossover(self, rings: int | None = None) -> float:
        """Bytes from which the flat ring is faster than two levels: 0 if always, infinite if never."""
        low, high = 1.0, 1e15

        def two_level_wins(size: float) -> bool:
            return self.two_level(size) < self.flat_ring(size, rings)

        if two_level_wins(high):
            return math.inf
        if not two_level_wins(low):
            return 0.0
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if two_level_wins(middle) else (low, middle)
        return low


def _check(num_bytes: float, ranks: int) -> None:
    if ranks < 1 or num_bytes < 0:
        raise ValueError(f"num_bytes={num_bytes}, ranks={ranks}: at least one rank, and no negative size")


MAX_PIECES, TOLERANCE = 5, 0.08
LEAST_POINTS = 3  # two would be met exactly, and say nothing


@dataclass(frozen=True)
class Piece(Link):
    """α–β for payloads from `from_bytes` on; W is in payload bytes (inf for a constant time)."""

    from_bytes: float = 0.0


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

    def metrics(self, sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
        """For a record, as `simulate.calibrate.measured_links` reads it: pieces, and the errors at measured points."""
        errors = relative_errors(self, sizes, seconds)
        large = [abs(error) for size, error in zip(sizes, errors, strict=True) if size > 1e6]
        return {
            "pieces": self.to_list(),
            "latency_us": 1e6 * self.pieces[0].latency_s,
            "fit_error_max_pct": 100 * max(map(abs, errors)),
            "fit_error_above_1mb_pct": 100 * max(large) if large else None,
            "residuals_pct": [100 * error for error in errors],
        }

    def to_list(self) -> list[dict[str, float]]:
        """For a record."""
        return [asdict(piece) for piece in self.pieces]

    @classmethod
    def from_list(cls, pieces: Sequence[Mapping[str, Any]]) -> "CollectiveFit":
        """The inverse of `to_list`."""
        return cls(tuple(Piece(**piece) for piece in pieces))


def fit_collective(sizes: Sequence[float], seconds: Sequence[float]) -> CollectiveFit:
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
        if max(map(abs, relative_errors(fit, *zip(*points, strict=True)))) <= TOLERANCE:
            break
    return fit


def relative_errors(fit: CollectiveFit, sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """fit/measured − 1 of each point."""
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
