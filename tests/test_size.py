"""The size of every package may fall, and does not rise unseen."""

import pytest

from tests.size import code_tokens, sizes

LIMITS = {  # thousands of code tokens, what was last reached: a row falls with the code, a higher one needs its reason
    "distlab/*.py": 11,
    "distlab/bench": 7,
    "distlab/checkpoint": 8,
    "distlab/comm": 8,
    "distlab/measure": 18,
    "distlab/model": 7,
    "distlab/parallel": 28,
    "distlab/report": 19,
    "distlab/theory": 29,
    "distlab/train": 11,
    "docs": 1,
    "examples": 2,
    "experiments": 101,
    "kernels": 61,
    "launch": 6,
    "source": 309,
    "tests": 260,
}


def test_no_package_grows_and_every_limit_is_what_was_reached() -> None:
    """A row is the package's size rounded up to a thousand: a larger package fails, and so does a stale row."""
    reached = {package: -(-count // 1000) for package, count in sizes().items()}
    assert reached == LIMITS, {
        package: f"{reached.get(package)} thousand, LIMITS has {LIMITS.get(package)}"
        for package in reached.keys() | LIMITS
        if reached.get(package) != LIMITS.get(package)
    }


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x = 1\n", 3),
        ("x = 1  # a comment\n", 3),
        ('"""A docstring."""\nx = 1\n', 3),
        ('def f():\n    """A docstring\n    of two lines."""\n    return "a string"\n', 7),
        ('f"{a + b} and {c:>{width}}"\n', 1),
        ('f"{f(\'inner\')}" "text"\n', 2),
    ],
)
def test_what_counts(text: str, count: int) -> None:
    """Names, numbers, operators and strings count, an f-string once; comments and docstrings do not."""
    assert code_tokens(text) == count
