"""Every cost against the rounds of its algorithm."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.theory import collective_time as cost
from distlab.theory.collective_time import Link

LINK = Link(bytes_per_s=3.0, latency_s=0.25)


@given(st.integers(1, 9), st.integers(1, 50))
def test_rings(ranks, size):
    """Rounds and the largest message of each, as the algorithms in their papers have them."""
    ring, tree = ranks - 1, math.ceil(math.log2(ranks))
    for algorithm, rounds, message in (
        ("ring all-reduce", 2 * ring, size / ranks),
        ("ring all-gather", ring, size / ranks),
        ("whole-tensor ring", ring, size),
        ("binomial tree", 2 * tree, size),
    ):
        expected = rounds * (LINK.latency_s + message / LINK.bytes_per_s)
        assert cost.collective_seconds(algorithm, size, ranks, LINK) == pytest.approx(expected), (
            algorithm
        )
