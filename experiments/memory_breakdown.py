"""Where does a rank's memory go under each strategy, and is it what the formulas say?

    distlab run memory_breakdown                                       all GPUs, or two CPU ranks
    distlab run memory_breakdown --nproc 2 --size xl --batch 2 --context 512 --dtype bf16

Every variant trains a few steps; parameters, gradients and optimizer state are counted from the tensors
themselves, the moments of a step (after construction, before and after the optimizer, the peak) by the allocator.
Beside each stands what `theory.memory` predicts from the widths of the model alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from distlab.bench.subject import Variant, Workbench, variants
from distlab.comm import RankContext, collectives
from distlab.experiment import Experiment, Options, Run, View, option
from distlab.measure.clock import PhaseTimer, slowest_rank
from distlab.measure.memory import allocated_bytes, peak_memory, tensor_bytes
from distlab.measure.statistics import MIN_SAMPLES, percentiles
from distlab.model.config import DTYPES, ModelConfig, preset
from distlab.model.config import PRESETS as MODELS
from distlab.options import SEED
from distlab.parallel import STRATEGIES as KNOWN
from distlab.report.charts import stacked_bars
from distlab.report.record import Record
from distlab.report.table import Column
from distlab.theory.memory.peak import CUBLAS_WORKSPACES, Breakdown, step_memory
from distlab.theory.model_shape import ModelShape
from distlab.train.requirements import PlannedStep, require

STRATEGIES = (
    *("local", "bucketed", "sharded-optimizer", "zero1", "fsdp"),
    *("torch-ddp-tuned", "torch-zero", "fsdp2"),
)
SETTLE_STEPS = 4  # in one of them torch DDP rebuilds its buckets and holds them twice: part of the peak
MOMENTS = ("after_init", "before_step", "after_step")
STATES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class MemoryConfig(Options):
    """What to run. Raises ValueError for a value that is not allowed; the message says what is."""

    size: str = option("tiny", "model preset", choices=tuple(MODELS))
    batch: int = option(4, "sequences per rank", least=1)
    context: int | None = option(None, "tokens per sequence [the preset's]", least=1)
    dtype: str = option("fp32", "fp32, or bf16 computation over fp32 parameters", choices=("fp32", "bf16"))
    strategies: tuple[str, ...] = option(STRATEGIES, "what to measure", choices=tuple(KNOWN))
    bucket_size_mb: float = option(25.0, "MiB", above=0)
    steps: int = option(5, "timed steps, after four to settle; the peak is that of all", least=MIN_SAMPLES)
    seed: int = option(0, "of parameters and data", **SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, context_length=self.context)


def measure(config: MemoryConfig, context: RankContext, run: Run) -> None:
    """A row per variant, the fullest rank's; call it on every rank.

    Raises:
        MemoryError: a strategy with this model and batch does not fit.
        ValueError: a strategy that needs a GPU, without one.
    """
    model = config.model()
    planned = [
        PlannedStep(model, config.batch, name, config.dtype) for name in config.strategies
    ]
    require(planned, context.device, context)
    bench = Workbench(
        context, model, batch_size=config.batch, compute_dtype=DTYPES[config.dtype], seed=config.seed
    )
    shared = {"backend": context.backend, "num_parameters": model.num_parameters, "context": model.context_length}
    for variant in variants(config.strategies, [config.bucket_size_mb]):
        if run.done(variant.name):
            continue
        run.progress(f"measuring {variant.name}")
        measured = _fullest(_measure(bench, variant, config.steps), context)
        metrics = measured | _predicted(config, context, variant)
        for name in (*STATES, *MOMENTS, "peak_alloc"):
            predicted, found = metrics[f"predicted_{name}_bytes"], metrics[f"{name}_bytes"]
            metrics[f"{name}_error_pct"] = 100 * (predicted / found - 1) if found else None
        run.add(variant.name, metrics, **shared)


def _measure(bench: Workbench, variant: Variant, steps: int) -> dict[str, int | float | None]:
    device = bench.context.device
    timer = PhaseTimer(device)
    found: dict[str, int | float | None] = {}

    def mark(phase: str) -> None:
        timer.mark(phase)
        moment = {"forward_backward": "before_step", "optimizer": "after_step"}[phase]
        found[f"{moment}_bytes"] = allocated_bytes(device)
        if moment == "before_step":
            found["gradients_bytes"] = tensor_bytes(
                p.grad for p in _parameters(attached.model, attached.optimizer) if p.grad is not None
            )

    with bench.attached(variant, mark) as attached:
        found["after_init_bytes"] = allocated_bytes(device)
        with peak_memory(device) as peak:
            for number in range(SETTLE_STEPS + steps):
                if number == SETTLE_STEPS:
                    timer.clear()
                timer.start()
                attached()
            samples = [sample["step"] for sample in timer.steps()]
        attached.settle()
        found["parameters_bytes"] = tensor_bytes(_parameters(attached.model, attached.optimizer))
        found["optimizer_state_bytes"] = tensor_bytes(_optimizer_state(attached.optimizer))
    found["peak_alloc_bytes"] = peak.peak_alloc_bytes
    found["peak_requested_bytes"] = peak.peak_requested_bytes
    slowest = slowest_rank(samples, bench.context.group, device)
    return found | {"step_p50_ms": percentiles(slowest)["p50"]}


def _parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from model.parameters()
    for group in optimizer.param_groups:
        yield from group["params"]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Per-element state on this rank."""
    for values in optimizer.state.values():
        yield from (v for v in values.values() if isinstance(v, Tensor) and v.ndim > 0)


def _fullest(measured: dict[str, int | float | None], context: RankContext) -> dict[str, int | float | None]:
    """The largest of every figure over the ranks."""
    ranks = collectives.gather_objects(measured, context.group)
    return {name: None if measured[name] is None else max(rank[name] for rank in ranks) for name in measured}


def _predicted(config: MemoryConfig, context: RankContext, variant: Variant) -> dict[str, int | str]:
    """What `theory.memory` says of this variant."""
    model, casts = config.model(), variant.strategy.casts_parameters
    expected = step_memory(
        ModelShape.of(model),
        batch=config.batch,
        context=model.context_length,
        strategy=variant.strategy.name,
        world_size=context.world_size,
        precision={"fp32": "fp32", "bf16": "bf16" if casts else "bf16-autocast"}[config.dtype],
        attention=model.attention,
        workspace_bytes=CUBLAS_WORKSPACES if context.device.type == "cuda" else 0,
    )
    states = expected.before_step
    peak = {f"predicted_peak_{each.name}_bytes": getattr(expected.peak, each.name) for each in fields(Breakdown)}
    moments = {f"predicted_{moment}_bytes": getattr(expected, moment).total for moment in MOMENTS}
    return moments | peak | {
        "predicted_parameters_bytes": expected.after_step.parameters,
        "predicted_gradients_bytes": states.gradients + states.buckets,
        "predicted_optimizer_state_bytes": expected.after_step.optimizer_state,
        "predicted_peak_alloc_bytes": expected.peak.total,
        "predicted_peak_phase": expected.peak_phase,
    }  # fmt: skip


def _gib(metric: str, title: str) -> Column:
    return Column(f"metrics.{metric}", title, ".2f", scale=2**-30)


def _percent(metric: str) -> Column:
    return Column(f"metrics.{metric}_error_pct", "err %", "+.1f")


COLUMNS = [
    Column("variant", "strategy"),
    *(
        column
        for name, title in zip(STATES, ("parameters GiB", "gradients", "optimizer state"), strict=True)
        for column in (_gib(f"{name}_bytes", title), _percent(name))
    ),
    _gib("after_init_bytes", "after init GiB"),
    _gib("before_step_bytes", "before step"),
    _gib("after_step_bytes", "after step"),
    _gib("peak_alloc_bytes", "peak GiB"),
    _gib("predicted_peak_alloc_bytes", "predicted"),
    _percent("peak_alloc"),
    Column("metrics.predicted_peak_phase", "peak in"),
    Column("metrics.step_p50_ms", "step p50 ms", ".1f"),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    return (
        f"{config['size']} ({config['num_parameters'] / 1e6:,.1f} M parameters), batch {config['batch']} × context "
        f"{config['context']} per rank, {config['dtype']}, buckets of {config['bucket_size_mb']:g} MiB, "
        f"{config['world_size']} × {env['device_name']} ({config['backend']}), torch {env['torch']}; err: predicted "
        "over measured"
    )


PARTS = {  # of the predicted peak; the allocator does not tell the last two apart
    "parameters": ("parameters",),
    "optimizer state": ("optimizer_state",),
    "gradients": ("gradients", "buckets"),
    "activations, copies": ("activations", "gathered", "weight_copies", "temporary"),
}
REST = "the last two"


def draw(records: Sequence[Record], path: Path) -> None:
    """Per variant the measured peak above the predicted one, stacked by category, in GiB."""
    labels: list[str] = []
    parts: dict[str, list[float | str | None]] = {name: [] for name in (*PARTS, REST)}
    for record in records:
        metrics = record.metrics
        known = [metrics["parameters_bytes"], metrics["optimizer_state_bytes"]]
        peak = metrics["peak_alloc_bytes"]
        if peak is not None:
            rest = peak - sum(known)
            labels.append(f"{record.variant}, measured")
            for part, value in zip(parts.values(), [*known, 0, 0, rest], strict=True):
                part.append(value / 2**30)
        labels.append(f"{record.variant}, predicted")
        for name, categories in PARTS.items():
            total = sum(metrics[f"predicted_peak_{category}_bytes"] for category in categories)
            parts[name].append(total / 2**30)
        parts[REST].append(0.0)
    title = f"Peak memory per rank: {headline(records).partition('; err')[0]}"
    stacked_bars(path, labels, parts, title=title, unit="GiB")


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=(
        *("variant", "parameters_bytes", "gradients_bytes", "optimizer_state_bytes", "peak_alloc_bytes"),
        "predicted_peak_alloc_bytes",
    ),
    pictures={"memory.png": draw},
    reading="Parameters, gradients and optimizer state are counted from the tensors themselves; what the allocator "
    "held after construction, before and after the optimizer and at its peak is the fullest rank's. The phase of the "
    "peak is the closed form's: at a small batch it lies where gradients are complete, at a large one where "
    "activations are.\n\n"
    "In the picture a bar that is measured stands above the one that is predicted. Of a measured peak only parameters "
    "and optimizer state can be told apart by counting; the rest is gradients, activations and copies.",
    prediction="The closed form of distlab.theory.memory, from the widths of the model alone.",
    noise="Bytes do not vary from run to run by more than the order in which blocks of the allocator are reused.",
)
PRESETS = {
    "quick": {"strategies": ("local", "bucketed", "zero1", "fsdp"), "steps": 3},
    "smoke": {
        "size": "tiny", "batch": 1, "context": 16, "steps": 3, "bucket_size_mb": 1.0, "strategies": ("local", "zero1"),
    },
}  # fmt: skip
EXPERIMENT = Experiment(MemoryConfig, measure, VIEW, presets=PRESETS, ranks="many")
