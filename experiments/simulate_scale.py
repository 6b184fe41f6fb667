"""What does a step look like on a thousand ranks? One rank of it, simulated on this CPU with the real strategies.

    python -m experiments.simulate_scale --model 10B --ranks 1024 --strategies bucketed,zero1,fsdp

Each strategy runs on fake ranks and fake tensors: its collectives and its memory are what the code does, not what
a formula says. The timeline puts times to them, of a machine at the shares of its peaks that a calibrated one reaches.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from distlab.hardware import by_alias
from distlab.model import preset
from distlab.parallel import get_strategy
from distlab.report import (
    Record,
    View,
    Work,
    add_output_options,
    commit,
    environment,
    progress,
    run_command,
)
from distlab.report.charts import stacked_bars, timeline
from distlab.report.options import real, whole
from distlab.report.table import Column
from distlab.simulate import Contention, LinkModel, replay
from distlab.simulate.estimate import Machine, machine_of
from distlab.simulate.events import CATEGORIES
from distlab.simulate.training import simulate_training
from distlab.theory.flops import mfu, step_flops

NAME = "simulate_scale"


@dataclass(frozen=True)
class ScaleConfig:
    """What to simulate.

    Args:
        model: a preset.
        ranks: world size.
        batch: sequences per rank.
        context: tokens per sequence; None for the preset's.
        strategies: of this lab; torch's own cannot be simulated.
        device: an alias of `distlab.hardware.BY_ALIAS`.
        link, between, devices_per_node: see `distlab.simulate.estimate.machine_of`.
        dtype: `bf16` or `fp32`.
        bucket_size_mb: MiB.
        checkpointing: recompute blocks in backward.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    model: str = "10B"
    ranks: int = 1024
    batch: int = 2
    context: int | None = None
    strategies: tuple[str, ...] = ("bucketed", "zero1", "fsdp")
    device: str = "h100"
    link: str = "nvlink"
    between: str = "ib-ndr"
    devices_per_node: int = 8
    dtype: str = "bf16"
    bucket_size_mb: float = 100.0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in self.strategies:
            if get_strategy(name).is_peer:
                raise ValueError(
                    f"strategy {name!r} is torch's, whose C++ cannot run on fake tensors; choose ours"
                )
        if not self.strategies:
            raise ValueError("give at least one strategy")
        self.machine()
        self.shape()

    def shape(self):
        return preset(self.model, context_length=self.context)

    def machine(self) -> Machine:
        return machine_of(
            by_alias(self.device),
            link=self.link,
            between=self.between,
            devices_per_node=self.devices_per_node,
            dtype=self.dtype,
        )


def run(
    config: ScaleConfig, progress: Callable[[str], None] = lambda text: None
) -> tuple[list[Record], dict]:
    """One record per strategy, and the lanes of each timeline."""
    model, machine, gpu = config.shape(), config.machine(), by_alias(config.device)
    network = machine.network
    link = LinkModel(network.ring_bytes_per_s(config.ranks), network.latency_s, network.hop_s)
    facts = {"environment": environment("cpu"), "commit": commit(None)}
    sizes = {"batch": config.batch, "context": model.context_length, "vocab_size": model.vocab_size}
    sizes |= {"d_model": model.d_model, "d_ff": model.d_ff, "num_layers": model.num_layers}
    records, rows = [], {}
    for strategy in config.strategies:
        progress(f"simulating {strategy} on {config.ranks} ranks")
        begin = time.perf_counter()
        step = simulate_training(
            model,
            strategy,
            batch=config.batch,
            world_size=config.ranks,
            dtype=config.dtype,
            bucket_size_mb=config.bucket_size_mb,
            checkpointing=config.checkpointing,
        )
        line = replay(step, machine.device, link, Contention(*machine.contention))
        seconds = time.perf_counter() - begin
        peak = gpu.peak["tf32" if config.dtype == "fp32" else config.dtype]
        metrics = {
            "predicted_step_ms": line.step_ms,
            "predicted_exposed_comm_ms": line.exposed_ms,
            "predicted_comm_ms": line.comm_ms,
            "predicted_overlap_pct": line.overlap_pct,
            "predicted_tokens_per_s": config.batch * model.context_length * config.ranks / line.step_ms * 1e3,
            "predicted_mfu_pct": 100 * mfu(step_flops(**sizes), line.step_ms / 1e3, peak),
            "collectives_per_step": len(step.calls),
            "comm_bytes_per_step": step.comm_bytes,
            "simulated_peak_bytes": step.peak.total,
            "simulated_peak_phase": step.peak.phase,
            "simulated_states_bytes": sum(step.after_init.values()) - step.after_init["activations"],
            "fits": step.peak.total <= 0.94 * gpu.hbm_bytes,
            "simulation_s": seconds,
            "simulation_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        metrics |= {f"peak_{name}_bytes": size for name, size in step.peak.by_category().items()}
        shared = asdict(config) | {"num_parameters": model.num_parameters}
        records.append(Record(NAME, strategy, shared, metrics, **facts))
        rows[strategy] = line.lanes
    return records, rows


COLUMNS = [
    Column("variant", "strategy"),
    Column("metrics.predicted_step_ms", "step ms", ",.1f"),
    Column("metrics.predicted_exposed_comm_ms", "exposed ms", ",.1f"),
    Column("metrics.predicted_comm_ms", "comm ms", ",.1f"),
    Column("metrics.predicted_overlap_pct", "overlap %", ".0f"),
    Column("metrics.predicted_mfu_pct", "MFU %", ".1f"),
    Column("metrics.collectives_per_step", "calls", "d"),
    Column("metrics.comm_bytes_per_step", "sent GB", ",.1f", scale=1e-9),
    Column("metrics.simulated_peak_bytes", "peak GiB", ".1f", scale=2**-30),
    Column("metrics.fits", "fits", align="left"),
    Column("metrics.simulation_s", "simulated in s", ".1f"),
    Column("metrics.simulation_rss_bytes", "using GiB", ".1f", scale=2**-30),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what was simulated."""
    config = ScaleConfig(**{field.name: records[0].config[field.name] for field in fields(ScaleConfig)})
    model = config.shape()
    return (
        f"{config.model} ({model.num_parameters / 1e9:.1f} B parameters), {config.batch} × {model.context_length} "
        f"tokens per rank on {config.ranks:,} × {by_alias(config.device).name} ({config.link}, {config.between}), "
        f"{config.dtype}; one rank simulated"
    )


def draw_memory(records: Sequence[Record], path: Path) -> None:
    """The peak's memory by category."""
    parts = {
        name: [record.metrics[f"peak_{name}_bytes"] / 2**30 for record in records] for name in CATEGORIES
    }
    labels = [record.variant for record in records]
    stacked_bars(path, labels, parts, title=f"At the peak: {headline(records)}", unit="GiB")


VIEW = View(
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"memory.png": draw_memory},
    reading="One rank ran the strategies' own code on fake tensors: collectives, bytes and memory are counted, not "
    "estimated. Times are those of a machine at the shares of its peaks that a calibrated one reaches. In the timeline "
    "compute is above and communication below; what compute does not hide is orange.",
    prediction="Every time here is predicted. How good such predictions were: docs/theory/simulation.md.",
    noise="Nothing was measured but the seconds that the simulation took.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    default = ScaleConfig()
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default.model, help="a preset")
    parser.add_argument("--ranks", type=whole(), default=default.ranks)
    parser.add_argument("--batch", type=whole(), default=default.batch, help="sequences per rank")
    parser.add_argument("--context", type=whole())
    parser.add_argument("--strategies", type=lambda text: tuple(text.split(",")), default=default.strategies)
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--link", default=default.link)
    parser.add_argument("--between", default=default.between)
    parser.add_argument("--devices-per-node", type=whole(), default=default.devices_per_node)
    parser.add_argument("--dtype", default=default.dtype, choices=("bf16", "fp32"))
    parser.add_argument("--bucket-size-mb", type=real(above=0), default=default.bucket_size_mb)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the small model on 64 ranks")
    add_output_options(parser, measures=False)
    args = parser.parse_args(arguments)
    if args.quick:
        args.model, args.ranks = "small", 64

    def prepare() -> Work:
        config = ScaleConfig(**{field.name: getattr(args, field.name) for field in fields(ScaleConfig)})

        def work(folder: Path) -> list[Record]:
            records, rows = run(config, progress)
            timeline(folder / "timeline.png", rows, title=headline(records))
            return records

        return work

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
