"""Broken benchmarks are caught: clocks that do not wait, models that compute nothing, speeds that cannot be."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from distlab.measure import clock
from distlab.measure.clock import PhaseTimer, measure
from distlab.measure.validity import Implausible, check_clock, check_speed, check_work

KERNEL_MS = 5.0


class FakeGPU:
    """A device with one stream, and a clock of its own: launching takes the host 0.1 ms, and only synchronising waits
    for what was launched."""

    def __init__(self):
        self.now = self.free_at = 0.0  # s

    def launch(self, ms):
        self.now += 1e-4
        self.free_at = max(self.free_at, self.now) + ms / 1e3

    def synchronize(self, device=None):
        self.now = max(self.now, self.free_at)


@pytest.fixture
def gpu(monkeypatch):
    """`clock` on a fake CUDA device, whose events are stamped when the stream reaches them."""
    fake = FakeGPU()

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self, stream):
            self.at = max(fake.free_at, fake.now)

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    cuda = SimpleNamespace(synchronize=fake.synchronize, Event=Event, current_stream=lambda device: None)
    monkeypatch.setattr(clock, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    return fake


def series(gpu, calls=4):
    """Samples and the wall clock of some launches, as benchmarks take them."""
    timer = PhaseTimer("cuda")
    timer.synchronize()
    begin = gpu.now
    for _ in range(calls):
        timer.start()
        gpu.launch(KERNEL_MS)
        timer.mark("call")
    timer.synchronize()
    wall_ms = (gpu.now - begin) * 1e3
    return [step["step"] for step in timer.steps()], wall_ms


def test_our_clock_sees_what_the_host_does_not_wait_for(gpu):
    samples, wall_ms = series(gpu)
    assert samples == pytest.approx([KERNEL_MS] * 4, abs=0.11)
    assert check_clock(samples, wall_ms) == pytest.approx(1, abs=0.01)
    times = measure(lambda: gpu.launch(KERNEL_MS), warmup=1, repeats=3, device="cuda")
    assert times == pytest.approx([KERNEL_MS] * 3, abs=0.11)


def test_a_timer_without_synchronisation_is_caught(gpu, monkeypatch):
    # The usual mistake: reads the host's clock without waiting for the device.
    monkeypatch.setattr(clock, "instant", lambda device: gpu.now)
    samples, wall_ms = series(gpu)
    assert samples == pytest.approx([0.1] * 4)
    with pytest.raises(Implausible, match="wait for the device"):
        check_clock(samples, wall_ms)


def test_what_the_clock_may_cover():
    assert check_clock([1.0, 1.0], 2.0) == 1
    with pytest.raises(Implausible, match="50 %"):
        check_clock([1.0], 2.0)
    assert check_clock([1.0], 2.0, "cpu") == 0.5  # other processes
    with pytest.raises(Implausible, match="5 %"):
        check_clock([0.1], 2.0, "cpu")
    with pytest.raises(Implausible, match="200 %"):
        check_clock([2.0, 2.0], 2.0)


def test_a_step_must_have_computed_something():
    loss, gradient = torch.tensor(3.0), torch.ones(2)
    check_work(loss)
    check_work(loss, [gradient, None])
    for wrong, match in (([torch.zeros(3), None], "zero"), ([], "zero"), ([torch.tensor([math.nan])], "nan")):
        with pytest.raises(Implausible, match=match):
            check_work(loss, wrong)
    with pytest.raises(Implausible, match="NaNs"):
        check_work(torch.tensor(math.inf))


def test_nothing_is_faster_than_the_device():
    assert check_speed(1e12, 1.0, None) is None
    assert check_speed(1e12, 2.0, 1e15) == pytest.approx(0.5)
    with pytest.raises(Implausible, match="200 %"):
        check_speed(1e12, 0.5, 1e15)


def matmul(size):
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ a


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["matmul", "softmax", "copy"])
def test_the_timer_agrees_with_triton(name):
    """Within 3 %, calls as `do_bench` makes them: the L2 is flushed in between, which also rests the clock.

    In turns of as many calls: power and heat move the clock by more than the two may differ. `do_bench` warms up with
    calls that nothing rests, so it is asked for next to none of them.
    """
    from triton.testing import do_bench

    x = torch.randn(8192, 8192, device="cuda")
    y = torch.empty_like(x)
    kernels = {
        "matmul": matmul(4096),
        "softmax": lambda: torch.softmax(x, -1, out=y),
        "copy": lambda: y.copy_(x),
    }
    kernel, cache = kernels[name], torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    def ours():
        timer = PhaseTimer("cuda")
        for _ in range(400):
            cache.zero_()
            timer.start()
            kernel()
            timer.mark("kernel")
        return statistics.median(step["kernel"] for step in timer.steps())

    turns = [(do_bench(kernel, warmup=1, rep=100, return_mode="median"), ours()) for _ in range(5)]
    theirs, mine = map(statistics.median, zip(*turns, strict=True))
    assert mine == pytest.approx(theirs, rel=0.03)
