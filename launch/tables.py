"""Redraw the tables of README.md and docs/ from the committed records, and their code from the source (`make tables`).

With `--check` nothing is written; the exit code is 1 if a page is out of date.
"""

import argparse
import sys
from pathlib import Path

from distlab.report import run_to_end
from distlab.report.embed import embed_code, embed_tables
from distlab.report.record import read_json
from launch.__main__ import view_of

ROOT = Path(__file__).resolve().parents[1]
def table_of(source: str) -> str:
    """Headline and table of a file of records.

    Or of some of its variants, and of some columns by the last part of their keys: `records/….json#naive,flat@comm_ms`.
    """
    source, _, only = source.partition("@")
    source, _, rows = source.partition("#")
    records = read_json(ROOT / source)
    if rows:
        wanted = rows.split(",")
        records = [record for record in records if record.variant in wanted]
        if {record.variant for record in records} != set(wanted):
            raise ValueError(f"{source}: not all of {rows} are variants there")
    experiment = records[0].experiment
    view = view_of(experiment)
    commits = dict.fromkeys(_short(record.commit) for record in records)
    note = f"{view.headline_of(records)} (commit{'s' * (len(commits) > 1)} {', '.join(commits)}, `{source}`)"
    return f"{note}\n\n{view.table(records, 'markdown', only.split(',') if only else ())}"


def _short(commit: str | None) -> str:
    name, _, state = (commit or "unknown").partition("-")
    return name[:12] + (f"-{state}" if state else "")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args(argv).check
    return run_to_end("tables", lambda: redraw_pages(check=check))


def redraw_pages(*, check: bool) -> int:
    """Write what is out of date, or only name it; 1 if it was only named."""
    stale = []
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = embed_code(embed_tables(old, table_of), ROOT)
        if new != old:
            stale.append(page.relative_to(ROOT))
            if not check:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'out of date; run make tables' if check else 'redrawn'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
