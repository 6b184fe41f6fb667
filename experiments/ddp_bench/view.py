"""What the rows of `ddp_bench` say: columns, comparisons, what is wrong, and the picture of a step."""

from pathlib import Path

from distlab.bench.reference import other_parameters, rows_that_ran_eager
from distlab.experiment import Column, Record, Records, View, headline_from
from distlab.measure import closes
from distlab.parallel import STRATEGIES, Strategy
from distlab.report import (
    NOISE,
    Ratio,
    fastest,
    gib_column,
    is_number,
    noise_by_row,
    noise_of,
    row_of,
    stacked_bars,
    text_column,
    waiting,
)

REFUSED = "refused"
NOISY_PCT = 10  # of a row, above which no account is expected to close
HOST_BOUND_PCT = 50  # of the step without work on the GPU
OVERHEAD_PCT = 10  # of a step, above which communication is in the way
CAUSES = {
    "exposed communication": "overhead_exposed_ms",
    "slower compute": "overhead_slowdown_ms",
    "copies": "overhead_copies_ms",
    "idle": "overhead_idle_ms",
}

PARTS = (*CAUSES.values(), "overhead_optimizer_ms")


def strategy_of(row: str) -> Strategy | None:
    """Find the strategy of a row, whose name a bucket size may follow; None of a record whose strategy is gone."""
    names = [name for name in STRATEGIES if f"{row}-".startswith(f"{name}-")]
    return STRATEGIES.get(max(names, key=len, default=None))


LOCAL = row_of("local")
TORCH = fastest("step_p50_ms", lambda r: (s := strategy_of(r.variant)) and s.is_peer and s.updates == "all")
OVER_LOCAL = Ratio("vs_local", LOCAL)
OVER_TORCH = Ratio("vs_torch_ddp", TORCH)


def compare(records: Records) -> None:
    """Hold the rows that ran and are right against `local` and torch DDP's fastest, and say what of the overhead their
    traces leave open.
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
    return f"batch {config.get('batch')}" + (f" × context {c}" if (c := config.get("context")) else "")


headline = headline_from(
    "{size} ({num_parameters:M} parameters), {examples} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}{noise}{waiting}",
    examples=examples_of,
    noise=lambda records: f"; {noise}" if (noise := noise_by_row(records)) else "",
    waiting=lambda records: waiting([r for r in records if r.variant == "local"]),
)


def unexplained_rows(records: Records) -> list[str]:
    """Rows of whose overhead the trace leaves more than 5 % of the step and 1 ms unexplained.

    The account is of steps under the profiler, so a row within its noise is let pass; where the GPU waits for the host
    most of the time, which the headline says, the profiler's own calls decide and no account can close.
    """
    if any((r.metrics.get("gpu_idle_pct") or 0.0) > HOST_BOUND_PCT for r in records if r.variant == "local"):
        return []
    return [
        record.variant
        for record in records
        if record.metrics.get("overhead_closes") is False
        and abs(record.metrics["overhead_unexplained_ms"])
        > (noise_of(record.metrics) or 0.0) / 100 * record.metrics["step_p50_ms"]
    ]


def open_accounts(records: Records) -> list[str]:
    """One line for the rows that are not explained; none on a CPU, or where a row is noisier than 10 %."""
    noisy = any((noise_of(record.metrics) or 0.0) > NOISY_PCT for record in records)
    if noisy or records[0].config.get("backend") == "gloo" or not (rows := unexplained_rows(records)):
        return []
    return [f"(The trace explains the overhead of {', '.join(rows)} only in part; the page says how much is open, "
            "and more --profile-steps, or a machine that does nothing else, may close it.)"]


def wrong_rows(records: Records) -> list[str]:
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
        if metrics.get("sent_nothing"):
            problems.append(
                f"{record.variant}: sent nothing, so no row is compared with it; torch's static_graph DDP does that "
                "where forward returns a type that pytree does not know"
            )
    return problems + rows_that_ran_eager(records) + other_parameters(records)


def compiled_parts(record: Record) -> str | None:
    """Return `24 of 24` for a compiled row, None for an eager one."""
    calls = record.metrics.get("compiled_calls")
    return None if calls is None else f"{calls} of {record.metrics['compiled_parts']}"


def what_communication_costs(records: Records) -> list[str]:
    """Say whether the fastest of our strategies that overlap hides its communication, or what most of the rest is."""
    overlapping = [r for r in ours(records, "overhead_ms") if not strategy_of(r.variant).after_backward]
    if not overlapping:
        return []
    best = min(overlapping, key=lambda r: r.metrics["step_p50_ms"])
    share = 100 * best.metrics["overhead_ms"] / best.metrics["step_p50_ms"]
    hidden = share <= OVERHEAD_PCT or OVER_LOCAL.tie(best)
    causes = {text: ms for text, name in CAUSES.items() if is_number(ms := best.metrics.get(name)) and ms > 0}
    told = best.metrics.get("overhead_closes") and not hidden
    most = max(causes, key=causes.__getitem__, default=None) if told else None
    return [
        f"Communication is {'hidden' if hidden else 'in the way'}: {best.variant}, the fastest of ours that overlaps, "
        f"has {best.metrics['overhead_ms']:.1f} ms overhead, {max(share, 0.0):.0f} % of its step"
        f"{f', most of it {most} ({causes[most]:.1f} ms)' if most else ''}."
    ]


def against_the_peer(records: Records) -> list[str]:
    """Say where the fastest of our strategies stands beside torch DDP's fastest row."""
    compared = ours(records, "vs_torch_ddp")
    if not compared:
        return []
    best = min(compared, key=lambda r: r.metrics["vs_torch_ddp"])
    ratio = best.metrics["vs_torch_ddp"]
    than = f"takes {ratio:.3f} times as long as torch DDP's fastest row"
    return [f"{best.variant}, the fastest of ours, {than}{': a tie' if OVER_TORCH.tie(best) else ''}."]


def ours(records: Records, metric: str) -> list[Record]:
    """Select the rows of this lab's strategies, of those that communicate, that have this number."""
    known = [r for r in records if is_number(r.metrics.get(metric))]
    return [r for r in known if (s := strategy_of(r.variant)) and s.synchronizes and not s.is_peer]


def draw_step_times(records: Records, path: Path) -> None:
    """Stacked bars: compute, optimizer, and the overhead by its causes; whiskers from p20 to p80 of the step.

    A bar ends at the step's median; compute is what local's optimizer leaves of its step. What the rest takes longer is
    divided in the proportions of the trace's account; without one it is a single part, `overhead`.
    """
    local = next((r.metrics for r in records if r.variant == "local" and is_number(r.metrics.get("step_p50_ms"))), None)
    parts = {name: [] for name in ("compute", "optimizer", *CAUSES, "overhead")}
    ends = []
    for metrics in (record.metrics for record in records):
        said = metrics["step_p50_ms"] if isinstance(metrics["step_p50_ms"], str) else None
        bar = dict.fromkeys(parts, said)
        if local and said is None:
            compute, optimizer = local["step_p50_ms"] - local["optimizer_p50_ms"], metrics["optimizer_p50_ms"]
            longer = metrics["step_p50_ms"] - optimizer - compute
            causes = {text: max(metrics.get(name) or 0.0, 0.0) for text, name in CAUSES.items()}
            causes = causes if any(causes.values()) else {"overhead": 1.0}
            bar = dict.fromkeys(parts, 0.0) | {"compute": compute, "optimizer": optimizer}
            bar |= {text: longer * ms / sum(causes.values()) for text, ms in causes.items()}
        for name, value in bar.items():
            parts[name].append(value)
        ends.append((metrics["step_p20_ms"], metrics["step_p80_ms"]) if local and said is None else None)
    drawn = {name: values for name, values in parts.items() if any(values) or name in ("compute", "optimizer")}
    title = f"Where a step's time goes: {headline(records)}"
    stacked_bars(path, [record.variant for record in records], drawn, title=title, unit="ms", whiskers=ends)


VIEW = View(
    columns=[
        Column("variant", "strategy"),
        Column("metrics.step_p20_ms", "step p20 ms", ".1f", about="a fifth of the steps took less"),
        Column("metrics.step_p50_ms", "p50 ms", ".1f", about="the median step"),
        Column("metrics.step_p80_ms", "p80 ms", ".1f", about="a fifth of the steps took more"),
        NOISE,
        Column(
            "metrics.forward_backward_p50_ms", "fwd+bwd+sync ms", ".1f",
            about="median of forward, backward and the wait for communication",
        ),
        Column("metrics.optimizer_p50_ms", "optimizer ms", ".1f", about="median of the optimizer's step"),
        Column(
            "metrics.overhead_ms", "overhead ms", ".1f", note=OVER_LOCAL.tie,
            about="what a step takes longer than `local`'s; a tie where the 95 % interval of their ratio contains 1",
        ),
        Column("metrics.comm_ms", "comm ms", ".1f", about="time of all communication in the trace of rank 0"),
        Column("metrics.exposed_ms", "exposed ms", ".1f", about="the part of it that no compute covers"),
        Column("metrics.overlap_pct", "overlap %", ".0f", about="the share of communication that compute covers"),
        Column(
            "metrics.gpu_idle_pct", "GPU idle %", ".0f", optional=True,
            about="the part of an untraced step for which the trace shows no work on the GPU",
        ),
        Column(
            "metrics.collectives_per_step", "calls", "d",
            about="collectives of a step, counted at torch's dispatcher",
        ),
        Column("metrics.comm_bytes_per_step", "sent MB", ",.1f", scale=1e-6, about="handed to them by a rank"),
        Column("metrics.tokens_per_s", "tokens/s", ",.0f", about="of all ranks"),
        Column("metrics.examples_per_s", "examples/s", ",.1f", optional=True, about="of all ranks"),
        Column("metrics.mfu_pct", "MFU %", ".1f", optional=True, about="FLOPs of the model over the device's peak"),
        gib_column(
            "metrics.peak_alloc_bytes", "peak GiB", ".1f", optional=True,
            about="most that torch's allocator held",
        ),
        OVER_TORCH.column(
            "÷ torch",
            about="over torch DDP's fastest row, paired step by step; a tie where the 95 % interval contains 1",
        ),
        Column(
            "metrics.max_abs_param_diff", "max |Δparam|", ".1e",
            about="the largest difference of any parameter from training in one process, after a few steps of fp32 SGD "
            "on the tiny preset",
        ),
        text_column(
            "config.ran_compiled", "compiled", optional=True, derived=compiled_parts,
            about="compiled graphs that ran in a step after the timing, of those that a compiled step runs",
        ),
        *(
            Column(f"metrics.{name}", f"overhead: {part} ms", form, optional=True, about=about)
            for name, part, form, about in (
                ("overhead_exposed_ms", "exposed", ".1f", "the part of the overhead that is exposed communication"),
                ("overhead_slowdown_ms", "slower compute", ".1f", "compute that communication slows"),
                ("overhead_copies_ms", "copies", ".1f", "copies into buckets and out of them"),
                ("overhead_optimizer_ms", "optimizer", "+.1f", "negative where the optimizer is sharded"),
                ("overhead_idle_ms", "idle", "+.1f", "nothing runs"),
                ("overhead_unexplained_ms", "unexplained", "+.1f", "what of it is in no part of the trace's account"),
            )
        ),
        text_column(
            "config.does", "what it does", optional=True,
            derived=lambda record: (strategy := strategy_of(record.variant)) and strategy.does,
        ),
    ],
    headline=headline,
    derive=compare,
    terminal=("variant", "step_p50_ms", "noise_pct", "overhead_ms", "peak_alloc_bytes", "vs_torch_ddp", "does"),
    pictures={"step_time.png": draw_step_times},
    findings=lambda records: [
        *(f"Left out: {record.metrics['refusal']}." for record in records if record.metrics.get("refusal")),
        *what_communication_costs(records),
        *against_the_peer(records),
        *open_accounts(records),
    ],
    reading="Overhead is divided among its causes by the profiler's trace of rank 0. The bars end at the median of the "
    "untraced steps, and divide what a step takes longer than local's in the proportions of that account.\n\n"
    "In the timeline compute is above, communication below; what is exposed is orange.",
    prediction="Collectives and bytes per step in closed form (distlab.theory.volume). Step times are predicted "
    "by `distlab run predict`, before a measurement.",
)
