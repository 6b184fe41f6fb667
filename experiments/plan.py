"""Will it fit, and what is fastest? This model, this batch, these GPUs, answered on a laptop.

    distlab run plan --model xl --batch 512 --devices h100:64 --link nvlink --tokens 1e11

Every strategy is tried with every micro-batch that divides a rank's share of the batch, with and without
activation checkpointing. Memory comes from `distlab.theory.memory`, time from `distlab.simulate.estimate`: both are
predictions, at the shares of the datasheets' peaks that a calibrated machine reaches.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from distlab.bench.task import check_name
from distlab.experiment import (
    Column,
    Experiment,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.hardware import GPUSpec, by_alias
from distlab.model import ModelConfig
from distlab.report import stacked_bars
from distlab.simulate.estimate import Machine, MachineOptions, estimate_step
from distlab.simulate.timeline import replay
from distlab.theory.flops import hardware_flops, mfu, step_flops
from distlab.theory.memory.peak import devices_to_fit
from distlab.theory.model_shape import divisors
from distlab.train.requirements import PlannedStep
from experiments._own_model import num_parameters, simulated

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "fsdp")
USABLE = (
    0.94  # of the datasheet's memory: the driver's context, NCCL's buffers and fragmentation take the rest
)
DRAWN = 14  # bars in the picture; the table has all choices
PER_STRATEGY = 2  # of each strategy with and without checkpointing, the largest micro-batches that fit


@dataclass(frozen=True)
class PlanConfig(MachineOptions):
    """The question. Raises ValueError for a batch that the devices cannot divide, with the nearest that they can."""

    model: str = option("xl", "a preset, or your own: package.module:function, see docs/learn/own_model.md")
    batch: int = option(512, "sequences per step, over all devices", least=1)
    device: str = option("h100:64", "name and number, such as h100:64", flag="--devices")
    tokens: float = option(1e11, "to train on", above=0)
    strategies: tuple[str, ...] = option(STRATEGIES, "to consider", choices=STRATEGIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        _, count = self.fleet()
        if self.batch < count:
            raise ValueError(
                f"a batch of {self.batch} sequences leaves some of {count} devices without one; the nearest choices: "
                f"--batch {count}, or {max(1, self.batch)} devices"
            )
        if self.batch % count:
            near = max(1, round(self.batch / count)) * count
            raise ValueError(
                f"{count} devices do not divide a batch of {self.batch}; the nearest is --batch {near}"
            )

    @property
    def factory(self) -> str | None:
        """The name of a user's factory, if the model is one."""
        return self.model if ":" in self.model else None

    def shape(self) -> ModelConfig | None:
        """The preset, with its context replaced; None for a user's model.

        Raises:
            ValueError: an unknown preset, a name of another form, or a context for a user's model.
        """
        if self.factory is None:
            return super().shape()
        check_name(self.factory)
        if self.context is not None:
            raise ValueError(f"--context is of the lab's Transformer, and --model {self.model} makes its own batches")
        return None

    def num_parameters(self) -> int:
        """Trainable ones."""
        shape = self.shape()
        return num_parameters(self.factory) if shape is None else shape.num_parameters

    def fleet(self) -> tuple[GPUSpec, int]:
        """The device and how many."""
        name, _, count = self.device.partition(":")
        if (count and not count.isdigit()) or count == "0":
            raise ValueError(f"devices {self.device!r}: give a name and a number, such as h100:64")
        return by_alias(name), int(count or 1)

    def gpu(self) -> GPUSpec:
        """The device's datasheet."""
        return self.fleet()[0]


def measure(config: PlanConfig, context: RankContext, run: Run) -> None:
    """One row per choice, those that fit first, fastest first."""
    machine = config.machine()
    own = {"num_parameters": config.num_parameters(), "world_size": config.fleet()[1]}
    for strategy in config.strategies:
        for checkpointing in (False, True) if config.factory is None else (False,):
            run.progress(f"{strategy}{' recomputed' * checkpointing}")
            for micro, metrics in _choices(config, strategy, checkpointing, machine):
                name = f"{strategy} × {micro}" + (" recomputed" if checkpointing else "")
                run.add(name, metrics, **own, strategy=strategy, micro_batch=micro, checkpointing=checkpointing)
    run.records.sort(
        key=lambda r: (
            not r.metrics["fits"],
            r.metrics["predicted_step_ms"] or r.metrics["predicted_peak_bytes"],
        )
    )
    run.save()


def _choices(
    config: PlanConfig, strategy: str, checkpointing: bool, machine: Machine
) -> list[tuple[int, dict[str, object]]]:
    """The largest micro-batches that fit, with all metrics; if none does, the smallest, with its memory only."""
    gpu, ranks = config.fleet()
    micros = sorted(divisors(config.batch // ranks), reverse=True)
    memory = lru_cache(maxsize=None)(partial(_memory, config, strategy, checkpointing=checkpointing))
    usable = USABLE * gpu.hbm_bytes
    # Sorted from the largest: those that do not fit stand before those that do.
    first = bisect(micros, False, key=lambda micro: memory(micro)["predicted_peak_bytes"] <= usable)
    fitting = micros[first:]
    if not fitting:
        return [(micros[-1], memory(micros[-1]) | {"fits": False, "predicted_step_ms": None, "limited_by": "memory"})]
    return [
        (micro, memory(micro) | {"fits": True} | _time(config, strategy, micro, checkpointing, machine))
        for micro in fitting[:PER_STRATEGY]
    ]


def _memory(config: PlanConfig, strategy: str, micro: int, checkpointing: bool) -> dict[str, object]:
    gpu, ranks = config.fleet()
    if config.factory is not None:
        step = simulated(config.factory, strategy, micro, ranks, config.dtype)
        return {
            "predicted_peak_bytes": step.peak.total,
            "predicted_peak_phase": step.peak.phase,
            "predicted_states_bytes": step.after_init["parameters"] + step.after_init["buckets"],
            "devices_for_states": devices_to_fit(4 * 4 * config.num_parameters(), USABLE * gpu.hbm_bytes),
        }
    model, accumulates = config.shape(), config.batch // ranks > micro
    blocks = "block" if checkpointing else "none"
    planned = PlannedStep(model, micro, strategy, config.dtype, checkpointing=blocks, accumulates=accumulates)
    memory = planned.memory(ranks)
    return {
        "predicted_peak_bytes": memory.peak.total,
        "predicted_peak_phase": memory.peak_phase,
        "predicted_states_bytes": memory.after_step.states,
        "devices_for_states": devices_to_fit(4 * 4 * model.num_parameters, USABLE * gpu.hbm_bytes),
    }


def _time(
    config: PlanConfig, strategy: str, micro: int, checkpointing: bool, machine: Machine
) -> dict[str, object]:
    gpu, ranks = config.fleet()
    if config.factory is not None:
        return _time_of_own(config, strategy, micro, machine)
    model, steps = config.shape(), config.batch // ranks // micro
    time = estimate_step(
        model,
        strategy,
        machine,
        batch=micro,
        ranks=ranks,
        dtype=config.dtype,
        checkpointing=checkpointing,
        micro_batches=steps,
    )
    sizes = model.sizes(config.batch // ranks)
    matmuls = hardware_flops(checkpointing=checkpointing, causal=True, **sizes) / machine.device.flops_per_s
    parts = {
        "compute": min(matmuls, time.compute),
        "memory bandwidth": max(0.0, time.compute - matmuls),
        "communication": time.exposed,
        "optimizer": time.optimizer,
    }
    tokens_per_s = config.batch * model.context_length / time.step
    share = mfu(step_flops(**sizes), time.step, gpu.peak["tf32" if config.dtype == "fp32" else config.dtype])
    return {
        "predicted_step_ms": 1e3 * time.step,
        "predicted_exposed_comm_ms": 1e3 * time.exposed,
        "predicted_comm_ms": 1e3 * time.communication,
        **{f"{name.replace(' ', '_')}_ms": 1e3 * seconds for name, seconds in parts.items()},
        "predicted_tokens_per_s": tokens_per_s,
        "predicted_mfu_pct": 100 * share,
        "predicted_days": config.tokens / tokens_per_s / 86_400,
        "limited_by": max(parts, key=parts.__getitem__),
    }


def _time_of_own(config: PlanConfig, strategy: str, micro: int, machine: Machine) -> dict[str, object]:
    """The same of a user's model, by replaying its operators and messages."""
    gpu, ranks = config.fleet()
    step = simulated(config.factory, strategy, micro, ranks, config.dtype)
    once, steps = replay(step, machine), config.batch // ranks // micro
    seconds = {phase: sum(machine.device.seconds(op) for op in step.operators if (op.phase == "optimizer") == updates)
               for phase, updates in (("compute", False), ("optimizer", True))}  # fmt: skip
    flops = sum(op.flops for op in step.operators) * steps
    matmuls = min(flops / machine.device.flops_per_s, steps * seconds["compute"])
    step_s = once.step_ms / 1e3 + (steps - 1) * seconds["compute"]
    parts = {
        "compute": matmuls,
        "memory bandwidth": steps * seconds["compute"] - matmuls,
        "communication": max(0.0, once.exposed_ms / 1e3),
        "optimizer": seconds["optimizer"],
    }
    share = mfu(flops, step_s, gpu.peak["tf32" if config.dtype == "fp32" else config.dtype])
    return {
        "predicted_step_ms": 1e3 * step_s,
        "predicted_exposed_comm_ms": once.exposed_ms,
        "predicted_comm_ms": once.comm_ms,
        **{f"{name.replace(' ', '_')}_ms": 1e3 * seconds for name, seconds in parts.items()},
        "predicted_examples_per_s": config.batch / step_s,
        "predicted_mfu_pct": 100 * share,
        "limited_by": max(parts, key=parts.__getitem__),
    }


def examples_of(records: Sequence[Record]) -> str:
    """What the batch counts."""
    shape = PlanConfig.of(records[0].config).shape()
    return "examples" if shape is None else f"sequences × {shape.context_length} tokens"


headline = headline_from(
    "{model} ({num_parameters:B} parameters), {batch} {examples} per step on {world_size} × "
    "{gpu} ({link}, {between} between nodes of {devices_per_node}), {dtype}; predicted",
    gpu=lambda records: PlanConfig.of(records[0].config).gpu().name,
    examples=examples_of,
)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def answer(records: Sequence[Record]) -> str:
    """The answer in words; `recomputed` means activation checkpointing of every block."""
    config = PlanConfig.of(records[0].config)
    gpu, _ = config.fleet()
    fitting = [record for record in records if record.metrics["fits"]]
    if not fitting:
        least = min(records, key=lambda record: record.metrics["predicted_peak_bytes"])
        peak = least.metrics["predicted_peak_bytes"]
        return (
            f"Nothing fits in {USABLE * gpu.hbm_bytes / 2**30:.0f} usable GiB. Closest: {least.variant}, "
            f"{peak / 2**30:.1f} GiB. The states alone need {least.metrics['devices_for_states']} devices: more "
            "devices with fsdp, a shorter --context, or a smaller model."
        )
    best = fitting[0]
    known = best.metrics
    if config.factory is None:
        rate = f"{known['predicted_tokens_per_s']:,.0f} tokens/s"
        total = f", {config.tokens:.3g} tokens in {known['predicted_days']:,.1f} days"
    else:
        rate, total = f"{known['predicted_examples_per_s']:,.0f} examples/s", ""
    text = (
        f"Fastest: {best.variant}: {_ms(known['predicted_step_ms'])} ms per step, {rate}, "
        f"MFU {known['predicted_mfu_pct']:.0f} %{total}; most of the step is {known['limited_by']}."
    )
    others = [record for record in fitting if record.config["strategy"] != best.config["strategy"]]
    if others:
        ratio = others[0].metrics["predicted_step_ms"] / best.metrics["predicted_step_ms"] - 1
        text += f" Next best: {others[0].variant}, {100 * ratio:.0f} % slower."
    return text


def draw(records: Sequence[Record], path: Path) -> None:
    """A bar per choice: where its step's time would go."""
    parts = {"compute": "compute", "memory bandwidth": "memory_bandwidth", "exposed communication": "communication"}
    shown = records[:DRAWN]
    bars = {
        name: [r.metrics[f"{part}_ms"] if r.metrics["fits"] else "does not fit" for r in shown]
        for name, part in (parts | {"optimizer": "optimizer"}).items()
    }
    stacked_bars(path, [r.variant for r in shown], bars, title=headline(records), unit="ms per step")


VIEW = View(
    columns=[
        Column("variant", "strategy × micro-batch"),
        Column("metrics.fits", "fits", align="left"),
        Column("metrics.predicted_peak_bytes", "peak GiB", ".1f", scale=2**-30),
        Column("metrics.predicted_peak_phase", "at", align="left"),
        Column("metrics.predicted_step_ms", "step ms", _ms),
        Column("metrics.predicted_exposed_comm_ms", "exposed ms", _ms),
        Column("metrics.predicted_tokens_per_s", "tokens/s", ",.0f", optional=True),
        Column("metrics.predicted_examples_per_s", "examples/s", ",.0f", optional=True),
        Column("metrics.predicted_mfu_pct", "MFU %", ".1f"),
        Column("metrics.predicted_days", "days", ",.1f", optional=True),
        Column("metrics.limited_by", "largest part", align="left"),
    ],
    next=("distlab run ddp_bench", "distlab run memory_breakdown"),
    headline=headline,
    terminal=(
        *(
            "variant",
            "fits",
            "predicted_peak_bytes",
            "predicted_step_ms",
            *("predicted_tokens_per_s", "predicted_examples_per_s"),
            "predicted_mfu_pct",
        ),
        *("predicted_days", "limited_by"),
    ),
    pictures={"plan.png": draw},
    findings=lambda records: [answer(records)],
    reading="A row per strategy and micro-batch, the fastest first; `recomputed` means activation checkpointing of "
    "every block. Where nothing fits, the last column of the answer says how many devices the states alone need.",
    prediction="Everything here is predicted: memory in closed form, time from simulated layers at the shares of the "
    "datasheets' peaks that a calibrated machine reached. How good they were: docs/learn/theory/simulation.md.",
    noise="Nothing was measured.",
)


EXPERIMENT = Experiment(
    PlanConfig, measure, VIEW,
    presets={
        "quick": {"strategies": ("bucketed", "fsdp")},
        "smoke": {"strategies": ("fsdp",), "model": "small"},
    },
    ranks="none",
)
