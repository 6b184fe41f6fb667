"""Code tokens of each package (`make size`): names, numbers, operators and strings, as `tokenize` sees them.

Comments and docstrings are free, an f-string is one token on every Python, and neither long lines nor clever ones
change the count. `tests/test_size.py` holds the limits.
"""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))
TOGETHER = {"simulate": "theory"}  # packages of distlab that share a row with another


def code_tokens(text: str) -> int:
    """Count the code tokens of a source text."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if depth == 0 and not docstring and token.type in CODE | {FSTRING_START}:
            count += 1
        depth += (token.type == FSTRING_START) - (token.type == FSTRING_END)
    return count


def row(path: Path) -> str:
    """Name the package that a tracked file, relative to the repository's root, counts for."""
    top, *inside = path.parts
    if top != "distlab":
        return top
    return f"distlab/{TOGETHER.get(inside[0], inside[0])}" if len(inside) > 1 else "distlab/*.py"


def sizes() -> Counter[str]:
    """Count the code tokens of every package, of `source` (all that lies outside tests/) and of the tests."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    counts: Counter[str] = Counter()
    for path in map(Path, tracked):
        if (ROOT / path).exists():
            counts[row(path)] += code_tokens((ROOT / path).read_text(encoding="utf-8"))
    counts["source"] = counts.total() - counts["tests"]
    return counts


if __name__ == "__main__":
    for package, count in sorted(sizes().items()):
        print(f"{package:<20} {count:>8,} code tokens")
