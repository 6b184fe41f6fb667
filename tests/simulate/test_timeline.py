"""The two streams on synthetic events, the cost models, and the calibration on steps of known
constants.
"""

import pytest
import torch

from distlab.measure.collectives import CollectiveCall
from distlab.model import ModelConfig
from distlab.simulate.calibrate import NEEDED, calibrate
from distlab.simulate.events import Compute, Wait
from distlab.simulate.step import SimulatedStep, simulate_training
from distlab.simulate.timeline import DeviceModel, Machine, replay
from distlab.theory.step_time import Network

DEVICE = DeviceModel(1e3, 1e9)  # 1 FLOP is 1 ms
NETWORK = Network(1e3, 1e3)  # over 2 ranks an all-reduce of 1 byte takes 1 ms
MACHINE = Machine(DEVICE, NETWORK)


def compute(ms, phase="backward"):
    return Compute("mm", ms, 0, phase)


def issue(number, ms):
    return CollectiveCall("all_reduce", ms, torch.uint8, ms, number)


def step(*items):
    calls = tuple(item for item in items if isinstance(item, CollectiveCall))
    return SimulatedStep(2, calls, items + items, len(items), (), {})


def test_naive_stands_still_and_overlap_hides():
    naive = replay(step(compute(10), issue(0, 4), Wait(0), compute(5)), MACHINE)
    assert (naive.step_ms, naive.overhead_ms, naive.comm_ms) == pytest.approx((19, 4, 4))
    assert naive.overlap_pct == pytest.approx(0, abs=1e-9)
    hidden = replay(step(compute(10), issue(0, 4), compute(5), Wait(0)), MACHINE)
    assert (hidden.step_ms, hidden.overhead_ms, hidden.overlap_pct) == pytest.approx((15, 0, 100))
    tail = replay(
        step(compute(10), issue(0, 4), issue(1, 4), compute(5), Wait(0), Wait(1)), MACHINE
    )
    assert (tail.step_ms, tail.overhead_ms, tail.comm_ms) == pytest.approx((18, 3, 8))
    assert tail.overlap_pct == pytest.approx(100 * 5 / 8)
    assert tail.lanes["communication"] == [pytest.approx((10, 18))]
    assert tail.lanes["exposed"] == [pytest.approx((15, 18))]


def test_waiting_for_the_last_waits_for_all_before_it():
    line = replay(
        step(issue(0, 4), issue(1, 4), issue(2, 4), Wait(1), compute(5), Wait(2)), MACHINE
    )
    assert (line.step_ms, line.comm_ms, line.overhead_ms) == pytest.approx((13, 12, 8))


def test_contention_slows_both():
    # 4 ms of communication at half speed run 8 ms, in which compute at 3/4 does 6 of its 10; then 4
    # alone.
    line = replay(step(issue(0, 4), compute(10), Wait(0)), Machine(DEVICE, NETWORK, (0.75, 0.5)))
    assert (line.step_ms, line.comm_ms, line.overhead_ms) == pytest.approx((12, 8, 2))


def test_what_one_step_leaves_in_flight_the_next_waits_for():
    first = (Wait(99), compute(5, "forward"), compute(5), issue(0, 8))
    second = (Wait(0), compute(5, "forward"), compute(5), issue(1, 8))
    zero1 = SimulatedStep(2, (), first + second, len(first), (), {})
    line = replay(zero1, MACHINE)
    assert (line.step_ms, line.overhead_ms) == pytest.approx((18, 8))
    assert line.phases == pytest.approx({"forward": 5, "backward": 13})


@pytest.mark.parametrize("ranks", [4, 16])  # a ring, and a tree with fewer hops
def test_calibration_finds_the_constants_it_was_given(ranks):
    config, small = (
        ModelConfig(64 * n, 256 * n, 2, 4, vocab_size=500 * n, context_length=64) for n in (4, 1)
    )
    steps = {name: simulate_training(config, name, batch=4, world_size=ranks) for name in NEEDED}
    other = simulate_training(small, "local", batch=4, world_size=2)
    device, network = (
        DeviceModel(4e13, 1e12, 1e-6, 2e12),
        Network(2e11, 2e11, latency_s=3e-6, hop_s=1e-6),
    )
    measured = {}
    for name, one in {**steps, "second": other}.items():
        line = replay(one, Machine(device, network, (0.7, 0.9)))
        optimizer = line.phases["optimizer"]
        measured[name] = {
            "step_p50_ms": line.step_ms,
            "comm_ms": line.comm_ms,
            "forward_backward_p50_ms": line.step_ms - optimizer,
            "optimizer_p50_ms": optimizer,
        }
    second = other, measured.pop("second")["forward_backward_p50_ms"] / 1e3
    found = calibrate(measured, steps, second, launch_s=1e-6, hop_s=1e-6)
    assert found.device.flops_per_s == pytest.approx(4e13, rel=0.02)
    assert found.device.bytes_per_s == pytest.approx(1e12, rel=0.02)
    assert found.device.update_bytes_per_s == pytest.approx(2e12, rel=0.02)
    assert found.network.inside_bytes_per_s == pytest.approx(2e11, rel=0.01)
    assert found.network.latency_s == pytest.approx(3e-6, rel=0.01)
    with pytest.raises(ValueError, match="less arithmetic per byte"):
        calibrate(measured, steps, (other, 1.0), launch_s=1e-6, hop_s=1e-6)
    again = replay(steps["overlap"], found)
    assert again.step_ms == pytest.approx(measured["overlap"]["step_p50_ms"], rel=0.01)
    del measured["flat"]["comm_ms"]
    with pytest.raises(ValueError, match="measured and the simulated step of 'flat'"):
        calibrate(measured, steps)
