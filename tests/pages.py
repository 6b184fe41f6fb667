"""The pages of this repository, and the shell commands that stand on them."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.commands import ROOT

PROGRAMS = (
    "distlab",
    "python",
    "python3",
    ".venv/bin/python",
    "torchrun",
    "pytest",
    "make",
    "pip",
    "export",
    "sbatch",
    "bash",
    "compute-sanitizer",
)
SHELLS = ("", "sh", "bash", "shell", "console")
_START = re.compile(r"(?:[A-Z_]+=\S+ )*(?:" + "|".join(map(re.escape, PROGRAMS)) + r") \S")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


DRAWN = re.compile("[│┌└─↑↓]")  # a drawing, in a fence that names no language either


@dataclass(frozen=True)
class Command:
    """A command as a page gives it: one line, comments and continuations resolved."""

    page: str
    text: str


def commands_of(page: Path) -> list[Command]:
    """Every command in fenced blocks of shell, in indented blocks and between single backticks, in
    page order.
    """
    name = str(page.relative_to(ROOT))
    text = page.read_text(encoding="utf-8")
    found: list[tuple[int, str]] = []

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    for match in _shell_fences(text):
        found += _lines(match[2], match.start(2))
    prose = re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)
    for match in re.finditer(r"(?:^ {4,}\S.*\n)+", prose, re.MULTILINE):
        found += _lines(match[0], match.start())
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        inline = " ".join(match[1].split())
        if _START.match(inline) and "…" not in inline:
            found.append((match.start(), inline))
    return [Command(name, command) for _, command in sorted(found)]


def fenced_lines(page: Path) -> list[str]:
    """Every line of a page's fenced blocks of shell, comments and continuations resolved, drawings
    left out.
    """
    found = []
    for match in _shell_fences(page.read_text(encoding="utf-8")):
        if not DRAWN.search(match[2]):
            joined = re.sub(r"\\\n\s*", " ", match[2])
            found += [text for line in joined.splitlines() if (text := _without_comment(line))]
    return found


def _shell_fences(text: str) -> list[re.Match[str]]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [match for match in found if match[1] in SHELLS]


def _without_comment(line: str) -> str:
    return " ".join(re.sub(r"(^|\s)#.*$", "", line).removeprefix("$ ").split())


def _lines(block: str, offset: int) -> list[tuple[int, str]]:
    """The commands of a block, each with its position on the page."""
    joined = re.sub(r"\\\n\s*", lambda match: " " * len(match[0]), block)
    found = []
    for match in re.finditer(r"^.*$", joined, re.MULTILINE):
        line = _without_comment(match[0])
        if _START.match(line):
            found.append((offset + match.start(), line))
    return found
