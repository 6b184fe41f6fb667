"""Memory over one step by category; the largest blocks at its peak, and who asked for them."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from distlab.bench.timing import TrialConfig, described, opened
from distlab.experiment import Column, RankContext, Record, View
from distlab.measure import emitter, memory_timeline, named_ranges, peak_memory
from distlab.report import environment, stacked_areas

from .view import Rows, headline, mib_column, ms_column, of_each, prefix

NAME = "model_memory"


def memory(
    context: RankContext, config: TrialConfig, folder: Path, slug: str, most: int = 8
) -> dict[str, Rows]:
    """Draw rank 0's memory over one step; its largest blocks at the peak as rows, with what is held then."""
    device = context.device
    on_cuda = device.type == "cuda"
    with opened(context, config) as trial:
        trial("step")  # the optimizer's state comes with the first
        trial.model.zero_grad(set_to_none=True)
        trial.optimizer.zero_grad(set_to_none=True)
        trial.last_loss = None
        if not context.is_main:
            for _ in range(1 + on_cuda):
                trial("step")
            return {}
        with tempfile.TemporaryDirectory(prefix="distlab-memory-") as temporary, ExitStack() as stack:
            path = Path(temporary) / "trace.json"
            stack.enter_context(named_ranges(trial.model, emitter("profiler"), trial.optimizer))
            allocator = stack.enter_context(peak_memory(device))
            held = memory_timeline.record_memory(partial(trial, "step"), trial.model, trial.optimizer, path, device)
            timeline = memory_timeline.memory_timeline(path, held, device)
        if on_cuda:
            with memory_timeline.allocator_history(folder / f"memory_{slug}.pickle"):
                trial("step")
    where = described([config.recorded(context)], environment(device))
    draw_memory(timeline, folder / f"memory_{slug}.png", f"Memory over one training step: {where}")
    at, categories = timeline.peak()
    total = sum(categories.values())
    shared = {f"at_peak_{name.replace(' ', '_')}_bytes": size for name, size in categories.items()}
    shared |= {"timeline_peak_bytes": total, "peak_alloc_bytes": allocator.peak_alloc_bytes, "peak_at_ms": at}
    rows = []
    for block in timeline.largest(most):
        own = {
            "block_bytes": block.bytes,
            "of_peak_pct": 100 * block.bytes / total,
            "category": block.category,
        }
        own |= {"phase": block.phase, "from_ms": block.start_ms, "to_ms": block.end_ms}
        rows.append((block.origin, own | shared))
    return {NAME: rows}


def draw_memory(timeline: memory_timeline.MemoryTimeline, path: Path, title: str) -> None:
    """Memory over one step by category."""
    times, layers = timeline.curves()
    at, categories = timeline.peak()
    total = sum(categories.values())
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    stacked_areas(
        path,
        times,
        {name: [value / size for value in values] for name, values in layers.items()},
        title=title,
        x_label="time since the start of the step (ms; stretched by the recording)",
        y_label=f"held ({unit})",
        end=timeline.step_ms,
        spans=timeline.phases,
        notes=[(at, total / size, f"peak {total / size:.1f} {unit}")],
    )


def memory_findings(records: Sequence[Record]) -> list[str]:
    """What is held at the peak, by category, and whether the allocator says the same."""
    lines = []
    for label, record in of_each(records).items():
        m = record.metrics
        held = {name: m[f"at_peak_{name.replace(' ', '_')}_bytes"] for name in memory_timeline.CATEGORIES}
        parts = [f"{name} {size / 2**20:,.1f}" for name, size in held.items()]
        count = m["peak_alloc_bytes"]
        allocator = f", by the allocator's count {count / 2**20:,.1f}" if count else ""
        lines.append(
            f"{prefix(label)}held at the peak, in MiB: {', '.join(parts)}; together "
            f"{m['timeline_peak_bytes'] / 2**20:,.1f}{allocator}."
        )
    return lines


VIEW = View(
    name=NAME,
    question="What holds the memory at the peak of a step, and where was it allocated?",
    columns=[Column("variant", "allocated by"), mib_column("block_bytes", "MiB"),
     Column("metrics.of_peak_pct", "of peak %", ".1f"), Column("metrics.category", "kind", align="left"),
     Column("metrics.phase", "phase", align="left"), ms_column("from_ms", "from ms"), ms_column("to_ms", "to ms")],
    headline=headline,
    findings=memory_findings,
    reading="The largest blocks at the peak. The origin is the named part of the model and the "
    "operator that allocated the block. Activations are what forward leaves for backward; temporary blocks live within "
    "a phase, or are made in backward; before is memory that existed at the start and is neither parameter nor state.",
)  # fmt: skip
