"""`report.html`: question, set-up, results, predictions and noise of an experiment on one page.

The page needs no network and no other file: pictures are inside it, its content security policy
forbids the rest, and links lead to files in its folder. It prints what the records hold and
computes nothing that its tables do not have.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.report.derived import noise_by_row
from distlab.report.record import Records
from distlab.report.table import Column, by_machine, is_number, render, shared_options

if TYPE_CHECKING:
    from distlab.report.view import View

MOST_COLUMNS = 15  # with those of a row's name
MOST_NAMES = 4  # columns that may name a row


def page(
    view: View,
    records: Records,
    pictures: Mapping[Path, str],
    findings: Sequence[str],
    links: Mapping[str, Sequence[str]],
) -> str:
    """Return the whole page.

    Args:
        view: view of the records.
        pictures: file (`.png`) → its caption.
        findings: sentences that answer the question.
        links: description of files → their addresses from the page.
    """
    # The tables are made once, since the legend of columns and the tables below need them.
    tables = view.tables(records)
    return _template().render(
        title=view.name,
        view=view,
        headline=view.headline_of(records),
        findings=findings,
        noise=noise_by_row(records),
        links=links,
        columns={
            column.title: column.about
            for _, _, columns in tables
            for column in columns
            if column.about
        },
        setups=[_setup(machine, group) for machine, group in by_machine(records).items()],
        tables=[
            {
                # The page also shows each table as Markdown, to be copied into another page.
                "markdown": render(group, columns, "markdown"),
                "title": title,
                "parts": [_table(group, part) for part in _parts(columns)],
            }
            for title, group, columns in tables
        ],
        pictures=[
            # The picture is in the page itself, so that the page can be sent as one file.
            (caption, base64.b64encode(path.read_bytes()).decode())
            for path, caption in pictures.items()
        ],
    )


def _template() -> Any:
    """Return the template in this folder. Its filter `code` formats text in backticks as code."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        # A misspelt name in the template raises instead of leaving a gap.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Text is escaped before it is marked safe: a record may hold HTML.
    environment.filters["code"] = lambda text: Markup(
        re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    )
    return environment.get_template("page.html.j2")


def _parts(columns: Sequence[Column]) -> list[list[Column]]:
    """Return the columns of a table as a page of 1,400 pixels shows them.

    Many columns are split into parts above one another, and each part begins with the columns that
    name the row.
    """
    # The name of a row ends with the variant, which the shape, the dtype or the direction precede.
    keys = [column.key for column in columns[:MOST_NAMES]]
    names = keys.index("variant") + 1 if "variant" in keys else 1
    others = MOST_COLUMNS - names
    starts = range(names, max(len(columns), names + 1), others)
    return [[*columns[:names], *columns[start : start + others]] for start in starts]


def _table(records: Records, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the table for the template.

    Each column has (title, True if aligned left, description), and each cell (text, number to sort
    by).
    """
    rows = []
    for record in records:
        cells = []
        for column in columns:
            value = column.value(record)
            # Sorting needs the number, because the cell's text has units and separators.
            cells.append((column.text(record), value if is_number(value) else None))
        rows.append(cells)
    return {
        "head": [(column.title, column.stands_left, column.about) for column in columns],
        "rows": rows,
    }


def _setup(machine: str, records: Records) -> dict[str, Any]:
    """Return hardware, versions, commit, command and common options of one machine's records."""
    config = records[0].config
    known = records[0].environment
    count = config.get("world_size") or known.get("device_count") or 1
    backend = config.get("backend")
    versions = {
        "torch": "torch",
        "Triton": "triton",
        "CUDA": "cuda",
        "NCCL": "nccl",
        "Python": "python",
    }
    facts = {
        "device": f"{count} × {machine}" + (f" ({backend})" if backend else ""),
        "CPU": f"{known.get('cpu_model') or 'unknown'}, {known.get('cpu_cores') or '?'} usable "
        f"cores, threads per process: {known.get('cpu_threads_per_rank') or '?'}",
        "versions": ", ".join(
            f"{label} {known[key]}" for label, key in versions.items() if known.get(key)
        ),
        # Rows of a resumed run may be of several commits.
        "commit": ", ".join(dict.fromkeys(str(record.commit or "unknown") for record in records)),
    }
    commands = filter(None, dict.fromkeys(record.environment.get("command") for record in records))
    options = {
        name: json.dumps(value, default=str, ensure_ascii=False)
        for name, value in shared_options(records).items()
    }
    return {
        "facts": facts,
        "command": "\n".join(commands) or "the command was not recorded",
        "options": options,
    }
