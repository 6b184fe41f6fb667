"""Comparisons of rows of `ddp_bench`, and the sentences that follow from them.

Every function takes the rows of a run. Those that compute something return new rows.
"""

from dataclasses import dataclass
from typing import Optional

from distlab.bench.reference import other_parameters, rows_that_ran_eager
from distlab.experiment import Record, Records, headline_from
from distlab.measure import closes
from distlab.parallel import STRATEGIES, Strategy
from distlab.report import (
    TOO_WIDE,
    UNCLEAR,
    fastest,
    interval_of,
    is_number,
    is_too_wide,
    noise_by_row,
    noise_of,
    ratio_metrics,
    row_named,
    verdict_of,
    waiting,
    with_interval,
)

REFUSED = "refused"
FAILED = "failed"
WRONG = "WRONG"
RIGHT = "right"  # beginning of a verdict: the row's gradients are those of one process
NOISY_PCT = 10  # a row with more noise may be the reason for an open account
IDLE_PCT = 10  # if the GPU idles for more of local's step, the host is the bottleneck
OVERHEAD_PCT = 10  # if its overhead is more of a step, communication is in the way
COVERED_PCT = 50  # if compute covers less of it, communication is not called hidden
CAUSES = {
    "exposed communication": "overhead_exposed_ms",
    "slower compute": "overhead_slowdown_ms",
    "copies": "overhead_copies_ms",
    "idle": "overhead_idle_ms",
}
# The optimizer is a part of the overhead that can be negative, so it is not among the causes.
PARTS = (*CAUSES.values(), "overhead_optimizer_ms")


def strategy_of(row: str) -> Strategy | None:
    """Return the strategy of a row, whose name may end with a bucket size. None if it is gone."""
    # The longest name that fits: `bucketed-dma-100` begins with `bucketed-` and with
    # `bucketed-dma-`.
    names = [name for name in STRATEGIES if f"{row}-".startswith(f"{name}-")]
    return STRATEGIES.get(max(names, key=len, default=None))


def local_row(records: Records) -> Record | None:
    """Return the row without communication."""
    return row_named("local", records)


def fastest_of_torch_ddp(records: Records) -> Record | None:
    """Return torch DDP's fastest row: that of a peer which updates all parameters on each rank."""
    rows = []
    for record in records:
        strategy = strategy_of(record.variant)
        # torch-zero and FSDP2 are peers too, but each rank updates only a part of the parameters.
        if strategy is not None and strategy.is_peer and strategy.updates == "all":
            rows.append(record)
    return fastest(rows, "step_p50_ms")


def compare(records: Records) -> list[Record]:
    """Return the rows, the right ones compared with `local` and with torch DDP's fastest row.

    They also have what their overhead is, and how much of it their traces leave unexplained.
    """
    # A row that skips work can be fast. Neither its time nor a ratio to it would mean anything.
    right = [record for record in records if not wrong_rows([record])]
    local = local_row(right)
    torch_ddp = fastest_of_torch_ddp(right)
    found = []
    for record in records:
        if record not in right:
            found.append(record)
            continue
        metrics = record.metrics | ratio_metrics("vs_torch_ddp", record, torch_ddp)
        over_local = ratio_metrics("vs_local", record, local)
        if over_local:
            metrics |= over_local | overhead_metrics(record, local)
        found.append(record.with_metrics(metrics))
    return found


def overhead_metrics(record: Record, local: Record) -> dict[str, float | bool]:
    """Return what a row's step takes longer than `local`'s, and whether its trace explains it."""
    step_ms = record.metrics["step_p50_ms"]
    overhead_ms = step_ms - local.metrics["step_p50_ms"]
    if "overhead_exposed_ms" not in record.metrics:  # no trace
        # Without a trace there is nothing that the overhead could be divided among.
        return {"overhead_ms": overhead_ms}
    # The overhead is measured without a profiler, its parts come from a trace with one. The rest is
    # what these do not agree on.
    unexplained_ms = overhead_ms - sum(record.metrics[part] for part in PARTS)
    return {
        "overhead_ms": overhead_ms,
        "overhead_unexplained_ms": unexplained_ms,
        "overhead_closes": closes(unexplained_ms, overhead_ms, step_ms),
    }


def examples_of(records: Records) -> str:
    """Return the batch, and the context where there is one, in a few words."""
    config = records[0].config
    context = config.get("context")
    batch = f"batch {config.get('batch')}"
    return f"{batch} × context {context}" if context else batch


def noise_in_headline(records: Records) -> str:
    """Return the rows' noise, for the end of a headline."""
    noise = noise_by_row(records)
    return f"; {noise}" if noise else ""


def host_bound(records: Records) -> str:
    """Return a warning if the GPU waits for the host in more than 10 % of a row's step.

    If `local` is such a row, all are, and the warning is about the run.
    """
    local = local_row(records)
    idle = None if local is None else local.metrics.get("gpu_idle_pct")
    # A run on a CPU has no such number, and the host is the device there.
    if is_number(idle) and idle > IDLE_PCT:
        return f"; this run measures the host: the GPU is idle in {idle:.0f} % of local's step"
    return waiting(records)


headline = headline_from(
    "{size} ({num_parameters:M} parameters), {examples} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}{noise}{host}",
    examples=examples_of,
    noise=noise_in_headline,
    host=host_bound,
)


def findings(records: Records) -> list[str]:
    """Return the sentences that follow from the rows."""
    left_out = []
    # Reasons come first, because they explain why a row is missing below.
    for record in records:
        if record.metrics.get("refusal"):
            left_out.append(f"Left out: {record.metrics['refusal']}.")
    return [
        *left_out,
        *what_communication_costs(records),
        *against_the_peer(records),
        *open_accounts(records),
    ]


def open_rows(records: Records) -> list[str]:
    """Name rows whose overhead the trace does not explain well enough (`closes`)."""
    # `is False`: rows without a trace have None, and they are not open.
    return [record.variant for record in records if record.metrics.get("overhead_closes") is False]


def open_account(record: Record) -> str:
    """Return the mark of a row whose account does not close, for its overhead in the table."""
    return " open" if record.metrics.get("overhead_closes") is False else ""


def open_accounts(records: Records) -> list[str]:
    """Say in one line which rows are not explained, on every backend and at every noise."""
    rows = open_rows(records)
    if not rows:
        return []
    # The parts cannot add up to a number that is not known better than this.
    noise = max((noise_of(record.metrics) or 0.0) for record in records)
    # More traced steps help only if the noise is small enough.
    remedy = "more --profile-steps may close it"
    if noise > NOISY_PCT:
        remedy = f"steps differ by up to ± {noise:.0f} % here, so a quiet machine may close it"
    return [
        f"The trace does not explain the overhead of {', '.join(rows)} (marked open). The page "
        f"says how much is unexplained. {remedy[0].upper()}{remedy[1:]}."
    ]


def wrong_rows(records: Records) -> list[str]:
    """Name wrong volumes, parameters or gradients and rows with eager code, a line each."""
    problems = []
    for record in records:
        verdict = record.metrics.get("verdict")
        # A verdict may have an addition, such as `right, sent nothing`, so its beginning decides.
        if verdict is not None and not verdict.startswith(RIGHT):
            problems.append(f"{record.variant}: {record.metrics.get('verdict_detail', verdict)}")
    for record in records:
        metrics = record.metrics
        # None means that there was no prediction to compare with.
        if metrics.get("volume_as_predicted") is False:
            problems.append(
                f"{record.variant}: sent {metrics['collectives_per_step']} collectives, "
                f"{metrics['comm_bytes_per_step']} bytes; the closed form says "
                f"{metrics['predicted_collectives_per_step']} and "
                f"{metrics['predicted_comm_bytes_per_step']}"
            )
        if metrics.get("sent_nothing"):
            problems.append(
                f"{record.variant}: sent nothing, so no row is compared with "
                f"it{_why_silent(record)}"
            )
    return problems + rows_that_ran_eager(records) + other_parameters(records)


def _why_silent(record: Record) -> str:
    """Return the known reason why a peer sends nothing, for the end of a sentence."""
    strategy = strategy_of(record.variant)
    if strategy is None or not strategy.is_peer:
        return ""
    return (
        "; torch's static_graph DDP does that where forward returns a type that pytree does not "
        "know"
    )


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
        # All three ratios are needed, since the finding is about the interval.
        if not all(is_number(ratio) and ratio > 0 for ratio in ratios):
            return None
        # ratio = step/local, so the share of the step that is not local's is 1 − 1/ratio.
        return cls(*(100 * (1 - 1 / ratio) for ratio in ratios))


def what_communication_costs(records: Records) -> list[str]:
    """Say whether the fastest of our strategies that overlap hides its communication.

    There are three verdicts. *Hidden* needs an interval that ends below 10 % of the step and a
    trace in which compute covers at least half of the communication. *In the way* needs an interval
    that begins above 10 %. Everything else is *cannot tell*, with the reason and what would help.
    """
    if records and records[0].config.get("world_size") == 1:
        return ["There is one rank, and nothing is communicated: overheads are what wrappers cost."]
    # Strategies that send after backward cannot hide anything, so they do not answer the question.
    overlapping = [
        r for r in ours(records, "overhead_ms") if not strategy_of(r.variant).after_backward
    ]
    if not overlapping:
        return []
    # The question is whether communication can be hidden, so the best attempt answers it.
    best = min(overlapping, key=lambda r: r.metrics["step_p50_ms"])
    overhead = Overhead.of(best)
    if overhead is None:
        return []
    who = f"{best.variant}, the fastest of ours that overlaps,"
    overhead_ms = best.metrics["overhead_ms"]
    more = "more" if overhead_ms >= 0 else "less"
    interval = f"95 %: {overhead.low:.0f} to {overhead.high:.0f} %"
    if is_too_wide(interval_of(best, "vs_local")):
        interval = TOO_WIDE
    measured = (
        f"takes {abs(overhead_ms):.1f} ms {more} than local, {overhead.middle:.0f} % "
        f"of its step ({interval})"
    )
    # The whole interval is above the limit. A median above it would not suffice.
    if overhead.low > OVERHEAD_PCT:
        return [f"Communication is in the way: {who} {measured}{_largest_cause(best)}."]
    doubt = _doubt(best, overhead, records)
    if doubt:
        return [f"This run cannot tell whether communication is hidden: {who} {measured}. {doubt}"]
    covered = best.metrics["overlap_pct"]
    return [
        f"Communication is hidden: {who} {measured}, and compute covers {covered:.0f} % of its "
        "communication."
    ]


def _doubt(best: Record, overhead: Overhead, records: Records) -> str:
    """Return the reason why communication cannot be called hidden. Empty if it can."""
    metrics = best.metrics
    local = local_row(records)
    # The overhead is a difference of two rows, so the noisier one limits it.
    noise = max(noise_of(each.metrics) or 0.0 for each in (best, local) if each is not None)
    try_again = f"Noise is ± {noise:.0f} %: try --rounds 6, or a machine that does nothing else."
    if is_too_wide(interval_of(best, "vs_local")):
        return try_again
    if overhead.high > OVERHEAD_PCT:
        return f"The interval reaches above {OVERHEAD_PCT} %. {try_again}"
    # Strategies that update only a part of the parameters can really be faster than `local`.
    if overhead.high < 0 and strategy_of(best.variant).updates == "all":
        return (
            "A strategy cannot be faster than no communication, so other work disturbed the "
            f"run. {try_again}"
        )
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
    # A cause that saves time cannot explain why a row is slower.
    causes = {text: ms for text, ms in causes.items() if is_number(ms) and ms > 0}
    # The causes of an open account do not add up to the overhead, so the largest of them may not be
    # the largest part.
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
    # The interval contains 1, so neither is faster.
    if verdict_of(best, "vs_torch_ddp") == UNCLEAR:
        return [f"{best.variant}, the fastest of ours, ties with {theirs}: {measured}."]
    # `measured` is a ratio followed by its interval in brackets.
    ratio, interval = measured.split(" ", 1)
    return [
        f"{best.variant}, the fastest of ours, takes {ratio} times as long as {theirs} {interval}."
    ]


def ours(records: Records, metric: str) -> list[Record]:
    """Select the rows of this lab's communicating strategies that have this number."""
    known = [r for r in records if is_number(r.metrics.get(metric))]
    found = []
    for record in known:
        strategy = strategy_of(record.variant)
        if strategy is not None and strategy.synchronizes and not strategy.is_peer:
            found.append(record)
    return found
