"""Where does a rank's memory go under each strategy, and is it what the formulas say?

Every variant trains a few steps; parameters, gradients and optimizer state are counted from the tensors
themselves, the moments of a step (after construction, before and after the optimizer, the peak) by the allocator.
Beside each stands what `theory.memory` predicts from the widths of the model alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from distlab.bench.subject import Variant, Workbench, variants
from distlab.comm import RankContext, collectives
from distlab.measure.clock import PhaseTimer, slowest_rank
from distlab.measure.memory import allocated_bytes, peak_memory, tensor_bytes
from distlab.measure.statistics import MIN_SAMPLES, percentiles
from distlab.model import config as model_config
from distlab.model.config import ModelConfig, preset
from distlab.report.charts import stacked_bars
from distlab.report.record import Record, commit, environment
from distlab.report.table import Column
from distlab.report.view import View
from distlab.theory.memory.peak import CUBLAS_WORKSPACES, Breakdown, StepMemory, step_memory
from distlab.theory.model_shape import ModelShape
from distlab.train.requirements import PlannedStep, require

NAME = "memory_breakdown"
DTYPES = {name: model_config.DTYPES[name] for name in ("fp32", "bf16")}
STRATEGIES = (
    "local",
    "bucketed",
    "sharded-optimizer",
    "zero1",
    "fsdp",
    "torch-ddp-tuned",
    "torch-zero",
    "fsdp2",
)
SETTLE_STEPS = 4  # in one of them torch DDP rebuilds its buckets and holds them twice: part of the peak
MOMENTS = ("after_init", "before_step", "after_step")
STATES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class MemoryConfig:
    """What to run.

    Args:
        size: model preset.
        batch: sequences per rank.
        context: tokens per sequence; None for the preset's.
        dtype: `fp32`, or `bf16` computation over fp32 parameters.
        strategies: names of the registry.
        bucket_size_mb: MiB.
        steps: timed steps, after four to settle. The peak is that of all.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "tiny"
    batch: int = 4
    context: int | None = None
    dtype: str = "fp32"
    strategies: tuple[str, ...] = STRATEGIES
    bucket_size_mb: float = 25.0
    steps: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        for name in ("batch", "bucket_size_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
        if self.steps < MIN_SAMPLES:
            raise ValueError(f"steps={self.steps}: measure at least {MIN_SAMPLES}")
        if not self.strategies:
            raise ValueError("give at least one strategy")
        variants(self.strategies, [self.bucket_size_mb])
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, context_length=self.context)


def run(
    config: MemoryConfig,
    context: RankContext,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure every variant; call it on every rank. Returns rank 0's records, which are the fullest rank's.

    Raises:
        MemoryError: a strategy with this model and batch does not fit.
        ValueError: a strategy that needs a GPU, without one.
    """
    model = config.model()
    dtype = DTYPES[config.dtype]
    planned = [
        PlannedStep(model, config.batch, name, config.dtype, config.bucket_size_mb) for name in config.strategies
    ]
    require(planned, context.device, context)
    bench = Workbench(context, model, batch_size=config.batch, compute_dtype=dtype, seed=config.seed)
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    shared = asdict(config) | {"world_size": context.world_size, "backend": context.backend}
    shared |= {"num_parameters": model.num_parameters, "context": model.context_length}
    records = []
    for variant in variants(config.strategies, [config.bucket_size_mb]):
        progress(f"measuring {variant.name}")
        measured = _fullest(_measure(bench, variant, config.steps), context)
        metrics = measured | _predicted(config, context, variant)
        for name in (*STATES, *MOMENTS, "peak_alloc"):
            metrics[f"{name}_error_pct"] = _error(
                metrics[f"predicted_{name}_bytes"], metrics[f"{name}_bytes"]
            )
        records.append(Record(NAME, variant.name, shared, metrics, **facts))
    return records


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


def predict(config: MemoryConfig, variant: Variant, world_size: int, *, on_gpu: bool) -> StepMemory:
    """What `theory.memory` says of this variant."""
    casts = variant.strategy.casts_parameters
    precision = {"fp32": "fp32", "bf16": "bf16" if casts else "bf16-autocast"}[config.dtype]
    model = config.model()
    return step_memory(
        ModelShape.of(model),
        batch=config.batch,
        context=model.context_length,
        strategy=variant.strategy.name,
        world_size=world_size,
        precision=precision,
        attention=model.attention,
        bucket_size_mb=config.bucket_size_mb,
        workspace_bytes=CUBLAS_WORKSPACES if on_gpu else 0,
    )


def _predicted(config: MemoryConfig, context: RankContext, variant: Variant) -> dict[str, int | str]:
    expected = predict(config, variant, context.world_size, on_gpu=context.device.type == "cuda")
    states = expected.before_step
    found: dict[str, int | str] = {
        "predicted_parameters_bytes": expected.after_step.parameters,
        "predicted_gradients_bytes": states.gradients + states.buckets,
        "predicted_optimizer_state_bytes": expected.after_step.optimizer_state,
        "predicted_peak_alloc_bytes": expected.peak.total,
        "predicted_peak_phase": expected.peak_phase,
    }
    found |= {f"predicted_{moment}_bytes": getattr(expected, moment).total for moment in MOMENTS}
    for field in fields(Breakdown):
        found[f"predicted_peak_{field.name}_bytes"] = getattr(expected.peak, field.name)
    return found


def _error(predicted: int, measured: int | None) -> float | None:
    return 100 * (predicted / measured - 1) if measured else None


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
    config, env = records[0].config, records[0].environment
    title = (
        f"Peak memory per rank: {config['size']}, batch {config['batch']} × context {config['context']}, "
        f"{config['dtype']}, {config['world_size']} × {env['device_name']}"
    )
    stacked_bars(path, labels, parts, title=title, unit="GiB")


VIEW = View(
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
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
