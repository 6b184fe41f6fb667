"""How often to save: the closed forms of goodput."""

import math

import numpy as np
import pytest

from distlab.theory.reliability import Failures

FAILURES = Failures(between=20_000.0, checkpoint=60.0, restart=2_000.0)


def test_goodput_is_that_of_drawn_failures():
    """Check the closed form against 20,000 drawn intervals, within 3 %.

    Work and a save are repeated, each time after a restart, until no failure comes in them.
    """
    interval = 1500.0
    generator = np.random.default_rng(0)

    def failed_attempts(needed_s):
        """Yield the seconds of each attempt that fails, until `needed_s` pass without a failure."""
        while True:
            until_failure_s = generator.exponential(FAILURES.between)
            if until_failure_s >= needed_s:
                return
            yield until_failure_s

    lasting = total = 0.0
    for _ in range(20_000):
        for failed_s in failed_attempts(interval + FAILURES.checkpoint):
            total += failed_s
            # A failure during the restart begins the restart again.
            total += sum(failed_attempts(FAILURES.restart)) + FAILURES.restart
        lasting += interval
        total += interval + FAILURES.checkpoint
    assert lasting / total == pytest.approx(FAILURES.goodput(interval), rel=0.03)


def test_daly_is_the_top_of_the_closed_form():
    around = FAILURES.daly() * np.linspace(0.8, 1.2, 401)
    top = max(around, key=FAILURES.goodput)
    assert top == pytest.approx(FAILURES.daly(), rel=0.02)
    assert FAILURES.goodput(FAILURES.daly()) >= FAILURES.goodput(FAILURES.young())


def test_ends_of_the_scale():
    never = Failures(math.inf, 60.0, 300.0)
    assert never.daly() == math.inf and never.goodput(math.inf) == 1
    assert never.goodput(3600.0) == pytest.approx(3600 / 3660)
