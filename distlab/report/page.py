"""`report.html`: an experiment's question, set-up, results, predictions, noise and how to read them, on one page.

The page needs no network and no other file: pictures are inside it, and its content security policy forbids the
rest. It prints what the records hold and computes nothing that the tables beside it do not have.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.report.derived import noise_of
from distlab.report.record import Record
from distlab.report.table import STYLES, Column, by_machine, is_number, render

if TYPE_CHECKING:
    from distlab.report.view import View


def page(
    view: View,
    records: Sequence[Record],
    pictures: Sequence[tuple[str, Path]] = (),
    findings: Sequence[str] = (),
) -> str:
    """The whole page.

    Args:
        view: how the records are shown.
        pictures: caption and file (`.png`) of each.
        findings: sentences that follow from these records.
    """
    return rendered(
        "page.html.j2", title=view.name, view=view, headline=view.headline_of(records), findings=findings,
        noises=_noises(records),
        setups=[_setup(machine, group) for machine, group in by_machine(records).items()],
        tables=[
            _table(group, columns) | {style: render(group, columns, style) for style in STYLES if style != "text"}
            | {"title": title} for title, group, columns in view.tables(records)
        ],
        pictures=[(caption, base64.b64encode(path.read_bytes()).decode()) for caption, path in pictures],
    )  # fmt: skip


def rendered(template: str, **values: Any) -> str:
    """One of the templates beside this file, filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template(template).render(**values)


def _table(records: Sequence[Record], columns: Sequence[Column]) -> dict[str, Any]:
    """What the template makes a table of: (title, whether it stands left) of each column; cells are (text, number to
    sort by).
    """
    rows = [
        [(c.text(record), value if is_number(value := c.value(record)) else None) for c in columns]
        for record in records
    ]
    return {"head": [(column.title, column.stands_left) for column in columns], "rows": rows}


def _setup(machine: str, records: Sequence[Record]) -> dict[str, Any]:
    """One machine: hardware, versions, commit, command, and what all its records have in common."""
    config, known = records[0].config, records[0].environment
    count, backend = config.get("world_size") or known.get("device_count") or 1, config.get("backend")
    versions = {"torch": "torch", "Triton": "triton", "CUDA": "cuda", "NCCL": "nccl", "Python": "python"}
    facts = {
        "device": f"{count} × {machine}" + (f" ({backend})" if backend else ""),
        "CPU": f"{known.get('cpu_model') or 'unknown'}, {known.get('cpu_cores') or '?'} usable cores, "
        f"threads per process: {known.get('cpu_threads_per_rank') or '?'}",
        "versions": ", ".join(f"{label} {known[key]}" for label, key in versions.items() if known.get(key)),
        "commit": ", ".join(dict.fromkeys(str(record.commit or "unknown") for record in records)),
    }
    commands = filter(None, dict.fromkeys(record.environment.get("command") for record in records))
    options = {
        key: json.dumps(value, default=str, ensure_ascii=False)
        for key, value in config.items()
        if all(key in record.config and record.config[key] == value for record in records)
    }
    return {"facts": facts, "command": "\n".join(commands) or "the command was not recorded", "options": options}


def _noises(records: Sequence[Record]) -> list[str]:
    """What the records say of noise: each row's own."""
    noises = {r.variant: noise for r in records if (noise := noise_of(r.metrics)) is not None}
    if noises:
        best, worst = (pick(noises, key=noises.__getitem__) for pick in (min, max))
        return [
            f"Noise is each row's own: from {noises[best]:.1f} % ({best}) to {noises[worst]:.1f} % ({worst}). Two rows "
            "that differ by less than the noise of the worse one are a tie."
        ]
    return []
