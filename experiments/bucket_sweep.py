"""Which bucket size is best here, and could one have known?

    distlab run bucket_sweep                                 # all GPUs, or two CPU ranks
    distlab run bucket_sweep --nproc 2 --size xl --batch 2

Before anything is timed with buckets, the parts are: when backward has made each gradient, what all-reduces cost
(a fit, taken here), how backward and an all-reduce slow each other down, and what
packing costs. From these the step with every bucket size is predicted, then it is measured, and torch DDP's beside.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distlab.bench.timing import BenchOptions, Timing, Variant, synthetic_batches, variants
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
    MIN_SAMPLES,
    clock,
    disturb,
    gradient_ready_ms,
    percentiles,
    slowest_rank,
    time_collective,
)
from distlab.model import TransformerLM
from distlab.parallel.buckets import MIB, plan_buckets
from distlab.precision import DTYPES, autocast
from distlab.report import NOISE, Panel, Ratio, Series, fastest, is_number, lines, measured, prediction_error
from distlab.theory.collective_time import CollectiveFit, fit_collective
from distlab.theory.step_time import pipeline
from distlab.train.step import loss_function

OURS, PEER, PARTS = "bucketed", "torch-ddp-tuned", "parts"
OVER_BEST = Ratio("over_best", fastest("step_p50_ms", lambda record: record.config.get("strategy") == OURS))
OFF = prediction_error("predicted_step_ms", "step_p50_ms", "error %", "+.1f")
LARGEST_MESSAGE = 2**30  # fits are extrapolated beyond


@dataclass(frozen=True)
class BucketSweepConfig(BenchOptions, TimingOptions):
    """What to sweep. Raises ValueError for a value that is not allowed; the message says what is."""

    bucket_sizes_mb: tuple[float | None, ...] = option(
        (1.0, 10.0, 25.0, 100.0, 400.0, 1000.0, None),
        "MiB per bucket; none for unbounded",
        above=0,
        words={"none": None},
        flag="--bucket-size-mb",
    )
    compile: str = "off"  # backward's parts are those of an eager one that recomputes nothing
    checkpointing: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.bucket_sizes_mb) < 2:
            raise ValueError(f"bucket sizes {self.bucket_sizes_mb}: give two or more to compare")
        if self.steps * self.rounds < MIN_SAMPLES:
            raise ValueError(f"steps={self.steps}, rounds={self.rounds}: time at least {MIN_SAMPLES} steps")

    def rows(self) -> list[Variant]:
        """local, ours and torch's with every bucket size."""
        return variants(["local", OURS, PEER], self.bucket_sizes_mb)


def measure_parts(config: BucketSweepConfig, context: RankContext, local: Timing) -> dict[str, Any]:
    """What predictions need, measured without any bucket, as metrics of a record. Every rank calls it.

    Returns:
        Per trainable parameter `ready_ms`, from the start of an undisturbed backward until its gradient is there, and
        `packed`, whether it is copied into the bucket (some layers write it there themselves); `backward_ms` of that
        backward; `forward_backward_ms` and `optimizer_ms` of the local step; how fast packing is; at which rates
        backward and an all-reduce run beside each other; and `pieces`, the fit of all-reduces.
    """
    ready_ms, packed, backward_ms, disturbance = _backward_alone_and_disturbed(config, context)
    gc.collect()  # hooks and graph form cycles; the next tensors need their memory
    return {
        **{f"{phase}_ms": percentiles(local.phases[phase])["p50"] for phase in ("forward_backward", "optimizer")},
        "backward_ms": backward_ms,
        "first_gradient_ms": min(ready_ms),
        "pack_gb_per_s": 1e-6 * _message(config) / _pack_ms(context, _message(config)),
        "packed_parameters": sum(packed),
        "compute_rate": disturbance["compute_rate"],
        "communication_rate": disturbance["communication_rate"],
        "pieces": _all_reduce_fit(context, 4 * config.model().num_parameters).to_list(),
        "ready_ms": ready_ms,
        "packed": packed,
    }


def _message(config: BucketSweepConfig) -> int:
    """Bytes of the all-reduces that run beside backward, and of the tensor whose packing is timed."""
    return min(4 * config.model().num_parameters, 100 * MIB)


def _backward_alone_and_disturbed(
    config: BucketSweepConfig, context: RankContext
) -> tuple[list[float], list[bool], float, dict[str, float]]:
    """Ready times of the gradients in ms, whose gradients must be packed, the length of backward in ms, and what a
    running all-reduce does to it.
    """
    model = TransformerLM(config.model(), device=context.device, seed=config.seed)
    tokens, loss_fn = synthetic_batches(context, config)[0], loss_function(config.model())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with autocast(context.device, DTYPES[config.dtype]):
            return loss_fn(model, tokens)

    forward().backward()
    packed = [True] * len(parameters)
    if context.device.type == "cuda":  # elsewhere buckets offer no memory
        packed = _declined(parameters, lambda: forward().backward())
    ready_ms, end_ms = gradient_ready_ms(forward, parameters, context.device)
    kept = forward()

    def backward() -> None:
        model.zero_grad(set_to_none=True)
        kept.backward(retain_graph=True)  # again and again, so that only backward runs beside the messages

    disturbance = disturb(context, backward, _message(config))
    times = slowest_rank([*ready_ms, end_ms], context.group, context.device)
    return times[:-1], packed, times[-1], disturbance


def _declined(parameters: Sequence[torch.nn.Parameter], backward: Callable[[], None]) -> list[bool]:
    """For each parameter, whether its gradient is not written into the bucket's buffer, so that it must be copied.

    All are offered the same memory: the gradients of this pass are not used.
    """
    scratch = torch.empty(max(p.numel() for p in parameters), device=parameters[0].device)
    for parameter in parameters:
        parameter.gradient_target = scratch[: parameter.numel()].view(parameter.shape)
    backward()
    return [parameter.__dict__.pop("gradient_target", None) is not None for parameter in parameters]


def _all_reduce_fit(context: RankContext, num_bytes: int) -> CollectiveFit:
    largest = min(num_bytes, LARGEST_MESSAGE)
    sizes = sorted({max(4096, largest // 2**k) for k in range(13)})
    timed = [time_collective(context, "all_reduce", size, repeats=8, budget_s=0.3) for size in sizes]
    return fit_collective([timing.num_bytes for timing in timed], [timing.p50_s for timing in timed])


def _pack_ms(context: RankContext, num_bytes: int) -> float:
    """To copy a gradient of so many bytes, as packing does."""
    source = torch.ones(num_bytes // 4, device=context.device)
    target = torch.empty_like(source)
    samples = clock.measure(lambda: target.copy_(source), warmup=1, repeats=5, device=context.device)
    return percentiles(slowest_rank(samples, context.group, context.device))["p50"]


def predict(config: BucketSweepConfig, parts: Mapping[str, Any], bucket_size_mb: float | None) -> dict[str, float]:
    """The step with buckets of one size: when each is complete, what it costs, and how it disturbs backward."""
    model = TransformerLM(config.model(), device="meta")
    numels = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    buckets = plan_buckets(numels, [torch.float32] * len(numels), bucket_size_mb)
    # Packing is work of the computing stream: what is there was also copied, if it was not written in place.
    ready_ms, packed, copied = parts["ready_ms"], {}, 0.0
    for index in sorted(range(len(numels)), key=ready_ms.__getitem__):
        copied += 4e-6 * numels[index] / parts["pack_gb_per_s"] * parts["packed"][index]
        packed[index] = ready_ms[index] + copied
    ready = [max(packed[index] for index in bucket.indices) / 1e3 for bucket in buckets]
    messages = [CollectiveFit.from_list(parts["pieces"]).seconds(bucket.num_bytes) for bucket in buckets]
    rates = {name: parts[name] for name in ("compute_rate", "communication_rate")}
    together_s = pipeline(ready, messages, (parts["backward_ms"] + copied) / 1e3, **rates)
    overhead_ms = 1e3 * together_s - parts["backward_ms"]
    return {
        "predicted_step_ms": parts["forward_backward_ms"] + parts["optimizer_ms"] + overhead_ms,
        "predicted_overhead_ms": overhead_ms,
        "predicted_comm_ms": 1e3 * sum(messages),
        "buckets": len(buckets),
    }


def measure(config: BucketSweepConfig, context: RankContext, run: Run) -> None:
    """Predict, then measure; call it on every rank.

    Raises:
        MemoryError: the model with this batch does not fit.
    """
    rows = config.rows()
    bench = config.workbench(context, rows, some=True)
    run.progress("timing the local step, backward's gradients, all-reduces and contention")
    local = bench.time_rounds(rows[:1], rounds=1, warmup=config.warmup, steps=max(config.steps, 3))["local"]
    parts = collectives.gather_objects(measure_parts(config, context, local), context.group)[0]
    predicted = {row.name: predict(config, parts, row.bucket_size_mb) for row in rows if row.name != "local"}
    timings = bench.time_rounds(
        rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=run.progress
    )
    shared = config.facts(context)
    run.add(PARTS, parts, **shared)
    for row in rows:
        timing = timings[row.name]
        metrics = timing.metrics()
        if row.strategy.name == OURS:
            metrics |= predicted[row.name]
        bucket_size = row.bucket_size_mb if row.strategy.has_buckets else "none"
        run.add(row.name, metrics, **shared, strategy=row.strategy.name, bucket_size_mb=bucket_size)


headline = headline_from(
    "Bucket sizes: {size} ({num_parameters:M} parameters), batch {batch} × context {context} per rank, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}"
)


def findings(records: Sequence[Record]) -> list[str]:
    """The optimum both ways, and the parts that the prediction is made of."""
    found = []
    if best := OVER_BEST.baseline(records):
        predicted = [r for r in records if OFF.value(r) is not None]
        choice = min(predicted, key=lambda r: r.metrics["predicted_step_ms"])
        ratio, *_ = OVER_BEST.of(choice, best)
        worst = max(map(OFF.value, predicted), key=abs)
        found.append(
            f"Best measured: {best.variant}, {best.metrics['step_p50_ms']:.1f} ms. Predicted best: {choice.variant}, "
            f"which takes {ratio:.3f} of that{OVER_BEST.tie(choice)}. Largest error of a prediction: {worst:+.1f} %."
        )
    for m in (record.metrics for record in records if record.variant == PARTS):
        found.append(
            f"Parts: forward and backward {m['forward_backward_ms']:.1f} ms, of which backward "
            f"{m['backward_ms']:.1f}; the first gradient after {m['first_gradient_ms']:.1f} ms; beside an "
            f"all-reduce backward runs at {m['compute_rate']:.2f} of its speed and the all-reduce at "
            f"{m['communication_rate']:.2f}; packing at {m['pack_gb_per_s']:.0f} GB/s, of "
            f"{m.get('packed_parameters', len(m['ready_ms']))} of {len(m['ready_ms'])} parameters."
        )
    return found


def draw(records: Sequence[Record], path: Path) -> None:
    """Step time against bucket size: points measured, line predicted."""
    rows = [r for r in records if r.config.get("strategy") in (OURS, PEER)]
    sizes = [r.config["bucket_size_mb"] for r in rows]
    finite = sorted({size for size in sizes if size is not None})
    beyond = 4 * finite[-1] if finite else 1.0
    ticks = [(size, f"{size:g}") for size in finite] + [(beyond, "all")] * (None in sizes)
    series = []
    for strategy, label in ((OURS, "bucketed, measured"), (PEER, "torch DDP, measured")):
        mine = [r for r in rows if r.config["strategy"] == strategy and is_number(r.metrics["step_p50_ms"])]
        x = [beyond if r.config["bucket_size_mb"] is None else r.config["bucket_size_mb"] for r in mine]
        if mine:
            peer = strategy == PEER
            series += measured(label, x, mine, "step", "bucketed, predicted", "predicted_step_ms", hollow=peer)
    local = next((r.metrics.get("step_p50_ms") for r in records if r.variant == "local"), None)
    if isinstance(local, float):
        series.append(Series("no communication", [min(finite or [1.0]), beyond], [local, local], line="--"))
    panel = Panel("", "bucket size (MiB)", "step (ms)", series, log_x=10, x_ticks=ticks)
    lines(path, [panel], title=headline(records))


VIEW = View(
    columns=[
        Column("variant", "strategy"),
        Column("metrics.buckets", "buckets", "d", missing=""),
        Column("metrics.step_p20_ms", "step p20 ms", ".1f", missing=""),
        Column("metrics.step_p50_ms", "p50", ".1f", missing=""),
        Column("metrics.step_p80_ms", "p80", ".1f", missing=""),
        NOISE,
        Column("metrics.predicted_step_ms", "predicted ms", ".1f", missing=""),
        OFF,
        OVER_BEST.column("÷ best bucketed", missing=""),
        Column("metrics.predicted_comm_ms", "predicted comm ms", ".1f", missing=""),
        Column("metrics.predicted_overhead_ms", "overhead", ".1f", missing=""),
        Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30, missing=""),
    ],
    headline=headline,
    derive=OVER_BEST.add,
    terminal=(
        *("variant", "buckets", "step_p50_ms", "noise_pct", "predicted_step_ms", "step_p50_ms_error_pct", "over_best"),
        *("predicted_overhead_ms", "peak_alloc_bytes"),
    ),
    pictures={"bucket_sweep.png": draw},
    findings=findings,
    reading="A small bucket is sent early and costs a latency; a large one is sent late, and the last is fully "
    "exposed. "
    "If communication takes longer than backward, it must above all start early and not be slowed. “all” is "
    "one unbounded bucket: nothing overlaps.",
    prediction="Every bucket is complete when its last gradient is computed and, unless it was written there, packed; "
    "buckets are sent in order, each for the time of the fit; during a transfer, backward and the transfer run at the "
    "rates measured beside each other (distlab.theory.step_time.pipeline). Nothing is fitted to a measured "
    "step with buckets.",
    noise="Error bars reach from p20 to p80 of the steps.",
)

QUICK = {
    "size": "tiny", "dtype": "fp32", "batch": 2, "context": 32, "bucket_sizes_mb": (1.0, 4.0, None), "warmup": 1,
    "steps": 4, "rounds": 1,
}  # fmt: skip
EXPERIMENT = Experiment(
    BucketSweepConfig, measure, VIEW,
    presets={
        "gpu": {"size": "medium", "batch": 8, "dtype": "bf16", "warmup": 3, "steps": 8},
        "cpu": {"steps": 5, "bucket_sizes_mb": (0.25, 1.0, 2.0, 4.0, 10.0, None)},
        "quick": QUICK,
        "smoke": QUICK | {"batch": 1, "context": 16, "bucket_sizes_mb": (1.0, None), "steps": 3},
    },
    ranks="many",
)
