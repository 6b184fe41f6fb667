"""Tables from records: one list of columns, rendered as text for a terminal or as Markdown."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tabulate import tabulate

from distlab.report.record import Record, Records
from distlab.text import for_markdown, for_terminal

K = TypeVar("K")
HEADING_PADDING = 2  # which tabulate adds to a heading, and not to a cell
BETWEEN_COLUMNS = 2
LONGEST_CELL = 40  # in a terminal


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: place of the value in the record: ``"variant"``, ``"commit"``,
            ``"metrics.step_p50_ms"``, ``"config.batch"``. Dots walk into nested dictionaries.
        title: heading, with the unit.
        format: format specification for numbers (``".1f"``, ``",d"``), or a function value → text.
        scale: factor for numbers. ``1 / 2**30`` shows bytes as GiB.
        missing: text for None and for an entry that the record lacks.
        derived: function from record to value, for a record that lacks it, such as one written
            before there was such a metric.
        note: function from record to text after a number, such as `` tie``. Empty for none.
        optional: True to leave it out of a table in which no record has it.
        about: sentence that describes it, which a page shows.
        align: ``"left"``, or None, which puts ``variant`` left and everything else right.
    """

    key: str
    title: str
    format: str | Callable[[Any], str] = ""
    scale: float = 1
    missing: str = "n/a"
    align: str | None = None
    derived: Callable[[Record], Any] = lambda record: None
    note: Callable[[Record], str] = lambda record: ""
    optional: bool = False
    about: str = ""

    @property
    def name(self) -> str:
        """The end of the key, by which a column is asked for."""
        return self.key.rpartition(".")[2]

    def is_empty(self, records: Records) -> bool:
        """Return whether none of the records has a value."""
        return all(self.value(record) is None for record in records)

    @property
    def stands_left(self) -> bool:
        """Return whether its cells are aligned left."""
        return self.align == "left" or self.key == "variant"

    def value(self, record: Record) -> Any:
        """Return the record's value, or the derived one, without scale. None if there is none."""
        value: Any = record
        for name in self.key.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        return self.derived(record) if value is None else value

    def text(self, record: Record) -> str:
        """Return the cell of ``record``, not escaped. Text such as ``"OOM"`` is shown as it is."""
        value = self.value(record)
        if value is None:
            return self.missing
        if isinstance(value, str | bool):
            return str(value)
        if callable(self.format):
            return self.format(value) + self.note(record)
        scaled = value * self.scale
        text = format(scaled, self.format)
        # nothing that was counted is shown as none
        if self.scale != 1 and value and not text.strip("+-0."):
            text = f"{scaled:.1g}"
        return text + self.note(record)


text_column = partial(Column, align="left")  # of words
sparse_column = partial(Column, missing="")  # empty in rows that it is not of
gib_column = partial(Column, scale=2**-30)  # of bytes, in GiB


def render(records: Records, columns: Sequence[Column], style: str = "text") -> str:
    """One table, one row per record in the given order.

    Args:
        style: ``"text"`` or ``"markdown"`` (GitHub's pipes).

    Raises:
        ValueError: no columns, or a format that does not fit the value (names the column).
    """

    def written(text: str) -> str:
        # A line break would end the row.
        return for_markdown(text) if style == "markdown" else for_terminal(" ".join(text.split()))

    rows = [[written(_cell(column, record)) for column in columns] for record in records]
    titles = [written(column.title) for column in columns]
    return _tabulate(rows, columns, titles, "pipe" if style == "markdown" else "simple")


def render_for_terminal(records: Records, columns: Sequence[Column], width: int = 100) -> str:
    """Render a text table at most `width` characters wide.

    If it does not fit, headings are broken into lines. Then columns are left out from the right,
    where the least important ones are, and a line below says how many. Cells longer than 40
    characters are cut.

    Raises:
        ValueError: no columns, or a format that does not fit the value (names the column).
    """
    cells = [
        [for_terminal(" ".join(_cell(column, record).split())) for column in columns]
        for record in records
    ]
    rows = [
        [c if len(c) <= LONGEST_CELL else c[: LONGEST_CELL - 1] + "…" for c in row] for row in cells
    ]
    titles = [column.title for column in columns]
    if _width(_tabulate(rows, columns, titles)) > width:
        titles = _broken_titles(titles, rows, width)
    for shown in range(len(columns), 0, -1):
        text = _tabulate([row[:shown] for row in rows], columns[:shown], titles[:shown])
        if _width(text) <= width:
            break
    hidden = len(columns) - shown
    return text + (f"\n{hidden} more column{'s' * (hidden > 1)} in the page" if hidden else "")


def _broken_titles(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Break headings into lines, into no more lines than the table's width asks for.

    Every column begins as narrow as its cells and the longest word of its heading. Then the room
    that is left goes to the columns whose headings have the most lines.
    """
    longest_words = [max(title.split() or [""], key=len)[:LONGEST_CELL] for title in titles]
    lengths = [max(1, *map(len, column)) for column in zip(longest_words, *rows, strict=True)]
    cells = [max([0, *map(len, column)]) for column in zip(*rows, strict=True)] or [0] * len(titles)

    def lines_of(column: int, length: int) -> list[str]:
        return textwrap.wrap(titles[column], length) or [""]

    def width_of(column: int, length: int) -> int:
        heading = max(map(len, lines_of(column, length))) + HEADING_PADDING
        return max(cells[column], heading)

    widths = [width_of(column, length) for column, length in enumerate(lengths)]
    room = width - sum(widths) - BETWEEN_COLUMNS * (len(widths) - 1)
    fixed = set()  # columns whose headings cannot lose a line in the room that is left
    while len(fixed) < len(titles):
        column = max(
            (each for each in range(len(titles)) if each not in fixed),
            key=lambda each: len(lines_of(each, lengths[each])),
        )
        before = len(lines_of(column, lengths[column]))
        fewer = [
            length
            for length in range(lengths[column] + 1, len(titles[column]) + 1)
            if len(lines_of(column, length)) < before
        ]
        more = width_of(column, fewer[0]) - widths[column] if fewer else 0
        if not fewer or more > room:
            fixed.add(column)
            continue
        room -= more
        lengths[column] = fewer[0]
        widths[column] += more
    broken = [lines_of(column, length) for column, length in enumerate(lengths)]
    height = max(map(len, broken))
    return ["\n".join([""] * (height - len(lines)) + lines) for lines in broken]


def _tabulate(
    rows: Sequence[Sequence[str]],
    columns: Sequence[Column],
    titles: Sequence[str],
    tablefmt: str = "simple",
) -> str:
    if not columns:
        raise ValueError("a table needs at least one column")
    return tabulate(
        rows,
        headers=titles,
        tablefmt=tablefmt,
        # cells are formatted already; tabulate must not turn "1.50" into 1.5
        disable_numparse=True,
        colalign=["left" if column.stands_left else "right" for column in columns]
        if rows
        else None,
    )


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def _cell(column: Column, record: Record) -> str:
    try:
        return column.text(record)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {column.key!r} of variant {record.variant!r}: {error}") from error


def is_number(value: Any) -> bool:
    """Return whether a metric is a finite number, and not None, a text such as `OOM` or a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def grouped(records: Records, key: Callable[[Record], K]) -> dict[K, list[Record]]:
    """Group the records by key, in order of first appearance."""
    found = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def shared_options(records: Records) -> dict[str, Any]:
    """Return the options that are the same in all records."""
    options = records[0].config.items()
    return {
        name: value
        for name, value in options
        if all(record.config.get(name) == value for record in records)
    }


def by_machine(records: Records) -> dict[str, list[Record]]:
    """Group the records by machine, in order of first appearance.

    A machine is named by its device, and by torch's version if one kind of device appears with
    several. No line and no bar of a picture mixes machines.
    """
    found = grouped(
        records,
        lambda r: (
            str(r.environment.get("device_name") or "unknown device"),
            str(r.environment.get("torch") or "unknown"),
        ),
    )
    devices = [device for device, _ in found]
    return {
        device if devices.count(device) == 1 else f"{device}, torch {version}": group
        for (device, version), group in found.items()
    }
