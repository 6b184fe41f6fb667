"""`tests.gradient_path` counts the code that one gradient runs through.

It reports, and sets no limit.
"""

import pytest

from tests.gradient_path import STRATEGIES, Function, count, shown


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_path_of_one_gradient_is_counted(strategy):
    """Every strategy enters at least its hook and its finish, in at least one file of its own."""
    counted = count(strategy)
    assert counted.functions >= 2 and counted.changes_of_file >= 1 and counted.tokens > 50, counted


def test_a_function_is_shown_as_a_place_and_checks_are_indented():
    assert shown(Function("parallel/ddp.py", "_on_gradient", 190)) == "ddp.py:190  _on_gradient"
    assert shown(Function("parallel/checks.py", "check", 7)) == "    checks.py:7  check"
    assert shown(Function("comm/collectives.py", "sum", 3)) == "comm/collectives.py:3  sum"
