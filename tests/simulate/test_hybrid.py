"""Hybrid sharding in the simulation: FSDP's events of one group, and what its replicas add."""

import pytest

from distlab.hardware import cluster
from distlab.model import ModelConfig
from distlab.simulate.estimate import estimate_step, machine_on
from distlab.simulate.run import hybrid, simulate_training
from distlab.simulate.timeline import replay

CONFIG = ModelConfig(1024, 4096, 4, 8, vocab_size=4000, context_length=1024)


@pytest.fixture(scope="module")
def group():
    return simulate_training(CONFIG, "fsdp", batch=4, world_size=8)


def test_every_reduced_shard_is_averaged_once_among_replicas(group):
    found = hybrid(group, 64)
    scattered = [call for call in group.calls if call.op == "reduce_scatter"]
    reduced = [call for call in group.calls if call.op == "all_reduce"]
    added = [call for call in found.calls if getattr(call, "ranks", None) == 8]
    assert len(added) == len(scattered) + len(reduced) > 0
    assert sum(call.bytes for call in added) == sum(call.bytes // 8 for call in scattered) + sum(
        call.bytes for call in reduced
    )
    assert [call for call in found.calls if call not in added] == list(group.calls)


def test_one_group_is_fsdp(group):
    assert hybrid(group, 8) == group


@pytest.mark.parametrize("ranks", [16, 256])
def test_the_estimate_is_close(group, ranks):
    """As for other strategies (`test_estimate`): the closed form assumes an even flow of messages."""
    machine = machine_on(cluster(f"dgx-h100:{ranks}"))
    line = replay(hybrid(group, ranks), machine)
    found = estimate_step(CONFIG, "hsdp", machine, batch=4, ranks=ranks)
    assert 1e3 * found.step == pytest.approx(line.step_ms, rel=0.08)
    plain = replay(group, machine)
    assert line.comm_ms > plain.comm_ms and line.step_ms >= plain.step_ms


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


def test_refusals(group):
    with pytest.raises(ValueError, match="groups of 8 do not divide 12 ranks"):
        hybrid(group, 12)
