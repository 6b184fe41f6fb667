"""Records of several machines in one place: told apart, never mixed into one line or one bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from distlab.report.record import Record


def by_machine(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each machine, in order of first appearance, by the device's name; with torch's version where one
    kind of device appears with several.
    """
    versions: dict[str, set[str]] = {}
    for record in records:
        device, torch_version = _where(record)
        versions.setdefault(device, set()).add(torch_version)
    found: dict[str, list[Record]] = {}
    for record in records:
        device, torch_version = _where(record)
        name = device if len(versions[device]) == 1 else f"{device}, torch {torch_version}"
        found.setdefault(name, []).append(record)
    return found


def keyed_apart(records: Sequence[Record]) -> list[Record]:
    """The records in their order; where they come from several machines, each variant's name says from which."""
    machines = by_machine(records)
    if len(machines) < 2:
        return list(records)
    names = {id(record): name for name, group in machines.items() for record in group}
    return [
        dataclasses.replace(record, variant=f"{record.variant} [{names[id(record)]}]") for record in records
    ]


def _where(record: Record) -> tuple[str, str]:
    known = record.environment
    return str(known.get("device_name") or "unknown device"), str(known.get("torch") or "unknown")
