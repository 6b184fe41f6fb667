"""Insert known faults one at a time, and report which of them the tests do not notice.

    python -m tests.mutations --workers 4   # all, four at a time; exit code 1 if one survives
    python -m tests.mutations --list
    python -m tests.mutations --category buckets resume
    python -m tests.mutations --only "Overlap sends in hook order"
    python -m tests.mutations --only "Overlap sends" --tests tests/parallel/test_contract.py

A mutation replaces one text of one file, in a copy of the tree. `tests/mutations.toml` lists them,
grouped by what they protect. The text must occur exactly once in its file. If you change that code,
change the entry as well: `tests/test_mutations.py` checks this in every run of the suite. An entry
names the tests that are about its fault, among those that `make test` runs. Other tests may notice
it as well. If the named tests pass, the mutation has survived. If they cannot be collected, the
command ends with an error.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: sentence that says what is wrong once the fault is inserted.
        category: group of the list that the fault belongs to, for `--category`.
        file: path relative to the repository's root.
        find: text that occurs exactly once in the file.
        replacement: text that replaces it.
        tests: arguments of pytest. At least one test among them must fail.
    """

    name: str
    category: str
    file: str
    find: str
    replacement: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the file below `root`.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        count = text.count(self.find)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.file} has its text {count} times, not once: {self.find!r}"
            )
        path.write_text(text.replace(self.find, self.replacement), encoding="utf-8")


def read_list(path: Path) -> tuple[Mutation, ...]:
    """Read a list of mutations from a TOML file, with one table per mutation."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    mutations = []
    for entry in found:
        tests = tuple(shlex.split(entry["tests"]))
        mutations.append(Mutation(**entry | {"tests": tests}))
    return tuple(mutations)


MUTATIONS = read_list(ROOT / "tests" / "mutations.toml")


# -- the command -----------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy tracked files, and new files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@dataclass(frozen=True)
class Result:
    """Result of one mutation. `seen` names the first test that failed, or says why none could."""

    killed: bool
    seen: str
    seconds: float


def examine(mutation: Mutation, root: Path, tests: Sequence[str]) -> Result:
    """Apply the mutation to the copy at `root`, run tests there, and undo it.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    path = root / mutation.file
    before = path.read_text(encoding="utf-8")
    mutation.apply(root)
    variables = os.environ | {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-m", "not commands", *tests]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(False, f"no end within {LIMIT_S:.0f} s", time.monotonic() - begin)
    finally:
        path.write_text(before, encoding="utf-8")
    seconds = time.monotonic() - begin
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"{mutation.name}: pytest ended with "
            f"{done.returncode}:\n{done.stdout[-2000:]}{done.stderr}"
        )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return Result(done.returncode == 1, failed[1] if failed else "", seconds)


def results(
    mutations: Sequence[Mutation], tests: Sequence[str] | None, workers: int
) -> Iterator[tuple[Mutation, Result]]:
    """Examine `workers` mutations at a time, each in its own copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPool(workers) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            copy_tree(Path(folder, str(number)))
            copies.put(Path(folder, str(number)))

        def examined(mutation: Mutation) -> tuple[Mutation, Result]:
            root = copies.get()
            try:
                return mutation, examine(mutation, root, tests or mutation.tests)
            finally:
                copies.put(root)

        yield from pool.imap_unordered(examined, mutations)


def main(argv: Sequence[str] | None = None) -> int:
    """Run mutations and return 1 if one survives."""
    categories = sorted({m.category for m in MUTATIONS})
    p = argparse.ArgumentParser("python -m tests.mutations", description=__doc__.splitlines()[0])
    p.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="whose name or file has this; may be repeated [all]",
    )
    p.add_argument(
        "--category",
        nargs="+",
        choices=categories,
        default=categories,
        metavar="NAME",
        help="[all]",
    )
    p.add_argument("--workers", type=int, default=2, help="how many at a time [2]")
    p.add_argument("--list", action="store_true", help="print names and files and end")
    p.add_argument(
        "--tests", type=shlex.split, help="arguments of pytest, instead of the entries' own"
    )
    args = p.parse_args(argv)
    if args.workers < 1:
        p.error(f"--workers {args.workers}: at least one")
    texts = args.only or [""]
    chosen = []
    for mutation in MUTATIONS:
        is_named = any(text in mutation.name or text in mutation.file for text in texts)
        if mutation.category in args.category and is_named:
            chosen.append(mutation)
    if not chosen:
        print(f"no mutation's name or file has {args.only}; --list shows them", file=sys.stderr)
        return 2
    if args.list:
        for mutation in chosen:
            print(f"{mutation.category:10}  {mutation.name}  ({mutation.file})")
        return 0
    survivors = 0
    for mutation, result in results(chosen, args.tests, args.workers):
        survivors += not result.killed
        verdict = "killed  " if result.killed else "SURVIVED"
        print(f"{verdict}  {mutation.name}  ({result.seconds:.0f} s)  {result.seen}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
