"""The documentation site, where mkdocs is installed: no warning, no dead link, every public name,
and in a browser.
"""

import importlib.util
import os
import re
import subprocess
import sys
from html import unescape
from urllib.parse import unquote, urlsplit

import pytest

from tests.commands import ROOT
from tests.report.browser import chromium
from tests.test_public_names import NAMES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs is not installed: pip install -e '.[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=quiet, check=False
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


def test_no_link_is_dead_and_nothing_is_fetched(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 30
    dead, outside = [], []
    for path, text in pages.items():
        outside += re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//[^"]*', text)
        if path.name == "404.html":
            continue
        for link in re.findall(r'<(?:a|img|link|script)\b[^>]*?\s(?:href|src)="([^"]*)"', text):
            parts = urlsplit(unescape(link))
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            there = target.exists() and (
                not parts.fragment
                or target.suffix != ".html"
                or re.search(rf'id="{re.escape(unquote(parts.fragment))}"', pages[target])
                is not None
            )
            if not there and not parts.fragment.startswith("__"):  # of the theme's code blocks
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead and not [link for link in outside if "canonical" not in link], (
        dead[:20],
        outside[:5],
    )


def test_every_public_name_has_its_signature(site):
    for module, names in NAMES.items():
        package = module.removeprefix("distlab.").partition(".")[0]
        text = (site / "reference" / f"{package}.html").read_text(encoding="utf-8")
        for name in names.split():
            assert f'id="{module}.{name}"' in text, f"{module}.{name}"
    inherited = re.findall(
        r'id="(distlab\.parallel\.\w+\.no_sync)"', (site / "reference/parallel.html").read_text()
    )
    assert inherited == ["distlab.parallel.ParallelModel.no_sync"]


SEARCH = """<script>addEventListener("load", () => setTimeout(() => {
  const input = document.querySelector("input.md-search__input");
  input.focus();
  input.value = "BucketedDDP";
  input.dispatchEvent(new Event("input", {bubbles: true}));
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true, key: "P"}));
}, 1500))</script></body>"""


@pytest.mark.skipif(
    chromium() is None, reason="needs Chromium, and none of its usual names is on the PATH"
)
def test_the_search_finds_from_a_file(site, tmp_path):
    page = site / "searched.html"
    page.write_text(
        (site / "index.html").read_text(encoding="utf-8").replace("</body>", SEARCH),
        encoding="utf-8",
    )
    shown = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=20000",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    ).stdout
    page.unlink()
    assert re.search(
        r'href="[^"]*reference/parallel\.html[^"]*" class="md-search-result__link"', shown
    )
