"""What the rows of all parts have in common: their form, their labels, the headline, columns of one unit."""

from collections.abc import Sequence
from typing import Any

from distlab.bench.subject import described
from distlab.report.record import Record
from distlab.report.table import Column

Rows = list[tuple[str, dict[str, Any]]]  # variant and metrics


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    return described([record.config for record in records], records[0].environment)


def of_each(records: Sequence[Record]) -> dict[str, Record]:
    """The first record of every combination."""
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record.config["label"], record)
    return found


def prefix(label: str) -> str:
    """What stands before the rows of the trial with this label."""
    return f"{label}: " if label else ""


def ms_column(metric: str, title: str) -> Column:
    """A column of milliseconds."""
    return Column(f"metrics.{metric}", title, ".2f")


def mib_column(metric: str, title: str) -> Column:
    """A column of MiB, from bytes."""
    return Column(f"metrics.{metric}", title, ",.1f", scale=2**-20)
