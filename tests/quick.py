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
from functools import cache
from pathlib import Path

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
    """Files that differ from HEAD, or that git does not know yet."""
    listed = (
        ["diff", "--name-only", "--diff-filter=d", "HEAD"],
        ["ls-files", "--others", "--exclude-standard"],
    )
    said = (
        subprocess.run(["git", *each], cwd=ROOT, capture_output=True, text=True, check=True)
        for each in listed
    )
    return [file for each in said for file in each.stdout.splitlines()]


def near(file: str) -> Iterator[tuple[int, str, str]]:
    """(how near, file of tests, expression of `-k`) of what may notice a fault in this file."""
    path = Path(file)
    if re.fullmatch(r"tests/(.*/)?test_\w+\.py", file):
        yield 0, file, ""
    for mutation in MUTATIONS:
        if mutation.file == file:
            name, *options = mutation.tests
            yield (
                1,
                name.split("::")[0],
                options[1] if options[:1] == ["-k"] else name.partition("::")[2],
            )
    if path.suffix == ".md":
        yield 2, "tests/test_pages.py", path.name
    inside = Path(*path.parts[1 if path.parts[0] in ("distlab", "docs") else 0 :])
    mirrors = Path("tests", inside.parent)
    for test in sorted((ROOT / mirrors).glob("test_*.py")) if path.suffix == ".py" else []:
        name = test.relative_to(ROOT).as_posix()
        yield (2 if inside.stem.strip("_") in test.stem else 3), name, ""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name, imported in imports().items():
        if path.suffix == ".py" and module in imported:
            yield 2 if file.startswith("tests/") else 3, name, ""


@cache
def imports() -> dict[str, set[str]]:
    """File of tests → modules that it imports, and names in them."""
    found = {}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        names = found[test.relative_to(ROOT).as_posix()] = set()
        for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
    return found


def matches(expression: str, node: str) -> bool:
    """Return True if pytest's `-k` would choose this item."""
    words = re.sub(
        r"[^\s()]+",
        lambda word: word[0] if word[0] in ("and", "or", "not") else str(word[0] in node),
        expression,
    )
    return not expression or eval(words)


def collected(files: Sequence[str]) -> list[str]:
    """The items of these files that this machine can run."""
    listing = io.StringIO()
    with redirect_stdout(listing):
        pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not commands", *files]
        )
    return [line for line in listing.getvalue().splitlines() if "::" in line]


def chosen(files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Items to run, and functions that are left out, for changes of these files."""
    costs = json.loads(COSTS.read_text(encoding="utf-8"))
    wanted = [(0, name, "") for name in ALWAYS] + [each for file in files for each in near(file)]
    functions: dict[str, tuple[int, float, list[str]]] = {}  # function → nearness, seconds, items
    for node in collected(sorted({name for _, name, _ in wanted})):
        found = [
            rank
            for rank, name, words in wanted
            if node.startswith(f"{name}::") and matches(words, node)
        ]
        if found:
            function = node.partition("[")[0]
            rank, seconds, nodes = functions.get(function, (9, costs.get(function, 0.0), []))
            functions[function] = min(rank, *found), seconds + ITEM_S, [*nodes, node]
    run, left, spent = [], [], 0.0
    for function, (_, seconds, nodes) in sorted(functions.items(), key=lambda item: item[1][:2]):
        if seconds <= MOST_S and spent + seconds <= BUDGET_S:
            spent += seconds
            run += nodes
        else:
            left.append(f"{function} ({seconds:.0f} s)")
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
