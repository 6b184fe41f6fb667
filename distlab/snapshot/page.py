"""Records and the view of an explanation, for `report.html`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.report import Column, Panel, Record, Records, Series, View, lines, text_column
from distlab.report.provenance import command
from distlab.snapshot.purposes import PURPOSES
from distlab.snapshot.report import MIB, DeviceExplanation, Explanation, changes, size_text
from distlab.text import for_terminal

NAME = "memory"
FINDINGS = "findings"
BY_PURPOSE, BY_LINE = "held at the peak, by purpose", "held at the peak, by line"
UNUSED = "reserved and not used when the snapshot was taken, by kind"
GROWTH = "memory grows at"
CHANGES = "changes since the earlier snapshot, at the peak"
PAGE_LINES = 50  # most rows of a table; `--json` prints all
SLICES = 2000  # most points of a line in the picture


def records_of(
    explanation: Explanation, snapshot: str, earlier: Explanation | None = None
) -> list[Record]:
    """Return the rows of all tables of the page.

    Args:
        explanation: explanation of the snapshot.
        snapshot: name of the file.
        earlier: explanation of an earlier snapshot, for a table of what changed.
    """
    environment = {"device_name": "GPU", "command": command()}
    found = []

    def add(device: int, part: str, variant: str, metrics: dict[str, Any]) -> None:
        config = {"snapshot": snapshot, "part": f"device {device}: {part}"}
        # A name in a stack may hold anything, also characters that no file in UTF-8 can have.
        found.append(Record(NAME, for_terminal(variant), config, metrics, environment, None))

    for device in explanation.devices:
        for part, variant, metrics in _rows(device):
            add(device.device, part, variant, metrics)
    line_count: Counter[int] = Counter()  # device → number of its lines so far
    for change in [] if earlier is None else changes(earlier, explanation):
        line_count[change.device] += change.of == "line"
        if line_count[change.device] > PAGE_LINES:
            continue
        metrics = {
            "before_bytes": change.before_bytes,
            "after_bytes": change.after_bytes,
            "changed_bytes": change.bytes,
        }
        add(change.device, CHANGES, change.name, metrics)
    return found


def _rows(device: DeviceExplanation) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (table, name of the row, metrics) for each row of one device."""
    peak_bytes = max(device.peak_bytes, 1)
    reserved_bytes = max(device.end_reserved_bytes, 1)
    rows: list[tuple[str, str, dict[str, Any]]] = []
    for finding in device.findings()[:PAGE_LINES]:
        sentence = for_terminal(finding.sentence)
        rows.append((FINDINGS, finding.kind, {"bytes": finding.bytes, "text": sentence}))
    if not rows:  # a page needs a row
        rows.append((FINDINGS, "nothing", {"bytes": 0, "text": device.advice()}))
    for purpose in PURPOSES:
        size = device.purposes[purpose]
        if size:
            metrics = {"bytes": size, "of_peak_pct": 100 * size / peak_bytes}
            rows.append((BY_PURPOSE, purpose, metrics))
    for site, purpose, size, blocks in device.sites[:PAGE_LINES]:
        metrics = {"purpose": purpose, "bytes": size, "of_peak_pct": 100 * size / peak_bytes}
        rows.append((BY_LINE, site, metrics | {"blocks": blocks}))
    for each in device.unused:
        metrics = {
            "bytes": each.bytes,
            "of_reserved_pct": 100 * each.bytes / reserved_bytes,
            "places": each.places,
            "largest_bytes": each.largest,
            "text": each.remedy,
        }
        rows.append((UNUSED, each.kind, metrics))
    for each in device.growth[:PAGE_LINES]:
        metrics = {
            "bytes": each.bytes,
            "blocks": each.blocks,
            "times": each.steps,
            "bytes_per_time": each.bytes_per_step,
        }
        rows.append((GROWTH, each.site, metrics))
    return rows


def page_view(explanation: Explanation) -> View:
    """Return the view that shows `records_of`, with a picture of the recording."""
    recorded = [device for device in explanation.devices if device.events > 0]

    def draw(records: Sequence[Record], path: Path) -> None:
        if recorded:
            panels = [_panel(device) for device in recorded]
            lines(path, panels, title="Memory during the recording")

    return View(
        name=NAME,
        question="What holds the GPU's memory, why is more reserved than used, and what grows?",
        columns=[
            Column("variant", ""),
            text_column("metrics.purpose", "purpose"),
            Column("metrics.bytes", "MiB", ",.1f", scale=1 / MIB),
            Column("metrics.of_peak_pct", "% of peak", ".0f"),
            Column("metrics.of_reserved_pct", "% of reserved", ".0f"),
            Column("metrics.blocks", "blocks", ",d"),
            Column("metrics.places", "places", ",d"),
            Column("metrics.largest_bytes", "largest, MiB", ",.1f", scale=1 / MIB),
            Column("metrics.times", "times", ",d"),
            Column("metrics.bytes_per_time", "MiB each time", ",.3f", scale=1 / MIB),
            text_column("metrics.text", "what to do"),
            Column("metrics.before_bytes", "MiB before", ",.1f", scale=1 / MIB),
            Column("metrics.after_bytes", "MiB after", ",.1f", scale=1 / MIB),
            Column("metrics.changed_bytes", "change, MiB", "+,.1f", scale=1 / MIB),
        ],
        headline=lambda records: "; ".join(device.summary() for device in explanation.devices),
        findings=lambda records: [for_terminal(device.advice()) for device in explanation.devices],
        parted_by="config.part",
        pictures={"memory.png": draw},
        reading="The peak is the moment at which most memory is allocated. A line is the innermost "
        "one of the program's own code that allocated a block, and the purpose is concluded from "
        "the stack and the life of the block. Reserved memory is what the allocator holds, whether "
        "a tensor uses it or not. A line grows if it allocates again and again and its memory is "
        "not released, in each of several steps. docs/learn/your_memory.md explains the tables.",
        prediction="None: this accounts for what the allocator recorded.",
    )


def result(records: Records) -> str:
    """Return the sentence to act on first, for the list of runs."""
    return records[0].metrics["text"]


def _panel(device: DeviceExplanation) -> Panel:
    """Return allocated and reserved memory over the recording of one device, with the peak."""
    first_event = max(device.peak_event, 0)  # a peak before the recording is drawn at its begin
    peak = Series("peak", [first_event], [device.peak_bytes / MIB])
    series = [_line("allocated", device.allocated, device.events)]
    if device.reserved_bytes is not None:
        series.append(_line("reserved", device.reserved, device.events))
    return Panel(
        f"device {device.device}: peak {size_text(device.peak_bytes)}",
        "number of the event",
        "MiB",
        [*series, peak],
        log_x=None,
    )


def _line(label: str, changes: Sequence[tuple[int, int]], events: int) -> Series:
    """Return a line of at most `SLICES` points, each the largest value of a slice of the events.

    Args:
        changes: (number of the event, bytes from then on), by event. -1 is before the recording.
        events: number of events.
    """
    width = -(-events // SLICES)
    held = 0
    position = 0
    x, y = [], []
    for start in range(0, events, width):
        values = []
        while position < len(changes) and changes[position][0] < start + width:
            held = changes[position][1]
            values.append(held)
            position += 1
        # Nothing changes in some slices. They hold what the one before ends with.
        x.append(start)
        y.append(max(values, default=held) / MIB)
    return Series(label, x, y, line="-")
