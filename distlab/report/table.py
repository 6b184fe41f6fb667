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
# All three in characters.
HEADING_PADDING = 2  # tabulate adds it to a heading, and not to a cell
BETWEEN_COLUMNS = 2
LONGEST_CELL = 40  # in a terminal


def _nothing_derived(record: Record) -> Any:
    """Return None: there is no value that could be derived."""
    return None


def _no_note(record: Record) -> str:
    """Return an empty note."""
    return ""


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
    derived: Callable[[Record], Any] = _nothing_derived
    note: Callable[[Record], str] = _no_note
    optional: bool = False
    about: str = ""

    @property
    def name(self) -> str:
        """Last part of the key, by which callers ask for a column."""
        return self.key.rpartition(".")[2]

    def is_empty(self, records: Records) -> bool:
        """Return whether none of the records has a value."""
        return all(self.value(record) is None for record in records)

    @property
    def stands_left(self) -> bool:
        """True if its cells are aligned left."""
        return self.align == "left" or self.key == "variant"

    def value(self, record: Record) -> Any:
        """Return the record's value, or the derived one, without scale. None if there is none."""
        value: Any = record
        for name in self.key.split("."):
            if isinstance(value, dict):
                # Environment, options and metrics are dictionaries. Everything else is an attribute
                # of the record.
                value = value.get(name)
            else:
                value = getattr(value, name, None)
        if value is None:
            return self.derived(record)
        return value

    def text(self, record: Record) -> str:
        """Return the cell of ``record``, not escaped. Text such as ``"OOM"`` is shown as it is.

        Raises:
            TypeError, ValueError: the format does not fit the value.
        """
        value = self.value(record)
        if value is None:
            return self.missing
        # A bool is an int to Python, so it must be found before numbers are.
        if isinstance(value, str | bool):
            return str(value)
        if callable(self.format):
            return self.format(value) + self.note(record)
        scaled = value * self.scale
        text = format(scaled, self.format)
        shows_only_zeros = not text.strip("+-0.")
        if self.scale != 1 and value and shows_only_zeros:
            # A few bytes in GiB would look like no bytes. One digit tells them apart.
            text = f"{scaled:.1g}"
        return text + self.note(record)


text_column = partial(Column, align="left")  # a column of words
sparse_column = partial(Column, missing="")  # a column that is empty in rows without the metric
gib_column = partial(Column, scale=2**-30)  # a column that shows bytes in GiB


def render(records: Records, columns: Sequence[Column], style: str = "text") -> str:
    """Render one table, with one row per record in the given order.

    Args:
        records: rows.
        columns: columns, from left to right.
        style: ``"text"`` or ``"markdown"`` (GitHub's pipes).

    Raises:
        ValueError: no columns, or a format that does not fit the value (names the column).
    """

    is_markdown = style == "markdown"

    def written(text: str) -> str:
        if is_markdown:
            return for_markdown(text)
        return for_terminal(" ".join(text.split()))  # a line break would end the row

    rows = []
    for record in records:
        rows.append([written(_cell(column, record)) for column in columns])
    titles = [written(column.title) for column in columns]
    tablefmt = "pipe" if is_markdown else "simple"
    # Markdown pipes and terminal columns have the same cells.
    return _tabulate(rows, columns, titles, tablefmt)


def render_for_terminal(records: Records, columns: Sequence[Column], width: int = 100) -> str:
    """Render a text table at most `width` characters wide.

    If it does not fit, headings are broken into lines. Then columns are left out from the right,
    where the least important ones are, and a line below says how many. Cells longer than 40
    characters are cut.

    Args:
        records: rows.
        columns: columns, from left to right.
        width: characters. A table of one column may be wider.

    Raises:
        ValueError: no columns, or a format that does not fit the value (names the column).
    """
    rows = []
    for record in records:
        rows.append([_short_cell(column, record) for column in columns])
    titles = [column.title for column in columns]
    # Broken headings cost lines, so they are used only where the table is too wide.
    if _width(_tabulate(rows, columns, titles)) > width:
        titles = _broken_titles(titles, rows, width)
    # The first columns say most, so the last ones go first. A table keeps at least one.
    for shown in range(len(columns), 0, -1):
        cut_rows = [row[:shown] for row in rows]
        text = _tabulate(cut_rows, columns[:shown], titles[:shown])
        if _width(text) <= width:
            break
    hidden = len(columns) - shown
    if hidden == 0:
        return text
    plural = "s" if hidden > 1 else ""
    return f"{text}\n{hidden} more column{plural} in the page"


def _short_cell(column: Column, record: Record) -> str:
    """Return a cell for a terminal: one line of at most `LONGEST_CELL` characters."""
    text = for_terminal(" ".join(_cell(column, record).split()))
    if len(text) <= LONGEST_CELL:
        return text
    # Names such as `package.module:function` differ at their end, and sentences at their beginning.
    if " " not in text:
        return "…" + text[1 - LONGEST_CELL :]
    return text[: LONGEST_CELL - 1] + "…"


def _broken_titles(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Break headings into lines, into no more lines than the table's width asks for.

    Every column begins as narrow as its cells and the longest word of its heading. Then the room
    that is left goes to the columns whose headings have the most lines.

    Args:
        titles: headings, one per column.
        rows: cells of each row as text, one per column.
        width: characters of the whole table.

    Returns:
        The headings with line breaks. All have the same number of lines, the first ones empty.
    """
    widest_cells = []  # characters of the widest cell of each column
    lengths = []  # largest number of characters of a line of each heading
    for number, title in enumerate(titles):
        widest_cell = max((len(row[number]) for row in rows), default=0)
        longest_word = max((len(word) for word in title.split()), default=0)
        widest_cells.append(widest_cell)
        lengths.append(max(1, widest_cell, min(longest_word, LONGEST_CELL)))

    def lines_of(column: int, length: int) -> list[str]:
        """Return the lines of a heading that is broken at `length` characters."""
        return textwrap.wrap(titles[column], length) or [""]

    def width_of(column: int, length: int) -> int:
        """Return the width of a column whose heading is broken at `length` characters."""
        longest_line = max(len(line) for line in lines_of(column, length))
        return max(widest_cells[column], longest_line + HEADING_PADDING)

    def with_fewer_lines(column: int) -> int | None:
        """Return the next length at which a heading has fewer lines. None if there is none."""
        count = len(lines_of(column, lengths[column]))
        for length in range(lengths[column] + 1, len(titles[column]) + 1):
            if len(lines_of(column, length)) < count:
                return length
        return None

    widths = [width_of(column, length) for column, length in enumerate(lengths)]
    # The room is negative where even the narrowest form is too wide.
    room = width - sum(widths) - BETWEEN_COLUMNS * (len(widths) - 1)
    open_columns = list(range(len(titles)))  # columns whose headings may still lose a line
    while open_columns:
        # The first of those with the most lines: the height of the heading depends on it.
        column = max(open_columns, key=lambda each: len(lines_of(each, lengths[each])))
        length = with_fewer_lines(column)
        if length is None:
            open_columns.remove(column)
            continue
        # The column grows only if the heading becomes wider than the cells.
        more = width_of(column, length) - widths[column]
        if more > room:
            open_columns.remove(column)
            continue
        room -= more
        lengths[column] = length
        widths[column] += more
    broken = [lines_of(column, length) for column, length in enumerate(lengths)]
    height = max(len(lines) for lines in broken)
    padded = []
    for lines in broken:
        above = [""] * (height - len(lines))  # so that headings stand next to the cells
        padded.append("\n".join(above + lines))
    return padded


def _tabulate(
    rows: Sequence[Sequence[str]],
    columns: Sequence[Column],
    titles: Sequence[str],
    tablefmt: str = "simple",
) -> str:
    """Return a table of formatted cells in a form of tabulate's.

    Raises:
        ValueError: no columns.
    """
    if not columns:
        raise ValueError("a table needs at least one column")
    alignment = None  # tabulate refuses one for a table without rows
    if rows:
        alignment = ["left" if column.stands_left else "right" for column in columns]
    return tabulate(
        rows,
        headers=titles,
        tablefmt=tablefmt,
        # cells are formatted already; tabulate must not turn "1.50" into 1.5
        disable_numparse=True,
        colalign=alignment,
    )


def _width(text: str) -> int:
    """Return the characters of the longest line."""
    return max(len(line) for line in text.splitlines())


def _cell(column: Column, record: Record) -> str:
    """Return the cell of a record.

    Raises:
        ValueError: the format does not fit the value. The message names column and row.
    """
    try:
        return column.text(record)
    except (TypeError, ValueError) as error:
        # The message names the place, since the format was written far from the value.
        raise ValueError(f"column {column.key!r} of variant {record.variant!r}: {error}") from error


def is_number(value: Any) -> bool:
    """Return whether a metric is a finite number, and not None, a text such as `OOM` or a bool."""
    if isinstance(value, bool):  # Python counts True and False among the integers
        return False
    # NaN and infinity are results, but nothing can be computed with them.
    return isinstance(value, int | float) and math.isfinite(value)


def grouped(records: Records, key: Callable[[Record], K]) -> dict[K, list[Record]]:
    """Group the records by key, in order of first appearance.

    Args:
        records: rows.
        key: function from a record to the key of its group.

    Returns:
        Key → records, in their order.
    """
    found: dict[K, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def shared_options(records: Records) -> dict[str, Any]:
    """Return the options that are the same in all records, of which there is at least one."""
    shared = {}
    for name, value in records[0].config.items():
        # An option that varies is shown in the table, and not above it.
        if all(record.config.get(name) == value for record in records):
            shared[name] = value
    return shared


def by_machine(records: Records) -> dict[str, list[Record]]:
    """Group the records by machine, in order of first appearance.

    A machine is named by its device, and by torch's version if one kind of device appears with
    several. No line and no bar of a picture mixes machines.

    Returns:
        Name of the machine → records, in their order.
    """
    found = grouped(records, _device_and_torch)
    devices = [device for device, _ in found]
    machines = {}
    for (device, version), group in found.items():
        has_one_version = devices.count(device) == 1
        name = device if has_one_version else f"{device}, torch {version}"
        machines[name] = group
    return machines


def _device_and_torch(record: Record) -> tuple[str, str]:
    """Return the names of a record's device and of its version of torch."""
    device = str(record.environment.get("device_name") or "unknown device")
    version = str(record.environment.get("torch") or "unknown")
    return device, version
