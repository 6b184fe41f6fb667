"""Where does each millisecond of training a large model at a long context go, and did the plan say so?

    distlab run long_context --nproc 2                     8 B parameters, 32,768 tokens per rank: two GPUs of 141 GB
    distlab run long_context --scale 1/8                   every dimension an eighth: one GPU, or two CPU ranks
    distlab run long_context --nproc 2 --minutes 9 --name mine      what is left is done by the same command again

First this lab's trainer trains the model for some steps, with warm-up, on tokens that can be learnt. Then steps of the
lab's FSDP and of torch's FSDP2 (SDPA, compiled blocks, three ways to recompute them) are timed in interleaved rounds,
built anew in each, so that both fit; all compute the loss in chunks, in the head. A profiled step of each says how much
communication nothing covers. Memory and time of each were predicted before anything was allocated.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distlab.bench.timing import PHASES, BenchOptions, Variant, Workbench, peak_of
from distlab.comm import collectives
from distlab.experiment import (
    Column,
    Experiment,
    RankContext,
    Record,
    Run,
    TimingOptions,
    View,
    headline_from,
    option,
)
from distlab.measure import (
    MIN_PAIRS,
    account,
    load_trace,
    own_noise_floor,
    paired_ratio,
    peak_memory,
    percentiles,
)
from distlab.model import OPS_CHOICES, PRESETS, ModelConfig
from distlab.parallel import get_strategy
from distlab.report import NOISE, TIE, Panel, interval_ties, lines, memory_areas, overlaid, stacked_bars
from distlab.report.run import same_run
from distlab.simulate.plan import Plan, plan_step
from distlab.theory.flops import forward_flops, mfu
from distlab.train.config import TrainConfig
from distlab.train.data import SyntheticSequences
from distlab.train.loop import Trainer
from distlab.train.requirements import require

TOKENS = 1024  # of the vocabulary that occur in the data: enough steps are few
SAME_LOSS = 0.02  # relative; two honest bf16 computations of one step
OURS = "fsdp"
PEER = {"ops": "torch", "attention": "sdpa", "compile": "blocks"}
ROWS: dict[str, tuple[str, dict[str, str]]] = {  # row → (strategy, options that are not the command's)
    OURS: ("fsdp", {}),
    "fsdp blocks": ("fsdp", {"checkpointing": "block"}),
    "fsdp sdpa": ("fsdp", {"attention": "sdpa"}),
    **{
        f"fsdp2 {keep}": ("fsdp2", PEER | {"checkpointing": keep})
        for keep in ("block", "attention", "qkv", "auto")
    },
}


@dataclass(frozen=True)
class LongContextConfig(BenchOptions, TimingOptions):
    """What to run. Raises ValueError for a value that is not allowed; the message says what is."""

    size: str = option("8B", "model preset", choices=tuple(PRESETS))
    scale: str = option("1", "of every dimension of the preset, its context too: a fraction such as 1/8")
    batch: int = option(1, "sequences per rank", least=1)
    ops: str = option("triton", "of the lab's rows", choices=OPS_CHOICES)
    checkpointing: str = option("auto", "of the lab's rows: auto, or as for distlab train")
    rows: tuple[str, ...] = option(
        (OURS, "fsdp2 block", "fsdp2 attention", "fsdp2 qkv"), "what to time", choices=tuple(ROWS)
    )
    train_steps: int = option(20, "of the trainer, 0 for none", least=0)
    lr: float = option(3e-4, "largest learning rate, after warm-up over half of the steps", above=0)
    profile_steps: int = option(1, "per trace, 0 for no traces", least=0)
    minutes: float = option(9.0, "nothing is begun later than that; the same --name goes on", above=0)

    def __post_init__(self) -> None:
        try:
            scale = Fraction(self.scale)
        except (ValueError, ZeroDivisionError):
            scale = Fraction(0)
        if not 0 < scale <= 1:
            raise ValueError(f"scale={self.scale!r}: give a fraction above 0 and at most 1, such as 1/8")
        super().__post_init__()
        if self.steps * self.rounds < MIN_PAIRS:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least {MIN_PAIRS} steps")

    def base(self) -> ModelConfig:
        """The preset, every dimension but the width of a head times the scale."""
        whole, scale = super().base(), Fraction(self.scale)
        if scale == 1:
            return whole
        heads, kv_heads, *rest = (
            max(1, int(scale * size))
            for size in (whole.num_heads, whole.kv_heads, whole.d_ff, whole.num_layers, whole.vocab_size)
        )
        d_ff, layers, vocabulary = rest
        return replace(
            whole, d_model=heads * whole.head_dim, d_ff=d_ff, num_layers=layers, num_heads=heads,
            num_kv_heads=whole.num_kv_heads and math.gcd(heads, kv_heads), vocab_size=vocabulary,
            context_length=max(1, int(scale * whole.context_length)),
        )  # fmt: skip

    def variant(self, row: str) -> Variant:
        """What a row times."""
        strategy, options = ROWS[row]
        return Variant(row, get_strategy(strategy), options=replace(self, **options))


def measure(config: LongContextConfig, context: RankContext, run: Run) -> None:
    """A row per way to train; what a run of this name has done already is not done again.

    Raises:
        MemoryError: nothing fits: by how much, and which option helps.
    """
    begin = time.monotonic()
    variants = [config.variant(row) for row in config.rows]
    plans = [v.options.planned(v.strategy.name) for v in variants]
    require(plans, context.device, context, some=context.device.type == "cuda")
    for variant, step in zip(variants, plans, strict=True):
        if not run.done(variant.name):
            plan = plan_step(step, context)
            run.add(variant.name, predicted(plan), **config.facts(context))
            run.progress(f"plan of {variant.name}: {plan}")
    for name, work in parts(config, context, run, variants):
        late = time.monotonic() - begin > 60 * config.minutes
        if not collectives.all_ranks_agree(not late, context.device, context.group):
            run.progress(f"{config.minutes:g} minutes are over before {name}: the same command with --name goes on")
            break
        run.progress(name)
        work()
        gc.collect()
        if any(variant.options.compile != "off" for variant in variants):
            torch.compiler.reset()  # what was compiled holds on to its model
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
        compare(run.records)
        run.save()


def parts(
    config: LongContextConfig, context: RankContext, run: Run, variants: Sequence[Variant]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is still to be done, in order: training, rounds of steps, traces."""
    ours = run.done(OURS)
    if config.train_steps and ours is not None and "loss" not in ours.metrics:
        yield f"training for {config.train_steps} steps", partial(train, config, context, ours)
    bench = Workbench(context, config)
    if config.profile_steps and ours is not None and "memory_peak_phase" not in ours.metrics:
        yield f"memory over one step of {OURS}", partial(memory, config, bench, ours, run)
    for number in range(config.rounds):
        for variant in (*variants[number % len(variants) :], *variants[: number % len(variants)]):
            record = run.done(variant.name)
            if record.metrics.get("rounds", 0) <= number and record.metrics.get("status") != "OOM":
                what = f"round {number + 1}/{config.rounds}: {variant.name}"
                yield what, partial(time_round, config, bench, variant, record)
    for variant in variants if config.profile_steps else ():
        record = run.done(variant.name)
        if "idle_ms" not in record.metrics and record.metrics.get("status") != "OOM":
            yield f"profiling {variant.name}", partial(profile, config, bench, variant, record, run)


def predicted(plan: Plan) -> dict[str, Any]:
    """What a plan says, as metrics."""
    memory, step = plan.memory, plan.time
    found = {
        "keeps": plan.step.checkpointing, "predicted_peak_bytes": memory.peak.total,
        "predicted_peak_phase": memory.peak_phase,
    }  # fmt: skip
    if step is not None:
        found |= {"predicted_step_ms": 1e3 * step.step, "predicted_exposed_comm_ms": 1e3 * step.exposed}
    return found


def train(config: LongContextConfig, context: RankContext, record: Record) -> None:
    """The lab's trainer for some steps: its losses and times."""
    model = config.model()
    dimensions = {
        "context": model.context_length, "vocab": model.vocab_size, "d_model": model.d_model, "d_ff": model.d_ff,
        "layers": model.num_layers, "heads": model.num_heads, "kv_heads": model.num_kv_heads,
    }  # fmt: skip
    same = {name: getattr(config, name) for name in ("size", "attention", "ops", "dtype", "compile", "seed")}
    training = TrainConfig(
        **dimensions, **same, strategy=OURS, checkpointing=record.metrics["keeps"], steps=config.train_steps,
        lr=config.lr, warmup=config.train_steps // 2, batch=config.batch * context.world_size,
    )  # fmt: skip
    data = SyntheticSequences(min(TOKENS, model.vocab_size), model.context_length, config.seed)
    reports = []
    with peak_memory(context.device) as memory:
        trainer = Trainer(training, context, train=data, report=reports.append)
        try:
            trainer.run()
        finally:
            trainer.close()
    record.metrics.update(
        loss=[report.loss for report in reports], first_loss=reports[0].loss, final_loss=reports[-1].loss,
        train_step_p50_ms=percentiles([report.step_ms for report in reports[len(reports) // 2 :]])["p50"],
        train_peak_alloc_bytes=memory.peak_alloc_bytes,
    )  # fmt: skip


def time_round(config: LongContextConfig, bench: Workbench, variant: Variant, record: Record) -> None:
    """Some more steps of a row."""
    losses: list[float] = []
    timing = bench.time_rounds(
        [variant], rounds=1, warmup=config.warmup, steps=config.steps,
        inspect=lambda _, subject: losses.append(float(subject.last_loss)),
    )[variant.name]  # fmt: skip
    metrics = record.metrics
    if timing.out_of_memory:
        metrics |= {"status": "OOM", "step_p50_ms": "OOM"}
        return
    for phase in PHASES:
        samples = [*metrics.get(f"{phase}_samples_ms", []), *timing.phases[phase]]
        metrics[f"{phase}_samples_ms"] = samples
        metrics |= {f"{phase}_{p}_ms": ms for p, ms in percentiles(samples).items()}
    metrics |= {"status": "ok", "rounds": metrics.get("rounds", 0) + 1, "loss_after_steps": losses[0]}
    metrics["noise_floor_pct"] = own_noise_floor(metrics["step_samples_ms"])
    metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
    peak = peak_of(bench.context.device, config.dtype)
    flops = 3 * forward_flops(**config.model().sizes(config.batch), causal=True).total
    share = mfu(flops, metrics["step_p50_ms"] / 1e3, peak)
    metrics["mfu_causal_pct"] = None if share is None else 100 * share
    for name, found in (("step", "step_p50_ms"), ("peak", "peak_alloc_bytes")):
        said_ = metrics.get({"step": "predicted_step_ms", "peak": "predicted_peak_bytes"}[name])
        if said_ is not None and metrics[found] is not None:
            metrics[f"{name}_error_pct"] = 100 * (said_ / metrics[found] - 1)


def profile(config: LongContextConfig, bench: Workbench, variant: Variant, record: Record, run: Run) -> None:
    """What a step consists of, from this rank's trace."""
    path = run.path / f"trace_{variant.name.replace(' ', '_')}_rank{bench.context.rank}.json.gz"
    bench.profile(variant, path, config.profile_steps)
    seen = account(load_trace(path))
    record.metrics.update(
        profiled_step_ms=seen.step_ms, compute_ms=seen.compute_ms, comm_ms=seen.comm_ms,
        uncovered_comm_ms=seen.uncovered_comm_ms, overlap_pct=seen.overlap_pct, copy_ms=seen.copy_ms,
        idle_ms=seen.idle_ms,
    )  # fmt: skip


def memory(config: LongContextConfig, bench: Workbench, record: Record, run: Run) -> None:
    """A picture of this lab's memory over one step, and in which phase it was highest."""
    with bench.attached(config.variant(OURS)) as subject:
        timeline = subject.memory_timeline()
    record.metrics["memory_peak_phase"] = None
    if timeline is not None:
        at, _ = timeline.peak()
        inside = [phase for phase, (start, end) in timeline.phases.items() if start <= at <= end]
        record.metrics["memory_peak_phase"] = inside[0] if inside else None
        memory_areas(run.path / "memory.png", timeline, title=f"Memory over a step of {OURS}: {headline(run.records)}")


def compare(records: Sequence[Record]) -> None:
    """Each row beside the fastest of torch's, and its loss beside ours."""
    timed = {r.variant: r.metrics for r in records if r.metrics.get("status") == "ok"}
    peers = [name for name in timed if name.startswith("fsdp2")]
    best = min(peers, key=lambda name: timed[name]["step_p50_ms"], default=None)
    for metrics in timed.values():
        if OURS in timed:
            ours = timed[OURS]["loss_after_steps"]
            metrics["loss_rel_diff"] = abs(metrics["loss_after_steps"] - ours) / ours
        mine, theirs = metrics["step_samples_ms"], timed[best]["step_samples_ms"] if best else []
        pairs = min(len(mine), len(theirs))
        if pairs >= MIN_PAIRS:
            ratio = paired_ratio(mine[:pairs], theirs[:pairs])
            metrics |= zip(("vs_peer", "vs_peer_low", "vs_peer_high"), ratio, strict=True)


def wrong_rows(records: Sequence[Record]) -> list[str]:
    """A loss that did not fall, or that is another than ours after the same steps."""
    problems = []
    for record in records:
        first, final, apart = (record.metrics.get(n) for n in ("first_loss", "final_loss", "loss_rel_diff"))
        if first is not None and not final < first:
            problems.append(f"{record.variant}: the loss was {first:.3f} at first and is {final:.3f} at the end")
        if apart is not None and not apart <= SAME_LOSS:
            problems.append(f"{record.variant}: its loss differs by {100 * apart:.1f} % from that of {OURS}")
    return problems


def findings(records: Sequence[Record]) -> list[str]:
    """What went wrong, what does not fit, and how training went."""
    found = [f"WRONG: {problem}" for problem in wrong_rows(records)]
    for record in records:
        metrics = record.metrics
        if metrics.get("status") == "OOM":
            peak = metrics["predicted_peak_bytes"] / 2**30
            found.append(f"{record.variant} ran out of memory: the plan was {peak:.1f} GiB, keeping {metrics['keeps']}")
        if metrics.get("loss"):
            found.append(
                f"{len(metrics['loss'])} steps of the trainer: loss {metrics['first_loss']:.3f} to "
                f"{metrics['final_loss']:.3f}, {metrics['train_step_p50_ms']:,.0f} ms a step in its second half."
            )
    return found


headline = headline_from(
    "{size} at scale {scale} ({num_parameters:M} parameters), batch {batch} × context {tokens_each} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}",
    tokens_each=lambda records: LongContextConfig.of(records[0].config).model().context_length,
)


def draw_step(records: Sequence[Record], path: Path) -> None:
    """A bar per row: forward, backward, optimizer."""
    phases = ("forward", "backward", "optimizer")
    parts_ = {p: [r.metrics.get(f"{p}_p50_ms", r.metrics.get("status")) for r in records] for p in phases}
    stacked_bars(path, [r.variant for r in records], parts_, title=f"A step: {headline(records)}", unit="ms")


def draw_loss(records: Sequence[Record], path: Path) -> None:
    """The trainer's losses, if it trained."""
    curves = {r.variant: (list(range(1, len(r.metrics["loss"]) + 1)), r.metrics["loss"])
              for r in records if r.metrics.get("loss")}  # fmt: skip
    if curves:
        panel = Panel("", "step", "loss (nats per token)", overlaid(curves), log_x=None, from_zero=False)
        lines(path, [panel], title=f"The trainer's loss: {headline(records)}")


VIEW = View(
    columns=[
        Column("variant", "row"),
        Column("metrics.keeps", "blocks keep", align="left"),
        Column("metrics.step_p50_ms", "step ms", ",.1f"),
        NOISE,
        Column("metrics.forward_p50_ms", "forward", ",.1f"),
        Column("metrics.backward_p50_ms", "backward", ",.1f"),
        Column("metrics.optimizer_p50_ms", "optimizer", ",.1f"),
        Column("metrics.uncovered_comm_ms", "comm alone", ",.1f"),
        Column("metrics.idle_ms", "idle", ",.1f"),
        Column("metrics.predicted_step_ms", "predicted ms", ",.1f"),
        Column("metrics.step_error_pct", "err %", "+.1f"),
        Column("metrics.mfu_causal_pct", "MFU %", ".1f"),
        Column(
            "metrics.vs_peer", "÷ torch", ".3f",
            note=lambda r: TIE if interval_ties(r.metrics.get("vs_peer_low"), r.metrics.get("vs_peer_high")) else "",
        ),
        Column("metrics.vs_peer_high", "≤ (95 %)", ".3f"),
        Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
        Column("metrics.predicted_peak_bytes", "plan GiB", ".1f", scale=2**-30),
        Column("metrics.peak_error_pct", "err %", "+.1f"),
        Column("metrics.loss_rel_diff", "Δ loss", ".1e"),
        Column("metrics.profiled_step_ms", "profiled step ms", ",.1f", optional=True),
        Column("metrics.compute_ms", "compute", ",.1f", optional=True),
        Column("metrics.comm_ms", "comm", ",.1f", optional=True),
        Column("metrics.overlap_pct", "overlap %", ".0f", optional=True),
    ],
    headline=headline,
    terminal=(
        *("variant", "step_p50_ms", "forward_p50_ms", "backward_p50_ms", "optimizer_p50_ms", "uncovered_comm_ms"),
        *("idle_ms", "vs_peer", "peak_alloc_bytes", "predicted_peak_bytes"),
    ),
    pictures={"step.png": draw_step, "loss.png": draw_loss},
    findings=findings,
    reading="Forward holds the loss and, since it is computed in chunks, both matmuls of its gradients; backward what "
    "is recomputed and the waits for gradients. Communication alone and idle time are of a profiled step of rank 0. "
    "Blocks keep: `block` their input alone, `attention` also its output, `qkv` also queries, keys, values and the "
    "output projection, `gate-up` also SwiGLU's two; the rest is recomputed. MFU counts causal attention as half, and "
    "no recomputation. The ratio is over the fastest of torch's rows, paired by step, with the upper end of its 95 % "
    "interval. Δ loss is the relative difference from the first row's after as many steps from equal weights.",
    prediction="Memory in closed form (distlab.theory.memory); time from two simulated layers at the shares of the "
    "datasheet's peaks that another model reached (distlab.simulate.estimate), on known GPUs.",
)

SMALL = {"train_steps": 5, "warmup": 1, "steps": 5, "rounds": 1}
EXPERIMENT = Experiment(
    LongContextConfig, measure, VIEW,
    presets={
        "gpu": {"dtype": "bf16", "attention": "flash"},
        "quick": SMALL | {"scale": "1/32", "rows": (OURS, "fsdp blocks")},
        "smoke": SMALL | {"scale": "1/32", "context": 64, "d_ff": 64, "vocab": 64, "rows": (OURS, "fsdp blocks")},
    },
    ranks="many",
    wrong=wrong_rows,
    same_run=lambda before, now: [line for line in same_run(before, now) if not line.startswith("option minutes ")],
)  # fmt: skip
