"""Will it fit, and what is fastest? This model, this batch, these GPUs, answered on a laptop.

    distlab run plan --model xl --batch 512 --devices h100:64 --link nvlink --tokens 1e11
    distlab run plan --model llama3-8b --batch 2048 --cluster dgx-h100:1024 --tokens 1e12 --days 30

Every strategy is tried with every micro-batch that divides a rank's share of the batch, hybrid sharding with groups of
one node and of 2, 4, 8, … nodes, without recomputation, with selective and with full. Memory comes from
`distlab.theory.memory`, time from `distlab.simulate.estimate`, days from the goodput that failures leave: all are
predictions, at the shares of the datasheets' peaks that a calibrated machine reaches. `distlab run plan_check` holds
the first choice against every other, simulated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from distlab.hardware import GPUSpec, by_alias, cluster
from distlab.report import stacked_bars
from distlab.simulate.choices import STRATEGIES, Choice, choices, estimated, memory
from distlab.simulate.estimate import USABLE, MachineOptions
from distlab.simulate.timeline import Machine
from distlab.theory.flops import hardware_flops, mfu, step_flops
from distlab.theory.memory.peak import StepMemory, devices_to_fit
from distlab.theory.operators import RECOMPUTATION
from distlab.theory.reliability import GPU_HOURS_BETWEEN_FAILURES, Failures

DRAWN = 14  # bars in the picture; the table has all choices
PER_STRATEGY = 2  # of each strategy, group and recomputation, the fastest micro-batches
STATE_BYTES = 12  # of a checkpoint per parameter: fp32 parameters and AdamW's two moments


@dataclass(frozen=True)
class PlanConfig(MachineOptions):
    """The question. Raises ValueError for a batch that the devices cannot divide, with the nearest that they can."""

    batch: int = option(512, "sequences per step, over all devices", least=1)
    device: str = option("h100:64", "name and number, such as h100:64", flag="--devices")
    tokens: float = option(1e11, "to train on", above=0)
    days: float | None = option(None, "that training may take", above=0)
    strategies: tuple[str, ...] = option(STRATEGIES, "to consider", choices=STRATEGIES)
    recomputation: tuple[str, ...] = option(RECOMPUTATION, "to consider", choices=RECOMPUTATION)
    gpu_hours: float = option(round(GPU_HOURS_BETWEEN_FAILURES), "of one GPU between failures", above=0)
    storage_gb_per_s: float = option(2.0, "that a node writes of a checkpoint", above=0)
    restart_s: float = option(600.0, "from a failure to the first new step", least=0)

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

    def fleet(self) -> tuple[GPUSpec, int]:
        """The device and how many."""
        if self.cluster is not None:
            hosts = cluster(self.cluster)
            return hosts.gpu, hosts.gpus
        name, _, count = self.device.partition(":")
        if (count and not count.isdigit()) or count == "0":
            raise ValueError(f"devices {self.device!r}: give a name and a number, such as h100:64")
        return by_alias(name), int(count or 1)

    def gpu(self) -> GPUSpec:
        """The device's datasheet."""
        return self.fleet()[0]

    def place(self) -> str:
        """GPU and links, or the cluster, in words."""
        links = f"{self.gpu().name} ({self.link}, {self.between} between nodes of {self.devices_per_node})"
        return self.cluster or links


def measure(config: PlanConfig, context: RankContext, run: Run) -> None:
    """One row per choice, those that fit first, fastest first."""
    machine, (gpu, ranks) = config.machine(), config.fleet()
    model = config.shape()
    own = {"num_parameters": model.num_parameters, "world_size": ranks}
    # Of a strategy with its group and recomputation: each micro-batch with the memory it takes.
    ways: dict[tuple, list[tuple[Choice, StepMemory]]] = {}
    nodes = machine.network.devices_per_node
    for choice in choices(ranks, nodes, config.batch // ranks, config.strategies, config.recomputation):
        needed = memory(model, choice, ranks, config.dtype)
        ways.setdefault((choice.strategy, choice.group, choice.recompute), []).append((choice, needed))
    for way in ways.values():
        fitting = [(choice, needed) for choice, needed in way if needed.peak.total <= USABLE * gpu.hbm_bytes]
        rows = [(choice, needed, _time(config, choice, machine)) for choice, needed in fitting]
        rows = sorted(rows, key=lambda row: row[2]["predicted_step_ms"])[:PER_STRATEGY]
        if not rows:
            nothing = {"fits": False, "predicted_step_ms": None, "limited_by": "memory"}
            rows = [(*way[-1], nothing)]
        for choice, needed, metrics in rows:
            run.add(str(choice), {"fits": True} | _memory(config, needed) | metrics, **own, **vars(choice))
    run.records.sort(
        key=lambda r: (
            not r.metrics["fits"],
            r.metrics["predicted_step_ms"] or r.metrics["predicted_peak_bytes"],
        )
    )
    run.save()


def _memory(config: PlanConfig, needed: StepMemory) -> dict[str, object]:
    gpu, _ = config.fleet()
    return {
        "predicted_peak_bytes": needed.peak.total,
        "predicted_peak_phase": needed.peak_phase,
        "predicted_states_bytes": needed.after_step.states,
        "devices_for_states": devices_to_fit(4 * 4 * config.shape().num_parameters, USABLE * gpu.hbm_bytes),
    }


def _time(config: PlanConfig, choice: Choice, machine: Machine) -> dict[str, object]:
    gpu, ranks = config.fleet()
    model = config.shape()
    time = estimated(model, choice, machine, ranks, config.dtype)
    sizes = model.sizes(config.batch // ranks)
    again = {"none": 0.0, "selective": 0.4, "full": 1.0}[choice.recompute]  # of a block's matmuls, about
    needed, more = (hardware_flops(checkpointing=full, causal=True, **sizes) for full in (False, True))
    matmuls = (needed + again * (more - needed)) / machine.device.flops_per_s
    parts = {
        "compute": min(matmuls, time.compute),
        "memory bandwidth": max(0.0, time.compute - matmuls),
        "communication": time.exposed,
        "optimizer": time.optimizer,
    }
    tokens_per_s = config.batch * model.context_length / time.step
    share = mfu(step_flops(**sizes), time.step, gpu.peak["tf32" if config.dtype == "fp32" else config.dtype])
    nodes = -(-ranks // machine.network.devices_per_node)
    saving = STATE_BYTES * model.num_parameters / nodes / (1e9 * config.storage_gb_per_s)
    failures = Failures.of_gpus(ranks, saving, config.restart_s, config.gpu_hours)
    goodput = failures.goodput(failures.daly())
    return {
        "predicted_step_ms": 1e3 * time.step,
        "predicted_exposed_comm_ms": 1e3 * time.exposed,
        "predicted_comm_ms": 1e3 * time.communication,
        **{f"{name.replace(' ', '_')}_ms": 1e3 * seconds for name, seconds in parts.items()},
        "predicted_tokens_per_s": tokens_per_s,
        "predicted_mfu_pct": 100 * share,
        "predicted_goodput_pct": 100 * goodput,
        "checkpoint_interval_s": failures.daly(),
        "predicted_days": config.tokens / tokens_per_s / goodput / 86_400,
        "limited_by": max(parts, key=parts.__getitem__),
    }


headline = headline_from(
    "{model} ({num_parameters:B} parameters), {batch} sequences × {tokens_each} tokens per step on {world_size} × "
    "{gpu}, {dtype}; predicted",
    gpu=lambda records: PlanConfig.of(records[0].config).place(),
    tokens_each=lambda records: PlanConfig.of(records[0].config).shape().context_length,
)


def answer(records: Sequence[Record]) -> str:
    """The answer in words; `recomputed` means activation checkpointing of every block."""
    config = PlanConfig.of(records[0].config)
    gpu, ranks = config.fleet()
    usable = USABLE * gpu.hbm_bytes
    fitting = [record for record in records if record.metrics["fits"]]
    if not fitting:
        least = min(records, key=lambda record: record.metrics["predicted_peak_bytes"])
        peak = least.metrics["predicted_peak_bytes"]
        return (
            f"Nothing fits in {usable / 2**30:.0f} usable GiB. Closest: {least.variant}, "
            f"{peak / 2**30:.1f} GiB, {(peak - usable) / 2**30:.1f} too much. The states alone need "
            f"{least.metrics['devices_for_states']} devices: more devices with fsdp, a shorter --context, or a smaller "
            "model."
        )
    best = fitting[0]
    m = best.metrics
    text = (
        f"Fastest: {best.variant}: {m['predicted_step_ms']:,.0f} ms per step, "
        f"{m['predicted_tokens_per_s']:,.0f} tokens/s, MFU {m['predicted_mfu_pct']:.0f} %, "
        f"{config.tokens:.3g} tokens in {m['predicted_days']:,.1f} days at a goodput of "
        f"{m['predicted_goodput_pct']:.1f} % (a checkpoint every {m['checkpoint_interval_s'] / 60:,.0f} minutes); most "
        f"of the step is {m['limited_by']}, {m['predicted_exposed_comm_ms']:,.0f} ms are exposed communication."
    )
    text += _reasons(best, records)
    others = [r for r in fitting if r.config["strategy"] != best.config["strategy"]]
    others += [r for r in fitting if r not in others and _way(r) != _way(best)]  # other groups
    seconds = {_way(record): record for record in reversed(others)}
    runners_up = sorted(seconds.values(), key=others.index)[:2]
    for label, other in zip(("Next best", "Third"), runners_up, strict=False):
        ratio = other.metrics["predicted_step_ms"] / m["predicted_step_ms"] - 1
        text += f" {label}: {other.variant}, {100 * ratio:.0f} % slower ({other.metrics['limited_by']})."
    if config.days is not None and m["predicted_days"] > config.days:
        enough = math.ceil(ranks * m["predicted_days"] / config.days)
        text += f" That is longer than {config.days:g} days: it takes about {enough:,} GPUs, or fewer tokens."
    return text


def _way(record: Record) -> tuple:
    """A choice but for its micro-batch and recomputation."""
    return record.config["strategy"], record.config.get("group")


def _reasons(best: Record, records: Sequence[Record]) -> str:
    """Why not with less recomputation, or whole parameters: what these would take."""
    rank = RECOMPUTATION.index(best.config["recompute"])
    lighter = [
        r for r in records
        if _way(r) == _way(best) and RECOMPUTATION.index(r.config["recompute"]) < rank and not r.metrics["fits"]
    ]  # fmt: skip
    if lighter:
        least = min(lighter, key=lambda r: r.metrics["predicted_peak_bytes"])
        return f" Less recomputation takes {least.metrics['predicted_peak_bytes'] / 2**30:.0f} GiB and does not fit."
    whole = [r for r in records if r.config["strategy"] == "bucketed" and not r.metrics["fits"]]
    if whole and best.config["strategy"] in ("fsdp", "hsdp"):
        least = min(whole, key=lambda r: r.metrics["predicted_peak_bytes"])
        return f" Whole parameters on every GPU take {least.metrics['predicted_peak_bytes'] / 2**30:.0f} GiB."
    return ""


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
        Column("metrics.predicted_step_ms", "step ms", ",.0f"),
        Column("metrics.predicted_exposed_comm_ms", "exposed ms", ",.0f"),
        Column("metrics.predicted_tokens_per_s", "tokens/s", ",.0f"),
        Column("metrics.predicted_mfu_pct", "MFU %", ".1f"),
        Column("metrics.predicted_goodput_pct", "goodput %", ".1f"),
        Column("metrics.predicted_days", "days", ",.1f"),
        Column("metrics.limited_by", "largest part", align="left"),
    ],
    headline=headline,
    terminal=(
        *(
            "variant",
            "fits",
            "predicted_peak_bytes",
            "predicted_step_ms",
            "predicted_tokens_per_s",
            "predicted_mfu_pct",
        ),
        *("predicted_days", "limited_by"),
    ),
    pictures={"plan.png": draw},
    findings=lambda records: [answer(records)],
    reading="A row per strategy and micro-batch, the fastest first; `recomputed` means activation checkpointing of "
    "every block, `selective` of all but attention and every other matmul; `in 8s` is the group that shares a copy of "
    "the parameters. Where nothing fits, the last column of the answer says how many devices the states alone need.",
    prediction="Everything here is predicted: memory and operators in closed form, at the shares of the "
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
