"""Broken benchmarks are caught: clocks that do not wait, models that compute nothing, speeds that
cannot be.
"""

import math
import statistics

import pytest
import torch

from distlab.measure.clock import PhaseTimer
from distlab.measure.validity import Implausible, check_clock, check_speed, check_work


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
    for wrong, match in (
        ([torch.zeros(3), None], "zero"),
        ([], "zero"),
        ([torch.tensor([math.nan])], "nan"),
    ):
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
    """Within 3 %, calls as `do_bench` makes them: the L2 is flushed in between, which also rests
    the clock.

    In turns of as many calls: power and heat move the clock by more than the two may differ.
    `do_bench` warms up with calls that nothing rests, so it is asked for next to none of them.
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
