"""What a reader gets: table and pictures."""

from collections.abc import Sequence
from pathlib import Path

from distlab.bench.subject import described
from distlab.measure.trace.capture import PHASES
from distlab.report.charts import Panel, lines, overlaid, stacked_bars
from distlab.report.noise import NOISE
from distlab.report.record import Record
from distlab.report.table import Column
from distlab.report.view import View

from . import __doc__ as QUESTION
from .config import NAME


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    return described([record.config for record in records], records[0].environment)


def _ms(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ".2f")


def _exponent(value: float) -> str:
    return f"{value:.0e}"


COLUMNS = [
    Column("variant", "what"),
    _ms("step_mean_ms", "mean ms"), _ms("step_std_ms", "± std"), _ms("step_p20_ms", "p20"), _ms("step_p50_ms", "p50"),
    _ms("step_p80_ms", "p80"), _ms("first_ms", "first"), _ms("forward_p50_ms", "forward"),
    _ms("backward_p50_ms", "backward"), _ms("optimizer_p50_ms", "optimizer"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".2f", scale=2**-30),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f"), Column("metrics.tflops_per_s", "TFLOP/s", ",.2f"),
    Column("metrics.mfu_pct", "MFU %", ".1f"), Column("metrics.grad_rel_error", "gradient error", _exponent),
    NOISE, Column("metrics.status", "status", align="left"),
]  # fmt: skip


def draw_steps(records: Sequence[Record], path: Path) -> None:
    """A bar per row: forward, backward and optimizer, with p20 and p80 of the whole."""
    labels = [record.variant for record in records]
    parts: dict[str, list[float | str | None]] = {phase: [] for phase in PHASES}
    whiskers: list[tuple[float, float] | None] = []
    for record in records:
        metrics = record.metrics
        timed = metrics.get("step_p50_ms") is not None
        for phase, values in parts.items():
            values.append((metrics[f"{phase}_p50_ms"] or 0.0) if timed else metrics["status"])
        whiskers.append((metrics["step_p20_ms"], metrics["step_p80_ms"]) if timed else None)
    stacked_bars(path, labels, parts, title=headline(records), unit="ms (median; whiskers p20 to p80)",
                      whiskers=whiskers)  # fmt: skip


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
    name=NAME,
    question=QUESTION.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"steps.png": draw_steps, "warmup.png": draw_warmup},
    reading="Inference is a forward without gradients; forward keeps what backward needs and stops there; "
    "forward_backward adds backward and the synchronisation of gradients; step adds the optimizer. Every call works on "
    "the next of four batches. Rows with several warm-ups are cut from one series; the column first is a row's first "
    "call.\n\n"
    "The gradient error is ‖g − g_ref‖ / ‖g_ref‖ over all parameters, against a model of the same weights with naive "
    "attention, torch's operations, fp32, nothing compiled. A row whose error is above the tolerance of its type, "
    "whose clock does not cover the wall's, whose gradients are zero, or that is faster than the device's peak, says "
    "so in its status.",
    prediction="None: see ddp_bench, plan and the calculator for predicted steps.",
)
