"""All-reduces over hosts by events: every message of every rank, when it starts, leaves its link free and arrives.

A message starts when its rank has what it sends and its link is free; it occupies the link for bytes over bandwidth
and arrives a latency later. Ranks of a round are independent of each other, so a round is one step of numpy. Nothing
here knows the closed forms of `distlab.theory.collective_time.Fabric`, which are tested against it.
"""

import numpy as np

from distlab.theory.collective_time import Fabric


def _ring(ready: np.ndarray, occupied: np.ndarray, latency: np.ndarray, rounds: int) -> np.ndarray:
    """When each rank has its last message; `ready`, and seconds per message on the link to the next rank, per rank.

    The last axis is the ring.
    """
    free = has = ready
    for _ in range(rounds):
        free = np.maximum(has, free) + occupied
        has = np.roll(free + latency, 1, axis=-1)
    return has


def flat_ring(fabric: Fabric, num_bytes: float, rings: int | None = None) -> float:
    """Seconds of the ring all-reduce through all ranks. All rings are alike, so one is walked."""
    inside, between = fabric.ring_links(num_bytes, rings)
    last = np.arange(1, fabric.ranks + 1) % fabric.per_host == 0  # of a host: it sends to the next
    last &= fabric.hosts > 1
    occupied = np.where(last, between, inside)
    latency = np.where(last, fabric.between.latency_s, fabric.inside.latency_s)
    return float(_ring(np.zeros(fabric.ranks), occupied, latency, 2 * (fabric.ranks - 1)).max())


def two_level(fabric: Fabric, num_bytes: float) -> float:
    """Seconds of reduce-scatter inside, all-reduce between, all-gather inside; no phase waits for other ranks' ends."""
    hosts, each = fabric.hosts, fabric.per_host
    has = np.zeros((hosts, each))
    chunk = np.asarray(num_bytes / each / fabric.inside.bytes_per_s)
    hop = np.asarray(fabric.inside.latency_s)
    has = _ring(has, chunk, hop, each - 1)
    part = np.asarray(num_bytes / each / hosts / fabric.between.bytes_per_s)
    has = _ring(has.T, part, np.asarray(fabric.between.latency_s), 2 * (hosts - 1)).T
    return float(_ring(has, chunk, hop, each - 1).max())


def tree(fabric: Fabric, num_bytes: float) -> float:
    """Seconds of a binomial tree's all-reduce: partial sums go up, inside hosts first, and the result comes down."""
    has = np.zeros((fabric.hosts, fabric.per_host))
    up = [(1, 2**k, fabric.inside.seconds(num_bytes)) for k in range((fabric.per_host - 1).bit_length())]
    up += [(0, 2**k, fabric.card.seconds(num_bytes)) for k in range((fabric.hosts - 1).bit_length())]
    for axis, apart, seconds in up:
        line = np.moveaxis(has, axis, 0) if axis == 1 else has[:, 0]
        for low in range(0, len(line) - apart, 2 * apart):
            line[low] = np.maximum(line[low], line[low + apart] + seconds)
    for axis, apart, seconds in reversed(up):
        line = np.moveaxis(has, axis, 0) if axis == 1 else has[:, 0]
        for low in range(0, len(line) - apart, 2 * apart):
            line[low + apart] = np.maximum(line[low + apart], line[low] + seconds)
            line[low] = line[low] + seconds  # its link was busy
    return float(has.max())
