"""The result of an examination, as a table, JSON, Markdown or a line of CSV."""

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from distlab.text import for_markdown

HOLDS, BROKEN, REFUSED = "holds", "BROKEN", "refuses"
NOT_HANDED_IN, NOT_EXAMINED = "not handed in", "not examined"
WIDTH = 100  # columns of a terminal
BEYOND_NOTE = "* beyond what handouts ask for; real training needs it"


@dataclass(frozen=True)
class Row:
    """An invariant of one part.

    Attributes:
        part: name of the part.
        invariant: what must hold.
        status: `holds`, `BROKEN`, `refuses` (an error instead of a wrong result, where that is
            accepted), `not handed in` or `not examined`.
        ranks: number of ranks on which it broke, or all numbers that were examined.
        input: what was run, in one line.
        expected, seen: what must hold and what happened, where it is broken.
        is_beyond: True for what handouts do not ask for.
    """

    part: str
    invariant: str
    status: str
    ranks: str = ""
    input: str = ""
    expected: str = ""
    seen: str = ""
    is_beyond: bool = False


@dataclass(repr=False)
class Report:
    """Result of the examination of one submission.

    Attributes:
        folder: path of the submission.
        rows: invariants, by part.
        seconds: seconds that the examination took.
        timing: table of `--time`, as text.
        failure: why nothing could be examined, as a sentence. There are no rows then.
    """

    folder: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    timing: str = ""
    failure: str = ""

    @property
    def is_right(self) -> bool:
        """True if something was handed in and nothing is broken."""
        counts = self.counts()
        # A submission in which nothing was handed in has nothing broken either, and is not right.
        return counts[BROKEN] == 0 and counts[HOLDS] > 0

    def counts(self) -> Counter:
        """Return status → number of rows."""
        return Counter(row.status for row in self.rows)

    def parts(self) -> list[str]:
        """Return the names of the parts, in the order of the rows."""
        return list(dict.fromkeys(row.part for row in self.rows))

    def of_part(self, part: str) -> list[Row]:
        """Return the rows of one part."""
        return [row for row in self.rows if row.part == part]

    def summary(self) -> str:
        """Return one line for all parts."""
        if self.failure:
            return self.failure
        counts = self.counts()
        text = f"{counts[HOLDS]} invariants hold, {counts[BROKEN]} are broken"
        if counts[REFUSED]:
            text += f", {counts[REFUSED]} are refused with an error"
        if counts[NOT_EXAMINED]:
            text += f", {counts[NOT_EXAMINED]} were not examined"
        missing = [
            part
            for part in self.parts()
            if all(row.status == NOT_HANDED_IN for row in self.of_part(part))
        ]
        if missing:
            text += f"; not handed in: {', '.join(missing)}"
        return f"{text} ({self.seconds:.0f} s)"

    def __str__(self) -> str:
        """Return the terminal's form: a line per part, and the rows that do not hold."""
        first = f"{self.folder}: {self.summary()}"
        if self.failure:
            return first
        lines = [first, ""]
        for part in self.parts():
            rows = self.of_part(part)
            if rows[0].status == NOT_HANDED_IN:
                lines.append(f"{part:<18} not handed in: {rows[0].seen}")
                continue
            held = sum(row.status == HOLDS for row in rows)
            lines.append(f"{part:<18} {held} of {len(rows)} hold")
            for row in rows:
                if row.status not in (HOLDS, NOT_EXAMINED):
                    lines += _lines_of(row)
            reasons = Counter(row.seen for row in rows if row.status == NOT_EXAMINED)
            for reason, count in reasons.items():
                lines += _wrapped(f"  {NOT_EXAMINED:<13} {count} more, ", reason)
        if any(row.is_beyond and row.status != HOLDS for row in self.rows):
            lines += ["", BEYOND_NOTE]
        if self.timing:
            lines += ["", self.timing]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)  # pytest shows the repr of what an assertion holds

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "folder": self.folder,
            "is_right": self.is_right,
            "failure": self.failure,
            "seconds": round(self.seconds, 1),
            "counts": dict(self.counts()),
            "rows": [asdict(row) for row in self.rows],
            "timing": self.timing,
        }

    def markdown(self) -> str:
        """Return the report for a comment on a pull request."""
        # The name tells reports apart that are printed one after the other.
        title = f"**{for_markdown(self.folder)}: {for_markdown(self.summary())}**"
        if self.failure:
            return title
        lines = [title, ""]
        lines += ["| part | invariant | | input | expected | seen |", "|---|---|---|---|---|---|"]
        for row in self.rows:
            if row.status == NOT_HANDED_IN:
                continue
            cells = [row.part, row.invariant, row.status, row.input, row.expected, row.seen]
            lines.append("| " + " | ".join(for_markdown(cell) for cell in cells) + " |")
        if self.timing:
            lines += ["", "```", self.timing, "```"]
        return "\n".join(lines)

    def csv_row(self) -> dict[str, Any]:
        """Return one row for many submissions: counts for each part, and what is broken.

        Where nothing could be examined, `broken` says why.
        """
        row: dict[str, Any] = {"folder": self.folder, "seconds": round(self.seconds, 1)}
        for part in self.parts():
            rows = self.of_part(part)
            if rows[0].status == NOT_HANDED_IN:
                row[part] = NOT_HANDED_IN
            else:
                # An accepted error counts for the student. A row that was not examined does not.
                right = sum(each.status in (HOLDS, REFUSED) for each in rows)
                row[part] = f"{right}/{len(rows)}"
        broken = [f"{each.part}: {each.invariant}" for each in self.rows if each.status == BROKEN]
        row["broken"] = self.failure or "; ".join(broken)
        return row


def _lines_of(row: Row) -> list[str]:
    """Return the lines of one row of the terminal's table."""
    mark = "*" if row.is_beyond else ""
    lines = [f"  {row.status:<13} {row.invariant}{mark}"]
    ranks = f"{row.ranks}, " if row.ranks else ""
    details = [("input", f"{ranks}{row.input}"), ("expected", row.expected), ("seen", row.seen)]
    for title, text in details:
        if text:
            lines += _wrapped(f"{'':16}{title + ':':<10}", text)
    return lines


def _wrapped(begin: str, text: str) -> list[str]:
    """Return lines of a terminal's width that begin with `begin`, or are indented as far."""
    indent = " " * min(len(begin), 26)
    return textwrap.wrap(text, WIDTH, initial_indent=begin, subsequent_indent=indent)
