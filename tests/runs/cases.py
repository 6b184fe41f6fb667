"""Saved runs for the tests of the notebook."""

from distlab.report import Record, write_json

MACHINE = {"device_name": "NVIDIA H200", "device_count": 2, "torch": "2.11", "cuda": "13.0"}


def record(
    variant,
    step_ms,
    *,
    machine=MACHINE,
    commit="abcdef0123456789",
    date=None,
    config=None,
    **metrics,
):
    where = machine | ({"date": date} if date else {})
    facts = {"batch": 4, "world_size": 2} | (config or {})
    return Record("bench", variant, facts, {"step_p50_ms": step_ms} | metrics, where, commit)


def saved(root, name, *records):
    folder = root / "bench" / name
    folder.mkdir(parents=True)
    write_json(records, folder / "records.json")
    return folder
