"""Columns, pictures and texts of `ddp_bench`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distlab.experiment import Column, Record, Records, View
from distlab.report import (
    NOISE,
    gib_column,
    is_number,
    ratio_column,
    stacked_bars,
    text_column,
    tie_mark,
)

from .comparison import CAUSES, compare, findings, headline, local_row, open_account, strategy_of

NOT_EXPLAINED = "not explained"


def compiled_parts(record: Record) -> str | None:
    """Return `24 of 24` for a compiled row, None for an eager one."""
    calls = record.metrics.get("compiled_calls")
    return None if calls is None else f"{calls} of {record.metrics['compiled_parts']}"


def overhead_mark(record: Record) -> str:
    """Return the marks of a row's overhead: a tie with `local`, an account that does not close."""
    return tie_mark(record, "vs_local") + open_account(record)


def what_it_does(record: Record) -> str | None:
    """Return the description of a row's strategy. None if there is no such strategy any more."""
    strategy = strategy_of(record.variant)
    return None if strategy is None else strategy.does


def draw_step_times(records: Records, path: Path) -> None:
    """Draw a bar per row: compute, optimizer, and the overhead by its causes.

    Whiskers reach from p20 to p80 of the step.

    Compute is `local`'s step without its optimizer, less what the row saves of it. Causes have the
    length that the trace gives them. The overhead of a row without a trace, or whose account does
    not close, is one grey part, `not explained`. The number is the median step. A bar may reach
    beyond it, where the trace shows more than was measured without it.
    """
    # A row without a time has a word in the place of the number.
    timed = [record for record in records if is_number(record.metrics.get("step_p50_ms"))]
    local = local_row(timed)
    parts = {name: [] for name in ("compute", "optimizer", *CAUSES, NOT_EXPLAINED)}
    whiskers, medians = [], []
    for record in records:
        metrics = record.metrics
        if isinstance(metrics["step_p50_ms"], str):  # out of memory, refused
            # The text is drawn where the bar would be, so that the row is not taken for a fast one.
            bar = dict.fromkeys(parts, metrics["step_p50_ms"])
        elif local is None:
            bar = dict.fromkeys(parts)
        else:
            bar = _step_parts(metrics, local.metrics)
        # Every row adds one value to each part, so that all parts have a bar for each row.
        for name, values in parts.items():
            values.append(bar[name])
        drawn = local is not None and is_number(metrics["step_p50_ms"])
        whiskers.append((metrics["step_p20_ms"], metrics["step_p80_ms"]) if drawn else None)
        medians.append(metrics["step_p50_ms"] if drawn else None)
    # Causes that no row has would only lengthen the legend.
    shown = {
        name: values
        for name, values in parts.items()
        if any(values) or name in ("compute", "optimizer")
    }
    title = f"Where a step's time goes: {headline(records)}"
    labels = [record.variant for record in records]
    stacked_bars(path, labels, shown, title=title, unit="ms", whiskers=whiskers, totals=medians)


def _step_parts(metrics: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, float]:
    """Divide a row's median step into the parts of its bar, in ms."""
    # The reference for all rows is the compute of `local`, which no communication disturbs.
    compute = local["step_p50_ms"] - local["optimizer_p50_ms"]
    if not metrics.get("overhead_closes"):
        # Each row keeps its own optimizer time, because sharded strategies update only a part.
        optimizer = metrics["optimizer_p50_ms"]
        rest = metrics["step_p50_ms"] - optimizer - compute
        bar = {"compute": compute, "optimizer": optimizer} | dict.fromkeys(CAUSES, 0.0)
        # Noise can make the rest negative, and a bar cannot start at a negative length.
        return bar | {NOT_EXPLAINED: max(rest, 0.0)}
    # The optimizer's time by the trace: by the clock it includes idle time, which is a cause.
    optimizer = local["optimizer_p50_ms"] + (metrics.get("overhead_optimizer_ms") or 0.0)
    bar = {"compute": compute, "optimizer": optimizer}
    for text, name in CAUSES.items():
        ms = metrics.get(name) or 0.0
        # A bar cannot have a negative part. It is a part of `local`'s compute that this row saves,
        # such as copies that only `local` makes.
        bar["compute"] += min(ms, 0.0)
        bar[text] = max(ms, 0.0)
    return bar | {NOT_EXPLAINED: max(metrics["overhead_unexplained_ms"], 0.0)}


VIEW = View(
    columns=[
        Column("variant", "strategy"),
        Column("metrics.step_p20_ms", "step p20 ms", ".1f", about="a fifth of the steps took less"),
        Column("metrics.step_p50_ms", "step ms", ".1f", about="the median step"),
        Column("metrics.step_p80_ms", "step p80 ms", ".1f", about="a fifth of the steps took more"),
        NOISE,
        Column(
            "metrics.forward_backward_p50_ms",
            "forward + backward + sync ms",
            ".1f",
            about="median of forward, backward and the wait for communication",
        ),
        Column(
            "metrics.optimizer_p50_ms",
            "optimizer ms",
            ".1f",
            about="median of the optimizer's step",
        ),
        Column(
            "metrics.overhead_ms",
            "overhead ms",
            ".1f",
            note=overhead_mark,
            about="what a step takes longer than `local`'s; a tie where the 95 % interval of "
            "their ratio contains 1; open where the causes in the trace miss it by more than half, "
            "and by more than 1 % of the step or 1 ms; or by more than 5 % of the step",
        ),
        Column(
            "metrics.comm_ms",
            "comm ms",
            ".1f",
            about="time of all communication in the trace of rank 0, with waits for other ranks",
        ),
        Column(
            "metrics.exposed_ms", "exposed ms", ".1f", about="the part of it that no compute covers"
        ),
        Column(
            "metrics.exposed_gather_ms",
            "exposed gathers ms",
            ".1f",
            optional=True,
            about="the part of that in which parameters are gathered",
        ),
        Column(
            "metrics.overlap_pct",
            "overlap %",
            ".0f",
            about="the share of communication that compute covers",
        ),
        Column(
            "metrics.gpu_idle_pct",
            "GPU idle %",
            ".0f",
            optional=True,
            about="the part of an untraced step for which the trace shows no work on the GPU",
        ),
        Column(
            "metrics.collectives_per_step",
            "calls",
            "d",
            about="collectives of a step, counted at torch's dispatcher",
        ),
        Column(
            "metrics.comm_bytes_per_step",
            "sent MB",
            ",.1f",
            scale=1e-6,
            about="handed to them by a rank",
        ),
        Column("metrics.tokens_per_s", "tokens/s", ",.0f", about="of all ranks"),
        Column("metrics.examples_per_s", "examples/s", ",.1f", optional=True, about="of all ranks"),
        Column(
            "metrics.mfu_pct",
            "MFU %",
            ".1f",
            optional=True,
            about="FLOPs of the model over the device's peak",
        ),
        gib_column(
            "metrics.peak_alloc_bytes",
            "peak GiB",
            ".1f",
            optional=True,
            about="most that torch's allocator held",
        ),
        ratio_column(
            "vs_torch_ddp",
            "÷ torch DDP",
            about="over torch DDP's fastest row, paired step by step; a tie where the 95 % "
            "interval contains 1",
        ),
        Column(
            "metrics.max_abs_param_diff",
            "parameter error",
            ".1e",
            about="the largest difference of any parameter from training in one process, after a "
            "few steps of fp32 SGD on the tiny preset",
        ),
        text_column(
            "config.ran_compiled",
            "compiled",
            optional=True,
            derived=compiled_parts,
            about="compiled graphs that ran in a step after the timing, of those that a compiled "
            "step runs",
        ),
        text_column(
            "metrics.verdict",
            "as one process",
            optional=True,
            about="whether gradients, parameters and buffers are those of training in one "
            "process, as `distlab check` judges",
        ),
        Column(
            "metrics.traced_step_ms",
            "traced step ms",
            ".1f",
            optional=True,
            about="the step under the profiler whose account is given: on a CPU, of several the "
            "one nearest the median",
        ),
        *(
            Column(f"metrics.{name}", f"of it {part} ms", form, optional=True, about=about)
            for name, part, form, about in (
                (
                    "overhead_exposed_ms",
                    "exposed",
                    ".1f",
                    "the part of the overhead that is exposed communication",
                ),
                (
                    "overhead_slowdown_ms",
                    "slower compute",
                    ".1f",
                    "compute that communication slows",
                ),
                ("overhead_copies_ms", "copies", ".1f", "copies into buckets and out of them"),
                (
                    "overhead_optimizer_ms",
                    "optimizer",
                    "+.1f",
                    "negative where the optimizer is sharded",
                ),
                ("overhead_idle_ms", "idle", "+.1f", "nothing runs"),
                (
                    "overhead_unexplained_ms",
                    "unexplained",
                    "+.1f",
                    "what of it is in no part of the trace's account",
                ),
            )
        ),
        text_column(
            "config.does",
            "what it does",
            optional=True,
            derived=what_it_does,
        ),
    ],
    headline=headline,
    derive=compare,
    terminal=(
        "variant",
        "step_p50_ms",
        "noise_pct",
        "overhead_ms",
        "collectives_per_step",
        "overlap_pct",
        "peak_alloc_bytes",
        "vs_torch_ddp",
        "verdict",
    ),
    pictures={"step_time.png": draw_step_times},
    findings=findings,
    reading="Overhead is divided among its causes by the profiler's trace of rank 0. In the bars, "
    "causes have the length that the trace gives them, and what is not explained is grey. Where "
    "the account does not close, all of the overhead is. The number is the median step. A bar may "
    "reach beyond it, where a negative cause offsets others.\n\n"
    "In the timeline compute is above, communication below; what is exposed is orange.",
    prediction="Collectives and bytes per step in closed form (distlab.theory.volume). Step times "
    "are predicted by `distlab run predict`, before a measurement.",
)
