"""Redraw the tables of README.md and docs/ from the committed records, and their code from the source (`make tables`).

With `--check` nothing is written; the exit code is 1 if a page is out of date.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from distlab.report.embed import embed_code, embed_tables
from distlab.report.record import Record, read_json
from distlab.report.table import Column, render
from experiments import (
    attention_record,
    attention_sweep,
    ddp_bench,
    kernel_roofline,
    memory_breakdown,
    predict_steps,
    sabotage,
    train_curves,
)

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS: dict[str, tuple[Callable[[list[Record]], str], Callable[[list[Record]], list[Column]]]] = {
    ddp_bench.NAME: (ddp_bench.headline, ddp_bench.columns),
    memory_breakdown.NAME: (memory_breakdown.headline, lambda records: memory_breakdown.COLUMNS),
    predict_steps.COMPARISON: (
        predict_steps.comparison_headline,
        lambda records: predict_steps.COMPARISON_COLUMNS,
    ),
    kernel_roofline.EXPERIMENT: (kernel_roofline.headline, lambda records: kernel_roofline.COLUMNS),
    train_curves.NAME: (train_curves.headline, lambda records: train_curves.COLUMNS),
    sabotage.NAME: (sabotage.headline, lambda records: sabotage.COLUMNS),
    attention_record.EXPERIMENT: (attention_record.headline, lambda records: attention_record.COLUMNS),
    attention_sweep.COMPARISON: (attention_sweep.headline, lambda records: attention_sweep.COMPARISON_COLUMNS),
}


def table_of(source: str) -> str:
    """Headline and table of a file of records, or of some of its variants (`records/….json#naive,flat`)."""
    source, _, rows = source.partition("#")
    records = read_json(ROOT / source)
    if rows:
        wanted = rows.split(",")
        records = [record for record in records if record.variant in wanted]
        if {record.variant for record in records} != set(wanted):
            raise ValueError(f"{source}: not all of {rows} are variants there")
    experiment = records[0].experiment
    if experiment not in EXPERIMENTS:
        raise ValueError(f"{source}: no columns are known for records of {experiment!r}")
    headline, columns = EXPERIMENTS[experiment]
    commit = (records[0].commit or "unknown")[:12]
    note = f"{headline(records)} (commit {commit}, `{source}`)"
    return f"{note}\n\n{render(records, columns(records), 'markdown')}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser("tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
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
