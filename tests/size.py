"""Report the size and the texture of every package: `make size`.

Nothing here is a limit. The figures help a reviewer to see where code is dense: many tokens per
line, few comments, wide lines.
"""

import ast
import io
import subprocess
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
FSTRING_START = getattr(tokenize, "FSTRING_START", -1)  # since Python 3.12
FSTRING_END = getattr(tokenize, "FSTRING_END", -1)
WIDE = 100  # columns


@dataclass
class Texture:
    """Counts of one package. `code_lines` are lines that hold at least one code token."""

    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    comments: int = 0
    wide_lines: int = 0

    def add(self, text: str) -> None:
        """Add the counts of one source file."""
        rows = text.splitlines()
        tokens = _code_token_rows(text)
        self.lines += len(rows)
        self.code_lines += len(set(tokens))
        self.tokens += len(tokens)
        self.wide_lines += sum(len(row) > WIDE for row in rows)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            self.comments += token.type == tokenize.COMMENT


def code_tokens(text: str) -> int:
    """Count the code tokens of a source text: names, numbers, operators, strings.

    No comments, no docstrings.
    """
    return len(_code_token_rows(text))


def _code_token_rows(text: str) -> list[int]:
    """Return the first line of every code token. An f-string is one token on every Python."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if documented and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    rows: list[int] = []
    depth = 0  # of f-strings, whose parts are tokens of their own since Python 3.12
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if depth == 0 and not is_docstring and token.type in CODE | {FSTRING_START}:
            rows.append(token.start[0])
        if token.type == FSTRING_START:
            depth += 1
        elif token.type == FSTRING_END:
            depth -= 1
    return rows


def package_of(path: Path) -> str:
    """Name the package of a tracked file, given relative to the repository's root."""
    top, *inside = path.parts
    if top != "distlab":
        return top
    return f"distlab/{inside[0]}" if len(inside) > 1 else "distlab/*.py"


def textures() -> dict[str, Texture]:
    """Measure every package, and `source`: all files outside tests/."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages: dict[str, Texture] = defaultdict(Texture)
    for path in map(Path, listed.split()):
        if not (ROOT / path).exists():
            continue  # deleted, and not committed yet
        text = (ROOT / path).read_text(encoding="utf-8")
        package = package_of(path)
        packages[package].add(text)
        if package != "tests":
            packages["source"].add(text)
    return packages


def report() -> str:
    """Return the table that `make size` prints."""
    rows = [
        f"{'package':<20} {'lines':>7} {'tokens/line':>12} {'comments/100':>13} "
        f"{'> 100 columns':>14}"
    ]
    for package, counts in sorted(textures().items()):
        per_line = counts.tokens / max(counts.code_lines, 1)
        comments = 100 * counts.comments / max(counts.code_lines, 1)
        wide = counts.wide_lines / max(counts.lines, 1)
        rows.append(
            f"{package:<20} {counts.lines:>7,} {per_line:>12.1f} {comments:>13.1f} {wide:>14.1%}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(report())
