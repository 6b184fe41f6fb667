"""View of `ddp_bench`: columns, comparisons, wrong rows, and the picture of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from distlab.bench.reference import other_parameters, rows_that_ran_eager
from distlab.experiment import Column, Record, Records, View, headline_from
from distlab.measure import closes
from distlab.parallel import STRATEGIES, Strategy
from distlab.report import (
    NOISE,
    UNCLEAR,
    Ratio,
    fastest,
    gib_column,
    is_number,
    noise_by_row,
    noise_of,
    row_of,
    stacked_bars,
    text_column,
    verdict_of,
    with_interval,
)

REFUSED = "refused"
FAILED = "failed"
NOISY_PCT = 10  # of a row, above which its noise is named as a reason for an open account
IDLE_PCT = 10  # of local's step, above which the host is the bottleneck
OVERHEAD_PCT = 10  # of a step, above which communication is in the way
COVERED_PCT = 50  # of communication, below which it is not called hidden
NOT_EXPLAINED = "not explained"
RIGHT = "right"  # a verdict that begins so: the row's gradients are those of one process
CAUSES = {
    "exposed communication": "overhead_exposed_ms",
    "slower compute": "overhead_slowdown_ms",
    "copies": "overhead_copies_ms",
    "idle": "overhead_idle_ms",
}

PARTS = (*CAUSES.values(), "overhead_optimizer_ms")


def strategy_of(row: str) -> Strategy | None:
    """Return the strategy of a row, whose name may end with a bucket size. None if it is gone."""
    names = [name for name in STRATEGIES if f"{row}-".startswith(f"{name}-")]
    return STRATEGIES.get(max(names, key=len, default=None))


LOCAL = row_of("local")
TORCH = fastest(
    "step_p50_ms", lambda r: (s := strategy_of(r.variant)) and s.is_peer and s.updates == "all"
)
OVER_LOCAL = Ratio("vs_local", LOCAL)
OVER_TORCH = Ratio("vs_torch_ddp", TORCH)


def compare(records: Records) -> None:
    """Compare right rows with `local` and torch DDP's fastest row.

    Also write how much of the overhead their traces leave unexplained.
    """
    sound = [record for record in records if not wrong_rows([record])]
    for ratio in (OVER_LOCAL, OVER_TORCH):
        ratio.add(sound)
    local = LOCAL(sound)
    for metrics in (record.metrics for record in sound if local and "vs_local" in record.metrics):
        metrics["overhead_ms"] = metrics["step_p50_ms"] - local.metrics["step_p50_ms"]
        if "overhead_exposed_ms" in metrics:
            unexplained = metrics["overhead_ms"] - sum(metrics[name] for name in PARTS)
            metrics["overhead_unexplained_ms"] = unexplained
            metrics["overhead_closes"] = closes(unexplained, metrics["step_p50_ms"])


def examples_of(records: Records) -> str:
    """Batch, and context where there is one, in a few words."""
    config = records[0].config
    return f"batch {config.get('batch')}" + (
        f" × context {c}" if (c := config.get("context")) else ""
    )


def host_bound(records: Records) -> str:
    """Return a warning if the GPU waits for the host in more than 10 % of `local`'s step."""
    local = LOCAL(records)
    idle = None if local is None else local.metrics.get("gpu_idle_pct")
    if not is_number(idle) or idle <= IDLE_PCT:
        return ""
    return f"; this run measures the host: the GPU is idle in {idle:.0f} % of local's step"


headline = headline_from(
    "{size} ({num_parameters:M} parameters), {examples} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}{noise}{host}",
    examples=examples_of,
    noise=lambda records: f"; {noise}" if (noise := noise_by_row(records)) else "",
    host=host_bound,
)


def open_rows(records: Records) -> list[str]:
    """Name rows whose overhead the trace does not explain to within 5 % of the step or 1 ms."""
    return [record.variant for record in records if record.metrics.get("overhead_closes") is False]


def open_account(record: Record) -> str:
    """Return the mark of a row whose account does not close, for its overhead in the table."""
    return " open" if record.metrics.get("overhead_closes") is False else ""


def open_accounts(records: Records) -> list[str]:
    """Say in one line which rows are not explained, on every backend and at every noise."""
    rows = open_rows(records)
    if not rows:
        return []
    noise = max((noise_of(record.metrics) or 0.0) for record in records)
    remedy = "more --profile-steps may close it"
    if noise > NOISY_PCT:
        remedy = f"steps differ by up to ± {noise:.0f} % here, so a quiet machine may close it"
    return [
        f"The trace does not explain the overhead of {', '.join(rows)} (marked open). The page says how much is "
        f"unexplained. {remedy[0].upper()}{remedy[1:]}."
    ]


def wrong_rows(records: Records) -> list[str]:
    """Name wrong volumes, parameters or gradients and rows with eager code, a line each."""
    problems = []
    for record in records:
        verdict = record.metrics.get("verdict")
        if verdict is not None and not verdict.startswith(RIGHT):
            problems.append(f"{record.variant}: {record.metrics.get('verdict_detail', verdict)}")
    for record in records:
        metrics = record.metrics
        if metrics.get("volume_as_predicted") is False:
            problems.append(
                f"{record.variant}: sent {metrics['collectives_per_step']} collectives, "
                f"{metrics['comm_bytes_per_step']} bytes; the closed form says "
                f"{metrics['predicted_collectives_per_step']} and {metrics['predicted_comm_bytes_per_step']}"
            )
        if metrics.get("sent_nothing"):
            problems.append(
                f"{record.variant}: sent nothing, so no row is compared with it{_why_silent(record)}"
            )
    return problems + rows_that_ran_eager(records) + other_parameters(records)


def _why_silent(record: Record) -> str:
    """Return the known reason why a peer sends nothing, for the end of a sentence."""
    strategy = strategy_of(record.variant)
    if strategy is None or not strategy.is_peer:
        return ""
    return "; torch's static_graph DDP does that where forward returns a type that pytree does not know"


def compiled_parts(record: Record) -> str | None:
    """Return `24 of 24` for a compiled row, None for an eager one."""
    calls = record.metrics.get("compiled_calls")
    return None if calls is None else f"{calls} of {record.metrics['compiled_parts']}"


@dataclass(frozen=True)
class Overhead:
    """The share of a row's step that it takes longer than `local`, in %, with its 95 % interval."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, record: Record) -> Optional["Overhead"]:
        """Return the overhead of a row; None if it was not compared with `local`."""
        ratios = [record.metrics.get(f"vs_local{end}") for end in ("", "_low", "_high")]
        if not all(is_number(ratio) and ratio > 0 for ratio in ratios):
            return None
        return cls(*(100 * (1 - 1 / ratio) for ratio in ratios))


def what_communication_costs(records: Records) -> list[str]:
    """Say whether the fastest of our strategies that overlap hides its communication.

    There are three verdicts. *Hidden* needs an interval that ends below 10 % of the step and a
    trace in which compute covers at least half of the communication. *In the way* needs an interval
    that begins above 10 %. Everything else is *cannot tell*, with the reason and what would help.
    """
    if records and records[0].config.get("world_size") == 1:
        return ["There is one rank, and nothing is communicated: overheads are what wrappers cost."]
    overlapping = [
        r for r in ours(records, "overhead_ms") if not strategy_of(r.variant).after_backward
    ]
    if not overlapping:
        return []
    best = min(overlapping, key=lambda r: r.metrics["step_p50_ms"])
    overhead = Overhead.of(best)
    if overhead is None:
        return []
    who = f"{best.variant}, the fastest of ours that overlaps,"
    measured = (
        f"takes {best.metrics['overhead_ms']:+.1f} ms longer than local, {overhead.middle:.0f} % of its step "
        f"(95 %: {overhead.low:.0f} to {overhead.high:.0f} %)"
    )
    if overhead.low > OVERHEAD_PCT:
        return [f"Communication is in the way: {who} {measured}{_largest_cause(best)}."]
    doubt = _doubt(best, overhead, records)
    if doubt:
        return [f"This run cannot tell whether communication is hidden: {who} {measured}. {doubt}"]
    covered = best.metrics["overlap_pct"]
    return [
        f"Communication is hidden: {who} {measured}, and compute covers {covered:.0f} % of its communication."
    ]


def _doubt(best: Record, overhead: Overhead, records: Records) -> str:
    """Return the reason why communication cannot be called hidden. Empty if it can."""
    metrics = best.metrics
    local = LOCAL(records)
    noise = max(noise_of(each.metrics) or 0.0 for each in (best, local) if each is not None)
    try_again = f"Noise is ± {noise:.0f} %: try --rounds 6, or a machine that does nothing else."
    if overhead.high > OVERHEAD_PCT:
        return f"The interval reaches above {OVERHEAD_PCT} %. {try_again}"
    if overhead.high < 0 and strategy_of(best.variant).updates == "all":
        return f"A strategy cannot be faster than no communication, so other work disturbed the run. {try_again}"
    covered = metrics.get("overlap_pct")
    if not is_number(covered):
        return (
            "There is no trace of it that shows what covers its communication: see --profile-steps."
        )
    if covered < COVERED_PCT:
        return f"Compute covers only {covered:.0f} % of its communication in the trace."
    return ""


def _largest_cause(record: Record) -> str:
    """Return the cause of most of a row's overhead. Empty if the trace does not explain it."""
    causes = {text: record.metrics.get(name) for text, name in CAUSES.items()}
    causes = {text: ms for text, ms in causes.items() if is_number(ms) and ms > 0}
    if not causes or not record.metrics.get("overhead_closes"):
        return ""
    largest = max(causes, key=causes.__getitem__)
    return f", most of it {largest} ({causes[largest]:.1f} ms)"


def against_the_peer(records: Records) -> list[str]:
    """Compare the fastest of our strategies with torch DDP's fastest row."""
    compared = ours(records, "vs_torch_ddp")
    if not compared:
        return []
    best = min(compared, key=lambda r: r.metrics["vs_torch_ddp"])
    measured = with_interval(best, "vs_torch_ddp", ".3f")
    theirs = "torch DDP's fastest row"
    if verdict_of(best, "vs_torch_ddp") == UNCLEAR:
        return [f"{best.variant}, the fastest of ours, ties with {theirs}: {measured}."]
    ratio, interval = measured.split(" ", 1)
    return [
        f"{best.variant}, the fastest of ours, takes {ratio} times as long as {theirs} {interval}."
    ]


def ours(records: Records, metric: str) -> list[Record]:
    """Select the rows of this lab's communicating strategies that have this number."""
    known = [r for r in records if is_number(r.metrics.get(metric))]
    return [r for r in known if (s := strategy_of(r.variant)) and s.synchronizes and not s.is_peer]


def draw_step_times(records: Records, path: Path) -> None:
    """Draw a bar per row: compute, optimizer, and the overhead by its causes.

    Whiskers reach from p20 to p80 of the step.

    Compute is `local`'s step without its optimizer. Causes have the length that the trace gives
    them. The overhead of a row without a trace, or whose account does not close, is one grey part,
    `not explained`. The number is the median step. A bar may reach beyond it, where a cause is
    offset by a negative one, such as compute that is faster.
    """
    timed = [record for record in records if is_number(record.metrics.get("step_p50_ms"))]
    local = LOCAL(timed)
    parts = {name: [] for name in ("compute", "optimizer", *CAUSES, NOT_EXPLAINED)}
    whiskers, medians = [], []
    for record in records:
        metrics = record.metrics
        if isinstance(metrics["step_p50_ms"], str):  # out of memory, refused
            bar = dict.fromkeys(parts, metrics["step_p50_ms"])
        elif local is None:
            bar = dict.fromkeys(parts)
        else:
            bar = _step_parts(metrics, local.metrics)
        for name, values in parts.items():
            values.append(bar[name])
        drawn = local is not None and is_number(metrics["step_p50_ms"])
        whiskers.append((metrics["step_p20_ms"], metrics["step_p80_ms"]) if drawn else None)
        medians.append(metrics["step_p50_ms"] if drawn else None)
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
    compute = local["step_p50_ms"] - local["optimizer_p50_ms"]
    optimizer = metrics["optimizer_p50_ms"]
    rest = metrics["step_p50_ms"] - optimizer - compute
    bar = {"compute": compute, "optimizer": optimizer} | dict.fromkeys(CAUSES, 0.0)
    if metrics.get("overhead_closes"):
        for text, name in CAUSES.items():
            bar[text] = max(metrics.get(name) or 0.0, 0.0)
            rest -= bar[text]
    return bar | {NOT_EXPLAINED: max(rest, 0.0)}


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
            note=lambda r: OVER_LOCAL.tie(r) + open_account(r),
            about="what a step takes longer than `local`'s; a tie where the 95 % interval of their ratio contains 1; "
            "open where the trace leaves more than 5 % of the step, or 1 ms, unexplained",
        ),
        Column(
            "metrics.comm_ms",
            "comm ms",
            ".1f",
            about="time of all communication in the trace of rank 0",
        ),
        Column(
            "metrics.exposed_ms", "exposed ms", ".1f", about="the part of it that no compute covers"
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
        OVER_TORCH.column(
            "÷ torch DDP",
            about="over torch DDP's fastest row, paired step by step; a tie where the 95 % interval contains 1",
        ),
        Column(
            "metrics.max_abs_param_diff",
            "parameter error",
            ".1e",
            about="the largest difference of any parameter from training in one process, after a few steps of fp32 SGD "
            "on the tiny preset",
        ),
        text_column(
            "config.ran_compiled",
            "compiled",
            optional=True,
            derived=compiled_parts,
            about="compiled graphs that ran in a step after the timing, of those that a compiled step runs",
        ),
        text_column(
            "metrics.verdict",
            "as one process",
            optional=True,
            about="whether gradients, parameters and buffers are those of training in one process, as `distlab check` "
            "judges",
        ),
        Column(
            "metrics.traced_step_ms",
            "traced step ms",
            ".1f",
            optional=True,
            about="the step under the profiler whose account is given: on a CPU, of several the one nearest the median",
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
            derived=lambda record: (strategy := strategy_of(record.variant)) and strategy.does,
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
    findings=lambda records: [
        *(
            f"Left out: {record.metrics['refusal']}."
            for record in records
            if record.metrics.get("refusal")
        ),
        *what_communication_costs(records),
        *against_the_peer(records),
        *open_accounts(records),
    ],
    reading="Overhead is divided among its causes by the profiler's trace of rank 0. In the bars, causes have "
    "the length that the trace gives them, and what is not explained is grey. Where the account does not close, all of "
    "the overhead is. The number is the median step. A bar may reach beyond it, where a negative cause offsets "
    "others.\n\n"
    "In the timeline compute is above, communication below; what is exposed is orange.",
    prediction="Collectives and bytes per step in closed form (distlab.theory.volume). Step times are predicted "
    "by `distlab run predict`, before a measurement.",
)
