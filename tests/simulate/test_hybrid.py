"""Hybrid sharding in the simulation: the strategies' own collectives, and in which groups
they run.
"""

import pytest

from distlab.hardware import cluster
from distlab.model import ModelConfig
from distlab.simulate import replay
from distlab.simulate.estimate import estimate_step, machine_on
from distlab.simulate.events import GroupCall
from distlab.simulate.step import simulate_training

CONFIG = ModelConfig(1024, 4096, 4, 8, vocab_size=4000, context_length=1024)


def simulated(strategy, ranks, shard_size=None):
    return simulate_training(CONFIG, strategy, batch=4, world_size=ranks, shard_size=shard_size)


@pytest.fixture(scope="module")
def fsdp():
    return simulated("fsdp", 8)


def by_group(step, stride):
    """(op, bytes) of the collectives of groups of that stride; None: of all ranks."""
    return [(call.op, call.bytes) for call in step.calls if getattr(call, "stride", None) == stride]


def test_every_reduced_shard_is_averaged_once_among_replicas(fsdp):
    step = simulated("hsdp", 64, 8)
    inside, between = by_group(step, 1), by_group(step, 8)
    norms = [(call.op, call.bytes) for call in fsdp.calls if call.op == "all_reduce"]
    assert sorted(inside) == sorted(
        (call.op, call.bytes) for call in fsdp.calls if call.op != "all_reduce"
    )
    scattered = [size for op, size in inside if op == "reduce_scatter"]
    assert (
        between == [("all_reduce", size // 8) for size in scattered]
        and by_group(step, None) == norms
    )
    assert {call.ranks for call in step.calls if isinstance(call, GroupCall)} == {8}
    assert step.peak.total >= fsdp.peak.total


def test_replicas_average_once_per_step_of_four_micro_batches():
    """In the simulation and in the closed form of time, which agree within 8 %."""
    machine = machine_on(cluster("dgx-h100:8x8"))
    several = simulate_training(
        CONFIG, "hsdp", batch=4, world_size=64, shard_size=8, micro_batches=4
    )
    one = simulated("hsdp", 64, 8)
    assert sorted(by_group(several, 1)) == sorted(4 * by_group(one, 1))
    assert by_group(several, 8) == by_group(one, 8)
    sizes = {"batch": 4, "ranks": 64, "group": 8}
    found = estimate_step(CONFIG, "hsdp", machine, micro_batches=4, **sizes)
    assert found.calls == len(several.calls)
    assert 1e3 * found.device == pytest.approx(replay(several, machine).step_ms, rel=0.08)
    # All but the replicas' all-reduces four times.
    of_one = estimate_step(CONFIG, "hsdp", machine, **sizes).communication
    inside = estimate_step(CONFIG, "fsdp", machine, batch=4, ranks=8).communication
    assert found.communication == pytest.approx(4 * inside + (of_one - inside))


def test_one_group_is_fsdp(fsdp):
    one = simulated("hsdp", 8, 8)
    assert one.items == fsdp.items


def test_groups_smaller_and_larger_than_a_host():
    machine = machine_on(cluster("dgx-h100:64"))
    comm = {
        size: estimate_step(CONFIG, "hsdp", machine, batch=4, ranks=64, group=size).communication
        for size in (4, 8, 64)
    }
    fsdp = estimate_step(CONFIG, "fsdp", machine, batch=4, ranks=64)
    assert comm[64] == pytest.approx(fsdp.communication)
    # Four places with two replicas per host, or eight with one: the same bytes leave a host.
    assert comm[4] == pytest.approx(comm[8], rel=0.1)
    assert [machine.network.across(size).devices_per_node for size in (4, 8, 16)] == [2, 1, 1]
