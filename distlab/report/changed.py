"""What of the code that made a record has changed since."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from distlab.report.provenance import git

# Imported by every experiment, and no part of what one measures.
SHOWING = ("distlab/report/", "distlab/notebook/", "distlab/experiment.py", "distlab/ending.py", "distlab/files.py")


@cache
def imported(module: str, root: Path) -> frozenset[str]:
    """The files of the checkout that a module imports, by the syntax tree, at any depth; its own among them."""
    files: set[str] = set()
    modules = [module]
    while modules:
        path = _file_of(modules.pop(), root)
        if path is None or (name := path.relative_to(root).as_posix()) in files:
            continue
        files.add(name)
        modules += _imports(path, root)
    return frozenset(name for name in files if not name.startswith(SHOWING))


def changed_since(commit: str | None, experiment: str, root: Path) -> list[str]:
    """The files that an experiment runs through and that differ from a commit; empty where git knows nothing of it."""
    listed = git(root, "diff", "--name-only", (commit or "unknown").removesuffix("-dirty"))
    changed = set((listed or "").splitlines())
    return sorted(changed & imported(f"experiments.{experiment}", root))


def _file_of(module: str, root: Path) -> Path | None:
    stem = root.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def _imports(path: Path, root: Path) -> Iterator[str]:
    package = ".".join(path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module if not node.level else ".".join(filter(None, (package, node.module)))
            yield base or ""
            yield from (f"{base}.{alias.name}" for alias in node.names)
