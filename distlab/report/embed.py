"""Tables inside Markdown pages, drawn from committed records: the page cannot drift from what was measured.

A page holds a pair of markers, and what lies between them is made:

    <!-- table records/ddp_bench/cpu.json -->
    …
    <!-- end table -->
"""

import re
from collections.abc import Callable

MARKED = re.compile(
    r"(?P<begin><!-- table (?P<source>\S+) -->\n)(?P<body>.*?)(?P<end><!-- end table -->)", re.DOTALL
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
