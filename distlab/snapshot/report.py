"""The explanation of a snapshot: what to act on first, the peak, unused memory and growth."""

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from distlab.snapshot.fragmentation import FREE, ROUNDED, Unused, unused
from distlab.snapshot.growth import Growth, growing
from distlab.snapshot.history import History, histories
from distlab.snapshot.purposes import PURPOSES, by_purpose, by_site
from distlab.snapshot.reader import Snapshot
from distlab.text import for_terminal

KIB, MIB, GIB = 2**10, 2**20, 2**30
WIDTH = 100  # columns of a terminal
LINES = 10  # most rows of the table of source lines
SITE_WIDTH = 48
MUCH = 0.15  # part of the reserved memory whose waste comes first
# Part of the peak from which growth comes first. A line that adds less in the recorded steps needs
# thousands of them to matter.
GROWTH_SHARE = 0.001
RECORD = 'torch.cuda.memory._record_memory_history(stacks="python")'


@dataclass(frozen=True)
class Finding:
    """Something to act on.

    Attributes:
        kind: `growth`, `unused memory` or `the peak`.
        bytes: bytes that it holds.
        sentence: what happens where, and what to do.
    """

    kind: str
    bytes: int
    sentence: str


@dataclass(frozen=True)
class DeviceExplanation:
    """Explanation of one device's memory.

    Attributes:
        device: number of the device.
        events: number of recorded events; 0 if the program recorded none.
        peak_event: number of the event of the peak.
        peak_bytes: largest number of allocated bytes in the recording.
        reserved_bytes: bytes that were reserved at that time. None if they are not known.
        end_bytes: allocated bytes at the end.
        end_reserved_bytes: bytes that are reserved at the end.
        purposes: purpose → bytes at the peak.
        sites: (line, purpose, bytes, blocks) at the peak, the largest first.
        unused: reserved memory that no tensor uses at the end.
        growth: lines whose memory grows.
        allocated: (number of the event, allocated bytes from then on), by event.
        reserved: (number of the event, reserved bytes from then on), by event.
        has_stacks: False if the program has recorded events without their stacks.
    """

    device: int
    events: int
    peak_event: int
    peak_bytes: int
    reserved_bytes: int | None
    end_bytes: int
    end_reserved_bytes: int
    purposes: Counter
    sites: list[tuple[str, str, int, int]]
    unused: list[Unused]
    growth: list[Growth]
    allocated: list[tuple[int, int]]
    reserved: list[tuple[int, int]]
    has_stacks: bool

    def summary(self) -> str:
        """Return the peak in one line."""
        when = f"of {self.events:,} recorded events"
        if self.events == 0:
            when = "when the snapshot was taken (nothing was recorded before)"
        reserved = "what was reserved then is not recorded"
        if self.reserved_bytes is not None:
            reserved = f"{size_text(self.reserved_bytes)} reserved then"
        peak = size_text(self.peak_bytes)
        return f"device {self.device}: peak {peak} allocated {when}, {reserved}"

    def findings(self) -> list[Finding]:
        """Return what to act on, the most urgent first."""
        fast, slow = [], []
        for each in self.growth:
            sentence = (
                f"Memory grows at {each.site}: {size_text(each.bytes_per_step)} each of "
                f"{each.steps} times, {size_text(each.bytes)} in all, and none of it is released. "
                "Look for a list, a graph or a cache that keeps it."
            )
            is_fast = each.bytes >= GROWTH_SHARE * self.peak_bytes
            (fast if is_fast else slow).append(Finding("growth", each.bytes, sentence))
        found = fast
        wasted = [each for each in self.unused if each.kind not in (FREE, ROUNDED)]
        if wasted and sum(each.bytes for each in wasted) > MUCH * self.end_reserved_bytes:
            first = wasted[0]
            part = 100 * first.bytes / self.end_reserved_bytes
            sentence = (
                f"{size_text(first.bytes)}, {part:.0f} % of what is reserved, are {first.kind} "
                f"({first.places} of them). {first.remedy[0].upper()}{first.remedy[1:]}."
            )
            found.append(Finding("unused memory", first.bytes, sentence))
        if not self.has_stacks:
            sentence = (
                f"The peak is {size_text(self.peak_bytes)}. What holds it is not known, because "
                f"the recording has no stacks. Record it with {RECORD}."
            )
            found.append(Finding("the peak", self.peak_bytes, sentence))
        elif self.sites:
            site, purpose, size, blocks = self.sites[0]
            part = 100 * size / max(self.peak_bytes, 1)
            sentence = (
                f"At the peak of {size_text(self.peak_bytes)}, the most is held by {site}: "
                f"{size_text(size)} in {blocks} block{'' if blocks == 1 else 's'}, {part:.0f} % "
                f"({purpose})."
            )
            found.append(Finding("the peak", size, sentence))
        return found + slow

    def advice(self) -> str:
        """Return the sentence to act on first."""
        found = self.findings()
        if not found:
            return "Nothing is allocated."
        return found[0].sentence


@dataclass(frozen=True)
class Explanation:
    """Explanation of a snapshot, for each device that has memory."""

    devices: list[DeviceExplanation]

    def __str__(self) -> str:
        return for_terminal("\n\n".join(_text(device) for device in self.devices))

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain values, for JSON."""
        return {"devices": [_plain(device) for device in self.devices]}


def explain(snapshot: Snapshot) -> Explanation:
    """Explain a snapshot.

    Raises:
        ValueError: it has no memory of any device.
    """
    found = [_explained(history) for history in histories(snapshot)]
    if not found:
        raise ValueError("the snapshot holds no memory: no segment, and no recorded event")
    return Explanation(found)


def _explained(history: History) -> DeviceExplanation:
    event, peak_bytes = history.peak()
    at_end = [block for block in history.blocks if block.is_held]
    # Reserved bytes are counted back from the end. If the recording misses changes of segments,
    # they come out as less than what is allocated, which cannot be.
    reserved_bytes = history.reserved_at(event)
    is_known = reserved_bytes >= peak_bytes
    return DeviceExplanation(
        history.device,
        history.count,
        event,
        peak_bytes,
        reserved_bytes if is_known else None,
        sum(block.bytes for block in at_end),
        sum(segment["total_size"] for segment in history.segments),
        by_purpose(history, event),
        by_site(history, event),
        unused(history),
        growing(history),
        history.allocated(),
        history.reserved if is_known else [],
        history.has_stacks,
    )


def _text(device: DeviceExplanation) -> str:
    """Return the terminal's form."""
    parts = [
        textwrap.fill(device.advice(), WIDTH),
        textwrap.fill(device.summary(), WIDTH),
        _purpose_table(device),
        _site_table(device),
    ]
    if device.unused:
        parts.append(_unused_table(device))
    if device.growth:
        parts.append(_growth_table(device))
    return "\n\n".join(parts)


def _purpose_table(device: DeviceExplanation) -> str:
    rows = []
    for purpose in PURPOSES:
        size = device.purposes[purpose]
        if size:
            rows.append((purpose, f"{size / MIB:,.1f}", f"{100 * size / device.peak_bytes:.0f}"))
    titles = ("held at the peak", "MiB", "%")
    return tabulate(rows, titles, disable_numparse=True, colalign=("left", "right", "right"))


def _site_table(device: DeviceExplanation) -> str:
    rows = []
    for site, purpose, size, blocks in device.sites[:LINES]:
        rows.append((site[-SITE_WIDTH:], purpose, f"{size / MIB:,.1f}", blocks))
    titles = ("line", "purpose", "MiB", "blocks")
    return tabulate(
        rows, titles, disable_numparse=True, colalign=("left", "left", "right", "right")
    )


def _unused_table(device: DeviceExplanation) -> str:
    rows = []
    for each in device.unused:
        size, largest = f"{each.bytes / MIB:,.1f}", f"{each.largest / MIB:,.1f}"
        rows.append((each.kind, size, each.places, largest))
    titles = (
        f"unused of {size_text(device.end_reserved_bytes)} reserved",
        "MiB",
        "places",
        "largest",
    )
    table = tabulate(
        rows, titles, disable_numparse=True, colalign=("left", "right", "right", "right")
    )
    advice = []
    for each in device.unused:
        if each.bytes > MIB:
            advice.append(textwrap.fill(f"{each.kind}: {each.remedy}", WIDTH))
    return "\n".join([table, *advice])


def _growth_table(device: DeviceExplanation) -> str:
    rows = []
    for each in device.growth[:LINES]:
        per_step = size_text(each.bytes_per_step)
        rows.append((each.site[-SITE_WIDTH:], per_step, each.steps, size_text(each.bytes)))
    titles = ("memory grows at", "each time", "times", "in all")
    return tabulate(
        rows, titles, disable_numparse=True, colalign=("left", "right", "right", "right")
    )


def _plain(device: DeviceExplanation) -> dict[str, Any]:
    sites = []
    for site, purpose, size, blocks in device.sites:
        sites.append({"line": site, "purpose": purpose, "bytes": size, "blocks": blocks})
    return {
        "device": device.device,
        "advice": device.advice(),
        "events": device.events,
        "peak_bytes": device.peak_bytes,
        "reserved_bytes": device.reserved_bytes,
        "end_bytes": device.end_bytes,
        "end_reserved_bytes": device.end_reserved_bytes,
        "purposes": dict(device.purposes),
        "lines": sites,
        "unused": [
            {"kind": each.kind, "bytes": each.bytes, "places": each.places, "remedy": each.remedy}
            for each in device.unused
        ],
        "growth": [
            {"line": each.site, "bytes": each.bytes, "times": each.steps} for each in device.growth
        ],
    }


@dataclass(frozen=True)
class Change:
    """Memory of one purpose or line in two snapshots of a program, at their peaks.

    Attributes:
        device: number of the device.
        of: `peak`, `purpose` or `line`.
        name: what holds it.
        before_bytes, after_bytes: bytes in the earlier and in the later snapshot.
    """

    device: int
    of: str
    name: str
    before_bytes: int
    after_bytes: int

    @property
    def bytes(self) -> int:
        """Growth from the earlier to the later snapshot, in bytes."""
        return self.after_bytes - self.before_bytes


def changes(before: Explanation, after: Explanation) -> list[Change]:
    """Return what changed between two snapshots of one program.

    For each device these are its peaks, its purposes, and the lines that hold another number of
    bytes, the largest changes first. A device that one snapshot lacks held 0 bytes there.
    """
    earlier = {device.device: device for device in before.devices}
    later = {device.device: device for device in after.devices}
    found = []
    for number in sorted(earlier.keys() | later.keys()):
        found += _changes(number, earlier.get(number), later.get(number))
    return found


def _changes(
    number: int, before: DeviceExplanation | None, after: DeviceExplanation | None
) -> list[Change]:
    """Return the changes of one device, where None is a device without memory."""
    both = (before, after)
    peaks = [device.peak_bytes if device else 0 for device in both]
    rows = [Change(number, "peak", "peak, allocated", *peaks)]
    reserved = []
    for device in both:
        size = device.reserved_bytes if device else 0
        if size is not None:
            reserved.append(size)
    if len(reserved) == 2:
        rows.append(Change(number, "peak", "peak, reserved", *reserved))
    for purpose in PURPOSES:
        sizes = [device.purposes[purpose] if device else 0 for device in both]
        if any(sizes):
            rows.append(Change(number, "purpose", purpose, *sizes))
    sites = []
    for device in both:
        rows_of_sites = device.sites if device else []
        sites.append({(site, purpose): size for site, purpose, size, _ in rows_of_sites})
    lines = []
    for key in sites[0].keys() | sites[1].keys():
        site, _ = key
        line = Change(number, "line", site, sites[0].get(key, 0), sites[1].get(key, 0))
        if line.bytes:
            lines.append(line)
    lines.sort(key=lambda line: (-abs(line.bytes), line.name))
    return rows + lines


def difference(before: Explanation, after: Explanation) -> str:
    """Return what changed between two snapshots of one program, as a table for each device."""
    found = changes(before, after)
    tables = []
    for number in dict.fromkeys(change.device for change in found):
        rows = [change for change in found if change.device == number]
        shown = [change for change in rows if change.of != "line"]
        # Less than half of the last digit that is shown would be a row without a change.
        lines = [row for row in rows if row.of == "line" and abs(row.bytes) >= MIB / 20]
        shown += lines[:LINES]
        tables.append(
            tabulate(
                [_row(change) for change in shown],
                (f"device {number}: at the peak", "MiB before", "MiB after", "change"),
                disable_numparse=True,
                colalign=("left", "right", "right", "right"),
            )
        )
    return "\n\n".join(tables)


def _row(change: Change) -> tuple[str, str, str, str]:
    """Return a row of the table. The end of a long path tells more than its beginning."""
    return (
        change.name[-SITE_WIDTH:],
        f"{change.before_bytes / MIB:,.1f}",
        f"{change.after_bytes / MIB:,.1f}",
        f"{change.bytes / MIB:+,.1f}",
    )


def size_text(size: float) -> str:
    """Return bytes in the unit in which they are not rounded to zero."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= MIB or size == 0:
        return f"{size / MIB:.1f} MiB"
    if size >= KIB:
        return f"{size / KIB:.1f} KiB"
    return f"{size:.0f} bytes"
