"""What the page's zoomable timeline holds: kernels and messages of one step of each row, small enough to inline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from distlab.report.style import COLOURS

FILE = "timeline.json"
MOST = 40_000  # characters of a row's spans as JSON, and twelve rows stay under half a megabyte
KINDS = {  # kind → name, colour, lane
    "compute": ("compute", COLOURS["compute"], 0),
    "copy": ("copy", COLOURS["copies"], 0),
    "communication": ("communication", COLOURS["communication"], 1),
}
LENGTH = 26  # characters of a span as JSON, without what it carries


class Span(NamedTuple):
    """One kernel or message; times in ms from the start of the step. `more`: its bucket and its bytes, say."""

    kind: str
    name: str
    start_ms: float
    end_ms: float
    more: str = ""


def zoomable(rows: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """The data of the page's timeline: row → spans; of a row with too many, short neighbours of a kind are one."""
    names: dict[str, int] = {}
    found = []
    for row, given in rows.items():
        spans = sorted(given, key=lambda span: span.start_ms)
        end_us = round(1e3 * max((span.end_ms for span in spans), default=0.0))
        least_ms = end_us / 1e3 / 8000
        while sum(LENGTH + len(span.more) for span in spans) > MOST:
            spans, least_ms = _joined(spans, least_ms), 2 * least_ms
        packed = [
            [list(KINDS).index(span.kind), round(1e3 * span.start_ms, 1), round(1e3 * (span.end_ms - span.start_ms), 1),
             names.setdefault(span.name[:120], len(names)), span.more]
            for span in spans
        ]  # fmt: skip
        found.append({"name": row, "end_us": end_us, "spans": packed})
    return {"kinds": list(KINDS.values()), "names": list(names), "rows": found}


def _joined(spans: list[Span], least_ms: float) -> list[Span]:
    """Neighbours of a kind that are shorter than this, as one span each."""
    joined = []
    for (kind, short), group in groupby(
        spans, key=lambda span: (span.kind, span.end_ms - span.start_ms < least_ms)
    ):
        members = list(group)
        while short and members:
            last = next(
                (n for n, each in enumerate(members) if each.start_ms > members[0].start_ms + least_ms), None
            )
            some, members = members[:last], members[last:] if last else []
            more = some[0].more if len(some) == 1 else ""
            name = some[0].name if len(some) == 1 else f"{len(some)} short ones"
            joined.append(Span(kind, name, some[0].start_ms, max(each.end_ms for each in some), more))
        joined += members
    return joined
