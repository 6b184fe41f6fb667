"""What a reader gets: table and pictures, and what the views of all parts share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.bench.timing import described
from distlab.experiment import Column, Record, View
from distlab.measure.trace.capture import PHASES
from distlab.report import NOISE, Panel, lines, overlaid, stacked_bars

Rows = list[tuple[str, dict[str, Any]]]  # variant and metrics, of one part

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
    """What stands before the rows of the combination with this label."""
    return f"{label}: " if label else ""


def ms_column(metric: str, title: str) -> Column:
    """A column of milliseconds."""
    return Column(f"metrics.{metric}", title, ".2f")


def mib_column(metric: str, title: str) -> Column:
    """A column of MiB, from bytes."""
    return Column(f"metrics.{metric}", title, ",.1f", scale=2**-20)


COLUMNS = [
    Column("variant", "what"),
    ms_column("step_mean_ms", "mean ms"), ms_column("step_std_ms", "± std"), ms_column("step_p20_ms", "p20"),
    ms_column("step_p50_ms", "p50"),
    ms_column("step_p80_ms", "p80"), ms_column("first_ms", "first"), ms_column("forward_p50_ms", "forward"),
    ms_column("backward_p50_ms", "backward"), ms_column("optimizer_p50_ms", "optimizer"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f"), Column("metrics.tflops_per_s", "TFLOP/s", ",.2f"),
    Column("metrics.mfu_pct", "MFU %", ".1f"), Column("metrics.grad_rel_error", "gradient error", ".0e"),
    NOISE, Column("metrics.status", "status", align="left"),
]  # fmt: skip


def draw_steps(records: Sequence[Record], path: Path) -> None:
    """A bar per row: forward, backward and optimizer, with p20 and p80 of the whole."""
    rows = [record.metrics for record in records]
    timed = [metrics.get("step_p50_ms") is not None for metrics in rows]
    parts = {
        phase: [(m[f"{phase}_p50_ms"] or 0.0) if ok else m["status"] for m, ok in zip(rows, timed, strict=True)]
        for phase in PHASES
    }
    ends = [(m["step_p20_ms"], m["step_p80_ms"]) if ok else None for m, ok in zip(rows, timed, strict=True)]
    unit, labels = "ms (median; whiskers p20 to p80)", [record.variant for record in records]
    stacked_bars(path, labels, parts, title=headline(records), unit=unit, whiskers=ends)


def draw_warmup(records: Sequence[Record], path: Path) -> None:
    """Every call of the series that were measured from the first call on; nothing without such a series."""
    series = {
        r.variant.removesuffix(", warm-up 0"): (
            list(range(len(r.metrics["series_ms"]))),
            r.metrics["series_ms"],
        )
        for r in records
        if r.metrics.get("series_ms")
    }
    if series and len({r.config["warmup"] for r in records}) > 1:
        panel = Panel("", "call", "ms", overlaid(series), log_x=None, from_zero=False)
        lines(path, [panel], title=f"Every call from the first: {headline(records)}")


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=("variant", "step_p50_ms", "noise_pct", "peak_alloc_bytes", "tokens_per_s", "mfu_pct", "status"),
    pictures={"steps.png": draw_steps, "warmup.png": draw_warmup},
    reading="Inference is a forward without gradients; forward keeps what backward needs and stops there; "
    "forward_backward adds backward and the synchronisation of gradients; step adds the optimizer. Every call works on "
    "the next of four batches. Rows with several warm-ups are cut from one series; the column first is a row's first "
    "call.\n\n"
    "The gradient error is ‖g − g_ref‖ / ‖g_ref‖ over all parameters, against a model of the same weights with naive "
    "attention, torch's operations, fp32, nothing compiled. A row whose error is above the tolerance of its dtype, "
    "whose clock does not cover the wall's, whose gradients are zero, or that is faster than the device's peak, says "
    "so in its status.",
    prediction="None: see ddp_bench, plan and the calculator for predicted steps.",
)
