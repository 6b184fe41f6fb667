"""Where does a rank's memory go, and is it what the formulas say?

    distlab run memory_breakdown                             # all GPUs, or two CPU ranks
    distlab run memory_breakdown --nproc 2 --size xl --batch 2 --context 512 --dtype bf16

Every variant trains a few steps; parameters, gradients and optimizer state are counted from the
tensors themselves, the moments of a step (after construction, before and after the optimizer, the
peak) by the allocator. Next to each is the prediction of `theory.memory` from the widths of the
model alone.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from distlab.bench.task import OwnModel
from distlab.bench.trial import Trial, refusals
from distlab.bench.variant import BenchOptions, Variant, require_memory, variants
from distlab.comm import collectives
from distlab.experiment import (
    Column,
    Experiment,
    RankContext,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import allocated_bytes, parameters_of, peak_memory, tensor_bytes
from distlab.parallel import STRATEGIES as KNOWN
from distlab.parallel import check_buckets
from distlab.report import gib_column, prediction_error, stacked_bars
from distlab.theory.memory.peak import Breakdown
from experiments._own_model import own_facts, peaks

STRATEGIES = (
    "local",
    "bucketed",
    "sharded-optimizer",
    "zero1",
    "zero2",
    "fsdp",
    "torch-ddp-tuned",
    "torch-zero",
    "fsdp2",
)
STEPS = 7  # in one of them torch DDP rebuilds its buckets and holds them twice: part of the peak


@dataclass(frozen=True)
class MemoryConfig(OwnModel, BenchOptions):
    """Options of the experiment. Raises ValueError for a value that is not allowed."""

    dtype: str = option(
        "fp32", "dtype: fp32, or bf16 computation over fp32 parameters", choices=("fp32", "bf16")
    )
    strategies: tuple[str, ...] = option(STRATEGIES, "strategies to measure", choices=tuple(KNOWN))
    bucket_size_mb: float = option(25.0, "MiB per bucket", above=0)

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for a size of buckets without a strategy that has buckets."""
        super().check_given(given)
        check_buckets(given, given.get("strategies", cls.strategies))


def measure(config: MemoryConfig, context: RankContext, run: Run) -> None:
    """Add a row per variant, that of the fullest rank. Call it on every rank.

    Raises:
        MemoryError: no strategy with this model and batch fits.
        ValueError: a strategy that needs a GPU, without one.
    """
    rows = variants(config.strategies, [config.bucket_size_mb])
    require_memory(config, rows, context)
    refused = refusals(config, rows, context)
    for name, reason in refused.items():
        run.notice(f"{name} is left out: {reason}")
    for variant in [row for row in rows if row.name not in refused]:
        # A row of an earlier run of this name is kept.
        if run.done(variant.name):
            continue
        run.progress(f"measuring {variant.name}")
        ranks = collectives.gather_objects(_measure(config, context, variant), context.group)
        fullest: dict[str, int | float | None] = {}
        # Every number is the largest over ranks by itself. Different ranks may be the fullest at
        # different moments.
        for name in ranks[0]:
            values = [rank[name] for rank in ranks]
            # The fullest rank is the one that runs out of memory first. On a CPU there is no
            # allocator to ask.
            fullest[name] = None if None in values else max(values)
        run.add(variant.name, fullest, **config.facts(context), **own_facts(config.factory))
    if context.is_main:  # other ranks need not wait for the predictions
        simulated = None if config.factory is None else _simulated(config, context, rows)
        # The name of a row may contain its bucket size.
        strategy_of = {row.name: row.strategy.name for row in rows}
        for record in list(run.records):
            strategy = strategy_of[record.variant]
            if simulated is None:
                predicted = _predicted(config, context, strategy)
            else:
                predicted = simulated.get(strategy, {})
            run.replace(record, record.metrics | predicted)
        run.save()


def _measure(
    config: MemoryConfig, context: RankContext, variant: Variant
) -> dict[str, int | float | None]:
    """Return the memory of this rank in a few steps, in bytes."""
    device = context.device
    found = {}

    def mark(phase: str) -> None:
        """Count at the end of a phase of the step."""
        if phase == "backward":
            # After backward and its synchronization, before the optimizer makes its temporaries.
            found["before_step_bytes"] = allocated_bytes(device)
            # Sharded strategies step shards, which only the optimizer knows.
            parameters = parameters_of(attached.model, attached.optimizer)
            gradients = [p.grad for p in parameters if p.grad is not None]
            # Strategies that accumulate shards keep gradients elsewhere than in `.grad`.
            if attached.model.accumulates_shards:
                gradients = attached.model.gradients().every()
            found["gradients_bytes"] = tensor_bytes(gradients)
        # The one phase that is left is the optimizer's.
        elif phase != "forward":
            found["after_step_bytes"] = allocated_bytes(device)

    with closing(Trial(context, config, variant)) as attached:
        found["after_init_bytes"] = allocated_bytes(device)
        with peak_memory(device) as peak:
            for _ in range(STEPS):
                attached("step", mark)
        attached.settle()
        found["parameters_bytes"] = tensor_bytes(parameters_of(attached.model, attached.optimizer))
        states: list[Tensor] = []
        for state in attached.optimizer.state.values():
            # scalars count steps, and are not of the parameters' size
            states += [x for x in state.values() if isinstance(x, Tensor) and x.ndim > 0]
        found["optimizer_state_bytes"] = tensor_bytes(states)
    return found | {"peak_alloc_bytes": peak.peak_alloc_bytes}


def _predicted(config: MemoryConfig, context: RankContext, strategy: str) -> dict[str, int | str]:
    """Return the prediction of `theory.memory` for this variant."""
    # The plan has a bucket size of its own, and this experiment gives one for all rows.
    planned = replace(config.planned(strategy), bucket_size_mb=config.bucket_size_mb)
    expected = planned.memory(context.world_size, on_gpu=context.device.type == "cuda")
    before_step, after_step = expected.before_step, expected.after_step
    predicted = {
        "predicted_after_init_bytes": expected.after_init.total,
        "predicted_before_step_bytes": before_step.total,
        "predicted_after_step_bytes": after_step.total,
    }
    # Each category of the peak is kept, because the picture draws them apart.
    for category in fields(Breakdown):
        size = getattr(expected.peak, category.name)
        predicted[f"predicted_peak_{category.name}_bytes"] = size
    return predicted | {
        "predicted_parameters_bytes": after_step.parameters,
        # Under strategies with buckets `.grad` are views of them.
        "predicted_gradients_bytes": before_step.gradients + before_step.buckets,
        "predicted_optimizer_state_bytes": after_step.optimizer_state,
        "predicted_peak_alloc_bytes": expected.peak.total,
        "predicted_peak_phase": expected.peak_phase,
    }


def _simulated(
    config: MemoryConfig, context: RankContext, rows: Sequence[Variant]
) -> dict[str, dict[str, int | str]]:
    """Return strategy → memory of a step of a user's model in the fake world.

    Torch's peers, and models that read values, have none.
    """
    strategies = dict.fromkeys(row.strategy.name for row in rows)
    simulated = peaks(config.factory, strategies, config.batch, context.world_size, config.dtype)
    found = {}
    for strategy, known in simulated.items():
        predicted = {}
        for category in fields(Breakdown):
            # The simulation lists only categories that hold something.
            size = known["peak"].get(category.name, 0)
            predicted[f"predicted_peak_{category.name}_bytes"] = size
        found[strategy] = predicted | {
            "predicted_after_init_bytes": known["after_init"],
            "predicted_peak_alloc_bytes": sum(known["peak"].values()),
            "predicted_peak_phase": known["phase"],
        }
    return found


def _gib(metric: str, title: str) -> Column:
    """Return a column of bytes, in GiB."""
    return gib_column(f"metrics.{metric}", title, ".4g")


def _error(quantity: str, title: str) -> Column:
    """Return a column of the error of a predicted quantity, in %."""
    return prediction_error(f"predicted_{quantity}_bytes", f"{quantity}_bytes", title, "+.1f")


def context_in_words(records: Records) -> str:
    """Return the context of the headline. A user's model has none."""
    context = records[0].config.get("context")
    return f" × context {context}" if context else ""


headline = headline_from(
    "{size} ({num_parameters:M} parameters), batch {batch}{length} per rank, {dtype}, buckets of "
    "{bucket_size_mb:g} MiB, {world_size} × {device_name} ({backend}), torch {torch}; "
    "err: predicted over measured",
    length=context_in_words,
)


# Part of the predicted peak → its categories.
PARTS = {
    "parameters": ("parameters",),
    "optimizer state": ("optimizer_state",),
    "gradients": ("gradients", "buckets"),
    "activations, copies": ("activations", "gathered", "weight_copies", "temporary"),
}
# The allocator cannot tell the last two of these parts apart, so a measured bar shows their sum.
TOGETHER = "both, measured"


def draw(records: Records, path: Path) -> None:
    """Draw the measured peak of each variant above the predicted one, by category, in GiB."""
    bars = {}  # label → bytes of each part
    for record in records:
        metrics, peak = record.metrics, record.metrics["peak_alloc_bytes"]
        if peak is not None:
            # A measured peak can be divided only as far as tensors can be counted.
            known = [metrics["parameters_bytes"], metrics["optimizer_state_bytes"]]
            # The order is that of PARTS, with one more at the end.
            bars[f"{record.variant}, measured"] = [*known, 0, 0, peak - sum(known)]
        if metrics.get("predicted_peak_alloc_bytes") is None:
            continue
        predicted = []
        for categories in PARTS.values():
            sizes = [metrics[f"predicted_peak_{name}_bytes"] for name in categories]
            predicted.append(sum(sizes))
        # The additional part, which only measured bars have, is 0 here.
        bars[f"{record.variant}, predicted"] = [*predicted, 0]
    if not bars:
        return
    parts = {}
    for number, part in enumerate((*PARTS, TOGETHER)):
        parts[part] = [sizes[number] / 2**30 for sizes in bars.values()]
    title = f"Peak memory per rank: {headline(records).partition('; err')[0]}"
    stacked_bars(path, list(bars), parts, title=title, unit="GiB")


VIEW = View(
    columns=[
        Column("variant", "strategy"),
        _gib("parameters_bytes", "parameters GiB"),
        _error("parameters", "parameters err %"),
        _gib("gradients_bytes", "gradients GiB"),
        _error("gradients", "gradients err %"),
        _gib("optimizer_state_bytes", "optimizer state GiB"),
        _error("optimizer_state", "optimizer state err %"),
        _gib("after_init_bytes", "after init GiB"),
        _gib("before_step_bytes", "before step GiB"),
        _gib("after_step_bytes", "after step GiB"),
        _gib("peak_alloc_bytes", "peak GiB"),
        _gib("predicted_peak_alloc_bytes", "predicted peak GiB"),
        _error("peak_alloc", "peak err %"),
        Column("metrics.predicted_peak_phase", "peak in"),
    ],
    headline=headline,
    terminal=(
        "variant",
        "parameters_bytes",
        "gradients_bytes",
        "optimizer_state_bytes",
        "peak_alloc_bytes",
        "predicted_peak_alloc_bytes",
    ),
    pictures={"memory.png": draw},
    reading="Parameters, gradients and optimizer state are counted from the tensors themselves; "
    "what the allocator held after construction, before and after the optimizer and at its peak is "
    "the fullest rank's. The phase of the peak is the closed form's: at a small batch it is where "
    "gradients are complete, at a large one where activations are.\n\n"
    "In the picture the measured bar is above the predicted one. Only the parameters and the "
    "optimizer state of a measured peak can be counted separately; the rest is gradients, "
    "activations and copies.",
    prediction="The closed form of distlab.theory.memory, from the widths of the model alone.",
    noise="Bytes do not vary from run to run by more than the order in which blocks of the "
    "allocator are reused.",
)
EXPERIMENT = Experiment(
    MemoryConfig,
    measure,
    VIEW,
    presets={
        "quick": {"strategies": ("local", "bucketed", "zero1", "fsdp")},
        "smoke": {
            "size": "tiny",
            "batch": 1,
            "context": 16,
            "bucket_size_mb": 1.0,
            "strategies": ("local", "zero1"),
        },
    },
    ranks="many",
)
