"""Where does the time of training at a long context go?

    distlab run long_context --scale 1/8               # an eighth of it: one GPU, or a CPU
    distlab run long_context --nproc 2                 # 8 B parameters, two GPUs of 141 GB
    distlab run long_context --nproc 2 --minutes 9 --name mine    # again: does what is left

Steps of the lab's FSDP and of torch's FSDP2 (SDPA, compiled blocks, three ways to recompute them,
of which `selective` is torchtitan's) are timed in interleaved rounds, built anew in each, so that
both fit; all compute the loss in chunks, in the head. Peers that the first round shows to be slow
are left out of the others. The last round ends with a profiled step, which says how much
communication nothing covers. Memory and time of each were predicted before anything was allocated.
"""

import gc
import math
import time
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from distlab.bench.reference import rows_that_ran_eager
from distlab.bench.step_timing import PHASES, time_rounds
from distlab.bench.trial import Trial
from distlab.bench.variant import BenchOptions, Variant
from distlab.comm import collectives
from distlab.experiment import (
    Column,
    Experiment,
    Metrics,
    RankContext,
    Record,
    Records,
    Run,
    TimingOptions,
    View,
    headline_from,
    option,
)
from distlab.hardware import peak_of
from distlab.measure import account, load_trace, percentile_metrics
from distlab.model import OPS_CHOICES, PRESETS, ModelConfig
from distlab.parallel import get_strategy
from distlab.report import (
    NOISE,
    PEAK,
    fastest,
    gib_column,
    prediction_error,
    ratio_column,
    ratio_metrics,
    row_named,
    step_bars,
    text_column,
)
from distlab.simulate.plan import Plan, plan_steps
from distlab.theory.flops import forward_flops, mfu
from distlab.train.memory_budget import require

SAME_LOSS = 0.02  # relative; two honest bf16 computations of one step
# A peer within this factor of the fastest peer's step may be the fastest after further rounds.
CLOSE = 1.02
OURS = "fsdp"
PEER = {"ops": "torch", "attention": "sdpa", "compile": "blocks"}
# row → (strategy, options that are not the command's)
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    OURS: ("fsdp", {}),
    "fsdp blocks": ("fsdp", {"checkpointing": "block"}),
    "fsdp sdpa": ("fsdp", {"attention": "sdpa"}),
    "fsdp2 block": ("fsdp2", PEER | {"checkpointing": "block"}),
    "fsdp2 attention": ("fsdp2", PEER | {"checkpointing": "attention"}),
    "fsdp2 qkv": ("fsdp2", PEER | {"checkpointing": "qkv"}),
    "fsdp2 selective": ("fsdp2", PEER | {"checkpointing": "selective"}),
    "fsdp2 auto": ("fsdp2", PEER | {"checkpointing": "auto"}),
}


def is_peer(row: str) -> bool:
    """Return whether a row is torch's."""
    return get_strategy(ROWS[row][0]).is_peer


@dataclass(frozen=True)
class LongContextConfig(BenchOptions, TimingOptions):
    """Options of the experiment. Raises ValueError for a value that is not allowed."""

    size: str = option("8B", "model preset", choices=tuple(PRESETS))
    scale: str = option(
        "1", "scale of every dimension of the preset, also of its context: a fraction such as 1/8"
    )
    batch: int = option(1, "sequences per rank", minimum=1)
    ops: str = option("triton", "operations of the lab's rows", choices=OPS_CHOICES)
    checkpointing: str = option(
        "auto", "recomputation of the lab's rows: auto, or as for distlab train"
    )
    rows: tuple[str, ...] = option(
        (OURS, "fsdp2 selective", "fsdp2 qkv", "fsdp2 attention"),
        "rows to time",
        choices=tuple(ROWS),
    )
    profile_steps: int = option(1, "steps per trace, 0 for no traces", minimum=0)
    minutes: float = option(
        7.5, "minutes after which nothing is begun; the same --name goes on", above=0
    )

    def __post_init__(self) -> None:
        # The scale is checked first, since the checks of the base class need the scaled model.
        try:
            scale = Fraction(self.scale)
        except (ValueError, ZeroDivisionError):
            # 0 is outside the allowed range, so an unreadable fraction gets the same message.
            scale = Fraction(0)
        if not 0 < scale <= 1:
            raise ValueError(
                f"scale={self.scale!r}: give a fraction above 0 and at most 1, such as 1/8"
            )
        super().__post_init__()

    def base(self) -> ModelConfig:
        """Return the preset with every dimension but the width of a head times the scale."""
        whole, scale = super().base(), Fraction(self.scale)
        if scale == 1:
            return whole

        def scaled(size: int) -> int:
            return max(1, int(scale * size))

        heads = scaled(whole.num_heads)
        # Groups of queries that share a key head must be of equal size.
        kv_heads = math.gcd(heads, scaled(whole.kv_heads))
        return replace(
            whole,
            # The width of a head stays: kernels and tensor cores want 64 or 128.
            d_model=heads * whole.head_dim,
            d_ff=scaled(whole.d_ff),
            num_layers=scaled(whole.num_layers),
            num_heads=heads,
            num_kv_heads=whole.num_kv_heads and kv_heads,
            vocab_size=scaled(whole.vocab_size),
            context_length=scaled(whole.context_length),
        )

    def variant(self, row: str, checkpointing: str | None = None) -> Variant:
        """Return the variant that a row times. `checkpointing` replaces its own, unless None."""
        # unused
        strategy, own = ROWS[row]
        if checkpointing is not None:
            own = own | {"checkpointing": checkpointing}
        # The variant has its own options, since rows differ in what the command's options set for
        # all.
        return Variant(row, get_strategy(strategy), options=replace(self, **own))


def measure(config: LongContextConfig, context: RankContext, run: Run) -> None:
    """Add a row per way to train. What a run of this name has done already is not done again.

    Raises:
        MemoryError: nothing fits. It says by how much, and which option helps.
    """
    begin = time.monotonic()
    # All rows are planned before anything is allocated: a long run must not end at its third row.
    steps = []
    for row in config.rows:
        strategy, _ = ROWS[row]
        steps.append(config.variant(row).options.planned(strategy))
    # On a GPU the rows that fit are run, and the others say OOM.
    require(steps, context.device, context, some=context.device.type == "cuda")
    # Every row has its record from the start, so that the table is complete whenever the run is cut
    # off, and a later run finds what is left.
    if len(run.records) < len(steps):
        for row, plan in zip(config.rows, plan_steps(steps, context), strict=True):
            run.add(row, predicted(plan), **config.facts(context))
            run.notice(f"plan of {row}: {plan}")
    for number in range(config.rounds):
        for row in config.rows:
            # A row may be done with this round, or be too slow to be timed again.
            if not is_due(run.done(row), number, run.records):
                continue
            what = f"round {number + 1}/{config.rounds}: {row}"
            # Clocks of ranks differ, so they agree. A rank that stopped alone would leave the
            # others waiting in a collective.
            late = time.monotonic() - begin > 60 * config.minutes
            if not collectives.all_ranks_agree(not late, context.device, context.group):
                run.notice(
                    f"{config.minutes:g} minutes are over before {what}: the same command with "
                    "--name goes on"
                )
                # The run counts as incomplete, so that the next command with this name goes on.
                run.cut_off = True
                return
            run.progress(what)
            record = run.done(row)
            run.replace(record, record.metrics | one_round(config, context, record, run, number))
            # Wrappers and hooks form cycles. Without this the next row would not fit next to the
            # last one's model.
            gc.collect()
            if config.variant(row).options.compile != "off":
                torch.compiler.reset()  # compiled code keeps its model alive
            if context.device.type == "cuda":
                torch.cuda.empty_cache()
            run.save()


def is_due(record: Record, number: int, records: Records) -> bool:
    """Return whether a row is still to be timed in a round."""
    # `rounds` is the number of rounds that the row has behind it.
    return record.metrics.get("rounds", 0) <= number and worth_timing(record, records)


def one_round(
    config: LongContextConfig, context: RankContext, record: Record, run: Run, number: int
) -> Metrics:
    """Return the metrics of one more round of a row.

    A failure of torch's costs its row and no other. It is the same on all ranks.
    """
    # An error of our own rows is a bug, and must not become a row.
    if not is_peer(record.variant):
        return time_round(config, context, record, run, number)
    try:
        return time_round(config, context, record, run, number)
    except Exception as error:
        return failure_of(record, error)


def failure_of(record: Record, error: Exception) -> Metrics:
    """Return the metrics of a row that failed. One that was timed before keeps its times."""
    failure: Metrics = {"failure": _first_line(error)}
    # A row that was timed in earlier rounds stays valid without this one.
    if "status" not in record.metrics:
        failure |= {"status": "failed", "step_p50_ms": "failed"}
    return failure


def _first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def worth_timing(record: Record, records: Records) -> bool:
    """Return whether a row can run and, if it is a timed peer, whether it is among the fastest."""
    status, mine = record.metrics.get("status"), record.metrics.get("step_p50_ms")
    if status not in (None, "ok"):
        return False
    # Ours are always timed. Of the peers only the fastest decides the ratio, and each round builds
    # an 8B model anew.
    peers = [r.metrics["step_p50_ms"] for r in timed(records) if is_peer(r.variant)]
    return mine is None or not is_peer(record.variant) or mine <= CLOSE * min(peers)


def timed(records: Records) -> list[Record]:
    """Return the rows that have been timed."""
    return [record for record in records if record.metrics.get("status") == "ok"]


def predicted(plan: Plan) -> Metrics:
    """Return a plan's prediction as metrics."""
    memory, step = plan.memory, plan.time
    found = {
        "keeps": plan.step.checkpointing,
        "predicted_peak_bytes": memory.peak.total,
        "free_bytes": plan.free_bytes,
    }
    # Trying would end the process on a CPU, and waste minutes on a GPU.
    if plan.free_bytes is not None and memory.peak.total > plan.free_bytes:
        found |= {"status": "OOM", "step_p50_ms": "OOM"}  # it is not tried
    if step is not None:
        found |= {
            "predicted_step_ms": 1e3 * step.step,
            "predicted_overhead_ms": 1e3 * step.overhead,
        }
    return found


def time_round(
    config: LongContextConfig, context: RankContext, record: Record, run: Run, number: int
) -> Metrics:
    """Time some more steps of a row and return its metrics, in the last round also of a trace."""
    row = record.variant
    losses = []
    traced: Metrics = {}

    def inspect(_: Variant, trial: Trial) -> None:
        # After the timing, since reading the value waits for the device.
        losses.append(float(trial.last_loss))
        if config.profile_steps and number == config.rounds - 1:
            try:
                traced.update(profile(trial, config.profile_steps, row, run))
            except Exception as error:  # the row was timed, whatever instruments do
                traced["failure"] = _first_line(error)

    # `auto` was resolved by the plan. Resolved again in each round, it could differ with the free
    # memory.
    variant = config.variant(row, checkpointing=record.metrics["keeps"])
    timing = time_rounds(
        config,
        [variant],
        context,
        rounds=1,
        warmup=config.warmup,
        steps=config.steps,
        inspect=inspect,
    )[row]
    # The round may fail although the plan fitted, because other programs use the memory.
    if timing.out_of_memory:
        return {"status": "OOM", "step_p50_ms": "OOM"}
    metrics: Metrics = {"status": "ok"}
    for phase in PHASES:
        # The medians are those of all rounds, not of this one.
        samples = [*record.metrics.get(f"{phase}_samples_ms", []), *timing.phases[phase]]
        metrics[f"{phase}_samples_ms"] = samples
        metrics |= percentile_metrics(phase, samples)
    metrics["rounds"] = number + 1
    # Each round trains a model that is built anew, so every round ends with the same loss.
    metrics["loss_after_steps"] = losses[0]
    # A round that ran eager stays on record.
    if timing.compiled and not record.metrics.get("ran_eager"):
        metrics |= timing.compiled[0].metrics()
    metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
    peak = peak_of(context.device, config.dtype)
    # Backward has two matmuls for each of the forward's: a gradient of the input and one of the
    # weight. Recomputation is not counted.
    flops = 3 * forward_flops(**config.model().sizes(config.batch), causal=True).total
    share = mfu(flops, metrics["step_p50_ms"] / 1e3, peak)
    metrics["mfu_causal_pct"] = None if share is None else 100 * share
    return metrics | traced


def profile(trial: Trial, steps: int, row: str, run: Run) -> Metrics:
    """Write a trace of this rank's step, and return what communication and idle time it shows."""
    path = run.path / f"trace_{row.replace(' ', '_')}_rank{trial.context.rank}.json.gz"
    trial.profile(path, steps)
    seen = account(load_trace(path))
    return {"exposed_ms": seen.exposed_ms, "idle_ms": seen.idle_ms}


def compare(records: Records) -> list[Record]:
    """Return the rows, compared with the fastest of torch's, and their losses with ours."""
    done = timed(records)
    # The fastest of torch's ways to recompute is what a user of torch would pick.
    peer = fastest([record for record in done if is_peer(record.variant)], "step_p50_ms")
    # Losses are compared with those of our main row.
    ours = row_named(OURS, done)
    found = []
    for record in records:
        if record in done:
            metrics = ratio_metrics("vs_peer", record, peer)
            if ours is not None:
                loss = ours.metrics["loss_after_steps"]
                # The loss is positive, so the difference may be divided by it.
                metrics["loss_rel_diff"] = abs(record.metrics["loss_after_steps"] - loss) / loss
            record = record.with_metrics(metrics)
        found.append(record)
    return found


def wrong_rows(records: Records) -> list[str]:
    """Name failures, and losses that differ from ours after the same steps."""
    problems = []
    for record in records:
        apart = record.metrics.get("loss_rel_diff")
        if "failure" in record.metrics:
            problems.append(f"{record.variant}: {record.metrics['failure']}")
        # "not <=", because a NaN is an error too.
        if apart is not None and not apart <= SAME_LOSS:
            problems.append(
                f"{record.variant}: its loss differs by {100 * apart:.1f} % from that of {OURS}"
            )
    return problems + rows_that_ran_eager(records)


def findings(records: Records) -> list[str]:
    """Name the rows that do not fit."""
    found = []
    for record in records:
        metrics = record.metrics
        if metrics.get("status") == "OOM":
            peak = metrics["predicted_peak_bytes"] / 2**30
            free = metrics["free_bytes"]
            of_free = "" if free is None else f" of {free / 2**30:.1f} free"
            found.append(
                f"{record.variant} does not fit: the plan is {peak:.1f} GiB{of_free}, keeping "
                f"{metrics['keeps']}"
            )
    return found


def tokens_each(records: Records) -> int:
    """Return the tokens of a sequence, as the scale leaves them."""
    return LongContextConfig.of(records[0].config).model().context_length


VIEW = View(
    columns=[
        Column("variant", "row"),
        text_column("metrics.keeps", "blocks keep"),
        Column("metrics.step_p50_ms", "step ms", ",.1f"),
        NOISE,
        Column("metrics.forward_p50_ms", "forward ms", ",.1f"),
        Column("metrics.backward_p50_ms", "backward ms", ",.1f"),
        Column("metrics.optimizer_p50_ms", "optimizer ms", ",.1f"),
        Column("metrics.exposed_ms", "exposed ms", ",.1f"),
        Column("metrics.idle_ms", "idle ms", ",.1f"),
        Column("metrics.predicted_step_ms", "predicted ms", ",.1f"),
        prediction_error("predicted_step_ms", "step_p50_ms", "time err %", "+.1f"),
        Column("metrics.mfu_causal_pct", "MFU %", ".1f"),
        ratio_column("vs_peer", "÷ torch"),
        PEAK,
        gib_column("metrics.predicted_peak_bytes", "plan GiB", ".1f"),
        prediction_error("predicted_peak_bytes", "peak_alloc_bytes", "memory err %", "+.1f"),
        Column("metrics.loss_rel_diff", "Δ loss", ".1e"),
    ],
    pictures={"step.png": step_bars("forward", "backward", "optimizer")},
    headline=headline_from(
        "{size} at scale {scale} ({num_parameters:M} parameters), batch {batch} × context "
        "{tokens_each} per rank, {dtype}, {world_size} × {device_name} ({backend}), torch {torch}",
        tokens_each=tokens_each,
    ),
    derive=compare,
    terminal=(
        "variant",
        "step_p50_ms",
        "forward_p50_ms",
        "backward_p50_ms",
        "optimizer_p50_ms",
        "exposed_ms",
        "idle_ms",
        "vs_peer",
        "peak_alloc_bytes",
        "predicted_peak_bytes",
    ),
    findings=findings,
    reading="Forward holds the loss and, since it is computed in chunks, both matmuls of its "
    "gradients; backward what is recomputed and the waits for gradients. Exposed communication, "
    "which no compute covers, and idle time are of a profiled step of rank 0. Blocks keep: `block` "
    "their input alone, `attention` also its output, `qkv` also queries, keys, values and the "
    "output projection, `gate-up` also SwiGLU's two; `selective` attention's output and every "
    "other matmul's; the rest is recomputed. MFU counts causal attention as half, and no "
    "recomputation. The ratio is over the fastest of torch's rows, paired by step; a tie where its "
    "95 % interval contains 1. Δ loss is the relative difference from the first row's after the "
    "same steps from equal weights.",
    prediction="Memory in closed form (distlab.theory.memory); time from two simulated layers at "
    "the shares of the datasheet's peaks that another model reached (distlab.simulate.estimate), "
    "on known GPUs.",
)

SMALL = {"warmup": 1, "steps": 5, "rounds": 1}
EXPERIMENT = Experiment(
    LongContextConfig,
    measure,
    VIEW,
    presets={
        "gpu": {"dtype": "bf16", "attention": "auto", "steps": 5},
        "quick": SMALL | {"scale": "1/32", "rows": (OURS, "fsdp blocks")},
        "smoke": SMALL
        | {"scale": "1/32", "context": 64, "d_ff": 64, "vocab": 64, "rows": (OURS, "fsdp blocks")},
    },
    ranks="many",
    wrong=wrong_rows,
    may_change=("minutes",),
)
