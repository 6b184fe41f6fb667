"""How often to save: the closed forms of goodput."""

import math

import numpy as np
import pytest

from distlab.theory.reliability import Failures

FAILURES = Failures(between=20_000.0, checkpoint=60.0, restart=2_000.0)


def test_goodput_is_that_of_drawn_failures():
    """Periods of work and a save are repeated, each after a restart, until no failure comes in one.

    Within 3 %.
    """
    interval, generator = 1500.0, np.random.default_rng(0)
    lasting = total = 0.0
    for _ in range(20_000):
        while (failure := generator.exponential(FAILURES.between)) < interval + FAILURES.checkpoint:
            total += failure
            while (again := generator.exponential(FAILURES.between)) < FAILURES.restart:
                total += again
            total += FAILURES.restart
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
