"""The closed form of a step against the pipelines it stands for, run message by message."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.parallel import STRATEGIES
from distlab.theory.step_time import ComputeTime, Messages, Network, pipeline, step_time

NETWORK = Network(100.0, 10.0, devices_per_node=4, latency_s=0.01, hop_s=0.001)
RATES = st.floats(0.1, 1.0)
TIMES = st.floats(0, 100)


@given(TIMES, TIMES, RATES, RATES)
def test_together_is_two_streams(compute, communication, p, q):
    """In small slices of time: each stream runs at its rate while the other does, then at
    its own.
    """
    compute_left = compute
    communication_left = communication
    now = 0.0
    while compute_left > 1e-9 and communication_left > 1e-9:
        slice_s = min(compute_left / p, communication_left / q)
        compute_left -= p * slice_s
        communication_left -= q * slice_s
        now += slice_s
    found = pipeline([0.0], [communication], compute, compute_rate=p, communication_rate=q)
    assert found == pytest.approx(now + compute_left + communication_left, abs=1e-6)
    assert pipeline([0.0], [communication], compute) == pytest.approx(max(compute, communication))


def test_a_pipeline_by_hand():
    """Ready at 2 and 3 of 10 s.

    Messages of 1 and 4 s at half speed; backward beside them at 3/4.
    """
    # 2 alone; 1 s of message lasts 2, backward is at 3.5; 4 s last 8, backward at 9.5; 0.5 alone.
    found = pipeline([2, 3], [1, 4], 10, compute_rate=0.75, communication_rate=0.5)
    assert found == pytest.approx(2 + 2 + 8 + 0.5)
    assert pipeline([], [], 10) == 10


@given(st.integers(1, 4), st.integers(1, 9), st.floats(1, 1e4))
def test_network(ranks, messages, size):
    one = NETWORK.seconds(size, ranks)
    assert NETWORK.seconds(size * messages, ranks, messages) == pytest.approx(messages * one)
    assert NETWORK.seconds(size, ranks, operation="all_gather") <= one
    assert NETWORK.seconds(size, 1) == 0


def test_rings_between_nodes_use_every_adapter():
    one = {"num_bytes": 1.0, "operation": "broadcast"}
    assert Network(100.0, 10.0, 4).seconds(ranks=4, **one) == 1 / 100
    # four adapters of 10 leave a node side by side
    assert Network(100.0, 10.0, 4).seconds(ranks=5, **one) == 1 / 40
    assert Network(100.0, 50.0, 4).seconds(ranks=8, **one) == 1 / 100


COMPUTE = ComputeTime(forward=2.0, backward=4.0, optimizer=1.0, pack=0.5)
MESSAGES = Messages(gradient_bytes=80.0, parameter_bytes=40.0, calls=4, buckets=4, units=5)
CALLS = {"naive": 10, "flat": 1, "overlap": 10, "sharded-optimizer": 4 + 3, "zero1": 9, "fsdp": 16}


def test_worked_example():
    """Two ranks, no latency: an all-reduce of 80 bytes at 100 per second takes 0.8 s, one pass of
    it 0.4.
    """
    network = Network(100.0, 100.0)
    found = {
        name: step_time(
            STRATEGIES[name],
            COMPUTE,
            replace(MESSAGES, calls=CALLS.get(name, 4)),
            network,
            2,
        )
        for name in (
            "local",
            "naive",
            "flat",
            "overlap",
            "bucketed",
            "sharded-optimizer",
            "zero1",
            "fsdp",
        )
    }
    steps = {name: time.step for name, time in found.items()}
    assert steps["local"] == 7
    assert steps["naive"] == pytest.approx(7.8)
    assert steps["flat"] == pytest.approx(7 + 0.5 + 0.8)
    assert steps["overlap"] == pytest.approx(7 + 0.08)  # the last of ten messages
    assert steps["bucketed"] == pytest.approx(7 + 0.5 + 0.2)
    assert steps["sharded-optimizer"] == pytest.approx(7 + 0.5 + 0.2 + 0.4 - 0.5)
    assert steps["zero1"] == pytest.approx(
        7 + 0.5 + 0.1 + 0.1 - 0.5
    )  # first gather, last scatter, half a step
    # Gathers of 0.2 s and scatters of 0.4 s hide; of five, the first gather and the last scatter do
    # not.
    assert steps["fsdp"] == pytest.approx(7 + 0.04 + 0.08 - 0.5)
    assert found["fsdp"].communication == pytest.approx(2 * 0.2 + 0.4)
    assert all(
        time.step == pytest.approx(time.compute + time.overhead + time.optimizer)
        for time in found.values()
    )


def test_zero2_reduces_and_packs_for_each_micro_batch():
    """With one of them it takes ZeRO-1's time; a second adds a reduce-scatter and a copy."""
    network = Network(100.0, 100.0)
    found = {}
    for name, micro_batches in (("zero1", 1), ("zero2", 1), ("zero2", 2)):
        sent = replace(MESSAGES, reductions=micro_batches if name == "zero2" else 1)
        found[name, micro_batches] = step_time(
            STRATEGIES[name], COMPUTE, sent, network, 2, micro_batches=micro_batches
        )
    assert found["zero2", 1] == found["zero1", 1]
    one, two = found["zero2", 1], found["zero2", 2]
    assert two.communication == pytest.approx(one.communication + 0.4)
    assert two.step == pytest.approx(one.step + 0.5 + 0.1)


def test_accumulation_hides_more_for_ddp_and_sends_more_for_fsdp():
    def communication(name, micro_batches):
        strategy = STRATEGIES[name]
        time = step_time(strategy, COMPUTE, MESSAGES, NETWORK, 4, micro_batches=micro_batches)
        return time.communication

    assert communication("bucketed", 4) == communication("bucketed", 1)
    assert communication("fsdp", 4) > communication("fsdp", 1)
    # One second of the last of four backwards covers 1.5 s of 2; the last of four messages takes
    # half a second.
    slow = step_time(
        STRATEGIES["bucketed"], COMPUTE, MESSAGES, Network(40.0, 40.0), 2, micro_batches=4
    )
    assert slow.overhead == pytest.approx(1.0)
