"""`report.html`: an experiment's question, set-up, results, predictions, noise and how to read them, on one page.

The page needs no network and no other file: pictures are inside it, and its content security policy forbids the
rest. It prints what the records hold and computes nothing that the tables beside it do not have.
"""

from __future__ import annotations

import base64
import html
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from distlab.report.machines import by_machine
from distlab.report.noise import noise_of
from distlab.report.page import CSS, SCRIPT
from distlab.report.predictions import accuracy, compared
from distlab.report.record import Record
from distlab.report.table import Column, render

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
MOST_FIGURES = 500  # rows of the table that has every prediction; beyond that the summary stands alone
Cell = tuple[str, float | None]  # what is shown, and by what number it sorts


def page(
    records: Sequence[Record],
    *,
    name: str,
    question: str,
    headline: str,
    tables: Sequence[tuple[str, Sequence[Record], Sequence[Column]]],
    pictures: Sequence[tuple[str, Path]] = (),
    findings: Sequence[str] = (),
    reading: str = "",
    prediction: str = "",
    noise: str = "",
) -> str:
    """The whole page.

    Args:
        name: of the experiment.
        question: what it asks, one sentence.
        headline: what the tables were measured on, one line.
        tables: title (empty for an only one), records and columns of each.
        pictures: caption and file (`.png`) of each.
        findings: sentences that follow from these records.
        reading: how to read the table and the pictures.
        prediction, noise: words for these sections, before what the records themselves say.
    """
    machines = by_machine(records)
    body = [
        f"<h1>{_text(question)}</h1>",
        f'<p class="faint">{_text(name)}: {_text(headline)}</p>',
        _section("Set-up", *(_set_up(machine, group) for machine, group in machines.items())),
        _section(
            "Result",
            *_paragraphs(findings),
            *(_records_table(*each) for each in tables),
            *map(_figure, pictures),
        ),
        _section("Prediction", *_paragraphs([prediction]), _predictions(records, bool(prediction))),
        _section("Noise floor", *_paragraphs([noise]), *_paragraphs(_noise(records, bool(noise)))),
        _section("Reading", *_paragraphs(reading.split("\n\n"))),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{_text(name)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n'
        + "\n".join(body)
        + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], left: Sequence[bool]) -> str:
    """A table whose headings sort it.

    Args:
        left: per column, whether it stands left (texts) or right (numbers).
    """
    sides = [' class="left"' if side else "" for side in left]
    head = "".join(
        f'<th scope="col"{side}><button type="button">{_text(title)}</button></th>'
        for title, side in zip(titles, sides, strict=True)
    )
    lines = []
    for row in rows:
        cells = (
            f"<td{side}{'' if value is None else f' data-value={chr(34)}{value!r}{chr(34)}'}>{_text(shown)}</td>"
            for (shown, value), side in zip(row, sides, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _records_table(title: str, records: Sequence[Record], columns: Sequence[Column]) -> str:
    rows = [
        [(column.text(record), _number(column.value(record))) for column in columns] for record in records
    ]
    sources = "".join(
        f"<h3>{label}</h3><pre>{_text(render(records, columns, style))}</pre>"
        for label, style in (("Markdown", "markdown"), ("LaTeX", "latex"))
    )
    made = table([column.title for column in columns], rows, [column.stands_left for column in columns])
    heading = f"<h3>{_text(title)}</h3>" if title else ""
    return f"{heading}{made}\n<details><summary>This table as Markdown and LaTeX</summary>{sources}</details>"


def _set_up(machine: str, records: Sequence[Record]) -> str:
    """One machine: hardware, versions, commit, command, and what all its records have in common."""
    first = records[0]
    known = first.environment
    count = first.config.get("world_size") or known.get("device_count") or 1
    backend = first.config.get("backend")
    rows = {
        "device": f"{count} × {machine}" + (f" ({backend})" if backend else ""),
        "CPU": f"{known.get('cpu_model') or 'unknown'}, {known.get('cpu_cores') or '?'} usable cores, "
        f"threads per process: {known.get('cpu_threads_per_rank') or '?'}",
        "versions": ", ".join(
            f"{label} {known[key]}"
            for label, key in (("torch", "torch"), ("Triton", "triton"), ("CUDA", "cuda"), ("NCCL", "nccl"),
                               ("Python", "python"))
            if known.get(key)
        ),
        "commit": ", ".join(dict.fromkeys(str(record.commit or "unknown") for record in records)),
    }  # fmt: skip
    commands = dict.fromkeys(record.environment.get("command") for record in records)
    shown = "\n".join(command for command in commands if command) or "the command was not recorded"
    common = {
        key: value
        for key, value in first.config.items()
        if all(key in record.config and record.config[key] == value for record in records)
    }
    items = "".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in rows.items())
    options = "".join(
        f"<dt>{_text(key)}</dt><dd>{_text(json.dumps(value, default=str, ensure_ascii=False))}</dd>"
        for key, value in common.items()
    )
    return (
        f"<dl>{items}</dl><pre>{_text(shown)}</pre>"
        f"<details><summary>Every option of this run</summary><dl>{options}</dl></details>"
    )


def _predictions(records: Sequence[Record], explained: bool) -> str:
    figures = compared(records)
    if not figures:
        return "" if explained else "<p>No figure of this experiment is predicted.</p>"
    titles = ["quantity", "figures", "median |error| %", "worst error %", "worst at"]
    lines = [
        [(line.quantity, None), (str(line.figures), line.figures),
         (f"{line.median_error_pct:.1f}", line.median_error_pct),
         (f"{line.worst_error_pct:+.1f}", line.worst_error_pct),
         (line.worst_variant if line.worst_error_pct else "none", None)]
        for line in accuracy(figures)
    ]  # fmt: skip
    summary = table(titles, lines, [True, False, False, False, True])
    note = "<p>Error: predicted over measured, minus one. Above 20 % it wants an explanation.</p>"
    if len(figures) > MOST_FIGURES:
        return note + summary
    rows = [
        [(f.variant, None), (f.quantity, None), (_short(f.predicted), f.predicted),
         (_short(f.measured), f.measured), ("n/a" if f.error_pct is None else f"{f.error_pct:+.1f}", f.error_pct)]
        for f in figures
    ]  # fmt: skip
    titles = ["variant", "quantity", "predicted", "measured", "error %"]
    every = table(titles, rows, [True, True, False, False, False])
    return f"{note}{summary}<details><summary>Every predicted figure</summary>{every}</details>"


def _noise(records: Sequence[Record], explained: bool) -> list[str]:
    """What the records say: each row's own noise, and how far their samples spread."""
    lines = []
    noises = {r.variant: noise for r in records if (noise := noise_of(r.metrics)) is not None}
    if noises:
        best, worst = (pick(noises, key=noises.__getitem__) for pick in (min, max))
        lines.append(
            f"Noise is each row's own: from {noises[best]:.1f} % ({best}) to {noises[worst]:.1f} % ({worst}). Two rows "
            "that differ by less than the noise of the worse one are a tie."
        )
    for quantity, spreads in _spreads(records).items():
        lines.append(
            f"From p20 to p80, {quantity} spreads over {statistics.median(spreads):.1f} % of its median (median over "
            f"{len(spreads)} rows; widest {max(spreads):.1f} %)."
        )
    return lines or ([] if explained else ["Not measured: no variant was timed against itself in this run."])


def _spreads(records: Sequence[Record]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for record in records:
        for name, middle in record.metrics.items():
            ends = [_number(record.metrics.get(name.replace("_p50_", f"_{p}_"))) for p in ("p20", "p80")]
            if "_p50_" in name and _number(middle) and None not in ends:
                found.setdefault(name.replace("_p50", ""), []).append(100 * (ends[1] - ends[0]) / middle)
    return found


def _figure(picture: tuple[str, Path]) -> str:
    caption, path = picture
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<figure><img alt="{_text(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _section(title: str, *parts: str) -> str:
    return f"<h2>{_text(title)}</h2>\n" + "\n".join(part for part in parts if part)


def _paragraphs(texts: Iterable[str]) -> list[str]:
    return [f"<p>{_text(text.strip())}</p>" for text in texts if text.strip()]


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _number(value: Any) -> float | int | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None


def _short(value: float) -> str:
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    )
