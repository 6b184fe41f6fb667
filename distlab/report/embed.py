"""Tables and code inside Markdown pages, made from committed records and from the source: pages cannot drift.

A page holds a pair of markers, and what lies between them is made:

    <!-- table records/ddp_bench/cpu.json -->
    …
    <!-- end table -->

    <!-- code distlab/parallel/naive.py NaiveDDP._synchronize -->
    …
    <!-- end code -->
"""

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

MARKED = re.compile(
    r"(?P<begin><!-- table (?P<source>\S[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end table -->)", re.DOTALL
)
CODE = re.compile(
    r"(?P<begin><!-- code (?P<path>\S+) (?P<name>\S+) -->\n)(?P<body>.*?)(?P<end><!-- end code -->)",
    re.DOTALL,
)


def embed_tables(page: str, table_of: Callable[[str], str]) -> str:
    """The page with every marked place filled anew.

    Args:
        page: Markdown.
        table_of: from the source named in the marker to the Markdown to stand there.

    Raises:
        ValueError: a begin marker without its end.
    """
    if page.count("<!-- table ") != len(MARKED.findall(page)):
        raise ValueError("a '<!-- table … -->' marker has no '<!-- end table -->' after it")

    def fill(match: re.Match) -> str:
        return f"{match['begin']}\n{table_of(match['source']).strip()}\n\n{match['end']}"

    return MARKED.sub(fill, page)


def embed_code(page: str, root: Path) -> str:
    """The page with every marked piece of code taken anew from the source.

    Args:
        page: Markdown.
        root: the folder that paths in markers start from.

    Raises:
        ValueError: a begin marker without its end, or a name that the file does not define.
    """
    if page.count("<!-- code ") != len(CODE.findall(page)):
        raise ValueError("a '<!-- code … -->' marker has no '<!-- end code -->' after it")

    def fill(match: re.Match) -> str:
        code = definition(root / match["path"], match["name"])
        return f"{match['begin']}\n```python\n{code}\n```\n\n{match['end']}"

    return CODE.sub(fill, page)


def definition(path: Path, name: str) -> str:
    """The text of a function, method or class, without what it is indented by.

    Args:
        path: a Python file.
        name: such as `plan_buckets` or `NaiveDDP._synchronize`.

    Raises:
        ValueError: the file does not define it.
    """
    text = path.read_text(encoding="utf-8")
    nodes: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in nodes if getattr(node, "name", None) == part), None)
        if found is None:
            raise ValueError(f"{path.name} defines no {name!r}")
        nodes = getattr(found, "body", [])
    first = min([found.lineno, *(decorator.lineno for decorator in getattr(found, "decorator_list", []))])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : found.end_lineno]))
