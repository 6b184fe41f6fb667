"""The core stays visible: how much code one gradient runs through under each strategy."""

import pytest

from tests.gradient_path import Count, count

LIMITS = {  # functions, changes of file, code tokens; functions of the guards
    "naive": Count(9, 6, 425, 9),
    "flat": Count(11, 5, 625, 9),
    "overlap": Count(10, 9, 525, 10),
    "bucketed": Count(13, 11, 825, 10),
    "sharded-optimizer": Count(19, 14, 1400, 10),
    "zero1": Count(30, 24, 1850, 10),
    "fsdp": Count(34, 32, 2700, 10),
}


@pytest.mark.parametrize("strategy", LIMITS)
def test_one_gradient_runs_through_no_more_code(strategy):
    """A limit rises only with a reason; `python -m tests.gradient_path STRATEGY` lists the functions."""
    counted = count(strategy)
    assert all(now <= most for now, most in zip(counted, LIMITS[strategy], strict=True)), counted
