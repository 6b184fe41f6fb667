"""The worked examples of docs/learn, run as they stand."""

import doctest
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "learn" / "theory"
WITH_EXAMPLES = (
    "memory",
    "../long_context",
    "../tensor",
    "../context",
    "../pipeline",
    "communication",
    "buckets",
    "compute",
    "limits",
    "parallelisms",
    "../sharding",
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    failed, tried = doctest.testfile(str(PAGES / f"{name}.md"), module_relative=False)
    assert tried > 0
    assert failed == 0
