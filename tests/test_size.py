"""The size of every package may fall, and does not rise unseen."""


import pytest

from tests.size import code_tokens, sizes

LIMITS = {  # thousands of code tokens; a row may be lowered with the code, and is raised with a reason beside it
    "distlab/*.py": 21.6,  # runs.py and compare.py, which stood in report and notebook; check.py; optim.py
    "distlab/bench": 5.5,  # rows of layouts
    "distlab/checkpoint": 8.7,  # boxes of whole parameters
    "distlab/comm": 9.3,  # sums, and passing on round a group; ranks on NCCL end when another is lost
    "distlab/measure": 15.3,
    "distlab/model": 8,  # stages of a pipeline; export under Llama's names
    "distlab/parallel": 40.9,  # layouts and pipelines; refusals have files; facts stand in entries; Muon's placements
    "distlab/report": 11.7,  # derived columns, which experiments computed; links of a page, tables in parts
    "distlab/theory": 28.8,  # what a rank of a layout sends, holds and takes; pipelines; Muon
    "distlab/train": 12,
    "docs": 1.7,  # drawings of the pages
    "examples": 4,  # strategies.py: six strategies in one file
    "experiments": 85,  # pipelines; muon; contention; fp8; forms of kernels, CUDA C++, 4.6; Llama's layer; torchao's
    "kernels": 60,  # nn: modules; float8_linear; heads of 192 and 256; masks that cut nothing; wide rows of softmax
    "launch": 7.4,  # groups, short help and hints for misspelt words; sample asks and exports
    "setup.py": 1,
    "source": 319.2,  # three axes, 15; check, Muon, contention, 8; pages, runs, kernels.nn, 5; tutorials, forms, 5
    "tests": 195.9,  # what masks cut; norms of few rows; fp8, torchao; without the recorder; wide rows of softmax
}


def outgrown(counts, limits):
    """What each package has that is larger than its limit, in thousands, or has none."""
    return {
        package: f"{count:,} code tokens, limit {limits.get(package, 0):,} thousand"
        for package, count in counts.items()
        if count > 1000 * limits.get(package, 0)
    }


def test_no_package_outgrows_its_limit():
    """Only growth fails: code that shrinks leaves its row too high, and nobody has to touch it for that."""
    assert outgrown(sizes(), LIMITS) == {}


def test_what_outgrows_a_limit():
    """One token more than the thousands, or a package without a row; one that shrank, or is gone, does not."""
    assert not outgrown({"a": 2000, "b": 3}, {"a": 2, "b": 9, "gone": 1})
    assert outgrown({"a": 2001, "new": 1}, {"a": 2}).keys() == {"a", "new"}


@pytest.mark.parametrize(
    "text, count",
    [
        ("x = 1\n", 3),
        ("x = 1  # a comment\n", 3),
        ('"""A docstring."""\nx = 1\n', 3),
        ('def f():\n    """A docstring\n    of two lines."""\n    return "a string"\n', 7),
        ('f"{a + b} and {c:>{width}}"\n', 1),
        ('f"{f(\'inner\')}" "text"\n', 2),
    ],
)
def test_what_counts(text, count):
    """Names, numbers, operators and strings count, an f-string once; comments and docstrings do not."""
    assert code_tokens(text) == count
