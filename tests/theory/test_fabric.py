"""Clusters and their all-reduces: closed forms against every message simulated, limits, and what is refused."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.hardware import CLUSTERS, GB, cluster
from distlab.theory.collective_time import Fabric, collective_seconds
from tests.theory import messages as events

SIZES = st.floats(1e3, 1e11)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(CLUSTERS)), st.integers(1, 20), st.integers(1, 8), SIZES)
def test_simulated_messages_take_what_the_closed_form_says(name, hosts, each, size):
    """Within rounding; the bar is 2 %."""
    fabric = Fabric.of(cluster(f"{name}:{hosts}x{each}"))
    for algorithm in ("flat_ring", "two_level"):
        expected = getattr(fabric, algorithm)(size)
        assert getattr(events, algorithm)(fabric, size) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("hosts, each", [(1, 8), (4, 2), (16, 8)])
def test_trees_of_powers_of_two(hosts, each):
    fabric = Fabric.of(cluster(f"dgx-h100:{hosts}x{each}"))
    assert events.tree(fabric, 1e6) == pytest.approx(fabric.tree(1e6))


def test_one_host_is_the_ring_of_one_link():
    fabric = Fabric.of(cluster("dgx-h200:1x4"))
    expected = collective_seconds("ring all-reduce", 1e8, 4, fabric.inside)
    assert fabric.flat_ring(1e8) == pytest.approx(expected) == pytest.approx(fabric.two_level(1e8))


@pytest.mark.parametrize("name", CLUSTERS)
def test_crossover_is_where_the_winner_changes(name):
    fabric = Fabric.of(cluster(f"{name}:16x8"))
    size = fabric.crossover()
    assert 0 < size < math.inf
    assert fabric.two_level(size / 2) < fabric.flat_ring(size / 2)
    assert fabric.two_level(2 * size) > fabric.flat_ring(2 * size)
    assert fabric.crossover(rings=1) == math.inf  # one ring leaves all cards but one idle


def test_names_and_sizes():
    spec = cluster("grand-teton:128")
    assert (spec.hosts, spec.gpus_per_host, spec.between) == (16, 8, 50 * GB)
    assert spec.gpu.hbm_bandwidth == 2.4e12 and spec.gpu.watts == 500
    shared = cluster("p4d:2x8")
    assert shared.between == 6.25 * GB  # four cards of 100 Gb/s for eight GPUs
    assert replace(shared, oversubscription=2.0).between == 3.125 * GB
    assert all(spec.source for spec in CLUSTERS.values())


@pytest.mark.parametrize(
    "text, says",
    [("dgx-z9", "choose one of"), ("dgx-h100:12", "nearest"), ("dgx-h100:axb", "HOSTSxGPUS"), ("p4d:0", "HOSTSxGPUS")],
)
def test_refused_names(text, says):
    with pytest.raises(ValueError, match=says):
        cluster(text)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"oversubscription": 0.5}, "oversubscription"),
        ({"card_bytes_per_s": 400 * 8 * GB}, "not bits"),
        ({"cards_per_host": 0}, "at least one"),
        ({"inside_bytes_per_s": -1.0, "hosts": 1}, "positive"),
    ],
)
def test_contradictory_links(wrong, says):
    with pytest.raises(ValueError, match=says):
        replace(CLUSTERS["dgx-h100"], **{"hosts": 2} | wrong)


def test_more_rings_than_cards():
    with pytest.raises(ValueError, match="rings"):
        Fabric.of(cluster("p4d:2x8")).flat_ring(1e6, rings=8)
