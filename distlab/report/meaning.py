"""What a page's figures mean, in sentences made by rules, and which commands to run next.

A rule looks at metrics by their names, in rows of any experiment; what the rows do not hold, it says nothing about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distlab.report.noise import interval_ties, noise_of
from distlab.report.predictions import accuracy, compared
from distlab.report.record import Record
from distlab.report.table import is_number

NOISY_PCT = 10.0  # more than that hides what most changes bring
IDLE_PCT = 10.0  # of a step in which a GPU waits for its host
EXPOSED_PCT = 10.0  # of a step
OF_COPY_PCT = 70.0  # of the copy's bandwidth: nothing but less traffic makes such a kernel faster
UNEXPLAINED_PCT = 20.0  # of a prediction
COMMANDS = 2

Finding = tuple[str, str | None]  # a sentence, and a command that looks further


def meaning(records: Sequence[Record], commands: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """(sentences, the two commands to run next) for the rows of one experiment.

    Args:
        commands: of the experiment, where the rules name none.
    """
    found = [finding for rule in RULES if (finding := rule(records)) is not None]
    name = records[0].experiment
    every = [
        *filter(None, (command for _, command in found)),
        *commands,
        f"distlab runs {name}",
        f"distlab compare --history {name}",
    ]
    return [sentence for sentence, _ in found], list(dict.fromkeys(every))[:COMMANDS]


def _noise(records: Sequence[Record]) -> Finding | None:
    noises = {r.variant: noise for r in records if (noise := noise_of(r.metrics)) is not None}
    loud = [row for row, noise in noises.items() if noise > NOISY_PCT]
    if not loud:
        return None
    worst = max(loud, key=noises.__getitem__)
    config = records[0].config
    longer = [
        f"--{name} {2 * config[name]}" for name in ("steps", "rounds") if isinstance(config.get(name), int)
    ]
    command = (
        f"distlab run {records[0].experiment}{_option(config, 'size')} {' '.join(longer)}" if longer else None
    )
    return (
        f"Noise is too large in {len(loud)} of {len(noises)} rows, up to {noises[worst]:.0f} % ({worst}): "
        f"differences below "
        "that mean nothing. Time longer, on a machine that does nothing else.",
        command,
    )


def _host_bound(records: Sequence[Record]) -> Finding | None:
    kernels = [
        r
        for r in records
        if is_number(r.metrics.get("host_p50_ms"))
        and is_number(device := r.metrics.get("fwd_bwd_device_p50_ms"))
        and r.metrics["host_p50_ms"] > device
    ]
    if kernels:
        return (
            f"{len(kernels)} of {len(records)} rows are host-bound: the host takes longer to launch them than the GPU "
            "to run them, so a faster kernel would not show.",
            "distlab run kernel_host_time",
        )
    local = next((r for r in records if r.variant == "local" and r.environment.get("cuda")), None)
    if local is None:
        return None
    idle, step = local.metrics.get("idle_ms"), local.metrics.get("profiled_step_ms")
    if not is_number(idle) or not is_number(step) or 100 * idle <= IDLE_PCT * step:
        return None
    return (
        f"The step is host-bound: without any communication the GPU idles {100 * idle / step:.0f} % of it, because "
        "kernels are launched more slowly than they run. A larger --batch or --compile model helps all rows.",
        f"distlab run model_benchmark{_option(local.config, 'size')} --profile",
    )


def _bandwidth_bound(records: Sequence[Record]) -> Finding | None:
    shares = {r.variant: r.metrics["of_copy_pct"] for r in records if is_number(r.metrics.get("of_copy_pct"))}
    near = [row for row, share in shares.items() if share >= OF_COPY_PCT]
    if not near:
        return None
    return (
        f"{len(near)} of {len(shares)} rows are bandwidth-bound: they reach {OF_COPY_PCT:.0f} % or more of what a copy "
        "reaches in the same run, and only less traffic (fusion, a smaller dtype) makes them faster.",
        None,
    )


def _exposed(records: Sequence[Record]) -> Finding | None:
    ours = [
        r
        for r in records
        if r.variant.startswith(("bucketed", "zero1", "fsdp", "overlap"))
        and is_number(r.metrics.get("exposed_comm_ms"))
        and is_number(r.metrics.get("step_p50_ms"))
    ]
    if not ours:
        return None
    best = min(ours, key=lambda r: r.metrics["step_p50_ms"])
    m = best.metrics
    share = 100 * m["exposed_comm_ms"] / m["step_p50_ms"]
    if share <= EXPOSED_PCT or interval_ties(m.get("vs_local_low"), m.get("vs_local_high")):
        return (
            f"Communication is hidden: {best.variant}, the fastest that overlaps, exposes "
            f"{m['exposed_comm_ms']:.1f} ms, "
            f"{max(share, 0.0):.0f} % of its step.",
            None,
        )
    why = {
        "communication that no compute covers": "exposed_uncovered_ms",
        "compute that communication slows": "exposed_slowdown_ms",
        "copies": "exposed_copies_ms",
        "idle time": "exposed_idle_ms",
    }
    causes = {text: m[name] for text, name in why.items() if is_number(m.get(name)) and m[name] > 0}
    most = max(causes, key=causes.__getitem__, default=None)
    because = f", most of it {most} ({causes[most]:.1f} ms)" if most else ""
    return (
        f"Communication is in the way: even {best.variant}, the fastest that overlaps, exposes "
        f"{m['exposed_comm_ms']:.1f} ms, {share:.0f} % of its step{because}.",
        f"distlab run bucket_sweep{_option(best.config, 'size')}",
    )


def _peer(records: Sequence[Record]) -> Finding | None:
    ours = {
        r.variant: r
        for r in records
        if not r.variant.startswith(("local", "torch", "fsdp2")) and is_number(r.metrics.get("vs_torch_ddp"))
    }
    if ours:
        row, best = min(ours.items(), key=lambda item: item[1].metrics["vs_torch_ddp"])
        ratio, low, high = (best.metrics.get(f"vs_torch_ddp{end}") for end in ("", "_low", "_high"))
        if interval_ties(low, high):
            return f"Level with torch DDP: {row}, the fastest of ours, is a tie with its fastest row.", None
        if ratio < 1:
            return (
                f"{row} is ahead of torch DDP's fastest row by {100 * (1 - ratio):.1f} % of its step.",
                None,
            )
        return (
            f"The peer is ahead: torch DDP's fastest row beats {row}, the fastest of ours, by "
            f"{100 * (1 - 1 / ratio):.1f} %.",
            (
                f"distlab run ddp_bench{_option(best.config, 'size')} --strategies local {row} "
                f"torch-ddp-tuned --profile-steps 3"
            ),
        )
    ratios = [r.metrics["peer_over_ours"] for r in records if is_number(r.metrics.get("peer_over_ours"))]
    behind = [ratio for ratio in ratios if ratio < 1]
    if behind:
        return (
            f"The best peer is ahead in {len(behind)} of {len(ratios)} rows, by up to "
            f"{100 * (1 / min(behind) - 1):.0f} %.",
            None,
        )
    return (
        (f"Ours is level with the best peer, or ahead, in all {len(ratios)} rows.", None) if ratios else None
    )


def _out_of_memory(records: Sequence[Record]) -> Finding | None:
    rows = [r.variant for r in records if "OOM" in (r.metrics.get("step_p50_ms"), r.metrics.get("status"))]
    if not rows:
        return None
    return (
        f"Out of memory: {', '.join(rows)}. A strategy that shards, a smaller --batch or activation "
        f"checkpointing needs "
        "less.",
        f"distlab run memory_breakdown{_option(records[0].config, 'size')}",
    )


def _predicted(records: Sequence[Record]) -> Finding | None:
    errors = [row for row in accuracy(compared(records)) if abs(row.metrics["error_pct"]) > UNEXPLAINED_PCT]
    if not errors:
        return None
    worst = max(errors, key=lambda row: abs(row.metrics["error_pct"]))
    return (
        f"A prediction is off: {worst.config['quantity']} by {worst.metrics['error_pct']:+.0f} % at {worst.variant}. "
        "Until it is explained, neither figure should be built on.",
        None,
    )


def _option(config: dict, name: str) -> str:
    """` --size medium`; empty where the rows differ in it, or it is no option."""
    if config.get("factory"):
        return f" --model {config['factory']}"
    value = config.get(name)
    return f" --{name} {value}" if isinstance(value, str) else ""


RULES: tuple[Callable[[Sequence[Record]], Finding | None], ...] = (
    _noise,
    _host_bound,
    _bandwidth_bound,
    _exposed,
    _peer,
    _out_of_memory,
    _predicted,
)
