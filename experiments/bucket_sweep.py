"""Which bucket size is best here, and could one have known? Step time against bucket size, measured and predicted.

Before anything is timed with buckets, the parts are: when backward has made each gradient, what all-reduces cost
(a fit, from records of allreduce_sweep or taken here), how backward and an all-reduce slow each other down, and what
packing costs. From these the step with every bucket size is predicted, then it is measured, and torch DDP's beside.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from distlab.comm import RankContext, collectives
from distlab.measure.bandwidth import time_collective
from distlab.measure.contention import Disturbance, disturb
from distlab.measure.ready import GradientReadyTimes
from distlab.measure.timing import MIN_SAMPLES, PhaseTimer, percentiles, slowest_rank
from distlab.model.config import ModelConfig, preset
from distlab.model.transformer import TransformerLM
from distlab.parallel.buckets import MIB, plan_buckets
from distlab.report.record import Record, commit, environment
from distlab.report.sweeps import Panel, Series, curves
from distlab.report.table import Column
from distlab.report.view import View
from distlab.simulate.calibrate import MeasuredLinks
from distlab.theory.bucket_model import pipeline
from distlab.theory.collective_fit import CollectiveFit, fit_collective
from distlab.train.data import SyntheticTokens
from distlab.train.step import next_token_loss
from distlab.train.workbench import Timing, Variant, Workbench, variants

NAME = "bucket_sweep"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = (1.0, 10.0, 25.0, 100.0, 400.0, 1000.0, None)
OURS, PEER, PARTS, OPTIMUM = "bucketed", "torch-ddp-tuned", "parts", "optimum"
LARGEST_MESSAGE = 2**30  # fits are extrapolated beyond


@dataclass(frozen=True)
class BucketSweepConfig:
    """What to sweep.

    Args:
        size, batch, context, dtype: as ddp_bench's.
        bucket_sizes_mb: MiB; None is unbounded.
        peer: whether torch DDP's sweep is measured beside.
        warmup, steps, rounds: untimed and timed steps per round, and rounds, interleaved.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "tiny"
    batch: int = 4
    context: int | None = None
    dtype: str = "fp32"
    bucket_sizes_mb: tuple[float | None, ...] = SIZES
    peer: bool = True
    warmup: int = 2
    steps: int = 5
    rounds: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        if len(self.bucket_sizes_mb) < 2:
            raise ValueError(f"bucket sizes {self.bucket_sizes_mb}: give two or more to compare")
        if min(self.batch, self.warmup, self.rounds) < 1 or self.steps * self.rounds < MIN_SAMPLES:
            raise ValueError(
                f"batch={self.batch}, warmup={self.warmup}, steps={self.steps}, rounds={self.rounds}: at least one "
                f"each, and {MIN_SAMPLES} timed steps"
            )
        self.rows()
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, **({} if self.context is None else {"context_length": self.context}))

    def rows(self) -> list[Variant]:
        """local, ours and torch's with every bucket size."""
        for size in self.bucket_sizes_mb:
            if size is not None and not size > 0:
                raise ValueError(f"bucket size {size}: must be a positive number of MiB, or 'none'")
        return variants(["local", OURS, *([PEER] if self.peer else [])], self.bucket_sizes_mb)


@dataclass(frozen=True)
class Parts:
    """What a prediction is made of; times in ms.

    Args:
        ready_ms: per trainable parameter, from the start of an undisturbed backward until its gradient is there.
        packed: per parameter, whether its gradient is copied into the bucket: some layers write it there themselves.
        backward_ms: of that backward.
        compute_ms: forward and backward of the local step; optimizer_ms: its optimizer.
        pack_ms_per_byte: to copy a gradient into its bucket.
        disturbance: of backward and all-reduces.
        fit: of all-reduces.
    """

    ready_ms: list[float]
    packed: list[bool]
    backward_ms: float
    compute_ms: float
    optimizer_ms: float
    pack_ms_per_byte: float
    disturbance: Disturbance
    fit: CollectiveFit


def run(
    config: BucketSweepConfig,
    context: RankContext,
    *,
    links: MeasuredLinks | None = None,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Predict, then measure; call it on every rank. All ranks return the same records.

    Args:
        links: measured on this kind of machine before; None times all-reduces here.
    """
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    shared = asdict(config) | {"world_size": context.world_size, "backend": context.backend}
    shared |= {
        "num_parameters": config.model().num_parameters,
        "context": config.model().context_length,
        "fit_from_records": links is not None,
    }
    rows, bench = config.rows(), _bench(config, context)
    progress("timing the local step, backward's gradients, all-reduces and contention")
    local = bench.time_rounds(rows[:1], rounds=1, warmup=config.warmup, steps=max(config.steps, 3))["local"]
    parts = collectives.gather_objects(measure_parts(config, context, local, links), context.group)[0]
    predicted = {row.name: predict(config, parts, row.bucket_size_mb) for row in rows if row.name != "local"}
    timings = bench.time_rounds(
        rows, rounds=config.rounds, warmup=config.warmup, steps=config.steps, progress=progress
    )
    records = [Record(NAME, PARTS, shared, _describe(parts), **facts)]
    for row in rows:
        timing = timings[row.name]
        own = {"strategy": row.strategy.name}
        own["bucket_size_mb"] = row.bucket_size_mb if row.strategy.has_buckets else "none"
        metrics: dict[str, Any] = {"step_p50_ms": "OOM"}
        if not timing.out_of_memory:
            metrics = {f"step_{p}_ms": value for p, value in percentiles(timing.phases["step"]).items()}
            metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
        if row.strategy.name == OURS:
            metrics |= predicted[row.name]
            if not timing.out_of_memory:
                metrics["error_pct"] = 100 * (metrics["predicted_step_ms"] / metrics["step_p50_ms"] - 1)
        records.append(Record(NAME, row.name, shared | own, metrics, **facts))
    records.append(Record(NAME, OPTIMUM, shared, _optimum(records), **facts))
    return collectives.gather_objects(records, context.group)[0]


def _bench(config: BucketSweepConfig, context: RankContext) -> Workbench:
    return Workbench(
        context,
        config.model(),
        batch_size=config.batch,
        compute_dtype=DTYPES[config.dtype],
        seed=config.seed,
    )


def measure_parts(
    config: BucketSweepConfig, context: RankContext, local: Timing, links: MeasuredLinks | None
) -> Parts:
    """What predictions need, measured without any bucket. Every rank calls it."""
    ready_ms, packed, backward_ms, disturbance = _backward_alone_and_disturbed(config, context)
    gc.collect()  # hooks and graph form cycles; the next tensors need their memory
    num_bytes = 4 * config.model().num_parameters
    p50 = {phase: percentiles(samples)["p50"] for phase, samples in local.phases.items()}
    return Parts(
        ready_ms=ready_ms,
        packed=packed,
        backward_ms=backward_ms,
        compute_ms=p50["forward_backward"],
        optimizer_ms=p50["optimizer"],
        pack_ms_per_byte=_pack_ms(context, _message(config)) / _message(config),
        disturbance=disturbance,
        fit=_all_reduce_fit(context, num_bytes, links),
    )


def _message(config: BucketSweepConfig) -> int:
    """Bytes of the all-reduces that run beside backward, and of the tensor whose packing is timed."""
    return min(4 * config.model().num_parameters, 100 * MIB)


def _backward_alone_and_disturbed(
    config: BucketSweepConfig, context: RankContext
) -> tuple[list[float], list[bool], float, Disturbance]:
    """Ready times of the gradients in ms, whose gradients must be packed, the length of backward in ms, and what a
    running all-reduce does to it."""
    shape, dtype = config.model(), DTYPES[config.dtype]
    model = TransformerLM(shape, device=context.device, seed=config.seed)
    tokens = SyntheticTokens(
        shape.vocab_size,
        config.batch,
        shape.context_length,
        seed=config.seed,
        rank=context.rank,
        device=context.device,
    ).batch(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ready = GradientReadyTimes(parameters, context.device)

    def forward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(context.device.type, dtype=dtype, enabled=dtype is not None):
            return next_token_loss(model, tokens)

    forward().backward()
    packed = [True] * len(parameters)
    if context.device.type == "cuda":  # elsewhere buckets offer no memory
        packed = _declined(parameters, lambda: forward().backward())
    with ready.recording():
        for _ in range(5):
            loss = forward()
            ready.start()
            loss.backward()
            ready.stop()
    kept = forward()

    def backward() -> None:
        model.zero_grad(set_to_none=True)
        kept.backward(retain_graph=True)  # again and again, so that nothing but backward meets the messages

    disturbance = disturb(context, backward, _message(config))
    times = slowest_rank([*ready.times_ms(), ready.backward_ms()], context.group, context.device)
    return times[:-1], packed, times[-1], disturbance


def _declined(parameters: Sequence[torch.nn.Parameter], backward: Callable[[], None]) -> list[bool]:
    """Of which parameters the gradient is not written where a bucket offers its memory, so that it must be copied.

    All are offered one and the same memory: the gradients of this pass are good for nothing.
    """
    scratch = torch.empty(max(p.numel() for p in parameters), device=parameters[0].device)
    for parameter in parameters:
        parameter.gradient_target = scratch[: parameter.numel()].view(parameter.shape)
    backward()
    return [parameter.__dict__.pop("gradient_target", None) is not None for parameter in parameters]


def _all_reduce_fit(context: RankContext, num_bytes: int, links: MeasuredLinks | None) -> CollectiveFit:
    largest = min(num_bytes, LARGEST_MESSAGE)
    sizes = sorted({max(4096, largest // 2**k) for k in range(13)})
    if links is not None:
        times = [links.time("all_reduce", size, context.world_size) for size in sizes]
    else:
        timed = [time_collective(context, "all_reduce", size, repeats=8, budget_s=0.3) for size in sizes]
        sizes = [timing.num_bytes for timing in timed]
        times = [percentiles(timing.samples_ms)["p50"] / 1e3 for timing in timed]
    return fit_collective(sizes, times)


def _pack_ms(context: RankContext, num_bytes: int) -> float:
    """To copy a gradient of so many bytes, as packing does."""
    source = torch.ones(num_bytes // 4, device=context.device)
    target = torch.empty_like(source)
    timer = PhaseTimer(context.device)
    for _ in range(6):
        timer.start()
        target.copy_(source)
        timer.mark("copy")
    samples = [step["copy"] for step in timer.steps()][1:]
    return percentiles(slowest_rank(samples, context.group, context.device))["p50"]


def predict(config: BucketSweepConfig, parts: Parts, bucket_size_mb: float | None) -> dict[str, float]:
    """The step with buckets of one size: when each is complete, what it costs, and how it disturbs backward."""
    model = TransformerLM(config.model(), device="meta")
    numels = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    buckets = plan_buckets(numels, [torch.float32] * len(numels), bucket_size_mb)
    rates = parts.disturbance
    # Packing is work of the computing stream: what is there was also copied, if it was not written in place.
    order = sorted(range(len(numels)), key=lambda index: parts.ready_ms[index])
    packed, copied = {}, 0.0
    for index in order:
        copied += 4 * numels[index] * parts.pack_ms_per_byte * parts.packed[index]
        packed[index] = parts.ready_ms[index] + copied
    ready = [max(packed[slot.index] for slot in bucket.slots) / 1e3 for bucket in buckets]
    messages = [parts.fit.seconds(bucket.num_bytes) for bucket in buckets]
    alone_s = (parts.backward_ms + copied) / 1e3
    together_s = pipeline(
        ready,
        messages,
        alone_s,
        compute_rate=rates.compute_rate,
        communication_rate=rates.communication_rate,
    )
    exposed_ms = 1e3 * together_s - parts.backward_ms
    return {
        "predicted_step_ms": parts.compute_ms + parts.optimizer_ms + exposed_ms,
        "predicted_exposed_comm_ms": exposed_ms,
        "predicted_comm_ms": 1e3 * sum(messages),
        "buckets": len(buckets),
    }


def _describe(parts: Parts) -> dict[str, Any]:
    return {
        "forward_backward_ms": parts.compute_ms,
        "backward_ms": parts.backward_ms,
        "optimizer_ms": parts.optimizer_ms,
        "first_gradient_ms": min(parts.ready_ms),
        "pack_gb_per_s": 1e-6 / parts.pack_ms_per_byte,
        "packed_parameters": sum(parts.packed),
        "compute_rate": parts.disturbance.compute_rate,
        "communication_rate": parts.disturbance.communication_rate,
        "pieces": parts.fit.to_list(),
        "ready_ms": parts.ready_ms,
    }


def _optimum(records: Sequence[Record]) -> dict[str, Any]:
    """The best bucket sizes, measured and predicted, and what following the prediction costs."""
    done = [r for r in records if isinstance(r.metrics.get("step_p50_ms"), float)]
    ours = [r for r in done if r.config.get("strategy") == OURS]
    torchs = [r for r in done if r.config.get("strategy") == PEER]
    if not ours:
        return {}
    best = min(ours, key=lambda r: r.metrics["step_p50_ms"])
    choice = min(ours, key=lambda r: r.metrics["predicted_step_ms"])
    found = {
        "best_bucket_mb": _label(best),
        "best_step_ms": best.metrics["step_p50_ms"],
        "predicted_best_bucket_mb": _label(choice),
        "step_at_predicted_best_ms": choice.metrics["step_p50_ms"],
        "regret_pct": 100 * (choice.metrics["step_p50_ms"] / best.metrics["step_p50_ms"] - 1),
        "largest_error_pct": max((r.metrics["error_pct"] for r in ours), key=abs),
    }
    if torchs:
        peer = min(torchs, key=lambda r: r.metrics["step_p50_ms"])
        found |= {"torch_best_bucket_mb": _label(peer), "torch_best_step_ms": peer.metrics["step_p50_ms"]}
    return found


def _label(record: Record) -> str:
    size = record.config["bucket_size_mb"]
    return "unbounded" if size is None else f"{size:g}"


def best_bucket_size(
    records: Iterable[Record], *, device_name: str, world_size: int, size: str, batch: int
) -> float | None:
    """The measured best bucket size in MiB (None: unbounded) for a model on a machine, for `--bucket-size-mb auto`.

    Where this batch was not swept the nearest counts; another device, model or number of ranks never does.

    Raises:
        ValueError: nothing of the kind was swept; the message says what to run.
    """
    fitting = [
        r
        for r in records
        if r.experiment == NAME
        and r.config.get("strategy") == OURS
        and isinstance(r.metrics.get("step_p50_ms"), float)
        and (r.environment["device_name"], r.config["world_size"], r.config["size"])
        == (device_name, world_size, size)
    ]
    if not fitting:
        raise ValueError(
            f"no bucket sweep of {size} on {world_size} × {device_name} is on record: run launch/bucket_sweep.py "
            f"--size {size} --nproc {world_size} here and name its records with --bucket-sweep, or give a size in MiB"
        )
    nearest = min({r.config["batch"] for r in fitting}, key=lambda known: (abs(known - batch), known))
    best = min((r for r in fitting if r.config["batch"] == nearest), key=lambda r: r.metrics["step_p50_ms"])
    return best.config["bucket_size_mb"]


COLUMNS = [
    Column("variant", "strategy"),
    Column("metrics.buckets", "buckets", "d", missing=""),
    Column("metrics.step_p20_ms", "step p20 ms", ".1f", missing=""),
    Column("metrics.step_p50_ms", "p50", ".1f", missing=""),
    Column("metrics.step_p80_ms", "p80", ".1f", missing=""),
    Column("metrics.predicted_step_ms", "predicted ms", ".1f", missing=""),
    Column("metrics.error_pct", "error %", "+.1f", missing=""),
    Column("metrics.predicted_comm_ms", "predicted comm ms", ".1f", missing=""),
    Column("metrics.predicted_exposed_comm_ms", "exposed", ".1f", missing=""),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30, missing=""),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what was swept."""
    config, env = records[0].config, records[0].environment
    return (
        f"Bucket sizes: {config['size']} ({config['num_parameters'] / 1e6:,.1f} M parameters), batch "
        f"{config['batch']} × context {config['context']} per rank, {config['dtype']}, {config['world_size']} × "
        f"{env['device_name']} ({config['backend']}), torch {env['torch']}"
    )


def findings(records: Sequence[Record]) -> list[str]:
    """The optimum both ways, and the parts that the prediction is made of."""
    lines = []
    for record in records:
        m = record.metrics
        if record.variant == OPTIMUM and m:
            lines.append(
                f"Best measured: {m['best_bucket_mb']} MiB, {m['best_step_ms']:.1f} ms. Predicted best: "
                f"{m['predicted_best_bucket_mb']} MiB, which takes {m['step_at_predicted_best_ms']:.1f} ms "
                f"({m['regret_pct']:+.1f} %). Largest error of a prediction: {m['largest_error_pct']:+.1f} %."
            )
            if "torch_best_step_ms" in m:
                lines.append(
                    f"torch DDP's best: {m['torch_best_bucket_mb']} MiB, {m['torch_best_step_ms']:.1f} ms."
                )
        if record.variant == PARTS:
            lines.append(
                f"Parts: forward and backward {m['forward_backward_ms']:.1f} ms, of which backward "
                f"{m['backward_ms']:.1f}; the first gradient after {m['first_gradient_ms']:.1f} ms; beside an "
                f"all-reduce backward runs at {m['compute_rate']:.2f} of its speed and the all-reduce at "
                f"{m['communication_rate']:.2f}; packing at {m['pack_gb_per_s']:.0f} GB/s, of "
                f"{m.get('packed_parameters', len(m['ready_ms']))} of {len(m['ready_ms'])} parameters."
            )
    return lines


def draw(records: Sequence[Record], path: Path) -> None:
    """Step time against bucket size: points measured, line predicted."""
    rows = [r for r in records if r.config.get("strategy") in (OURS, PEER)]
    sizes = [r.config["bucket_size_mb"] for r in rows]
    finite = sorted({size for size in sizes if size is not None})
    beyond = 4 * finite[-1] if finite else 1.0
    ticks = [(size, f"{size:g}") for size in finite] + [(beyond, "all")] * (None in sizes)
    series = []
    for strategy, label in ((OURS, "bucketed, measured"), (PEER, "torch DDP, measured")):
        mine = [
            r
            for r in rows
            if r.config["strategy"] == strategy and isinstance(r.metrics["step_p50_ms"], float)
        ]
        if not mine:
            continue
        x = [beyond if r.config["bucket_size_mb"] is None else r.config["bucket_size_mb"] for r in mine]
        low, y, high = ([r.metrics[f"step_{p}_ms"] for r in mine] for p in ("p20", "p50", "p80"))
        series.append(Series(label, x, y, low, high, dashed=strategy == PEER))
        if strategy == OURS:
            predicted = [r.metrics["predicted_step_ms"] for r in mine]
            series.append(Series("bucketed, predicted", x, predicted, line=True, like=label))
    local = next((r.metrics.get("step_p50_ms") for r in records if r.variant == "local"), None)
    if isinstance(local, float):
        ends = [min(finite or [1.0]), beyond]
        series.append(Series("no communication", ends, [local, local], line=True, dashed=True))
    panel = Panel("", "bucket size (MiB)", "step (ms)", series, log_x=10, x_ticks=ticks)
    curves(path, [panel], title=headline(records), height_in=4.2)


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={"bucket_sweep.png": draw},
    findings=findings,
    reading="A small bucket leaves early and costs a latency; a large one leaves late, and the last is exposed whole. "
    "Where communication is longer than backward what counts most is that it starts early and is not slowed. “all” is "
    "one unbounded bucket: nothing overlaps.",
    prediction="Every bucket is complete when its last gradient is made and, unless it was written there, packed; "
    "buckets are sent in order, each for the time of the fit; while one is under way, backward and it run at their "
    "measured rates beside each other (distlab.theory.bucket_model.pipeline). Nothing is fitted to a measured "
    "step with buckets.",
    noise="Error bars reach from p20 to p80 of the steps.",
)
