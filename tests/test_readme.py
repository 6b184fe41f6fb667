"""The pages: tables as their records say, links that lead somewhere."""

import re
from functools import partial

import pytest

from distlab.report.docs_tables import definition, embed_code, embed_tables, table_of
from launch.__main__ import view_of
from tests.commands import ROOT
from tests.pages import pages

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_drawn_from_their_records(page):
    text = page.read_text(encoding="utf-8")
    assert embed_tables(text, partial(table_of, view_of=view_of, root=ROOT)) == text, "run make tables"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_that_of_the_package(page):
    text = page.read_text(encoding="utf-8")
    assert embed_code(text, ROOT) == text, "run make tables"


def test_code_that_is_not_there_is_an_error():
    assert definition(ROOT / "distlab/parallel/naive.py", "NaiveDDP._synchronize").startswith(
        "@torch.no_grad()"
    )
    with pytest.raises(ValueError, match="defines no"):
        embed_code("<!-- code distlab/parallel/naive.py NaiveDDP.gone -->\n<!-- end code -->", ROOT)
    with pytest.raises(ValueError, match="end code"):
        embed_code("<!-- code distlab/parallel/naive.py NaiveDDP -->\n", ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_of_this_repository(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", text):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if anchor and target.suffix == ".md":
            assert anchor[1:] in headings(target), f"{page.name} links to {path}{anchor}"


def headings(page) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation dropped, blanks to hyphens."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_a_marker_without_its_end_is_an_error():
    with pytest.raises(ValueError, match="end table"):
        embed_tables("<!-- table a.json -->\n", str)
