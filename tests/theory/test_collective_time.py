"""Every cost against its algorithm, walked message by message on numbers: right result, and the time it took."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.theory import collective_time as cost
from distlab.theory.collective_time import Link

ring_all_reduce, tree_all_reduce = (
    partial(cost.collective_seconds, name) for name in ("ring all-reduce", "binomial tree")
)
LINK = Link(bytes_per_s=3.0, latency_s=0.25)
RANKS = st.integers(1, 9)


class Wires:
    """Rounds of messages; a round lasts as long as its longest message."""

    def __init__(self, link: Link):
        self.link, self.seconds, self.sent = link, 0.0, 0.0

    def round(self, sizes):
        self.seconds += max(self.link.seconds(size) for size in sizes)
        self.sent += max(sizes)


def ring(values, piece, all_reduce):
    """`values[r][p]`: rank r's number for piece p of the tensor. Returns the wires and the ranks' results."""
    ranks, wires = len(values), Wires(LINK)
    state = [list(row) for row in values]
    for step in range(ranks - 1):  # reduce-scatter
        sending = [(r, (r - step) % ranks, state[r][(r - step) % ranks]) for r in range(ranks)]
        for r, p, value in sending:
            state[(r + 1) % ranks][p] += value
        wires.round([piece] * ranks)
    if not all_reduce:
        return wires, [state[r][(r + 1) % ranks] for r in range(ranks)]
    for step in range(ranks - 1):  # all-gather
        sending = [(r, (r + 1 - step) % ranks, state[r][(r + 1 - step) % ranks]) for r in range(ranks)]
        for r, p, value in sending:
            state[(r + 1) % ranks][p] = value
        wires.round([piece] * ranks)
    return wires, state


@given(RANKS, st.integers(1, 50), st.booleans())
def test_rings(ranks, piece, all_reduce):
    values = [[100 * r + p for p in range(ranks)] for r in range(ranks)]
    wires, result = ring(values, piece, all_reduce)
    sums = [sum(row[p] for row in values) for p in range(ranks)]
    expected = [sums] * ranks if all_reduce else [sums[(r + 1) % ranks] for r in range(ranks)]
    assert result == expected
    algorithm = "ring all-reduce" if all_reduce else "ring all-gather"
    assert cost.collective_seconds(algorithm, piece * ranks, ranks, LINK) == pytest.approx(wires.seconds)


@given(RANKS, st.integers(1, 50))
def test_ring_of_whole_tensors(ranks, size):
    values, wires = list(range(1, ranks + 1)), Wires(LINK)
    total, passing = list(values), list(values)
    for _ in range(ranks - 1):
        passing = [passing[(r - 1) % ranks] for r in range(ranks)]
        total = [mine + other for mine, other in zip(total, passing, strict=True)]
        wires.round([size] * ranks)
    assert total == [sum(values)] * ranks
    assert cost.collective_seconds("whole-tensor ring", size, ranks, LINK) == pytest.approx(wires.seconds)


@given(RANKS, st.integers(1, 50))
def test_tree(ranks, size):
    total, wires, distance = list(range(1, ranks + 1)), Wires(LINK), 1
    while distance < ranks:
        for r in range(0, ranks - distance, 2 * distance):
            total[r] += total[r + distance]
        wires.round([size])
        distance *= 2
    while distance > 1:
        distance //= 2
        for r in range(0, ranks - distance, 2 * distance):
            total[r + distance] = total[r]
        wires.round([size])
    assert total == [ranks * (ranks + 1) // 2] * ranks
    assert tree_all_reduce(size, ranks, LINK) == pytest.approx(wires.seconds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Link(0.0), "bytes_per_s=0"),
        (lambda: Link(1.0, -1.0), "latency_s=-1"),
        (lambda: ring_all_reduce(1, 0, LINK), "ranks=0"),
        (lambda: ring_all_reduce(-1, 2, LINK), "num_bytes=-1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_lonely_rank_sends_nothing():
    assert ring_all_reduce(1e9, 1, LINK) == tree_all_reduce(1e9, 1, LINK) == 0
