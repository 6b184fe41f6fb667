"""Cell after cell on sub-groups of the ranks: what the folder holds is kept, what there is no time for is left."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import first_ranks, rest
from distlab.report.record import OutputFolder, Record, commit, environment, read_json, write_json

from . import cells
from .config import NAME, MeasureConfig
from .prediction import in_own_process, predictions

PREDICTIONS = "predictions.json"


def run(
    config: MeasureConfig,
    context: RankContext,
    folder: OutputFolder,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Predict, then measure what the folder does not hold yet; call it on every rank. All get the same records.

    Raises:
        ValueError: the folder holds records of another machine.
    """
    begin = time.monotonic()
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    groups = config.groups(context.world_size)
    records = _resume(config, context, folder, facts["environment"])
    lasted: dict[str, float] = {}
    with ExitStack() as stack:
        members = {ranks: stack.enter_context(first_ranks(context, ranks)) for ranks in groups}
        sweeps = [(None, ranks) for ranks in groups]
        for number, (regime, ranks) in enumerate([*sweeps, *config.cells(context.world_size)]):
            known = {(r.config["regime"], r.config["world_size"]) for r in records}
            name = "collectives" if regime is None else str(regime)
            if (name, ranks) in known or (regime is None and (ranks == 1 or not config.sweep_bytes)):
                continue
            left = 60 * config.minutes - (time.monotonic() - begin)
            enough = collectives.gather_objects(left > lasted.get(name, 0.0), context.group)[0]
            if not enough:
                progress(f"{name} on {ranks} ranks: no time left; go on with --resume {folder.path}")
                continue
            progress(f"{name} on {ranks} ranks")
            started, mine = time.monotonic(), []
            if members[ranks] is not None:
                if regime is None:
                    rows = cells.sweep(config, members[ranks])
                else:
                    rows = cells.measure(config, regime, members[ranks], progress)
                for variant, own, metrics in rows:
                    mine.append(Record(NAME, variant, asdict(config) | own, metrics, **facts))
            rest(context, f"scaling-{number}", ranks)
            lasted[name] = time.monotonic() - started
            records += collectives.gather_objects(mine, context.group)[0]
            if context.is_main:
                write_json(_complete(records, folder), folder.path / "records.json")
    complete = _complete(records, folder) if context.is_main else None
    return collectives.gather_objects(complete, context.group)[0]


def _resume(
    config: MeasureConfig, context: RankContext, folder: OutputFolder, here: dict[str, Any]
) -> list[Record]:
    """What the folder holds, and its predictions, written now if they are not there."""
    found: list[Record] | Exception = []
    if context.is_main:
        try:
            path = folder.path / "records.json"
            found = read_json(path) if path.exists() else []
            others = {r.environment["device_name"] for r in found} - {here["device_name"]}
            if others:
                raise ValueError(
                    f"{path} holds records of {', '.join(others)}, this is {here['device_name']}"
                )
            if not (folder.path / PREDICTIONS).exists():
                arguments = config, context.world_size, str(here["device_name"])
                write_json(in_own_process(predictions, *arguments), folder.path / PREDICTIONS)
        except (ValueError, OSError) as error:
            found = error
    found = collectives.gather_objects(found, context.group)[0]
    if isinstance(found, Exception):
        raise found
    return found


def _complete(records: Sequence[Record], folder: OutputFolder) -> list[Record]:
    """The records with efficiency, and with what had been predicted."""
    expected = {
        (r.config["regime"], r.config["world_size"], r.variant): r.metrics
        for r in read_json(folder.path / PREDICTIONS)
    }
    alone = {
        r.config["regime"]: r.metrics["step_p50_ms"]
        for r in records
        if r.variant == "local" and r.config["world_size"] == 1 and r.metrics["step_p50_ms"] != "OOM"
    }
    for record in records:
        regime, ranks = record.config["regime"], record.config["world_size"]
        step = record.metrics.get("step_p50_ms")
        record.metrics.update(expected.get((regime, ranks, record.variant), {}))
        if isinstance(step, float) and regime in alone:
            share = ranks if record.config["kind"] == "strong" else 1
            record.metrics["efficiency_pct"] = 100 * alone[regime] / step / share
        if isinstance(step, float) and "predicted_step_ms" in record.metrics:
            record.metrics["error_pct"] = 100 * (record.metrics["predicted_step_ms"] / step - 1)
    return list(records)
