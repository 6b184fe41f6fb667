"""Check a change within a minute: `make quick`, or `python -m tests.quick [FILE…]`.

Runs lint, and of the tests those nearest to the files that differ from HEAD (or are named): the
changed tests, what `tests/mutations.py` runs for the file, its mirror (`tests/report/test_table.py`
of `distlab/report/table.py`), then tests that import it and the rest of its folder. In each group
the cheapest come first, until the time by `tests/costs.json`, which `make costs` renews, is spent;
what does not fit is named. It replaces no `make test`.
"""

import ast
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
# test function → seconds of all its cases, without those that take no time
COSTS = ROOT / "tests" / "costs.json"
BUDGET_S = 35.0  # of two workers together
MOST_S = 20.0  # of one function
ITEM_S = 0.04  # what each costs besides
ALWAYS = ("tests/test_architecture.py", "tests/test_mutations.py")


def changed() -> list[str]:
    """Return the files that differ from HEAD, and those that git does not know yet."""
    files = []
    for arguments in (
        ["diff", "--name-only", "--diff-filter=d", "HEAD"],
        ["ls-files", "--others", "--exclude-standard"],
    ):
        listed = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        files += listed.stdout.splitlines()
    return files


class Near(NamedTuple):
    """Tests that may notice a fault in a file.

    Attributes:
        rank: distance from the file. 0 is the file itself.
        tests: file of tests.
        words: expression of `-k`. "" for all tests of that file.
    """

    rank: int
    tests: str
    words: str


@dataclass
class Candidate:
    """A function of tests that may run.

    Attributes:
        name: file and name of the function, as pytest writes them.
        rank: smallest distance of its items, see `Near`.
        seconds: seconds of all its items.
        nodes: items.
    """

    name: str
    rank: int
    seconds: float
    nodes: list[str] = field(default_factory=list)


def near(file: str) -> Iterator[Near]:
    """Yield the tests that may notice a fault in this file."""
    path = Path(file)
    if re.fullmatch(r"tests/(.*/)?test_\w+\.py", file):
        yield Near(0, file, "")
    for mutation in MUTATIONS:
        if mutation.file == file:
            name, *options = mutation.tests
            tests, _, words = name.partition("::")
            if options[:1] == ["-k"]:
                words = options[1]
            yield Near(1, tests, words)
    if path.suffix == ".md":
        yield Near(2, "tests/test_pages.py", path.name)
    if path.suffix != ".py":
        return
    # A test's folder mirrors that of the module, without the name of the package.
    inside = Path(*path.parts[1 if path.parts[0] in ("distlab", "docs") else 0 :])
    mirrors = Path("tests", inside.parent)
    for test in sorted((ROOT / mirrors).glob("test_*.py")):
        has_its_name = inside.stem.strip("_") in test.stem
        yield Near(2 if has_its_name else 3, test.relative_to(ROOT).as_posix(), "")
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    is_helper = file.startswith("tests/")
    for name, imported in imports().items():
        if module in imported:
            yield Near(2 if is_helper else 3, name, "")


@cache
def imports() -> dict[str, set[str]]:
    """Return file of tests → modules that it imports, and names in them."""
    found = {}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        names = set()
        found[test.relative_to(ROOT).as_posix()] = names
        for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
    return found


def matches(expression: str, node: str) -> bool:
    """Return True if pytest's `-k` would choose this item."""
    if not expression:
        return True

    def answer(word: re.Match[str]) -> str:
        """Return an operator as it is, and for a text whether the item has it."""
        text = word[0]
        return text if text in ("and", "or", "not") else str(text in node)

    return eval(re.sub(r"[^\s()]+", answer, expression))


def collected(files: Sequence[str]) -> list[str]:
    """Return the items of these files that this machine can run."""
    listing = io.StringIO()
    with redirect_stdout(listing):
        pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not commands", *files]
        )
    return [line for line in listing.getvalue().splitlines() if "::" in line]


def chosen(files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the items to run for changes of these files, and the functions that are left out."""
    costs = json.loads(COSTS.read_text(encoding="utf-8"))
    wanted = [Near(0, name, "") for name in ALWAYS]
    for file in files:
        wanted += near(file)
    functions: dict[str, Candidate] = {}
    for node in collected(sorted({each.tests for each in wanted})):
        ranks = []
        for each in wanted:
            if node.startswith(f"{each.tests}::") and matches(each.words, node):
                ranks.append(each.rank)
        if not ranks:
            continue
        name = node.partition("[")[0]  # without its parameters
        if name not in functions:
            functions[name] = Candidate(name, min(ranks), costs.get(name, 0.0))
        function = functions[name]
        function.rank = min(function.rank, *ranks)
        function.seconds += ITEM_S
        function.nodes.append(node)
    run, left = [], []
    spent_s = 0.0
    # The nearest first, and of these the fastest.
    for function in sorted(functions.values(), key=lambda each: (each.rank, each.seconds)):
        if function.seconds <= MOST_S and spent_s + function.seconds <= BUDGET_S:
            spent_s += function.seconds
            run += function.nodes
        else:
            left.append(f"{function.name} ({function.seconds:.0f} s)")
    return run, left


def main(files: Sequence[str]) -> int:
    """Run what is near these files, by default those that were changed."""
    lint = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, check=False
    ).returncode
    files = files or changed()
    run, left = chosen(files)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-p",
        "no:cacheprovider",
        *run,
    ]
    tests = subprocess.run(command, cwd=ROOT, check=False).returncode
    shown = left if len(left) <= 5 else [*left[:5], f"and {len(left) - 5} more"]
    print(
        f"{len(files)} files: {len(run)} tests"
        + (f"; left out for time: {', '.join(shown)}" if left else "")
    )
    return lint or tests


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
