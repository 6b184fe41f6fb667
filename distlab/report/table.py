"""Tables from records: one list of columns, rendered as text for a terminal, Markdown for a README, LaTeX
for a report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from distlab.report.record import Record

STYLES = {"text": "simple", "markdown": "pipe", "latex": "latex_raw"}


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: where the value stands in the record: ``"variant"``, ``"commit"``, ``"metrics.step_p50_ms"``,
            ``"config.batch"``; dots walk into nested dictionaries.
        title: the heading, with the unit.
        format: a format specification for numbers (``".1f"``, ``",d"``) or a function value → text.
        scale: numbers are multiplied by it first; ``1 / 2**30`` shows bytes as GiB.
        missing: shown for None and for an entry that the record lacks.
        derived: record → value for a record that lacks it, such as one written before there was such a metric.
        note: record → text behind a number, such as `` tie``; empty for none.
        align: ``"left"`` or ``"right"``; None puts ``variant`` and ``experiment`` left and everything else
            right.
    """

    key: str
    title: str
    format: str | Callable[[Any], str] = ""
    scale: float = 1
    missing: str = "n/a"
    align: str | None = None
    derived: Callable[[Record], Any] = lambda record: None
    note: Callable[[Record], str] = lambda record: ""

    def __post_init__(self) -> None:
        roots = ("experiment", "variant", "commit", "config", "metrics", "environment")
        root, _, rest = self.key.partition(".")
        if root not in roots or (root in roots[3:]) != bool(rest):
            raise ValueError(
                f"column key {self.key!r} points at nothing: use 'experiment', 'variant', 'commit', "
                "'config.NAME', 'metrics.NAME' or 'environment.NAME'"
            )
        if self.align not in (None, "left", "right"):
            raise ValueError(f"align must be 'left', 'right' or None, got {self.align!r}")

    @property
    def stands_left(self) -> bool:
        """Whether its cells are aligned left."""
        return (self.align or ("left" if self.key in ("variant", "experiment") else "right")) == "left"

    def value(self, record: Record) -> Any:
        """What the record holds there, or what is derived from it, not scaled; None if nothing."""
        value: Any = record
        for name in self.key.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        return self.derived(record) if value is None else value

    def text(self, record: Record) -> str:
        """The cell of ``record``, not escaped. Text such as ``"OOM"`` is shown as it is."""
        value = self.value(record)
        if value is None:
            return self.missing
        if isinstance(value, str | bool):
            return str(value)
        number = self.format(value) if callable(self.format) else format(self._scaled(value), self.format)
        return number + self.note(record)

    def _scaled(self, value: Any) -> Any:
        return value if self.scale == 1 else value * self.scale


def render(records: Sequence[Record], columns: Sequence[Column], style: str = "text") -> str:
    """One table, one row per record in the given order.

    Args:
        style: ``"text"``, ``"markdown"`` (GitHub's pipes) or ``"latex"`` (a ``tabular`` that compiles with
            pdflatex).

    Raises:
        ValueError: an unknown style, no columns, or a format that does not fit the value (names the column).
    """
    if style not in STYLES:
        raise ValueError(f"unknown table style {style!r}: use one of {', '.join(map(repr, STYLES))}")
    if not columns:
        raise ValueError("a table needs at least one column")
    escape = {"text": str, "markdown": _escape_markdown, "latex": escape_latex}[style]
    rows = [[escape(_cell(column, record)) for column in columns] for record in records]
    aligns = ["left" if column.stands_left else "right" for column in columns]
    return tabulate(
        rows,
        headers=[escape(column.title) for column in columns],
        tablefmt=STYLES[style],
        disable_numparse=True,  # cells are formatted already; tabulate must not turn "1.50" into 1.5
        colalign=aligns if rows else None,
    )


def render_for_terminal(records: Sequence[Record], columns: Sequence[Column], width: int = 100) -> str:
    """The table in at most `width` characters: columns that do not fit are left out from the right."""
    for count in range(len(columns), 0, -1):
        text = render(records, columns[:count])
        if max(map(len, text.splitlines())) <= width or count == 1:
            more = len(columns) - count
            return text + (f"\n{more} more columns are in the page." if more else "")
    return ""


def _cell(column: Column, record: Record) -> str:
    try:
        return column.text(record)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {column.key!r} of variant {record.variant!r}: {error}") from error


def _escape_markdown(text: str) -> str:
    for character in "\\|*<`":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())  # a line break would end the row


# fmt: off
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#",
    "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "−": "$-$", "×": r"$\times$", "±": r"$\pm$", "≤": r"$\leq$",
    "≥": r"$\geq$", "≈": r"$\approx$", "∞": r"$\infty$", "→": r"$\rightarrow$", "·": r"$\cdot$",
    "Δ": r"$\Delta$", "µ": r"$\mu$", "μ": r"$\mu$", "²": r"$^2$", "³": r"$^3$", "–": "--", "—": "---",
    "…": r"\ldots{}",
}
# fmt: on


def escape_latex(text: str) -> str:
    """``text`` with LaTeX's special characters escaped and the usual mathematical signs put into math mode.

    One pass over the characters, so that a replacement is never escaped again.
    """
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
