"""Records and the view of an examination, for `report.html`."""

from collections.abc import Iterator

from distlab.grade.report import (
    BEYOND_NOTE,
    BROKEN,
    HOLDS,
    NOT_EXAMINED,
    NOT_HANDED_IN,
    REFUSED,
    Report,
    Row,
)
from distlab.report import Column, Metrics, Record, Records, View, commit, environment, text_column
from distlab.text import for_terminal

NAME = "grade"
PARTS = "parts"
# Broken invariants that have a sentence above the tables. The tables have all of them.
MOST_SENTENCES = 4


def records_of(report: Report, device: str) -> list[Record]:
    """Return the rows of all tables of the page.

    Args:
        device: `cpu` or `cuda`.
    """
    where = environment(device)
    code = commit()
    # A name and a message may hold anything, also characters that no file in UTF-8 can have.
    submission = for_terminal(report.folder)
    found = []
    for table, name, metrics in _rows(report):
        config = {"submission": submission, "device": device, "part": table}
        found.append(Record(NAME, name, config, metrics, where, code))
    return found


def _rows(report: Report) -> Iterator[tuple[str, str, Metrics]]:
    """Yield (table, name of the row, metrics): a row for each part, then the invariants by part."""
    if report.failure:
        # A page has a row at least.
        yield PARTS, "all parts", {"note": for_terminal(report.failure)}
        return
    examined = []
    for part in report.parts():
        rows = report.of_part(part)
        if rows[0].status == NOT_HANDED_IN:
            note = f"{NOT_HANDED_IN}: {for_terminal(rows[0].seen)}"
            yield PARTS, part, {"note": note}
            continue
        examined.append(part)
        statuses = [row.status for row in rows]
        counts = {
            "holds": statuses.count(HOLDS),
            "broken": statuses.count(BROKEN),
            "refused": statuses.count(REFUSED),
            "not_examined": statuses.count(NOT_EXAMINED),
            "not_handed_in": statuses.count(NOT_HANDED_IN),
        }
        yield PARTS, part, counts
    for part in examined:
        for row in report.of_part(part):
            yield part, _name(row), _verdict(row)


def _name(row: Row) -> str:
    """Return the invariant, with a star if handouts do not ask for it."""
    return f"{row.invariant}*" if row.is_beyond else row.invariant


def _verdict(row: Row) -> Metrics:
    """Return the verdict and what was seen. Texts that a row does not have are None."""
    return {
        "verdict": row.status,
        "ranks": row.ranks or None,
        "input": row.input or None,
        "expected": row.expected or None,
        "seen": for_terminal(row.seen) or None,
    }


def page_view(report: Report) -> View:
    """Return the view that shows `records_of`."""
    return View(
        name=NAME,
        question="Which invariants does this submission keep?",
        columns=[
            Column("variant", ""),
            Column("metrics.holds", "hold", missing=""),
            Column("metrics.broken", "broken", missing=""),
            Column("metrics.refused", "refused", missing=""),
            Column("metrics.not_examined", "not examined", missing=""),
            Column("metrics.not_handed_in", "not handed in", missing=""),
            text_column("metrics.note", "note", missing=""),
            text_column("metrics.verdict", "verdict"),
            text_column("metrics.ranks", "ranks", missing=""),
            text_column("metrics.input", "input", missing=""),
            text_column("metrics.expected", "expected", missing=""),
            text_column("metrics.seen", "seen", missing=""),
        ],
        headline=lambda records: (
            f"{records[0].config['submission']}, on {records[0].environment['device_name']}"
        ),
        findings=lambda records: _sentences(report),
        parted_by="config.part",
        reading=f"{HOLDS} and {BROKEN} are verdicts. {REFUSED}: an error of the submission's own, "
        f"where a wrong result would be worse. {NOT_EXAMINED}: a row that would repeat another "
        f"one. {NOT_HANDED_IN}: a function is missing, raises NotImplementedError or returns "
        "None.\n\n"
        f"{BEYOND_NOTE}. docs/learn/grade.md says what is examined.",
        prediction="None: invariants hold or do not.",
    )


def result(records: Records) -> str:
    """Return the numbers of invariants that hold and are broken, for the list of runs."""
    if not any("holds" in record.metrics for record in records):
        return "nothing was examined"
    holds = sum(record.metrics.get("holds", 0) for record in records)
    broken = sum(record.metrics.get("broken", 0) for record in records)
    return f"{holds} hold, {broken} broken"


def _sentences(report: Report) -> list[str]:
    """Return the summary, and then the first broken invariants."""
    broken = [row for row in report.rows if row.status == BROKEN]
    # The page obeys no characters that a message of the submission's may have.
    sentences = [for_terminal(report.summary())]
    for row in broken[:MOST_SENTENCES]:
        # A page shows what begins with a word in capitals and a colon in red.
        seen = for_terminal(row.seen)
        sentences.append(f"{BROKEN}: {row.part}, {_name(row)}. Seen: {seen}")
    return sentences
