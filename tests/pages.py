"""The pages of this repository, and the shell commands in them."""

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


DRAWN = re.compile("[│┌└─↑↓]")  # signs of a drawing, whose fence also names no language


@dataclass(frozen=True)
class Command:
    """Command of a page, as one line without comments."""

    page: str
    text: str


def commands_of(page: Path) -> list[Command]:
    """Return every command of a page, in its order.

    Commands are in fenced blocks of shell, in indented blocks and between single backticks.
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
    """Return every line of a page's fenced blocks of shell, without comments and drawings.

    A command that is continued on the next line is one line.
    """
    found = []
    for match in _shell_fences(page.read_text(encoding="utf-8")):
        if not DRAWN.search(match[2]):
            joined = re.sub(r"\\\n\s*", " ", match[2])
            lines = [_without_comment(line) for line in joined.splitlines()]
            found += [line for line in lines if line]
    return found


def _shell_fences(text: str) -> list[re.Match[str]]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [match for match in found if match[1] in SHELLS]


def _without_comment(line: str) -> str:
    return " ".join(re.sub(r"(^|\s)#.*$", "", line).removeprefix("$ ").split())


def _lines(block: str, offset: int) -> list[tuple[int, str]]:
    """Return the commands of a block, each with its position on the page."""

    def spaces(match: re.Match[str]) -> str:
        return " " * len(match[0])  # as many, so that positions stay

    joined = re.sub(r"\\\n\s*", spaces, block)
    found = []
    for match in re.finditer(r"^.*$", joined, re.MULTILINE):
        line = _without_comment(match[0])
        if _START.match(line):
            found.append((offset + match.start(), line))
    return found
