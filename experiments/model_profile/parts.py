"""Every configuration, part by part: what is wanted is measured, and becomes records."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from distlab.bench.subject import TrialConfig
from distlab.comm import RankContext
from distlab.measure.validity import attempt
from distlab.report.record import Record, commit, environment
from distlab.report.view import View

from . import memory, residuals, work
from .inspection import Inspection
from .rows import Rows, prefix

VIEWS: dict[str, View] = {
    view.name: view for view in (work.KERNEL_VIEW, work.WORK_VIEW, memory.VIEW, residuals.VIEW)
}


def run(
    trials: Mapping[str, TrialConfig],
    wanted: Inspection,
    context: RankContext,
    folder: Path,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, list[Record]]:
    """Take the full step of every trial apart; call it on every rank.

    Traces, pictures and the allocator's history are written to `folder`.

    Args:
        trials: by label, which stands before the rows of a table; "" for the only one.

    Returns:
        Records by experiment: `model_kernels` and `model_work`, `model_memory`, `model_saved`; complete on rank 0. A
        trial that fails in one of them is reported by `progress` and has no rows there.

    Raises:
        ValueError: a rank to be profiled that does not exist.
    """
    wanted.check_ranks(context.world_size)
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    found: dict[str, list[Record]] = {}
    for label, trial in trials.items():
        name = label or trial.size
        where = trial.recorded(context) | {"label": label}
        slug = name.replace(", ", "-").replace(" ", "-")
        parts: dict[str, Callable[[], dict[str, Rows]]] = {}
        if wanted.profile:
            parts["profiling"] = partial(work.profile, context, trial, wanted, folder, slug)
        if wanted.memory:
            parts["recording the memory of"] = partial(memory.memory, context, trial, folder, slug)
        if wanted.saved:
            parts["listing what is saved for backward by"] = partial(residuals.saved, context, trial)
        for what, part in parts.items():
            progress(f"{what} {name}")
            rows = attempt(part)
            if (status := rows.pop("status")) != "ok":
                progress(f"{what} {name}: {status}")
            for experiment, measured in rows.items():
                found.setdefault(experiment, []).extend(
                    Record(experiment, f"{prefix(label)}{variant}", where, metrics, **facts)
                    for variant, metrics in measured
                )
    return found
