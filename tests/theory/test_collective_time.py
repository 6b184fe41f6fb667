"""Every cost against the rounds of its algorithm."""

import math
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


@given(st.integers(1, 9), st.integers(1, 50))
def test_rings(ranks, size):
    """Rounds and the largest message of each, as the algorithms in their papers have them."""
    ring, tree = ranks - 1, math.ceil(math.log2(ranks))
    for algorithm, rounds, message in (
        ("ring all-reduce", 2 * ring, size / ranks), ("ring all-gather", ring, size / ranks),
        ("whole-tensor ring", ring, size), ("binomial tree", 2 * tree, size),
    ):  # fmt: skip
        expected = rounds * (LINK.latency_s + message / LINK.bytes_per_s)
        assert cost.collective_seconds(algorithm, size, ranks, LINK) == pytest.approx(expected), algorithm


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
