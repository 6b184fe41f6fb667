"""`tests.gradient_path` counts the code that one gradient runs through. It reports, and sets no limit."""

import pytest

from tests.gradient_path import STRATEGIES, count


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_path_of_one_gradient_is_counted(strategy):
    """Every strategy enters at least its hook and its finish, in at least one file of its own."""
    counted = count(strategy)
    assert counted.functions >= 2 and counted.changes_of_file >= 1 and counted.tokens > 50, counted
