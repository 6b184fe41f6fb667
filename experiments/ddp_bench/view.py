"""What a reader gets: table, findings, bars and timeline."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distlab.experiment import Column, Record, View, headline_from
from distlab.report import NOISE, TIE, interval_ties, noise_by_row, noise_of, stacked_bars

OOM = "OOM"


def _tie(ratio: str) -> Callable[[Record], str]:
    """` tie` where the 95 % interval of a ratio contains 1."""

    def note(record: Record) -> str:
        low, high = (record.metrics.get(f"{ratio}_{end}") for end in ("low", "high"))
        return TIE if interval_ties(low, high) else ""

    return note


COLUMNS = [
    Column("variant", "strategy"),
    Column("metrics.step_p20_ms", "step p20 ms", ".1f"),
    Column("metrics.step_p50_ms", "p50", ".1f"),
    Column("metrics.step_p80_ms", "p80", ".1f"),
    NOISE,
    Column("metrics.forward_backward_p50_ms", "fwd+bwd+sync ms", ".1f"),
    Column("metrics.optimizer_p50_ms", "optimizer ms", ".1f"),
    Column("metrics.exposed_comm_ms", "exposed ms", ".1f", note=_tie("vs_local")),
    Column("metrics.comm_ms", "comm ms", ".1f"),
    Column("metrics.comm_share_pct", "of step %", ".0f"),
    Column("metrics.overlap_pct", "overlap %", ".0f"),
    Column("metrics.collectives_per_step", "calls", "d"),
    Column("metrics.comm_bytes_per_step", "sent MB", ",.1f", scale=1e-6),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f"),
    Column("metrics.mfu_pct", "MFU %", ".1f"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
    Column("metrics.vs_torch_ddp", "÷ torch", ".3f", note=_tie("vs_torch_ddp")),
    Column("metrics.vs_torch_ddp_high", "≤ (95 %)", ".3f"),
    Column("metrics.max_abs_param_diff", "max |Δparam|", ".1e"),
    Column(
        "metrics.exposed_vs_torch_ddp", "exposed ÷ torch's", ".2f", note=_tie("exposed_vs_torch_ddp"), optional=True
    ),
    Column("metrics.exposed_vs_torch_ddp_high", "≤ (95 %)", ".2f", optional=True),
    Column("metrics.exposed_all_gather_forward_ms", "all-gather alone fwd ms", ".1f", optional=True),
    Column("metrics.exposed_all_gather_backward_ms", "bwd ms", ".1f", optional=True),
    Column("metrics.exposed_uncovered_ms", "exposed: alone ms", ".1f", optional=True),
    Column("metrics.exposed_slowdown_ms", "slower compute", ".1f", optional=True),
    Column("metrics.exposed_copies_ms", "copies", ".1f", optional=True),
    Column("metrics.exposed_optimizer_ms", "optimizer", "+.1f", optional=True),
    Column("metrics.exposed_idle_ms", "idle", "+.1f", optional=True),
    Column("metrics.exposed_unexplained_ms", "unexplained", "+.1f", optional=True),
]


headline = headline_from(
    "{size} ({num_parameters:M} parameters), batch {batch} × context {context} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}{noise}",
    noise=lambda records: f"; {noise}" if (noise := noise_by_row(records)) else "",
)


def unexplained_rows(records: Sequence[Record]) -> list[str]:
    """Rows whose exposed communication the trace explains to less than 5 % of the step or 1 ms, one line each.

    The account is of steps under the profiler, so a row within its noise is let pass.
    """
    return [
        f"{record.variant}: {record.metrics['exposed_unexplained_ms']:+.1f} ms of "
        f"{record.metrics['exposed_comm_ms']:.1f} ms exposed communication are in no part of its trace's account"
        f"{_what_to_try(record)}"
        for record in records
        if record.metrics.get("exposed_closes") is False
        and abs(record.metrics["exposed_unexplained_ms"])
        > (noise_of(record.metrics) or 0.0) / 100 * record.metrics["step_p50_ms"]
    ]


def _what_to_try(record: Record) -> str:
    """What usually closes an account, with the numbers of this run."""
    config = record.config
    more = {name: config[name] for name in ("profile_steps", "steps") if isinstance(config.get(name), int)}
    options = " and ".join(f"--{name.replace('_', '-')} {2 * value + 1}" for name, value in more.items())
    first = f"{options}, since the account is of the traced steps alone, then " if options else ""
    return f"; try {first}a machine that does nothing else"


def wrong_rows(records: Sequence[Record]) -> list[str]:
    """What is wrong with the results, one line each: volumes off the closed form, parameters off the reference."""
    problems = []
    for record in records:
        metrics = record.metrics
        if metrics.get("volume_as_predicted") is False:
            problems.append(
                f"{record.variant}: sent {metrics['collectives_per_step']} collectives, "
                f"{metrics['comm_bytes_per_step']} bytes; the closed form says "
                f"{metrics['predicted_collectives_per_step']} and {metrics['predicted_comm_bytes_per_step']}"
            )
        difference = metrics.get("max_abs_param_diff")
        if difference is not None and not difference < 1e-5:  # fp32 SGD at rate 0.1: some 1e-8 from rounding
            problems.append(f"{record.variant}: parameters differ from one process by {difference:.1e}")
    return problems


def draw_step_times(records: Sequence[Record], path: Path) -> None:
    """Stacked bars: compute, exposed communication, optimizer; whiskers from p20 to p80 of the step."""
    compute_ms = next((r.metrics.get("forward_backward_p50_ms") for r in records if r.variant == "local"), None)

    def cells(metrics: Mapping[str, Any]) -> list[float | str | None]:
        if metrics["step_p50_ms"] == OOM or compute_ms is None:
            return [OOM if metrics["step_p50_ms"] == OOM else None] * 3
        return [compute_ms, metrics["forward_backward_p50_ms"] - compute_ms, metrics["optimizer_p50_ms"]]

    rows = [cells(record.metrics) for record in records]
    ends = [[record.metrics.get(f"step_{p}_ms") for p in ("p20", "p80")] for record in records]
    stacked_bars(
        path, [record.variant for record in records],
        dict(zip(("compute", "exposed communication", "optimizer"), zip(*rows, strict=True), strict=True)),
        title=f"Where a step's time goes: {headline(records)}", unit="ms",
        whiskers=[None if row[0] in (OOM, None) else end for row, end in zip(rows, ends, strict=True)],
    )  # fmt: skip


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=(
        *("variant", "step_p50_ms", "noise_pct", "exposed_comm_ms", "overlap_pct", "vs_torch_ddp", "peak_alloc_bytes"),
        "max_abs_param_diff",
    ),
    pictures={"step_time.png": draw_step_times},
    findings=lambda records: [
        *(f"WRONG: {problem}" for problem in wrong_rows(records)),
        *(f"UNEXPLAINED: {row}" for row in unexplained_rows(records)),
    ],
    reading="Exposed communication is what a step takes longer than the same step without communication (local). "
    "Communication time and overlap, the share of it that compute covers, come from the profiler's trace of rank 0; "
    "calls and bytes are counted at torch's dispatcher. The ratio to torch is over torch DDP's fastest row, paired "
    "step by step; beside it stands the upper end of its 95 % bootstrap interval. The last column is the largest "
    "difference of any parameter from training in one process after a few steps of fp32 SGD on the tiny preset. A tie "
    "is a ratio whose 95 % interval contains 1, for the exposed time that of the step over local's; ± is the row's own "
    "noise.\n\n"
    "In the timeline compute is above, communication below; what compute does not hide is orange.",
    prediction="Collectives and bytes per step in closed form (distlab.theory.volume). Step times are predicted "
    "by `distlab run predict_steps`, before a measurement.",
)
