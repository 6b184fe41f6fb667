"""Stragglers, failures and checkpoints: drawn ones against the closed forms."""

import math

import numpy as np
import pytest

from distlab.simulate import reliability
from distlab.theory.reliability import Failures, Jitter

FAILURES = Failures(between=20_000.0, checkpoint=60.0, restart=300.0)


@pytest.mark.parametrize("interval", [400.0, 1500.0, 6000.0])
def test_goodput_is_dalys(interval):
    """Within 1 %: the end of the week falls into a period, which the closed form does not know."""
    week = reliability.run(FAILURES, interval, runs=300)
    assert week.goodput == pytest.approx(FAILURES.goodput(interval), rel=0.01)
    assert week.goodput + week.lost + week.saving + week.down == pytest.approx(1)
    assert week.failures == pytest.approx(7 * 86_400 / FAILURES.between, rel=0.05)


def test_the_rules_are_as_good_as_the_best_interval():
    """Goodput is flat at its top, so intervals may differ by tens of per cent, goodput by half a per cent."""
    best = reliability.best_interval(FAILURES, runs=40)
    top = reliability.run(FAILURES, best, runs=40).goodput
    for rule in (FAILURES.young(), FAILURES.daly()):
        assert 0.5 < rule / best < 2
        assert reliability.run(FAILURES, rule, runs=40).goodput > top - 0.005
    assert FAILURES.goodput(FAILURES.daly()) >= FAILURES.goodput(FAILURES.young())


def test_daly_is_the_top_of_the_closed_form():
    around = FAILURES.daly() * np.linspace(0.8, 1.2, 401)
    top = max(around, key=FAILURES.goodput)
    assert top == pytest.approx(FAILURES.daly(), rel=0.02)


def test_without_failures_nothing_is_lost():
    never = Failures(math.inf, 60.0, 300.0)
    week = reliability.run(never, 3600.0, runs=1)
    assert (week.lost, week.failures, week.down) == pytest.approx((0, 0, 0))
    assert week.goodput == pytest.approx(never.goodput(3600.0), rel=1e-3)
    assert never.daly() == math.inf and never.goodput(math.inf) == 1


def test_a_restart_longer_than_the_time_between_failures_leaves_little():
    doomed = Failures(between=100.0, checkpoint=10.0, restart=1000.0)
    assert reliability.run(doomed, 50.0, runs=3).goodput < 0.01
    assert doomed.goodput(1e6) == 0


@pytest.mark.parametrize("hosts", [8, 128, 1024])
def test_the_slowest_host(hosts):
    jitter = Jitter(of_step=0.03)
    times = reliability.step_times(1.0, 0.2, hosts, jitter, steps=400)
    assert times.mean() - 0.2 == pytest.approx(jitter.slowest(hosts), rel=0.01)


def test_a_slow_host_delays_every_step():
    times = reliability.step_times(1.0, 0.0, 64, Jitter(of_host=0.1), steps=50)
    assert times.std() == pytest.approx(0) and times[0] > 1.1


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: Failures(0.0, 1.0, 1.0), "must be positive"),
        (lambda: Jitter(-0.1), "not negative"),
        (lambda: FAILURES.goodput(0.0), "interval=0.0"),
        (lambda: reliability.run(FAILURES, -1.0, runs=1), "interval=-1.0"),
        (lambda: Jitter(0.1).slowest(0), "at least one"),
    ],
)
def test_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
