"""Records and the view of an explanation: for `report.html`, and for `distlab compare`'s tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distlab.compare import UNSURE, SavedRun, compared, verdicts, view_of
from distlab.measure.interleaved import MIN_PAIRS, percentiles
from distlab.report import Column, Record, Records, View, text_column, timeline
from distlab.report.provenance import command
from distlab.trace.causes import FINDING_PCT, UNKNOWN
from distlab.trace.explanation import Explanation, parts_of

NAME = "trace"
ACCOUNT, CAUSES = "where the time of a step goes", "why"
COLLECTIVES, GROUPS = "the most exposed collectives", "communication by process group"
KERNELS = "kernels (operators) of the first rank"
CHANGES = "what changed in the median step"
# A part of a step below this counts as zero. Its ratio to another run would mean nothing.
_ZERO_MS = 1e-3


def records_of(explanation: Explanation, old: Explanation | None = None) -> list[Record]:
    """Return the rows of all tables of the page.

    Args:
        explanation: explanation of the run.
        old: explanation of an older run, for a table of what changed.
    """
    environment = {"device_name": _device(explanation), "command": command()}
    found = []

    def add(part: str, variant: str, metrics: dict) -> None:
        found.append(Record(NAME, variant, {"part": part}, metrics, environment, None))

    for rank in explanation.ranks:
        metrics = {}
        for name, ms in parts_of(rank.mean).items():
            metrics[f"{name.split()[0]}_ms"] = ms
        metrics["overlap_pct"] = rank.mean.overlap_pct
        add(ACCOUNT, f"rank {rank.rank}", metrics)
    for finding in explanation.findings:
        metrics = {"ms": finding.ms, "pct": finding.pct, "of_rank": finding.rank}
        add(CAUSES, finding.cause, metrics | {"count": finding.count, "mostly": finding.about})
    for row in explanation.collectives():
        metrics = {"exposed_ms": row["exposed_ms"], "of_rank": row["rank"], "cause": row["cause"]}
        add(COLLECTIVES, f"{row['collective']}, number {row['number']}", metrics)
    for group in explanation.groups():
        metrics = {
            "ms": group.ms,
            "exposed_ms": group.exposed_ms,
            "count": group.count,
            "size_mb": None if group.size_bytes is None else group.size_bytes / 1e6,
            "bus_gb_per_s": group.bus_gb_per_s,
        }
        add(GROUPS, f"{group.operation} in group {group.group}", metrics)
    for kernel in explanation.kernels():
        add(KERNELS, kernel.name[:100], {"ms": kernel.ms, "count": kernel.count})
    if old is not None:
        rows, _ = against(old, explanation)
        for row in rows:
            metrics = {f"change_{name}": value for name, value in row.metrics.items()}
            add(CHANGES, row.variant, metrics)
    return found


def page_view(explanation: Explanation, old: Explanation | None = None) -> View:
    """Return the view that shows `records_of`, with the timeline of the longest step.

    Args:
        explanation, old: as for `records_of`.
    """
    number, rows = explanation.worst()

    def draw(records: Sequence[Record], path: Path) -> None:
        timeline(path, rows, title=f"Step {number}, the longest one")

    large = [finding.sentence for finding in explanation.findings if finding.is_large]
    sentences = large[:5] or [explanation.first]
    if old is not None:
        sentences = [*changed(old, explanation), *sentences]
    return View(
        name=NAME,
        question="Where does the time of a step go, and why?",
        columns=[
            Column("variant", ""),
            Column("metrics.step_ms", "step ms", ".2f"),
            Column("metrics.compute_ms", "compute ms", ".2f"),
            Column("metrics.optimizer_ms", "optimizer ms", ".2f"),
            Column("metrics.exposed_ms", "exposed ms", ".2f"),
            Column("metrics.copies_ms", "copies ms", ".2f"),
            Column("metrics.idle_ms", "idle ms", ".2f"),
            Column("metrics.overlap_pct", "overlap %", ".0f"),
            Column("metrics.ms", "ms per step", ".2f"),
            Column("metrics.pct", "% of step", ".1f"),
            Column("metrics.of_rank", "rank", "d"),
            Column("metrics.count", "per step", ".3g"),
            Column("metrics.size_mb", "MB", ".2f"),
            Column("metrics.bus_gb_per_s", "bus GB/s", ".2f"),
            text_column("metrics.cause", "cause"),
            text_column("metrics.mostly", "mostly"),
            Column("metrics.change_run_0", "ms before", ".2f"),
            Column("metrics.change_run_1", "ms now", ".2f"),
            Column("metrics.change_difference_pct", "difference %", "+.1f"),
            Column("metrics.change_low_pct", "from (95 %)", "+.1f"),
            Column("metrics.change_high_pct", "to", "+.1f"),
            Column("metrics.change_noise_pct", "noise %", ".1f"),
            text_column("metrics.change_verdict", "verdict"),
        ],
        headline=lambda records: explanation.summary,
        findings=lambda records: [*sentences, *(f"({note})" for note in explanation.notes)],
        parted_by="config.part",
        pictures={"timeline.png": draw},
        reading="Compute, optimizer, exposed communication, copies and idle time add up to the "
        "step. All are means over the traced steps, but what changed is of the medians. "
        "Communication is exposed while nothing "
        "computes. A cause is that of the rank on which it takes longest. "
        "docs/learn/your_trace.md explains the causes.",
        prediction="None: this accounts for what was traced.",
        noise="A profiler makes steps longer, above all on the host.",
    )


def result(records: Records) -> str:
    """Return the largest cause of lost time, for the list of runs."""
    for record in records:  # the largest cause comes first
        is_cause = record.config["part"] == CAUSES and record.variant != UNKNOWN
        if is_cause and record.metrics["pct"] >= FINDING_PCT:
            return (
                f"{record.variant}, {record.metrics['ms']:.2f} ms per step "
                f"({record.metrics['pct']:.0f} %)"
            )
    for record in records:
        is_unexplained = record.config["part"] == CAUSES and record.variant == UNKNOWN
        if is_unexplained and record.metrics["pct"] >= FINDING_PCT:
            return (
                f"idle for an unknown reason, {record.metrics['ms']:.2f} ms per step "
                f"({record.metrics['pct']:.0f} %)"
            )
    return f"no cause of lost time takes {FINDING_PCT:g} % of the step"


def against(old: Explanation, new: Explanation) -> tuple[list[Record], View]:
    """Return the rows and the view of what changed in the parts of a step."""
    runs = [_saved(old), _saved(new)]
    rows = compared(runs)
    # Not `compare.findings`: the rows are parts of one step. If all of them moved, the step has
    # changed, and that does not tell of the machine.
    return rows, replace(view_of(runs, rows[0].config["metric"]), findings=verdicts)


def changed(old: Explanation, new: Explanation) -> list[str]:
    """Return the sentences on what changed: large causes, then parts of the median step."""
    rows, view = against(old, new)
    found = [*changed_causes(old, new), *view.findings_of(rows)]
    if any(row.metrics["verdict"] == UNSURE for row in rows):
        found.append(f"With {MIN_PAIRS} traced steps or more in both runs, the noise is known.")
    return found


def changed_causes(old: Explanation, new: Explanation) -> list[str]:
    """Return a sentence for every large cause that only one of two explanations has."""
    before = {finding.cause: finding for finding in old.findings if finding.is_large}
    after = {finding.cause: finding for finding in new.findings if finding.is_large}
    small = {finding.cause: finding for finding in new.findings if not finding.is_large}
    said = []
    for cause, finding in after.items():
        if cause not in before:
            said.append(f"New cause: {cause}, {finding.ms:.2f} ms per step.")
    for cause, finding in before.items():
        if cause not in after:
            now = f"now {small[cause].ms:.2f} ms" if cause in small else "now none"
            said.append(f"No longer large: {cause}, {finding.ms:.2f} ms per step before, {now}.")
    return said


def _saved(explanation: Explanation) -> SavedRun:
    """Return the parts of a step as rows of a run, each with its samples."""
    path = Path(os.path.abspath(explanation.ranks[0].trace.path))
    environment = {"device_name": _device(explanation)}
    rows = []
    for part, samples in explanation.samples().items():
        median_ms = percentiles(samples)["p50"]
        metrics = {"part_p50_ms": 0.0}
        if median_ms > _ZERO_MS:
            metrics = {"part_p50_ms": median_ms, "part_samples_ms": samples}
        rows.append(Record(NAME, part, {}, metrics, environment, None))
    return SavedRun(path, rows)


def _device(explanation: Explanation) -> str:
    for rank in explanation.ranks:
        if rank.trace.device_name:
            return rank.trace.device_name
    return "GPU" if explanation.ranks[0].trace.on_gpu else "CPU"
