"""A headless Chromium for pages: what a script finds there, and what the console said."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WATCH = """<script>
window.problems = [];
for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
  addEventListener(kind, event => {
    problems.push(kind + ": " + (event.message || event.reason || event.blockedURI));
  });
</script>"""


def chromium():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Seen:
    """`answer`: what the script evaluated to.

    `problems`: errors of the page; `console`: its lines.
    """

    answer: Any
    problems: list[str]
    console: list[str]


def visit(page, script, *, dark=False, width=1200):
    """Open a copy of the page beside it, evaluate `script` there once it has loaded, and say what
    happened.

    Args:
        script: a JavaScript expression, whose value JSON can hold.
        width: pixels of the window.
        dark: whether the system prefers dark pages.
    """
    ask = f"""<script>addEventListener("load", () => {{
      const ask = () => {{
        try {{ return {script}; }} catch (error) {{ problems.push(String(error)); }}
      }};
      const answer = ask();
      document.documentElement.innerHTML = "<pre></pre>";
      document.querySelector("pre").textContent = JSON.stringify({{answer, problems}});
    }});</script>"""
    text = page.read_text(encoding="utf-8")
    assert text.count("<title>") == text.count("</body>") == 1
    visited = page.with_name(f"visited-{'dark' if dark else 'light'}.html")
    visited.write_text(
        text.replace("<title>", f"{WATCH}<title>").replace("</body>", f"{ask}</body>"),
        encoding="utf-8",
    )
    result = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--window-size={width},900",
            "--dump-dom",
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            visited.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = re.search(r"<pre>(.*)</pre>", result.stdout, re.DOTALL)
    assert found, f"the page gave no answer: {result.stdout[-500:]}\n{result.stderr[-2000:]}"
    seen = json.loads(unescape(found[1]))
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return Seen(seen.get("answer"), seen["problems"], console)
