"""Which rows of a sweep are what, and the line that says what they were measured on."""

from collections.abc import Sequence

from distlab.measure.bandwidth import OPERATIONS
from distlab.report.record import Record

FIT, CONTENTION = "fit ", "contention "


def timings(records: Sequence[Record]) -> list[Record]:
    """The rows that are times of collectives."""
    return [record for record in records if record.variant in OPERATIONS]


def fits(records: Sequence[Record]) -> list[Record]:
    """The rows that are fits."""
    return [record for record in records if record.variant.startswith(FIT)]


def contention(records: Sequence[Record]) -> list[Record]:
    """The rows on contention."""
    return [record for record in records if record.variant.startswith(CONTENTION)]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the tables were measured on."""
    env, backends = records[0].environment, sorted({record.config["backend"] for record in records})
    ranks = sorted({record.config["world_size"] for record in records})
    return (
        f"Collectives on {', '.join(map(str, ranks))} ranks, {env['device_name']} ({', '.join(backends)}), "
        f"torch {env['torch']}"
    )
