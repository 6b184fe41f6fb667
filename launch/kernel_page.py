"""The page of a run of `distlab kernel`: verdict, mistakes with smallest inputs, and times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.kernel_check import Report
from distlab.report import Column, Record, Records, View, commit, environment, write
from launch.kernel_timing import Timing

NAME = "kernel"
VERDICT = "inputs"
MISTAKES = "mistakes"
TIMES = "how fast"


def write_page(
    folder: Path, kernel: str, device: str, seed: int, report: Report, timing: Timing
) -> Path:
    """Write records, tables and page of an examination into a folder. Return the page."""
    where = environment(device)
    code = commit(None)
    settings = {"kernel": kernel, "operation": report.operation, "device": device, "seed": seed}

    def record(part: str, variant: str, config: dict[str, Any], metrics: dict[str, Any]) -> Record:
        # The part decides which of the three tables of the page shows the record.
        return Record(NAME, variant, {**settings, **config, "part": part}, metrics, where, code)

    counts = report.to_dict()
    verdict = {name: counts[name] for name in ("right", "refused", "wrong", "not_tried")}
    verdict["sentences"] = _sentences(report, timing)
    records = [record(VERDICT, kernel, {}, verdict)]
    for finding in counts["findings"]:
        metrics = {name: finding[name] for name in ("inputs", "smallest", "detail")}
        records.append(record(MISTAKES, finding["kind"], {}, metrics))
    for row in timing.records:
        config = {"at": row.config.get("label") or row.config["shape"]}
        config["direction"] = row.config.get("direction", "")
        # Lists are samples of single calls, too many for a page's table.
        metrics = {k: v for k, v in row.metrics.items() if not isinstance(v, list)}
        records.append(record(TIMES, row.variant, config, metrics))
    return write(VIEW, records, folder)


def result(records: Records) -> str:
    """Return the numbers of inputs that are right, refused and wrong, for the list of runs."""
    inputs = records[0].metrics
    counts = f"{inputs['right']} right, {inputs['refused']} refused, {inputs['wrong']} wrong"
    if inputs["not_tried"]:
        counts += f", {inputs['not_tried']} not tried"
    for record in records:
        # Timed sizes are larger, so a kernel may be wrong there alone.
        if record.variant == "yours" and "WRONG" in str(record.metrics.get("status")):
            return f"{counts}, WRONG when timed"
    return counts


def _sentences(report: Report, timing: Timing) -> list[str]:
    """Return the verdict and what is remarkable, a sentence each."""
    first, *_ = str(report).splitlines()
    sentences = [first if report.is_right else f"WRONG: {first.removeprefix('WRONG: ')}"]
    if report.too_large:
        sentences.append(f"Not tried: {report.too_large}.")
    return sentences + timing.sentences


def _findings(records: Records) -> Sequence[str]:
    return [line for record in records for line in record.metrics.get("sentences", ())]


def _headline(records: Records) -> str:
    first = records[0]
    where = first.environment.get("device_name") or "CPU"
    return f"{first.config['kernel']} as {first.config['operation']}, on {where}"


# One view serves three tables. Each shows the columns for which its records have values.
VIEW = View(
    name=NAME,
    question="Is my kernel right, also on inputs that its own test does not have, and how fast?",
    columns=[
        Column("variant", "row"),
        Column("metrics.right", "right", optional=True),
        Column("metrics.refused", "refused", optional=True),
        Column("metrics.wrong", "wrong", optional=True),
        Column("metrics.not_tried", "not tried", optional=True),
        Column("metrics.inputs", "inputs", optional=True),
        Column("metrics.smallest", "the smallest", optional=True, align="left"),
        Column("metrics.detail", "what is wrong", optional=True, align="left"),
        Column("config.at", "at", optional=True, align="left"),
        Column("config.direction", "direction", optional=True, missing=""),
        Column("metrics.wall_p50_ms", "wall ms", ".4f", optional=True),
        Column("metrics.time_p50_ms", "device ms", ".4f", optional=True),
        Column("metrics.fwd_device_p50_ms", "forward ms", ".4f", optional=True),
        Column("metrics.fwd_bwd_device_p50_ms", "forward + backward ms", ".4f", optional=True),
        Column("metrics.gb_per_s", "GB/s", ",.0f", optional=True),
        Column("metrics.of_copy_pct", "% of copy", ".0f", optional=True, missing=""),
        Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", optional=True, missing=""),
        Column("metrics.fwd_tflop_per_s", "forward TFLOP/s", ".1f", optional=True),
        Column("metrics.registers", "registers", optional=True, missing=""),
        Column("metrics.spill_bytes", "spilled", optional=True, missing=""),
        Column("metrics.occupancy_pct", "occupancy %", ".0f", optional=True, missing=""),
        Column("metrics.status", "status", optional=True),
    ],
    headline=_headline,
    parted_by="config.part",
    findings=_findings,
    reading="Inputs: the numbers of inputs on which the kernel is right, refuses with an error, or "
    "is wrong. Mistakes: the smallest input that shows each. How fast: yours is the examined "
    "kernel, ours this lab's, naive plain torch one operator at a time, builtin torch's own. "
    "Device times are replays of a CUDA graph. GB/s is the least traffic over the device time; its "
    "share is of the bandwidth of a copy in the same run.",
)
